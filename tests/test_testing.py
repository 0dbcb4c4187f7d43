"""The problem maker tells right from wrong, and the tolerance table refuses what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from portamoe.activations import GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep
from portamoe.canary import canary_problem
from portamoe.formats import quantize_activations
from portamoe.reference import dequantized, moe_reference
from portamoe.spec import KIMI_K3, MoESpec
from portamoe.testing import (
    EDGE_CASES,
    TOLERANCES,
    Problem,
    assert_close,
    edge_case,
    error_metrics,
    make_problem,
    make_routing,
    tolerance,
    tolerance_of,
)
from portamoe.weights import ExpertWeights, validate

SITU = SiTU(beta=4.0, linear_beta=25.0)
SMALL = MoESpec(hidden_size=128, intermediate_size=96, num_experts=8, top_k=3, activation=SITU)
ACTIVATIONS = (
    SITU,
    SiTU(beta=4.0),
    SwiGLU(),
    SwiGLU(limit=7.0),
    SwiGLUOAI(alpha=1.702, limit=7.0),
    SwiGLUStep(limit=7.0),
    GeGLU(),
    ReLU2(),
)
#: min(silu(g), 7) and silu(min(g, 7)) are 0.007 apart at most.
ALIKE = ({SwiGLU(limit=7.0), SwiGLUStep(limit=7.0)},)


def with_weights(problem: Problem, **tensors: torch.Tensor) -> Problem:
    return replace(problem, weights=replace(problem.weights, **tensors))


def swapped_halves(problem: Problem) -> Problem:
    w = problem.weights
    gate, up = w.w13.chunk(2, dim=1)
    gate_scale, up_scale = w.w13_scale.chunk(2, dim=1)
    return with_weights(problem, w13=torch.cat((up, gate), 1), w13_scale=torch.cat((up_scale, gate_scale), 1))


def with_activation(problem: Problem, activation) -> Problem:
    return replace(problem, spec=replace(problem.spec, activation=activation))


#: Faults that real libraries have had, and that a backend's test must catch.
FAULTS = {
    "SiLU for SiTU": lambda p: with_activation(p, SwiGLU()),
    "no clamp of up": lambda p: with_activation(p, SiTU(beta=4.0)),
    "beta 1": lambda p: with_activation(p, SiTU(beta=1.0, linear_beta=25.0)),
    "gate and up swapped": swapped_halves,
    "scales a row late": lambda p: with_weights(p, w13_scale=p.weights.w13_scale.roll(1, dims=1)),
    "w2 scales a row late": lambda p: with_weights(p, w2_scale=p.weights.w2_scale.roll(1, dims=1)),
    "scales a block late": lambda p: with_weights(p, w13_scale=p.weights.w13_scale.roll(1, dims=2)),
    "scales of the next expert": lambda p: with_weights(p, w13_scale=p.weights.w13_scale.roll(1, dims=0)),
    "high nibble first": lambda p: with_weights(p, w2=(p.weights.w2 << 4) | (p.weights.w2 >> 4)),
    "one scale of all rows off by one": lambda p: with_weights(p, w2_scale=one_more(p.weights.w2_scale)),
    "weights of the slots swapped": lambda p: replace(p, topk_weights=p.topk_weights.flip(1)),
    "no routing weights": lambda p: replace(p, topk_weights=torch.ones_like(p.topk_weights)),
    "last slot dropped": lambda p: replace(p, topk_ids=last_dropped(p.topk_ids)),
    "-1 is the last expert": lambda p: replace(p, topk_ids=p.topk_ids.where(p.topk_ids >= 0, 7)),
}


def one_more(scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clone()
    scale[:, :, -1] += 1
    return scale


def last_dropped(ids: torch.Tensor) -> torch.Tensor:
    ids = ids.clone()
    ids[:, -1] = -1
    return ids


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_far_beyond_the_widest_bf16_tolerance(fault):
    problem = make_problem(SMALL, 16, minus_one=0.2)
    wrong = FAULTS[fault](problem).reference()
    metrics = error_metrics(wrong, problem.reference())
    assert metrics.rms > 10 * TOLERANCES["bf16_4"].rms
    with pytest.raises(AssertionError, match="relative RMS"):
        assert_close(wrong, problem.reference(), roundings=4)


@pytest.mark.parametrize("one", ACTIVATIONS, ids=repr)
def test_each_activation_is_far_from_every_other(one):
    problem = make_problem(replace(SMALL, activation=one), 16)
    for other in ACTIVATIONS:
        if other == one or {one, other} in ALIKE:
            continue
        metrics = error_metrics(with_activation(problem, other).reference(), problem.reference())
        assert metrics.rms > 4 * TOLERANCES["bf16_4"].rms, other


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "bf16"])
def test_pre_activations_reach_forty_and_saturate(weight_format):
    spec = replace(SMALL, weight_format=weight_format)
    problem = make_problem(spec, 64)
    gates, ups = [], []
    for index in range(spec.num_local_experts):
        w13, _ = dequantized(problem.weights.expert(index))
        gate, up = (problem.x.double() @ w13.T).chunk(2, dim=1)
        gates.append(gate)
        ups.append(up)
    gate, up = torch.stack(gates), torch.stack(ups)
    assert gate.std() >= 4
    assert up.std() >= 25
    assert gate.max() > 40
    assert gate.min() < -40


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda c: c.name)
def test_edge_cases_are_consistent(case):
    problem = make_problem(case.spec, case.tokens, routing=case.routing)
    validate(problem.weights, case.spec)
    assert problem.x.shape == (case.tokens, case.spec.hidden_size)
    assert problem.topk_ids.shape == problem.topk_weights.shape == (case.tokens, case.spec.top_k)
    assert problem.topk_ids.dtype == torch.int32
    assert torch.isfinite(problem.reference()).all()
    if case.routing == "none_local":
        assert not problem.reference().any()
    assert case.covers
    assert edge_case(case.name) is case


def test_edge_case_names_are_unique_and_listed_when_unknown():
    assert len({case.name for case in EDGE_CASES}) == len(EDGE_CASES)
    with pytest.raises(ValueError, match="896_experts"):
        edge_case("nothing")


def test_a_seed_gives_the_same_problem_and_another_seed_another():
    one, same, other = (make_problem(SMALL, 8, seed=s) for s in (1, 1, 2))
    for name in ("x", "topk_ids", "topk_weights"):
        assert torch.equal(getattr(one, name), getattr(same, name))
        assert not torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(one.weights.w13, same.weights.w13)
    assert not torch.equal(one.weights.w13, other.weights.w13)


def test_all_weight_codes_occur_and_scales_differ_by_expert_row_and_block():
    weights: ExpertWeights = make_problem(SMALL, 1).weights
    assert len(weights.w13.unique()) == 256
    for scale in (weights.w13_scale, weights.w2_scale):
        assert (scale[1:] != scale[:-1]).any()
        assert (scale[:, 1:] != scale[:, :-1]).any()
        assert (scale[:, :, 1:] != scale[:, :, :-1]).any()


def test_nvfp4_global_scales_of_gate_and_up_are_no_power_of_two_apart():
    weights = make_problem(replace(SMALL, weight_format="nvfp4"), 1).weights
    ratio = weights.w13_global_scale[:, 1] / weights.w13_global_scale[:, 0]
    assert ((ratio.log2() - ratio.log2().round()).abs() > 1e-3).all()


def test_routing_families():
    spec = replace(SMALL, num_experts=12, local_experts=range(4, 8))
    generator = torch.Generator().manual_seed(0)

    def ids(**kwargs):
        return make_routing(spec, 24, generator, **kwargs)[0]

    uniform = ids()
    assert all(len(set(row.tolist())) == spec.top_k for row in uniform)
    assert uniform.max() > 7
    assert uniform.min() < 4
    local = ids(remote=False)
    assert local.min() >= 4
    assert local.max() < 8
    none = ids(routing="none_local")
    assert not ((none >= 4) & (none < 8)).any()
    assert (ids(routing="one_expert", expert=5) == torch.tensor([5, -1, -1])).all()
    same = ids(routing="same")
    assert (same == same[:1]).all()
    assert torch.bincount(ids(routing="balanced").flatten()).tolist() == [6] * 12
    duplicates = ids(routing="duplicates")
    assert (duplicates == duplicates[:, :1]).all()
    counts = torch.bincount(ids(routing="skew").flatten(), minlength=12)
    assert counts[0] > 2 * counts[11]
    assert (ids(minus_one=1.0) == -1).all()
    with pytest.raises(ValueError, match="uniform"):
        ids(routing="strange")


def test_fewer_local_experts_than_slots_leave_minus_one():
    spec = replace(SMALL, local_experts=range(2, 4))
    ids, weights = make_routing(spec, 5, torch.Generator(), remote=False)
    assert (ids[:, 2] == -1).all()
    assert torch.allclose(weights.sum(1), torch.ones(5))


def test_a_full_size_expert_is_drawn_within_its_own_bytes():
    spec = replace(KIMI_K3, num_experts=1, top_k=1, local_experts=range(1))
    weights = make_problem(spec, 1).weights
    assert weights.nbytes == 3 * 3584 * 3072 * 17 // 32


# --- assert_close ---------------------------------------------------------------------------------------------------


def truth(tokens: int = 6, columns: int = 32) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1))


def test_one_rounding_passes_and_too_coarse_a_format_fails():
    expected = truth(64, 512)
    metrics = assert_close(expected.bfloat16(), expected, roundings=1)
    assert 0.0014 < metrics.rms < 0.0019
    with pytest.raises(AssertionError, match="fp16_1"):
        assert_close(expected.bfloat16(), expected, roundings="fp16_1")
    with pytest.raises(AssertionError, match="float32"):
        assert_close(expected.half(), expected, roundings="float32")


def test_the_message_names_where_it_is_worst():
    expected = truth()
    actual = expected.clone()
    actual[4, 17] += 3.0
    with pytest.raises(AssertionError, match=r"(?s)here: .*token 4 column 17 .*worst token 4") as caught:
        assert_close(actual, expected, context="here")
    assert f"{float(expected[4, 17]):.6g}" in str(caught.value)


def test_a_small_token_does_not_hide_behind_the_others():
    expected = truth()
    expected[2] *= 1e-4
    actual = expected.clone()
    actual[2] *= 1.05
    assert error_metrics(actual, expected).rms < 1e-5
    with pytest.raises(AssertionError, match="worst token"):
        assert_close(actual, expected, roundings=2)


def test_one_wrong_element_of_many_is_caught_by_the_maximum():
    expected = truth(500, 1000)
    actual = expected.clone()
    actual[3, 3] += 0.03 * expected.abs().max()
    assert error_metrics(actual, expected).token < 1e-2
    with pytest.raises(AssertionError, match=r"max 0\.03"):
        assert_close(actual, expected, roundings=2)


def test_a_token_without_experts_must_be_exactly_zero():
    expected = truth()
    expected[1] = 0
    assert_close(expected, expected)
    actual = expected.clone()
    actual[1, 0] = 1e-30
    with pytest.raises(AssertionError, match="worst token inf"):
        assert_close(actual, expected, roundings=4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_must_stand_where_the_reference_has_it(value):
    expected = truth()
    expected[3] = value
    metrics = assert_close(expected.clone(), expected)
    assert metrics.nonfinite == 32
    clean = expected.clone()
    clean[3] = 0.0
    with pytest.raises(AssertionError, match="32 NaN or Inf differ"):
        assert_close(clean, expected)
    spread = expected.clone()
    spread[2, 5] = value
    with pytest.raises(AssertionError, match="1 NaN or Inf differ"):
        assert_close(spread, expected)


def test_shapes_must_match_and_tolerances_have_names():
    with pytest.raises(ValueError, match="equal"):
        error_metrics(truth(), truth(5))
    with pytest.raises(ValueError, match="bf16_4"):
        tolerance("bf16")
    assert tolerance(4) is TOLERANCES["bf16_4"]


def test_no_tokens_are_close():
    assert assert_close(torch.empty(0, 4), torch.empty(0, 4)).rms == 0


def test_the_tolerance_of_a_backend():
    assert tolerance_of(SMALL, object()) == "bf16_4"
    assert tolerance_of(SMALL, type("B", (), {"roundings": 2})()) == "bf16_2"
    assert tolerance_of(replace(SMALL, activation_format="mxfp8"), object()) == "mxfp8"


class RoundedSiTU(SiTU):
    """SiTU with gate, up and h rounded to bf16, as a backend of four roundings does."""

    def _formula(self, gate, up):
        return super()._formula(gate.bfloat16().float(), up.bfloat16().float()).bfloat16().float()


@pytest.mark.parametrize("activation_format", ["bf16", "mxfp8", "mxfp4", "nvfp4"])
def test_a_backend_that_rounds_often_passes_and_another_format_does_not(activation_format):
    spec = replace(SMALL, hidden_size=256, activation_format=activation_format)
    problem = make_problem(spec, 33)
    expected = problem.reference()
    rounded = with_activation(problem, RoundedSiTU(beta=4.0, linear_beta=25.0)).reference().bfloat16()
    assert_close(rounded, expected, roundings=tolerance_of(spec, object()))
    other = "mxfp8" if activation_format == "bf16" else "bf16"
    wrong = moe_reference(
        replace(spec, activation_format=other), problem.weights, problem.x, problem.topk_ids, problem.topk_weights
    )
    with pytest.raises(AssertionError):
        assert_close(wrong, expected, roundings=tolerance_of(spec, object()))


def _quantised(x, scale, order):
    """Return x in NVFP4 as kernels compute it: with a reciprocal of 6, of the scale, or of the product."""
    blocks = x.float().reshape(x.shape[0], -1, 16)
    amax, inverse = blocks.abs().amax(-1), 1 / scale
    sixth = torch.tensor(1 / 6, dtype=torch.float32)
    wanted = {"6 first": amax * sixth * inverse, "scale first": amax * inverse / 6, "product": amax / (6 * scale)}
    steps = wanted[order].clamp_max(448).to(torch.float8_e4m3fn).float()
    factor = torch.where(steps > 0, inverse / steps, 0.0)[..., None]
    ratio = blocks * factor if order != "product" else blocks / (steps * scale).clamp_min(1e-30)[..., None]
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = values[(ratio.abs()[..., None] - values).abs().argmin(-1)]
    return (nearest.copysign(ratio) * (steps * scale)[..., None]).flatten(1)


@pytest.mark.parametrize("order", ["6 first", "scale first", "product"])
@pytest.mark.parametrize("seed", range(2))
def test_no_value_of_x_lies_where_the_order_of_operations_decides(order, seed):
    """Else a right kernel brushes NVFP4's bound: half-way values that go the other way cost up to 3 % RMS."""
    few = replace(SMALL, num_experts=3, hidden_size=256, intermediate_size=32)
    spec = replace(few, weight_format="nvfp4", activation_format="nvfp4")
    for problem in (make_problem(spec, 20, seed=seed), canary_problem(spec)):
        scale = problem.weights.w13_input_scale.amax()
        expected = quantize_activations(problem.x, "nvfp4", scale)
        torch.testing.assert_close(_quantised(problem.x, scale, order), expected, rtol=1e-6, atol=0)
