"""The canary finds every fault that libraries have had, and the choice of a backend follows what it found."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch

from portamoe import canary, registry, verdicts
from portamoe.acceptance.checklist import ACTIVATIONS
from portamoe.activations import GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep
from portamoe.alternatives import Alternative, alternatives, label
from portamoe.canary import CanaryFault, canary_problem, cases_of, judge, references, token_buckets
from portamoe.decision import Accepted, BackendRejected, Rejected
from portamoe.dispatch import choose_verified
from portamoe.layer import RoutedExperts
from portamoe.spec import MoESpec
from portamoe.testing import assert_close, error_metrics, make_problem, tolerance_of
from tests import faulty_backends as faulty
from tests.host_recordings import device

CPU = torch.device("cpu")
SITU = SiTU(beta=4.0, linear_beta=25.0)
SPEC = MoESpec(hidden_size=64, intermediate_size=96, num_experts=8, top_k=3, activation=SITU)
HERE = device("cpu", "cpu")


def run(backend, spec=SPEC, max_tokens=16):
    return canary.run(backend, spec, cases_of(backend, spec, max_tokens), CPU)


def result(verdict) -> str:
    return "passed" if verdict.passed else str(verdict.reason.value)


# --- the problem ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=label)
def test_the_problem_reaches_where_activations_differ(activation):
    spec = replace(SPEC, activation=activation)
    problem = canary_problem(spec)
    seen = []
    keep = faulty.Formula(lambda g, u: seen.append((g, u)) or g)
    replace(problem, spec=replace(spec, activation=keep)).reference()
    gate, up = (torch.cat([pair[half] for pair in seen]) for half in (0, 1))
    for values in (gate, up):
        assert values.min() < -40
        assert values.max() > 40
        assert (values.abs() < 1).any()
    assert (problem.topk_ids == -1).sum() == 1
    assert len(problem.x) == canary.TOKENS


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "bf16"])
def test_neighbouring_experts_have_scales_of_their_own(weight_format):
    w = canary_problem(replace(SPEC, weight_format=weight_format)).weights
    name = {"mxfp4": "w2_scale", "nvfp4": "w2_global_scale", "bf16": "w2"}[weight_format]
    sizes = [getattr(w, name)[e].double().abs().mean() for e in range(6)]
    for e in range(5):
        assert abs(sizes[e] - sizes[e + 1]) > (0.5 if weight_format == "mxfp4" else 0.15 * sizes[e])


def test_every_call_size_meets_every_token():
    for tokens in (1, 2, 3, 7, 16, 19, 20, 21, 64):
        rows = torch.cat(list(canary._rows(tokens, CPU)))
        assert set(rows.tolist()) == set(range(canary.TOKENS))
        assert len(rows) % tokens == 0


def test_buckets_are_powers_of_two_and_one_more():
    assert token_buckets(1) == (1,)
    assert token_buckets(9) == (1, 2, 3, 4, 5, 8, 9)
    assert token_buckets(100) == (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100)


def test_the_formulas_run_as_the_reference_does():
    for spec in (
        SPEC,
        replace(SPEC, bias=True),
        replace(SPEC, local_experts=range(2, 5)),
        replace(SPEC, activation_format="mxfp8"),
        replace(SPEC, weight_format="nvfp4", activation_format="nvfp4"),
    ):
        problem = canary_problem(spec)
        same = canary._with_formulas(problem, (Alternative("same", spec.activation),))["same"]
        row = spec.activation_format if spec.activation_format != "bf16" else "float32"
        assert_close(same, problem.reference(), roundings=row)


# --- telling right from wrong -----------------------------------------------------------------------------------------

#: What no result in bf16 tells apart at any pre-activation: they differ by less than its rounding.
INDISTINCT = {
    SwiGLU(limit=7.0): {"SwiGLUStep(limit=7.0)"},
    SwiGLUStep(limit=7.0): {"SwiGLU(limit=7.0)"},
    GeGLU(): {"GeGLU(approximate='tanh')"},
    GeGLU(approximate="tanh"): {"GeGLU(approximate='none')"},
}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=label)
def test_each_activation_is_told_from_every_alternative(activation):
    spec = replace(SPEC, activation=activation)
    known, rows = references(spec, CPU), torch.arange(canary.TOKENS)
    assert set(judge(known.truth.bfloat16(), rows, known, "bf16_1")) == INDISTINCT.get(activation, set())
    for name, other in known.others.items():
        if name not in INDISTINCT.get(activation, set()):
            with pytest.raises(CanaryFault, match=r"computed .* instead of") as fault:
                judge(other.bfloat16(), rows, known, "bf16_1")
            named = re.match("computed (.*) instead of", str(fault.value))[1]
            # Another name only where both are nearer than bf16 rounds (1.7e-3): min(silu(g), 7) and silu(min(g, 7)).
            assert named == name or error_metrics(known.others[named], other).rms < 1e-3


def test_a_right_result_is_four_times_nearer_to_the_reference(monkeypatch):
    """Also where a wide tolerance would let it pass: a little less than a fifth of the way is near enough."""
    monkeypatch.setattr(canary, "assert_close", lambda *_, **__: None)
    known, rows = references(SPEC, CPU), torch.arange(canary.TOKENS)
    other = known.others["SwiGLU"]
    judge(torch.lerp(known.truth, other, 0.19), rows, replace(known, others={"SwiGLU": other}), "bf16_1")
    with pytest.raises(CanaryFault, match="cannot be told from SwiGLU, asked for SiTU: relative RMS"):
        judge(torch.lerp(known.truth, other, 0.21), rows, replace(known, others={"SwiGLU": other}), "bf16_1")


@pytest.mark.parametrize("activation_format", ["mxfp8", "mxfp4", "nvfp4"])
def test_quantised_activations_are_compared_with_the_quantised_reference(activation_format):
    weight_format = "nvfp4" if activation_format == "nvfp4" else "mxfp4"
    spec = replace(SPEC, weight_format=weight_format, activation_format=activation_format)
    assert result(run(faulty.Right(), spec)) == "passed"

    class Unquantised(faulty.Right):
        def spec(self, prepared, tokens):
            return replace(prepared.spec, activation_format="bf16")

    assert "computed something else" in result(run(Unquantised(), spec))
    assert result(run(faulty.Computes(SwiGLU()), spec)).startswith("computed SwiGLU instead of SiTU: ")
    assert result(run(faulty.Computes(SiTU(beta=4.0)), spec)).startswith("computed SiTU without linear_beta instead")


@pytest.mark.parametrize("row", [0, canary._CHUNK, 2 * canary._CHUNK + 5])
def test_every_row_of_a_large_call_is_judged(row):
    known = references(SPEC, CPU)
    rows = torch.arange(2 * canary._CHUNK + 20) % canary.TOKENS
    y = known.truth[rows].bfloat16()
    judge(y, rows, known, "bf16_1")
    y[row] = known.others["SwiGLU"][rows[row]].bfloat16()
    with pytest.raises(CanaryFault, match=r"computed SwiGLU instead of SiTU in 1 of \d+ rows"):
        judge(y, rows, known, "bf16_1")


def test_a_wrong_scale_or_slice_is_no_activation():
    assert result(run(faulty.MixesScales())).startswith(
        "computed something else instead of SiTU(beta=4.0, linear_beta=25.0): relative RMS"
    )


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (SwiGLU(), "SwiGLU"),
        (GeGLU(), "GeGLU(approximate='none')"),
        (ReLU2(), "ReLU2"),
        (SwiGLUOAI(alpha=1.702, limit=7.0), "SwiGLUOAI(alpha=1.702, limit=7.0, offset=1.0)"),
        (SiTU(beta=4.0), "SiTU without linear_beta"),
        (SiTU(beta=25.0, linear_beta=4.0), "SiTU(beta=25.0, linear_beta=4.0)"),
        (faulty.Formula(lambda g, u: SITU(u, g)), "SiTU with the halves swapped"),
    ],
)
def test_the_reason_names_what_was_computed(activation, name):
    asked = label(SITU) if name.startswith("SiTU ") else "SiTU"
    assert result(run(faulty.Computes(activation))).startswith(f"computed {name} instead of {asked}: relative RMS ")


def test_the_whole_text_of_a_rejection():
    reason = run(faulty.Computes(SwiGLU())).reason
    assert re.fullmatch(
        r"canary: computed SwiGLU instead of SiTU: relative RMS [\d.]+ to the one asked for, 0\.00\d+ to the other "
        r"\(at 1 tokens\) \(needs the reference's numbers\); use another backend; PORTAMOE_CANARY=force checks again",
        str(reason),
    )
    assert reason.to_dict()["what"] == "canary"


def test_the_alternatives_are_what_their_names_say():
    g, u = torch.meshgrid(torch.linspace(-50, 50, 201), torch.linspace(-50, 50, 201), indexing="ij")
    oai = {a.name: a.formula for a in alternatives(SwiGLUOAI(alpha=1.702, limit=7.0))}
    gc, uc = g.clamp(max=7), u.clamp(-7, 7)
    for name, gate, up in (
        ("SwiGLUOAI without its clamps", g, u),
        ("SwiGLUOAI without the clamp of the gate", g, uc),
        ("SwiGLUOAI without the clamp of up", gc, u),
    ):
        torch.testing.assert_close(oai[name](g, u), (up + 1) * gate * (1.702 * gate).sigmoid(), rtol=1e-4, atol=1e-4)
    step = {a.name: a.formula for a in alternatives(SwiGLUStep(limit=0.5))}
    silu = g * g.sigmoid()
    without_up = step["SwiGLUStep without the clamp of up"](g, u)
    torch.testing.assert_close(without_up, silu.clamp(max=0.5) * u, rtol=1e-4, atol=1e-4)
    without_gate = step["SwiGLUStep without the clamp of the gate"](g, u)
    torch.testing.assert_close(without_gate, silu * u.clamp(-0.5, 0.5), rtol=1e-4, atol=1e-4)
    situ = {a.name: a.formula for a in alternatives(SITU)}
    torch.testing.assert_close(situ["SiTU without beta"](g, u), silu * 25 * (u / 25).tanh(), rtol=1e-4, atol=1e-4)
    soft = 4 * (g / 4).tanh() * (g / 4).sigmoid() * 25 * (u / 25).tanh()
    torch.testing.assert_close(situ["SiTU with sigmoid(g / beta)"](g, u), soft, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", [faulty.ServesMinusOne(0), faulty.ServesMinusOne(7)], ids=["first", "last"])
def test_a_slot_of_minus_one_must_be_left_out(backend):
    assert re.match(
        r"computed the (first|last) expert for a slot of -1 instead of nothing in 1 of 20 rows", result(run(backend))
    )


def test_with_one_slot_a_token_gets_exactly_nothing():
    spec = replace(SPEC, top_k=1)
    assert result(run(faulty.Right(), spec)) == "passed"
    assert "for a slot of -1 instead of nothing" in result(run(faulty.ServesMinusOne(0), spec))


def test_nan_is_a_fault():
    assert "computed NaN or Inf in" in result(run(faulty.NotFinite()))


def test_a_bias_that_is_dropped_is_a_fault():
    class NoBias(faulty.Right):
        def weights(self, prepared):
            w = prepared.weights
            return replace(w, w13_bias=w.w13_bias * 0, w2_bias=w.w2_bias * 0)

    spec = replace(SPEC, bias=True)
    assert result(run(faulty.Right(), spec)) == "passed"
    assert "computed something else" in result(run(NoBias(), spec))


# --- every kernel that may be picked ----------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [1, 2, 4, 17, 33, 64])
def test_a_fault_for_one_bucket_only_is_found(low):
    backend = faulty.Computes(SwiGLU(), where=lambda tokens: low <= tokens < 2 * low)
    assert re.search(rf"computed SwiGLU instead of SiTU: .* \(at {low} tokens\)", result(run(backend, max_tokens=100)))
    assert result(run(backend, max_tokens=low - 1 or 1)) == "passed" or low == 1


def test_one_wrong_row_in_a_large_call_is_found():
    assert "instead of SiTU(beta=4.0, linear_beta=25.0) in 1 of" in result(run(faulty.OneRowWrong(), max_tokens=64))
    assert result(run(faulty.OneRowWrong(), max_tokens=40)) == "passed"


def test_a_tactic_that_drops_the_betas_is_found_although_the_runtime_picks_another():
    backend = faulty.Tactics(SwiGLU())
    assert cases_of(backend, SPEC, 16) == (("one_cta", 4), ("two_cta", 4))
    verdict = run(backend)
    assert "computed SwiGLU instead of SiTU" in result(verdict)
    assert "(at 4 tokens with tactic two_cta)" in result(verdict)
    assert verdict.cases == (("one_cta", 4), ("two_cta", 4))
    assert result(run(faulty.Tactics(SITU))) == "passed"


def test_the_backend_says_which_sizes_differ():
    backend = faulty.Right()
    backend.canary_token_buckets = lambda spec, max_tokens: (max_tokens,)
    run(backend, max_tokens=48)
    assert backend.calls == [48]


def test_workspace_and_output_hold_nan_before(monkeypatch):
    class ReadsFirst(faulty.Right):
        def forward(self, prepared, x, ids, weights, workspace, out, *, max_local_rows):
            assert workspace.data_ptr() % 256 == 0
            assert workspace.view(torch.float32).isnan().all()
            assert out.isnan().all()
            super().forward(prepared, x, ids, weights, workspace, out, max_local_rows=max_local_rows)

    assert result(run(ReadsFirst())) == "passed"


def test_the_core_s_own_backend_is_checked_as_all_are():
    torch_backend = registry.named("torch")
    for activation in ACTIVATIONS:
        assert run(torch_backend, replace(SPEC, activation=activation)).passed
    assert tolerance_of(SPEC, torch_backend) == "bf16_1"


# --- dispatch ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def announce(monkeypatch, tmp_path):
    """Return a function that replaces all backends; verdicts go to a folder of the test."""

    def install(*backends):
        monkeypatch.setattr(registry, "backends", lambda: tuple(sorted(backends, key=lambda b: -b.priority)))

    for name in ("PORTAMOE_BACKEND", "PORTAMOE_CANARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PORTAMOE_CACHE_DIR", str(tmp_path))
    verdicts._store.cache_clear()
    return install


def another_process():
    """Forget what this process knows; what is on disk stays."""
    verdicts._store.cache_clear()


def choose(backend=None, **how):
    return choose_verified(SPEC, HERE, backend, **{"max_tokens": 8} | how)


def decision(name):
    return next(d for d in registry.decide(SPEC, HERE) if d.backend == name)


def test_a_backend_is_unverified_until_its_canary_has_passed(announce):
    announce(faulty.Right())
    assert decision("right") == Accepted("right", "right_package", "unverified")
    chosen = choose()
    assert chosen.selection.decisions[0].verification == "verified"
    assert decision("right").verification == "verified"
    another_process()
    assert decision("right").verification == "verified"


def test_a_known_verdict_costs_no_run(announce):
    backend = faulty.Right()
    announce(backend)
    for _ in range(3):
        choose()
        another_process()
    assert backend.prepared == 1


def test_only_what_is_not_covered_yet_is_run(announce):
    backend = faulty.Right()
    announce(backend)
    choose(max_tokens=4)
    assert set(backend.calls) == {1, 2, 3, 4}
    backend.calls.clear()
    choose(max_tokens=9)
    assert set(backend.calls) == {5, 8, 9}
    choose(max_tokens=5)
    assert set(backend.calls) == {5, 8, 9}


def test_a_tactic_that_comes_later_is_run_although_its_number_of_tokens_was(announce):
    """An autotuner of a later version, or a larger max_tokens, may bring a tactic: tokens alone do not cover it."""
    backend = faulty.Tactics(SwiGLU())
    announce(backend, faulty.Right())
    backend.tactics = lambda spec, max_tokens: ("one_cta",)
    assert choose().backend is backend
    backend.tactics = lambda spec, max_tokens: ("one_cta", "two_cta")
    assert choose().backend.name == "right"
    assert "with tactic two_cta" in str(decision("faulty").reasons[0])


def test_force_keeps_what_larger_calls_have_shown(announce):
    """`verify` forces few tokens for an activation while another process covers many: neither may void the other."""
    backend = faulty.Right()
    announce(backend)
    choose(max_tokens=9)
    another_process()
    choose(max_tokens=2, canary="force")
    backend.calls.clear()
    another_process()
    choose(max_tokens=9)
    assert backend.calls == []


def test_a_forced_failure_voids_what_was_covered(announce):
    backend = faulty.Computes(SITU)
    announce(backend, faulty.Right())
    assert choose(max_tokens=9).backend is backend
    another_process()
    backend.activation = SwiGLU()
    assert choose(max_tokens=2, canary="force").backend.name == "right"
    another_process()
    assert choose(max_tokens=9).backend.name == "right"


def test_an_automatic_choice_moves_on_and_says_so_once(announce, caplog):
    announce(faulty.Computes(SwiGLU()), faulty.Right())
    for _ in range(3):
        assert choose().backend.name == "right"
    assert len(caplog.records) == 1
    record = caplog.records[0]
    assert (record.name, record.levelno) == ("portamoe", logging.WARNING)
    assert re.match(
        r"faulty is passed over on cpu \(cpu\), right serves: canary: computed SwiGLU instead of SiTU: ", record.message
    )
    rejected = decision("faulty")
    assert isinstance(rejected, Rejected)
    assert "computed SwiGLU instead of SiTU" in str(rejected.reasons[0])


def test_the_next_process_knows_the_failure_and_says_it_again(announce, caplog):
    backend = faulty.Computes(SwiGLU())
    announce(backend, faulty.Right())
    choose()
    another_process()
    caplog.clear()
    assert registry.choose(SPEC, HERE).name == "right"
    assert choose().backend.name == "right"
    assert backend.prepared == 1
    assert len(caplog.records) == 1


def test_a_named_backend_that_fails_raises_and_nothing_replaces_it(announce, caplog, monkeypatch):
    announce(faulty.Computes(SwiGLU()), faulty.Right())
    for _ in range(2):
        with pytest.raises(BackendRejected, match=r"backend='faulty' is rejected: canary: computed SwiGLU instead"):
            choose("faulty")
    monkeypatch.setenv("PORTAMOE_BACKEND", "faulty")
    with pytest.raises(BackendRejected, match="PORTAMOE_BACKEND=faulty is rejected: canary: computed SwiGLU"):
        choose()
    assert not caplog.records
    assert choose("right").backend.name == "right"


def test_when_all_fail_every_reason_is_given(announce):
    announce(faulty.Computes(SwiGLU()), faulty.NotFinite())
    with pytest.raises(BackendRejected, match=r"computed SwiGLU.*\| right: canary: computed NaN") as error:
        choose()
    assert all(isinstance(d, Rejected) for d in error.value.decisions)


def test_what_a_backend_raises_is_a_reason_in_this_process_only(announce, caplog):
    announce(faulty.Raises(RuntimeError("no kernel image\nfor this device")), faulty.Right())
    with caplog.at_level(logging.DEBUG, "portamoe"):
        assert choose().backend.name == "right"
    assert "canary: raised RuntimeError: no kernel image (needs a result)" in str(decision("faulty").reasons[0])
    assert any(record.exc_info for record in caplog.records)
    another_process()
    assert decision("faulty") == Accepted("faulty", "faulty_package", "unverified")


def test_an_interrupt_is_not_a_verdict(announce):
    announce(faulty.Raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        choose()
    assert isinstance(decision("faulty"), Accepted)


def test_force_runs_again_and_once_a_process(announce, monkeypatch):
    backend = faulty.Computes(SwiGLU())
    announce(backend, faulty.Right())
    choose()
    backend.activation = SITU  # repaired, without another version
    assert choose().backend.name == "right"
    assert choose(canary="force").backend.name == "faulty"
    monkeypatch.setenv("PORTAMOE_CANARY", "force")
    assert choose().backend.name == "faulty"
    assert backend.prepared == 2
    another_process()
    choose()
    assert backend.prepared == 3
    assert decision("faulty").verification == "verified"


def test_skip_trusts_the_backend(announce, monkeypatch):
    backend = faulty.Computes(SwiGLU())
    announce(backend, faulty.Right())
    assert choose(canary="skip").backend is backend
    assert backend.prepared == 0
    choose()
    monkeypatch.setenv("PORTAMOE_CANARY", "skip")
    assert choose().backend is backend
    assert decision("faulty").verification == "unverified"
    assert backend.prepared == 1


def test_an_unknown_mode_is_an_error(announce, monkeypatch):
    announce(faulty.Right())
    with pytest.raises(ValueError, match="canary='never' is none of auto, force, skip"):
        choose(canary="never")
    monkeypatch.setenv("PORTAMOE_CANARY", "off")
    with pytest.raises(ValueError, match="PORTAMOE_CANARY=off is none of"):
        choose()
    assert decision("right").verification == "unverified"


def test_other_betas_need_a_canary_of_their_own(announce):
    backend = faulty.Right()
    announce(backend)
    choose()
    choose_verified(replace(SPEC, activation=SiTU(beta=4.0, linear_beta=24.0)), HERE, max_tokens=8)
    assert backend.prepared == 2


def test_nothing_runs_inside_a_capture(announce, monkeypatch):
    announce(faulty.Right())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="a canary cannot run inside a graph capture; construct RoutedExperts before"
    ):
        choose()
    assert isinstance(decision("right"), Accepted)
    assert choose(canary="skip").backend.name == "right"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    choose()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    choose()  # nothing has to be run


def test_a_backend_without_a_small_spec_stays_unverified_and_that_is_said(announce, caplog):
    backend = faulty.Right(canary_spec=lambda spec: replace(spec, hidden_size=32))
    backend.check = lambda spec, _: [] if spec.hidden_size == 64 else ["too small"]
    announce(backend)
    for _ in range(2):
        assert choose().selection.decisions[0].verification == "unverified"
    assert [r.message.split(":")[0] for r in caplog.records] == ["no canary for right on cpu"]


def test_a_layer_is_served_by_the_first_that_is_right(announce, caplog):
    announce(faulty.Computes(SwiGLU()), faulty.Right(), registry.named("torch"))
    problem = make_problem(SPEC, 4)
    layer = RoutedExperts(SPEC, problem.weights, device="cpu", max_tokens=4)
    assert layer.backend.name == "right"
    assert layer.decision.verification == "verified"
    assert_close(layer(problem.x, problem.topk_ids, problem.topk_weights), problem.reference(), roundings=1)
    with pytest.raises(BackendRejected, match="computed SwiGLU instead of SiTU"):
        RoutedExperts(SPEC, problem.weights, device="cpu", max_tokens=4, backend="faulty")
    wrong = RoutedExperts(SPEC, problem.weights, device="cpu", max_tokens=4, backend="faulty", canary="skip")
    assert wrong.decision.verification == "unverified"
