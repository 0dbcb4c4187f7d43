"""How long calls take on one rank's share of the spec, measured alone on the device."""

from __future__ import annotations

import fcntl
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from portamoe.checks import weight_bytes
from portamoe.gpu_timing import capture
from portamoe.testing import Problem, make_problem

if TYPE_CHECKING:
    from portamoe.acceptance.checklist import Outcome, Planned, Subject
    from portamoe.device import Device
    from portamoe.spec import MoESpec

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
_ON_CPU = 4
#: Weights of the timed layer: several backends prepare theirs at the same time.
_BYTES, _SHARE = 4e9, 0.06
#: Calls go round over so many parts of the tokens, so that their experts are not those that the cache still holds.
_ROUND = 8
#: The call whose numbers are compared with the reference.
_COMPARED = 16
_CALLS, _LEAST_CALLS, _SECONDS = 24, 3, 1.0

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def plan(subject: Subject) -> Iterator[Planned]:
    """Yield the checks of speed, none with --quick."""
    if subject.quick:
        return
    spec = that_fits(subject.spec, subject.device) if subject.gpu else subject.small
    times = TOKENS if subject.gpu else TOKENS[:_ON_CPU]
    made: list[tuple[Problem, dict[int, tuple[float, str]]]] = []

    def run(tokens: int) -> Outcome:
        subject.accept(spec)
        waited = 0.0
        if not made:  # all are measured in one turn, when the first is asked for
            problem = make_problem(spec, max(times), device=subject.where)
            made.append((problem, {}))
            waited = _measure(subject, problem, times, made[0][1])
        problem, measured = made[0]
        if tokens not in measured:
            raise RuntimeError("an earlier measurement failed")
        us, how = measured[tokens]
        local = set(spec.local_experts)
        hits = [len(set(ids.unique().tolist()) & local) for _, ids, _ in _parts(problem, tokens)]
        read = sum(hits) * weight_bytes(spec) // (len(hits) * spec.num_local_experts)
        figures = {"spec": spec.to_dict(), "tokens": tokens, "us": us, "weight_bytes": read, "provenance": "measured"}
        figures["waited_s"] = waited
        return f"{us:.1f} µs ({how}), {read / us / 1e3:.3g} GB/s of weights", figures

    for tokens in times:
        yield "timing", f"{tokens} tokens", partial(run, tokens)


def _measure(subject: Subject, problem: Problem, times: tuple[int, ...], into: dict[int, tuple[float, str]]) -> float:
    """Measure every number of tokens; return the seconds that were spent waiting for the turn."""
    layer = subject.layer(problem)
    for tokens in times:  # compiles; in the turn nothing is left to do but to run
        part = _parts(problem, tokens)[0]
        y = layer(*part)
        if not bool(torch.isfinite(y).all()):
            raise AssertionError(f"the result of {tokens} tokens is not finite")
        if tokens == _COMPARED:  # no other check has tensors of more than 2^31 elements
            subject.close(y, Problem(problem.spec, problem.weights, *part).reference(), problem.spec)
    graphs = subject.gpu and bool(getattr(subject.backend, "graph_safe", True))
    start = time.perf_counter()
    with _turn(subject.turn):
        waited = time.perf_counter() - start
        for tokens in times:
            calls: list[Callable[[], object]] = [partial(layer, *part) for part in _parts(problem, tokens)]
            if graphs:
                calls = [capture(call).replay for call in calls]
                for replay in calls:  # the first one loads the graph
                    replay()
            into[tokens] = _microseconds(calls, subject.where), "graph" if graphs else "calls"
    return waited


def _parts(problem: Problem, tokens: int) -> list[Inputs]:
    """Return up to _ROUND calls of `tokens` tokens of the problem."""
    count = min(_ROUND, problem.x.shape[0] // tokens)
    rows = [slice(i * tokens, (i + 1) * tokens) for i in range(count)]
    return [(problem.x[r].clone(), problem.topk_ids[r].clone(), problem.topk_weights[r].clone()) for r in rows]


@contextmanager
def _turn(file: str | None) -> Iterator[None]:
    """Wait until nobody else uses the device, and keep it that way."""
    if file is None:
        yield
        return
    with Path(file).open("a", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back


def that_fits(spec: MoESpec, device: Device) -> MoESpec:
    """Return one rank's share of `spec` that leaves room beside it, with the sizes and the routing of the whole."""
    free = device.memory_free_bytes or device.memory_bytes or int(_BYTES)
    limit = min(_BYTES, _SHARE * free)
    one = weight_bytes(spec) / spec.num_local_experts
    count = max(1, min(spec.num_local_experts, int(limit / one)))
    first = spec.local_experts.start
    return replace(spec, local_experts=range(first, first + count))


def _microseconds(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Return the median time of a call, over up to _CALLS of them or about _SECONDS."""
    times: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(times) < _CALLS and (len(times) < _LEAST_CALLS or time.perf_counter() < until):
        call = calls[len(times) % len(calls)]
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
