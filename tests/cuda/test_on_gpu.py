"""The fused backend on a GPU: every path against the reference, windows, graphs, repeatability, no late compilation.

Small shapes, so that compute-sanitizer can watch: compute-sanitizer python -m pytest tests/cuda/test_on_gpu.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cuda_moe.triton_fused import BACKEND, BATCH_INVARIANT  # noqa: E402
from portamoe.activations import GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep  # noqa: E402
from portamoe.spec import MoESpec  # noqa: E402
from portamoe.testing import error_metrics, make_problem  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SMALL = MoESpec(hidden_size=256, intermediate_size=192, num_experts=24, top_k=6, activation=SiTU(4.0, 25.0))
SPECS = {
    "small": SMALL,
    "rank": replace(SMALL, local_experts=range(7, 12)),
    "half_blocks": replace(SMALL, hidden_size=288, intermediate_size=96),
    "biases": replace(SMALL, activation=SwiGLUOAI(alpha=1.702, limit=7.0), bias=True),
    "bf16": replace(SMALL, weight_format="bf16"),
}
ACTIVATIONS = {
    "situ_up": SiTU(4.0),
    "swiglu": SwiGLU(),
    "swiglu_limit": SwiGLU(limit=7.0),
    "swiglu_step": SwiGLUStep(limit=7.0),
    "geglu": GeGLU(),
    "geglu_tanh": GeGLU(approximate="tanh"),
    "relu2": ReLU2(),
}
#: Pairs or direct, leaders or listed, narrow, wide of one width, wide of three widths and of the widest.
TOKENS = (1, 5, 16, 20, 90, 300, 700)


class Layer:
    """One prepared layer with a poisoned workspace between guards."""

    def __init__(self, problem, backend=BACKEND):
        self.backend, self.spec = backend, problem.spec
        self.prepared = backend.prepare(problem.weights, problem.spec, torch.device("cuda", 0))

    def __call__(self, x, ids, weights, rows=None):
        tokens = x.shape[0]
        rows = rows or self.backend.default_max_local_rows(self.spec, tokens)
        size = self.backend.workspace_bytes(self.spec, tokens, rows)
        guarded = torch.full((size + 512,), 0xFF, dtype=torch.uint8, device="cuda")
        out = torch.full_like(x, float("nan"))
        workspace = guarded[256 : 256 + size]
        self.backend.forward(self.prepared, x, ids, weights, workspace, out, max_local_rows=rows)
        assert bool((guarded[:256] == 0xFF).all())
        assert bool((guarded[256 + size :] == 0xFF).all())
        return out


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", SPECS)
def test_values_and_repeats(name, tokens):
    problem = make_problem(SPECS[name], tokens, device="cuda", minus_one=0.1)
    layer, inputs = Layer(problem), (problem.x, problem.topk_ids, problem.topk_weights)
    first = layer(*inputs)
    metrics = error_metrics(first, problem.reference())
    assert metrics.rms <= 0.0035
    assert metrics.max <= 0.025
    assert torch.equal(first, layer(*inputs))


@pytest.mark.parametrize("tokens", [3, 60])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, tokens):
    problem = make_problem(replace(SMALL, activation=ACTIVATIONS[name]), tokens, device="cuda")
    metrics = error_metrics(Layer(problem)(problem.x, problem.topk_ids, problem.topk_weights), problem.reference())
    assert metrics.rms <= 0.0035
    assert metrics.max <= 0.025


@pytest.mark.parametrize("activation", [SwiGLUOAI(alpha=1.702, limit=7.0), SwiGLU(limit=7.0), SwiGLUStep(limit=7.0)])
def test_a_token_of_nan_stays_nan_alone(activation):
    problem = make_problem(replace(SMALL, activation=activation), 40, device="cuda")
    problem.x[7] = float("nan")
    nan = Layer(problem)(problem.x, problem.topk_ids, problem.topk_weights).isnan()
    assert nan[7].all()
    assert int(nan.any(1).sum()) == 1


@pytest.mark.parametrize("routing", ["duplicates", "skew", "none_local"])
@pytest.mark.parametrize("tokens", [3, 12, 200, 900])
def test_odd_routing(routing, tokens):
    spec = SMALL if routing == "duplicates" else replace(SMALL, local_experts=range(7, 12))
    problem = make_problem(spec, tokens, device="cuda", routing=routing)
    layer, inputs = Layer(problem), (problem.x, problem.topk_ids, problem.topk_weights)
    out = layer(*inputs)
    assert error_metrics(out, problem.reference()).rms <= 0.0035
    assert torch.equal(out, layer(*inputs))


@pytest.mark.parametrize("tokens", [60, 700])
def test_windows_give_the_same_bits(tokens):
    problem = make_problem(SMALL, tokens, device="cuda", routing="skew")
    layer, inputs = Layer(problem), (problem.x, problem.topk_ids, problem.topk_weights)
    assert torch.equal(layer(*inputs), layer(*inputs, rows=256))


def test_a_token_alone_equals_itself_in_a_batch():
    problem = make_problem(SMALL, 300, device="cuda")
    layer, inputs = Layer(problem, BATCH_INVARIANT), (problem.x, problem.topk_ids, problem.topk_weights)
    whole = layer(*inputs)
    for tokens in (1, 16, 77):
        part = layer(*(t[:tokens].contiguous() for t in inputs))
        assert torch.equal(part, whole[:tokens])


@pytest.mark.parametrize("tokens", [1, 5, 12, 50, 400])
def test_replay_follows_its_inputs(tokens):
    spec = replace(SMALL, local_experts=range(7, 12)) if tokens == 5 else SMALL
    problem, other = (make_problem(spec, tokens, device="cuda", seed=seed) for seed in (0, 9))
    layer = Layer(problem)
    rows = BACKEND.default_max_local_rows(spec, tokens)
    workspace = torch.empty(BACKEND.workspace_bytes(spec, tokens, rows), dtype=torch.uint8, device="cuda")
    inputs = [t.clone() for t in (problem.x, problem.topk_ids, problem.topk_weights)]
    out = torch.empty_like(problem.x)
    BACKEND.forward(layer.prepared, *inputs, workspace, out, max_local_rows=rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        BACKEND.forward(layer.prepared, *inputs, workspace, out, max_local_rows=rows)
    for target, source in zip(inputs, (other.x, other.topk_ids, other.topk_weights), strict=True):
        target.copy_(source)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, layer(*inputs))


def test_nothing_compiles_after_warm_up_and_graphs_follow_their_inputs():
    from cuda_moe.prepared import compiled_binaries

    problem = make_problem(SMALL, 40, device="cuda")
    other = make_problem(SMALL, 40, device="cuda", seed=9)
    layer = Layer(problem)
    rows = BACKEND.default_max_local_rows(SMALL, 40)
    BACKEND.warm_up(layer.prepared, 40, rows)
    before = compiled_binaries()
    workspace = torch.empty(BACKEND.workspace_bytes(SMALL, 40, rows), dtype=torch.uint8, device="cuda")
    inputs = [t.clone() for t in (problem.x, problem.topk_ids, problem.topk_weights)]
    out = torch.empty_like(problem.x)
    for tokens in range(1, 41):
        part = [t[:tokens] for t in inputs]
        BACKEND.forward(layer.prepared, *part, workspace, out[:tokens], max_local_rows=rows)
    assert compiled_binaries() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        BACKEND.forward(layer.prepared, *inputs, workspace, out, max_local_rows=rows)
    for target, source in zip(inputs, (other.x, other.topk_ids, other.topk_weights), strict=True):
        target.copy_(source)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, layer(*inputs))
