"""The embedded default backend: any device that torch has, every activation, format and size, little memory.

Weights stay in their checkpoint bytes; a call decodes the experts that are hit, a few rows at a time, and multiplies in
float32. It reads the routing on the host, so it cannot be captured in a graph. The computation is in `_torch_moe`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portamoe.backend import WarmUpReport
from portamoe.checks import memory_reason, multiple_reason, present, torch_reason, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from portamoe._torch_moe import TorchPrepared
    from portamoe.backend import PreparedWeights
    from portamoe.decision import Reason
    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertSource

#: pyproject.toml's floor.
_MIN_TORCH = "2.6"
#: Weight values decoded at a time: 16 MiB of float32, small for a GPU and a few cache sizes of a CPU.
CHUNK_VALUES = 1 << 22
#: Rows of one window when the caller names none: enough for matrix products to outweigh the decoding.
_DEFAULT_ROWS = 1024
_ALIGNMENT = 256
#: The canary's call, so that one verdict serves every max_tokens from here on.
_CANARY_TOKENS = 20


class TorchBackend:
    """`portamoe.backend.Backend` in plain torch.

    graph_safe:     False — `forward` raises inside a graph capture
    deterministic:  True — the same inputs give the same bits
    roundings:      1 — only the result is rounded to x's dtype
    x_dtypes:       what x may be; the sum is float32 for all
    row_dtype:      float32, see `portamoe.backend.RowBackend`
    """

    name = "torch"
    package = "portamoe"
    priority = 0
    graph_safe = False
    deterministic = True
    roundings = 1
    x_dtypes = ("bfloat16", "float16", "float32")
    row_dtype = "float32"

    def check(self, spec: MoESpec, device: Device) -> list[Reason]:
        """Return what is missing: torch itself, its support for the vendor, or memory."""
        return [
            *present(torch_reason(device, _MIN_TORCH)),
            *_block_reasons(spec),
            *present(self._memory_reason(spec, device)),
        ]

    def only_on_request(self, spec: MoESpec, device: Device) -> Reason | None:  # noqa: ARG002
        """Return None: it is what is left when nothing else fits."""
        return None

    def prepare(
        self,
        weights: ExpertSource,
        spec: MoESpec,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> PreparedWeights:
        """Move the experts to `device` as they are; those that are already there are used in place, not copied.

        Raises ValueError or TypeError that names the tensor of an expert that does not fit `spec`.
        """
        from portamoe import _torch_moe

        return _torch_moe.prepare(weights, spec, device, progress)

    def default_max_local_rows(self, spec: MoESpec, max_tokens: int) -> int:  # noqa: ARG002
        """Return 1024, or max_tokens where that is less: no expert has more rows than there are tokens."""
        return max(1, min(max_tokens, _DEFAULT_ROWS))

    def canary_token_buckets(self, spec: MoESpec, max_tokens: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return one number of tokens: the same code serves all."""
        return (min(max_tokens, _CANARY_TOKENS),)

    def workspace_bytes(self, spec: MoESpec, max_tokens: int, max_local_rows: int) -> int:
        """Return the bytes of sum, window of rows and decoded weights.

        Beside it torch itself takes index arrays of O(T·K) and temporaries below 32 MiB, neither of which depends on
        the routing.
        """
        return sum(region_bytes(spec, max_tokens, max_local_rows).values())

    def warm_up(
        self,
        prepared: PreparedWeights,
        max_tokens: int,  # noqa: ARG002
        max_local_rows: int,  # noqa: ARG002
    ) -> WarmUpReport:
        """Compile nothing; run one token through one expert, which loads what torch loads on first use."""
        from portamoe import _torch_moe

        start = time.perf_counter()
        _torch_moe.touch(_own(prepared), self.workspace_bytes(prepared.spec, 1, 1))
        return WarmUpReport(binaries=0, seconds=time.perf_counter() - start)

    def forward(
        self,
        prepared: PreparedWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        workspace: torch.Tensor,
        out: torch.Tensor,
        *,
        max_local_rows: int,
        **hooks: Any,
    ) -> None:
        """Write this rank's weighted sum of its experts to `out`; tensors as in `Backend.forward`, x also float32.

        Raises RuntimeError inside a graph capture, TypeError for hooks and ValueError for a workspace too small.
        """
        from portamoe import _torch_moe

        if given := sorted(name for name, hook in hooks.items() if hook is not None):
            raise TypeError(f"the torch backend has no hooks, got {', '.join(given)}; use another backend")
        own = _own(prepared)
        needed = self.workspace_bytes(own.spec, x.shape[0], max_local_rows)
        if workspace.numel() < needed:
            raise ValueError(f"workspace has {workspace.numel()} bytes, {x.shape[0]} tokens need {needed}")
        _torch_moe.forward(own, x, topk_ids, topk_weights, workspace, out, max_local_rows)

    def forward_rows(
        self,
        prepared: PreparedWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        workspace: torch.Tensor,
        rows: torch.Tensor,
        *,
        max_local_rows: int,
    ) -> None:
        """Write the row of every (token, slot) of this rank to `rows`; see `portamoe.backend.RowBackend`.

        A row has the bits that `forward` sums if its expert has the same rows in the same windows: matrix products of
        one to three rows are computed with other instructions than larger ones.
        """
        from portamoe import _torch_moe

        _torch_moe.forward_rows(_own(prepared), x, topk_ids, workspace, rows, max_local_rows)

    def sum_rows(
        self,
        prepared: PreparedWeights,  # noqa: ARG002
        rows: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the weighted sum of `rows`, in ascending id and float32; see `portamoe.backend.RowBackend`."""
        from portamoe import _torch_moe

        _torch_moe.sum_rows(rows, topk_ids, topk_weights, out)

    def _memory_reason(self, spec: MoESpec, device: Device) -> Reason | None:
        """Compare the memory with the weights and one token's workspace.

        A CPU uses weights that are in memory where they lie, so there its size counts and not what is free.
        """
        if device.vendor == "cpu":
            device = replace(device, memory_free_bytes=None)
        return memory_reason(weight_bytes(spec) + self.workspace_bytes(spec, 1, 1), device)


def region_bytes(spec: MoESpec, tokens: int, max_local_rows: int) -> dict[str, int]:
    """Return the workspace's regions in order, each a multiple of 256 bytes: the one source of its layout.

    sum:      (T, H) float32
    rows:     (R, H) float32, x of a window, later the experts' result; R = min(T, max_local_rows)
    gate_up:  (R, 2I) float32, its first half later h
    weight:   decoded rows of w13 or w2, float32
    """
    rows = max(1, min(tokens, max_local_rows))
    hidden, inter = spec.hidden_size, spec.intermediate_size
    weight = max(chunk_rows(columns, total) * columns for columns, total in ((hidden, 2 * inter), (inter, hidden)))
    values = {"sum": tokens * hidden, "rows": rows * hidden, "gate_up": rows * 2 * inter, "weight": weight}
    return {name: -(-4 * count // _ALIGNMENT) * _ALIGNMENT for name, count in values.items()}


def chunk_rows(columns: int, rows: int) -> int:
    """Return how many of a matrix's rows are decoded at a time."""
    return max(1, min(rows, CHUNK_VALUES // columns))


def _block_reasons(spec: MoESpec) -> list[Reason]:
    """Quantised activations share a scale over blocks of H and I."""
    block = {"bf16": 1, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}[spec.activation_format]
    remedy = f"{spec.activation_format} activations come in blocks; use bf16 activations"
    return present(
        multiple_reason("hidden_size", spec.hidden_size, block, remedy),
        multiple_reason("intermediate_size", spec.intermediate_size, block, remedy),
    )


def _own(prepared: PreparedWeights) -> TorchPrepared:
    from portamoe._torch_moe import TorchPrepared

    if not isinstance(prepared, TorchPrepared):
        raise TypeError(
            f"weights were prepared by another backend ({type(prepared).__name__}); prepare them with torch"
        )
    return prepared


BACKEND = TorchBackend()
