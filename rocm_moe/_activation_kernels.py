"""Device code: the gated activation on [gate | up] rows, in float32, rounded once.

The formulas are those of portamoe.activations. tanh and sigmoid share one reciprocal: with a = exp(-2|x|),
tanh(x) = sign(x)·(1 - a)/(1 + a), and 1 - a comes from its series where |x| is small, so no digits cancel.
"""

import triton
import triton.language as tl

from rocm_moe._decode_kernels import round_to_bf16
from rocm_moe.triton_compat import amd_exp2, amd_reciprocal

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp2(x, FAST: tl.constexpr):
    if FAST:
        return amd_exp2(x)  # v_exp_f32; results below 2^-126 become 0, which changes no sum here
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    if FAST:
        return amd_reciprocal(x)
    else:
        return 1.0 / x


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    return reciprocal(1.0 + exp2(x * -LOG2E, FAST), FAST)


@triton.jit
def tanh_parts(x, RATE: tl.constexpr, FAST: tl.constexpr):
    """|tanh(RATE·x/2)| as numerator and denominator: 1 - exp(-RATE|x|) and 1 + exp(-RATE|x|)."""
    z = tl.abs(x) * RATE
    a = exp2(z * -LOG2E, FAST)
    series = z * (1.0 - z * (0.5 - z * (1.0 / 6.0 - z * (1.0 / 24.0))))
    return tl.where(z < 0.0625, series, 1.0 - a), 1.0 + a


@triton.jit
def with_sign(magnitude, sign_bits):
    bits = magnitude.to(tl.int32, bitcast=True) | (sign_bits & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def below(x, limit):
    """min(x, limit) that keeps NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def within(x, limit):
    """clamp(x, -limit, limit) that keeps NaN."""
    return tl.where(x < -limit, -limit, below(x, limit))


@triton.jit
def situ(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, FAST: tl.constexpr):
    top, bottom = tanh_parts(gate, 2.0 / BETA, FAST)
    bottom *= 1.0 + exp2(gate * -LOG2E, FAST)
    signs = gate.to(tl.int32, bitcast=True)
    if LINEAR_BETA > 0:
        top_up, bottom_up = tanh_parts(up, 2.0 / LINEAR_BETA, FAST)
        signs = signs ^ up.to(tl.int32, bitcast=True)
        return with_sign(top * top_up * (BETA * LINEAR_BETA) * reciprocal(bottom * bottom_up, FAST), signs)
    else:
        return with_sign(top * BETA * reciprocal(bottom, FAST), signs) * up


@triton.jit
def gelu(x, TANH: tl.constexpr, FAST: tl.constexpr):
    if TANH:
        # x/2·(1 + tanh(y)) = x·sigmoid(2y), y = √(2/π)·(x + 0.044715·x³)
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x), FAST)
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gated(gate, up, NAME: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr):
    """The activation NAME with its parameters A, B, C (0 where it has none or leaves one unset)."""
    if NAME == "situ":
        return situ(gate, up, A, B, FAST)
    elif NAME == "swiglu":
        if A > 0:
            gate, up = below(gate, A), within(up, A)
        return gate * sigmoid(gate, FAST) * up
    elif NAME == "swiglu_oai":
        gate, up = below(gate, B), within(up, B)
        return (up + C) * gate * sigmoid(A * gate, FAST)
    elif NAME == "swiglu_step":
        return below(gate * sigmoid(gate, FAST), A) * within(up, A)
    elif NAME == "geglu":
        return gelu(gate, A > 0, FAST) * up
    else:
        tl.static_assert(NAME == "relu2")
        positive = tl.where(gate < 0, 0.0, gate)
        return positive * positive * up


@triton.jit
def activate(gate_up, out, window_rows, capacity, splits, I: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             NAME: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, PARTIAL: tl.constexpr,
             FAST: tl.constexpr, DECODE: tl.constexpr):  # fmt: skip
    """out[r, i] = f(gate_up[r, i], gate_up[r, I + i]) for the window's rows; grid (row blocks · column blocks,).

    PARTIAL: gate_up is float32 [splits, capacity, 2I], added in order of splits.
    """
    COLUMN_BLOCKS: tl.constexpr = I // COLUMNS
    rows = tl.load(window_rows)
    first = tl.program_id(0) // COLUMN_BLOCKS * ROWS
    if first >= rows:
        return
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(0) % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column >= 0)[None, :]
    source = gate_up + row[:, None].to(tl.int64) * (2 * I) + column[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + I, mask=mask, other=0.0).to(tl.float32)
    if PARTIAL:
        stride = capacity.to(tl.int64) * (2 * I)
        for _ in range(1, splits):
            source += stride
            gate += tl.load(source, mask=mask, other=0.0)
            up += tl.load(source + I, mask=mask, other=0.0)
    h = gated(gate, up, NAME, A, B, C, FAST)
    tl.store(out + row[:, None].to(tl.int64) * I + column[None, :], round_to_bf16(h, DECODE), mask=mask)
