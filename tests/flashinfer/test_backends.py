"""The adapters end to end against the strict stand-ins, and the mistakes that must turn them red."""

import dataclasses
import inspect

import pytest
import torch
from safetensors.torch import load_file

from cuda_moe import flashinfer_base, flashinfer_call, flashinfer_layouts, flashinfer_trtllm
from cuda_moe.flashinfer_cutedsl import ATOMIC, FlashInferCuteDsl, activation_arguments
from cuda_moe.flashinfer_cutedsl import BACKEND as CUTEDSL
from cuda_moe.flashinfer_cutlass import BACKEND as CUTLASS
from cuda_moe.flashinfer_trtllm import BACKEND as TRTLLM
from portamoe.activations import GeGLU, SiTU, SwiGLU, SwiGLUOAI
from portamoe.checkpoints import load_experts
from portamoe.formats import nvfp4_quantize
from portamoe.spec import MoESpec
from portamoe.testing import assert_close, error_metrics, make_problem, tolerance
from tests.flashinfer import trees

NVFP4_TINY = "tests/data/kimi-k3-nvfp4-tiny"
MXFP4_TINY = "tests/data/kimi-k3-tiny"
SPEC = MoESpec(hidden_size=256, intermediate_size=192, num_experts=8, top_k=3, activation=SiTU(4.0, 25.0))
#: (backend, weights, activations, first version): every mode of the table.
MODES = {
    "cutedsl_w4a4": (CUTEDSL, "nvfp4", "nvfp4", "0.6.18"),
    "cutedsl_w4a16": (CUTEDSL, "nvfp4", "bf16", "0.7.0"),
    "cutedsl_w4a8": (CUTEDSL, "mxfp4", "mxfp8", "0.7.4"),
    "trtllm_nvfp4": (TRTLLM, "nvfp4", "nvfp4", "0.7.0"),
    "trtllm_mxfp8": (TRTLLM, "mxfp4", "mxfp8", "0.7.0"),
    "trtllm_bf16": (TRTLLM, "mxfp4", "bf16", "0.7.0"),
    "cutlass_w4a16": (CUTLASS, "mxfp4", "bf16", "0.7.0"),
}
NAMES = tuple(MODES)
CROOKED = 1.0371


def mode(name, **changes):
    backend, weights, activations, version = MODES[name]
    spec = dataclasses.replace(SPEC, weight_format=weights, activation_format=activations, **changes)
    return backend, spec, version


def one_scale(problem):
    """Give w1 and w3 one global scale, which is what kernels take; make_problem draws two.

    Input scales get a crooked factor, as calibrated ones have: with make_problem's, many block scales of x lie half-way
    between two E4M3 values, where a quantiser's order of operations decides.
    """
    weights = problem.weights
    if weights.w13_global_scale is None:
        return problem
    shared = weights.w13_global_scale[:, :1].repeat(1, 2)
    weights = dataclasses.replace(
        weights,
        w13_global_scale=shared,
        w13_input_scale=weights.w13_input_scale * CROOKED,
        w2_input_scale=weights.w2_input_scale * CROOKED,
    )
    return dataclasses.replace(problem, weights=weights)


def run(backend, spec, weights, x, ids, topk_weights, *, max_local_rows=None, prepared=None):
    prepared = prepared or backend.prepare(weights, spec, torch.device("cpu"))
    rows = max_local_rows or backend.default_max_local_rows(spec, x.shape[0])
    workspace = torch.full((backend.workspace_bytes(spec, x.shape[0], rows),), 0xFF, dtype=torch.uint8)
    out = torch.full_like(x, torch.nan)
    backend.forward(prepared, x, ids, topk_weights, workspace, out, max_local_rows=rows)
    return out


def run_problem(backend, problem, **kwargs):
    fields = (problem.weights, problem.x, problem.topk_ids, problem.topk_weights)
    return run(backend, problem.spec, *fields, **kwargs)


def roundings(spec):
    return 4 if spec.activation_format == "bf16" else spec.activation_format


@pytest.mark.parametrize("name", NAMES)
def test_every_mode_agrees_with_the_reference(install, name):
    backend, spec, version = mode(name)
    install(version)
    problem = one_scale(make_problem(spec, 17, minus_one=0.2))
    assert_close(run_problem(backend, problem), problem.reference(), roundings=roundings(spec))


@pytest.mark.parametrize("version", trees.VERSIONS)
def test_w4a4_on_every_version(install, version):
    backend, spec, _ = mode("cutedsl_w4a4")
    install(version)
    problem = one_scale(make_problem(spec, 5))
    assert_close(run_problem(backend, problem), problem.reference(), roundings="nvfp4")


@pytest.mark.parametrize("name", NAMES)
def test_padded_sizes(install, name):
    backend, spec, version = mode(name, hidden_size=288, intermediate_size=96)
    install(version)
    problem = one_scale(make_problem(spec, 6))
    assert_close(run_problem(backend, problem), problem.reference(), roundings=roundings(spec))


@pytest.mark.parametrize("name", NAMES)
def test_spread_experts_windows_duplicates_and_foreign_slots(install, name):
    backend, spec, version = mode(name, local_experts=range(2, 7))
    install(version)
    problem = one_scale(make_problem(spec, 9, routing="duplicates", minus_one=0.3))
    for window in (None, 2 * spec.top_k):
        y = run_problem(backend, problem, max_local_rows=window)
        assert_close(y, problem.reference(), roundings=roundings(spec))


@pytest.mark.parametrize("name", NAMES)
def test_a_token_without_local_experts_gives_zero_even_from_nan(install, name):
    backend, spec, version = mode(name, local_experts=range(4))
    install(version)
    problem = one_scale(make_problem(spec, 4))
    ids, x = problem.topk_ids.clone(), problem.x.clone()
    ids[1] = torch.tensor([-1, 7, 6])
    if spec.activation_format == "bf16":
        x[1] = torch.nan
    out = run(backend, spec, problem.weights, x, ids, problem.topk_weights)
    assert not out[1].any()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(install, name):
    backend, spec, version = mode(name)
    install(version)
    problem = one_scale(make_problem(spec, 1))
    prepared = backend.prepare(problem.weights, spec, torch.device("cpu"))
    empty = problem.x[:0]
    ids, weights = problem.topk_ids[:0], problem.topk_weights[:0]
    backend.forward(prepared, empty, ids, weights, torch.empty(0, dtype=torch.uint8), empty.clone(), max_local_rows=1)


ACTIVATIONS = [SiTU(2.0), SwiGLU(), SwiGLU(7.0), SwiGLUOAI(1.5, 5.0, 0.75), GeGLU("tanh")]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("name", ["cutedsl_w4a16", "cutedsl_w4a4"])
def test_cutedsl_activations(install, name, activation):
    backend, spec, _ = mode(name, activation=activation)
    install()
    problem = one_scale(make_problem(spec, 8))
    assert_close(run_problem(backend, problem), problem.reference(), roundings=roundings(spec))


@pytest.mark.parametrize("name", ["trtllm_nvfp4", "trtllm_mxfp8", "trtllm_bf16", "cutlass_w4a16"])
def test_plain_swiglu_elsewhere(install, name):
    backend, spec, version = mode(name, activation=SwiGLU())
    install(version)
    problem = one_scale(make_problem(spec, 8))
    assert_close(run_problem(backend, problem), problem.reference(), roundings=roundings(spec))


@pytest.mark.parametrize("name", ["trtllm_nvfp4", "cutlass_w4a16"])
def test_what_an_adapter_cannot_pass_raises(install, name):
    backend, spec, version = mode(name, activation=SiTU(4.0))
    install(version)
    with pytest.raises(TypeError, match="both betas"):
        run_problem(backend, one_scale(make_problem(spec, 2)))


def tiny(layer=1):
    spec, weights = load_experts(NVFP4_TINY, layer)
    return spec, weights, load_file(f"{NVFP4_TINY}/expected/layer_{layer}.safetensors")


def test_the_tiny_nvfp4_checkpoint(install):
    """w1 and w3 of its expert 3 differ in their global scale: folded, not taken from the gate."""
    install()
    spec, weights, data = tiny()
    y = run(CUTEDSL, spec, weights, data["x"], data["topk_ids"], data["topk_weights"])
    assert_close(y, data["y_ref"], roundings=4)
    own = error_metrics(y, data["y_ref"]).rms
    for wrong in ("y_if_silu", "y_if_w1_scale_2_for_both", "y_if_w3w1"):
        assert error_metrics(y, data[wrong]).rms > 4 * own


@pytest.mark.parametrize("backend", [CUTEDSL, TRTLLM], ids=lambda b: b.name)
def test_the_tiny_nvfp4_checkpoint_with_quantised_activations(install, backend):
    install()
    spec, weights, data = tiny()
    spec = dataclasses.replace(spec, activation_format="nvfp4")
    from portamoe.reference import moe_reference

    arguments = (data["x"], data["topk_ids"], data["topk_weights"])
    assert_close(run(backend, spec, weights, *arguments), moe_reference(spec, weights, *arguments), roundings="nvfp4")


@pytest.mark.parametrize("name", ["trtllm_bf16", "cutlass_w4a16"])
def test_the_tiny_mxfp4_checkpoint(install, name):
    install()
    spec, weights = load_experts(MXFP4_TINY, 2)
    data = load_file(f"{MXFP4_TINY}/expected/layer_2.safetensors")
    y = run(MODES[name][0], spec, weights, data["x"], data["topk_ids"], data["topk_weights"])
    assert_close(y, data["y_ref"], roundings=4)


def test_betas_that_are_dropped_are_caught_by_the_numbers():
    for name in ("cutedsl_w4a4", "trtllm_mxfp8", "cutlass_w4a16"):
        _, spec, _ = mode(name)
        problem = one_scale(make_problem(spec, 9))
        truth = problem.reference()
        swiglu = dataclasses.replace(problem, spec=dataclasses.replace(spec, activation=SwiGLU())).reference()
        bound = 4 * tolerance(roundings(spec)).rms
        assert error_metrics(swiglu, truth).rms > bound


@pytest.mark.parametrize("name", ["cutedsl_w4a4", "trtllm_mxfp8", "cutlass_w4a16"])
def test_a_kernel_that_ignores_the_betas_fails_the_comparison(install, name):
    backend, spec, version = mode(name)
    install(version, drop_situ=True)
    problem = one_scale(make_problem(spec, 9))
    with pytest.raises(AssertionError):
        assert_close(run_problem(backend, problem), problem.reference(), roundings=roundings(spec))


def test_the_canary_catches_dropped_betas(install):
    from portamoe import canary

    backend, spec, version = mode("cutedsl_w4a16")
    install(version, drop_situ=True)
    verdict = canary.run(backend, spec, ((None, 5),), torch.device("cpu"))
    assert not verdict.passed
    assert "SwiGLU instead of SiTU" in str(verdict.reason)


def test_the_canary_passes_where_betas_arrive(install):
    from portamoe import canary

    for name in ("cutedsl_w4a16", "cutedsl_w4a4", "trtllm_nvfp4", "cutlass_w4a16"):
        backend, spec, _ = mode(name)
        assert backend.name.startswith("flashinfer")
    install()
    for name in ("cutedsl_w4a16", "cutedsl_w4a4", "trtllm_nvfp4", "cutlass_w4a16"):
        backend, spec, _ = mode(name)
        assert canary.run(backend, spec, ((None, 5),), torch.device("cpu")).passed, name


# Every argument that carries meaning reaches the kernel.


@pytest.mark.parametrize("name", NAMES)
def test_arguments_arrive(install, calls, name):
    beta, linear_beta = 3.25, 17.5
    backend, spec, version = mode(name, activation=SiTU(beta, linear_beta), local_experts=range(2, 7))
    install(version)
    problem = one_scale(make_problem(spec, 4))
    run_problem(backend, problem)
    function, call = calls()[-1]
    if function.startswith("cute_dsl"):
        assert (call["situ_beta"], call["situ_linear_beta"]) == (beta, linear_beta)
        assert call["activation_type"] == 3
        assert (call["num_experts"], call["num_local_experts"], call["local_expert_offset"]) == (8, 5, 2)
        assert call["use_fused_finalize"] is False
        assert call.get("tactic", -1) == -1
    elif function.startswith("trtllm"):
        assert call["activation_type"] == 10
        assert call["gemm1_alpha"].tolist() == [beta] * 5
        assert call["gemm1_beta"].tolist() == [linear_beta] * 5
        assert (call["num_experts"], call["local_num_experts"], call["local_expert_offset"]) == (8, 5, 2)
    else:
        assert call["activation_type"] == 10
        assert call["situ_beta"].tolist() == [beta] * 5
        assert call["situ_linear_beta"].tolist() == [linear_beta] * 5


def test_no_linear_beta_is_no_argument(install, calls):
    backend, spec, version = mode("cutedsl_w4a4", activation=SiTU(2.0))
    install(version)
    run_problem(backend, one_scale(make_problem(spec, 2)))
    assert calls()[-1][1]["situ_linear_beta"] is None


def test_the_atomic_variant_is_another_backend(install, calls):
    _, spec, version = mode("cutedsl_w4a4")
    install(version)
    problem = one_scale(make_problem(spec, 3))
    assert_close(run_problem(ATOMIC, problem), problem.reference(), roundings="nvfp4")
    assert calls()[-1][1]["use_fused_finalize"] is True
    assert ATOMIC.name != CUTEDSL.name
    assert ATOMIC.only_on_request(spec, None) is not None
    assert CUTEDSL.only_on_request(spec, None) is None
    assert FlashInferCuteDsl().deterministic
    assert not ATOMIC.deterministic


def test_scales_of_trtllm(install, calls):
    """SiTU's output scale holds no gate scale, SwiGLU's does (vllm-project/vllm pull 52405)."""
    for activation, folded in ((SiTU(4.0, 25.0), False), (SwiGLU(), True)):
        backend, spec, version = mode("trtllm_nvfp4", activation=activation)
        if not folded:
            install(version)
        problem = one_scale(make_problem(spec, 2))
        run_problem(backend, problem)
        call = calls()[-1][1]
        factor = 1 / float(problem.weights.w2_input_scale.max())
        gate = call["output1_scale_gate_scalar"]
        expected = gate * factor if folded else torch.full_like(gate, factor)
        assert torch.allclose(call["output1_scale_scalar"], expected, rtol=1e-6)
        inputs = problem.weights.w13_input_scale.max()
        assert torch.allclose(gate, problem.weights.w13_global_scale[:, 0] * inputs, rtol=1e-6)


def test_distinct_scales_of_every_expert(install):
    """Factors of 1, 3 and 0.5 between experts, input scales 0.25 and 2: every expert by itself is right."""
    backend, spec, version = mode("cutedsl_w4a4", num_experts=3, top_k=1, local_experts=range(3))
    install(version)
    problem = one_scale(make_problem(spec, 6))
    weights = problem.weights
    factors = torch.tensor([1.0, 3.0, 0.5])
    weights = dataclasses.replace(
        weights,
        w13_global_scale=weights.w13_global_scale * factors[:, None],
        w2_global_scale=weights.w2_global_scale * factors.flip(0),
        w13_input_scale=weights.w13_input_scale * 0.25,
        w2_input_scale=weights.w2_input_scale * 2.0,
    )
    for expert in range(3):
        ids = torch.full_like(problem.topk_ids, expert)
        changed = dataclasses.replace(problem, weights=weights, topk_ids=ids)
        assert_close(run_problem(backend, changed), changed.reference(), roundings="nvfp4")


def test_the_largest_input_scale_serves_all(install):
    backend, spec, version = mode("cutedsl_w4a4")
    install(version)
    weights = one_scale(make_problem(spec, 2)).weights
    inputs = torch.linspace(0.001, 0.002, 16).view(8, 2)
    weights = dataclasses.replace(weights, w13_input_scale=inputs, w2_input_scale=inputs[:, 0].clone())
    prepared = backend.prepare(weights, spec, torch.device("cpu"))
    assert torch.allclose(1 / prepared.x_factor, inputs.max())
    assert torch.allclose(prepared.w13_alpha, weights.w13_global_scale[:, 0] * inputs.max())
    assert torch.allclose(1 / prepared.h_factor, inputs[:, 0].max())


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
    with pytest.raises(flashinfer_call.FlashInferEnvironmentError, match="4OVER6"):
        backend.prepare(make_problem(spec, 1).weights, spec, torch.device("cpu"))


# What FlashInfer may be like when it is imported.


def test_no_flashinfer_at_all(install):
    with pytest.raises(flashinfer_call.FlashInferUnavailableError, match="ModuleNotFoundError"):
        flashinfer_call.load(("fp4_quantize",))


def test_functions_that_vanish_without_triton(install):
    install(without=("cute_dsl_fused_moe", "cute_dsl_fused_moe_nvfp4"))
    with pytest.raises(flashinfer_call.FlashInferUnavailableError, match="triton"):
        flashinfer_call.load(CUTEDSL.functions)


def test_a_parameter_that_is_missing(install):
    install("0.6.18")
    with pytest.raises(flashinfer_call.FlashInferUnavailableError, match="situ_beta"):
        flashinfer_call.load(CUTLASS.functions)


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
    layouts = flashinfer_layouts.arrange
    monkeypatch.setattr(
        flashinfer_layouts, "arrange", lambda w, rows: layouts(w, dataclasses.replace(rows, first="gate"))
    )


def no_shift(monkeypatch):
    monkeypatch.setattr(flashinfer_layouts, "swizzle_scale", lambda scale: scale.contiguous())


def folded_twice(monkeypatch):
    def wrong(prepared):
        return prepared.w13_alpha * prepared.h_factor

    monkeypatch.setattr(flashinfer_trtllm, "_output1_scale", wrong)


def no_padding_of_x(monkeypatch):
    original = flashinfer_base._padded

    def wrong(x, out, layout, workspace):
        wide, result = original(x, out, layout, workspace)
        if layout.hidden_pad:
            wide[:, layout.hidden :] = 1e4
            wide[:, : layout.hidden].roll(1, 1)
        return wide.roll(1, 1), result

    monkeypatch.setattr(flashinfer_base, "_padded", wrong)


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("cutedsl_w4a16", swapped),
        ("cutedsl_w4a4", no_shift),
        ("trtllm_nvfp4", folded_twice),
        ("trtllm_mxfp8", swapped),
        ("cutlass_w4a16", swapped),
        ("cutedsl_w4a16", no_padding_of_x),
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
    from tests.flashinfer import strict_kernels

    packed, scale = strict_kernels.quantise_nvfp4(x, torch.tensor([50.0]))
    expected, expected_scale, _ = nvfp4_quantize(x, torch.tensor(1 / 50.0))
    assert (packed != expected).float().mean() < 0.01
    assert (scale.float() - expected_scale.float()).abs().max() <= 0.07 * expected_scale.float().max()


def test_activation_arguments_name_what_is_missing():
    with pytest.raises(TypeError, match="GeGLU"):
        activation_arguments(GeGLU())
    assert "situ_beta" in inspect.getsource(activation_arguments)
