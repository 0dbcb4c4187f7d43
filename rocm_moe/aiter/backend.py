"""Backend `aiter`: AMD's AITER fused MoE, where its version, the arch, the activation and the environment allow it.

h is rounded to bf16 (a16w4) and the result once more; AITER chooses its kernels by token count from tuned tables, so
the result is not bitwise the same for every T. Its intermediates come from torch's caching allocator, sized by T and K.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from portamoe.activations import SiTU
from portamoe.decision import Reason
from portamoe.layouts import round_up
from portamoe.token_windows import tokens_per_window, warm_up_by_running, windows
from rocm_moe.aiter import call
from rocm_moe.aiter.checks import REMEDY, aiter_reasons, arch_and_activation_reasons, floor_for, host_reasons
from rocm_moe.aiter.support import Mode, support

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from portamoe.backend import WarmUpReport
    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.weights import Expert, ExpertSource
    from rocm_moe.aiter.layouts import AiterLayout

#: Largest E8M0 code that is served: 2^73. A slot that is not this rank's is computed with weight 0, and 0 times an
#: expert's output must be 0, so nothing may overflow float32: 6 * 2^73 * 100 * I stays far below 2^127.
MAX_SCALE_CODE = 200
#: `forward`'s buffers start at multiples of this.
ALIGNMENT = 256


@dataclass(frozen=True)
class AiterWeights:
    """One rank's experts in AITER's order, with what a call of them needs.

    w1, w2:              (E, 2I, H/2), (E, H, I/2) float4_e2m1fn_x2, shuffled, I and H padded
    w1_scale, w2_scale:  (E*2I, H/32), (E*H, I/32) uint8, shuffled, columns rounded up to 8
    """

    spec: MoESpec
    mode: Mode
    layout: AiterLayout
    handle: call.AiterHandle
    w1: torch.Tensor
    w2: torch.Tensor
    w1_scale: torch.Tensor
    w2_scale: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.nbytes for t in (self.w1, self.w2, self.w1_scale, self.w2_scale))


class AiterBackend:
    """See `portamoe.backend.Backend`.

    graph_safe:     True — a number of tokens can be captured once it was run, which compiles and reads tuned tables
    deterministic:  False — AITER promises no repeatability, and its tables choose kernels that were not read one by one
    roundings:      4 — to bf16: h, each expert's result (some second stages add those up in bf16) and the sum
    """

    name = "aiter"
    package = "rocm_moe"
    priority = 100
    graph_safe = True
    deterministic = False
    roundings = 4

    def check(self, spec: MoESpec, device: Device) -> list[Reason]:
        """Compare arch, activation, mode, AITER's files, environment, folders and memory with the allowlist."""
        data = support()
        reasons = arch_and_activation_reasons(spec, device, data)
        if device.vendor != "amd":
            return reasons
        mode = data.mode_for(spec.activation_format)
        reasons += aiter_reasons(device, floor_for(spec, device, data), data)
        if mode is not None:
            reasons += call.environment_reasons(mode, device.host.env, data)
        needed = prepared_bytes(spec) if mode is not None and spec.weight_format == "mxfp4" else 0
        return reasons + host_reasons(device, needed)

    def only_on_request(self, spec: MoESpec, device: Device) -> Reason | None:
        """Pass over spread experts: every slot of other ranks is computed here with weight 0."""
        del device
        if spec.num_local_experts == spec.num_experts:
            return None
        return Reason(
            "local experts",
            f"{spec.num_local_experts} of {spec.num_experts}",
            "all: AITER's SiTU takes no expert mask, so slots of other ranks cost as much as one's own",
            'triton_unfused skips them; backend="aiter" is obeyed',
        )

    def prepare(
        self,
        weights: ExpertSource,
        spec: MoESpec,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> AiterWeights:
        """Import AITER, then shuffle expert by expert.

        Raises AiterUnavailableError, AiterEnvironmentError, or ValueError for weights whose scales are NaN or huge.
        """
        import torch

        from portamoe.weights import validate
        from rocm_moe.aiter.layouts import to_aiter

        mode, layout = mode_and_layout(spec)
        validate(weights, spec)
        if reasons := call.environment_reasons(mode, os.environ):
            raise call.AiterEnvironmentError("; ".join(map(str, reasons)))
        handle = call.load_aiter()
        count = len(weights)
        stored = {
            name: torch.empty((count, *shape), dtype=torch.uint8, device=device)
            for name, shape in layout.shapes().items()
        }
        for index in range(count):
            expert = weights.expert(index)
            _require_finite(expert, index)
            for name, tensor in to_aiter(expert, layout).items():
                stored[name][index].copy_(tensor)
            if progress is not None:
                progress(index + 1, count)
        return AiterWeights(
            spec=spec,
            mode=mode,
            layout=layout,
            handle=handle,
            w1=stored["w13"].view(torch.float4_e2m1fn_x2),
            w2=stored["w2"].view(torch.float4_e2m1fn_x2),
            w1_scale=stored["w13_scale"].flatten(0, 1),
            w2_scale=stored["w2_scale"].flatten(0, 1),
        )

    def default_max_local_rows(self, spec: MoESpec, max_tokens: int) -> int:
        """Return all rows: AITER sizes its own intermediates."""
        return max_tokens * spec.top_k

    def workspace_bytes(self, spec: MoESpec, max_tokens: int, max_local_rows: int) -> int:
        """Return the bytes of the padded x; AITER's own intermediates come from torch's allocator."""
        _, layout = mode_and_layout(spec)
        if not layout.hidden_pad:
            return 0
        return round_up(tokens_per_window(spec, max_tokens, max_local_rows) * layout.hidden_padded * 2, ALIGNMENT)

    def warm_up(self, prepared: AiterWeights, max_tokens: int, max_local_rows: int) -> WarmUpReport:
        """Run every power of two of tokens up to `max_tokens`: AITER chooses its kernels by such buckets.

        `binaries` counts the token counts that were run; AITER does not say what it compiled.
        """
        spec = prepared.spec
        return warm_up_by_running(
            spec,
            prepared.w1.device,
            tokens_per_window(spec, max_tokens, max_local_rows),
            lambda tokens: self.workspace_bytes(spec, tokens, max_local_rows),
            partial(self.forward, prepared, max_local_rows=max_local_rows),
        )

    def forward(
        self,
        prepared: AiterWeights,
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

        Raises TypeError for weights of another backend and for hooks: AITER has no points between its GEMMs. What AITER
        raises comes through: its shuffled weights serve no other kernel.
        """
        if hooks:
            raise TypeError(f"aiter has no hooks, got {', '.join(hooks)}; use triton_unfused")
        if not isinstance(prepared, AiterWeights):
            raise TypeError(f"aiter needs AiterWeights from its own prepare, got {type(prepared).__name__}")
        for rows in windows(prepared.spec, x.shape[0], max_local_rows):
            _forward_window(prepared, x[rows], topk_ids[rows], topk_weights[rows], workspace, out[rows])


def _forward_window(
    prepared: AiterWeights,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: torch.Tensor,
    out: torch.Tensor,
) -> None:
    from rocm_moe.aiter.routing import remap

    spec, layout = prepared.spec, prepared.layout
    activation = spec.activation
    if not isinstance(activation, SiTU) or activation.linear_beta is None:
        raise TypeError(f"aiter computes SiTU with both betas only, got {activation!r}")
    ids, weights, here = remap(topk_ids, topk_weights, spec.local_experts.start, spec.num_local_experts)
    y = call.call_fused_moe(
        prepared.handle,
        prepared.mode,
        layout,
        x=_padded(x, layout, workspace),
        w1=prepared.w1,
        w2=prepared.w2,
        w1_scale=prepared.w1_scale,
        w2_scale=prepared.w2_scale,
        topk_weights=weights,
        topk_ids=ids,
        beta=activation.beta,
        linear_beta=activation.linear_beta,
    )
    # A token without a local expert gives 0 even where its x is NaN.
    out.copy_(y[:, : spec.hidden_size].masked_fill(~here[:, None], 0.0))


def _padded(x: torch.Tensor, layout: AiterLayout, workspace: torch.Tensor) -> torch.Tensor:
    """Return x with zeros up to H padded, in the workspace; x itself where nothing is padded."""
    if not layout.hidden_pad:
        return x
    tokens = x.shape[0]
    size = tokens * layout.hidden_padded * x.element_size()
    if workspace.numel() < size:
        raise ValueError(f"workspace has {workspace.numel()} bytes, {tokens} tokens need {size}; see workspace_bytes")
    wide = workspace[:size].view(x.dtype).view(tokens, layout.hidden_padded)
    wide[:, : layout.hidden].copy_(x)
    wide[:, layout.hidden :].zero_()
    return wide


def mode_and_layout(spec: MoESpec) -> tuple[Mode, AiterLayout]:
    """Return AITER's mode for the spec's activation format and the layout it takes; ValueError if there is none."""
    from rocm_moe.aiter.layouts import layout_for

    mode = support().mode_for(spec.activation_format)
    if mode is None or spec.weight_format != "mxfp4":
        asked = f"{spec.weight_format} weights with {spec.activation_format} activations"
        raise ValueError(f"aiter serves MXFP4 weights with bf16, MXFP8 or MXFP4 activations, not {asked}; {REMEDY}")
    layout = layout_for(
        spec.hidden_size,
        spec.intermediate_size,
        hidden_multiple=mode.hidden_multiple,
        intermediate_multiple=mode.intermediate_multiple,
        interleaved=mode.interleaved,
    )
    return mode, layout


def prepared_bytes(spec: MoESpec) -> int:
    """Return the bytes of `AiterWeights`; looks at sizes only, so it works without torch."""
    mode = support().mode_for(spec.activation_format)
    if mode is None:
        return 0
    hidden = round_up(spec.hidden_size, mode.hidden_multiple)
    inter = round_up(spec.intermediate_size, mode.intermediate_multiple)
    scales = 2 * inter * round_up(hidden // 32, 8) + hidden * round_up(inter // 32, 8)
    return spec.num_local_experts * (3 * hidden * inter // 2 + scales)


def _require_finite(expert: Expert, index: int) -> None:
    for name in ("w13_scale", "w2_scale"):
        scale = getattr(expert, name)
        codes = scale if scale.element_size() == 1 and not scale.is_floating_point() else scale.view(dtype=_uint8())
        largest = int(codes.max())
        if largest > MAX_SCALE_CODE:
            what = "NaN" if largest == 255 else f"2^{largest - 127}"
            raise ValueError(
                f"{name} of local expert {index} holds {what} (E8M0 code {largest}); aiter serves codes up to "
                f"{MAX_SCALE_CODE}, as it computes slots of other ranks with weight 0; {REMEDY}"
            )


def _uint8() -> torch.dtype:
    import torch

    return torch.uint8


BACKEND = AiterBackend()
