"""Backends that compute on the CPU with the reference, right or with one fault that real libraries have had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from portamoe.activations import Activation
from portamoe.backend import WarmUpReport
from portamoe.reference import moe_reference
from portamoe.spec import MoESpec
from portamoe.weights import ExpertWeights, stack


@dataclass(frozen=True)
class Formula(Activation):
    """An activation of any formula, to stand in for the one asked for."""

    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def _formula(self, gate, up):
        return self.function(gate, up)


@dataclass
class Prepared:
    spec: MoESpec
    weights: ExpertWeights
    tactic: str | None = None
    nbytes: int = 0


class Right:
    """Computes what was asked and rounds once; counts what it was asked to do."""

    roundings = 1
    deterministic = True
    graph_safe = False

    def __init__(self, name: str = "right", priority: int = 10, **attributes: Any) -> None:
        self.name, self.package, self.priority = name, f"{name}_package", priority
        self.prepared = 0
        self.calls: list[int] = []
        for key, value in attributes.items():
            setattr(self, key, value)

    def check(self, spec, device):
        return []

    def only_on_request(self, spec, device):
        return None

    def prepare(self, weights, spec, device, progress=None):
        self.prepared += 1
        return Prepared(spec, stack(weights))

    def default_max_local_rows(self, spec, max_tokens):
        return max_tokens * spec.top_k

    def workspace_bytes(self, spec, max_tokens, max_local_rows):
        return 256

    def warm_up(self, prepared, max_tokens, max_local_rows):
        return WarmUpReport(0, 0.0)

    def forward(self, prepared, x, topk_ids, topk_weights, workspace, out, *, max_local_rows):
        self.calls.append(len(x))
        out.copy_(self.compute(prepared, x, topk_ids, topk_weights))

    def compute(self, prepared, x, ids, weights):
        return moe_reference(self.spec(prepared, len(x)), self.weights(prepared), x, ids, weights)

    def spec(self, prepared, tokens):
        return prepared.spec

    def weights(self, prepared):
        return prepared.weights


class Computes(Right):
    """Computes another activation, for all or only for some numbers of tokens."""

    def __init__(self, activation, where=lambda tokens: True, **how):
        super().__init__(**{"name": "faulty", "priority": 20} | how)
        self.activation, self.where = activation, where

    def spec(self, prepared, tokens):
        return replace(prepared.spec, activation=self.activation) if self.where(tokens) else prepared.spec


class ServesMinusOne(Right):
    """Takes an id of -1 for an expert."""

    def __init__(self, expert=0, **how):
        super().__init__(**{"name": "faulty", "priority": 20} | how)
        self.expert = expert

    def compute(self, prepared, x, ids, weights):
        return super().compute(prepared, x, torch.where(ids == -1, self.expert, ids), weights)


class NotFinite(Right):
    """Leaves NaN in one row of calls of several."""

    def compute(self, prepared, x, ids, weights):
        y = super().compute(prepared, x, ids, weights)
        y[-1, 0] = torch.nan
        return y


class Raises(Right):
    """Raises what it was given."""

    def __init__(self, error, **how):
        super().__init__(**{"name": "faulty", "priority": 20} | how)
        self.error = error

    def compute(self, prepared, x, ids, weights):
        raise self.error


class MixesScales(Right):
    """Uses the scale of the expert before."""

    def weights(self, prepared):
        return replace(prepared.weights, w2_scale=prepared.weights.w2_scale.roll(1, 0))


class OneRowWrong(Right):
    """Zeroes one row of large calls."""

    def compute(self, prepared, x, ids, weights):
        y = super().compute(prepared, x, ids, weights)
        if len(y) > 40:
            y[37] = 0.0
        return y


class Tactics(Right):
    """Has two tactics; the second drops the betas, and the runtime picks it when nobody looks."""

    def __init__(self, activation, **how):
        super().__init__(**{"name": "faulty", "priority": 20} | how)
        self.activation = activation

    def tactics(self, spec, max_tokens):
        return ("one_cta", "two_cta")

    def canary_token_buckets(self, spec, max_tokens):
        return (4,)

    @contextmanager
    def pinned(self, prepared, tactic) -> Iterator[None]:
        prepared.tactic = tactic
        yield
        prepared.tactic = None

    def spec(self, prepared, tokens):
        return replace(prepared.spec, activation=self.activation) if prepared.tactic == "two_cta" else prepared.spec
