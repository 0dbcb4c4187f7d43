"""Whether portamoe serves a layer of vLLM: a decision as data, with the reason for each refusal.

Nothing of vLLM is imported: its `FusedMoEConfig` is read by attribute names, which the contract tests hold against the
real class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from portamoe import registry
from portamoe.activations import Activation, SiTU, SwiGLU
from portamoe.checks import present
from portamoe.decision import Accepted, BackendRejected, Reason
from portamoe.detection import DetectionError, detect
from portamoe.dispatch import choose_verified
from portamoe.integrations.vllm import VARIABLE
from portamoe.spec import MoESpec

if TYPE_CHECKING:
    from portamoe.backend import Backend
    from portamoe.device import Device
    from portamoe.registry import Selection

_STOCK = "vLLM's own method serves it"
#: From this compute capability on vLLM has a native path with SiTU of its own (FLASHINFER_TRTLLM_MXFP4_MXFP8).
_NATIVE_CAPABILITY = (10, 0)


@dataclass(frozen=True)
class LayerDecision:
    """Who serves a layer's experts.

    backend:    of portamoe, or None: vLLM's own method does
    spec:       sizes of this rank; the local range starts at 0 until the layer's expert map is known
    reasons:    why not portamoe; empty if it does
    selection:  portamoe's choice among its backends, where it came to one
    """

    backend: Backend | None
    spec: MoESpec | None
    reasons: tuple[Reason, ...]
    selection: Selection | None = None

    def __str__(self) -> str:
        if self.backend is None or self.selection is None:
            return "portamoe leaves MXFP4 experts to vLLM: " + "; ".join(map(str, self.reasons))
        decided = next(d for d in self.selection.decisions if d.backend == self.backend.name)
        how = decided.verification if isinstance(decided, Accepted) else "unverified"
        return f"portamoe serves MXFP4 experts: {self.selection} ({how})"


def decide(moe: Any) -> LayerDecision:
    """Return who serves the layer that vLLM's FusedMoEConfig `moe` describes; a canary runs where none has before."""
    with plain_torch():
        spec, reasons = None, asked_for(moe) + layer_reasons(moe)
        try:
            spec = spec_of(moe, activation_of(moe))
        except ValueError as error:
            reasons.append(Reason("layer", str(error), None, _STOCK))
        if reasons or spec is None:
            return LayerDecision(None, spec, tuple(reasons))
        return _choose(moe, spec)


def asked_for(moe: Any) -> list[Reason]:
    """Return what the user asked for that is not portamoe: its switch and --moe-backend."""
    off = os.environ.get(VARIABLE) == "0"
    explicit = getattr(moe, "moe_backend", "auto")
    return present(
        Reason(VARIABLE, 0, None, _STOCK) if off else None,
        None if explicit == "auto" else Reason("--moe-backend", str(explicit), "auto", _STOCK),
    )


def layer_reasons(moe: Any) -> list[Reason]:
    """Return what the layer has that portamoe's experts do not do inside vLLM."""
    parallel, dtype = moe.moe_parallel_config, moe.in_dtype
    batched = bool(parallel.use_all2all_kernels) and not parallel.use_ag_rs_all2all_kernels
    if getattr(parallel, "use_passthrough_all2all", False):
        batched = True
    shared = bool(getattr(moe, "aiter_fmoe_shared_expert_enabled", False))
    return present(
        None if dtype is torch.bfloat16 else Reason("dtype", str(dtype), "torch.bfloat16", _STOCK),
        Reason("bias", "in the experts", "none", _STOCK) if moe.has_bias else None,
        Reason("LoRA", "enabled", "none", "the LoRA of w2 needs rows that no hook hands over; " + _STOCK)
        if moe.is_lora_enabled
        else None,
        Reason("EPLB", "enabled", "off", _STOCK) if parallel.enable_eplb else None,
        Reason("--all2all-backend", str(parallel.all2all_backend), "allgather_reducescatter", _STOCK)
        if batched
        else None,
        Reason("AITER's fused shared experts", "enabled", "off", _STOCK) if shared else None,
    )


def activation_of(moe: Any) -> Activation:
    """Return the activation as portamoe has it; ValueError for those that the experts inside vLLM do not have."""
    name = str(getattr(moe.activation, "value", moe.activation))
    if name == "situ":
        beta, linear = moe.activation_situ_beta, moe.activation_situ_linear_beta
        if beta is None:
            raise ValueError("activation situ without activation_situ_beta")
        # vLLM's kernels take a linear_beta <= 0 for "not set".
        return SiTU(beta=float(beta), linear_beta=None if linear is None or linear <= 0 else float(linear))
    if name == "silu":
        if (moe.swiglu_alpha or 1.0) != 1.0 or moe.swiglu_beta:
            raise ValueError(f"activation silu with alpha {moe.swiglu_alpha} and beta {moe.swiglu_beta}")
        return SwiGLU(limit=None if moe.swiglu_limit is None else float(moe.swiglu_limit))
    raise ValueError(f"activation {name}, expected situ or silu")


def spec_of(moe: Any, activation: Activation, local_experts: range | None = None) -> MoESpec:
    """Return the spec of this rank; ValueError where the sizes are no multiple of MXFP4's block."""
    return MoESpec(
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition,
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        activation=activation,
        local_experts=range(moe.num_local_experts) if local_experts is None else local_experts,
    )


def max_tokens(moe: Any) -> int:
    """Return the tokens that reach this rank's experts at most: those of all data-parallel ranks, gathered."""
    return int(moe.max_num_tokens) * max(1, int(moe.moe_parallel_config.dp_size))


def torch_device(moe: Any) -> torch.device:
    """Return the device of the layer; vLLM names only its type and makes it the current one."""
    device = torch.device(moe.device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def plain_torch() -> Iterator[None]:
    """Undo what vLLM sets while it builds a model: a default device and bf16 as the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _choose(moe: Any, spec: MoESpec) -> LayerDecision:
    try:
        device = detect().device(str(torch_device(moe)))
        chosen = choose_verified(spec, device, max_tokens=max_tokens(moe))
    except (BackendRejected, DetectionError, ValueError) as error:
        return LayerDecision(None, spec, (Reason("portamoe", str(error), None, _STOCK),))
    named = bool(os.environ.get(registry.VARIABLE))
    reasons = present(
        None if named else _slow_reason(chosen.backend),
        None if named or os.environ.get(VARIABLE) == "1" else _native_reason(device),
        _capture_reason(chosen.backend, moe),
    )
    if reasons:
        return LayerDecision(None, spec, tuple(reasons), chosen.selection)
    return LayerDecision(chosen.backend, spec, (), chosen.selection)


def _slow_reason(backend: Backend) -> Reason | None:
    if backend.name != "torch":
        return None
    remedy = f"`portamoe probe capabilities` says why no other fits; {registry.VARIABLE}=torch takes it all the same"
    return Reason("backend", "torch, for tests and rare devices", "one with GPU kernels", remedy)


def _native_reason(device: Device) -> Reason | None:
    capability = device.capability
    if capability is None or capability < _NATIVE_CAPABILITY:
        return None
    remedy = f"vLLM computes SiTU natively there; {VARIABLE}=1 takes portamoe all the same"
    return Reason("arch", device.arch, "before sm_100", remedy)


def _capture_reason(backend: Backend, moe: Any) -> Reason | None:
    size = int(getattr(moe, "max_capture_size", 0) or 0)
    if size == 0 or getattr(backend, "graph_safe", False):
        return None
    return Reason(f"graphs of up to {size} tokens", backend.name, "a backend that can be captured", "--enforce-eager")
