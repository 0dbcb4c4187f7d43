"""`portamoe::routed_experts`: one opaque node for whoever traces torch, with the layer's numbers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from portamoe import custom_op
from portamoe.activations import SiTU
from portamoe.layer import RoutedExperts
from portamoe.spec import MoESpec
from portamoe.testing import assert_close, make_problem

SPEC = MoESpec(
    hidden_size=64,
    intermediate_size=64,
    num_experts=8,
    top_k=3,
    activation=SiTU(beta=4.0, linear_beta=25.0),
    local_experts=range(2, 7),
)
OP = torch.ops.portamoe.routed_experts.default


@pytest.fixture
def problem():
    return make_problem(SPEC, 6)


@pytest.fixture
def layer(problem):
    return make(problem)


def make(problem, **kwargs) -> RoutedExperts:
    arguments = {"max_tokens": 16, "device": "cpu", "backend": "torch"} | kwargs
    return RoutedExperts(problem.spec, problem.weights, **arguments)


def inputs(problem):
    return problem.x, problem.topk_ids, problem.topk_weights


def nodes(graph):
    """Return the operators of a graph, and how many of them are ours."""
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    return called, sum(target is OP for target in called)


def test_opcheck(problem, layer):
    for tokens in (1, 6):
        args = tuple(t[:tokens].contiguous() for t in inputs(problem))
        given = (*args, layer._workspace, torch.empty_like(args[0]), layer._key)
        results = torch.library.opcheck(OP, given)
        assert set(results.values()) == {"SUCCESS"}
        assert len(results) == 4


def test_schema_declares_what_is_written(problem, layer):
    written = [a.name for a in OP._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["workspace", "out"]
    x = [t.clone() for t in inputs(problem)]
    out = torch.empty_like(problem.x)
    OP(*inputs(problem), layer._workspace, out, layer._key)
    assert all(torch.equal(a, b) for a, b in zip(x, inputs(problem), strict=True))
    assert_close(out, problem.reference(), roundings=1)


def test_eager_calls_go_past_the_dispatcher(problem, layer, monkeypatch):
    expected = layer(*inputs(problem))
    monkeypatch.setattr(custom_op, "call", None)
    assert torch.equal(layer(*inputs(problem)), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(problem, layer, backend):
    if backend == "inductor":
        pytest.importorskip("triton")
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (6, 9, 2):
        other = make_problem(SPEC, tokens, seed=tokens)
        given = (other.x, other.topk_ids, other.topk_weights)
        assert torch.equal(compiled(*given), layer(*given))


def test_a_compiled_graph_holds_one_node_a_layer(problem):
    layers = [make(problem) for _ in range(3)]
    layers.append(make(problem, workspace=layers[0]._workspace))
    seen = []

    def spy(graph, _):
        seen.append(graph.graph)
        return graph

    def model(x, ids, weights):
        for layer in layers:
            x = layer(x, ids, weights) + 1
        return x

    given = inputs(problem)
    assert torch.equal(torch.compile(model, fullgraph=True, backend=spy)(*given), model(*given))
    called, ours = nodes(seen[0])
    assert ours == 4
    assert len(called) == 4 * 3  # empty_like, the operator, the sum


def test_the_callers_out_is_written(problem, layer):
    expected = layer(*inputs(problem))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def into(x, ids, weights, out):
        return layer(x, ids, weights, out=out) * 2

    out = torch.full_like(problem.x, torch.nan)
    assert torch.equal(into(*inputs(problem), out), expected * 2)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export(problem, layer, strict):
    tokens = torch.export.Dim("T", min=2, max=16)
    exported = torch.export.export(layer, inputs(problem), strict=strict, dynamic_shapes=({0: tokens},) * 3)
    assert nodes(exported.graph)[1] == 1
    other = make_problem(SPEC, 9, seed=3)
    given = (other.x, other.topk_ids, other.topk_weights)
    assert torch.equal(exported.module()(*given), layer(*given))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(problem, layer, mode):
    graph = make_fx(layer, tracing_mode=mode)(*inputs(problem))
    assert nodes(graph.graph)[1] == 1
    assert torch.equal(graph(*inputs(problem)), layer(*inputs(problem)))


def test_jit_trace(problem, layer):
    traced = torch.jit.trace(layer, inputs(problem), check_trace=False)
    assert "portamoe::routed_experts" in str(traced.inlined_graph)
    other = make_problem(SPEC, 6, seed=5)
    given = (other.x, other.topk_ids, other.topk_weights)
    assert torch.equal(traced(*given), layer(*given))


@pytest.mark.parametrize("active", [False, True])
def test_fake_tensors(problem, layer, active, monkeypatch):
    monkeypatch.setattr(layer, "backend", None)  # nothing may be computed
    mode = FakeTensorMode()
    x, ids, weights = (mode.from_tensor(t) for t in inputs(problem))
    if active:
        with mode:
            y = layer(x, ids, weights)
    else:
        y = layer(x, ids, weights)
    assert isinstance(y, FakeTensor)
    assert (y.shape, y.dtype) == (problem.x.shape, torch.bfloat16)


def test_fake_tensors_of_other_sizes_are_refused(problem, layer):
    mode = FakeTensorMode()
    x, ids, weights = (mode.from_tensor(t) for t in inputs(problem))
    with pytest.raises(ValueError, match=r"topk_ids has shape \(6, 2\), expected \(6, 3\)"):
        layer(x, ids[:, :2], weights)
    with pytest.raises(TypeError, match=r"topk_weights is torch\.float16"):
        layer(x, ids, weights.half())


def test_a_dispatch_mode_sees_the_operator(problem, layer):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        layer(*inputs(problem))
    assert OP in seen


def test_cpu_checks_still_raise_inside_a_compiled_graph(problem, layer):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ids = problem.topk_ids.clone()
    ids[4, 1] = 8
    with pytest.raises(ValueError, match=r"topk_ids\[4, 1\] is 8, expected -1 or 0 … 7"):
        compiled(problem.x, ids, problem.topk_weights)
    many = make_problem(SPEC, 17)
    with pytest.raises(ValueError, match="17 tokens, the layer was made for max_tokens=16"):
        compiled(many.x, many.topk_ids, many.topk_weights)


def test_no_backward(problem, layer):
    x = problem.x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        layer(x, problem.topk_ids, problem.topk_weights)
    with pytest.raises(Exception, match="no backward"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x, problem.topk_ids, problem.topk_weights)


# --- the table of layers ----------------------------------------------------------------------------------------------


def test_many_layers_come_and_go_without_a_trace(problem):
    before = len(custom_op._LAYERS)
    keys = set()
    for _ in range(50):
        layer = make(problem)
        keys.add(layer._key)
        alive = weakref.ref(layer)
        del layer
        assert alive() is None  # at once: nothing but the caller held it
    assert len(keys) == 50
    assert len(custom_op._LAYERS) == before


def test_a_graph_that_outlives_its_layer_raises(problem):
    layer = make(problem)
    graph = make_fx(layer, tracing_mode="real")(*inputs(problem))
    key = layer._key
    expected = layer(*inputs(problem))
    assert torch.equal(graph(*inputs(problem)), expected)
    del layer
    gc.collect()
    other = make(make_problem(SPEC, 6, seed=9))  # must not be found in its place
    assert other._key != key
    with pytest.raises(RuntimeError, match=f"no layer '{key}' in this process"):
        graph(*inputs(problem))


def test_compiled_layers_are_told_apart(problem):
    one, two = make(problem), make(make_problem(SPEC, 6, seed=9))

    def model(layer, x, ids, weights):
        return layer(x, ids, weights)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for layer in (one, two, one):
        assert torch.equal(compiled(layer, *inputs(problem)), layer(*inputs(problem)))
    assert not torch.equal(one(*inputs(problem)), two(*inputs(problem)))


# --- hooks ------------------------------------------------------------------------------------------------------------


class Recorder:
    """A backend with hooks, in place of the layer's."""

    name = "recorder"
    x_dtypes = ("bfloat16",)

    def __init__(self):
        self.hooks = []

    def forward(self, prepared, x, topk_ids, topk_weights, workspace, out, *, max_local_rows, **hooks):
        self.hooks.append(hooks)
        out.zero_()


def test_hooks_of_a_layer_reach_compiled_calls_and_those_of_a_call_do_not(problem, layer):
    layer.backend = recorder = Recorder()

    def hook(rows, row_map): ...

    layer.set_hooks(after_gemm1=hook, after_gemm2=None)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(*inputs(problem))
    layer(*inputs(problem))
    layer(*inputs(problem), after_gemm2=hook)
    assert recorder.hooks == [{"after_gemm1": hook}, {"after_gemm1": hook}, {"after_gemm2": hook}]
    with pytest.raises(TypeError, match=r"hooks \['after_gemm2'\] of one call cannot be traced"):
        layer(*(FakeTensorMode().from_tensor(t) for t in inputs(problem)), after_gemm2=hook)
    layer.set_hooks()
    compiled(*inputs(problem))
    assert recorder.hooks[-1] == {}


def test_a_backend_without_hooks_says_so_in_a_compiled_call(problem, layer):
    layer.set_hooks(after_gemm1=print)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(TypeError, match="the torch backend has no hooks"):
        compiled(*inputs(problem))
