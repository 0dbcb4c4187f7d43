"""Limits and timing of `portamoe bench`: one GPU graph that rotates through several inputs, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portamoe.gpu_timing import capture, median_ms

if TYPE_CHECKING:
    import torch

PROBE_BYTES = 1 << 32
MATMUL_SIZE = 8192
#: Replays: as many as fit into this, between the two bounds.
BUDGET_MS, LEAST_REPLAYS, MOST_REPLAYS = 120.0, 5, 40


@dataclass(frozen=True)
class Timing:
    """Median and least µs of one call, and what the graph wrote.

    repeats:  whether the first set's result equals an eager call's bit for bit
    finite:   whether no element of any set's result is NaN, from replays over outputs filled with NaN
    first:    (T, H) of the first set
    """

    us: float
    us_min: float
    replays: int
    repeats: bool
    finite: bool
    first: torch.Tensor


def limits(device: torch.device) -> dict[str, float]:
    """Measure read and copy bandwidth (TB/s), a large bf16 matmul (TFLOP/s) and an empty kernel in a graph (µs)."""
    import torch

    source = torch.empty(PROBE_BYTES // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    read = PROBE_BYTES / median_ms(source.max) / 1e9
    copy = 2 * PROBE_BYTES / median_ms(lambda: target.copy_(source)) / 1e9
    source = target = torch.empty(0, device=device)
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * MATMUL_SIZE**3 / median_ms(lambda: a @ b) / 1e9
    counter = torch.zeros(16, device=device)

    def count() -> None:
        for _ in range(64):
            counter.add_(1)

    graph = capture(count)
    # A reduction reads at least as slowly as a copy; whichever is faster is nearer to the limit.
    return {
        "read_tbs": max(read, copy),
        "copy_tbs": copy,
        "matmul_tflops": matmul,
        "empty_us": median_ms(graph.replay) / 64 * 1e3,
    }


def time_graph(call: Callable[..., torch.Tensor], sets: Sequence[Iterable[torch.Tensor]]) -> Timing:
    """Time `call(x, topk_ids, topk_weights)` by replaying one graph that calls it once for every input set."""
    import torch

    eager = call(*sets[0]).clone()
    kept: list[torch.Tensor] = []

    def action() -> None:
        kept.extend(call(*inputs) for inputs in sets)

    graph = capture(action)
    outputs = kept[-len(sets) :]
    first = median_ms(graph.replay, 1)
    replays = int(max(LEAST_REPLAYS, min(MOST_REPLAYS, BUDGET_MS / max(first, 1e-3))))
    times = []
    for output in outputs:
        output.fill_(float("nan"))
    for _ in range(replays):
        times.append(median_ms(graph.replay, 1, warm_up=0) * 1e3 / len(sets))
    torch.cuda.synchronize()
    finite = all(bool(torch.isfinite(o).all()) for o in outputs)
    same = torch.equal(outputs[0], eager)
    return Timing(statistics.median(times), min(times), replays, same, finite, outputs[0].clone())


def eager_us(call: Callable[..., Any], inputs: Iterable[torch.Tensor], calls: int = 50) -> float:
    """Return host µs of one eager call, the device not waited for."""
    import torch

    tensors = tuple(inputs)
    for _ in range(3):
        call(*tensors)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call(*tensors)
    spent = (time.perf_counter() - began) / calls * 1e6
    torch.cuda.synchronize()
    return spent


def peak_bytes(action: Callable[[], Any]) -> int:
    """Return the most bytes that one call takes from torch's allocator, its result included."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def launches(action: Callable[[], Any]) -> int:
    """Return how many kernels, copies and fills one call puts on the device, by the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    action()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        action()
        torch.cuda.synchronize()
    return sum(str(event.device_type).endswith("CUDA") for event in record.events() or ())
