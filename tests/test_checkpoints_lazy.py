"""Nothing but the requested layer, experts and share of them is read from a checkpoint."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from portamoe.checkpoints import load_experts
from portamoe.layouts import slice_tensor_parallel
from portamoe.weights import Expert, validate
from tests import checkpoint_builders as build
from tests.checkpoint_builders import DATA, E, I, assert_same

all_formats = pytest.mark.parametrize("builder", build.BUILDERS, ids=lambda builder: builder.__name__)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of data read, by tensor name, taken from the ranges of the files; a range beyond a tensor is an error."""
    counted: Counter[str] = Counter()

    def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        count = real(descriptor, buffers, offset)
        (name,) = [n for n, (begin, end) in ranges_of(file).items() if begin <= offset and offset + count <= end]
        counted[name] += count
        return count

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    return counted


def ranges_of(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes lie in a file, by a parser of its own."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {n: (start + e["data_offsets"][0], start + e["data_offsets"][1]) for n, e in header.items()}


@all_formats
def test_every_format_reads_one_expert_and_nothing_else(
    builder: Callable[[], build.Checkpoint], tmp_path: Path, reads: Counter[str]
) -> None:
    checkpoint = builder()
    directory = checkpoint.write(tmp_path)
    spec, source = load_experts(directory, checkpoint.layer)
    assert not reads, "data was read before any expert was asked for"
    validate(source, spec)
    reads.clear()
    expert = source.expert(2)
    assert sum(reads.values()) == expert.nbytes
    if spec.bias:
        assert {name.removeprefix(build.GPT_OSS_PREFIX).partition("_proj")[0] for name in reads} == {"gate_up", "down"}
    else:
        assert {name.removeprefix(build.KIMI_PREFIX).partition(".")[0] for name in reads} == {"2"}


@all_formats
def test_local_experts_are_those_of_the_whole(builder: Callable[[], build.Checkpoint], tmp_path: Path) -> None:
    checkpoint = builder()
    directory = checkpoint.write(tmp_path)
    _, whole = load_experts(directory, checkpoint.layer)
    spec, part = load_experts(directory, checkpoint.layer, range(1, 3))
    assert spec.local_experts == range(1, 3)
    assert (spec.num_experts, len(part)) == (E, 2)
    for index in range(2):
        assert_same(part.expert(index), whole.expert(1 + index))
    assert_same(part.materialize().expert(1), whole.expert(2))
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"local expert {index} of 2"):
            part.expert(index)


@all_formats
def test_experts_own_their_memory(builder: Callable[[], build.Checkpoint], tmp_path: Path) -> None:
    checkpoint = builder()
    _, source = load_experts(checkpoint.write(tmp_path), checkpoint.layer)
    expert = source.expert(0)
    for f in fields(Expert):
        value = getattr(expert, f.name)
        if value is not None:
            assert value.is_contiguous(), f.name
            # A view would keep the mapping, and all of a stacked tensor, alive.
            assert value.untyped_storage().nbytes() == value.nbytes, f.name


@all_formats
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_tensor_parallel_shares_rebuild_the_whole(
    builder: Callable[[], build.Checkpoint], ranks: int, tmp_path: Path, reads: Counter[str]
) -> None:
    checkpoint = builder()
    directory = checkpoint.write(tmp_path)
    spec, source = load_experts(directory, checkpoint.layer)
    block = 32 if spec.weight_format == "mxfp4" else 16
    if I // ranks % block:
        per_rank = f"{I} over {ranks} ranks gives {I // ranks} values a rank, no multiple of {block}"
        with pytest.raises(ValueError, match=per_rank):
            load_experts(directory, checkpoint.layer, tensor_parallel=(0, ranks))
        return
    whole, parts = source.expert(1), []
    for rank in range(ranks):
        rank_spec, rank_source = load_experts(directory, checkpoint.layer, tensor_parallel=(rank, ranks))
        assert rank_spec == replace(spec, intermediate_size=I // ranks)
        validate(rank_source, rank_spec)
        reads.clear()
        parts.append(rank_source.expert(1))
        assert parts[-1].nbytes < whole.nbytes
        # Rows are read alone; where columns are cut, the rows that hold them, whose bytes lie in the same pages.
        # A zero bias on rank 1 and later is read as well.
        of_rows = sum(t.nbytes for t in (parts[-1].w13, parts[-1].w13_scale, parts[-1].w13_bias) if t is not None)
        of_columns = sum(t.nbytes for t in (whole.w2, whole.w2_scale, whole.w2_bias) if t is not None)
        scalars = ("w13_global_scale", "w13_input_scale", "w2_global_scale", "w2_input_scale")
        of_scalars = sum(t.nbytes for t in (getattr(whole, name) for name in scalars) if t is not None)
        assert sum(reads.values()) == of_rows + of_columns + of_scalars
        assert_same(parts[-1], slice_tensor_parallel(whole, rank, ranks))
    for name in ("w13", "w13_scale", "w13_bias"):
        shards = [getattr(part, name) for part in parts]
        if shards[0] is not None:
            raw = [shard.view(torch.uint8).chunk(2) for shard in shards]
            rebuilt = torch.cat([half for halves in zip(*raw, strict=True) for half in halves])
            assert torch.equal(rebuilt, getattr(whole, name).view(torch.uint8)), name
    for name in ("w2", "w2_scale"):
        raw = [getattr(part, name).view(torch.uint8) for part in parts]
        assert torch.equal(torch.cat(raw, dim=1), getattr(whole, name).view(torch.uint8)), name
    if whole.w2_bias is not None:
        # The ranks' partial sums are added up, so the bias must be in exactly one of them.
        assert torch.equal(sum(part.w2_bias for part in parts), whole.w2_bias)  # type: ignore[arg-type]


def test_only_the_shards_of_the_requested_experts_need_to_be_there(tmp_path: Path) -> None:
    shutil.copytree(DATA / "kimi-k3-tiny", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-00001-of-000003.safetensors").unlink()
    (tmp_path / "model-00002-of-000003.safetensors").write_bytes(b"not safetensors")
    _, source = load_experts(tmp_path, 2)
    _, complete = load_experts(DATA / "kimi-k3-tiny", 2)
    assert_same(source.expert(15), complete.expert(15))


def test_experts_of_one_shard_are_read_without_the_layers_other_shard(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    (directory / build.SHARD.format(2)).unlink()
    _, source = load_experts(directory, 1, range(2, 3))
    assert len(source) == 1


def test_a_source_holds_its_files_open_and_lets_go(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    _, source = load_experts(directory, 1)
    before = source.expert(1)
    shutil.rmtree(directory)
    assert_same(source.expert(1), before)
    del source
    gc.collect()
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(directory) not in maps.read_text()
