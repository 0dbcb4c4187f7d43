"""Weights in FlashInfer's orders, and the way back: pure torch, one expert at a time.

Three kernels, three orders; up rows come before gate rows in all of them, gate, up, H and I are padded first.

cutedsl  w13 rows: 64 up, 64 gate, 64 up, … (16 with swap_ab); scales in 128x4 tiles, seen as (32, 4, R/128, 4, C/4, E)
trtllm   w13 rows: up 0, gate 0, up 1, …; then, in w2 too, row 4i + j of 32 goes to row 8j + i; scales in 128x4 tiles
cutlass  w13 rows: all up, all gate; scales folded to (R/64, C/4, 16, 16); the nibbles take a pass on the device

A 128x4 tile: element (r, c) of its 128 rows and 4 columns lies at (r % 32)·16 + (r // 32)·4 + c.

Sources: FlashInfer 0.7.4, cute_dsl/utils.py (convert_sf_to_mma_layout), fused_moe/prepare.py, utils.py
(get_shuffle_matrix_a_row_indices); compared with those functions in tests/flashinfer/contract.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from portamoe.layouts import LaidOut, Layout, arrange, pad_expert, round_up, unpad_expert
from portamoe.weights import Expert

if TYPE_CHECKING:
    from cuda_moe.flashinfer.support import Mode

Kind = Literal["cutedsl", "trtllm", "cutlass"]

TILE_ROWS, TILE_COLUMNS = 128, 4
#: Rows that trtllm-gen's epilogue shuffles among themselves, at its epilogue tile of 128.
SHUFFLE_ROWS = 32
#: Rows and K of a folded block of the SM90 kernel's scales.
FOLD_ROWS, FOLD_K = 64, 128


@dataclass(frozen=True)
class FlashInferLayout:
    """Order and padded sizes of one rank's experts.

    kind:                                whose order
    rows:                                order of w13's rows before any shuffle
    block:                               weights that share a scale
    hidden, intermediate:                H and I of the spec
    hidden_padded, intermediate_padded:  what the kernels see
    """

    kind: Kind
    rows: Layout
    block: int
    hidden: int
    intermediate: int
    hidden_padded: int
    intermediate_padded: int

    @property
    def hidden_pad(self) -> int:
        """Columns of x that are padding."""
        return self.hidden_padded - self.hidden

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the stored shape of each of one expert's tensors, all uint8."""
        rows, hidden, inter = 2 * self.intermediate_padded, self.hidden_padded, self.intermediate_padded
        return {
            "w13": (rows, hidden // 2),
            "w2": (hidden, inter // 2),
            "w13_scale": self._scale_shape(rows, hidden // self.block),
            "w2_scale": self._scale_shape(hidden, inter // self.block),
        }

    def _scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if self.kind == "cutlass":
            return (rows // FOLD_ROWS, columns // 4, 16, 16)
        return (rows, columns)


def layout_for(mode: Mode, hidden: int, intermediate: int) -> FlashInferLayout:
    """Return the layout of `mode` for H and I, padded to its multiples."""
    kind: Kind = {"flashinfer_cutedsl": "cutedsl", "flashinfer_trtllm": "trtllm"}.get(mode.backend, "cutlass")  # type: ignore[assignment]
    return FlashInferLayout(
        kind,
        Layout("up", mode.group or None),
        mode.block,
        hidden,
        intermediate,
        round_up(hidden, mode.hidden_multiple),
        round_up(intermediate, mode.intermediate_multiple),
    )


def to_kernel(expert: Expert, layout: FlashInferLayout) -> dict[str, torch.Tensor]:
    """Convert one canonical expert; keys and shapes as in `layout.shapes()`, all uint8.

    Global and input scales are none of the layout's business; w13_scale has to be what one global scale multiplies.

    Raises ValueError when a scale is missing or a size does not fit `layout`.
    """
    if expert.w13_scale is None or expert.w2_scale is None:
        raise ValueError(f"the {layout.kind} layout needs w13_scale and w2_scale; this expert has none")
    if (found := (expert.w2.shape[0], expert.w13.shape[0] // 2)) != (layout.hidden, layout.intermediate):
        raise ValueError(f"the expert has (H, I) = {found}, the layout is for {(layout.hidden, layout.intermediate)}")
    padded = pad_expert(expert, layout.intermediate_padded, layout.hidden_padded)
    moved = arrange(padded, layout.rows).weights
    matrices = {"w13": moved.w13, "w2": moved.w2}
    scales = {"w13_scale": _bytes(moved.w13_scale), "w2_scale": _bytes(moved.w2_scale)}
    if layout.kind == "trtllm":
        matrices = {name: shuffle_rows(matrix) for name, matrix in matrices.items()}
        scales = {name: shuffle_rows(scale) for name, scale in scales.items()}
    change = fold_scale if layout.kind == "cutlass" else swizzle_scale
    return {name: matrix.contiguous() for name, matrix in matrices.items()} | {
        name: change(scale) for name, scale in scales.items()
    }


def from_kernel(stored: dict[str, torch.Tensor], layout: FlashInferLayout) -> Expert:
    """Invert `to_kernel`: weights and block scales of the canonical expert, without any padding."""
    columns = {
        "w13_scale": layout.hidden_padded // layout.block,
        "w2_scale": layout.intermediate_padded // layout.block,
    }
    back = unfold_scale if layout.kind == "cutlass" else unswizzle_scale
    tensors = dict(stored) | {name: back(stored[name], count) for name, count in columns.items()}
    if layout.kind == "trtllm":
        tensors = {name: unshuffle_rows(tensor) for name, tensor in tensors.items()}
    dtype = torch.float8_e4m3fn if layout.block == 16 else torch.uint8
    moved = Expert(
        w13=tensors["w13"],
        w2=tensors["w2"],
        w13_scale=tensors["w13_scale"].view(dtype),
        w2_scale=tensors["w2_scale"].view(dtype),
    )
    return unpad_expert(LaidOut(moved, layout.rows).canonical(), layout.intermediate, layout.hidden)


def swizzle_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return (R, C) uint8 in 128x4 tiles, same shape; R a multiple of 128, C of 4."""
    rows, columns = _matrix(scale, TILE_ROWS, TILE_COLUMNS)
    tiles = scale.reshape(rows // TILE_ROWS, 4, 32, columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def unswizzle_scale(stored: torch.Tensor, columns: int) -> torch.Tensor:
    """Invert `swizzle_scale`."""
    rows = stored.numel() // columns
    tiles = stored.reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def mma_view(stored: torch.Tensor) -> torch.Tensor:
    """Return swizzled scales (E, R, C) as CuteDSL's strided view (32, 4, R/128, 4, C/4, E)."""
    experts, rows, columns = stored.shape
    tiles = stored.view(experts, rows // TILE_ROWS, columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    return tiles.permute(3, 4, 1, 5, 2, 0)


def shuffle_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return (R, C) with row 4i + j of every 32 moved to row 8j + i; R a multiple of 32."""
    rows, columns = _matrix(matrix, SHUFFLE_ROWS, 1)
    return matrix.reshape(rows // SHUFFLE_ROWS, 8, 4, columns).transpose(1, 2).reshape(rows, columns)


def unshuffle_rows(stored: torch.Tensor) -> torch.Tensor:
    """Invert `shuffle_rows`."""
    rows, columns = _matrix(stored, SHUFFLE_ROWS, 1)
    return stored.reshape(rows // SHUFFLE_ROWS, 4, 8, columns).transpose(1, 2).reshape(rows, columns)


def fold_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return (R, C) uint8 as (R/64, C/4, 16, 16): of 64 rows and 4 columns, (16s + f, c) lies at (f, 4s + c)."""
    rows, columns = _matrix(scale, FOLD_ROWS, 4)
    blocks = scale.reshape(rows // FOLD_ROWS, 4, 16, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(rows // FOLD_ROWS, columns // 4, 16, 16)


def unfold_scale(stored: torch.Tensor, columns: int) -> torch.Tensor:
    """Invert `fold_scale`."""
    rows = stored.numel() // columns
    blocks = stored.reshape(rows // FOLD_ROWS, columns // 4, 16, 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(rows, columns)


def without_global_scales(expert: Expert, w13_scale: torch.Tensor) -> Expert:
    """Return the expert with w13's block scales replaced and nothing beside weights and block scales."""
    return replace(
        expert,
        w13_scale=w13_scale,
        w13_global_scale=None,
        w2_global_scale=None,
        w13_input_scale=None,
        w2_input_scale=None,
    )


def _bytes(scale: torch.Tensor | None) -> torch.Tensor:
    """Reinterpret one-byte scales; a value cast would round them."""
    assert scale is not None  # noqa: S101 - checked by the caller
    return scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)


def _matrix(tensor: torch.Tensor, rows: int, columns: int) -> tuple[int, int]:
    if tensor.dim() != 2 or tensor.shape[0] % rows or tensor.shape[1] % columns:
        raise ValueError(
            f"shape {tuple(tensor.shape)} does not fit: rows come in multiples of {rows}, columns of {columns}"
        )
    return int(tensor.shape[0]), int(tensor.shape[1])
