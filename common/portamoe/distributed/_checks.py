"""What the self-test compares with one process: every form and sum, and routings that have broken other libraries."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from portamoe.activations import SiTU
from portamoe.distributed.expert_parallel import Combine, ExpertParallel, Form
from portamoe.distributed.placement import split_experts
from portamoe.distributed.rank_group import RankGroup
from portamoe.layer import RoutedExperts
from portamoe.layouts import slice_tensor_parallel
from portamoe.reference import moe_reference
from portamoe.spec import MoESpec
from portamoe.testing import error_metrics, make_problem, tolerance
from portamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Small, with an uneven split over 2, 4 and 8 ranks and K above the number of ranks of one node's GPUs in none.
SPEC = MoESpec(
    hidden_size=256,
    intermediate_size=256,
    num_experts=19,
    top_k=4,
    activation=SiTU(beta=4.0, linear_beta=25.0),
)
MAX_TOKENS = 256


@dataclass(frozen=True)
class Case:
    """One comparison: how tokens lie and are routed, and how they travel.

    tokens:  rank and number of ranks -> T of that rank
    bitwise: promised, not only close
    """

    name: str
    routing: Any
    tokens: Callable[[int, int], int]
    form: Form
    combine: Combine
    window: int | None = None

    @property
    def bitwise(self) -> bool:
        """One round of exact sums has the bits of one process; several have them where rows keep theirs."""
        return self.combine == "exact" and self.window is None


class Result(NamedTuple):
    """The worst rank of a comparison: the same bits, and errors relative to the float32 reference."""

    name: str
    bitwise: bool
    promised: bool
    rms: float
    limit: float

    @property
    def passed(self) -> bool:
        """Close enough, and bit for bit where promised."""
        return self.rms <= self.limit and (self.bitwise or not self.promised)


def _even(_rank: int, _size: int) -> int:
    return 12


def _uneven(rank: int, _size: int) -> int:
    return (7, 0, 23, 1)[rank % 4]


def _one_sided(rank: int, size: int) -> int:
    return 20 if rank == size - 1 else 0


def _none(_rank: int, _size: int) -> int:
    return 0


def _cases() -> Iterator[Case]:
    layouts = (
        ("even", "uniform", _even),
        ("uneven", "uniform", _uneven),
        ("one rank has all tokens", "uniform", _one_sided),
        ("skewed", "skew", _uneven),
        ("one expert", "one_expert", _uneven),
        ("same experts", "same", _even),
        ("duplicates", "duplicates", _even),
        ("no tokens", "uniform", _none),
    )
    forms: tuple[Form, ...] = ("all_to_all", "all_gather")
    sums: tuple[Combine, ...] = ("exact", "partial_sums")
    for form in forms:
        for combine in sums:
            for name, routing, tokens in layouts:
                yield Case(f"{form} {combine}: {name}", routing, tokens, form, combine)
            yield Case(f"{form} {combine}: rounds", "uniform", _uneven, form, combine, window=5)
    yield Case("auto exact: uneven", "uniform", _uneven, "auto", "exact")


CASES = tuple(_cases())


class Bench:
    """The ranks' layers and one process's layer for the same random problem.

    device, backend:  as of `RoutedExperts`
    """

    def __init__(self, ranks: RankGroup, backend: str | None, spec: MoESpec = SPEC) -> None:
        self.ranks, self.spec, self.backend = ranks, spec, backend
        self.weights = make_problem(spec, 1, seed=7, device=ranks.device).weights
        self.single = self._layer(spec, self.weights)
        local = split_experts(spec.num_experts, ranks.rank, ranks.size)
        self.layer = self._layer(replace(spec, local_experts=local), _cut(self.weights, local))

    def run(self, case: Case) -> Result:
        """Compare one case on all ranks."""
        problem, mine = self._problem(case)
        inputs = (problem.x, problem.topk_ids, problem.topk_weights)
        parallel = ExpertParallel(self.layer, self.ranks, form=case.form, combine=case.combine, window=case.window)
        out = parallel(*(tensor[mine] for tensor in inputs))
        expected, same = whole(self.single, *inputs)[mine], True
        if "float32" in getattr(self.layer.backend, "x_dtypes", ()):
            # Rounded to bf16, sums in another order look alike; in float32 they do not.
            finer = (problem.x.float(), *inputs[1:])
            same = torch.equal(parallel(*(tensor[mine] for tensor in finer)), whole(self.single, *finer)[mine])
        reference, more = problem.reference()[mine], int(case.combine == "partial_sums")
        return self._result(case.name, case.bitwise, out, expected, reference, more, same=same)

    def run_slices(self, combine: Combine = "exact") -> Result | None:
        """Compare two slices of I over neighbours, experts over the rest; None for an odd number of ranks."""
        ranks = self.ranks
        if ranks.size % 2:
            return None
        pairs: list[Any] = [dist.new_group([r, r + 1]) for r in range(0, ranks.size, 2)]
        rest: list[Any] = [dist.new_group(list(range(r, ranks.size, 2))) for r in range(2)]
        tensor = RankGroup(pairs[ranks.rank // 2], ranks.device, timeout=ranks.timeout)
        expert = RankGroup(rest[ranks.rank % 2], ranks.device, timeout=ranks.timeout)
        spec = replace(self.spec, intermediate_size=self.spec.intermediate_size // 2)
        slices = [slice_tensor_parallel(self.weights, half, 2) for half in range(2)]
        local = split_experts(spec.num_experts, expert.rank, expert.size)
        layer = self._layer(replace(spec, local_experts=local), _cut(slices[tensor.rank], local))
        case = Case("slices of I", "uniform", lambda rank, _size: 9 + rank, "auto", combine)
        problem, mine = self._problem(case, expert)
        inputs = (problem.x, problem.topk_ids, problem.topk_weights)
        parallel = ExpertParallel(layer, expert, tensor_group=tensor, combine=combine)
        out = parallel(*(t[mine] for t in inputs))
        halves = [whole(self._layer(spec, part), *inputs) for part in slices]
        expected = (halves[0].float() + halves[1].float()).to(out.dtype)
        reference = problem.reference()[mine]
        name = f"{ranks.size // 2} x experts, 2 x slices of I, {combine}"
        result = self._result(name, combine == "exact", out, expected[mine], reference, 1)
        parallel.close()
        return result

    def run_captured(self, tokens: int = 8) -> Result:
        """Capture the all-gather form in a GPU graph, replay it with other inputs and compare with an eager call."""
        first, other = (
            make_problem(self.spec, tokens, seed=seed + self.ranks.rank, device=self.ranks.device)
            for seed in (100, 200)
        )
        parallel = ExpertParallel(self.layer, self.ranks, form="all_gather")
        held = [t.clone() for t in (first.x, first.topk_ids, first.topk_weights)]
        out = torch.empty_like(held[0])
        stream: Any = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                parallel(*held, out=out)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            parallel(*held, out=out)
        inputs = (other.x, other.topk_ids, other.topk_weights)
        for target, source in zip(held, inputs, strict=True):
            target.copy_(source)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = parallel(*inputs)
        reference = moe_reference(self.spec, self.weights, *inputs)
        return self._result("captured all_gather exact, replayed with other routing", True, out, expected, reference, 0)

    def _problem(self, case: Case, ranks: RankGroup | None = None) -> tuple[Any, slice]:
        """Return all ranks' tokens, in order of ranks, and which of them are this rank's."""
        ranks = ranks or self.ranks
        counts = [case.tokens(rank, ranks.size) for rank in range(ranks.size)]
        first = sum(counts[: ranks.rank])
        problem = make_problem(
            self.spec, max(1, sum(counts)), seed=3, device=ranks.device, routing=case.routing, minus_one=0.1
        )
        return replace(problem, weights=self.weights), slice(first, first + counts[ranks.rank])

    def _result(
        self,
        name: str,
        promised: bool,  # noqa: FBT001, RUF100
        out: torch.Tensor,
        expected: torch.Tensor,
        reference: torch.Tensor,
        more_roundings: int,
        *,
        same: bool = True,
    ) -> Result:
        roundings = getattr(self.layer.backend, "roundings", 4) + more_roundings
        limit = tolerance(roundings if roundings <= 2 else 4).rms
        rms = error_metrics(out, reference).rms if len(out) else 0.0
        mine = (same and bool(torch.equal(out, expected)), rms)
        everyone = self.ranks.gather_objects(mine)
        return Result(name, all(same for same, _ in everyone), promised, max(rms for _, rms in everyone), limit)

    def _layer(self, spec: MoESpec, weights: ExpertWeights) -> RoutedExperts:
        device = str(self.ranks.device)
        layer = RoutedExperts(
            spec, weights, max_tokens=MAX_TOKENS, device=device, backend=self.backend, max_local_rows=MAX_TOKENS * 4
        )
        layer.warm_up()
        return layer


def whole(layer: RoutedExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return what one process computes: rows and their sum; the plain call where a backend has no rows."""
    if layer.row_dtype is None:
        return layer.forward(x, ids, weights)
    rows = torch.empty(ids.numel() + 1, x.shape[1], dtype=layer.row_dtype, device=x.device)
    layer.forward_rows(x, ids, rows)
    out = torch.empty_like(x)
    layer.sum_rows(rows, ids, weights, out)
    return out


def _cut(weights: ExpertWeights, local: range) -> ExpertWeights:
    out: dict[str, Any] = {}
    for field in fields(weights):
        stacked = getattr(weights, field.name)
        out[field.name] = None if stacked is None else stacked[local.start : local.stop]
    return ExpertWeights(**out)
