"""`RoutedExperts`: the choice of a backend, the checks of every call, and what a module may be asked to do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from portamoe import registry
from portamoe.activations import SiTU
from portamoe.backend import WarmUpReport
from portamoe.checkpoints import load_experts
from portamoe.decision import Accepted, BackendRejected, Reason
from portamoe.layer import RoutedExperts
from portamoe.spec import MoESpec
from portamoe.testing import assert_close, make_problem

DATA = Path(__file__).parent / "data"
SPEC = MoESpec(
    hidden_size=64,
    intermediate_size=64,
    num_experts=8,
    top_k=3,
    activation=SiTU(beta=4.0, linear_beta=25.0),
    local_experts=range(2, 7),
)


@pytest.fixture
def problem():
    return make_problem(SPEC, 6)


@pytest.fixture
def layer(problem):
    return make(problem)


def make(problem, **kwargs) -> RoutedExperts:
    arguments = {"max_tokens": 8, "device": "cpu", "backend": "torch"} | kwargs
    return RoutedExperts(problem.spec, problem.weights, **arguments)


def inputs(problem):
    return problem.x, problem.topk_ids, problem.topk_weights


# --- values -----------------------------------------------------------------------------------------------------------


def test_data_sets_give_their_expected_values(data_set):
    spec, source, tensors = data_set.load()
    layer = RoutedExperts(spec, source, max_tokens=16, device="cpu", backend="torch")
    y = layer(tensors["x"], tensors["topk_ids"], tensors["topk_weights"])
    assert y.dtype == torch.bfloat16
    assert_close(y, tensors["y_ref"], roundings=1)


def test_ranks_add_up_to_the_whole_layer(kimi):
    total = 0
    for first in range(0, 16, 4):
        spec, source, tensors = kimi.load(range(first, first + 4))
        layer = RoutedExperts(spec, source, max_tokens=16, device="cpu", backend="torch")
        total = total + layer(tensors["x"].float(), tensors["topk_ids"], tensors["topk_weights"])
    assert_close(total, tensors["y_ref"], roundings="float32")


def test_out_is_written_and_returned(problem, layer):
    out = torch.full_like(problem.x, torch.nan)
    assert layer(*inputs(problem), out=out) is out
    assert torch.equal(out, layer(*inputs(problem)))
    assert_close(out, problem.reference(), roundings=1)


def test_fewer_rows_a_window_and_a_shared_workspace_give_the_same(problem):
    expected = make(problem)(*inputs(problem))
    small = make(problem, max_local_rows=1)
    assert small.workspace_bytes < make(problem).workspace_bytes
    assert_close(small(*inputs(problem)), expected.float(), roundings=1)
    workspace = torch.full((make(problem).workspace_bytes,), 0xFF, dtype=torch.uint8)
    one, two = make(problem, workspace=workspace), make(problem, workspace=workspace)
    assert torch.equal(one(*inputs(problem)), expected)
    assert torch.equal(two(*inputs(problem)), expected)


def test_uninitialised_memory_reaches_no_result(problem, poison):
    expected = make(problem)(*inputs(problem))
    for byte in (0xFF, 0x7B):
        poison(byte)
        assert torch.equal(make(problem)(*inputs(problem)), expected)


def test_nan_stays_in_its_row(problem, layer):
    clean = layer(*inputs(problem))
    hit = ((problem.topk_ids >= 2) & (problem.topk_ids < 7)).any(1).nonzero().flatten().tolist()
    row = hit[0]
    problem.x[row] = torch.nan
    y = layer(*inputs(problem))
    assert y[row].isnan().all()
    others = [t for t in range(6) if t != row]
    assert torch.equal(y[others], clean[others])


def test_no_tokens_launch_nothing(problem, layer, monkeypatch):
    monkeypatch.setattr(type(layer.backend), "forward", None)
    y = layer(problem.x[:0], problem.topk_ids[:0], problem.topk_weights[:0])
    assert y.shape == (0, 64)
    assert y.dtype == torch.bfloat16


def test_nothing_local_is_exactly_zero(layer):
    problem = make_problem(SPEC, 5, routing="none_local")
    y = layer(*inputs(problem))
    assert y.shape == (5, 64)
    assert not y.any()


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [8, -2, 2**30])
def test_ids_outside_the_layer_are_an_error_on_the_cpu(problem, layer, wrong):
    problem.topk_ids[4, 1] = wrong
    with pytest.raises(ValueError, match=rf"topk_ids\[4, 1\] is {wrong}, expected -1 or 0 … 7"):
        layer(*inputs(problem))


def test_without_validation_such_ids_count_as_minus_one(problem):
    layer = make(problem, validate=False)
    ids = problem.topk_ids.clone()
    ids[4, 1], ids[2, 0] = 8, -7
    dropped = torch.where((ids < 0) | (ids > 7), -1, ids)
    expected = layer(problem.x, dropped, problem.topk_weights)
    assert torch.equal(layer(problem.x, ids, problem.topk_weights), expected)


def change(name, value):
    return lambda tensors: tensors | {name: value(tensors[name])}


BAD_INPUT = {
    "more tokens than announced": (
        lambda t: {k: torch.cat((v, v)) for k, v in t.items()},
        ValueError,
        "12 tokens, the layer was made for max_tokens=8",
    ),
    "x of another width": (change("x", lambda x: x[:, :32]), ValueError, r"x has shape \(6, 32\), expected \(T, 64\)"),
    "x of one dimension": (change("x", lambda x: x[0]), ValueError, r"x has shape \(64,\)"),
    "x of integers": (change("x", lambda x: x.int()), TypeError, "x is torch.int32, torch takes torch.bfloat16"),
    "x in float64": (change("x", lambda x: x.double()), TypeError, "x is torch.float64"),
    "x strided": (
        change("x", lambda x: torch.cat((x, x), 1)[:, :64]),
        ValueError,
        r"x has strides \(128, 1\), expected contiguous",
    ),
    "ids of other tokens": (
        change("topk_ids", lambda i: i[:5]),
        ValueError,
        r"topk_ids has shape \(5, 3\), expected \(6, 3\)",
    ),
    "ids of another top-k": (change("topk_ids", lambda i: i[:, :2]), ValueError, r"topk_ids has shape \(6, 2\)"),
    "ids in float": (change("topk_ids", lambda i: i.float()), TypeError, "topk_ids is torch.float32"),
    "ids in uint8": (change("topk_ids", lambda i: i.to(torch.uint8)), TypeError, "topk_ids is torch.uint8"),
    "ids transposed": (
        change("topk_ids", lambda i: i.T.contiguous().T),
        ValueError,
        r"topk_ids has strides \(1, 6\)",
    ),
    "weights in bf16": (change("topk_weights", lambda w: w.bfloat16()), TypeError, "topk_weights is torch.bfloat16"),
    "x elsewhere": (change("x", lambda x: x.to("meta")), ValueError, "x is on meta, the layer on cpu"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_names_tensor_and_expectation(problem, layer, name):
    spoil, error, message = BAD_INPUT[name]
    tensors = {"x": problem.x, "topk_ids": problem.topk_ids, "topk_weights": problem.topk_weights}
    with pytest.raises(error, match=message):
        layer(**spoil(tensors))


def test_out_must_fit_and_overlap_nothing(problem, layer):
    with pytest.raises(ValueError, match=r"out has shape \(5, 64\), expected \(6, 64\)"):
        layer(*inputs(problem), out=torch.empty(5, 64, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"out is torch\.float32"):
        layer(*inputs(problem), out=torch.empty(6, 64))
    with pytest.raises(ValueError, match="out overlaps x"):
        layer(*inputs(problem), out=problem.x)
    both = torch.zeros(9, 64, dtype=torch.bfloat16)
    both[:6] = problem.x
    with pytest.raises(ValueError, match="out overlaps x"):
        layer(both[:6], problem.topk_ids, problem.topk_weights, out=both[3:])
    layer(both[:3], problem.topk_ids[:3], problem.topk_weights[:3], out=both[3:6])
    workspace = torch.empty(make(problem).workspace_bytes, dtype=torch.uint8)
    shared = make(problem, workspace=workspace)
    inside = workspace[: 6 * 64 * 2].view(torch.bfloat16).view(6, 64)
    with pytest.raises(ValueError, match="out overlaps the workspace"):
        shared(*inputs(problem), out=inside)


def test_a_call_that_wants_gradients_is_refused(problem, layer):
    problem.x.requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        layer(*inputs(problem))
    with torch.no_grad():
        assert_close(layer(*inputs(problem)), problem.reference(), roundings=1)


@pytest.mark.parametrize("name", ["x", "topk_weights", "out"])
def test_whatever_wants_a_gradient_is_refused_and_served_without(name, problem, layer):
    tensors = dict(zip(("x", "topk_ids", "topk_weights"), inputs(problem), strict=True)) | {"out": problem.x.clone()}
    expected = layer(**tensors).clone()
    tensors[name] = tensors[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=rf"{name} requires a gradient.*no_grad"):
        layer(**tensors)
    with torch.no_grad():
        assert torch.equal(layer(**tensors), expected)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights"])
def test_what_is_no_tensor_is_named(name, problem, layer):
    tensors = dict(zip(("x", "topk_ids", "topk_weights"), inputs(problem), strict=True))
    tensors[name] = tensors[name].float().numpy()
    with pytest.raises(TypeError, match=rf"{name} is a ndarray, expected a torch tensor"):
        layer(**tensors)


def test_rows_and_their_sum_are_checked_like_a_call(problem, layer):
    x, ids, weights = inputs(problem)
    rows = torch.empty(len(x) * SPEC.top_k + 1, SPEC.hidden_size, dtype=layer.row_dtype)
    layer.forward_rows(x, ids, rows)
    out = torch.empty_like(x)
    layer.sum_rows(rows, ids, weights, out)
    assert torch.equal(out, layer(x, ids, weights))
    with pytest.raises(TypeError, match=r"topk_weights is torch.bfloat16"):
        layer.sum_rows(rows, ids, weights.bfloat16(), out)
    with pytest.raises(ValueError, match=r"topk_weights has shape \(5, 3\), expected \(6, 3\)"):
        layer.sum_rows(rows, ids, weights[:5], out)
    with pytest.raises(ValueError, match=r"topk_ids has shape \(6, 2\), expected \(6, 3\)"):
        layer.sum_rows(rows, ids[:, :2].contiguous(), weights, out)
    with pytest.raises(ValueError, match=r"out has shape \(5, 64\), expected \(6, 64\)"):
        layer.sum_rows(rows, ids, weights, out[:5])
    shared = rows.view(-1)[: out.numel()].view(out.dtype)[: out.numel()].view_as(out)
    with pytest.raises(ValueError, match="out overlaps rows"):
        layer.sum_rows(rows, ids, weights, shared)
    within = rows.view(-1).view(x.dtype)[: x.numel()].view_as(x)
    with pytest.raises(ValueError, match="rows overlaps x"):
        layer.forward_rows(within, ids, rows)


def test_hooks_reach_the_backend(problem, layer):
    with pytest.raises(TypeError, match="after_gemm1"):
        layer(*inputs(problem), after_gemm1=lambda *_: None)


# --- construction -----------------------------------------------------------------------------------------------------


def test_what_a_layer_says_of_itself(problem, layer):
    assert layer.backend.name == "torch"
    assert layer.decision == Accepted("torch", "portamoe", verification="verified")
    assert layer.prepared_bytes == problem.weights.nbytes
    assert layer.workspace_bytes == layer.backend.workspace_bytes(SPEC, 8, layer.max_local_rows)
    assert "backend=torch, device=cpu, experts=2:7 of 8, max_tokens=8" in repr(layer)
    assert isinstance(layer.warm_up(), WarmUpReport)
    assert layer.warm_up(4).binaries == 0
    with pytest.raises(ValueError, match="max_tokens 9 exceeds the 8"):
        layer.warm_up(9)


def test_progress_is_told(problem):
    told = []
    make(problem, progress=lambda *args: told.append(args))
    assert told[-1] == (5, 5)


def test_an_unknown_backend_lists_the_known_ones(problem, monkeypatch):
    with pytest.raises(ValueError, match=r"unknown backend 'best'; known: .*torch"):
        make(problem, backend="best")
    monkeypatch.setenv("PORTAMOE_BACKEND", "fastest")
    with pytest.raises(ValueError, match=r"PORTAMOE_BACKEND=fastest: .*known: .*torch"):
        make(problem, backend=None)
    make(problem)  # an argument goes before the variable


def test_a_rejected_backend_is_refused_before_the_weights_are_touched(problem, monkeypatch):
    class No:
        name, package, priority = "no", "test", 1000

        def check(self, spec, device):
            return [Reason("luck", "none", "some", "try again")]

        def only_on_request(self, spec, device):
            return None

    class Untouchable:
        def __len__(self):
            raise AssertionError("touched")

        def expert(self, index):
            raise AssertionError("touched")

    monkeypatch.setattr(registry, "backends", lambda: (No(), *real))
    with pytest.raises(BackendRejected, match=r"luck: none \(needs some\); try again"):
        RoutedExperts(SPEC, Untouchable(), max_tokens=1, device="cpu", backend="no")


real = registry.backends()


def test_the_automatic_choice_takes_what_accepts(problem):
    layer = make(problem, backend=None)
    assert_close(layer(*inputs(problem)), problem.reference(), roundings=4)
    assert layer.selection.name == layer.backend.name


def test_weights_of_another_spec_are_refused(problem):
    with pytest.raises(ValueError, match="weights hold 5 experts, the spec's local range has 8"):
        make(replace(problem, spec=replace(SPEC, local_experts=range(8))))
    with pytest.raises(ValueError, match=r"w13 has shape \(128, 32\), expected \(192, 32\)"):
        make(replace(problem, spec=replace(SPEC, intermediate_size=96)))


def test_the_spec_of_one_rank_with_the_weights_of_another_is_refused():
    first, _ = load_experts(DATA / "kimi-k3-tiny", 1, range(8))
    second, weights = load_experts(DATA / "kimi-k3-tiny", 1, range(8, 16))
    with pytest.raises(
        ValueError, match=r"local_experts is range\(0, 8\), the weights were opened with range\(8, 16\)"
    ):
        RoutedExperts(first, weights, max_tokens=4, device="cpu", backend="torch")
    layer = RoutedExperts(second, weights, max_tokens=4, device="cpu", backend="torch")
    assert layer.spec.local_experts == range(8, 16)


def test_bad_arguments(problem):
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        make(problem, max_tokens=0)
    with pytest.raises(TypeError, match=r"max_tokens must be an int, got 8\.0"):
        make(problem, max_tokens=8.0)
    with pytest.raises(ValueError, match="max_local_rows"):
        make(problem, max_local_rows=-1)
    with pytest.raises(ValueError, match=r"no device 'cuda:77'; visible here: .*cpu"):
        make(problem, device="cuda:77")
    with pytest.raises(ValueError, match="workspace has 100 bytes, 8 tokens need"):
        make(problem, workspace=torch.empty(100, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"workspace is torch\.float32"):
        make(problem, workspace=torch.empty(10**6))


# --- a module among modules -------------------------------------------------------------------------------------------


def test_it_has_no_state_and_no_parameters(layer):
    assert not layer.state_dict()
    assert not list(layer.parameters())
    assert not list(layer.buffers())
    layer.load_state_dict({})


def test_a_parent_may_change_dtype_and_stay_but_not_move(problem, layer):
    parent = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
    parent.half().to("cpu").eval()
    assert_close(layer(*inputs(problem)), problem.reference(), roundings=1)
    with pytest.raises(RuntimeError, match=r"prepared on cpu and cannot move to meta; .*device='meta'"):
        parent.to("meta")


def test_copies_and_pickles_are_refused(layer):
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(layer)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(layer)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(layer)


def test_the_public_name_is_lazy_and_the_same():
    import portamoe

    assert portamoe.RoutedExperts is RoutedExperts


def test_duplicates_have_one_row_and_the_bits_of_a_call(problem, layer):
    """With a product of more rows their last bits may differ on some CPUs."""
    x, weights = problem.x, problem.topk_weights
    ids = torch.full_like(problem.topk_ids, 3)
    ids[1] = torch.tensor([4, -1, 4])
    rows = torch.full((ids.numel() + 1, SPEC.hidden_size), torch.nan, dtype=layer.row_dtype)
    layer.forward_rows(x, ids, rows)
    by_slot = rows[:-1].view(len(x), SPEC.top_k, -1)
    assert torch.equal(by_slot[0], by_slot[0, :1].expand(3, -1))
    assert torch.equal(by_slot[1, 0], by_slot[1, 2])
    assert by_slot[1, 1].count_nonzero() == 0
    assert by_slot[1, 0].count_nonzero() > 0
    out = torch.empty_like(x)
    layer.sum_rows(rows, ids, weights, out)
    assert torch.equal(out, layer(x, ids, weights))
