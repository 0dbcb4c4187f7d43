# mypy: ignore-errors
"""Device code: the weighted sum of a token's rows, in float32 and in ascending expert id, rounded once."""

import triton
import triton.language as tl

from rocm_moe._align_kernels import window_size
from rocm_moe._decode_kernels import round_to_bf16


@triton.jit
def combine(y, token_rows, token_weights, token_count, total_rows, carry, out, tokens, window, whole, divided, capacity,
            splits, TOP_K: tl.constexpr, H: tl.constexpr, COLUMNS: tl.constexpr,
            PARTIAL: tl.constexpr, DECODE: tl.constexpr):  # fmt: skip
    """out[t] = sum over t's rows r, ascending, of weight[t, r]·y[r].

    Programs take blocks of one token and COLUMNS columns in turn, see `_activation_kernels.activate`.

    Rows are sorted by expert, so windows follow each other in ascending order. While rows of later windows are
    missing, the float32 sum waits, its high half in `out` and its low half in `carry` [T, H]: the additions are those
    of a single window, one by one.
    PARTIAL: y is float32 [splits, capacity, H], added in order of splits before it is weighted.
    """
    COLUMN_BLOCKS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    total = tl.load(total_rows)
    size = window_size(total, whole, divided)
    base = window * size
    if (window > 0) & (base >= total):
        return
    for block in range(tl.program_id(0), tokens * COLUMN_BLOCKS, tl.num_programs(0)):
        token = block // COLUMN_BLOCKS
        column = block % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < H
        count = tl.load(token_count + token)
        first = tl.load(token_rows + token * TOP_K, mask=count > 0, other=0x7FFFFFFF)
        target = token.to(tl.int64) * H + column

        nowhere = tl.zeros_like(column)
        first = nowhere + first
        waiting = inside & (first < base)
        high = tl.load(out + target, mask=waiting, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(carry + target, mask=waiting, other=0).to(tl.int32)
        acc = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
        for i in range(0, count, 4):
            for u in tl.static_range(4):
                row = tl.load(token_rows + token * TOP_K + i + u, mask=i + u < count, other=0) - base
                weight = tl.load(token_weights + token * TOP_K + i + u, mask=i + u < count, other=0.0)
                here = (i + u < count) & (row >= 0) & (row < size)
                # As a vector, because the interpreter mistypes a mask made of a vector and a scalar.
                mask = inside & (nowhere + here.to(tl.int32) > 0)
                source = y + tl.where(here, row, 0).to(tl.int64) * H + column
                value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
                if PARTIAL:
                    for _ in range(1, splits):
                        source += capacity.to(tl.int64) * H
                        value += tl.load(source, mask=mask, other=0.0)
                acc = tl.fma(value, nowhere.to(tl.float32) + tl.where(here, weight, 0.0), acc)
        if base + size >= total:
            tl.store(out + target, round_to_bf16(acc, DECODE, ANY_NAN=True), mask=inside)
        else:
            bits = acc.to(tl.int32, bitcast=True)
            kept = inside & (first < base + size)
            tl.store(out + target, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=kept)
            tl.store(carry + target, bits.to(tl.int16), mask=kept)
