"""Which kernels run for how many tokens, with which tiles: data from tuned/<arch>.json, and sizes of the grids."""

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from portamoe.spec import MoESpec

Path = Literal["pair", "leader", "direct", "listed", "sorted"]

#: Names the folder of the user's own tiles.
FOLDER_VARIABLE = "PORTAMOE_TUNED_DIR"
#: K up to which GEMM2 takes the "short" tile: the whole of K in one step (TP8 of Kimi-K3: 384).
SHORT_K = 512
#: Tokens up to which three launches must do, and pairs that one program can look through.
FEW_TOKENS = 16
FEW_PAIRS = 512
#: Pairs up to which every program finds its own pair, without an order made beforehand.
DIRECT_PAIRS = 64
#: Where most experts are local, programs take the pair that their index names; beyond so many tokens, so few experts
#: are hit by one pair only that pairs of one expert share a program.
PAIR_TOKENS = 4
#: Most tiles over expected ones up to which the grid provides for all.
NEAR_WORST = 1.4
#: Widths of one entry's tiles, and what bounds a width: they are handed to the kernels as bytes.
MOST_WIDTHS = 6
MOST_COLUMNS = 256
#: Tokens that one block of the sort ranks: two words of bits per expert.
SORT_TOKENS = 64
#: Tokens up to which the sort's second launch takes programs of a quarter block.
SPREAD_TOKENS = 2048


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

    columns:  tokens of a tile: the least of these ascending widths that holds its rows
    wide:     composite tiles with wgmma where the GPU has it; else narrow ones with mma.sync
    loop:     programs go on to further tiles; else what exceeds the slots is left to the rest kernel
    slots:    tiles that the grid provides for, an estimate from the sizes alone
    """

    path: Path
    gate_up: Tile
    down: Tile
    columns: tuple[int, ...]
    wide: bool
    loop: bool
    slots: int
    pdl: bool

    @property
    def widest(self) -> int:
        """Most rows of one tile."""
        return self.columns[-1]


@functools.lru_cache(maxsize=16)
def tuned(capability: int, batch_invariant: bool) -> dict[str, Any]:
    """Return the tile table of a CUDA capability (90 = Hopper).

    $PORTAMOE_TUNED_DIR/triton_fused/sm_<capability>.json if that file exists, else what tuned/ holds: Hopper's own, and
    one for all others. Raises ValueError for a file that is no table.
    """
    own = tuned_file(os.environ.get(FOLDER_VARIABLE, ""), capability)
    packaged = "sm_90" if capability // 10 == 9 else "default"
    file = own if own.is_file() else resources.files("cuda_moe") / "tuned" / f"{packaged}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return dict(data["batch_invariant"] if batch_invariant else data["default"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no table of tiles ({error!r}); make one with portamoe bench --tune") from error


def tuned_file(folder: str, capability: int) -> pathlib.Path:
    """Return where tiles measured by the user lie in his folder."""
    return pathlib.Path(folder) / "triton_fused" / f"sm_{capability}.json"


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
    return plan_of(tuned(capability, batch_invariant), spec, tokens, capability)


def plan_of(table: dict[str, Any], spec: MoESpec, tokens: int, capability: int) -> Plan:
    """Return the plan that a table of tiles gives."""
    pairs = tokens * spec.top_k
    few = table["few"] if tokens <= FEW_TOKENS and pairs <= FEW_PAIRS else None
    path = "sorted" if few is None else _few_path(spec, tokens)
    entry = _entry(few if few is not None else table["sorted"], spec, tokens)
    short = spec.intermediate_size <= SHORT_K and "down_short" in entry
    gate_up, down = _tile(entry["gate_up"]), _tile(entry["down_short" if short else "down"])
    if spec.weight_format == "bf16":
        gate_up, down = _whole_k(gate_up), _whole_k(down)
    gate_up, down = _divisible(gate_up, spec.hidden_size), _divisible(down, spec.intermediate_size)
    if gate_up.registers and 2 * spec.intermediate_size % gate_up.rows:
        gate_up = replace(gate_up, registers=0)  # the masks of a last tile take registers too
    columns = _columns(entry["columns"])
    if path != "sorted":
        if gate_up.slices != down.slices:
            gate_up, down = _whole_k(gate_up, gate_up.unroll), _whole_k(down, down.unroll)
        columns = (columns[0] // gate_up.slices,)  # parts of K take columns of the instruction
    wide, may_loop = entry.get("wide", False), path != "sorted" or entry.get("loop", False)
    slots = _slots(spec, tokens, path, columns[-1], wide, may_loop)
    most = _most_slots(spec, tokens, path, columns[-1])
    loop = slots < most and may_loop
    return Plan(
        path=path,
        gate_up=gate_up,
        down=down,
        columns=columns,
        wide=wide,
        loop=loop,
        slots=slots,
        pdl=entry.get("pdl", False) and capability >= 90,
    )


def _columns(widths: list[int]) -> tuple[int, ...]:
    """Return the widths of an entry; each must be a power of two or the sum of two, as products have powers of two."""
    columns = tuple(widths)
    valid = all(width % 8 == 0 and width.bit_count() <= 2 and 0 < width < MOST_COLUMNS for width in columns)
    if not valid or not 0 < len(columns) <= MOST_WIDTHS or columns != tuple(sorted(set(columns))):
        raise ValueError(
            f"columns are {widths}, expected 1 to {MOST_WIDTHS} ascending multiples of 8 below {MOST_COLUMNS}, each a "
            "power of two or the sum of two; make a table with portamoe bench --tune"
        )
    return columns


def _few_path(spec: MoESpec, tokens: int) -> Path:
    if 2 * spec.num_local_experts >= spec.num_experts:
        return "pair" if tokens <= PAIR_TOKENS else "leader"
    return "direct" if tokens * spec.top_k <= DIRECT_PAIRS else "listed"


def plan_edges(spec: MoESpec, max_tokens: int, capability: int, batch_invariant: bool) -> list[int]:
    """Return token counts up to `max_tokens` that see every tile in use, and the largest count of each."""
    edges = {max_tokens, *range(1, min(FEW_TOKENS, max_tokens) + 1)}
    edges.update(t for t in (FEW_TOKENS + 1, SPREAD_TOKENS, SPREAD_TOKENS + 1) if t <= max_tokens)
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
    return replace(tile, unroll=min(steps, key=lambda step: (abs(step - tile.unroll), abs(step - 3))))


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
    hit = min(spec.num_local_experts, pairs)
    return hit + (pairs - hit) // widest


def may_remain(spec: MoESpec, tokens: int, plan: Plan) -> bool:
    """Return whether a routing could make tiles that the grid of the first window does not provide for."""
    return not plan.loop and plan.slots < max_tiles(spec, tokens, plan.widest)


def _most_slots(spec: MoESpec, tokens: int, path: Path, columns: int) -> int:
    return max_tiles(spec, tokens, columns) if path in {"listed", "sorted"} else tokens * spec.top_k


def _slots(spec: MoESpec, tokens: int, path: Path, widest: int, wide: bool, loop: bool) -> int:
    pairs = tokens * spec.top_k
    local = pairs * spec.num_local_experts / spec.num_experts
    if path in {"pair", "leader"}:
        return pairs
    if path == "direct":
        return max(1, min(pairs, math.ceil(local)))
    expected, most = expected_tiles(spec, tokens, widest), max_tiles(spec, tokens, widest)
    # A loop over tiles costs registers, and a rest kernel a launch: neither where the worst case is near.
    if not wide and most <= NEAR_WORST * expected:
        return most
    # A surplus program costs about a nanosecond; what has no slot is left to the rest kernel, or to programs that go on
    # to further tiles. Wide tiles are few, so they get room for half as many rows again in few experts.
    if loop:
        return max(1, min(most, math.ceil(1.05 * expected + 2)))
    return max(1, min(most, math.ceil(1.1 * expected + (0.5 if wide else 0.1) * local / widest + 4)))
