"""The operator on a GPU: compiled and captured calls of both Triton backends give an eager call's bits."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from portamoe.activations import SiTU
from portamoe.integrations.vllm.decision import decide, plain_torch
from portamoe.integrations.vllm.rank import RankExperts, placement
from portamoe.integrations.vllm.weights import PARAMETERS, take
from portamoe.layer import RoutedExperts
from portamoe.registry import named
from portamoe.spec import MoESpec
from portamoe.testing import assert_close, make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SPEC = MoESpec(
    hidden_size=256,
    intermediate_size=192,
    num_experts=24,
    top_k=6,
    activation=SiTU(beta=4.0, linear_beta=25.0),
    local_experts=range(4, 16),
)
BACKENDS = ("triton_unfused", "triton_fused")


def make(backend, tokens=64, spec=SPEC):
    problem = make_problem(spec, tokens, device="cuda", minus_one=0.1)
    layer = RoutedExperts(spec, problem.weights, max_tokens=tokens, device="cuda", backend=backend)
    layer.warm_up()
    return layer, problem


def given(tokens, seed, spec=SPEC):
    other = make_problem(spec, tokens, device="cuda", minus_one=0.1, seed=seed)
    return other.x, other.topk_ids, other.topk_weights


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend):
    layer, _ = make(backend)
    x, ids, weights = given(5, 1)
    op = torch.ops.portamoe.routed_experts.default
    results = torch.library.opcheck(op, (x, ids, weights, layer._workspace, torch.empty_like(x), layer._key))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend):
    layer, problem = make(backend)
    compiled = torch.compile(lambda *a: layer(*a) + 1, fullgraph=True, dynamic=True)
    for tokens in (64, 3, 17):
        args = given(tokens, tokens)
        assert torch.equal(compiled(*args), layer(*args) + 1)
    assert_close(layer(problem.x, problem.topk_ids, problem.topk_weights), problem.reference(), roundings=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_cuda_graphs(backend):
    """The workspace is written: Inductor captures such a graph only where its address never changes."""
    from torch._dynamo.utils import counters

    layer, _ = make(backend)
    counters.clear()
    compiled = torch.compile(lambda *a: layer(*a) * 2, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(5):
            args = given(16, seed)
            assert torch.equal(compiled(*args).clone(), layer(*args) * 2)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_captured_and_replayed_with_other_routing(backend, tokens):
    layer, _ = make(backend)
    static = tuple(t.clone() for t in given(tokens, 1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(*static)
    for seed in (2, 3):
        fresh = given(tokens, seed)
        for destination, source in zip(static, fresh, strict=True):
            destination.copy_(source)
        graph.replay()
        assert torch.equal(y, layer(*fresh))


@contextmanager
def vllm_building():
    """Set what vLLM sets while it builds a model, a default dtype and a device (here one that computes nothing)."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), plain_torch():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_plug_in_takes_a_kernel_of_ours_on_this_gpu():
    """The canary runs while vLLM builds a model."""
    parallel = SimpleNamespace(
        dp_size=1, use_all2all_kernels=False, use_ag_rs_all2all_kernels=False, enable_eplb=False, all2all_backend="none"
    )
    moe = SimpleNamespace(
        num_experts=24, num_local_experts=12, experts_per_token=6, hidden_dim=256, intermediate_size_per_partition=192,
        activation=SimpleNamespace(value="situ"), activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
        in_dtype=torch.bfloat16, device="cuda", moe_backend="auto", has_bias=False, is_lora_enabled=False,
        max_num_tokens=64, max_capture_size=64, moe_parallel_config=parallel,
    )  # fmt: skip
    with vllm_building():
        found = decide(moe)
    print(f"\n{found}")  # noqa: T201
    assert found.backend is not None or torch.cuda.get_device_capability() >= (10, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_on_memory_of_somebody_else_in_a_capture(backend):
    """What the vLLM plug-in runs: aliased first workspace, expert map, ids of other ranks, one more row of poison."""
    whole = replace(SPEC, local_experts=range(24))
    problem = make_problem(whole, 40, device="cuda", minus_one=0.1)
    expert_map = torch.full((24,), -1, dtype=torch.int32)
    expert_map[4:16] = torch.arange(12, dtype=torch.int32)
    place = placement(expert_map.cuda(), 12)
    assert place.local_experts == range(4, 16)
    module = torch.nn.Module()
    for ours, theirs in PARAMETERS.items():
        value = getattr(problem.weights, ours)[4:16].clone()
        module.register_parameter(theirs, torch.nn.Parameter(value, requires_grad=False))
    with vllm_building():
        rank = RankExperts(named(backend), take(module), SPEC, torch.device("cuda", 0), 40)
    common = torch.full((40 * 256,), float("nan"), dtype=torch.bfloat16, device="cuda")
    workspace = torch.full((-(-rank.workspace_bytes(40) // 2),), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = common.view(40, 256)
    args = (problem.x, problem.topk_ids, problem.topk_weights, workspace, expert_map.cuda())
    rank(out, *args)
    expected = out.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rank(out, *args)
    common.fill_(float("nan"))
    workspace.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
    local = replace(
        problem, spec=SPEC, weights=type(problem.weights)(
            **{n: v[4:16] for n, v in vars(problem.weights).items() if v is not None}
        ),
    )  # fmt: skip
    assert_close(out, local.reference(), roundings=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_taking_a_layer_over_needs_one_expert_more_than_its_weights(backend):
    spec = replace(SPEC, hidden_size=1024, intermediate_size=1024, num_experts=32, local_experts=range(32))
    problem = make_problem(spec, 8, device="cpu")
    module = torch.nn.Module()
    for ours, theirs in PARAMETERS.items():
        value = getattr(problem.weights, ours).cuda()
        module.register_parameter(theirs, torch.nn.Parameter(value, requires_grad=False))
        del value
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights = take(module)
    one = weights.expert(0).nbytes
    prepared = named(backend).prepare(weights, spec, torch.device("cuda", 0))
    extra = torch.cuda.max_memory_allocated() - before
    print(f"\n{backend}: {extra / one:.1f} experts above the loaded layer at most")  # noqa: T201
    assert prepared.nbytes <= 1.1 * one * 32
    # Temporaries of one expert's conversion are int64 indices and unpacked nibbles: several times its packed bytes.
    assert extra < 16 * one
