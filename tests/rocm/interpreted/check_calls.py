"""Whole calls against the float32 reference, on the CPU: run by tests/rocm/test_interpreter.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from portamoe.activations import SiTU, SwiGLU, SwiGLUOAI
from portamoe.formats import mxfp4_dequantize
from portamoe.spec import MoESpec
from portamoe.testing import EDGE_CASES, assert_close, edge_case, make_problem
from rocm_moe import plan
from rocm_moe.triton_compat import INTERPRETED
from rocm_moe.triton_unfused import BACKEND
from tests.rocm.unfused_calls import call

assert INTERPRETED, "run with TRITON_INTERPRET=1"
SITU = SiTU(4.0, 25.0)
#: Minutes in the interpreter; the GPU tests run them.
SLOW = {"896_experts", "22_of_160", "40_experts", "129_tokens", "skew", "tall", "wide", "typical"}
CASES = [case for case in EDGE_CASES if case.spec.weight_format == "mxfp4" and case.name not in SLOW]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_edge_case(case):
    problem = make_problem(case.spec, case.tokens, routing=case.routing)
    y = call(problem)
    if case.tokens:
        assert_close(y, problem.reference(), roundings=4)


@pytest.mark.parametrize(
    ("tokens", "hidden", "inter", "experts", "activation"),
    [
        (1, 384, 256, 32, SITU),
        (2, 384, 256, 128, SITU),
        (2, 384, 256, 32, SwiGLU()),
        (1, 384, 256, 32, SwiGLUOAI(1.702, 7.0)),
    ],
)
def test_sizes_of_the_first_users(tokens, hidden, inter, experts, activation):
    spec = MoESpec(hidden_size=hidden, intermediate_size=inter, num_experts=experts, top_k=4, activation=activation)
    problem = make_problem(spec, tokens, seed=experts)
    assert_close(call(problem), problem.reference(), roundings=4)


@pytest.mark.parametrize("rows", [16, 32, 48])
def test_windows_change_no_bit(rows):
    spec = dataclasses.replace(edge_case("rank_in_middle").spec, top_k=4)
    problem = make_problem(spec, 33, remote=False, minus_one=0.3)
    whole = call(problem, max_local_rows=10**6)
    assert plan.sizes(spec, 33, rows).windows > 1
    assert torch.equal(call(problem, max_local_rows=rows), whole)
    assert_close(whole, problem.reference(), roundings=4)


def test_split_k_serves_few_tokens():
    spec = MoESpec(hidden_size=512, intermediate_size=256, num_experts=4, top_k=2, activation=SITU, bias=True)
    problem = make_problem(spec, 2)
    prepared = BACKEND.prepare(problem.weights, spec, problem.x.device)
    made = plan.make_plan(spec, prepared.table, 2, 10**6)
    assert made.gemm1.splits > 1
    assert made.gemm2.splits > 1
    assert_close(call(problem, prepared=prepared), problem.reference(), roundings=4)


@pytest.mark.parametrize("rows", [10**6, 16], ids=["one-window", "windows"])
def test_lora_delta_through_the_hooks_equals_merged_weights(rows):
    """Rank-16 deltas on w13 and w2 of every expert, added to the rows between the kernels."""
    spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=4, top_k=2, activation=SITU)
    problem = make_problem(spec, 9)
    generator = torch.Generator().manual_seed(5)
    w13 = torch.stack([mxfp4_dequantize(problem.weights.w13[e], problem.weights.w13_scale[e]) for e in range(4)])
    w2 = torch.stack([mxfp4_dequantize(problem.weights.w2[e], problem.weights.w2_scale[e]) for e in range(4)])
    a13, b13 = torch.randn(4, 16, 64, generator=generator), torch.randn(4, 128, 16, generator=generator)
    a2, b2 = torch.randn(4, 16, 64, generator=generator), torch.randn(4, 64, 16, generator=generator)
    b13 *= 0.5 * w13.std() / (4 * b13.std())
    b2 *= 0.5 * w2.std() / (4 * b2.std())
    kept = {}
    calls = []

    def after_gemm1(rows, row_map):
        n = int(row_map.count)
        calls.append(n)
        expert, token = row_map.expert.long().clamp(min=0), row_map.token.long()
        x = problem.x[token].float()
        delta = torch.einsum("rh,reh->re", x, a13[expert])
        rows += torch.einsum("re,rne->rn", delta, b13[expert]).bfloat16()
        kept["h"] = SITU.apply(rows.float(), torch.float32)

    def after_gemm2(rows, row_map):
        expert = row_map.expert.long().clamp(min=0)
        delta = torch.einsum("rh,reh->re", kept["h"].nan_to_num(), a2[expert])
        rows += torch.einsum("re,rne->rn", delta, b2[expert]).bfloat16()

    y = call(problem, max_local_rows=rows, after_gemm1=after_gemm1, after_gemm2=after_gemm2)
    truth = torch.zeros(9, 64)
    for token in range(9):
        for slot in range(2):
            e = int(problem.topk_ids[token, slot])
            h = SITU.apply((w13[e] + b13[e] @ a13[e]) @ problem.x[token].float(), torch.float32)
            truth[token] += problem.topk_weights[token, slot] * ((w2[e] + b2[e] @ a2[e]) @ h)
    assert sum(calls) == 18
    # The bf16 additions of the deltas are two roundings more than the backend's own.
    assert float((y.float() - truth).norm() / truth.norm()) < 0.006
    plain = call(problem)
    assert float((plain.float() - truth).norm() / truth.norm()) > 0.05, "the deltas matter"


def test_what_a_call_refuses():
    problem = make_problem(edge_case("smallest").spec, 1)
    with pytest.raises(TypeError, match="before_gemm1"):
        call(problem, before_gemm1=lambda *_: None)
    with pytest.raises(TypeError, match="prepared as"):
        call(problem, prepared=object())
    prepared = BACKEND.prepare(problem.weights, problem.spec, problem.x.device)
    with pytest.raises(ValueError, match="the workspace has 16 bytes"):
        BACKEND.forward(
            prepared, problem.x, problem.topk_ids, problem.topk_weights,
            torch.empty(16, dtype=torch.uint8), torch.empty_like(problem.x), max_local_rows=16,
        )  # fmt: skip


def test_prepared_weights_take_the_canonical_bytes():
    problem = make_problem(edge_case("typical").spec, 1)
    prepared = BACKEND.prepare(problem.weights, problem.spec, problem.x.device)
    assert prepared.nbytes <= 1.01 * problem.weights.nbytes
    assert prepared.spec == problem.spec
