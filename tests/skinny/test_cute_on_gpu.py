"""The CuteDSL kernels on a GPU: values at every M, capture, and what programmatic launch is refused for."""

import pytest
import torch

from cuda_moe.skinny import cute_launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(cute_launch.available() is not None, reason="needs CuteDSL"),
]

#: Relative RMS against float64: the rounding of the result to bf16 alone gives 1.7e-3.
TOLERANCE = 2e-3
SPLIT = {"rows": 32, "split": 2, "warps": 7}
CASES = (
    ("cute_mma", 1536, 7168, {"rows": 48, "split": 4, "warps": 7}),
    ("cute_mma", 1001, 3584, SPLIT),  # the last tile is not full
    ("cute_mma", 7168, 1536, {"rows": 16, "warps": 6, "per_sm": 2}),  # several tiles a CTA
    ("cute_mma", 520, 768, {"rows": 8, "warps": 3, "chunk": 256, "stages": 1}),
    ("cute_gemv", 1001, 7168, {"threads": 224, "outputs": 4}),
)


def problem(n, k, m, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    draw = {"device": "cuda", "generator": generator}
    x, weight = torch.randn(m, k, **draw).bfloat16(), (torch.randn(n, k, **draw) * k**-0.5).bfloat16()
    residual = torch.randn(m, n, **draw).bfloat16()
    return x, weight, residual, torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(("variant", "n", "k", "parameters"), CASES)
@pytest.mark.parametrize("added", [False, True])
def test_values(variant, n, k, parameters, added):
    for m in range(1, 17) if variant == "cute_mma" else (1, 2, 3, 8):
        x, weight, residual, out = problem(n, k, m, seed=m)
        cute_launch.launch(variant, x, weight, out, residual if added else None, **parameters)
        truth = x.double() @ weight.double().T + (residual.double() if added else 0)
        assert (out.double() - truth).norm() <= TOLERANCE * truth.norm(), m
        again = torch.full_like(out, float("nan"))
        cute_launch.launch(variant, x, weight, again, residual if added else None, **parameters)
        assert torch.equal(out, again), m


def test_a_residual_may_be_the_output():
    x, weight, residual, out = problem(1536, 7168, 5)
    cute_launch.launch("cute_mma", x, weight, out, residual, **CASES[0][3])
    cute_launch.launch("cute_mma", x, weight, residual, residual, **CASES[0][3])
    assert torch.equal(out, residual)


def test_nothing_compiles_in_a_capture():
    x, weight, _, out = problem(64, 1024, 2)
    parameters = {"rows": 16, "warps": 4, "chunk": 64}
    with pytest.raises(RuntimeError, match="warm_up"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cute_launch.launch("cute_mma", x, weight, out, **parameters)
    cute_launch.warm_up([{"kernel": "cute_mma", "n": 64, "k": 1024, "m": 2, "parameters": parameters}])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cute_launch.launch("cute_mma", x, weight, out, **parameters)
    graph.replay()
    assert torch.isfinite(out).all()


def warmed(n, k, m):
    entry = {"kernel": "cute_mma", "n": n, "k": k, "m": m, "parameters": SPLIT}
    cute_launch.warm_up([entry, {**entry, "pdl": True}])
    return problem(n, k, m)


def test_programmatic_launch_wants_a_producer_in_the_same_capture():
    x, weight, _, out = warmed(1536, 7168, 4)
    with pytest.raises(ValueError, match="outside a capture"):
        cute_launch.launch("cute_mma", x, weight, out, pdl=True, **SPLIT)
    with pytest.raises(ValueError, match="0 nodes"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cute_launch.launch("cute_mma", x, weight, out, pdl=True, **SPLIT)

    def after_a_join():
        side = torch.cuda.Stream()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.mul_(1)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                weight.mul_(1)
            x.mul_(1)
            torch.cuda.current_stream().wait_stream(side)
            cute_launch.launch("cute_mma", x, weight, out, pdl=True, **SPLIT)

    with pytest.raises(ValueError, match="2 nodes"):
        after_a_join()


def test_a_chain_of_programmatic_launches_sees_each_result():
    x, down, _, hidden = warmed(3584, 7168, 4)
    _, up, _, out = warmed(7168, 3584, 4)
    cute_launch.launch("cute_mma", x, down, hidden, **SPLIT)
    cute_launch.launch("cute_mma", hidden, up, out, **SPLIT)
    want, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden.fill_(float("nan"))
        out.fill_(float("nan"))
        cute_launch.launch("cute_mma", x, down, hidden, pdl=True, **SPLIT)
        cute_launch.launch("cute_mma", hidden, up, out, pdl=True, **SPLIT)
    for _ in range(500):
        graph.replay()
        assert torch.equal(out, want)
