"""Calls of the backend `triton_unfused` for tests: poisoned workspace and output, guarded against writes beyond."""

from __future__ import annotations

import torch

from rocm_moe.triton_unfused import BACKEND

GUARD = 256


def call(problem, *, max_local_rows=None, prepared=None, max_tokens=None, **hooks):
    """Return the backend's result; everything it may read uninitialised is NaN, everything behind is checked."""
    spec, x = problem.spec, problem.x
    tokens = max_tokens or max(x.shape[0], 1)
    rows = max_local_rows or BACKEND.default_max_local_rows(spec, tokens)
    prepared = prepared or BACKEND.prepare(problem.weights, spec, x.device)
    size = BACKEND.workspace_bytes(spec, tokens, rows)
    memory = torch.full((size + GUARD,), 0xFF, dtype=torch.uint8, device=x.device)
    out = torch.full_like(x, float("nan"))
    BACKEND.forward(
        prepared, x, problem.topk_ids, problem.topk_weights, memory[:size], out, max_local_rows=rows, **hooks
    )
    assert bool((memory[size:] == 0xFF).all()), "wrote behind the workspace"
    return out
