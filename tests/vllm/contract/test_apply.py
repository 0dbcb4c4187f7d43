"""What the real vLLM computes through portamoe: values against the float32 reference, at every level of its stack."""

import pytest
import torch
from vllm.model_executor.layers.quantization import get_quantization_config

from portamoe.activations import SwiGLU
from portamoe.integrations.vllm import decision
from portamoe.reference import moe_reference
from portamoe.testing import assert_close
from tests.vllm.contract.layers import SPEC, forward, load, moe_config, of_ranks, problem_of
from tests.vllm.contract.runner import one_process_group, run_layer

pytestmark = pytest.mark.usefixtures("torch_backend")


def experts_of(layer):
    return layer.quant_method.moe_kernel.fused_experts


def test_routed_experts_give_the_reference_and_no_other_activation():
    problem = problem_of()
    layer = load(problem, moe_config())
    y = forward(layer, problem)
    assert_close(y, problem.reference(), roundings=1)
    silu = moe_reference(
        type(SPEC)(**{**vars(SPEC), "activation": SwiGLU()}), problem.weights, problem.x, problem.topk_ids,
        problem.topk_weights,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        assert_close(y, silu, roundings=4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_type(dtype):
    problem = problem_of()
    layer = load(problem, moe_config())
    assert_close(forward(layer, problem, problem.topk_ids.to(dtype)), problem.reference(), roundings=1)


def test_tensor_parallel_ranks_add_up_without_padding():
    """I = 3072 at 8 ranks is 384, which vLLM's own backends pad to 512."""
    spec = type(SPEC)(**{**vars(SPEC), "intermediate_size": 3072, "num_experts": 4, "top_k": 2,
                         "local_experts": range(4)})  # fmt: skip
    problem = problem_of(spec)
    total = torch.zeros_like(problem.x, dtype=torch.float32)
    for rank in range(8):
        layer = load(problem, moe_config(spec, tp=8, rank=rank))
        assert layer.w13_weight.shape == (4, 2 * 384, spec.hidden_size // 2)
        assert experts_of(layer).rank.spec.intermediate_size == 384
        total += forward(layer, problem).float()
    # Each rank rounds its partial sum to bf16.
    assert_close(total, problem.reference(), roundings=2)


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_expert_parallel_ranks_add_up(placement):
    problem = problem_of(tokens=9)
    total = torch.zeros_like(problem.x, dtype=torch.float32)
    for rank in range(8):
        layer = load(problem, moe_config(ep=8, rank=rank), placement)
        y = forward(layer, problem)
        assert experts_of(layer).rank.mapped == (placement == "round_robin")
        if placement == "linear":
            assert experts_of(layer).rank.spec.local_experts == range(2 * rank, 2 * rank + 2)
            assert_close(y, of_ranks(problem, 2 * rank, 2), roundings=1)
        total += y.float()
    assert_close(total, problem.reference(), roundings=2)


def test_nothing_local_and_one_token():
    problem = problem_of(tokens=1)
    layer = load(problem, moe_config(ep=8, rank=3))
    nothing = torch.tensor([[0, 1, -1, 15]], dtype=torch.int32)
    assert not forward(layer, problem, nothing).any()


def test_workspaces_are_those_that_were_announced_and_the_first_may_be_the_output(monkeypatch):
    problem = problem_of(tokens=7)
    layer = load(problem, moe_config(ep=2, rank=1))
    experts = experts_of(layer)
    expected = forward(layer, problem)
    shape13, shape2, shape_out = experts.workspace_shapes(7, 512, 128, 4, 16, 8, None, problem.spec.activation)
    assert shape_out == (7, 128)
    for poison in (0xFF, 0x7B, 0x00):
        size = max(torch.Size(shape13).numel(), torch.Size(shape_out).numel())
        common = torch.full((2 * size,), poison, dtype=torch.uint8).view(torch.bfloat16)
        workspace2 = torch.full((2 * torch.Size(shape2).numel(),), poison, dtype=torch.uint8).view(torch.bfloat16)
        guard = torch.full((64,), poison, dtype=torch.uint8)
        output = common[: 7 * 128].view(7, 128)
        experts.apply(
            output=output, hidden_states=problem.x, w1=layer.w13_weight, w2=layer.w2_weight,
            topk_weights=problem.topk_weights, topk_ids=problem.topk_ids, activation=layer.activation,
            global_num_experts=16, expert_map=layer.expert_map, a1q_scale=None, a2_scale=None,
            workspace13=common[: torch.Size(shape13).numel()].view(shape13), workspace2=workspace2,
            expert_tokens_meta=None, apply_router_weight_on_input=False,
        )  # fmt: skip
        assert torch.equal(output, expected)
        assert (guard == poison).all()
    with pytest.raises(ValueError, match="bytes of workspace, 7 tokens need"):
        experts.rank(output, problem.x, problem.topk_ids, problem.topk_weights, workspace2[:100], None)


def test_workspace_grows_with_the_tokens():
    """vLLM locks its workspace after the largest call: a smaller one must never need more."""
    experts = experts_of(load(problem_of(), moe_config()))
    sizes = [experts.workspace_shapes(m, 512, 128, 4, 16, 16, None, None)[1][0] for m in range(1, 70)]
    assert sizes == sorted(sizes)


def test_router_weights_on_the_input_are_not_applied_twice():
    problem = problem_of()
    layer = load(problem, moe_config())
    experts = experts_of(layer)
    ones = moe_reference(
        problem.spec, problem.weights, problem.x, problem.topk_ids, torch.ones_like(problem.topk_weights)
    )
    output = torch.empty_like(problem.x)
    workspace2 = torch.empty(experts.workspace_shapes(6, 512, 128, 4, 16, 16, None, None)[1], dtype=torch.bfloat16)
    experts.apply(output, problem.x, layer.w13_weight, layer.w2_weight, problem.topk_weights, problem.topk_ids,
                  layer.activation, 16, None, None, None, workspace2[:0], workspace2, None, True)  # fmt: skip
    assert_close(output, ones, roundings=1)


def test_weights_are_taken_over_once_and_leave_no_memory():
    problem = problem_of()
    layer = load(problem, moe_config())
    assert layer.w13_weight.shape == (16, 512, 64)
    assert layer.w13_weight.untyped_storage().nbytes() == 1
    assert not any(p.requires_grad for p in layer.parameters())
    with pytest.raises(RuntimeError, match="already taken w13_weight"):
        layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(RuntimeError):
        layer.w13_weight.data.copy_(torch.zeros(16, 512, 64, dtype=torch.uint8))


def test_full_runner(monkeypatch):
    """FusedMoEFactory -> MoERunner: routing, the modular kernel and the reduction are vLLM's."""
    monkeypatch.setattr(decision, "torch_device", lambda _: torch.device("cpu"))  # vLLM says "cuda"
    problem = problem_of(tokens=5)
    with one_process_group() as config:
        y, ids, weights = run_layer(problem, get_quantization_config("mxfp4").from_config({}), config)
    reference = moe_reference(problem.spec, problem.weights, problem.x, ids, weights)
    assert_close(y, reference, roundings=2)
