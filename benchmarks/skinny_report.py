"""Table and plot of the projections of few rows from a measurement's JSON.

    python benchmarks/skinny_report.py benchmarks/results/nvidia-h200/skinny_gemm.json \
        --markdown benchmarks/RESULTS_SKINNY.md --plot benchmarks/results/nvidia-h200/skinny_gemm.svg

The JSON has `runs`, each with rows of n, k, tokens, floor_us, torch_us; dsv3_us and dsv3_pdl_us where that kernel takes
the shape; plan and us, and plan_pdl and pdl_us for dependent launches in a row, where there is a winner. The plot shows
the first run.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_SIDE = ("us", "gain", "of read")
COLUMNS = ("N x K", "M", "floor", "torch.mm", "dsv3 / PDL", "plan", *_SIDE, "plan, PDL", *_SIDE)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _side(row: Json, name: str, us: str) -> list[str]:
    if row.get(us) is None:
        return ["torch" if us == "us" else "-", "-", "-", "-"]
    return [
        f"`{row[name]}`",
        f"{row[us]:.1f}",
        f"{row['torch_us'] / row[us]:.2f}x",
        f"{row['floor_us'] / row[us]:.0%}",
    ]


def table(rows: list[Json]) -> str:
    """Return the rows as a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for row in rows:
        peer = "-" if row.get("dsv3_us") is None else f"{_number(row['dsv3_us'])} / {_number(row.get('dsv3_pdl_us'))}"
        cells = [f"{row['n']}x{row['k']}", str(row["tokens"]), _number(row["floor_us"]), _number(row["torch_us"]), peer]
        lines.append(tuple(cells + _side(row, "plan", "us") + _side(row, "plan_pdl", "pdl_us")))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(report: Json) -> str:
    """Return the whole page: a section for each run."""
    return "\n".join(["# Projections of few rows", "", *(line for run in report["runs"] for line in _section(run))])


def _section(run: Json) -> list[str]:
    return [
        f"## {run['title']}",
        "",
        f"Measured on an {run['device']}, {run['date']}, {run['versions']}.",
        f"{run['method']}",
        f"Read bandwidth in the same run: {run['read_tbs']:.3g} TB/s; the floor is what weights, x and y take at that.",
        *run.get("notes", ()),
        "",
        table(run["rows"]),
        "",
    ]


def plot(run: Json, file: Path) -> None:
    """Plot the share of the read bandwidth over shapes, for 1 and 8 rows."""
    mpl = importlib.import_module("matplotlib")
    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "portamoe"})  # small files, the same bytes each time
    plt = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(2, 1, figsize=(10, 7), sharex=True)
    for axis, tokens in zip(axes, (1, 8), strict=True):
        rows = sorted((r for r in run["rows"] if r["tokens"] == tokens), key=lambda r: r["n"] * r["k"])
        for label, key, style in (
            ("torch.mm", "torch_us", "ks--"),
            ("dsv3_fused_a_gemm", "dsv3_us", "C1^:"),
            ("dsv3_fused_a_gemm, PDL", "dsv3_pdl_us", "C1v:"),
            ("plan", "us", "C0o-"),
            ("plan, PDL", "pdl_us", "C2o-"),
        ):
            points = [(i, 100 * r["floor_us"] / r[key]) for i, r in enumerate(rows) if r.get(key)]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label, markersize=4)
        axis.set(ylabel="% of read bandwidth", title=f"{tokens} row{'s' if tokens > 1 else ''} of x", ylim=(0, 105))
        axis.grid(alpha=0.3)
        axis.set_xticks(range(len(rows)), [f"{r['n']}x{r['k']}" for r in rows], rotation=60, fontsize=7)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{run['device']}, {run['date']}, CUDA-graph replay")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    report = json.loads(args.report.read_text(encoding="utf-8"))
    if args.markdown:
        args.markdown.write_text(markdown(report), encoding="utf-8")
    if args.plot:
        plot(report["runs"][0], args.plot)


if __name__ == "__main__":
    main()
