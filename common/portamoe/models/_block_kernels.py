# mypy: ignore-errors
# ruff: noqa: PLR0124 - x == x is false for NaN

"""Device code of the block around the experts: router logits, choice of experts, SiTU, RMSNorm. Any GPU of Triton's.

Everything is computed in float32 and rounded once. Addresses are 64-bit.

PDL: the kernel lets the next one on its stream begin, and where it was itself launched dependent on the one before it,
it waits for that to end before it touches what that wrote (programmatic dependent launch, NVIDIA from Hopper on).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1.1754943508222875e-38)
#: In the order of scores as integers: an expert that is taken or none, below NaN, below -Inf.
TAKEN = tl.constexpr(-0x80000000)
NOT_A_NUMBER = tl.constexpr(-0x7FFFFFFF)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def tanh(x):
    """(1 - a)/(1 + a) with a = exp(-2|x|); its series where |x| is small and 1 - a would lose digits."""
    z = tl.abs(x)
    a = tl.exp2(z * (-2.0 * LOG2E))
    square = z * z
    series = z * (1.0 - square * (0.3333333333333333 - square * 0.13333333333333333))
    magnitude = tl.where(z < 0.0625, series, (1.0 - a) / (1.0 + a))
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit(do_not_specialize=["tokens"])
def router_logits_kernel(
    x,
    weight,
    partial,
    tokens,
    E: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """partial[s, t, e] = the part of x[t] · weight[e] over the s-th range of D; the reader adds the parts in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    experts = tl.program_id(0) * BE + tl.arange(0, BE)
    split = tl.program_id(1)
    rows = tl.program_id(2) * BT + tl.arange(0, BT)
    acc = tl.zeros((BT, BE), tl.float32)
    for step in range(STEPS):
        k = (split * STEPS + step) * BK + tl.arange(0, BK)
        a = tl.load(x + rows[:, None].to(tl.int64) * D + k[None, :], mask=(rows < tokens)[:, None] & (k < D), other=0.0)
        b = tl.load(
            weight + experts[None, :].to(tl.int64) * D + k[:, None], mask=(experts < E) & (k < D)[:, None], other=0.0
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc)
    target = partial + (split.to(tl.int64) * tokens + rows[:, None]) * E + experts[None, :]
    tl.store(target, acc, mask=(rows < tokens)[:, None] & (experts < E))


@triton.jit
def logits_of(partial, token, tokens, e, mask, E: tl.constexpr, SPLITS: tl.constexpr):
    total = tl.load(partial + token * E + e, mask=mask, other=0.0)
    for s in tl.static_range(1, SPLITS):
        total += tl.load(partial + (s * tokens.to(tl.int64) + token) * E + e, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    partial,
    bias,
    ids,
    weights,
    tokens,
    E: tl.constexpr,
    BINS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """The K largest of sigmoid(logit) + bias, the lower id first among equals, NaN last; weights as SigmoidRouter's."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BINS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    score = sigmoid(logits_of(partial, token, tokens, e, e < E, E, SPLITS))
    choice = score + tl.load(bias + e, mask=e < E, other=0.0)
    bits = choice.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(choice == choice, order, NOT_A_NUMBER)
    order = tl.where(e < E, order, TAKEN)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    for k in range(TOPK):
        # Two reductions of 32 bits, each one instruction a warp; with the id in the low half of 64 bits it takes ten.
        best = tl.max(order, 0)
        index = tl.min(tl.where(order == best, e, BINS), 0)
        chosen = tl.where(slot == k, index, chosen)
        order = tl.where(e == index, TAKEN, order)
    used = slot < TOPK
    value = sigmoid(logits_of(partial, token, tokens, chosen, used, E, SPLITS))
    compared = value + tl.load(bias + chosen, mask=used, other=0.0)
    value = tl.where(used & (compared == compared), value, 0.0)
    if RENORMALIZE:
        value = value / tl.maximum(tl.sum(value, 0), TINY)
    tl.store(ids + token * TOPK + slot, chosen, mask=used)
    tl.store(weights + token * TOPK + slot, value * FACTOR, mask=used)


@triton.jit
def situ_kernel(gate_up, h, S, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """h[t, i] = SiTU(gate_up[t, i], gate_up[t, S + i])."""
    token = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < S
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up + token * 2 * S + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * S + S + i, mask=inside, other=0.0).to(tl.float32)
    value = BETA * tanh(gate / BETA) * sigmoid(gate)
    if LINEAR_BETA is not None:
        up = LINEAR_BETA * tanh(up / LINEAR_BETA)
    tl.store(h + token * S + i, (value * up).to(h.dtype.element_ty), mask=inside)


@triton.jit
def norm_kernel(x, weight, out, EPS: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t] = x[t] / sqrt(mean(x[t]²) + eps) · weight."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + token * H + i, mask=i < H, other=0.0).to(tl.float32)
    scale = tl.load(weight + i, mask=i < H, other=0.0).to(tl.float32)
    rate = tl.rsqrt(tl.sum(value * value, 0) / H + EPS)
    tl.store(out + token * H + i, (value * rate * scale).to(out.dtype.element_ty), mask=i < H)
