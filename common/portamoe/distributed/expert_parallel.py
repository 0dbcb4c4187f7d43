"""`ExpertParallel`: one layer's experts over the ranks of a group, each rank with its own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from portamoe import call_checks
from portamoe.distributed._exchange import Wire, add_in_order, as_bytes, local_pairs, outgoing
from portamoe.distributed.placement import owners
from portamoe.distributed.rank_group import RankGroup

if TYPE_CHECKING:
    import torch.distributed as dist

    from portamoe.layer import RoutedExperts

Combine = Literal["exact", "partial_sums"]
Form = Literal["auto", "all_to_all", "all_gather"]

#: Bytes that a rank may send in the all-gather form when "auto" chooses it: at 50 GB/s about 80 µs, what the exchange
#: of counts and its wait on the host cost. modelled; not measured on several GPUs.
GATHER_BYTES = 4 << 20

#: What x may be, by the number under which ranks compare it.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class ExpertParallel(nn.Module):
    """y[t] = Σ_k w[t, k] · expert(id[t, k])(x[t]) over the experts of all ranks, for this rank's tokens.

    layer:         this rank's `RoutedExperts`; the ranks' `local_experts` must cover all experts, see `split_experts`
    group:         torch.distributed group, or a `RankGroup` that layers share; default: all ranks
    tensor_group:  second axis: ranks that hold slices of I of the same experts (`layouts.slice_tensor_parallel`) and
                   call with the same tokens. Their results are added in float32, in ascending rank, rounded once.
    combine:       "exact"         the unweighted row of every (token, slot) comes back and is summed in ascending
                                   expert id by the kernel of one process: the same bits, on any number of ranks
                   "partial_sums"  each rank's weighted sum comes back, and these are added in float32: up to K times
                                   fewer bytes, one more rounding, other bits on another number of ranks
    form:          "all_to_all"  uneven, every token once to each rank that needs it; waits on the host
                   "all_gather"  all tokens to all ranks, then reduce-scatter; the only one in a graph capture
                   "auto"        the second in a capture and where it sends less than GATHER_BYTES, else the first
    window:        tokens of a rank in one round; default and most: max_tokens / ranks of the layer
    timeout:       seconds until a missing rank is named; default: the group's own

    A call runs in as many rounds as its longest rank needs. Whatever the routing, a round holds at most
    ranks·window tokens received and, for exact sums, ranks·window·K + window·K rows of H: see `buffer_bytes`.

    In a graph capture every rank calls with the same number of tokens, at most `window`; pad with ids of -1. No rank is
    named when a replay hangs: NCCL's own watchdog ends it.

    Raises ValueError for ranks that do not fit each other; `forward` raises RankError naming ranks that are missing.
    """

    def __init__(
        self,
        layer: RoutedExperts,
        group: dist.ProcessGroup | RankGroup | None = None,
        *,
        tensor_group: dist.ProcessGroup | RankGroup | None = None,
        combine: Combine = "exact",
        form: Form = "auto",
        window: int | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        for name, value, allowed in (("combine", combine, get_args(Combine)), ("form", form, get_args(Form))):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if combine == "exact" and layer.row_dtype is None:
            raise ValueError(
                f"{layer.backend.name} gives weighted sums only, so combine='exact' cannot work; use "
                "combine='partial_sums', or the backend torch or triton_unfused"
            )
        self.layer, self.spec = layer, layer.spec
        self.combine: Combine = combine
        self.form: Form = form
        self.ranks = _rank_group(group, layer.device, timeout)
        self.window = self._make_window(window)
        self._number = self.ranks.add_layer()
        owners_of = self._agree_on_layout(_place_in(tensor_group))
        self._owner = torch.tensor(owners_of, device=layer.device)
        # Behind the comparison: a rank alone with its tensor group would wait for the others.
        self.tensor_ranks = None if tensor_group is None else _rank_group(tensor_group, layer.device, timeout)
        self._agree_on_slices()

    @property
    def buffer_bytes(self) -> int:
        """The most bytes that a round allocates beside the layer's workspace and the output, whatever the routing."""
        hidden, top_k, ranks = self.spec.hidden_size, self.spec.top_k, self.ranks.size
        sent, received = self.window * min(ranks, top_k), self.window * ranks
        tokens = (sent + 2 * received) * (hidden * 4 + top_k * 8)
        if self.combine == "partial_sums":
            return tokens + (sent + 2 * received) * hidden * 4
        # Rows of the tokens received, those that return, those that come back and the same by pair.
        row = hidden * (self.layer.row_dtype or torch.float32).itemsize
        pairs = received * top_k * (1 + 1) + 2 * self.window * top_k + 2
        return tokens + pairs * row

    def close(self) -> None:
        """End the threads of the groups that this layer made; call it before `destroy_process_group`."""
        for ranks in (self.ranks, self.tensor_ranks):
            if ranks is not None:
                ranks.close()

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum over all experts for this rank's tokens; all ranks of the group must call.

        x, topk_ids, topk_weights, out:  as in `RoutedExperts.forward`, with ids of the whole layer and any T, also 0

        Raises ValueError, TypeError or RuntimeError for tensors that do not fit, for ranks of the tensor group with
        different T, and for inputs that require a gradient; RankError naming ranks that are missing.
        """
        self.ranks.begin_call()  # ahead of the checks: a rank that catches their error is in another call from then on
        call_checks.no_gradients("ExpertParallel", x=x, topk_weights=topk_weights, out=out)
        with torch.no_grad():
            return self._forward(x, topk_ids, topk_weights, out)

    def _forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty_like(x)
        self.layer.check_metadata(x, topk_ids, topk_weights, out)
        if self.layer.validate and bool(((topk_ids < -1) | (topk_ids >= self.spec.num_experts)).any()):
            raise ValueError(f"topk_ids has values outside -1 … {self.spec.num_experts - 1}")
        ids = torch.where((topk_ids >= 0) & (topk_ids < self.spec.num_experts), topk_ids, -1)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            if self.tensor_ranks is not None:
                self.tensor_ranks.begin_call()
            self._captured(x, ids, topk_weights, out)
        else:
            slices = self._slices_of(x)
            tokens, gather = self._agree_on_call(x.shape[0], x.dtype, slices)
            run = self._gathered if gather else self._exchanged
            for first in range(0, max(tokens), self.window):
                part = slice(first, min(first + self.window, max(tokens)))
                run(x[part], ids[part], topk_weights[part], out[part], part.stop - part.start)
        if self.tensor_ranks is not None:
            self._add_slices(out)
        return out

    def _captured(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        if self.form == "all_to_all":
            raise RuntimeError("an uneven all-to-all waits on the host and cannot be captured; use form='all_gather'")
        if x.shape[0] > self.window:
            raise ValueError(
                f"a captured call has {x.shape[0]} tokens, one round takes {self.window}; raise max_tokens"
            )
        self._gathered(x, ids, weights, out, x.shape[0])

    def _gathered(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, capacity: int
    ) -> None:
        """Run a round in the all-gather form; every rank takes part with `capacity` tokens, some of them empty."""
        ranks, top_k, hidden = self.ranks, self.spec.top_k, self.spec.hidden_size
        wire = self._wire(x.dtype)
        packed = wire.pack(x, ids, weights)
        if len(packed) < capacity:
            empty = x.new_zeros(capacity - len(packed), hidden)
            nowhere = ids.new_full((len(empty), top_k), -1)
            packed = torch.cat([packed, wire.pack(empty, nowhere, weights.new_zeros(nowhere.shape))])
        received = packed.new_empty(ranks.size * capacity, wire.nbytes)
        ranks.all_gather("dispatch", received, packed)
        all_x, all_ids, all_weights = wire.unpack(received)
        if self.combine == "partial_sums":
            with ranks.step("experts"):
                partial = self.layer(all_x, all_ids, all_weights).float()
            mine = partial.new_empty(capacity, hidden)
            ranks.reduce_scatter("combine", mine, partial)
            out.copy_(mine[: len(x)])
            return
        rows = self._rows(len(all_x))
        with ranks.step("experts"):
            self.layer.forward_rows(all_x, all_ids, rows)
        mine = self._rows(capacity)
        # One rank has the row, the others have zero bits: adding them as integers leaves the row as it is.
        ranks.reduce_scatter("combine", mine[:-1].view(torch.int32), rows[:-1].view(torch.int32))
        with ranks.step("sum"):
            self.layer.sum_rows(mine[: len(x) * top_k + 1], ids, weights, out)

    def _exchanged(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, _capacity: int
    ) -> None:
        """Run a round in the all-to-all form: tokens go where their experts are, rows or sums come back."""
        ranks, hidden = self.ranks, self.spec.hidden_size
        wire = self._wire(x.dtype)
        sent = outgoing(ids, self._owner, ranks.size)
        mine = torch.cat([sent.token_count, sent.pair_count])
        counts = mine.new_empty(ranks.size * len(mine))
        ranks.all_gather("counts", counts, mine, host=True)
        table = counts.view(ranks.size, 2, ranks.size).tolist()  # [from][tokens, pairs][to]
        tokens_to, pairs_back = table[ranks.rank]
        tokens_from = [table[r][0][ranks.rank] for r in range(ranks.size)]
        pairs_to = [table[r][1][ranks.rank] for r in range(ranks.size)]

        packed = wire.pack(x, ids, weights)[sent.tokens]
        received = packed.new_empty(sum(tokens_from), wire.nbytes)
        ranks.all_to_all("dispatch", received, packed, tokens_from, tokens_to)
        all_x, all_ids, all_weights = wire.unpack(received)
        if self.combine == "partial_sums":
            with ranks.step("experts"):
                partial = as_bytes(self.layer(all_x, all_ids, all_weights))
            back = partial.new_empty(sum(tokens_to), partial.shape[1])
            ranks.all_to_all("combine", back, partial, tokens_to, tokens_from)
            with ranks.step("sum"):
                add_in_order(back.view(x.dtype), sent.tokens, tokens_to, out)
            return
        rows = self._rows(len(all_x))
        with ranks.step("experts"):
            self.layer.forward_rows(all_x, all_ids, rows)
        answer = as_bytes(rows[local_pairs(all_ids, self.spec.local_experts)])
        back = answer.new_empty(sum(pairs_back), answer.shape[1])
        ranks.all_to_all("combine", back, answer, pairs_back, pairs_to)
        with ranks.step("sum"):
            home = self._rows(len(x)).zero_()
            home.index_copy_(0, sent.pairs[: len(back)], back.view(home.dtype).view(-1, hidden))
            self.layer.sum_rows(home, ids, weights, out)

    def _add_slices(self, out: torch.Tensor) -> None:
        """Replace `out` by the float32 sum of the tensor group's, in ascending rank and rounded once."""
        ranks: Any = self.tensor_ranks
        if not len(out):
            return
        slices = out.new_empty(ranks.size, *out.shape)
        ranks.all_gather("tensor-parallel", as_bytes(slices.flatten(0, 1)), as_bytes(out))
        total = torch.zeros(out.shape, device=out.device)
        for part in slices:
            total += part.float()
        out.copy_(total)

    def _rows(self, tokens: int) -> torch.Tensor:
        shape = (tokens * self.spec.top_k + 1, self.spec.hidden_size)
        return torch.empty(shape, dtype=self.layer.row_dtype, device=self.layer.device)

    def _wire(self, dtype: torch.dtype) -> Wire:
        return Wire(self.spec.hidden_size, self.spec.top_k, dtype, self.combine == "partial_sums")

    def _slices_of(self, x: torch.Tensor) -> list[list[int]]:
        """Return T and dtype of the tensor group's ranks; an uneven gather of their results would hang."""
        ranks = self.tensor_ranks
        if ranks is None:
            return []
        ranks.begin_call()
        mine = torch.tensor([[x.shape[0], _DTYPES.index(x.dtype)]], device=self.layer.device)
        everyone = mine.new_empty(ranks.size, 2)
        ranks.all_gather("tensor-parallel tokens", everyone, mine, host=True)
        table: list[list[int]] = everyone.tolist()
        return table

    def _agree_on_call(self, tokens: int, dtype: torch.dtype, slices: list[list[int]]) -> tuple[list[int], bool]:
        """Return every rank's T and whether to use the all-gather form; raises where ranks are in different calls."""
        ranks = self.ranks
        call = [ranks.calls, self._number, _DTYPES.index(dtype), ranks.identity]
        alike = all(row == slices[0] for row in slices)
        mine = torch.tensor([[tokens, *call, alike]], device=self.layer.device)
        everyone = mine.new_empty(ranks.size, len(call) + 2)
        ranks.all_gather("tokens", everyone, mine, host=True)
        table: list[list[int]] = everyone.tolist()
        if not alike:
            kinds = "; ".join(f"rank {r} has {t} tokens of {_DTYPES[d]}" for r, (t, d) in enumerate(slices))
            raise ValueError(f"the tensor group's ranks must call with the same tokens, but {kinds}")
        for rank, (_, *theirs, fits) in enumerate(table):
            if not fits:
                raise ValueError(
                    f"rank {rank} was called with other tokens than its tensor group; they must be the same"
                )
            if theirs != call:
                raise ValueError(
                    f"{_call_text(rank, theirs)}, {_call_text(ranks.rank, call)}; all ranks must make the same calls "
                    "in the same order"
                )
        counts = [row[0] for row in table]
        if self.form != "auto":
            return counts, self.form == "all_gather"
        back = 4 * self.spec.hidden_size
        if self.layer.row_dtype is not None and self.combine == "exact":
            back = self.spec.top_k * self.spec.hidden_size * self.layer.row_dtype.itemsize
        sent = min(max(counts), self.window) * (ranks.size - 1) * (self._wire(dtype).nbytes + back)
        return counts, sent <= GATHER_BYTES

    def _agree_on_layout(self, slices: str) -> list[int]:
        """Return the rank of every expert after comparing what all ranks must have in common."""
        local = (self.spec.local_experts.start, self.spec.local_experts.stop)
        common = self.spec.to_dict() | {"local_experts": None, "backend": self.layer.backend.name}
        common |= {"combine": self.combine, "form": self.form, "window": self.window, "layer": self._number}
        common["tensor_group"] = slices
        everyone = self.ranks.gather_objects((local, common))
        for rank, (_, theirs) in enumerate(everyone):
            for name, value in theirs.items():
                if value != common[name]:
                    raise ValueError(
                        f"{name} is {value} on rank {rank} and {common[name]} on rank {self.ranks.rank}; make the "
                        "layers alike on all ranks"
                    )
        return owners([ends for ends, _ in everyone], self.spec.num_experts)

    def _agree_on_slices(self) -> None:
        """Compare what the ranks of the tensor group must have in common."""
        if self.tensor_ranks is None:
            return
        local = (self.spec.local_experts.start, self.spec.local_experts.stop)
        for rank, theirs in enumerate(self.tensor_ranks.gather_objects(local)):
            if theirs != local:
                raise ValueError(
                    f"rank {rank} of the tensor group holds experts {theirs[0]}:{theirs[1]}, this one "
                    f"{local[0]}:{local[1]}; its ranks hold slices of the same experts"
                )

    def _make_window(self, window: int | None) -> int:
        most = self.layer.max_tokens // self.ranks.size
        if most < 1:
            raise ValueError(
                f"the layer's max_tokens {self.layer.max_tokens} is less than the {self.ranks.size} ranks; a round "
                "needs one token of each"
            )
        if window is None:
            return most
        if not 1 <= window <= most:
            raise ValueError(f"window must be within 1 … {most} (max_tokens / ranks), got {window}")
        return window


def _call_text(rank: int, call: list[int]) -> str:
    count, layer, dtype, group = call
    return f"rank {rank} is in call {count}, of layer {layer}, RankGroup {group:x}, with x of {_DTYPES[dtype]}"


def _place_in(group: dist.ProcessGroup | RankGroup | None) -> str:
    """Say which slice of I a tensor group makes this rank's, for the comparison over the experts' group."""
    if group is None:
        return "none"
    import torch.distributed as dist

    rank, size = (
        (group.rank, group.size) if isinstance(group, RankGroup) else (dist.get_rank(group), dist.get_world_size(group))
    )
    return f"slice {rank} of {size}"


def _rank_group(group: dist.ProcessGroup | RankGroup | None, device: torch.device, timeout: float | None) -> RankGroup:
    if isinstance(group, RankGroup):
        if group.device != device:
            raise ValueError(f"the RankGroup is for {group.device}, the layer on {device}")
        return group
    return RankGroup(group, device, timeout=timeout)
