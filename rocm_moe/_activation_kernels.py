# mypy: ignore-errors
# ruff: noqa: RET505, E741 - Triton compiles these forms, not the ones that ruff prefers
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
    """2^x to 2 ulp; results below 2^-126 become 0, which changes no sum here."""
    if FAST == "amd":
        return amd_exp2(x)
    elif FAST == "nvidia":
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """1/x to 1 ulp; a full division costs ten instructions."""
    if FAST == "amd":
        return amd_reciprocal(x)
    elif FAST == "nvidia":
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    return reciprocal(1.0 + exp2(x * -LOG2E, FAST), FAST)


@triton.jit
def tanh_parts(x, RATE: tl.constexpr, FAST: tl.constexpr):
    """Numerator and denominator of |tanh(RATE·x/2)|, and a = exp(-RATE|x|): 1 - a and 1 + a."""
    z = tl.abs(x)
    a = exp2(z * (-LOG2E * RATE), FAST)
    # Either form is within 2e-5 of the true value at 1/256 and better away from it; bf16 resolves 4e-3.
    series = z * RATE * (1.0 - z * (0.5 * RATE))
    return tl.where(z < 0.00390625 / RATE, series, 1.0 - a), 1.0 + a, a


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
    top, bottom, a = tanh_parts(gate, 2.0 / BETA, FAST)
    signs = gate.to(tl.int32, bitcast=True)
    if BETA == 4.0:
        # sigmoid from |g|, for exp(-|g|) is the square of what tanh already has: one exponential less.
        decay = a * a
        top = tl.where(gate < 0, top * decay, top)
    else:
        decay = exp2(gate * -LOG2E, FAST)
    bottom *= 1.0 + decay
    if LINEAR_BETA > 0:
        top_up, bottom_up, _ = tanh_parts(up, 2.0 / LINEAR_BETA, FAST)
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
    """out[r, i] = f(gate_up[r, i], gate_up[r, I + i]) for the window's rows.

    Programs take blocks of ROWS x COLUMNS in turn; a grid of all blocks takes one each, a smaller one costs less
    where the window is likely to be empty. PARTIAL: gate_up is float32 [splits, capacity, 2I], added in order of
    splits.
    """
    COLUMN_BLOCKS: tl.constexpr = I // COLUMNS
    rows = tl.load(window_rows)
    blocks = (rows + ROWS - 1) // ROWS * COLUMN_BLOCKS
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = block // COLUMN_BLOCKS * ROWS + tl.arange(0, ROWS)
        column = block % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
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
