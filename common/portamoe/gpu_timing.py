"""Timing on a GPU: calls captured in a graph, and medians between device events."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def capture(action: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Run `action` once on a stream of its own, which compiles what it launches, then return a graph of it."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        action()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph


def median_ms(
    action: Callable[[], Any], runs: int = 10, before: Callable[[], Any] | None = None, warm_up: int = 2
) -> float:
    """Return the median milliseconds of `action` between two device events, after `warm_up` runs more.

    before:  called ahead of each run, outside of its time
    """
    import torch

    times = []
    for _ in range(runs + warm_up):
        if before is not None:
            before()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times[warm_up:]))
