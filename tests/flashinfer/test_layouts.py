"""Converters: exact round trips, documented positions, and padding that never stays uninitialised."""

import dataclasses

import pytest
import torch

from cuda_moe.flashinfer import layouts
from cuda_moe.flashinfer.support import support
from portamoe.weights import Expert
from tests.flashinfer import strict_kernels

MODES = sorted(support().modes.values(), key=lambda m: m.name)
SIZES = [(256, 128), (256, 192), (288, 96), (3584, 384)]


def drawn(mode, hidden, inter):
    generator = torch.Generator().manual_seed(hidden + inter)

    def bytes_(*shape):
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    dtype = torch.float8_e4m3fn if mode.block == 16 else torch.uint8
    return Expert(
        w13=bytes_(2 * inter, hidden // 2),
        w2=bytes_(hidden, inter // 2),
        w13_scale=bytes_(2 * inter, hidden // mode.block).view(dtype),
        w2_scale=bytes_(hidden, inter // mode.block).view(dtype),
    )


def as_bytes(expert):
    return {name: value.view(torch.uint8) for name, value in vars(expert).items() if value is not None}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_round_trip(mode, size):
    layout = layouts.layout_for(mode, *size)
    expert = drawn(mode, *size)
    stored = layouts.to_kernel(expert, layout)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == layout.shapes()
    back = as_bytes(layouts.from_kernel(stored, layout))
    for name, value in as_bytes(expert).items():
        assert torch.equal(back[name], value), name


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_rows_and_scales_lie_where_the_contract_says(mode):
    """Gate and up rows are tagged; every row is looked up by the stand-in's own arithmetic."""
    hidden, inter = 256, 128
    expert = drawn(mode, hidden, inter)
    layout = layouts.layout_for(mode, hidden, inter)
    stored = layouts.to_kernel(expert, layout)
    row = torch.arange(2 * inter)
    place = strict_kernels.up_first_row(row, inter, mode.group or inter)
    if layout.kind == "trtllm":
        place = strict_kernels.shuffled_row(place)
    assert torch.equal(stored["w13"][place], expert.w13)
    columns = hidden // mode.block
    codes = expert.w13_scale.view(torch.uint8)
    if layout.kind == "cutlass":
        r, c = place[:, None], torch.arange(columns)[None]
        found = stored["w13_scale"][r // 64, c // 4, r % 16, r % 64 // 16 * 4 + c % 4]
    else:
        offsets = strict_kernels.swizzled_offset(place[:, None], torch.arange(columns)[None], columns)
        found = stored["w13_scale"].flatten()[offsets]
    assert torch.equal(found, codes)


def test_every_byte_of_padding_is_written(monkeypatch):
    """Poisoned memory must not reach a converted tensor."""
    original = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **k: original(self, *a, **k).fill_(0x77))
    for mode in MODES:
        layout = layouts.layout_for(mode, 288, 96)
        stored = layouts.to_kernel(drawn(mode, 288, 96), layout)
        back = layouts.from_kernel(stored, dataclasses.replace(layout, hidden=layout.hidden_padded,
                                                               intermediate=layout.intermediate_padded))  # fmt: skip
        assert not back.w13[:, 144:].any()
        assert not back.w2[288:].any()
        assert not back.w2[:, 48:].any()
        scale = back.w13_scale.view(torch.uint8)
        assert bool((scale[:, 288 // mode.block :] == (0x38 if mode.block == 16 else 127)).all())


def test_the_mma_view_is_strided_as_documented():
    scale = torch.arange(2 * 256 * 8, dtype=torch.int32).to(torch.uint8).view(2, 256, 8)
    swizzled = torch.stack([layouts.swizzle_scale(s) for s in scale])
    view = layouts.mma_view(swizzled)
    assert tuple(view.shape) == (32, 4, 2, 4, 2, 2)
    assert view.untyped_storage().data_ptr() == swizzled.untyped_storage().data_ptr()
    for e, m, k in ((0, 0, 0), (1, 255, 7), (0, 130, 5), (1, 33, 2)):
        assert view[m % 32, m % 128 // 32, m // 128, k % 4, k // 4, e] == scale[e, m, k]


def test_sizes_that_do_not_fit_are_named():
    mode = support().modes["cutedsl_w4a4"]
    layout = layouts.layout_for(mode, 256, 128)
    with pytest.raises(ValueError, match=r"\(256, 192\)"):
        layouts.to_kernel(drawn(mode, 256, 192), layout)
    with pytest.raises(ValueError, match="multiples of 128"):
        layouts.swizzle_scale(torch.zeros(64, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="has none"):
        layouts.to_kernel(dataclasses.replace(drawn(mode, 256, 128), w2_scale=None), layout)
