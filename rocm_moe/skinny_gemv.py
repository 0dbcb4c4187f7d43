"""Projections of few rows on gfx90a for `portamoe.linear`: y = x · Wᵀ (+ residual) in one launch, and when that pays.

There is no measurement behind it. Judged is the compiled code against a split-K product and its reduction, two
launches that are granted everything else: they stream at the rate of a long read and compute for nothing.

    two   = 2 · (launch + latency) + (weights + x + y + 2 · 2 · 4·M·N) / HBM rate      two partial sums, float32
    one   = launch + latency + max(weights + x + y over the HBM rate;  rounds · steps · latency;
                                   workgroups of a CU · (VALU clocks;  bytes of loads / 64))

The kernel serves M rows where one · 1.05 ≤ two ("modelled"). Launch, latency and rate are those of `clock_model`; a CU
takes 64 bytes a clock from its L1 (AMD CDNA 2 white paper), which bounds the loads of x that every workgroup repeats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from portamoe.checks import present, triton_reason
from portamoe.linear_provider import MOST_ROWS, Candidate, LinearTable, Timed
from rocm_moe.evidence import clock_model
from rocm_moe.evidence.clock_model import MACHINES, Machine

if TYPE_CHECKING:
    import torch

    from portamoe.decision import Reason
    from portamoe.device import Device
    from portamoe.linear_provider import Kernel
    from rocm_moe.evidence.isa import Code
    from rocm_moe.variants import Variant

ARCH = "gfx90a"
LEAST_TRITON = "3.3"
#: The least modelled gain over two launches, the rule of the measured plans.
LEAST_GAIN = 1.05
#: Bytes a clock that a compute unit takes from its L1.
L1_BYTES_CLOCK = 64.0
WAVE = 64
#: bf16 values of one 16-byte load.
VECTOR = 8


#: Weight rows of a workgroup.
ROWS = 4
#: Waves of a workgroup, preferred first; K must divide by what they take in a step.
WARPS = (4, 2, 1)


def padded(m: int) -> int:
    """Return M rounded up to a power of two."""
    return 1 << (m - 1).bit_length()


def warps_for(k: int) -> int | None:
    """Return the waves of a workgroup for this K, None if no number of them takes it in whole steps."""
    return next((warps for warps in WARPS if k % step_of(warps) == 0), None)


def step_of(warps: int) -> int:
    """Return the values of K that a workgroup takes at a time."""
    return warps * WAVE * VECTOR


def reasons(n: int, k: int, device: Device) -> list[Reason]:
    """Return why the kernel cannot serve weights (N, K) on `device`."""
    from portamoe.decision import Reason

    arch = None if device.arch == ARCH else Reason("device", device.arch, ARCH)
    depth = Reason("K", k, f"a multiple of {step_of(WARPS[-1])}") if warps_for(k) is None else None
    rows = Reason("N", n, f"a multiple of {ROWS}") if n % ROWS else None
    return present(arch, depth, rows, triton_reason(device.host, LEAST_TRITON))


# ---------------------------------------------------------------------------------------------------- judgement


@dataclass(frozen=True)
class Judgement:
    """Modelled seconds of the one launch and of the two, and what bounds the one: "HBM", "compute", "L1", "latency"."""

    one: float
    two: float
    limit: str

    @property
    def gain(self) -> float:
        """Time of the two launches over that of the one."""
        return self.two / self.one


def two_launches(n: int, k: int, m: int, machine: Machine) -> float:
    """Return the modelled seconds of a split-K product in two parts and their sum, at the best that they can be."""
    partials = 2 * 2 * 4 * m * n
    moved = 2 * (n * k + m * (n + k)) + partials
    return 2 * (machine.launch_s + machine.latency_s) + moved / (machine.hbm_bytes_s * machine.hbm_efficiency)


@dataclass(frozen=True)
class Issue:
    """What the judgement needs of compiled code.

    straight, step:  clocks that the VALU instructions of a wave take outside the loop over K, and in one step of it
    vgprs, shared:   registers of a lane, bytes of LDS of a workgroup
    """

    straight: float
    step: float
    vgprs: int
    shared: int = 256


def issue_of(code: Code, shared: int, machine: Machine = MACHINES[ARCH]) -> Issue:
    """Read an `Issue` off compiled code; raises ValueError where that has no loop."""
    if code.loop is None:
        raise ValueError("the code has no loop over K; it cannot be judged")
    straight, step = (clock_model.valu_clocks(counts, machine) for counts in (code.straight, code.loop))
    return Issue(straight, step, code.vgprs, shared)


#: M -> the most that any variant for M rows takes; from 16 rows on the VALU is busy for longer than the weights take
#: to arrive ("compiled", Triton 3.9.0); the tests compile them and compare.
COMPILED: Mapping[int, Issue] = MappingProxyType(
    {
        1: Issue(472, 324, 58, 64),
        2: Issue(984, 484, 80, 128),
        3: Issue(1756, 764, 96, 128),
        4: Issue(1800, 804, 116, 128),
        5: Issue(3032, 1100, 132, 128),
        6: Issue(3044, 1252, 142, 128),
        7: Issue(3060, 1444, 212, 128),
        8: Issue(3060, 1444, 212, 128),
    }
)


def judge(issue: Issue, n: int, k: int, m: int, machine: Machine = MACHINES[ARCH]) -> Judgement:
    """Return the judgement on code that takes `issue`, for (M, N, K)."""
    warps = warps_for(k)
    if warps is None:
        raise ValueError(f"K={k} is no multiple of {step_of(WARPS[-1])}")
    busiest = math.ceil(math.ceil(n / ROWS) / machine.compute_units)
    registers = math.ceil(issue.vgprs / machine.vgpr_granule) * machine.vgpr_granule
    waves = min(machine.max_waves, machine.vgprs // registers) * machine.simds
    resident = max(1, min(waves // warps, machine.lds_bytes // max(1, issue.shared)))
    steps = k // step_of(warps)
    loaded = 2 * k * (ROWS + m)
    parts = {
        "HBM": 2 * (n * k + m * (n + k)) / (machine.hbm_bytes_s * machine.hbm_efficiency),
        "compute": busiest * (issue.straight + steps * issue.step) * warps / machine.simds / machine.clock_hz,
        "L1": busiest * loaded / L1_BYTES_CLOCK / machine.clock_hz,
        "latency": math.ceil(busiest / resident) * steps * machine.latency_s,
    }
    limit = max(parts, key=lambda name: parts[name])
    one = machine.launch_s + machine.latency_s + parts[limit]
    return Judgement(one, two_launches(n, k, m, machine), limit)


def worthwhile(n: int, k: int, m: int, machine: Machine = MACHINES[ARCH]) -> bool:
    """Return whether the kernel is modelled to beat two launches by LEAST_GAIN for (M, N, K)."""
    return m in COMPILED and warps_for(k) is not None and judge(COMPILED[m], n, k, m, machine).gain >= LEAST_GAIN


# ------------------------------------------------------------------------------------------------------- kernel


def variant(m: int, warps: int, *, residual: bool) -> Variant:
    """Return the binary for M rows and `warps` waves."""
    from rocm_moe._skinny_gemv_kernels import skinny_gemv_kernel
    from rocm_moe.variants import Variant

    constants = {"M": m, "MP": padded(m), "ROWS": ROWS, "THREADS": warps * WAVE, "RESIDUAL": residual}
    kernel: Any = skinny_gemv_kernel
    names = list(kernel.arg_names)
    types = {"N": "i32", "K": "i32"} | dict.fromkeys(("x", "w", "y", "residual"), "*bf16")
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = ("x", "w", "y", "residual", "K")
    attrs: dict[tuple[int, ...], list[list[Any]]] = {(names.index(a),): [["tt.divisibility", 16]] for a in aligned}
    options = {"num_warps": warps, "num_stages": 1}
    return Variant("skinny_gemv", "gemm1", kernel, signature, constants, attrs, options)


@functools.lru_cache(maxsize=256)
def _binary(m: int, warps: int, residual: bool, index: int) -> Any:  # noqa: ARG001 - a binary is loaded on one device
    import torch

    from rocm_moe.triton_compat import Binary

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the product of {m} rows is not compiled yet, and a capture is no time to compile: call the layer once, "
            "with as many rows, before the capture"
        )
    return Binary(variant(m, warps, residual=residual), ARCH)


def bind(n: int, k: int, m: int, device: torch.device) -> Kernel:
    """Return call(x, weight, out, residual=None, *, pdl=False) for (M, N, K); pdl means nothing on AMD."""
    warps = warps_for(k)
    if warps is None or n % ROWS:
        raise ValueError(f"N={n}, K={k}: needs multiples of {ROWS} and {step_of(WARPS[-1])}")
    grid = (n // ROWS, 1)

    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        pdl: bool = False,  # noqa: ARG001 - the providers' common signature
    ) -> None:
        from rocm_moe.triton_compat import current_stream

        index = int(device.index or 0)
        binary = _binary(m, warps, residual is not None, index)
        added = out if residual is None else residual
        pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), added.data_ptr())
        binary.launch(grid, current_stream(index), binary.arguments((*pointers, n, k)))

    return call


# ----------------------------------------------------------------------------------------------------- provider


class GemvProvider:
    """The kernel for gfx90a where it is modelled to beat two launches."""

    name = "skinny_gemv"

    def table(self, n: int, k: int, device: Device) -> LinearTable | None:
        """Return the kernels for bf16 weights (N, K) on `device`, None where torch serves all M."""
        import torch

        wanted = [worthwhile(n, k, m) for m in range(1, MOST_ROWS + 1)]
        if reasons(n, k, device) or not any(wanted):
            return None
        at = torch.device(device.torch_name)
        kernels = tuple(bind(n, k, m, at) if yes else None for m, yes in enumerate(wanted, start=1))
        return LinearTable(kernels, tuple("skinny_gemv" if yes else "torch" for yes in wanted))

    def lines(self, device: Device) -> tuple[str, ...]:
        """Return what the probe says: which rows the kernel serves, and that this is modelled."""
        if device.arch != ARCH:
            return ()
        if why := triton_reason(device.host, LEAST_TRITON):
            return (f"linear: torch serves every projection; {why}",)
        return (
            f"linear: {ARCH}: one-launch GEMV for 1 to {max(COMPILED)} rows where it saves 5 %: modelled, unmeasured",
        )

    def shapes(self, device: Device) -> tuple[tuple[int, int], ...]:  # noqa: ARG002 - the providers' common signature
        """Return Kimi-K3's projections: latent down and up, router, shared experts."""
        return ((3584, 7168), (7168, 3584), (896, 7168), (1536, 7168), (7168, 768))

    def candidates(self, n: int, k: int, m: int, device: Device) -> list[Candidate]:
        """Return the one way to launch it."""
        import torch

        if reasons(n, k, device) or m not in COMPILED:
            return []
        return [Candidate("skinny_gemv", bind(n, k, m, torch.device(device.torch_name)), (ROWS, warps_for(k)))]

    def plan(
        self,
        device: Device,
        about: Mapping[str, Any],  # noqa: ARG002 - the providers' common signature
        timed: Sequence[Timed],  # noqa: ARG002
        torch_us: Mapping[tuple[int, int, int], float],  # noqa: ARG002
    ) -> tuple[str, str]:
        """Raise ValueError: which rows the kernel serves here is modelled, no plan file says it."""
        raise ValueError(f"{device.arch} has no plan file; compare the rows of `portamoe bench --gemm` without --tune")


PROVIDER = GemvProvider()
