"""Cases of `portamoe bench`: layers as a rank sees them, routings, the batches of one graph, and the least time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portamoe.activations import SiTU
from portamoe.spec import GPT_OSS, KIMI_K3, MoESpec

if TYPE_CHECKING:
    import torch

#: Weights that one graph streams: several times the 60 MB of an H200's L2, so that they do not stay there.
ROTATED_BYTES = 300e6
MOST_SETS = 16
#: Bytes of a weight with its share of the scale.
WEIGHT_BYTES = {"mxfp4": 17 / 32, "nvfp4": 9 / 16, "bf16": 2.0}

#: Kimi-K3 with experts or I spread over ranks, and gpt-oss; gptoss-situ has no biases, so that every peer can run it.
CASES: dict[str, MoESpec] = {
    "k3-ep8": replace(KIMI_K3, local_experts=range(112)),
    "k3-ep16": replace(KIMI_K3, local_experts=range(56)),
    "k3-ep32": replace(KIMI_K3, local_experts=range(28)),
    "k3-tp8": replace(KIMI_K3, intermediate_size=384),
    "k3-tp16": replace(KIMI_K3, intermediate_size=192),
    "gptoss": GPT_OSS,
    "gptoss-situ": replace(GPT_OSS, activation=SiTU(beta=4.0, linear_beta=25.0), bias=False),
}
UNIFORM, SKEW, ONE_SIDED = "uniform", "skew", "one-sided"
#: Suffixes of a case's name: a few experts get most tokens; every expert of every token is on this rank.
ROUTINGS = (UNIFORM, SKEW, ONE_SIDED)
#: Popularity of the expert of rank r among all: 1 / (r + 4), in an order that is drawn once.
SKEW_OFFSET, SKEW_SEED = 4, 3
#: Up to so many tokens this rank gets exactly its share of the pairs: their number would decide the time.
FEW_TOKENS, DRAWS = 4, 200


@dataclass(frozen=True)
class Case:
    """A layer and a routing; `name` is that of the layer, with the routing behind it unless that is uniform."""

    name: str
    layer: str
    routing: str

    @property
    def spec(self) -> MoESpec:
        """The layer's sizes."""
        return CASES[self.layer]


@dataclass(frozen=True)
class Inputs:
    """One token batch: x (T, H) bf16, topk_ids (T, K) int32, topk_weights (T, K) float32."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def __iter__(self) -> Any:
        return iter((self.x, self.topk_ids, self.topk_weights))


def case(name: str) -> Case:
    """Return the case of that name; raises ValueError for an unknown one, and for a one-sided layer without a side."""
    layer, _, routing = name.partition("_")
    if layer not in CASES or (routing or UNIFORM) not in ROUTINGS or name.endswith(f"_{UNIFORM}"):
        known = ", ".join(CASES)
        raise ValueError(f"unknown case {name!r}; known: {known}, each also with _{SKEW}, those of a rank _{ONE_SIDED}")
    spec = CASES[layer]
    if routing == ONE_SIDED and spec.num_local_experts == spec.num_experts:
        raise ValueError(f"{layer} has every expert on this rank: take it without _{ONE_SIDED}")
    return Case(name, layer, routing or UNIFORM)


def names() -> list[str]:
    """Return the name of every case."""
    found = []
    for layer, spec in CASES.items():
        whole = spec.num_local_experts == spec.num_experts
        found += [layer, f"{layer}_{SKEW}", *([] if whole else [f"{layer}_{ONE_SIDED}"])]
    return found


def make_inputs(spec: MoESpec, x_std: float, tokens: int, routing: str, device: torch.device) -> list[Inputs]:
    """Return the batches that one graph rotates through, the same in every run; enough to outgrow the L2 cache."""
    sets = [_draw(spec, x_std, tokens, routing, device, 1000)]
    streamed = max(1.0, hits(spec, sets[0].topk_ids) * expert_bytes(spec))
    least = 1 if tokens >= 256 else 2
    count = max(least, min(MOST_SETS, math.ceil(ROTATED_BYTES / streamed)))
    sets += [_draw(spec, x_std, tokens, routing, device, 1000 + index) for index in range(1, count)]
    return sets


def _draw(spec: MoESpec, x_std: float, tokens: int, routing: str, device: torch.device, seed: int) -> Inputs:
    import torch

    from portamoe.testing import make_routing, make_x

    generator = torch.Generator(device=device).manual_seed(seed)
    wanted = max(1, round(tokens * spec.top_k * spec.num_local_experts / spec.num_experts))
    ids, weights = make_routing(spec, tokens, generator, remote=routing != ONE_SIDED)
    if routing == SKEW:
        ids = _skewed(spec, tokens, generator)
    for _ in range(DRAWS if tokens <= FEW_TOKENS and routing == UNIFORM else 0):
        if _local(spec, ids).numel() == wanted:
            break
        ids, weights = make_routing(spec, tokens, generator)
    return Inputs(make_x(tokens, spec.hidden_size, x_std, generator).bfloat16(), ids, weights)


def _skewed(spec: MoESpec, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Draw (T, K) int32 distinct ids a token by the popularity above (Gumbel top-k)."""
    import torch

    order = torch.randperm(spec.num_experts, generator=torch.Generator().manual_seed(SKEW_SEED))
    uniform = torch.rand(tokens, spec.num_experts, generator=generator, device=generator.device).clamp_(1e-9, 1 - 1e-9)
    score = -torch.log(-torch.log(uniform)) - torch.log(order.to(generator.device).float() + SKEW_OFFSET)
    return score.topk(spec.top_k, dim=1).indices.int().contiguous()


def expert_bytes(spec: MoESpec) -> float:
    """Bytes of one expert's matrices with their scales."""
    return 3 * spec.hidden_size * spec.intermediate_size * WEIGHT_BYTES[spec.weight_format]


def _local(spec: MoESpec, ids: torch.Tensor) -> torch.Tensor:
    return ids[(ids >= spec.local_experts.start) & (ids < spec.local_experts.stop)]


def hits(spec: MoESpec, ids: torch.Tensor) -> int:
    """Number of this rank's experts that at least one token chose."""
    return int(_local(spec, ids).unique().numel())


def work(spec: MoESpec, sets: Sequence[Inputs], limit: dict[str, float]) -> dict[str, Any]:
    """Return what a call must do: `rows` (pairs of this rank), `experts` that are hit, `us` at least, and its `bound`.

    us = max((experts · bytes of an expert + x + result) / read rate, 6 · rows · H · I / matmul rate)
    """
    hit = sum(hits(spec, s.topk_ids) for s in sets) / len(sets)
    rows = sum(_local(spec, s.topk_ids).numel() for s in sets) / len(sets)
    moved = hit * expert_bytes(spec) + 4 * sets[0].x.numel()
    memory = moved / limit["read_tbs"] / 1e6
    flops = 6 * rows * spec.hidden_size * spec.intermediate_size / limit["matmul_tflops"] / 1e6
    us, bound = (memory, "memory") if memory >= flops else (flops, "flops")
    return {"us": round(us, 2), "bound": bound, "rows": round(rows, 1), "experts": round(hit, 1), "sets": len(sets)}
