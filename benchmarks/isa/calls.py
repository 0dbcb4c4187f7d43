"""The modelled time of whole calls, from compiled kernels and the table of tiles."""

from __future__ import annotations

from typing import Any

from benchmarks.isa.rows import tile_of
from benchmarks.isa.shards import CALL_RANKS, CALL_TOKENS, SPECS
from portamoe.spec import MoESpec
from rocm_moe import plan as planning
from rocm_moe.evidence import call_model
from rocm_moe.evidence.call_model import Gemm, LaunchTime
from rocm_moe.evidence.clock_model import MACHINES, Machine
from rocm_moe.evidence.isa import Code
from rocm_moe.tiles import TileTable, expected_hits

#: Enough bytes in flight on a compute unit to cover the latency of HBM at its peak rate.
WANTED_IN_FLIGHT = 16 * 1024


def gemm_of(kernel: dict[str, Any]) -> Gemm:
    """Return a compiled GEMM as the call model takes it."""
    stages = int(kernel["options"].get("num_stages", 2))
    return Gemm(kernel["name"], Code.from_dict(kernel["code"]), kernel["shared"], tile_of(kernel), stages)


def call_rows(arch: str, kernels: list[dict[str, Any]], table: TileTable) -> list[dict[str, Any]]:
    """Return a row for each shard and number of tokens: every launch with grid, waves, bytes in flight and time.

    "mean" is the mean rank under uniformly random routing, "slowest" the one whose experts are hit most.
    """
    machine = MACHINES[arch]
    out = []
    for name, ranks in CALL_RANKS.items():
        spec = SPECS[name]
        for tokens in CALL_TOKENS:
            hits = {"mean": expected_hits(spec, tokens)}
            if ranks > 1:
                hits["slowest"] = call_model.slowest_hits(spec, tokens)
            for rank, experts in hits.items():
                launches = launches_of(spec, name, tokens, kernels, table, machine, experts)
                if launches:
                    out.append(call_row(arch, name, tokens, rank, experts, launches))
    return out


def launches_of(
    spec: MoESpec,
    spec_name: str,
    tokens: int,
    kernels: list[dict[str, Any]],
    table: TileTable,
    machine: Machine,
    hits: float,
) -> tuple[LaunchTime, ...] | None:
    """Return the modelled launches of one call; None if a kernel that it needs did not compile."""
    plan = planning.make_plan(spec, table, tokens, planning.default_max_local_rows(spec, tokens))
    products = []
    for step, product in (("gemm1", plan.gemm1), ("gemm2", plan.gemm2)):
        name = planning.variant_name(step, cell=plan.cell, partial=product.partial)  # type: ignore[arg-type]
        kernel = next((k for k in kernels if k["name"] == name and spec_name in k["specs"] and "error" not in k), None)
        if kernel is None:
            return None
        grid = product.grid[0] * product.grid[1]
        products.append(call_model.Product(gemm_of(kernel), product.splits, grid))
    return call_model.call_time(spec, tokens, products[0], products[1], machine, experts=hits)


def call_row(
    arch: str, name: str, tokens: int, crowd: str, hits: float, launches: tuple[LaunchTime, ...]
) -> dict[str, Any]:
    """Return the JSON row of one call."""
    return {
        "evidence": "modelled",
        "arch": arch,
        "shard": name,
        "tokens": tokens,
        "rank": crowd,
        "experts_hit": round(hits, 1),
        "launches": len(launches),
        "us": round(1e6 * sum(launch.seconds for launch in launches), 1),
        "each": [
            {
                "step": launch.step,
                "kernel": launch.kernel,
                "us": round(1e6 * launch.seconds, 1),
                "grid": launch.grid,
                "workgroups": round(launch.workgroups),
                "waves": round(launch.waves),
                "splits": launch.splits,
                "kib_in_flight_cu": round(launch.bytes_in_flight_cu / 1024, 1),
                "hbm_mb": round(launch.hbm_bytes / 1e6, 2),
                "limit": launch.limit,
            }
            for launch in launches
        ],
    }
