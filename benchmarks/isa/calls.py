"""The modelled time of whole calls, from compiled kernels and the table of tiles."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.isa.rows import tile_of
from benchmarks.isa.shards import CALL_RANKS, CALL_TOKENS, SPECS
from portamoe.spec import MoESpec
from rocm_moe import call_model
from rocm_moe.call_model import Gemm, LaunchTime
from rocm_moe.clock_model import MACHINES, Machine
from rocm_moe.isa import Code
from rocm_moe.tiles import GemmTile, TileTable, expected_hits

#: Enough bytes in flight on a compute unit to cover the latency of HBM at its peak rate.
WANTED_IN_FLIGHT = 16 * 1024


def gemm_of(kernel: dict[str, Any]) -> Gemm:
    """Return a compiled GEMM as the call model takes it."""
    stages = int(kernel["options"].get("num_stages", 2))
    return Gemm(kernel["name"], Code.from_dict(kernel["code"]), kernel["shared"], tile_of(kernel), stages)


def call_rows(arch: str, kernels: list[dict[str, Any]], table: TileTable) -> list[dict[str, Any]]:
    """Return a row for each shard and number of tokens: every launch with grid, waves, bytes in flight and time."""
    machine = MACHINES[arch]
    out = []
    for name in CALL_RANKS:
        spec = SPECS[name]
        for tokens in CALL_TOKENS:
            for crowd in ("mean", "slowest"):
                hits = expected_hits(spec, tokens) if crowd == "mean" else call_model.slowest_hits(spec, tokens)
                if crowd == "slowest" and CALL_RANKS[name] == 1:
                    continue
                launches = launches_of(spec, name, tokens, kernels, table, machine, hits)
                if launches:
                    out.append(call_row(arch, name, tokens, crowd, hits, launches))
    return out


def launches_of(
    spec: MoESpec, spec_name: str, tokens: int, kernels: list[dict[str, Any]], table: TileTable, machine: Machine,
    hits: float,
) -> tuple[LaunchTime, ...] | None:  # fmt: skip
    """Return the modelled launches of one call; None if a kernel that it needs did not compile."""
    cell = table.cell(spec, tokens)
    products = []
    for step, columns, depth, tile in (
        ("gemm1", 2 * spec.intermediate_size, spec.hidden_size, cell.gemm1),
        ("gemm2", spec.hidden_size, spec.intermediate_size, cell.gemm2),
    ):
        tiles = call_model.expected_tiles(spec, tokens, cell.tokens)
        parts, _ = tile.split_for(depth, tiles * math.ceil(columns / tile.rows))
        kernel = find(kernels, spec_name, step, cell.tokens, tile, partial=parts > 1)
        if kernel is None:
            return None
        products.append((gemm_of(kernel), parts))
    (gemm1, splits1), (gemm2, splits2) = products
    return call_model.call_time(spec, tokens, gemm1, gemm2, machine, splits=(splits1, splits2), experts=hits)


def find(
    kernels: list[dict[str, Any]], spec_name: str, step: str, rows: int, tile: GemmTile, *, partial: bool
) -> dict[str, Any] | None:
    """Return the compiled kernel of a cell, None if it is missing or did not compile."""
    for kernel in kernels:
        constants = kernel["constants"]
        if (
            kernel["step"] == step
            and spec_name in kernel["specs"]
            and "error" not in kernel
            and (constants["BM"], constants["BN"], constants["PARTIAL"]) == (rows, tile.rows, partial)
            and kernel["warps"] == tile.warps
        ):
            return kernel
    return None


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
