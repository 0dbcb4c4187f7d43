# mypy: ignore-errors
"""Device code for few tokens: two launches without a sort, or three with one that orders the pairs.

Direct: a tile is one local pair, found from the ids by every program. Listed: a tile is up to COLUMNS pairs of one
expert, from route_few_kernel. gate_up writes h by pair, down weighted float32 rows; the last program to arrive at a
block of columns sums them. A pair's row, in h and y, is token * TOPK + its place among the token's local experts in
ascending order.
"""

# I is the letter of the field; constexpr branches must stay statements of their own.
# ruff: noqa: E741, SIM102
from __future__ import annotations

import triton
import triton.language as tl

from cuda_moe._routing_kernels import local_ids
from cuda_moe._tile_kernels import down_result, gate_up_result, narrow_product


@triton.jit
def _direct_tile(e, tile, weights, PAIRS: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return expert, rows (COLUMNS,), weights (COLUMNS,) and columns in use (one) of the tile-th local pair."""
    j = tl.arange(0, PAIRS)
    live = e >= 0
    chosen = live & (tl.cumsum(live.to(tl.int32), 0) == tile + 1)
    pair = tl.sum(tl.where(chosen, j, 0), 0)
    expert = tl.sum(tl.where(chosen, e, 0), 0)
    mine = live & (j // TOPK == pair // TOPK)
    order = tl.sum((mine & ((e < expert) | ((e == expert) & (j < pair)))).to(tl.int32), 0)
    n = tl.arange(0, COLUMNS)
    w = tl.load(weights + pair + n, mask=n < 1, other=0.0)
    return expert, n * 0 + pair // TOPK * TOPK + order, w, 1


@triton.jit
def _listed_tile(tile, tile_expert, tile_count, tile_dest, tile_weight, COLUMNS: tl.constexpr):
    """Return the same from the lists of route_few_kernel."""
    n = tl.arange(0, COLUMNS)
    count = tl.load(tile_count + tile)
    at = tile * COLUMNS + n
    dest = tl.load(tile_dest + at, mask=n < count, other=0)
    return tl.load(tile_expert + tile), dest, tl.load(tile_weight + at, mask=n < count, other=0.0), count


@triton.jit
def _repeat(v, SLICES: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.reshape(tl.broadcast_to(v[None, :], (SLICES, COLUMNS)), (SLICES * COLUMNS,))


@triton.jit(do_not_specialize=["tokens"])
def few_gate_up_kernel(x, ids, weights, codes, scales, factor, bias, h, arrivals, meta, tile_expert, tile_count,
                       tile_dest, tile_weight, tokens, FIRST: tl.constexpr, LOCAL: tl.constexpr, H: tl.constexpr,
                       I: tl.constexpr, HS: tl.constexpr, TOPK: tl.constexpr, PAIRS: tl.constexpr,
                       LISTED: tl.constexpr, COLUMNS: tl.constexpr, MT: tl.constexpr, UNROLL: tl.constexpr,
                       STAGES: tl.constexpr, SLICES: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr,
                       MMA_ORDER: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr,
                       P1: tl.constexpr, P2: tl.constexpr, ARRIVALS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """`h` of every local pair; grid (blocks of 16 * MT rows, tile slots). Zeroes the arrival counters of down."""
    block = tl.program_id(0)
    if block == 0:
        if tl.program_id(1) == 0:
            tl.store(arrivals + tl.arange(0, ARRIVALS), tl.zeros((ARRIVALS,), tl.int32))
    if LISTED:
        if PDL:
            tl.extra.cuda.gdc_wait()
        e = block
        tiles = tl.load(meta)
    else:
        j = tl.arange(0, PAIRS)
        e = local_ids(ids, j, j < tokens * TOPK, FIRST, LOCAL)
        tiles = tl.sum((e >= 0).to(tl.int32), 0)
    n = tl.arange(0, COLUMNS)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=1):
        if LISTED:
            expert, dest, _, count = _listed_tile(tile, tile_expert, tile_count, tile_dest, tile_weight, COLUMNS)
        else:
            expert, dest, _, count = _direct_tile(e, tile, weights, PAIRS, TOPK, COLUMNS)
        live = n < count
        row = _repeat(dest // TOPK, SLICES, COLUMNS).to(tl.int64) * H
        every = _repeat(live.to(tl.int32), SLICES, COLUMNS) > 0
        acc = narrow_product(
            x, row, every, codes, scales, expert, block * MT, H, I // 8, MT, COLUMNS, UNROLL, STAGES, SLICES,
            FORMAT, DECODE, MMA_ORDER,
        )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        scale = tl.load(factor + expert)
        value = gate_up_result(acc, scale, bias, expert, block * MT, I, MT, COLUMNS, BIAS, ACT, P0, P1, P2)
        col = block * MT * 8 + tl.arange(0, MT * 8)
        keep = live[None, :] & (col < I)[:, None]
        tl.store(h + dest[None, :] * HS + col[:, None], value.to(h.dtype.element_ty), mask=keep)


@triton.jit
def _sum_rows(y, ids, out, tokens, t, col, keep, FIRST: tl.constexpr, LOCAL: tl.constexpr, H: tl.constexpr,
              TOPK: tl.constexpr, KP: tl.constexpr):  # fmt: skip
    """Write out (t, col): each token's weighted rows added in ascending expert order, rounded once."""
    slot = tl.arange(0, KP)
    here = (t < tokens)[:, None] & (slot < TOPK)[None, :]
    e = local_ids(ids, t[:, None] * TOPK + slot[None, :], here, FIRST, LOCAL)
    n = tl.sum((e >= 0).to(tl.int32), 1)
    at = t[:, None] * (TOPK * H) + col[None, :]
    acc = tl.zeros(at.shape, tl.float32)
    for first in tl.range(0, tl.max(n, 0), 4, num_stages=1):
        for i in tl.static_range(4):
            live = (first + i < n)[:, None] & keep[None, :]
            acc += tl.load(y + at + (first + i) * H, mask=live, other=0.0, cache_modifier=".cg")
    tl.store(
        out + t[:, None] * H + col[None, :], acc.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & keep[None, :]
    )


@triton.jit(do_not_specialize=["tokens"])
def few_down_kernel(h, ids, weights, codes, scales, factor, bias, y, out, arrivals, meta, tile_expert, tile_count,
                    tile_dest, tile_weight, tokens, FIRST: tl.constexpr, LOCAL: tl.constexpr, H: tl.constexpr,
                    I: tl.constexpr, HS: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr,
                    LISTED: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, MT: tl.constexpr,
                    UNROLL: tl.constexpr, STAGES: tl.constexpr, SLICES: tl.constexpr, FORMAT: tl.constexpr,
                    DECODE: tl.constexpr, MMA_ORDER: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Weighted y of every local pair, then the sum; grid (blocks of 16 * MT rows of w2, tile slots)."""
    block = tl.program_id(0)
    if LISTED:
        if PDL:
            tl.extra.cuda.gdc_wait()
        e = block
        tiles = tl.load(meta)
    else:
        # ids are older than the launch before this one, so they are read while that still runs.
        j = tl.arange(0, PAIRS)
        e = local_ids(ids, j, j < tokens * TOPK, FIRST, LOCAL)
        tiles = tl.sum((e >= 0).to(tl.int32), 0)
        if PDL:
            tl.extra.cuda.gdc_wait()
    n = tl.arange(0, COLUMNS)
    col = block * MT * 16 + tl.arange(0, MT * 16)
    if (tiles == 0) & (tl.program_id(1) == 0):
        _sum_rows(y, ids, out, tokens, tl.arange(0, TOKENS), col, col < H, FIRST, LOCAL, H, TOPK, KP)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=1):
        if LISTED:
            expert, dest, w, count = _listed_tile(tile, tile_expert, tile_count, tile_dest, tile_weight, COLUMNS)
        else:
            expert, dest, w, count = _direct_tile(e, tile, weights, PAIRS, TOPK, COLUMNS)
        live = n < count
        every = _repeat(live.to(tl.int32), SLICES, COLUMNS) > 0
        row = _repeat(dest, SLICES, COLUMNS).to(tl.int64) * HS
        acc = narrow_product(
            h, row, every, codes, scales, expert, block * MT, I, H // 16, MT, COLUMNS, UNROLL, STAGES, SLICES,
            FORMAT, DECODE, MMA_ORDER,
        )  # fmt: skip
        scale = tl.load(factor + expert)
        value = down_result(acc, scale, bias, expert, col, H, BIAS) * w[None, :]
        keep = live[None, :] & (col < H)[:, None]
        tl.store(y + dest[None, :] * H + col[:, None], value, mask=keep, cache_modifier=".cg")
        tl.debug_barrier()
        if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == tiles - 1:
            tl.debug_barrier()
            _sum_rows(y, ids, out, tokens, tl.arange(0, TOKENS), col, col < H, FIRST, LOCAL, H, TOPK, KP)
