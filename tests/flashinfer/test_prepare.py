"""What `prepare` refuses, what FlashInfer may be like at import, and the mistakes that must turn the numbers red."""

import dataclasses

import pytest
import torch

from cuda_moe.flashinfer import base, call, cutlass, layouts, trtllm
from cuda_moe.flashinfer.cutedsl import BACKEND as CUTEDSL
from cuda_moe.flashinfer.cutedsl import activation_arguments
from cuda_moe.flashinfer.cutlass import BACKEND as CUTLASS
from cuda_moe.flashinfer.trtllm import BACKEND as TRTLLM
from portamoe.activations import GeGLU
from portamoe.formats import nvfp4_quantize
from portamoe.testing import assert_close, make_problem
from tests.flashinfer import strict_kernels
from tests.flashinfer.problems import NAMES, SPEC, mode, one_scale, roundings, run_problem

# Weights that a kernel cannot express are refused, with the expert's number.


def test_global_scales_that_do_not_fold_are_refused(install):
    backend, spec, version = mode("cutedsl_w4a16")
    install(version)
    weights = make_problem(spec, 1).weights
    scales = weights.w13_global_scale.clone()
    scales[5, 1] = scales[5, 0] * 1.1
    weights = dataclasses.replace(weights, w13_global_scale=scales)
    with pytest.raises(ValueError, match=r"local expert \d.*torch backend"):
        backend.prepare(weights, spec, torch.device("cpu"))


@pytest.mark.parametrize("name", ["cutedsl_w4a4", "cutlass_w4a16"])
def test_nan_scales_are_refused(install, name):
    backend, spec, version = mode(name)
    install(version)
    weights = one_scale(make_problem(spec, 1)).weights
    weights.w2_scale.view(torch.uint8)[3, 0, 0] = 0x7F if spec.weight_format == "nvfp4" else 255
    with pytest.raises(ValueError, match="w2_scale of local expert 3"):
        backend.prepare(weights, spec, torch.device("cpu"))


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_input_scales_must_be_positive(install, value):
    backend, spec, version = mode("cutedsl_w4a4")
    install(version)
    weights = one_scale(make_problem(spec, 1)).weights
    weights.w13_input_scale[2] = value
    with pytest.raises(ValueError, match="local expert 2"):
        backend.prepare(weights, spec, torch.device("cpu"))


def test_weights_of_another_backend_are_refused(install):
    install()
    _, spec, _ = mode("cutedsl_w4a4")
    problem = one_scale(make_problem(spec, 1))
    prepared = TRTLLM.prepare(problem.weights, spec, torch.device("cpu"))
    with pytest.raises(TypeError, match="flashinfer_trtllm"):
        run_problem(CUTEDSL, problem, prepared=prepared)
    with pytest.raises(TypeError, match="no hooks"):
        CUTEDSL.forward(prepared, problem.x, None, None, None, None, max_local_rows=1, after_gemm1=print)


def test_the_environment_is_read_again_at_load(install, monkeypatch):
    backend, spec, version = mode("cutedsl_w4a4")
    install(version)
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    with pytest.raises(call.FlashInferEnvironmentError, match="4OVER6"):
        backend.prepare(make_problem(spec, 1).weights, spec, torch.device("cpu"))


# What FlashInfer may be like when it is imported.


def test_no_flashinfer_at_all(install):
    with pytest.raises(call.FlashInferUnavailableError, match="ModuleNotFoundError"):
        call.load(("fp4_quantize",))


def test_functions_that_vanish_without_triton(install):
    install(without=("cute_dsl_fused_moe", "cute_dsl_fused_moe_nvfp4"))
    with pytest.raises(call.FlashInferUnavailableError, match="triton"):
        call.load(CUTEDSL.functions)


def test_a_parameter_that_is_missing(install):
    install("0.6.18")
    with pytest.raises(call.FlashInferUnavailableError, match="situ_beta"):
        call.load(CUTLASS.functions)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_told_beforehand(install, name):
    backend, spec, version = mode(name, hidden_size=288, intermediate_size=96)
    install(version)
    prepared = backend.prepare(one_scale(make_problem(spec, 1)).weights, spec, torch.device("cpu"))
    told = backend.prepared_bytes(spec)
    assert prepared.nbytes - told == prepared.w13_alpha.nbytes + prepared.w2_alpha.nbytes


def test_warm_up_runs_every_bucket(install, calls):
    backend, spec, version = mode("cutedsl_w4a16")
    install(version)
    prepared = backend.prepare(one_scale(make_problem(spec, 1)).weights, spec, torch.device("cpu"))
    report = backend.warm_up(prepared, 6, 6 * spec.top_k)
    assert report.binaries == 4
    assert [call["x"].shape[0] for name, call in calls() if name.startswith("cute")] == [1, 2, 4, 6]


# Mutations: each of these mistakes has to turn a test red, so the tests can fail.


def swapped(monkeypatch):
    arrange = layouts.arrange
    monkeypatch.setattr(layouts, "arrange", lambda w, rows: arrange(w, dataclasses.replace(rows, first="gate")))


def no_shift(monkeypatch):
    monkeypatch.setattr(layouts, "swizzle_scale", lambda scale: scale.contiguous())


def folded_twice(monkeypatch):
    def wrong(prepared):
        return prepared.w13_alpha * prepared.h_factor

    monkeypatch.setattr(trtllm, "_output1_scale", wrong)


def shifted_x(monkeypatch):
    original = base._padded

    def wrong(x, out, layout, workspace):
        wide, result = original(x, out, layout, workspace)
        return wide.roll(1, 1), result

    monkeypatch.setattr(base, "_padded", wrong)


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("cutedsl_w4a16", swapped),
        ("cutedsl_w4a4", no_shift),
        ("trtllm_nvfp4", folded_twice),
        ("trtllm_mxfp8", swapped),
        ("cutlass_w4a16", swapped),
        ("cutedsl_w4a16", shifted_x),
    ],
)
def test_a_mistake_shows(install, monkeypatch, name, break_it):
    backend, spec, version = mode(name)
    install(version)
    problem = one_scale(make_problem(spec, 9))
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        assert_close(run_problem(backend, problem), problem.reference(), roundings=roundings(spec))


def test_the_stand_ins_quantiser_agrees_with_the_formats():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    packed, scale = strict_kernels.quantise_nvfp4(x, torch.tensor([50.0]))
    expected, expected_scale, _ = nvfp4_quantize(x, torch.tensor(1 / 50.0))
    assert (packed != expected).float().mean() < 0.01
    assert (scale.float() - expected_scale.float()).abs().max() <= 0.07 * expected_scale.float().max()


def test_activation_arguments_name_what_is_missing():
    with pytest.raises(TypeError, match="GeGLU"):
        activation_arguments(GeGLU())


def test_only_this_ranks_experts_keep_their_ids():
    """Ids on both sides of the range become -1 with weight 0, an expert named twice is named once with both weights."""
    ids = torch.tensor([[1, 2, 4, 5], [-1, 8, 3, 3], [6, 2, 2, 2]])
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]])
    spec = dataclasses.replace(SPEC, local_experts=range(2, 5))
    local, factors = call.localised(ids, weights, spec)
    assert local.tolist() == [[-1, 2, 4, -1], [-1, -1, 3, -1], [-1, 2, -1, -1]]
    expected = torch.tensor([[0.0, 0.2, 0.3, 0.0], [0.0, 0.0, 0.7, 0.0], [0.0, 0.9, 0.0, 0.0]])
    torch.testing.assert_close(factors, expected)
    assert (local.dtype, factors.dtype) == (torch.int32, torch.float32)


def test_routing_needs_no_value_on_the_host():
    """Calls are captured in graphs: under fake tensors every look at a value raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    spec = dataclasses.replace(SPEC, local_experts=range(2, 5))
    with FakeTensorMode():
        ids, weights = torch.zeros(7, 3, dtype=torch.int64), torch.zeros(7, 3)
        local, factors = call.localised(ids, weights, spec)
        own, scaled, here = cutlass.filled(ids, weights, spec)
    assert local.shape == factors.shape == own.shape == scaled.shape == (7, 3)
    assert here.shape == (7,)
