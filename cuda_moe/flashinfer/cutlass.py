"""Backend `flashinfer_cutlass`: FlashInfer's CUTLASS MoE on Hopper, MXFP4 weights with bf16 activations.

The byte order of the nibbles is made by a function on the device, one expert at a time. FlashInfer compiles the
kernels with nvcc at first use, which takes minutes. Slots of other ranks are computed with weight 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda_moe.flashinfer.base import FlashInferBackend, FlashInferWeights
from portamoe.activations import SiTU, SwiGLU
from portamoe.decision import Reason

if TYPE_CHECKING:
    import torch

    from cuda_moe.flashinfer.call import Handle
    from portamoe.device import Device
    from portamoe.spec import MoESpec

_INTERLEAVE = "interleave_moe_weights_for_sm90_mixed_gemm"


class FlashInferCutlass(FlashInferBackend):
    """The backend."""

    name = "flashinfer_cutlass"
    priority = 70
    table = "flashinfer_cutlass"
    functions = ("cutlass_fused_moe", _INTERLEAVE)

    def only_on_request(self, spec: MoESpec, device: Device) -> Reason | None:
        """Pass over spread experts: every slot of other ranks is computed here with weight 0."""
        del device
        if spec.num_local_experts == spec.num_experts:
            return None
        value = f"{spec.num_local_experts} of {spec.num_experts}"
        limit = "all: FlashInfer's own runner of this kernel takes no expert parallelism"
        return Reason("local experts", value, limit, f"triton_fused skips them; backend={self.name!r} is obeyed")

    def _finished(self, handle: Handle, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in {"w13", "w2"}:
            return tensor
        interleaved: torch.Tensor = handle[_INTERLEAVE]({"weight": tensor.unsqueeze(0), "quant_type": "fp4"}, {})
        return interleaved.squeeze(0)

    def _call(
        self,
        prepared: FlashInferWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        import torch

        ids, weights, here = filled(topk_ids, topk_weights, prepared.spec)
        kind, betas = _activation_arguments(prepared)
        # A token without a local expert gives 0 even where its x is NaN.
        arguments: dict[str, Any] = {
            "input": x.masked_fill(~here[:, None], 0.0),
            "token_selected_experts": ids,
            "token_final_scales": weights,
            "fc1_expert_weights": prepared.w13,
            "fc2_expert_weights": prepared.w2,
            "output_dtype": x.dtype,
            "quant_scales": [prepared.w13_scale.view(torch.int32), prepared.w2_scale.view(torch.int32)],
            "output": out,
            "use_w4_group_scaling": True,
            "activation_type": prepared.handle.activation_type(kind),
            "use_fused_finalize": False,
            "tp_size": 1,
            "tp_rank": 0,
            "ep_size": 1,
            "ep_rank": 0,
            **betas,
        }
        prepared.handle["cutlass_fused_moe"](arguments, {"nvfp4_4over6": None})


def _activation_arguments(prepared: FlashInferWeights) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the ActivationType's name and the betas, (E,) float32; its own defaults 4 and 25 are never relied on."""
    activation, like = prepared.spec.activation, prepared.w13_alpha
    if isinstance(activation, SiTU) and activation.linear_beta is not None:
        values = {"situ_beta": activation.beta, "situ_linear_beta": activation.linear_beta}
        return "Situ", {name: like.new_full(like.shape, value) for name, value in values.items()}
    if isinstance(activation, SwiGLU) and activation.limit is None:
        return "Swiglu", {}
    raise TypeError(f"flashinfer_cutlass passes SiTU with both betas and plain SwiGLU, not {activation!r}")


def filled(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, spec: MoESpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn ids of the whole layer into this rank's; a slot that is not ours gets some expert with weight 0.

    returns  (T, K) int32 ids in 0 … E_local - 1; (T, K) float32 weights; (T,) bool, whether a token has any slot here
    """
    import torch

    local = topk_ids.long() - spec.local_experts.start
    here = (local >= 0) & (local < spec.num_local_experts)
    slots = torch.arange(local.numel(), device=local.device).view_as(local) % spec.num_local_experts
    ids = torch.where(here, local, slots).int()
    return ids, torch.where(here, topk_weights.float(), 0.0), here.any(1)


BACKEND = FlashInferCutlass()
