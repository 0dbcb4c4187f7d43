"""The weights of `triton_unfused`: canonical experts brought into the kernels' order, one at a time."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from portamoe.weights import validate
from rocm_moe.binaries import Binaries
from rocm_moe.tiles import TileTable, load_table
from rocm_moe.triton_compat import INTERPRETED
from rocm_moe.variants import layout_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from portamoe.backend import PreparedWeights
    from portamoe.spec import MoESpec
    from portamoe.weights import Expert, ExpertSource
    from rocm_moe.layouts import KernelLayout


@dataclass(frozen=True)
class Matrix:
    """One of the two matrices of all local experts in a kernel layout.

    words:          (E·N·K/8,) int32
    scales:         (E·N·K/32,) uint8
    flags:          (E,) int32 — not 0: look up row_exponents
    row_exponents:  (E·N,) uint8, or (1,) where no expert needs them
    bias:           (E·N,) float32, or (1,) without biases
    """

    words: torch.Tensor
    scales: torch.Tensor
    flags: torch.Tensor
    row_exponents: torch.Tensor
    bias: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.words, self.scales, self.flags, self.row_exponents, self.bias))


@dataclass
class UnfusedWeights:
    """`portamoe.backend.PreparedWeights` of this backend, with its kernels and planned calls."""

    spec: MoESpec
    arch: str
    layout: KernelLayout
    device: torch.device
    w13: Matrix
    w2: Matrix
    table: TileTable
    binaries: Binaries
    #: Calls planned so far, by `unfused_call`; their number is bounded there.
    calls: dict[Any, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.w13.nbytes + self.w2.nbytes

    def load_all(self) -> int:
        """Compile and load every kernel; returns how many there are (0 in the interpreter)."""
        if INTERPRETED:
            return 0
        self.binaries.load_all()
        return len(self.binaries)


def own(prepared: PreparedWeights) -> UnfusedWeights:
    """Return `prepared` as this backend's; raises TypeError for weights in another backend's layout."""
    if not isinstance(prepared, UnfusedWeights):
        raise TypeError(f"triton_unfused got weights prepared as {type(prepared).__name__}; prepare them with it")
    return prepared


def device_arch(device: torch.device) -> str:
    """Return "gfx90a", "sm_90" or "cpu" of a torch device."""
    if device.type != "cuda":
        return "cpu"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.lru_cache(maxsize=64)
def _binaries(arch: str, spec: MoESpec, device: torch.device, tuned_dir: str | None) -> tuple[TileTable, Binaries]:
    """Return tiles and kernels, shared by all layers of a spec on a device."""
    del device, tuned_dir  # part of the key: kernels are loaded on one device, tiles read from one folder
    table = load_table(arch)
    return table, Binaries(arch, spec, table)


def prepare(
    weights: ExpertSource, spec: MoESpec, device: torch.device, progress: Callable[[int, int], None] | None
) -> UnfusedWeights:
    """Bring each expert into the kernels' order; see TritonUnfusedBackend.prepare."""
    validate(weights, spec)
    arch = device_arch(device)
    layout = layout_for(arch)
    table, binaries = _binaries(arch, spec, device, os.environ.get("PORTAMOE_TUNED_DIR"))
    hidden, inter = spec.hidden_size, spec.intermediate_size
    w13 = _MatrixBuilder(layout, spec, device, 2 * inter, hidden)
    w2 = _MatrixBuilder(layout, spec, device, hidden, inter)
    for index in range(len(weights)):
        expert: Expert = weights.expert(index)
        w13.add(index, expert.w13, expert.w13_scale, expert.w13_bias)
        w2.add(index, expert.w2, expert.w2_scale, expert.w2_bias)
        if progress:
            progress(index + 1, len(weights))
    return UnfusedWeights(spec, arch, layout, device, w13.build(), w2.build(), table, binaries)


class _MatrixBuilder:
    """Fills a Matrix expert by expert: beside it there is never more than one expert in another order."""

    def __init__(self, layout: KernelLayout, spec: MoESpec, device: torch.device, rows: int, columns: int) -> None:
        self._layout, self._rows, self._columns = layout, rows, columns
        experts = spec.num_local_experts
        self._experts, self._device = experts, device
        self._words = torch.empty((experts, rows * columns // 8), dtype=torch.int32, device=device)
        self._scales = torch.empty((experts, rows * columns // 32), dtype=torch.uint8, device=device)
        self._flags = torch.zeros(experts, dtype=torch.int32)
        self._exponents: torch.Tensor | None = None
        self._bias = torch.zeros((experts, rows) if spec.bias else (1,), dtype=torch.float32, device=device)

    def add(self, index: int, codes: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        if scales is None or tuple(codes.shape) != (self._rows, self._columns // 2):
            raise ValueError(
                f"expert {index}: codes {tuple(codes.shape)} with scales {None if scales is None else 'given'}, "
                f"expected ({self._rows}, {self._columns // 2}) with scales"
            )
        packed = self._layout.pack(codes.to(self._device), scales.to(self._device))
        self._words[index] = packed.words
        self._scales[index] = packed.scales
        if packed.row_exponents is not None:
            if self._exponents is None:
                shape = (self._experts, self._rows)
                self._exponents = torch.zeros(shape, dtype=torch.uint8, device=self._device)
            self._exponents[index] = packed.row_exponents
            self._flags[index] = 1
        if bias is not None:
            # A NaN as arithmetic makes it: the kernels round others wrongly, see _decode_kernels.round_to_bf16.
            self._bias[index] = torch.where(bias.isnan(), float("nan"), bias).to(self._device)

    def build(self) -> Matrix:
        exponents = self._exponents
        if exponents is None:
            exponents = torch.zeros(1, dtype=torch.uint8, device=self._device)
        return Matrix(
            self._words.view(-1),
            self._scales.view(-1),
            self._flags.to(self._device),
            exponents.view(-1),
            self._bias.view(-1),
        )
