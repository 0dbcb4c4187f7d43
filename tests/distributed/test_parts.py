"""The parts of `portamoe.distributed` in one process; a comparison that could not fail would be found here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from portamoe import RoutedExperts
from portamoe.distributed import ExpertParallel, RankGroup, split_experts
from portamoe.distributed._checks import CASES, SPEC, Bench
from portamoe.distributed._exchange import Wire, add_in_order, local_pairs, outgoing
from portamoe.distributed.placement import owners
from portamoe.testing import make_problem

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ranks():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = RankGroup(None, torch.device("cpu"), timeout=5.0)
    yield group
    group.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(("experts", "size"), [(896, 8), (19, 4), (5, 5), (1, 1)])
def test_shares_cover_all_experts_once_and_differ_by_one(experts, size):
    shares = [split_experts(experts, rank, size) for rank in range(size)]
    assert [e for share in shares for e in share] == list(range(experts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    expected = [rank for rank, share in enumerate(shares) for _ in share]
    assert owners([(s.start, s.stop) for s in shares], experts) == expected


def test_arguments_are_those_of_the_layer(ranks):
    problem = make_problem(SPEC, 5)
    parallel = ExpertParallel(RoutedExperts(SPEC, problem.weights, max_tokens=8, device="cpu", backend="torch"), ranks)
    x, ids, weights = problem.x, problem.topk_ids, problem.topk_weights
    for wrong, error, words in (
        ((x, ids, weights, torch.zeros(9, SPEC.hidden_size, dtype=x.dtype)), ValueError, "out has shape"),
        ((x, ids, weights, torch.zeros(x.shape)), TypeError, "out is torch.float32"),
        ((x, ids.bool(), weights), TypeError, "topk_ids is torch.bool"),
        ((x, ids.float(), weights), TypeError, "topk_ids is torch.float32"),
        ((x, ids + SPEC.num_experts, weights), ValueError, "topk_ids has values outside"),
    ):
        with pytest.raises(error, match=words):
            parallel(*wrong)


def test_a_device_may_be_a_string_and_a_time_out_a_number(ranks):
    named = RankGroup(None, "cpu")
    assert named.device == torch.device("cpu")
    named.close()
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout must be positive"):
            RankGroup(None, "cpu", timeout=wrong)


def test_impossible_shares_are_refused():
    with pytest.raises(ValueError, match="3 experts over 4 ranks"):
        split_experts(3, 0, 4)
    with pytest.raises(ValueError, match=r"0 … 1, got 2"):
        split_experts(3, 2, 2)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_packed_row_is_read_back_exactly(weighted, tokens):
    wire = Wire(hidden=64, top_k=3, dtype=torch.bfloat16, weighted=weighted)
    x = torch.randn(tokens, 64).bfloat16()
    ids, weights = torch.randint(-1, 896, (tokens, 3)), torch.rand(tokens, 3)
    packed = wire.pack(x, ids, weights)
    assert packed.shape == (tokens, 64 * 2 + 3 * 4 * (2 if weighted else 1))
    got_x, got_ids, got_weights = wire.unpack(packed)
    assert torch.equal(got_x, x)
    assert torch.equal(got_ids, ids.int())
    assert torch.equal(got_weights, weights) or not weighted
    assert not tokens or got_x.data_ptr() != packed.data_ptr()


def test_tokens_and_pairs_are_sorted_by_rank():
    owner = torch.tensor([0, 0, 1, 2])
    sent = outgoing(torch.tensor([[3, 0, 1], [2, -1, 3], [-1, -1, -1]]), owner, ranks=3)
    assert sent.tokens.tolist() == [0, 1, 0, 1]
    assert sent.token_count.tolist() == [1, 1, 2]
    assert sent.pairs[:5].tolist() == [1, 2, 3, 0, 5]
    assert sent.pair_count.tolist() == [2, 1, 2]
    assert local_pairs(torch.tensor([[3, 0], [2, -1]]), range(2, 4)).tolist() == [0, 2]


def test_partial_sums_are_added_in_float32_by_ascending_rank():
    out = torch.empty(2, 1, dtype=torch.bfloat16)
    partial = torch.tensor([[256.0], [1.0], [1.0], [5.0]]).bfloat16()  # 256 + 1 alone would be 256 in bf16
    add_in_order(partial, torch.tensor([0, 0, 0, 1]), [1, 1, 2], out)
    assert out.flatten().tolist() == [258.0, 5.0]


def test_rows_and_their_sum_are_a_call(kimi):
    spec, source, expected = kimi.load()
    layer = RoutedExperts(spec, source, max_tokens=64, device="cpu", backend="torch", canary="skip")
    x, ids, weights = (expected[name] for name in ("x", "topk_ids", "topk_weights"))
    rows = torch.full((ids.numel() + 1, spec.hidden_size), float("nan"))
    layer.forward_rows(x, ids, rows)
    out = torch.empty_like(x)
    layer.sum_rows(rows, ids, weights, out)
    assert torch.equal(out, layer(x, ids, weights))


def test_every_comparison_can_fail(ranks, monkeypatch):
    bench = Bench(ranks, "torch")
    case = next(c for c in CASES if c.name == "all_to_all exact: even")
    assert bench.run(case).passed
    layer = bench.layer
    good_sum, good_rows = layer.sum_rows, layer.forward_rows

    def descending(rows, ids, weights, out):
        good_sum(rows, torch.where(ids < 0, ids, SPEC.num_experts - 1 - ids), weights, out)

    def shifted(x, ids, rows):
        good_rows(x, ids, rows)
        rows[:-1] = rows[:-1].roll(1, 0)

    monkeypatch.setattr(layer, "sum_rows", descending)
    result = bench.run(case)
    assert not result.bitwise
    assert result.rms <= result.limit
    assert not result.passed
    monkeypatch.setattr(layer, "sum_rows", good_sum)
    monkeypatch.setattr(layer, "forward_rows", shifted)
    assert bench.run(case).rms > 0.1


def test_a_backend_without_rows_sums_partially_or_says_so(ranks, monkeypatch):
    layer = Bench(ranks, "torch").layer
    monkeypatch.setattr(type(layer.backend), "row_dtype", None)
    with pytest.raises(ValueError, match="combine='partial_sums'"):
        ExpertParallel(layer, ranks)
    with pytest.raises(ValueError, match="no rows"):
        layer.forward_rows(torch.empty(0, 256).bfloat16(), torch.empty(0, 4).int(), torch.empty(1, 256))
    problem = make_problem(SPEC, 3)
    out = ExpertParallel(layer, ranks, combine="partial_sums")(problem.x, problem.topk_ids, problem.topk_weights)
    assert out.isfinite().all()


def test_wrong_arguments_are_refused(ranks):
    layer = Bench(ranks, "torch").layer
    with pytest.raises(ValueError, match="combine must be one of exact, partial_sums"):
        ExpertParallel(layer, ranks, combine="fast")
    parallel = ExpertParallel(layer, ranks)
    problem = make_problem(SPEC, 3)
    with pytest.raises(ValueError, match="topk_ids has shape"):
        parallel(problem.x, problem.topk_ids[:2], problem.topk_weights)
    with pytest.raises(ValueError, match=r"outside -1 … 18"):
        parallel(problem.x, problem.topk_ids + 100, problem.topk_weights)
    with pytest.raises(ValueError, match="timeout must be positive"):
        RankGroup(None, torch.device("cpu"), timeout=0)


def test_no_group_is_refused():
    with pytest.raises(ValueError, match="init_process_group first"):
        RankGroup(None, torch.device("cpu"))


INTERPRETED = """
import torch
from portamoe import MoESpec, RoutedExperts, SiTU
from portamoe.testing import make_problem
spec = MoESpec(hidden_size=128, intermediate_size=64, num_experts=8, top_k=4, activation=SiTU(4.0, 25.0))
problem = make_problem(spec, 9, minus_one=0.2)
for window in (64, 16):
    layer = RoutedExperts(spec, problem.weights, max_tokens=9, device="cpu", backend="triton_unfused", canary="skip",
                          max_local_rows=window)
    rows = torch.full((9 * 4 + 1, 128), float("nan"), dtype=torch.bfloat16)
    layer.forward_rows(problem.x, problem.topk_ids, rows)
    out = torch.empty_like(problem.x)
    layer.sum_rows(rows, problem.topk_ids, problem.topk_weights, out)
    assert torch.equal(out, layer(problem.x, problem.topk_ids, problem.topk_weights)), window
    layer.sum_rows(rows.roll(1, 0), problem.topk_ids, problem.topk_weights, out)
    assert not torch.equal(out, layer(problem.x, problem.topk_ids, problem.topk_weights)), "rows of other pairs"
"""


@pytest.mark.kernels
def test_rows_and_their_sum_are_a_call_of_triton_unfused():
    pytest.importorskip("triton")
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'common'}:{ROOT}"}
    command = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
