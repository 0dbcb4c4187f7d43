"""triton_unfused on a GPU: full sizes against the reference, windows, graphs, hooks, memory beyond 2^31 elements.

The tests named `small` are for compute-sanitizer: compute-sanitizer python -m pytest tests/rocm/test_on_gpu.py -k small
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from portamoe.activations import SiTU  # noqa: E402
from portamoe.spec import GPT_OSS, KIMI_K3, MoESpec  # noqa: E402
from portamoe.testing import assert_close, edge_case, make_problem, make_routing, make_x  # noqa: E402
from portamoe.testing.problems import Problem  # noqa: E402
from rocm_moe import plan  # noqa: E402
from rocm_moe.triton_unfused import BACKEND  # noqa: E402
from tests.rocm.unfused_calls import call  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SPECS = {
    "EP8": replace(KIMI_K3, local_experts=range(112)),
    "TP8": replace(KIMI_K3, intermediate_size=384),
    "gpt-oss": GPT_OSS,
}
FEW = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
TOKENS = (*FEW, 1024, 4096, 8192)
SMALL = ("typical", "gpt_oss", "rank_in_middle", "22_of_160", "duplicates", "896_experts", "all_to_one", "skew")


class Layer:
    """A layer at full size, prepared once for all tests of a spec."""

    def __init__(self, spec):
        self.first = make_problem(spec, 8, device="cuda")
        self.prepared = BACKEND.prepare(self.first.weights, spec, torch.device("cuda", 0))
        self.report = BACKEND.warm_up(self.prepared, 8192, BACKEND.default_max_local_rows(spec, 8192))

    def problem(self, tokens, seed=0, **routing):
        spec, weights = self.first.spec, self.first.weights
        generator = torch.Generator(device="cuda").manual_seed(1000 * seed + tokens)
        ids, weight = make_routing(spec, tokens, generator, **routing)
        std = float(self.first.x.float().std())
        return Problem(spec, weights, make_x(tokens, spec.hidden_size, std, generator).bfloat16(), ids, weight)

    def __call__(self, problem, rows=None, **hooks):
        return call(problem, max_local_rows=rows, prepared=self.prepared, **hooks)


@pytest.fixture(scope="module", params=SPECS)
def layer(request):
    made = Layer(SPECS[request.param])
    yield made
    del made
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tokens", TOKENS)
def test_values_repeats_and_both_id_types(layer, tokens):
    problem = layer.problem(tokens)
    out = layer(problem)
    assert_close(out, problem.reference(), roundings=BACKEND.roundings)
    assert torch.equal(out, layer(problem))
    assert torch.equal(out, layer(replace(problem, topk_ids=problem.topk_ids.long())))


@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize("routing", ["skew", "same", "one_expert", "duplicates", "none_local", "minus_one"])
def test_uneven_routing(layer, routing, tokens):
    if routing == "none_local" and layer.first.spec.num_local_experts == layer.first.spec.num_experts:
        problem = replace(layer.problem(tokens), topk_ids=torch.full_like(layer.problem(tokens).topk_ids, -1))
    else:
        problem = layer.problem(tokens, **({"minus_one": 0.4} if routing == "minus_one" else {"routing": routing}))
    out = layer(problem)
    if routing == "none_local":
        assert bool((out == 0).all())
    else:
        assert_close(out, problem.reference(), roundings=BACKEND.roundings)


def test_windows_give_the_same_bits(layer):
    problem = layer.problem(512, routing="skew")
    whole = layer(problem)
    for rows in (16, 64, 500, 1024, 3000):
        assert torch.equal(layer(problem, rows=rows), whole), rows


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 1024])
def test_a_captured_call_follows_its_inputs(layer, tokens):
    spec, one, other = layer.first.spec, layer.problem(tokens), layer.problem(tokens, seed=7)
    inputs = [t.clone() for t in (one.x, one.topk_ids, one.topk_weights)]
    rows = BACKEND.default_max_local_rows(spec, tokens)
    workspace = torch.empty(BACKEND.workspace_bytes(spec, tokens, rows), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(one.x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        BACKEND.forward(layer.prepared, *inputs, workspace, out, max_local_rows=rows)
    for target, source in zip(inputs, (other.x, other.topk_ids, other.topk_weights), strict=True):
        target.copy_(source)
    out.fill_(float("nan"))
    workspace.fill_(0xFF)
    graph.replay()
    assert torch.equal(out, layer(other))


def test_nothing_compiles_after_warm_up(layer, monkeypatch):
    assert layer.report.binaries <= 24

    def compiled(*_):
        raise AssertionError("a kernel was compiled after warm_up")

    monkeypatch.setattr("rocm_moe.triton_compat.compile_variant", compiled)
    everything = layer.problem(8192)
    for tokens in (*range(1, 200), 255, 256, 257, 511, 513, 1000, 2047, 2049, 4095, 8191):
        part = (everything.x[:tokens], everything.topk_ids[:tokens], everything.topk_weights[:tokens])
        layer(Problem(everything.spec, everything.weights, *part))


def test_hooks_see_every_row_and_may_change_it(layer):
    problem = layer.problem(300)
    plain, seen = layer(problem), []

    def double(rows, row_map):
        seen.append((row_map.token.clone(), row_map.slot.clone(), row_map.expert.clone(), int(row_map.count)))
        rows *= 2.0

    assert torch.equal(layer(problem, after_gemm2=double), plain * 2.0)
    token, slot, expert, count = seen[0]
    flat, local = problem.topk_ids.flatten(), problem.spec.local_experts
    pairs = ((flat >= local.start) & (flat < local.stop)).nonzero().flatten()
    order = pairs[flat[pairs].sort(stable=True).indices]
    assert count == len(order)
    assert torch.equal(token[:count] * problem.spec.top_k + slot[:count], order.int())
    assert torch.equal(expert[:count], flat[order])

    def clear(rows, row_map):
        rows.zero_()

    assert bool((layer(problem, after_gemm1=clear) == 0).all() or problem.spec.bias)


@pytest.mark.parametrize(("experts", "top_k"), [(1024, 16), (8, 8)], ids=["1024-experts", "8-experts"])
def test_2_to_the_20_pairs(experts, top_k):
    activation = SiTU(4.0, 25.0)
    spec = MoESpec(hidden_size=256, intermediate_size=64, num_experts=experts, top_k=top_k, activation=activation)
    problem = make_problem(spec, 2**20 // top_k, device="cuda")
    assert_close(call(problem), problem.reference(), roundings=BACKEND.roundings)


def test_more_than_2_to_the_31_elements():
    spec = MoESpec(hidden_size=3584, intermediate_size=64, num_experts=18, top_k=16, activation=SiTU(4.0, 25.0))
    tokens = 2**31 // (spec.hidden_size * spec.top_k) + 1000
    sizes = plan.sizes(spec, tokens, 10**9)
    assert sizes.whole * spec.hidden_size > 2**31
    if torch.cuda.mem_get_info()[0] < 4 * sizes.nbytes:
        pytest.skip(f"needs {4 * sizes.nbytes / 2**30:.0f} GiB of free memory")
    problem = make_problem(spec, tokens, device="cuda")
    whole = call(problem, max_local_rows=10**9)
    assert_close(whole, problem.reference(), roundings=BACKEND.roundings)
    assert torch.equal(call(problem, max_local_rows=300_000), whole)


@pytest.mark.parametrize("rows", [16, None], ids=["windows", "one-window"])
@pytest.mark.parametrize("name", SMALL)
def test_small_shapes(name, rows):
    case = edge_case(name)
    problem = make_problem(case.spec, case.tokens, routing=case.routing, device="cuda")
    out = call(problem, max_local_rows=rows)
    assert_close(out, problem.reference(), roundings=BACKEND.roundings)


def test_small_chunks_of_the_alignment(monkeypatch):
    monkeypatch.setattr(plan, "MOST_CHUNKS", 3)
    plan.sizes.cache_clear()
    try:
        problem = make_problem(replace(edge_case("skew").spec, top_k=5), 400, routing="skew", device="cuda")
        assert plan.sizes(problem.spec, 400, 10**6).blocks > 1
        assert_close(call(problem, max_local_rows=10**6), problem.reference(), roundings=BACKEND.roundings)
    finally:
        plan.sizes.cache_clear()
