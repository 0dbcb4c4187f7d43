"""Tiles measured on the device at hand and written where `tiles.load_table` finds them: `portamoe bench --tune`.

For a few numbers of tokens whole calls are timed as graph replays, first over the tiles of GEMM1, then over those of
GEMM2. The result goes to $PORTAMOE_TUNED_DIR/<arch>.json, marked `measured`, and overrides the packaged table.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from portamoe.whole_files import written_beside
from rocm_moe import plan as planning
from rocm_moe.tiles import Cell, GemmTile, TileTable, load_table, read_table, rows_per_hit_expert, table_to_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from portamoe.spec import MoESpec
    from rocm_moe.unfused_weights import UnfusedWeights

#: Each gets a cell of its own; more would exceed the number of binaries that a spec may have.
TOKENS = (1, 16, 128, 1024)
#: (weight rows, warps) of a tile; a wave works on at least one brick of 16 rows.
SHAPES = ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8))
#: Workgroups per compute unit that splitting K aims at.
FILLS = (0, 2, 4, 8)
#: K is split only where the grid may be too small without.
FEW_TOKENS = 16
SMALLEST_ROWS, LARGEST_ROWS = 16, 128
REPLAYS = 20
FOLDER_VARIABLE = "PORTAMOE_TUNED_DIR"


@dataclass(frozen=True)
class Trial:
    """One timed cell: microseconds of a call of `tokens` tokens, or why it could not run."""

    tokens: int
    cell: Cell
    us: float | None
    failure: str | None = None


@dataclass(frozen=True)
class TuneReport:
    """What `portamoe bench --tune` did: the table, its file, and every trial."""

    table: TileTable
    file: Path
    before_us: Mapping[int, float]
    after_us: Mapping[int, float]
    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "file": str(self.file),
            "table": table_to_dict(self.table),
            "before_us": dict(self.before_us),
            "after_us": dict(self.after_us),
            "trials": len(self.trials),
            "failed": [trial.failure for trial in self.trials if trial.failure],
        }

    def lines(self) -> list[str]:
        """Return the report as text lines."""
        out = [f"{len(self.trials)} tiles tried, written to {self.file}"]
        out += [
            f"T {tokens:5}: {self.before_us[tokens]:9.1f} µs before, {after:9.1f} µs now"
            for tokens, after in self.after_us.items()
        ]
        return out


def run(
    spec: MoESpec,
    device: torch.device,
    tokens: Sequence[int] = TOKENS,
    folder: Path | None = None,
    progress: Callable[[Trial], None] | None = None,
) -> TuneReport:
    """Measure tiles for `spec` on `device` and write the table of its arch.

    tokens:  numbers of tokens to tune for, at most four
    folder:  where to write; default: $PORTAMOE_TUNED_DIR

    Raises ValueError without a folder, for a CPU and for more numbers of tokens than cells are possible.
    """
    import torch

    from rocm_moe.unfused_weights import device_arch

    target = folder or (Path(os.environ[FOLDER_VARIABLE]) if FOLDER_VARIABLE in os.environ else None)
    if target is None:
        raise ValueError(f"there is nowhere to write the tiles: set {FOLDER_VARIABLE} to a folder you can write to")
    if device.type != "cuda":
        raise ValueError(f"tiles are measured on a GPU, got {device}")
    if not tokens or len(tokens) > len(TOKENS):
        raise ValueError(f"one to {len(TOKENS)} numbers of tokens can be tuned for, got {list(tokens)}")
    with torch.cuda.device(device):
        arch = device_arch(device)
        bench = _Bench(spec, device, arch, load_table(arch, {}), progress)
        best = {count: bench.tune(count) for count in sorted(tokens)}
        table = bench.table_of(best)
    path = write(table, target)
    return TuneReport(
        table=read_table(path, arch),
        file=path,
        before_us=MappingProxyType(dict(bench.before)),
        after_us=MappingProxyType({count: trial.us or math.inf for count, trial in best.items()}),
        trials=tuple(bench.trials),
    )


def write(table: TileTable, folder: Path) -> Path:
    """Write `table` to folder/<arch>.json in one step, so that a reader never sees half a file; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.arch}.json"
    with written_beside(path) as beside:
        beside.write_text(json.dumps(table_to_dict(table), indent=1) + "\n", encoding="utf-8")
    return path


def candidate_rows(mean_rows: float) -> tuple[int, ...]:
    """Return the row counts (BM) worth trying when an expert that is hit has `mean_rows` rows."""
    fitting = max(SMALLEST_ROWS, 1 << math.ceil(math.log2(max(mean_rows, 1.0))))
    return tuple(
        rows for rows in (16, 32, 64, 128) if fitting // 2 <= rows <= max(SMALLEST_ROWS, fitting) <= 2 * LARGEST_ROWS
    ) or (64, LARGEST_ROWS)


def variations(units: int, tokens: int) -> Iterator[Callable[[GemmTile], Iterator[GemmTile]]]:
    """Yield what to vary one after the other, each from the best tile so far: shape, unrolling, splits of K."""
    yield lambda best: (replace(best, rows=rows, warps=warps) for rows, warps in SHAPES)
    yield lambda best: iter((replace(best, unroll=3 - min(best.unroll, 2)),))
    if tokens <= FEW_TOKENS:
        yield lambda best: (replace(best, fill=fill * units) for fill in FILLS)


def cells_of(best: Mapping[int, Cell], spec: MoESpec) -> tuple[Cell, ...]:
    """Return the table's cells: each serves up to the geometric mean of its rows and the next one's."""
    counts = sorted(best)
    means = [rows_per_hit_expert(spec, count) for count in counts]
    limits = [math.sqrt(a * b) for a, b in itertools.pairwise(means)] + [1e9]
    return tuple(replace(best[count], rows_per_expert=limit) for count, limit in zip(counts, limits, strict=True))


class _Bench:
    """Times calls of one spec with any table; the weights are random bytes, prepared once."""

    def __init__(
        self,
        spec: MoESpec,
        device: torch.device,
        arch: str,
        table: TileTable,
        progress: Callable[[Trial], None] | None,
    ) -> None:
        import torch

        self.spec, self.device, self.arch, self.table = spec, device, arch, table
        self.units = int(torch.cuda.get_device_properties(device).multi_processor_count)
        self.progress = progress
        self.trials: list[Trial] = []
        self.before: dict[int, float] = {}
        self.prepared = random_weights(spec, device, arch, table)

    def tune(self, tokens: int) -> Trial:
        """Return the fastest cell for `tokens` tokens: GEMM1 first, then GEMM2, for each number of rows."""
        packaged = self.table.cell(self.spec, tokens)
        best = self.time(tokens, packaged)
        self.before[tokens] = best.us if best.us is not None else math.inf
        for rows in candidate_rows(rows_per_hit_expert(self.spec, tokens)):
            start = min(self.table.cells, key=lambda cell: abs(cell.tokens - rows))
            local = self.time(tokens, replace(start, tokens=rows))
            for vary in variations(self.units, tokens):
                for tile in vary(local.cell.gemm1):
                    local = faster(local, self.time(tokens, replace(local.cell, gemm1=tile)))
            for vary in variations(self.units, tokens):
                for tile in vary(local.cell.gemm2):
                    local = faster(local, self.time(tokens, replace(local.cell, gemm2=tile)))
            best = faster(best, local)
        return best

    def table_of(self, best: Mapping[int, Trial]) -> TileTable:
        """Return the table of the best cells, marked `measured`, with date, device and command."""
        import torch

        origin = {
            "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
            "device": torch.cuda.get_device_name(self.device),
            "command": shlex.join(["portamoe", *sys.argv[1:]]),
        }
        cells = cells_of({tokens: trial.cell for tokens, trial in best.items()}, self.spec)
        return TileTable(self.arch, "measured", cells, "measured now", MappingProxyType(origin))

    def time(self, tokens: int, cell: Cell) -> Trial:
        """Return the time of a call with `cell`, or why its kernels cannot be built or run."""
        from triton.compiler import CompilationError
        from triton.runtime.errors import OutOfResources

        table = replace(self.table, cells=(replace(cell, rows_per_expert=1e9),))
        try:
            trial = Trial(tokens, cell, self._replay_us(tokens, table))
        except (CompilationError, OutOfResources) as error:
            trial = Trial(tokens, cell, None, f"{type(error).__name__}: {str(error)[:200]}")
        self.trials.append(trial)
        if self.progress:
            self.progress(trial)
        return trial

    def _replay_us(self, tokens: int, table: TileTable) -> float:
        import torch

        from portamoe.gpu_timing import capture, median_ms
        from rocm_moe import unfused_call
        from rocm_moe.binaries import Binaries
        from rocm_moe.evidence.limits import REPEATS

        spec = self.spec
        prepared = replace(self.prepared, table=table, binaries=Binaries(self.arch, spec, table), calls={})
        prepared.load_all()
        rows = planning.default_max_local_rows(spec, tokens)
        workspace = torch.empty(planning.workspace_bytes(spec, tokens, rows), dtype=torch.uint8, device=self.device)
        chance = torch.Generator(device=self.device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device=self.device, generator=chance)

        x = (random(tokens, spec.hidden_size) - 0.5).bfloat16()
        ids = random(tokens, spec.num_experts).topk(spec.top_k).indices.int()
        tensors = unfused_call.Tensors(x, ids, random(tokens, spec.top_k), torch.empty_like(x))

        def calls() -> None:
            for _ in range(REPLAYS):
                unfused_call.run(prepared, tensors, workspace, rows, {})

        return median_ms(capture(calls).replay, REPEATS) / REPLAYS * 1e3


def faster(a: Trial, b: Trial) -> Trial:
    """Return the faster of two trials; one that failed is slower than any."""
    return b if (b.us if b.us is not None else math.inf) < (a.us if a.us is not None else math.inf) else a


def random_weights(spec: MoESpec, device: torch.device, arch: str, table: TileTable) -> UnfusedWeights:
    """Return weights of random codes and harmless scales in the arch's layout, without a checkpoint."""
    import torch

    from rocm_moe.binaries import Binaries
    from rocm_moe.unfused_weights import Matrix, UnfusedWeights
    from rocm_moe.variants import layout_for

    experts = spec.num_local_experts

    def matrix(rows: int, columns: int) -> Matrix:
        size = experts * rows * columns
        words = torch.randint(-(2**31), 2**31 - 1, (size // 8,), dtype=torch.int32, device=device)
        scales = torch.full((size // 32,), 121, dtype=torch.uint8, device=device)
        flags = torch.zeros(experts, dtype=torch.int32, device=device)
        bias = torch.zeros(experts * rows if spec.bias else 1, device=device)
        return Matrix(words, scales, flags, torch.zeros(1, dtype=torch.uint8, device=device), bias)

    inter, hidden = spec.intermediate_size, spec.hidden_size
    w13, w2 = matrix(2 * inter, hidden), matrix(hidden, inter)
    return UnfusedWeights(spec, arch, layout_for(arch), device, w13, w2, table, Binaries(arch, spec, table))
