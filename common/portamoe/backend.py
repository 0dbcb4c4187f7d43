"""The contract between the core and a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from portamoe.decision import Reason
    from portamoe.device import Device, Vendor
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertSource


class PreparedWeights(Protocol):
    """One rank's experts in a backend's own layout, on one device."""

    @property
    def spec(self) -> MoESpec:
        """The spec they were prepared for."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes they take on the device."""
        ...


@dataclass(frozen=True)
class WarmUpReport:
    """What `warm_up` compiled: number of binaries and the seconds it took."""

    binaries: int
    seconds: float


@dataclass(frozen=True)
class Announcement:
    """A backend for the devices of some vendors, as a package's BACKENDS may name it instead of "module:attribute".

    name, priority:  as the backend itself has them
    vendors:         "amd", "nvidia", "cpu"; devices of others are refused without importing the module, which keeps
                     `import portamoe` cheap
    """

    target: str
    name: str
    priority: int
    vendors: tuple[Vendor, ...]


class Backend(Protocol):
    """What the registry asks of a backend. Nothing heavy is imported before `prepare`.

    name, package:  as shown by the probe ("triton_unfused", "rocm_moe")
    priority:       among those that accept, the automatic choice takes the highest

    T tokens, H hidden size, I intermediate size, K experts per token; topk_ids are ids of the whole layer, and an
    id that is -1 or outside `spec.local_experts` contributes nothing.
    """

    name: str
    package: str
    priority: int

    def check(self, spec: MoESpec, device: Device) -> list[Reason]:
        """Return every reason why `spec` cannot be served on `device`; empty means accepted.

        Looks only at facts in `device` and `device.host`: no vendor import, no GPU context, no torch.
        """
        ...

    def only_on_request(self, spec: MoESpec, device: Device) -> Reason | None:
        """Return why the automatic choice should pass over this backend although it works, or None."""
        ...

    def prepare(
        self,
        weights: ExpertSource,
        spec: MoESpec,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> PreparedWeights:
        """Convert canonical weights to this backend's layout on `device`, expert by expert.

        `progress(done, total)` is called after each expert.
        """
        ...

    def default_max_local_rows(self, spec: MoESpec, max_tokens: int) -> int:
        """Return the rows of one window when the caller names none."""
        ...

    def workspace_bytes(self, spec: MoESpec, max_tokens: int, max_local_rows: int) -> int:
        """Return exactly how many bytes `forward` uses beside its output for up to `max_tokens`."""
        ...

    def warm_up(self, prepared: PreparedWeights, max_tokens: int, max_local_rows: int) -> WarmUpReport:
        """Compile everything that `forward` will ever launch for 1 … max_tokens tokens."""
        ...

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
        """Write this rank's weighted sum of its experts to `out`; no host sync, no allocation.

        x:             (T, H) bf16, contiguous
        topk_ids:      (T, K) int32 or int64
        topk_weights:  (T, K) float32
        workspace:     (N,) uint8, N >= workspace_bytes(spec, T, max_local_rows), 256-byte aligned
        out:           (T, H), dtype of x, contiguous
        max_local_rows: rows of one window; routing that needs more runs in further windows, same result
        hooks:         `after_gemm1`, `after_gemm2` where the backend has such points; others raise TypeError
        """
        ...


class RowBackend(Backend, Protocol):
    """A backend that can leave a call's rows unsummed, for a sum elsewhere that has the bits of its own.

    row_dtype:  of an expert's row before it is weighted, by torch's name: what the backend itself sums ("bfloat16")

    `portamoe.distributed` brings the rows of all ranks together with it. A backend without these three is used there
    with partial sums only.
    """

    row_dtype: str

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
        """Write the unweighted row of every (token, slot) of this rank to `rows`, zeros where it has none.

        x, topk_ids, workspace, max_local_rows:  as in `forward`
        rows:  (T·K + 1, H) row_dtype, contiguous: row t·K + k is that of slot k; the last one is there to be spoilt
        """
        ...

    def sum_rows(
        self,
        prepared: PreparedWeights,
        rows: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write Σ_k w[t, k] · row[t, k] to `out` with the additions of `forward`, in ascending id and rounded once.

        rows:           (T·K + 1, H) as `forward_rows` has them, of whichever ranks; the last one is not read
        topk_ids:       (T, K), order of the sum; slots of a negative id are left out
        topk_weights:   (T, K) float32
        out:            (T, H), contiguous
        """
        ...
