"""The experts class that vLLM's modular kernel calls."""
# mypy: disable-error-code="misc"
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

from portamoe.integrations.vllm.decision import decide

if TYPE_CHECKING:
    from portamoe.integrations.vllm.rank import RankExperts

_ACTIVATIONS = frozenset({"situ", "silu"})


class PortaExperts(mk.FusedMoEExpertsModular):
    """One rank's routed experts: MXFP4 weights, bf16 activations, a plain partial sum.

    vLLM gives two workspaces, the first of which may be the output's memory: all of ours lies in the second.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rank: RankExperts | None = None

    def use(self, rank: RankExperts) -> None:
        """Serve with these prepared experts from now on."""
        self._rank = rank

    @property
    def rank(self) -> RankExperts:
        """The prepared experts; RuntimeError before the weights are loaded."""
        if self._rank is None:
            raise RuntimeError("PortaExperts has no weights: they come from PortaMxfp4MoEMethod after loading")
        return self._rank

    @staticmethod
    def is_supported_config(
        cls: type[PortaExperts],  # noqa: PLW0211 - vLLM passes it by hand # pyright: ignore[reportSelfClsParameterName]
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: Any,
    ) -> tuple[bool, str | None]:
        """Return (True, None), or (False, why): first what vLLM itself checks, then portamoe's decision."""
        supported, why = mk.FusedMoEExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if not supported:
            return False, why
        decision = decide(moe_config)
        return decision.backend is not None, None if decision.backend is not None else str(decision)

    @staticmethod
    def activation_format() -> Any:
        """Rows of tokens, not batches of experts."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True  # the decision of is_supported_config knows the layer's device

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key == kMxfp4Static and activation_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return str(getattr(activation, "value", activation)) in _ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Activations stay bf16."""
        return True

    def workspace_shapes(
        self,
        M: int,
        N: int,  # noqa: ARG002
        K: int,
        topk: int,  # noqa: ARG002
        global_num_experts: int,  # noqa: ARG002
        local_num_experts: int,  # noqa: ARG002
        expert_tokens_meta: Any,  # noqa: ARG002
        activation: Any,  # noqa: ARG002
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of workspace13 (nothing), workspace2 (everything) and the output, in 2-byte elements."""
        return (0,), (-(-self.rank.workspace_bytes(M) // 2),), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """The sum over a token's experts is already made, with their weights."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,  # noqa: ARG002
        w2: torch.Tensor,  # noqa: ARG002
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,  # noqa: ARG002
        global_num_experts: int,  # noqa: ARG002
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,  # noqa: ARG002 - may be the output's memory
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,  # noqa: ARG002
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write this rank's weighted sum of its experts to `output`; launches kernels only, waits for nothing."""
        if a1q_scale is not None or a2_scale is not None:
            raise ValueError("PortaExperts takes bf16 activations, got quantised ones")
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        self.rank(output.view(hidden_states.shape), hidden_states, topk_ids, topk_weights, workspace2, expert_map)
