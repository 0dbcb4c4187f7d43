"""What a tuning run tries, and the plan it writes: entries that beat torch by 5 % or more under graph replay."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from cuda_moe.skinny.cute_parameters import GemvParameters, MmaParameters
from cuda_moe.skinny.parameters import TritonFragments, TritonGemv, TritonMma, TritonTile
from cuda_moe.skinny.plan import LEAST_GAIN, SCHEMA, Choice, Parameters
from portamoe.linear_provider import Timed

#: Share of K that the last step may hold in vain.
MOST_WASTE = 1.35
#: Values of K that the smallest program takes in one step.
LEAST_STEP = 256
#: Rows of x above which the CUDA cores cannot keep up with the memory.
GEMV_ROWS = 8


def candidates(n: int, k: int, m: int) -> list[Choice]:
    """Return the kernels worth timing for (M, N, K), of every implementation."""
    tiles: list[tuple[str, Parameters]] = []
    if m <= GEMV_ROWS:
        for rows, warps, unroll in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)):
            tiles.append(("triton_gemv", TritonGemv(rows, warps, unroll)))
        for threads, outputs, ahead in product((64, 96, 128, 224, 256), (1, 2, 3, 4), (2, 4)):
            tiles.append(("cute_gemv", GemvParameters(threads, outputs, ahead)))
    steps = ((4, 64), (4, 128), (8, 32), (8, 64), (4, 32))
    for rows, (groups, depth), stages, split in product((16, 32), steps, (3, 4, 6, 8, 10), (1, 2, 4)):
        tiles.append(("triton_mma", TritonMma(rows, groups, depth, stages, split)))
    for rows, warps, chunks, ahead in product((8, 16, 32), (2, 4, 8), (1, 2, 4, 8), (False, True)):
        tiles.append(("triton_fragments", TritonFragments(rows, warps, chunks, ahead)))
    for warps, chunk, stages, per_sm in product((4, 8), (128, 256), (2, 4, 6), (1, 2)):
        tiles.append(("cute_mma", MmaParameters(warps=warps, chunk=chunk, stages=stages, per_sm=per_sm)))
    return [Choice(kernel, tile) for kernel, tile in tiles if _fits(tile, n, k, m)]


def _fits(tile: Parameters, n: int, k: int, m: int) -> bool:
    if isinstance(tile, TritonTile) and math.ceil(k / tile.step) * tile.step > max(MOST_WASTE * k, LEAST_STEP):
        return False
    try:
        tile.check(n, k, m)
    except ValueError:
        return False
    return True


def document(
    arch: str, about: Mapping[str, Any], timed: Iterable[Timed], torch_us: Mapping[tuple[int, int, int], float]
) -> dict[str, Any]:
    """Return the plan file of a tuning run.

    arch:      "sm90"
    about:     device, date, command, versions
    timed:     every kernel that was right
    torch_us:  (N, K, M) -> time of torch.mm in the same run; decides which shapes and rows the plan has

    For each shape and number of rows the fastest kernel of each implementation is kept, if it gains 5 % or more.
    """
    by_key: dict[tuple[int, int, int], list[Timed]] = {}
    for t in timed:
        by_key.setdefault((t.n, t.k, t.m), []).append(t)
    projections = []
    for n, k in dict.fromkeys((n, k) for n, k, _ in torch_us):
        entries = []
        previous = 0
        for m in sorted(rows for n2, k2, rows in torch_us if (n2, k2) == (n, k)):
            times = by_key.get((n, k, m), [])
            plain, dependent = (_best([t for t in times if t.pdl is pdl], torch_us[n, k, m]) for pdl in (False, True))
            if plain or dependent:
                entry = {"tokens": [previous + 1, m], "torch_us": round(torch_us[n, k, m], 2), "choices": plain}
                entries.append(entry | ({"dependent": dependent} if dependent else {}))
            previous = m
        projections.append({"n": n, "k": k, "entries": entries})
    return {"schema": SCHEMA, "arch": arch, "origin": "measured", **about, "projections": projections}


def _best(times: list[Timed], torch_us: float) -> list[dict[str, Any]]:
    """Return the fastest of each implementation that gains enough, by its gain over torch in its own run."""
    best: dict[str, Timed] = {}
    for t in sorted(times, key=lambda t: t.us / (t.torch_us or torch_us)):
        best.setdefault(t.choice.kernel.partition("_")[0], t)
    found = []
    for t in best.values():
        own = {"torch_us": round(t.torch_us, 2)} if t.torch_us else {}
        if round(t.us, 2) * LEAST_GAIN <= round(t.torch_us or torch_us, 2):
            parameters = asdict(t.choice.parameters)
            found.append({"kernel": t.choice.kernel, "parameters": parameters, "us": round(t.us, 2), **own})
    return found


def to_json(plan: Mapping[str, Any]) -> str:
    """Return the plan as JSON with a line for every choice."""
    head = json.dumps({key: value for key, value in plan.items() if key != "projections"}, indent=1)[:-2]
    blocks = []
    for p in plan["projections"]:
        named = {key: value for key, value in p.items() if key != "entries"}
        entries = ",\n".join(f"  {json.dumps(entry)}" for entry in p["entries"])
        blocks.append(
            f'  {json.dumps(named)[:-1]}, "entries": [\n{entries}\n  ]}}'
            if entries
            else f'  {json.dumps(named)[:-1]}, "entries": []}}'
        )
    return head + ',\n "projections": [\n' + ",\n".join(blocks) + "\n ]\n}\n"
