"""`portamoe bench` as far as no GPU is needed: cases, table, floor, refusals."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from portamoe.cli import _measure, bench, main  # noqa: E402

REPORT = {
    "device": "a GPU",
    "torch": "2",
    "date": "2026-01-01",
    "limits": {"read_tbs": 4.0},
    "rows": [
        {"case": "k3-ep8", "tokens": 1, "name": "floor", "us": 8.0, "bound": "memory"},
        {"case": "k3-ep8", "tokens": 1, "name": "fast", "us": 20.0, "wrong": False},
        {"case": "k3-ep8", "tokens": 1, "name": "liar", "us": 2.0, "wrong": True},
        {"case": "k3-ep8", "tokens": None, "name": "broken", "failed": "ImportError: no"},
    ],
}


def test_table_shows_ratio_to_the_floor_and_what_is_wrong_or_failed():
    text = bench.table(REPORT)
    assert "20.0 x2.50" in text
    assert "2.0 x0.25 WRONG" in text
    assert "broken k3-ep8 : ImportError: no" in text


def test_floor_counts_local_experts_and_rows_only():
    spec = _measure.CASES["k3-ep8"]
    ids = torch.tensor([[0, 1, 2, -1] + [500] * 12], dtype=torch.int32)
    inputs = _measure.Inputs(torch.zeros(1, spec.hidden_size), ids, torch.zeros(1, 16))
    us, bound = _measure.floor_us(spec, [inputs], {"read_tbs": 4.0, "matmul_tflops": 800.0})
    weights = 3 * 3 * 3584 * 3072 * 17 / 32
    assert bound == "memory"
    assert us == pytest.approx((weights + 4 * 3584) / 4.0e6)


def test_cases_are_listed(capsys):
    assert main(["bench", "--cases", "list"]) == 0
    assert "gptoss-situ" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench"]) == 2
    assert "portamoe verify" in capsys.readouterr().err


def test_unknown_case_and_count_are_refused():
    with pytest.raises(ValueError, match="k3-ep8"):
        bench._case("nothing")
    with pytest.raises(ValueError, match="positive"):
        bench._count("0")
