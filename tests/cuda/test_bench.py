"""`portamoe bench` as far as no GPU is needed: cases, table, floor, refusals."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from portamoe import registry  # noqa: E402
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


class Report:
    def lines(self):
        return ["stream 1.3 TB/s"]

    def to_dict(self):
        return {"stream": 1.3}


class Measuring:
    """A backend with limits to measure and no tiles."""

    name = "measuring"

    def measure_limits(self, spec, device):
        assert (spec.hidden_size, str(device)) == (2880, "cuda:0")
        return Report()


@pytest.fixture
def measuring(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(registry, "named", lambda name: Measuring() if name == "measuring" else None)


def test_limits_are_the_backends_own(measuring, capsys, tmp_path):
    file = tmp_path / "limits.json"
    arguments = ["bench", "--limits", "--backend", "measuring", "--spec", "gpt-oss", "--json", str(file)]
    assert main(arguments) == 0
    assert "stream 1.3 TB/s" in capsys.readouterr().out
    assert json.loads(file.read_text())["measuring.measure_limits"] == {"stream": 1.3}


def test_what_a_backend_does_not_measure_is_refused(measuring, capsys):
    assert main(["bench", "--tune", "--backend", "measuring"]) == 2
    assert "measuring measures no tiles" in capsys.readouterr().err
    assert main(["bench", "--tune", "--backend", "nobody"]) == 2
    assert "unknown backend 'nobody'" in capsys.readouterr().err


def test_a_harness_file_gives_the_rows_of_a_report():
    from benchmarks.plots import rows_of

    rows = rows_of(
        {
            "problems": [{"case": "a", "M": 4, "floor_us": 2.0}],
            "results": [
                {"case": "a", "M": 4, "peer": "marlin", "us": 5.0, "rel_err": 0.004},
                {"case": "a", "M": 4, "peer": "plug:triton_fused", "us": 3.0, "rel_err": float("nan")},
            ],
        }
    )
    assert [row["name"] for row in rows] == ["floor", "peer:marlin", "triton_fused"]
    assert [row.get("wrong") for row in rows] == [None, False, True]


def test_plot_leaves_wrong_results_out(tmp_path):
    pytest.importorskip("matplotlib")
    from portamoe.cli._plot import plot

    plot(REPORT, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "fast" in text
    assert "liar" not in text
