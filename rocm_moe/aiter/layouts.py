"""AITER's weight layout: 16x16 tiles of packed E2M1, E8M0 scales in 32x8 tiles, and the way back.

A row tile of 16 rows times 32 bytes is stored as two 16x16 blocks, rows fastest but for the 16 bytes that stay
together: view (R/16, 16, B/32, 2, 16) -> permute (0, 2, 3, 1, 4). A scale tile of 32 rows times 8 columns is stored as
view (R/32, 2, 16, C/8, 2, 4) -> permute (0, 3, 5, 2, 4, 1). In "interleaved" layouts 16 gate rows and 16 up rows take
turns before both. AITER's own scale shuffle leaves the columns between K/32 and the next multiple of 8 uninitialised;
here every padded byte is written: zero nibbles, and scale 0x7F = 2^0.

Sources: ROCm/aiter v0.1.20, aiter/ops/shuffle.py and aiter/utility/fp4_utils.py (permutations, compared by hash in
tests/aiter), aiter/fused_moe.py (sizes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portamoe.layouts import round_up
from portamoe.weights import Expert

#: Rows of a weight tile; gate and up alternate in blocks of as many rows in interleaved layouts.
TILE_ROWS = 16
#: Bytes of a weight tile's row: 2 x 16.
TILE_BYTES = 32
#: Rows and columns of a scale tile.
SCALE_TILE = (32, 8)
#: E8M0 code of 1.0, which fills padded scales.
SCALE_ONE = 0x7F


@dataclass(frozen=True)
class AiterLayout:
    """Order and padded sizes of one rank's experts for AITER's fused MoE.

    hidden, intermediate:                H and I of the spec
    hidden_padded, intermediate_padded:  the sizes that the kernels see
    interleaved:                         w13 alternates 16 gate rows and 16 up rows (a8w4); else `[w1; w3]`
    """

    hidden: int
    intermediate: int
    hidden_padded: int
    intermediate_padded: int
    interleaved: bool

    @property
    def hidden_pad(self) -> int:
        """Columns of x that are padding; AITER's `hidden_pad`."""
        return self.hidden_padded - self.hidden

    @property
    def intermediate_pad(self) -> int:
        """Padded rows of each of gate and up; AITER's `intermediate_pad`."""
        return self.intermediate_padded - self.intermediate

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return rows and bytes of one expert's four stored tensors."""
        rows, hidden = 2 * self.intermediate_padded, self.hidden_padded
        return {
            "w13": (rows, hidden // 2),
            "w2": (hidden, self.intermediate_padded // 2),
            "w13_scale": (rows, round_up(hidden // 32, SCALE_TILE[1])),
            "w2_scale": (hidden, round_up(self.intermediate_padded // 32, SCALE_TILE[1])),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of one expert as stored."""
        return sum(rows * columns for rows, columns in self.shapes().values())


def layout_for(
    hidden: int, intermediate: int, *, hidden_multiple: int, intermediate_multiple: int, interleaved: bool
) -> AiterLayout:
    """Round H and I up to what the kernels take."""
    return AiterLayout(
        hidden,
        intermediate,
        round_up(hidden, hidden_multiple),
        round_up(intermediate, intermediate_multiple),
        interleaved,
    )


def shuffle_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return (R, B) uint8 in AITER's (16, 16) order, same shape; R a multiple of 16, B of 32 bytes."""
    rows, columns = _matrix(weight, TILE_ROWS, TILE_BYTES, "weight")
    tiles = weight.reshape(rows // TILE_ROWS, TILE_ROWS, columns // TILE_BYTES, 2, 16)
    return tiles.permute(0, 2, 3, 1, 4).reshape(rows, columns)


def unshuffle_weight(stored: torch.Tensor) -> torch.Tensor:
    """Invert `shuffle_weight`."""
    rows, columns = _matrix(stored, TILE_ROWS, TILE_BYTES, "weight")
    tiles = stored.reshape(rows // TILE_ROWS, columns // TILE_BYTES, 2, TILE_ROWS, 16)
    return tiles.permute(0, 3, 1, 2, 4).reshape(rows, columns)


def shuffle_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return (R, C) uint8 scales as (R, C rounded up to 8), the added columns 0x7F; R a multiple of 32."""
    height, width = SCALE_TILE
    if scale.dim() == 2 and scale.shape[1] % width:
        scale = _pad(scale, scale.shape[0], round_up(scale.shape[1], width), SCALE_ONE)
    rows, columns = _matrix(scale, height, width, "scale")
    tiles = scale.reshape(rows // height, 2, 16, columns // width, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(rows, columns)


def unshuffle_scale(stored: torch.Tensor, columns: int) -> torch.Tensor:
    """Invert `shuffle_scale`: (R, columns), without the columns that were added."""
    height, width = SCALE_TILE
    rows, padded = _matrix(stored, height, width, "scale")
    tiles = stored.reshape(rows // height, padded // width, 4, 16, 2, 2)
    return tiles.permute(0, 5, 3, 1, 4, 2).reshape(rows, padded)[:, :columns].contiguous()


def interleave_gate_up(w13_gate_up: torch.Tensor) -> torch.Tensor:
    """Return `[w1; w3]` (2I, C) as 16 gate rows, 16 up rows, 16 gate rows, ...; I a multiple of 16."""
    rows, columns = _matrix(w13_gate_up, 2 * TILE_ROWS, 1, "w13")
    halves = w13_gate_up.reshape(2, rows // (2 * TILE_ROWS), TILE_ROWS, columns)
    return halves.transpose(0, 1).reshape(rows, columns)


def separate_gate_up(w13_interleaved: torch.Tensor) -> torch.Tensor:
    """Invert `interleave_gate_up`."""
    rows, columns = _matrix(w13_interleaved, 2 * TILE_ROWS, 1, "w13")
    blocks = w13_interleaved.reshape(rows // (2 * TILE_ROWS), 2, TILE_ROWS, columns)
    return blocks.transpose(0, 1).reshape(rows, columns)


def to_aiter(expert: Expert, layout: AiterLayout) -> dict[str, torch.Tensor]:
    """Convert one canonical MXFP4 expert; keys and shapes as in `layout.shapes()`, all uint8.

    Raises ValueError when a scale is missing or a size does not fit `layout`.
    """
    if expert.w13_scale is None or expert.w2_scale is None:
        raise ValueError("AITER's MXFP4 layout needs w13_scale and w2_scale; this expert has none")
    inter, hidden = layout.intermediate_padded, layout.hidden_padded
    w13 = _pad_gate_up(expert.w13, layout, hidden // 2, 0)
    s13 = _pad_gate_up(_bytes(expert.w13_scale), layout, hidden // 32, SCALE_ONE)
    if layout.interleaved:
        w13, s13 = interleave_gate_up(w13), interleave_gate_up(s13)
    return {
        "w13": shuffle_weight(w13),
        "w2": shuffle_weight(_pad(expert.w2, hidden, inter // 2, 0)),
        "w13_scale": shuffle_scale(s13),
        "w2_scale": shuffle_scale(_pad(_bytes(expert.w2_scale), hidden, inter // 32, SCALE_ONE)),
    }


def from_aiter(stored: dict[str, torch.Tensor], layout: AiterLayout) -> Expert:
    """Invert `to_aiter`: the canonical expert without any padding."""
    hidden, inter, padded = layout.hidden, layout.intermediate, layout.intermediate_padded
    w13, s13 = unshuffle_weight(stored["w13"]), unshuffle_scale(stored["w13_scale"], hidden // 32)
    if layout.interleaved:
        w13, s13 = separate_gate_up(w13), separate_gate_up(s13)

    def unpad(matrix: torch.Tensor, columns: int) -> torch.Tensor:
        halves = matrix.reshape(2, padded, -1)[:, :inter, :columns]
        return halves.reshape(2 * inter, columns)

    return Expert(
        w13=unpad(w13, hidden // 2),
        w2=unshuffle_weight(stored["w2"])[:hidden, : inter // 2].contiguous(),
        w13_scale=unpad(s13, hidden // 32),
        w2_scale=unshuffle_scale(stored["w2_scale"], inter // 32)[:hidden].contiguous(),
    )


def _pad_gate_up(w13_gate_up: torch.Tensor, layout: AiterLayout, columns: int, fill: int) -> torch.Tensor:
    """Pad gate and up each to I padded; padding the two as one block would move the up rows."""
    if w13_gate_up.dim() != 2 or w13_gate_up.shape[0] != 2 * layout.intermediate:
        raise ValueError(
            f"w13 has shape {tuple(w13_gate_up.shape)}, expected {2 * layout.intermediate} rows of [w1; w3]"
        )
    gate, up = w13_gate_up.chunk(2)
    rows = layout.intermediate_padded
    return torch.cat((_pad(gate, rows, columns, fill), _pad(up, rows, columns, fill)))


def _pad(matrix: torch.Tensor, rows: int, columns: int, fill: int) -> torch.Tensor:
    if matrix.dtype != torch.uint8:
        raise TypeError(f"packed MXFP4 tensors are uint8, got {matrix.dtype}")
    if matrix.dim() != 2 or matrix.shape[0] > rows or matrix.shape[1] > columns:
        raise ValueError(f"shape {tuple(matrix.shape)} does not fit into ({rows}, {columns})")
    if tuple(matrix.shape) == (rows, columns):
        return matrix
    out = matrix.new_full((rows, columns), fill)
    out[: matrix.shape[0], : matrix.shape[1]] = matrix
    return out


def _bytes(scale: torch.Tensor) -> torch.Tensor:
    """Reinterpret float8_e8m0fnu scales; a value cast would round them."""
    return scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)


def _matrix(tensor: torch.Tensor, rows: int, columns: int, name: str) -> tuple[int, int]:
    if tensor.dim() != 2 or tensor.shape[0] % rows or tensor.shape[1] % columns:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; needs rows in multiples of {rows} and columns of {columns}"
        )
    return int(tensor.shape[0]), int(tensor.shape[1])
