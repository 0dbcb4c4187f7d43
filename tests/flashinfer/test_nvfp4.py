"""The exact cast between MXFP4 and NVFP4, its inverse, the fold of global scales, and who serves a recode."""

import dataclasses

import pytest
import torch

from portamoe import nvfp4
from portamoe.activations import SiTU
from portamoe.checkpoints import load_experts
from portamoe.decision import Reason
from portamoe.formats import mxfp4_dequantize, nvfp4_dequantize
from portamoe.layer import RoutedExperts
from portamoe.spec import MoESpec
from portamoe.testing import assert_close, make_problem
from portamoe.weights import Expert, ExpertWeights, stack

SPEC = MoESpec(hidden_size=64, intermediate_size=32, num_experts=4, top_k=2, activation=SiTU(4.0, 25.0))


def mxfp4_expert(w13_bytes, w2_bytes=None, codes=0x21):
    """An expert of H = I = 32 with one scale a row of w13: given bytes for its 64 rows, repeated."""
    rows = torch.tensor(w13_bytes, dtype=torch.uint8).repeat(64)[:64, None]
    down = torch.tensor(w2_bytes or [127], dtype=torch.uint8).repeat(32)[:32, None]
    return Expert(
        w13=torch.full((64, 16), codes, dtype=torch.uint8),
        w2=torch.full((32, 16), codes, dtype=torch.uint8),
        w13_scale=rows,
        w2_scale=down,
    )


def values(expert):
    if expert.w13_global_scale is None:
        return mxfp4_dequantize(expert.w13, expert.w13_scale), mxfp4_dequantize(expert.w2, expert.w2_scale)
    return (
        nvfp4_dequantize(expert.w13, expert.w13_scale, expert.w13_global_scale),
        nvfp4_dequantize(expert.w2, expert.w2_scale, expert.w2_global_scale),
    )


def test_the_cast_keeps_every_weight_and_comes_back_byte_for_byte():
    spec, source = load_experts("tests/data/kimi-k3-tiny", 1)
    for index in range(len(source)):
        expert = source.expert(index)
        cast = nvfp4.from_mxfp4(expert)
        assert all(torch.equal(a, b) for a, b in zip(values(cast), values(expert), strict=True))
        assert torch.equal(cast.w13, expert.w13)
        assert cast.w13_global_scale[0] == cast.w13_global_scale[1]
        back = nvfp4.to_mxfp4(cast)
        for name in ("w13", "w2", "w13_scale", "w2_scale"):
            assert torch.equal(getattr(back, name), getattr(expert, name)), name
    assert spec.weight_format == "mxfp4"


@pytest.mark.parametrize("spread", range(20))
def test_the_exactness_condition(spread):
    """E4M3 holds powers of two from 2^8 down to 2^-9, so 17 binary exponents fit and 18 do not."""
    expert = mxfp4_expert([140, 140 - spread])
    if spread > nvfp4.MOST_SPREAD:
        with pytest.raises(nvfp4.InexactError, match=f"2\\^{spread} below"):
            nvfp4.from_mxfp4(expert)
        return
    cast = nvfp4.from_mxfp4(expert)
    assert torch.equal(values(cast)[0], values(expert)[0])
    assert float(cast.w13_scale.float().max()) == 256.0
    assert float(cast.w13_global_scale[0]) == 2.0 ** (140 - 127 - 8)
    assert torch.equal(nvfp4.to_mxfp4(cast).w13_scale, expert.w13_scale)


def test_blocks_that_are_all_zero_do_not_count():
    expert = mxfp4_expert([140, 10])
    expert.w13[1::2] = 0x80  # 0 and -0
    cast = nvfp4.from_mxfp4(expert)
    assert torch.equal(values(cast)[0], values(expert)[0])
    assert torch.equal(values(nvfp4.to_mxfp4(cast))[0].signbit(), values(expert)[0].signbit())


@pytest.mark.parametrize("byte", [0, 1, 118, 127, 254])
def test_every_magnitude_of_scale(byte):
    expert = mxfp4_expert([byte], [byte])
    cast = nvfp4.from_mxfp4(expert)
    assert torch.equal(nvfp4.to_mxfp4(cast).w13_scale, expert.w13_scale)
    assert torch.equal(nvfp4.to_mxfp4(cast).w2_scale, expert.w2_scale)


def test_a_nan_scale_is_no_weight():
    with pytest.raises(nvfp4.InexactError, match="NaN"):
        nvfp4.from_mxfp4(mxfp4_expert([255]))


def broken(change):
    cast = nvfp4.from_mxfp4(mxfp4_expert([127]))
    return change(cast)


def two_scales(expert):
    scale = expert.w13_scale.clone()
    scale[5, 1] = 128.0
    return dataclasses.replace(expert, w13_scale=scale)


def no_power(expert):
    return dataclasses.replace(expert, w2_global_scale=expert.w2_global_scale * 1.5)


def too_small(expert):
    return dataclasses.replace(expert, w13_global_scale=torch.full((2,), 2.0**-140))


@pytest.mark.parametrize("change", [two_scales, no_power, too_small])
def test_what_is_no_recode_is_not_converted(change):
    with pytest.raises(nvfp4.InexactError, match="no recode of MXFP4"):
        nvfp4.to_mxfp4(broken(change))


def test_a_scale_of_zero_makes_its_block_zero():
    expert = nvfp4.from_mxfp4(mxfp4_expert([127]))
    scale = expert.w13_scale.clone()
    scale[3, 0] = 0.0
    expert = dataclasses.replace(expert, w13_scale=scale)
    assert torch.equal(values(nvfp4.to_mxfp4(expert))[0], values(expert)[0])


# One global scale for w1 and w3.


def folding(gate, up, scales=(1.0, 2.0, 4.0, 64.0)):
    expert = nvfp4.from_mxfp4(mxfp4_expert([127], codes=0x73))
    scale = torch.tensor(scales).repeat(64)[:128].view(64, 2).to(torch.float8_e4m3fn)
    return dataclasses.replace(expert, w13_scale=scale, w13_global_scale=torch.tensor([gate, up]))


@pytest.mark.parametrize(
    ("gate", "up"),
    [(0.5, 0.5), (0.5, 0.25), (1.0, 3.0), (0.015625, 0.0015625), (1.0, 1.75), (2.0**-6, 10 * 2.0**-6), (1.0, 2.0**11)],
)
def test_a_quotient_that_folds_changes_no_weight(gate, up):
    expert = folding(gate, up)
    scale, shared = nvfp4.fold_global_scales(expert)
    before = nvfp4_dequantize(expert.w13, expert.w13_scale, expert.w13_global_scale)
    assert torch.equal(nvfp4_dequantize(expert.w13, scale, shared), before)


@pytest.mark.parametrize(("gate", "up"), [(1.0, 1.1), (1.0, 0.3), (1.0, 2.0**20), (1.0, 1.0001)])
def test_a_quotient_that_does_not_is_refused(gate, up):
    with pytest.raises(nvfp4.InexactError, match="does not fold"):
        nvfp4.fold_global_scales(folding(gate, up))


def test_odd_scales_do_not_take_a_factor_of_three():
    with pytest.raises(nvfp4.InexactError, match="does not fold"):
        nvfp4.fold_global_scales(folding(1.0, 3.0, scales=(1.0, 1.125)))


# Who serves what.


def recode_of(problem):
    """The problem's MXFP4 weights as an NVFP4 checkpoint would hold them."""
    experts = [nvfp4.from_mxfp4(problem.weights.expert(i)) for i in range(len(problem.weights))]

    class Source:
        def __len__(self):
            return len(experts)

        def expert(self, index):
            return experts[index]

    return dataclasses.replace(problem.spec, weight_format="nvfp4"), stack(Source())


def test_a_recode_is_seen_and_converted_expert_by_expert():
    problem = make_problem(SPEC, 3)
    spec, weights = recode_of(problem)
    recoded_spec, source = nvfp4.recode_to_mxfp4(weights, spec)
    assert recoded_spec == SPEC
    assert torch.equal(source.expert(2).w13_scale, problem.weights.expert(2).w13_scale)


def test_the_tiny_checkpoint_is_kept_with_the_reason():
    spec, source = load_experts("tests/data/kimi-k3-nvfp4-tiny", 1)
    reason = nvfp4.recode_to_mxfp4(source, spec)
    assert isinstance(reason, Reason)
    assert "local expert 3" in str(reason)
    assert "no power of two" in str(reason)
    assert "torch backend" in reason.remedy


def test_quantised_activations_have_no_mxfp4_form():
    reason = nvfp4.mxfp4_spec(dataclasses.replace(SPEC, weight_format="nvfp4", activation_format="nvfp4"))
    assert isinstance(reason, Reason)
    assert "bf16" in reason.remedy


def test_a_layer_on_the_cpu_keeps_nvfp4_on_torch():
    problem = make_problem(SPEC, 5)
    spec, weights = recode_of(problem)
    layer = RoutedExperts(spec, weights, device="cpu", max_tokens=5)
    assert layer.backend.name == "torch"
    assert layer.spec.weight_format == "nvfp4"
    assert_close(layer(problem.x, problem.topk_ids, problem.topk_weights), problem.reference(), roundings=1)


@pytest.fixture
def mxfp4_only(monkeypatch):
    """Register a backend that takes MXFP4 alone and beats torch."""
    from portamoe import registry
    from portamoe.torch_backend import TorchBackend

    class Only(TorchBackend):
        name = "mxfp4_only"
        priority = 50

        def check(self, spec, device):
            return [] if spec.weight_format == "mxfp4" else [Reason("weight format", spec.weight_format, "mxfp4")]

    found = (Only(), TorchBackend())
    monkeypatch.setattr(registry, "backends", lambda: found)


@pytest.mark.parametrize("backend", [None, "mxfp4_only"])
def test_a_layer_serves_a_recode_through_an_mxfp4_backend(mxfp4_only, caplog, backend):
    problem = make_problem(SPEC, 5)
    spec, weights = recode_of(problem)
    with caplog.at_level("INFO", logger="portamoe"):
        layer = RoutedExperts(spec, weights, device="cpu", max_tokens=5, backend=backend)
    assert layer.backend.name == "mxfp4_only"
    assert layer.spec == SPEC
    assert_close(layer(problem.x, problem.topk_ids, problem.topk_weights), problem.reference(), roundings=1)
    assert "recode of MXFP4" in caplog.text


def test_what_is_no_recode_stays_with_torch(mxfp4_only, caplog):
    spec, source = load_experts("tests/data/kimi-k3-nvfp4-tiny", 1)
    with caplog.at_level("INFO", logger="portamoe"):
        layer = RoutedExperts(spec, source, device="cpu", max_tokens=9)
    assert layer.backend.name == "torch"
    assert "NVFP4 weights are kept" in caplog.text


def test_torch_asked_for_is_torch(mxfp4_only):
    spec, weights = recode_of(make_problem(SPEC, 1))
    assert RoutedExperts(spec, weights, device="cpu", max_tokens=1, backend="torch").spec.weight_format == "nvfp4"


def test_stacked_weights_are_a_source():
    assert isinstance(recode_of(make_problem(SPEC, 1))[1], ExpertWeights)
