"""The embedded backend: expected values, the families of public bug reports, and its memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from portamoe.activations import ReLU2, SiTU, SwiGLU
from portamoe.device import Device, Host
from portamoe.layouts import slice_tensor_parallel
from portamoe.reference import moe_reference
from portamoe.spec import GPT_OSS, KIMI_K3, MoESpec
from portamoe.testing import (
    EDGE_CASES,
    Problem,
    assert_close,
    edge_case,
    error_metrics,
    make_problem,
)
from portamoe.torch_backend import BACKEND, region_bytes
from portamoe.weights import ExpertWeights

CPU = torch.device("cpu")
TYPICAL = edge_case("typical").spec
SMALL = MoESpec(
    hidden_size=64, intermediate_size=64, num_experts=8, top_k=3, activation=SiTU(beta=4.0, linear_beta=25.0)
)
#: Row of the tolerance table by dtype of x: nothing but the result is rounded.
ROUNDINGS = {torch.float32: "float32", torch.bfloat16: "bf16_1", torch.float16: "fp16_1"}


def run(problem: Problem, *, max_local_rows: int | None = None, prepared=None) -> torch.Tensor:
    """Run the backend as the contract says, with workspace and output full of NaN."""
    spec, tokens = problem.spec, problem.x.shape[0]
    rows = BACKEND.default_max_local_rows(spec, tokens) if max_local_rows is None else max_local_rows
    prepared = prepared or BACKEND.prepare(problem.weights, spec, CPU)
    workspace = torch.full((BACKEND.workspace_bytes(spec, tokens, rows),), 0xFF, dtype=torch.uint8)
    out = torch.full_like(problem.x, torch.nan)
    BACKEND.forward(prepared, problem.x, problem.topk_ids, problem.topk_weights, workspace, out, max_local_rows=rows)
    return out


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_data_sets_give_their_expected_values(data_set, dtype):
    spec, source, tensors = data_set.load()
    problem = Problem(spec, source, tensors["x"].to(dtype), tensors["topk_ids"], tensors["topk_weights"])
    y = run(problem)
    if dtype == torch.float16:  # not all bf16 x are fp16 numbers: compare with the reference of what was passed
        assert_close(y, problem.reference(), roundings="fp16_1")
    else:
        assert_close(y, tensors["y_ref"], roundings=ROUNDINGS[dtype])
    for name in (name for name in tensors if name.startswith("y_if_")):
        assert error_metrics(tensors[name], y).rms > 0.3, name


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda c: c.name)
def test_edge_cases(case, dtype):
    problem = make_problem(case.spec, case.tokens, routing=case.routing, x_dtype=dtype)
    assert_close(run(problem), problem.reference(), roundings=ROUNDINGS[dtype])


@pytest.mark.parametrize("activation_format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "bf16"])
def test_quantised_activations(activation_format, weight_format):
    spec = replace(TYPICAL, activation_format=activation_format, weight_format=weight_format)
    problem = make_problem(spec, 9)
    assert_close(run(problem), problem.reference(), roundings=activation_format)


def test_every_expert_alone_has_the_same_error():
    # A scale that belongs to another expert leaves expert 0 right and all others wrong.
    for weight_format in ("mxfp4", "nvfp4"):
        spec = replace(SMALL, hidden_size=160, num_experts=5, weight_format=weight_format, local_experts=range(5))
        for expert in range(5):
            problem = make_problem(spec, 4, routing="one_expert", expert=expert, x_dtype=torch.float32)
            assert_close(run(problem), problem.reference(), roundings="float32", context=f"expert {expert}")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_routing(data):
    experts = data.draw(st.sampled_from((1, 6, 40)))
    top_k = data.draw(st.integers(1, min(experts, 6)))
    first = data.draw(st.integers(0, experts - 1))
    local = range(first, data.draw(st.integers(first + 1, experts)))
    spec = MoESpec(
        hidden_size=32, intermediate_size=32, num_experts=experts, top_k=top_k, activation=SMALL.activation,
        local_experts=local,
    )  # fmt: skip
    tokens = data.draw(st.integers(0, 9))
    problem = make_problem(spec, tokens, seed=data.draw(st.integers(0, 3)), x_dtype=torch.float32)
    values = st.integers(-2, experts + 1)
    flat = data.draw(st.lists(values, min_size=tokens * top_k, max_size=tokens * top_k))
    dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    weights = problem.topk_weights * (torch.rand(tokens, top_k) > 0.3)  # some weights are 0
    problem = replace(problem, topk_ids=torch.tensor(flat, dtype=dtype).view(tokens, top_k), topk_weights=weights)
    y = run(problem, max_local_rows=data.draw(st.integers(1, 9)))
    assert_close(y, problem.reference(), roundings="float32")


def test_minus_one_is_not_the_last_expert():
    problem = make_problem(SMALL, 6, minus_one=0.5, x_dtype=torch.float32)
    problem.weights.w2_scale[-1] = 180  # the last expert's results are 2^50 times too large
    problem.topk_ids[problem.topk_ids == 7] = 6
    assert_close(run(problem), problem.reference(), roundings="float32")
    assert run(problem).abs().max() < 1e3


def test_fp16_does_not_overflow_before_the_weight():
    # h reaches 6.6e4 and an expert's result 1e6, more than fp16 holds; the weighted sum is small again.
    problem = make_problem(replace(SMALL, activation=ReLU2()), 4, gate_std=64, up_std=64, x_dtype=torch.float16)
    problem.weights.w2_scale.add_(16)
    problem = replace(problem, topk_weights=problem.topk_weights * 1e-4)
    assert (
        moe_reference(problem.spec, problem.weights, problem.x, problem.topk_ids, torch.ones_like(problem.topk_weights))
        .abs()
        .max()
        > 70000
    )
    assert_close(run(problem), problem.reference(), roundings="fp16_1")


def test_nan_stays_in_its_row():
    problem = make_problem(SMALL, 6)
    clean = run(problem)
    problem.x[3, 0] = torch.nan
    y = run(problem)
    assert y[3].isnan().all()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(y[others], clean[others])


def test_a_scale_byte_of_255_is_nan_and_reaches_only_tokens_of_its_expert():
    problem = make_problem(SMALL, 16, x_dtype=torch.float32)
    problem.weights.w13_scale[5, 0, 0] = 255
    y = run(problem)
    hit = (problem.topk_ids == 5).any(1)
    assert 0 < int(hit.sum()) < 16
    assert torch.equal(y.isnan().all(1), hit)
    assert_close(y, problem.reference(), roundings="float32")


# --- one computation, whatever the cut --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("inter", [1536, 1856, 2880, 3072])
def test_tensor_parallel_ranks_add_up(inter, size):
    spec = replace(SMALL, hidden_size=32, intermediate_size=inter, num_experts=3, top_k=2, local_experts=range(3))
    problem = make_problem(replace(spec, bias=True), 4, x_dtype=torch.float32)
    if inter % (32 * size):
        with pytest.raises(ValueError, match=rf"(?s){inter}.*{size}"):
            slice_tensor_parallel(problem.weights, 0, size)
        return
    total = torch.zeros_like(problem.x)
    for rank in range(size):
        weights = slice_tensor_parallel(problem.weights, rank, size)
        rank_spec = replace(problem.spec, intermediate_size=inter // size)
        total += run(replace(problem, spec=rank_spec, weights=weights))
    # The ranks' partial sums are larger than the whole by up to the root of their number.
    assert_close(total, problem.reference(), roundings="float32")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "bf16"])
def test_expert_parallel_ranks_add_up(size, weight_format):
    spec = replace(SMALL, weight_format=weight_format)
    whole = make_problem(spec, 12, x_dtype=torch.float32)
    total = torch.zeros_like(whole.x)
    step = spec.num_experts // size
    for rank in range(size):
        local = range(rank * step, (rank + 1) * step)
        part = {k: v[local.start : local.stop] for k, v in vars(whole.weights).items() if v is not None}
        y = run(replace(whole, spec=replace(spec, local_experts=local), weights=ExpertWeights(**part)))
        hit = ((whole.topk_ids >= local.start) & (whole.topk_ids < local.stop)).any(1)
        assert not y[~hit].any()
        total += y
    assert_close(total, whole.reference(), roundings="float32")


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64])
def test_windows_do_not_change_the_result(rows):
    problem = make_problem(TYPICAL, 33, routing="skew", x_dtype=torch.float32)
    assert_close(run(problem, max_local_rows=rows), run(problem), roundings="float32")


TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def test_every_row_is_as_if_it_were_alone():
    problem = make_problem(SMALL, TOKENS[-1], x_dtype=torch.float32)

    def rows(selected: slice) -> Problem:
        return replace(
            problem,
            x=problem.x[selected],
            topk_ids=problem.topk_ids[selected],
            topk_weights=problem.topk_weights[selected],
        )

    prepared = BACKEND.prepare(problem.weights, problem.spec, CPU)
    alone = torch.cat([run(rows(slice(t, t + 1)), prepared=prepared) for t in range(TOKENS[-1])])
    for tokens in TOKENS:
        assert_close(run(rows(slice(tokens)), prepared=prepared), alone[:tokens], roundings="float32")


def test_twenty_runs_give_the_same_bits():
    problem = make_problem(TYPICAL, 17, routing="duplicates")
    first = run(problem)
    assert all(torch.equal(first, run(problem)) for _ in range(20))


def test_deterministic_mode_is_satisfied():
    problem = make_problem(SMALL, 9, routing="skew")
    expected = run(problem)
    # The public switch imports the whole compiler first.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        assert torch.equal(run(problem), expected)
    finally:
        torch._C._set_deterministic_algorithms(False, warn_only=False)


@pytest.mark.parametrize("name", ["typical", "gpt_oss", "nvfp4", "bf16", "none_local", "duplicates"])
def test_uninitialised_memory_reaches_no_result(name, poison):
    case = edge_case(name)
    problem = make_problem(case.spec, case.tokens, routing=case.routing)
    expected = run(problem)
    for byte in (0xFF, 0x7B):
        poison(byte)
        assert torch.equal(run(problem), expected)


def test_inputs_are_left_as_they_were():
    problem = make_problem(SMALL, 9, routing="duplicates")
    before = [t.clone() for t in (problem.x, problem.topk_ids, problem.topk_weights, problem.weights.w13)]
    run(problem)
    after = (problem.x, problem.topk_ids, problem.topk_weights, problem.weights.w13)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_relaxed_matmul_precision_of_the_process_is_not_used():
    problem = make_problem(TYPICAL, 9, x_dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert_close(run(problem), problem.reference(), roundings="float32")
    finally:
        torch.set_float32_matmul_precision(before)


# --- contract ---------------------------------------------------------------------------------------------------------


def test_weights_in_memory_are_not_copied_and_progress_is_told():
    problem = make_problem(SMALL, 1)
    told = []
    prepared = BACKEND.prepare(problem.weights, SMALL, CPU, lambda *args: told.append(args))
    assert told == [(i + 1, 8) for i in range(8)]
    assert prepared.nbytes == problem.weights.nbytes
    assert prepared.spec is SMALL
    assert prepared.experts[2].w13.data_ptr() == problem.weights.w13[2].data_ptr()


def test_an_expert_that_does_not_fit_is_named():
    class Source:
        def __len__(self):
            return 8

        def expert(self, index):
            expert = make_problem(SMALL, 1).weights.expert(index)
            return replace(expert, w2=expert.w2.T) if index == 5 else expert

    with pytest.raises(ValueError, match=r"w2 of local expert 5 .*\(32, 64\), expected .*\(64, 32\)"):
        BACKEND.prepare(Source(), SMALL, CPU)


def test_strided_weights_are_as_good_as_contiguous_ones():
    problem = make_problem(SMALL, 5, x_dtype=torch.float32)
    wide = torch.zeros(8, 128, 48, dtype=torch.uint8)
    wide[:, :, 5:37] = problem.weights.w13
    strided = replace(problem, weights=replace(problem.weights, w13=wide[:, :, 5:37]))
    assert torch.equal(run(strided), run(problem))


def test_workspace_is_exact_and_bounded_by_the_window():
    problem = make_problem(SMALL, 9)
    prepared = BACKEND.prepare(problem.weights, SMALL, CPU)
    needed = BACKEND.workspace_bytes(SMALL, 9, 4)
    assert needed == sum(region_bytes(SMALL, 9, 4).values())
    args = (prepared, problem.x, problem.topk_ids, problem.topk_weights)
    guarded = torch.full((needed + 256,), 7, dtype=torch.uint8)
    BACKEND.forward(*args, guarded[:needed], torch.empty_like(problem.x), max_local_rows=4)
    assert (guarded[needed:] == 7).all()
    with pytest.raises(ValueError, match=f"workspace has {needed - 1} bytes, 9 tokens need {needed}"):
        BACKEND.forward(*args, guarded[: needed - 1], torch.empty_like(problem.x), max_local_rows=4)
    per_token = BACKEND.workspace_bytes(KIMI_K3, 8192, 1024) - BACKEND.workspace_bytes(KIMI_K3, 4096, 1024)
    assert per_token == 4096 * 4 * 3584  # only the sum grows


def test_hooks_and_foreign_weights_are_refused():
    problem = make_problem(SMALL, 2)
    prepared = BACKEND.prepare(problem.weights, SMALL, CPU)
    workspace = torch.empty(BACKEND.workspace_bytes(SMALL, 2, 2), dtype=torch.uint8)
    args = (problem.x, problem.topk_ids, problem.topk_weights, workspace, torch.empty_like(problem.x))
    with pytest.raises(TypeError, match="no hooks, got after_gemm1"):
        BACKEND.forward(prepared, *args, max_local_rows=2, after_gemm1=print)
    BACKEND.forward(prepared, *args, max_local_rows=2, after_gemm1=None)
    with pytest.raises(TypeError, match="prepared by another backend"):
        BACKEND.forward(problem.weights, *args, max_local_rows=2)


def test_capture_is_refused_before_anything_is_read(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    problem = make_problem(SMALL, 2)
    prepared = BACKEND.prepare(problem.weights, SMALL, CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    workspace = torch.empty(BACKEND.workspace_bytes(SMALL, 2, 2), dtype=torch.uint8)
    args = (problem.topk_ids, problem.topk_weights, workspace, torch.empty_like(problem.x))
    assert BACKEND.graph_safe is False
    with pytest.raises(RuntimeError, match="graph"):
        BACKEND.forward(prepared, problem.x.as_subclass(OnGpu), *args, max_local_rows=2)


def test_warm_up_compiles_nothing():
    for name in ("typical", "gpt_oss", "nvfp4", "bf16", "rank_in_middle"):
        problem = make_problem(edge_case(name).spec, 1)
        prepared = BACKEND.prepare(problem.weights, problem.spec, CPU)
        report = BACKEND.warm_up(prepared, 16, 16)
        assert report.binaries == 0
        assert report.seconds > 0


# --- check ------------------------------------------------------------------------------------------------------------

TORCH = {"version": "2.9.1+rocm6.4", "hip": "6.4", "cuda": None}


def device(vendor="amd", arch="gfx90a", torch_facts=TORCH, **memory) -> Device:
    return Device(vendor, arch, 0, "test", Host("x86_64", "3.12", torch=torch_facts), **memory)


@pytest.mark.parametrize("spec", [KIMI_K3, GPT_OSS, *(case.spec for case in EDGE_CASES)], ids=str)
def test_check_accepts_every_spec_on_every_vendor(spec):
    cuda = {"version": "2.11.0+cu130", "hip": None, "cuda": "13.0"}
    cpu = {"version": "2.13.0+cpu", "hip": None, "cuda": None}
    assert BACKEND.check(spec, device()) == []
    assert BACKEND.check(spec, device("nvidia", "sm_107", cuda)) == []
    assert BACKEND.check(spec, device("cpu", "cpu", cpu)) == []
    assert BACKEND.only_on_request(spec, device()) is None


def test_check_says_what_is_missing():
    (reason,) = BACKEND.check(KIMI_K3, device(torch_facts=None))
    assert (reason.what, reason.value, reason.limit) == ("torch", "not installed", ">= 2.6")
    (reason,) = BACKEND.check(KIMI_K3, device(torch_facts=TORCH | {"version": "2.5.1+rocm6.2"}))
    assert (reason.value, reason.limit) == ("2.5.1+rocm6.2", ">= 2.6")
    (reason,) = BACKEND.check(KIMI_K3, device("nvidia", "sm_90"))
    assert (reason.what, reason.limit) == ("torch build", "a CUDA build")
    reasons = BACKEND.check(replace(edge_case("nvfp4").spec, activation_format="mxfp8"), device())
    assert [(r.what, r.value) for r in reasons] == [("hidden_size", 80), ("intermediate_size", 48)]


def test_check_compares_memory_with_weights_and_workspace():
    gb = 10**9
    assert BACKEND.check(KIMI_K3, device(memory_bytes=64 * gb, memory_free_bytes=17 * gb)) == []
    (reason,) = BACKEND.check(KIMI_K3, device(memory_bytes=64 * gb, memory_free_bytes=15 * gb))
    assert reason.what == "memory"
    # Weights that are in a CPU's memory are used in place: what is free says little there.
    cpu = {"vendor": "cpu", "arch": "cpu", "torch_facts": TORCH}
    assert BACKEND.check(KIMI_K3, device(**cpu, memory_bytes=24 * gb, memory_free_bytes=5 * gb)) == []
    assert BACKEND.check(KIMI_K3, device(**cpu, memory_bytes=8 * gb, memory_free_bytes=8 * gb))


# --- memory -----------------------------------------------------------------------------------------------------------

CHILD = """
import re, sys
from pathlib import Path
from dataclasses import replace
import psutil, torch
from portamoe.spec import KIMI_K3
from portamoe.testing import make_problem
from portamoe.torch_backend import BACKEND

torch.set_num_threads(2)
spec = replace(KIMI_K3, num_experts=2, top_k=2, local_experts=range(2))
small = replace(spec, hidden_size=64, intermediate_size=64)

def call(spec, tokens):
    problem = make_problem(spec, tokens)  # all tokens go to both experts
    prepared = BACKEND.prepare(problem.weights, spec, torch.device("cpu"))
    out = torch.empty_like(problem.x)
    def forward():
        rows = BACKEND.default_max_local_rows(spec, tokens)
        workspace = torch.empty(BACKEND.workspace_bytes(spec, tokens, rows), dtype=torch.uint8)
        BACKEND.forward(
            prepared, problem.x, problem.topk_ids, problem.topk_weights, workspace, out, max_local_rows=rows
        )
    return forward

call(small, 16)()  # what torch and MKL load on first use is not the call's
forward = call(spec, 16)
process = psutil.Process()
before = process.memory_info().rss
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
forward()
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
print(peak - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_a_full_size_call_stays_within_its_memory():
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", CHILD], capture_output=True, text=True, env=child_environment()
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this kernel does not let a process reset its peak")
    assert done.returncode == 0, done.stderr
    extra = int(done.stdout)
    expert = 3 * 3584 * 3072 * 4
    assert 1e6 < extra <= 1.5 * expert + 8 * 16 * 2 * 3072


def child_environment() -> dict[str, str]:
    import os

    import portamoe

    return os.environ | {"PYTHONPATH": str(Path(portamoe.__file__).parents[1])}


def test_the_activation_asked_for_is_the_one_computed():
    problem = make_problem(SMALL, 9)
    y = run(problem)
    for other in (SwiGLU(), SiTU(beta=4.0), SiTU(beta=1.0, linear_beta=25.0)):
        wrong = replace(problem, spec=replace(SMALL, activation=other)).reference()
        assert error_metrics(wrong, y).rms > 0.05
    assert_close(y, problem.reference(), roundings=1)
