"""A plug-in for a peers harness: this library's backends on the harness's canonical weights.

`build(weights, spec) -> callable(x, topk_ids, topk_weights)`; the backend is PORTAMOE_PEERS_BACKEND,
"module:attribute".
weights: w13 (E, 2I, H/2), w13_scale, w2 (E, H, I/2), w2_scale, uint8; spec: hidden, intermediate, experts, local_experts,
top_k, beta, linear_beta.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from portamoe.activations import SiTU
from portamoe.spec import MoESpec
from portamoe.weights import ExpertWeights


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


def build(weights: Any, spec: Any) -> Any:
    own = moe_spec(spec)
    device = weights.w13.device
    module, _, attribute = os.environ.get("PORTAMOE_PEERS_BACKEND", "rocm_moe.triton_unfused:BACKEND").partition(":")
    backend = getattr(importlib.import_module(module), attribute)
    source = ExpertWeights(w13=weights.w13, w2=weights.w2, w13_scale=weights.w13_scale, w2_scale=weights.w2_scale)
    prepared = backend.prepare(source, own, device)
    backend.warm_up(prepared, 8192, backend.default_max_local_rows(own, 8192))

    def forward(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        rows = backend.default_max_local_rows(own, x.shape[0])
        size = backend.workspace_bytes(own, x.shape[0], rows)
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        out = torch.empty_like(x)
        backend.forward(prepared, x, topk_ids, topk_weights, workspace, out, max_local_rows=rows)
        return out

    forward.prepared, forward.backend, forward.spec = prepared, backend, own  # type: ignore[attr-defined]
    return forward
