# mypy: ignore-errors
"""Device code shared by all expert kernels: MXFP4 decode in registers, activations, one tile of an expert product.

Weights are the first operand (swap-AB): rows of the expert matrix stand on the M side of the matrix instruction and
tokens on its N side in steps of 8, so few tokens per expert do not pay for a tile of 64.
"""

# I is the letter of the field; constexpr branches must stay statements of their own.
# ruff: noqa: E741, SIM108
from __future__ import annotations

import triton
import triton.language as tl

# One 32-bit word holds the 8 weights that a lane owns of a 16 x 16 fragment (layouts.py). The sign, two exponent bits
# and mantissa bit of an E2M1 code, put at bits 15, 8, 7, 6 of a bf16, are that code's value times 2**-126; the
# multiplication with a scale stored as E8M0 + 126 undoes it and applies the scale, exactly.
_DECODE = """{ .reg .b32 a, b, c, d, e, z; mov.b32 z, 0x80008000;
and.b32 a, $8, 0x81C081C0;
shl.b32 b, $8, 6; and.b32 b, b, 0x81C081C0;
shf.r.wrap.b32 c, $8, $8, 6; and.b32 c, c, 0x81C081C0;
shl.b32 d, $8, 4; and.b32 d, d, 0x81808180; shr.u32 e, $8, 4; lop3.b32 d, e, 0x00400040, d, 0xEA;
MUL(a, $9) mov.b32 {$0, $1}, a; MUL(b, $10) mov.b32 {$2, $3}, b;
MUL(c, $9) mov.b32 {$4, $5}, c; MUL(d, $10) mov.b32 {$6, $7}, d; }"""


def _decode_asm(multiply: str) -> str:
    text = _DECODE
    for register in "abcd":
        for scale in ("$9", "$10"):
            text = text.replace(f"MUL({register}, {scale})", multiply.format(r=register, s=scale))
    return text


DECODE_SM90 = tl.constexpr(_decode_asm("mul.bf16x2 {r}, {r}, {s};"))
# Before sm_90 there is no mul.bf16x2; adding -0.0 keeps every product as it is.
DECODE_SM80 = tl.constexpr(_decode_asm("fma.rn.bf16x2 {r}, {r}, {s}, z;"))
DECODE_CONSTRAINTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")
# Triton 3.6 lets the next decode overwrite A registers that an asynchronous wgmma still reads; waiting for all of
# them between load and decode removes it at no cost in registers (sass.py checks the compiled code).
WAIT_WGMMA = tl.constexpr("wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;")
ZERO = tl.constexpr("mov.b32 $0, 0;")
FIELD = tl.constexpr(0x81C081C0 - (1 << 32))
FIELD_HIGH = tl.constexpr(0x81808180 - (1 << 32))
FIELD_LOW = tl.constexpr(0x00400040)
SCALE_UNIT = tl.constexpr(0x00800080)


@triton.jit
def near_range(N: tl.constexpr, anchor, NEAR: tl.constexpr):
    """Return 0 ... N - 1; NEAR: computed where it stands, `anchor` being any integer of the loop around it.

    In a loop over tiles the compiler would compute the lane offsets of all addresses once and keep them through the
    loop over K, at up to 24 registers a thread.
    """
    v = tl.arange(0, N)
    if NEAR:
        zero = tl.inline_asm_elementwise(ZERO, "=r,r", [anchor], dtype=tl.int32, is_pure=False, pack=1)
        v += tl.multiple_of(zero, 128)
    return v


@triton.jit
def _portable_pair(word, scale):
    """Return the values of the low and high half of a masked word as float32, times their scale."""
    factor = ((scale & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & -65536).to(tl.float32, bitcast=True)
    return low * factor, high * factor


@triton.jit
def _portable_decode(q, s0, s1):
    """The decode without inline assembly: the same fields by shifts and masks, float32 results."""
    a, b = _portable_pair(q & FIELD, s0), _portable_pair((q << 6) & FIELD, s1)
    c = _portable_pair((((q >> 6) & 0x03FFFFFF) | (q << 26)) & FIELD, s0)
    d = _portable_pair(((q << 4) & FIELD_HIGH) | ((q >> 4) & FIELD_LOW), s1)
    return a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]


@triton.jit
def decode(q, s, MT: tl.constexpr, MMA_ORDER: tl.constexpr, DECODE: tl.constexpr):
    """Decode MT fragments rows: q (MT, 128) int32, s (MT, 8) int32 -> (MT * 16, 64), bf16 or (portable) float32.

    MMA_ORDER: columns in the order t, a1, h inside each 16, 4 consecutive ones per lane; else a1, t,
    h. DECODE: "sm90", "sm80" or "portable".
    """
    q = tl.reshape(q, (MT, 8, 4, 2, 2))  # m16 fragment, g, t, block of 32, k16 step in it
    s = tl.reshape(s, (MT, 8, 1, 1, 1)) >> (tl.arange(0, 2) * 16)[None, None, None, :, None]
    s0, s1 = (s & 255) * SCALE_UNIT, ((s >> 8) & 255) * SCALE_UNIT
    if DECODE == "portable":
        o0, o1, o2, o3, o4, o5, o6, o7 = _portable_decode(q, s0, s1)
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = tl.inline_asm_elementwise(
            DECODE_SM90 if DECODE == "sm90" else DECODE_SM80,
            DECODE_CONSTRAINTS,
            [q, s0, s1],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    w = tl.join(
        tl.join(tl.join(o0, o1), tl.join(o2, o3)), tl.join(tl.join(o4, o5), tl.join(o6, o7))
    )  # ... | h, a0 (row half), a1 (k half)
    w = tl.reshape(w, (MT, 8, 4, 4, 2, 2, 2))  # mt g t ks h a0 a1
    if MMA_ORDER:
        w = tl.permute(w, (0, 5, 1, 3, 2, 6, 4))
    else:
        w = tl.permute(w, (0, 5, 1, 3, 6, 2, 4))
    return tl.reshape(w, (MT * 16, 64))


@triton.jit
def k_order(PERMUTED: tl.constexpr):
    """Return the K offset of each of a tile's 64 columns.

    PERMUTED: the weights are stored in lane order and read in natural order, so the columns of each 16 come as
    0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15. Otherwise K ascends.
    """
    v = tl.arange(0, 64)
    if PERMUTED:
        v = natural_column(v)
        v = tl.max_contiguous(tl.multiple_of(v, 2), 2)
    return v


@triton.jit
def natural_column(v):
    """Return the stored column that stands at place v when weights in lane order are read in natural order."""
    return v // 16 * 16 + ((v >> 1) & 3) * 4 + ((v >> 3) & 1) * 2 + (v & 1)


@triton.jit
def _tanh_parts(x):
    """Return a and b with tanh(x) = a / b: 1 - exp(-2x) and 1 + exp(-2x), near 0 by the numerator's series."""
    # tanh(-10) is -1 in float32; the bound keeps products of numerators finite. NaN stays NaN.
    x = tl.maximum(x, -10.0, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp(-2.0 * x)
    # The difference loses relative accuracy near 0, the series beyond 0.1: either is within 5e-7.
    series = x * (2.0 + x * (-2.0 + x * (1.333333333 + x * (-0.6666666667 + x * 0.2666666667))))
    return tl.where(tl.abs(x) < 0.1, series, 1.0 - e), 1.0 + e


@triton.jit
def _tanh(x):
    a, b = _tanh_parts(x)
    return a / b


@triton.jit
def _at_most(x, limit: tl.constexpr):
    """Return min(x, limit); NaN stays NaN, as in torch."""
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamp(x, limit: tl.constexpr):
    return _at_most(tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL), limit)


@triton.jit
def activate(g, u, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr):
    """Return the gated activation of portamoe.activations in float32; P0, P1, P2 are its fields in order."""
    if ACT == "situ":
        # One division: each is several instructions, for every element of h.
        a, b = _tanh_parts(g * (1.0 / P0))
        a, b = P0 * a, b * (1.0 + tl.exp(-g))
        if P1 is not None:
            c, d = _tanh_parts(u * (1.0 / P1))
            u, b = P1 * c, b * d
        y = a * u / b
    elif ACT == "swiglu":
        if P0 is not None:
            g = _at_most(g, P0)
            u = _clamp(u, P0)
        y = g / (1.0 + tl.exp(-g)) * u
    elif ACT == "swiglu_oai":
        g = _at_most(g, P1)
        y = (_clamp(u, P1) + P2) * g / (1.0 + tl.exp(-P0 * g))
    elif ACT == "swiglu_step":
        y = _at_most(g / (1.0 + tl.exp(-g)), P0) * _clamp(u, P0)
    elif ACT == "geglu":
        if P0 == "tanh":
            y = 0.5 * g * (1.0 + _tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u
        else:
            y = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    else:
        tl.static_assert(ACT == "relu2")
        r = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        y = r * r * u
    return y


@triton.jit
def load_weights(codes, scales, kb, MT: tl.constexpr, FORMAT: tl.constexpr, K: tl.constexpr, WAIT: tl.constexpr,
                 MMA_ORDER: tl.constexpr, DECODE: tl.constexpr):  # fmt: skip
    """Return columns 64 * kb ... of MT * 16 weight rows as the first operand of a dot."""
    if FORMAT == "mxfp4":
        q = tl.load(codes + kb * 128)
        s = tl.load(scales + kb * 8)
        if WAIT:
            q = tl.inline_asm_elementwise(WAIT_WGMMA, "=r,r", [q], dtype=tl.int32, is_pure=False, pack=1)
        w = decode(q, s, MT, MMA_ORDER, DECODE)
    else:
        if K % 64 == 0:
            w = tl.load(codes + kb * 64)
        else:
            w = tl.load(codes + kb * 64, mask=scales < K - kb * 64, other=0.0)
        if DECODE == "portable":
            w = w.to(tl.float32)
    return w


@triton.jit
def weight_pointers(codes, scales, expert, first, K: tl.constexpr, N16: tl.constexpr, MT: tl.constexpr,
                    SLICES: tl.constexpr, FORMAT: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """Pointers of the first 64 columns of MT * SLICES fragments of 16 rows; `first` counts fragments in the expert.

    With SLICES > 1 the fragments repeat MT rows at SLICES equally long parts of K. For bf16 the second result holds
    the columns, for the mask of a K tail.
    """
    KB: tl.constexpr = (K + 63) // 64
    mt = near_range(MT * SLICES, first, NEAR)
    fragment = expert.to(tl.int64) * N16 + first
    if FORMAT == "mxfp4":
        block = (mt % MT) * KB + (mt // MT) * (KB // SLICES)
        q = codes + fragment * (KB * 128) + block[:, None] * 128 + near_range(128, first, NEAR)[None, :]
        s = scales + fragment * (KB * 8) + block[:, None] * 8 + near_range(8, first, NEAR)[None, :]
    else:
        tl.static_assert(SLICES == 1)
        k = near_range(64, first, NEAR)[None, :]
        rows = near_range(MT * 16, first, NEAR)[:, None]
        q = codes + fragment * (16 * K) + rows * K + k
        s = k + rows * 0
    return q, s


@triton.jit
def load_tokens(x, kb, k, live, K: tl.constexpr, DECODE: tl.constexpr):
    """Return 64 columns of the token rows, (64, tokens): zero for dead columns and past K."""
    if K % 64 == 0:
        v = tl.load(x + kb * 64, mask=live[None, :], other=0.0)
    else:
        v = tl.load(x + kb * 64, mask=live[None, :] & (k[:, None] < K - kb * 64), other=0.0)
    if DECODE == "portable":
        v = v.to(tl.float32)
    return v


@triton.jit
def narrow_product(x, row_offset, live, codes, scales, expert, first, K: tl.constexpr, N16: tl.constexpr,
                   MT: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
                   SLICES: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr,
                   MMA_ORDER: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """Return (MT * 16, BN) float32: weight rows times at most BN tokens, by mma.sync.

    row_offset (SLICES * BN,) int64: element offset of each column's token row; live (SLICES * BN,): columns in use.
    With SLICES > 1 the columns repeat the BN tokens at each part of K; only products of equal parts are kept, which
    splits K over the warps of one program without a second kernel.
    """
    KB: tl.constexpr = (K + 63) // 64
    PART: tl.constexpr = KB // SLICES
    STEP: tl.constexpr = UNROLL if PART % UNROLL == 0 else 1
    tl.static_assert(SLICES == 1 or (KB % SLICES == 0 and K % 64 == 0))
    q, s = weight_pointers(codes, scales, expert, first, K, N16, MT, SLICES, FORMAT, NEAR)
    k = near_range(64, first, NEAR)
    if SLICES > 1:
        row_offset += (tl.arange(0, SLICES * BN) // BN) * (PART * 64)
    xp = x + row_offset[None, :] + k[:, None]
    acc = tl.zeros((MT * SLICES * 16, SLICES * BN), tl.float32)
    for kb in tl.range(0, PART, STEP, num_stages=STAGES):
        for i in tl.static_range(STEP):
            v = load_tokens(xp, kb + i, k, live, K, DECODE)
            w = load_weights(q, s, kb + i, MT * SLICES, FORMAT, K, False, MMA_ORDER, DECODE)
            acc = tl.dot(w, v, acc)
    if SLICES > 1:
        parts = tl.reshape(acc, (SLICES, MT * 16, SLICES, BN))
        equal = tl.arange(0, SLICES)[:, None, None, None] == tl.arange(0, SLICES)[None, None, :, None]
        acc = tl.sum(tl.sum(tl.where(equal, parts, 0.0), 2), 0)
    return acc


@triton.jit
def wide_product(x, rows_a, live_a, rows_b, live_b, codes, scales, expert, first, K: tl.constexpr,
                 N16: tl.constexpr, MT: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, UNROLL: tl.constexpr,
                 STAGES: tl.constexpr, FORMAT: tl.constexpr, DECODE: tl.constexpr, MMA_ORDER: tl.constexpr,
                 PERMUTED: tl.constexpr, WAIT: tl.constexpr):  # fmt: skip
    """Return (MT * 16, BA) and (MT * 16, BB) float32: two groups of tokens share one decode; BB = 0: only the first."""
    KB: tl.constexpr = (K + 63) // 64
    STEP: tl.constexpr = UNROLL if KB % UNROLL == 0 else 1
    q, s = weight_pointers(codes, scales, expert, first, K, N16, MT, 1, FORMAT, False)
    k = k_order(PERMUTED)
    xa = x + rows_a[None, :] + k[:, None]
    acc_a = tl.zeros((MT * 16, BA), tl.float32)
    if BB > 0:
        xb = x + rows_b[None, :] + k[:, None]
        acc_b = tl.zeros((MT * 16, BB), tl.float32)
    for kb in tl.range(0, KB, STEP, num_stages=STAGES):
        for i in tl.static_range(STEP):
            va = load_tokens(xa, kb + i, k, live_a, K, DECODE)
            if BB > 0:
                vb = load_tokens(xb, kb + i, k, live_b, K, DECODE)
            w = load_weights(q, s, kb + i, MT, FORMAT, K, WAIT, MMA_ORDER, DECODE)
            acc_a = tl.dot(w, va, acc_a)
            if BB > 0:
                acc_b = tl.dot(w, vb, acc_b)
    if BB == 0:
        acc_b = acc_a
    return acc_a, acc_b


@triton.jit
def gate_up_result(acc, factor, bias, expert, first, I: tl.constexpr, MT: tl.constexpr, BN: tl.constexpr,
                   BIAS: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
                   P2: tl.constexpr):  # fmt: skip
    """Return h (MT * 8, BN) float32 of an accumulator whose fragments hold 8 gate rows, then 8 up rows."""
    both = tl.permute(tl.reshape(acc * factor, (MT, 2, 8, BN)), (0, 2, 3, 1))
    gate, up = tl.split(both)
    if BIAS:
        row = (first + tl.arange(0, MT)[:, None]) * 16 + tl.arange(0, 8)[None, :]
        at = bias + expert * (2 * I) + row
        gate += tl.load(at, mask=row < 2 * I, other=0.0)[:, :, None]
        up += tl.load(at + 8, mask=row < 2 * I, other=0.0)[:, :, None]
    return tl.reshape(activate(gate, up, ACT, P0, P1, P2), (MT * 8, BN))


@triton.jit
def down_result(acc, factor, bias, expert, cols, H: tl.constexpr, BIAS: tl.constexpr):
    """Return y (rows of w2, BN) float32: the accumulator times the expert's factor, plus the bias."""
    y = acc * factor
    if BIAS:
        y += tl.load(bias + expert * H + cols, mask=cols < H, other=0.0)[:, None]
    return y
