"""The checks of the acceptance set, in order; those of speed are in `timing`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from portamoe import dispatch, verdicts
from portamoe.acceptance.shares import GROUPS, Share
from portamoe.activations import Activation, GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep
from portamoe.alternatives import label
from portamoe.canary import on_device, poisoned
from portamoe.gpu_timing import capture
from portamoe.layer import RoutedExperts
from portamoe.spec import MoESpec
from portamoe.testing import EDGE_CASES, Problem, Routing, assert_close, make_problem, tolerance_of

if TYPE_CHECKING:
    from portamoe.backend import Backend
    from portamoe.device import Device

Status = Literal["passed", "failed", "not run"]

#: Every activation of the core, with and without what is optional.
ACTIVATIONS: tuple[Activation, ...] = (
    SiTU(beta=4.0, linear_beta=25.0),
    SiTU(beta=4.0),
    SwiGLU(),
    SwiGLU(limit=7.0),
    SwiGLUOAI(alpha=1.702, limit=7.0),
    SwiGLUStep(limit=7.0),
    GeGLU(),
    GeGLU(approximate="tanh"),
    ReLU2(),
)
#: Numbers of tokens on both sides of what tiles and buckets end at.
TOKEN_EDGES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513)
LARGE_TOKEN_EDGES = (1023, 1024, 1025, 2048, 4095, 4096, 4097)
#: Numbers of tokens that the canary covers on a GPU, on a CPU and with --quick.
CANARY_TOKENS, FEW_TOKENS = 8192, 64
#: Windows of so many rows.
WINDOW_ROWS = (16, 100)


EVERYTHING = Share(GROUPS)


class NotRun(Exception):
    """A check that cannot be made here; says why."""


@dataclass(frozen=True)
class Check:
    """One check of one backend.

    group, case:  what was checked ("shape", "three_blocks")
    detail:       what came out, or why it failed or was not run
    figures:      numbers for the record: rms, us, the verdict
    """

    backend: str
    group: str
    case: str
    status: Status
    detail: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class Subject:
    """What is checked: a backend, the spec asked about, the small spec like it, where, and whether in a hurry.

    turn:  a file that is locked by whoever uses the device alone, to measure times
    """

    backend: Backend
    spec: MoESpec
    small: MoESpec
    device: Device
    quick: bool
    turn: str | None = None

    @property
    def gpu(self) -> bool:
        """Is it on a GPU?"""
        return self.device.vendor != "cpu"

    @property
    def where(self) -> torch.device:
        """The torch device."""
        return torch.device(self.device.torch_name)

    @property
    def deterministic(self) -> bool:
        """Does the backend promise the same bits for the same inputs here? Those that say nothing do."""
        here = getattr(self.backend, "deterministic_on", None)
        return bool(getattr(self.backend, "deterministic", True) if here is None else here(self.device))

    def accept(self, spec: MoESpec) -> None:
        """Raise NotRun where the backend refuses `spec`."""
        if reasons := self.backend.check(spec, self.device):
            raise NotRun("; ".join(map(str, reasons)))

    def problem(self, spec: MoESpec, tokens: int, **how: Any) -> Problem:
        """Return a problem on the device, drawn on the CPU so that it is the same everywhere."""
        return on_device(make_problem(spec, tokens, **how), self.where)

    def layer(self, problem: Problem, max_tokens: int = 0, **how: Any) -> RoutedExperts:
        """Return a layer of the problem's weights; its canary has a check of its own."""
        tokens = max(1, max_tokens or problem.x.shape[0])
        return RoutedExperts(
            problem.spec,
            problem.weights,
            device=self.where,
            backend=self.backend.name,
            max_tokens=tokens,
            canary="skip",
            **how,
        )

    def close(self, y: torch.Tensor, truth: torch.Tensor, spec: MoESpec) -> tuple[str, dict[str, Any]]:
        """Return the error in words and figures; AssertionError where it is beyond the tolerance."""
        row = tolerance_of(spec, self.backend)
        metrics = assert_close(y, truth, roundings=row)
        return f"relative RMS {metrics.rms:.2g}", {"rms": metrics.rms, "max": metrics.max, "tolerance": row}


Outcome = tuple[str, dict[str, Any]]
#: (group, case, what to do)
Planned = tuple[str, str, Callable[[], Outcome]]


def checks(
    subject: Subject,
    share: Share = EVERYTHING,
    done: Collection[tuple[str, str]] = (),
    begin: Callable[[str, str], None] | None = None,
) -> Iterator[Check]:
    """Run the checks of a share, one after the other; what a backend raises is a failed check.

    done:   (group, case) of those that are left out
    begin:  is told group and case of each check before it is run
    """
    seen: Counter[str] = Counter()
    for group, case, do in plan(subject):
        number = seen[group]
        seen[group] += 1
        if not share.has(group, number) or (group, case) in done:
            continue
        if begin is not None:
            begin(group, case)
        yield _checked(subject, group, case, do)


def _checked(subject: Subject, group: str, case: str, do: Callable[[], Outcome]) -> Check:
    start = time.perf_counter()
    status: Status
    try:
        detail, figures = do()
        status = "passed"
    except NotRun as why:
        status, detail, figures = "not run", str(why), {}
    except Exception as error:  # noqa: BLE001 - a backend may throw anything
        text = str(error).strip()
        known = isinstance(error, AssertionError) and text
        status, detail, figures = "failed", text if known else f"{type(error).__name__}: {text}", {}
    return Check(subject.backend.name, group, case, status, detail, time.perf_counter() - start, figures)


def plan(subject: Subject) -> Iterator[Planned]:
    """Yield every check in order, the cheapest proof first."""
    few = FEW_TOKENS if subject.quick or not subject.gpu else CANARY_TOKENS
    yield "canary", "spec", partial(_canary, subject, subject.spec, few)
    for activation in ACTIVATIONS:
        asked = replace(subject.spec, activation=activation)
        yield "activation", label(activation), partial(_canary, subject, asked, FEW_TOKENS)
    for case in EDGE_CASES:
        yield "shape", case.name, partial(_compare, subject, case.spec, case.tokens, routing=case.routing)
    yield from _token_edges(subject)
    for routing in get_args(Routing):
        yield "routing", routing, partial(_compare, subject, subject.small, 33, routing=routing)
    yield "routing", "minus_one", partial(_compare, subject, subject.small, 33, minus_one=0.3)
    for tokens in (1, 5, 129):
        yield "repeat", f"{tokens} tokens", partial(_repeat, subject, tokens)
    for rows in WINDOW_ROWS:
        yield "windows", f"{rows} rows", partial(_windows, subject, rows)
    for tokens in (1, 33):
        yield "graph", f"{tokens} tokens", partial(_graph, subject, tokens)
    from portamoe.acceptance import timing  # it needs what is above

    yield from timing.plan(subject)


def _canary(subject: Subject, spec: MoESpec, max_tokens: int) -> Outcome:
    subject.accept(spec)
    small = verdicts.canary_spec(subject.backend, spec, subject.device)
    verdict = dispatch.ensure(subject.backend, spec, subject.device, max_tokens, force=True)
    if verdict is None or small is None:
        raise NotRun(f"{subject.backend.name} accepts no small spec like this one")
    if not verdict.passed:
        raise AssertionError(verdict.reason)
    key = verdicts.key_of(subject.backend, small, subject.device)
    blind = f", not told from {', '.join(verdict.indistinct)}" if verdict.indistinct else ""
    figures = {"key": json.loads(key.text), "verdict": verdict.to_dict()}
    return f"{len(verdict.cases)} kernels or sizes{blind}", figures


def _compare(subject: Subject, spec: MoESpec, tokens: int, **how: Any) -> Outcome:
    subject.accept(spec)
    problem = subject.problem(spec, tokens, **how)
    y = subject.layer(problem)(problem.x, problem.topk_ids, problem.topk_weights)
    return subject.close(y, problem.reference(), spec)


def _token_edges(subject: Subject) -> Iterator[Planned]:
    edges = TOKEN_EDGES + (LARGE_TOKEN_EDGES if subject.gpu and not subject.quick else ())
    made: list[tuple[Problem, torch.Tensor, RoutedExperts]] = []

    def run(tokens: int) -> Outcome:
        if not made:  # once for all, when the first is run
            problem = subject.problem(subject.small, max(edges))
            made.append((problem, problem.reference(), subject.layer(problem)))
        problem, truth, layer = made[0]
        y = layer(problem.x[:tokens], problem.topk_ids[:tokens], problem.topk_weights[:tokens])
        return subject.close(y, truth[:tokens], subject.small)

    for tokens in edges:
        yield "tokens", str(tokens), partial(run, tokens)


def _repeat(subject: Subject, tokens: int) -> Outcome:
    if not subject.deterministic:
        raise NotRun(f"{subject.backend.name} does not promise the same bits")
    problem = subject.problem(subject.small, tokens)
    inputs = (problem.x, problem.topk_ids, problem.topk_weights)
    size = subject.layer(problem).workspace_bytes
    # What the workspace held before must not matter: NaN, huge, zero.
    layers = [subject.layer(problem, workspace=poisoned(size, subject.where, b)) for b in (0xFF, 0x7B, 0x00)]
    results = [layer(*inputs) for layer in layers for _ in range(3)]
    differ = sum(not torch.equal(results[0], other) for other in results[1:])
    if differ:
        raise AssertionError(f"{differ} of {len(results) - 1} repetitions differ from the first call")
    detail, figures = subject.close(results[0], problem.reference(), subject.small)
    return f"{len(results)} calls bitwise the same, {detail}", figures


def _windows(subject: Subject, rows: int) -> Outcome:
    problem = subject.problem(subject.small, 65)
    inputs = (problem.x, problem.topk_ids, problem.topk_weights)
    whole = subject.layer(problem)(*inputs)
    y = subject.layer(problem, max_local_rows=rows)(*inputs)
    detail, figures = subject.close(y, problem.reference(), subject.small)
    return f"{detail}, {'bitwise' if torch.equal(whole, y) else 'not bitwise'} as in one window", figures


def _graph(subject: Subject, tokens: int) -> Outcome:
    if not subject.gpu:
        raise NotRun("graphs need a GPU")
    if not getattr(subject.backend, "graph_safe", True):
        raise NotRun(f"{subject.backend.name} says that it cannot be captured")
    problem = subject.problem(subject.small, tokens)
    layer = subject.layer(problem)
    layer.warm_up()
    static = [t.clone() for t in (problem.x, problem.topk_ids, problem.topk_weights)]
    out = torch.empty_like(problem.x)
    graph = capture(lambda: layer(*static, out=out))
    detail = ""
    figures: dict[str, float] = {}
    for seed, routing in enumerate(("uniform", "one_expert", "none_local", "duplicates")):
        other = subject.problem(subject.small, tokens, seed=seed, routing=routing)
        new = (other.x, other.topk_ids, other.topk_weights)
        for target, value in zip(static, new, strict=True):
            target.copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        # The weights are those that the layer was made with, whatever this seed would draw.
        truth = Problem(subject.small, problem.weights, *new).reference()
        detail, figures = subject.close(out, truth, subject.small)
        if subject.deterministic and not torch.equal(out, layer(*new)):
            raise AssertionError(f"a replay with {routing} routing differs from a plain call")
    return f"4 routings replayed, {detail}", figures
