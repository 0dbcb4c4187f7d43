"""What FlashInfer's three backends share: checks, preparation expert by expert, windows, warm-up.

FlashInfer takes its intermediates from torch's caching allocator, sized by T and K, and compiles parts of itself at
first use; `workspace_bytes` counts only what is padded here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cuda_moe.flashinfer import checks
from cuda_moe.flashinfer.call import FlashInferEnvironmentError, Handle, load
from cuda_moe.flashinfer.support import Mode, support
from portamoe.layouts import round_up
from portamoe.token_windows import tokens_per_window, warm_up_by_running, windows

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cuda_moe.flashinfer.layouts import FlashInferLayout
    from portamoe.backend import WarmUpReport
    from portamoe.decision import Reason
    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertSource

#: `forward`'s buffers start at multiples of this.
ALIGNMENT = 256


@dataclass(frozen=True)
class FlashInferWeights:
    """One rank's experts in a FlashInfer kernel's order, with what a call of them needs.

    w13, w2:              (E, 2I, H/2), (E, H, I/2) uint8, I and H padded
    w13_scale, w2_scale:  block scales as `FlashInferLayout.shapes` has them, uint8
    w13_alpha, w2_alpha:  (E,) float32 — what GEMM1's and GEMM2's accumulators are multiplied with
    x_factor, h_factor:   (1,) float32 — 1 / input scale of x and of h, 1 where they are not quantised to NVFP4
    atomic:               the kernel adds up a token's experts with atomics
    """

    backend: str
    spec: MoESpec
    mode: Mode
    layout: FlashInferLayout
    handle: Handle
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    w13_alpha: torch.Tensor
    w2_alpha: torch.Tensor
    x_factor: torch.Tensor
    h_factor: torch.Tensor
    atomic: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self.w13, self.w2, self.w13_scale, self.w2_scale, self.w13_alpha, self.w2_alpha)
        return sum(t.nbytes for t in tensors)


class FlashInferBackend:
    """See `portamoe.backend.Backend`; subclasses name their functions and make the call.

    table:      the backend's name in support.json
    functions:  what is taken from FlashInfer
    cute_dsl:   needs CuteDSL and Triton

    graph_safe:     True — a number of tokens can be captured once it was run, which compiles
    deterministic:  True — the same inputs give the same bits; the variant with atomics says otherwise
    roundings:      4 — to bf16: h where it is not quantised, each expert's result and the sum
    """

    name: str
    priority: int
    table: str
    package = "cuda_moe"
    functions: tuple[str, ...] = ()
    cute_dsl = False
    graph_safe = True
    deterministic = True
    roundings = 4

    def check(self, spec: MoESpec, device: Device) -> list[Reason]:
        """Compare formats, version, arch, activation, packages, environment and memory with the table."""
        reasons = checks.table_reasons(self.table, spec, device)
        if device.vendor != "nvidia":
            return reasons
        host = device.host
        if host.vendor.get("flashinfer") is not None:
            reasons += checks.package_reasons(device, cute_dsl=self.cute_dsl)
        reasons += checks.environment_reasons(host.env)
        return reasons + checks.memory_reasons(self.prepared_bytes(spec), device)

    def only_on_request(self, spec: MoESpec, device: Device) -> Reason | None:
        """Return None: where it accepts, its order among the others is its priority's."""
        del spec, device
        return None

    def mode(self, spec: MoESpec) -> Mode:
        """Return the mode for the spec's formats; ValueError if there is none."""
        mode = support().mode_for(self.table, spec)
        if mode is None:
            asked = f"{spec.weight_format} weights with {spec.activation_format} activations"
            raise ValueError(f"{self.name} has no mode for {asked}; {checks.remedy_for(spec)}")
        return mode

    def layout(self, spec: MoESpec) -> FlashInferLayout:
        """Return the order and padded sizes of the spec's experts."""
        from cuda_moe.flashinfer.layouts import layout_for

        return layout_for(self.mode(spec), spec.hidden_size, spec.intermediate_size)

    def prepared_bytes(self, spec: MoESpec) -> int:
        """Return the bytes of the weights; looks at sizes only, so it works without torch. 0 without a mode."""
        mode = support().mode_for(self.table, spec)
        if mode is None:
            return 0
        hidden = round_up(spec.hidden_size, mode.hidden_multiple)
        inter = round_up(spec.intermediate_size, mode.intermediate_multiple)
        return spec.num_local_experts * 3 * hidden * inter * (mode.block + 2) // (2 * mode.block)

    def prepare(
        self,
        weights: ExpertSource,
        spec: MoESpec,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> FlashInferWeights:
        """Import FlashInfer, then convert expert by expert.

        Raises FlashInferUnavailableError, FlashInferEnvironmentError, or ValueError for weights that the kernel's
        scales cannot express, with the expert's number.
        """
        import torch

        from cuda_moe.flashinfer.layouts import to_kernel
        from cuda_moe.flashinfer.scales import Scales
        from portamoe.weights import validate

        layout, mode = self.layout(spec), self.mode(spec)
        validate(weights, spec)
        if reasons := checks.environment_reasons(os.environ):
            raise FlashInferEnvironmentError("; ".join(map(str, reasons)))
        handle = load(self.functions)
        stored = {
            name: torch.empty((len(weights), *shape), dtype=torch.uint8, device=device)
            for name, shape in layout.shapes().items()
        }
        scales = Scales(mode)
        for index in range(len(weights)):
            expert = scales.take(weights.expert(index), index)
            for name, tensor in to_kernel(expert, layout).items():
                stored[name][index].copy_(self._finished(handle, name, tensor.to(device)))
            if progress is not None:
                progress(index + 1, len(weights))
        factors = {name: tensor.to(device) for name, tensor in scales.tensors().items()}
        atomic = self._is_atomic(arch_of(device))
        return FlashInferWeights(self.table, spec, mode, layout, handle, **stored, **factors, atomic=atomic)

    def _is_atomic(self, arch: str) -> bool:
        """Return whether this backend's kernel adds with atomics on `arch`."""
        del arch
        return False

    def _finished(self, handle: Handle, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Apply what can only be done on the device."""
        del handle, name
        return tensor

    def default_max_local_rows(self, spec: MoESpec, max_tokens: int) -> int:
        """Return all rows: FlashInfer sizes its own intermediates."""
        return max_tokens * spec.top_k

    def workspace_bytes(self, spec: MoESpec, max_tokens: int, max_local_rows: int) -> int:
        """Return the bytes of x and the result where H is padded, 0 where it is not."""
        layout = self.layout(spec)
        if not layout.hidden_pad:
            return 0
        return 2 * round_up(tokens_per_window(spec, max_tokens, max_local_rows) * layout.hidden_padded * 2, ALIGNMENT)

    def warm_up(self, prepared: FlashInferWeights, max_tokens: int, max_local_rows: int) -> WarmUpReport:
        """Run every power of two of tokens up to `max_tokens`; `binaries` counts the runs, FlashInfer says no more."""
        spec = prepared.spec
        return warm_up_by_running(
            spec,
            prepared.w13.device,
            tokens_per_window(spec, max_tokens, max_local_rows),
            lambda tokens: self.workspace_bytes(spec, tokens, max_local_rows),
            partial(self.forward, prepared, max_local_rows=max_local_rows),
        )

    def forward(
        self,
        prepared: FlashInferWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        workspace: torch.Tensor,
        out: torch.Tensor,
        *,
        max_local_rows: int,
        **hooks: Any,
    ) -> None:
        """Write this rank's weighted sum to `out`; windows are ranges of tokens with at most `max_local_rows` slots.

        Raises TypeError for weights of another backend and for hooks: FlashInfer has no points between its GEMMs.
        """
        if hooks:
            raise TypeError(f"{self.name} has no hooks, got {', '.join(hooks)}; use triton_unfused")
        if not isinstance(prepared, FlashInferWeights) or prepared.backend != self.table:
            have = getattr(prepared, "backend", type(prepared).__name__)
            raise TypeError(f"{self.name} needs weights from its own prepare, got those of {have}")
        for rows in windows(prepared.spec, x.shape[0], max_local_rows):
            wide_x, wide_out = _padded(x[rows], out[rows], prepared.layout, workspace)
            self._call(prepared, wide_x, topk_ids[rows], topk_weights[rows], wide_out)
            if prepared.layout.hidden_pad:
                out[rows].copy_(wide_out[:, : prepared.layout.hidden])

    def _call(
        self,
        prepared: FlashInferWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the result for x (T, H padded) to `out` (T, H padded)."""
        raise NotImplementedError


def arch_of(device: torch.device) -> str:
    """Return "sm_107" of a torch device, "cpu" where there is no GPU."""
    import torch

    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _padded(
    x: torch.Tensor, out: torch.Tensor, layout: FlashInferLayout, workspace: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x with zeros up to H padded and room for as wide a result, in the workspace; x and out where H fits."""
    if not layout.hidden_pad:
        return x, out
    tokens, width = x.shape[0], layout.hidden_padded
    size = round_up(tokens * width * 2, ALIGNMENT)
    if workspace.numel() < 2 * size:
        raise ValueError(f"workspace has {workspace.numel()} bytes, {tokens} tokens need {2 * size}")
    wide, result = (
        workspace[i * size : i * size + tokens * width * 2].view(x.dtype).view(tokens, width) for i in range(2)
    )
    wide[:, : layout.hidden].copy_(x)
    wide[:, layout.hidden :].zero_()
    return wide, result
