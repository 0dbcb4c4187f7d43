"""Plug-ins for a peers harness: this library's public layer on the harness's canonical weights.

`triton_fused` and `triton_unfused` have the signature that the harness asks for,
`build(weights, spec) -> callable(x, topk_ids, topk_weights)`, and run under CUDA-graph capture.
weights: w13 (E, 2I, H/2), w13_scale, w2 (E, H, I/2), w2_scale, uint8; spec: hidden, intermediate, experts,
local_experts, top_k, beta, linear_beta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from portamoe.activations import SiTU
from portamoe.layer import RoutedExperts
from portamoe.spec import MoESpec
from portamoe.weights import ExpertWeights

MAX_TOKENS = 8192


def triton_fused(weights: Any, spec: Any) -> Callable[..., Any]:
    """Build the layer on the backend of that name."""
    return _layer("triton_fused", weights, spec)


def triton_unfused(weights: Any, spec: Any) -> Callable[..., Any]:
    """Build the layer on the backend of that name."""
    return _layer("triton_unfused", weights, spec)


def moe_spec(spec: Any) -> MoESpec:
    """Return the library's spec of a harness spec."""
    return MoESpec(
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_experts=spec.experts,
        top_k=spec.top_k,
        activation=SiTU(spec.beta, spec.linear_beta),
        local_experts=range(spec.local_experts),
    )


def _layer(backend: str, weights: Any, spec: Any) -> RoutedExperts:
    source = ExpertWeights(w13=weights.w13, w2=weights.w2, w13_scale=weights.w13_scale, w2_scale=weights.w2_scale)
    # No warm_up: it would compile for every number of tokens, and the harness calls once before it captures.
    return RoutedExperts(moe_spec(spec), source, device=weights.w13.device, backend=backend, max_tokens=MAX_TOKENS)
