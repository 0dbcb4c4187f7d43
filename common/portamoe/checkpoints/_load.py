"""From a folder to the experts of one layer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from portamoe.checkpoints._config import Config, read_config
from portamoe.checkpoints._experts import CheckpointExperts, Origin, Share
from portamoe.checkpoints._registry import Reader, choose_reader
from portamoe.checkpoints._safetensors import TensorFolder
from portamoe.checkpoints._shard import Watched
from portamoe.checkpoints.errors import CheckpointError
from portamoe.spec import BLOCK_SIZE, MoESpec

if TYPE_CHECKING:
    from portamoe.checkpoints.kimi_block import BlockConfig, BlockWeights


class Checkpoint:
    """A checkpoint folder that is opened once and serves any number of layers.

    directory:  holds config.json and one safetensors file, or shards with model.safetensors.index.json

    Kimi-K3's index names 497,220 tensors; reading it takes seconds, so a model of many layers shares one Checkpoint. It
    keeps the files open that it has read from, and refuses to go on when one of them, the index or the config has
    changed since it was first looked at (size, modification time, or another file in its place).

    Loading writes nothing but the layer's memory: one that was interrupted starts over, with the same Checkpoint.

    Raises CheckpointError (a ValueError) when the folder is no checkpoint, or of a kind that is not read.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"{directory} is no folder; a checkpoint is a local folder with config.json")
        self._config, self._config_file = _watched_config(self.directory)
        self._reader: Reader = choose_reader(self._config)
        self._folder = TensorFolder(self.directory)

    @property
    def description(self) -> str:
        """Model and format, for people."""
        return self._reader.description

    def experts(
        self, layer: int, experts: range | None = None, *, tensor_parallel: tuple[int, int] = (0, 1)
    ) -> tuple[MoESpec, CheckpointExperts]:
        """Return one layer's spec and a lazy source of its routed experts; see `load_experts`."""
        config = self._config
        self._config_file.check()
        _layer(layer)
        try:
            spec = self._reader.spec(config, layer)
        except CheckpointError:
            raise
        except (TypeError, ValueError) as error:  # of the spec and the activation: the numbers are the config's
            raise CheckpointError(f"{config.path}: {error}") from error
        spec = replace(spec, local_experts=_local_experts(experts, spec.num_experts))
        share = _share(tensor_parallel, spec)
        read_expert = self._reader.open(config, self._folder, layer, spec, share)
        rank_spec = replace(spec, intermediate_size=share.stop - share.start)
        origin = Origin(self.directory.resolve(), layer)
        return rank_spec, CheckpointExperts(rank_spec, self._reader.description, read_expert, origin)

    def block(self, layer: int, *, shared_parallel: tuple[int, int] = (0, 1)) -> tuple[BlockConfig, BlockWeights]:
        """Read what surrounds the routed experts in one MoE block of Kimi-K3, checked like the experts.

        shared_parallel:  (rank, ranks): keep this rank's part of the shared experts' intermediate dimension

        Raises CheckpointError for another model, a dense layer and tensors that are missing, surplus or misshapen.
        """
        from portamoe.checkpoints._kimi import KimiReader
        from portamoe.checkpoints.kimi_block import block_config, block_weights

        if not isinstance(self._reader, KimiReader):
            raise CheckpointError(f"{self.directory} is {self.description}; only Kimi-K3 has a latent MoE block")
        self._config_file.check()
        rules = block_config(self._config, _layer(layer))
        return rules, block_weights(self._config, self._folder, layer, rules, shared_parallel)


def load_experts(
    directory: str | os.PathLike[str],
    layer: int,
    experts: range | None = None,
    *,
    tensor_parallel: tuple[int, int] = (0, 1),
) -> tuple[MoESpec, CheckpointExperts]:
    """Find one layer's routed experts in a checkpoint folder and return their spec and a lazy source of them.

    directory:        holds config.json and one safetensors file, or shards with model.safetensors.index.json; for many
                      layers open a `Checkpoint` once
    layer:            the layer's number in the model
    experts:          ids to load, a contiguous range within 0:E (expert parallelism); default: all
    tensor_parallel:  (rank, ranks): keep this rank's I/ranks of the intermediate dimension, which must be a whole
                      number of scale blocks; spec.intermediate_size is then the rank's

    All names, shapes and dtypes of the requested experts are checked in the files' headers; data is read later, by
    `CheckpointExperts.expert`. Nothing of other layers or experts is read.

    Raises CheckpointError (a ValueError) for a checkpoint that is incomplete, contradictory or of an unknown kind, and
    ValueError or TypeError for arguments that do not fit it.
    """
    return Checkpoint(directory).experts(layer, experts, tensor_parallel=tensor_parallel)


def _watched_config(directory: Path) -> tuple[Config, Watched]:
    """Read the config between two looks at the file, so that what is watched is what was read."""
    path = directory / "config.json"
    watched = Watched(path) if path.is_file() else None
    config = read_config(directory)
    watched = watched or Watched(path)
    watched.check()
    return config, watched


def _layer(layer: int) -> int:
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise TypeError(f"layer must be an int, got {layer!r}")
    return layer


def _local_experts(experts: range | None, num_experts: int) -> range:
    if experts is None:
        return range(num_experts)
    if not isinstance(experts, range):
        raise TypeError(f"experts must be a range, got {experts!r}")
    if experts.step != 1 or not experts or experts.start < 0 or experts.stop > num_experts:
        raise ValueError(f"experts must be a non-empty contiguous range within 0:{num_experts}, got {experts!r}")
    return experts


def _share(tensor_parallel: tuple[int, int], spec: MoESpec) -> Share:
    match tensor_parallel:
        case (int(rank), int(ranks)) if 0 <= rank < ranks:
            pass
        case _:
            raise ValueError(f"tensor_parallel must be (rank, ranks) with 0 <= rank < ranks, got {tensor_parallel!r}")
    block = BLOCK_SIZE[spec.weight_format]
    part, rest = divmod(spec.intermediate_size, ranks)
    if rest or part % block:
        raise ValueError(
            f"intermediate_size {spec.intermediate_size} over {ranks} ranks gives {spec.intermediate_size / ranks:g} "
            f"values a rank, no multiple of {block}, the block of {spec.weight_format}; use fewer "
            "ranks or split the experts"
        )
    return Share(rank, rank * part, (rank + 1) * part)
