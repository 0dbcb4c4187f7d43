"""How fast a compiled MXFP4 GEMM can be at best: clocks of each unit from instruction counts.

    VALU clocks  = issue clocks · VALU slots (+ issue of the matrix instructions)
    MFMA clocks  = Σ clocks of each matrix instruction
    LDS clocks   = bytes read and written / 128
    HBM clocks   = bytes of weights and scales / (HBM peak / CUs / clock frequency)
    share        = HBM clocks / max(VALU, MFMA, LDS)          VALU and MFMA overlap perfectly
    no overlap   = HBM clocks / (VALU + MFMA)                 they never do

A share of 1 means that the weights can stream at the HBM peak. Everything here is an upper bound on speed ("modelled"):
bank conflicts, wait states, instruction fetch and clocks that drop under load are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocm_moe.evidence.isa import Code, Counts

#: Bytes of one MXFP4 weight with its share of the block scale: 4 bits + 8/32 bits.
MXFP4_BYTES = 0.53125


@dataclass(frozen=True)
class Machine:
    """Rates of one device (of one GCD on MI250X).

    compute_units, clock_hz, hbm_bytes_s:  published peaks
    wave, simds:       lanes of a wave; SIMDs of a compute unit
    valu_clocks:       clocks a VALU instruction of a wave holds its SIMD
    packed_fma_clocks, perm_clocks:  the same for v_pk_fma_f32 and v_perm_b32; equal until measured otherwise
    matrix_clocks:     mnemonic -> clocks it holds the matrix core of its SIMD
    vgprs, max_waves:  registers a lane of a SIMD, waves it can hold
    lds_bytes:         of a compute unit, also the most that one workgroup may take
    hbm_efficiency:    share of the peak that a long stream reaches
    latency_s:         of an HBM load
    launch_s:          from the end of a kernel to the start of the next inside a graph
    workgroups_per_clock:  that the whole device starts, if they exit at once
    """

    compute_units: int
    clock_hz: float
    hbm_bytes_s: float
    matrix_clocks: Mapping[str, float]
    wave: int = 64
    simds: int = 4
    valu_clocks: float = 4.0
    packed_fma_clocks: float = 4.0
    perm_clocks: float = 4.0
    vgprs: int = 512
    vgpr_granule: int = 8
    max_waves: int = 8
    lds_bytes: int = 65536
    lds_bytes_clock: float = 128.0
    hbm_efficiency: float = 0.85
    latency_s: float = 1.0e-6
    launch_s: float = 5.0e-6
    workgroups_per_clock: float = 1.0

    @property
    def hbm_bytes_clock(self) -> float:
        """Bytes that each compute unit may take from HBM in one clock."""
        return self.hbm_bytes_s / self.compute_units / self.clock_hz


def _mfma(clocks16: int, names16: tuple[str, ...], names32: tuple[str, ...]) -> Mapping[str, float]:
    return MappingProxyType(dict.fromkeys(names16, clocks16) | dict.fromkeys(names32, 2 * clocks16))


_rdna = partial(
    Machine,
    wave=32,
    simds=2,
    valu_clocks=1.0,
    packed_fma_clocks=1.0,
    perm_clocks=1.0,
    vgprs=1536,
    vgpr_granule=24,
    max_waves=16,
)
_WMMA = ("v_wmma_f32_16x16x16_bf16", "v_wmma_f32_16x16x16_f16")

#: gfx90a: one GCD of MI250X (rocm.docs.amd.com gpu-specs: 110 CU; mi250: 1.6 TB/s). gfx942: MI300X. gfx950: MI355X.
#: gfx1100: RX 7900 XTX, gfx1201: RX 9070 XT. MFMA clocks: AMD's matrix_instruction_calculator; WMMA clocks: from the
#: published bf16 peaks. hbm_efficiency and the fields after it are assumptions until `portamoe bench --limits` ran.
MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "gfx90a": Machine(
            compute_units=110,
            clock_hz=1.7e9,
            hbm_bytes_s=1.6e12,
            matrix_clocks=_mfma(
                32,
                ("v_mfma_f32_16x16x16bf16_1k", "v_mfma_f32_16x16x16f16"),
                ("v_mfma_f32_32x32x8bf16_1k", "v_mfma_f32_32x32x8f16"),
            ),
        ),
        "gfx942": Machine(
            compute_units=304,
            clock_hz=2.1e9,
            hbm_bytes_s=5.3e12,
            matrix_clocks=_mfma(
                16,
                ("v_mfma_f32_16x16x16_bf16", "v_mfma_f32_16x16x16_f16"),
                ("v_mfma_f32_32x32x8_bf16", "v_mfma_f32_32x32x8_f16"),
            ),
        ),
        "gfx950": Machine(
            compute_units=256,
            clock_hz=2.4e9,
            hbm_bytes_s=8.0e12,
            matrix_clocks=_mfma(
                16,
                ("v_mfma_f32_16x16x32_bf16", "v_mfma_f32_16x16x32_f16", "v_mfma_f32_16x16x16_bf16"),
                ("v_mfma_f32_32x32x16_bf16", "v_mfma_f32_32x32x16_f16", "v_mfma_f32_32x32x8_bf16"),
            ),
            lds_bytes=163840,
        ),
        "gfx1100": _rdna(
            compute_units=96,
            clock_hz=2.5e9,
            hbm_bytes_s=0.96e12,
            matrix_clocks=dict.fromkeys(_WMMA, 32),
        ),
        "gfx1201": _rdna(
            compute_units=64,
            clock_hz=2.97e9,
            hbm_bytes_s=0.64e12,
            matrix_clocks=dict.fromkeys(_WMMA, 16),
        ),
    }
)


@dataclass(frozen=True)
class Tile:
    """What one workgroup computes: `rows` tokens by `columns` weight rows, `warps` waves."""

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True)
class Bound:
    """Clocks of each unit for one compute unit working on one tile (or one step along K of it).

    elements:    weights decoded; issue, matrix, lds, hbm: clocks; valu: VALU clocks without matrix issue
    """

    elements: float
    issue: float
    valu: float
    matrix: float
    lds: float
    hbm: float

    @property
    def limit(self) -> str:
        """The unit that takes longest: "VALU", "MFMA" or "LDS"."""
        return max((self.issue, "VALU"), (self.matrix, "MFMA"), (self.lds, "LDS"))[1]

    @property
    def share(self) -> float:
        """Weight stream as a share of the HBM peak if VALU and MFMA overlap fully."""
        return self.hbm / max(self.issue, self.matrix, self.lds)

    @property
    def share_no_overlap(self) -> float:
        """The same if they never overlap."""
        return self.hbm / max(self.valu + self.matrix, self.lds)

    def tflops(self, machine: Machine, rows: int, *, overlap: bool) -> float:
        """Return the ceiling in TFLOP/s for a tile of `rows` tokens."""
        clocks = max(self.issue, self.matrix, self.lds) if overlap else max(self.valu + self.matrix, self.lds)
        flop = 2 * rows * self.elements * machine.compute_units
        return flop * machine.clock_hz / clocks / 1e12


def matrix_flop(mnemonic: str) -> int:
    """Return the floating-point operations of one matrix instruction, from the sizes in its name."""
    sizes = mnemonic.split("_f32_")[1].split("x")
    depth = "".join(_leading_digits(sizes[2]))
    return 2 * int(sizes[0]) * int(sizes[1]) * int(depth)


def _leading_digits(text: str) -> str:
    end = next((i for i, c in enumerate(text) if not c.isdigit()), len(text))
    return text[:end]


def valu_clocks(counts: Counts, machine: Machine) -> float:
    """Return the clocks that one wave's VALU instructions hold its SIMD."""
    perm = counts.classes.get("perm", 0)
    packed = counts.classes.get("packed_fma", 0)
    rest = counts.valu_slots - perm - packed
    return rest * machine.valu_clocks + perm * machine.perm_clocks + packed * machine.packed_fma_clocks


def matrix_clocks(counts: Counts, machine: Machine) -> float:
    """Return the clocks that one wave's matrix instructions hold the matrix core.

    Raises ValueError for an instruction that the machine's table lacks.
    """
    total = 0.0
    for mnemonic, number in counts.matrix.items():
        key = mnemonic.removesuffix("_e64").removesuffix("_w32")
        if key not in machine.matrix_clocks:
            raise ValueError(f"no clocks known for {mnemonic}; known: {', '.join(machine.matrix_clocks)}")
        total += number * machine.matrix_clocks[key]
    return total


def elements_of(counts: Counts, tile: Tile) -> float:
    """Return the weights that a workgroup consumes in `counts`, from its matrix instructions."""
    flop = sum(n * matrix_flop(m) for m, n in counts.matrix.items()) * tile.warps
    return flop / 2 / tile.rows


def bound(counts: Counts, tile: Tile, machine: Machine, elements: float | None = None) -> Bound:
    """Return the clocks of a compute unit for `counts` executed by every wave of a tile.

    elements: weights decoded meanwhile; default: what the matrix instructions imply
    """
    waves = tile.warps / machine.simds
    valu = valu_clocks(counts, machine) * waves
    issue = valu + counts.matrix_total * machine.valu_clocks * waves
    lds = (counts.lds_read_bytes + counts.lds_write_bytes) * machine.wave * tile.warps
    weights = elements_of(counts, tile) if elements is None else elements
    return Bound(
        elements=weights,
        issue=issue,
        valu=valu,
        matrix=matrix_clocks(counts, machine) * waves,
        lds=lds / machine.lds_bytes_clock,
        hbm=weights * MXFP4_BYTES / machine.hbm_bytes_clock,
    )


def whole(code: Code, tile: Tile, machine: Machine, depth: int) -> Bound:
    """Return the clocks of a compute unit for a whole tile: prologue, the loop over `depth` = K values, epilogue.

    Code without a loop is counted as it stands. Raises ValueError if the code has no matrix instructions.
    """
    around = bound(code.straight, tile, machine)
    total = tile.columns * depth
    if code.loop is None or not code.loop.matrix:
        if not code.straight.matrix:
            raise ValueError("the code has no matrix instructions")
        return dataclasses.replace(around, elements=total, hbm=total * MXFP4_BYTES / machine.hbm_bytes_clock)
    loop = bound(code.loop, tile, machine)
    steps = max(0.0, (total - around.elements) / loop.elements)
    return Bound(
        elements=total,
        issue=around.issue + steps * loop.issue,
        valu=around.valu + steps * loop.valu,
        matrix=around.matrix + steps * loop.matrix,
        lds=around.lds + steps * loop.lds,
        hbm=total * MXFP4_BYTES / machine.hbm_bytes_clock,
    )


def stream_share(code: Code, machine: Machine) -> float:
    """Return how much of the HBM peak a kernel without matrix instructions can stream before its VALU limits it.

    HBM clocks of the global bytes that a wave loads and stores over the VALU clocks it takes for them, in the main
    loop, or in the whole code if that has no loop. 1 or more means memory-bound.
    """
    counts = code.loop if code.loop and code.loop.load_bytes + code.loop.store_bytes else code.straight
    moved = (counts.load_bytes + counts.store_bytes) * machine.wave / machine.hbm_bytes_clock
    return moved / max(valu_clocks(counts, machine) / machine.simds, 1e-9)


def resident_workgroups(code: Code, shared: int, warps: int, machine: Machine) -> int:
    """Return how many workgroups a compute unit holds, from registers, LDS (`shared` bytes) and the wave limit."""
    granule = machine.vgpr_granule
    registers = max(granule, math.ceil(code.vgprs / granule) * granule)
    waves = min(machine.max_waves, machine.vgprs // registers) * machine.simds
    by_waves = waves // warps
    by_lds = machine.lds_bytes // shared if shared else by_waves
    return max(0, min(by_waves, by_lds))
