# mypy: ignore-errors
"""Device code of the general chain after the sort: gate_up, down, combine, and rest for what the first window lacks.

Rows are (token, expert) pairs in expert order. The first window of tiles runs in gate_up and down, whose grid the host
sizes from an estimate; combine sums it. rest, one launch, takes the remaining tiles window by window.
"""

# I is the letter of the field; constexpr branches must stay statements of their own.
# ruff: noqa: E741, SIM102
from __future__ import annotations

import triton
import triton.language as tl

from cuda_moe import plan
from cuda_moe._tile_kernels import down_result, gate_up_result, narrow_product, wide_product

MOST_WIDTHS = tl.constexpr(plan.MOST_WIDTHS)


@triton.jit
def _store_h(h, value, row, live, first, HS: tl.constexpr, I: tl.constexpr, MT: tl.constexpr,
             H_NATURAL: tl.constexpr):  # fmt: skip
    """Store h by row; H_NATURAL: each 16 columns in the order in which `down` reads weights stored in lane order."""
    col = first * 8 + tl.arange(0, MT * 8)
    if H_NATURAL:
        # Columns t, a1, parity of each 16 move to a1, t, parity; the store stays contiguous.
        BN: tl.constexpr = value.shape[1]
        value = tl.permute(tl.reshape(value, (MT // 2, 4, 2, 2, BN)), (0, 2, 1, 3, 4))
        value = tl.reshape(value, (MT * 8, BN))
    keep = live[None, :] & (col < I)[:, None]
    tl.store(h + row[None, :].to(tl.int64) * HS + col[:, None], value.to(h.dtype.element_ty), mask=keep)


@triton.jit
def _store_y(y, acc, factor, bias, expert, row, live, first, H: tl.constexpr, MT: tl.constexpr, BIAS: tl.constexpr):
    col = first * 16 + tl.arange(0, MT * 16)
    value = down_result(acc, factor, bias, expert, col, H, BIAS)
    keep = live[None, :] & (col < H)[:, None]
    tl.store(y + row[None, :].to(tl.int64) * H + col[:, None], value.to(y.dtype.element_ty), mask=keep)


@triton.jit
def _narrow_gate_up(x, codes, scales, factor, bias, h, row_token, expert, r0, count, base, block, H: tl.constexpr,
                    I: tl.constexpr, HS: tl.constexpr, MT: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr,
                    STAGES: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr,
                    BIAS: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
                    P2: tl.constexpr):  # fmt: skip
    n = tl.arange(0, BN)
    live = n < count
    token = tl.load(row_token + r0 + n, mask=live, other=0).to(tl.int64)
    scale = tl.load(factor + expert)
    acc = narrow_product(
        x, token * H, live, codes, scales, expert, block * MT, H, I // 8, MT, BN, UNROLL, STAGES, 1, FORMAT, DECODE,
        MMA_ORDER, False,
    )  # fmt: skip
    value = gate_up_result(acc, scale, bias, expert, block * MT, I, MT, BN, BIAS, ACT, P0, P1, P2)
    _store_h(h, value, r0 - base + n, live, block * MT, HS, I, MT, False)


@triton.jit
def _narrow_down(h, codes, scales, factor, bias, y, expert, r0, count, base, block, H: tl.constexpr, I: tl.constexpr,
                 HS: tl.constexpr, MT: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
                 FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr,
                 BIAS: tl.constexpr):  # fmt: skip
    n = tl.arange(0, BN)
    live = n < count
    row = r0 - base + n
    scale = tl.load(factor + expert)
    acc = narrow_product(
        h, row.to(tl.int64) * HS, live, codes, scales, expert, block * MT, I, H // 16, MT, BN, UNROLL, STAGES, 1,
        FORMAT, DECODE, MMA_ORDER, False,
    )  # fmt: skip
    _store_y(y, acc, scale, bias, expert, row, live, block * MT, H, MT, BIAS)


@triton.jit
def _wide_gate_up_part(x, codes, scales, factor, bias, h, row_token, expert, r0, count, base, block,
                       H: tl.constexpr, I: tl.constexpr, HS: tl.constexpr, MT: tl.constexpr, BA: tl.constexpr,
                       BB: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, FORMAT: tl.constexpr,
                       DECODE: tl.constexpr, MMA_ORDER: tl.constexpr, WAIT: tl.constexpr, X_PERMUTED: tl.constexpr,
                       H_NATURAL: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
                       P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr):  # fmt: skip
    na = tl.arange(0, BA)
    nb = BA + tl.arange(0, BB if BB > 0 else BA)
    live_a, live_b = na < count, nb < count
    ta = tl.load(row_token + r0 + na, mask=live_a, other=0).to(tl.int64)
    tb = ta
    if BB > 0:
        tb = tl.load(row_token + r0 + nb, mask=live_b, other=0).to(tl.int64)
    acc_a, acc_b = wide_product(
        x, ta * H, live_a, tb * H, live_b, codes, scales, expert, block * MT, H, I // 8, MT, BA, BB, UNROLL, STAGES,
        FORMAT, DECODE, MMA_ORDER, X_PERMUTED, WAIT,
    )  # fmt: skip
    scale = tl.load(factor + expert)
    value = gate_up_result(acc_a, scale, bias, expert, block * MT, I, MT, BA, BIAS, ACT, P0, P1, P2)
    _store_h(h, value, r0 - base + na, live_a, block * MT, HS, I, MT, H_NATURAL)
    if BB > 0:
        value = gate_up_result(acc_b, scale, bias, expert, block * MT, I, MT, BB, BIAS, ACT, P0, P1, P2)
        _store_h(h, value, r0 - base + nb, live_b, block * MT, HS, I, MT, H_NATURAL)


@triton.jit
def _wide_down_part(h, codes, scales, factor, bias, y, expert, r0, count, base, block, H: tl.constexpr,
                    I: tl.constexpr, HS: tl.constexpr, MT: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
                    UNROLL: tl.constexpr, STAGES: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr,
                    MMA_ORDER: tl.constexpr, WAIT: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    na = tl.arange(0, BA)
    nb = BA + tl.arange(0, BB if BB > 0 else BA)
    live_a, live_b = na < count, nb < count
    row_a, row_b = r0 - base + na, r0 - base + nb
    acc_a, acc_b = wide_product(
        h, row_a.to(tl.int64) * HS, live_a, row_b.to(tl.int64) * HS, live_b, codes, scales, expert, block * MT, I,
        H // 16, MT, BA, BB, UNROLL, STAGES, FORMAT, DECODE, MMA_ORDER, False, WAIT,
    )  # fmt: skip
    scale = tl.load(factor + expert)
    _store_y(y, acc_a, scale, bias, expert, row_a, live_a, block * MT, H, MT, BIAS)
    if BB > 0:
        _store_y(y, acc_b, scale, bias, expert, row_b, live_b, block * MT, H, MT, BIAS)


@triton.jit
def _facts(tile_expert, tile_row, tile_count, tile):
    """Return expert, first row and rows of a tile; of a slot without one, whatever memory holds."""
    return tl.load(tile_expert + tile), tl.load(tile_row + tile), tl.load(tile_count + tile)


@triton.jit
def _gate_up_tile(x, codes, scales, factor, bias, h, row_token, facts, base, block,
                  H: tl.constexpr, I: tl.constexpr, HS: tl.constexpr, MT: tl.constexpr, BASES: tl.constexpr,
                  WIDTHS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
                  WIDE: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr,
                  WAIT: tl.constexpr, X_PERMUTED: tl.constexpr, H_NATURAL: tl.constexpr, BIAS: tl.constexpr,
                  ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr):  # fmt: skip
    """One tile: of the widths that ascend in the bytes of WIDTHS the least that holds its rows.

    Byte i of BASES is the greatest power of two in byte i of WIDTHS; one product has that width, a second one the rest.
    """
    e, r0, count = facts
    if not WIDE:
        _narrow_gate_up(x, codes, scales, factor, bias, h, row_token, e, r0, count, base, block, H, I, HS, MT,
                        WIDTHS & 255, UNROLL, STAGES, FORMAT, DECODE, MMA_ORDER, BIAS, ACT, P0, P1, P2)  # fmt: skip
    else:
        for i in tl.static_range(MOST_WIDTHS):
            if WIDTHS >> 8 * i > 0:
                if (count > (WIDTHS >> 8 * i - 8 & 255 if i > 0 else 0)) & (count <= (WIDTHS >> 8 * i & 255)):
                    _wide_gate_up_part(x, codes, scales, factor, bias, h, row_token, e, r0, count, base, block, H, I,
                                       HS, MT, BASES >> 8 * i & 255, WIDTHS - BASES >> 8 * i & 255, UNROLL, STAGES,
                                       FORMAT, DECODE, MMA_ORDER, WAIT, X_PERMUTED, H_NATURAL, BIAS, ACT, P0, P1,
                                       P2)  # fmt: skip


@triton.jit
def _down_tile(h, codes, scales, factor, bias, y, facts, base, block,
               H: tl.constexpr, I: tl.constexpr, HS: tl.constexpr, MT: tl.constexpr, BASES: tl.constexpr,
               WIDTHS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
               WIDE: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr,
               WAIT: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    e, r0, count = facts
    if not WIDE:
        _narrow_down(h, codes, scales, factor, bias, y, e, r0, count, base, block, H, I, HS, MT, WIDTHS & 255, UNROLL,
                     STAGES, FORMAT, DECODE, MMA_ORDER, BIAS)  # fmt: skip
    else:
        for i in tl.static_range(MOST_WIDTHS):
            if WIDTHS >> 8 * i > 0:
                if (count > (WIDTHS >> 8 * i - 8 & 255 if i > 0 else 0)) & (count <= (WIDTHS >> 8 * i & 255)):
                    _wide_down_part(h, codes, scales, factor, bias, y, e, r0, count, base, block, H, I, HS, MT,
                                    BASES >> 8 * i & 255, WIDTHS - BASES >> 8 * i & 255, UNROLL, STAGES, FORMAT,
                                    DECODE, MMA_ORDER, WAIT, BIAS)  # fmt: skip


@triton.jit
def gate_up_kernel(x, codes, scales, factor, bias, h, row_token, tile_expert, tile_row, tile_count, meta,
                   H: tl.constexpr, I: tl.constexpr, HS: tl.constexpr, MT: tl.constexpr, BASES: tl.constexpr,
                   WIDTHS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
                   WIDE: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr,
                   WAIT: tl.constexpr, X_PERMUTED: tl.constexpr, H_NATURAL: tl.constexpr, BIAS: tl.constexpr,
                   ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
                   LOOP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """H = activation(w13 · x) of the first window; grid (blocks of 16 * MT rows, tile slots).

    LOOP: programs go on to further tiles, so any number of slots will do. A loop around a wide tile costs registers
    that it needs; without it the window has at most as many tiles as there are slots.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, tile, tiles = tl.program_id(0), tl.program_id(1), tl.load(meta + 1)
    if not LOOP:
        # Loaded beside the bound that says whether they count, not after it.
        facts = _facts(tile_expert, tile_row, tile_count, tile)
        if tile < tiles:
            _gate_up_tile(x, codes, scales, factor, bias, h, row_token, facts, 0,
                          block, H, I, HS, MT, BASES, WIDTHS, UNROLL, STAGES, WIDE, FORMAT, DECODE, MMA_ORDER,
                          WAIT, X_PERMUTED, H_NATURAL, BIAS, ACT, P0, P1, P2)  # fmt: skip
    else:
        for more in tl.range(tile, tiles, tl.num_programs(1), num_stages=1):
            _gate_up_tile(x, codes, scales, factor, bias, h, row_token,
                          _facts(tile_expert, tile_row, tile_count, more), 0,
                          block, H, I, HS, MT, BASES, WIDTHS, UNROLL, STAGES, WIDE, FORMAT, DECODE, MMA_ORDER,
                          WAIT, X_PERMUTED, H_NATURAL, BIAS, ACT, P0, P1, P2)  # fmt: skip


@triton.jit
def down_kernel(h, codes, scales, factor, bias, y, tile_expert, tile_row, tile_count, meta, H: tl.constexpr,
                I: tl.constexpr, HS: tl.constexpr, MT: tl.constexpr, BASES: tl.constexpr, WIDTHS: tl.constexpr,
                UNROLL: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
                FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr, WAIT: tl.constexpr,
                BIAS: tl.constexpr, LOOP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Y = w2 · h of the first window, bf16 rows; grid (blocks of 16 * MT rows of w2, tile slots)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, tile, tiles = tl.program_id(0), tl.program_id(1), tl.load(meta + 1)
    if not LOOP:
        # Loaded beside the bound that says whether they count, not after it.
        facts = _facts(tile_expert, tile_row, tile_count, tile)
        if tile < tiles:
            _down_tile(h, codes, scales, factor, bias, y, facts, 0, block, H, I, HS,
                       MT, BASES, WIDTHS, UNROLL, STAGES, WIDE, FORMAT, DECODE, MMA_ORDER, WAIT, BIAS)  # fmt: skip
    else:
        for more in tl.range(tile, tiles, tl.num_programs(1), num_stages=1):
            _down_tile(h, codes, scales, factor, bias, y, _facts(tile_expert, tile_row, tile_count, more), 0, block,
                       H, I, HS,
                       MT, BASES, WIDTHS, UNROLL, STAGES, WIDE, FORMAT, DECODE, MMA_ORDER, WAIT, BIAS)  # fmt: skip


@triton.jit
def _add_row(acc, y, token_row, token_weight, at, live, low, high, col, keep, H: tl.constexpr):
    """Add one of the token's rows if it lies in [low, high), times its weight."""
    row = tl.load(token_row + at, mask=live, other=-1)
    inside = (row >= low) & (row < high)
    w = tl.load(token_weight + at, mask=inside, other=0.0)
    # Compared as blocks: Triton's interpreter makes integers of a boolean that it spreads over a block.
    rows = row + col * 0
    v = tl.load(y + (row - low).to(tl.int64) * H + col, mask=keep & (rows >= low) & (rows < high), other=0.0)
    return acc + v.to(tl.float32) * w


@triton.jit
def _combine(y, token_row, token_weight, token_rows, out, low_half, t, block, low, high, H: tl.constexpr,
             TOPK: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """Add the rows in [low, high) of token t to its float32 sum, in ascending expert order.

    A sum that is not complete is kept exactly: its upper 16 bits in `out`, its lower 16 bits in `low_half`. It is
    rounded once, when its last row has been added.
    """
    t = t.to(tl.int64)
    n = tl.load(token_rows + t)
    col = block * BLOCK + tl.arange(0, BLOCK)
    keep = col < H
    at = t * H + col
    first = tl.load(token_row + t * TOPK, mask=n > 0, other=0)
    last = tl.load(token_row + t * TOPK + n - 1, mask=n > 0, other=-1)
    begun = (n > 0) & (first < low)
    done = last < high
    if (low == 0) | ((n > 0) & (last >= low) & (first < high)):
        acc = tl.zeros((BLOCK,), tl.float32)
        if begun:
            upper = tl.load((out + at).to(tl.pointer_type(tl.uint16)), mask=keep, other=0).to(tl.uint32)
            lower = tl.load(low_half + at, mask=keep, other=0).to(tl.uint32)
            acc = ((upper << 16) | lower).to(tl.float32, bitcast=True)
        for i in tl.static_range(UNROLL):
            acc = _add_row(acc, y, token_row, token_weight, t * TOPK + i, n > i, low, high, col, keep, H)
        if UNROLL < TOPK:
            for i in tl.range(UNROLL, n, num_stages=1):
                acc = _add_row(acc, y, token_row, token_weight, t * TOPK + i, n > i, low, high, col, keep, H)
        if done:
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=keep)
        else:
            bits = acc.to(tl.uint32, bitcast=True)
            tl.store((out + at).to(tl.pointer_type(tl.uint16)), (bits >> 16).to(tl.uint16), mask=keep)
            tl.store(low_half + at, (bits & 0xFFFF).to(tl.uint16), mask=keep)


@triton.jit
def combine_kernel(y, token_row, token_weight, token_rows, meta, out, low_half, H: tl.constexpr, TOPK: tl.constexpr,
                   BLOCK: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Sum the first window's rows of each token; grid (tokens, blocks of columns)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _combine(y, token_row, token_weight, token_rows, out, low_half, tl.program_id(0), tl.program_id(1), 0,
             tl.load(meta + 2), H, TOPK, BLOCK, UNROLL)  # fmt: skip


@triton.jit
def _grid_barrier(counter, target):
    """Wait until every program of the launch came here; all of them are resident (cooperative launch)."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel")
    while tl.atomic_add(counter, 0, sem="acquire") < target:
        pass
    tl.debug_barrier()


@triton.jit
def _window_end(tile_row, tile_count, first, tiles, limit):
    """Return the first tile behind the window that starts at `first` and ends at row `limit`."""
    end = first
    more = True
    while more:
        j = end + tl.arange(0, 256)
        row = tl.load(tile_row + j, mask=j < tiles, other=0) + tl.load(tile_count + j, mask=j < tiles, other=0)
        fit = tl.sum(((j < tiles) & (row <= limit)).to(tl.int32), 0)
        end += fit
        more = fit == 256
    return end


@triton.jit(do_not_specialize=["tokens", "capacity"])
def rest_kernel(x, codes1, scales1, factor1, bias1, codes2, scales2, factor2, bias2, h, y, low_half, out, row_token,
                token_row, token_weight, token_rows, tile_expert, tile_row, tile_count, meta, tokens, capacity,
                H: tl.constexpr, I: tl.constexpr, HS: tl.constexpr, MT1: tl.constexpr, MT2: tl.constexpr,
                BASES: tl.constexpr, WIDTHS: tl.constexpr, UNROLL1: tl.constexpr,
                UNROLL2: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr, FORMAT: tl.constexpr,
                DECODE: tl.constexpr, MMA_ORDER: tl.constexpr, WAIT: tl.constexpr, X_PERMUTED: tl.constexpr,
                H_NATURAL: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
                P2: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """All windows behind the first, `capacity` rows each; a cooperative launch, over at once if there are none."""
    tiles = tl.load(meta)
    first = tl.load(meta + 1)
    NB1: tl.constexpr = (I // 8 + MT1 - 1) // MT1
    NB2: tl.constexpr = (H // 16 + MT2 - 1) // MT2
    NB3: tl.constexpr = (H + BLOCK - 1) // BLOCK
    programs = tl.num_programs(0)
    arrived = programs * 0
    while first < tiles:
        base = tl.load(tile_row + first)
        end = _window_end(tile_row, tile_count, first, tiles, base + capacity)
        for work in tl.range(tl.program_id(0), (end - first) * NB1, programs, num_stages=1):
            _gate_up_tile(x, codes1, scales1, factor1, bias1, h, row_token,
                          _facts(tile_expert, tile_row, tile_count, first + work // NB1), base,
                          work % NB1, H, I, HS, MT1, BASES, WIDTHS, UNROLL1, STAGES, WIDE,
                          FORMAT, DECODE, MMA_ORDER, WAIT, X_PERMUTED, H_NATURAL, BIAS, ACT, P0, P1, P2)  # fmt: skip
        arrived += programs
        _grid_barrier(meta + 4, arrived)
        for work in tl.range(tl.program_id(0), (end - first) * NB2, programs, num_stages=1):
            _down_tile(h, codes2, scales2, factor2, bias2, y,
                       _facts(tile_expert, tile_row, tile_count, first + work // NB2), base,
                       work % NB2, H, I, HS, MT2, BASES, WIDTHS, UNROLL2, STAGES, WIDE, FORMAT, DECODE, MMA_ORDER,
                       WAIT, BIAS)  # fmt: skip
        arrived += programs
        _grid_barrier(meta + 4, arrived)
        top = tl.load(tile_row + end - 1) + tl.load(tile_count + end - 1)
        for work in tl.range(tl.program_id(0), tokens * NB3, programs, num_stages=1):
            # A loop's index is a plain int to the interpreter; the sum makes it a tensor there too.
            t = work // NB3 + 0 * first
            _combine(y, token_row, token_weight, token_rows, out, low_half, t, work % NB3, base, top, H,
                     TOPK, BLOCK, 1)  # fmt: skip
        arrived += programs
        _grid_barrier(meta + 4, arrived)
        first = end
