"""`portamoe bench --gemm` as far as no GPU is needed: arguments, table, and the plan of a tuning run."""

from __future__ import annotations

import argparse
import json

import pytest

torch = pytest.importorskip("torch")

from cuda_moe.skinny.parameters import TritonGemv, TritonMma  # noqa: E402
from cuda_moe.skinny.plan import Choice, read_plan  # noqa: E402
from cuda_moe.skinny.tuning import candidates, document, to_json  # noqa: E402
from portamoe.cli import gemm, main  # noqa: E402
from portamoe.cli.bench import DEFAULT_TOKENS  # noqa: E402
from portamoe.linear_provider import Timed, providers  # noqa: E402
from tests.host_recordings import recorded  # noqa: E402

ABOUT = {"device": "a GPU", "date": "2026-01-01", "command": "portamoe bench --gemm --tune"}
FAST, SLOW = Choice("triton_gemv", TritonGemv(2, 4, 1)), Choice("triton_mma", TritonMma())


def test_a_plan_keeps_the_fastest_of_each_implementation_that_gains_5_percent(tmp_path):
    torch_us = {(1536, 7168, 1): 10.0, (1536, 7168, 4): 10.0, (1536, 7168, 8): 10.0, (3584, 7168, 1): 20.0}
    timed = [
        Timed(1536, 7168, 1, SLOW, 9.0),
        Timed(1536, 7168, 1, FAST, 8.0),
        Timed(1536, 7168, 4, SLOW, 9.53),  # 4.9 %
        Timed(1536, 7168, 8, SLOW, 9.52),  # 5 %
    ]
    path = tmp_path / "sm90.json"
    path.write_text(to_json(document("sm90", ABOUT, timed, torch_us)), encoding="utf-8")
    plan = read_plan(path)
    entries = plan.entries[1536, 7168]
    assert [(e.first, e.last, e.choices[0].kernel) for e in entries] == [(1, 1, "triton_gemv"), (5, 8, "triton_mma")]
    assert entries[0].choices == (Choice("triton_gemv", TritonGemv(2, 4, 1), 8.0),)
    assert plan.entries[3584, 7168] == ()
    assert plan.line() == "sm90: measured (a GPU, 2026-01-01), 2 projections"


@pytest.mark.parametrize(("n", "k", "m"), [(1536, 7168, 1), (7168, 768, 16), (3072, 128, 4)])
def test_candidates_can_compute_the_shape(n, k, m):
    found = candidates(n, k, m)
    assert found
    assert len(found) == len(set(found))
    for choice in found:
        choice.parameters.check(n, k, m)
    assert {"triton_mma"} <= {choice.kernel for choice in found} if k > 128 else True
    assert ("triton_gemv" in {choice.kernel for choice in found}) == (m <= 8)


def test_the_provider_names_the_file_that_its_plan_is_read_from(tmp_path, monkeypatch):
    device = recorded("h200").devices[0]
    provider = providers(device)[0]
    name, text = provider.plan(device, ABOUT, [Timed(1536, 7168, 1, FAST, 8.0)], {(1536, 7168, 1): 10.0})
    (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("PORTAMOE_TUNED_DIR", str(tmp_path))
    assert provider.shapes(device) == ((1536, 7168),)
    assert json.loads(text)["origin"] == "measured"


def test_table_shows_gain_share_and_what_is_wrong():
    rows = [
        {"n": 1536, "k": 7168, "tokens": 1, "torch_us": 10.0, "floor_us": 5.0, "plan": "triton_gemv", "us": 8.0},
        {"n": 1536, "k": 7168, "tokens": 8, "torch_us": 10.0, "floor_us": 5.0, "plan": "triton_mma", "us": 8.0},
        {"n": 1536, "k": 7168, "tokens": 16, "torch_us": 10.0, "floor_us": 5.0},
    ]
    rows[0]["wrong"], rows[1]["wrong"] = False, True
    text = gemm.table({"device": "a GPU", "torch": "2", "date": "today", "read_tbs": 4.5, "rows": rows})
    lines = [line.split() for line in text.splitlines()]
    assert lines[2][-4:] == ["triton_gemv", "8.0", "1.25", "62%"]
    assert lines[3][-5:] == ["triton_mma", "WRONG", "8.0", "1.25", "62%"]
    assert text.splitlines()[-1].split() == ["1536x7168", "16", "5.0", "10.0", "torch", "-", "-", "50%"]


def test_arguments_are_refused_with_what_came():
    assert gemm._shapes("1536x7168,7168x768") == ((1536, 7168), (7168, 768))
    with pytest.raises(ValueError, match="'1536'"):
        gemm._shapes("1536")
    with pytest.raises(ValueError, match="17"):
        gemm._rows_of(argparse.Namespace(tokens="1,17"))
    assert gemm._rows_of(argparse.Namespace(tokens=DEFAULT_TOKENS)) == gemm.ROWS


def test_tuning_needs_a_folder(monkeypatch):
    monkeypatch.delenv("PORTAMOE_TUNED_DIR", raising=False)
    with pytest.raises(ValueError, match="PORTAMOE_TUNED_DIR"):
        gemm._tuned_folder()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "--gemm"]) != 0
    assert "times a GPU" in capsys.readouterr().err
