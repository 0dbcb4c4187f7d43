"""Modelled time of one whole MoE call: which tiles run for T tokens, and how long each launch takes.

At few tokens the latency of loads and the number of launches rule, not the ceilings of `clock_model`. For one launch

    r     = workgroups a compute unit holds at once, at most what its registers, waves and LDS allow
    step  = max(clocks of r tiles' VALU, MFMA and LDS; latency of the loads issued one step ahead)
    time  = launch + latency · dependent loads
            + max(rounds · (straight + steps · step); bytes / (efficiency · HBM peak); grid / dispatch rate)

The dependent loads of a GEMM are its tile's record, then its rows, before the first weight. Routing is uniformly
random. All of it is "modelled"; `portamoe bench --limits` replaces the machine's assumptions by measurements.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_moe.evidence import clock_model
from rocm_moe.evidence.clock_model import MXFP4_BYTES, Machine, Tile
from rocm_moe.plan import tokens_a_block
from rocm_moe.tiles import expected_hits

if TYPE_CHECKING:
    from portamoe.spec import MoESpec
    from rocm_moe.evidence.isa import Code

#: Dependent loads before the last store of the small kernels, one after the other.
CHAINS: Mapping[str, int] = {"count": 3, "place": 5, "activation": 2, "combine": 4}


@dataclass(frozen=True)
class Gemm:
    """A compiled grouped GEMM, as the model needs it.

    shared:  bytes of LDS of a workgroup
    stages:  Triton's num_stages; loads run stages - 1 steps ahead
    """

    name: str
    code: Code
    shared: int
    tile: Tile
    stages: int = 2


@dataclass(frozen=True)
class Product:
    """How a GEMM is launched: splits of K, and workgroups of the grid, those without work included."""

    gemm: Gemm
    splits: int
    grid: int


@dataclass(frozen=True)
class LaunchTime:
    """Modelled time of a launch, and what explains it.

    grid:                workgroups launched, most of which may exit at once
    workgroups, waves:   with work to do; on the device at once
    bytes_in_flight_cu:  HBM bytes of weights that a busy compute unit waits for
    hbm_bytes:           read and written
    limit:               "HBM", "compute", "latency", "dispatch" or "launch"
    """

    step: str
    kernel: str
    seconds: float
    grid: int
    workgroups: float
    waves: float
    bytes_in_flight_cu: float
    hbm_bytes: float
    limit: str
    splits: int = 1


def gemm_time(
    step: str,
    product: Product,
    machine: Machine,
    *,
    tiles: float,
    rows: float,
    experts: float,
    columns: int,
    depth: int,
) -> LaunchTime:
    """Return the modelled time of a grouped GEMM.

    tiles:    row tiles with work; rows: routed rows; experts: experts that are hit, whose weights are read once
    columns:  weight rows of an expert (N); depth: K
    """
    gemm, splits = product.gemm, product.splits
    code, tile = gemm.code, gemm.tile
    around = clock_model.bound(code.straight, tile, machine)
    # Without a loop, every load of the tile is in flight at once.
    steps, step_clocks, step_elements = 0.0, 0.0, tile.columns * depth / splits
    if code.loop is not None and code.loop.matrix:
        loop = clock_model.bound(code.loop, tile, machine)
        steps = max(0.0, (tile.columns * depth / splits - around.elements) / loop.elements)
        step_clocks, step_elements = max(loop.issue, loop.matrix, loop.lds), loop.elements
    elif not code.straight.matrix:
        raise ValueError(f"{gemm.name} has no matrix instructions; it cannot be modelled as a GEMM")
    workgroups = tiles * math.ceil(columns / tile.columns) * splits
    resident = max(1, clock_model.resident_workgroups(code, gemm.shared, tile.warps, machine))
    together = max(1, min(resident, math.ceil(workgroups / machine.compute_units)))
    rounds = max(1, math.ceil(workgroups / (machine.compute_units * together)))
    crowd = math.ceil(together * tile.warps / machine.simds) * machine.simds / tile.warps
    ahead = max(1, gemm.stages - 1)
    work = crowd * step_clocks
    wait = machine.latency_s * machine.clock_hz / ahead
    straight = crowd * max(around.issue, around.matrix, around.lds)
    moved = experts * columns * depth * MXFP4_BYTES + rows * (2 * depth + columns * (4 * splits if splits > 1 else 2))
    busy = rounds * (straight + steps * max(work, wait)) / machine.clock_hz
    parts = {
        "compute" if work >= wait or not steps else "latency": busy,
        "HBM": moved / (machine.hbm_bytes_s * machine.hbm_efficiency),
        "dispatch": product.grid / machine.workgroups_per_clock / machine.clock_hz,
    }
    limit = max(parts, key=lambda name: parts[name])
    return LaunchTime(
        step=step,
        kernel=gemm.name,
        seconds=machine.launch_s + 2 * machine.latency_s + parts[limit],
        grid=product.grid,
        workgroups=workgroups,
        waves=min(workgroups, machine.compute_units * together) * tile.warps,
        bytes_in_flight_cu=together * (ahead if steps else 1) * step_elements * MXFP4_BYTES,
        hbm_bytes=moved,
        limit=limit,
        splits=splits,
    )


def small_time(step: str, machine: Machine, moved: float, passes: int = 1) -> LaunchTime:
    """Return the modelled time of a kernel that only moves `moved` bytes; passes: rounds of its chain of loads."""
    stream = moved / (machine.hbm_bytes_s * machine.hbm_efficiency)
    chain = CHAINS[step] * passes * machine.latency_s
    return LaunchTime(
        step=step,
        kernel=step,
        seconds=machine.launch_s + chain + stream,
        grid=0,
        workgroups=0,
        waves=0,
        bytes_in_flight_cu=0,
        hbm_bytes=moved,
        limit="HBM" if stream > machine.launch_s + chain else "launch",
    )


def call_time(
    spec: MoESpec, tokens: int, one: Product, two: Product, machine: Machine, experts: float | None = None
) -> tuple[LaunchTime, ...]:
    """Return the launches of one call of `tokens` tokens in one window, in order.

    one, two:  GEMM1 and GEMM2
    experts:   experts hit on this rank; default: the mean for uniformly random routing
    """
    mean_hits = expected_hits(spec, tokens)
    hits = mean_hits if experts is None else experts
    crowding = hits / mean_hits
    rows = crowding * tokens * spec.top_k * spec.num_local_experts / spec.num_experts
    hidden, inter = spec.hidden_size, spec.intermediate_size
    wide, narrow = (4 * p.splits if p.splits > 1 else 2 for p in (one, two))
    pairs = tokens * spec.top_k

    def gemm(step: str, product: Product, columns: int, depth: int) -> LaunchTime:
        tiles = crowding * expected_tiles(spec, tokens, product.gemm.tile.rows)
        return gemm_time(step, product, machine, tiles=tiles, rows=rows, experts=hits, columns=columns, depth=depth)

    count = () if tokens <= tokens_a_block(spec) else (small_time("count", machine, 4 * pairs * 2),)
    return (
        *count,
        small_time("place", machine, 4 * pairs * 8),
        gemm("gemm1", one, 2 * inter, hidden),
        small_time("activation", machine, rows * inter * (2 * wide + 2)),
        gemm("gemm2", two, hidden, inter),
        small_time("combine", machine, rows * hidden * narrow + tokens * hidden * 2),
    )


def expected_tiles(spec: MoESpec, tokens: int, rows: int) -> float:
    """Return the expected row tiles of `rows` tokens over all local experts, routing uniformly random."""
    p = spec.top_k / spec.num_experts
    total = 0.0
    chance = (1 - p) ** tokens
    for hits in range(1, tokens + 1):
        chance *= (tokens - hits + 1) / hits * p / (1 - p)
        total += chance * math.ceil(hits / rows)
    return spec.num_local_experts * total


@functools.lru_cache(maxsize=256)
def slowest_hits(spec: MoESpec, tokens: int, trials: int = 200, seed: int = 0) -> float:
    """Return the expected number of experts hit on the rank that is hit most, by simulation with a fixed seed."""
    ranks = spec.num_experts // spec.num_local_experts
    if ranks == 1:
        return expected_hits(spec, tokens)
    chance = random.Random(seed)  # noqa: S311 - a simulation, not a secret
    total = 0
    for _ in range(trials):
        hit: set[int] = set()
        for _ in range(tokens):
            hit.update(chance.sample(range(spec.num_experts), spec.top_k))
        counts = [0] * ranks
        for expert in hit:
            counts[expert // spec.num_local_experts] += 1
        total += max(counts)
    return total / trials
