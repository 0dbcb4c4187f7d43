"""Storage of the expert matrices in the order in which the kernels read them, and the exact way back.

A fragment is 16 rows by 64 columns: 512 contiguous bytes, of which lane (g, t) of a warp owns 16. One 32-bit word
holds the 8 codes of rows g and g + 8 and of 4 columns of a step of 16: a lane's operand of the matrix instruction, so
a load needs no exchange between lanes. In natural order these are columns 2t, 2t + 1, 2t + 8, 2t + 9, as the
instruction counts them; in lane order 4t ... 4t + 3, as Triton up to 3.6 counts them for mma.sync. w13 puts 8 gate
rows and the 8 up rows of the same outputs in one fragment.

Scales lie beside: one word per row pair (g, g + 8) and 64 columns, bytes (g, block 0),
(g + 8, block 0), (g, block 1), (g + 8, block 1), each E8M0 + 126 minus the expert's shift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FRAGMENT_ROWS = 16
FRAGMENT_COLS = 64
#: A stored scale of s + 126 is the bf16 exponent of 2**(s - 1): it undoes the decode's 2**-126. It fits for s <= 128.
SCALE_BIAS = 126
LARGEST_UNSHIFTED = 128
E8M0_NAN = 255
#: Fragments that a block of rows may read behind the last expert; their results are masked.
SLACK_FRAGMENTS = 16


def _bit_positions(row_half: int, k_half: int, parity: int) -> tuple[int, int, int, int]:
    """Bits of sign, exponent 1, exponent 0 and mantissa of a code in its word.

    row_half: row g or g + 8; k_half: columns 2t.. or 2t + 8..; parity: even or odd column. The even columns' fields
    come out in the lower half of the decoded pair. The shifts that bring each field to bits 15, 8, 7, 6 are those of
    `_tile_kernels.decode`: none, left 6, rotate 6, and two for the last.
    """
    low, high = 16 * parity, 16 * (1 - parity)
    return {
        (0, 0): (15 + low, 8 + low, 7 + low, 6 + low),
        (1, 0): (9 + low, 2 + low, 1 + low, 0 + low),
        (0, 1): (5 + high, 14 + low, 13 + low, 12 + low),
        (1, 1): (11 + low, 4 + low, 3 + low, 10 + low),
    }[row_half, k_half]


def _fields() -> list[tuple[int, int, int, tuple[int, int, int, int]]]:
    halves = (0, 1)
    return [(a0, a1, h, _bit_positions(a0, a1, h)) for a0 in halves for a1 in halves for h in halves]


@dataclass(frozen=True)
class FragmentLayout:
    """Layout of one expert matrix of `rows` x `cols`.

    gate_up:     its rows are [gate; up], stored 8 and 8
    lane_order:  which 4 columns of 16 a lane owns, see above

    Codes (rows/16, blocks of 64 columns, 128) int32, scales (rows/16, blocks, 8) int32; a last half block of columns
    is filled with code 0.
    """

    rows: int
    cols: int
    gate_up: bool
    lane_order: bool

    def __post_init__(self) -> None:
        if self.rows % 32 or self.cols % 32:
            raise ValueError(f"an MXFP4 matrix of {self.rows} x {self.cols} is no multiple of 32 both ways")

    @property
    def fragments(self) -> int:
        """Fragments of 16 rows."""
        return self.rows // FRAGMENT_ROWS

    @property
    def blocks(self) -> int:
        """Blocks of 64 columns, the last one possibly half empty."""
        return -(-self.cols // FRAGMENT_COLS)

    def row_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Rearrange (rows, ...) to (fragments, 2, 8, ...): row half, g."""
        if self.gate_up:
            gate_up: torch.Tensor = rows.unflatten(0, (2, self.fragments, 8))
            return gate_up.transpose(0, 1)
        plain: torch.Tensor = rows.unflatten(0, (self.fragments, 2, 8))
        return plain

    def row_order_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Undo `row_order`."""
        return (rows.transpose(0, 1) if self.gate_up else rows).flatten(0, 2)

    def _columns(self) -> tuple[int, ...]:
        return (self.blocks, 4, 4, 2, 2) if self.lane_order else (self.blocks, 4, 2, 4, 2)

    def pack_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return (fragments, blocks, 128) int32 of canonical codes (rows, cols/2) uint8."""
        import torch

        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        padded = torch.nn.functional.pad(nibbles, (0, self.blocks * FRAGMENT_COLS - self.cols))
        # fragment, row half, g | block, step of 16, column half, t, parity
        v = self.row_order(padded).unflatten(-1, self._columns()).to(torch.int32)
        v = v.transpose(-3, -2) if self.lane_order else v
        words = torch.zeros(v.shape[0], 8, self.blocks, 4, 4, dtype=torch.int32, device=codes.device)
        for row_half, k_half, parity, bits in _fields():
            code = v[:, row_half, :, :, :, k_half, :, parity]
            for source, target in zip((3, 2, 1, 0), bits, strict=True):
                words |= ((code >> source) & 1) << target
        # fragment g block step t -> fragment block g t step
        return words.permute(0, 2, 1, 4, 3).reshape(v.shape[0], self.blocks, 128)

    def unpack_codes(self, words: torch.Tensor) -> torch.Tensor:
        """Return the canonical codes (rows, cols/2) uint8 of `pack_codes`' result."""
        import torch

        words = words.view(self.fragments, self.blocks, 8, 4, 4).permute(0, 2, 1, 4, 3)
        shape = (self.fragments, 2, 8, self.blocks, 4, 2, 4, 2)
        v = torch.zeros(shape, dtype=torch.int32, device=words.device)
        for row_half, k_half, parity, bits in _fields():
            for source, target in zip((3, 2, 1, 0), bits, strict=True):
                v[:, row_half, :, :, :, k_half, :, parity] |= ((words >> target) & 1) << source
        v = v.transpose(-3, -2) if self.lane_order else v
        nibbles = self.row_order_back(v.flatten(3))[:, : self.cols].to(torch.uint8)
        return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)

    def pack_scales(self, scales: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return (fragments, blocks, 8) int32 and the expert's shift, from E8M0 bytes (rows, cols/32) uint8.

        The stored matrix is the true one times 2**-shift; shift is 0 unless a scale exceeds 2. Raises ValueError for
        the E8M0 code of NaN.
        """
        import torch

        largest = int(scales.max())
        if largest == E8M0_NAN:
            raise ValueError("an expert's scales hold the E8M0 code 255 (NaN): the checkpoint is damaged")
        shift = max(0, largest - LARGEST_UNSHIFTED)
        stored = scales.to(torch.int32) + (SCALE_BIAS - shift)
        stored = torch.nn.functional.pad(stored, (0, 2 * self.blocks - scales.shape[1]), value=SCALE_BIAS)
        v = self.row_order(stored).unflatten(-1, (self.blocks, 2))  # fragment, row half, g, block, block of 32
        words = v[:, 0, ..., 0] | (v[:, 1, ..., 0] << 8) | (v[:, 0, ..., 1] << 16) | (v[:, 1, ..., 1] << 24)
        return words.transpose(1, 2).contiguous(), shift

    def unpack_scales(self, words: torch.Tensor, shift: int) -> torch.Tensor:
        """Return the canonical E8M0 bytes (rows, cols/32) uint8 of `pack_scales`' result."""
        import torch

        w = words.view(self.fragments, self.blocks, 8).transpose(1, 2)
        halves = [torch.stack(((w >> s) & 255, (w >> (s + 16)) & 255), -1) for s in (0, 8)]
        stored = self.row_order_back(torch.stack(halves, 1).flatten(3))[:, : self.cols // 32]
        return (stored - (SCALE_BIAS - shift)).to(torch.uint8)
