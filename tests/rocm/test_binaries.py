"""Ranks that start together share the work of compiling, and nothing makes them wait for ever."""

from __future__ import annotations

import fcntl
import multiprocessing
import time

import pytest

pytest.importorskip("triton")
NAMES = [f"kernel-{i}" for i in range(12)]


def rank(folder, queue, barrier):
    from rocm_moe.binaries import share_work

    barrier.wait()
    compiled = 0
    for name in share_work(NAMES, lambda name: folder / f"{name}.lock"):
        if not (folder / name).exists():
            time.sleep(0.1)  # compiling
            (folder / name).touch()
            compiled += 1
    queue.put(compiled)


def test_four_ranks_compile_each_kernel_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue, barrier = context.Queue(), context.Barrier(4)
    ranks = [context.Process(target=rank, args=(tmp_path, queue, barrier)) for _ in range(4)]
    for process in ranks:
        process.start()
    counts = [queue.get(timeout=120) for _ in ranks]
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert sum(counts) == len(NAMES), "no kernel was compiled twice"
    assert max(counts) < len(NAMES), "more than one rank worked"


def test_a_lock_that_is_never_given_back_delays_but_does_not_stop(tmp_path):
    from rocm_moe.binaries import share_work

    with (tmp_path / "b.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        order = list(share_work(["a", "b", "c"], lambda name: tmp_path / f"{name}.lock", patience=0.3))
    assert order == ["a", "c", "b"]
    assert 0.25 < time.monotonic() - start < 10


def test_a_folder_that_cannot_be_written_needs_no_lock(tmp_path):
    from rocm_moe.binaries import share_work

    blocked = tmp_path / "file"
    blocked.touch()
    assert list(share_work(["a", "b"], lambda name: blocked / f"{name}.lock")) == ["a", "b"]
