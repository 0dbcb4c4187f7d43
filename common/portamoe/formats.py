"""Number formats of weights and activations, exact: E2M1 nibbles, E8M0 and E4M3 block scales.

MXFP4: 32 consecutive K of a row share one E8M0 byte; value = E2M1 · 2^(byte - 127).
NVFP4: 16 consecutive K of a row share one E4M3 scale; value = E2M1 · scale · global scale.
MXFP8: E4M3 elements with the scales of MXFP4; for activations only.

Two values share a byte, the even K in the low nibble. A product too large for the output dtype is ±Inf, never a wrapped
exponent. Subnormal results are made from integers, so they are the same when the CPU is told to flush them to zero.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5.3 (elements), 5.4 (E8M0) and 6.3 (choice of the scale);
NVFP4: NVIDIA/Model-Optimizer, modelopt/torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, get_args

import torch

from portamoe.spec import BLOCK_SIZE, ActivationFormat

#: E2M1 by code; bit 3 is the sign, so code 8 is -0.
E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX: Final = 6.0  # 1.5 · 2^2
E4M3_MAX: Final = 448.0  # 1.75 · 2^8
E8M0_ONE: Final = 127  # 2^0
E8M0_NAN: Final = 255

_E2M1_EMAX: Final = 2  # exponent of the largest E2M1 value
_E4M3_EMAX: Final = 8
#: Half-way points between neighbours of E2M1, by which of the two has the even code.
_TIES_TO_LOWER: Final = (0.25, 1.25, 2.5, 5.0)
_TIES_TO_UPPER: Final = (0.75, 1.75, 3.5)
_FLOAT32_INF: Final = 0x7F800000
_FLOAT32_FRACTION: Final = 0x007FFFFF
#: One int of two neighbouring values: index_select moves whole ints about four times as fast as pairs.
_PAIR_DTYPE: Final = {
    torch.float64: torch.complex128,
    torch.float32: torch.int64,
    torch.bfloat16: torch.int32,
    torch.float16: torch.int32,
}


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Put two E2M1 codes into each byte, even K low: (..., K) uint8 below 16 -> (..., K/2) uint8."""
    if codes.dtype != torch.uint8:
        raise TypeError(f"E2M1 codes must be uint8, got {codes.dtype}")
    if codes.shape[-1] % 2:
        raise ValueError(f"K = {codes.shape[-1]} is odd; two E2M1 codes share a byte")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Take the E2M1 codes out of their bytes: (..., K/2) uint8 -> (..., K) uint8 below 16."""
    _want_dtype("packed E2M1", packed, torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of packed E2M1: (..., K/2) uint8 -> (..., K) float32."""
    _want_dtype("packed E2M1", packed, torch.uint8)
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    return table[unpack_e2m1(packed).int()]


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1: to nearest, ties to the even code, beyond ±6 (and ±Inf) to ±6; the sign is kept, on zeros too.

    x:       (..., K) float, K even
    returns  (..., K/2) uint8

    Raises ValueError for a NaN, which E2M1 does not have (this waits for the device), and for an odd K.
    """
    if not x.dtype.is_floating_point:
        raise TypeError(f"expected a float tensor, got {x.dtype}")
    if bool(x.isnan().any()):
        raise ValueError("E2M1 has no NaN; a block with a NaN needs a NaN scale, see mxfp4_quantize")
    return pack_e2m1(_e2m1_codes(x))


def as_e8m0_bytes(scale: torch.Tensor) -> torch.Tensor:
    """Return E8M0 scales as their bytes, never by a cast of their value.

    scale:   any shape; uint8 (returned as it is), float8_e8m0fnu (reinterpreted) or float32 (see `encode_e8m0`)
    returns  uint8 of the same shape

    Raises TypeError for any other dtype, ValueError for a float32 that is no power of two.
    """
    if scale.dtype == torch.uint8:
        return scale
    if scale.dtype == getattr(torch, "float8_e8m0fnu", None):  # torch >= 2.7
        return scale.view(torch.uint8)
    if scale.dtype == torch.float32:
        return encode_e8m0(scale)
    raise TypeError(
        f"E8M0 scales must be uint8, float8_e8m0fnu or float32 powers of two, got {scale.dtype}; "
        "view the bytes as uint8"
    )


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Return 2^(byte - 127) as float32: byte 0 is the subnormal 2^-127, byte 255 NaN.

    scale:   any shape; uint8 or float8_e8m0fnu
    """
    bits = as_e8m0_bytes(scale).int() << 23
    bits = torch.where(bits == 0, 1 << 22, bits)  # 2^-127, the one subnormal
    return torch.where(bits == _FLOAT32_INF, _FLOAT32_INF | 1 << 22, bits).view(torch.float32)


def encode_e8m0(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of float32 values 2^-127 … 2^127 and NaN (byte 255); the inverse of `decode_e8m0`.

    Raises ValueError for any other value: rounding a scale without its payload would change the weights.
    """
    _want_dtype("E8M0 value", x, torch.float32)
    bits = x.view(torch.int32)
    exponent, fraction = bits >> 23, bits & _FLOAT32_FRACTION
    nan = (exponent & 0xFF == 0xFF) & (fraction != 0)
    power = (exponent > 0) & (exponent < 0xFF) & (fraction == 0)
    smallest = bits == 1 << 22
    bad = ~(nan | power | smallest)
    if bool(bad.any()):
        raise ValueError(
            f"{int(bad.sum())} of {x.numel()} scales are no powers of two within 2^-127 … 2^127, "
            f"such as {float(x[bad][0])}; E8M0 holds no others, so requantise the weights"
        )
    return torch.where(nan, E8M0_NAN, exponent & 0xFF).to(torch.uint8)


def mxfp4_dequantize(
    w: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return E2M1 · 2^(byte - 127), exact where `dtype` holds it, else rounded once (±Inf beyond its range).

    w:       (..., K/2) uint8
    scale:   (..., K/32) E8M0 as `as_e8m0_bytes` takes it; byte 255 makes its block NaN
    dtype:   float32, float64, bfloat16 or float16 (exact: float64 always; float32 and bfloat16 up to their range)
    out:     (..., K) of `dtype`, contiguous, to write to; default: a new tensor
    returns  (..., K); extra memory is bounded whatever the size of w
    """
    rows, scales = _rows_and_scales(w, as_e8m0_bytes(scale), "mxfp4")
    out = _output(w, dtype, out)
    table = _pair_table("mxfp4", dtype, w.device)
    flat = out.view(rows.shape[0], out.shape[-1]).view(_PAIR_DTYPE[dtype])
    for part in _chunks(rows):
        _look_up(table, rows[part], scales[part], flat[part])
    return out


def mxfp4_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to MXFP4 with the scale 2^(floor(log2(amax)) - 2) of OCP MX v1.0 section 6.3.

    x:       (..., K) float, K a multiple of 32
    returns  (..., K/2) uint8 and (..., K/32) uint8 E8M0

    A block of zeros gets byte 0; a block with Inf or NaN gets byte 255 (NaN) and codes 0. With this rule values
    between 6 and 8 times the scale saturate at 6.
    """
    scaled, scale = _mx_scaled(x, _E2M1_EMAX)
    return pack_e2m1(_e2m1_codes(scaled).flatten(-2)), scale


def mxfp8_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to MXFP8: E4M3 with the scale 2^(floor(log2(amax)) - 8), saturating at ±448 times the scale.

    x:       (..., K) float, K a multiple of 32
    returns  (..., K) float8_e4m3fn and (..., K/32) uint8 E8M0, byte 255 for a block with Inf or NaN
    """
    scaled, scale = _mx_scaled(x, _E4M3_EMAX)
    # torch's own cast saturates or gives NaN beyond 448, depending on its version.
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2), scale


def mxfp8_dequantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return E4M3 · 2^(byte - 127) as float32, exact: (..., K) float8_e4m3fn, (..., K/32) E8M0 -> (..., K)."""
    _want_dtype("MXFP8 element", x, torch.float8_e4m3fn)
    blocks = _blocks(x.float(), BLOCK_SIZE["mxfp4"])
    scale = as_e8m0_bytes(scale)
    if scale.shape != blocks.shape[:-1]:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}, expected {tuple(blocks.shape[:-1])} for 32 values each"
        )
    return _times_e8m0(blocks, scale.unsqueeze(-1)).flatten(-2)


def nvfp4_dequantize(
    w: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (E2M1 · scale) · global_scale: the first product is exact, the second is rounded once, to float32.

    w:             (..., N, K/2) uint8
    scale:         (..., N, K/16) float8_e4m3fn
    global_scale:  float32; () or (...) for whole matrices, (..., P) for P equal groups of rows (w13: w1 and w3)
    dtype:         of the result; from float32 another rounding
    out:           (..., N, K) of `dtype`, contiguous, to write to; default: a new tensor
    returns        (..., N, K)
    """
    _want_dtype("NVFP4 scale", scale, torch.float8_e4m3fn)
    rows, scales = _rows_and_scales(w, scale.view(torch.uint8), "nvfp4")
    factors = _row_factors(global_scale, w.shape[:-1]).reshape(-1, 1)
    out = _output(w, dtype, out)
    flat = out.view(rows.shape[0], out.shape[-1])
    table = _pair_table("nvfp4", torch.float32, w.device)
    for part in _chunks(rows):
        values = torch.empty_like(flat[part], dtype=torch.float32)
        _look_up(table, rows[part], scales[part], values.view(torch.int64))
        flat[part] = values.mul_(factors[part])
    return out


def nvfp4_quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to NVFP4: block scale E4M3(amax / (6 · global)), element E2M1(x / (block scale · global)).

    x:             (..., N, K) float, K a multiple of 16
    global_scale:  float32 as in `nvfp4_dequantize`; default: amax(x) / (6 · 448), or 1 where x is all zero
    returns        (..., N, K/2) uint8, (..., N, K/16) float8_e4m3fn, global_scale

    A block scale beyond 448 saturates, one that rounds to 0 makes its block 0, Inf or NaN makes it NaN.
    """
    blocks = _blocks(x.float(), BLOCK_SIZE["nvfp4"])
    if global_scale is None:
        amax = x.float().abs().amax()
        global_scale = torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones_like(amax))
    factors = _row_factors(global_scale, x.shape[:-1]).unsqueeze(-1)
    amax = blocks.abs().amax(dim=-1)
    wanted = (amax / (E2M1_MAX * factors)).clamp(max=E4M3_MAX)
    scale = torch.where(amax.isfinite(), wanted, torch.nan).to(torch.float8_e4m3fn)
    step = (scale.float() * factors).unsqueeze(-1)
    codes = _e2m1_codes(blocks / step)
    codes = torch.where(step > 0, codes, torch.zeros_like(codes))
    return pack_e2m1(codes.flatten(-2)), scale, global_scale


def quantize_activations(
    x: torch.Tensor, activation_format: ActivationFormat, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what is left of activations after rounding them to `activation_format`, as float32.

    x:                  (..., K) float
    activation_format:  "bf16", "mxfp8", "mxfp4" or "nvfp4"
    input_scale:        () float32, the global scale of nvfp4 (checkpoint: `input_scale`); None for the others
    returns             (..., K) float32

    Raises ValueError for an unknown format, for a K that the block does not divide, and where `input_scale` is missing
    or would be ignored.
    """
    if activation_format not in get_args(ActivationFormat):
        raise ValueError(f"activation_format must be one of {get_args(ActivationFormat)}, got {activation_format!r}")
    if (input_scale is not None) != (activation_format == "nvfp4"):
        raise ValueError(f"input_scale is for nvfp4 and only for it, got {input_scale} for {activation_format}")
    if activation_format == "bf16":
        return x.to(torch.bfloat16).float()
    if activation_format == "mxfp8":
        return mxfp8_dequantize(*mxfp8_quantize(x))
    if activation_format == "mxfp4":
        return mxfp4_dequantize(*mxfp4_quantize(x))
    return nvfp4_dequantize(*nvfp4_quantize(x, input_scale))


def _want_dtype(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{what} must be {dtype}, got {tensor.dtype}")


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 codes of float values as uint8 of the same shape; a NaN gets the code of zero."""
    magnitude = x.abs()
    code = x.signbit().to(torch.uint8) << 3
    for tie in _TIES_TO_LOWER:
        code += magnitude > tie
    for tie in _TIES_TO_UPPER:
        code += magnitude >= tie
    return code


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    if x.shape[-1] % block:
        raise ValueError(f"K = {x.shape[-1]} is no multiple of {block}, the values that share a scale")
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _mx_scaled(x: torch.Tensor, emax: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks of x / scale and the E8M0 scales 2^(floor(log2(amax)) - emax), both from the bits of x.

    Comparing bits keeps amax of subnormals, orders NaN above Inf above all numbers, and rounds nothing.
    """
    blocks = _blocks(x.float(), BLOCK_SIZE["mxfp4"])
    bits = blocks.view(torch.int32)
    field, fraction = bits >> 23 & 0xFF, bits & _FLOAT32_FRACTION
    top = field.amax(dim=-1, keepdim=True)
    scale = torch.where(top == 0xFF, E8M0_NAN, (top - emax).clamp(min=0))
    # A subnormal is fraction · 2^-149; as an int it survives where the float would be flushed.
    subnormal = fraction.float() * 2.0**-22 * _power_of_two(-scale.clamp(max=126))
    scaled = torch.where(field == 0, torch.where(bits < 0, -subnormal, subnormal), blocks)
    scaled = torch.where(field == 0, scaled, scaled * _power_of_two(127 - scale.clamp(max=253)))
    scaled = torch.where(scale == E8M0_NAN, 0.0, scaled)
    return scaled, scale.squeeze(-1).to(torch.uint8)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent as float32, -126 <= exponent <= 127."""
    return (exponent + 127 << 23).to(torch.int32).view(torch.float32)


def _times_e8m0(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return x · 2^(scale - 127) from float32 bits, for x that is 0, NaN or normal with at most 7 significant bits."""
    bits = x.view(torch.int32)
    field = (bits >> 23 & 0xFF) + scale.int() - 127
    fraction = bits & _FLOAT32_FRACTION
    subnormal = (fraction | 1 << 23) >> (1 - field).clamp(0, 31)
    magnitude = torch.where(field >= 1, field << 23 | fraction, subnormal)
    magnitude = torch.where(field >= 0xFF, _FLOAT32_INF, magnitude)
    magnitude = torch.where(x == 0, 0, magnitude)
    magnitude = torch.where(x.isnan() | (scale == E8M0_NAN), _FLOAT32_INF | 1 << 22, magnitude)
    return (magnitude | bits & -(1 << 31)).view(torch.float32)


@lru_cache(maxsize=32)
def _pair_table(weight_format: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return all products of a block scale and two E2M1 codes: entry 256 · scale byte + weight byte, as pairs.

    One look-up a byte is as fast as a decode and a multiplication, and exact for subnormals on every device.
    """
    codes = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(-1)
    if weight_format == "nvfp4":  # 2 · 4 significant bits, 2^-10 … 2688: exact and normal in float32
        products = scales.view(torch.float8_e4m3fn).float() * codes
    elif dtype == torch.float32:
        products = _times_e8m0(codes, scales)
    elif dtype == torch.bfloat16:  # two significant bits and float32's exponents: the upper half of the bits
        products = (_times_e8m0(codes, scales).view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    else:
        powers = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [torch.nan], dtype=torch.float64)
        products = (powers.unsqueeze(-1) * codes.double()).to(dtype)
    byte = torch.arange(256)
    pairs = torch.stack((products[:, byte & 0xF], products[:, byte >> 4]), dim=-1)
    return pairs.view(_PAIR_DTYPE[dtype]).flatten().to(device)


def _look_up(table: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    index = w.reshape(*scale.shape, w.shape[-1] // scale.shape[-1]).int() | (scale.int() << 8).unsqueeze(-1)
    torch.index_select(table, 0, index.flatten(), out=out.view(-1))


def _chunks(rows: torch.Tensor) -> list[slice]:
    """Row ranges of about 256 Ki values, which stay in a CPU's cache; 16 Mi elsewhere, to fill a GPU."""
    values = 1 << (18 if rows.device.type == "cpu" else 24)
    step = max(1, values // max(1, 2 * rows.shape[-1]))
    return [slice(first, first + step) for first in range(0, rows.shape[0], step)]


def _rows_and_scales(w: torch.Tensor, scale: torch.Tensor, weight_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Check that a packed matrix and its scale bytes belong together; return both with one row dimension."""
    _want_dtype(f"{weight_format} weights", w, torch.uint8)
    block = BLOCK_SIZE[weight_format]
    if 2 * w.shape[-1] % block:
        raise ValueError(f"K = {2 * w.shape[-1]} is no multiple of {block}, the block of {weight_format}")
    expected = (*w.shape[:-1], 2 * w.shape[-1] // block)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}, expected {expected}: one for each {block} values of {weight_format}"
        )
    if scale.device != w.device:
        raise ValueError(f"weights are on {w.device} and their scales on {scale.device}")
    return w.reshape(-1, w.shape[-1]), scale.reshape(-1, scale.shape[-1])


def _row_factors(global_scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Spread global scales, () or (...) or (..., P), over the rows (..., N) given by `shape`."""
    _want_dtype("global scale", global_scale, torch.float32)
    lead = shape[:-1]
    if global_scale.dim() == 0:
        return global_scale.expand(shape)
    if global_scale.shape == lead:
        return global_scale.unsqueeze(-1).expand(shape)
    if global_scale.shape[:-1] == lead and global_scale.shape[-1] and not shape[-1] % global_scale.shape[-1]:
        return global_scale.repeat_interleave(shape[-1] // global_scale.shape[-1], dim=-1)
    raise ValueError(
        f"global scale has shape {tuple(global_scale.shape)}; for rows {tuple(shape)} it must be (), {tuple(lead)} "
        f"or {(*lead, 'P')} with P a divisor of {shape[-1]}"
    )


def _output(w: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    if dtype not in _PAIR_DTYPE:
        raise TypeError(f"dtype must be one of {', '.join(map(str, _PAIR_DTYPE))}, got {dtype}")
    shape = (*w.shape[:-1], 2 * w.shape[-1])
    if out is None:
        return torch.empty(shape, dtype=dtype, device=w.device)
    if tuple(out.shape) != shape or out.dtype != dtype or not out.is_contiguous() or out.device != w.device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}, expected contiguous {dtype} {shape} on {w.device}"
        )
    return out
