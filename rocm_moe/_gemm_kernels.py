# mypy: ignore-errors
# ruff: noqa: D403, SIM102 - Triton compiles these forms, not the ones that ruff prefers
"""Device code: grouped products of routed rows with MXFP4 experts, decoded in registers.

    out[row, n] = bias[e, n] + sum_k x[source(row), k] · w[e, n, k]      for every row of expert e

A program owns BN weight rows and one tile of up to BM routed rows. The weights are the first operand of the dot, so the
accumulator is [BN, BM], a lane holds one weight row (one scale a lane), and the decoded numbers go from registers
into the matrix instruction without shared memory. Rows past the tile's end read the last row again and are not
stored: a column of the accumulator depends on its own row only.

Shapes: K a multiple of 32; N a multiple of 16. `steps` 128-wide K blocks are one split's share; the last split also
takes what is left of K. PARTIAL: every split writes its float32 sums, in order of splits, for the next kernel to add.
"""

import triton
import triton.language as tl

from rocm_moe._decode_kernels import (
    decode_fragments,
    decode_words,
    exponent_twice,
    fragment_scale,
    round_to_bf16,
    undo_factor,
)


@triton.jit
def store_rows(acc, out, bias, flags, row_exponents, expert, columns, first, m, stored, capacity, N: tl.constexpr,
               BN: tl.constexpr, BIAS: tl.constexpr, PARTIAL: tl.constexpr, DECODE: tl.constexpr):  # fmt: skip
    """Undo the exponents that decoding left, add the bias (in split 0) and write acc [BN, BM] to rows of `out`."""
    split = tl.program_id(1)
    inside = columns < N
    acc *= undo_factor(DECODE)
    if tl.load(flags + expert) != 0:
        # Rare: rows with scales near the end of the range were stored smaller by a power of two; 255 marks NaN.
        exponent = tl.load(row_exponents + expert * N + columns, mask=inside, other=0).to(tl.int32)
        power = tl.where(exponent == 255, 0x7FC00000, (127 + exponent) << 23).to(tl.float32, bitcast=True)
        acc *= power[:, None]
    if BIAS:
        b = tl.load(bias + expert * N + columns, mask=inside, other=0.0)
        acc += tl.where(split == 0, b, 0.0)[:, None]
    block = tl.trans(acc)
    # One 64-bit base, 32-bit offsets within the tile.
    base = out + first.to(tl.int64) * N
    if PARTIAL:
        base += split.to(tl.int64) * capacity * N
    target = base + (m[:, None] * N + columns[None, :])
    mask = stored[:, None]
    if N % BN != 0:
        mask = mask & inside[None, :]
    if PARTIAL:
        tl.store(target, block, mask=mask)
    else:
        tl.store(target, round_to_bf16(block, DECODE), mask=mask)


@triton.jit
def load_rows(pointers, DECODE: tl.constexpr):
    x = tl.load(pointers)
    if DECODE == "interpret":
        x = x.to(tl.float32)
    return x


@triton.jit
def multiply_whole(acc, words, exponent, x_rows, DECODE: tl.constexpr):
    """acc [BN, BM] plus a 128-wide block at once, in K order: few, large operations for the interpreter."""
    BN: tl.constexpr = acc.shape[0]
    word = tl.reshape(tl.permute(tl.reshape(words, (BN // 16, 4, 16, 4)), (0, 2, 1, 3)), (BN * 4, 4))
    numbers = decode_words(word, tl.reshape(exponent, (BN * 4, 1)), DECODE)
    x = load_rows(x_rows + tl.arange(0, 128)[None, :], DECODE)
    return tl.dot(tl.reshape(numbers, (BN, 128)), tl.trans(x), acc)


@triton.jit
def multiply_block(acc, w, s, a, x_rows, DECODE: tl.constexpr):
    """acc [BN, BM] plus a 128-wide block: words at w [BN / 16, 256], scale words at s [BN], rows of x at a [BM, 32]."""
    BN: tl.constexpr = acc.shape[0]
    exponent = exponent_twice(tl.load(s), DECODE)
    if DECODE == "interpret":
        acc = multiply_whole(acc, tl.load(w), exponent, x_rows, DECODE)
    else:
        words = tl.reshape(tl.load(w), (BN // 16, 4, 16, 2, 2))
        words = tl.reshape(tl.permute(words, (0, 2, 1, 3, 4)), (BN, 4, 2, 2))
        even, odd = tl.split(words)
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        x0, x1, x2, x3 = tl.load(a), tl.load(a + 8), tl.load(a + 16), tl.load(a + 24)
        acc = tl.dot(decode_words(w0, exponent, DECODE), tl.trans(x0), acc)
        acc = tl.dot(decode_words(w1, exponent, DECODE), tl.trans(x1), acc)
        acc = tl.dot(decode_words(w2, exponent, DECODE), tl.trans(x2), acc)
        acc = tl.dot(decode_words(w3, exponent, DECODE), tl.trans(x3), acc)
    return acc


@triton.jit
def multiply_tail(acc, words, scale_bytes, x_rows, TAIL: tl.constexpr, DECODE: tl.constexpr):
    """acc [BN, BM] plus the last TAIL 32-wide blocks of K, stored one by one: word g of a row holds K = 8g … 8g + 7."""
    BN: tl.constexpr = acc.shape[0]
    for j in tl.static_range(TAIL):
        word = tl.reshape(tl.load(words + (j * 64 + tl.arange(0, 64))[None, :]), (BN // 16, 4, 16))
        byte = tl.load(scale_bytes + j * 16).to(tl.int32)[:, None] + tl.zeros((BN, 4), tl.int32)
        numbers = decode_words(tl.reshape(tl.permute(word, (0, 2, 1)), (BN, 4)), byte * 0x00800080, DECODE)
        x = load_rows(x_rows + (j * 32 + tl.arange(0, 32))[None, :], DECODE)
        acc = tl.dot(numbers, tl.trans(x), acc)
    return acc


@triton.jit
def grouped_gemm_bricks(x, weights, scales, scale_bytes, bias, flags, row_exponents, tiles, row_source, out, capacity,
                        steps, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                        UNROLL: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, PARTIAL: tl.constexpr,
                        DECODE: tl.constexpr):  # fmt: skip
    """Weights in bricks of 16 rows x 128 K (see layouts.BrickLayout); grid (N tiles · tile slots, splits).

    Of a 128-wide K block, lane group g owns the 32-block g: one scale and 16 bytes of codes a lane. Dot r = 0 … 3
    takes word r of every group, K = 32g + 8r … 32g + 8r + 7, so the activations are read in pieces of eight.
    """
    N_TILES: tl.constexpr = (N + BN - 1) // BN
    BLOCKS: tl.constexpr = K // 128
    TAIL: tl.constexpr = K % 128 // 32
    record = tiles + tl.program_id(0) // N_TILES * 4
    rows = tl.load(record + 2)
    if rows == 0:
        return
    expert = tl.load(record).to(tl.int64)
    first = tl.load(record + 1)
    n_tile = tl.program_id(0) % N_TILES
    split = tl.program_id(1)

    m = tl.arange(0, BM)
    row = first + tl.minimum(m, rows - 1)
    source = row
    if GATHER:
        source = tl.load(row_source + row)
    x_rows = x + source[:, None].to(tl.int64) * K

    brick = n_tile * (BN // 16) + tl.arange(0, BN // 16)
    columns = n_tile * BN + tl.arange(0, BN)
    brick_of = n_tile * (BN // 16) + tl.arange(0, BN) // 16
    if N % BN != 0:
        # The last brick row is read again where BN does not divide N: nothing is masked in the loop.
        brick = tl.minimum(brick, N // 16 - 1)
        brick_of = tl.minimum(brick_of, N // 16 - 1)
    lane = tl.arange(0, BN) % 16
    expert_words = weights + expert * (N * K // 8)

    acc = tl.zeros((BN, BM), tl.float32)
    c = tl.arange(0, 32)
    if BLOCKS > 0:
        begin = split * steps
        end = tl.minimum(begin + steps, BLOCKS)
        # 64-bit bases are scalars, offsets of lanes have 32 bits: address arithmetic on lanes is what costs.
        w = (expert_words + begin * 256) + (brick[:, None] * (BLOCKS * 256) + tl.arange(0, 256)[None, :])
        s = (scales + expert * (N * K // 128) + begin * 16) + (brick_of * (BLOCKS * 16) + lane)
        a = x_rows + (begin * 128 + (c // 8 * 32 + c % 8))[None, :]
        if UNROLL == BLOCKS and not PARTIAL:
            # A short K without a loop: every load is issued before the first product needs one.
            for u in tl.static_range(UNROLL):
                acc = multiply_block(acc, w + u * 256, s + u * 16, a + u * 128, x_rows + u * 128, DECODE)
        else:
            for i in range(0, end - begin, UNROLL):
                for u in tl.static_range(UNROLL):
                    whole = x_rows + (begin + i + u) * 128
                    acc = multiply_block(acc, w + u * 256, s + u * 16, a + u * 128, whole, DECODE)
                w += UNROLL * 256
                s += UNROLL * 16
                a += UNROLL * 128
    if TAIL > 0:
        if split == tl.num_programs(1) - 1:
            acc = multiply_tail(acc, expert_words + N * BLOCKS * 16 + brick[:, None] * (TAIL * 64),
                                scale_bytes + expert * (N * K // 32) + N * BLOCKS * 4 + brick_of * (TAIL * 16) + lane,
                                x_rows + BLOCKS * 128, TAIL, DECODE)  # fmt: skip
    store_rows(acc, out, bias, flags, row_exponents, expert, columns, first, m, m < rows, capacity, N, BN, BIAS,
    PARTIAL,
               DECODE)  # fmt: skip


@triton.jit
def decode_tile(word, scales, STEPS: tl.constexpr):
    """[16M, 16·STEPS] numbers of word [M, 32·STEPS] and scales [M, 8] (bytes: 32-block, then row half)."""
    M: tl.constexpr = word.shape[0]
    block = tl.reshape(tl.arange(0, STEPS) // 2 * 16, (1, 1, 1, STEPS))
    shifted = tl.reshape(scales, (M, 8, 1, 1)) >> block
    low, high = fragment_scale(shifted & 0xFF), fragment_scale((shifted >> 8) & 0xFF)
    return decode_fragments(word, low, high, STEPS)


@triton.jit
def source_rows(x, row_source, first, m, rows, K: tl.constexpr, GATHER: tl.constexpr):
    """Pointers to the activations of a tile's rows m; rows past the end point at the first row and are masked."""
    row = first + tl.where(m < rows, m, 0)
    if GATHER:
        row = tl.load(row_source + row)
    return x + row[:, None].to(tl.int64) * K


@triton.jit
def multiply_rows(x, weights, scales, scale_bytes, bias, flags, row_exponents, row_source, out, capacity, steps, expert,
                  first, rows, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, MORE: tl.constexpr,
                  BN: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, PARTIAL: tl.constexpr,
                  DECODE: tl.constexpr):  # fmt: skip
    """One tile of up to BM + MORE rows; both parts share the decoded weights.

    Two 64-wide products an iteration: with a single one, Triton 3.6 lets the next decode overwrite registers that an
    asynchronous wgmma still reads (triton-lang/triton issue 9433); with two it waits for both.
    """
    N_TILES: tl.constexpr = (N + BN - 1) // BN
    TILES64: tl.constexpr = K // 64
    n_tile = tl.program_id(0) % N_TILES
    split = tl.program_id(1)
    tile = tl.minimum(n_tile * (BN // 16) + tl.arange(0, BN // 16), N // 16 - 1)
    expert_words = weights + expert * (N * K // 8)
    expert_bytes = scale_bytes + expert * (N * K // 32)
    w = expert_words + tile[:, None] * (TILES64 * 128) + tl.arange(0, 128)[None, :]
    s = scales + expert * (N * K // 128) + tile[:, None] * (TILES64 * 8) + tl.arange(0, 8)[None, :]
    k64 = tl.arange(0, 64)[None, :]

    m = tl.arange(0, BM)
    rows_of_x = source_rows(x, row_source, first, m, rows, K, GATHER)
    there = (m < rows)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if MORE > 0:
        more = BM + tl.arange(0, MORE)
        more_of_x = source_rows(x, row_source, first, more, rows, K, GATHER)
        more_there = (more < rows)[:, None]
        more_acc = tl.zeros((BN, MORE), tl.float32)
    begin = split * steps
    for k in range(begin, tl.minimum(begin + steps, K // 128)):
        for u in tl.static_range(2):
            t = 2 * k + u
            numbers = decode_tile(tl.load(w + t * 128), tl.load(s + t * 8), 4)
            acc = tl.dot(numbers, tl.trans(tl.load(rows_of_x + (t * 64 + k64), mask=there, other=0.0)), acc)
            if MORE > 0:
                columns_of_x = tl.load(more_of_x + (t * 64 + k64), mask=more_there, other=0.0)
                more_acc = tl.dot(numbers, tl.trans(columns_of_x), more_acc)
    if K % 128 != 0:
        if split == tl.num_programs(1) - 1:
            if TILES64 % 2 == 1:
                last: tl.constexpr = TILES64 - 1
                numbers64 = decode_tile(tl.load(w + last * 128), tl.load(s + last * 8), 4)
                x64 = tl.load(rows_of_x + (last * 64 + k64), mask=there, other=0.0)
                acc = tl.dot(numbers64, tl.trans(x64), acc)
                if MORE > 0:
                    more64 = tl.load(more_of_x + (last * 64 + k64), mask=more_there, other=0.0)
                    more_acc = tl.dot(numbers64, tl.trans(more64), more_acc)
            if K % 64 != 0:
                k32 = TILES64 * 64 + tl.arange(0, 32)[None, :]
                w32 = expert_words + N * TILES64 * 8 + tile[:, None] * 64 + tl.arange(0, 64)[None, :]
                s32 = expert_bytes + N * TILES64 * 2 + tile[:, None] * 16 + tl.arange(0, 8)[None, :] * 2
                pair = tl.load(s32).to(tl.int32) | (tl.load(s32 + 1).to(tl.int32) << 8)
                numbers32 = decode_tile(tl.load(w32), pair, 2)
                acc = tl.dot(numbers32, tl.trans(tl.load(rows_of_x + k32, mask=there, other=0.0)), acc)
                if MORE > 0:
                    more32 = tl.load(more_of_x + k32, mask=more_there, other=0.0)
                    more_acc = tl.dot(numbers32, tl.trans(more32), more_acc)
    columns = n_tile * BN + tl.arange(0, BN)
    store_rows(acc, out, bias, flags, row_exponents, expert, columns, first, m, m < rows, capacity, N, BN, BIAS,
    PARTIAL,
               DECODE)  # fmt: skip
    if MORE > 0:
        store_rows(more_acc, out, bias, flags, row_exponents, expert, columns, first, more, more < rows, capacity, N,
                   BN, BIAS, PARTIAL, DECODE)  # fmt: skip


@triton.jit
def grouped_gemm_fragments(x, weights, scales, scale_bytes, bias, flags, row_exponents, tiles, row_source, out,
                           capacity, steps, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, LITTLE: tl.constexpr,
                           MUCH: tl.constexpr, BN: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr,
                           PARTIAL: tl.constexpr, DECODE: tl.constexpr):  # fmt: skip
    """Weights in NVIDIA's operand order (see layouts.FragmentLayout); grid (N tiles · tile slots, splits).

    A tile holds up to BM + MUCH rows and is computed as BM, BM + LITTLE or BM + MUCH, whichever is enough: less padding
    than whole multiples of BM.
    """
    N_TILES: tl.constexpr = (N + BN - 1) // BN
    record = tiles + tl.program_id(0) // N_TILES * 4
    rows = tl.load(record + 2)
    if rows == 0:
        return
    expert = tl.load(record).to(tl.int64)
    first = tl.load(record + 1)
    if MUCH == 0 or rows <= BM:
        multiply_rows(x, weights, scales, scale_bytes, bias, flags, row_exponents, row_source, out, capacity, steps,
                      expert, first, rows, N, K, BM, 0, BN, GATHER, BIAS, PARTIAL, DECODE)  # fmt: skip
    elif rows <= BM + LITTLE:
        multiply_rows(x, weights, scales, scale_bytes, bias, flags, row_exponents, row_source, out, capacity, steps,
                      expert, first, rows, N, K, BM, LITTLE, BN, GATHER, BIAS, PARTIAL, DECODE)  # fmt: skip
    else:
        multiply_rows(x, weights, scales, scale_bytes, bias, flags, row_exponents, row_source, out, capacity, steps,
                      expert, first, rows, N, K, BM, MUCH, BN, GATHER, BIAS, PARTIAL, DECODE)  # fmt: skip
