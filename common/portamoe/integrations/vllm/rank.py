"""One rank's experts, prepared for a backend and called on memory that vLLM owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from portamoe.backend import Backend, PreparedWeights
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertSource

_ALIGNMENT = 256


@dataclass(frozen=True)
class Placement:
    """Which experts of the layer are here.

    local_experts:  as in MoESpec: ids of the whole layer, or 0 … E_local - 1 where `mapped`
    mapped:         ids have to go through vLLM's expert map first, because they are no contiguous range
    """

    local_experts: range
    mapped: bool


def placement(expert_map: torch.Tensor | None, num_local_experts: int) -> Placement:
    """Return the placement that vLLM's expert map describes: (E,) int32, the local index or -1; None: all are here.

    Raises ValueError for a map that does not hold every local index once.
    """
    if expert_map is None:
        return Placement(range(num_local_experts), mapped=False)
    index = expert_map.cpu()
    here = (index >= 0).nonzero().flatten().tolist()
    local = index[index >= 0].tolist()
    if sorted(local) != list(range(num_local_experts)):
        raise ValueError(f"the expert map holds the indices {local}, expected each of 0 … {num_local_experts - 1}")
    first = here[0]
    if here == list(range(first, first + len(here))) and local == list(range(len(here))):
        return Placement(range(first, first + len(here)), mapped=False)
    return Placement(range(num_local_experts), mapped=True)


class RankExperts:
    """Prepared experts of a backend that take workspace and output from the caller.

    max_tokens:  sets the rows of a window, not a limit: more tokens take more windows
    """

    def __init__(
        self,
        backend: Backend,
        weights: ExpertSource,
        spec: MoESpec,
        device: torch.device,
        max_tokens: int,
        *,
        mapped: bool = False,
    ) -> None:
        self.backend, self.spec, self.mapped = backend, spec, mapped
        self.max_local_rows = backend.default_max_local_rows(spec, max_tokens)
        self.prepared: PreparedWeights = backend.prepare(weights, spec, device)
        #: Compiles ahead of captures; layers of one spec share the kernels, so only the first waits.
        self.warmed = backend.warm_up(self.prepared, max_tokens, self.max_local_rows)
        self._bytes: dict[int, int] = {}

    def workspace_bytes(self, tokens: int) -> int:
        """Return the bytes of workspace for a call of `tokens` tokens, with room to align it; grows with `tokens`."""
        known = self._bytes.get(tokens)
        if known is None:
            known = self.backend.workspace_bytes(self.spec, tokens, self.max_local_rows) + _ALIGNMENT
            self._bytes[tokens] = known
        return known

    def __call__(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        workspace: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        """Write this rank's plain partial sum to `out`; -1 and other ranks' ids contribute nothing.

        out, x:        (T, H) bf16, contiguous
        topk_ids:      (T, K) int32 or int64, ids of the whole layer or -1
        topk_weights:  (T, K) any float
        workspace:     contiguous, at least `workspace_bytes(T)` bytes, sharing none with `out`
        expert_map:    (E,) int32; looked at only where the experts are no contiguous range

        Raises ValueError for a workspace that is too small.
        """
        raw = workspace.view(-1).view(torch.uint8)
        first = -raw.data_ptr() % _ALIGNMENT
        needed = self.workspace_bytes(x.shape[0]) - _ALIGNMENT
        if raw.numel() < first + needed:
            raise ValueError(f"vLLM gave {raw.numel()} bytes of workspace, {x.shape[0]} tokens need {first + needed}")
        if self.mapped and expert_map is not None:
            topk_ids = torch.where(topk_ids >= 0, expert_map[topk_ids.clamp(min=0).long()], -1)
        self.backend.forward(
            self.prepared,
            x.contiguous(),
            topk_ids.contiguous(),
            topk_weights.float().contiguous(),
            raw[first : first + needed],
            out,
            max_local_rows=self.max_local_rows,
        )
