"""Stacking experts, and comparing them with what a spec implies."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from portamoe.activations import SiTU, SwiGLUOAI
from portamoe.spec import MoESpec
from portamoe.weights import Expert, ExpertSource, ExpertWeights, stack, validate

H, I = 64, 96  # noqa: E741
SPEC = MoESpec(hidden_size=H, intermediate_size=I, num_experts=3, top_k=2, activation=SiTU(4.0, 25.0))
NVFP4 = replace(SPEC, weight_format="nvfp4")
BIASED = replace(SPEC, bias=True, activation=SwiGLUOAI(1.702, 7.0))


class Listed:
    """Experts in a list: the smallest source."""

    def __init__(self, experts: list[Expert]) -> None:
        self.experts = experts

    def __len__(self) -> int:
        return len(self.experts)

    def expert(self, index: int) -> Expert:
        return self.experts[index]


def _u8(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def make(spec: MoESpec, **changes: Any) -> Expert:
    block = 32 if spec.weight_format == "mxfp4" else 16
    tensors: dict[str, Any] = {
        "w13": _u8(2 * I, H // 2),
        "w2": _u8(H, I // 2),
        "w13_scale": _u8(2 * I, H // block),
        "w2_scale": _u8(H, I // block),
    }
    if spec.weight_format == "nvfp4":
        tensors["w13_scale"] = tensors["w13_scale"].view(torch.float8_e4m3fn)
        tensors["w2_scale"] = tensors["w2_scale"].view(torch.float8_e4m3fn)
        tensors |= {"w13_global_scale": torch.rand(2), "w2_global_scale": torch.rand(())}
    if spec.bias:
        tensors |= {"w13_bias": torch.rand(2 * I), "w2_bias": torch.rand(H).bfloat16()}
    return Expert(**(tensors | changes))


def same(a: Expert, b: Expert) -> bool:
    def raw(value: torch.Tensor | None) -> list[int] | None:
        return None if value is None else value.reshape(-1).contiguous().view(torch.uint8).tolist()

    return all(raw(getattr(a, f.name)) == raw(getattr(b, f.name)) for f in fields(Expert))


@pytest.mark.parametrize("spec", [SPEC, NVFP4, BIASED], ids=["mxfp4", "nvfp4", "bias"])
def test_stacked_experts_are_the_experts(spec: MoESpec, monkeypatch: pytest.MonkeyPatch) -> None:
    # Uninitialised memory holds NaN bytes here: what stack forgets to write shows.
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, size: new_empty(self, size).view(torch.uint8).fill_(0xFF).view(self.dtype),
    )
    source = Listed([make(spec) for _ in range(3)])
    stacked = stack(source)
    assert len(stacked) == 3
    assert isinstance(source, ExpertSource)
    assert isinstance(stacked, ExpertSource)
    for index in range(3):
        assert same(stacked.expert(index), source.expert(index))
        assert not same(stacked.expert(index), source.expert((index + 1) % 3))
    assert stacked.nbytes == sum(expert.nbytes for expert in source.experts)
    validate(source, spec)
    validate(stacked, spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w2_bias": torch.zeros(H)}, r"w2_bias of expert 1 is torch.float32 \(64,\), that of expert 0 is absent"),
        ({"w2_scale": None}, "w2_scale of expert 1 is absent"),
        ({"w2": _u8(1, I // 2)}, r"w2 of expert 1 is torch.uint8 \(1, 48\).*\(64, 48\)"),
        ({"w13": _u8(2 * I, H // 2).to(torch.int32)}, "w13 of expert 1 is torch.int32"),
    ],
)
def test_stack_refuses_experts_that_differ(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stack(Listed([make(SPEC), make(SPEC, **change)]))


@pytest.mark.parametrize(
    ("spec", "change", "error", "message"),
    [
        (SPEC, {"w13_scale": None}, ValueError, r"w13_scale is missing, mxfp4 needs it as \(192, 2\)"),
        (SPEC, {"w2": _u8(I // 2, H)}, ValueError, r"w2 has shape \(48, 64\), expected \(64, 48\)"),
        (SPEC, {"w2_scale": torch.ones(H, I // 32)}, TypeError, "w2_scale is torch.float32"),
        (SPEC, {"w13_bias": torch.ones(2 * I)}, ValueError, "carry w13_bias, .*bias=False"),
        (SPEC, {"w13_global_scale": torch.ones(2)}, ValueError, "carry w13_global_scale, .*'mxfp4'"),
        (NVFP4, {"w13_global_scale": torch.ones(())}, ValueError, r"w13_global_scale has shape \(\), expected \(2,\)"),
        (NVFP4, {"w13_scale": _u8(2 * I, H // 16)}, TypeError, "w13_scale is torch.uint8"),
        (BIASED, {"w2_bias": None}, ValueError, "w2_bias is missing"),
    ],
)
def test_validate_names_the_tensor(spec: MoESpec, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        validate(Listed([make(spec, **change)] * 3), spec)


def test_validate_compares_counts() -> None:
    with pytest.raises(ValueError, match="weights hold 2 experts, the spec's local range has 3"):
        validate(Listed([make(SPEC)] * 2), SPEC)
    stacked = stack(Listed([make(SPEC) for _ in range(3)]))
    assert stacked.w2_scale is not None
    with pytest.raises(ValueError, match=r"w2_scale has shape \(2, 64, 3\), but w13 holds 3 experts"):
        validate(replace(stacked, w2_scale=stacked.w2_scale[:2]), SPEC)


def test_input_scales_of_nvfp4_are_optional() -> None:
    scales = {"w13_input_scale": torch.ones(2), "w2_input_scale": torch.ones(())}
    validate(Listed([make(NVFP4, **scales)] * 3), NVFP4)
    with pytest.raises(ValueError, match="carry w13_input_scale, w2_input_scale"):
        validate(Listed([make(SPEC, **scales)] * 3), SPEC)


def test_expert_of_a_stack_is_a_view() -> None:
    stacked = ExpertWeights(w13=torch.zeros(2, 4, 2), w2=torch.zeros(2, 2, 2))
    stacked.expert(1).w2.fill_(1.0)
    assert stacked.w2.sum(dim=(1, 2)).tolist() == [0.0, 4.0]
