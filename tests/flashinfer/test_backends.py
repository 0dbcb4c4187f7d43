"""The adapters end to end against the strict stand-ins: numbers, and that every argument arrives."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from cuda_moe.flashinfer import base
from cuda_moe.flashinfer.cutedsl import ATOMIC, FlashInferCuteDsl
from cuda_moe.flashinfer.cutedsl import BACKEND as CUTEDSL
from cuda_moe.flashinfer.trtllm import BACKEND as TRTLLM
from portamoe.activations import GeGLU, SiTU, SwiGLU, SwiGLUOAI
from portamoe.checkpoints import load_experts
from portamoe.testing import assert_close, error_metrics, make_problem, tolerance
from tests.flashinfer import trees
from tests.flashinfer.problems import MODES, MXFP4_TINY, NAMES, NVFP4_TINY, mode, one_scale, roundings, run, run_problem
from tests.host_recordings import recorded


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


@pytest.mark.parametrize(("version", "atomic"), [("0.7.2", True), ("0.7.2.post1", True), ("0.7.4", False)])
def test_rubin_adds_with_atomics_where_its_kernel_has_nothing_else(install, monkeypatch, version, atomic):
    """Before 0.7.4 the Rubin kernel raises for the deterministic finalize, so asking for it would serve nothing."""
    backend, spec, _ = mode("cutedsl_w4a4")
    install(version, arch="sm_107")
    monkeypatch.setattr(base, "arch_of", lambda _: "sm_107")
    problem = one_scale(make_problem(spec, 5))
    prepared = backend.prepare(problem.weights, spec, torch.device("cpu"))
    assert_close(run_problem(backend, problem, prepared=prepared), problem.reference(), roundings="nvfp4")
    assert prepared.atomic is atomic
    assert ATOMIC.prepare(problem.weights, spec, torch.device("cpu")).atomic is True
    host = recorded("rubin-flashinfer-0.7.2", vendor={"flashinfer": {"version": version}}).devices[0]
    assert backend.deterministic_on(host) is not atomic
    assert backend.deterministic_on(recorded("b300").devices[0]) is True
    assert ATOMIC.deterministic_on(recorded("b300").devices[0]) is False


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
