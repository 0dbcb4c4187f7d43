"""What `portamoe bench` times: this library's layer on each backend, and peers, as builders of callables.

A module or folder of peers is the user's: a folder holds `peers.py`, which may import its neighbours. It has

    PEERS: {name: build(weights, spec) -> callable(x, topk_ids, topk_weights) -> (T, H)}
    use_payload(folder)     optional, called once with --payload

with weights.w13, w13_scale, w2 and w2_scale as in `ExpertWeights`, and a `PeerSpec`. The callable runs under capture.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.activations import SiTU
from portamoe.cli._report import PEER
from portamoe.testing.tolerances import ErrorMetrics, Tolerance, tolerance, tolerance_of

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertWeights

#: A peer counts as right up to this relative RMS error; backends are held to the tolerance table.
PEER_TOLERANCE = Tolerance(rms=0.01, max=math.inf, token=math.inf)


@dataclass(frozen=True)
class Implementation:
    """Something to time: `call(x, topk_ids, topk_weights)`, how exact it must be, what else is known of it."""

    name: str
    call: Callable[..., torch.Tensor]
    bounds: Tolerance
    facts: Callable[[int], dict[str, Any]] = lambda _: {}

    def wrong(self, error: ErrorMetrics) -> bool:
        """Say whether a result is beyond the bounds, or has a NaN or Inf of its own."""
        bounds = self.bounds
        within = error.rms <= bounds.rms and error.max <= bounds.max and error.token <= bounds.token
        return not within or error.misplaced > 0


Builder = Callable[[], Implementation]


@dataclass(frozen=True)
class PeerSpec:
    """Sizes as peers get them: ids below `local_experts` are on this rank, of `experts` in all."""

    hidden: int
    intermediate: int
    experts: int
    local_experts: int
    top_k: int
    beta: float
    linear_beta: float

    @property
    def expert_parallel(self) -> bool:
        """Whether some experts are on other ranks."""
        return self.local_experts != self.experts

    def local_rows(self, tokens: int) -> int:
        """Return the (token, expert) pairs that uniform routing sends to this rank."""
        return math.ceil(tokens * self.top_k * self.local_experts / self.experts)


def peer_spec(spec: MoESpec) -> PeerSpec:
    """Return the sizes for peers; raises ValueError for what the contract cannot say."""
    activation = spec.activation
    if not isinstance(activation, SiTU) or activation.linear_beta is None:
        raise ValueError(f"peers are timed with SiTU of two betas, got {activation}")
    if spec.bias or spec.weight_format != "mxfp4" or spec.activation_format != "bf16" or spec.local_experts.start:
        raise ValueError("peers are timed on MXFP4 weights, without biases, on the rank of the first experts")
    sizes = (spec.hidden_size, spec.intermediate_size, spec.num_experts, spec.num_local_experts, spec.top_k)
    return PeerSpec(*sizes, activation.beta, activation.linear_beta)


def backends(
    spec: MoESpec, weights: ExpertWeights, facts: Device, device: torch.device, most: int, wanted: Sequence[str]
) -> dict[str, Builder]:
    """Return a builder for each accepted backend, or for those in `wanted`, whose refusal then raises."""
    from portamoe import registry
    from portamoe.decision import Accepted

    names = [d.backend for d in registry.decide(spec, facts) if isinstance(d, Accepted)]
    return {name: _layer(name, spec, weights, device, most) for name in (wanted or names)}


def _layer(name: str, spec: MoESpec, weights: ExpertWeights, device: torch.device, most: int) -> Builder:
    def build() -> Implementation:
        from portamoe.layer import RoutedExperts

        # Every result is compared with float32 anyway. No warm_up: it would compile for every number of tokens, and
        # each cell calls once before it captures.
        layer = RoutedExperts(spec, weights, device=device, backend=name, max_tokens=most, canary="skip")

        def facts(tokens: int) -> dict[str, Any]:
            rows = layer.backend.default_max_local_rows(spec, tokens)
            return {"workspace_bytes": layer.backend.workspace_bytes(spec, tokens, rows)}

        return Implementation(name, layer, tolerance(tolerance_of(spec, layer.backend)), facts)

    return build


def peers(module: ModuleType, wanted: Sequence[str], spec: MoESpec, weights: ExpertWeights) -> dict[str, Builder]:
    """Return a builder for each peer of a module, or for those in `wanted`."""
    if unknown := set(wanted) - set(module.PEERS):
        raise ValueError(f"unknown peer {', '.join(sorted(unknown))}; known: {', '.join(module.PEERS)}")

    def builder(name: str) -> Builder:
        def build() -> Implementation:
            return Implementation(PEER + name, module.PEERS[name](weights, peer_spec(spec)), PEER_TOLERANCE)

        return build

    return {PEER + name: builder(name) for name in module.PEERS if not wanted or name in wanted}


def load_peers(source: str, payload: str | None) -> ModuleType:
    """Import the module of that name, or `peers.py` of that folder, and hand it its payload."""
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "peers.py").is_file():
            raise ValueError(f"--peers {source}: the folder holds no peers.py")
        # Its neighbours are imported by their bare names, now and when a peer is built.
        sys.path.insert(0, str(folder.resolve()))
        module = importlib.import_module("peers")
    else:
        module = importlib.import_module(source)
    if not getattr(module, "PEERS", None):
        raise ValueError(f"--peers {source} names no PEERS; see portamoe.cli._implementations")
    if payload and hasattr(module, "use_payload"):
        module.use_payload(payload)
    return module
