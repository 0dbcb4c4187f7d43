"""What one call launches and where its intermediates lie: sizes, windows, grids and splits, before anything runs.

Everything follows from the spec, the number of tokens and `max_local_rows`, never from the routing, so a call can be
captured in a graph. Neither torch nor Triton is imported.

Rows sorted by expert run in windows. If all local rows fit into one window of `whole` rows, window 0 holds them and the
others exit at once. If not, every window has `divided` rows: fewer, because unfinished float32 sums are carried from
window to window. Their high halves lie in the output, their low halves behind the `divided` rows of the first buffer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from portamoe.layouts import round_up
from rocm_moe.tiles import Cell, GemmTile, TileTable, expected_hits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portamoe.spec import MoESpec

Step = Literal["count", "place", "gemm1", "activation", "gemm2", "combine"]

#: Programs of `activate` and `combine` in windows after the first, which are mostly empty.
LATER_GRID = 2048
#: Pairs, padded to a power of two of slots, that `count_pairs` ranks at a time: all against all.
PAIRS_A_BLOCK = 256
#: Chunks of blocks in which pairs are counted, unless a chunk would have more than MOST_BLOCKS (counts are int16).
MOST_CHUNKS = 128
MOST_BLOCKS = 64
#: Blocks that `place_pairs` places at a time where a chunk has more than one.
PLACED_BLOCKS = 4
#: Counts that a program of `place_pairs` reads at a time.
CHUNK_COUNTS_A_STEP = 8192
#: Programs of `place_pairs` that list the tiles of a window.
TILE_PROGRAMS = 16
#: Elements of one program of `activate`, columns of one of `combine`: 16 bytes a lane.
ACTIVATION_ELEMENTS = 2048
COMBINE_COLUMNS = 512
#: No tile has fewer routed rows (BM), which bounds the number of tile slots.
SMALLEST_TILE = 8
#: (splits of K) x (rows of a call) never exceeds this, which bounds the memory of partial sums.
SPLIT_ROWS = 512
#: The most parts into which K is split.
MOST_SPLITS = 8
#: Rows of a window are a multiple of this, so that pointers into the row maps stay aligned.
ROW_MULTIPLE = 16
_ALIGNMENT = 256


@dataclass(frozen=True)
class Region:
    """A part of the workspace: byte offset, bytes and torch dtype by name."""

    offset: int
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Sizes:
    """The arch-independent part of a plan, from spec, tokens and max_local_rows.

    pairs:    T·K, the most rows there can be
    whole:    rows of window 0 if everything fits in it
    divided:  rows of each window if it does not
    windows:  launched, whether they have rows or not
    slots:    tile slots of a window, for tiles of SMALLEST_TILE rows
    blocks:   blocks of pairs in a chunk of the alignment
    chunks:   of them; 1 means that the call is a single block
    regions:  name -> where it lies in the workspace
    nbytes:   of the workspace
    """

    tokens: int
    pairs: int
    whole: int
    divided: int
    windows: int
    slots: int
    blocks: int
    chunks: int
    regions: Mapping[str, Region]
    nbytes: int


@dataclass(frozen=True)
class GemmPlan:
    """How a product runs: its tile, the splits of K, 128-wide steps a split and the grid."""

    tile: GemmTile
    splits: int
    steps: int
    grid: tuple[int, int]

    @property
    def partial(self) -> bool:
        """Float32 sums of each split are left to the next kernel."""
        return self.splits > 1


@dataclass(frozen=True)
class Plan:
    """One call: sizes, the tile cell, both products and the grids of the other kernels."""

    sizes: Sizes
    cell: Cell
    slots: int
    gemm1: GemmPlan
    gemm2: GemmPlan
    place_grid: int
    activation_grid: int
    combine_grid: int

    @staticmethod
    def later(grid: int, window: int) -> int:
        """Return `grid` in window 0, at most LATER_GRID after it."""
        return min(grid, LATER_GRID) if window else grid


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch for reports: the variant's name, the grid and the window (None: once a call)."""

    variant: str
    grid: tuple[int, ...]
    window: int | None


def default_max_local_rows(spec: MoESpec, max_tokens: int) -> int:
    """Return 2·T·K·E_local/E, rounded up: twice the share that uniform routing brings here, at most all pairs."""
    pairs = max_tokens * spec.top_k
    share = -(-2 * pairs * spec.num_local_experts // spec.num_experts)
    return round_up(min(pairs, share), ROW_MULTIPLE)


@functools.lru_cache(maxsize=4096)
def sizes(spec: MoESpec, tokens: int, max_local_rows: int) -> Sizes:
    """Return windows and workspace for a call of `tokens` tokens.

    Raises ValueError for a number of tokens or rows below 1.
    """
    if tokens < 1 or max_local_rows < 1:
        raise ValueError(f"tokens {tokens} and max_local_rows {max_local_rows} must be at least 1")
    pairs = tokens * spec.top_k
    limit = round_up(max_local_rows, ROW_MULTIPLE)
    whole = min(limit, round_up(pairs, ROW_MULTIPLE))
    width = max(2 * spec.intermediate_size, spec.hidden_size)
    carry = 0 if pairs <= whole else tokens * spec.hidden_size * 2
    divided = whole
    if carry:
        spare = whole - round_up(-(-carry // (2 * width)), ROW_MULTIPLE)
        divided = max(spare, round_up(whole // 2, ROW_MULTIPLE))
    windows = 1 if pairs <= whole else -(-pairs // divided)
    slots = tile_slots(spec, whole, SMALLEST_TILE)
    all_blocks = -(-tokens // tokens_a_block(spec))
    blocks = 1
    if all_blocks > MOST_CHUNKS:
        blocks = min(round_up(-(-all_blocks // MOST_CHUNKS), PLACED_BLOCKS), MOST_BLOCKS)
    chunks = -(-all_blocks // blocks)
    # Not of `chunks`, which may be more for fewer tokens.
    counted = max(min(all_blocks, MOST_CHUNKS), -(-all_blocks // MOST_BLOCKS))
    partial = min(SPLIT_ROWS, whole * MOST_SPLITS) * width * 4
    wanted = {
        "counts": (counted * expert_bins(spec) * 2 if all_blocks > 1 else 0, "int16"),
        "ranked": (pairs * 4 if all_blocks > 1 else 0, "int32"),
        "total_rows": (4, "int32"),
        "row_token": (max(pairs, whole) * 4, "int32"),
        "row_slot": (max(pairs, whole) * 4, "int32"),
        "row_expert": (max(pairs, whole) * 4, "int32"),
        "token_rows": (pairs * 4, "int32"),
        "token_weights": (pairs * 4, "float32"),
        "token_count": (tokens * 4, "int32"),
        "tiles": (windows * slots * 16, "int32"),
        "window_rows": (windows * 4, "int32"),
        # GEMM1's rows, then GEMM2's; float32 partial sums of either; behind `divided` rows the carried halves.
        "rows": (max(whole * width * 2, divided * width * 2 + carry, partial), "bfloat16"),
        "h": (whole * spec.intermediate_size * 2, "bfloat16"),
    }
    regions, offset = {}, 0
    for name, (nbytes, dtype) in wanted.items():
        regions[name] = Region(offset, nbytes, dtype)
        offset = round_up(offset + nbytes, _ALIGNMENT)
    return Sizes(tokens, pairs, whole, divided, windows, slots, blocks, chunks, MappingProxyType(regions), offset)


def workspace_bytes(spec: MoESpec, max_tokens: int, max_local_rows: int) -> int:
    """Return the bytes that calls of up to `max_tokens` tokens use beside their output."""
    return sizes(spec, max_tokens, max_local_rows).nbytes


def carry_offset(spec: MoESpec, of: Sizes) -> int:
    """Return the byte offset of the carried halves in the workspace; anything if there is a single window."""
    width = max(2 * spec.intermediate_size, spec.hidden_size)
    return of.regions["rows"].offset + (of.divided * width * 2 if of.windows > 1 else 0)


def make_plan(spec: MoESpec, table: TileTable, tokens: int, max_local_rows: int, *, whole_rows: bool = False) -> Plan:
    """Return the plan of a call; `whole_rows`: never split K, because a hook wants the finished rows."""
    of = sizes(spec, tokens, max_local_rows)
    cell = table.cell(spec, tokens)
    slots = tile_slots(spec, of.whole, cell.tile_rows)
    hits = expected_hits(spec, tokens)
    gemm1 = _gemm_plan(cell.gemm1, 2 * spec.intermediate_size, spec.hidden_size, slots, hits, of, whole_rows)
    gemm2 = _gemm_plan(cell.gemm2, spec.hidden_size, spec.intermediate_size, slots, hits, of, whole_rows)
    columns = activation_columns(spec.intermediate_size)
    row_blocks = -(-of.whole // (ACTIVATION_ELEMENTS // columns))
    return Plan(
        of,
        cell,
        slots,
        gemm1,
        gemm2,
        place_grid=of.chunks + of.windows * TILE_PROGRAMS,
        activation_grid=row_blocks * (spec.intermediate_size // columns),
        combine_grid=tokens * -(-spec.hidden_size // COMBINE_COLUMNS),
    )


def _gemm_plan(
    tile: GemmTile, rows: int, columns: int, slots: int, hits: float, of: Sizes, whole_rows: bool
) -> GemmPlan:
    n_tiles = -(-rows // tile.rows)
    most = 1 if whole_rows else max(1, min(SPLIT_ROWS // round_up(of.pairs, ROW_MULTIPLE), MOST_SPLITS))
    splits, steps = tile.split_for(columns, hits * n_tiles, most)
    return GemmPlan(tile, splits, steps, (n_tiles * slots, splits))


def launches(
    spec: MoESpec, table: TileTable, tokens: int, max_local_rows: int, ids: str = "i32"
) -> list[PlannedLaunch]:
    """Return every launch of a call in order."""
    plan = make_plan(spec, table, tokens, max_local_rows)
    few = plan.sizes.chunks == 1
    out = [] if few else [PlannedLaunch(variant_name("count", ids=ids), (plan.sizes.chunks,), None)]
    out.append(PlannedLaunch(place_name(plan.sizes, ids), (plan.place_grid,), None))
    one, two = plan.gemm1.partial, plan.gemm2.partial
    for window in range(plan.sizes.windows):
        out += [
            PlannedLaunch(variant_name("gemm1", cell=plan.cell, partial=one), plan.gemm1.grid, window),
            PlannedLaunch(variant_name("activation", partial=one), (plan.later(plan.activation_grid, window),), window),
            PlannedLaunch(variant_name("gemm2", cell=plan.cell, partial=two), plan.gemm2.grid, window),
            PlannedLaunch(variant_name("combine", partial=two), (plan.later(plan.combine_grid, window),), window),
        ]
    return out


def variant_name(step: Step, *, ids: str = "", cell: Cell | None = None, partial: bool = False) -> str:
    """Return the name under which `variants.kernel_variants` lists a binary."""
    if step in ("count", "place"):
        return f"{step}-{ids}" if ids else step
    suffix = "-partial" if partial else ""
    if cell is None:
        return step + suffix
    tile = cell.gemm1 if step == "gemm1" else cell.gemm2
    options = "".join(f"-{key}{value}" for key, value in sorted(tile.options.items()))
    tokens = "+".join(str(rows) for rows in (cell.tokens, *cell.extra))
    return f"{step}-{tokens}x{tile.rows}-w{tile.warps}s{tile.stages}u{tile.unroll}{options}{suffix}"


def expert_bins(spec: MoESpec) -> int:
    """Return the power of two that holds a number for each local expert and one for pairs without a row."""
    return 1 << spec.num_local_experts.bit_length()


def token_slots(spec: MoESpec) -> int:
    """Return top-k rounded up to a power of two."""
    return 1 << (spec.top_k - 1).bit_length()


def tokens_a_block(spec: MoESpec) -> int:
    """Return the tokens of PAIRS_A_BLOCK pairs."""
    return max(1, PAIRS_A_BLOCK // token_slots(spec))


def tile_slots(spec: MoESpec, rows: int, tile_rows: int) -> int:
    """Return how many tiles of up to `tile_rows` rows any routing of `rows` rows may need."""
    return min(spec.num_local_experts, rows) + rows // tile_rows


def place_name(of: Sizes, ids: str) -> str:
    """Return the variant of `place_pairs`: only a call of one block reads ids there."""
    if of.chunks == 1:
        return variant_name("place", ids=ids)
    return variant_name("place", ids="many" if of.blocks > 1 else "")


def activation_columns(inter: int) -> int:
    """Return the columns of an activation program: the largest power of two that divides I, at most 1024."""
    return min(inter & -inter, 1024)
