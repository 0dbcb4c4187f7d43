"""Plots of a `portamoe bench` report: time over tokens beside the floor and the peers, and the share of the limit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def plot(report: Json, file: Path) -> None:
    """Write one column per case: µs over tokens on logarithmic axes, below it floor / µs in percent.

    report:  needs `device` and `rows` with `case`, `tokens`, `name` ("floor" for the floor) and `us`; rows without
             a time, or marked `wrong`, are left out
    file:    its suffix chooses the format (svg, png, pdf)

    Raises ModuleNotFoundError without matplotlib (the extra `portamoe[bench]`).
    """
    mpl = importlib.import_module("matplotlib")
    mpl.use("Agg")
    # Text as text: small files, and the same bytes for the same numbers.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "portamoe"})
    plt = importlib.import_module("matplotlib.pyplot")

    rows = [row for row in report["rows"] if row.get("us") and not row.get("wrong")]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows if row["name"] != "floor"))
    figure, axes = plt.subplots(2, len(cases), figsize=(4.6 * len(cases), 6.4), squeeze=False, sharex="col")
    for column, case in enumerate(cases):
        points = {
            name: {row["tokens"]: row["us"] for row in rows if row["case"] == case and row["name"] == name}
            for name in ("floor", *names)
        }
        time, share = axes[0][column], axes[1][column]
        for index, (name, values) in enumerate(points.items()):
            if not values:
                continue
            tokens = sorted(values)
            style = {"color": "black", "linestyle": "--"} if name == "floor" else _style(index, name)
            time.plot(tokens, [values[t] for t in tokens], label=name, **style)
            if name != "floor":
                share.plot(tokens, [100 * points["floor"][t] / values[t] for t in tokens], **style)
        time.set(xscale="log", yscale="log", ylabel="µs", title=case)
        share.set(xscale="log", ylim=(0, 100), xlabel="tokens", ylabel="share of the limit, %")
        for axis in (time, share):
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{report['device']}, {report['date']}", fontsize=9)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)


def _style(index: int, name: str) -> Json:
    """Own backends thick, peers thin; ten colours in turn."""
    own = not name.startswith("peer:")
    return {"color": f"C{(index - 1) % 10}", "marker": "o", "markersize": 3, "linewidth": 2.0 if own else 1.0}
