"""How the `torch` backend compares with plain matrix products on already dequantised weights, in time and memory.

    python benchmarks/torch_backend.py [--experts 16] [--tokens 16] [--threads 2] [--repeats 5]

The baseline does the two float32 products of every expert and the activation on weights that were dequantised before;
one expert's 132 MB serve for all, which no cache holds. Both run in this process, in turn, and the median of the pairs'
ratios counts. Memory is the peak of the resident set during one call above what weights and inputs take.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from portamoe.reference import dequantized
from portamoe.spec import KIMI_K3, MoESpec
from portamoe.testing import ErrorMetrics, Problem, assert_close, make_problem
from portamoe.torch_backend import BACKEND

#: The goals: times the baseline, and dequantised float32 experts.
GOAL_RATIO, GOAL_EXPERTS = 6.0, 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec = replace(KIMI_K3, num_experts=args.experts, top_k=min(16, args.experts), local_experts=range(args.experts))
    problem = make_problem(spec, args.tokens)
    forward, _ = backend_call(problem)
    before = status("VmRSS")
    peak = peak_during(forward)
    plain, products = plain_call(problem)
    times = [(seconds(plain), seconds(forward)) for _ in range(args.repeats)]
    baseline, ours = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(pair[1] / pair[0] for pair in times)
    metrics = check(problem)

    expert = 3 * spec.hidden_size * spec.intermediate_size * 4
    allowed = GOAL_EXPERTS * expert + 8 * args.tokens * spec.top_k * spec.intermediate_size
    report(spec, args)
    print(f"plain products    {baseline * 1e3:8.1f} ms  ({products} dequantised experts)")
    print(f"torch backend     {ours * 1e3:8.1f} ms  ({ratio:.2f} times; goal: {GOAL_RATIO:g})")
    print(f"weights           {problem.weights.nbytes / 1e6:8.1f} MB  ({problem.weights.nbytes / ours / 1e9:.2f} GB/s)")
    if peak is None:
        print("memory            this kernel does not let a process reset its peak")
        return 0
    extra = peak - before
    print(f"extra memory      {extra / 1e6:8.1f} MB  ({extra / expert:.2f} experts; goal: {allowed / 1e6:.1f} MB)")
    print(f"error             relative RMS {metrics.rms:.2e} against the float32 reference, one expert")
    return 0 if ratio <= GOAL_RATIO and extra <= allowed else 1


def check(problem: Problem) -> ErrorMetrics:
    """Compare the result of one expert's tokens with the reference, which is too slow for all experts."""
    one = replace(problem, topk_ids=torch.where(problem.topk_ids == 0, 0, -1).int())
    forward, out = backend_call(one)
    forward()
    return assert_close(out, one.reference(), roundings=1)


def report(spec: MoESpec, args: argparse.Namespace) -> None:
    print(f"measured {time.strftime('%Y-%m-%d')} on {processor()}, {args.threads} threads, torch {torch.__version__}")
    print(f"command: python {' '.join(sys.argv)}")
    print(
        f"{spec.num_experts} experts, H {spec.hidden_size}, I {spec.intermediate_size}, T {args.tokens}, "
        f"K {spec.top_k}, {spec.weight_format}, {spec.activation}"
    )


def backend_call(problem: Problem) -> tuple[Callable[[], None], torch.Tensor]:
    spec, tokens = problem.spec, problem.x.shape[0]
    prepared = BACKEND.prepare(problem.weights, spec, torch.device("cpu"))
    rows = BACKEND.default_max_local_rows(spec, tokens)
    out = torch.empty_like(problem.x)
    BACKEND.warm_up(prepared, tokens, rows)

    def forward() -> None:
        # The workspace is part of the call's memory here, as it is of its contract.
        workspace = torch.empty(BACKEND.workspace_bytes(spec, tokens, rows), dtype=torch.uint8)
        BACKEND.forward(
            prepared, problem.x, problem.topk_ids, problem.topk_weights, workspace, out, max_local_rows=rows
        )

    return forward, out


def plain_call(problem: Problem) -> tuple[Callable[[], None], int]:
    w13, w2 = (matrix.float() for matrix in dequantized(problem.weights.expert(0)))
    local = problem.spec.local_experts
    groups = [problem.x[(problem.topk_ids == expert).any(1)].float() for expert in local]
    groups = [x for x in groups if len(x)]

    def products() -> None:
        for x in groups:
            gate, up = (x @ w13.T).chunk(2, dim=1)
            problem.spec.activation(gate, up) @ w2.T

    return products, len(groups)


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_during(call: Callable[[], None]) -> int | None:
    """Return the largest resident set in bytes while `call` runs, or None where Linux does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    call()
    return status("VmHWM")


def status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def processor() -> str:
    names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return f"{names[0] if names else platform.processor()} ({len(names)} cores)"


if __name__ == "__main__":
    sys.exit(main())
