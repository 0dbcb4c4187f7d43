# mypy: ignore-errors
"""Device code that orders (token, slot) pairs by expert: no sync with the host, no state kept between calls.

The general sort takes two launches. Block b of the first counts the pairs of its 64 tokens per expert and ranks them
among equals; block b of the second adds up the counts of the blocks before it. The order inside an expert is that of
the pairs, so equal inputs give equal tiles.
"""

# I is the letter of the field; constexpr branches must stay statements of their own.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def local_ids(ids, at, mask, FIRST: tl.constexpr, LOCAL: tl.constexpr):
    """Return expert indices of this rank, -1 where the id is -1, foreign or masked."""
    e = tl.load(ids + at, mask=mask, other=-1).to(tl.int32) - FIRST
    return tl.where(mask & (e >= 0) & (e < LOCAL), e, -1)


@triton.jit
def _bits(v):
    """Return how many bits of each int32 are set."""
    v = v.to(tl.uint32, bitcast=True)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    v = v + (v >> 8)
    return ((v + (v >> 16)) & 63).to(tl.int32)


@triton.jit
def _rank_by_masks(masks, rank_out, counts, e, j, BINS: tl.constexpr, TOKENS: tl.constexpr):
    """Rank the pairs of TOKENS = 64 tokens, e (TOKENS, KP), whose experts differ within a token; return if they do.

    Two words of bits per expert say which of the tokens chose it; a pair's rank is the number of bits below its own.
    """
    bins = tl.arange(0, BINS)
    tl.store(masks + bins, tl.zeros((BINS,), tl.int32))
    tl.store(masks + BINS + bins, tl.zeros((BINS,), tl.int32))
    tl.debug_barrier()
    t = tl.arange(0, TOKENS)[:, None]
    word, bit = t // 32, t % 32
    local = e >= 0
    own = tl.broadcast_to(1 << bit, e.shape)
    tl.atomic_or(masks + word * BINS + e, own, mask=local, sem="relaxed")
    tl.debug_barrier()
    first = tl.load(masks + e, mask=local, other=0, cache_modifier=".cg")
    second = tl.load(masks + BINS + e, mask=local & (word > 0), other=0, cache_modifier=".cg")
    below = ~((-1 << bit) + 0 * e)
    rank = tl.where(word > 0, _bits(first) + _bits(second & below), _bits(first & below))
    tl.store(rank_out + j, rank, mask=local)
    chosen = _bits(tl.load(masks + bins, cache_modifier=".cg"))
    chosen += _bits(tl.load(masks + BINS + bins, cache_modifier=".cg"))
    tl.store(counts + bins, chosen.to(tl.int16))
    return tl.sum(chosen, 0) == tl.sum(tl.sum(local.to(tl.int32), 1), 0)


@triton.jit
def _rank_by_comparison(ids, rank_out, counts, e, j, first, pairs, FIRST: tl.constexpr, LOCAL: tl.constexpr,
                        BINS: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Rank any pairs e, j (SIZE,), by comparing each with all before it."""
    STEP: tl.constexpr = 4
    rank = tl.zeros((SIZE,), tl.int32)
    for c in tl.range(0, SIZE, STEP, num_stages=1):
        i = first + c + tl.arange(0, STEP)
        ei = local_ids(ids, i // KP * TOPK + i % KP, (i < pairs) & (i % KP < TOPK), FIRST, LOCAL)
        before = (ei[None, :] == e[:, None]) & (i[None, :] < j[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    tl.store(rank_out + j, rank, mask=e >= 0)
    tl.store(counts + tl.arange(0, BINS), tl.histogram(tl.maximum(e, 0), BINS, mask=e >= 0).to(tl.int16))


@triton.jit
def _copy_natural(x, x_natural, first, tokens, H: tl.constexpr, TOKENS: tl.constexpr):
    """Copy TOKENS rows with each 16 columns in the order of _tile_kernels.natural_column; pairs of columns as words."""
    WORDS: tl.constexpr = H // 2
    source = x.to(tl.pointer_type(tl.int32))
    target = x_natural.to(tl.pointer_type(tl.int32))
    t = (first + tl.arange(0, TOKENS))[:, None]
    for c in tl.static_range(0, WORDS, 1024):
        w = c + tl.arange(0, 1024)[None, :]
        keep = (w < WORDS) & (t < tokens)
        v = tl.load(source + t.to(tl.int64) * WORDS + w, mask=keep, other=0)
        place = w // 8 * 8 + (w & 1) * 4 + ((w >> 1) & 3)
        tl.store(target + t.to(tl.int64) * WORDS + place, v, mask=keep)


@triton.jit(do_not_specialize=["tokens"])
def count_kernel(ids, rank_out, counts, masks, tokens, FIRST: tl.constexpr, LOCAL: tl.constexpr, BINS: tl.constexpr,
                 TOPK: tl.constexpr, KP: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Block b: counts (b, BINS) int16 of the pairs of TOKENS tokens and each pair's rank among equals in the block.

    Pairs are numbered token * KP + slot, KP >= TOPK a power of two.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0)
    t = b * TOKENS + tl.arange(0, TOKENS)[:, None]
    slot = tl.arange(0, KP)[None, :]
    e = local_ids(ids, t * TOPK + slot, (t < tokens) & (slot < TOPK), FIRST, LOCAL)
    j = t * KP + slot
    own = counts + b * BINS
    different = _rank_by_masks(masks + b * (2 * BINS), rank_out, own, e, j, BINS, TOKENS)
    if not different:
        # A token that chose an expert twice: rare, if ever.
        tl.debug_barrier()
        SIZE: tl.constexpr = TOKENS * KP
        _rank_by_comparison(ids, rank_out, own, tl.reshape(e, (SIZE,)), tl.reshape(j, (SIZE,)),
                            b * SIZE, tokens * KP, FIRST, LOCAL, BINS, TOPK, KP, SIZE)  # fmt: skip


@triton.jit
def _write_tiles(c, offset, meta, tile_expert, tile_row, tile_count, programs, row_limit, tile_limit,
                 BINS: tl.constexpr, BN: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    """Write the tiles: each expert's rows in equal parts of at most BN rows, rounded up to ROUND rows."""
    bins = tl.arange(0, BINS)
    parts = (c + BN - 1) // BN
    size = (c + parts - 1) // tl.maximum(parts, 1)
    size = tl.minimum((size + ROUND - 1) // ROUND * ROUND, BN)
    first = tl.cumsum(parts, 0) - parts
    b = tl.program_id(0)
    for j in tl.range(b, tl.max(parts, 0), programs, num_stages=1):
        live = j < parts
        tl.store(tile_expert + first + j, bins, mask=live)
        tl.store(tile_row + first + j, offset + j * size, mask=live)
        tl.store(tile_count + first + j, tl.minimum(size, c - j * size), mask=live)
    if b == 0:
        # The first window ends where the rows or the tiles of the main launches end, whichever comes first.
        whole = tl.where(offset + c <= row_limit, parts, (row_limit - offset) // tl.maximum(size, 1))
        main = tl.maximum(tl.minimum(tl.minimum(whole, tile_limit - first), parts), 0)
        main = tl.where(offset > row_limit, 0, main)
        tl.store(meta, tl.sum(parts, 0))
        tl.store(meta + 1, tl.sum(main, 0))
        tl.store(meta + 2, tl.sum(tl.minimum(c, main * size), 0))
        tl.store(meta + 3, tl.sum(c, 0))
        tl.store(meta + 4, 0)


@triton.jit
def _sum_counts(counts, own, blocks, BINS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return counts (blocks, BINS) summed over all blocks, and over those before `own`; BLOCKS loads in flight."""
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for first in tl.range(0, blocks, BLOCKS, num_stages=1):
        for i in tl.static_range(BLOCKS):
            o = first + i
            # Compared as a block: Triton's interpreter makes integers of a boolean that it spreads over a block.
            c = tl.load(counts + o * BINS + bins, mask=o + 0 * bins < blocks, other=0).to(tl.int32)
            total += c
            before += tl.where(o + 0 * bins < own, c, 0)
    return total, before


@triton.jit(do_not_specialize=["tokens", "blocks", "programs", "row_limit", "tile_limit"])
def place_kernel(ids, weights, rank_in, counts, row_token, token_row, token_weight, token_rows, tile_expert, tile_row,
                 tile_count, meta, x, x_natural, tokens, blocks, programs, row_limit, tile_limit,
                 FIRST: tl.constexpr, LOCAL: tl.constexpr, BINS: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr,
                 TOKENS: tl.constexpr, PART: tl.constexpr, BN: tl.constexpr, ROUND: tl.constexpr,
                 BLOCKS: tl.constexpr, H: tl.constexpr, COPY: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Write the tile lists, row_token (rows), and per token its rows and weights in ascending expert order.

    Each of the first `programs` programs places PART tokens of a block of TOKENS; with COPY > 0 those behind copy x
    for wgmma, COPY tokens each. meta: tiles, tiles and rows of the first window, rows, and a zeroed barrier counter.
    """
    b = tl.program_id(0)
    if COPY > 0:
        if b >= programs:
            _copy_natural(x, x_natural, (b - programs) * COPY, tokens, H, COPY)
    if b < programs:
        SIZE: tl.constexpr = PART * KP
        # ids and weights are older than the launch before this one.
        t = b * PART + tl.arange(0, PART)[:, None]
        slot = tl.arange(0, KP)[None, :]
        e = local_ids(ids, t * TOPK + slot, (t < tokens) & (slot < TOPK), FIRST, LOCAL)
        w = tl.load(weights + t * TOPK + slot, mask=e >= 0, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        rank = tl.load(rank_in + t * KP + slot, mask=e >= 0, other=0)
        total, before = _sum_counts(counts, b * PART // TOKENS, blocks, BINS, BLOCKS)
        offset = tl.cumsum(total, 0) - total
        base = tl.gather(offset + before, tl.reshape(tl.maximum(e, 0), (SIZE,)), 0)
        row = tl.reshape(base, (PART, KP)) + rank
        # Rows ascend with the expert, so their order among a token's rows is the ascending expert id.
        key = tl.where(e >= 0, row, 1 << 30)
        order = tl.sum((tl.reshape(key, (PART, KP, 1)) > tl.reshape(key, (PART, 1, KP))).to(tl.int32), 2)
        at = t * TOPK + order
        tl.store(token_row + at, row, mask=e >= 0)
        tl.store(token_weight + at, w, mask=e >= 0)
        here = b * PART + tl.arange(0, PART)
        tl.store(token_rows + here, tl.sum((e >= 0).to(tl.int32), 1), mask=here < tokens)
        tl.store(row_token + row, tl.broadcast_to(t, (PART, KP)), mask=e >= 0)
        _write_tiles(total, offset, meta, tile_expert, tile_row, tile_count, programs, row_limit, tile_limit, BINS, BN,
                     ROUND)  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def route_few_kernel(ids, weights, meta, tile_expert, tile_count, tile_dest, tile_weight, tile_need, tokens,
                     FIRST: tl.constexpr, LOCAL: tl.constexpr, BINS: tl.constexpr, TOPK: tl.constexpr,
                     PAIRS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Tiles of at most COLUMNS pairs of one expert, for at most PAIRS pairs; each program places PART of them.

    Column n of tile i: tile_dest (i, n) = token * TOPK + place of the expert among the token's local ones in ascending
    order, its weight, and in tile_need how many local slots the token has. meta[0]: number of tiles.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, PAIRS)
    j = tl.program_id(0) * PART + tl.arange(0, PART)
    pairs = tokens * TOPK
    all_e = local_ids(ids, i, i < pairs, FIRST, LOCAL)
    e = local_ids(ids, j, j < pairs, FIRST, LOCAL)
    w = tl.load(weights + j, mask=e >= 0, other=0.0)
    counts = tl.histogram(tl.maximum(all_e, 0), BINS, mask=all_e >= 0)
    parts = (counts + COLUMNS - 1) // COLUMNS
    first = tl.cumsum(parts, 0) - parts
    same = (all_e[None, :] == e[:, None]) & (i[None, :] < j[:, None])
    rank = tl.sum(same.to(tl.int32), 1)
    mine = (i[None, :] // TOPK == j[:, None] // TOPK) & (all_e >= 0)[None, :]
    order = tl.sum((mine & ((all_e[None, :] < e[:, None]) | same)).to(tl.int32), 1)
    at = tl.maximum(e, 0)
    tile = tl.gather(first, at, 0) + rank // COLUMNS
    column = rank % COLUMNS
    live = e >= 0
    tl.store(tile_dest + tile * COLUMNS + column, j // TOPK * TOPK + order, mask=live)
    tl.store(tile_weight + tile * COLUMNS + column, w, mask=live)
    tl.store(tile_need + tile * COLUMNS + column, tl.sum(mine.to(tl.int32), 1), mask=live)
    head = live & (column == 0)
    tl.store(tile_expert + tile, e, mask=head)
    tl.store(tile_count + tile, tl.minimum(tl.gather(counts, at, 0) - rank // COLUMNS * COLUMNS, COLUMNS), mask=head)
    if tl.program_id(0) == 0:
        tl.store(meta, tl.sum(parts, 0))
