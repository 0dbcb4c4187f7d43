"""Every code and every scale byte of the number formats, against values computed in Python's exact integers."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from portamoe import formats
from portamoe.formats import E2M1_VALUES

INF, NAN = math.inf, math.nan
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP MX v1.0, section 5.3.3
DTYPES = {torch.float32: (24, -149, 128), torch.bfloat16: (8, -133, 128), torch.float16: (11, -24, 16)}
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round a double to `dtype`, to nearest even, in exact rationals: without torch or the FPU's modes."""
    if value == 0 or math.isnan(value) or dtype == torch.float64:
        return value
    bits, least, top = DTYPES[dtype]
    exponent = max(math.frexp(value)[1] - bits, least)
    steps = round(Fraction(value) / Fraction(2) ** exponent)  # Python rounds halves to even
    result = math.copysign(math.ldexp(abs(steps), exponent), value)
    return math.copysign(INF, value) if abs(result) >= 2.0**top else result


def bits(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    """The bit patterns of values that `dtype` holds, packed by Python."""
    wide = {torch.float64: ("d", torch.int64), torch.float32: ("f", torch.int32), torch.float16: ("e", torch.int16)}
    if dtype == torch.bfloat16:
        return (bits(values, torch.float32) >> 16).to(torch.int16)
    code, view = wide[dtype]
    return torch.frombuffer(bytearray(struct.pack(f"<{len(values)}{code}", *values)), dtype=view)


def same_bits(got: torch.Tensor, values: list[float]) -> bool:
    """Equal bit for bit, -0 and subnormals included; any NaN equals any NaN."""
    torch.set_flush_denormal(False)  # Python's own packing would flush too
    want = bits(values, got.dtype)
    raw = got.contiguous().flatten().view(want.dtype)
    nan = torch.tensor([math.isnan(v) for v in values])
    return bool(torch.equal(raw[~nan], want[~nan]) and got.flatten()[nan].isnan().all())


@pytest.fixture(params=[False, True], ids=["ieee", "flush_denormal"])
def flush(request: pytest.FixtureRequest):
    """Run once as usual and once with the CPU told to flush subnormals, with the look-up tables made anew."""
    formats._pair_table.cache_clear()
    torch.set_flush_denormal(request.param)
    yield request.param
    torch.set_flush_denormal(False)
    formats._pair_table.cache_clear()


def e4m3_value(byte: int) -> float:
    """OCP OFP8 E4M3: bias 7, no infinities, NaN where all of the lower seven bits are set."""
    field, fraction = byte >> 3 & 0xF, byte & 7
    if byte & 0x7F == 0x7F:
        return NAN
    value = fraction * 2.0**-9 if field == 0 else (1 + fraction / 8) * 2.0 ** (field - 7)
    return math.copysign(value, -1 if byte & 0x80 else 1)


# ---- E2M1 ----


def test_e2m1_decodes_every_byte_low_nibble_first():
    got = formats.decode_e2m1(ALL_BYTES.view(16, 16))
    assert got.shape == (16, 32)
    assert got.dtype == torch.float32
    signed = E2M1 + [-v for v in E2M1]
    assert same_bits(got, [v for byte in range(256) for v in (signed[byte & 15], signed[byte >> 4])])
    assert list(E2M1_VALUES) == signed
    assert math.copysign(1, E2M1_VALUES[8]) == -1


def test_e2m1_round_trips_every_byte():
    assert torch.equal(formats.encode_e2m1(formats.decode_e2m1(ALL_BYTES)), ALL_BYTES)
    assert torch.equal(formats.pack_e2m1(formats.unpack_e2m1(ALL_BYTES)), ALL_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_e2m1_encodes_to_the_nearest_even_code(dtype):
    grid = torch.arange(-9 * 64, 9 * 64 + 1, dtype=torch.float64) / 64  # every tie and its neighbours, beyond the range
    values = grid.to(dtype).repeat_interleave(2)
    got = formats.unpack_e2m1(formats.encode_e2m1(values))[::2].tolist()
    for x, code in zip(values[::2].tolist(), got, strict=True):
        distance = [abs(abs(x) - v) for v in E2M1]
        nearest = [c for c in range(8) if distance[c] == min(distance)]
        want = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
        assert code & 7 == want, x
        assert (code >> 3) == (math.copysign(1, x) < 0), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_e2m1_next_to_a_tie_goes_to_the_nearer_value(dtype, tie):
    centre = torch.tensor(tie, dtype=dtype)
    below, above = torch.nextafter(centre, centre * 0), torch.nextafter(centre, centre * 2)
    low, high = formats.unpack_e2m1(formats.encode_e2m1(torch.stack((below, above)))).tolist()
    assert (E2M1[low], E2M1[high]) == (max(v for v in E2M1 if v < tie), min(v for v in E2M1 if v > tie))


def test_e2m1_keeps_signs_saturates_and_refuses_nan():
    x = torch.tensor([-0.0, 0.0, INF, -INF, 1e30, -1e-40])
    assert formats.unpack_e2m1(formats.encode_e2m1(x)).tolist() == [8, 0, 7, 15, 7, 8]
    with pytest.raises(ValueError, match="no NaN"):
        formats.encode_e2m1(torch.tensor([1.0, NAN]))


# ---- E8M0 ----


def test_e8m0_decodes_every_byte(flush):
    got = formats.decode_e8m0(ALL_BYTES)
    assert same_bits(got, [2.0 ** (byte - 127) for byte in range(255)] + [NAN])
    assert got.view(torch.int32)[0] == 0x00400000  # 2^-127, not zero


def test_e8m0_round_trips_every_byte(flush):
    assert torch.equal(formats.encode_e8m0(formats.decode_e8m0(ALL_BYTES)), ALL_BYTES)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, 1.5, 3.0, INF, -INF, 2.0**-128, 2.0**-149, 2.0**-126 * 1.5])
def test_e8m0_refuses_what_is_no_scale(value):
    with pytest.raises(ValueError, match="requantise"):
        formats.encode_e8m0(torch.tensor([1.0, value]))


def test_e8m0_scales_are_reinterpreted_never_cast():
    raw = torch.tensor([0, 1, 126, 127, 128, 134, 254, 255], dtype=torch.uint8)
    assert formats.as_e8m0_bytes(raw) is raw
    assert torch.equal(formats.as_e8m0_bytes(raw.view(torch.float8_e8m0fnu)), raw)
    assert torch.equal(formats.as_e8m0_bytes(formats.decode_e8m0(raw)), raw)
    for dtype in (torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float64):
        with pytest.raises(TypeError, match="float8_e8m0fnu"):
            formats.as_e8m0_bytes(torch.ones(4, dtype=dtype))


# ---- MXFP4 ----


def every_code_with_every_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """One row for each E8M0 byte, its two blocks hold all 256 nibble pairs over 16 rows."""
    w = ALL_BYTES.view(16, 16).repeat(256, 1)
    return w, ALL_BYTES.repeat_interleave(16).view(-1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_mxfp4_decodes_every_code_with_every_scale(dtype, flush):
    w, scale = every_code_with_every_scale()
    want = [
        rounded(E2M1_VALUES[code] * 2.0 ** (byte - 127), dtype) if byte < 255 else NAN
        for byte in range(256)
        for pair in range(256)
        for code in (pair & 15, pair >> 4)
    ]
    assert same_bits(formats.mxfp4_dequantize(w, scale, dtype), want)


def test_mxfp4_uses_the_scale_of_its_own_row_and_block():
    w = torch.full((3, 5, 48), 0x22, dtype=torch.uint8)  # every value 1.0, so the result is the scale
    scale = torch.arange(100, 145, dtype=torch.uint8).view(3, 5, 3)
    got = formats.mxfp4_dequantize(w, scale)
    assert torch.equal(got, formats.decode_e8m0(scale).repeat_interleave(32, dim=-1))
    as_e8m0 = scale.view(torch.float8_e8m0fnu)
    assert torch.equal(formats.mxfp4_dequantize(w, as_e8m0), got)


@pytest.mark.parametrize("rows", [0, 1, 700])
def test_mxfp4_takes_views_chunks_and_an_output(rows):
    generator = torch.Generator().manual_seed(rows)
    w = torch.randint(0, 256, (rows, 2 * 960), generator=generator, dtype=torch.uint8)[:, 960:]
    scale = torch.randint(100, 140, (rows, 60), generator=generator, dtype=torch.uint8)
    want = formats.decode_e2m1(w) * formats.decode_e8m0(scale).repeat_interleave(32, dim=-1)
    out = torch.full((rows, 1920), NAN)
    assert formats.mxfp4_dequantize(w, scale, out=out) is out
    assert torch.equal(out, want)


def test_mxfp4_refuses_what_does_not_fit():
    w, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(TypeError, match="uint8"):
        formats.mxfp4_dequantize(w.to(torch.int8), scale)
    with pytest.raises(ValueError, match=r"\(2, 4\), expected \(4, 2\)"):
        formats.mxfp4_dequantize(w, scale.T.contiguous())
    with pytest.raises(ValueError, match="K = 60"):
        formats.mxfp4_dequantize(w[:, :30], scale)
    with pytest.raises(TypeError, match="float32"):
        formats.mxfp4_dequantize(w, scale, torch.int32)
    with pytest.raises(ValueError, match="out is"):
        formats.mxfp4_dequantize(w, scale, out=torch.empty(4, 32))
    with pytest.raises(ValueError, match="K = 48"):
        formats.mxfp4_quantize(torch.zeros(2, 48))


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (6.0, 127),
        (6.0000005, 127),
        (7.0, 127),
        (7.999, 127),
        (8.0, 128),
        (4.0, 127),
        (3.999, 126),
        (1.5 * 2.0**20, 127 + 18),
        (2.0**20, 127 + 18),
        (1.9999999, 127 - 2),  # float32 just below 2: in bf16 it would be 2
        (3.4028234e38, 252),
        (2.0**-125, 0),
        (2.0**-124, 1),
        (1e-40, 0),
        (0.0, 0),
        (INF, 255),
        (NAN, 255),
    ],
)
def test_mx_scale_is_two_to_the_floor_of_log2_amax_minus_two(amax, byte, flush):
    torch.set_flush_denormal(False)
    x = torch.zeros(2, 32)
    x[1, 7] = -amax
    torch.set_flush_denormal(flush)
    packed, scale = formats.mxfp4_quantize(x)
    assert scale.tolist() == [[0], [byte]]
    back = formats.mxfp4_dequantize(packed, scale)
    assert torch.equal(back[0], torch.zeros(32))
    if byte == 255:
        assert back[1].isnan().all()
        assert int(packed[1].sum()) == 0
    else:
        assert back.isfinite().all()


def test_mxfp4_round_trips_its_own_values(flush):
    """Every scale a block with amax 6·scale can choose, and all codes; bit for bit, from subnormals up."""
    codes = torch.cat((torch.arange(16), torch.arange(16).flip(0))).to(torch.uint8)
    packed = formats.pack_e2m1(codes).expand(253, 16)
    scale = torch.arange(253, dtype=torch.uint8).view(-1, 1)
    got_packed, got_scale = formats.mxfp4_quantize(formats.mxfp4_dequantize(packed, scale))
    assert torch.equal(got_scale, scale)
    assert torch.equal(got_packed, packed)


def test_mxfp4_quantize_is_nearest_and_keeps_negative_zero():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 64, generator=generator) * torch.exp2(torch.randint(-20, 20, (64, 1), generator=generator))
    x[0, 0] = -0.0
    packed, scale = formats.mxfp4_quantize(x)
    back = formats.mxfp4_dequantize(packed, scale)
    step = formats.decode_e8m0(scale).repeat_interleave(32, -1)
    candidates = torch.tensor(E2M1_VALUES) * step.unsqueeze(-1)
    assert torch.equal((back - x).abs(), (candidates - x.unsqueeze(-1)).abs().amin(-1))
    assert math.copysign(1, back[0, 0]) == -1


# ---- NVFP4 ----


def test_nvfp4_decodes_every_code_with_every_scale():
    w = ALL_BYTES.view(1, 256).repeat(256, 1).view(256, 32, 8)  # 32 blocks of 16 a row
    w, scale = w.reshape(256, 256), ALL_BYTES.view(256, 1).repeat(1, 32).view(torch.float8_e4m3fn)
    got = formats.nvfp4_dequantize(w, scale, torch.tensor(0.375))
    want = [
        E2M1_VALUES[code] * e4m3_value(byte) * 0.375
        for byte in range(256)
        for pair in range(256)
        for code in (pair & 15, pair >> 4)
    ]
    assert same_bits(got, want)


def test_nvfp4_rounds_the_exact_block_product_once():
    """(E2M1 · scale) · global differs from E2M1 · (scale · global) for some globals; the former is one rounding."""
    generator = torch.Generator().manual_seed(5)
    w = torch.randint(0, 256, (64, 8), generator=generator, dtype=torch.uint8)
    scale = torch.randint(1, 126, (64, 1), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    g = torch.tensor(0.0123)
    exact = formats.decode_e2m1(w).double() * scale.double() * g.double()
    assert torch.equal(formats.nvfp4_dequantize(w, scale, g), exact.float())
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(formats.nvfp4_dequantize(w, scale, g, dtype), exact.float().to(dtype))


@pytest.mark.parametrize(
    ("w_shape", "global_shape", "rows"),
    [
        ((6, 8), (2,), [0, 0, 0, 1, 1, 1]),
        ((6, 8), (), [0] * 6),
        ((2, 4, 8), (2, 2), [0, 0, 1, 1, 2, 2, 3, 3]),
        ((2, 4, 8), (2,), [0, 0, 0, 0, 1, 1, 1, 1]),
        ((2, 4, 8), (), [0] * 8),
    ],
)
def test_nvfp4_global_scales_belong_to_matrices_or_halves(w_shape, global_shape, rows):
    w = torch.full(w_shape, 0x22, dtype=torch.uint8)
    scale = torch.ones(*w_shape[:-1], 1).to(torch.float8_e4m3fn)
    g = (torch.arange(4)[: math.prod(global_shape)] + 1.0).view(global_shape)
    got = formats.nvfp4_dequantize(w, scale, g)
    assert torch.equal(got.reshape(-1, 16)[:, 0], torch.tensor(rows) + 1.0)


def test_nvfp4_refuses_what_does_not_fit():
    w, scale = torch.zeros(6, 8, dtype=torch.uint8), torch.zeros(6, 1, dtype=torch.uint8)
    e4m3 = scale.view(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        formats.nvfp4_dequantize(w, scale, torch.tensor(1.0))
    with pytest.raises(ValueError, match="P a divisor of 6"):
        formats.nvfp4_dequantize(w, e4m3, torch.ones(4))
    with pytest.raises(TypeError, match="float32"):
        formats.nvfp4_dequantize(w, e4m3, torch.ones((), dtype=torch.float64))


def test_nvfp4_quantize_follows_its_formula():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 64, generator=generator) * torch.tensor([1e-6, 1e-3, 1, 2, 4, 8, 16, 0]).view(-1, 1)
    packed, scale, g = formats.nvfp4_quantize(x)
    assert float(g) == pytest.approx(float(x.abs().max()) / (6 * 448), rel=1e-6)
    codes = formats.unpack_e2m1(packed).view(8, 4, 16)
    finite = [e4m3_value(b) for b in range(127)]
    for row in range(8):
        for block in range(4):
            values = x[row, 16 * block : 16 * block + 16].tolist()
            wanted = max(map(abs, values)) / (6 * float(g))
            got = float(scale[row, block])
            assert abs(got - wanted) <= min(abs(v - wanted) for v in finite) * (1 + 1e-5)
            for value, code in zip(values, codes[row, block].tolist(), strict=True):
                if got == 0:
                    assert code == 0
                else:
                    target = value / (got * float(g))
                    best = min(abs(v - target) for v in E2M1_VALUES)
                    assert abs(E2M1_VALUES[code] - target) <= best + 1e-5


def test_nvfp4_quantize_takes_a_given_global_scale_zeros_and_non_finite_blocks():
    x = torch.zeros(4, 32)
    packed, scale, g = formats.nvfp4_quantize(x)
    assert (float(g), int(packed.sum()), float(scale.float().sum())) == (1.0, 0, 0.0)
    x[0, 0], x[1, 20], x[2, 1], x[3, 2] = 1e9, NAN, INF, 6.0
    packed, scale, _ = formats.nvfp4_quantize(x, torch.tensor(0.5))
    back = formats.nvfp4_dequantize(packed, scale, torch.tensor(0.5))
    assert back[0, 0] == 6 * 448 * 0.5  # saturates
    assert back.isnan().tolist() == [[False] * 32, [False] * 16 + [True] * 16, [True] * 16 + [False] * 16, [False] * 32]
    assert back[3].tolist() == [0.0, 0.0, 6.0] + [0.0] * 29


# ---- MXFP8 and activations ----


def test_e4m3_decodes_every_byte():
    assert same_bits(ALL_BYTES.view(torch.float8_e4m3fn).float(), [e4m3_value(b) for b in range(256)])


def test_mxfp8_decodes_every_element_with_every_scale(flush):
    x = ALL_BYTES.view(torch.float8_e4m3fn).repeat(256, 1)
    scale = ALL_BYTES.view(256, 1).repeat(1, 8)
    want = [
        rounded(e4m3_value(code) * 2.0 ** (byte - 127), torch.float32) if byte < 255 else NAN
        for byte in range(256)
        for code in range(256)
    ]
    assert same_bits(formats.mxfp8_dequantize(x, scale), want)


def test_mxfp8_quantizes_to_the_nearest_even_e4m3():
    finite = [e4m3_value(b) for b in range(127)]
    middles = [(a + b) / 2 for a, b in pairwise(finite)]
    values = torch.tensor(finite + middles + [455.0, 480.0, 511.0])
    blocks = torch.cat((torch.full((len(values), 1), 256.0), values.view(-1, 1), torch.zeros(len(values), 30)), dim=1)
    q, scale = formats.mxfp8_quantize(blocks)
    assert torch.equal(scale, torch.full_like(scale, 127))
    got = q[:, 1].view(torch.uint8).tolist()
    ties = [a if a % 2 == 0 else a + 1 for a in range(126)]
    assert got == [*range(127), *ties, 126, 126, 126]


def test_mxfp8_scale_and_non_finite_blocks():
    x = torch.zeros(4, 32)
    x[0, 0], x[1, 0], x[2, 0] = 2.0**-30 * 448, INF, NAN
    q, scale = formats.mxfp8_quantize(x)
    assert scale.flatten().tolist() == [127 - 30, 255, 255, 0]
    back = formats.mxfp8_dequantize(q, scale)
    assert torch.equal(back[[0, 3]], x[[0, 3]])
    assert back[1:3].isnan().all()


@pytest.mark.parametrize(("fmt", "worst"), [("bf16", 2**-9), ("mxfp8", 2**-3), ("mxfp4", 0.26), ("nvfp4", 0.17)])
def test_quantised_activations_are_near_and_nan_stays_in_its_row(fmt, worst):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(11)).to(torch.bfloat16)
    g = x.float().abs().max() / (6 * 448) if fmt == "nvfp4" else None
    got = formats.quantize_activations(x, fmt, g)
    assert got.dtype == torch.float32
    block_max = x.float().abs().view(5, -1, 16).amax(-1).repeat_interleave(16, -1)
    if fmt in {"mxfp8", "mxfp4"}:
        block_max = x.float().abs().view(5, -1, 32).amax(-1).repeat_interleave(32, -1)
    assert ((got - x.float()).abs() <= worst * block_max).all()
    assert torch.equal(formats.quantize_activations(got, fmt, g), got) or fmt == "nvfp4"
    x[2, 3] = NAN
    got = formats.quantize_activations(x, fmt, g)
    assert got.isnan().any(-1).tolist() == [False, False, True, False, False]
    assert formats.quantize_activations(x[:0], fmt, g).shape == (0, 64)


def test_quantised_activations_want_their_input_scale():
    x = torch.zeros(1, 32)
    with pytest.raises(ValueError, match="input_scale"):
        formats.quantize_activations(x, "nvfp4")
    with pytest.raises(ValueError, match="input_scale"):
        formats.quantize_activations(x, "mxfp4", torch.tensor(1.0))
    with pytest.raises(ValueError, match="fp8"):
        formats.quantize_activations(x, "fp8")


def test_nothing_uninitialised_reaches_a_result(monkeypatch):
    """Every torch.empty is filled with 0xFF bytes (NaN), then with zeros: the results are the same and finite."""
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(6, 96, generator=generator)
    results = []
    for poison in (0xFF, 0x00):
        for name in ("empty", "empty_like"):
            original = getattr(torch, name)

            def poisoned(*args, original=original, poison=poison, **kwargs):
                tensor = original(*args, **kwargs)
                if tensor.numel():
                    tensor.view(torch.uint8).fill_(poison)
                return tensor

            monkeypatch.setattr(torch, name, poisoned)
        mx = formats.mxfp4_dequantize(*formats.mxfp4_quantize(x))
        nv = formats.nvfp4_dequantize(*formats.nvfp4_quantize(x))
        results.append((mx, nv))
        monkeypatch.undo()
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
