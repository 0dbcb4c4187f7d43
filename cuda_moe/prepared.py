"""Weights in the kernels' order on one device, with what was compiled for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cuda_moe import triton_compat
from cuda_moe.layouts import FRAGMENT_ROWS, SLACK_FRAGMENTS, FragmentLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from cuda_moe.calls import Call
    from portamoe.spec import MoESpec
    from portamoe.weights import Expert, ExpertSource

#: Capability that plans are made for where no GPU is at hand (interpreter, sizes on a CPU host).
DEFAULT_CAPABILITY = 90


def planning_capability() -> int:
    """Return the CUDA capability of the current device, 90 for Hopper, or DEFAULT_CAPABILITY without one."""
    import torch

    if triton_compat.interpreting() or not torch.cuda.is_available():
        return DEFAULT_CAPABILITY
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


@dataclass
class Matrix:
    """One of the two expert matrices, all experts in one tensor per kind.

    codes:   fragments (E * rows/16 + slack, blocks, 128) int32; bf16 weights: (E * rows + slack, cols) bf16
    scales:  (E * rows/16 + slack, blocks, 8) int32; bf16 weights: an empty tensor
    factor:  (E,) float32, 2**shift: what the accumulator is multiplied with
    bias:    (E, rows) float32 in the order of the stored rows; an empty tensor without biases
    """

    codes: torch.Tensor
    scales: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.factor, self.bias))


@dataclass
class FusedWeights:
    """Prepared weights of the fused backend; `calls` caches one prepared call per number of tokens."""

    spec: MoESpec
    device: torch.device
    gate_up: Matrix
    down: Matrix
    batch_invariant: bool
    capability: int
    processors: int
    calls: dict[tuple[int, int, torch.dtype], Call] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes they take on the device."""
        return self.gate_up.nbytes + self.down.nbytes

    def launcher(self, source: triton_compat.KernelSource) -> Any:
        """Return the compiled kernel of `source` on this device, compiling it if needed."""
        if triton_compat.interpreting():
            return triton_compat.InterpretedLauncher(source)
        return _launcher(source, self.capability, self.device.index)

    def compile(self, sources: Iterable[triton_compat.KernelSource]) -> int:
        """Compile and load `sources`; return how many there are (0 when interpreting)."""
        if triton_compat.interpreting():
            return 0
        unique = list(dict.fromkeys(sources))
        for source in unique:
            self.launcher(source)
        return len(unique)


@functools.lru_cache(maxsize=4096)
def _launcher(source: triton_compat.KernelSource, capability: int, index: int) -> triton_compat.Launcher:
    import torch

    with torch.cuda.device(index):
        return triton_compat.Launcher(source, capability)


def compiled_binaries() -> int:
    """Return how many binaries this process has compiled or loaded: equal before and after means no compilation."""
    return _launcher.cache_info().misses


def _empty(spec: MoESpec, layout: FragmentLayout | None, rows: int, cols: int, device: torch.device) -> Matrix:
    import torch

    experts = spec.num_local_experts
    if layout is None:
        slack = SLACK_FRAGMENTS * FRAGMENT_ROWS
        codes = torch.empty(experts * rows + slack, cols, dtype=torch.bfloat16, device=device)
        codes[experts * rows :].zero_()
        scales = torch.empty(0, dtype=torch.int32, device=device)
    else:
        fragments = experts * layout.fragments
        codes = torch.empty(fragments + SLACK_FRAGMENTS, layout.blocks, 128, dtype=torch.int32, device=device)
        scales = torch.empty(fragments + SLACK_FRAGMENTS, layout.blocks, 8, dtype=torch.int32, device=device)
        codes[fragments:].zero_()
        scales[fragments:].zero_()
    bias = torch.empty(experts if spec.bias else 0, rows, dtype=torch.float32, device=device)
    return Matrix(codes, scales, torch.ones(experts, dtype=torch.float32, device=device), bias)


def _row_order(rows: torch.Tensor, gate_up: bool) -> torch.Tensor:
    return rows.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2) if gate_up else rows


def _put(matrix: Matrix, layout: FragmentLayout | None, expert: Expert, which: str, index: int) -> None:
    """Write one expert's matrix `which` ("w13" or "w2") at `index`."""
    weight, scale, bias = (getattr(expert, which + suffix) for suffix in ("", "_scale", "_bias"))
    device = matrix.codes.device
    if layout is None:
        rows = weight.shape[0]
        matrix.codes[index * rows : (index + 1) * rows] = _row_order(weight.to(device), which == "w13")
    else:
        at = slice(index * layout.fragments, (index + 1) * layout.fragments)
        matrix.codes[at] = layout.pack_codes(weight.to(device))
        matrix.scales[at], shift = layout.pack_scales(scale.to(device))
        matrix.factor[index] = 2.0**shift
    if bias is not None:
        matrix.bias[index] = _row_order(bias.to(device).float(), which == "w13")


def prepare(
    weights: ExpertSource,
    spec: MoESpec,
    device: torch.device,
    batch_invariant: bool,
    progress: Callable[[int, int], None] | None,
) -> FusedWeights:
    """Convert the experts one at a time; raises ValueError or TypeError for weights that do not fit `spec`."""
    from portamoe.weights import validate

    validate(weights, spec)
    prepared = empty_weights(spec, device, batch_invariant)
    layouts = _layouts(spec)
    total = len(weights)
    for index in range(total):
        expert = weights.expert(index)
        for name, matrix in (("w13", prepared.gate_up), ("w2", prepared.down)):
            _put(matrix, layouts[name], expert, name, index)
        if progress is not None:
            progress(index + 1, total)
    return prepared


def _shapes(spec: MoESpec) -> dict[str, tuple[int, int]]:
    inter, hidden = spec.intermediate_size, spec.hidden_size
    return {"w13": (2 * inter, hidden), "w2": (hidden, inter)}


def _layouts(spec: MoESpec) -> dict[str, FragmentLayout | None]:
    lane_order = triton_compat.lane_order()
    return {
        name: FragmentLayout(*shape, gate_up=name == "w13", lane_order=lane_order)
        if spec.weight_format == "mxfp4"
        else None
        for name, shape in _shapes(spec).items()
    }


def empty_weights(spec: MoESpec, device: torch.device, batch_invariant: bool) -> FusedWeights:
    """Return prepared weights whose experts are not filled in; raises ValueError for a device that is no CUDA GPU."""
    import torch

    cuda = device.type == "cuda"
    if cuda and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if not cuda and not triton_compat.interpreting():
        raise ValueError(f"triton_fused runs on CUDA, got device {device}; use the torch backend")
    layouts = _layouts(spec)
    w13, w2 = (_empty(spec, layouts[name], *shape, device) for name, shape in _shapes(spec).items())
    properties = torch.cuda.get_device_properties(device) if cuda else None
    capability = properties.major * 10 + properties.minor if properties else DEFAULT_CAPABILITY
    processors = properties.multi_processor_count if properties else 1
    return FusedWeights(spec, device, w13, w2, batch_invariant, capability, processors)
