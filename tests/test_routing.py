"""Router rules against expected values and strange logits; the alignment against plain Python."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from portamoe.activations import SwiGLU
from portamoe.routing import SigmoidRouter, SoftmaxRouter, align
from portamoe.spec import MoESpec

ROUTERS = (SigmoidRouter, SoftmaxRouter)
TOP_K = (1, 2, 3, 5, 6, 7, 8, 10, 16, 22)
EXPERTS = (6, 8, 40, 60, 96, 160, 384, 896)


def spec_of(experts: int, top_k: int, local: range | None = None) -> MoESpec:
    return MoESpec(
        hidden_size=32,
        intermediate_size=32,
        num_experts=experts,
        top_k=top_k,
        activation=SwiGLU(),
        local_experts=local or range(experts),
    )


def test_data_sets(data_set):
    spec, _, tensors = data_set.load()
    bias, router = None, SoftmaxRouter(spec.top_k)
    if data_set.name.startswith("kimi"):
        router = SigmoidRouter(spec.top_k)
        bias = gate_bias(data_set)
    ids, weights = router(tensors["router_logits"], bias)
    assert torch.equal(ids, tensors["topk_ids"])
    assert ids.dtype == torch.int32
    assert torch.allclose(weights, tensors["topk_weights"], rtol=1e-6, atol=0)


def gate_bias(data_set) -> torch.Tensor:
    from safetensors import safe_open

    name = f"language_model.model.layers.{data_set.layer}.block_sparse_moe.gate.e_score_correction_bias"
    for file in sorted(data_set.checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118
                return tensors.get_tensor(name)
    raise AssertionError(f"{name} is in no file")


def test_the_bias_changes_the_choice_but_not_the_weights(kimi):
    _, _, tensors = kimi.load()
    logits = tensors["router_logits"]
    with_bias = SigmoidRouter(4)(logits, gate_bias(kimi))
    without = SigmoidRouter(4)(logits)
    changed = (with_bias[0].sort(1).values != without[0].sort(1).values).any(1)
    assert int(changed.sum()) == 5
    scores = logits.sigmoid().gather(1, with_bias[0].long())
    assert torch.allclose(with_bias[1], (scores / scores.sum(1, keepdim=True)).float())


def test_the_scaling_factor_is_applied_once():
    logits = torch.randn(5, 12)
    plain, scaled = SigmoidRouter(4)(logits), SigmoidRouter(4, routed_scaling_factor=2.5)(logits)
    assert torch.equal(plain[0], scaled[0])
    assert torch.equal(plain[1] * 2.5, scaled[1])


def test_without_renormalisation():
    logits = torch.randn(5, 12)
    ids, weights = SigmoidRouter(4, renormalize=False)(logits)
    assert torch.allclose(weights, logits.sigmoid().gather(1, ids.long()))
    ids, weights = SoftmaxRouter(4, renormalize=False)(logits)
    assert torch.allclose(weights, logits.softmax(1).gather(1, ids.long()))
    assert torch.allclose(SoftmaxRouter(4)(logits)[1], logits.topk(4).values.softmax(1))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("experts", EXPERTS)
def test_any_top_k(router, experts):
    logits = torch.randn(9, experts, generator=torch.Generator().manual_seed(experts))
    for top_k in {*(k for k in TOP_K if k <= experts), experts}:
        ids, weights = router(top_k)(logits)
        assert torch.equal(ids.sort(1).values, logits.topk(top_k).indices.int().sort(1).values)
        assert torch.allclose(weights.sum(1), torch.ones(9), atol=1e-5)


STRANGE = {
    "all NaN": [torch.nan] * 8,
    "one NaN": [1.0, torch.nan, 2.0, 3.0, 0.0, -1.0, -2.0, 0.5],
    "mostly NaN": [torch.nan] * 6 + [-5.0, 1.0],
    "all equal": [0.25] * 8,
    "all -Inf": [-torch.inf] * 8,
    "NaN and -Inf": [torch.nan] * 4 + [-torch.inf] * 4,
    "one Inf": [0.0, torch.inf] + [1.0] * 6,
    "two Inf": [torch.inf, 0.0, torch.inf] + [1.0] * 5,
    "huge": [3e38, -3e38] * 4,
    "Inf and NaN": [torch.inf, torch.nan] * 4,
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
def test_strange_logits_give_distinct_ids_and_finite_weights(router, top_k):
    ordinary = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor(list(STRANGE.values()))
    ids, weights = router(top_k)(torch.cat((ordinary, rows)))
    for row in ids.tolist():
        assert len(set(row)) == top_k
        assert all(0 <= i < 8 for i in row)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    alone = router(top_k)(ordinary)
    assert torch.equal(ids[:3], alone[0])
    # torch's sigmoid rounds differently in the vector part and the remainder of a tensor (AVX-512).
    torch.testing.assert_close(weights[:3], alone[1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("router", ROUTERS)
def test_nan_experts_come_last_and_weigh_nothing(router):
    ids, weights = router(2)(torch.tensor([[torch.nan, 1.0, 2.0, 3.0]]))
    assert ids.tolist() == [[3, 2]]
    assert weights.sum() == pytest.approx(1.0)
    ids, weights = router(3)(torch.tensor([[torch.nan, -torch.inf, torch.nan, 3.0]]))
    assert ids.tolist() == [[3, 1, 0]]
    assert weights[0, 2] == 0
    assert router(2)(torch.full((1, 4), torch.nan))[1].tolist() == [[0.0, 0.0]]


def test_a_nan_bias_is_as_a_nan_score():
    bias = torch.tensor([0.0, torch.nan, 0.0, 0.0])
    ids, weights = SigmoidRouter(4)(torch.zeros(1, 4), bias)
    assert ids.tolist() == [[0, 2, 3, 1]]
    assert weights[0, 3] == 0


@pytest.mark.parametrize("router", ROUTERS)
def test_equal_scores_take_the_lower_id_first(router):
    logits = torch.zeros(2, 896)
    logits[1, 500:] = 1.0
    ids, _ = router(16)(logits)
    assert ids.tolist() == [list(range(16)), list(range(500, 516))]


@pytest.mark.parametrize("router", ROUTERS)
def test_wrong_input_is_an_error(router):
    with pytest.raises(ValueError, match="top_k is 5, expected 1 to 4"):
        router(5)(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"\(4,\), expected \(T, E\)"):
        router(2)(torch.zeros(4))
    with pytest.raises(TypeError, match="int64"):
        router(2)(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="correction"):
        router(2)(torch.zeros(1, 4), torch.zeros(3))


@pytest.mark.parametrize("router", ROUTERS)
def test_strided_logits_and_no_tokens(router):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(600, 20, generator=generator)  # one in a few hundred rows shows a difference in the last bit
    views = (wide[:, 3:11], torch.randn(8, 600, generator=generator).T)
    for view in views:
        ids, weights = router(3)(view)
        same = router(3)(view.contiguous())
        assert torch.equal(ids, same[0])
        assert torch.equal(weights, same[1])
    ids, weights = router(3)(torch.zeros(0, 8))
    assert ids.shape == weights.shape == (0, 3)


# --- align ------------------------------------------------------------------------------------------------------------


def aligned(ids: torch.Tensor, spec: MoESpec) -> list[list[int]]:
    alignment = align(ids, spec)
    edges = alignment.offsets.tolist()
    assert edges[0] == 0  # what is not computed stands behind, not before
    assert alignment.counts.tolist() == [b - a for a, b in pairwise(edges)]
    assert torch.equal(alignment.tokens, alignment.pairs // spec.top_k)
    assert sorted(alignment.pairs.tolist()) == list(range(ids.numel()))
    return [alignment.pairs[a:b].tolist() for a, b in pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_align_equals_plain_python(data):
    experts = data.draw(st.sampled_from((1, 6, 40, 896)))
    top_k = data.draw(st.integers(1, min(experts, 5)))
    first = data.draw(st.integers(0, experts - 1))
    local = range(first, data.draw(st.integers(first + 1, experts)))
    tokens = data.draw(st.integers(0, 12))
    # Duplicates, -1, other ranks' ids and garbage beyond the last expert.
    values = st.integers(-3, experts + 3)
    flat = data.draw(st.lists(values, min_size=tokens * top_k, max_size=tokens * top_k))
    dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    ids = torch.tensor(flat, dtype=dtype).view(tokens, top_k)
    expected = [[pair for pair, value in enumerate(flat) if value == expert] for expert in local]
    assert aligned(ids, spec_of(experts, top_k, local)) == expected


@pytest.mark.parametrize("experts", [40, 64])
def test_the_count_of_expert_31_is_exact_with_minus_one(experts):
    ids = torch.tensor([[31, -1, 2], [-1, 31, 30], [-1, -1, -1], [5, 6, 31], [33, 32, -1]])
    counts = align(ids, spec_of(experts, 3)).counts
    assert torch.equal(counts, torch.bincount(ids[ids >= 0], minlength=experts))
    assert counts[31] == 3
    assert counts[-1] == 0


def test_align_wants_its_shape_and_dtype():
    with pytest.raises(TypeError, match="float32, expected int32 or int64"):
        align(torch.zeros(2, 3), spec_of(8, 3))
    with pytest.raises(ValueError, match=r"\(2, 4\), expected \(T, 3\)"):
        align(torch.zeros(2, 4, dtype=torch.int32), spec_of(8, 3))


class NoSync(TorchFunctionMode):
    """Refuses what makes a GPU wait for the host, or gives a size that depends on the data."""

    FORBIDDEN = frozenset(
        [
            "item",
            "tolist",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "nonzero",
            "unique",
            "masked_select",
            "index_add_",
            "cpu",
            "numpy",
        ]
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.FORBIDDEN:
            raise AssertionError(f"{func.__name__} needs the host")
        return func(*args, **(kwargs or {}))


def test_nothing_here_waits_for_the_host():
    logits = torch.randn(5, 12)
    with NoSync():
        ids, _ = SigmoidRouter(3)(logits, torch.zeros(12))
        SoftmaxRouter(3)(logits)
        align(ids, spec_of(12, 3, range(2, 9)))
        with pytest.raises(AssertionError, match="needs the host"):
            bool(logits.sum() > 0)
