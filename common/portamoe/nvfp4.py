"""NVFP4 beside MXFP4: the exact cast, its inverse, and one global scale for w1 and w3 where that changes no weight.

    MXFP4   w = e2m1 · 2^k                 k = byte - 127, for 32 consecutive K of a row
    NVFP4   w = e2m1 · s · g               s in E4M3 for 16 consecutive K, g in float32 for a whole projection

The cast keeps the nibbles: m = max(k) - 8, g = 2^m, s = 2^(k - m). E4M3 holds the powers 2^-9 … 2^8, so it is exact
where max(k) - k <= 17 for every block that is not all zero. NVIDIA's Kimi-K3-NVFP4 was made like this from the MXFP4
release; where both scales of each pair of blocks still show it, `recode_to_mxfp4` goes back and MXFP4 backends serve
the checkpoint.

Source: NVIDIA/Model-Optimizer, examples/kimi/kimi_k3/quantize_to_nvfp4.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from portamoe.decision import Reason
from portamoe.weights import Expert

if TYPE_CHECKING:
    import torch

    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertSource

_LOG = logging.getLogger("portamoe")

#: k - m of the largest power of two in E4M3: 2^8 = 256.
TOP_POWER: Final = 8
#: The most that max(k) - k may be: the smallest positive E4M3 value is the subnormal 2^-9.
MOST_SPREAD: Final = 17
#: E8M0 byte of blocks whose weights are all zero, where any would do: 2^0.
_ZERO_BLOCK: Final = 127
_E8M0_NAN: Final = 255
#: Magnitudes of E2M1 but for 0: a fold has to keep the float32 value of each.
_E2M1_MAGNITUDES: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class InexactError(ValueError):
    """A conversion would change weights; says where and why."""


def from_mxfp4(expert: Expert) -> Expert:
    """Cast one canonical MXFP4 expert to NVFP4 without changing a weight; w1 and w3 get one global scale.

    Input scales are left out: MXFP4 has none, and NVFP4 kernels then take 1.

    Raises InexactError where a block that is not all zero is more than 2^17 below the largest, or is NaN.
    """
    w13_scale, w13_global = _cast(expert.w13, expert.w13_scale, "w13")
    w2_scale, w2_global = _cast(expert.w2, expert.w2_scale, "w2")
    return replace(
        expert,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_global_scale=w13_global.repeat(2),
        w2_global_scale=w2_global,
    )


def _cast(weight: torch.Tensor, scale: torch.Tensor | None, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block scales (N, K/16) E4M3 and the global scale () of a matrix in MXFP4."""
    import torch

    if scale is None or scale.dtype not in {torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)}:
        raise TypeError(f"{name}_scale is {None if scale is None else scale.dtype}, expected E8M0 bytes (MXFP4)")
    codes = scale.view(torch.uint8).int()
    live = ~_zero_blocks(weight, scale.shape[-1])
    if bool((codes[live] == _E8M0_NAN).any()):
        raise InexactError(f"{name}_scale holds NaN (E8M0 byte 255), which is no weight")
    top = int(codes[live].max()) if bool(live.any()) else _ZERO_BLOCK
    spread = torch.where(live, top - codes, 0)
    if (widest := int(spread.max())) > MOST_SPREAD:
        raise InexactError(
            f"{name}: a block scale is 2^{widest} below the largest, E4M3 holds powers of two down to "
            f"2^{MOST_SPREAD} below it; keep MXFP4 or requantise"
        )
    blocks = torch.where(live, torch.exp2((TOP_POWER - spread).float()), 0.0)
    global_scale = torch.tensor(2.0 ** (top - 127 - TOP_POWER), dtype=torch.float32, device=weight.device)
    return blocks.to(torch.float8_e4m3fn).repeat_interleave(2, dim=-1), global_scale


def to_mxfp4(expert: Expert) -> Expert:
    """Convert one canonical NVFP4 expert back to MXFP4 without changing a weight.

    Each pair of blocks must have one scale (a half that is all zero has none), and s · g must be a power of two within
    2^-127 … 2^127. Input scales are dropped, as MXFP4 has none.

    Raises InexactError that says how many pairs do not show it.
    """
    if expert.w13_global_scale is None or expert.w2_global_scale is None:
        raise TypeError("to_mxfp4 needs an NVFP4 expert with global scales")
    w13, w13_scale = _inverse(expert.w13, expert.w13_scale, expert.w13_global_scale, "w13")
    w2, w2_scale = _inverse(expert.w2, expert.w2_scale, expert.w2_global_scale, "w2")
    return Expert(
        w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale, w13_bias=expert.w13_bias, w2_bias=expert.w2_bias
    )


def _inverse(
    weight: torch.Tensor, scale: torch.Tensor | None, global_scale: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    if scale is None or scale.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name}_scale is {None if scale is None else scale.dtype}, expected float8_e4m3fn (NVFP4)")
    if scale.shape[-1] % 2:
        raise InexactError(f"{name} has {scale.shape[-1]} blocks of 16 in a row, MXFP4 takes them in pairs")
    values = scale.float()
    dead = _zero_blocks(weight, scale.shape[-1]) | (values == 0)
    if bool((values == 0).any()):  # a scale of 0 makes its block 0, whatever the nibbles are; signs stay
        zeroed = (values == 0).repeat_interleave(weight.shape[-1] // scale.shape[-1], dim=-1)
        weight = torch.where(zeroed, weight & 0x88, weight)
    values = torch.where(dead, 0.0, values)
    first, second = values[..., 0::2], values[..., 1::2]
    pair = torch.maximum(first, second)
    unequal = (first != second) & (first != 0) & (second != 0)
    rows = scale.shape[0] // global_scale.numel()
    factors = global_scale.double().reshape(-1).repeat_interleave(rows)[:, None]
    fraction, exponent = torch.frexp(pair.double() * factors)
    empty = pair == 0
    byte = exponent - 1 + 127
    odd = ~empty & ((fraction != 0.5) | (byte < 0) | (byte >= _E8M0_NAN) | pair.isnan())
    if bad := int((unequal | odd).sum()):
        raise InexactError(
            f"{name}: {int(unequal.sum())} of {pair.numel()} pairs of blocks have two scales and {int(odd.sum())} a "
            f"scale that is no power of two ({bad} in all), so this is no recode of MXFP4"
        )
    return weight, torch.where(empty, _ZERO_BLOCK, byte).to(torch.uint8)


def _zero_blocks(weight: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return (N, blocks) bool: every weight of the block is ±0, whatever its scale."""
    zero: torch.Tensor = ((weight & 0x77) == 0).view(weight.shape[0], blocks, -1).all(-1)
    return zero


def fold_global_scales(expert: Expert) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w13's block scales and the one global scale that serves w1 and w3, for kernels that take no two.

    Equal scales pass as they are. Otherwise the quotient goes into the block scales, of one projection or, with a power
    of two to keep them in range, of both; a fold counts as exact where the float32 value of every E2M1 code under every
    block scale stays what `formats.nvfp4_dequantize` gives.

    returns  (2I, H/16) float8_e4m3fn and () float32

    Raises InexactError where no fold is exact; the gate's scale is never taken for both.
    """
    import torch

    scale, scales = expert.w13_scale, expert.w13_global_scale
    if scale is None or scales is None or scale.dtype != torch.float8_e4m3fn:
        raise TypeError("fold_global_scales needs an NVFP4 expert with w13_scale and w13_global_scale")
    gate, up = (float(value) for value in scales)
    if gate == up:
        return scale, scales[0].clone()
    halves = [half.view(torch.uint8).int() for half in scale.chunk(2)]
    used = [half.unique().to("cpu", torch.uint8) for half in halves]
    for base in (gate, up):
        for shift in _shifts():
            target = base * 2.0**shift
            one, other = (_folded(codes, own, target) for codes, own in zip(used, (gate, up), strict=True))
            if one is not None and other is not None:
                folded = torch.cat([t.to(scale.device)[half] for t, half in zip((one, other), halves, strict=True)])
                return folded.view(torch.float8_e4m3fn), torch.tensor(target, device=scale.device)
    raise InexactError(
        f"w1 and w3 have the global scales {gate:.6g} and {up:.6g}, whose quotient {gate / up:.6g} does not fold "
        "exactly into E4M3 block scales; this kernel takes one for both, so use the torch backend"
    )


def _shifts() -> list[int]:
    """Powers of two to try, nearest to none first."""
    return sorted(range(-16, 17), key=abs)


def _folded(codes: torch.Tensor, own: float, target: float) -> torch.Tensor | None:
    """Return the (256,) uint8 table from E4M3 bytes under `own` to those under `target`, None where one is inexact."""
    import torch

    values = codes.view(torch.float8_e4m3fn).float()
    wanted = values.double() * (own / target)
    if bool((wanted.abs() > 448).any()) or bool(values.isnan().any()):
        return None
    new = wanted.to(torch.float8_e4m3fn)
    magnitudes = torch.tensor(_E2M1_MAGNITUDES)[:, None]
    if not torch.equal((magnitudes * values) * torch.tensor(own), (magnitudes * new.float()) * torch.tensor(target)):
        return None
    table = torch.zeros(256, dtype=torch.uint8)
    table[codes.int()] = new.view(torch.uint8)
    return table


@dataclass(frozen=True)
class RecodedExperts:
    """An NVFP4 source seen as MXFP4: each expert is converted back when it is asked for."""

    source: ExpertSource

    def __len__(self) -> int:
        return len(self.source)

    def expert(self, index: int) -> Expert:
        """Return the local expert `index` in MXFP4; InexactError where its scales do not show the recode."""
        try:
            return to_mxfp4(self.source.expert(index))
        except InexactError as error:
            raise InexactError(f"local expert {index}: {error}") from error


def mxfp4_spec(spec: MoESpec) -> MoESpec | Reason:
    """Return `spec` with MXFP4 weights, or why an NVFP4 spec has no such form."""
    if spec.activation_format == "nvfp4":
        remedy = 'ask for activation_format="bf16", which needs no calibrated input scales'
        return Reason("activation format", "nvfp4", "bf16, mxfp8 or mxfp4 beside MXFP4 weights", remedy)
    for name in ("hidden_size", "intermediate_size"):
        if getattr(spec, name) % 32:
            return Reason(name, getattr(spec, name), "a multiple of 32, the block of MXFP4")
    return replace(spec, weight_format="mxfp4")


def recode_to_mxfp4(source: ExpertSource, spec: MoESpec) -> tuple[MoESpec, ExpertSource] | Reason:
    """Return spec and source in MXFP4 if every expert converts back value-exactly, else the reason why not.

    Every expert is looked at, its block scales first; nothing is kept.
    """
    recoded = mxfp4_spec(spec)
    if isinstance(recoded, Reason):
        return recoded
    experts = RecodedExperts(source)
    for index in range(len(source)):
        try:
            experts.expert(index)
        except InexactError as error:
            return Reason("NVFP4 weights", str(error), "a recode of MXFP4", "the torch backend takes NVFP4 as it is")
    return recoded, experts


def served_as(
    spec: MoESpec, source: ExpertSource, device: Device, backend: str | None = None
) -> tuple[MoESpec, ExpertSource]:
    """Return what a layer serves an NVFP4 spec as: the same, or its MXFP4 form on a backend that beats torch.

    backend:  the name asked for, None for $PORTAMOE_BACKEND or the automatic choice

    A backend that takes NVFP4 itself comes first. Where there is none but `torch`, or the one named refuses NVFP4 and
    takes MXFP4, the weights are converted back if they are a recode; the log says which.
    """
    choice = mxfp4_choice(spec, device, backend)
    if choice is None or isinstance(choice, Reason):
        return spec, source
    recoded = recode_to_mxfp4(source, spec)
    if isinstance(recoded, Reason):
        _LOG.info("NVFP4 weights are kept: %s", recoded)
        return spec, source
    _LOG.info("NVFP4 weights are a recode of MXFP4 and are served as that, with the same values")
    return recoded


def mxfp4_choice(spec: MoESpec, device: Device, backend: str | None = None) -> str | Reason | None:
    """Return the backend that serves an NVFP4 spec's weights as MXFP4, if they are a recode of that.

    backend:  the name asked for, None for $PORTAMOE_BACKEND or the automatic choice

    None where a backend other than `torch` takes NVFP4 as it is, or none takes MXFP4 either; a Reason where the spec
    itself keeps its weights from that. Needs no torch.
    """
    from portamoe import registry

    plain = {None, "torch"}
    if spec.weight_format != "nvfp4" or registry.choose(spec, device, backend).name not in plain:
        return None
    other = mxfp4_spec(spec)
    if isinstance(other, Reason):
        return other
    name = registry.choose(other, device, backend).name
    return None if name in plain else name
