"""Run the Triton kernels of skinny products through Triton's interpreter and print one JSON line per case.

A process of its own: TRITON_INTERPRET counts when a kernel's module is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "cuda"))

import interpreter

interpreter.patch()

import torch  # noqa: E402

from cuda_moe.skinny import launch  # noqa: E402
from cuda_moe.skinny.parameters import TritonFragments, TritonGemv, TritonMma, token_columns  # noqa: E402
from cuda_moe.triton_compat import InterpretedLauncher  # noqa: E402

torch.set_num_threads(1)

#: name: tile, (N, K, M), residual. What each alone covers stands beside it.
CASES = {
    "gemv": (TritonGemv(2, 1, 1), (64, 512, 1), False),
    "gemv_odd_rows": (TritonGemv(4, 2, 1), (67, 512, 3), True),  # masks of rows of w and of x, residual
    "gemv_odd_depth": (TritonGemv(2, 1, 2), (64, 528, 2), False),  # the last step holds 16 values of 512
    "gemv_unrolled": (TritonGemv(1, 1, 4), (33, 2048, 4), False),
    "mma": (TritonMma(16, 2, 32, 3), (32, 256, 8), False),
    "mma_few_tokens": (TritonMma(16, 4, 16, 3), (16, 256, 3), True),  # masks of tokens, residual
    "mma_wide": (TritonMma(32, 2, 32, 3), (32, 192, 16), False),  # 16 columns
    "mma_odd": (TritonMma(16, 2, 32, 3), (20, 144, 9), True),  # rows and depth masked
    "mma_split": (TritonMma(16, 2, 32, 3, 4), (48, 640, 5), True),  # pieces of 3, 3, 2 and 2 steps
    "fragments": (TritonFragments(16, 2, 2), (32, 256, 8), False),
    "fragments_ahead": (TritonFragments(16, 2, 2, ahead=True), (16, 384, 3), True),  # the last loads are masked
    "fragments_wide": (TritonFragments(32, 1, 4), (32, 256, 16), False),  # two tiles of rows and of tokens
    "fragments_swapped": (TritonFragments(8, 2, 2), (40, 256, 5), True),  # w is the right operand
    "fragments_swapped_wide": (TritonFragments(8, 2, 1, ahead=True), (12, 192, 13), False),
    "fragments_odd": (TritonFragments(16, 4, 1, ahead=True), (19, 160, 11), True),  # rows, depth and tokens masked
    "mma_split_odd": (TritonMma(16, 2, 16, 3, 2), (24, 176, 11), False),
}


def run(tile, shape, with_residual):
    """Return output, reference and counters of one launch with poisoned outputs and partial sums."""
    n, k, m = shape
    g = torch.Generator().manual_seed(n + k + m)
    x, w = (torch.randn(rows, k, generator=g).bfloat16() for rows in (m, n))
    residual = torch.randn(m, n, generator=g).bfloat16() if with_residual else None
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    v = launch.variant(tile, n, k, m, with_residual, False)
    call = InterpretedLauncher(launch.source(tile, v, widen=True))
    args = (x, w, out, out if residual is None else residual)
    counters = torch.zeros(64, dtype=torch.int32)
    if isinstance(tile, TritonGemv):
        args = (*args, n, k)
    elif isinstance(tile, TritonFragments):
        args = (*args, n, k, m)
    else:
        size = tile.split * tile.tiles(n) * tile.rows * token_columns(m)
        args = (*args, torch.full((size,), float("nan")), counters, n, k, m)
    call(tile.grid(n), 0, args)
    truth = x.double() @ w.double().T
    return out, truth if residual is None else truth + residual.double(), counters


def main():
    """Run every case."""
    for name, case in CASES.items():
        out, truth, counters = run(*case)
        error = float((out.double() - truth).norm() / truth.norm())
        sys.stdout.write(json.dumps({"case": name, "rms": error, "counters": int(counters.abs().sum())}) + "\n")


if __name__ == "__main__":
    main()
