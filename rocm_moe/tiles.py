"""Which tile serves how many tokens: data in tuned/<arch>.json, overridden by a file in PORTAMOE_TUNED_DIR.

A table is a list of cells in ascending `rows_per_expert`; the first whose limit is not exceeded by the mean number of
rows of an expert that is hit serves the call. Where a grid of whole columns would be smaller than `fill` workgroups,
K is split.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portamoe.spec import MoESpec

PROVENANCES = ("measured", "emulated", "compiled", "modelled", "inherited")
SCHEMA = 1
#: K columns of one loop step of the kernels, the unit in which K is split.
STEP = 128
#: Up to so many steps, K is computed without a loop.
MOST_UNROLLED = 4


class TunedFileError(ValueError):
    """A file of tuned tiles cannot be used; says which file and why."""


@dataclass(frozen=True)
class GemmTile:
    """How one product is cut up.

    rows:       weight rows of a workgroup (BN), a multiple of 16
    warps, stages: as Triton's num_warps and num_stages
    unroll:     128-wide K steps in one loop iteration, used where it divides K
    fill:       workgroups that the grid should have; K is split until it does. 0: never split
    options:    further compiler options ("matrix_instr_nonkdim", "kpack", "waves_per_eu")
    """

    rows: int
    warps: int
    stages: int = 2
    unroll: int = 1
    fill: int = 0
    options: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def unroll_for(self, columns: int, *, whole: bool = False) -> int:
        """Return `unroll` where it divides the 128-wide steps of K = columns, else 1; all of them if `whole` and few.

        whole: K is not split
        """
        steps = columns // STEP
        if whole and 0 < steps <= MOST_UNROLLED:
            return steps
        return self.unroll if steps % self.unroll == 0 else 1

    def split_for(self, columns: int, workgroups: float, most: int) -> tuple[int, int]:
        """Return (parts, steps a part) for K = columns when one part would have `workgroups` workgroups."""
        total, unroll = columns // STEP, self.unroll_for(columns)
        if not total:
            return 1, 0
        wanted = math.ceil(self.fill / max(workgroups, 1.0)) if self.fill else 1
        parts = max(1, min(wanted, most, total // unroll))
        steps = math.ceil(total / parts / unroll) * unroll
        return math.ceil(total / steps), steps


@dataclass(frozen=True)
class Cell:
    """The tiles for up to `rows_per_expert` rows an expert, the same routed rows in both products.

    tokens:  routed rows of a tile (BM)
    extra:   () or two numbers of further rows that a tile may have, where its kernel can add them (NVIDIA)
    """

    rows_per_expert: float
    tokens: int
    gemm1: GemmTile
    gemm2: GemmTile
    extra: tuple[int, ...] = ()

    @property
    def tile_rows(self) -> int:
        """The most rows of a tile."""
        return self.tokens + max(self.extra, default=0)


@dataclass(frozen=True)
class TileTable:
    """All cells of an arch and where they come from.

    provenance:  "measured", "emulated", "compiled", "modelled" or "inherited"
    source:      the file it was read from
    origin:      date, device and command that made it, as the file says
    """

    arch: str
    provenance: str
    cells: tuple[Cell, ...]
    source: str
    origin: Mapping[str, Any]

    def cell(self, spec: MoESpec, tokens: int) -> Cell:
        """Return the cell for `tokens` tokens of `spec` under uniform routing."""
        mean = rows_per_hit_expert(spec, tokens)
        return next((cell for cell in self.cells if mean <= cell.rows_per_expert), self.cells[-1])


def expected_hits(spec: MoESpec, tokens: int) -> float:
    """Return how many local experts at least one of `tokens` tokens chooses, if routing is uniform."""
    return spec.num_local_experts * (1.0 - (1.0 - spec.top_k / spec.num_experts) ** tokens)


def rows_per_hit_expert(spec: MoESpec, tokens: int) -> float:
    """Return the mean rows of an expert that has any, if routing is uniform."""
    rows = tokens * spec.top_k * spec.num_local_experts / spec.num_experts
    return rows / expected_hits(spec, tokens)


def table_file(arch: str) -> str:
    """Return the table that serves `arch`: RDNA archs share one per generation, NVIDIA's are by capability."""
    if arch.startswith("gfx11"):
        return "gfx1100"
    if arch.startswith("gfx12") and arch != "gfx1250":
        return "gfx1201"
    if arch.startswith("sm_") or arch == "cpu":
        return "sm_90" if arch.startswith("sm_9") else ("cpu" if arch == "cpu" else "sm_80")
    return arch


def load_table(arch: str, environ: Mapping[str, str] = os.environ) -> TileTable:
    """Return the tiles of `arch`: from $PORTAMOE_TUNED_DIR/<arch>.json if that file exists, else the packaged ones.

    Raises TunedFileError for a file that is not of this schema and for an arch without tiles.
    """
    packaged = Path(__file__).parent / "tuned" / f"{table_file(arch)}.json"
    override = environ.get("PORTAMOE_TUNED_DIR")
    if override:
        own = Path(override) / f"{arch}.json"
        if own.is_file():
            return read_table(own, arch)
    if not packaged.is_file():
        raise TunedFileError(f"no tiles for {arch}: {packaged} does not exist")
    return read_table(packaged, arch)


def read_table(path: Path, arch: str) -> TileTable:
    """Read one JSON file; raises TunedFileError that names the file and the fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise TunedFileError(f"{path} has schema {data['schema']}, this version reads {SCHEMA}")
        if data["provenance"] not in PROVENANCES:
            raise TunedFileError(f"{path}: provenance {data['provenance']!r} is none of {', '.join(PROVENANCES)}")
        cells = tuple(_cell(entry) for entry in data["cells"])
        origin = {key: data.get(key) for key in ("date", "device", "command")}
        table = TileTable(arch, data["provenance"], cells, str(path), MappingProxyType(origin))
    except (KeyError, TypeError, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TunedFileError(f"{path} is no table of tiles: {type(error).__name__}: {error}") from error
    limits = [cell.rows_per_expert for cell in cells]
    if not cells or limits != sorted(limits):
        raise TunedFileError(f"{path}: cells must be in ascending rows_per_expert, got {limits}")
    return table


def table_to_dict(table: TileTable) -> dict[str, Any]:
    """Return the JSON form that `read_table` reads."""
    cells = [
        {
            "rows_per_expert": cell.rows_per_expert,
            "tokens": cell.tokens,
            "extra": list(cell.extra),
            "gemm1": _tile_to_dict(cell.gemm1),
            "gemm2": _tile_to_dict(cell.gemm2),
        }
        for cell in table.cells
    ]
    return {"schema": SCHEMA, "arch": table.arch, "provenance": table.provenance, **table.origin, "cells": cells}


def _tile_to_dict(tile: GemmTile) -> dict[str, Any]:
    values = {f.name: getattr(tile, f.name) for f in fields(tile)}
    return {**values, "options": dict(tile.options)}


def _cell(entry: Mapping[str, Any]) -> Cell:
    extra = tuple(int(rows) for rows in entry.get("extra", ()))
    if len(extra) not in (0, 2):
        raise TunedFileError(f"a cell has extra rows {list(extra)}, expected none or two numbers")
    tiles = _tile(entry["gemm1"]), _tile(entry["gemm2"])
    return Cell(float(entry["rows_per_expert"]), int(entry["tokens"]), *tiles, extra)


def _tile(entry: Mapping[str, Any]) -> GemmTile:
    values = dict(entry)
    tile = GemmTile(**{**values, "options": MappingProxyType(dict(values.get("options", {})))})
    if tile.rows % 16 or tile.rows < 16:
        raise TunedFileError(f"a tile has {tile.rows} weight rows, the kernels take multiples of 16")
    return tile
