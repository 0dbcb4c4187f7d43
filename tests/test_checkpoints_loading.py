"""A long load: files that change under it, reads that fail, interruptions, memory, and the bar."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from portamoe.checkpoints import Checkpoint, CheckpointError, CheckpointExperts, _shard, load_experts, loading_bar
from portamoe.layer import RoutedExperts
from tests import checkpoint_builders as build
from tests.checkpoint_builders import DATA, KIMI_PREFIX, assert_same

FIRST = build.SHARD.format(1)
#: Expert 0 lies in the first shard, expert 1 in the second.
W1 = f"{KIMI_PREFIX}0.w1.weight_packed"


def opened(directory: Path) -> CheckpointExperts:
    return load_experts(build.kimi_k3().write(directory), 1)[1]


def later(path: Path) -> None:
    """Move the file's modification time on, whatever the clock's resolution."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def test_a_shard_that_is_replaced_is_refused(tmp_path: Path) -> None:
    source = opened(tmp_path)
    source.expert(0)
    other = tmp_path / "other"
    save_file(load_file(tmp_path / FIRST), other)
    os.utime(other, ns=(0, (tmp_path / FIRST).stat().st_mtime_ns))
    other.replace(tmp_path / FIRST)
    with pytest.raises(CheckpointError, match=rf"{FIRST} has changed .*another file is in its place.* load again"):
        source.expert(0)
    source.expert(1)  # of the other shard


def test_a_shard_that_is_written_in_place_is_refused(tmp_path: Path) -> None:
    source = opened(tmp_path)
    path = tmp_path / FIRST
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    later(path)
    with pytest.raises(CheckpointError, match=rf"{FIRST} has changed .*was modified"):
        source.expert(0)


@pytest.mark.parametrize("change", [-100, 100])
def test_a_shard_that_is_cut_or_grows_is_refused(change: int, tmp_path: Path) -> None:
    source = opened(tmp_path)
    path = tmp_path / FIRST
    size = path.stat().st_size
    os.truncate(path, size + change)
    message = rf"{FIRST} has changed .*had {size} bytes and has {size + change}"
    with pytest.raises(CheckpointError, match=message):  # expert 2 comes last in the file
        source.expert(2)


def test_a_shard_that_changes_during_a_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = opened(tmp_path), os.preadv

    def preadv(*args: Any) -> int:
        later(tmp_path / FIRST)
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CheckpointError, match=f"{FIRST} has changed"):
        source.expert(0)


def test_a_config_that_changes_is_refused_for_the_next_block(tmp_path: Path) -> None:
    shutil.copytree(DATA / "kimi-k3-tiny", tmp_path / "tiny")
    checkpoint = Checkpoint(tmp_path / "tiny")
    checkpoint.block(1)
    later(tmp_path / "tiny" / "config.json")
    with pytest.raises(CheckpointError, match=r"config.json has changed"):
        checkpoint.block(1)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_an_index_or_config_that_changes_is_refused_for_the_next_layer(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(build.kimi_k3().write(tmp_path))
    _, source = checkpoint.experts(1)
    later(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} has changed"):
        checkpoint.experts(1)
    source.expert(0)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is gone"):
        checkpoint.experts(1)


def test_a_second_copy_that_appears_later_is_seen(tmp_path: Path) -> None:
    """The other shards are looked through once, and again when they have changed."""
    checkpoint = Checkpoint(build.kimi_k3().write(tmp_path))
    checkpoint.experts(1, range(1))
    second = tmp_path / build.SHARD.format(2)
    save_file(load_file(second) | {W1: torch.zeros(96, 32, dtype=torch.uint8)}, second)
    with pytest.raises(CheckpointError, match="is held by 2 files"):
        checkpoint.experts(1, range(1))


def test_short_reads_are_continued_and_failed_ones_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = opened(tmp_path), os.preadv
    whole = source.expert(2)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:100]], at))
    assert_same(source.expert(2), whole)

    def failing(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match=f"cannot read {KIMI_PREFIX}2.w1.* from .*{FIRST}: Input/output error"):
        source.expert(2)
    monkeypatch.setattr(os, "preadv", real)
    assert_same(source.expert(2), whole)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interrupted_load_starts_over(interruption: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the first attempt is left or reused, and the same checkpoint serves the second."""
    checkpoint = Checkpoint(DATA / "kimi-k3-tiny")
    spec, source = checkpoint.experts(1)
    calls: list[tuple[int, int]] = []

    def interrupt(done: int, total: int) -> None:
        calls.append((done, total))
        if done == 7:
            raise interruption

    with pytest.raises(interruption):
        RoutedExperts(spec, source, max_tokens=4, device="cpu", backend="torch", progress=interrupt)
    assert calls[-1] == (7, 16)
    read: list[int] = []
    real = CheckpointExperts.expert
    monkeypatch.setattr(CheckpointExperts, "expert", lambda self, i: (read.append(i), real(self, i))[1])
    again = RoutedExperts(spec, source, max_tokens=4, device="cpu", backend="torch")
    assert set(read) == set(range(16))
    x = torch.randn(4, spec.hidden_size).bfloat16()
    ids, weights = torch.randint(0, 16, (4, 4), dtype=torch.int32), torch.rand(4, 4)
    fresh = RoutedExperts(*load_experts(DATA / "kimi-k3-tiny", 1), max_tokens=4, device="cpu", backend="torch")
    assert torch.equal(again(x, ids, weights), fresh(x, ids, weights))


@pytest.mark.parametrize("builder", build.BUILDERS, ids=lambda builder: builder.__name__)
@pytest.mark.parametrize("ranks", [1, 3])
def test_experts_go_straight_into_a_stack(builder: Any, ranks: int, tmp_path: Path) -> None:
    checkpoint = builder()
    source = load_experts(checkpoint.write(tmp_path), checkpoint.layer, tensor_parallel=(ranks - 1, ranks))[1]
    stack = source.materialize()
    assert len(stack) == len(source)
    for index in range(len(source)):
        assert_same(stack.expert(index), source.expert(index))
    source.read_into(1, stack.expert(0))
    assert_same(stack.expert(0), source.expert(1))
    assert_same(stack.expert(1), source.expert(1))
    with pytest.raises(IndexError, match="local expert 4 of 4"):
        source.read_into(4, stack.expert(0))


def test_a_target_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = opened(tmp_path)
    target = source.expert(0)
    with pytest.raises(ValueError, match=r"out is torch.uint8 \(96, 32\) .*, expected torch.uint8 \(192, 32\)"):
        source.read_into(0, replace(target, w13=target.w13[:96]))
    with pytest.raises(ValueError, match=r"the target's w2_bias is torch.float32 .*, the checkpoint's absent"):
        source.read_into(0, replace(target, w2_bias=torch.zeros(64)))


def test_gate_and_up_of_different_files_go_straight_into_their_target_and_nowhere_else(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    whole = load_experts(checkpoint.write(tmp_path / "whole"), 1)[1].expert(0)
    checkpoint.places |= {name: build.SHARD.format(1 + (".w3." in name)) for name in checkpoint.tensors}
    source = load_experts(checkpoint.write(tmp_path / "split"), 1)[1]
    target = replace(whole, **{name: torch.zeros_like(getattr(whole, name)) for name in ("w13", "w2")})
    source.read_into(0, target)
    assert_same(target, whole)
    behind = torch.full((200, 32), 7, dtype=torch.uint8)
    for wrong in (behind[:96], behind[:192].int(), behind.repeat(1, 2)[:192, ::2]):
        with pytest.raises(ValueError, match=r"expected torch.uint8 \(192, 32\), contiguous"):
            source.read_into(0, replace(target, w13=wrong))
    assert bool((behind == 7).all())


@pytest.mark.parametrize("piece", [1, 40, 100])
def test_cut_columns_are_the_same_in_pieces_of_any_size(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build.kimi_k3().write(tmp_path)
    wanted = load_experts(directory, 1, tensor_parallel=(1, 3))[1].expert(1)
    monkeypatch.setattr(_shard, "_PIECE_BYTES", piece)
    assert_same(load_experts(directory, 1, tensor_parallel=(1, 3))[1].expert(1), wanted)


def test_files_are_closed_with_the_checkpoint(tmp_path: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("needs /proc")

    def held() -> list[Path]:
        links = [path.readlink() for path in descriptors.iterdir() if path.is_symlink()]
        return [link for link in links if link.is_relative_to(tmp_path)]

    source = opened(tmp_path)
    assert len(held()) == 2
    source.expert(0)
    del source
    assert held() == []


def test_nothing_is_mapped(tmp_path: Path) -> None:
    """Mapped pages count as this process's memory, which a layer's bytes must not."""
    source = opened(tmp_path)
    expert = source.expert(0)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()
    assert expert.w13.is_contiguous()


def test_the_index_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from portamoe.checkpoints import _safetensors

    shutil.copytree(DATA / "kimi-k3-tiny", tmp_path, dirs_exist_ok=True)
    checkpoint = Checkpoint(tmp_path)
    monkeypatch.setattr(_safetensors, "_weight_map", lambda path: pytest.fail("the index was read again"))
    found = {layer: checkpoint.experts(layer)[1].expert(3) for layer in (1, 2, 1)}
    monkeypatch.undo()
    for layer, expert in found.items():
        assert_same(expert, load_experts(tmp_path, layer)[1].expert(3))


def test_the_bar_counts_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from portamoe.checkpoints import _progress

    monkeypatch.setattr(_progress, "_DELAY", 0.0)
    spec, source = load_experts(DATA / "kimi-k3-tiny", 1)
    with loading_bar(spec, "layer 1") as progress:
        for index in range(len(source)):
            source.expert(index)
            time.sleep(0.02)
            progress(index + 1, len(source))
    shown = capsys.readouterr().err
    assert "layer 1" in shown
    assert "B/s" in shown
    assert "1.25M" in shown  # 16 experts of 3 · 256 · 192 · 17/32 bytes
