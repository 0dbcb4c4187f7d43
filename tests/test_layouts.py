"""Row orders with tagged rows, padding and tensor-parallel slices: bytes, and the numbers an expert makes of them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from portamoe import formats, layouts
from portamoe.activations import Activation, GeGLU, SiTU, SwiGLUOAI
from portamoe.layouts import LAYOUTS, Layout, LayoutError
from portamoe.weights import Expert, ExpertWeights

BLOCK = {"mxfp4": 32, "nvfp4": 16, "bf16": 1}
FORMATS = list(BLOCK)
SITU = SiTU(4.0, 25.0)


def make_expert(fmt: str, inter: int, hidden: int, seed: int = 0, stacked: int | None = None) -> Expert:
    """Random canonical bytes: scales within a few powers of two, biases set, w1 and w3 with their own global scales."""
    g = torch.Generator().manual_seed(seed)
    lead = () if stacked is None else (stacked,)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*lead, *shape, generator=g).to(torch.bfloat16)

    biases = {"w13_bias": normal(2 * inter), "w2_bias": normal(hidden)}
    make = Expert if stacked is None else ExpertWeights
    if fmt == "bf16":
        return make(w13=normal(2 * inter, hidden), w2=normal(hidden, inter), **biases)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (*lead, *shape), generator=g, dtype=torch.uint8)

    low, high = (118, 130) if fmt == "mxfp4" else (0x20, 0x48)
    scales = {
        "w13_scale": integers(low, high, 2 * inter, hidden // BLOCK[fmt]),
        "w2_scale": integers(low, high, hidden, inter // BLOCK[fmt]),
    }
    if fmt == "nvfp4":
        scales = {name: value.view(torch.float8_e4m3fn) for name, value in scales.items()}
        scales["w13_global_scale"] = torch.rand(*lead, 2, generator=g)
        scales["w2_global_scale"] = torch.rand(lead, generator=g)
    return make(
        w13=integers(0, 256, 2 * inter, hidden // 2), w2=integers(0, 256, hidden, inter // 2), **scales, **biases
    )


def same(a: Expert, b: Expert) -> bool:
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if (x is None) != (y is None):
            return False
        if x is not None and not (x.dtype == y.dtype and x.shape == y.shape and torch.equal(raw(x), raw(y))):
            return False
    return True


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8) if t.dim() else t


def run(expert: Expert, x: torch.Tensor, activation: Activation = SITU) -> torch.Tensor:
    """The expert in float64 from its canonical bytes."""

    def decode(name: str) -> torch.Tensor:
        w, scale = getattr(expert, name), getattr(expert, f"{name}_scale")
        if scale is None:
            return w.double()
        if scale.dtype == torch.uint8:
            return formats.mxfp4_dequantize(w, scale, torch.float64)
        return formats.nvfp4_dequantize(w, scale, getattr(expert, f"{name}_global_scale")).double()

    hidden = x.double() @ decode("w13").mT
    if expert.w13_bias is not None:
        hidden = hidden + expert.w13_bias.double()
    y = activation.apply(hidden) @ decode("w2").mT
    return y if expert.w2_bias is None else y + expert.w2_bias.double()


# ---- row orders ----


def tagged_expert(inter: int = 64, hidden: int = 32) -> Expert:
    """Gate rows hold 1.0 (code 2), scale byte 101 and bias 1; up rows 2.0 (code 4), scale byte 102 and bias 2."""
    gate_up = torch.tensor([1, 2], dtype=torch.uint8).repeat_interleave(inter).view(-1, 1)
    return Expert(
        w13=(gate_up * 0x22).repeat(1, hidden // 2),
        w2=torch.zeros(hidden, inter // 2, dtype=torch.uint8),
        w13_scale=(gate_up + 100).repeat(1, hidden // 32),
        w2_scale=torch.full((hidden, inter // 32), 127, dtype=torch.uint8),
        w13_bias=gate_up.flatten().to(torch.bfloat16),
        w2_bias=torch.zeros(hidden, dtype=torch.bfloat16),
    )


#: The first rows of each order, written by hand for I = 64: g = gate, u = up.
DOCUMENTED = {
    "[w1; w3]": "g" * 64 + "u" * 64,
    "[w3; w1]": "u" * 64 + "g" * 64,
    "w1/w3 interleaved by 1 row": "gu" * 64,
    "w3/w1 interleaved by 1 row": "ug" * 64,
    "w1/w3 interleaved by 64 rows": "g" * 64 + "u" * 64,
    "w3/w1 interleaved by 64 rows": "u" * 64 + "g" * 64,
    "w1/w3 interleaved by 32 rows": ("g" * 32 + "u" * 32) * 2,
    "w3/w1 interleaved by 32 rows": ("u" * 32 + "g" * 32) * 2,
    "w1/w3 interleaved by 16 rows": ("g" * 16 + "u" * 16) * 4,
    "w3/w1 interleaved by 16 rows": ("u" * 16 + "g" * 16) * 4,
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tagged_rows_lie_where_the_layout_says(layout):
    weights = layouts.arrange(tagged_expert(), layout).weights
    tags = {
        "w13": formats.decode_e2m1(weights.w13)[:, 0],
        "w13_scale": weights.w13_scale[:, 0].float() - 100,
        "w13_bias": weights.w13_bias.float(),
    }
    for name, tag in tags.items():
        assert "".join(" gu"[int(t)] for t in tag) == DOCUMENTED[str(layout)], name
    assert len({str(each) for each in LAYOUTS}) == len(LAYOUTS) == len(DOCUMENTED)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_within_a_half_keep_their_order(layout):
    """Row by row against a loop: the i-th gate row comes before the (i+1)-th, and likewise for up."""
    inter = 192
    rows = layout.rows(inter).tolist()
    assert [r for r in rows if r < inter] == list(range(inter))
    assert [r for r in rows if r >= inter] == list(range(inter, 2 * inter))
    assert layout.inverse_rows(inter)[layout.rows(inter)].tolist() == list(range(2 * inter))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_round_trips_byte_for_byte(fmt, layout):
    expert = make_expert(fmt, 192, 96)
    laid_out = layouts.arrange(expert, layout)
    assert same(laid_out.canonical(), expert)
    assert same(laid_out.weights, expert) == (layout == layouts.CANONICAL)
    for other in LAYOUTS:
        assert same(laid_out.to(other).weights, layouts.arrange(expert, other).weights)


@pytest.mark.parametrize("fmt", FORMATS)
def test_stacked_experts_are_arranged_padded_and_sliced_like_single_ones(fmt):
    stacked = make_expert(fmt, 96, 64, stacked=3)
    for change in (
        lambda w: layouts.arrange(w, Layout("up", 16)).weights,
        lambda w: layouts.pad_expert(w, 128, 96),
        lambda w: layouts.slice_tensor_parallel(w, 2, 3),
    ):
        changed = change(stacked)
        assert isinstance(changed, ExpertWeights)
        for e in range(3):
            assert same(changed.expert(e), change(stacked.expert(e)))


def test_reading_the_bytes_in_another_layout_changes_the_numbers():
    expert = make_expert("mxfp4", 64, 64)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    right = run(expert, x)
    for layout in LAYOUTS[1:]:
        weights = layouts.arrange(expert, layout).weights
        if layout != Layout("gate", 64):  # at I = 64 one block is the whole half
            assert (run(weights, x) - right).norm() > 0.5 * right.norm(), layout


def test_a_launcher_given_another_layout_raises_and_names_both():
    laid_out = layouts.arrange(tagged_expert(), layouts.W13_INTERLEAVED_GATE_UP)
    assert laid_out.require("kernel", layouts.CANONICAL, layouts.W13_INTERLEAVED_GATE_UP) is laid_out.weights
    with pytest.raises(LayoutError, match=r"some_kernel reads w13 as \[w1; w3\].*w1/w3 interleaved by 1 row"):
        laid_out.require("some_kernel", layouts.CANONICAL)
    assert issubclass(LayoutError, ValueError)


def test_a_layout_refuses_what_it_cannot_order():
    with pytest.raises(ValueError, match=r"160 is no multiple of 64"):
        layouts.arrange(make_expert("mxfp4", 160, 32), Layout("up", 64))
    with pytest.raises(ValueError, match="gate"):
        Layout("left")
    with pytest.raises(ValueError, match="at least 1"):
        Layout("gate", 0)
    for block in (True, 16.0, "16"):
        with pytest.raises(TypeError, match="block"):
            Layout("gate", block)
    odd = make_expert("bf16", 4, 4)
    with pytest.raises(ValueError, match="7 rows"):
        layouts.arrange(replace(odd, w13=odd.w13[:7]), layouts.W13_UP_GATE)


# ---- padding ----


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("activation", [SITU, SwiGLUOAI(1.702, 7.0), GeGLU()], ids=lambda a: a.name)
def test_padding_leaves_the_result_as_it_is(fmt, activation):
    expert = make_expert(fmt, 160, 96)
    padded = layouts.pad_expert(expert, 256, 128)
    assert padded.w13.shape[0] == 512
    assert padded.w2.shape[0] == 128
    assert same(layouts.unpad_expert(padded, 160, 96), expert)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    wide = torch.full((3, 128), 1e3)  # whatever stands in the padded columns of x meets zero weights
    wide[:, :96] = x
    want, got = run(expert, x, activation), run(padded, wide, activation)
    torch.testing.assert_close(got[:, :96], want, rtol=1e-12, atol=0)
    assert torch.equal(got[:, 96:], torch.zeros(3, 32, dtype=torch.float64))


@pytest.mark.parametrize(("fmt", "scale"), [("mxfp4", 127), ("nvfp4", 0x38), ("bf16", None)])
def test_padding_is_zeros_and_scales_of_one_in_each_half(fmt, scale):
    expert = make_expert(fmt, 96, 64)
    padded = layouts.pad_expert(expert, 128, 128)
    for name, whole in (("w13", 0), ("w2", 0), ("w13_scale", scale), ("w2_scale", scale), ("w13_bias", 0)):
        before, after = getattr(expert, name), getattr(padded, name)
        if before is None:
            continue
        before, after = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (before, after))
        halves = (2, -1) if name.startswith("w13") else (1, -1)
        before, after = (t.unflatten(0, halves) for t in (before, after))
        region = tuple(slice(n) for n in before.shape)
        assert torch.equal(after[region], before), name
        mask = torch.ones_like(after, dtype=torch.bool)
        mask[region] = False
        assert mask.any(), name
        assert (after[mask] == whole).all(), name


def test_padding_that_is_not_needed_copies_nothing():
    expert = make_expert("mxfp4", 64, 64)
    assert layouts.pad_expert(expert, 64, 32) is expert


def test_padding_refuses_a_size_that_cuts_a_block():
    expert = make_expert("mxfp4", 64, 64)
    with pytest.raises(ValueError, match=r"intermediate size 64 padded to a multiple of 24 is 72.*block of 32"):
        layouts.pad_expert(expert, 24)
    with pytest.raises(ValueError, match="hidden_multiple must be at least 1"):
        layouts.pad_expert(expert, 1, 0)
    with pytest.raises(TypeError, match="intermediate_multiple"):
        layouts.pad_expert(expert, 64.0)
    for inter, hidden in ((128, 64), (48, 64), (0, 64), (64, 16)):
        with pytest.raises(ValueError, match="multiple of 32"):
            layouts.unpad_expert(expert, inter, hidden)


@pytest.mark.parametrize("fmt", FORMATS)
def test_nothing_uninitialised_reaches_converted_weights(fmt, monkeypatch):
    expert = make_expert(fmt, 96, 64)
    results = []
    for poison in (0xFF, 0x77):

        def poisoned(tensor: torch.Tensor, poison: int = poison) -> torch.Tensor:
            tensor.view(torch.uint8).fill_(poison)
            return tensor

        empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
        monkeypatch.setattr(torch, "empty", lambda *a, f=empty, p=poisoned, **k: p(f(*a, **k)))
        monkeypatch.setattr(torch, "empty_like", lambda *a, f=empty_like, p=poisoned, **k: p(f(*a, **k)))
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, f=new_empty, p=poisoned, **k: p(f(*a, **k)))
        part = layouts.slice_tensor_parallel(layouts.pad_expert(expert, 128, 96), 1, 2)
        results.append(layouts.arrange(part, Layout("up", 32)).weights)
        monkeypatch.undo()
    assert same(*results)


# ---- tensor parallelism ----


def join(shards: list[Expert]) -> Expert:
    """Put the ranks' shares together again."""

    def rows(name: str, dim: int) -> torch.Tensor:
        halves = [getattr(s, name).chunk(2, dim=dim) for s in shards]
        return torch.cat([raw_one_byte(h[0]) for h in halves] + [raw_one_byte(h[1]) for h in halves], dim=dim)

    def columns(name: str) -> torch.Tensor:
        return torch.cat([raw_one_byte(getattr(s, name)) for s in shards], dim=-1)

    first = shards[0]
    changed = {"w13": rows("w13", -2), "w13_bias": rows("w13_bias", -1), "w2": columns("w2")}
    changed["w2_bias"] = torch.stack([s.w2_bias for s in shards]).sum(0)
    if first.w13_scale is not None:
        changed["w13_scale"] = rows("w13_scale", -2).view(first.w13_scale.dtype)
        changed["w2_scale"] = columns("w2_scale").view(first.w2_scale.dtype)
    return replace(first, **changed)


def raw_one_byte(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("inter", [1536, 1856, 2880, 3072])
def test_shards_rebuild_the_whole_or_the_error_has_the_numbers(fmt, ranks, inter):
    """1536/8 = 192, which kernels pad; 1856/8 = 232 cuts 16; 2880/8 = 360 cuts 32; 3072/16 = 192."""
    expert = make_expert(fmt, inter, 64)
    if inter % ranks or (inter // ranks) % BLOCK[fmt]:
        with pytest.raises(ValueError, match="expert parallelism") as error:
            layouts.slice_tensor_parallel(expert, 1, ranks)
        for number in (inter, ranks, BLOCK[fmt], f"{inter / ranks:g}", f"{inter / ranks / BLOCK[fmt]:g}"):
            assert str(number) in str(error.value)
        return
    shards = [layouts.slice_tensor_parallel(expert, rank, ranks) for rank in range(ranks)]
    assert same(join(shards), expert)
    share = inter // ranks
    for rank, shard in enumerate(shards):
        rows = slice(rank * share, (rank + 1) * share)
        assert torch.equal(shard.w13[:share], expert.w13[rows])
        assert torch.equal(shard.w13[share:], expert.w13[inter:][rows])
        assert all(t is None or t.is_contiguous() for t in (getattr(shard, f.name) for f in fields(shard)))


def test_kimi_k3_over_64_ranks_cuts_a_block_of_32():
    with pytest.raises(ValueError, match=r"3072 over 64 ranks is 48 a rank, 1.5 blocks of 32 .* divides 96"):
        layouts.slice_tensor_parallel(make_expert("mxfp4", 3072, 32), 0, 64)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_ranks_outputs_add_up_to_the_whole_padded_or_not(fmt, ranks):
    expert = make_expert(fmt, 192, 64)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    whole = run(expert, x)
    shards = [layouts.slice_tensor_parallel(expert, rank, ranks) for rank in range(ranks)]
    for parts in (shards, [layouts.pad_expert(s, 128) for s in shards]):
        total = torch.stack([run(s, x) for s in parts]).sum(0)
        torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-10 * float(whole.abs().max()))


def test_slicing_refuses_bad_ranks_and_contradicting_tensors():
    expert = make_expert("mxfp4", 64, 64)
    for rank, size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError, match="rank must be within"):
            layouts.slice_tensor_parallel(expert, rank, size)
    for rank, size in ((True, 2), (0, 2.0)):
        with pytest.raises(TypeError, match="must be an int"):
            layouts.slice_tensor_parallel(expert, rank, size)
    with pytest.raises(ValueError, match=r"w2_scale is \(64, 1\).*end in \(64, 2\)"):
        layouts.slice_tensor_parallel(replace(expert, w2_scale=expert.w2_scale[:, :1]), 0, 2)
    with pytest.raises(ValueError, match="w2_scale is missing"):
        layouts.pad_expert(replace(expert, w2_scale=None), 128)
    with pytest.raises(TypeError, match="float32"):
        layouts.pad_expert(replace(expert, w13_scale=expert.w13_scale.float()), 128)
