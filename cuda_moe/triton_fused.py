"""Fused MXFP4 and bf16 experts in Triton for CUDA: SM80 to SM12x, tuned on SM90.

GEMM1 applies the activation in its epilogue, so nothing of size rows x 2I is written; weights are decoded in
registers. Up to 16 tokens take two or three launches, more take five, and six where a window may not hold all rows.
Rounded to bf16: h, the rows of GEMM2 (not up to 16 tokens) and the result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portamoe.checks import (
    cache_reason,
    memory_reason,
    present,
    torch_reason,
    triton_reason,
    vendor_reason,
    weight_bytes,
)
from portamoe.decision import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cuda_moe.prepared import FusedWeights
    from cuda_moe.tune import TuneReport
    from portamoe.backend import WarmUpReport
    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertSource

#: tl.inline_asm_elementwise, tl.gather and launch_pdl as they are used here.
LEAST_TRITON = "3.3"
LEAST_TORCH = "2.6"
MOST_SLOTS = 32
MOST_LOCAL_EXPERTS = 4096
BF16_MULTIPLE = 16
#: Rows of a default window over the expected ones; up to SMALL_PAIRS pairs a window holds them all.
WINDOW_MARGIN = 1.3
SMALL_PAIRS = 16384


@dataclass(frozen=True)
class TritonFused:
    """The backend; see portamoe.backend.Backend for the contract.

    batch_invariant: a token's result is bitwise the same whatever the batch and the window; one kind of matrix
    instruction serves every size, and few tokens pay for tiles of 32.
    graph_safe, deterministic:  the same inputs give the same bits, in a graph or not, whatever max_local_rows is
    roundings:  4 is the class; three are made: h, GEMM2's rows (float32 up to 16 tokens) and the result
    """

    batch_invariant: bool = False
    package: str = "cuda_moe"
    graph_safe: bool = True
    deterministic: bool = True
    roundings: int = 4
    x_dtypes: tuple[str, ...] = ("bfloat16",)

    @property
    def name(self) -> str:
        """Name shown by the probe."""
        return "triton_fused_invariant" if self.batch_invariant else "triton_fused"

    @property
    def priority(self) -> int:
        """The invariant variant is slower, so it comes after."""
        return 65 if self.batch_invariant else 80

    def check(self, spec: MoESpec, device: Device) -> list[Reason]:
        """Return every reason why `spec` cannot be served on `device`."""
        reasons = present(
            vendor_reason(device, "nvidia"),
            _capability_reason(device),
            torch_reason(device, LEAST_TORCH),
            triton_reason(device.host, LEAST_TRITON),
            cache_reason(device.host, "TRITON_CACHE_DIR"),
            memory_reason(weight_bytes(spec), device),
        )
        if spec.weight_format not in {"mxfp4", "bf16"}:
            reasons.append(Reason("weight format", spec.weight_format, "mxfp4 or bf16", "use a flashinfer backend"))
        if spec.activation_format != "bf16":
            reasons.append(Reason("activation format", spec.activation_format, "bf16", "use a flashinfer backend"))
        if spec.activation.name not in {"situ", "swiglu", "swiglu_oai", "swiglu_step", "geglu", "relu2"}:
            reasons.append(Reason("activation", spec.activation.name, None, "use the torch backend"))
        if spec.top_k > MOST_SLOTS:
            reasons.append(Reason("top_k", spec.top_k, f"<= {MOST_SLOTS}", "use the torch backend"))
        if spec.num_local_experts > MOST_LOCAL_EXPERTS:
            count = spec.num_local_experts
            reasons.append(Reason("local experts", count, f"<= {MOST_LOCAL_EXPERTS}", "spread them over more ranks"))
        if spec.weight_format == "bf16":
            for name in ("hidden_size", "intermediate_size"):
                if (size := getattr(spec, name)) % BF16_MULTIPLE:
                    reasons.append(Reason(name, size, f"a multiple of {BF16_MULTIPLE}", "use the torch backend"))
        return reasons

    def only_on_request(self, spec: MoESpec, device: Device) -> Reason | None:  # noqa: ARG002
        """Return why the automatic choice passes over this backend, or None."""
        if self.batch_invariant:
            return Reason("batch invariance", "slower at few tokens", None, f"ask for backend={self.name!r}")
        return None

    def prepare(
        self,
        weights: ExpertSource,
        spec: MoESpec,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> FusedWeights:
        """Convert canonical weights to fragments on `device`, one expert at a time."""
        from cuda_moe.prepared import prepare

        return prepare(weights, spec, device, self.batch_invariant, progress)

    def default_max_local_rows(self, spec: MoESpec, max_tokens: int) -> int:
        """Return all pairs where they are few or all local, else 1.3 times what uniform routing sends here."""
        pairs = max_tokens * spec.top_k
        expected = pairs * spec.num_local_experts / spec.num_experts
        return min(pairs, max(SMALL_PAIRS, -(-int(WINDOW_MARGIN * expected) // 128) * 128))

    def workspace_bytes(self, spec: MoESpec, max_tokens: int, max_local_rows: int) -> int:
        """Return exactly how many bytes `forward` uses beside its output for up to `max_tokens` tokens."""
        from cuda_moe.prepared import planning_capability
        from cuda_moe.workspace import workspace_bytes

        if max_tokens < 1 or max_local_rows < 1:
            raise ValueError(f"max_tokens {max_tokens} and max_local_rows {max_local_rows} must be at least 1")
        return workspace_bytes(spec, max_tokens, max_local_rows, planning_capability(), self.batch_invariant)

    def warm_up(self, prepared: FusedWeights, max_tokens: int, max_local_rows: int) -> WarmUpReport:
        """Compile all that `forward` launches for 1 ... max_tokens tokens; `forward` then compiles nothing."""
        from cuda_moe.calls import kernels_of
        from portamoe.backend import WarmUpReport

        began = time.perf_counter()
        sources = kernels_of(prepared, max_tokens, max_local_rows)
        binaries = prepared.compile(sources)
        return WarmUpReport(binaries, time.perf_counter() - began)

    def tune(self, spec: MoESpec, device: torch.device) -> TuneReport:
        """Measure tiles for `spec` and write them to $PORTAMOE_TUNED_DIR; raises ValueError where that is not set."""
        from cuda_moe import tune

        return tune.run(spec, device)

    def forward(
        self,
        prepared: FusedWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        workspace: torch.Tensor,
        out: torch.Tensor,
        *,
        max_local_rows: int,
        **hooks: Any,
    ) -> None:
        """Write this rank's weighted sum of its experts to `out`; no host sync, no allocation.

        Raises TypeError for hooks and dtypes, ValueError for shapes, strides, alignment and a small workspace.
        """
        if hooks:
            raise TypeError(f"{self.name} has no hooks, got {sorted(hooks)}")
        tokens = x.shape[0]
        call = prepared.calls.get((tokens, max_local_rows, topk_ids.dtype))
        if call is None:
            from cuda_moe.calls import Call

            call = Call(prepared, tokens, max_local_rows, topk_ids.dtype)
            prepared.calls[tokens, max_local_rows, topk_ids.dtype] = call
        call.check(x, topk_ids, topk_weights, workspace, out)
        if tokens:
            call.launch(x, topk_ids, topk_weights, workspace, out)


def _capability_reason(device: Device) -> Reason | None:
    capability = device.capability
    if device.vendor != "nvidia" or (capability is not None and capability >= (8, 0)):
        return None
    return Reason("compute capability", device.arch, ">= sm_80", "bf16 matrix instructions start there; use torch")


BACKEND = TritonFused()
BATCH_INVARIANT = TritonFused(batch_invariant=True)
