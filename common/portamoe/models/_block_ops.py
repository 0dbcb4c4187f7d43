"""The small steps of the block around the experts, in plain torch and as one or two Triton kernels each.

Both compute in float32 and round once, and neither waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from portamoe.reference import full_precision

if TYPE_CHECKING:
    from portamoe.activations import SiTU
    from portamoe.routing import SigmoidRouter

#: torch.mm takes `out_dtype` on CUDA since then.
_LEAST_TORCH_OUT_DTYPE = (2, 8)
#: Tokens for which the router's logits are one product of ours that is split over D; more fill the device anyway.
_SPLIT_TOKENS = 64
_LOGIT_TOKENS, _LOGIT_EXPERTS, _LOGIT_COLUMNS = 16, 16, 256
#: Values of D of one program; short ranges, because 896 experts alone make too few programs for a GPU.
_SPLIT_COLUMNS = 1024
_SITU_COLUMNS = 1024


class BlockOps(Protocol):
    """What a block does beside its large products; T tokens, D hidden size, H latent size, E experts, K of them."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def route(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rule: SigmoidRouter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return topk_ids (T, K) int32 and topk_weights (T, K) float32 of x (T, D), from logits in float32."""
        ...

    def activate(self, gate_up: torch.Tensor, activation: SiTU) -> torch.Tensor:
        """Return the activation of [gate | up] (T, 2S) as (T, S), rounded once."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the RMSNorm of x (T, H): x / sqrt(mean(x²) + eps) · weight, rounded once."""
        ...


class TorchOps:
    """Plain torch: any device and dtype."""

    name = "torch"

    def route(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rule: SigmoidRouter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose by `SigmoidRouter`."""
        return rule(router_logits(x, weight), bias)

    def activate(self, gate_up: torch.Tensor, activation: SiTU) -> torch.Tensor:
        """Apply the activation's own formula."""
        return activation.apply(gate_up)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise in float32."""
        value = x.float()
        rate = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
        return (value * rate * weight.float()).to(x.dtype)


@dataclass(frozen=True)
class TritonOps:
    """Triton kernels for bf16 on a GPU: two launches for the routing, one for each of the others.

    pdl:  launch choice and activation programmatically dependent, each on the kernel that was launched right before it
          on the same stream: the logits', and whatever made gate_up; and let the kernels behind begin early
    """

    pdl: bool = False

    name: str = "triton"

    def route(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rule: SigmoidRouter
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Multiply in parts of D and let the choice add them up; torch multiplies where there are many tokens."""
        if x.shape[0] <= _SPLIT_TOKENS:
            return choose(partial_logits(x, weight, pdl=self.pdl), bias, rule, pdl=self.pdl)
        return choose(router_logits(x, weight)[None], bias, rule, pdl=self.pdl)

    def activate(self, gate_up: torch.Tensor, activation: SiTU) -> torch.Tensor:
        """Apply SiTU."""
        from portamoe.models._block_kernels import situ_kernel

        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        h = gate_up.new_empty((tokens, size))
        grid = (-(-size // _SITU_COLUMNS), tokens)
        formula = (activation.beta, activation.linear_beta)
        _launch(situ_kernel, grid, gate_up, h, size, *formula, _SITU_COLUMNS, self.pdl, num_warps=4, **_after(self.pdl))
        return h

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise one token a program."""
        from portamoe.models._block_kernels import norm_kernel

        out = torch.empty_like(x)
        _launch(
            norm_kernel, (x.shape[0],), x, weight, out, eps, x.shape[1], _power_of_2(x.shape[1]), self.pdl, num_warps=8
        )
        return out


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x · weightᵀ (T, E) in float32 without rounding x or weight: bf16 products are exact in float32."""
    if x.is_cuda and x.dtype == torch.bfloat16 and _mm_takes_out_dtype():
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    with full_precision():
        return x.float() @ weight.float().T


def _mm_takes_out_dtype() -> bool:
    major, minor = torch.__version__.split(".")[:2]
    return torch.version.hip is None and (int(major), int(minor)) >= _LEAST_TORCH_OUT_DTYPE


def partial_logits(x: torch.Tensor, weight: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Return the router's logits as parts (splits, T, E) float32 that add up to them."""
    from portamoe.models._block_kernels import router_logits_kernel

    # On a CPU Triton interprets, and would multiply the bits of bf16 instead of its values.
    widen = not x.is_cuda
    (tokens, width), experts = x.shape, weight.shape[0]
    steps = -(-min(width, _SPLIT_COLUMNS) // _LOGIT_COLUMNS)
    splits = -(-width // (steps * _LOGIT_COLUMNS))
    partial = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    grid = (-(-experts // _LOGIT_EXPERTS), splits, -(-tokens // _LOGIT_TOKENS))
    sizes = (experts, width, _LOGIT_TOKENS, _LOGIT_EXPERTS, _LOGIT_COLUMNS, steps)
    _launch(router_logits_kernel, grid, x, weight, partial, tokens, *sizes, widen, pdl, num_warps=4, num_stages=4)
    return partial


def choose(
    partial: torch.Tensor, bias: torch.Tensor, rule: SigmoidRouter, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (T, K) int32 and weights (T, K) float32 for logits in parts (splits, T, E), as `rule` has it."""
    from portamoe.models._block_kernels import route_kernel

    splits, tokens, experts = partial.shape
    ids = torch.empty((tokens, rule.top_k), dtype=torch.int32, device=partial.device)
    weights = torch.empty((tokens, rule.top_k), dtype=torch.float32, device=partial.device)
    bins, slots = _power_of_2(experts), _power_of_2(rule.top_k)
    constants = (experts, bins, rule.top_k, slots, splits, rule.renormalize, rule.routed_scaling_factor, pdl)
    _launch(route_kernel, (tokens,), partial, bias, ids, weights, tokens, *constants, num_warps=4, **_after(pdl))
    return ids, weights


def _after(pdl: bool) -> dict[str, bool]:
    """Return the launch options of a kernel that may begin while the one before it on its stream ends."""
    return {"launch_pdl": True} if pdl else {}


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    kernel[grid](*arguments, **options)


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
