"""One rank's experts on borrowed memory: placements, workspaces, poison, and weights that are taken over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from portamoe.activations import SiTU
from portamoe.integrations.vllm.rank import Placement, RankExperts, placement
from portamoe.integrations.vllm.weights import PARAMETERS, take
from portamoe.spec import MoESpec
from portamoe.testing import assert_close, make_problem
from portamoe.torch_backend import BACKEND

CPU = torch.device("cpu")
SPEC = MoESpec(
    hidden_size=64, intermediate_size=96, num_experts=8, top_k=3, activation=SiTU(beta=4.0, linear_beta=25.0)
)


def map_of(*here, total=8):
    out = torch.full((total,), -1, dtype=torch.int32)
    out[list(here)] = torch.arange(len(here), dtype=torch.int32)
    return out


def slice_of(problem, experts):
    index = torch.tensor(experts)
    return type(problem.weights)(**{n: v[index] for n, v in vars(problem.weights).items() if v is not None})


def call(rank, problem, expert_map=None, poison=0x00, ids=None):
    x = problem.x
    workspace = torch.full((-(-rank.workspace_bytes(x.shape[0]) // 2) * 2,), poison, dtype=torch.uint8)
    out = torch.full_like(x, torch.nan)
    ids = problem.topk_ids if ids is None else ids
    rank(out, x, ids, problem.topk_weights, workspace.view(torch.bfloat16), expert_map)
    return out


def test_placements():
    assert placement(None, 8) == Placement(range(8), mapped=False)
    assert placement(map_of(4, 5), 2) == Placement(range(4, 6), mapped=False)
    assert placement(map_of(1, 5), 2) == Placement(range(2), mapped=True)
    swapped = map_of(4, 5)
    swapped[[4, 5]] = swapped[[5, 4]]
    assert placement(swapped, 2) == Placement(range(2), mapped=True)
    with pytest.raises(ValueError, match="expected each of 0 … 2"):
        placement(map_of(4, 5), 3)


@pytest.mark.parametrize("here", [(2, 3, 4), (0, 3, 6), (6, 0, 3)])
def test_any_placement_gives_the_partial_sum_of_its_experts(here):
    problem = make_problem(SPEC, 9, minus_one=0.2)
    expert_map = map_of(*here)
    place = placement(expert_map, 3)
    assert place.mapped == (here != (2, 3, 4))
    spec = replace(SPEC, local_experts=place.local_experts)
    rank = RankExperts(BACKEND, slice_of(problem, here), spec, CPU, 16, mapped=place.mapped)
    expected = torch.zeros(9, 64)
    for expert in here:
        one = replace(problem, spec=replace(SPEC, local_experts=range(expert, expert + 1)),
                      weights=slice_of(problem, [expert]))  # fmt: skip
        expected += one.reference()
    for ids in (problem.topk_ids, problem.topk_ids.long()):
        assert_close(call(rank, problem, expert_map, ids=ids), expected, roundings=1)


def test_workspace_may_hold_anything_and_lie_anywhere():
    problem = make_problem(SPEC, 5)
    rank = RankExperts(BACKEND, problem.weights, SPEC, CPU, 16)
    expected = call(rank, problem)
    for poison in (0xFF, 0x7B):
        assert torch.equal(call(rank, problem, poison=poison), expected)
    big = torch.full((rank.workspace_bytes(5) + 600,), 0xFF, dtype=torch.uint8)
    for start in (2, 130):
        out = torch.empty_like(problem.x)
        part = big[start : start + rank.workspace_bytes(5)]
        rank(out, problem.x, problem.topk_ids, problem.topk_weights, part, None)
        assert torch.equal(out, expected)
        assert (big[start + rank.workspace_bytes(5) :] == 0xFF).all()
    with pytest.raises(ValueError, match="vLLM gave 100 bytes of workspace, 5 tokens need"):
        rank(out, problem.x, problem.topk_ids, problem.topk_weights, big[:100], None)


def test_more_tokens_than_announced_take_more_windows():
    problem = make_problem(SPEC, 40)
    rank = RankExperts(BACKEND, problem.weights, SPEC, CPU, 4)
    assert_close(call(rank, problem), problem.reference(), roundings=1)


def test_inputs_need_not_be_contiguous_nor_the_weights_float32():
    problem = make_problem(SPEC, 6)
    rank = RankExperts(BACKEND, problem.weights, SPEC, CPU, 16)
    expected = call(rank, problem)
    spread = replace(problem, x=problem.x.T.contiguous().T, topk_ids=problem.topk_ids.T.contiguous().T)
    assert not spread.x.is_contiguous()
    assert torch.equal(call(rank, spread), expected)
    half = replace(problem, topk_weights=problem.topk_weights.bfloat16())
    exact = replace(problem, topk_weights=half.topk_weights.float())
    assert torch.equal(call(rank, half), call(rank, exact))


def test_weights_are_taken_without_a_copy_on_a_cpu_and_only_once():
    problem = make_problem(SPEC, 4)
    module = torch.nn.Module()
    for ours, theirs in PARAMETERS.items():
        module.register_parameter(theirs, torch.nn.Parameter(getattr(problem.weights, ours), requires_grad=False))
    addresses = {ours: getattr(module, theirs).data_ptr() for ours, theirs in PARAMETERS.items()}
    weights = take(module)
    for ours, theirs in PARAMETERS.items():
        assert getattr(weights, ours).data_ptr() == addresses[ours]
        left = getattr(module, theirs)
        assert left.shape == getattr(weights, ours).shape
        assert left.untyped_storage().nbytes() == 1
    assert_close(call(RankExperts(BACKEND, weights, SPEC, CPU, 8), problem), problem.reference(), roundings=1)
    with pytest.raises(RuntimeError, match="already taken w13_weight"):
        take(module)
