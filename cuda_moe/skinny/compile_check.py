"""Compile the Triton kernels of the plans for a GPU that need not be there; spills fail.

    python -m cuda_moe.skinny.compile_check --targets 90,100,103,107

Each target compiles in a process of its own, because an unsupported one can abort the compiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from cuda_moe import sass
from cuda_moe.compile_check import report
from cuda_moe.skinny import launch
from cuda_moe.skinny.parameters import TritonFragments, TritonGemv, TritonMma, TritonTile
from cuda_moe.skinny.plan import load_plan
from cuda_moe.triton_compat import compile_kernel

TARGETS = (90, 100, 103, 107)
#: Seconds that one target may take.
LIMIT = 300


def check_target(capability: int, everything: bool) -> list[dict[str, object]]:
    """Compile in this process; return per kernel its name, variant, registers, and what speaks against it.

    capability:  90 for sm_90a
    everything:  every tile of the plan that serves the capability; else one of each kernel, with and without masks,
                 residual and programmatic dependent launch
    """
    plain = launch.Variant(8, True, False, False)
    masked = launch.Variant(5, False, True, True)
    wanted: dict[tuple[TritonTile, launch.Variant], None] = {
        (TritonGemv(2, 4, 1), launch.Variant(1, True, False, False)): None,
        (TritonGemv(2, 4, 1), masked): None,
        (TritonMma(16, 4, 64, 4), plain): None,
        (TritonFragments(16, 4, 4, ahead=True), plain): None,
        (TritonFragments(16, 4, 2), launch.Variant(16, False, True, True)): None,
        (TritonMma(16, 4, 64, 4, 2), launch.Variant(16, False, True, True)): None,
    }
    if everything:
        wanted |= dict.fromkeys(_planned(capability))
    rows = []
    for tile, variant in wanted:
        cubin = compile_kernel(launch.source(tile, variant), capability).asm["cubin"]
        used = sass.resources(cubin)
        rows.append(
            {
                "kernel": str(tile),
                "variant": str(variant),
                "registers": used.registers,
                "problems": sass.problems(cubin, capability),
            }
        )
    return rows


def _planned(capability: int) -> list[tuple[TritonTile, launch.Variant]]:
    plan = load_plan((capability // 10, capability % 10), {})
    found: list[tuple[TritonTile, launch.Variant]] = []
    for (n, k), entries in (plan.entries if plan else {}).items():
        for entry in entries:
            for choice in entry.choices:
                tile = choice.parameters
                if isinstance(tile, TritonTile):
                    found += [(tile, launch.variant(tile, n, k, m, False, False)) for m in {entry.first, entry.last}]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the checks that the command line asks for; the status is 1 if any kernel fails or has a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="compute capabilities, 90 for sm_90a")
    parser.add_argument("--everything", action="store_true", help="every tile of the plans, not one of each kernel")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    failed = False
    for capability in (int(target) for target in args.targets.split(",")):
        if args.in_process:
            sys.stdout.write(json.dumps(check_target(capability, args.everything)) + "\n")
        else:
            child = _child(capability, args.everything)
            failed |= report(f"sm_{capability}", child, lambda row: f"{row['kernel']} {row['variant']}")
    return int(failed)


def _child(capability: int, everything: bool) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cuda_moe.skinny.compile_check", "--in-process", "--targets", str(capability)]
    command += ["--everything"] * everything
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
