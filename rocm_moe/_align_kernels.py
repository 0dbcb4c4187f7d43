# mypy: ignore-errors
"""Device code: routed (token, slot) pairs to rows sorted by expert, in two launches, stable and without atomics.

A pair is token · TOP_K + slot. Pairs whose expert is -1 or elsewhere get no row. Rows of one expert keep the order of
their pairs, so the maps are the same in every run.
"""

import triton
import triton.language as tl


@triton.jit
def place(pair, mine, row, expert, pair_row, row_token, row_slot, row_expert, TOP_K: tl.constexpr):
    """Give the pairs that are `mine` the rows from `row` on; returns the next free row."""
    count = mine.to(tl.int32)
    position = row + tl.cumsum(count, 0) - count
    tl.store(pair_row + pair, position, mask=mine)
    tl.store(row_token + position, pair // TOP_K, mask=mine)
    tl.store(row_slot + position, pair % TOP_K, mask=mine)
    tl.store(row_expert + position, tl.zeros_like(pair) + expert, mask=mine)
    return row + tl.sum(count, 0)


@triton.jit
def sort_pairs(ids, offsets, pair_row, row_token, row_slot, row_expert, pairs, first_expert,
               TOP_K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Place the pairs of one local expert; grid (E_local,).

    First pass: count the pairs of lower local experts, which is where this expert's rows begin. Second pass: number its
    own pairs in order.
    """
    local = tl.program_id(0)
    expert = first_expert + local
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, 4 * BLOCK):
        for u in tl.static_range(4):
            pair = start + u * BLOCK + lane
            chosen = tl.load(ids + pair, mask=pair < pairs, other=-1)
            lower += ((chosen >= first_expert) & (chosen < expert)).to(tl.int32)
    row = tl.sum(lower, 0)
    tl.store(offsets + local, row)
    for start in range(0, pairs, 4 * BLOCK):
        pair = start + lane
        # All four loads before the first sum, which waits for all threads.
        c0 = tl.load(ids + pair, mask=pair < pairs, other=-1)
        c1 = tl.load(ids + pair + BLOCK, mask=pair + BLOCK < pairs, other=-1)
        c2 = tl.load(ids + pair + 2 * BLOCK, mask=pair + 2 * BLOCK < pairs, other=-1)
        c3 = tl.load(ids + pair + 3 * BLOCK, mask=pair + 3 * BLOCK < pairs, other=-1)
        row = place(pair, c0 == expert, row, expert, pair_row, row_token, row_slot, row_expert, TOP_K)
        if start + BLOCK < pairs:
            row = place(pair + BLOCK, c1 == expert, row, expert, pair_row, row_token, row_slot, row_expert, TOP_K)
        if start + 2 * BLOCK < pairs:
            row = place(pair + 2 * BLOCK, c2 == expert, row, expert, pair_row, row_token, row_slot, row_expert, TOP_K)
            row = place(pair + 3 * BLOCK, c3 == expert, row, expert, pair_row, row_token, row_slot, row_expert, TOP_K)
    if local == tl.num_programs(0) - 1:
        tl.store(offsets + local + 1, row)


@triton.jit
def window_size(total, whole, divided):
    """Rows of a window: `whole` if everything fits in one, else `divided`, which leaves room to carry sums."""
    return tl.where(total <= whole, whole, divided)


@triton.jit
def index_tokens(ids, weights, offsets, pair_row, row_token, row_slot, row_expert, token_rows, token_weights,
                 token_count, block, tokens, first_expert, E_LOCAL: tl.constexpr, TOP_K: tl.constexpr,
                 SLOTS: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """For TOKENS tokens: their rows in ascending order (ascending expert), with weights, and how many there are."""
    token = block * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)
    valid = (token < tokens)[:, None] & (slot < TOP_K)[None, :]
    pair = token[:, None] * TOP_K + slot[None, :]
    chosen = tl.load(ids + pair, mask=valid, other=-1)
    here = (chosen >= first_expert) & (chosen < first_expert + E_LOCAL)
    row = tl.load(pair_row + pair, mask=here, other=0x7FFFFFFF)
    weight = tl.load(weights + pair, mask=here, other=0.0)
    lower = tl.reshape(row, (TOKENS, 1, SLOTS)) < tl.reshape(row, (TOKENS, SLOTS, 1))
    target = token[:, None] * TOP_K + tl.sum(lower.to(tl.int32), 2)
    tl.store(token_rows + target, row, mask=here)
    tl.store(token_weights + target, weight, mask=here)
    tl.store(token_count + token, tl.sum(here.to(tl.int32), 1), mask=token < tokens)
    # Rows that do not exist point at token 0, so that a hook may index with the whole map.
    beyond = valid & (pair >= tl.load(offsets + E_LOCAL))
    nothing = tl.zeros_like(pair)
    tl.store(row_token + pair, nothing, mask=beyond)
    tl.store(row_slot + pair, nothing, mask=beyond)
    tl.store(row_expert + pair, nothing - 1, mask=beyond)


@triton.jit
def list_tiles(offsets, tiles, window_rows, block, blocks_a_window, whole, divided, tile_rows, E_LOCAL: tl.constexpr,
               E_PADDED: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """TILES tile slots of one window: (expert, first row within the window, rows); rows is 0 in surplus slots."""
    window = block // blocks_a_window
    total = tl.load(offsets + E_LOCAL)
    size = window_size(total, whole, divided)
    base = window * size
    expert = tl.arange(0, E_PADDED)
    begin = tl.load(offsets + expert, mask=expert < E_LOCAL, other=0x7FFFFFFF)
    end = tl.load(offsets + expert + 1, mask=expert < E_LOCAL, other=0x7FFFFFFF)
    begin = tl.minimum(tl.maximum(begin - base, 0), size)
    end = tl.minimum(tl.maximum(end - base, 0), size)
    last_tile = tl.cumsum((end - begin + tile_rows - 1) // tile_rows, 0)

    slot = block % blocks_a_window * TILES + tl.arange(0, TILES)
    before = last_tile[None, :] <= slot[:, None]
    owner = tl.sum(before.to(tl.int32), 1)
    tile = slot - tl.max(tl.where(before, last_tile[None, :], 0), 1)
    mine = expert[None, :] == owner[:, None]
    first = tl.sum(tl.where(mine, begin[None, :], 0), 1) + tile * tile_rows
    rows = tl.sum(tl.where(mine, end[None, :], 0), 1) - first
    rows = tl.where(owner < E_LOCAL, tl.minimum(tl.maximum(rows, 0), tile_rows), 0)
    record = tiles + (block * TILES + tl.arange(0, TILES)) * 4
    tl.store(record, owner)
    tl.store(record + 1, first)
    tl.store(record + 2, rows)
    if block % blocks_a_window == 0:
        tl.store(window_rows + window, tl.minimum(tl.maximum(total - base, 0), size))


@triton.jit
def index_rows(ids, weights, offsets, pair_row, row_token, row_slot, row_expert, token_rows, token_weights, token_count,
               tiles, window_rows, tokens, first_expert, token_blocks, blocks_a_window, whole, divided, tile_rows,
               E_LOCAL: tl.constexpr, E_PADDED: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
               TOKENS: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """What the later kernels look up; grid (token blocks + windows · tile blocks of a window,)."""
    block = tl.program_id(0)
    if block < token_blocks:
        index_tokens(ids, weights, offsets, pair_row, row_token, row_slot, row_expert, token_rows, token_weights,
                     token_count, block, tokens, first_expert, E_LOCAL, TOP_K, SLOTS, TOKENS)  # fmt: skip
    else:
        list_tiles(offsets, tiles, window_rows, block - token_blocks, blocks_a_window, whole, divided, tile_rows,
                   E_LOCAL, E_PADDED, TILES)  # fmt: skip
