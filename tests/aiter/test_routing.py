"""Routing remapped for AITER: the weighted sum stays, ids are local and distinct, nothing depends on the host."""

import pytest
import torch

from rocm_moe.aiter.routing import remap


def weighted_sum(ids, weights, values, first=0):
    """Return sum over slots of weight * values[id - first], skipping ids outside."""
    out = torch.zeros(ids.shape[0], dtype=torch.float64)
    for t, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            if 0 <= expert - first < len(values):
                out[t] += float(weights[t, k]) * values[expert - first]
    return out


@pytest.mark.parametrize(
    ("top_k", "first", "num_local"),
    [
        (4, 0, 16),  # all experts here
        (4, 8, 4),  # this rank has exactly K
        (6, 8, 3),  # fewer than K: the slots shrink
        (1, 0, 1),
        (16, 112, 112),  # Kimi-K3 over 8 ranks
        (3, 39, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_sum_stays(top_k, first, num_local, dtype):
    generator = torch.Generator().manual_seed(top_k)
    total = first + num_local + 5
    ids = torch.randint(-1, total + 2, (200, top_k), generator=generator).to(dtype)
    ids[0] = -1
    ids[1] = first  # one expert in every slot
    ids[2] = first + num_local - 1
    ids[3] = total + 1000
    weights = torch.rand(200, top_k, generator=generator)
    values = torch.rand(num_local, generator=generator, dtype=torch.float64).tolist()
    local, scaled, here = remap(ids, weights, first, num_local)
    slots = min(top_k, num_local)
    assert local.dtype == torch.int32
    assert scaled.dtype == torch.float32
    assert local.shape == scaled.shape == (200, slots)
    assert local.is_contiguous()
    assert scaled.is_contiguous()
    assert int(local.min()) >= 0
    assert int(local.max()) < num_local
    ordered = local.sort(dim=1).values
    assert not (ordered[:, 1:] == ordered[:, :-1]).any(), "an expert twice in one row"
    expected = weighted_sum(ids, weights, values, first)
    torch.testing.assert_close(weighted_sum(local, scaled, values), expected, rtol=1e-6, atol=1e-7)
    inside = (ids >= first) & (ids < first + num_local)
    assert torch.equal(here, inside.any(1))


def test_plain_rows_are_kept_as_they_are():
    ids = torch.tensor([[5, 2, 7], [0, 1, 3]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25, 0.25], [float("nan"), 1.0, 2.0]])
    local, scaled, _ = remap(ids, weights, 0, 8)
    assert torch.equal(local, ids)
    assert torch.equal(scaled[0], weights[0])
    assert scaled[1, 0].isnan()
    assert torch.equal(scaled[1, 1:], weights[1, 1:])


def test_a_masked_weight_may_be_nan():
    _, scaled, here = remap(torch.tensor([[-1, 3]]), torch.tensor([[float("nan"), 1.0]]), 0, 8)
    assert torch.equal(scaled, torch.tensor([[0.0, 1.0]]))
    assert here.all()


def test_filled_slots_spread_over_the_experts():
    ids = torch.full((64, 4), -1)
    local, scaled, here = remap(ids, torch.ones(64, 4), 0, 32)
    assert not here.any()
    assert not scaled.any()
    assert torch.bincount(local.flatten(), minlength=32).max() <= 8 + 1


def test_no_host_sync():
    """Under fake tensors every look at a value on the host raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        ids = torch.zeros(7, 4, dtype=torch.int32)
        local, scaled, here = remap(ids, torch.zeros(7, 4), 2, 3)
    assert local.shape == scaled.shape == (7, 3)
    assert here.shape == (7,)


def test_no_tokens():
    local, scaled, here = remap(torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, 4), 0, 16)
    assert local.shape == scaled.shape == (0, 4)
    assert here.shape == (0,)
