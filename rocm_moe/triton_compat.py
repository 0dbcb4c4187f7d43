"""Everything that depends on the Triton version or on whether Triton interprets: intrinsics, compiling, launching.

Serves Triton 3.3 to 3.9. Nothing else in rocm_moe looks at a Triton version.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from packaging.version import Version
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import core

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rocm_moe.variants import Variant

#: Kernels run on the CPU, one program after the other; decided when Triton decorates them, so once per process.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

VERSION = Version(triton.__version__).release[:2]

#: LLVM intrinsics can be called by name from 3.4 on (3.3 spells the builder argument differently).
HAS_INTRINSICS = VERSION >= (3, 4) and not INTERPRETED

#: 3.3 fails to compile, for AMD, a tl.gather of more indices than there are entries.
GATHER_NEEDS_AN_ENTRY_AN_INDEX = VERSION < (3, 4)

_INT32 = core.dtype("int32")


@core.extern  # type: ignore[untyped-decorator]
def amd_perm(high: Any, low: Any, selector: Any, _semantic: Any = None) -> Any:
    """Return v_perm_b32: byte i of the result is the byte that byte i of `selector` names.

    Selector bytes: 0 to 3 take a byte of `low`, 4 to 7 one of `high`, 12 gives 0x00.
    The symbol's name is an LLVM intrinsic, so LLVM schedules it like any instruction.
    """
    symbol = {(_INT32, _INT32, _INT32): ("llvm.amdgcn.perm", _INT32)}
    return core.extern_elementwise("", "", [high, low, selector], symbol, is_pure=True, _semantic=_semantic)


@core.extern  # type: ignore[untyped-decorator]
def funnel_shift_right(high: Any, low: Any, count: Any, _semantic: Any = None) -> Any:
    """Return bits count … count+31 of high:low (v_alignbit_b32); high = low = w rotates w right."""
    symbol = {(_INT32, _INT32, _INT32): ("llvm.fshr.i32", _INT32)}
    return core.extern_elementwise("", "", [high, low, count], symbol, is_pure=True, _semantic=_semantic)


@core.extern  # type: ignore[untyped-decorator]
def amd_reciprocal(x: Any, _semantic: Any = None) -> Any:
    """Return v_rcp_f32: 1/x to 1 ulp; a full division costs ten instructions."""
    symbol = {(core.dtype("fp32"),): ("llvm.amdgcn.rcp.f32", core.dtype("fp32"))}
    return core.extern_elementwise("", "", [x], symbol, is_pure=True, _semantic=_semantic)


@core.extern  # type: ignore[untyped-decorator]
def amd_exp2(x: Any, _semantic: Any = None) -> Any:
    """Return v_exp_f32: 2^x to 1 ulp, subnormal results flushed to zero."""
    symbol = {(core.dtype("fp32"),): ("llvm.amdgcn.exp2.f32", core.dtype("fp32"))}
    return core.extern_elementwise("", "", [x], symbol, is_pure=True, _semantic=_semantic)


def gpu_target(arch: str) -> GPUTarget:
    """Return Triton's target of "gfx90a" or "sm_90"."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def compile_variant(variant: Variant, arch: str) -> Any:
    """Return Triton's compiled kernel for `arch`, from its cache if it is there. Needs no GPU and no driver.

    Integers are not specialised, so one binary serves every number of tokens.
    """
    signature, constexprs, attrs = dict(variant.signature), dict(variant.constexprs), dict(variant.attrs)
    source = ASTSource(variant.fn, signature=signature, constexprs=constexprs, attrs=attrs)
    # Contraction is part of the numbers; Triton changes its default in 3.10.
    options = {"enable_fp_fusion": True, **variant.options}
    return triton.compile(source, target=gpu_target(arch), options=options)


class Binary:
    """A kernel loaded on the current device, launched without Triton's argument inspection.

    Triton's own call costs more than 10 µs a launch on the host; types and alignment are settled when the binary is
    made, so its launcher can be called at once. Pointers are passed as integers.
    """

    def __init__(self, variant: Variant, arch: str) -> None:
        compiled = compile_variant(variant, arch)
        launcher = compiled.run  # loads the module: not possible while a stream captures
        function, metadata = compiled.function, compiled.packed_metadata
        # Constants have no parameter in the binary, but launchers take a value for each parameter of the source.
        self._constants = tuple(variant.constexprs.values())
        self._launch = launcher
        self._after_stream: tuple[Any, ...] = (function, metadata, None, None, None)
        if VERSION in _BARE_LAUNCHERS and _needs_no_scratch(launcher):
            # What the launcher's Python part would pass on, settled once: saves about 2 µs of 8.
            flags = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
            self._launch = launcher.launch
            self._after_stream = (function, *flags, metadata, None, None, None)

    def arguments(self, values: Iterable[int]) -> list[Any]:
        """Return the arguments for `launch`: the kernel's in order, then its constants."""
        return [*values, *self._constants]

    def launch(self, grid: tuple[int, int], stream: int, arguments: list[Any]) -> None:
        """Enqueue the kernel on the raw stream handle."""
        self._launch(grid[0], grid[1], 1, stream, *self._after_stream, *arguments)


#: Versions whose compiled CUDA launcher takes (grid, stream, function, cooperative, PDL, two scratches, metadata, …).
_BARE_LAUNCHERS = frozenset({(3, 5), (3, 6)})


def _needs_no_scratch(launcher: Any) -> bool:
    names = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    return all(hasattr(launcher, name) for name in names) and not (
        launcher.global_scratch_size or launcher.profile_scratch_size
    )


def current_stream(device_index: int) -> int:
    """Return the raw handle of torch's current stream on a device, as Triton's own launches do."""
    driver: Any = triton.runtime.driver.active  # its declared base class lacks the method
    return int(driver.get_current_stream(device_index))


def interpret(variant: Variant, grid: tuple[int, int], arguments: Iterable[Any]) -> None:
    """Run the kernel on the CPU, program after program, on tensors."""
    variant.fn[grid](*arguments, **variant.constexprs)


def cache_folder() -> Path:
    """Return the folder in which Triton keeps binaries."""
    configured = os.environ.get("TRITON_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".triton" / "cache"
