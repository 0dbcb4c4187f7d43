# mypy: ignore-errors
"""Device code that orders (token, slot) pairs by expert: no sync with the host, no state kept between calls.

The general sort takes two launches. Block b of the first counts its pairs per expert and ranks them among equals;
block b of the second adds up the counts of the blocks before it. The order inside an expert is that of the pairs, so
equal inputs give equal tiles.
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
def _rank_in_chunk(ids, first, e, j, pairs, FIRST: tl.constexpr, LOCAL: tl.constexpr, TOPK: tl.constexpr,
                   KP: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Return how many earlier pairs of the chunk at `first` chose the same expert, for each pair j of it."""
    STEP: tl.constexpr = 32
    rank = tl.zeros((SIZE,), tl.int32)
    for c in tl.range(0, SIZE, STEP, num_stages=1):
        i = first + c + tl.arange(0, STEP)
        ei = local_ids(ids, i // KP * TOPK + i % KP, (i < pairs) & (i % KP < TOPK), FIRST, LOCAL)
        before = (ei[None, :] == e[:, None]) & (i[None, :] < j[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    return rank


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


@triton.jit(do_not_specialize=["tokens", "chunks", "blocks"])
def count_kernel(ids, rank_out, counts, x, x_natural, tokens, chunks, blocks, FIRST: tl.constexpr,
                 LOCAL: tl.constexpr, BINS: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, SIZE: tl.constexpr,
                 H: tl.constexpr, COPY: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Block b: counts (b, BINS) of its `chunks` * SIZE pairs and each pair's rank among equals in the block.

    Pairs are numbered token * KP + slot, KP >= TOPK a power of two. COPY > 0: the programs behind the blocks copy x
    for wgmma, COPY tokens each.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0)
    if COPY > 0:
        if b >= blocks:
            _copy_natural(x, x_natural, (b - blocks) * COPY, tokens, H, COPY)
    if b < blocks:
        pairs = tokens * KP
        seen = tl.zeros((BINS,), tl.int32)
        for c in tl.range(0, chunks, num_stages=1):
            first = (b * chunks + c) * SIZE
            j = first + tl.arange(0, SIZE)
            e = local_ids(ids, j // KP * TOPK + j % KP, (j < pairs) & (j % KP < TOPK), FIRST, LOCAL)
            rank = _rank_in_chunk(ids, first, e, j, pairs, FIRST, LOCAL, TOPK, KP, SIZE)
            rank += tl.gather(seen, tl.maximum(e, 0), 0)
            tl.store(rank_out + j, rank, mask=e >= 0)
            seen += tl.histogram(tl.maximum(e, 0), BINS, mask=e >= 0)
        tl.store(counts + b * BINS + tl.arange(0, BINS), seen)


@triton.jit
def _write_tiles(c, offset, meta, tile_expert, tile_row, tile_count, row_limit, tile_limit, BINS: tl.constexpr,
                 BN: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    """Write the tiles: each expert's rows in equal parts of at most BN rows, rounded up to ROUND rows."""
    bins = tl.arange(0, BINS)
    parts = (c + BN - 1) // BN
    size = (c + parts - 1) // tl.maximum(parts, 1)
    size = tl.minimum((size + ROUND - 1) // ROUND * ROUND, BN)
    first = tl.cumsum(parts, 0) - parts
    b = tl.program_id(0)
    for j in tl.range(b, tl.max(parts, 0), tl.num_programs(0), num_stages=1):
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


@triton.jit(do_not_specialize=["tokens", "chunks", "blocks", "row_limit", "tile_limit"])
def place_kernel(ids, weights, rank_in, counts, row_token, token_row, token_weight, token_rows, tile_expert, tile_row,
                 tile_count, meta, tokens, chunks, blocks, row_limit, tile_limit, FIRST: tl.constexpr,
                 LOCAL: tl.constexpr, BINS: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, SIZE: tl.constexpr,
                 BN: tl.constexpr, ROUND: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Write the tile lists, row_token (rows), and per token its rows and weights in ascending expert order.

    meta: tiles, tiles and rows of the first window, rows, and a zeroed barrier counter.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for other in tl.range(0, blocks, BLOCKS, num_stages=1):
        o = other + tl.arange(0, BLOCKS)
        c = tl.load(counts + o[:, None] * BINS + bins[None, :], mask=(o < blocks)[:, None], other=0)
        total += tl.sum(c, 0)
        before += tl.sum(tl.where((o < b)[:, None], c, 0), 0)
    offset = tl.cumsum(total, 0) - total
    start = offset + before
    TOKENS: tl.constexpr = SIZE // KP
    slot = tl.arange(0, KP)
    for c in tl.range(0, chunks, num_stages=1):
        t = (b * chunks + c) * TOKENS + tl.arange(0, TOKENS)
        here = (t < tokens)[:, None] & (slot < TOPK)[None, :]
        e = local_ids(ids, t[:, None] * TOPK + slot[None, :], here, FIRST, LOCAL)
        rank = tl.load(rank_in + t[:, None] * KP + slot[None, :], mask=e >= 0, other=0)
        base = tl.gather(start, tl.reshape(tl.maximum(e, 0), (SIZE,)), 0)
        row = tl.reshape(base, (TOKENS, KP)) + rank
        # Rows ascend with the expert, so their order among a token's rows is the ascending expert id.
        key = tl.where(e >= 0, row, 1 << 30)
        order = tl.sum((tl.reshape(key, (TOKENS, KP, 1)) < tl.reshape(key, (TOKENS, 1, KP))).to(tl.int32), 1)
        w = tl.load(weights + t[:, None] * TOPK + slot[None, :], mask=e >= 0, other=0.0)
        at = t[:, None] * TOPK + order
        tl.store(token_row + at, row, mask=e >= 0)
        tl.store(token_weight + at, w, mask=e >= 0)
        tl.store(token_rows + t, tl.sum((e >= 0).to(tl.int32), 1), mask=t < tokens)
        tl.store(row_token + row, tl.broadcast_to(t[:, None], (TOKENS, KP)), mask=e >= 0)
    _write_tiles(total, offset, meta, tile_expert, tile_row, tile_count, row_limit, tile_limit, BINS, BN, ROUND)


@triton.jit(do_not_specialize=["tokens"])
def route_few_kernel(ids, weights, meta, tile_expert, tile_count, tile_dest, tile_weight, tokens, FIRST: tl.constexpr,
                     LOCAL: tl.constexpr, BINS: tl.constexpr, TOPK: tl.constexpr, PAIRS: tl.constexpr,
                     PART: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Tiles of at most COLUMNS pairs of one expert, for at most PAIRS pairs; each program places PART of them.

    Column n of tile i: tile_dest (i, n) = token * TOPK + place of the expert among the token's local ones in ascending
    order, and its weight. meta[0]: number of tiles.
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
    head = live & (column == 0)
    tl.store(tile_expert + tile, e, mask=head)
    tl.store(tile_count + tile, tl.minimum(tl.gather(counts, at, 0) - rank // COLUMNS * COLUMNS, COLUMNS), mask=head)
    if tl.program_id(0) == 0:
        tl.store(meta, tl.sum(parts, 0))
