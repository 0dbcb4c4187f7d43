"""Kimi-K3's whole MoE block: `LatentMoE`, from a checkpoint folder to the block's output."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from portamoe import projections
from portamoe.checkpoints import Checkpoint
from portamoe.checks import present, triton_reason
from portamoe.decision import Reason
from portamoe.detection import detect
from portamoe.layer import RoutedExperts
from portamoe.models._block_ops import BlockOps, TorchOps, TritonOps
from portamoe.models._decode_graph import DecodeGraph

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from portamoe.backend import WarmUpReport
    from portamoe.checkpoints.kimi_block import BlockConfig, BlockWeights

    Linear = Callable[..., torch.Tensor]
    Reduction = Callable[[torch.Tensor], torch.Tensor]

#: Most tokens of a captured call: what the one-launch projections are planned for.
DECODE_TOKENS = 16
#: The kernels beside the products are bf16 and need dot operands of 16 rows, as Triton has them since then.
_LEAST_TRITON = "3.3"
_DTYPES = (torch.bfloat16, torch.float32)


class LatentMoE(nn.Module):
    """Kimi-K3's MoE block, with D the model's hidden size and H the latent one, the width of the routed experts.

        ids, w = router(x)                          float32 logits, sigmoid; the bias takes part in the selection only
        routed = Σ_k w_k · expert(id_k)(down · x)   this rank's experts, (T, H)
        y      = up · rmsnorm(reduce(routed)) + shared(x)

    The scaling factor is part of w, as in the model: before the norm.

    config, weights:  as `Checkpoint.block` returns them
    experts:          this rank's routed experts, on the device that the block is to run on
    dtype:            torch.bfloat16, or torch.float32 for reference where the experts' backend takes it
    reduce:           called with this rank's partial sum (T, H), returns the sum over all ranks (an all-reduce, maybe
                      in place); needed when the rank holds a part of the experts: the norm is not linear, so the sum
                      must be complete before it. Where the shared experts are split, called with theirs (T, D) too
    kernels:          "triton" or "torch" for routing, SiTU and norm; default: Triton on a GPU that has it, in bf16
    linear:           y = x · weightᵀ (+ residual) of the projections; default: `portamoe.linear`
    overlap:          run the router and the shared experts on a second stream; default: on a GPU, up to 16 tokens

    The module is for inference and has no parameters, buffers or state_dict entries, like `RoutedExperts`.

    Raises ValueError or TypeError for arguments that do not fit each other.
    """

    def __init__(
        self,
        config: BlockConfig,
        weights: BlockWeights,
        experts: RoutedExperts,
        *,
        dtype: torch.dtype = torch.bfloat16,
        reduce: Reduction | None = None,
        kernels: Literal["triton", "torch"] | None = None,
        linear: Linear | None = None,
        overlap: bool | None = None,
    ) -> None:
        super().__init__()
        if dtype not in _DTYPES:
            raise TypeError(f"dtype is {dtype}, expected torch.bfloat16 or torch.float32")
        _check_fit(config, experts, reduce)
        _check_origin(weights, experts)
        _check_weights(config, weights)
        self.config, self.experts, self.dtype, self.device = config, experts, dtype, experts.device
        self._reduce = reduce
        self._ops = _block_ops(self.device, dtype, kernels, own_linear=linear is None)
        self._linear = projections.linear if linear is None else linear
        self._overlap = self.device.type == "cuda" if overlap is None else overlap
        if self._overlap and self.device.type != "cuda":
            raise ValueError(f"overlap needs a GPU with streams, the experts are on {self.device}")
        self._router = weights.router.to(self.device, dtype)
        self._bias = weights.correction_bias.to(self.device, torch.float32)
        self._down, self._up = (w.to(self.device, dtype) for w in (weights.down, weights.up))
        self._norm = None if weights.norm is None else weights.norm.to(self.device, dtype)
        self._gate_up = weights.shared_gate_up.to(self.device, dtype)
        self._shared_down = weights.shared_down.to(self.device, dtype)
        self._shared_is_partial = 2 * config.shared_intermediate_size != self._gate_up.shape[0]
        if self._shared_is_partial and reduce is None:
            raise ValueError(
                f"the weights hold {self._gate_up.shape[0] // 2} of {config.shared_intermediate_size} intermediate "
                "values of the shared experts, so their output is a partial sum; pass reduce"
            )
        self._graphs: dict[int, DecodeGraph] = {}
        #: Numbers of tokens for which projections that are launched dependent on the kernel before them are compiled.
        self._dependent: set[int] = set()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        layer: int,
        *,
        max_tokens: int,
        experts: range | None = None,
        tensor_parallel: tuple[int, int] = (0, 1),
        shared_parallel: tuple[int, int] = (0, 1),
        device: torch.device | str | None = None,
        backend: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> LatentMoE:
        """Build one layer's block, or a rank's part of it.

        checkpoint:       a folder, or a `Checkpoint` that was opened once for all layers
        max_tokens:       the most tokens T of a call
        experts:          ids of the routed experts on this rank; default: all
        tensor_parallel:  (rank, ranks) of the routed experts' intermediate dimension
        shared_parallel:  (rank, ranks) of the shared experts' intermediate dimension; default: every rank has all
        device, backend, progress:  as for `RoutedExperts`
        options:          dtype, reduce, kernels, linear, overlap of the class

        Raises CheckpointError for a checkpoint that does not hold such a block, and what class and `RoutedExperts` do.
        """
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        config, weights = opened.block(layer, shared_parallel=shared_parallel)
        spec, source = opened.experts(layer, experts, tensor_parallel=tensor_parallel)
        is_partial = spec.num_local_experts < spec.num_experts or tensor_parallel[1] > 1
        if is_partial and options.get("reduce") is None:
            raise _needs_reduce(f"experts {spec.local_experts}, tensor_parallel {tensor_parallel}")
        routed = RoutedExperts(spec, source, max_tokens=max_tokens, device=device, backend=backend, progress=progress)
        return cls(config, weights, routed, **options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the block's output, without the residual around the block.

        hidden:  (..., D) of the block's dtype — T tokens in all; another layout than contiguous is copied
        returns  (..., D) of the same dtype

        Where a graph was captured for T, it is replayed, unless the caller is capturing one himself.

        Raises ValueError or TypeError naming what came and what was expected.
        """
        self._check(hidden)
        x = hidden.reshape(-1, self.config.hidden_size).contiguous()
        graph = self._graphs.get(x.shape[0])
        if graph is not None and not torch.cuda.is_current_stream_capturing():
            return graph(x).clone().view(hidden.shape)
        return self._run(x).view(hidden.shape)

    def capture(self, tokens: Iterable[int] = range(1, DECODE_TOKENS + 1)) -> None:
        """Capture calls of these numbers of tokens as CUDA graphs, which `forward` then replays.

        Raises RuntimeError where the device has no graphs or the experts' backend cannot be captured, ValueError for
        more tokens than 16 or than the block takes.
        """
        backend = self.experts.backend
        if self.device.type != "cuda":
            raise RuntimeError(f"graphs need a GPU, the block is on {self.device}")
        if not getattr(backend, "graph_safe", False):
            raise RuntimeError(f"the backend {backend.name} cannot run inside a graph capture; use another backend")
        most = min(DECODE_TOKENS, self.experts.max_tokens)
        for count in tokens:
            if not 1 <= count <= most:
                raise ValueError(f"tokens has {count}, expected 1 to {most}")
            with self._on_device():
                self._compile_dependent(count)
                self._graphs[count] = DecodeGraph(self._run, count, self.config.hidden_size, self.dtype, self.device)

    def decode_graph(self, tokens: int) -> DecodeGraph:
        """Return the captured call of `tokens` tokens, whose buffers a caller may write and read without copies."""
        if tokens not in self._graphs:
            raise ValueError(f"no graph was captured for {tokens} tokens, there are {sorted(self._graphs)}")
        return self._graphs[tokens]

    def warm_up(self) -> WarmUpReport:
        """Compile everything that calls of 1 … max_tokens tokens will launch; returns the experts' report."""
        report = self.experts.warm_up()
        most = self.experts.max_tokens
        with self._on_device():
            for count in sorted({min(n, most) for n in (*range(1, DECODE_TOKENS + 1), 2 * DECODE_TOKENS, most)}):
                self._run(torch.zeros(count, self.config.hidden_size, dtype=self.dtype, device=self.device))
                self._compile_dependent(count)
        return report

    def _compile_dependent(self, tokens: int) -> None:
        """Compile the dependent launches of a call of `tokens` tokens, which a capture cannot."""
        if tokens <= DECODE_TOKENS and isinstance(self._ops, TritonOps) and self._ops.pdl:
            x = torch.zeros(tokens, self.config.hidden_size, dtype=self.dtype, device=self.device)
            self._run(x, dependent=True)
            self._dependent.add(tokens)

    def _run(self, x: torch.Tensor, *, dependent: bool | None = None) -> torch.Tensor:
        """Compute the block for x (T, D), contiguous, on the current stream, and on a second one beside it.

        dependent:  let projections begin while the kernel before them ends, where that is one of ours on the same
                    stream; default: in a capture, where they are compiled
        """
        if x.shape[0] == 0:
            return torch.empty_like(x)
        if dependent is None:
            dependent = x.shape[0] in self._dependent and torch.cuda.is_current_stream_capturing()
        with self._on_device():
            if self._overlap and x.shape[0] <= DECODE_TOKENS:
                return self._run_overlapped(x, dependent)
            ids, weights = self._route(x)
            latent = self._product(x, self._down)
            routed = self.experts(latent, ids, weights)
            shared = self._shared(x, behind_routing=False, dependent=dependent)
            return self._finish(routed, shared, dependent)

    def _run_overlapped(self, x: torch.Tensor, dependent: bool) -> torch.Tensor:
        """Let the router run beside the down projection, and the shared experts beside that and the routed experts."""
        main, side = torch.cuda.current_stream(), _side_stream(self.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            ids, weights = self._route(x)
            chosen = side.record_event()
            shared = self._shared(x, behind_routing=dependent, dependent=dependent)
        latent = self._product(x, self._down)
        main.wait_event(chosen)
        routed = self.experts(latent, ids, weights)
        main.wait_stream(side)
        if not torch.cuda.is_current_stream_capturing():
            for tensor in (ids, weights, shared):  # made on the side stream, read on this one
                tensor.record_stream(main)
        return self._finish(routed, shared, dependent)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ops.route(x, self._router, self._bias, self.config.router)

    def _shared(self, x: torch.Tensor, *, behind_routing: bool = False, dependent: bool = False) -> torch.Tensor:
        """Return the shared experts' output (T, D), a partial sum where they are split over ranks."""
        gate_up = self._product(x, self._gate_up, dependent=behind_routing)
        h = self._ops.activate(gate_up, self.config.activation)
        return self._product(h, self._shared_down, dependent=dependent)

    def _finish(self, routed: torch.Tensor, shared: torch.Tensor, dependent: bool) -> torch.Tensor:
        """Reduce, normalise, project up and add the shared experts.

        The norm's kernel, launched plainly, stands between the join of the streams and the up projection: a dependent
        launch right behind a join has two producers, of which one is on another stream.
        """
        if self._reduce is not None:
            routed = _reduced(self._reduce, routed)
            if self._shared_is_partial:
                shared = _reduced(self._reduce, shared)
        if self._norm is None or self.config.norm_eps is None:
            return self._product(routed, self._up, shared)
        normed = self._ops.norm(routed, self._norm, self.config.norm_eps)
        return self._product(normed, self._up, shared, dependent=dependent)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, *, dependent: bool = False
    ) -> torch.Tensor:
        """Return x · weightᵀ (+ residual); `dependent` only right behind a kernel of ours on the same stream."""
        if dependent:
            return projections.linear(x, weight, residual, pdl=True)
        return self._linear(x, weight, residual)

    def _check(self, hidden: torch.Tensor) -> None:
        size = self.config.hidden_size
        if hidden.dim() < 1 or hidden.shape[-1] != size:
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}, expected (..., {size})")
        if hidden.dtype != self.dtype:
            raise TypeError(f"hidden is {hidden.dtype}, the block was made for {self.dtype}")
        if hidden.device != self.device:
            raise ValueError(f"hidden is on {hidden.device}, the block on {self.device}")
        if hidden.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("LatentMoE is for inference and has no backward; call it under torch.no_grad()")

    def _on_device(self) -> Any:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def extra_repr(self) -> str:
        """Show sizes and choices, for `print(model)`."""
        c = self.config
        return (
            f"hidden={c.hidden_size}, latent={c.latent_size}, shared={self._gate_up.shape[0] // 2} of "
            f"{c.shared_intermediate_size}, kernels={self._ops.name}, overlap={self._overlap}, dtype={self.dtype}"
        )


def _reduced(reduce: Reduction, partial: torch.Tensor) -> torch.Tensor:
    total = reduce(partial)
    if not isinstance(total, torch.Tensor) or (total.shape, total.dtype) != (partial.shape, partial.dtype):
        found = f"{total.dtype} {tuple(total.shape)}" if isinstance(total, torch.Tensor) else repr(total)
        raise TypeError(
            f"reduce returned {found}, expected {partial.dtype} {tuple(partial.shape)}; one that adds in place must "
            "return its tensor too"
        )
    return total


def _check_fit(config: BlockConfig, experts: RoutedExperts, reduce: Reduction | None) -> None:
    spec = experts.spec
    for name, ours, theirs in (
        ("latent size", config.latent_size, spec.hidden_size),
        ("number of experts", config.num_experts, spec.num_experts),
        ("top_k", config.router.top_k, spec.top_k),
    ):
        if ours != theirs:
            raise ValueError(f"the block's {name} is {ours}, the experts' {theirs}")
    if config.activation != spec.activation:
        raise ValueError(f"the block's activation is {config.activation}, the experts' {spec.activation}")
    if spec.intermediate_size > config.moe_intermediate_size:
        raise ValueError(
            f"the experts' intermediate size is {spec.intermediate_size}, the block's {config.moe_intermediate_size}"
        )
    if reduce is None and spec.num_local_experts < spec.num_experts:
        raise _needs_reduce(f"experts {spec.local_experts} of {spec.num_experts}")
    if reduce is None and spec.intermediate_size < config.moe_intermediate_size:
        raise _needs_reduce(f"{spec.intermediate_size} of {config.moe_intermediate_size} intermediate values")
    if reduce is not None and not callable(reduce):
        raise TypeError(f"reduce is {reduce!r}, expected a function from a partial sum to the sum over all ranks")


def _check_origin(weights: BlockWeights, experts: RoutedExperts) -> None:
    """Layers of a model have the same shapes, so only where tensors were read tells them apart."""
    if weights.origin is not None and experts.origin is not None and weights.origin != experts.origin:
        raise ValueError(
            f"the block's weights are {weights.origin}, the experts {experts.origin}; take both from one layer, or "
            "use LatentMoE.from_checkpoint"
        )


def _check_weights(config: BlockConfig, weights: BlockWeights) -> None:
    E, D, H, S = config.num_experts, config.hidden_size, config.latent_size, weights.shared_down.shape[-1]
    expected: dict[str, tuple[int, ...]] = {
        "router": (E, D),
        "correction_bias": (E,),
        "down": (H, D),
        "up": (D, H),
        "shared_gate_up": (2 * S, D),
        "shared_down": (D, S),
    }
    if (weights.norm is None) != (config.norm_eps is None):
        raise ValueError(
            f"the weights have {'no' if weights.norm is None else 'a'} latent norm, but norm_eps is {config.norm_eps}"
        )
    if weights.norm is not None:
        expected["norm"] = (H,)
    for name, shape in expected.items():
        if (found := tuple(getattr(weights, name).shape)) != shape:
            raise ValueError(f"weights.{name} has shape {found}, expected {shape}")
    if not 0 < S <= config.shared_intermediate_size:
        raise ValueError(f"the weights hold {S} of {config.shared_intermediate_size} shared intermediate values")


def _needs_reduce(part: str) -> ValueError:
    return ValueError(
        f"this rank holds a part of the routed experts ({part}), so their sum is partial and the norm behind it would "
        "be wrong; pass reduce, the sum over all ranks"
    )


def _block_ops(device: torch.device, dtype: torch.dtype, wanted: str | None, *, own_linear: bool) -> BlockOps:
    if wanted not in (None, "triton", "torch"):
        raise ValueError(f"kernels must be 'triton' or 'torch', got {wanted!r}")
    if wanted == "torch" or (wanted is None and (device.type != "cuda" or dtype != torch.bfloat16)):
        return TorchOps()
    reasons = present(triton_reason(detect().host, _LEAST_TRITON))
    if dtype != torch.bfloat16:
        reasons.append(Reason("dtype", str(dtype), "torch.bfloat16"))
    if device.type != "cuda":
        reasons.append(Reason("device", str(device), "a GPU"))
    if not reasons:
        # A linear of the caller's may end in a copy, behind which nothing may be launched dependent.
        return TritonOps(pdl=own_linear and _has_dependent_launch(device))
    if wanted is None:
        return TorchOps()
    raise ValueError(f"kernels='triton' cannot be had: {'; '.join(map(str, reasons))}")


def _has_dependent_launch(device: torch.device) -> bool:
    """Programmatic dependent launch is NVIDIA's, from Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers of a device: they never run at the same time."""
    return torch.cuda.Stream(device)
