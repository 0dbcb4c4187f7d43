# mypy: ignore-errors
# ruff: noqa: RET505, PLR0124, PLR1714 - Triton compiles these forms, not the ones that ruff prefers
"""Device code: E2M1 codes with their E8M0 scale to bf16 numbers, exactly; rounding to bf16.

Two storage forms (see layouts.py) are decoded here. *Bricks*: a word holds K = 8i … 8i+7 of one row; pair q = 0 … 3 is
K = 8i + 2q (low half of a register) and 8i + 2q + 1 (high half). *Fragments*: a word holds the eight weights that one
lane of an NVIDIA 16 x 16 matrix operand owns.

The block scale becomes part of the bf16 exponent, so the accumulator needs no scaling. Bricks store b = E8M0 + 1: the
magnitude 0.5 has b as its bf16 exponent field, every number but zero is normal (the matrix instructions of MI200 flush
subnormal operands to zero), and all are FACTOR times too large, which the epilogue undoes.

DECODE is "lut" (byte look-up, AMD), "convert" (gfx950's instruction), "portable" (integer arithmetic, any compiler),
"interpret" (portable, on float32 numbers, because the interpreter multiplies the raw bits of bf16) or "fragments".
"""

import triton
import triton.language as tl

from rocm_moe.triton_compat import amd_perm, funnel_shift_right


@triton.jit
def round_to_bf16(x, DECODE: tl.constexpr, ANY_NAN: tl.constexpr = False):
    """Nearest even, by integer arithmetic where the compiler's conversion costs twice as much or truncates.

    ANY_NAN: x may hold NaNs with set bits below the highest 16, which arithmetic on bf16 numbers never makes; the
    carry of rounding could run through those into the sign.
    """
    # Triton 3.3 takes two operands of `or` at a time.
    if (DECODE == "convert" or DECODE == "fragments") or (ANY_NAN and DECODE != "interpret"):
        return x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        if ANY_NAN:
            rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def undo_factor(DECODE: tl.constexpr):
    """What a sum of decoded products has to be multiplied by."""
    if DECODE == "fragments":
        return 1.0
    elif DECODE == "convert":
        return 0.5
    else:
        return 0.25


@triton.jit
def exponent_twice(four, DECODE: tl.constexpr):
    """[N] words of four scale bytes to [N, 4]: byte g at bits 14..7 and 30..23, the exponent fields of two bf16."""
    g = tl.arange(0, 4)[None, :]
    word = four[:, None] + tl.zeros((four.shape[0], 4), tl.int32)
    if DECODE == "lut" or DECODE == "convert":
        # Bytes 1 and 3 of the result are byte g of `word` (selector 4 + g), bytes 0 and 2 are zero (selector 12).
        picked = amd_perm(word, tl.zeros_like(word), tl.zeros_like(word) + (0x0C0C0C0C + (g - 8) * 0x01000100))
        return (picked >> 1) & 0x7FFFFFFF
    else:
        return ((word >> (8 * g)) & 0xFF) * 0x00800080


@triton.jit
def rotate_right_4(word, DECODE: tl.constexpr):
    if DECODE == "lut":
        return funnel_shift_right(word, word, tl.full(word.shape, 4, tl.int32))
    else:
        return ((word >> 4) & 0x0FFFFFFF) | (word << 28)


@triton.jit
def look_up_tables(exponent):
    """High and low bytes of the eight scaled magnitudes, as two table words each."""
    zero = tl.zeros_like(exponent)
    # Magnitudes 0, 0.5 | 1, 1.5 | 2, 3 | 4, 6: exponent steps of one, mantissa 0 or .5. Zero has no exponent.
    m01 = exponent & -0x10000
    m23 = exponent + 0x00C00080
    m45 = exponent + 0x01400100
    m67 = exponent + 0x01C00180
    high = zero + 0x07050301
    low = zero + 0x06040200
    return amd_perm(m23, m01, high), amd_perm(m67, m45, high), amd_perm(m23, m01, low), amd_perm(m67, m45, low)


@triton.jit
def look_up_two_pairs(word, high03, high47, low03, low47):
    """Bytes of `word`: sign in bit 7, magnitude code in bits 2..0; pair 0 is bytes (0, 2), pair 1 bytes (1, 3)."""
    zero = tl.zeros_like(word)
    code = word & 0x07070707
    high = (word & -0x7F7F7F80) | amd_perm(high47, high03, code)
    low = amd_perm(low47, low03, code)
    return amd_perm(high, low, zero + 0x06020400), amd_perm(high, low, zero + 0x07030501)


@triton.jit
def compute_pair(word, exponent, q: tl.constexpr):
    """Pair q = 0, 1 of the look-up storage by integer arithmetic on two 16-bit lanes: 3 times the instructions."""
    fields = word >> (8 * q)
    code = fields & 0x00070007
    at_least_half = ((code + 0x00070007) >> 3) & 0x00010001
    at_least_one = ((code + 0x00060006) >> 3) & 0x00010001
    magnitude = ((code + at_least_one) << 6) + at_least_half * ((exponent & 0xFFFF) - 64)
    return magnitude | ((fields << 8) & -0x7FFF8000)


@triton.jit
def convert_pair(word, scale, q: tl.constexpr):
    """gfx950: numbers of byte q (low nibble first) times `scale`, a power of two, as one word of two bf16."""
    SELECT: tl.constexpr = ("", " op_sel:[1,0,0]", " op_sel:[0,1,0]", " op_sel:[1,1,0]")[q]
    return tl.inline_asm_elementwise(
        "v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2" + SELECT,
        "=v,v,v",
        [word, scale],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def unpack_pairs(pairs, DECODE: tl.constexpr):
    """[…] words of two bf16 to […, 2] numbers; no instruction on a GPU."""
    if DECODE == "interpret":
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -0x10000).to(tl.float32, bitcast=True)
    else:
        low = (pairs & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def decode_words(word, exponent, DECODE: tl.constexpr):
    """[N, 4] words with [N, 4] exponents (see exponent_twice) to [N, 32] numbers, those of each word in K order."""
    if DECODE == "lut":
        high03, high47, low03, low47 = look_up_tables(exponent)
        p0, p1 = look_up_two_pairs(word, high03, high47, low03, low47)
        p2, p3 = look_up_two_pairs(rotate_right_4(word, DECODE), high03, high47, low03, low47)
    elif DECODE == "convert":
        scale = (exponent & 0x7F800000).to(tl.float32, bitcast=True)
        p0, p1 = convert_pair(word, scale, 0), convert_pair(word, scale, 1)
        p2, p3 = convert_pair(word, scale, 2), convert_pair(word, scale, 3)
    else:
        turned = rotate_right_4(word, DECODE)
        p0, p1 = compute_pair(word, exponent, 0), compute_pair(word, exponent, 1)
        p2, p3 = compute_pair(turned, exponent, 0), compute_pair(turned, exponent, 1)
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.reshape(unpack_pairs(pairs, DECODE), (word.shape[0], 32))


#: One fragment word to four registers of two bf16, times the scales of row g ($5) and of row g + 8 ($6).
#: An E2M1 code put at bits 8..6 of a bf16 is its value times 2^-126, so the multiply by 2^(E8M0 - 1) undoes the bias
#: and scales at once. Registers 0, 1: K = 2t, 2t+1 of both rows; registers 2, 3: K = 2t+8, 2t+9.
FRAGMENT_DECODE = tl.constexpr("""{
.reg .b32 a, b, c, d, e, z;
mov.b32 z, 0x80008000;
and.b32 a, $4, 0x81C081C0;
shl.b32 b, $4, 6; and.b32 b, b, 0x81C081C0;
shf.r.wrap.b32 c, $4, $4, 6; and.b32 c, c, 0x81C081C0;
shl.b32 d, $4, 4; and.b32 d, d, 0x81808180; shr.u32 e, $4, 4; lop3.b32 d, e, 0x00400040, d, 0xEA;
fma.rn.bf16x2 $0, a, $5, z; fma.rn.bf16x2 $1, b, $6, z; fma.rn.bf16x2 $2, c, $5, z; fma.rn.bf16x2 $3, d, $6, z;
}""")


@triton.jit
def fragment_scale(byte):
    """Two bf16 of 2^(byte - 127); byte 0 gives the subnormal 2^-127."""
    return tl.maximum(byte * 0x00800080, 0x00400040)


@triton.jit
def decode_fragments(word, scale_low, scale_high, STEPS: tl.constexpr):
    """[M, 32·STEPS] words of 16-row tiles to [16M, 16·STEPS] numbers in K order.

    scale_low, scale_high: [M, 8, 1, STEPS] words of two bf16 — of rows g and g + 8 at each 16-wide K step
    """
    M: tl.constexpr = word.shape[0]
    q = tl.reshape(word, (M, 8, 4, STEPS))
    r0, r1, r2, r3 = tl.inline_asm_elementwise(
        FRAGMENT_DECODE,
        "=r,=r,=r,=r,r,r,r",
        [q, scale_low, scale_high],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    # Put together with masks instead of tl.join: they fold away, and Triton doubles the K width of an mma.sync
    # operand for every value that a join touches, which would shuffle the weights through shared memory.
    row_half = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 2, 1, 1))
    k_half = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 2, 1))
    half = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 1, 2))
    shape: tl.constexpr = (M, 8, 4, STEPS, 1, 1, 1)
    low = (tl.reshape(r0, shape) & (row_half - 1)) | (tl.reshape(r1, shape) & -row_half)
    high = (tl.reshape(r2, shape) & (row_half - 1)) | (tl.reshape(r3, shape) & -row_half)
    word32 = (low & (k_half - 1)) | (high & -k_half)
    numbers = ((word32 >> (16 * half)) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.permute(numbers, (0, 4, 1, 3, 5, 2, 6)), (M * 16, STEPS * 16))
