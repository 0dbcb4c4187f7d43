"""`portamoe.linear` without a GPU: values, shapes, refusals, and what it asks of a provider."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import portamoe  # noqa: E402
from portamoe import projections  # noqa: E402
from portamoe.linear_provider import MOST_ROWS, TORCH_ONLY, LinearTable, providers  # noqa: E402
from portamoe.projections import LinearPlan  # noqa: E402
from tests.host_recordings import recorded  # noqa: E402

N, K = 24, 32


@pytest.fixture(autouse=True)
def fresh():
    projections.resolve.cache_clear()
    yield
    projections.resolve.cache_clear()


def problem(*rows, dtype=torch.float32):
    g = torch.Generator().manual_seed(sum(rows))
    x = torch.randn(*rows, K, generator=g).to(dtype)
    w = torch.randn(N, K, generator=g).to(dtype)
    return x, w, torch.randn(*rows, N, generator=g).to(dtype)


class Recorder:
    """A kernel that computes with torch and remembers what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, weight, out, residual=None, *, pdl=False):
        self.calls.append((x, weight, residual, pdl))
        y = x.float() @ weight.float().T
        out.copy_(y if residual is None else y + residual.float())


@pytest.fixture
def kernel(monkeypatch):
    """Make every bf16 weight on the CPU eligible, and one kernel serve 1 to 8 rows."""
    recorder = Recorder()
    served = LinearTable((recorder,) * 8 + (None,) * 8, ("recorder",) * 8 + ("torch",) * 8)
    monkeypatch.setattr(projections, "_eligible", lambda w: w.dtype == torch.bfloat16 and w.is_contiguous())
    monkeypatch.setattr(projections, "resolve", lambda n, k, device: served)
    monkeypatch.setattr(projections.resolve, "cache_clear", lambda: None, raising=False)
    return recorder


@pytest.mark.parametrize("rows", [(1,), (16,), (17,), (2, 3), (), (0,)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_values_on_the_cpu(rows, with_residual):
    x, w, residual = problem(*rows)
    y = portamoe.linear(x, w, residual if with_residual else None)
    truth = x.double() @ w.double().T + (residual.double() if with_residual else 0)
    assert y.shape == (*rows, N)
    torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("m", range(1, 9))
def test_planned_rows_go_to_the_kernel_and_others_to_torch(kernel, m):
    x, w, residual = problem(m, dtype=torch.bfloat16)
    truth = x.double() @ w.double().T + residual.double()
    y = portamoe.linear(x, w, residual)
    assert len(kernel.calls) == 1
    assert float((y.double() - truth).norm() / truth.norm()) <= 3e-3
    wide, _, _ = problem(m + 8, dtype=torch.bfloat16)
    portamoe.linear(wide, w)
    assert len(kernel.calls) == 1


def test_the_kernel_gets_plain_tensors(kernel):
    x, w, residual = problem(2, 3, dtype=torch.bfloat16)
    strided = torch.empty(2, 3, 2 * K, dtype=torch.bfloat16)[..., ::2].copy_(x)
    y = portamoe.linear(strided, w, residual, pdl=True)
    (given, _, added, pdl) = kernel.calls[0]
    assert given.shape == (6, K)
    assert given.is_contiguous()
    assert given.data_ptr() % 16 == 0
    assert added.shape == (6, N)
    assert pdl is True
    torch.testing.assert_close(y, portamoe.linear(x, w, residual))
    odd = torch.empty(K + 1, dtype=torch.bfloat16)[1:].copy_(x[0, 0])
    portamoe.linear(odd, w)
    assert kernel.calls[-1][0].data_ptr() % 16 == 0


def test_what_the_kernel_must_not_get_goes_to_torch(kernel):
    x, w, _ = problem(2, dtype=torch.bfloat16)
    portamoe.linear(x, w.t().contiguous().t())
    wanted = w.clone().requires_grad_()
    y = portamoe.linear(x, wanted)
    assert kernel.calls == []
    y.sum().backward()
    assert wanted.grad is not None
    with torch.no_grad():
        portamoe.linear(x, wanted)
    assert len(kernel.calls) == 1


def test_a_plan_is_resolved_once_and_serves_the_same(kernel):
    x, w, residual = problem(3, dtype=torch.bfloat16)
    plan = LinearPlan(w)
    assert plan.names[2] == "recorder"
    assert plan.names[8] == "torch"
    torch.testing.assert_close(plan(x, residual), portamoe.linear(x, w, residual))
    assert len(kernel.calls) == 2


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(2, K + 1)}, ValueError, r"\(2, 33\)"),
        ({"w": torch.zeros(K)}, ValueError, "do not fit"),
        ({"w": torch.zeros(N, K, dtype=torch.float16)}, TypeError, "float16"),
        ({"residual": torch.zeros(3, N)}, ValueError, r"\(3, 24\)"),
        ({"residual": torch.zeros(2, N, dtype=torch.float64)}, TypeError, "float64"),
        ({"residual": torch.zeros(2, N, device="meta")}, ValueError, "meta"),
    ],
)
def test_wrong_arguments_are_refused_with_what_came(change, error, words):
    given = {"x": torch.zeros(2, K), "w": torch.zeros(N, K), "residual": None} | change
    with pytest.raises(error, match=words):
        portamoe.linear(given["x"], given["w"], given["residual"])


def test_the_variable_keeps_projections_with_torch(monkeypatch):
    monkeypatch.setenv("PORTAMOE_LINEAR", "torch")
    assert projections.resolve(1536, 7168, torch.device("cuda", 0)) is TORCH_ONLY
    projections.resolve.cache_clear()
    monkeypatch.setenv("PORTAMOE_LINEAR", "cublas")
    with pytest.raises(ValueError, match="'cublas'"):
        projections.resolve(1536, 7168, torch.device("cuda", 0))


def test_providers_are_found_by_vendor():
    assert [p.name for p in providers(recorded("h200").devices[0])] == ["skinny"]
    assert [p.name for p in providers(recorded("lumi-g").devices[0])] == ["skinny_gemv"]
    assert providers(recorded("cpu-only").devices[0]) == ()


def test_a_table_answers_for_every_number_of_rows():
    h200 = recorded("h200", vendor={"triton": "3.6.0"}).devices[0]
    provider = providers(h200)[0]
    table = provider.table(99, 7168, h200)
    assert table is None
    assert len(TORCH_ONLY.kernels) == len(TORCH_ONLY.names) == MOST_ROWS


def test_the_name_is_the_function_whatever_was_imported_before():
    code = "import portamoe, portamoe.projections; from portamoe import linear; assert callable(portamoe.linear)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120,
                           env={"PYTHONPATH": "common:.", "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize(("rows", "n", "k"), [(3, 24, 0), (3, 0, 24), (0, 24, 8)])
def test_empty_products_add_the_residual(rows, n, k):
    residual = torch.randn(rows, n)
    assert torch.equal(portamoe.linear(torch.randn(rows, k), torch.randn(n, k), residual), residual)


def test_a_residual_is_added_before_the_one_rounding():
    g = torch.Generator().manual_seed(3)
    x, weight, residual = (torch.randn(*shape, generator=g).bfloat16() for shape in ((32, 512), (64, 512), (32, 64)))
    exact = x.double() @ weight.double().T + residual.double()
    once = (portamoe.linear(x, weight, residual) == exact.bfloat16()).float().mean()
    twice = ((x.double() @ weight.double().T).bfloat16() + residual == exact.bfloat16()).float().mean()
    assert twice < 0.8
    assert once > 0.95
