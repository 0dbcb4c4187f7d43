"""Plot results that were kept as JSON, of `portamoe bench --json` or of a peers harness.

    python benchmarks/plots.py OUT.svg RESULT.json... [--cases k3-ep8,k3-tp8]

A harness's file has `problems` (case, M, floor_us) and `results` (case, M, peer, us); its cases k3_ep8, k3_tp8 and
gptoss are k3-ep8, k3-tp8 and gptoss-situ here, and plug-ins are named module:function.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "common"), str(ROOT)]

from portamoe.cli._plot import plot  # noqa: E402 - the checkout need not be installed

#: Relative RMS error up to which a result counts as right.
TOLERANCE = 0.01


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of either kind of file in the form of `portamoe bench`."""
    if "rows" in report:
        return list(report["rows"])
    rows = [
        {"case": _case(p["case"]), "tokens": p["M"], "name": "floor", "us": p["floor_us"]} for p in report["problems"]
    ]
    for result in report["results"]:
        own = result["peer"].rpartition(":")[2] if ":" in result["peer"] else ""
        wrong = not (result.get("rel_err") or 1.0) <= TOLERANCE
        name = own or f"peer:{result['peer']}"
        key = {"case": _case(result["case"]), "tokens": result["M"]}
        rows.append({**key, "name": name, "us": result.get("us"), "wrong": wrong})
    return rows


def _case(name: str) -> str:
    return name.replace("k3_", "k3-").replace("gptoss", "gptoss-situ")


def main() -> None:
    """Read the files, write the plot."""
    parser = argparse.ArgumentParser(description="Plot results that were kept as JSON.")
    parser.add_argument("out", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--cases", help="comma list, in the order of the columns; default: every case")
    args = parser.parse_args()
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in args.results]
    rows = [row for report in reports for row in rows_of(report)]
    if args.cases:
        rows = [row for case in args.cases.split(",") for row in rows if row["case"] == case]
    plot({**reports[0], "rows": rows}, args.out)


if __name__ == "__main__":
    main()
