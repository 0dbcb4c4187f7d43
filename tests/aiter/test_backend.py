"""The adapter end to end against the strict stand-in, and the mistakes that must turn it red."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from portamoe.activations import SiTU
from portamoe.checkpoints import load_experts
from portamoe.spec import MoESpec
from portamoe.testing import assert_close, error_metrics, make_problem
from rocm_moe.aiter import call, layouts
from rocm_moe.aiter.backend import BACKEND, prepared_bytes
from rocm_moe.aiter.support import support
from tests.aiter import trees

DATA = "tests/data/kimi-k3-tiny"
TINY = MoESpec(hidden_size=256, intermediate_size=192, num_experts=16, top_k=4, activation=SiTU(4.0, 25.0))
FLOOR_VERSIONS = ["0.1.20", "0.1.20.post1", trees.MAIN]


def run(spec, weights, x, ids, topk_weights, *, max_local_rows=None, prepared=None):
    prepared = prepared or BACKEND.prepare(weights, spec, torch.device("cpu"))
    rows = max_local_rows or BACKEND.default_max_local_rows(spec, x.shape[0])
    workspace = torch.full((BACKEND.workspace_bytes(spec, x.shape[0], rows),), 0xFF, dtype=torch.uint8)
    out = torch.full_like(x, torch.nan)
    BACKEND.forward(prepared, x, ids, topk_weights, workspace, out, max_local_rows=rows)
    return out


def run_problem(problem, **kwargs):
    return run(problem.spec, problem.weights, problem.x, problem.topk_ids, problem.topk_weights, **kwargs)


@pytest.mark.parametrize("version", FLOOR_VERSIONS)
@pytest.mark.parametrize("layer", [1, 2])
def test_the_tiny_checkpoints_expected_values(install, version, layer):
    install(version)
    spec, weights = load_experts(DATA, layer)
    expected = load_file(f"{DATA}/expected/layer_{layer}.safetensors")
    x, ids = expected["x"], expected["topk_ids"]
    out = run(spec, weights, x, ids, expected["topk_weights"])
    assert_close(out, expected["y_ref"], roundings=2)


@pytest.mark.parametrize(
    "spec",
    [
        dataclasses.replace(TINY, intermediate_size=384, hidden_size=512),  # Kimi-K3's I at TP8: K/32 = 12
        dataclasses.replace(TINY, hidden_size=320),  # H padded: x goes through the workspace
        dataclasses.replace(TINY, activation=SiTU(1.5, 40.0), top_k=1),
        dataclasses.replace(TINY, local_experts=range(4, 10)),
        dataclasses.replace(TINY, local_experts=range(13, 16)),  # fewer experts than K
    ],
    ids=["tp8", "hidden-320", "other-betas", "ep", "ep-few"],
)
def test_random_problems(install, spec):
    install()
    problem = make_problem(spec, 9, seed=1, minus_one=0.1)
    assert_close(run_problem(problem), problem.reference(), roundings=2)


@pytest.mark.parametrize("routing", ["skew", "same", "one_expert", "none_local", "duplicates"])
def test_routings(install, routing):
    install()
    problem = make_problem(dataclasses.replace(TINY, local_experts=range(5, 12)), 7, routing=routing)
    assert_close(run_problem(problem), problem.reference(), roundings=2)


@pytest.mark.parametrize("rows", [1, 4, 9, 100])
def test_windows_of_tokens_give_the_same(install, rows):
    install()
    problem = make_problem(TINY, 5, minus_one=0.2)
    assert torch.equal(run_problem(problem, max_local_rows=rows), run_problem(problem))


def test_ranks_add_up(install):
    install()
    whole = make_problem(TINY, 6)
    total = torch.zeros(6, 256)
    for first in range(0, 16, 4):
        spec = dataclasses.replace(TINY, local_experts=range(first, first + 4))
        part = type(whole.weights)(
            **{
                f.name: None
                if getattr(whole.weights, f.name) is None
                else getattr(whole.weights, f.name)[first : first + 4]
                for f in dataclasses.fields(whole.weights)
            }
        )
        total += run(spec, part, whole.x, whole.topk_ids, whole.topk_weights).float()
    assert_close(total, whole.reference(), roundings=4)


def test_int64_ids_nan_rows_and_no_tokens(install):
    install()
    problem = make_problem(TINY, 4, ids_dtype=torch.int64)
    x = problem.x.clone()
    x[1, 3] = torch.nan
    ids = problem.topk_ids.clone()
    x[2, 0] = torch.nan
    ids[2] = -1
    out = run(TINY, problem.weights, x, ids, problem.topk_weights)
    assert out[1].isnan().all()
    assert not out[2].any(), "a token without experts is 0 even where its x is NaN"
    clean = run_problem(problem)
    assert torch.equal(out[[0, 3]], clean[[0, 3]])
    assert run(TINY, problem.weights, x[:0], ids[:0], problem.topk_weights[:0]).shape == (0, 256)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_quantised_activations_only_when_asked(install, fmt):
    """The stand-in follows the environment, so this also shows that mode, layout and gate mode belong together."""
    install()
    spec = dataclasses.replace(TINY, activation_format=fmt)
    problem = make_problem(spec, 6)
    out = run_problem(problem)
    assert_close(out, problem.reference(), roundings=1)
    plain = dataclasses.replace(problem, spec=TINY).reference()
    assert error_metrics(out, plain).rms > 0.01, "activations were not quantised"
    call = calls()[-1]
    mode = support().mode_for(fmt)
    assert call["gate_mode"] == mode.gate_mode


def calls():
    import aiter.fused_moe

    return aiter.fused_moe.CALLS


def test_every_argument_arrives(install):
    """Unique values for all that the spec decides; the rest by name, at its unset value."""
    install()
    spec = dataclasses.replace(TINY, hidden_size=320, activation=SiTU(beta=3.25, linear_beta=17.5))
    problem = make_problem(spec, 3)
    run_problem(problem)
    call = calls()[-1]
    assert (call["beta"], call["linear_beta"]) == (3.25, 17.5)
    assert (call["hidden_pad"], call["intermediate_pad"]) == (512 - 320, 256 - 192)
    assert call["gate_mode"] == "separated"
    assert call["activation"].name == "Situv2"
    assert call["quant_type"].name == "per_1x32"
    assert call["dtype"] == torch.bfloat16
    for name in ("expert_mask", "a1_scale", "a2_scale", "block_size_M", "num_local_tokens", "bias1", "bias2"):
        assert call[name] is None
    assert call["swiglu_limit"] is None
    assert call["doweight_stage1"] is False
    assert call["splitk"] == call["moe_sorting_dispatch_policy"] == 0


def test_flags_survive_rewrapping(install):
    """Views, nn.Parameter and deepcopy lose `is_shuffled`; the call sets it on what it passes."""
    install()
    problem = make_problem(TINY, 3)
    prepared = BACKEND.prepare(problem.weights, TINY, torch.device("cpu"))
    rewrapped = dataclasses.replace(prepared, w1=prepared.w1.detach(), w2=prepared.w2.data)
    assert torch.equal(run_problem(problem, prepared=rewrapped), run_problem(problem, prepared=prepared))


@pytest.mark.parametrize("spec", [TINY, dataclasses.replace(TINY, hidden_size=320, activation_format="mxfp8")])
def test_prepared_bytes_are_those_of_the_check(install, spec):
    install()
    problem = make_problem(spec, 1)
    progress = []
    prepared = BACKEND.prepare(problem.weights, spec, torch.device("cpu"), lambda *step: progress.append(step))
    assert prepared.nbytes == prepared_bytes(spec)
    assert progress == [(n, 16) for n in range(1, 17)]
    assert prepared.spec is spec


def test_poisoned_memory_changes_nothing(install, monkeypatch):
    install()
    problem = make_problem(dataclasses.replace(TINY, hidden_size=320), 4, minus_one=0.2)
    clean = run_problem(problem)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).view(torch.uint8).fill_(0xFF).view(k["dtype"]))
    assert torch.equal(run_problem(problem), clean)


def test_warm_up_runs_every_bucket(install):
    install()
    problem = make_problem(dataclasses.replace(TINY, local_experts=range(2, 5)), 1)
    prepared = BACKEND.prepare(problem.weights, problem.spec, torch.device("cpu"))
    before = len(calls())
    report = BACKEND.warm_up(prepared, 6, BACKEND.default_max_local_rows(problem.spec, 6))
    assert [call["hidden_states"].shape[0] for call in calls()[before:]] == [1, 2, 4, 6]
    assert report.binaries == 4


def test_user_errors(install):
    install()
    problem = make_problem(TINY, 2)
    prepared = BACKEND.prepare(problem.weights, TINY, torch.device("cpu"))
    arguments = (problem.x, problem.topk_ids, problem.topk_weights, torch.empty(0, dtype=torch.uint8), problem.x)
    with pytest.raises(TypeError, match="no hooks, got after_gemm1"):
        BACKEND.forward(prepared, *arguments, max_local_rows=8, after_gemm1=print)
    with pytest.raises(TypeError, match="needs AiterWeights"):
        BACKEND.forward(problem.weights, *arguments, max_local_rows=8)
    with pytest.raises(ValueError, match="16 experts"):
        BACKEND.prepare(problem.weights, dataclasses.replace(TINY, local_experts=range(4)), torch.device("cpu"))
    problem.weights.w2_scale[7, 0, 0] = 255
    with pytest.raises(ValueError, match=r"w2_scale of local expert 7 holds NaN"):
        BACKEND.prepare(problem.weights, TINY, torch.device("cpu"))


def test_a_contradicting_environment_is_refused_at_load_and_at_the_call(install, monkeypatch):
    install()
    problem = make_problem(TINY, 2)
    prepared = BACKEND.prepare(problem.weights, TINY, torch.device("cpu"))
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    with pytest.raises(call.AiterEnvironmentError, match="AITER_SITUV2_A8W4"):
        BACKEND.prepare(problem.weights, TINY, torch.device("cpu"))
    with pytest.raises(call.AiterEnvironmentError, match="VLLM_ROCM_USE_AITER_MOE_SITUV2=a16w4"):
        run_problem(problem, prepared=prepared)


def test_what_aiter_raises_comes_through(install):
    """Its shuffled weights serve no other kernel, so there is nothing to fall back to."""
    install()
    problem = make_problem(TINY, 2)
    prepared = BACKEND.prepare(problem.weights, TINY, torch.device("cpu"))

    def fail(*_, **__):
        raise RuntimeError("device_gemm does not support this GEMM problem")

    broken = dataclasses.replace(prepared, handle=dataclasses.replace(prepared.handle, fused_moe=fail))
    with pytest.raises(RuntimeError, match="device_gemm"):
        run_problem(problem, prepared=broken)


class _Wrong:
    """Stands before the stand-in and changes a call by `change(weights by name, keywords)`."""

    def __init__(self, right, change):
        self.right, self.change = right, change

    def __call__(self, x, w1, w2, topk_weights, topk_ids, **kwargs):
        weights = {"w1": w1, "w2": w2}
        self.change(weights, kwargs)
        return self.right(x, weights["w1"], weights["w2"], topk_weights, topk_ids, **kwargs)


def _keyword(name, value):
    return lambda _, kwargs: kwargs.update({name: value})


def _lose_flag(name):
    return lambda weights, _: weights.update({name: weights[name].view(torch.uint8).view(weights[name].dtype)})


def _silu(_, kwargs):
    kwargs["activation"] = type(kwargs["activation"]).Silu


def _relayout(change):
    """Change the canonical experts before they are prepared."""

    def patched(expert, layout):
        return right(change(expert), layout)

    right = layouts.to_aiter
    return patched


def _swap_gate_and_up(expert):
    def swapped(t):
        return torch.cat(t.chunk(2)[::-1])

    return dataclasses.replace(expert, w13=swapped(expert.w13), w13_scale=swapped(expert.w13_scale))


def _shift_scales(expert):
    return dataclasses.replace(expert, w13_scale=expert.w13_scale.roll(1, 0))


def _shift_down_scales(expert):
    return dataclasses.replace(expert, w2_scale=expert.w2_scale.roll(1, 0))


def _assert_right(problem, prepared):
    assert_close(run_problem(problem, prepared=prepared), problem.reference(), roundings=2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_keyword("gate_mode", "interleave"), "gate_mode"),
        (_keyword("beta", None), "beta is missing"),
        (_keyword("linear_beta", None), "linear_beta is missing"),
        (_keyword("linear_beta", 1e9), "relative RMS"),
        (_keyword("beta", 25.0), "relative RMS"),
        (_keyword("swiglu_limit", 7.0), "swiglu_limit"),
        (_keyword("w1_scale", None), "w1_scale is missing"),
        (_keyword("expert_mask", torch.ones(16)), "expert_mask"),
        (_lose_flag("w1"), "w1.is_shuffled is lost"),
        (_lose_flag("w2"), "w2.is_shuffled is lost"),
        (_silu, "relative RMS"),
        (_keyword("gate", "separated"), "unexpected keyword"),
    ],
)
def test_a_wrong_call_turns_red(install, change, says):
    install()
    problem = make_problem(TINY, 5)
    prepared = BACKEND.prepare(problem.weights, TINY, torch.device("cpu"))
    _assert_right(problem, prepared)
    wrong = dataclasses.replace(prepared.handle, fused_moe=_Wrong(prepared.handle.fused_moe, change))
    with pytest.raises(Exception, match=says):
        _assert_right(problem, dataclasses.replace(prepared, handle=wrong))


@pytest.mark.parametrize("change", [_swap_gate_and_up, _shift_scales, _shift_down_scales])
def test_a_wrong_layout_turns_red(install, monkeypatch, change):
    install()
    problem = make_problem(TINY, 5)
    monkeypatch.setattr(layouts, "to_aiter", _relayout(change))
    prepared = BACKEND.prepare(problem.weights, TINY, torch.device("cpu"))
    with pytest.raises(AssertionError, match="relative RMS"):
        _assert_right(problem, prepared)


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "mxfp4"])
def test_the_other_order_of_gate_and_up_turns_red(install, fmt):
    """Weights prepared for another mode than the environment selects: garbage that AITER does not report."""
    install()
    spec = dataclasses.replace(TINY, activation_format=fmt, intermediate_size=256)
    problem = make_problem(spec, 5)
    prepared = BACKEND.prepare(problem.weights, spec, torch.device("cpu"))
    flipped = dataclasses.replace(prepared.layout, interleaved=not prepared.layout.interleaved)
    stored = [layouts.to_aiter(problem.weights.expert(n), flipped) for n in range(16)]
    wrong = dataclasses.replace(
        prepared,
        w1=torch.stack([s["w13"] for s in stored]).view(torch.float4_e2m1fn_x2),
        w1_scale=torch.cat([s["w13_scale"] for s in stored]),
    )
    assert error_metrics(run_problem(problem, prepared=wrong), problem.reference()).rms > 0.5


def test_0_1_19_would_read_another_order(install):
    """Why the floor is 0.1.20: the same call on 0.1.19 asks for interleaved weights."""
    install("0.1.19.post2")
    problem = make_problem(TINY, 3)
    with pytest.raises(Exception, match="a16w4 takes 'interleave'"):
        run_problem(problem)
