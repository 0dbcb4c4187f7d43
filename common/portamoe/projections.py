"""`linear(x, weight, residual)`: projections of few rows on a vendor package's one-launch kernels, else torch.

At decode a projection has 1 to 16 rows and takes as long as its weights take to read. Whatever no provider has a
winner for is torch's.
"""

from __future__ import annotations

import functools
import math
import os

import torch

from portamoe.detection import detect
from portamoe.linear_provider import TORCH_ONLY, LinearTable, providers

#: Bytes to which a provider's kernels want x, weight, residual and out aligned.
ALIGNMENT = 16


#: Set to "torch", it keeps every projection with torch.
VARIABLE = "PORTAMOE_LINEAR"


@functools.lru_cache(maxsize=4096)
def resolve(n: int, k: int, device: torch.device) -> LinearTable:
    """Return the table of a bf16 weight (N, K) on a device, the first provider's that has one; once per shape.

    Raises ValueError for a PORTAMOE_LINEAR other than "torch".
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in {"", "torch"}:
        raise ValueError(f"{VARIABLE}={wanted!r}; 'torch' keeps projections with torch, unset the plan decides")
    if wanted or device.type != "cuda":
        return TORCH_ONLY
    facts = detect().device(f"cuda:{torch.cuda.current_device() if device.index is None else device.index}")
    for provider in providers(facts):
        table = provider.table(n, k, facts)
        if table is not None:
            return table
    return TORCH_ONLY


class LinearPlan:
    """The projection of one layer, resolved once: `plan(x, residual)` is y = x · weightᵀ (+ residual).

    weight:  (N, K) — kept by reference; one-launch kernels serve it where it is bf16, contiguous and on a GPU
    names:   what serves 1 to 16 rows
    """

    def __init__(self, weight: torch.Tensor) -> None:
        if weight.dim() != 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (N, K)")
        self.weight = weight
        table = resolve(*weight.shape, weight.device) if _eligible(weight) else TORCH_ONLY
        self._table = table
        self.names = table.names

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None, *, pdl: bool = False) -> torch.Tensor:
        """Return y (..., N) in the dtype of x; arguments and errors as those of `linear`."""
        return _apply(x, self.weight, residual, self._table, pdl)


def linear(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, *, pdl: bool = False
) -> torch.Tensor:
    """Return y = x · weightᵀ (+ residual), for 1 to 16 rows of bf16 on a GPU by the plan's one-launch kernel.

    x:         (..., K) — activations; rows that are not contiguous are copied first
    weight:    (N, K) of the same dtype and device; one that is not contiguous goes to torch
    residual:  (..., N) like the result, or None; added in float32 before the one rounding
    pdl:       let the kernel begin while the one before it on this stream still runs. Only within a capture and
               directly behind a kernel of the same stream; it does nothing where torch serves the product

    Returns y (..., N) in the dtype of x. More than 16 rows, other dtypes, tensors that need gradients and shapes
    without a winner go to torch. Raises ValueError for shapes that do not fit and TypeError for mixed dtypes.
    """
    table = resolve(*weight.shape, weight.device) if _eligible(weight) else TORCH_ONLY
    return _apply(x, weight, residual, table, pdl)


def _eligible(weight: torch.Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and weight.is_cuda
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.data_ptr() % ALIGNMENT == 0
    )


def _apply(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    table: LinearTable,
    pdl: bool,
) -> torch.Tensor:
    _check(x, weight, residual)
    n, k = weight.shape
    shape = (*x.shape[:-1], n)
    rows = x.numel() // k if k else 0
    kernel = table.kernel(rows, pdl=pdl)
    if kernel is None or (torch.is_grad_enabled() and _needs_grad(x, weight, residual)):
        return _torch(x, weight, residual, shape)
    x = _plain(x.reshape(rows, k))
    if residual is not None:
        residual = _plain(residual.reshape(rows, n))
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    kernel(x, weight, out, residual, pdl=pdl)
    return out.view(shape)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """Return t with contiguous rows at an aligned address, copied if need be."""
    t = t.contiguous()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


def _torch(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, shape: tuple[int, ...]
) -> torch.Tensor:
    if residual is None:
        return torch.nn.functional.linear(x, weight)
    # addmm adds in the product's float32 accumulator, so there is one rounding here too.
    rows = math.prod(shape[:-1])
    return torch.addmm(residual.reshape(rows, shape[-1]), x.reshape(rows, x.shape[-1]), weight.t()).view(shape)


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit; expected (..., K) and (N, K)"
        )
    if x.dtype != weight.dtype or (residual is not None and residual.dtype != x.dtype):
        added = "" if residual is None else f", residual {residual.dtype}"
        raise TypeError(f"x is {x.dtype}, weight {weight.dtype}{added}; expected one dtype for all")
    if residual is not None and tuple(residual.shape) != (*x.shape[:-1], weight.shape[0]):
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected {(*x.shape[:-1], weight.shape[0])}")
    for name, other in (("weight", weight), ("residual", residual)):
        if other is not None and other.device != x.device:
            raise ValueError(f"x is on {x.device}, {name} on {other.device}; expected one device")
