"""One open safetensors file: its header, reads of byte ranges, and a watch on whether it is still the same file.

Data is read with `preadv` straight into the tensor that is returned. A mapping would count every page that was touched
as this process's memory, and a network file system serves its page faults one small piece at a time.
Source of the file format: huggingface/safetensors, README.md, section "Format".
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.checkpoints._json import parse_object
from portamoe.checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    import torch

#: The format's limit on the length of a header, bytes.
_MAX_HEADER = 100_000_000
#: Rows of which only some columns are kept are read in pieces of about this many bytes.
_PIECE_BYTES = 256 << 10
#: safetensors' names of dtypes -> torch's, the dtypes that a reader here asks for.
_DTYPES = {
    "U8": "uint8",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "uint8",  # torch has a dtype of its own from 2.7 on; as bytes they serve every version
}


@dataclass(frozen=True)
class Identity:
    """What tells one state of a file from another, without reading it."""

    device: int
    inode: int
    bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """Return the identity in a stat."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor; `dtype` is the format's name ("U8", "BF16", "F8_E4M3").

    begin, end:  its bytes in the file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int


class Watched:
    """A path and what it held when it was first looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.identity = Identity.of(path.stat())
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error

    def check(self, descriptor: int | None = None) -> None:
        """Raise CheckpointError if the file, or the open `descriptor` of it, is no longer what it was.

        A file that was only removed still has its bytes behind the descriptor.
        """
        found = [] if descriptor is None else [Identity.of(os.fstat(descriptor))]
        try:
            found.append(Identity.of(self.path.stat()))
        except FileNotFoundError:
            if descriptor is None:
                raise CheckpointError(f"{self.path} is gone since it was opened; open the checkpoint again") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from error
        for now in found:
            if now != self.identity:
                raise CheckpointError(
                    f"{self.path} has changed since it was opened ({_difference(self.identity, now)}), so what was "
                    "read before may not belong to what is there now; wait until it is written, then load again"
                )


class ShardFile(Watched):
    """A safetensors file that is kept open; raises CheckpointError when it is none or cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self._descriptor)
        super().__init__(path)

    def headers(self, wanted: Callable[[str], bool]) -> dict[str, TensorHeader]:
        """Parse the header and return what it says of the tensors whose name is `wanted`.

        The rest is not kept, because the headers of all of Kimi-K3's shards take hundreds of MB.

        Raises CheckpointError unless the tensors fill the file exactly.
        """
        raw = raw_header(self.path)
        entries = _parse_header(self.path, raw)
        _check_layout(self.path)
        self.check(self._descriptor)
        start, out = 8 + len(raw), {}
        for name in filter(wanted, entries):
            entry = entries[name]
            begin, end = (start + int(offset) for offset in entry["data_offsets"])
            out[name] = TensorHeader(name, entry["dtype"], tuple(entry["shape"]), self.path.name, begin, end)
        return out

    def read(
        self, headers: Sequence[TensorHeader], index: tuple[slice, ...] = (), out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `torch.cat([tensor[index] for each of headers])`, which share a dtype, as a tensor of its own.

        index:  a slice with step 1 for each of the leading dimensions
        out:    where it goes, contiguous on the CPU, of the result's dtype and shape; default: new memory

        Of rows that are kept whole exactly their bytes are read. Where columns are cut, whole rows are read, in pieces:
        their bytes lie in the same pages of the file.

        Raises CheckpointError when the file cannot be read or has changed.
        """
        out, parts = destination(headers, index, out)
        for header, part in zip(headers, parts, strict=True):
            try:
                self._fill(part, header, index)
            except OSError as error:
                raise CheckpointError(
                    f"cannot read {header.name} from {self.path}: {error.strerror or error}"
                ) from error
        self.check(self._descriptor)
        return out

    def _fill(self, out: torch.Tensor, header: TensorHeader, index: tuple[slice, ...]) -> None:
        """Read `tensor[index]` into `out`, contiguous: one range, or pieces of rows of which columns are kept."""
        shape = header.shape
        bounds = [range(*part.indices(size)) for part, size in zip(index, shape, strict=False)]
        cut = [i for i, kept in enumerate(bounds) if len(kept) < shape[i]]
        last = cut[-1] if cut else 0
        strides = [math.prod(shape[i + 1 :]) * out.element_size() for i in range(len(shape))]
        if all(len(bounds[i]) == 1 for i in range(last)):
            first = sum(kept.start * stride for kept, stride in zip(bounds, strides, strict=False))
            self._read_range(out, header.begin + first)
            return
        rows, columns = bounds[last - 1], bounds[last]
        if any(len(bounds[i]) != 1 for i in range(last - 1)):
            raise ValueError(f"index {index} of {header.name} cuts more than two dimensions")
        first = header.begin + sum(bounds[i].start * strides[i] for i in range(last - 1))
        step = max(1, _PIECE_BYTES // strides[last - 1])
        target = out.view(len(rows), len(columns), -1)
        piece = out.new_empty((min(step, len(rows)), shape[last], target.shape[2]))
        for at in range(0, len(rows), step):
            part = piece[: min(step, len(rows) - at)]
            self._read_range(part, first + (rows.start + at) * strides[last - 1])
            target[at : at + len(part)] = part[:, columns.start : columns.stop]

    def _read_range(self, out: torch.Tensor, offset: int) -> None:
        """Fill `out`, contiguous, with the bytes of the file from `offset` on."""
        buffer = (
            memoryview((ctypes.c_uint8 * out.nbytes).from_address(out.data_ptr())) if out.nbytes else memoryview(b"")
        )
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if not count:
                self.check(self._descriptor)
                raise OSError(f"the file ends at byte {offset + done}")
            done += count


def destination(
    headers: Sequence[TensorHeader], index: tuple[slice, ...], out: torch.Tensor | None
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return where `torch.cat([tensor[index] for each of headers])` goes, and each tensor's part of it.

    Raises CheckpointError for tensors of different dtypes, and ValueError for an `out` of another dtype or shape, not
    contiguous, or not on the CPU.
    """
    import torch

    if kinds := {header.dtype for header in headers[1:]} - {headers[0].dtype}:
        other = next(header for header in headers if header.dtype in kinds)
        raise CheckpointError(
            f"{headers[0].name} is {headers[0].dtype} and {other.name} {other.dtype}; they are read as one tensor and "
            "must have the same dtype, so convert one of them"
        )
    shape = _selected(headers[0].shape, index)
    dtype = getattr(torch, _DTYPES[headers[0].dtype])
    whole = (len(headers) * shape[0], *shape[1:]) if shape else ()
    if out is None:
        out = torch.empty(whole, dtype=dtype)
    elif (out.dtype, tuple(out.shape)) != (dtype, whole) or not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}, expected {dtype} {whole}, contiguous, on the CPU"
        )
    return out, out.chunk(len(headers)) if shape else (out,)


def _check_layout(path: Path) -> None:
    """Let safetensors compare the header with the file; it maps the file and touches no data."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no valid safetensors file: {error}") from error


def raw_header(path: Path) -> bytes:
    """Return the bytes of the file's header; raises CheckpointError when it cannot have one."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself; fetch it with git lfs pull")
            if len(start) == 8 and length > _MAX_HEADER:
                raise CheckpointError(f"{path} is no safetensors file: it would start with a header of {length} bytes")
            if len(start) < 8 or size < 8 + length:
                raise CheckpointError(
                    f"{path} is truncated: its {size} bytes end within the header ({8 + length} bytes)"
                )
            return file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the header's entries by tensor name, having compared the file's size with what they promise."""
    entries = parse_object(raw, f"the header of {path}")
    entries.pop("__metadata__", None)
    end = 0
    for name, entry in entries.items():
        try:
            end = max(end, int(entry["data_offsets"][1]))
            well_formed = isinstance(entry["dtype"], str) and all(isinstance(n, int) for n in entry["shape"])
        except (KeyError, IndexError, TypeError, ValueError):
            well_formed = False
        if not well_formed:
            raise CheckpointError(f"the header of {path} describes {name} as {entry!r}")
    size, promised = path.stat().st_size, 8 + len(raw) + end
    if size < promised:
        raise CheckpointError(f"{path} is truncated: it has {size} bytes, its header promises {promised}")
    return entries


def _selected(shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[int, ...]:
    kept = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=False)]
    return (*kept, *shape[len(kept) :])


def _difference(before: Identity, now: Identity) -> str:
    if (before.device, before.inode) != (now.device, now.inode):
        return "another file is in its place"
    if before.bytes != now.bytes:
        return f"it had {before.bytes} bytes and has {now.bytes}"
    return f"it was modified {(now.modified_ns - before.modified_ns) / 1e9:.3f} s after that state"
