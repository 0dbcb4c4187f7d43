# mypy: ignore-errors
"""Device code for few tokens: two or three launches without a sort.

What one program works on, by path:
pair    the (token, slot) pair that its index names; where most experts are local
direct  the tile-th local pair, found from the ids by every program
leader  the pair that its index names with up to COLUMNS - 1 later ones of the same expert, if it is the first of them
listed  up to COLUMNS pairs of one expert, from route_few_kernel

gate_up writes h by pair (direct, listed: by row of y). down writes weighted float32 rows of y: token * TOPK + place of
the expert among the token's local ones in ascending order. Then the last program to arrive at a token's block of
columns sums them; leader leaves that to a third launch.
"""

# I is the letter of the field; constexpr branches must stay statements of their own.
# ruff: noqa: E741, PLR0912, PLR1714, SIM102
from __future__ import annotations

import triton
import triton.language as tl

from cuda_moe._routing_kernels import local_ids
from cuda_moe._tile_kernels import down_result, gate_up_result, narrow_product


@triton.jit
def _pair_tile(ids, pair, FIRST: tl.constexpr, LOCAL: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr):
    """Return the pair's expert (-1 if not local), its place among the token's local ones, and how many those are."""
    slot = tl.arange(0, KP)
    token = pair // TOPK
    e = local_ids(ids, token * TOPK + slot, slot < TOPK, FIRST, LOCAL)
    expert = tl.max(tl.where(slot == pair % TOPK, e, -1), 0)
    below = (e < expert) | ((e == expert) & (slot < pair % TOPK))
    return expert, tl.sum(((e >= 0) & below).to(tl.int32), 0), tl.sum((e >= 0).to(tl.int32), 0)


@triton.jit
def _direct_tile(e, tile, weights, PAIRS: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return expert, rows (COLUMNS,), weights and columns in use (one) of the tile-th local pair, rows of its token.

    Of the last result all elements count.
    """
    j = tl.arange(0, PAIRS)
    live = e >= 0
    chosen = live & (tl.cumsum(live.to(tl.int32), 0) == tile + 1)
    pair = tl.sum(tl.where(chosen, j, 0), 0)
    expert = tl.sum(tl.where(chosen, e, 0), 0)
    mine = live & (j // TOPK == pair // TOPK)
    order = tl.sum((mine & ((e < expert) | ((e == expert) & (j < pair)))).to(tl.int32), 0)
    n = tl.arange(0, COLUMNS)
    w = tl.load(weights + pair + n, mask=n < 1, other=0.0)
    return expert, n * 0 + pair // TOPK * TOPK + order, w, 1, n * 0 + tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _leader_tile(ids, pair, tokens, FIRST: tl.constexpr, LOCAL: tl.constexpr, TOPK: tl.constexpr, PAIRS: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """Return the pair's expert, the pairs (COLUMNS,) that it leads and how many: none unless it leads.

    Of the pairs of one expert, each COLUMNS-th leads, beginning with the first.
    """
    j = tl.arange(0, PAIRS)
    e = local_ids(ids, j, j < tokens * TOPK, FIRST, LOCAL)
    expert = tl.load(ids + pair).to(tl.int32) - FIRST
    same = (e == expert) & (e >= 0)
    # One sum for both: all pairs of the expert, and those before this one.
    both = tl.sum(same.to(tl.int32) + ((same & (j < pair)).to(tl.int32) << 16), 0)
    total, own = both & 65535, both >> 16
    n = tl.arange(0, COLUMNS)
    led = n * 0 + pair
    if (total > 1) & (own % COLUMNS == 0):
        rank = tl.cumsum(same.to(tl.int32), 0) - 1
        mine = same[None, :] & (rank[None, :] == own + n[:, None])
        led = tl.sum(tl.where(mine, j[None, :], 0), 1)
    return expert, led, tl.where(own % COLUMNS == 0, tl.minimum(total - own, COLUMNS), 0)


@triton.jit
def _places(ids, pair, live, FIRST: tl.constexpr, LOCAL: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr):
    """Return the rows of y of pairs (COLUMNS,)."""
    slot = tl.arange(0, KP)[None, :]
    first = (pair // TOPK * TOPK)[:, None]
    own = (pair % TOPK)[:, None]
    e = local_ids(ids, first + slot, live[:, None] & (slot < TOPK), FIRST, LOCAL)
    expert = tl.max(tl.where(slot == own, e, -1), 1)[:, None]
    below = (e >= 0) & ((e < expert) | ((e == expert) & (slot < own)))
    return pair // TOPK * TOPK + tl.sum(below.to(tl.int32), 1)


@triton.jit
def _listed_tile(tile, tile_expert, tile_count, tile_dest, tile_weight, tile_need, COLUMNS: tl.constexpr):
    """Return the same as _direct_tile from the lists of route_few_kernel."""
    n = tl.arange(0, COLUMNS)
    at = tile * COLUMNS + n
    # All at once: what lies behind the count is masked after it was loaded.
    count, dest, w = tl.load(tile_count + tile), tl.load(tile_dest + at), tl.load(tile_weight + at)
    need = tl.load(tile_need + at)
    live = n < count
    return tl.load(tile_expert + tile), tl.where(live, dest, 0), tl.where(live, w, 0.0), count, need


@triton.jit
def _tile(e, tile, weights, tile_expert, tile_count, tile_dest, tile_weight, tile_need, PAIRS: tl.constexpr,
          TOPK: tl.constexpr, PATH: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Return expert, rows, weights, columns in use of a tile, and how many rows the token of each column has."""
    if PATH == "listed":
        facts = _listed_tile(tile, tile_expert, tile_count, tile_dest, tile_weight, tile_need, COLUMNS)
    else:
        facts = _direct_tile(e, tile, weights, PAIRS, TOPK, COLUMNS)
    return facts


@triton.jit
def _repeat(v, SLICES: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.reshape(tl.broadcast_to(v[None, :], (SLICES, COLUMNS)), (SLICES * COLUMNS,))


@triton.jit
def _gate_up(x, codes, scales, factor, bias, h, expert, token, row, live, block, H: tl.constexpr, I: tl.constexpr,
             HS: tl.constexpr, COLUMNS: tl.constexpr, MT: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
             SLICES: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr,
             BIAS: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
             LOOP: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Write h rows `row` (COLUMNS,) of the expert's product with x rows `token`; EARLY: let `down` be launched."""
    x_row = _repeat(token, SLICES, COLUMNS).to(tl.int64) * H
    every = _repeat(live.to(tl.int32), SLICES, COLUMNS) > 0
    scale = tl.load(factor + expert)
    acc = narrow_product(
        x, x_row, every, codes, scales, expert, block * MT, H, I // 8, MT, COLUMNS, UNROLL, STAGES, SLICES,
        FORMAT, DECODE, MMA_ORDER, LOOP and DECODE != "portable",
    )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    value = gate_up_result(acc, scale, bias, expert, block * MT, I, MT, COLUMNS, BIAS, ACT, P0, P1, P2)
    col = block * MT * 8 + tl.arange(0, MT * 8)
    keep = live[None, :] & (col < I)[:, None]
    tl.store(h + row[None, :] * HS + col[:, None], value.to(h.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["tokens"])
def few_gate_up_kernel(x, ids, weights, codes, scales, factor, bias, h, arrivals, meta, tile_expert, tile_count,
                       tile_dest, tile_weight, tile_need, tokens, FIRST: tl.constexpr, LOCAL: tl.constexpr,
                       H: tl.constexpr, I: tl.constexpr, HS: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr,
                       PAIRS: tl.constexpr, PATH: tl.constexpr, LOOP: tl.constexpr, COLUMNS: tl.constexpr,
                       MT: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, SLICES: tl.constexpr,
                       FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr, BIAS: tl.constexpr,
                       ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
                       ARRIVALS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """`h` of every local pair; grid (blocks of 16 * MT rows, pairs or tile slots).

    Zeroes the arrival counters of down; leader: block 0 writes the lists that down reads, tile_need (pair of a column)
    and tile_dest (its row of y).
    """
    block = tl.program_id(0)
    n = tl.arange(0, COLUMNS)
    if PDL and (PATH == "pair" or PATH == "leader"):
        tl.extra.cuda.gdc_launch_dependents()
    if PATH != "leader":
        if block == 0:
            for first in tl.range(tl.program_id(1) * 256, ARRIVALS, tl.num_programs(1) * 256, num_stages=1):
                at = first + tl.arange(0, 256)
                tl.store(arrivals + at, tl.zeros((256,), tl.int32), mask=at < ARRIVALS)
    if PATH == "pair":
        pair = tl.program_id(1)
        expert = tl.load(ids + pair).to(tl.int32) - FIRST
        if (expert >= 0) & (expert < LOCAL):
            _gate_up(x, codes, scales, factor, bias, h, expert, n * 0 + pair // TOPK, n * 0 + pair, n < 1, block, H, I,
                     HS, COLUMNS, MT, UNROLL, STAGES, SLICES, FORMAT, DECODE, MMA_ORDER, BIAS, ACT, P0, P1, P2,
                     False, False)  # fmt: skip
    elif PATH == "leader":
        slot = tl.program_id(1)
        expert, pair, count = _leader_tile(ids, slot, tokens, FIRST, LOCAL, TOPK, PAIRS, COLUMNS)
        if block == 0:
            tl.store(tile_count + slot, count)
            tl.store(tile_need + slot * COLUMNS + n, pair)
            tl.store(tile_dest + slot * COLUMNS + n, _places(ids, pair, n < count, FIRST, LOCAL, TOPK, KP))
        if count > 0:
            _gate_up(x, codes, scales, factor, bias, h, expert, pair // TOPK, pair, n < count, block, H, I, HS, COLUMNS,
                     MT, UNROLL, STAGES, SLICES, FORMAT, DECODE, MMA_ORDER, BIAS, ACT, P0, P1, P2, False,
                     False)  # fmt: skip
    else:
        if PATH == "listed":
            if PDL:
                tl.extra.cuda.gdc_wait()
            e = block
            tiles = tl.load(meta)
        else:
            j = tl.arange(0, PAIRS)
            e = local_ids(ids, j, j < tokens * TOPK, FIRST, LOCAL)
            tiles = tl.sum((e >= 0).to(tl.int32), 0)
        if LOOP:
            for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=1):
                expert, dest, _, count, _ = _tile(e, tile, weights, tile_expert, tile_count, tile_dest, tile_weight,
                                                  tile_need, PAIRS, TOPK, PATH, COLUMNS)  # fmt: skip
                _gate_up(x, codes, scales, factor, bias, h, expert, dest // TOPK, dest, n < count, block, H, I, HS,
                         COLUMNS, MT, UNROLL, STAGES, SLICES, FORMAT, DECODE, MMA_ORDER, BIAS, ACT, P0, P1, P2,
                         LOOP, PDL)  # fmt: skip
        else:
            expert, dest, _, count, _ = _tile(e, tl.program_id(1), weights, tile_expert, tile_count, tile_dest,
                                              tile_weight, tile_need, PAIRS, TOPK, PATH, COLUMNS)  # fmt: skip
            if tl.program_id(1) < tiles:
                _gate_up(x, codes, scales, factor, bias, h, expert, dest // TOPK, dest, n < count, block, H, I, HS,
                         COLUMNS, MT, UNROLL, STAGES, SLICES, FORMAT, DECODE, MMA_ORDER, BIAS, ACT, P0, P1, P2,
                         LOOP, PDL)  # fmt: skip


@triton.jit
def _local_slots(ids, token, live, FIRST: tl.constexpr, LOCAL: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr):
    """Return how many of each token's slots are local."""
    slot = tl.arange(0, KP)[None, :]
    e = local_ids(ids, token[:, None] * TOPK + slot, live[:, None] & (slot < TOPK), FIRST, LOCAL)
    return tl.sum((e >= 0).to(tl.int32), 1)


@triton.jit
def _sum_token(y, out, token, rows, col, H: tl.constexpr, TOPK: tl.constexpr):
    """Write out (token, col): its `rows` weighted rows added in ascending expert order, rounded once."""
    acc = tl.zeros(col.shape, tl.float32)
    at = y + token * (TOPK * H) + col
    for i in tl.static_range(TOPK):
        acc += tl.load(at + i * H, mask=(col < H) & (i < rows + 0 * col), other=0.0, cache_modifier=".cg")
    tl.store(out + token * H + col, acc.to(out.dtype.element_ty), mask=col < H)


@triton.jit
def _down(h, codes, scales, factor, bias, y, out, arrivals, expert, h_row, dest, w, count, need, block,
          H: tl.constexpr, I: tl.constexpr, HS: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr,
          MT: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, SLICES: tl.constexpr, FORMAT: tl.constexpr,
          DECODE: tl.constexpr, MMA_ORDER: tl.constexpr, BIAS: tl.constexpr, LOOP: tl.constexpr,
          SUM: tl.constexpr):  # fmt: skip
    """Write y rows `dest` (COLUMNS,) from h rows `h_row`.

    SUM: and the sum of every token whose `need` rows are there.
    """
    n = tl.arange(0, COLUMNS)
    live = n < count
    col = block * MT * 16 + tl.arange(0, MT * 16)
    every = _repeat(live.to(tl.int32), SLICES, COLUMNS) > 0
    rows = _repeat(h_row, SLICES, COLUMNS).to(tl.int64) * HS
    scale = tl.load(factor + expert)
    acc = narrow_product(
        h, rows, every, codes, scales, expert, block * MT, I, H // 16, MT, COLUMNS, UNROLL, STAGES, SLICES,
        FORMAT, DECODE, MMA_ORDER, LOOP and DECODE != "portable",
    )  # fmt: skip
    value = down_result(acc, scale, bias, expert, col, H, BIAS) * w[None, :]
    keep = live[None, :] & (col < H)[:, None]
    tl.store(y + dest[None, :] * H + col[:, None], value, mask=keep, cache_modifier=".cg")
    if SUM:
        tl.debug_barrier()
        for c in tl.range(0, count, num_stages=1):
            token = tl.sum(tl.where(n == c, dest // TOPK, 0), 0)
            all_rows = tl.sum(tl.where(n == c, need, 0), 0)
            if tl.atomic_add(arrivals + token * tl.num_programs(0) + block, 1, sem="acq_rel") == all_rows - 1:
                tl.debug_barrier()
                _sum_token(y, out, token, all_rows, col, H, TOPK)


@triton.jit(do_not_specialize=["tokens"])
def few_down_kernel(h, ids, weights, codes, scales, factor, bias, y, out, arrivals, meta, tile_expert, tile_count,
                    tile_dest, tile_weight, tile_need, tokens, FIRST: tl.constexpr, LOCAL: tl.constexpr,
                    H: tl.constexpr, I: tl.constexpr, HS: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr,
                    PAIRS: tl.constexpr, PATH: tl.constexpr, LOOP: tl.constexpr, COLUMNS: tl.constexpr,
                    TOKENS: tl.constexpr, MT: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
                    SLICES: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr,
                    BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Weighted y of every local pair, then (not leader) the sums; grid (blocks of 16 * MT rows of w2, tile slots)."""
    block = tl.program_id(0)
    n = tl.arange(0, COLUMNS)
    # ids and weights are older than the launch before this one, so they are read while that still runs.
    if PATH != "leader":
        if tl.program_id(1) == 0:
            token = tl.arange(0, TOKENS)
            empty = (token < tokens) & (_local_slots(ids, token, token < tokens, FIRST, LOCAL, TOPK, KP) == 0)
            if tl.max(empty.to(tl.int32), 0) > 0:
                col = block * MT * 16 + tl.arange(0, MT * 16)
                zero = tl.zeros((TOKENS, MT * 16), out.dtype.element_ty)
                tl.store(out + token[:, None] * H + col[None, :], zero, mask=empty[:, None] & (col < H)[None, :])
    if PATH == "pair":
        pair = tl.program_id(1)
        expert, order, need = _pair_tile(ids, pair, FIRST, LOCAL, TOPK, KP)
        w = tl.load(weights + pair + n, mask=n < 1, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        if expert >= 0:
            _down(h, codes, scales, factor, bias, y, out, arrivals, expert, n * 0 + pair,
                  n * 0 + pair // TOPK * TOPK + order, w, 1, n * 0 + need, block, H, I, HS, TOPK, COLUMNS, MT,
                  UNROLL, STAGES, SLICES, FORMAT, DECODE, MMA_ORDER, BIAS, LOOP, True)  # fmt: skip
    elif PATH == "leader":
        slot = tl.program_id(1)
        expert = tl.load(ids + slot).to(tl.int32) - FIRST
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        at = slot * COLUMNS + n
        count, pair, dest = tl.load(tile_count + slot), tl.load(tile_need + at), tl.load(tile_dest + at)
        if count > 0:
            w = tl.load(weights + pair, mask=n < count, other=0.0)
            _down(h, codes, scales, factor, bias, y, out, arrivals, expert, pair, dest, w, count, n, block, H, I, HS,
                  TOPK, COLUMNS, MT, UNROLL, STAGES, SLICES, FORMAT, DECODE, MMA_ORDER, BIAS, LOOP, False)  # fmt: skip
    else:
        if PATH == "listed":
            if PDL:
                tl.extra.cuda.gdc_wait()
            e = block
            tiles = tl.load(meta)
        else:
            j = tl.arange(0, PAIRS)
            e = local_ids(ids, j, j < tokens * TOPK, FIRST, LOCAL)
            tiles = tl.sum((e >= 0).to(tl.int32), 0)
            if PDL:
                tl.extra.cuda.gdc_wait()
        if LOOP:
            for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=1):
                expert, dest, w, count, need = _tile(e, tile, weights, tile_expert, tile_count, tile_dest, tile_weight,
                                                     tile_need, PAIRS, TOPK, PATH, COLUMNS)  # fmt: skip
                _down(h, codes, scales, factor, bias, y, out, arrivals, expert, dest, dest, w, count, need, block, H,
                      I, HS, TOPK, COLUMNS, MT, UNROLL, STAGES, SLICES, FORMAT, DECODE, MMA_ORDER, BIAS,
                      LOOP, True)  # fmt: skip
        else:
            expert, dest, w, count, need = _tile(e, tl.program_id(1), weights, tile_expert, tile_count, tile_dest,
                                                 tile_weight, tile_need, PAIRS, TOPK, PATH, COLUMNS)  # fmt: skip
            if tl.program_id(1) < tiles:
                _down(h, codes, scales, factor, bias, y, out, arrivals, expert, dest, dest, w, count, need, block, H,
                      I, HS, TOPK, COLUMNS, MT, UNROLL, STAGES, SLICES, FORMAT, DECODE, MMA_ORDER, BIAS,
                      LOOP, True)  # fmt: skip


@triton.jit
def few_combine_kernel(y, ids, out, FIRST: tl.constexpr, LOCAL: tl.constexpr, H: tl.constexpr, TOPK: tl.constexpr,
                       KP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Sum each token's weighted rows; grid (tokens, blocks of BLOCK columns)."""
    token = tl.program_id(0)
    slot = tl.arange(0, KP)
    rows = tl.sum((local_ids(ids, token * TOPK + slot, slot < TOPK, FIRST, LOCAL) >= 0).to(tl.int32), 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    _sum_token(y, out, token, rows, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), H, TOPK)
