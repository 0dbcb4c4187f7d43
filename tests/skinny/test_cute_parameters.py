"""Parameters of the CuteDSL kernels: what is refused, and that the shared memory they plan holds what goes into it."""

import itertools

import pytest

from cuda_moe.skinny.cute_parameters import SHARED_BYTES, GemvParameters, MmaParameters, parse, token_tiles


@pytest.mark.parametrize(("rows", "split"), [(8, 1), (16, 2), (48, 4), (64, 8)])
@pytest.mark.parametrize("tiles", [1, 2])
def test_the_regions_of_shared_memory_lie_apart(rows, split, tiles):
    p = MmaParameters(rows=rows, split=split, warps=7, chunk=64, stages=3)
    layout = p.shared(tiles)
    assert layout.exchange >= p.warps * 8 * tiles * layout.token_pitch * 4
    received = split * 8 * tiles * (rows // split) * 4
    assert layout.exchanged == (received if split > 1 else 0)
    assert layout.slots >= layout.exchange + 2 * layout.exchanged
    assert layout.slots % 128 == layout.exchange % 4 == 0
    assert layout.slot == rows * p.chunk * 2
    assert layout.total == layout.slots + p.warps * p.stages * layout.slot


@pytest.mark.parametrize("chunk", [64, 128, 256, 512])
@pytest.mark.parametrize("step", [0, 1])
def test_16_byte_loads_of_a_quarter_warp_meet_in_no_bank(chunk, step):
    for first in range(0, 32, 8):
        banks = []
        for lane in range(first, first + 8):
            g, t = lane // 4, lane % 4
            piece = (4 * step + t) ^ (g % 2 * 4)
            banks += [(g * chunk * 2 + piece * 16) // 4 % 32 + word for word in range(4)]
        assert sorted(banks) == list(range(32))


@pytest.mark.parametrize("rows", [8, 16, 32, 48, 64])
def test_a_warps_partial_sums_meet_in_no_bank(rows):
    pitch = MmaParameters(rows=rows).shared(1).token_pitch
    lanes = itertools.product(range(8), range(4))
    assert len({(2 * t * pitch + g) % 32 for g, t in lanes}) == 32


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"rows": 12}, "rows=12"),
        ({"rows": 144}, "rows=144"),
        ({"warps": 0}, "warps=0"),
        ({"warps": 17}, "warps=17"),
        ({"chunk": 96}, "chunk=96"),
        ({"stages": 0}, "stages"),
        ({"split": 3}, "split=3"),
        ({"rows": 48, "split": 32}, "split=32"),
        ({"unroll": 2}, "unroll"),
    ],
)
def test_wrong_parameters_of_mma_are_named(wrong, what):
    with pytest.raises(ValueError, match=what):
        parse("cute_mma", wrong)


@pytest.mark.parametrize(
    ("wrong", "what"), [({"threads": 100}, "threads=100"), ({"outputs": 9}, "outputs"), ({"rows": 16}, "rows")]
)
def test_wrong_parameters_of_gemv_are_named(wrong, what):
    with pytest.raises(ValueError, match=what):
        parse("cute_gemv", wrong)


def test_an_unknown_variant_is_named():
    with pytest.raises(ValueError, match="cute_wgmma"):
        parse("cute_wgmma", {})


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="M=17"):
        MmaParameters().check(64, 7168, 17)
    with pytest.raises(ValueError, match="split·warps·chunk=1024"):
        MmaParameters(warps=8, chunk=128).check(64, 896, 1)
    with pytest.raises(ValueError, match=f"<= {SHARED_BYTES}"):
        MmaParameters(warps=7, chunk=128, stages=8, split=2).check(64, 7168, 1)
    with pytest.raises(ValueError, match="a larger split"):
        MmaParameters(warps=7, chunk=128).check(64, 7168, 16)
    with pytest.raises(ValueError, match="8·threads=1792"):
        GemvParameters(threads=224).check(64, 1536, 1)
    MmaParameters(warps=7, split=4).check(64, 7168, 16)
    GemvParameters(threads=224).check(64, 7168, 16)


def test_grids_cover_every_row():
    assert MmaParameters(rows=16).grid(6288, 132) == 132
    assert MmaParameters(rows=16, per_sm=4).grid(6288, 132) == 393
    assert MmaParameters(rows=64, split=4).grid(2112, 132) == 132
    assert MmaParameters(rows=32, split=8).grid(64, 132) == 16
    assert MmaParameters(rows=32, split=8).grid(6400, 4) == 8
    assert MmaParameters(rows=16).grid(17, 132) == 2
    assert GemvParameters(outputs=3).grid(7, 132) == 3
    assert MmaParameters(rows=16, split=2, warps=7).resident(7168, 1) == 1  # registers
    assert MmaParameters(rows=16, split=4, warps=7).resident(7168, 1) == 2
    assert MmaParameters(rows=48, split=4, warps=7).resident(7168, 1) == 1  # shared memory
    assert [token_tiles(m) for m in (1, 8, 9, 16)] == [1, 1, 2, 2]
