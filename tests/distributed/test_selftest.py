"""The self-test's report and exit codes, with one gloo process; its checks on several ranks are in test_ranks.py."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from portamoe.distributed import RankError, _checks, selftest


@pytest.fixture
def torchrun(monkeypatch):
    """The environment that torchrun gives a single process, and few checks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in (environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(selftest, "CASES", [case for case in _checks.CASES if "exact: even" in case.name])
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


ARGUMENTS = ["--backend", "gloo", "--device", "cpu", "--layer-backend", "torch", "--spec", "tiny", "--repeats", "1"]


def test_report_has_checks_times_and_bytes(torchrun, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert selftest.main([*ARGUMENTS, "--tokens", "1", "3", "--json", str(file)]) == 0
    assert "2 of 2 checks passed" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["environment"]["transport"] == "gloo"
    assert [check["passed"] for check in report["checks"]] == [True, True]
    kinds = {(row["form"], row["combine"], row["tokens"]) for row in report["timings"]}
    assert len(kinds) == 8
    for row in report["timings"]:
        assert row["steps"]["experts"]["us"] > 0
        assert all(step["sent_bytes"] == 0 for step in row["steps"].values())  # to other ranks


def test_a_wrong_result_exits_1(torchrun, monkeypatch, capsys):
    monkeypatch.setattr(_checks, "whole", lambda layer, x, ids, weights: torch.zeros_like(x))
    assert selftest.main([*ARGUMENTS, "--tokens"]) == 1
    out = capsys.readouterr().out
    assert "FAIL all_to_all exact: even" in out
    assert "OTHER BITS" in out


def test_a_missing_rank_exits_3(torchrun, monkeypatch, capsys):
    def missing(*_):
        raise RankError("rank 1 is dead", (1,), "tokens")

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(selftest, "_run", missing)
    monkeypatch.setattr(selftest.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        selftest.main(ARGUMENTS)
    assert ended.value.code == 3
    assert "rank 1 is dead" in capsys.readouterr().err


def test_without_torchrun_or_gpu_it_exits_2(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert selftest.main([]) == 2
    assert "torchrun" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert selftest.main(["--backend", "nccl", "--device", "cpu"]) == 2
    assert "no such GPU" in capsys.readouterr().err
