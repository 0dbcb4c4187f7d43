"""Files that are truncated, misplaced or no safetensors: a CheckpointError that names them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from portamoe.checkpoints import CheckpointError, load_experts
from tests import checkpoint_builders as build
from tests.checkpoint_builders import KIMI_PREFIX, edit_index

W1 = f"{KIMI_PREFIX}0.w1.weight_packed"
FIRST, SECOND = build.SHARD.format(1), build.SHARD.format(2)


def fail_written(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_experts(directory, 1)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (-1, "is truncated: it has [0-9]+ bytes, its header promises [0-9]+"),
        (100, r"is truncated: its 100 bytes end within the header \([0-9]+ bytes\)"),
        (5, "is truncated: its 5 bytes end within the header"),
        (0, "is truncated: its 0 bytes end within the header"),
    ],
)
def test_truncated_files(keep: int, message: str, sharded: bool, tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path, sharded=sharded)
    path = directory / (SECOND if sharded else "model.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    fail_written(directory, f"{path.name} {message}")
    if sharded:
        load_experts(directory, 1, range(1))  # expert 0 lies in the other shard


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "would start with a header of [0-9]+ bytes"),
        (struct.pack("<Q", 8) + b"not json", "header of .* is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "holds a JSON list, expected an object"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "describes a as {}"),
        (struct.pack("<Q", 18) + b'{"a": {}, "a": {}}', "holds 'a' more than once"),
        (struct.pack("<Q", 63) + b'{"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}   ' + bytes(2),
         "is no valid safetensors file"),
        (struct.pack("<Q", 63) + b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}   ' + bytes(3),
         "is no valid safetensors file"),
    ],
)  # fmt: skip
def test_files_that_are_no_safetensors(content: bytes, message: str, tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    (directory / FIRST).write_bytes(content)
    fail_written(directory, message)


def test_index_names_absent_files(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    (directory / SECOND).unlink()
    fail_written(directory, f"places 12 needed tensors in files that are not there: {SECOND}")


def test_index_places_a_tensor_in_the_wrong_shard(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    edit_index(directory, {W1: SECOND})
    fail_written(directory, f"{W1} is in {FIRST}, but the index places it in {SECOND}")
    load_experts(directory, 1, range(1, 4))


def test_index_names_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    directory = checkpoint.write(tmp_path)
    held = load_file(directory / FIRST)
    del held[W1]
    save_file(held, directory / FIRST)
    with pytest.raises(CheckpointError, match=f"{W1} is not in {FIRST}, where the index places it") as caught:
        load_experts(directory, 1)
    assert caught.value.missing == (W1,)


def test_index_leaves_a_tensor_out(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    edit_index(directory, {W1: None})
    fail_written(directory, f"{W1} is in {FIRST}, but the index does not list it")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    save_file(load_file(directory / SECOND) | {W1: torch.zeros(96, 32, dtype=torch.uint8)}, directory / SECOND)
    fail_written(directory, f"{W1} is held by 2 files: {FIRST}, {SECOND}")
    with pytest.raises(CheckpointError, match="held by 2 files"):  # the second copy lies where nothing else is needed
        load_experts(directory, 1, range(1))
    load_experts(directory, 1, range(1, 4))


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "x", "a": "y"}}', "{", "[]", "{}", '{"weight_map": []}'])
def test_indices_that_are_none(index: str, tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    (directory / "model.safetensors.index.json").write_text(index)
    fail_written(
        directory, "index.json (holds 'a' more than once|is not JSON|holds a JSON list|has no object 'weight_map')"
    )


def test_index_does_not_leave_the_folder(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    edit_index(directory, {W1: "../model.safetensors"})
    fail_written(directory, "names the file '../model.safetensors', expected a plain file name beside it")


def test_index_names_files_by_strings(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    edit_index(directory, {W1: 1})  # type: ignore[dict-item]
    fail_written(directory, "names files by int, expected strings")


def test_folders_without_the_files(tmp_path: Path) -> None:
    fail_written(tmp_path / "absent", "absent is no folder")
    directory = build.kimi_k3().write(tmp_path / "a")
    (directory / "model.safetensors.index.json").unlink()
    fail_written(directory, f"holds 2 safetensors files .{FIRST}, {SECOND}. but no model.safetensors.index.json")
    for path in directory.glob("*.safetensors"):
        path.unlink()
    fail_written(directory, "holds no safetensors file")
    (directory / "config.json").write_text("{")
    fail_written(directory, "config.json is not JSON")
    (directory / "config.json").unlink()
    fail_written(directory, "holds no config.json")
