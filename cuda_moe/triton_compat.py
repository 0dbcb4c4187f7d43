"""Compile a Triton kernel ahead of its launch and launch it with little host work, on Triton 3.3 and later.

A binary is compiled for an explicit signature, so the alignment or value of an argument never triggers another one,
and the same call compiles for a GPU that is not there. `launch` passes addresses as integers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Bytes of alignment that a pointer type with the suffix ":16" promises.
ALIGNMENT = 16


def interpreting() -> bool:
    """Return whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 when it was imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes"}


@functools.lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    """Return Triton's version as (major, minor)."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def lane_order() -> bool:
    """Return whether weights are best stored in lane order.

    For an operand that was joined from parts, tl.dot's mma.sync form takes 4 consecutive values of K per lane in
    Triton 3.6 and 2 in 3.9; the other order works too, at the price of shuffles.
    """
    return version() < (3, 9)


@dataclass(frozen=True)
class KernelSource:
    """A kernel with everything that decides its machine code.

    fn:         the @triton.jit function
    arguments:  run-time arguments in order, name -> type: "*bf16:16" is a pointer aligned to 16 bytes, "i32" an integer
    constants:  constexpr arguments by name
    num_warps, num_stages, pdl, cooperative:  launch options
    registers:  most registers a thread; 0: as many as the compiler likes
    """

    fn: Any
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int = 3
    pdl: bool = False
    cooperative: bool = False
    registers: int = 0

    @property
    def name(self) -> str:
        """Name of the kernel function."""
        return str(self.fn.__name__)


def compile_kernel(source: KernelSource, capability: int) -> Any:
    """Compile for the CUDA compute capability `capability` (90 = Hopper) and return Triton's compiled kernel.

    Needs no GPU. Raises what Triton raises when the kernel does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict(source.arguments)
    constants = dict(source.constants)
    signature = {name: types[name].partition(":")[0] if name in types else "constexpr" for name in source.fn.arg_names}
    aligned = [name for name, kind in types.items() if kind.endswith(f":{ALIGNMENT}")]
    attrs = {(source.fn.arg_names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in aligned}
    options: dict[str, Any] = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    if source.pdl:
        options["launch_pdl"] = True
    if source.cooperative:
        options["launch_cooperative_grid"] = True
    if source.registers:
        options["maxnreg"] = source.registers
    ast = ASTSource(source.fn, signature, constants, attrs)
    return triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options)


class Launcher:
    """A compiled kernel on the current device, called as launcher(grid, stream, addresses and integers in order)."""

    def __init__(self, source: KernelSource, capability: int) -> None:
        kernel = compile_kernel(source, capability)
        self._run = kernel.run  # loads the binary
        self._function = kernel.function
        self._metadata = kernel.packed_metadata
        names = [name for name, _ in source.arguments]
        if list(source.fn.arg_names[: len(names)]) != names:
            raise ValueError(f"{source.name}: run-time arguments {names} must come first and in order")
        values = dict(source.constants)
        self._tail = tuple(values[name] for name in source.fn.arg_names[len(names) :])

    def __call__(self, grid: tuple[int, int], stream: int, args: tuple[Any, ...]) -> None:
        """Launch on `stream` (the raw CUDA stream)."""
        self._run(grid[0], grid[1], 1, stream, self._function, self._metadata, None, None, None, *args, *self._tail)


class InterpretedLauncher:
    """The same interface over Triton's interpreter; takes tensors where `Launcher` takes addresses."""

    def __init__(self, source: KernelSource) -> None:
        self._fn = source.fn
        self._constants: Mapping[str, Any] = dict(source.constants)

    def __call__(self, grid: tuple[int, int], stream: int, args: tuple[Any, ...]) -> None:  # noqa: ARG002 - the launchers' common signature
        """Run every program of `grid`, one after the other; `stream` is ignored."""
        self._fn[grid](*args, **self._constants)


def current_stream(device: torch.device) -> int:
    """Return the raw CUDA stream that torch uses on `device` now."""
    import torch

    return int(torch._C._cuda_getCurrentRawStream(device.index))
