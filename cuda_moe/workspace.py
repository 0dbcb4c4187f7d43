"""Where each intermediate of a call lies in the caller's workspace, in bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cuda_moe.plan import SORT_TOKENS, SPREAD_TOKENS, Plan, make_plan, max_tiles, may_remain, plan_edges
from portamoe.layouts import round_up

if TYPE_CHECKING:
    from portamoe.spec import MoESpec

ALIGN = 256
#: Rows of a window that `max_local_rows` is rounded up to: more than the widest tile has.
LEAST_ROWS = 256


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Sort:
    """How the tokens are cut into `blocks` of SORT_TOKENS, each with `slots` pairs a token and `bins` counters.

    part:  tokens that one program of the second launch places
    """

    slots: int
    bins: int
    blocks: int
    part: int


def sort_shape(spec: MoESpec, tokens: int) -> Sort:
    """Return the shape of the sort for `tokens` tokens; slots: K rounded up to a power of two."""
    bins = max(16, next_power_of_2(spec.num_local_experts))
    # Every program of the second launch adds up all blocks' counts: few tokens are spread, many are not.
    part = SORT_TOKENS // 4 if tokens <= SPREAD_TOKENS else SORT_TOKENS
    return Sort(next_power_of_2(spec.top_k), bins, -(-tokens // SORT_TOKENS), part)


@dataclass(frozen=True)
class Regions:
    """Offsets in bytes by name, and their end.

    rows:       rows of the first window
    rest_rows:  rows of each further window; 0 when one window is certain to do
    """

    offsets: dict[str, int]
    sizes: dict[str, int]
    nbytes: int
    rows: int = 0
    rest_rows: int = 0


class _Packer:
    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.end = 0

    def add(self, name: str, size: int) -> None:
        self.offsets[name], self.sizes[name] = self.end, size
        self.end += round_up(size, ALIGN)


def _few(spec: MoESpec, tokens: int, plan: Plan) -> Regions:
    pairs, packer = tokens * spec.top_k, _Packer()
    listed, leader = plan.path == "listed", plan.path == "leader"
    tiles = max_tiles(spec, tokens, plan.widest) if listed else pairs if leader else 0
    packer.add("arrivals", 0 if leader else 4 * arrival_counters(spec, plan, tokens))
    packer.add("meta", 64)
    packer.add("tile_expert", 4 * tiles if listed else 0)
    packer.add("tile_count", 4 * tiles)
    packer.add("tile_dest", 4 * tiles * plan.widest)
    packer.add("tile_need", 4 * tiles * plan.widest)
    packer.add("tile_weight", 4 * tiles * plan.widest if listed else 0)
    packer.add("h", 2 * pairs * spec.intermediate_size)
    packer.add("y", 4 * pairs * spec.hidden_size)
    return Regions(packer.offsets, packer.sizes, packer.end)


def arrival_counters(spec: MoESpec, plan: Plan, tokens: int) -> int:
    """Return how many counters the few-token path of `plan` uses: one per token and block of columns."""
    return tokens * -(-spec.hidden_size // plan.down.rows)


def _sorted(spec: MoESpec, tokens: int, plan: Plan, max_local_rows: int) -> Regions:
    pairs, packer, sort = tokens * spec.top_k, _Packer(), sort_shape(spec, tokens)
    tiles = max_tiles(spec, tokens, plan.widest)
    rows = min(pairs, max(max_local_rows, LEAST_ROWS))
    packer.add("meta", 64)
    packer.add("counts", 2 * sort.blocks * sort.bins)
    packer.add("masks", 8 * sort.blocks * sort.bins)
    packer.add("rank", 4 * sort.blocks * sort.slots * SORT_TOKENS)
    for name in ("row_token", "token_row", "token_weight"):
        packer.add(name, 4 * pairs)
    packer.add("token_rows", 4 * tokens)
    for name in ("tile_expert", "tile_row", "tile_count"):
        packer.add(name, 4 * tiles)
    h_row, y_row = 2 * spec.intermediate_size, 2 * spec.hidden_size
    remains = rows < pairs or may_remain(spec, tokens, plan)
    partial = 2 * tokens * spec.hidden_size if remains else 0
    # h is read no more when the sums are made, so the kept halves of unfinished sums take its place; the further
    # windows share what is left of both.
    packer.add("h", max(h_row * rows, partial))
    # x in wgmma's order is read no more when y is written.
    packer.add("y", max(y_row * rows, 2 * tokens * spec.hidden_size if plan.wide else 0))
    offsets, sizes = dict(packer.offsets), dict(packer.sizes)
    rest_rows, end = 0, packer.end
    if remains:
        begin = offsets["h"] + round_up(partial, ALIGN)
        end = max(end, begin + LEAST_ROWS * (h_row + y_row) + ALIGN)
        rest_rows = (end - begin - ALIGN) // (h_row + y_row)
        offsets["partial"], sizes["partial"] = offsets["h"], partial
        offsets["rest_h"], sizes["rest_h"] = begin, h_row * rest_rows
        offsets["rest_y"] = begin + round_up(h_row * rest_rows, ALIGN)
        sizes["rest_y"] = y_row * rest_rows
    return Regions(offsets, sizes, end, rows, rest_rows)


@functools.lru_cache(maxsize=16384)
def regions(spec: MoESpec, tokens: int, plan: Plan, max_local_rows: int) -> Regions:
    """Return the layout of a call on `tokens` tokens with windows of `max_local_rows` rows."""
    if plan.path == "sorted":
        return _sorted(spec, tokens, plan, max_local_rows)
    return _few(spec, tokens, plan)


def workspace_bytes(spec: MoESpec, max_tokens: int, max_local_rows: int, capability: int, batch_invariant: bool) -> int:
    """Return the bytes that calls on 1 ... max_tokens tokens need.

    The need grows with the tokens as long as the same tiles are used, so the largest count of each entry decides.
    """
    return max(
        regions(spec, tokens, make_plan(spec, tokens, capability, batch_invariant), max_local_rows).nbytes
        for tokens in plan_edges(spec, max_tokens, capability, batch_invariant)
    )
