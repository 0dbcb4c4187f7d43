"""`RoutedExperts`: one rank's routed experts as a module, on the backend that was chosen for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn

from portamoe import call_checks, custom_op, nvfp4
from portamoe.decision import Accepted
from portamoe.detection import detect
from portamoe.dispatch import choose_verified
from portamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portamoe.backend import Backend, WarmUpReport
    from portamoe.checkpoints._experts import Origin
    from portamoe.registry import Selection
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertSource


class RoutedExperts(nn.Module):
    """The weighted sum of this rank's experts: y[t] = Σ_k w[t, k] · expert(id[t, k])(x[t]).

    spec, weights:   as `load_experts` returns them; any ExpertSource fits
    device:          a torch device; default: the GPU on which in-memory weights lie, else the first visible device
    backend:         a backend's name, obeyed or refused with the reasons; default: $PORTAMOE_BACKEND, else the best
    max_tokens:      the most tokens T of a call
    max_local_rows:  rows of one window of the work; fewer need less memory, the result is the same
    workspace:       (N,) uint8 on the device, N >= `workspace_bytes`, shared by layers that never run at the same time;
                     default: an own one
    validate:        look at the ids of every call and raise for those outside -1 … E - 1; default: on the CPU only, as
                     it makes a GPU wait. Without it such ids count as -1.
    progress:        called with (done, total) after each expert is prepared
    canary:          "auto": a backend first proves its numbers on a small problem, where no verdict is cached; "force":
                     once more; "skip": never; default: $PORTAMOE_CANARY, else "auto"

    NVFP4 weights that are a recode of MXFP4 are converted back, value by value the same, where only MXFP4 backends beat
    `torch` on the device; `spec` then says mxfp4.

    The module is for inference and has no parameters, buffers or state_dict entries. It stays on its device: `.to()`
    of another one raises, a change of dtype leaves it as it is.

    Raises BackendRejected with every reason, ValueError or TypeError for arguments that do not fit each other.
    """

    def __init__(
        self,
        spec: MoESpec,
        weights: ExpertSource,
        *,
        max_tokens: int,
        device: torch.device | str | None = None,
        backend: str | None = None,
        max_local_rows: int | None = None,
        workspace: torch.Tensor | None = None,
        validate: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
        canary: Literal["auto", "force", "skip"] | None = None,
    ) -> None:
        super().__init__()
        self.max_tokens = _positive("max_tokens", max_tokens)
        call_checks.source(spec, weights)
        #: The checkpoint and layer that the weights come from; None for weights in memory.
        self.origin: Origin | None = getattr(weights, "origin", None)
        self.device = _torch_device(device, weights)
        facts = detect().device(str(self.device))
        spec, weights = nvfp4.served_as(spec, weights, facts, backend)
        self.spec = spec
        chosen = choose_verified(spec, facts, backend, max_tokens=max_tokens, canary=canary)
        self.selection: Selection = chosen.selection
        self.backend: Backend = chosen.backend
        if max_local_rows is None:
            max_local_rows = self.backend.default_max_local_rows(spec, max_tokens)
        self.max_local_rows = _positive("max_local_rows", max_local_rows)
        self.validate = self.device.type == "cpu" if validate is None else validate
        # Ahead of the weights: a workspace that does not fit must not cost minutes of preparation.
        self._workspace = self._make_workspace(workspace)
        with self._on_device():
            self._prepared = self.backend.prepare(weights, spec, self.device, progress)
        custom_op.keep_address(self._workspace)
        self._hooks: dict[str, Any] = {}
        self._key = custom_op.add(self)

    @property
    def decision(self) -> Accepted:
        """The accepting decision of the backend in use; `selection` holds those of all backends."""
        for decision in self.selection.decisions:
            if decision.backend == self.backend.name and isinstance(decision, Accepted):
                return decision
        raise RuntimeError(f"no accepting decision of {self.backend.name} in {self.selection}")

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a call of `max_tokens` tokens needs beside its output, whatever the routing."""
        return self.backend.workspace_bytes(self.spec, self.max_tokens, self.max_local_rows)

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the weights in the backend's layout."""
        return self._prepared.nbytes

    def warm_up(self, max_tokens: int | None = None) -> WarmUpReport:
        """Compile everything that calls of 1 … max_tokens tokens will launch; default: this layer's maximum."""
        tokens = self.max_tokens if max_tokens is None else _positive("max_tokens", max_tokens)
        if tokens > self.max_tokens:
            raise ValueError(f"max_tokens {tokens} exceeds the {self.max_tokens} that the layer was made for")
        with self._on_device():
            return self.backend.warm_up(self._prepared, tokens, self.max_local_rows)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None = None,
        **hooks: Any,
    ) -> torch.Tensor:
        """Return this rank's plain partial sum: no norm, no reduction over ranks, no scaling factor.

        x:             (T, H) bf16, contiguous; other dtypes where the backend says so
        topk_ids:      (T, K) int32 or int64, ids of the whole layer; -1 and other ranks' ids contribute nothing
        topk_weights:  (T, K) float32
        out:           (T, H), dtype of x, contiguous, overlapping no other tensor; default: a new tensor
        hooks:         handed to the backend in place of those of `set_hooks`; one without such points raises TypeError
        returns        (T, H), dtype of x

        Where torch.compile, an export or fake tensors look at it, the call is one operator, `portamoe::routed_experts`.

        Raises ValueError or TypeError naming the tensor, what came and what was expected.
        """
        if custom_op.traced(x):
            return self._traced(x, topk_ids, topk_weights, out, hooks)
        given = out is not None
        if out is None:
            out = torch.empty_like(x)
        self.run(x, topk_ids, topk_weights, self._workspace, out, hooks or self._hooks, overlap=given)
        return out

    @property
    def row_dtype(self) -> torch.dtype | None:
        """Dtype of the rows of `forward_rows`; None where the backend only gives sums."""
        name = getattr(self.backend, "row_dtype", None)
        return None if name is None else getattr(torch, name)

    def forward_rows(self, x: torch.Tensor, topk_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the unweighted row of every (token, slot) of this rank, for a sum with other ranks' rows.

        x, topk_ids:  as in `forward`
        rows:         (T·K + 1, H) `row_dtype`, contiguous; row t·K + k is that of slot k, zeros where its expert is
                      not here; the last one is overwritten with anything

        Raises ValueError or TypeError for tensors that do not fit and for a backend that only gives sums.
        """
        call_checks.inputs(self, x, topk_ids)
        call_checks.rows(self, rows, x.shape[0])
        call_checks.no_overlap("rows", rows, x=x, topk_ids=topk_ids, **{"the workspace": self._workspace})
        if x.shape[0] == 0:
            return
        if self.validate:
            call_checks.ids(topk_ids, self.spec.num_experts)
        with self._on_device():
            backend: Any = self.backend
            backend.forward_rows(self._prepared, x, topk_ids, self._workspace, rows, max_local_rows=self.max_local_rows)

    def sum_rows(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write Σ_k w[t, k] · row[t, k], with the bits that `forward` has on a rank that holds all experts.

        rows:                    (T·K + 1, H) as of `forward_rows`; of any ranks, so ids need not be local
        topk_ids, topk_weights:  (T, K); slots with a negative id are left out
        out:                     (T, H) of x's dtype, contiguous, overlapping no other tensor

        Raises ValueError or TypeError for tensors that do not fit and for a backend that only gives sums.
        """
        call_checks.routing(self, topk_ids, topk_weights)
        call_checks.rows(self, rows, topk_ids.shape[0])
        call_checks.out_of_rows(self, out, rows, topk_ids, topk_weights)
        if topk_ids.shape[0]:
            with self._on_device():
                backend: Any = self.backend
                backend.sum_rows(self._prepared, rows, topk_ids, topk_weights, out)

    def set_hooks(self, **hooks: Any) -> None:
        """Hand `hooks` to the backend in every later call, compiled ones included; none: take them away.

        They are called while the operator runs: what they read must not be changed by the same compiled graph, and a
        captured graph keeps what they did at its capture.
        """
        self._hooks = {name: hook for name, hook in hooks.items() if hook is not None}

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        workspace: torch.Tensor,
        out: torch.Tensor,
        hooks: Mapping[str, Any] | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        """Write the result to `out` now, whoever looks; what the operator does. Tensors as in `forward`.

        workspace:  (N,) uint8, N >= `workspace_bytes`
        hooks:      default: those of `set_hooks`
        overlap:    look whether `out` overlaps another tensor
        """
        call_checks.inputs(self, x, topk_ids, topk_weights)
        if overlap:
            call_checks.out(self, out, workspace, x, topk_ids, topk_weights)
        if x.shape[0] == 0:
            return
        if self.validate:
            call_checks.ids(topk_ids, self.spec.num_experts)
        with self._on_device():
            self.backend.forward(
                self._prepared,
                x,
                topk_ids,
                topk_weights,
                workspace,
                out,
                max_local_rows=self.max_local_rows,
                **(self._hooks if hooks is None else hooks),
            )

    def _traced(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
        hooks: Mapping[str, Any],
    ) -> torch.Tensor:
        """Leave one operator in the graph; only what needs no data is looked at before it runs."""
        if hooks:
            raise TypeError(
                f"the hooks {sorted(hooks)} of one call cannot be traced; hand them to set_hooks() before, or call the "
                "layer outside of torch.compile"
            )
        call_checks.no_gradients("RoutedExperts", x=x, topk_weights=topk_weights, out=out)
        if out is None:
            out = torch.empty_like(x)
        workspace = custom_op.workspace_for(x, self._workspace)
        custom_op.call(x, topk_ids, topk_weights, workspace, out, self._key)
        return out

    def check_metadata(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Raise ValueError or TypeError for dtypes, shapes and devices that `run` would refuse, whatever T is."""
        call_checks.tensors(self, x, topk_ids, topk_weights)
        call_checks.tensor(self, "out", out, (x.dtype,), tuple(x.shape))

    def _make_workspace(self, workspace: torch.Tensor | None) -> torch.Tensor:
        needed = self.workspace_bytes
        if workspace is None:
            spare = torch.empty(needed + 255, dtype=torch.uint8, device=self.device)
            first = -spare.data_ptr() % 256  # the CPU's allocator aligns to 64 bytes only
            return spare[first : first + needed]
        if workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
            raise TypeError(
                f"workspace is {workspace.dtype} {tuple(workspace.shape)}, expected contiguous uint8 ({needed},)"
            )
        if workspace.device != self.device:
            raise ValueError(f"workspace is on {workspace.device}, the layer on {self.device}")
        if workspace.numel() < needed:
            raise ValueError(f"workspace has {workspace.numel()} bytes, {self.max_tokens} tokens need {needed}")
        if workspace.data_ptr() % 256 and self.device.type != "cpu":
            raise ValueError("workspace does not start at a multiple of 256 bytes; pass a tensor of its own")
        return workspace

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the layer's GPU current: kernels are launched on the current one, wherever their tensors lie."""
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RoutedExperts:  # noqa: ARG002, FBT001, FBT002, RUF100
        """Refuse to follow a parent module to another device; `nn.Module.to` and its like come here."""
        device = fn(torch.empty(0, device=self.device)).device
        if device != self.device:
            raise RuntimeError(
                f"RoutedExperts was prepared on {self.device} and cannot move to {device}; "
                f"construct it with device={str(device)!r}"
            )
        return self

    def __copy__(self) -> NoReturn:
        raise TypeError("RoutedExperts cannot be copied: it holds its weights once; construct another one")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "RoutedExperts cannot be pickled: its weights are in a backend's layout; keep the checkpoint instead"
        )

    def extra_repr(self) -> str:
        """Show what was chosen, for `print(model)`."""
        local = self.spec.local_experts
        return (
            f"backend={self.backend.name}, device={self.device}, experts={local.start}:{local.stop} of "
            f"{self.spec.num_experts}, max_tokens={self.max_tokens}"
        )


def _torch_device(device: torch.device | str | None, weights: ExpertSource) -> torch.device:
    if device is None:
        if isinstance(weights, ExpertWeights) and weights.w13.device.type != "cpu":
            return weights.w13.device
        return torch.device(detect().devices[0].torch_name)
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if chosen.type == "cpu" else chosen


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
