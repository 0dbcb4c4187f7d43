"""The file layer of a checkpoint: which file holds which tensor, and reads of parts of them.

Headers are read and compared before any data is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from portamoe.checkpoints._json import read_object
from portamoe.checkpoints._shard import Identity, ShardFile, TensorHeader, Watched, destination, raw_header
from portamoe.checkpoints.errors import CheckpointError, shorten

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
#: The number of a tensor's layer, in its name as a header holds it.
_LAYER = re.compile(rb"layers\.(\d+)\.")


@dataclass(frozen=True)
class Inventory:
    """The tensors found for a question: `headers` by name, and every contradiction between index and files."""

    headers: Mapping[str, TensorHeader]
    problems: tuple[str, ...]


class TensorFolder:
    """A folder with one safetensors file, or with shards and `model.safetensors.index.json`.

    It keeps open the files that it has read from, and refuses to go on when one of them, or the index, has changed.

    Raises CheckpointError when there is neither, or when the index is no index.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, ShardFile] = {}
        #: Where the tensors are that an inventory has found.
        self._located: dict[str, TensorHeader] = {}
        #: The layers that a file's header mentions, and the state of the file in which it did.
        self._mentions: dict[str, tuple[Identity, frozenset[bytes]]] = {}
        index_file = directory / INDEX_NAME
        self._watched: Watched | None = None
        if index_file.is_file():
            self._watched = Watched(index_file)
            self._index = _weight_map(index_file)
            self._watched.check()
        else:
            file = _only_file(directory)
            self._index = dict.fromkeys(self._open(file).headers(lambda _: True), file)

    @property
    def names(self) -> Mapping[str, str]:
        """The file of every tensor, as the index has it."""
        return self._index

    def below(self, prefix: str) -> Mapping[str, str]:
        """Return the names that start with `prefix`, and their files as the index has them."""
        layer = _layer_of(prefix)
        names = self._index if layer is None else self._by_layer.get(layer, {})
        return {name: file for name, file in names.items() if name.startswith(prefix)}

    @cached_property
    def _by_layer(self) -> Mapping[str, Mapping[str, str]]:
        """The index by the start of the names up to the layer's number: half a million names are sorted once."""
        out: dict[str, dict[str, str]] = defaultdict(dict)
        for name, file in self._index.items():
            if (layer := _layer_of(name)) is not None:
                out[layer][name] = file
        return out

    def inventory(self, prefix: str, relevant: Callable[[str], bool]) -> Inventory:
        """Return the headers of all tensors below `prefix` whose name is `relevant`, and what contradicts.

        The files that the index names for them must be there and whole. Other files are looked through for second
        copies; one that is absent or unreadable is passed over, because nothing is expected from it.

        Raises CheckpointError for absent, truncated or malformed files among the first, and when the index has changed.
        """
        if self._watched is not None:
            self._watched.check()
        placed = {n: f for n, f in self.below(prefix).items() if relevant(n)}
        needed = sorted(set(placed.values()))
        if absent := [file for file in needed if not (self.directory / file).is_file()]:
            of_them = sum(file in absent for file in placed.values())
            raise CheckpointError(
                f"{self.directory / INDEX_NAME} places {of_them} needed tensors in files that are not there: "
                f"{shorten(absent)}"
            )

        def wanted(name: str) -> bool:
            return name.startswith(prefix) and relevant(name)

        found: dict[str, list[TensorHeader]] = defaultdict(list)
        for file in self._all_files:
            is_needed = file in needed
            headers = (
                self._open(file).headers(wanted) if is_needed else self._headers_if_mentioned(file, prefix, wanted)
            )
            for name, header in headers.items():
                found[name].append(header)
        located = {n: hs[0] for n, hs in found.items()}
        self._located |= located
        return Inventory(located, tuple(_contradictions(placed, found)))

    def read(
        self, names: str | Sequence[str], index: tuple[slice, ...] = (), out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `tensor[index]` of a tensor that an inventory has found, or of several, one below the other.

        index:  a slice for each of the leading dimensions, step 1
        out:    where it goes, contiguous on the CPU; default: new memory, contiguous

        Raises CheckpointError when a file cannot be read or has changed, ValueError for an `out` that does not fit.
        """
        headers = [self._located[name] for name in ([names] if isinstance(names, str) else names)]
        files = {header.file for header in headers}
        if len(files) == 1:
            return self._open(files.pop()).read(headers, index, out)
        out, parts = destination(headers, index, out)
        for header, part in zip(headers, parts, strict=True):
            self._open(header.file).read([header], index, part)
        return out

    def _headers_if_mentioned(self, file: str, prefix: str, wanted: Callable[[str], bool]) -> dict[str, TensorHeader]:
        """Parse the header only if it mentions the prefix's layer: a search is far cheaper than parsing JSON."""
        layer = re.search(_LAYER, prefix.encode())
        path = self.directory / file
        opened = self._files.get(file)
        if opened is not None:  # something was read from it before, so it may not change
            opened.check()
        try:
            watched = Watched(path)
            known = self._mentions.get(file)
            if known is None or known[0] != watched.identity:
                known = self._mentions[file] = (watched.identity, frozenset(_LAYER.findall(raw_header(path))))
            return {} if layer and layer[1] not in known[1] else (opened or ShardFile(path)).headers(wanted)
        except CheckpointError:
            return {}

    @cached_property
    def _all_files(self) -> Sequence[str]:
        return sorted(set(self._index.values()))

    def _open(self, file: str) -> ShardFile:
        """Return the open file; it is kept as long as the folder."""
        if (opened := self._files.get(file)) is None:
            opened = self._files[file] = ShardFile(self.directory / file)
        return opened


def _layer_of(name: str) -> str | None:
    """Return a name's start up to and with its layer's number: "model.layers.7." of "model.layers.7.mlp.up"."""
    start = name.find("layers.")
    end = name.find(".", start + len("layers."))
    return None if start < 0 or end < 0 else name[: end + 1]


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
