"""`portamoe bench` as far as no GPU is needed: cases, table, floor, refusals."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from portamoe import registry  # noqa: E402
from portamoe.activations import SiTU  # noqa: E402
from portamoe.cli import _cases, _measure, bench, main  # noqa: E402
from portamoe.cli._report import Report, best_peer, table  # noqa: E402
from portamoe.spec import MoESpec  # noqa: E402

REPORT = {
    "device": "a GPU",
    "torch": "2",
    "date": "2026-01-01",
    "limits": {"read_tbs": 4.0},
    "rows": [
        {"case": "k3-ep8", "tokens": 1, "name": "floor", "us": 8.0, "bound": "memory"},
        {"case": "k3-ep8", "tokens": 1, "name": "fast", "us": 20.0, "wrong": False},
        {"case": "k3-ep8", "tokens": 1, "name": "liar", "us": 2.0, "wrong": True},
        {"case": "k3-ep8", "tokens": 1, "name": "peer:slow", "us": 40.0, "wrong": False},
        {"case": "k3-ep8", "tokens": 1, "name": "peer:liar", "us": 1.0, "wrong": True},
        {"case": "k3-ep8", "tokens": None, "name": "broken", "failed": "ImportError: no"},
    ],
}


def test_table_shows_the_ratios_and_what_is_wrong_or_failed():
    text = table(REPORT)
    assert "20.0 x2.50 /0.50" in text
    assert "2.0 x0.25 /0.05 WRONG" in text
    assert text.splitlines()[2].endswith("40.0 slow")
    assert "broken k3-ep8 : ImportError: no" in text


def test_a_wrong_peer_is_no_best_one():
    assert best_peer(REPORT["rows"])["name"] == "peer:slow"
    assert best_peer(REPORT["rows"][:3] + REPORT["rows"][4:]) is None


def test_work_counts_local_experts_and_rows_only():
    spec = _cases.CASES["k3-ep8"]
    ids = torch.tensor([[0, 1, 2, -1] + [500] * 12], dtype=torch.int32)
    inputs = _cases.Inputs(torch.zeros(1, spec.hidden_size), ids, torch.zeros(1, 16))
    work = _cases.work(spec, [inputs], {"read_tbs": 4.0, "matmul_tflops": 800.0})
    weights = 3 * 3 * 3584 * 3072 * 17 / 32
    assert (work["bound"], work["rows"], work["experts"]) == ("memory", 3, 3)
    assert work["us"] == pytest.approx((weights + 4 * 3584) / 4.0e6, abs=0.01)


CPU = torch.device("cpu")


@pytest.mark.parametrize("layer", ["k3-ep8", "k3-ep16", "k3-ep32"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_few_tokens_get_the_ranks_share_exactly(layer, tokens):
    spec = _cases.CASES[layer]
    share = max(1, round(tokens * spec.top_k * spec.num_local_experts / spec.num_experts))
    for inputs in _cases.make_inputs(spec, 1.0, tokens, "uniform", CPU):
        assert int((inputs.topk_ids < spec.num_local_experts).sum()) == share


def test_one_sided_routing_keeps_every_pair_here():
    spec = _cases.CASES["k3-ep32"]
    (inputs,) = _cases.make_inputs(spec, 1.0, 300, "one-sided", CPU)
    assert int(inputs.topk_ids.max()) < 28
    assert int(inputs.topk_ids.min()) >= 0


def test_skewed_routing_loads_a_few_experts_of_any_rank():
    spec = _cases.CASES["k3-ep8"]
    (inputs,) = _cases.make_inputs(spec, 1.0, 512, "skew", CPU)
    assert all(len(row.unique()) == spec.top_k for row in inputs.topk_ids[:20])
    counts = torch.bincount(inputs.topk_ids.flatten(), minlength=spec.num_experts)
    assert int(counts.max()) > 20 * counts.float().mean()
    assert 0.08 < float(counts[:112].sum() / counts.sum()) < 0.25
    again = _cases.make_inputs(spec, 1.0, 512, "skew", CPU)[0]
    assert torch.equal(again.topk_ids, inputs.topk_ids)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench"]) == 2
    assert "portamoe verify" in capsys.readouterr().err


def test_unknown_case_and_count_are_refused():
    with pytest.raises(ValueError, match="k3-ep8"):
        _cases.case("nothing")
    with pytest.raises(ValueError, match="k3-ep8"):
        _cases.case("k3-ep8_skewed")
    with pytest.raises(ValueError, match="every expert on this rank"):
        _cases.case("k3-tp8_one-sided")
    with pytest.raises(ValueError, match="positive"):
        bench._count("0")


class Evidence:
    def lines(self):
        return ["stream 1.3 TB/s"]

    def to_dict(self):
        return {"stream": 1.3}


class Measuring:
    """A backend with limits to measure and no tiles."""

    name = "measuring"

    def measure_limits(self, spec, device):
        assert (spec.hidden_size, str(device)) == (2880, "cuda:0")
        return Evidence()


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


TINY = MoESpec(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, activation=SiTU(4.0, 25.0))
PEERS = """
import neighbour

def right(weights, spec):
    from portamoe.reference import moe_reference
    from portamoe.cli._cases import CASES
    assert (spec.hidden, spec.experts, spec.local_experts, spec.local_rows(8)) == (64, 8, 4, 8)
    return lambda x, ids, w: moe_reference(CASES["tiny"], weights, x, ids, w).to(x.dtype) * neighbour.one

def wrong(weights, spec):
    forward = right(weights, spec)
    return lambda x, ids, w: forward(x, ids, w) * 1.1

def broken(weights, spec):
    raise ImportError("no such wheel")

def falls(weights, spec):
    return lambda x, ids, w: 1 / 0

PEERS = {"right": right, "wrong": wrong, "broken": broken, "falls": falls}

def use_payload(folder):
    neighbour.one = float(folder)
"""


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    """The whole command on a CPU: events and graphs, which need a GPU, are replaced by a clock of steps."""
    monkeypatch.setitem(_cases.CASES, "tiny", replace(TINY, local_experts=range(4)))
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "peers.py").write_text(PEERS)
    (tmp_path / "peers" / "neighbour.py").write_text("one = 0.0\n")
    path = list(sys.path)

    def time_graph(call, sets):
        first = call(*sets[0])
        return _measure.Timing(10.0 * len(first), 9.0, 5, repeats=True, finite=True, first=first)

    monkeypatch.setattr(_measure, "time_graph", time_graph)
    monkeypatch.setattr(_measure, "eager_us", lambda call, inputs, calls: 1.0)
    monkeypatch.setattr(_measure, "peak_bytes", lambda action: 7)
    monkeypatch.setattr(_measure, "launches", lambda action: 3)
    monkeypatch.setattr(_measure, "limits", lambda device: {"read_tbs": 1e-3, "matmul_tflops": 1.0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield tmp_path
    sys.path[:] = path
    for name in ("peers", "neighbour"):
        sys.modules.pop(name, None)


def arguments(folder, *more, tokens="1,8"):
    where = ["--device", "cpu", "--backend", "torch", "--peers", str(folder / "peers"), "--payload", "1.0"]
    return ["bench", "--cases", "tiny,tiny_skew,tiny_one-sided", "--tokens", tokens, *where, *more]


def test_backends_and_a_folder_of_peers_side_by_side(on_the_cpu, capsys):
    file = on_the_cpu / "new" / "out.json"
    assert main(arguments(on_the_cpu, "--json", str(file))) == 0
    report = json.loads(file.read_text())
    rows = {(row["case"], row["tokens"], row["name"]): row for row in report["rows"]}
    for case in ("tiny", "tiny_skew", "tiny_one-sided"):
        for tokens in (1, 8):
            own, right = rows[case, tokens, "torch"], rows[case, tokens, "peer:right"]
            assert (own["wrong"], right["wrong"], own["launches"], right["peak_bytes"]) == (False, False, 3, 7)
            assert own["over_peer"] == 1.0
            assert own["over_floor"] == pytest.approx(own["us"] / rows[case, tokens, "floor"]["us"], abs=1e-3)
            assert rows[case, tokens, "peer:wrong"]["wrong"]
            assert "ZeroDivisionError" in rows[case, tokens, "peer:falls"]["failed"]
    assert "no such wheel" in rows["tiny", None, "peer:broken"]["failed"]
    assert rows["tiny_one-sided", 8, "floor"]["rows"] == 16
    assert "--peers peers" in report["command"]
    assert str(on_the_cpu) not in report["command"]
    assert "WRONG" in capsys.readouterr().out


def test_a_case_can_have_tokens_of_its_own():
    cells = [(case.name, tokens) for case, tokens in bench._wanted("k3-ep8,k3-ep8_skew@2+8,k3-ep8@1+3", "1,4")]
    assert cells == [("k3-ep8", 1), ("k3-ep8", 4), ("k3-ep8_skew", 2), ("k3-ep8_skew", 8), ("k3-ep8", 3)]
    with pytest.raises(ValueError, match="positive"):
        bench._wanted("k3-ep8@2+x", "1")


def test_peers_can_be_picked(on_the_cpu, capsys):
    assert main(arguments(on_the_cpu, "--peer", "right", tokens="1")) == 0
    assert "peer:wrong" not in capsys.readouterr().out
    assert main(arguments(on_the_cpu, "--peer", "nobody", tokens="1")) == 2
    assert "known: right" in capsys.readouterr().err


def test_peers_that_cannot_run_a_case_say_why(on_the_cpu, monkeypatch, capsys):
    monkeypatch.setitem(_cases.CASES, "tiny", replace(TINY, local_experts=range(4), bias=True))
    assert main(arguments(on_the_cpu, tokens="1")) == 0
    assert "peer:right tiny : ValueError: peers are timed on MXFP4 weights, without biases" in capsys.readouterr().out


def test_compiling_ahead_times_nothing(on_the_cpu, monkeypatch, capsys):
    monkeypatch.setattr(_measure, "time_graph", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(_measure, "limits", lambda *_: pytest.fail("measured"))
    file = on_the_cpu / "out.json"
    assert main(arguments(on_the_cpu, "--compile", "--peer", "right", "--json", str(file))) == 0
    assert not file.exists()
    assert main(arguments(on_the_cpu, "--compile", "--peer", "falls")) == 1
    assert "peer:falls: ZeroDivisionError" in capsys.readouterr().out


def test_a_run_that_is_cut_off_keeps_its_rows(on_the_cpu, monkeypatch):
    seen = []

    def stops(call, inputs, calls):
        seen.append((inputs, calls))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(_measure, "eager_us", stops)
    file = on_the_cpu / "out.json"
    assert main(arguments(on_the_cpu, "--peer", "right", "--json", str(file))) == 130
    rows = json.loads(file.read_text())["rows"]
    assert [(r["tokens"], r["name"]) for r in rows if "us" in r and r["name"] != "floor"] == [
        (1, "torch"),
        (1, "peer:right"),
        (8, "torch"),
    ]


def test_a_module_of_peers_must_name_some(on_the_cpu, capsys):
    (on_the_cpu / "peers" / "peers.py").write_text("")
    assert main(arguments(on_the_cpu)) == 2
    assert "names no PEERS" in capsys.readouterr().err
    (on_the_cpu / "peers" / "peers.py").unlink()
    assert main(arguments(on_the_cpu)) == 2
    assert "no peers.py" in capsys.readouterr().err


def test_a_wrong_or_missing_backend_is_a_failure():
    fine = {"name": "torch", "us": 1.0, "wrong": False}
    assert not Report({}, None, [fine, {"name": "peer:x", "us": 1.0, "wrong": True}]).failed
    assert Report({}, None, [fine, {"name": "other", "us": 1.0, "wrong": True}]).failed
    assert Report({}, None, [fine, {"name": "other", "failed": "ImportError"}]).failed
    assert Report({}, None, [{"name": "floor", "us": 1.0}]).failed


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
