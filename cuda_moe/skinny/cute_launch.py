"""Launch the CuteDSL kernels `cute_gemv` and `cute_mma`, y = x @ W.T (+ residual) in one launch; say why they cannot.

CuteDSL is optional and imported by the first launch or `warm_up`, never by importing this module.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from cuda_moe.skinny.cute_parameters import GemvParameters, MmaParameters, Parameters, parse, token_tiles
from portamoe.decision import Reason

if TYPE_CHECKING:
    import torch

#: First version whose `inline_ptx` and compile options are the ones used here.
LEAST_VERSION = "4.8"
INSTALL = "pip install 'portamoe[cute]'"
#: Bytes that x, the weight and the output must be aligned to: the kernels load 16 at a time.
ALIGNMENT = 16


class CuteUnavailable(RuntimeError):
    """CuteDSL cannot be used here; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"CuteDSL kernels cannot run: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class _Key:
    """What a compiled kernel depends on; any N and any M of its bucket run on it."""

    variant: str
    k: int
    bucket: int
    residual: bool
    pdl: bool
    parameters: Parameters
    #: Does N divide by the rows of a tile? Without that, every row of a tile is asked whether it exists.
    even: bool = True


@functools.cache
def available() -> Reason | None:
    """Return why CuteDSL cannot be used in this environment, or None; reads package metadata, imports nothing.

    Devices are not asked about: the kernels need compute capability 9.0 or later, which `launch` checks.
    """
    name = "nvidia-cutlass-dsl"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Reason(name, "not installed", f">= {LEAST_VERSION}", INSTALL)
    if Version(version) < Version(LEAST_VERSION):
        return Reason(name, version, f">= {LEAST_VERSION}", INSTALL)
    if importlib.util.find_spec("cutlass") is None:
        return Reason(name, f"{version}, but no module cutlass", None, "reinstall it: its .pth file adds the path")
    return None


def launch(
    variant: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    pdl: bool = False,
    **parameters: Any,
) -> torch.Tensor:
    """Compute out = x @ weight.T (+ residual) in one launch on the current stream; deterministic; returns `out`.

    variant:   "cute_gemv" (CUDA cores) or "cute_mma" (tensor cores)
    x:         (M, K) bf16, M <= 16 — activations
    weight:    (N, K) bf16 — not written by the kernel before this one, see `pdl`
    out:       (M, N) bf16 — may be `residual`, not x
    residual:  (M, N) bf16 or None — added in float32 before the one rounding
    pdl:       programmatic dependent launch: the kernel begins, and fetches weights, while the kernel before it still
               runs, and reads x and residual once that has ended. Only within a capture and directly behind a kernel
               of the same stream; anything else raises.
    parameters: fields of `GemvParameters` or `MmaParameters`

    All tensors are contiguous and aligned to 16 bytes. Raises TypeError or ValueError for tensors or parameters that
    the kernel does not take, CuteUnavailable where CuteDSL is missing, and RuntimeError where the kernel would have
    to be compiled during a capture.
    """
    import torch

    p = parse(variant, parameters)
    m, n, k = _check(variant, p, x, weight, out, residual)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    if pdl:
        _check_producer(stream)
    run = _compiled(_key(variant, p, m, n, k, residual is not None, pdl), x.device.index)
    run(x, weight, residual, out, m, n, stream)
    return out


def warm_up(entries: Iterable[Mapping[str, Any]], device: torch.device | str = "cuda") -> None:
    """Compile and load the kernels of plan entries, so that launches in a capture find them.

    entries: mappings with kernel, n, k, m, parameters and, where they are not False, residual and pdl; entries of other
             kernels are passed over
    device:  where they will run
    """
    import torch

    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    for entry in entries:
        variant, m = entry["kernel"], entry["m"]
        if not variant.startswith("cute_"):
            continue
        p = parse(variant, dict(entry["parameters"]))
        n, k = entry["n"], entry["k"]
        p.check(n, k, m)
        _compiled(_key(variant, p, m, n, k, bool(entry.get("residual")), bool(entry.get("pdl"))), index)


def build(
    variant: str,
    k: int,
    m: int,
    arch: str,
    *,
    n: int | None = None,
    residual: bool = False,
    pdl: bool = False,
    **parameters: Any,
) -> Any:
    """Compile one kernel for an arch as CuteDSL names it ("sm_90a"); needs no GPU. Returns CuteDSL's compiled function.

    Its `__ptx__` and `__cubin__` hold the code where CUTE_DSL_KEEP_PTX and CUTE_DSL_KEEP_CUBIN are set.
    """
    p = parse(variant, parameters)
    p.check(n or 1, k, m)
    return _build(_key(variant, p, m, n or 0, k, residual, pdl), arch)


def _key(variant: str, p: Parameters, m: int, n: int, k: int, residual: bool, pdl: bool) -> _Key:
    if isinstance(p, GemvParameters):
        return _Key(variant, k, m, residual, pdl, p)
    return _Key(variant, k, token_tiles(m), residual, pdl, p, n % p.rows == 0)


def _build(key: _Key, arch: str) -> Any:
    reason = available()
    if reason:
        raise CuteUnavailable(reason)
    try:
        cutlass, runtime = import_module("cutlass"), import_module("cutlass.cute.runtime")
    except Exception as error:
        raise CuteUnavailable(Reason("import cutlass", f"{type(error).__name__}: {error}", None, INSTALL)) from error
    options = {"residual": key.residual, "pdl": key.pdl}
    if isinstance(key.parameters, MmaParameters):
        device_code = import_module("cuda_moe.skinny._cute_mma_kernels")
        kernel = device_code.MmaKernel(key.k, key.parameters, token_tiles=key.bucket, even=key.even, **options)
    else:
        device_code = import_module("cuda_moe.skinny._cute_gemv_kernels")
        kernel = device_code.GemvKernel(key.k, key.parameters, m=key.bucket, **options)
    addresses, sizes = [cutlass.Int64(0)] * 4, [cutlass.Int32(1)] * 3
    stream = runtime.make_fake_stream()
    return cutlass.cute.compile(kernel, *addresses, *sizes, stream, options=f"--gpu-arch {arch}")


@functools.cache
def _compiled(key: _Key, device: int) -> Callable[..., None]:
    """Compile and load a kernel and run it once, so that nothing is left to be loaded when a capture launches it."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{key.variant} for K={key.k} is not compiled yet, and a capture is no time to compile: call "
            "cuda_moe.skinny.cute_launch.warm_up with the plan's entries, or run the layer once, before the capture"
        )
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip or properties.major < 9:
        raise CuteUnavailable(Reason("device", properties.name, "an NVIDIA GPU of compute capability >= 9.0"))
    with torch.cuda.device(device):
        function = _build(key, f"sm_{properties.major}{properties.minor}a").to()
        call = _Call(function, import_module("cuda.bindings.driver").CUstream)

        def run(
            x: torch.Tensor,
            weight: torch.Tensor,
            residual: torch.Tensor | None,
            out: torch.Tensor,
            m: int,
            n: int,
            stream: int,
        ) -> None:
            grid = key.parameters.grid(n, properties.multi_processor_count)
            added = 0 if residual is None else residual.data_ptr()
            call(x.data_ptr(), weight.data_ptr(), added, out.data_ptr(), m, n, grid, stream)

        m, n = (key.bucket, 1) if isinstance(key.parameters, GemvParameters) else (1, key.parameters.rows)
        x, weight, added = (
            torch.ones(a, b, dtype=torch.bfloat16, device="cuda") for a, b in ((m, key.k), (n, key.k), (m, n))
        )
        results = [torch.full_like(added, torch.nan) for _ in range(2)]
        for y in results:  # first by CuteDSL's own way, then by ours
            run(x, weight, added if key.residual else None, y, m, n, torch.cuda.current_stream().cuda_stream)
        torch.cuda.current_stream().synchronize()
        if not torch.equal(*results):
            call.converts_anew = True
    return run


class _Call:
    """A loaded kernel's host function, called with four addresses, three sizes and a stream.

    CuteDSL converts Python arguments anew in each call, which takes longer (about 90 µs) than the kernels. The host
    function itself wants pointers to C values; those are made once a thread here and filled in each call.

    converts_anew:  set where that does not give the same result, as another version's function may want other values
    """

    SIGNATURE = (*[ctypes.c_int64] * 4, *[ctypes.c_int32] * 3, ctypes.c_void_p)

    def __init__(self, function: Any, stream_type: Any) -> None:
        self._function, self._stream_type = function, stream_type
        self._threads = threading.local()
        self.converts_anew = False

    def __call__(self, *arguments: int) -> None:
        """Launch; raises what CuteDSL raises for a launch that CUDA refuses."""
        values = getattr(self._threads, "values", None)
        if values is None or self.converts_anew:
            values = self._threads.values = [kind() for kind in self.SIGNATURE]
            self._threads.pointers = [ctypes.c_void_p(ctypes.addressof(value)) for value in values]
            # Once by CuteDSL's own way: a version that wants other arguments says so here.
            self._function(*arguments[:-1], self._stream_type(arguments[-1]))
            return
        for value, argument in zip(values, arguments, strict=True):
            value.value = argument
        self._function.run_compiled_program(self._threads.pointers)


def _check(
    variant: str,
    p: Parameters,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[int, int, int]:
    """Return M, N, K of tensors that the kernel takes; raise for others."""
    import torch

    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{variant}: x {tuple(x.shape)} and weight {tuple(weight.shape)}; needs (M, K) and (N, K)")
    (m, k), n = x.shape, weight.shape[0]
    p.check(n, k, m)
    given = {"x": (x, (m, k)), "weight": (weight, (n, k)), "out": (out, (m, n))}
    if residual is not None:
        given["residual"] = (residual, (m, n))
    for name, (tensor, shape) in given.items():
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{variant}: {name} is {tensor.dtype}; needs torch.bfloat16")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{variant}: {name} is {tuple(tensor.shape)}; needs {shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{variant}: {name} has strides {tensor.stride()}; make it contiguous first")
        if name in {"x", "weight"} and tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"{variant}: {name} is not aligned to {ALIGNMENT} bytes; clone it")
        if tensor.device != x.device:
            raise ValueError(f"{variant}: {name} is on {tensor.device}, x on {x.device}")
    if not x.is_cuda:
        raise ValueError(f"{variant}: tensors are on {x.device}; needs a CUDA device")
    if out.data_ptr() == x.data_ptr():
        raise ValueError(f"{variant}: out is x; the kernel reads x while it writes out")
    return m, n, k


def _check_producer(stream: int) -> None:
    """Raise unless the next launch of this stream's capture depends on exactly one node, a kernel."""
    runtime = import_module("cuda.bindings.runtime")
    info = runtime.cudaStreamGetCaptureInfo(runtime.cudaStream_t(stream))
    if int(info[0]):
        raise RuntimeError(f"cudaStreamGetCaptureInfo: {info[0]}")
    if info[1] != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive:
        raise ValueError("pdl=True outside a capture; programmatic launch is only for kernels within a CUDA graph")
    nodes = list(info[4] or ())
    kinds = [runtime.cudaGraphNodeGetType(node)[1] for node in nodes[:1]]
    if len(nodes) != 1 or kinds != [runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel]:
        raise ValueError(
            f"pdl=True behind {len(nodes)} nodes of the capture, {kinds}; needs exactly one kernel of the same stream: "
            "pass pdl=False to the first launch of a capture, after a fork or join, and behind copies"
        )
