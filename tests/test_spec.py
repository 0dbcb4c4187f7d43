"""`MoESpec`: what a copy with other sizes means, and ranges of experts that are none."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from portamoe.spec import KIMI_K3, MoESpec

COPIES = {
    "as it is": lambda spec: spec,
    "pickled": lambda spec: pickle.loads(pickle.dumps(spec)),  # noqa: S301 - its own bytes
    "deep copy": copy.deepcopy,
    "JSON": lambda spec: MoESpec.from_dict(spec.to_dict()),
    "all, named": lambda spec: replace(spec, local_experts=range(896)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("experts", [16, 32, 1024])
def test_all_experts_stay_all_with_another_number(how, experts):
    """`local_experts` is a field of its own, so `replace` hands on the old range; it must not stay behind."""
    changed = replace(COPIES[how](KIMI_K3), num_experts=experts)
    assert changed.local_experts == range(experts)
    assert changed == replace(KIMI_K3, num_experts=experts, local_experts=range(experts))
    assert hash(changed) == hash(replace(KIMI_K3, num_experts=experts, local_experts=range(experts)))


def test_a_part_stays_the_part_that_was_named():
    part = replace(KIMI_K3, local_experts=range(112))
    assert replace(part, num_experts=1024).local_experts == range(112)
    assert copy.deepcopy(part).local_experts == range(112)
    with pytest.raises(ValueError, match="within 0:64, got 0:112"):
        replace(part, num_experts=64)


@pytest.mark.parametrize("empty", [range(5, 5), range(896, 896), range(3, 1)])
def test_a_rank_without_experts_does_not_get_all(empty):
    with pytest.raises(ValueError, match="non-empty contiguous range"):
        replace(KIMI_K3, local_experts=empty)
    assert replace(KIMI_K3, local_experts=range(0)).local_experts == range(896)
