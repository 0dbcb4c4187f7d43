"""The file layer of a checkpoint: which file holds which tensor, and lazy reads of parts of them.

Headers are read and compared before any data is. Data is read through `safetensors.safe_open`, which maps the file:
only the pages of the requested slice are touched.
Source of the file format: huggingface/safetensors, README.md, section "Format".
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.checkpoints._json import parse_object, read_object
from portamoe.checkpoints.errors import CheckpointError, shorten

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
#: The format's limit on the length of a header, bytes.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor; `dtype` is the format's name ("U8", "BF16", "F8_E4M3")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Inventory:
    """The tensors found for a question: `headers` by name, and every contradiction between index and files."""

    headers: Mapping[str, TensorHeader]
    problems: tuple[str, ...]


class TensorFolder:
    """A folder with one safetensors file, or with shards and `model.safetensors.index.json`.

    Raises CheckpointError when there is neither, or when the index is no index.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles: dict[str, Any] = {}
        index_file = directory / INDEX_NAME
        if index_file.is_file():
            self._index = _weight_map(index_file)
            self._from_index = True
        else:
            file = _only_file(directory)
            self._index = dict.fromkeys(_parse_header(directory / file), file)
            self._from_index = False

    @property
    def names(self) -> Mapping[str, str]:
        """The file of every tensor, as the index has it."""
        return self._index

    def inventory(self, prefix: str, relevant: Callable[[str], bool]) -> Inventory:
        """Return the headers of all tensors below `prefix` whose name is `relevant`, and what contradicts.

        The files that the index names for them must be there and whole. Other files are looked through for second
        copies; one that is absent or unreadable is passed over, because nothing is expected from it.

        Raises CheckpointError for absent, truncated or malformed files among the first.
        """
        placed = {n: f for n, f in self._index.items() if n.startswith(prefix) and relevant(n)}
        needed = sorted(set(placed.values()))
        if absent := [file for file in needed if not (self.directory / file).is_file()]:
            of_them = sum(file in absent for file in placed.values())
            raise CheckpointError(
                f"{self.directory / INDEX_NAME} places {of_them} needed tensors in files that are not there: "
                f"{shorten(absent)}"
            )
        found: dict[str, list[TensorHeader]] = defaultdict(list)
        for file in sorted(set(self._index.values())):
            headers = self._headers(file) if file in needed else self._headers_if_mentioned(file, prefix)
            for name, header in headers.items():
                if name.startswith(prefix) and relevant(name):
                    found[name].append(header)
        return Inventory({n: hs[0] for n, hs in found.items()}, tuple(_contradictions(placed, found)))

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """Return `tensor[index]`, which may be a view of the mapped file: copy what is kept.

        Raises CheckpointError when the file cannot be read.
        """
        from safetensors import SafetensorError

        file = self._index[name]
        handle = self._open(file)
        try:
            tensor: torch.Tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name} from {self.directory / file}: {error}") from error
        return tensor

    def _headers(self, file: str) -> dict[str, TensorHeader]:
        entries = _parse_header(self.directory / file)
        self._open(file)  # also checks that the tensors fill the file exactly
        return {
            name: TensorHeader(name, str(entry["dtype"]), tuple(entry["shape"]), file)
            for name, entry in entries.items()
        }

    def _headers_if_mentioned(self, file: str, prefix: str) -> dict[str, TensorHeader]:
        """Parse the header only if it holds `prefix` at all: a search is far cheaper than 5,000 entries of JSON."""
        try:
            if f'"{prefix}'.encode() not in _raw_header(self.directory / file):
                return {}
            return self._headers(file)
        except CheckpointError:
            return {}

    def _open(self, file: str) -> Any:
        """Return the file's `safe_open` handle; it maps the file and is kept as long as the folder."""
        if (handle := self._handles.get(file)) is None:
            from safetensors import SafetensorError, safe_open

            path = self.directory / file
            try:
                handle = self._handles[file] = safe_open(os.fspath(path), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is no valid safetensors file: {error}") from error
        return handle


def _contradictions(placed: Mapping[str, str], found: Mapping[str, list[TensorHeader]]) -> list[str]:
    problems = []
    for name in sorted(placed.keys() | found.keys()):
        files = [header.file for header in found.get(name, [])]
        if len(files) > 1:
            problems.append(f"{name} is held by {len(files)} files: {', '.join(files)}")
        elif name not in placed:
            problems.append(f"{name} is in {files[0]}, but the index does not list it")
        elif not files:
            problems.append(f"{name} is not in {placed[name]}, where the index places it")
        elif files[0] != placed[name]:
            problems.append(f"{name} is in {files[0]}, but the index places it in {placed[name]}")
    return problems


def _weight_map(index_file: Path) -> dict[str, str]:
    weight_map = read_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index_file} has no object 'weight_map' from tensor names to files")
    # Half a million entries in Kimi-K3: each distinct file is looked at once, and the dict stays as it was parsed.
    if others := set(map(type, weight_map.values())) - {str}:
        raise CheckpointError(f"{index_file} names files by {shorten(t.__name__ for t in others)}, expected strings")
    for file in set(weight_map.values()):
        if Path(file).name != file:
            raise CheckpointError(f"{index_file} names the file {file!r}, expected a plain file name beside it")
    return weight_map


def _only_file(directory: Path) -> str:
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no safetensors file")
    if len(files) > 1:
        raise CheckpointError(
            f"{directory} holds {len(files)} safetensors files ({shorten(files)}) but no {INDEX_NAME}, "
            "which says what belongs to the model"
        )
    return files[0]


def _raw_header(path: Path) -> bytes:
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


def _parse_header(path: Path) -> dict[str, Any]:
    """Return the header's entries by tensor name, having compared the file's size with what they promise."""
    raw = _raw_header(path)
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
