"""vLLM's loaded expert tensors as portamoe's source, without a second copy of a layer on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from portamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from torch import nn

#: Our name -> vLLM's; the layouts are the same: w13 = [w1; w3], low nibble = even column, E8M0 scales by rows.
PARAMETERS = {
    "w13": "w13_weight",
    "w2": "w2_weight",
    "w13_scale": "w13_weight_scale",
    "w2_scale": "w2_weight_scale",
}


def take(layer: nn.Module) -> ExpertWeights:
    """Take the expert tensors away from `layer` and return them; the parameters keep shape and dtype and no memory.

    On a CPU the tensors are used where they lie. On a GPU they go to host memory first and are freed, so that a backend
    which brings experts back one at a time needs, beside its own copy, one expert on the device and one layer on the
    host.

    Raises RuntimeError where they were taken before: weights cannot be loaded again into a layer that is served.
    """
    taken = {ours: _take_one(layer, theirs) for ours, theirs in PARAMETERS.items()}
    return ExpertWeights(**taken)


def _take_one(layer: nn.Module, name: str) -> torch.Tensor:
    parameter: torch.Tensor = getattr(layer, name)
    if parameter.numel() > 1 and not any(parameter.stride()):
        raise RuntimeError(
            f"portamoe has already taken {name} of this layer into its own layout; loading weights again needs a new "
            "engine, or PORTAMOE_VLLM=0"
        )
    data = parameter.detach().view(torch.uint8)
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    if device.type != "cpu":
        data = data.cpu()
    delattr(layer, name)
    del parameter
    husk = torch.empty((1,) * len(shape), dtype=dtype, device=device).expand(shape)
    layer.register_parameter(name, torch.nn.Parameter(husk, requires_grad=False))
    return data
