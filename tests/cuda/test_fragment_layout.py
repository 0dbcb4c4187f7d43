"""Storage of the fused backend: exact both ways, every code and scale in its place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cuda_moe.layouts import FragmentLayout  # noqa: E402

SHAPES = [(64, 96, True), (32, 64, False), (192, 256, True), (32, 32, False)]


@pytest.mark.parametrize("lane_order", [False, True])
@pytest.mark.parametrize(("rows", "cols", "gate_up"), SHAPES)
def test_round_trip(rows, cols, gate_up, lane_order):
    generator = torch.Generator().manual_seed(rows + cols)
    layout = FragmentLayout(rows, cols, gate_up, lane_order)
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (rows, cols // 32), dtype=torch.uint8, generator=generator)
    assert torch.equal(layout.unpack_codes(layout.pack_codes(codes)), codes)
    words, shift = layout.pack_scales(scales)
    assert torch.equal(layout.unpack_scales(words, shift), scales)


def _decode_word(word: int) -> list[list[list[float]]]:
    """What the kernels' decode makes of one word: values [row half][column half][parity], from bit masks alone."""
    word &= 0xFFFFFFFF
    rotated = ((word >> 6) | (word << 26)) & 0xFFFFFFFF
    fields = {
        (0, 0): word & 0x81C081C0,
        (1, 0): (word << 6) & 0x81C081C0,
        (0, 1): rotated & 0x81C081C0,
        (1, 1): ((word << 4) & 0x81808180) | ((word >> 4) & 0x00400040),
    }
    out = [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    for (row, col), pair in fields.items():
        for parity in (0, 1):
            half = (pair >> (16 * parity)) & 0xFFFF
            sign, exponent, mantissa = half >> 15, (half >> 7) & 3, (half >> 6) & 1
            value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
            out[row][col][parity] = -value if sign else value
    return out


@pytest.mark.parametrize("lane_order", [False, True])
@pytest.mark.parametrize("gate_up", [False, True])
def test_each_value_lies_where_the_decode_finds_it(gate_up, lane_order):
    table = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (32, 64), dtype=torch.uint8, generator=generator)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).tolist()
    words = FragmentLayout(32, 128, gate_up, lane_order).pack_codes(codes)
    for fragment in range(2):
        for block in range(2):
            for g in range(8):
                for t in range(4):
                    for step in range(4):
                        values = _decode_word(int(words[fragment, block, (g * 4 + t) * 4 + step]))
                        for half in (0, 1):
                            row = half * 16 + fragment * 8 + g if gate_up else fragment * 16 + half * 8 + g
                            for a in (0, 1):
                                for parity in (0, 1):
                                    col = 4 * t + 2 * a + parity if lane_order else 8 * a + 2 * t + parity
                                    code = nibbles[row][block * 64 + step * 16 + col]
                                    wanted = table[code & 7] * (-1 if code & 8 else 1)
                                    assert values[half][a][parity] == wanted


@pytest.mark.parametrize("byte", range(255))
def test_every_scale_is_exact(byte):
    layout = FragmentLayout(32, 64, False, False)
    scales = torch.full((32, 2), byte, dtype=torch.uint8)
    words, shift = layout.pack_scales(scales)
    stored = int(words[0, 0, 0]) & 255
    assert 0 <= stored <= 254
    # The kernels' factor: a bf16 with this exponent, times 2**-126 of the decode, times 2**shift at the end.
    assert stored - 127 - 126 + shift == byte - 127
    assert torch.equal(layout.unpack_scales(words, shift), scales)


def test_nan_scale_is_refused():
    with pytest.raises(ValueError, match="255"):
        FragmentLayout(32, 64, False, False).pack_scales(torch.full((32, 2), 255, dtype=torch.uint8))


def test_odd_sizes_are_refused():
    with pytest.raises(ValueError, match="multiple of 32"):
        FragmentLayout(48, 64, False, False)
