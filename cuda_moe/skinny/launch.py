"""Compile and launch the Triton kernels of the plans, y = x @ W.T (+ residual) in one launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cuda_moe.skinny.parameters import TritonFragments, TritonGemv, TritonTile, padded, token_columns
from cuda_moe.triton_compat import KernelSource, Launcher, current_stream, version

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_BF16 = "*bf16:16"


@dataclass(frozen=True)
class Variant:
    """What the machine code depends on beside the tile.

    m:  rows of x, exact for the CUDA cores, 8 or 16 for the tensor cores
    even:  no load needs a mask
    lines:  with pdl, lines of 128 bytes of each weight row that are fetched before the wait
    """

    m: int
    even: bool
    residual: bool
    pdl: bool
    lines: int = 8


def variant(tile: TritonTile, n: int, k: int, m: int, residual: bool, pdl: bool) -> Variant:
    """Return the variant that computes (M, N, K) with `tile`; raises ValueError where none does."""
    tile.check(n, k, m)
    if isinstance(tile, TritonGemv):
        rows = m
    else:
        rows = tile.tokens(m) if isinstance(tile, TritonFragments) else token_columns(m)
    return Variant(rows, tile.even(n, k), residual, pdl)


def source(tile: TritonTile, v: Variant, *, widen: bool = False) -> KernelSource:
    """Return the kernel to compile; `widen` multiplies in float32, for Triton's interpreter."""
    from cuda_moe.skinny import _triton_kernels as kernels

    pointers = tuple((name, _BF16) for name in ("x", "w", "y", "residual"))
    sizes = (("N", "i32"), ("K", "i32:16"))
    common = (("EVEN", v.even), ("RESIDUAL", v.residual), ("PDL", v.pdl), ("LINES", v.lines))
    constants: tuple[tuple[str, Any], ...]
    if isinstance(tile, TritonGemv):
        constants = (("M", v.m), ("MP", padded(v.m)), ("ROWS", tile.rows), ("THREADS", tile.threads))
        constants += (("UNROLL", tile.unroll), *common)
        arguments: tuple[tuple[str, str], ...] = pointers + sizes
        return KernelSource(
            kernels.gemv_kernel, arguments, constants, tile.warps, 1, v.pdl, registers=_registers(tile.warps)
        )
    if isinstance(tile, TritonFragments):
        arguments = (*pointers, *sizes, ("M", "i32"))
        constants = (("TOKENS", v.m), ("ROWS", tile.rows), ("WARPS", tile.warps), ("CHUNKS", tile.chunks))
        constants += (("AHEAD", tile.ahead), *common, ("WIDEN", widen), ("ASCENDING", version() < (3, 9)))
        return KernelSource(
            kernels.fragment_kernel, arguments, constants, tile.warps, 1, v.pdl, registers=_registers(tile.warps)
        )
    arguments = (*pointers, ("partials", "*fp32:16"), ("counters", "*i32:16"), *sizes, ("M", "i32"))
    constants = (("MP", v.m), ("ROWS", tile.rows), ("GROUPS", tile.groups), ("BK", tile.depth))
    constants += (("STAGES", tile.stages), ("SPLIT", tile.split), *common, ("WIDEN", widen))
    return KernelSource(kernels.mma_kernel, arguments, constants, tile.groups, tile.stages, v.pdl)


def _registers(warps: int) -> int:
    """Return a bound on a thread's registers: without one ptxas saves them and sends fewer loads at a time."""
    return 168 if warps <= 8 else 112


@functools.lru_cache(maxsize=4096)
def _launcher(tile: TritonTile, v: Variant, device: int, capability: int) -> Launcher:  # noqa: ARG001 - a binary is loaded on one device
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{tile} is not compiled yet, and a capture is no time to compile: call the layer once, with as many rows, "
            "before the capture"
        )
    return Launcher(source(tile, v), capability)


@dataclass
class Counters:
    """Arrival counters of the tiles whose K is split, one block for each weight; zero between launches.

    Keyed by the weight's address: two launches that share a block must not run at the same time, and products of one
    weight do not, unless two streams use the same layer at once.
    """

    blocks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def of(self, weight: torch.Tensor, tiles: int) -> torch.Tensor:
        """Return the block of `weight`, `tiles` int32; made at the first call, which must not be in a capture."""
        import torch

        key = (weight.data_ptr(), tiles)
        block = self.blocks.get(key)
        if block is None or block.device != weight.device:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the first product of a weight whose K is split cannot be captured: its counters must be zeroed "
                    "outside; call the layer once before the capture"
                )
            block = self.blocks[key] = torch.zeros(tiles, dtype=torch.int32, device=weight.device)
            torch.cuda.current_stream(weight.device).synchronize()  # other streams may use them next
        return block


COUNTERS = Counters()


def bind(tile: TritonTile, n: int, k: int, m: int, device: torch.device) -> Callable[..., None]:
    """Return call(x, weight, out, residual=None, *, pdl=False) for this (M, N, K) on `device`.

    x (M, K), weight (N, K), out and residual (M, N): bf16, contiguous, 16-byte aligned; the caller has checked that.
    Nothing is compiled before the first call. Raises ValueError where the tile does not fit.
    """
    import torch

    tile.check(n, k, m)
    index = torch.cuda.current_device() if device.index is None else device.index
    major, minor = torch.cuda.get_device_capability(index)
    device, capability, grid = torch.device("cuda", index), 10 * major + minor, tile.grid(n)

    runs: dict[tuple[bool, bool], Launcher] = {}

    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        pdl: bool = False,
    ) -> None:
        run = runs.get((residual is None, pdl))
        if run is None:
            run = _launcher(tile, variant(tile, n, k, m, residual is not None, pdl), index, capability)
            runs[residual is None, pdl] = run
        added = out if residual is None else residual
        pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), added.data_ptr())
        if isinstance(tile, TritonGemv):
            run(grid, current_stream(device), (*pointers, n, k))
            return
        if isinstance(tile, TritonFragments):
            run(grid, current_stream(device), (*pointers, n, k, m))
            return
        state: tuple[Any, Any] = (out.data_ptr(), out.data_ptr())
        if tile.split > 1:
            counters = COUNTERS.of(weight, tile.tiles(n))
            size = tile.split * tile.tiles(n) * tile.rows * token_columns(m)
            partials = torch.empty(size, dtype=torch.float32, device=device)
            state = (partials.data_ptr(), counters.data_ptr())
        run(grid, current_stream(device), (*pointers, *state, n, k, m))

    return call
