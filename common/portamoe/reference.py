"""The truth that every backend is compared with: the MoE in float32 on dequantised weights, expert after expert.

    y[t] = Σ_e w[t, e] · (W2_e · q(f(W1_e · q(x[t]) + b1_e, W3_e · q(x[t]) + b3_e)) + b2_e)   over this rank's experts e

f is the activation, q the rounding to the spec's activation format (nothing for "bf16"), w[t, e] the sum of the weights
of the slots of t that name e. Experts are added in ascending id. Slow and plain on purpose.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from portamoe.formats import decode_e2m1, decode_e8m0, quantize_activations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portamoe.spec import MoESpec
    from portamoe.weights import Expert, ExpertSource


def moe_reference(
    spec: MoESpec,
    weights: ExpertSource,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """Return this rank's weighted sum of its experts, without any rounding below float32.

    weights:       this rank's experts, canonical, on any device
    x:             (T, H) float
    topk_ids:      (T, K) integer ids of the whole layer; -1 and ids outside `spec.local_experts` contribute nothing
    topk_weights:  (T, K) float
    returns        (T, H) float32, or float64 where x is float64, on the device of x

    A NaN in a token's x stays in that token's row. Not for graph capture: it looks at the routing on the host.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros(x.shape, dtype=dtype, device=x.device)
    with full_precision():
        for index, expert_id in enumerate(spec.local_experts):
            slots = topk_ids == expert_id
            tokens = slots.any(dim=1).nonzero().flatten()
            if not len(tokens):
                continue
            weight = torch.where(slots, topk_weights, 0.0).to(dtype).sum(dim=1)[tokens]
            result = expert_reference(spec, weights.expert(index), x[tokens].to(dtype))
            total[tokens] += weight[:, None] * result
    return total


def expert_reference(spec: MoESpec, expert: Expert, x: torch.Tensor) -> torch.Tensor:
    """Return one expert's output for every row of x, unweighted.

    x:       (R, H) float32 or float64, the dtype of the computation
    returns  (R, H)
    """
    w13, w2 = (matrix.to(x.dtype) for matrix in dequantized(expert, x.device))
    gate_up = round_activations(x, spec, expert.w13_input_scale) @ w13.T
    if expert.w13_bias is not None:
        gate_up += expert.w13_bias.to(x.device, x.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    h = round_activations(spec.activation(gate, up), spec, expert.w2_input_scale)
    result = h @ w2.T
    if expert.w2_bias is not None:
        result += expert.w2_bias.to(x.device, x.dtype)
    return result


def dequantized(expert: Expert, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w13 (2I, H), gate rows first, and w2 (H, I) as float64; only NVFP4 is rounded, once.

    device:  where; default: where the expert lies
    """
    return (
        _dequantized(expert.w13, expert.w13_scale, expert.w13_global_scale, device),
        _dequantized(expert.w2, expert.w2_scale, expert.w2_global_scale, device),
    )


def _dequantized(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    device: torch.device | None,
) -> torch.Tensor:
    if scale is None:
        return weight.to(device).double()
    values = decode_e2m1(weight.to(device)).double()
    scale = scale.to(device)
    scales = decode_e8m0(scale) if global_scale is None else scale.float()
    values *= scales.double().repeat_interleave(values.shape[-1] // scales.shape[-1], dim=-1)
    if global_scale is not None:  # (2,) for the rows of w1 and of w3, () for all rows of w2
        factors = global_scale.to(device).double().reshape(-1)
        values *= factors.repeat_interleave(values.shape[0] // len(factors))[:, None]
    return values


def round_activations(x: torch.Tensor, spec: MoESpec, input_scale: torch.Tensor | None) -> torch.Tensor:
    """Return x rounded as the spec's activation format asks before a GEMM, in the dtype of x.

    input_scale:  NVFP4's global scale: () or, for x of GEMM1, (2,) of w1 and w3, of which the larger serves both;
                  None counts as 1. Other formats have none.
    """
    if spec.activation_format == "bf16":
        return x
    scale = None
    if spec.activation_format == "nvfp4":
        scale = torch.ones((), device=x.device) if input_scale is None else input_scale.to(x.device).amax()
    return quantize_activations(x, spec.activation_format, scale).to(x.dtype)


@contextmanager
def full_precision() -> Iterator[None]:
    """Keep float32 matrix products in float32 (no TF32, no bf16 passes), whatever the process has allowed."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
