"""The implementations that a plan may name: whether they can run here, and how one is bound to a shape."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cuda_moe.skinny import cute_parameters
from cuda_moe.skinny.parameters import TritonTile
from cuda_moe.skinny.plan import Choice
from portamoe.checks import distribution_reason, triton_reason
from portamoe.decision import Reason

if TYPE_CHECKING:
    import torch

    from portamoe.device import Device

#: call(x, weight, out, residual=None, *, pdl=False) -> None
Call = Callable[..., Any]

#: `tl.range(num_stages=)` over loads of three dimensions and the instructions of programmatic dependent launch.
LEAST_TRITON = "3.5"
CUTE_LAUNCH = "cuda_moe.skinny.cute_launch"


def reason(kernel: str, device: Device) -> Reason | None:
    """Return why the kernel of that name cannot run on `device`, None if it can; imports nothing heavy."""
    if device.vendor != "nvidia":
        return Reason("device", device.arch, "an NVIDIA GPU")
    if kernel.startswith("triton_"):
        return triton_reason(device.host, LEAST_TRITON)
    if kernel in cute_parameters.VARIANTS:
        return _cute_reason(device)
    return Reason("kernel", kernel, "triton_gemv, triton_mma, triton_fragments, " + ", ".join(cute_parameters.VARIANTS))


def _cute_reason(device: Device) -> Reason | None:
    cute = import_module(CUTE_LAUNCH)
    if device.host.recorded is None:
        live: Reason | None = cute.available()
        return live
    return distribution_reason(device.host, ("nvidia-cutlass-dsl",), cute.LEAST_VERSION, cute.INSTALL)


def bind(choice: Choice, n: int, k: int, m: int, device: torch.device) -> Call:
    """Return call(x, weight, out, residual=None, *, pdl=False) of the choice for (M, N, K); compiles nothing yet."""
    if isinstance(choice.parameters, TritonTile):
        from cuda_moe.skinny import launch

        return launch.bind(choice.parameters, n, k, m, device)
    import torch

    choice.parameters.check(n, k, m)
    cute = import_module(CUTE_LAUNCH)
    parameters = vars(choice.parameters)
    entry = {"kernel": choice.kernel, "n": n, "k": k, "m": m, "parameters": parameters, "pdl": True}

    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        pdl: bool = False,
    ) -> None:
        if pdl and not torch.cuda.is_current_stream_capturing():
            # Outside a capture nothing is launched dependent; it is where the capture's kernel gets compiled.
            cute.warm_up([{**entry, "residual": residual is not None}], device)
            pdl = False
        cute.launch(choice.kernel, x, weight, out, residual, pdl=pdl, **parameters)

    return call
