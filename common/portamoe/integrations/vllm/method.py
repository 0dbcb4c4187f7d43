"""The quantisation method of a layer that portamoe serves: vLLM's tensors and loaders, portamoe's kernels."""
# mypy: disable-error-code="misc"
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, make_mxfp4_moe_kernel
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

from portamoe.integrations.vllm.decision import activation_of, max_tokens, plain_torch, spec_of
from portamoe.integrations.vllm.experts import PortaExperts
from portamoe.integrations.vllm.rank import RankExperts, placement
from portamoe.integrations.vllm.weights import take

if TYPE_CHECKING:
    from portamoe.integrations.vllm.decision import LayerDecision


class PortaMxfp4MoEMethod(Mxfp4MoEMethod):
    """`Mxfp4MoEMethod` on portamoe's experts; `create_weights`, the loaders and `apply` are vLLM's.

    vLLM's weight loader looks for "ModelOpt" and "compressed" in the name of this class; it must hold neither.
    """

    supports_pre_processed_weights = False

    def __init__(self, moe: Any, decision: LayerDecision) -> None:
        # Not the parent's: it would choose one of vLLM's own backends, or raise where there is none.
        FusedMoEMethodBase.__init__(self, moe)
        self.decision = decision
        self.weight_dtype = "mxfp4"
        self.activation_key = None
        self.is_k3_situ_aiter = self.is_k3_situ_int4_gfx942 = False
        self.mxfp4_backend = Mxfp4MoeBackend.NONE
        self.experts_cls = PortaExperts
        self.max_capture_size = getattr(moe, "max_capture_size", 0)
        self._cache_permute_indices: dict[Any, Any] = {}
        self.moe_kernel: Any = None
        self.w13_precision_config = self.w2_precision_config = None

    @property
    def supports_eplb(self) -> bool:
        """Experts do not move once they are prepared."""
        return False

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: Any,  # noqa: ARG002
        moe_parallel_config: Any,  # noqa: ARG002
    ) -> tuple[int, int]:
        """Return the sizes as they are: 384 at 8 ranks stays 384; a backend that pads does so in its own layout."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return weight-only MXFP4; the scales are in the prepared experts, vLLM only sees their shapes."""
        return mxfp4_w4a16_moe_quant_config(w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring the loaded experts into the backend's layout, compile its kernels and build vLLM's modular kernel.

        Raises RuntimeError when it is called again for the same weights.
        """
        backend = self.decision.backend
        if backend is None:
            raise RuntimeError(f"no backend to serve this layer: {self.decision}")
        with plain_torch():
            device = layer.w13_weight.device
            place = placement(layer.expert_map, layer.w13_weight.shape[0])
            spec = spec_of(self.moe, activation_of(self.moe), place.local_experts)
            rank = RankExperts(backend, take(layer), spec, device, max_tokens(self.moe), mapped=place.mapped)
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            self.moe_kernel = make_mxfp4_moe_kernel(
                moe_quant_config=self.moe_quant_config,
                moe_config=self.moe,
                experts_cls=self.experts_cls,
                mxfp4_backend=self.mxfp4_backend,
                routing_tables=layer._expert_routing_tables(),
            )
        self.moe_kernel.fused_experts.use(rank)
