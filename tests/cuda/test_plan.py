"""Sizes of the fused backend: grids, workspaces and which tiles are chosen, all known without a device."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from cuda_moe.plan import SORT_TOKENS, expected_tiles, make_plan, max_tiles, plan_edges, plan_of, tuned  # noqa: E402
from cuda_moe.triton_fused import BACKEND, BATCH_INVARIANT  # noqa: E402
from cuda_moe.workspace import regions, sort_shape, workspace_bytes  # noqa: E402
from portamoe.device import Device, Host  # noqa: E402
from portamoe.spec import GPT_OSS, KIMI_K3  # noqa: E402

EP8 = replace(KIMI_K3, local_experts=range(112))
TP8 = replace(KIMI_K3, intermediate_size=384)
SPECS = {"ep8": EP8, "tp8": TP8, "gpt-oss": GPT_OSS, "ep32": replace(KIMI_K3, local_experts=range(28))}


def test_extra_memory_of_prefill_stays_below_240_mb():
    assert workspace_bytes(EP8, 8192, 16640, 90, batch_invariant=False) <= 240e6
    assert BACKEND.workspace_bytes(EP8, 8192, 16640) <= 240e6


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_workspace_holds_every_smaller_call(name, invariant):
    spec, most, rows = SPECS[name], 3000, 5000
    announced = workspace_bytes(spec, most, rows, 90, invariant)
    needed = [
        regions(spec, tokens, make_plan(spec, tokens, 90, invariant), rows).nbytes
        for tokens in (*range(1, 40), *range(40, most, 97), most)
    ]
    assert announced == max(announced, *needed)
    assert announced in {
        regions(spec, tokens, make_plan(spec, tokens, 90, invariant), rows).nbytes
        for tokens in plan_edges(spec, most, 90, invariant)
    }


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tokens", [1, 17, 300, 5000])
def test_regions_do_not_overlap_while_both_are_in_use(name, tokens):
    spec = SPECS[name]
    found = regions(spec, tokens, make_plan(spec, tokens, 90), 700)
    first = {k: v for k, v in found.offsets.items() if k not in {"partial", "rest_h", "rest_y"}}
    spans = sorted((at, at + found.sizes[k]) for k, at in first.items())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert max(at + found.sizes[k] for k, at in found.offsets.items()) <= found.nbytes
    assert all(at % 256 == 0 for at in found.offsets.values())
    if "partial" in found.offsets:
        ends = [found.offsets[k] + found.sizes[k] for k in ("partial", "rest_h", "rest_y")]
        assert ends[0] <= found.offsets["rest_h"]
        assert ends[1] <= found.offsets["rest_y"]
        # What the sums keep must not lie on rows that other sums still read.
        assert ends[0] <= found.offsets["y"]
        assert found.rest_rows >= 256


def test_expected_tiles_is_the_mean_over_uniform_routings():
    generator = torch.Generator().manual_seed(0)
    counts = []
    for _ in range(20):
        ids = torch.rand(256, 896, generator=generator).topk(16).indices
        rows = torch.bincount(ids[ids < 112], minlength=112)
        counts.append(((rows + 7) // 8).sum())
    assert expected_tiles(EP8, 256, 8) == pytest.approx(float(torch.stack(counts).float().mean()), rel=0.02)


@pytest.mark.parametrize("tokens", [17, 100, 1000, 4096, 8192])
def test_slots_hold_uniform_routing_and_no_more_than_any(tokens):
    for spec in SPECS.values():
        plan = make_plan(spec, tokens, 90)
        assert expected_tiles(spec, tokens, plan.widest) <= plan.slots <= max_tiles(spec, tokens, plan.widest)


def test_few_tokens_take_at_most_three_launches():
    from cuda_moe.calls import Kernels

    for spec in SPECS.values():
        for tokens in range(1, 17):
            assert len(Kernels(spec, make_plan(spec, tokens, 90), tokens, torch.int32, 90).all(rest=True)) <= 3
        assert len(Kernels(spec, make_plan(spec, 4096, 90), 4096, torch.int32, 90).all(rest=True)) <= 6


def test_sort_covers_every_pair():
    for spec in (EP8, GPT_OSS, replace(EP8, top_k=3)):
        for tokens in (17, 1000, 8192):
            sort = sort_shape(spec, tokens)
            assert sort.slots >= spec.top_k
            assert (sort.blocks - 1) * SORT_TOKENS < tokens <= sort.blocks * SORT_TOKENS


@pytest.mark.parametrize("k", [1, 2, 5, 16])
def test_tiles_divide_k(k):
    spec = replace(TP8, intermediate_size=64 * k, hidden_size=64 * (k + 2))
    for tokens in (1, 4, 16, 100, 1000, 8192):
        plan = make_plan(spec, tokens, 90)
        for tile, blocks in ((plan.gate_up, k + 2), (plan.down, k)):
            assert blocks % (tile.slices * tile.unroll) == 0
            assert plan.columns[0] * tile.slices >= 8


@pytest.mark.parametrize("columns", [[], [8, 0, 0], [64, 16, 32], [12], [56], [256], [8, 16, 24, 32, 40, 48, 64]])
def test_widths_that_no_kernel_has_are_refused(columns):
    table = copy.deepcopy(tuned(90, False))
    for entry in table["sorted"]:
        entry["columns"] = columns
    with pytest.raises(ValueError, match="ascending multiples of 8"):
        plan_of(table, EP8, 100, 90)


def _device(arch="sm_90", triton="3.6.0"):
    torch_build = {"version": "2.11.0+cu130", "hip": None, "cuda": "13.0"}
    host = Host("x86_64", "3.12", torch=torch_build, vendor={"triton": triton})
    return Device("nvidia", arch, 0, "test", host)


def test_check_names_what_is_wrong():
    assert BACKEND.check(EP8, _device()) == []
    assert BACKEND.check(EP8, _device("sm_120")) == []
    assert BACKEND.check(GPT_OSS, _device("sm_80")) == []
    assert "sm_80" in str(BACKEND.check(EP8, _device("sm_75"))[0])
    assert "not installed" in str(BACKEND.check(EP8, _device(triton=None))[0])
    assert "3.3" in str(BACKEND.check(EP8, _device(triton="3.1.0"))[0])
    assert "nvfp4" in str(BACKEND.check(replace(EP8, weight_format="nvfp4"), _device())[0])
    assert "mxfp8" in str(BACKEND.check(replace(EP8, activation_format="mxfp8"), _device())[0])
    odd = replace(EP8, weight_format="bf16", hidden_size=50)
    assert "multiple of 16" in str(BACKEND.check(odd, _device())[0])
    cpu = Device("cpu", "cpu", 0, "cpu", Host("x86_64", "3.12", vendor={"triton": "3.9.0"}))
    assert "vendor nvidia" in str(BACKEND.check(EP8, cpu)[0])


def test_the_invariant_variant_is_only_for_those_who_ask():
    assert BACKEND.only_on_request(EP8, _device()) is None
    assert BATCH_INVARIANT.only_on_request(EP8, _device()) is not None
    assert BACKEND.name != BATCH_INVARIANT.name
