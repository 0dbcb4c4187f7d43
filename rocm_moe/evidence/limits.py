"""What the clock model assumes, measured on the device at hand: `portamoe bench --limits`.

Memory stream, matrix rate, byte-permute and packed multiply-add rates, how far matrix and vector work overlap, load
latency, the gap between launches and the rate at which workgroups start. With them every modelled cell of the kernels
for this device is evaluated again, so that one command turns `modelled` into `measured`.
"""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from portamoe.gpu_timing import capture, median_ms
from rocm_moe.evidence import clock_model, isa
from rocm_moe.evidence.clock_model import MACHINES, Bound, Machine, Tile

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from portamoe.spec import MoESpec

#: Bytes of the stream, larger than any cache of these devices (MI300's last level holds 256 MiB).
STREAM_BYTES = 1 << 30
#: Waves on each SIMD while instruction rates are measured: enough to hide every latency.
WAVES_A_SIMD = 8
WARPS = 4
#: Matrix tile of the rate measurement: four waves hold a 32 x 32 part of it each, so no work is done twice.
SIZE, DEPTH = 64, 32
#: Words between the links of the latency chain (16 KiB and one), and links followed.
STRIDE, HOPS = 4113, 4096
LAUNCHES = 200
EMPTY_GRID = 1 << 20
REPEATS = 5


@dataclass(frozen=True)
class Limits:
    """Measured rates of one device; None where the measurement does not apply to it.

    clock_hz:        nominal; all clocks below are in its unit, so a lower real clock shows as more clocks
    stream_bytes_s:  of a long read
    matrix_tflops, matrix_clocks:  bf16 rate, and clocks that one `matrix_mnemonic` holds its SIMD
    valu_clocks, perm_clocks, packed_fma_clocks:  clocks that an instruction of a wave holds its SIMD
    overlap:         share of the shorter of matrix and vector work that disappears behind the longer, 0 to 1
    latency_s:       of a load from memory that no cache holds
    launch_s:        a launch inside a graph
    workgroups_per_clock:  that start and exit at once
    """

    evidence: str
    date: str
    device: str
    arch: str
    compute_units: int
    clock_hz: float
    stream_bytes_s: float
    matrix_tflops: float
    matrix_mnemonic: str | None
    matrix_clocks: float | None
    valu_clocks: float | None
    perm_clocks: float | None
    packed_fma_clocks: float | None
    overlap: float | None
    latency_s: float
    launch_s: float
    workgroups_per_clock: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    def machine(self) -> Machine:
        """Return the model's machine with the measured values; raises ValueError for an arch without a model."""
        base = machine_of(self.arch)
        clocks = dict(base.matrix_clocks)
        if self.matrix_clocks is not None and self.matrix_mnemonic is not None:
            slower = self.matrix_clocks / base.matrix_clocks[self.matrix_mnemonic]
            clocks = {name: value * slower for name, value in base.matrix_clocks.items()}
        return replace(
            base,
            compute_units=self.compute_units,
            matrix_clocks=clocks,
            valu_clocks=self.valu_clocks or base.valu_clocks,
            perm_clocks=self.perm_clocks or base.perm_clocks,
            packed_fma_clocks=self.packed_fma_clocks or base.packed_fma_clocks,
            hbm_efficiency=self.stream_bytes_s / base.hbm_bytes_s,
            latency_s=self.latency_s,
            launch_s=self.launch_s,
            workgroups_per_clock=self.workgroups_per_clock,
        )


@dataclass(frozen=True)
class CellLimits:
    """A GEMM of the kernels for this device: share of the HBM peak and TFLOP/s, as modelled and as re-evaluated.

    modelled:  full and no overlap on the assumed machine; measured: with the measured rates and overlap
    reachable: the part of the HBM peak that the stream reaches here; below it the weights are not the limit
    """

    name: str
    modelled_share: tuple[float, float]
    measured_share: float
    modelled_tflops: tuple[float, float]
    measured_tflops: float
    reachable: float


@dataclass(frozen=True)
class LimitsReport:
    """What `portamoe bench --limits` prints and writes."""

    limits: Limits
    cells: tuple[CellLimits, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"limits": self.limits.to_dict(), "cells": [asdict(cell) for cell in self.cells]}

    def lines(self) -> list[str]:
        """Return the report as text lines."""
        out = [f"{name:22} {value}" for name, value in self.limits.to_dict().items()]
        for cell in self.cells:
            full, none = cell.modelled_share
            out.append(
                f"{cell.name:60} share {full:.2f}/{none:.2f} modelled, {cell.measured_share:.2f} with these rates "
                f"(stream reaches {cell.reachable:.2f}); TFLOP/s {cell.modelled_tflops[0]:.0f}/"
                f"{cell.modelled_tflops[1]:.0f} modelled, {cell.measured_tflops:.0f} with these rates"
            )
        return out


def machine_of(arch: str) -> Machine:
    """Return the model's machine of an arch; raises ValueError for one that has none."""
    if arch not in MACHINES:
        raise ValueError(f"there is no clock model of {arch}; there is one of {', '.join(MACHINES)}")
    return MACHINES[arch]


def run(spec: MoESpec, device: torch.device) -> LimitsReport:
    """Measure `device` and evaluate every GEMM that calls of `spec` may launch on it.

    On a device without a clock model (NVIDIA) only the limits are measured. Raises ValueError for a CPU.
    """
    limits = measure(device)
    cells = reevaluate(limits, spec) if limits.arch in MACHINES else ()
    return LimitsReport(limits, cells)


def reevaluate(limits: Limits, spec: MoESpec) -> tuple[CellLimits, ...]:
    """Compile the GEMMs of `spec` for the measured arch and evaluate the model with the measured rates."""
    from rocm_moe.triton_compat import compile_variant
    from rocm_moe.variants import kernel_variants

    assumed, measured = machine_of(limits.arch), limits.machine()
    overlap = 1.0 if limits.overlap is None else limits.overlap
    out = []
    for variant in kernel_variants(limits.arch, spec):
        if variant.tile is None:
            continue
        code = isa.parse(compile_variant(variant, limits.arch).asm["amdgcn"])
        constants = variant.constexprs
        tile = Tile(constants["BM"], constants["BN"], variant.options["num_warps"])
        before = clock_model.whole(code, tile, assumed, constants["K"])
        after = clock_model.whole(code, tile, measured, constants["K"])
        clocks = overlapped(after, overlap)
        flop = 2 * tile.rows * after.elements * measured.compute_units
        out.append(
            CellLimits(
                name=variant.name,
                modelled_share=(round(before.share, 3), round(before.share_no_overlap, 3)),
                measured_share=round(after.hbm / clocks, 3),
                modelled_tflops=(
                    round(before.tflops(assumed, tile.rows, overlap=True), 1),
                    round(before.tflops(assumed, tile.rows, overlap=False), 1),
                ),
                measured_tflops=round(flop * measured.clock_hz / clocks / 1e12, 1),
                reachable=round(measured.hbm_efficiency, 3),
            )
        )
    return tuple(out)


def overlapped(bound: Bound, overlap: float) -> float:
    """Return the clocks of a tile when `overlap` of the shorter of VALU and MFMA work hides behind the longer."""
    longer, shorter = max(bound.issue, bound.matrix), min(bound.valu, bound.matrix)
    return max(longer + (1.0 - overlap) * shorter, bound.lds)


def measure(device: torch.device) -> Limits:
    """Measure the rates of a GPU, a few seconds; raises ValueError for a CPU."""
    import torch

    from rocm_moe.unfused_weights import device_arch

    if device.type != "cuda":
        raise ValueError(f"limits are measured on a GPU, got {device}")
    with torch.cuda.device(device):
        arch = device_arch(device)
        properties = torch.cuda.get_device_properties(device)
        clock = MACHINES[arch].clock_hz if arch in MACHINES else properties.clock_rate * 1e3
        probe = _Probe(arch, int(properties.multi_processor_count), clock)
        tflops, mnemonic, matrix_clocks = probe.matrix()
        valu, perm, packed = probe.vector()
        return Limits(
            evidence="measured",
            date=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
            device=properties.name,
            arch=arch,
            compute_units=probe.units,
            clock_hz=clock,
            stream_bytes_s=probe.stream(),
            matrix_tflops=tflops,
            matrix_mnemonic=mnemonic,
            matrix_clocks=matrix_clocks,
            valu_clocks=valu,
            perm_clocks=perm,
            packed_fma_clocks=packed,
            overlap=probe.overlap(tflops, perm or valu),
            latency_s=probe.latency(),
            launch_s=probe.launch(),
            workgroups_per_clock=probe.dispatch(),
        )


class _Probe:
    """The measurements on the current device, with the buffers that they share."""

    def __init__(self, arch: str, units: int, clock: float) -> None:
        import torch

        from rocm_moe import _limits_kernels, triton_compat

        self.arch, self.units, self.clock = arch, units, clock
        self.amd = arch.startswith("gfx")
        self.machine = MACHINES.get(arch)
        simds = self.machine.simds if self.machine else 4
        self.programs = units * simds * WAVES_A_SIMD // WARPS
        self.wave = self.machine.wave if self.machine else 32
        self.kernels: Any = _limits_kernels
        self.permutes = self.amd and triton_compat.HAS_INTRINSICS
        self.words = torch.zeros(STREAM_BYTES // 4, dtype=torch.int32, device="cuda")
        self.numbers = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")
        self.out = torch.zeros(1 << 22, dtype=torch.int32, device="cuda")

    def stream(self) -> float:
        """Return bytes a second of a long read."""
        block = 4096
        programs = self.units * 8
        turns = STREAM_BYTES // 4 // block // programs
        seconds = median_seconds(
            lambda: self.kernels.stream_kernel[(programs,)](self.words, self.out, turns, BLOCK=block, num_warps=WARPS)
        )
        return turns * programs * block * 4 / seconds

    def matrix(self) -> tuple[float, str | None, float | None]:
        """Return TFLOP/s, the instruction, and the clocks that one holds its SIMD."""
        iterations = 2000
        compiled: list[Any] = []
        sums = self.out.view(_float32())

        def launch() -> None:
            kernel = self.kernels.matrix_kernel[(self.programs,)]
            compiled.append(kernel(self.numbers, sums, iterations, SIZE=SIZE, DEPTH=DEPTH, num_warps=WARPS))

        seconds = median_seconds(launch)
        rate = self.programs * iterations * 4 * 2 * SIZE * SIZE * DEPTH / seconds
        if self.machine is None:
            return rate / 1e12, None, None
        loop = isa.parse(compiled[0].asm["amdgcn"]).loop
        if loop is None or not loop.matrix:
            raise ValueError(f"the matrix measurement was compiled for {self.arch} without a matrix instruction")
        mnemonic = max(loop.matrix, key=lambda name: loop.matrix[name])
        slots = self.units * self.machine.simds * self.clock
        return rate / 1e12, mnemonic, clock_model.matrix_flop(mnemonic) * slots / rate

    def vector(self) -> tuple[float | None, float | None, float | None]:
        """Return clocks of a plain VALU instruction, of v_perm_b32 and of v_pk_fma_f32 (or of v_fma_f32)."""
        if self.machine is None:
            return None, None, None
        block = WARPS * self.wave

        def permute(perm: bool) -> float:
            kernel = self.kernels.permute_kernel[(self.programs,)]
            return self._clocks(lambda n: kernel(self.words, self.out, n, BLOCK=block, PERM=perm, num_warps=WARPS), 8)

        many = 8 * block
        sums = self.out.view(_float32())
        fma = self.kernels.fma_kernel[(self.programs,)]
        packed = self._clocks(lambda n: fma(self.words.view(_float32()), sums, n, BLOCK=many, num_warps=WARPS), 16)
        return permute(perm=False), permute(perm=True) if self.permutes else None, packed

    def _clocks(self, launch: Callable[[int], Any], lane_operations: int) -> float:
        """Return clocks a VALU instruction; lane_operations: a lane's operations in one iteration of the source."""
        if self.machine is None:
            raise ValueError(f"{self.arch} has no clock model, so its instructions have no clocks")
        iterations = 20000
        loop = isa.parse(launch(1).asm["amdgcn"]).loop
        if loop is None or not loop.valu:
            raise ValueError(f"a measurement was compiled for {self.arch} without its loop")
        operations = loop.valu + loop.classes.get("packed_fma", 0)
        instructions = iterations * lane_operations * loop.valu / operations * self.programs * WARPS
        seconds = median_seconds(lambda: launch(iterations))
        return seconds * self.clock * self.units * self.machine.simds / instructions

    def overlap(self, tflops: float, clocks: float | None) -> float | None:
        """Return how much of the shorter of matrix and permute work hides behind the longer."""
        if self.machine is None or clocks is None:
            return None
        iterations, block = 2000, WARPS * self.wave
        kernel = self.kernels.overlap_kernel[(self.programs,)]
        constants = {"SIZE": SIZE, "DEPTH": DEPTH, "BLOCK": block, "PERM": self.permutes, "num_warps": WARPS}
        sums = self.out.view(_float32())
        both = median_seconds(lambda: kernel(self.numbers, self.words, sums, iterations, **constants))
        matrix = self.programs * iterations * 2 * 2 * SIZE * SIZE * DEPTH / (tflops * 1e12)
        instructions = self.programs * WARPS * iterations * 16
        vector = instructions * clocks / (self.clock * self.units * self.machine.simds)
        return max(0.0, min(1.0, (matrix + vector - both) / min(matrix, vector)))

    def latency(self) -> float:
        """Return the seconds of a load that misses every cache."""
        import torch

        count = self.words.numel()
        place = torch.arange(count, dtype=torch.int32, device="cuda")
        links = (place + STRIDE) % count
        evict = self.words.clone()
        launch = self.kernels.chase_kernel[(1,)]
        return median_seconds(lambda: launch(links, self.out, HOPS), before=lambda: evict.add_(1)) / HOPS

    def launch(self) -> float:
        """Return the seconds of a launch inside a graph."""

        def launches() -> None:
            for _ in range(LAUNCHES):
                self.kernels.empty_kernel[(1,)](self.out)

        return median_seconds(capture(launches).replay) / LAUNCHES

    def dispatch(self) -> float:
        """Return the workgroups a clock that start and exit."""
        launch = self.kernels.empty_kernel[(EMPTY_GRID,)]
        return EMPTY_GRID / (median_seconds(lambda: launch(self.out)) * self.clock)


def _float32() -> torch.dtype:
    import torch

    return torch.float32


def median_seconds(launch: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    """Return the median seconds of `launch` on the current device after two runs; `before` runs outside the time."""
    return median_ms(launch, REPEATS, before) / 1e3
