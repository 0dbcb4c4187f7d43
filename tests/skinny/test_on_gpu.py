"""`portamoe.linear` and its kernels on a GPU: values, repeatability, poisoned outputs, streams, capture."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import portamoe  # noqa: E402
from cuda_moe.skinny import launch  # noqa: E402
from cuda_moe.skinny.parameters import TritonFragments, TritonGemv, TritonMma  # noqa: E402
from cuda_moe.skinny.plan import load_plan  # noqa: E402
from portamoe.projections import LinearPlan, resolve  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOLERANCE = 2e-3
#: cuBLAS may round the parts of a split K to bf16 before it adds them.
TORCH_TOLERANCE = 4e-3
#: A tile of each kernel that takes the shapes below; the split one counts arrivals.
TILES = (
    TritonGemv(2, 4, 1),
    TritonGemv(1, 8, 2),
    TritonMma(16, 4, 64, 4),
    TritonMma(16, 4, 32, 3, 4),
    TritonFragments(16, 4, 2, ahead=True),
    TritonFragments(8, 4, 4),
    TritonFragments(32, 2, 2),
)
#: Even, and with masks of rows and of K.
SHAPES = ((192, 2048), (100, 1184))


def problem(n, k, m, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed + 31 * n + k + m)
    x, w = (torch.randn(rows, k, device="cuda", generator=g).bfloat16() for rows in (m, n))
    return x, w, torch.randn(m, n, device="cuda", generator=g).bfloat16()


def rms(y, x, w, residual=None):
    truth = x.double() @ w.double().T
    if residual is not None:
        truth += residual.double()
    return float((y.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_for_every_number_of_rows(tile, shape):
    n, k = shape
    for m in (1, 2, 3, 5, 8, 9, 16):
        try:
            call = launch.bind(tile, n, k, m, torch.device("cuda", 0))
        except ValueError:
            assert isinstance(tile, TritonGemv)  # too many sums a thread
            continue
        x, w, residual = problem(n, k, m)
        for added in (None, residual):
            out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
            call(x, w, out, added)
            assert rms(out, x, w, added) <= TOLERANCE, (m, added is None)
            again = torch.full_like(out, float("nan"))
            call(x, w, again, added)
            assert torch.equal(out, again)


def test_planned_shapes_for_1_to_16_rows():
    plan = load_plan(torch.cuda.get_device_capability(), {})
    if plan is None:
        pytest.skip("no plan for this device")
    for n, k in plan.entries:
        if n * k > 30e6:
            continue
        _, w, _ = problem(n, k, 1)
        layer = LinearPlan(w)
        for m in range(1, 17):
            x, _, residual = problem(1, k, m)[0], None, problem(n, 64, m)[2]
            tolerance = TORCH_TOLERANCE if layer.names[m - 1] == "torch" else TOLERANCE
            for added in (None, residual):
                assert rms(layer(x, added), x, w, added) <= tolerance, (n, k, m, layer.names[m - 1])


def test_what_is_not_a_plain_tensor_is_handled():
    n, k = next(iter(load_plan((9, 0), {}).entries))
    x, w, residual = problem(n, k, 4)
    wide = torch.randn(4, 2 * k, device="cuda").bfloat16()
    assert rms(portamoe.linear(wide[:, ::2], w), wide[:, ::2], w) <= TOLERANCE
    odd = torch.randn(4 * k + 1, device="cuda").bfloat16()[1:].view(4, k)  # not aligned
    assert rms(portamoe.linear(odd, w), odd, w) <= TOLERANCE
    y = portamoe.linear(x.view(2, 2, k), w, residual.view(2, 2, n))
    assert rms(y.view(4, n), x, w, residual) <= TORCH_TOLERANCE
    many, _, _ = problem(1, k, 40)
    assert rms(portamoe.linear(many, w), many, w) <= TORCH_TOLERANCE
    columns = w.t().contiguous().t()
    assert rms(portamoe.linear(x, columns), x, w) <= TORCH_TOLERANCE


def test_a_capture_replays_with_new_inputs_and_programmatic_launches():
    n, k = 512, 2048
    x, w, _ = problem(n, k, 8)
    back = problem(k, n, 8)[1]
    for tile in TILES[2:]:
        down, up = (launch.bind(tile, *shape, 8, torch.device("cuda", 0)) for shape in ((n, k), (k, n)))
        h, y = (torch.empty(8, size, dtype=torch.bfloat16, device="cuda") for size in (n, k))
        for pdl in (False, True):
            down(x, w, h)
            up(h, back, y, pdl=pdl)
            down(y, w, h, pdl=pdl)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            down(x, w, h)
            up(h, back, y, pdl=True)
            down(y, w, h, pdl=True)
        for seed in range(20):
            x.copy_(problem(n, k, 8, seed)[0])
            h.fill_(float("nan"))
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            first = (x.double() @ w.double().T).bfloat16()
            assert rms(y, first, back) <= 4e-3
            assert rms(h, y, w) <= TOLERANCE


def test_the_first_split_product_of_a_weight_cannot_be_captured():
    n, k = 64, 2048
    x, w, _ = problem(n, k, 4)
    call = launch.bind(TritonMma(16, 4, 32, 3, 4), n, k, 4, torch.device("cuda", 0))
    out = torch.empty(4, n, dtype=torch.bfloat16, device="cuda")
    call(x, w, out)
    other = w.clone()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="outside"), torch.cuda.graph(graph):
        call(x, other, out)


def test_a_shape_is_resolved_once():
    w = torch.zeros(1536, 7168, dtype=torch.bfloat16, device="cuda")
    assert LinearPlan(w)._table is resolve(1536, 7168, w.device)
