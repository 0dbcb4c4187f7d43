"""Compile every kernel of triton_unfused for every AMD target without a GPU, judge the code, model its speed.

    python benchmarks/isa_report.py [--arch gfx90a …] [--specs EP8,TP8,…] [--out DIR]
    python benchmarks/isa_report.py --check [--also 3.6.0 …]       for CI: fails on a broken rule

Rules (see isa/rows.py): everything compiles, no spills, no scratch, LDS within 64 KiB, matrix instructions in the
GEMMs, weights of decode tiles not through LDS. Goals of speed are reported, never a reason to fail. Code facts are
`compiled`, everything in clocks, TFLOP/s and µs is `modelled` (clock_model.py and call_model.py in
rocm_moe/evidence/): no AMD GPU was used.

--also VERSION  compiles with that Triton too, installed without dependencies under build/triton-VERSION
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "common")]

from benchmarks.isa import render, rows  # noqa: E402 - the checkout is not installed
from benchmarks.isa.calls import call_rows  # noqa: E402
from benchmarks.isa.shards import TARGETS  # noqa: E402


def install_triton(version: str) -> Path:
    """Install a Triton wheel without its dependencies under build/, once; return the folder for PYTHONPATH."""
    target = ROOT / "build" / f"triton-{version}"
    if not (target / "triton" / "__init__.py").is_file():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*command, f"triton=={version}"], check=True)
    return target


def compile_arch(arch: str, triton: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """Compile all variants for one arch in a child process; a crash of LLVM becomes an error of the report."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "compiled.json"
        command = [sys.executable, str(ROOT / "benchmarks/isa/child.py"), arch, str(out), "--specs", options.specs]
        if options.keep:
            command += ["--keep", str(options.keep / arch)]
        if options.only:
            command += ["--only", options.only]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(folder) / "cache"), "OMP_NUM_THREADS": "1"}
        if triton is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(triton), os.environ.get("PYTHONPATH")]))
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if child.returncode or not out.is_file():
            tail = child.stderr.strip().splitlines()[-3:]
            raise ChildFailed(f"{arch}: the compiling process ended with {child.returncode}: {' | '.join(tail)}")
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


class ChildFailed(RuntimeError):
    """The process that compiles for one arch died."""


def report_of(compiled: dict[str, Any]) -> dict[str, Any]:
    """Return one arch's report: rows, whole calls, broken rules and missed goals."""
    from rocm_moe.tiles import load_table

    arch, kernels = compiled["arch"], compiled["kernels"]
    table = load_table(arch, {})
    report_rows = [rows.row_of(kernel) for kernel in kernels]
    return {
        "schema": 1,
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(["python", "benchmarks/isa_report.py", *sys.argv[1:]]),
        "arch": arch,
        "triton": compiled["triton"],
        "seconds": compiled["seconds"],
        "evidence": {"code": "compiled", "clocks and times": "modelled"},
        "tiles": {"provenance": table.provenance, "cells": len(table.cells)},
        "kernels": report_rows,
        "calls": call_rows(arch, kernels, table),
        "violations": [text for kernel in kernels for text in rows.violations(kernel)],
        "missed_goals": [text for row in report_rows for text in rows.missed_goals(row, compiled["triton"])],
    }


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the JSON and the text table of one report."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{report['arch']}-triton{report['triton']}"
    (folder / f"{stem}.json").write_text(render.json_text(report), encoding="utf-8")
    (folder / f"{stem}.txt").write_text(render.text(report), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument(
        "--specs", help="default: EP8,TP8,EP32,gpt-oss; with --check without EP32, whose GEMMs are EP8's"
    )
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument("--also", nargs="*", default=[], metavar="VERSION", help="compile with these Tritons too")
    parser.add_argument("--check", action="store_true", help="print violations only; fail if there are any")
    parser.add_argument("--out", type=Path, help="folder for the reports")
    parser.add_argument("--keep", type=Path, help="folder for assembler text and code objects")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.specs = options.specs or ("EP8,TP8,gpt-oss" if options.check else "EP8,TP8,EP32,gpt-oss")
    return options


def main() -> int:
    options = parse_arguments()
    tritons = [None, *(install_triton(version) for version in options.also)]
    work = [(arch, triton) for triton in tritons for arch in options.arch]
    failures: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(compile_arch, arch, triton, options) for arch, triton in work]
        for future in concurrent.futures.as_completed(futures):
            try:
                report = report_of(future.result())
            except ChildFailed as error:
                failures.append(str(error))
                continue
            failures += report["violations"]
            if options.out:
                write(report, options.out)
            if options.check:
                print(render.summary(report), flush=True)
            else:
                print(render.text(report), flush=True)
    for text in failures:
        print(f"VIOLATION {text}", flush=True)
    print(f"{len(work)} targets compiled, {len(failures)} violations")
    return 1 if failures and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
