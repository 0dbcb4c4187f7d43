"""Compile every kernel for a GPU that need not be there; spills and wgmma hazards fail.

    python -m cuda_moe.compile_check --targets 80,90,100,103,107,120 --specs kimi-k3-ep8,gpt-oss

Each target compiles in a process of its own, because an unsupported one can abort the compiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from portamoe.spec import GPT_OSS, KIMI_K3, MoESpec

TARGETS = (80, 90, 100, 103, 107, 120)
SPECS = {
    "kimi-k3-ep8": replace(KIMI_K3, local_experts=range(112)),
    "kimi-k3-tp8": replace(KIMI_K3, intermediate_size=384),
    "gpt-oss": GPT_OSS,
    "small": MoESpec(
        hidden_size=256, intermediate_size=96, num_experts=16, top_k=2, activation=KIMI_K3.activation
    ),
    "small-bf16": MoESpec(
        hidden_size=256, intermediate_size=96, num_experts=16, top_k=2, activation=KIMI_K3.activation,
        weight_format="bf16",
    ),
}  # fmt: skip
TOKENS = (1, 4, 16, 256, 1024, 4096, 8192)


def check_target(
    capability: int, spec: MoESpec, tokens: tuple[int, ...], invariant: bool, rest: bool
) -> list[dict[str, object]]:
    """Compile in this process; return per kernel its name, tokens, registers and what speaks against it."""
    import torch

    from cuda_moe import sass
    from cuda_moe.calls import Kernels
    from cuda_moe.plan import make_plan
    from cuda_moe.triton_compat import KernelSource, compile_kernel

    sources: dict[KernelSource, int] = {}
    for count in tokens:
        plan = make_plan(spec, count, capability, invariant)
        for source in Kernels(spec, plan, count, torch.int32, capability).all(rest):
            sources.setdefault(source, count)
    rows = []
    for source, count in sources.items():
        cubin = compile_kernel(source, capability).asm["cubin"]
        row = {"kernel": source.name, "tokens": count, "registers": sass.resources(cubin).registers}
        rows.append({**row, "problems": sass.problems(cubin, capability)})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the checks that the command line asks for; the status is 1 if any kernel fails or has a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="compute capabilities, 90 for sm_90a")
    parser.add_argument("--specs", default="kimi-k3-ep8,kimi-k3-tp8,gpt-oss", help=f"of {', '.join(SPECS)}")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--rest", action="store_true", help="also the kernel for further windows (slow to compile)")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    targets = [int(t) for t in args.targets.split(",")]
    failed = False
    for capability in targets:
        for name in args.specs.split(","):
            if args.in_process:
                tokens = tuple(int(t) for t in args.tokens.split(","))
                rows = check_target(capability, SPECS[name], tokens, args.batch_invariant, args.rest)
                sys.stdout.write(json.dumps(rows) + "\n")
                continue
            child = _child(capability, name, args)
            failed |= report(f"sm_{capability} {name}", child, lambda row: f"{row['kernel']} at {row['tokens']} tokens")
    return int(failed)


def _child(capability: int, name: str, args: argparse.Namespace) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cuda_moe.compile_check", "--in-process", "--targets", str(capability)]
    command += ["--specs", name, "--tokens", args.tokens]
    command += ["--batch-invariant"] * args.batch_invariant + ["--rest"] * args.rest
    return subprocess.run(command, capture_output=True, text=True, check=False)


def report(what: str, child: subprocess.CompletedProcess[str], kernel: Callable[[Any], str]) -> bool:
    """Print the outcome of one target's process and return whether something is wrong.

    what:    "sm_90 gpt-oss"
    child:   its last line are rows as JSON, each with registers and problems
    kernel:  the name of a row's kernel
    """
    if child.returncode:
        sys.stdout.write(f"{what}: exit status {child.returncode}\n{child.stderr[-2000:]}\n")
        return True
    rows = json.loads(child.stdout.splitlines()[-1])
    wrong = [(row, problem) for row in rows for problem in row["problems"]]
    most = max(row["registers"] for row in rows)
    sys.stdout.write(f"{what}: {len(rows)} kernels compiled, at most {most} registers\n")
    for row, problem in wrong:
        sys.stdout.write(f"  {kernel(row)}: {problem}\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
