"""Backend `triton_unfused`: MXFP4 experts as separate Triton kernels, align, GEMM1, activation, GEMM2, combine.

Made for gfx90a, where nothing native runs these experts; serves gfx942, gfx950 and RDNA too, NVIDIA from SM80 on, and
CPUs through Triton's interpreter. Between the kernels a caller may change the rows: `after_gemm1` and `after_gemm2`.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from portamoe.backend import WarmUpReport
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
from portamoe.device import is_rdna
from rocm_moe import plan

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from portamoe.backend import PreparedWeights
    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertSource
    from rocm_moe.evidence.limits import LimitsReport
    from rocm_moe.tune import TuneReport

_MIN_TORCH = "2.6"
_MIN_TRITON = "3.3"
#: AMD targets with matrix cores that Triton compiles for and whose tiles are known; RDNA3 and RDNA4 by predicate.
CDNA_TARGETS = ("gfx90a", "gfx942", "gfx950")
_MIN_CAPABILITY = (8, 0)
_HOOKS = frozenset({"after_gemm1", "after_gemm2"})
_USE_TORCH = "use the backend torch"


class TritonUnfusedBackend:
    """`portamoe.backend.Backend` in Triton, one kernel a step.

    graph_safe:     True — after `warm_up` a call can be captured and replayed with other routing
    deterministic:  True — the same inputs give the same bits, whatever max_local_rows is
    roundings:      4 — GEMM1's rows, h, GEMM2's rows and the result are rounded to bf16
    """

    name = "triton_unfused"
    package = "rocm_moe"
    priority = 50
    graph_safe = True
    deterministic = True
    roundings = 4
    x_dtypes = ("bfloat16",)
    row_dtype = "bfloat16"

    def check(self, spec: MoESpec, device: Device) -> list[Reason]:
        """Return what is missing: a supported arch, Triton, torch, the formats, the cache, memory."""
        interpreted = device.vendor == "cpu" and device.host.env.get("TRITON_INTERPRET") == "1"
        return present(
            None if interpreted else vendor_reason(device, "amd", "nvidia"),
            _arch_reason(device),
            torch_reason(device, _MIN_TORCH),
            triton_reason(device.host, _MIN_TRITON),
            _format_reason("weight format", spec.weight_format, "mxfp4"),
            _format_reason("activation format", spec.activation_format, "bf16"),
            None if interpreted else cache_reason(device.host, "TRITON_CACHE_DIR"),
            memory_reason(weight_bytes(spec), device),
        )

    def only_on_request(self, spec: MoESpec, device: Device) -> Reason | None:  # noqa: ARG002
        """Return a reason on CPUs: the interpreter is a thousand times slower than the backend torch."""
        if device.vendor != "cpu":
            return None
        return Reason("speed", "Triton's interpreter", "a GPU", "ask for triton_unfused by name, or use torch")

    def prepare(
        self,
        weights: ExpertSource,
        spec: MoESpec,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> PreparedWeights:
        """Bring each expert into the kernels' order on `device`; the result takes the canonical bytes.

        Raises ValueError or TypeError that names the tensor of an expert that does not fit `spec`.
        """
        from rocm_moe import unfused_weights

        return unfused_weights.prepare(weights, spec, device, progress)

    def default_max_local_rows(self, spec: MoESpec, max_tokens: int) -> int:
        """Return twice the rows that uniform routing brings here, rounded up; all pairs if that is less."""
        return plan.default_max_local_rows(spec, max_tokens)

    def workspace_bytes(self, spec: MoESpec, max_tokens: int, max_local_rows: int) -> int:
        """Return exactly what `forward` uses beside its output, whatever the routing."""
        return plan.workspace_bytes(spec, max_tokens, max_local_rows)

    def warm_up(
        self,
        prepared: PreparedWeights,
        max_tokens: int,  # noqa: ARG002
        max_local_rows: int,  # noqa: ARG002
    ) -> WarmUpReport:
        """Compile and load every kernel that calls of this spec can launch, whatever the number of tokens."""
        from rocm_moe import unfused_weights

        start = time.perf_counter()
        count = unfused_weights.own(prepared).load_all()
        return WarmUpReport(binaries=count, seconds=time.perf_counter() - start)

    def measure_limits(self, spec: MoESpec, device: torch.device) -> LimitsReport:
        """Measure what the clock model assumes on `device` and evaluate this spec's GEMMs with it."""
        from rocm_moe.evidence import limits

        return limits.run(spec, device)

    def tune(self, spec: MoESpec, device: torch.device) -> TuneReport:
        """Measure tiles for `spec` and write them to $PORTAMOE_TUNED_DIR; raises ValueError where that is not set."""
        from rocm_moe import tune

        return tune.run(spec, device)

    def forward(
        self,
        prepared: PreparedWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        workspace: torch.Tensor,
        out: torch.Tensor,
        *,
        max_local_rows: int,
        **hooks: Any,
    ) -> None:
        """Write this rank's weighted sum of its experts to `out`; tensors as in `portamoe.backend.Backend.forward`.

        after_gemm1(rows, row_map):  rows (R, 2I) bf16 = [gate | up] before the activation, to be changed in place
        after_gemm2(rows, row_map):  rows (R, H) bf16 before they are weighted and summed
            Both are called once a window with an `unfused_call.RowMap`; rows from `row_map.count` on do not exist.

        Raises TypeError for other hooks and for weights prepared by another backend, ValueError for a workspace that is
        too small or memory that is not aligned, RuntimeError for a capture before `warm_up`.
        """
        if hooks and (unknown := sorted(set(hooks) - _HOOKS)):
            raise TypeError(f"triton_unfused has no hooks {unknown}; it takes {sorted(_HOOKS)}")
        _run()(prepared, (x, topk_ids, topk_weights, out), workspace, max_local_rows, hooks)

    def forward_rows(
        self,
        prepared: PreparedWeights,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        workspace: torch.Tensor,
        rows: torch.Tensor,
        *,
        max_local_rows: int,
    ) -> None:
        """Write the row of every (token, slot) of this rank to `rows`; see `portamoe.backend.RowBackend`.

        K is never split here: the rows are those of a call with hooks.
        """
        from rocm_moe import unfused_rows

        unfused_rows.forward_rows(prepared, x, topk_ids, workspace, rows, max_local_rows)

    def sum_rows(
        self,
        prepared: PreparedWeights,
        rows: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the weighted sum of `rows` with the kernel of `forward`; see `portamoe.backend.RowBackend`."""
        from rocm_moe import unfused_rows

        unfused_rows.sum_rows(prepared, rows, topk_ids, topk_weights, out)


@functools.cache
def _run() -> Callable[..., None]:
    """Return the function that launches a call; an import statement in every call would cost more than a launch."""
    from rocm_moe import unfused_call

    return unfused_call.run


def _format_reason(what: str, value: str, wanted: str) -> Reason | None:
    return None if value == wanted else Reason(what, value, wanted, _USE_TORCH)


def _arch_reason(device: Device) -> Reason | None:
    if device.vendor == "cpu":
        if device.host.env.get("TRITON_INTERPRET") == "1":
            return None
        return Reason("TRITON_INTERPRET", device.host.env.get("TRITON_INTERPRET", "not set"), "1 on a CPU", _USE_TORCH)
    if device.vendor == "amd":
        if device.arch in CDNA_TARGETS or is_rdna(device):
            return None
        return Reason("arch", device.arch, f"{', '.join(CDNA_TARGETS)}, gfx11xx or gfx12xx", _USE_TORCH)
    capability = device.capability
    if capability is not None and capability >= _MIN_CAPABILITY:
        return None
    return Reason("arch", device.arch, "sm_80 or later", _USE_TORCH)


BACKEND = TritonUnfusedBackend()
