"""Which kernels run for how many tokens, with which tiles: data from tuned/<arch>.json, and sizes of the grids."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from portamoe.spec import MoESpec

Path = Literal["direct", "listed", "sorted"]

#: K up to which GEMM2 takes the "short" tile: the whole of K in one step (TP8 of Kimi-K3: 384).
SHORT_K = 512
#: Tokens up to which three launches must do, and pairs that one program can look through.
FEW_TOKENS = 16
FEW_PAIRS = 512
#: Pairs up to which every program finds its own pair, without an order made beforehand.
DIRECT_PAIRS = 64
#: Pairs that one block of the sort ranks at once, and blocks whose counts one program of its second launch adds up.
SORT_SIZE = 256
SORT_BLOCKS = 64


@dataclass(frozen=True)
class Tile:
    """One GEMM's tile: rows of the weight matrix, warps, blocks of 64 columns per step, stages, parts of K.

    registers: most registers a thread, so that more programs share a processor; 0: no bound
    """

    rows: int
    warps: int
    unroll: int
    stages: int
    slices: int = 1
    registers: int = 0

    @property
    def fragments(self) -> int:
        """Fragments of 16 rows (MT in the kernels)."""
        return self.rows // 16


@dataclass(frozen=True)
class Plan:
    """What one call launches.

    columns:  tokens of a tile: (a, 0, 0), or a, a + b1 or a + b2, whatever holds the tile's rows
    wide:     composite tiles with wgmma where the GPU has it; else narrow ones with mma.sync
    loop:     programs go on to further tiles; else what exceeds the slots is left to the rest kernel
    slots:    tiles that the grid provides for, an estimate from the sizes alone
    """

    path: Path
    gate_up: Tile
    down: Tile
    columns: tuple[int, int, int]
    wide: bool
    loop: bool
    slots: int
    pdl: bool

    @property
    def widest(self) -> int:
        """Most rows of one tile."""
        return self.columns[0] + self.columns[2]


@functools.lru_cache(maxsize=16)
def tuned(capability: int, batch_invariant: bool) -> dict[str, Any]:
    """Return the tile table of a CUDA capability (90 = Hopper) from tuned/, Hopper's where it has none of its own."""
    family = "sm90" if capability // 10 == 9 else "default"
    data = json.loads((resources.files("cuda_moe") / "tuned" / f"{family}.json").read_text(encoding="utf-8"))
    return dict(data["batch_invariant"] if batch_invariant else data["default"])


def _tile(data: dict[str, Any]) -> Tile:
    return Tile(**data)


def _entry(entries: list[dict[str, Any]], spec: MoESpec, tokens: int) -> dict[str, Any]:
    """Return the first entry that covers the tokens, or the rows per expert under uniform routing."""
    rows = tokens * spec.top_k / spec.num_experts
    for entry in entries:
        if tokens <= entry["tokens"] if "tokens" in entry else rows <= entry["rows_per_expert"]:
            return dict(entry)
    return dict(entries[-1])


@functools.lru_cache(maxsize=16384)
def make_plan(spec: MoESpec, tokens: int, capability: int, batch_invariant: bool = False) -> Plan:
    """Return the plan for `tokens` tokens; depends on nothing that a call could read on the device."""
    table = tuned(capability, batch_invariant)
    pairs = tokens * spec.top_k
    few = table["few"] if tokens <= FEW_TOKENS and pairs <= FEW_PAIRS else None
    direct = pairs <= DIRECT_PAIRS
    path: Path = "sorted" if few is None else "direct" if direct else "listed"
    entry = _entry(few if few is not None else table["sorted"], spec, tokens)
    short = spec.intermediate_size <= SHORT_K and "down_short" in entry
    gate_up, down = _tile(entry["gate_up"]), _tile(entry["down_short" if short else "down"])
    if spec.weight_format == "bf16":
        gate_up, down = _whole_k(gate_up), _whole_k(down)
    gate_up, down = _divisible(gate_up, spec.hidden_size), _divisible(down, spec.intermediate_size)
    columns = tuple(entry["columns"])
    if path != "sorted":
        if gate_up.slices != down.slices:
            gate_up, down = _whole_k(gate_up, gate_up.unroll), _whole_k(down, down.unroll)
        columns = (columns[0] // gate_up.slices, 0, 0)  # parts of K take columns of the instruction
    return Plan(
        path=path,
        gate_up=gate_up,
        down=down,
        columns=columns,
        wide=entry.get("wide", False),
        loop=entry.get("loop", False),
        slots=_slots(spec, tokens, path, columns[0] + columns[2], entry.get("wide", False)),
        pdl=entry.get("pdl", False) and capability >= 90,
    )


def plan_edges(spec: MoESpec, max_tokens: int, capability: int, batch_invariant: bool) -> list[int]:
    """Return token counts up to `max_tokens` that see every tile in use, and the largest count of each."""
    edges = {max_tokens, *range(1, min(FEW_TOKENS, max_tokens) + 1)}
    if max_tokens > FEW_TOKENS:
        edges.add(FEW_TOKENS + 1)
    for entry in tuned(capability, batch_invariant)["sorted"]:
        last = int(entry["rows_per_expert"] * spec.num_experts / spec.top_k)
        edges.update(t for t in (last - 1, last, last + 1) if 1 <= t <= max_tokens)
    return sorted(edges)


def _whole_k(tile: Tile, unroll: int = 1) -> Tile:
    return replace(tile, rows=tile.rows * tile.slices, unroll=unroll, slices=1)


def _divisible(tile: Tile, k: int) -> Tile:
    """Fit the tile to K: parts and steps must divide its blocks of 64; rows that lose their parts get the warps."""
    if k % (64 * tile.slices):
        tile = replace(tile, rows=tile.rows * tile.slices, slices=1)
    blocks = -(-k // 64) // tile.slices
    steps = [step for step in range(1, 2 * tile.unroll) if blocks % step == 0]
    return replace(tile, unroll=min(steps, key=lambda step: (abs(step - tile.unroll), -step)))


def expected_tiles(spec: MoESpec, tokens: int, widest: int) -> float:
    """Return the expected number of tiles under uniform routing: rows of an expert ~ Binomial(T, K/E)."""
    p = spec.top_k / spec.num_experts
    mean = tokens * p
    if p >= 1 or mean > 6 * widest:
        return spec.num_local_experts * (mean / widest + 0.5)
    log_q, log_odds = math.log1p(-p), math.log(p) - math.log1p(-p)
    term, total, below = tokens * log_q, 0.0, 0.0
    for rows in range(min(tokens, int(8 * widest + 40)) + 1):
        if rows:
            term += math.log((tokens - rows + 1) / rows) + log_odds
        if rows and (rows - 1) % widest == 0:
            total += 1.0 - below  # P(rows of the expert >= rows): one tile more
        below += math.exp(term)
    return spec.num_local_experts * total


def max_tiles(spec: MoESpec, tokens: int, widest: int) -> int:
    """Return the most tiles that any routing of `tokens` tokens makes."""
    pairs = tokens * spec.top_k
    return min(spec.num_local_experts, pairs) + pairs // widest


def _slots(spec: MoESpec, tokens: int, path: Path, widest: int, wide: bool) -> int:
    pairs = tokens * spec.top_k
    local = pairs * spec.num_local_experts / spec.num_experts
    if path == "direct":
        return max(1, min(pairs, math.ceil(local)))
    expected = expected_tiles(spec, tokens, widest)
    # A surplus program costs about a nanosecond; what has no slot is left to the rest kernel. Wide tiles are few, so
    # they get room for half as many rows again in few experts. Few-token programs go on to further tiles.
    if path == "listed":
        return max(1, min(max_tiles(spec, tokens, widest), math.ceil(1.05 * expected + 2)))
    room = 1.1 * expected + (0.5 if wide else 0.1) * local / widest + 4
    return max(1, min(max_tiles(spec, tokens, widest), math.ceil(room)))
