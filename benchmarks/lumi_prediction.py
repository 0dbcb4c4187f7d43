"""The tables of docs/lumi-prediction.md, computed from a committed ISA report.

    python benchmarks/lumi_prediction.py [benchmarks/results/modelled/gfx90a-triton3.6.0.json]

What a layer took in the seed's run follows from its published tokens per second. From that the modelled time of its
expert path is taken away and the modelled time of triton_unfused added; the rest of the layer stays as it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "common")]

from benchmarks.isa.calls import launches_of  # noqa: E402 - the checkout is not installed
from benchmarks.isa.shards import SPECS  # noqa: E402
from rocm_moe.evidence.call_model import slowest_hits  # noqa: E402
from rocm_moe.evidence.clock_model import MACHINES, MXFP4_BYTES, Machine  # noqa: E402
from rocm_moe.tiles import expected_hits, load_table  # noqa: E402

REPORT = ROOT / "benchmarks/results/modelled/gfx90a-triton3.6.0.json"
#: Concurrent requests -> tokens per second in the seed's run (vLLM pull request 63978).
SEED = {1: 6.8, 64: 110.0, 128: 178.0, 256: 193.0}
LAYERS, STAGES = 92, 4
SPEC = SPECS["EP8"]
#: FLOP of one routed row through both products.
ROW_FLOP = 2 * 3 * SPEC.intermediate_size * SPEC.hidden_size
EXPERT_BYTES = 3 * SPEC.intermediate_size * SPEC.hidden_size * MXFP4_BYTES
BASE = MACHINES["gfx90a"]
MODELS = {
    "likely": BASE,
    "best": replace(BASE, hbm_efficiency=0.9, latency_s=0.8e-6, launch_s=3e-6),
    "worst": replace(BASE, hbm_efficiency=0.65, latency_s=1.5e-6, launch_s=10e-6, perm_clocks=8.0),
}


@dataclass(frozen=True)
class SeedModel:
    """The seed's expert path: how fast weights stream, what padding rows cost, launches and their gaps.

    share:     of the HBM peak that tl.dot_scaled's decode reaches (compiled code: 0.49)
    foreign:   share of rows of other ranks that are computed as expert 0
    tflops:    rate at which those rows are computed
    launches:  kernels of sort, routing, both products, activation, index_add and copies; gap_s: each one's cost
    """

    share: float
    foreign: float
    tflops: float
    launches: int
    gap_s: float


SEED_MODELS = {
    "cheap": SeedModel(share=0.49, foreign=0.0, tflops=47.7, launches=16, gap_s=5e-6),
    "dear": SeedModel(share=0.35, foreign=7 / 8, tflops=47.7, launches=24, gap_s=25e-6),
}

EXPERT_HEAD = (
    "| tokens in a layer call | experts hit, mean / slowest rank | seed, ms "
    "| triton_unfused, mean rank, ms | slowest rank, ms (best … worst) |"
)
PREDICTION_HEAD = (
    "| requests | seed, tok/s | seed, ms a layer | tokens in a layer call | rest of the layer, ms | predicted, tok/s |"
)


def seed_expert_s(tokens: int, seed: SeedModel) -> float:
    """Return the modelled seconds of the seed's expert path in one layer, on the slowest rank."""
    stream = slowest_hits(SPEC, tokens) * EXPERT_BYTES / (seed.share * BASE.hbm_bytes_s)
    waste = tokens * SPEC.top_k * seed.foreign * ROW_FLOP / (seed.tflops * 1e12)
    return stream + waste + seed.launches * seed.gap_s


def new_expert_s(tokens: int, report: dict[str, Any], machine: Machine, hits: float) -> float:
    """Return the modelled seconds of triton_unfused's launches in one layer."""
    table = load_table("gfx90a", {})
    launches = launches_of(SPEC, "EP8", tokens, report["kernels"], table, machine, hits)
    if launches is None:
        raise ValueError(f"the report lacks a kernel for {tokens} tokens")
    return sum(launch.seconds for launch in launches)


def expert_table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the table of expert time per layer."""
    yield EXPERT_HEAD
    yield "|---|---|---|---|---|"
    for tokens in (1, 16, 32, 64, 128, 256):
        mean, slow = expected_hits(SPEC, tokens), slowest_hits(SPEC, tokens)
        seeds = sorted(1e3 * seed_expert_s(tokens, model) for model in SEED_MODELS.values())
        new = {name: 1e3 * new_expert_s(tokens, report, machine, slow) for name, machine in MODELS.items()}
        average = 1e3 * new_expert_s(tokens, report, BASE, mean)
        yield (
            f"| {tokens} | {mean:.1f} / {slow:.1f} | {seeds[0]:.2f} … {seeds[1]:.2f} | {average:.2f} "
            f"| {new['likely']:.2f} ({new['best']:.2f} … {new['worst']:.2f}) |"
        )


def prediction_table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the table of tokens per second: measured by the seed, predicted range."""
    yield PREDICTION_HEAD
    yield "|---|---|---|---|---|---|"
    for requests, rate in SEED.items():
        layer = requests / rate / LAYERS
        for tokens in sorted({max(1, requests // STAGES), requests}):
            low, high = predicted(requests, tokens, report)
            rest = [layer - seed_expert_s(tokens, SEED_MODELS[name]) for name in ("dear", "cheap")]
            yield (
                f"| {requests} | {rate:g} | {1e3 * layer:.2f} | {tokens} | {1e3 * rest[0]:.2f} … {1e3 * rest[1]:.2f} "
                f"| {low:.3g} … {high:.3g} |"
            )


def predicted(requests: int, tokens: int, report: dict[str, Any]) -> tuple[float, float]:
    """Return the lowest and highest predicted tokens per second.

    Lowest: the seed's experts were cheap and ours are as slow as the worst machine; highest: the other way round.
    """
    layer = requests / SEED[requests] / LAYERS
    slow = slowest_hits(SPEC, tokens)
    ends = []
    for seed, machine in (("cheap", "worst"), ("dear", "best")):
        ours = new_expert_s(tokens, report, MODELS[machine], slow)
        time = layer - seed_expert_s(tokens, SEED_MODELS[seed]) + ours
        ends.append(requests / (LAYERS * time))
    return ends[0], ends[1]


def tables(report: dict[str, Any]) -> str:
    """Return both tables as Markdown."""
    return "\n".join([*expert_table(report), "", *prediction_table(report)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?", default=REPORT)
    report = json.loads(parser.parse_args().report.read_text(encoding="utf-8"))
    print(tables(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
