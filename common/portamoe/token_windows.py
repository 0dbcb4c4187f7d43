"""What backends around another library's whole MoE call share: windows of tokens, and warming up by running.

Such a library compiles and chooses its kernels by the number of tokens and has no rows of its own to divide, so a
window is a range of tokens whose slots number at most `max_local_rows`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from portamoe.backend import WarmUpReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from portamoe.spec import MoESpec


def tokens_per_window(spec: MoESpec, tokens: int, max_local_rows: int) -> int:
    """Return how many of `tokens` tokens one call of the library takes."""
    return min(tokens, max(1, max_local_rows // spec.top_k))


def windows(spec: MoESpec, tokens: int, max_local_rows: int) -> Iterator[slice]:
    """Yield the tokens of each call of the library, in order; none for no tokens."""
    window = tokens_per_window(spec, tokens, max_local_rows)
    for start in range(0, tokens, max(window, 1)):
        yield slice(start, start + window)


def warm_up_by_running(
    spec: MoESpec,
    device: torch.device,
    window: int,
    workspace_bytes: Callable[[int], int],
    forward: Callable[..., None],
) -> WarmUpReport:
    """Run every power of two of tokens up to `window`, on zeros, with slots spread over the local experts.

    workspace_bytes:  of a number of tokens
    forward:          takes x, topk_ids, topk_weights, workspace and out

    `binaries` counts the runs: the library does not say what it compiled.
    """
    import torch

    sizes = sorted({min(1 << bit, window) for bit in range(window.bit_length() + 1)} if window else ())
    started = time.perf_counter()
    for tokens in sizes:
        slots = torch.arange(tokens * spec.top_k, device=device).reshape(tokens, spec.top_k)
        ids = (slots % spec.num_local_experts + spec.local_experts.start).int()
        x = torch.zeros((tokens, spec.hidden_size), dtype=torch.bfloat16, device=device)
        weights = torch.ones((tokens, spec.top_k), dtype=torch.float32, device=device)
        workspace = torch.empty(workspace_bytes(tokens), dtype=torch.uint8, device=device)
        forward(x, ids, weights, workspace, torch.empty_like(x))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return WarmUpReport(len(sizes), time.perf_counter() - started)
