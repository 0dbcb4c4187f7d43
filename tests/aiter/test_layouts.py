"""The adapter's shuffles: AITER's recorded bytes, exact inverses, padding that is written, rows where they belong."""

import pytest
import torch

from portamoe.weights import Expert
from rocm_moe.aiter import layouts
from tests.aiter import strict_moe
from tests.aiter.test_strict_fake import CONTRACT, digest, drawn

SIZES = [
    (256, 192),  # the tiny checkpoint: I is padded to 256, K/32 of w2 from 6 to 8
    (512, 384),  # Kimi-K3 at TP8: I is kept, K/32 = 12 is padded to 16
    (320, 96),  # both padded
    (256, 256),  # nothing padded
]


def layout_of(hidden, inter, interleaved):
    return layouts.layout_for(hidden, inter, hidden_multiple=256, intermediate_multiple=128, interleaved=interleaved)


def random_expert(hidden, inter, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    return Expert(
        w13=draw(0, 256, 2 * inter, hidden // 2),
        w2=draw(0, 256, hidden, inter // 2),
        w13_scale=draw(100, 140, 2 * inter, hidden // 32),
        w2_scale=draw(100, 140, hidden, inter // 32),
    )


@pytest.mark.parametrize("name", sorted(CONTRACT["hashes"]))
def test_recorded_hashes(name):
    source, *layout = name.split()
    shuffle = layouts.shuffle_weight if source.startswith("w") else layouts.shuffle_scale
    experts = list(drawn()[source])
    if layout == ["interleaved"]:
        experts = [layouts.interleave_gate_up(expert) for expert in experts]
    assert digest(torch.stack([shuffle(expert) for expert in experts])) == CONTRACT["hashes"][name]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("hidden", "inter"), SIZES)
def test_round_trip_is_exact(hidden, inter, interleaved):
    layout, expert = layout_of(hidden, inter, interleaved), random_expert(hidden, inter)
    stored = layouts.to_aiter(expert, layout)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == layout.shapes()
    assert sum(t.nbytes for t in stored.values()) == layout.nbytes
    back = layouts.from_aiter(stored, layout)
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        assert torch.equal(getattr(back, name), getattr(expert, name)), name


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("hidden", "inter"), SIZES)
def test_independent_unshuffle_reads_the_padded_expert(hidden, inter, interleaved):
    """The stand-in's index arithmetic finds gate, up and zeros where they belong."""
    layout, expert = layout_of(hidden, inter, interleaved), random_expert(hidden, inter)
    stored = layouts.to_aiter(expert, layout)
    rows, width = layout.shapes()["w13"]
    w13 = strict_moe.unshuffle(stored["w13"], strict_moe.weight_offsets(rows, width, interleaved))
    gate, up = w13.chunk(2)
    assert torch.equal(gate[:inter, : hidden // 2], expert.w13[:inter])
    assert torch.equal(up[:inter, : hidden // 2], expert.w13[inter:])
    assert not gate[inter:].any()
    assert not up[inter:].any()
    assert not w13[:, hidden // 2 :].any()
    columns = layout.hidden_padded // 32
    s13 = strict_moe.unshuffle(stored["w13_scale"], strict_moe.scale_offsets(rows, columns, interleaved))
    assert torch.equal(s13.chunk(2)[1][:inter, : hidden // 32], expert.w13_scale[inter:])
    assert (s13.chunk(2)[0][inter:] == 0x7F).all()
    rows2 = layout.hidden_padded
    s2 = strict_moe.unshuffle(stored["w2_scale"], strict_moe.scale_offsets(rows2, layout.intermediate_padded // 32))
    assert torch.equal(s2[:hidden, : inter // 32], expert.w2_scale)
    assert (s2[:, inter // 32 :] == 0x7F).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_row_tags(interleaved):
    """Gate rows 1.0 (code 2), up rows 2.0 (code 4): the stored order is what the mode says."""
    expert = random_expert(256, 128)
    w13 = torch.cat((torch.full((128, 128), 0x22), torch.full((128, 128), 0x44))).to(torch.uint8)
    tagged = Expert(w13, expert.w2, expert.w13_scale, expert.w2_scale)
    stored = layouts.to_aiter(tagged, layout_of(256, 128, interleaved))["w13"]
    tiles = stored.reshape(16, -1)[:, 0].tolist()  # a tile of 16 rows is contiguous
    assert tiles == ([0x22, 0x44] * 8 if interleaved else [0x22] * 8 + [0x44] * 8)


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_uninitialised_byte(monkeypatch, interleaved):
    layout, expert = layout_of(320, 96, interleaved), random_expert(320, 96)
    clean = layouts.to_aiter(expert, layout)
    empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        out = empty(self, *args, **kwargs)
        return out.fill_(0xFF)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(a[0] if len(a) == 1 else a, 0xFF, **k))
    monkeypatch.setattr(torch, "empty_like", lambda t, **k: torch.full_like(t, 0xFF, **k))
    for name, tensor in layouts.to_aiter(expert, layout).items():
        assert torch.equal(tensor, clean[name]), name


def test_e8m0_scales_are_reinterpreted():
    expert = random_expert(256, 128)
    as_e8m0 = Expert(
        expert.w13, expert.w2, expert.w13_scale.view(torch.float8_e8m0fnu), expert.w2_scale.view(torch.float8_e8m0fnu)
    )
    layout = layout_of(256, 128, False)
    for name, tensor in layouts.to_aiter(as_e8m0, layout).items():
        assert torch.equal(tensor, layouts.to_aiter(expert, layout)[name])


def test_wrong_shapes_say_what_came():
    with pytest.raises(ValueError, match=r"weight has shape \(24, 64\)"):
        layouts.shuffle_weight(torch.zeros(24, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="expected 256 rows"):
        layouts.to_aiter(random_expert(256, 64), layout_of(256, 128, False))
    with pytest.raises(ValueError, match="needs w13_scale"):
        layouts.to_aiter(Expert(w13=torch.zeros(1), w2=torch.zeros(1)), layout_of(256, 128, False))
    expert = random_expert(256, 128)
    wide = Expert(expert.w13.int(), expert.w2, expert.w13_scale, expert.w2_scale)
    with pytest.raises(TypeError, match="uint8"):
        layouts.to_aiter(wide, layout_of(256, 128, False))
