"""Tiles measured on the GPU at hand, written where `plan.tuned` finds them: `portamoe bench --tune`.

For every entry of the table that the spec uses, whole calls are timed as graph replays at one number of tokens, first
over the tiles of GEMM1, then over those of GEMM2.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuda_moe.plan import FEW_TOKENS, FOLDER_VARIABLE, SHORT_K, Plan, plan_of, tuned, tuned_file
from portamoe.whole_files import written_beside

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from cuda_moe.prepared import FusedWeights
    from portamoe.spec import MoESpec

#: Most tokens that tiles are measured at.
MOST_TOKENS = 8192
#: Tiles worth trying (rows, warps, unroll, stages, registers): few rows an expert with mma.sync, more with wgmma.
NARROW = ((32, 2, 4, 3, 0), (32, 2, 2, 4, 0), (64, 4, 4, 3, 0), (64, 4, 2, 3, 0), (32, 2, 6, 1, 0), (64, 4, 6, 1, 0))
WIDE = (
    (64, 4, 1, 3, 0),
    (64, 4, 2, 3, 0),
    (128, 4, 2, 3, 0),
    (128, 4, 1, 3, 168),
    (128, 4, 1, 4, 168),
    (128, 8, 1, 3, 128),
)
REPLAYS = 10
#: Four scales of 2**-8 (layouts.py: E8M0 + 126): sums of ordinary size. Products of zeros would draw less power than
#: real ones and let the clock run higher.
SCALES = int.from_bytes(bytes([127 - 8 + 126] * 4), "little", signed=True)

Json = dict[str, Any]


@dataclass
class TuneReport:
    """What was tried; µs by number of tokens before and after."""

    file: Path
    before_us: dict[int, float] = field(default_factory=dict)
    after_us: dict[int, float] = field(default_factory=dict)
    trials: int = 0
    failed: list[str] = field(default_factory=list)

    def to_dict(self) -> Json:
        """Return the JSON form."""
        return {**vars(self), "file": str(self.file)}

    def lines(self) -> list[str]:
        """Return the report as text lines."""
        out = [f"{self.trials} tiles tried, {len(self.failed)} of them failed, written to {self.file}"]
        for tokens, us in self.after_us.items():
            out.append(f"T {tokens:5}: {self.before_us[tokens]:9.1f} µs before, {us:9.1f} µs now")
        return out


def run(spec: MoESpec, device: torch.device, folder: Path | None = None, most: int = MOST_TOKENS) -> TuneReport:
    """Measure tiles for `spec` on `device` and write the table of its arch.

    folder:  where to write; default: $PORTAMOE_TUNED_DIR
    most:    most tokens to measure at

    Raises ValueError without a folder and for a CPU.
    """
    import torch

    target = str(folder) if folder else os.environ.get(FOLDER_VARIABLE)
    if not target:
        raise ValueError(f"there is nowhere to write the tiles: set {FOLDER_VARIABLE} to a folder you can write to")
    if device.type != "cuda":
        raise ValueError(f"tiles are measured on a GPU, got {device}")
    with torch.cuda.device(device):
        bench = _Bench(spec, device)
        report = TuneReport(tuned_file(target, bench.prepared.capability))
        bench.tune(report, most)
    _write(report.file, bench.table, bench.prepared.capability, torch.cuda.get_device_name(device))
    return report


def uses(table: Json, spec: MoESpec, most: int) -> Iterator[tuple[Json, int]]:
    """Yield each entry that calls of up to `most` tokens use, with a number of tokens that uses it."""
    per_token = spec.top_k / spec.num_experts
    for entry in table["few"] or ():
        if entry["tokens"] <= min(most, FEW_TOKENS):
            yield entry, entry["tokens"]
    first = FEW_TOKENS + 1 if table["few"] else 1
    for entry in table["sorted"]:
        last = min(most, int(entry["rows_per_expert"] / per_token))
        if last >= first:
            yield entry, max(first, min(last, round(math.sqrt(first * last))))
        first = max(first, last + 1)


class _Bench:
    """Times calls with any table; the weights are random bytes, prepared once."""

    def __init__(self, spec: MoESpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.prepared = random_weights(spec, device)
        self.table: Json = copy.deepcopy(tuned(self.prepared.capability, False))
        self.down = "down_short" if spec.intermediate_size <= SHORT_K else "down"

    def tune(self, report: TuneReport, most: int) -> None:
        """Replace every tile of the table by the fastest one tried."""
        for entry, tokens in list(uses(self.table, self.spec, most)):
            best = report.before_us[tokens] = self.time(tokens, report)
            for which in ("gate_up", self.down):
                entry.setdefault(which, dict(entry["down"]))
                for tile in self.candidates(entry):
                    kept, entry[which] = entry[which], tile
                    us = self.time(tokens, report)
                    best, entry[which] = (us, tile) if us < best else (best, kept)
            entry["source"] = "measured"
            report.after_us[tokens] = best

    def candidates(self, entry: Json) -> Sequence[Json]:
        """Return the tiles worth trying in an entry."""
        names = ("rows", "warps", "unroll", "stages", "registers")
        return [dict(zip(names, values, strict=True)) for values in (WIDE if entry.get("wide") else NARROW)]

    def time(self, tokens: int, report: TuneReport) -> float:
        """Return the µs of a call with the table as it is; infinity where its kernels cannot be built or run."""
        from triton.compiler import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        report.trials += 1
        try:
            return self._replay_us(tokens, plan_of(self.table, self.spec, tokens, self.prepared.capability))
        except (CompilationError, OutOfResources, PTXASError) as error:
            report.failed.append(f"{tokens} tokens: {type(error).__name__}: {str(error)[:200]}")
            return math.inf

    def _replay_us(self, tokens: int, plan: Plan) -> float:
        import torch

        from cuda_moe.calls import Call
        from cuda_moe.triton_fused import BACKEND
        from portamoe.gpu_timing import capture, median_ms

        spec, device = self.spec, self.device
        call = Call(self.prepared, tokens, BACKEND.default_max_local_rows(spec, tokens), torch.int32, plan)
        workspace = torch.empty(call.regions.nbytes, dtype=torch.uint8, device=device)
        chance = torch.Generator(device=device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device=device, generator=chance)

        x = (random(tokens, spec.hidden_size) - 0.5).bfloat16()
        out = torch.empty_like(x)
        # As many routings as outgrow the L2 where few experts are hit.
        ids = [random(tokens, spec.num_experts).topk(spec.top_k).indices.int() for _ in range(REPLAYS)]
        weights = random(tokens, spec.top_k)

        def calls() -> None:
            for chosen in ids:
                call.launch(x, chosen, weights, workspace, out)

        return median_ms(capture(calls).replay) / REPLAYS * 1e3


def random_weights(spec: MoESpec, device: torch.device) -> FusedWeights:
    """Return prepared weights of random bits and harmless scales, without a checkpoint."""
    import torch

    from cuda_moe.prepared import empty_weights

    prepared = empty_weights(spec, device, batch_invariant=False)
    for matrix in (prepared.gate_up, prepared.down):
        words = matrix.codes.view(torch.int32)
        words.random_(-(2**31), 2**31 - 1)
        if spec.weight_format == "bf16":
            words &= 0x3FFF3FFF  # finite
        matrix.scales.fill_(SCALES)
        matrix.factor.fill_(1.0)
        matrix.bias.zero_()
    return prepared


def _write(file: Path, table: Json, capability: int, device: str) -> None:
    """Write the table in one step, so that a reader never sees half a file."""
    data = {
        "arch": f"sm_{capability}",
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "device": device,
        "command": shlex.join(["portamoe", *sys.argv[1:]]),
        "default": table,
        "batch_invariant": tuned(capability, True),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(file) as beside:
        beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
