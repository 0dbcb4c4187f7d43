"""From a folder to the experts of one layer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from portamoe.checkpoints._config import Config, read_config
from portamoe.checkpoints._experts import CheckpointExperts, Share
from portamoe.checkpoints._registry import Reader, choose_reader
from portamoe.checkpoints._safetensors import TensorFolder
from portamoe.checkpoints.errors import CheckpointError
from portamoe.spec import BLOCK_SIZE, MoESpec


def load_experts(
    directory: str | os.PathLike[str],
    layer: int,
    experts: range | None = None,
    *,
    tensor_parallel: tuple[int, int] = (0, 1),
) -> tuple[MoESpec, CheckpointExperts]:
    """Find one layer's routed experts in a checkpoint folder and return their spec and a lazy source of them.

    directory:        holds config.json and one safetensors file, or shards with model.safetensors.index.json
    layer:            the layer's number in the model
    experts:          ids to load, a contiguous range within 0:E (expert parallelism); default: all
    tensor_parallel:  (rank, ranks): keep this rank's I/ranks of the intermediate dimension, which must be a whole
                      number of scale blocks; spec.intermediate_size is then the rank's

    All names, shapes and dtypes of the requested experts are checked in the files' headers; data is read later, by
    `CheckpointExperts.expert`. Nothing of other layers or experts is read.

    Raises CheckpointError (a ValueError) for a checkpoint that is incomplete, contradictory or of an unknown kind, and
    ValueError or TypeError for arguments that do not fit it.
    """
    config, reader, folder = _open(Path(directory))
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise TypeError(f"layer must be an int, got {layer!r}")
    try:
        spec = reader.spec(config, layer)
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:  # of the spec and the activation: the numbers are the config's
        raise CheckpointError(f"{config.path}: {error}") from error
    spec = replace(spec, local_experts=_local_experts(experts, spec.num_experts))
    share = _share(tensor_parallel, spec)
    read_expert = reader.open(config, folder, layer, spec, share)
    rank_spec = replace(spec, intermediate_size=share.stop - share.start)
    return rank_spec, CheckpointExperts(rank_spec, reader.description, read_expert)


def _open(directory: Path) -> tuple[Config, Reader, TensorFolder]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no folder; a checkpoint is a local folder with config.json")
    config = read_config(directory)
    return config, choose_reader(config), TensorFolder(directory)


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
