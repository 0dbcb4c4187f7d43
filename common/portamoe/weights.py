"""The canonical expert tensors, whole or one expert at a time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from portamoe.spec import MoESpec


@dataclass(frozen=True)
class Expert:
    """One expert's tensors in canonical order: w13 = [w1; w3], gate rows first, then up rows.

    w13:               (2I, H/2) uint8 packed E2M1, low nibble = even K; bf16 weights: (2I, H) bf16
    w2:                (H, I/2) uint8; bf16 weights: (H, I) bf16
    w13_scale:         (2I, H/32) uint8 E8M0 for mxfp4; (2I, H/16) float8_e4m3fn for nvfp4
    w2_scale:          (H, I/32) uint8; (H, I/16) float8_e4m3fn for nvfp4
    w13_global_scale:  (2,) float32, nvfp4 only: of w1 and of w3, which may differ
    w2_global_scale:   () float32, nvfp4 only
    w13_input_scale, w2_input_scale:  (2,) and () float32, nvfp4 only, for quantised activations
    w13_bias, w2_bias: (2I,) and (H,) bf16 or float32, only with biases
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_global_scale: torch.Tensor | None = None
    w2_global_scale: torch.Tensor | None = None
    w13_input_scale: torch.Tensor | None = None
    w2_input_scale: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        values = (getattr(self, f.name) for f in fields(self))
        return sum(value.nbytes for value in values if value is not None)


@runtime_checkable
class ExpertSource(Protocol):
    """Where a backend takes one rank's experts from, one at a time.

    A checkpoint on disk and tensors in memory look alike, so `prepare` never holds a second full copy.
    """

    def __len__(self) -> int:
        """Return E_local."""
        ...

    def expert(self, index: int) -> Expert:
        """Return the local expert `index` (0 … E_local - 1) on the CPU or wherever it lies."""
        ...


@dataclass(frozen=True)
class ExpertWeights(Expert):
    """All local experts stacked: every tensor of `Expert` with a leading E_local dimension."""

    def __len__(self) -> int:
        return int(self.w13.shape[0])

    def expert(self, index: int) -> Expert:
        """Return a view of the local expert `index`."""
        values: dict[str, Any] = {}
        for field in fields(self):
            stacked = getattr(self, field.name)
            values[field.name] = None if stacked is None else stacked[index]
        return Expert(**values)


def stack(source: ExpertSource) -> ExpertWeights:
    """Copy every expert of `source` into one set of stacked tensors on the device of the first.

    Raises ValueError when an expert's tensors are not those of the first in dtype and shape: a copy would cast or
    broadcast them.
    """
    first = source.expert(0)
    out: dict[str, torch.Tensor | None] = {}
    for field in fields(Expert):
        value = getattr(first, field.name)
        out[field.name] = None if value is None else value.new_empty((len(source), *value.shape))
    for index in range(len(source)):
        expert = first if index == 0 else source.expert(index)
        for name, target in out.items():
            value, wanted = getattr(expert, name), getattr(first, name)
            if _kind(value) != _kind(wanted):
                raise ValueError(f"{name} of expert {index} is {_kind(value)}, that of expert 0 is {_kind(wanted)}")
            if target is not None:
                target[index].copy_(value)
    return ExpertWeights(**out)  # type: ignore[arg-type]


def _kind(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def validate(source: ExpertSource, spec: MoESpec) -> None:
    """Compare the first expert's tensors, their dtypes and shapes, and the count, with what `spec` implies.

    Raises ValueError or TypeError naming the tensor, what came and what was expected; a tensor that the spec has no use
    for raises as well, because ignoring a scale or a bias would give plausible wrong results.
    """
    import torch

    if len(source) != spec.num_local_experts:
        raise ValueError(f"weights hold {len(source)} experts, the spec's local range has {spec.num_local_experts}")
    if isinstance(source, ExpertWeights):
        _validate_counts(source)
    expert = source.expert(0)
    expected = expected_tensors(spec)
    for name, (dtypes, shape) in expected.items():
        value = getattr(expert, name)
        if value is None:
            raise ValueError(f"{name} is missing, {spec.weight_format} needs it as {shape}")
        if not isinstance(value, torch.Tensor) or value.dtype not in dtypes:
            raise TypeError(f"{name} is {getattr(value, 'dtype', type(value))}, expected {dtypes}")
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {shape}")
    allowed = expected.keys() | ({"w13_input_scale", "w2_input_scale"} if spec.weight_format == "nvfp4" else set())
    given = {f.name for f in fields(expert) if getattr(expert, f.name) is not None}
    if surplus := sorted(given - allowed):
        raise ValueError(
            f"weights carry {', '.join(surplus)}, which a spec with weight_format={spec.weight_format!r} and "
            f"bias={spec.bias} has no use for"
        )


def _validate_counts(stacked: ExpertWeights) -> None:
    tensors = {f.name: getattr(stacked, f.name) for f in fields(stacked)}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[:1] != stacked.w13.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but w13 holds {len(stacked)} experts")


def expected_tensors(spec: MoESpec) -> dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]:
    """Return dtypes and shape of each tensor that one expert of `spec` must have."""
    import torch

    rows, hidden, inter = 2 * spec.intermediate_size, spec.hidden_size, spec.intermediate_size
    if spec.weight_format == "bf16":
        out: dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {
            "w13": ((torch.bfloat16,), (rows, hidden)),
            "w2": ((torch.bfloat16,), (hidden, inter)),
        }
    else:
        block = 32 if spec.weight_format == "mxfp4" else 16
        scale = torch.uint8 if spec.weight_format == "mxfp4" else torch.float8_e4m3fn
        out = {
            "w13": ((torch.uint8,), (rows, hidden // 2)),
            "w2": ((torch.uint8,), (hidden, inter // 2)),
            "w13_scale": ((scale,), (rows, hidden // block)),
            "w2_scale": ((scale,), (hidden, inter // block)),
        }
    if spec.weight_format == "nvfp4":
        out["w13_global_scale"] = ((torch.float32,), (2,))
        out["w2_global_scale"] = ((torch.float32,), ())
    if spec.bias:
        out["w13_bias"] = ((torch.bfloat16, torch.float32), (rows,))
        out["w2_bias"] = ((torch.bfloat16, torch.float32), (hidden,))
    return out
