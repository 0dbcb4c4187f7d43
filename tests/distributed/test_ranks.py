"""Experts over 2 and 4 gloo processes against one process, and what survivors of a dead or slow rank are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
#: As in worker.py, with room for a loaded runner in which a second is late.
TIMEOUT, LATE = 5.0, 1.0
LIMIT = 120.0


def start(scenario: str, size: int):
    """Run a scenario; return per rank its result (None without one) and its exit code."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives any rank
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'common'}:{ROOT}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), scenario, str(rank), str(size), str(store.port)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    return store, ranks


def finish(ranks, waited_for=None):
    out = []
    try:
        for rank, process in enumerate(ranks):
            if waited_for is not None and rank not in waited_for:
                out.append(None)
                continue
            stdout, stderr = process.communicate(timeout=LIMIT)
            lines = [line for line in stdout.splitlines() if line.startswith("RESULT ")]
            if not lines and process.returncode != -9:
                raise AssertionError(f"rank {rank} ended with {process.returncode}:\n{stdout}{stderr}")
            out.append(json.loads(lines[0].removeprefix("RESULT ")) if lines else None)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return out


def results(scenario, size, waited_for=None):
    _store, ranks = start(scenario, size)
    return finish(ranks, waited_for)


@pytest.mark.parametrize(("scenario", "size", "count"), [("checks", 2, 39), ("some_checks", 4, 13)])
def test_every_form_and_routing_gives_the_result_of_one_process(scenario, size, count):
    everyone = results(scenario, size)
    assert len(everyone[0]) == count
    for rank, checked in enumerate(everyone):
        for name, result in checked.items():
            assert result["passed"], (rank, name, result)
            assert result["bitwise"] or not result["promised"], (rank, name, result)
    promised = [name for name, result in everyone[0].items() if result["promised"]]
    assert sum("exact" in name for name in promised) == len(promised) >= 8


@pytest.fixture(scope="module")
def further():
    """What both ranks say in three smaller scenarios, started once."""
    return results("further", 2)


def test_exact_sums_have_the_bits_of_one_plain_call_in_every_dtype(further):
    for rank, said in enumerate(further):
        assert len(said["plain"]) == 12
        assert all(said["plain"].values()), (rank, said["plain"])


def test_a_skewed_call_stays_within_its_buffers(further):
    for rank, said in enumerate(further):
        assert said["bounded"] == {"all_to_all": [True] * 3, "all_gather": [True] * 3}, rank


def test_ranks_that_do_not_fit_are_refused_by_name(further):
    for rank, everything in enumerate(further):
        said = everything["refused"]
        assert f"form is {'all_gather' if rank else 'all_to_all'} on rank {1 - rank}" in said["form"]
        assert "expert 0 is on ranks 0 and 1" in said["overlap"]
        assert "expert 5 of 19 is on no rank" in said["gap"]
        assert "within 1 … 128" in said["window"]
        dtypes = ["torch.bfloat16", "torch.float16"]
        assert f"with x of {dtypes[1 - rank]}, rank {rank} is in call" in said["dtypes"]
        assert f"with x of {dtypes[rank]}; all ranks must make the same calls" in said["dtypes"]
        layers = [int(part.split(",")[0]) for part in said["layers"].split("of layer ")[1:]]
        assert abs(layers[0] - layers[1]) == 1
        named = [part.split(",")[0] for part in said["own_groups"].split("RankGroup ")[1:]]
        assert len(set(named)) == 2, said["own_groups"]
        assert f"tensor_group is {'none' if rank else 'slice 0 of 1'} on rank {1 - rank}" in said["tensor_group"]
        kinds = "rank 0 has 0 tokens of torch.bfloat16; rank 1 has 3 tokens of torch.bfloat16"
        assert kinds in said["tokens"], said["tokens"]
        assert "topk_weights requires a gradient, but ExpertParallel is for inference" in said["gradient"]
        assert rank == 0 or "topk_ids has shape (3, " in said["caught"]
        theirs, ours = (int(part.split(",")[0]) for part in said["after"].split("is in call ")[1:])
        assert theirs - ours == (-1 if rank else 1), said["after"]


@pytest.mark.parametrize(
    ("scenario", "size", "culprit", "why"),
    [
        ("killed", 3, 1, "is dead or stopped, last seen at step 'sum' of call 1"),
        ("killed_within", 2, 0, "is dead or stopped, last seen at step 'experts' of call 2"),
        ("stalled", 2, 1, "is alive but slow, still at step 'sum' of call 1"),
    ],
)
def test_survivors_name_the_missing_rank_within_the_time_out(scenario, size, culprit, why):
    survivors = [rank for rank in range(size) if rank != culprit]
    everyone = results(scenario, size, survivors)
    step = "combine" if scenario == "killed_within" else "tokens"
    for rank in survivors:
        told = everyone[rank]
        assert told["ranks"] == [culprit], told
        assert f"rank {culprit} {why}" in told["message"], told
        assert told["step"] == step, told
        assert f"step '{step}' of call 2 failed on rank {rank}" in told["message"], told
        assert told["seconds"] <= TIMEOUT + LATE, told
        assert told["again"].startswith("the group is broken"), told
