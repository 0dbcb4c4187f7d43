"""The experts of one layer, found and checked in the headers, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from portamoe.checkpoints._safetensors import TensorFolder
from portamoe.checkpoints.errors import CheckpointError, shorten
from portamoe.weights import Expert, ExpertWeights

if TYPE_CHECKING:
    import torch

    from portamoe.spec import MoESpec

#: How a reader reads one expert by its id in the layer, into given tensors where it can; they may be views.
ReadExpert = Callable[[int, Expert | None], Expert]
#: safetensors' names of the dtypes in which E8M0 scales are stored.
E8M0 = ("U8", "F8_E8M0")


@dataclass(frozen=True)
class Expected:
    """What a header must say of a tensor: one of `dtypes`, and `shape` or one of the `other_shapes`."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    other_shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Share:
    """The part of the intermediate dimension that this rank keeps: values `start` to `stop` of I."""

    rank: int
    start: int
    stop: int

    def rows(self, per_value: int = 1) -> tuple[slice]:
        """Return the index of rows where every intermediate value has `per_value` of them."""
        return (slice(self.start * per_value, self.stop * per_value),)

    def columns(self, values: int) -> slice:
        """Return the columns where each stands for `values` intermediate values (2 a byte, 32 or 16 a scale)."""
        return slice(self.start // values, self.stop // values)


@dataclass(frozen=True)
class Origin:
    """Where tensors were read from: a checkpoint folder, resolved, and the layer's number in the model."""

    directory: Path
    layer: int

    def __str__(self) -> str:
        return f"layer {self.layer} of {self.directory}"


class CheckpointExperts:
    """One rank's experts in a checkpoint: an `ExpertSource` that reads an expert when it is asked for.

    Names, shapes and dtypes were checked when it was made, without reading data. Each `expert()` reads only that
    expert's bytes, and of them only this rank's share, and returns tensors of its own on the CPU.
    """

    def __init__(self, spec: MoESpec, description: str, read_expert: ReadExpert, origin: Origin | None = None) -> None:
        self.spec = spec
        self.origin = origin
        #: What the checkpoint is, for people: "Kimi-K3, compressed-tensors mxfp4-pack-quantized".
        self.description = description
        self._read_expert = read_expert

    def __len__(self) -> int:
        return self.spec.num_local_experts

    def expert(self, index: int) -> Expert:
        """Read the local expert `index`, 0 … E_local - 1.

        Raises IndexError outside and CheckpointError when it cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"local expert {index} of {len(self)}")
        return self._read_expert(self.spec.local_experts[index], None)

    def read_into(self, index: int, target: Expert) -> None:
        """Read the local expert `index` into the tensors of `target`: contiguous, on the CPU, such as views of a stack.

        Raises IndexError outside, CheckpointError when it cannot be read, ValueError for tensors that do not fit.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"local expert {index} of {len(self)}")
        expert = self._read_expert(self.spec.local_experts[index], target)
        for field in fields(Expert):
            value, place = getattr(expert, field.name), getattr(target, field.name)
            if value is place:
                continue
            if value is None or place is None or (value.dtype, value.shape) != (place.dtype, place.shape):
                raise ValueError(f"the target's {field.name} is {_kind(place)}, the checkpoint's {_kind(value)}")
            place.copy_(value)

    def materialize(self) -> ExpertWeights:
        """Read all experts into one set of stacked tensors; beside them at most one expert is in memory."""
        first = self.expert(0)
        stacked = {}
        for field in fields(Expert):
            value = getattr(first, field.name)
            stacked[field.name] = None if value is None else value.new_empty((len(self), *value.shape))
        out = ExpertWeights(**stacked)  # type: ignore[arg-type]
        del first
        for index in range(len(self)):
            self.read_into(index, out.expert(index))
        return out


def _kind(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def check_tensors(
    folder: TensorFolder,
    prefix: str,
    expected: Mapping[str, Expected],
    relevant: Callable[[str], bool],
    sizes: str,
) -> None:
    """Compare what the files hold below `prefix` with what is expected, from their headers alone.

    relevant:  is this name any business of the request? What is relevant but not expected is surplus.
    sizes:     the config's sizes behind the expected shapes, for the message

    Raises CheckpointError that lists every missing, surplus, misplaced, repeated or misshapen tensor.
    """
    inventory = folder.inventory(prefix, lambda name: name in expected or relevant(name))
    missing = sorted(expected.keys() - inventory.headers.keys())
    surplus = sorted(inventory.headers.keys() - expected.keys())
    problems = []
    if missing:
        problems.append(f"missing ({len(missing)} of {len(expected)} expected): {shorten(missing)}")
    if surplus:
        problems.append(f"surplus ({len(surplus)}): {shorten(surplus)}")
    if not inventory.headers:
        problems.append(f"the folder holds {len(folder.names)} tensors, such as {shorten(sorted(folder.names)[:2])}")
    if inventory.problems:
        problems.append(shorten(inventory.problems))
    mismatches = []
    for name, wanted in expected.items():
        if header := inventory.headers.get(name):
            mismatches += _mismatches(name, wanted, header.dtype, header.shape)
    if mismatches:
        problems.append(f"{shorten(mismatches)}; expected from {sizes}")
    if problems:
        text = "; ".join(problems)
        raise CheckpointError(f"{folder.directory}: {text}", missing=missing, surplus=surplus)


def _mismatches(name: str, wanted: Expected, dtype: str, shape: tuple[int, ...]) -> list[str]:
    found = []
    if dtype not in wanted.dtypes:
        found.append(f"{name} is {dtype}, expected {' or '.join(wanted.dtypes)}")
    if shape != wanted.shape and shape not in wanted.other_shapes:
        is_transposed = len(shape) > 1 and shape == wanted.shape[::-1]
        hint = " (transposed)" if is_transposed else ""
        found.append(f"{name} has shape {list(shape)}{hint}, expected {list(wanted.shape)}")
    return found
