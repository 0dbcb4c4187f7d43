"""Canonical MXFP4 matrices to the order in which the kernels read them, and back, byte for byte.

A layout permutes the bits of one expert's matrix: `codes` (N, K/2) and `scales` (N, K/32) as in the checkpoint become
`words` (N·K/8,) int32 and `scales` (N·K/32,) uint8. Nothing is padded: N is a multiple of 16 and K of 32; what is
left of K after whole 128- or 64-wide blocks is stored behind them in 32-wide blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

NAN_SCALE = 255
#: Largest E8M0 byte that is stored without taking a power of two from its row, see the layouts below.
LARGEST_BRICK_SCALE = 250
LARGEST_FRAGMENT_SCALE = 128


@dataclass(frozen=True)
class Packed:
    """One expert's matrix in a kernel layout.

    words:          (N·K/8,) int32 — eight E2M1 codes each
    scales:         (N·K/32,) uint8 — E8M0 with the layout's own offset
    row_exponents:  (N,) uint8 — the exponent that was taken from the row's scales, 255 where one is NaN; None if all
    are 0
    """

    words: torch.Tensor
    scales: torch.Tensor
    row_exponents: torch.Tensor | None


class KernelLayout(ABC):
    """A typed property of prepared bytes: a launcher given another layout refuses them."""

    name: ClassVar[str]

    @abstractmethod
    def pack(self, codes: torch.Tensor, scales: torch.Tensor) -> Packed:
        """Return the matrix in this layout.

        codes:   (N, K/2) uint8, low nibble = even K
        scales:  (N, K/32) uint8, E8M0

        Raises ValueError for shapes that do not belong together or that no kernel takes.
        """

    @abstractmethod
    def unpack(self, packed: Packed, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `codes` (N, K/2) and `scales` (N, K/32), N = rows and K = columns: the inverse of `pack`."""


@dataclass(frozen=True)
class BrickLayout(KernelLayout):
    """Bricks of 16 rows x 128 K: 1 KiB that a wave of 64 lanes loads with one 16-byte load each.

    Lane 16g + n of a brick holds the 32-wide block g of row n, K = 32g … 32g + 31: four words and one scale. Order of
    words: [N/16][K/128][g][n][4], then the rest of K as [N/16][32-block][4][n]; scales: [N/16][K/128][n][g], then
    [N/16][32-block][n], stored as byte + 1 (see _decode_kernels), which must not exceed 251: from a row with a scale
    above 2^(250 - 127) an exponent of up to 4 is taken, and scales of that row below 2^(4 - 127) are raised to what
    can be stored: by a factor of 16 at most, on numbers 2^-246 times the row's largest.

    native:  nibbles stay as they are (gfx950 converts two neighbours with one instruction). Otherwise the word is
             arranged for a byte look-up: pair q = 0, 1 (K = 2q + h) has its magnitude in bits 2..0 and its sign in
             bit 7 of byte q + 2h; pairs 2, 3 the same after a rotation right by 4.
    """

    name: ClassVar[str] = "bricks"
    native: bool = False

    def pack(self, codes: torch.Tensor, scales: torch.Tensor) -> Packed:
        """Return the matrix in bricks; see KernelLayout.pack."""
        import torch

        rows, columns = _check(codes, scales)
        words = codes.contiguous().view(torch.int32)
        if not self.native:
            words = _to_look_up_order(words)
        whole = columns // 128
        main = words[:, : whole * 16].reshape(rows // 16, 16, whole, 4, 4).permute(0, 2, 3, 1, 4)
        rest = words[:, whole * 16 :].reshape(rows // 16, 16, -1, 4).permute(0, 2, 3, 1)
        stored, row_exponents = _shift_rows(scales, offset=1, largest=LARGEST_BRICK_SCALE, smallest=1)
        main_scales = stored[:, : whole * 4].reshape(rows // 16, 16, whole, 4).permute(0, 2, 1, 3)
        rest_scales = stored[:, whole * 4 :].reshape(rows // 16, 16, -1).permute(0, 2, 1)
        return Packed(_join(main, rest), _join(main_scales, rest_scales), row_exponents)

    def unpack(self, packed: Packed, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales; see KernelLayout.unpack."""
        import torch

        whole, rest = columns // 128, columns % 128 // 32
        main_words, rest_words = packed.words.split([rows * whole * 16, rows * rest * 4])
        main_scales, rest_scales = packed.scales.split([rows * whole * 4, rows * rest])
        words = torch.cat(
            [
                main_words.view(rows // 16, whole, 4, 16, 4).permute(0, 3, 1, 2, 4).reshape(rows, -1),
                rest_words.view(rows // 16, rest, 4, 16).permute(0, 3, 1, 2).reshape(rows, -1),
            ],
            dim=1,
        )
        scales = torch.cat(
            [
                main_scales.view(rows // 16, whole, 16, 4).permute(0, 2, 1, 3).reshape(rows, -1),
                rest_scales.view(rows // 16, rest, 16).permute(0, 2, 1).reshape(rows, -1),
            ],
            dim=1,
        )
        if not self.native:
            words = _from_look_up_order(words)
        return words.contiguous().view(torch.uint8), _unshift_rows(scales, packed.row_exponents, offset=1)


@dataclass(frozen=True)
class FragmentLayout(KernelLayout):
    """NVIDIA's register order of a 16 x 16 matrix operand: 16 rows x 64 K are 512 bytes, 16 a lane.

    Lane 4g + t of a tile holds one word for each 16-wide K step: rows g and g + 8, K = 2t, 2t + 1, 2t + 8, 2t + 9.
    Order of words: [N/16][K/64][g][t][step], then the last 32 of K, if any, as [N/16][g][t][step]; scales:
    [N/16][K/64][g][32-block] [row half], then [N/16][g][row half].

    A kernel undoes the bias of E2M1 placed into bf16 and applies the scale in one bf16 multiply by 2^(E8M0 - 1), so
    scales are stored as byte + 126; from a row with a scale above 2^(128 - 127) an exponent is taken.
    """

    name: ClassVar[str] = "fragments"

    def pack(self, codes: torch.Tensor, scales: torch.Tensor) -> Packed:
        """Return the matrix in fragments; see KernelLayout.pack."""
        rows, columns = _check(codes, scales)
        nibbles = _nibbles(codes)
        whole = columns // 64
        words = [_to_fragments(nibbles[:, : whole * 64], 4), _to_fragments(nibbles[:, whole * 64 :], 2)]
        stored, row_exponents = _shift_rows(scales, offset=126, largest=LARGEST_FRAGMENT_SCALE, smallest=0)
        main = stored[:, : whole * 2].reshape(rows // 16, 2, 8, whole, 2).permute(0, 3, 2, 4, 1)
        rest = stored[:, whole * 2 :].reshape(rows // 16, 2, 8, -1).permute(0, 3, 2, 1)
        return Packed(_join(*words), _join(main, rest), row_exponents)

    def unpack(self, packed: Packed, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales; see KernelLayout.unpack."""
        import torch

        whole, rest = columns // 64, columns % 64 // 32
        main, tail = packed.words.split([rows * whole * 8, rows * rest * 4])
        nibbles = torch.cat([_from_fragments(main, rows, whole, 4), _from_fragments(tail, rows, rest, 2)], dim=1).view(
            rows, -1, 2
        )
        codes = nibbles[..., 0] | (nibbles[..., 1] << 4)
        main_scales, tail_scales = packed.scales.split([rows * whole * 2, rows * rest])
        stored = torch.cat(
            [
                main_scales.view(rows // 16, whole, 8, 2, 2).permute(0, 4, 2, 1, 3).reshape(rows, -1),
                tail_scales.view(rows // 16, rest, 8, 2).permute(0, 3, 2, 1).reshape(rows, -1),
            ],
            dim=1,
        )
        return codes.to(torch.uint8), _unshift_rows(stored, packed.row_exponents, offset=126)


def _check(codes: torch.Tensor, scales: torch.Tensor) -> tuple[int, int]:
    """Return N and K, or raise ValueError naming the shape that is wrong."""
    rows, columns = codes.shape[0], codes.shape[1] * 2
    if tuple(scales.shape) != (rows, columns // 32) or columns % 32:
        raise ValueError(
            f"codes {tuple(codes.shape)} need scales ({rows}, {columns / 32:g}), got {tuple(scales.shape)}; "
            "K must be a multiple of 32"
        )
    if rows % 16:
        raise ValueError(f"the matrix has {rows} rows, the kernels take multiples of 16")
    return rows, columns


def _shift_rows(
    scales: torch.Tensor, *, offset: int, largest: int, smallest: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return byte + offset - (the row's exponent), at least `smallest`, and the exponents.

    A row with a NaN has 255 for its exponent; its bytes do not matter to a kernel and are kept modulo 256.
    """
    import torch

    plain = scales.int()
    nan = (scales == NAN_SCALE).any(dim=1)
    exponent = (plain.amax(dim=1) - largest).clamp(min=0)
    stored = (plain + offset - exponent[:, None]).clamp(min=smallest)
    stored = torch.where(nan[:, None], (plain + offset) & 0xFF, stored)
    exponent = exponent.masked_fill(nan, NAN_SCALE)
    return stored.to(torch.uint8), exponent.to(torch.uint8) if bool(exponent.any()) else None


def _unshift_rows(stored: torch.Tensor, row_exponents: torch.Tensor | None, *, offset: int) -> torch.Tensor:
    import torch

    plain = stored.int() - offset
    if row_exponents is not None:
        plain += row_exponents.int().masked_fill(row_exponents == NAN_SCALE, 0)[:, None]
    return (plain & 0xFF).to(torch.uint8)


def _join(*parts: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([part.reshape(-1) for part in parts])


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """(N, K/2) bytes to (N, K) codes, uint8."""
    import torch

    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


def _rotate_left(words: torch.Tensor, count: int) -> torch.Tensor:
    return (words << count) | ((words >> (32 - count)) & ((1 << count) - 1))


def _to_look_up_order(words: torch.Tensor) -> torch.Tensor:
    """Nibble t of a word (K = t) to the byte look-up arrangement; exact inverse of `_from_look_up_order`."""
    groups = []
    for group in (0, 1):
        value = words.new_zeros(())
        for nibble in range(4 * group, 4 * group + 4):
            code = words >> (4 * nibble)
            byte = nibble // 2 % 2 + 2 * (nibble % 2)
            value = value | (((code & 7) | ((code & 8) << 4)) << (8 * byte))
        groups.append(value)
    return groups[0] | _rotate_left(groups[1], 4)


def _from_look_up_order(words: torch.Tensor) -> torch.Tensor:
    out = words.new_zeros(())
    turned = _rotate_left(words, 28)
    for nibble in range(8):
        byte = nibble // 2 % 2 + 2 * (nibble % 2)
        field = (words if nibble < 4 else turned) >> (8 * byte)
        out = out | (((field & 7) | ((field >> 4) & 8)) << (4 * nibble))
    return out


#: Where a fragment word keeps the sign and the magnitude bits 2, 1, 0 of a code: by register (row half + 2·K half)
#: and by half h of the register. Chosen so that three of four registers come out with one mask (see FRAGMENT_DECODE).
FRAGMENT_BITS: tuple[tuple[tuple[int, int, int, int], ...], ...] = (
    ((15, 8, 7, 6), (31, 24, 23, 22)),
    ((9, 2, 1, 0), (25, 18, 17, 16)),
    ((21, 14, 13, 12), (5, 30, 29, 28)),
    ((11, 4, 3, 10), (27, 20, 19, 26)),
)


def _to_fragments(nibbles: torch.Tensor, steps: int) -> torch.Tensor:
    """(N, tiles·16·steps) codes to [N/16, tiles, g, t, step] int32 words."""
    import torch

    rows = nibbles.shape[0]
    # row half, g | tile, step, K half, t, h
    parts = nibbles.reshape(rows // 16, 2, 8, -1, steps, 2, 4, 2).to(torch.int32)
    words = parts.new_zeros((rows // 16, parts.shape[3], 8, 4, steps))
    for register, halves in enumerate(FRAGMENT_BITS):
        for h, bits in enumerate(halves):
            code = parts[:, register % 2, :, :, :, register // 2, :, h].permute(0, 2, 1, 4, 3)
            for source, target in zip((3, 2, 1, 0), bits, strict=True):
                words |= ((code >> source) & 1) << target
    return words


def _from_fragments(words: torch.Tensor, rows: int, tiles: int, steps: int) -> torch.Tensor:
    import torch

    words = words.view(rows // 16, tiles, 8, 4, steps)
    parts = words.new_zeros((rows // 16, 2, 8, tiles, steps, 2, 4, 2))
    for register, halves in enumerate(FRAGMENT_BITS):
        for h, bits in enumerate(halves):
            code = torch.zeros_like(words)
            for source, target in zip((3, 2, 1, 0), bits, strict=True):
                code |= ((words >> target) & 1) << source
            parts[:, register % 2, :, :, :, register // 2, :, h] = code.permute(0, 2, 1, 4, 3)
    return parts.reshape(rows, -1)
