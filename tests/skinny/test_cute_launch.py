"""Launching the CuteDSL kernels: what is refused before any of it is imported; cute_contract compiles the kernels."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from cuda_moe.skinny import cute_launch, registry
from cuda_moe.skinny.cute_parameters import parse
from cuda_moe.skinny.plan import Choice


@pytest.fixture
def asked_afresh():
    cute_launch.available.cache_clear()
    yield
    cute_launch.available.cache_clear()


def tensors(m=2, n=32, k=1024):
    bf16 = {"dtype": torch.bfloat16}
    return torch.randn(m, k, **bf16), torch.randn(n, k, **bf16), torch.empty(m, n, **bf16)


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        (lambda x, w, o: (x.float(), w, o), TypeError, "x is torch.float32"),
        (lambda x, w, o: (x, w.half(), o), TypeError, "weight is torch.float16"),
        (lambda x, w, o: (x, w, o.float()), TypeError, "out is torch.float32"),
        (lambda x, w, o: (x[0], w, o), ValueError, r"x \(1024,\)"),
        (lambda x, w, o: (x[:, :512].contiguous(), w, o), ValueError, r"needs \(M, K\) and \(N, K\)"),
        (lambda x, w, o: (torch.cat([x, x], 1)[:, :1024], w, o), ValueError, "x has strides"),
        (lambda x, w, o: (x, w.T.contiguous().T, o), ValueError, "weight has strides"),
        (lambda x, w, o: (x, w, o[:1]), ValueError, r"out is \(1, 32\); needs \(2, 32\)"),
        (lambda x, w, o: (torch.cat([x] * 9), w, o), ValueError, "M=18"),
        (lambda x, w, o: (x, w, o), ValueError, "needs a CUDA device"),
    ],
)
@pytest.mark.parametrize("variant", ["cute_gemv", "cute_mma"])
def test_tensors_that_no_kernel_takes_are_refused(variant, change, error, what):
    with pytest.raises(error, match=what):
        cute_launch.launch(variant, *change(*tensors()))


def test_misaligned_x_is_refused():
    x, weight, out = tensors()
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    with pytest.raises(ValueError, match="x is not aligned to 16 bytes"):
        cute_launch.launch("cute_mma", shifted, weight, out)


def test_a_residual_has_the_shape_of_the_output():
    x, weight, out = tensors()
    with pytest.raises(ValueError, match="residual"):
        cute_launch.launch("cute_mma", x, weight, out, out[:1])


def test_importing_loads_no_cutedsl():
    code = "import sys, cuda_moe.skinny.cute_launch as c; c.available(); print('cutlass' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("version", [None, "4.2.0"])
def test_a_missing_or_old_cutedsl_is_a_reason(monkeypatch, asked_afresh, version):
    def found(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    reason = cute_launch.available()
    assert reason is not None
    assert reason.value == (version or "not installed")
    assert "portamoe[cute]" in reason.remedy


def test_building_without_cutedsl_says_why(monkeypatch):
    reason = cute_launch.Reason("nvidia-cutlass-dsl", "not installed", ">= 4.8", "install it")
    monkeypatch.setattr(cute_launch, "available", lambda: reason)
    with pytest.raises(cute_launch.CuteUnavailable, match="not installed"):
        cute_launch.build("cute_mma", 7168, 1, "sm_90a")


def test_warm_up_passes_over_other_kernels_and_checks_the_rest():
    cute_launch.warm_up([{"kernel": "torch", "n": 1, "k": 1, "m": 1, "parameters": {}}], "cuda:0")
    with pytest.raises(ValueError, match="K=100"):
        cute_launch.warm_up([{"kernel": "cute_mma", "n": 64, "k": 100, "m": 1, "parameters": {}}], "cuda:0")


def test_an_eager_dependent_call_compiles_for_the_capture_and_launches_ordinarily(monkeypatch):
    launched, warmed, capturing = [], [], [False]
    monkeypatch.setattr(cute_launch, "launch", lambda *_, pdl, **__: launched.append(pdl))
    monkeypatch.setattr(cute_launch, "warm_up", lambda entries, _: warmed.extend(entries))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    parameters = parse("cute_gemv", {"threads": 224, "outputs": 2, "ahead": 2})
    call = registry.bind(Choice("cute_gemv", parameters), 1536, 7168, 2, torch.device("cuda"))
    call(None, None, None, None, pdl=True)
    capturing[0] = True
    call(None, None, None, None, pdl=True)
    assert launched == [False, True]
    assert [(e["n"], e["k"], e["m"], e["residual"], e["pdl"]) for e in warmed] == [(1536, 7168, 2, False, True)]
