"""Kernel layouts: exact round trips, no padding, and scales at the ends of their range."""

from __future__ import annotations

import pytest
import torch

from rocm_moe.layouts import BrickLayout, FragmentLayout

LAYOUTS = [BrickLayout(), BrickLayout(native=True), FragmentLayout()]
SHAPES = [(16, 32), (32, 64), (32, 96), (64, 128), (48, 160), (192, 192), (32, 384), (64, 2880), (16, 3072), (32, 3584)]


def matrix(rows, columns, low=0, high=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, high, (rows, columns // 32), generator=generator).to(torch.uint8)
    return codes, scales


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("low", "high"), [(110, 130), (0, 251), (4, 256)])
def test_round_trip_is_exact_and_takes_no_more_bytes(layout, shape, low, high):
    codes, scales = matrix(*shape, low, high)
    packed = layout.pack(codes, scales)
    assert packed.words.nbytes == codes.nbytes
    assert packed.scales.nbytes == scales.nbytes
    back_codes, back_scales = layout.unpack(packed, *shape)
    assert torch.equal(back_codes, codes)
    assert torch.equal(back_scales, scales)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_byte_of_the_scales_survives_alone_in_its_row(layout):
    codes, _ = matrix(256, 64)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 2).contiguous()
    packed = layout.pack(codes, scales)
    assert torch.equal(layout.unpack(packed, 256, 64)[1], scales)
    assert packed.row_exponents is not None
    assert packed.row_exponents[255] == 255


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_usual_scales_need_no_row_exponents(layout):
    assert layout.pack(*matrix(32, 128, 90, 128)).row_exponents is None


def test_no_two_rows_or_columns_share_a_place():
    """A code of one element must change exactly one nibble's worth of the words, a different one for each."""
    for layout in LAYOUTS:
        seen = set()
        for row in range(32):
            for column in range(0, 192, 5):
                codes = torch.zeros((32, 96), dtype=torch.uint8)
                codes[row, column // 2] = 0xF << (4 * (column % 2))
                words = layout.pack(codes, torch.full((32, 6), 127, dtype=torch.uint8)).words
                bits = [(int(i), int(words[i]) & 0xFFFFFFFF) for i in words.nonzero().flatten()]
                assert len(bits) == 1
                assert bin(bits[0][1]).count("1") == 4
                seen.add(bits[0])
        assert len(seen) == 32 * len(range(0, 192, 5))


def test_what_is_refused():
    codes, scales = matrix(32, 64)
    with pytest.raises(ValueError, match=r"need scales \(32, 2\), got \(32, 1\)"):
        BrickLayout().pack(codes, scales[:, :1])
    with pytest.raises(ValueError, match="24 rows, the kernels take multiples of 16"):
        FragmentLayout().pack(codes[:24], scales[:24])
