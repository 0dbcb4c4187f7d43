"""What a layer looks at before a call: tensors that fit it, no gradients to drop, memory that nothing else uses.

Every function returns None or raises ValueError, TypeError or RuntimeError saying what came and what was expected. T
tokens, K experts per token, H hidden size, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from portamoe.spec import MoESpec

if TYPE_CHECKING:
    from portamoe.layer import RoutedExperts
    from portamoe.weights import ExpertSource

#: What x may be where a backend does not say more in `x_dtypes`.
_X_DTYPES = ("bfloat16",)
_IDS = (torch.int32, torch.int64)
#: What a spec must have in common with that of the checkpoint's experts; the rest is the caller's to choose.
_OF_THE_WEIGHTS = ("hidden_size", "intermediate_size", "num_experts", "weight_format", "bias", "local_experts")


def source(spec: MoESpec, weights: ExpertSource) -> None:
    """Compare `spec` with the one that experts of a checkpoint came with: two ranks' experts have the same shapes."""
    theirs = getattr(weights, "spec", None)
    if not isinstance(theirs, MoESpec):
        return
    for name in _OF_THE_WEIGHTS:
        asked, read = getattr(spec, name), getattr(theirs, name)
        if asked != read:
            raise ValueError(
                f"spec.{name} is {asked!r}, the weights were opened with {read!r}; pass the spec that load_experts "
                "returned with them"
            )


def no_gradients(module: str, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors that want a gradient while gradients are recorded: it would be dropped without a word."""
    if not torch.is_grad_enabled():
        return
    for name, value in tensors.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch tensor")
        if value.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, but {module} is for inference and has no backward; call it under "
                "torch.no_grad()"
            )


def inputs(
    layer: RoutedExperts, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> None:
    """Check all that a call reads, and T against the layer's `max_tokens`."""
    tensors(layer, x, topk_ids, topk_weights)
    if x.shape[0] > layer.max_tokens:
        raise ValueError(
            f"x has {x.shape[0]} tokens, the layer was made for max_tokens={layer.max_tokens}; "
            "raise it or split the call"
        )
    no_gradients("RoutedExperts", x=x, topk_weights=topk_weights)


def tensors(layer: RoutedExperts, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None) -> None:
    """Check dtypes, shapes, devices and layout of x (T, H), topk_ids and topk_weights, whatever T is."""
    hidden = layer.spec.hidden_size
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}, expected a torch tensor (T, {hidden})")
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (T, {hidden})")
    tensor(layer, "x", x, _x_dtypes(layer), tuple(x.shape))
    _slots(layer, x.shape[0], topk_ids, topk_weights)


def _x_dtypes(layer: RoutedExperts) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in getattr(layer.backend, "x_dtypes", _X_DTYPES))


def routing(layer: RoutedExperts, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Check topk_ids and topk_weights (T, K), of any T."""
    if not isinstance(topk_ids, torch.Tensor) or topk_ids.dim() != 2:
        found = tuple(topk_ids.shape) if isinstance(topk_ids, torch.Tensor) else type(topk_ids).__name__
        raise ValueError(f"topk_ids is {found}, expected a tensor (T, {layer.spec.top_k})")
    _slots(layer, topk_ids.shape[0], topk_ids, topk_weights)


def _slots(layer: RoutedExperts, tokens: int, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None) -> None:
    shape = (tokens, layer.spec.top_k)
    tensor(layer, "topk_ids", topk_ids, _IDS, shape)
    if topk_weights is not None:
        tensor(layer, "topk_weights", topk_weights, (torch.float32,), shape)


def tensor(
    layer: RoutedExperts, name: str, value: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    """Check one tensor: a dtype of `dtypes`, exactly `shape`, on the layer's device, contiguous."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a torch tensor {shape}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} is {value.dtype}, {layer.backend.name} takes {' or '.join(map(str, dtypes))}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {shape}")
    if value.device != layer.device:
        raise ValueError(f"{name} is on {value.device}, the layer on {layer.device}")
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {value.stride()}, expected contiguous; call .contiguous()")


def rows(layer: RoutedExperts, value: torch.Tensor, tokens: int) -> None:
    """Check rows (T·K + 1, H) of the layer's `row_dtype`."""
    if layer.row_dtype is None:
        raise ValueError(f"{layer.backend.name} gives weighted sums only, no rows; use torch or triton_unfused")
    shape = (tokens * layer.spec.top_k + 1, layer.spec.hidden_size)
    tensor(layer, "rows", value, (layer.row_dtype,), shape)


def out(
    layer: RoutedExperts,
    value: torch.Tensor,
    workspace: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Check out: like x, and memory of its own."""
    tensor(layer, "out", value, (x.dtype,), tuple(x.shape))
    no_gradients("RoutedExperts", out=value)
    no_overlap("out", value, x=x, topk_ids=topk_ids, topk_weights=topk_weights, **{"the workspace": workspace})


def out_of_rows(
    layer: RoutedExperts, value: torch.Tensor, of: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> None:
    """Check out (T, H) of the sum of rows: any dtype that x may have, and memory of its own."""
    tensor(layer, "out", value, _x_dtypes(layer), (topk_ids.shape[0], layer.spec.hidden_size))
    no_gradients("RoutedExperts", out=value, topk_weights=topk_weights)
    no_overlap("out", value, rows=of, topk_ids=topk_ids, topk_weights=topk_weights)


def no_overlap(name: str, value: torch.Tensor, **others: torch.Tensor) -> None:
    """Refuse a contiguous tensor that shares bytes with one of the contiguous `others`."""
    start, end = value.data_ptr(), value.data_ptr() + value.nbytes
    for other, given in others.items():
        if start < given.data_ptr() + given.nbytes and given.data_ptr() < end:
            raise ValueError(f"{name} overlaps {other}; give it memory of its own")


def ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """Refuse ids outside -1 … E - 1; a GPU is waited for."""
    wrong = (topk_ids < -1) | (topk_ids >= num_experts)
    if bool(wrong.any()):
        token, slot = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"topk_ids[{token}, {slot}] is {int(topk_ids[token, slot])}, expected -1 or 0 … {num_experts - 1}"
        )
