"""FlashInfer as it is called: imported on first use, its parameters compared, inputs brought to its formats.

Every argument goes by name. What a version lacks is left out only where leaving it out means the same; a parameter that
carries the spec's meaning and is missing makes the backend unusable, and says so.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portamoe.decision import Reason

if TYPE_CHECKING:
    import torch

    from portamoe.spec import MoESpec


class FlashInferUnavailableError(RuntimeError):
    """FlashInfer cannot be used although its facts looked right; holds the reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class FlashInferEnvironmentError(RuntimeError):
    """The environment asks FlashInfer for other numbers than the spec."""


@dataclass(frozen=True)
class Function:
    """One of FlashInfer's functions with the names of its parameters."""

    name: str
    call: Callable[..., Any]
    parameters: frozenset[str]

    def __call__(self, required: Mapping[str, Any], neutral: Mapping[str, Any]) -> Any:
        """Call with all of `required`, and with those of `neutral` that this version has."""
        return self.call(**required, **{name: value for name, value in neutral.items() if name in self.parameters})


@dataclass(frozen=True)
class Handle:
    """The imported pieces that a backend needs; `activation_types` by name, as their values."""

    functions: Mapping[str, Function]
    activation_types: Mapping[str, int]

    def __getitem__(self, name: str) -> Function:
        return self.functions[name]

    def activation_type(self, name: str) -> int:
        """Return the enum's value; FlashInferUnavailableError where this version has no such member."""
        if name not in self.activation_types:
            raise FlashInferUnavailableError(
                Reason("flashinfer's ActivationType", f"lacks {name}", name, "upgrade flashinfer-python")
            )
        return self.activation_types[name]


#: Where each function lives, with the parameters that a call names without a way around.
FUNCTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cute_dsl_fused_moe": (
        "flashinfer.fused_moe",
        (
            "x", "x_sf", "token_selected_experts", "token_final_scales", "w1_weight", "w1_weight_sf", "w1_alpha",
            "fc2_input_scale", "w2_weight", "w2_weight_sf", "w2_alpha", "num_experts", "top_k", "num_local_experts",
            "local_expert_offset", "output_dtype", "use_fused_finalize", "moe_output", "aux_stream", "enable_pdl",
            "activation_type", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "situ_beta", "situ_linear_beta",
            "quant_mode",
        ),
    ),
    "trtllm_fp4_block_scale_routed_moe": (
        "flashinfer.fused_moe",
        (
            "topk_ids", "routing_bias", "hidden_states", "hidden_states_scale", "gemm1_weights", "gemm1_weights_scale",
            "gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_weights", "gemm2_weights_scale",
            "gemm2_bias", "output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar", "num_experts",
            "top_k", "n_group", "topk_group", "intermediate_size", "local_expert_offset", "local_num_experts",
            "routed_scaling_factor", "routing_method_type", "do_finalize", "activation_type", "output",
        ),
    ),
    "cutlass_fused_moe": (
        "flashinfer.fused_moe",
        (
            "input", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc2_expert_weights",
            "output_dtype", "quant_scales", "output", "use_w4_group_scaling", "activation_type", "use_fused_finalize",
            "situ_beta", "situ_linear_beta", "tp_size", "tp_rank", "ep_size", "ep_rank",
        ),
    ),
    "interleave_moe_weights_for_sm90_mixed_gemm": ("flashinfer.fused_moe", ("weight", "quant_type")),
    "fp4_quantize": (
        "flashinfer",
        ("input", "global_scale", "sf_vec_size", "sf_use_ue8m0", "is_sf_swizzled_layout", "backend"),
    ),
    "mxfp8_quantize": ("flashinfer", ("input", "is_sf_swizzled_layout", "alignment", "backend")),
}  # fmt: skip
#: Other names of the same function, tried in turn: CuteDSL's had another one before 0.7.0.
ALIASES: Mapping[str, tuple[str, ...]] = {"cute_dsl_fused_moe": ("cute_dsl_fused_moe", "cute_dsl_fused_moe_nvfp4")}


def load(names: tuple[str, ...]) -> Handle:
    """Import FlashInfer and compare the functions `names` with what the calls pass.

    Raises FlashInferUnavailableError, whatever the import raises: FlashInfer looks for the device, CuteDSL's libraries
    and Triton at import, and leaves functions out where one is missing.
    """
    try:
        enum = importlib.import_module("flashinfer.fused_moe").ActivationType
        types = {member.name: int(member) for member in enum}
        found = {name: _function(name) for name in names}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:400]
        remedy = "`portamoe probe --deep` imports it in a child process; reinstall it, or use triton_fused or torch"
        raise FlashInferUnavailableError(
            Reason("flashinfer import", text, "an import that succeeds", remedy)
        ) from error
    functions = {}
    for name, function in found.items():
        if function is None:
            raise FlashInferUnavailableError(_absent(name))
        if missing := parameter_reason(name, function.parameters):
            raise FlashInferUnavailableError(missing)
        functions[name] = function
    return Handle(functions, types)


def _function(name: str) -> Function | None:
    module = importlib.import_module(FUNCTIONS[name][0])
    for alias in ALIASES.get(name, (name,)):
        if (call := getattr(module, alias, None)) is not None:
            return Function(name, call, frozenset(inspect.signature(call).parameters))
    return None


def _absent(name: str) -> Reason:
    hint = "install triton and nvidia-cutlass-dsl: FlashInfer leaves this function out without them"
    return Reason(f"flashinfer's {name}", "absent", "installed dependencies", hint)


def parameter_reason(name: str, parameters: frozenset[str]) -> Reason | None:
    """Return why a function with these parameters cannot be called, or None."""
    if missing := [p for p in FUNCTIONS[name][1] if p not in parameters]:
        return Reason(
            f"{name}'s parameters", f"lacks {', '.join(missing)}", None, "install another FlashInfer, or use torch"
        )
    return None


def localised(topk_ids: torch.Tensor, topk_weights: torch.Tensor, spec: MoESpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Mark slots of other ranks with -1 and merge an expert that a token names twice, without a host sync.

    returns  (T, K) int32 ids of the whole layer or -1; (T, K) float32 weights, 0 beside -1

    FlashInfer's sort skips ids outside the local range, -1 too (include/flashinfer/trtllm/fused_moe/RoutingKernel.cuh).
    """
    import torch

    ids, local = topk_ids.int(), spec.local_experts
    here = (ids >= local.start) & (ids < local.stop)
    same = (ids[:, :, None] == ids[:, None, :]) & here[:, None, :]
    weights = torch.where(same, topk_weights.float()[:, None, :], 0.0).sum(-1)
    kept = here & ~same.tril(-1).any(-1)
    return torch.where(kept, ids, -1).contiguous(), torch.where(kept, weights, 0.0).contiguous()


def quantised_nvfp4(handle: Handle, x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (T, H) as packed NVFP4 (T, H/2) uint8 and linear block scales (T, H/16) E4M3.

    factor: (1,) float32, 1 / input scale
    """
    import torch

    packed, scale = handle["fp4_quantize"](
        {
            "input": x,
            "global_scale": factor,
            "sf_vec_size": 16,
            "sf_use_ue8m0": False,
            "is_sf_swizzled_layout": False,
            "backend": "cuda",
        },
        {"nvfp4_4over6": None, "is_sf_8x4_layout": False, "is_global_scale_inversed": False},
    )
    return packed.view(torch.uint8), scale.view(torch.float8_e4m3fn).reshape(x.shape[0], x.shape[1] // 16)


def quantised_mxfp8(handle: Handle, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (T, H) as E4M3 (T, H) and linear E8M0 scales (T, H/32) uint8."""
    import torch

    values, scale = handle["mxfp8_quantize"](
        {"input": x, "is_sf_swizzled_layout": False, "alignment": 32, "backend": "cuda"}, {}
    )
    return values, scale.view(torch.uint8).reshape(x.shape[0], x.shape[1] // 32)
