"""`portamoe::routed_experts`: the call of a layer as one opaque operator, for everything that traces torch.

`RoutedExperts` hands a call to the operator where a compiler, an export, a fake-tensor or other dispatch mode looks at
it, and makes the call itself everywhere else: the dispatcher would add 4 µs to an eager call of 30 µs, asking whether
anybody traces costs 0.6 µs (both measured on a CPU, torch 2.13, 2026-12-01).

A layer is named by a random string that is never used again, in a table of weak references: a graph that outlives its
layer, or is run in another process, raises instead of finding another layer's experts. Layers compiled one by one with
the same code are told apart by a guard on that string, so each counts towards torch._dynamo's recompile limit; a model
compiled whole has one graph.
"""

from __future__ import annotations

import uuid
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from portamoe.layer import RoutedExperts

NAME = "portamoe::routed_experts"
SCHEMA = (
    "routed_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor(a!) workspace, Tensor(b!) out, str layer)"
    " -> ()"
)

_LAYERS: weakref.WeakValueDictionary[str, RoutedExperts] = weakref.WeakValueDictionary()
#: A fragment, as other operators of this namespace may be defined elsewhere; the operator lives as long as it does.
_LIBRARY = torch.library.Library("portamoe", "FRAGMENT")


def add(layer: RoutedExperts) -> str:
    """Return the string that names `layer` in calls of the operator, as long as the layer lives."""
    key = uuid.uuid4().hex
    _LAYERS[key] = layer
    return key


def find(key: str) -> RoutedExperts:
    """Return the layer that `key` names; RuntimeError where there is none."""
    layer = _LAYERS.get(key)
    if layer is None:
        raise RuntimeError(
            f"{NAME}: no layer {key!r} in this process; it was deleted, or the graph was made in another process. "
            "Keep the RoutedExperts alive, or compile or export with the new one"
        )
    return layer


def traced(x: object) -> bool:
    """Does a compiler, an export, a tracer, a dispatch mode or a tensor subclass look at the call?"""
    return (
        torch.compiler.is_compiling()
        or type(x) is not torch.Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def call(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: torch.Tensor,
    out: torch.Tensor,
    layer: str,
) -> None:
    """Call the layer named `layer` through the dispatcher; tensors as in `RoutedExperts.forward`, all of them given."""
    torch.ops.portamoe.routed_experts.default(x, topk_ids, topk_weights, workspace, out, layer)


def keep_address(workspace: torch.Tensor) -> None:
    """Say that `workspace` stays where it is, or Inductor captures no graph that writes to it.

    This is what `torch._dynamo.mark_static_address` does; importing that takes seconds.
    """
    workspace._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined] # pyright: ignore


def workspace_for(x: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
    """Return `workspace`, or a fake one of its size where `x` is fake and nothing converts real tensors."""
    if torch.compiler.is_compiling():  # compilers and exports make an input of it
        return workspace
    from torch._guards import detect_fake_mode

    return workspace if detect_fake_mode((x,)) is None else x.new_empty(workspace.shape, dtype=workspace.dtype)


def _run(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: torch.Tensor,
    out: torch.Tensor,
    layer: str,
) -> None:
    find(layer).run(x, topk_ids, topk_weights, workspace, out)


def _fake(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: torch.Tensor,  # noqa: ARG001
    out: torch.Tensor,
    layer: str,
) -> None:
    find(layer).check_metadata(x, topk_ids, topk_weights, out)


def _define() -> None:
    _LIBRARY.define(SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
    _LIBRARY.impl("routed_experts", _run, "CompositeExplicitAutograd")
    torch.library.register_fake(NAME, _fake, lib=_LIBRARY)


_define()
