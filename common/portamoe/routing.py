"""Router rules, and the alignment of (token, slot) pairs to experts, in torch.

A backend receives `topk_ids` and `topk_weights`; the rules here are what makes them. No function here waits for a GPU,
and no tensor's size depends on the routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from portamoe.spec import MoESpec


class Router(Protocol):
    """A rule that turns router logits into expert ids and weights."""

    top_k: int

    def __call__(
        self, logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return topk_ids (T, K) int32 and topk_weights (T, K) float32 for logits (T, E)."""
        ...


@dataclass(frozen=True)
class SigmoidRouter:
    """Kimi-K3's rule: s = sigmoid(logits); the K largest of s + bias; weights s, renormalised, times a factor.

        w_k = routed_scaling_factor · s_k / Σ_j s_j

    top_k:                  K
    renormalize:            divide by the sum of the chosen s (Kimi-K3: moe_renormalize true)
    routed_scaling_factor:  applied here and nowhere else in this library (Kimi-K3: 1.0)

    The bias takes part in the selection only. Equal scores: the lower id first. A NaN score is chosen only when nothing
    else is left, and its weight is 0; so ids are distinct and weights finite whatever the logits.

    Source: vLLM 0.33.0, model_executor/layers/fused_moe/router/grouped_topk_router.py, with one group.
    """

    top_k: int
    renormalize: bool = True
    routed_scaling_factor: float = 1.0

    def __call__(
        self, logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts and weights.

        logits:           (T, E) float; computed in float32, or float64 if they are
        correction_bias:  (E,) float or None
        returns           topk_ids (T, K) int32, topk_weights (T, K) float32, by falling score

        Raises ValueError or TypeError for wrong shapes or dtypes and for K > E.
        """
        scores = _checked(logits, self.top_k).sigmoid()
        choice = scores
        if correction_bias is not None:
            if correction_bias.shape != logits.shape[1:]:
                raise ValueError(
                    f"correction_bias has shape {tuple(correction_bias.shape)}, expected {tuple(logits.shape[1:])}"
                )
            choice = scores + correction_bias.to(scores.dtype)
        ids = _top_k(choice, self.top_k)
        weights = scores.gather(1, ids)
        weights = torch.where(choice.gather(1, ids).isnan(), 0.0, weights)
        if self.renormalize:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return ids.to(torch.int32), (weights * self.routed_scaling_factor).float()


@dataclass(frozen=True)
class SoftmaxRouter:
    """Softmax top-k: the K largest logits; weights are the softmax over those K, or over all E.

    top_k:        K
    renormalize:  True: w_k = exp(l_k) / Σ_chosen exp(l_j) (gpt-oss); False: the sum runs over all E experts

    Equal logits: the lower id first. Infinite logits count as the largest finite ones, a NaN logit is chosen only when
    nothing else is left, and its weight is 0; so ids are distinct and weights finite whatever the logits.
    """

    top_k: int
    renormalize: bool = True

    def __call__(
        self, logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts and weights.

        logits:           (T, E) float; computed in float32, or float64 if they are
        correction_bias:  not part of this rule: ValueError
        returns           topk_ids (T, K) int32, topk_weights (T, K) float32, by falling logit

        Raises ValueError or TypeError for wrong shapes or dtypes and for K > E.
        """
        if correction_bias is not None:
            raise ValueError("the softmax rule has no correction bias; use SigmoidRouter")
        logits = _checked(logits, self.top_k)
        missing = logits.isnan()
        finite = logits.nan_to_num(nan=torch.finfo(logits.dtype).min)  # ±Inf become the largest finite values
        ids = _top_k(logits, self.top_k)
        largest = finite.amax(1, keepdim=True)
        powers = torch.where(missing, 0.0, (finite - largest).exp())
        chosen = powers.gather(1, ids)
        total = (chosen if self.renormalize else powers).sum(1, keepdim=True)
        weights = chosen / total.clamp(min=torch.finfo(torch.float32).tiny)
        return ids.to(torch.int32), weights.float()


def _checked(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the logits in at least float32, contiguous, after looking at shape, dtype and K.

    Contiguous, because torch computes a strided row with other instructions, which may differ in the last bit.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}, expected (T, E)")
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits are {logits.dtype}, expected a float dtype")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k is {top_k}, expected 1 to {logits.shape[1]}, the number of experts")
    return (logits if logits.dtype == torch.float64 else logits.float()).contiguous()


def _top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return (T, K) ids by falling score: lower id first among equals, NaN after everything else."""
    # A stable sort on the score, then a stable sort that moves NaN back: `topk` promises no order among equals.
    order = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argsort(
        dim=1, descending=True, stable=True
    )
    last = scores.isnan().gather(1, order).to(torch.uint8).argsort(dim=1, stable=True)
    return order.gather(1, last)[:, :top_k]


@dataclass(frozen=True)
class Alignment:
    """(token, slot) pairs in the order of this rank's experts; the sizes do not depend on the routing.

    pairs:    (T·K,) int64 — flat pair index token·K + slot, by local expert, ascending within one; pairs that this rank
              does not compute stand after offsets[-1]
    offsets:  (E_local + 1,) int64 — expert e has pairs[offsets[e] : offsets[e + 1]]
    top_k:    K
    """

    pairs: torch.Tensor
    offsets: torch.Tensor
    top_k: int

    @property
    def counts(self) -> torch.Tensor:
        """Rows of each local expert, (E_local,) int64."""
        return self.offsets.diff()

    @property
    def tokens(self) -> torch.Tensor:
        """Token of each pair, (T·K,) int64."""
        return self.pairs.div(self.top_k, rounding_mode="floor")


def align(topk_ids: torch.Tensor, spec: MoESpec) -> Alignment:
    """Sort the pairs by local expert, stably.

    topk_ids:  (T, K) int32 or int64, ids of the whole layer; -1 and ids outside `spec.local_experts` are left out

    Raises ValueError or TypeError for another shape or dtype.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids are {topk_ids.dtype}, expected int32 or int64")
    if topk_ids.dim() != 2 or topk_ids.shape[1] != spec.top_k:
        raise ValueError(f"topk_ids have shape {tuple(topk_ids.shape)}, expected (T, {spec.top_k})")
    local, count = spec.local_experts, spec.num_local_experts
    ids = topk_ids.reshape(-1).to(torch.int64)
    here = (ids >= local.start) & (ids < local.stop)
    keys, pairs = torch.where(here, ids - local.start, count).sort(stable=True)
    edges = torch.arange(count + 1, device=ids.device)
    return Alignment(pairs=pairs, offsets=torch.searchsorted(keys, edges), top_k=spec.top_k)
