"""Time `import portamoe` and `portamoe probe capabilities` in fresh processes.

    python benchmarks/import_time.py [--runs 15] [--json FILE]

Goals on a CPU-only host: the import, choice of a backend included, adds at most 150 ms to a bare interpreter and loads
no torch; the probe takes at most 600 ms. Medians of alternating runs, files already in the page cache.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

GOALS_MS = {"import portamoe, above a bare interpreter": 150.0, "portamoe probe capabilities": 600.0}
COMMANDS = {
    "bare": ["-c", "pass"],
    "import": ["-c", "import portamoe; portamoe.selected"],
    "probe": ["-m", "portamoe", "probe", "capabilities"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    milliseconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(args.runs + 1):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            if run:  # the first round fills the page cache
                milliseconds[name].append((time.perf_counter() - start) * 1e3)
    median = {name: statistics.median(values) for name, values in milliseconds.items()}
    figures = dict(zip(GOALS_MS, (median["import"] - median["bare"], median["probe"]), strict=True))

    for name, value in figures.items():
        print(f"{name:45} {value:7.1f} ms   goal {GOALS_MS[name]:.0f} ms   measured")
    if args.json:
        report = {
            "kind": "measured",
            "date": datetime.date.today().isoformat(),
            "command": "python benchmarks/import_time.py",
            "host": f"{platform.machine()}, {os.cpu_count()} cores, no GPU expected",
            "python": platform.python_version(),
            "runs": args.runs,
            "median_ms": {**median, **figures},
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
