"""Nothing but the requested layer, experts and share of them is read from a checkpoint."""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from portamoe.checkpoints import load_experts
from portamoe.layouts import slice_tensor_parallel
from portamoe.weights import Expert, validate
from tests import checkpoint_builders as build
from tests.checkpoint_builders import DATA, E, I, assert_same

all_formats = pytest.mark.parametrize("builder", build.BUILDERS, ids=lambda builder: builder.__name__)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Bytes of data read, by tensor name, through safetensors."""
    counted: Counter[str] = Counter()

    class Slice:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, index: Any) -> torch.Tensor:
            out: torch.Tensor = self.inner[index]
            counted[self.name] += out.nbytes
            return out

    class Handle:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.inner = real(*args, **kwargs)

        def get_tensor(self, name: str) -> torch.Tensor:
            out: torch.Tensor = self.inner.get_tensor(name)
            counted[name] += out.nbytes
            return out

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self.inner.get_slice(name))

    real = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Handle)
    return counted


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
        # A zero bias on rank 1 and later is read as well.
        assert sum(reads.values()) == parts[-1].nbytes < whole.nbytes
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
