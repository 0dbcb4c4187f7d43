"""The acceptance set: everything that a backend has to show on the machine at hand, as a list of checks.

`portamoe verify` runs it for each backend in a child process, `python -m portamoe.acceptance`, because a kernel on a
new device may crash or hang; the child prints one marked JSON line a check.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from portamoe import dispatch, registry, verdicts
from portamoe.activations import Activation, GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep
from portamoe.alternatives import label
from portamoe.canary import on_device, poisoned
from portamoe.checks import weight_bytes
from portamoe.layer import RoutedExperts
from portamoe.spec import MoESpec
from portamoe.testing import EDGE_CASES, Problem, Routing, assert_close, make_problem, tolerance_of

if TYPE_CHECKING:
    from portamoe.backend import Backend
    from portamoe.device import Device

Status = Literal["passed", "failed", "not run"]

MARK = "portamoe-check:"
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
TIMED_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
#: Weights of the timed layer: larger than any cache, small beside the memory.
_TIMED_BYTES, _TIMED_SHARE = 8e9, 0.25
_CALLS, _WARM_CALLS = 20, 3


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
    """What is checked: a backend, the spec asked about, the small spec like it, where, and whether in a hurry."""

    backend: Backend
    spec: MoESpec
    small: MoESpec
    device: Device
    quick: bool

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
        """Does the backend promise the same bits for the same inputs? Those that say nothing do."""
        return bool(getattr(self.backend, "deterministic", True))

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


def checks(subject: Subject) -> Iterator[Check]:
    """Run the whole set, one check after the other; what a backend raises is a failed check."""
    for group, case, do in plan(subject):
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
        yield Check(subject.backend.name, group, case, status, detail, time.perf_counter() - start, figures)


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
    yield from _timings(subject)


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
    side = torch.cuda.Stream(subject.where)
    side.wait_stream(torch.cuda.current_stream(subject.where))
    with torch.cuda.stream(side):
        layer(*static, out=out)
    torch.cuda.current_stream(subject.where).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*static, out=out)
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


def _timings(subject: Subject) -> Iterator[Planned]:
    if subject.quick:
        return
    spec = subject.small if not subject.gpu else _that_fits(subject.spec, subject.device)
    made: list[tuple[Problem, RoutedExperts]] = []

    def run(tokens: int) -> Outcome:
        subject.accept(spec)
        if not made:
            problem = make_problem(spec, max(times), device=subject.where)
            layer = subject.layer(problem)
            layer.warm_up()
            made.append((problem, layer))
        problem, layer = made[0]
        inputs = (problem.x[:tokens], problem.topk_ids[:tokens], problem.topk_weights[:tokens])
        y = layer(*inputs)
        if not bool(torch.isfinite(y).all()):
            raise AssertionError("the result is not finite")
        hit = len(set(inputs[1].unique().tolist()) & set(spec.local_experts))
        read = hit * weight_bytes(spec) // spec.num_local_experts
        us = _microseconds(lambda: layer(*inputs), subject.where)
        figures = {"spec": spec.to_dict(), "tokens": tokens, "us": us, "weight_bytes": read, "provenance": "measured"}
        return f"{us:.1f} µs, {read / us / 1e3:.3g} GB/s of weights", figures

    times = TIMED_TOKENS if subject.gpu else TIMED_TOKENS[:4]
    for tokens in times:
        yield "timing", f"{tokens} tokens", partial(run, tokens)


def _that_fits(spec: MoESpec, device: Device) -> MoESpec:
    """Return one rank's share of `spec` that leaves room beside it, with the sizes and the routing of the whole."""
    free = device.memory_free_bytes or device.memory_bytes or int(_TIMED_BYTES)
    limit = min(_TIMED_BYTES, _TIMED_SHARE * free)
    one = weight_bytes(spec) / spec.num_local_experts
    count = max(1, min(spec.num_local_experts, int(limit / one)))
    first = spec.local_experts.start
    return replace(spec, local_experts=range(first, first + count))


def _microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of a call."""
    for _ in range(_WARM_CALLS):
        call()
    times = []
    for _ in range(_CALLS):
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main(arguments: Sequence[str]) -> None:
    """Run the set for one backend and print a marked line a check: NAME DEVICE SPEC_JSON quick|full."""
    from portamoe.detection import detect

    name, device_name, text, pace = arguments
    device = detect().device(device_name)
    spec = MoESpec.from_dict(json.loads(text))
    backend = registry.named(name)
    if backend is None:
        raise ValueError(f"no backend {name!r}")
    if device.vendor != "cpu":
        torch.cuda.set_device(device.index)
    small = verdicts.canary_spec(backend, spec, device)
    found: Iterable[Check]
    if small is None:
        found = [Check(name, "canary", "spec", "not run", "the backend accepts no small spec like this one")]
    else:
        found = checks(Subject(backend, spec, small, device, pace == "quick"))
    with torch.no_grad():
        for check in found:
            sys.stdout.write(f"\n{MARK}{json.dumps(check.to_dict())}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
