"""The reference equals the expected values that separate code computed, and keeps the rules of the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from portamoe.activations import SiTU
from portamoe.formats import quantize_activations
from portamoe.reference import dequantized, expert_reference, full_precision, moe_reference, round_activations
from portamoe.spec import MoESpec
from portamoe.testing import assert_close, error_metrics, make_problem

SPEC = MoESpec(
    hidden_size=64, intermediate_size=96, num_experts=8, top_k=3, activation=SiTU(beta=4.0, linear_beta=25.0)
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_data_sets_give_their_expected_values(data_set, dtype):
    spec, source, tensors = data_set.load()
    x = tensors["x"].to(dtype)
    y = moe_reference(spec, source, x, tensors["topk_ids"], tensors["topk_weights"])
    assert y.dtype == dtype
    assert_close(y, tensors["y_ref"], roundings="float64" if dtype == torch.float64 else "float32")


def test_data_sets_are_far_from_what_is_wrong_on_purpose(data_set):
    spec, source, tensors = data_set.load()
    y = moe_reference(spec, source, tensors["x"], tensors["topk_ids"], tensors["topk_weights"])
    wrong = [name for name in tensors if name.startswith("y_if_")]
    assert len(wrong) >= 3
    for name in wrong:
        assert error_metrics(tensors[name], y).rms > 0.3, name


def test_sums_over_ranks_are_the_whole_layer(data_set):
    spec, _, tensors = data_set.load()
    total = 0
    step = spec.num_experts // 4
    for first in range(0, spec.num_experts, step):
        rank, source, _ = data_set.load(range(first, first + step))
        total = total + moe_reference(rank, source, tensors["x"].double(), tensors["topk_ids"], tensors["topk_weights"])
    assert_close(total, tensors["y_ref"], roundings="float64")


def by_hand(problem):
    """Compute one token and slot after another in Python, from the definition."""
    spec, out = problem.spec, torch.zeros(problem.x.shape, dtype=torch.float64)
    for token in range(problem.x.shape[0]):
        for slot in range(spec.top_k):
            expert_id = int(problem.topk_ids[token, slot])
            if expert_id not in spec.local_experts:
                continue
            expert = problem.weights.expert(expert_id - spec.local_experts.start)
            w13, w2 = dequantized(expert)
            gate_up = w13 @ problem.x[token].double()
            if expert.w13_bias is not None:
                gate_up += expert.w13_bias.double()
            h = spec.activation(gate_up[: spec.intermediate_size], gate_up[spec.intermediate_size :])
            y = w2 @ h
            if expert.w2_bias is not None:
                y += expert.w2_bias.double()
            out[token] += problem.topk_weights[token, slot].double() * y
    return out


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "bf16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("routing", ["uniform", "duplicates"])
def test_equals_the_definition(weight_format, bias, routing):
    spec = replace(SPEC, weight_format=weight_format, bias=bias, local_experts=range(2, 7))
    problem = make_problem(spec, 7, routing=routing, minus_one=0.2, x_dtype=torch.float64)
    assert_close(problem.reference(), by_hand(problem), roundings="float64")


def test_ids_that_are_not_local_contribute_nothing():
    problem = make_problem(replace(SPEC, local_experts=range(2, 4)), 6)
    ids = torch.tensor([[-1, 0, 7], [-1, -1, -1], [8, 2**30, -5], [1, 4, 5], [2, -1, 0], [3, 2, -1]])
    y = moe_reference(problem.spec, problem.weights, problem.x, ids, problem.topk_weights)
    assert not y[:4].any()
    assert y[4:].any(dim=1).all()


def test_a_nan_token_stays_in_its_row():
    problem = make_problem(SPEC, 5)
    clean = problem.reference()
    problem.x[2, 5] = torch.nan
    y = problem.reference()
    assert y[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], clean[others])


def test_a_nan_weight_stays_in_its_token_and_is_ignored_at_minus_one():
    problem = make_problem(SPEC, 4)
    problem.topk_weights[1, 1] = torch.nan
    assert problem.reference()[1].isnan().all()
    problem.topk_ids[1, 1] = -1
    assert torch.isfinite(problem.reference()).all()


def test_no_tokens():
    problem = make_problem(SPEC, 0)
    assert problem.reference().shape == (0, 64)


def test_bf16_activations_are_not_quantised():
    # Values that neither FP4 nor FP8 holds must survive: the checkpoint is weight-only.
    x = torch.full((3, 64), 1.0 + 2.0**-7)
    assert torch.equal(round_activations(x, SPEC, None), x)


@pytest.mark.parametrize("activation_format", ["mxfp8", "mxfp4", "nvfp4"])
def test_quantised_activations_are_rounded_before_each_gemm(activation_format):
    spec = replace(SPEC, activation_format=activation_format, weight_format="nvfp4")
    problem = make_problem(spec, 9)
    expert = problem.weights.expert(3)
    w13, w2 = (m.float() for m in dequantized(expert))
    scales = (None, None)
    if activation_format == "nvfp4":
        scales = (expert.w13_input_scale[0], expert.w2_input_scale)
    x = quantize_activations(problem.x, activation_format, scales[0])
    h = spec.activation(*(x @ w13.T).chunk(2, dim=1))
    expected = quantize_activations(h, activation_format, scales[1]) @ w2.T
    y = expert_reference(spec, expert, problem.x.float())
    assert_close(y, expected, roundings="float32")
    unquantised = expert_reference(replace(spec, activation_format="bf16"), expert, problem.x.float())
    assert error_metrics(y, unquantised).rms > 0.03


def test_the_larger_input_scale_of_gate_and_up_serves_both():
    spec = replace(SPEC, activation_format="nvfp4", weight_format="nvfp4")
    x = make_problem(spec, 3).x.float()
    one, two = torch.tensor([0.01, 0.03]), torch.tensor(0.03)
    assert torch.equal(round_activations(x, spec, one), quantize_activations(x, "nvfp4", two))
    assert torch.equal(round_activations(x, spec, None), quantize_activations(x, "nvfp4", torch.ones(())))


def test_full_precision_holds_and_gives_back():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(RuntimeError, match="inside"), full_precision():
            raise RuntimeError("inside")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
