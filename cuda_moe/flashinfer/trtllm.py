"""Backend `flashinfer_trtllm`: the trtllm-gen MoE through FlashInfer, for MXFP4 and NVFP4 on SM100 and SM103.

Its kernels are closed and come as files, which FlashInfer would download at first use; `check` looks whether they are
there. SiTU is an activation type of its own, with beta and linear_beta as tensors of one value an expert.

The kernel multiplies gate and up by `output1_scale_gate_scalar` and the activation's result by `output1_scale_scalar`.
For SwiGLU it multiplies the gate alone, so the scale of up belongs into `output1_scale_scalar`; SiTU is not homogeneous
in up, gets both halves scaled first, and `output1_scale_scalar` holds only the factor that quantises h.

Sources: FlashInfer 0.7.4, fused_moe/core.py and prepare.py; vllm-project/vllm pull 52405.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda_moe.flashinfer import checks
from cuda_moe.flashinfer.base import FlashInferBackend, FlashInferWeights
from cuda_moe.flashinfer.call import localised, quantised_mxfp8, quantised_nvfp4
from portamoe.activations import SiTU, SwiGLU

if TYPE_CHECKING:
    import torch

    from portamoe.decision import Reason
    from portamoe.device import Device
    from portamoe.spec import MoESpec

#: RoutingMethodType.Renormalize: which routing kernels run; ids and weights are given, so it computes no routing.
ROUTING_METHOD = 1


class FlashInferTrtllm(FlashInferBackend):
    """The backend."""

    name = "flashinfer_trtllm"
    priority = 90
    table = "flashinfer_trtllm"
    functions = ("trtllm_fp4_block_scale_routed_moe", "fp4_quantize", "mxfp8_quantize")

    def check(self, spec: MoESpec, device: Device) -> list[Reason]:
        """Compare with the table, and look whether the compiled kernels are on this machine."""
        reasons = super().check(spec, device)
        if device.vendor != "nvidia" or checks.table_reasons(self.table, spec, device):
            return reasons
        return reasons + checks.artifact_reasons(device.host)

    def _call(
        self,
        prepared: FlashInferWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        import torch

        spec, layout, handle = prepared.spec, prepared.layout, prepared.handle
        ids, weights = localised(topk_ids, topk_weights, spec)
        kind, alpha, beta = _activation_tensors(prepared)
        quantised, x_scale = self._quantised(prepared, x)
        arguments: dict[str, Any] = {
            "topk_ids": (ids, weights),
            "routing_bias": None,
            "hidden_states": quantised,
            "hidden_states_scale": x_scale,
            "gemm1_weights": prepared.w13,
            "gemm1_weights_scale": prepared.w13_scale.view(torch.float8_e4m3fn),
            "gemm1_bias": None,
            "gemm1_alpha": alpha,
            "gemm1_beta": beta,
            "gemm1_clamp_limit": None,
            "gemm2_weights": prepared.w2,
            "gemm2_weights_scale": prepared.w2_scale.view(torch.float8_e4m3fn),
            "gemm2_bias": None,
            "output1_scale_scalar": _output1_scale(prepared),
            "output1_scale_gate_scalar": prepared.w13_alpha,
            "output2_scale_scalar": prepared.w2_alpha,
            "num_experts": spec.num_experts,
            "top_k": spec.top_k,
            "n_group": None,
            "topk_group": None,
            "intermediate_size": layout.intermediate_padded,
            "local_expert_offset": spec.local_experts.start,
            "local_num_experts": spec.num_local_experts,
            "routed_scaling_factor": None,
            "routing_method_type": ROUTING_METHOD,
            "do_finalize": True,
            "activation_type": handle.activation_type(kind),
            "output": out,
        }
        handle["trtllm_fp4_block_scale_routed_moe"](arguments, self._neutral(x_scale))

    def _neutral(self, x_scale: torch.Tensor | None) -> dict[str, Any]:
        """Return what not every version has: the layout of x's scales must be named since 0.7.0."""
        neutral: dict[str, Any] = {"nvfp4_4over6": None, "per_token_scale": None, "gemm1_lora_delta": None}
        if x_scale is not None:
            import importlib

            enum = getattr(importlib.import_module("flashinfer.tllm_enums"), "SfLayout", None)
            if enum is not None:
                neutral["hidden_states_scale_layout"] = enum.layout_linear
        return neutral

    def _quantised(self, prepared: FlashInferWeights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return x in the mode's format and its linear block scales, viewed as float8 whatever they are."""
        import torch

        if prepared.mode.activations == "bf16":
            return x, None
        if prepared.mode.activations == "mxfp8":
            values, scale = quantised_mxfp8(prepared.handle, x)
            return values, scale.view(torch.float8_e4m3fn)
        return quantised_nvfp4(prepared.handle, x, prepared.x_factor)


def _activation_tensors(prepared: FlashInferWeights) -> tuple[str, torch.Tensor | None, torch.Tensor | None]:
    """Return the ActivationType's name, gemm1_alpha and gemm1_beta, (E,) float32 each.

    Raises TypeError for an activation that this adapter does not pass.
    """
    activation, like = prepared.spec.activation, prepared.w13_alpha
    if isinstance(activation, SiTU) and activation.linear_beta is not None:
        return "Situ", like.new_full(like.shape, activation.beta), like.new_full(like.shape, activation.linear_beta)
    if isinstance(activation, SwiGLU) and activation.limit is None:
        ones = like.new_ones(like.shape) if prepared.mode.weights == "nvfp4" else None
        return "Swiglu", ones, None
    raise TypeError(f"flashinfer_trtllm passes SiTU with both betas and plain SwiGLU, not {activation!r}")


def _output1_scale(prepared: FlashInferWeights) -> torch.Tensor:
    """Return (E,) float32: the factor that quantises h, and for SwiGLU the scale of up as well."""
    factor = prepared.h_factor.expand_as(prepared.w13_alpha)
    if isinstance(prepared.spec.activation, SiTU):
        return factor.contiguous()
    return prepared.w13_alpha * factor


BACKEND = FlashInferTrtllm()
