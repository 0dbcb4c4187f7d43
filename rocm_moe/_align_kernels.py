# mypy: ignore-errors
"""Device code: routed (token, slot) pairs to rows sorted by expert, stable and without atomics.

A pair is token · TOP_K + slot. Pairs whose expert is -1 or elsewhere get no row. Rows of one expert keep the order of
their pairs, so the maps are the same in every run.

Pairs come in blocks of TOKENS tokens with SLOTS >= TOP_K slots, a power of two in all, and blocks in chunks. The first
launch counts each chunk's pairs per expert and ranks every pair among the equal ones before it in its chunk. The second
adds up the chunks: a pair's row is the rows of lower experts, those of its expert in earlier chunks, and its rank.
A call of one block needs the second launch only (ONE_BLOCK).
"""

import triton
import triton.language as tl

from rocm_moe.triton_compat import GATHER_NEEDS_AN_ENTRY_AN_INDEX

#: More than the pairs of a chunk, see plan.MOST_BLOCKS.
RANKS = tl.constexpr(1 << 15)
REPEAT = tl.constexpr(GATHER_NEEDS_AN_ENTRY_AN_INDEX)


@triton.jit
def look_up(table, index):
    """table[index], of two powers of two."""
    if REPEAT and (table.shape[0] < index.shape[0]):
        shape: tl.constexpr = (index.shape[0] // table.shape[0], table.shape[0])
        table = tl.reshape(tl.broadcast_to(table[None, :], shape), index.shape)
    return tl.gather(table, index, 0)


@triton.jit
def block_pairs(block, tokens, TOP_K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr):
    """Pair numbers of a block and which exist, both [TOKENS · SLOTS]."""
    lane = tl.arange(0, TOKENS * SLOTS)
    token = block * TOKENS + lane // SLOTS
    slot = lane % SLOTS
    return token * TOP_K + slot, (token < tokens) & (slot < TOP_K)


@triton.jit
def local_experts(ids, pair, there, first_expert, E_LOCAL: tl.constexpr):
    """Experts of pairs as numbers on this rank, E_LOCAL where there is none."""
    expert = tl.load(ids + pair, mask=there, other=-1) - first_expert
    return tl.where(there & (expert >= 0) & (expert < E_LOCAL), expert, E_LOCAL).to(tl.int32)


@triton.jit
def rank_in_block(expert, pairs, STEP: tl.constexpr):
    """How many pairs before each of a block's have the same expert: all against the first `pairs`, STEP at a time."""
    PAIRS: tl.constexpr = expert.shape[0]
    lane = tl.arange(0, PAIRS)
    rank = tl.zeros((PAIRS,), tl.int32)
    for start in range(0, tl.minimum(pairs, PAIRS), STEP):
        other = start + tl.arange(0, STEP)
        # The same expert and a lower place in the block, as one comparison without sign.
        key = look_up(expert, other) * PAIRS + other
        distance = key[:, None] - (expert * PAIRS)[None, :]
        before = distance.to(tl.uint32, bitcast=True) < lane.to(tl.uint32, bitcast=True)[None, :]
        rank += tl.sum(before.to(tl.int32), 0)
    return rank


@triton.jit
def count_pairs(ids, counts, ranked, tokens, first_expert, blocks, E_LOCAL: tl.constexpr, BINS: tl.constexpr,
                TOP_K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, RANK_STEP: tl.constexpr):  # fmt: skip
    """Count and rank the pairs of one chunk of `blocks` blocks; grid (chunks,).

    counts: (chunks, BINS) int16, bin E_LOCAL takes the pairs without a row
    ranked: (pairs,) int32 of expert · RANKS + rank
    """
    chunk = tl.program_id(0)
    total = tl.zeros((BINS,), tl.int32)
    for block in range(chunk * blocks, (chunk + 1) * blocks):
        pair, there = block_pairs(block, tokens, TOP_K, SLOTS, TOKENS)
        expert = local_experts(ids, pair, there, first_expert, E_LOCAL)
        rank = rank_in_block(expert, (tokens - block * TOKENS) * SLOTS, RANK_STEP)
        rank += look_up(total, expert)
        tl.store(ranked + pair, expert * RANKS + rank, mask=there)
        total += tl.histogram(expert, BINS)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), total.to(tl.int16))


@triton.jit
def add_chunks(counts, chunks, chunk, BINS: tl.constexpr, STEP: tl.constexpr):
    """Pairs of each expert in all chunks and in those before `chunk`, both [BINS]."""
    step = tl.arange(0, STEP)
    bins = tl.arange(0, BINS)
    total = tl.zeros((STEP, BINS), tl.int32)
    before = tl.zeros((STEP, BINS), tl.int32)
    for start in range(0, chunks, STEP):
        row = start + step
        part = tl.load(counts + (row[:, None] * BINS + bins[None, :]), mask=(row < chunks)[:, None], other=0)
        total += part.to(tl.int32)
        before += tl.where((row < chunk)[:, None], part.to(tl.int32), 0)
    return tl.sum(total, 0), tl.sum(before, 0)


@triton.jit
def window_size(total, whole, divided):
    """Rows of a window: `whole` if everything fits in one, else `divided`, which leaves room to carry sums."""
    return tl.where(total <= whole, whole, divided)


@triton.jit
def place_block(expert, rank, start, rows, weights, row_token, row_slot, row_expert, token_rows, token_weights,
                token_count, block, tokens, first_expert, E_LOCAL: tl.constexpr, TOP_K: tl.constexpr,
                SLOTS: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Write the maps of a block: row to pair, and per token its rows in ascending order (ascending expert)."""
    pair, there = block_pairs(block, tokens, TOP_K, SLOTS, TOKENS)
    here = expert < E_LOCAL
    row = tl.where(here, look_up(start, expert) + rank, 0x7FFFFFFF)
    tl.store(row_token + row, pair // TOP_K, mask=here)
    tl.store(row_slot + row, pair % TOP_K, mask=here)
    tl.store(row_expert + row, expert + first_expert, mask=here)
    # Rows that do not exist point at token 0, so that a hook may index with the whole map.
    beyond = there & (pair >= rows)
    nothing = tl.zeros_like(pair)
    tl.store(row_token + pair, nothing, mask=beyond)
    tl.store(row_slot + pair, nothing, mask=beyond)
    tl.store(row_expert + pair, nothing - 1, mask=beyond)

    weight = tl.load(weights + pair, mask=here, other=0.0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    sorted_row = tl.reshape(row, (TOKENS, SLOTS))
    lower = tl.reshape(row, (TOKENS, 1, SLOTS)) < tl.reshape(row, (TOKENS, SLOTS, 1))
    target = token[:, None] * TOP_K + tl.sum(lower.to(tl.int32), 2)
    exists = sorted_row < 0x7FFFFFFF
    tl.store(token_rows + target, sorted_row, mask=exists)
    tl.store(token_weights + target, tl.reshape(weight, (TOKENS, SLOTS)), mask=exists)
    tl.store(token_count + token, tl.sum(exists.to(tl.int32), 1), mask=token < tokens)


@triton.jit
def list_tiles(total, rows, tiles, window_rows, window, part, slots, whole, divided, tile_rows, E_LOCAL: tl.constexpr,
               BINS: tl.constexpr, TILE_PROGRAMS: tl.constexpr):  # fmt: skip
    """One of TILE_PROGRAMS parts of a window's tiles: (expert, first row within the window, rows); rows 0: surplus."""
    bins = tl.arange(0, BINS)
    count = tl.where(bins < E_LOCAL, total, 0)
    size = window_size(rows, whole, divided)
    base = window * size
    first = tl.cumsum(count, 0) - count - base
    end = tl.minimum(tl.maximum(first + count, 0), size)
    first = tl.minimum(tl.maximum(first, 0), size)
    parts = (end - first + tile_rows - 1) // tile_rows
    slot = window * slots + tl.cumsum(parts, 0) - parts
    for i in range(part, tl.max(parts, 0), TILE_PROGRAMS):
        record = tiles + (slot + i) * 4
        row = first + i * tile_rows
        tl.store(record, bins, mask=i < parts)
        tl.store(record + 1, row, mask=i < parts)
        tl.store(record + 2, tl.minimum(end - row, tile_rows), mask=i < parts)
    for surplus in range(tl.sum(parts, 0) + part * BINS, slots, TILE_PROGRAMS * BINS):
        unused = surplus + bins
        tl.store(tiles + (window * slots + unused) * 4 + 2, tl.zeros_like(bins), mask=unused < slots)
    if part == 0:
        tl.store(window_rows + window, tl.minimum(tl.maximum(rows - base, 0), size))


@triton.jit
def place_pairs(ids, weights, counts, ranked, total_rows, row_token, row_slot, row_expert, token_rows, token_weights,
                token_count, tiles, window_rows, tokens, first_expert, chunks, blocks, slots, whole, divided, tile_rows,
                E_LOCAL: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
                TOKENS: tl.constexpr, RANK_STEP: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr,
                TILE_PROGRAMS: tl.constexpr, ONE_BLOCK: tl.constexpr):  # fmt: skip
    """What the later kernels look up, BLOCKS blocks at a time; grid (chunks + windows · TILE_PROGRAMS,)."""
    program = tl.program_id(0)
    if ONE_BLOCK:
        pair, there = block_pairs(0, tokens, TOP_K, SLOTS, TOKENS)
        expert = local_experts(ids, pair, there, first_expert, E_LOCAL)
        total = tl.histogram(expert, BINS)
        before = tl.zeros((BINS,), tl.int32)
    else:
        total, before = add_chunks(counts, chunks, program, BINS, STEP)
    rows = tl.sum(tl.where(tl.arange(0, BINS) < E_LOCAL, total, 0), 0)
    if program < chunks:
        start = tl.cumsum(total, 0) - total + before
        if program == 0:
            tl.store(total_rows, rows)
        if ONE_BLOCK:
            rank = rank_in_block(expert, tokens * SLOTS, RANK_STEP)
            place_block(expert, rank, start, rows, weights, row_token, row_slot, row_expert, token_rows, token_weights,
                        token_count, 0, tokens, first_expert, E_LOCAL, TOP_K, SLOTS, TOKENS)  # fmt: skip
        else:
            MANY: tl.constexpr = TOKENS * BLOCKS
            for block in range(program * blocks // BLOCKS, (program + 1) * blocks // BLOCKS):
                pair, there = block_pairs(block, tokens, TOP_K, SLOTS, MANY)
                found = tl.load(ranked + pair, mask=there, other=E_LOCAL * RANKS)
                place_block(found // RANKS, found % RANKS, start, rows, weights, row_token, row_slot, row_expert,
                            token_rows, token_weights, token_count, block, tokens, first_expert, E_LOCAL, TOP_K, SLOTS,
                            MANY)  # fmt: skip
    else:
        tile_program = program - chunks
        list_tiles(total, rows, tiles, window_rows, tile_program // TILE_PROGRAMS, tile_program % TILE_PROGRAMS, slots,
                   whole, divided, tile_rows, E_LOCAL, BINS, TILE_PROGRAMS)  # fmt: skip
