"""Cases, limits and timing of `portamoe bench`: one GPU graph that rotates through several inputs, medians."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portamoe.activations import SiTU
from portamoe.gpu_timing import capture, median_ms
from portamoe.spec import GPT_OSS, KIMI_K3, MoESpec

if TYPE_CHECKING:
    import torch

    from portamoe.testing import Problem

#: Weights that one graph streams: several times the 60 MB of an H200's L2, so that they do not stay there.
ROTATED_BYTES = 300e6
MOST_SETS = 16
CHECKED_TOKENS = 48
PROBE_BYTES = 1 << 32
MATMUL_SIZE = 8192
#: Replays: as many as fit into this, between the two bounds.
BUDGET_MS, LEAST_REPLAYS, MOST_REPLAYS = 120.0, 5, 40
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


@dataclass(frozen=True)
class Inputs:
    """One token batch: x (T, H) bf16, topk_ids (T, K) int32, topk_weights (T, K) float32."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def __iter__(self) -> Any:
        return iter((self.x, self.topk_ids, self.topk_weights))


@dataclass(frozen=True)
class Timing:
    """Median and least µs of one call, and whether the graph's outputs equal an eager call's bit for bit."""

    us: float
    us_min: float
    replays: int
    repeats: bool


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


def make_inputs(problem: Problem, spec: MoESpec, tokens: int, routing: str) -> list[Inputs]:
    """Return the batches that one graph rotates through, drawn like `problem`'s own; enough to outgrow the L2 cache."""
    import torch

    from portamoe.testing import make_routing

    first = Inputs(problem.x, problem.topk_ids, problem.topk_weights)
    streamed = max(1.0, hits(spec, first.topk_ids) * expert_bytes(spec))
    least = 1 if tokens >= 256 else 2
    sets = [first]
    for seed in range(1, max(least, min(MOST_SETS, math.ceil(ROTATED_BYTES / streamed)))):
        generator = torch.Generator(device=problem.x.device).manual_seed(1000 + seed)
        ids, weights = make_routing(spec, tokens, generator, routing=routing)  # type: ignore[arg-type]
        noise = torch.randn(problem.x.shape, generator=generator, device=problem.x.device)
        sets.append(Inputs((noise * problem.x.float().std()).to(problem.x.dtype), ids, weights))
    return sets


def expert_bytes(spec: MoESpec) -> float:
    """Bytes of one expert's matrices with their scales."""
    return 3 * spec.hidden_size * spec.intermediate_size * WEIGHT_BYTES[spec.weight_format]


def _local(spec: MoESpec, ids: torch.Tensor) -> torch.Tensor:
    return ids[(ids >= spec.local_experts.start) & (ids < spec.local_experts.stop)]


def hits(spec: MoESpec, ids: torch.Tensor) -> int:
    """Number of this rank's experts that at least one token chose."""
    return int(_local(spec, ids).unique().numel())


def floor_us(spec: MoESpec, sets: Sequence[Inputs], limit: dict[str, float]) -> tuple[float, str]:
    """Return the least µs of one call and what bounds it: the experts' bytes, or the operations of the local rows.

    max((experts hit · bytes of an expert + x + result) / read rate, 6 · rows · H · I / matmul rate)
    """
    hit = sum(hits(spec, s.topk_ids) for s in sets) / len(sets)
    rows = sum(_local(spec, s.topk_ids).numel() for s in sets) / len(sets)
    moved = hit * expert_bytes(spec) + 4 * sets[0].x.numel()
    memory = moved / limit["read_tbs"] / 1e6
    flops = 6 * rows * spec.hidden_size * spec.intermediate_size / limit["matmul_tflops"] / 1e6
    return (memory, "memory") if memory >= flops else (flops, "flops")


def time_graph(call: Callable[..., torch.Tensor], sets: Sequence[Inputs]) -> Timing:
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
        times.append(median_ms(graph.replay, 1) * 1e3 / len(sets))
    torch.cuda.synchronize()
    same = torch.equal(outputs[0], eager) and all(bool(torch.isfinite(o).all()) for o in outputs)
    return Timing(statistics.median(times), min(times), replays, same)


def eager_us(call: Callable[..., Any], inputs: Inputs, calls: int = 50) -> float:
    """Return host µs of one eager call, the device not waited for."""
    import torch

    for _ in range(3):
        call(*inputs)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call(*inputs)
    spent = (time.perf_counter() - began) / calls * 1e6
    torch.cuda.synchronize()
    return spent


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
