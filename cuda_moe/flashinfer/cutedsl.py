"""Backend `flashinfer_cutedsl`: FlashInfer's fused MoE in CuteDSL, for NVFP4 on SM100, SM103 and SM107.

GEMM1 gathers, activates and requantises, GEMM2 multiplies, a last pass adds up a token's experts in the order of its
slots. SiTU is chosen by `situ_beta` while `activation_type` stays Swiglu. FlashInfer's default tactic is pinned: an
autotuner in the same process never picks one that was not verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuda_moe.flashinfer.base import FlashInferBackend, FlashInferWeights
from cuda_moe.flashinfer.call import localised, quantised_mxfp8, quantised_nvfp4
from cuda_moe.flashinfer.support import parsed, support
from portamoe.activations import Activation, GeGLU, SiTU, SwiGLU, SwiGLUOAI
from portamoe.decision import Reason
from portamoe.detection.distributions import version

if TYPE_CHECKING:
    import torch

    from portamoe.device import Device
    from portamoe.spec import MoESpec

#: FlashInfer's word for "the runner's own default tactic"; any other value comes from its autotuner.
DEFAULT_TACTIC = -1


def activation_arguments(activation: Activation) -> tuple[str, dict[str, float]]:
    """Return the name of the ActivationType and the parameters that differ from FlashInfer's neutral ones.

    Raises TypeError for an activation that CuteDSL's kernels do not have.
    """
    if isinstance(activation, SiTU):
        betas = {"situ_beta": activation.beta}
        if activation.linear_beta is not None:  # None: up is not clamped
            betas["situ_linear_beta"] = activation.linear_beta
        return "Swiglu", betas
    if isinstance(activation, SwiGLU):
        return "Swiglu", {} if activation.limit is None else {"swiglu_limit": activation.limit}
    if isinstance(activation, SwiGLUOAI):
        values = {"swiglu_alpha": activation.alpha, "swiglu_beta": activation.offset}
        return "Swiglu", values | {"swiglu_limit": activation.limit}
    if isinstance(activation, GeGLU) and activation.approximate == "tanh":
        return "GegluTanh", {}
    raise TypeError(f"CuteDSL's MoE has no {activation!r}")


@dataclass(frozen=True)
class FlashInferCuteDsl(FlashInferBackend):
    """The backend.

    fused_finalize: GEMM2 adds to the result with atomics, so that the order of the sum, and with it the last bit, may
                    differ from call to call; some versions have nothing else on SM107, see `deterministic_on`
    """

    fused_finalize: bool = False
    table = "flashinfer_cutedsl"
    functions = ("cute_dsl_fused_moe", "fp4_quantize", "mxfp8_quantize")
    cute_dsl = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name shown by the probe."""
        return "flashinfer_cutedsl_atomic" if self.fused_finalize else "flashinfer_cutedsl"

    @property
    def priority(self) -> int:  # type: ignore[override]
        """The variant with atomics comes after."""
        return 94 if self.fused_finalize else 95

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        """The same inputs give the same bits."""
        return not self.fused_finalize

    def deterministic_on(self, device: Device) -> bool:
        """Return `deterministic`, but False where this FlashInfer's kernel for the device has atomics only."""
        found = parsed((device.host.vendor.get("flashinfer") or {}).get("version"))
        return self.deterministic and not support().is_atomic_only(device.arch, found)

    def _is_atomic(self, arch: str) -> bool:
        return self.fused_finalize or support().is_atomic_only(arch, parsed(version("flashinfer-python")))

    def only_on_request(self, spec: MoESpec, device: Device) -> Reason | None:
        """Pass over the variant with atomics."""
        del spec, device
        if not self.fused_finalize:
            return None
        return Reason("repeatability", "atomics", "the same bits every time", f"ask for backend={self.name!r}")

    def _call(
        self,
        prepared: FlashInferWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        from cuda_moe.flashinfer.layouts import mma_view

        spec, mode, handle = prepared.spec, prepared.mode, prepared.handle
        ids, weights = localised(topk_ids, topk_weights, spec)
        kind, parameters = activation_arguments(spec.activation)
        quantised, x_scale = self._quantised(prepared, x)
        arguments: dict[str, Any] = {
            "x": quantised,
            "x_sf": x_scale,
            "token_selected_experts": ids,
            "token_final_scales": weights,
            "w1_weight": prepared.w13,
            "w1_weight_sf": mma_view(prepared.w13_scale),
            "w1_alpha": prepared.w13_alpha,
            "fc2_input_scale": prepared.h_factor if mode.activations == "nvfp4" else None,
            "w2_weight": prepared.w2,
            "w2_weight_sf": mma_view(prepared.w2_scale),
            "w2_alpha": prepared.w2_alpha,
            "num_experts": spec.num_experts,
            "top_k": spec.top_k,
            "num_local_experts": spec.num_local_experts,
            "local_expert_offset": spec.local_experts.start,
            "output_dtype": x.dtype,
            "use_fused_finalize": prepared.atomic,
            "moe_output": out,
            "aux_stream": None,
            "enable_pdl": True,
            "activation_type": handle.activation_type(kind),
            "quant_mode": mode.quant_mode,
            **parameters,
        }
        neutral: dict[str, Any] = {"tactic": DEFAULT_TACTIC, "per_token_scale": None, "swap_ab": False}
        if mode.quant_mode == "w4a8":  # SiTU and the deterministic finalize are there only
            del neutral["swap_ab"]
            arguments["swap_ab"] = True
        handle["cute_dsl_fused_moe"](arguments, neutral)

    def _quantised(self, prepared: FlashInferWeights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return x in the mode's format and its linear block scales, None beside bf16."""
        if prepared.mode.activations == "bf16":
            return x, None
        if prepared.mode.activations == "mxfp8":
            return quantised_mxfp8(prepared.handle, x)
        packed, scale = quantised_nvfp4(prepared.handle, x, prepared.x_factor)
        return packed, scale.unsqueeze(-1)


BACKEND = FlashInferCuteDsl()
ATOMIC = FlashInferCuteDsl(fused_finalize=True)
