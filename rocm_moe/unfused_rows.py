"""Rows of `triton_unfused` without their sum, and the sum alone: the two halves of a call that ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rocm_moe import plan as planning
from rocm_moe import unfused_call
from rocm_moe.triton_compat import INTERPRETED, current_stream, interpret
from rocm_moe.unfused_weights import own

if TYPE_CHECKING:
    from portamoe.backend import PreparedWeights
    from rocm_moe.unfused_call import RowMap


def forward_rows(
    prepared: PreparedWeights,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    workspace: torch.Tensor,
    rows: torch.Tensor,
    max_local_rows: int,
) -> None:
    """Run a call and keep GEMM2's rows as they are before the sum; see TritonUnfusedBackend.forward_rows."""
    top_k, spare = topk_ids.shape[1], rows.shape[0] - 1
    rows.zero_()

    def keep(window: torch.Tensor, where: RowMap) -> None:
        exists = torch.arange(window.shape[0], device=window.device) < where.count
        pairs = where.token.to(torch.int64) * top_k + where.slot
        rows.index_copy_(0, torch.where(exists, pairs, spare), window)

    # The sum has no use, but every call ends with it; its weights are ones so that no garbage is multiplied.
    weights = torch.ones(topk_ids.shape, device=x.device)
    inputs = (x, topk_ids, weights, torch.empty_like(x))
    unfused_call.run(prepared, inputs, workspace, max_local_rows, {"after_gemm2": keep})


def sum_rows(
    prepared: PreparedWeights,
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launch the kernel that ends a call, on rows that lie by (token, slot) instead of by expert."""
    weights = own(prepared)
    tokens, top_k = topk_ids.shape
    plan = planning.make_plan(weights.spec, weights.table, tokens, tokens * top_k, whole_rows=True)
    *_, step = unfused_call._window_steps(weights, plan, 0)  # the last step of a window is the sum
    by_id = torch.where(topk_ids < 0, torch.iinfo(topk_ids.dtype).max, topk_ids)
    slots = by_id.argsort(dim=1, stable=True)
    first = torch.arange(tokens, device=rows.device)[:, None] * top_k
    regions = {
        "rows": rows,
        "token_rows": (first + slots).to(torch.int32),
        "token_weights": topk_weights.gather(1, slots).contiguous(),
        "token_count": (topk_ids >= 0).sum(1, dtype=torch.int32),
        "total_rows": torch.full((1,), tokens * top_k, dtype=torch.int32, device=rows.device),
    }
    values: list[Any] = []
    for argument in step.arguments:
        tensor: Any = argument
        if isinstance(argument, unfused_call._Part):
            # Halves that wait for a later window lie among the rows too; there is one window, so none are read.
            tensor = regions[argument.region].view(argument.dtype)
        elif argument == "out":
            tensor = out
        values.append(tensor.data_ptr() if isinstance(tensor, torch.Tensor) and not INTERPRETED else tensor)
    if INTERPRETED:
        interpret(weights.binaries.variant(step.variant), step.grid, values)
        return
    binary = weights.binaries.get(step.variant)
    binary.launch(step.grid, current_stream(rows.get_device()), binary.arguments(values))
