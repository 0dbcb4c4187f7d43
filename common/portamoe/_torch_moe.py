"""The computation of the `torch` backend: align, then expert by expert decode, multiply, activate, multiply, add."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from portamoe import weights as canonical
from portamoe.formats import mxfp4_dequantize, nvfp4_dequantize
from portamoe.reference import full_precision, round_activations
from portamoe.routing import align
from portamoe.torch_backend import chunk_rows, region_bytes
from portamoe.weights import Expert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertSource

#: Values that an elementwise step handles at a time, which bounds its temporaries.
_STEP_VALUES = 1 << 20


@dataclass(frozen=True)
class TorchPrepared:
    """This rank's experts in canonical bytes on one device."""

    spec: MoESpec
    experts: tuple[Expert, ...]
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' tensors."""
        return sum(expert.nbytes for expert in self.experts)


def prepare(
    source: ExpertSource,
    spec: MoESpec,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> TorchPrepared:
    """Move every expert to `device`, checked against `spec`, without a copy of those that lie there."""
    canonical.validate(source, spec)
    expected = canonical.expected_tensors(spec)
    experts = []
    for index in range(len(source)):
        expert = source.expert(index)
        for name, (dtypes, shape) in expected.items():
            value = getattr(expert, name)
            if value is None or value.dtype not in dtypes or tuple(value.shape) != shape:
                got = "missing" if value is None else f"{value.dtype} {tuple(value.shape)}"
                raise ValueError(f"{name} of local expert {index} is {got}, expected {dtypes} {shape}")
        moved: dict[str, Any] = {}
        for field in fields(Expert):
            value = getattr(expert, field.name)
            moved[field.name] = None if value is None else value.detach().to(device).contiguous()
        experts.append(Expert(**moved))
        if progress is not None:
            progress(index + 1, len(source))
    return TorchPrepared(spec, tuple(experts), device)


def touch(prepared: TorchPrepared, workspace_bytes: int) -> None:
    """Run one token of zeros through the first local expert."""
    spec, device = prepared.spec, prepared.device
    ids = torch.full((1, spec.top_k), -1, dtype=torch.int32, device=device)
    ids[0, 0] = spec.local_experts.start
    forward(
        prepared,
        torch.zeros(1, spec.hidden_size, dtype=torch.bfloat16, device=device),
        ids,
        torch.ones(1, spec.top_k, device=device),
        torch.empty(workspace_bytes, dtype=torch.uint8, device=device),
        torch.empty(1, spec.hidden_size, dtype=torch.bfloat16, device=device),
        1,
    )


@torch.no_grad()
def forward(
    prepared: TorchPrepared,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    workspace: torch.Tensor,
    out: torch.Tensor,
    max_local_rows: int,
) -> None:
    """Write the weighted sum of this rank's experts to `out`, in ascending expert id and float32, rounded once."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the torch backend reads the routing on the host, so a graph cannot capture it")
    spec = prepared.spec
    buffers = _carve(spec, x.shape[0], max_local_rows, workspace)
    total = buffers.sum.zero_()
    ids, weights = _merge_duplicates(topk_ids, topk_weights)
    alignment = align(ids, spec)
    tokens, weights = alignment.tokens, weights.reshape(-1)[alignment.pairs]
    edges = alignment.offsets.tolist()
    with full_precision():
        for index, expert in enumerate(prepared.experts):
            for first in range(edges[index], edges[index + 1], buffers.rows.shape[0]):
                window = slice(first, min(first + buffers.rows.shape[0], edges[index + 1]))
                result = _expert(spec, expert, x, tokens[window], buffers)
                _add_rows(total, tokens[window], result, weights[window])
    out.copy_(total)


@torch.no_grad()
def forward_rows(
    prepared: TorchPrepared,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    workspace: torch.Tensor,
    rows: torch.Tensor,
    max_local_rows: int,
) -> None:
    """Write the row of each (token, slot) to `rows` (T·K + 1, H) float32, zeros where its expert is not here."""
    spec = prepared.spec
    buffers = _carve(spec, x.shape[0], max_local_rows, workspace)
    # As in `forward`, a token goes through an expert once: the number of rows of a product may decide its last bits.
    ids, _ = _merge_duplicates(topk_ids, torch.zeros(topk_ids.shape, device=topk_ids.device))
    alignment = align(ids, spec)
    edges = alignment.offsets.tolist()
    rows.zero_()
    with full_precision():
        for index, expert in enumerate(prepared.experts):
            for first in range(edges[index], edges[index + 1], buffers.rows.shape[0]):
                window = slice(first, min(first + buffers.rows.shape[0], edges[index + 1]))
                result = _expert(spec, expert, x, alignment.tokens[window], buffers)
                rows.index_copy_(0, alignment.pairs[window], result)
    if ids is not topk_ids:
        count, top_k = topk_ids.shape
        slot = (topk_ids[:, :, None] == topk_ids[:, None, :]).to(torch.int32).argmax(dim=2)
        source = torch.arange(count, device=slot.device)[:, None] * top_k + slot
        rows[: count * top_k] = rows.index_select(0, source.flatten())


@torch.no_grad()
def sum_rows(rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
    """Write Σ_k w[t, k] · rows[t·K + k] to `out`, float32 products and sums in ascending id, as `forward` has them."""
    count, top_k = topk_ids.shape
    ids, weights = _merge_duplicates(topk_ids, topk_weights)
    order = torch.where(ids < 0, torch.iinfo(ids.dtype).max, ids).argsort(dim=1, stable=True)
    first = torch.arange(count, device=rows.device)[:, None] * top_k
    total = torch.zeros(out.shape, device=out.device)
    for slots in order.unbind(1):
        there = ids.gather(1, slots[:, None]) >= 0
        weighted = rows.index_select(0, (first + slots[:, None]).flatten()) * weights.gather(1, slots[:, None]).float()
        total = torch.where(there, weighted.add_(total), total)
    out.copy_(total)


@dataclass(frozen=True)
class _Buffers:
    """The workspace, carved: see `torch_backend.region_bytes`."""

    sum: torch.Tensor
    rows: torch.Tensor
    gate_up: torch.Tensor
    weight: torch.Tensor


def _carve(spec: MoESpec, tokens: int, max_local_rows: int, workspace: torch.Tensor) -> _Buffers:
    regions, offset = {}, 0
    for name, size in region_bytes(spec, tokens, max_local_rows).items():
        regions[name] = workspace[offset : offset + size].view(torch.float32)
        offset += size
    hidden, inter = spec.hidden_size, spec.intermediate_size
    rows = max(1, min(tokens, max_local_rows))
    return _Buffers(
        sum=regions["sum"][: tokens * hidden].view(tokens, hidden),
        rows=regions["rows"][: rows * hidden].view(rows, hidden),
        gate_up=regions["gate_up"][: rows * 2 * inter].view(rows, 2 * inter),
        weight=regions["weight"],
    )


def _merge_duplicates(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the first slot of a token that names an expert the weights of the others, and those the id -1.

    Then a window never holds a token twice, so its rows are added without atomics, in a fixed order.
    """
    ordered = ids.sort(dim=1).values
    if not bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        return ids, weights
    same = ids[:, :, None] == ids[:, None, :]
    earlier = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril(-1)
    weights = torch.where(same, weights[:, None, :], 0.0).sum(dim=2)
    return torch.where((same & earlier).any(dim=2), -1, ids), weights


def _expert(spec: MoESpec, expert: Expert, x: torch.Tensor, tokens: torch.Tensor, buffers: _Buffers) -> torch.Tensor:
    """Return one expert's (R, H) float32 result for the tokens of a window, in `buffers.rows`."""
    count, inter = len(tokens), spec.intermediate_size
    rows, gate_up = buffers.rows[:count], buffers.gate_up[:count]
    for part in _parts(count, spec.hidden_size):
        gathered = x.index_select(0, tokens[part]).float()
        rows[part] = round_activations(gathered, spec, expert.w13_input_scale)
    _multiply(rows, expert.w13, expert.w13_scale, expert.w13_global_scale, buffers.weight, gate_up)
    if expert.w13_bias is not None:
        gate_up += expert.w13_bias.float()
    h = gate_up[:, :inter]
    for part in _parts(count, inter):
        activated = spec.activation(gate_up[part, :inter], gate_up[part, inter:])
        h[part] = round_activations(activated, spec, expert.w2_input_scale)
    _multiply(h, expert.w2, expert.w2_scale, expert.w2_global_scale, buffers.weight, rows)
    if expert.w2_bias is not None:
        rows += expert.w2_bias.float()
    return rows


def _multiply(
    a: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    buffer: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write a · Wᵀ to `out`, decoding a few rows of W (N, K) at a time into `buffer`."""
    total, columns = weight.shape[0], a.shape[1]
    factors = None
    if global_scale is not None:  # one a row, so that a chunk may cross from w1 to w3
        groups = global_scale.reshape(-1)
        factors = groups.repeat_interleave(total // len(groups))
    step = chunk_rows(columns, total)
    for first in range(0, total, step):
        part = slice(first, min(first + step, total))
        chunk = buffer[: (part.stop - first) * columns].view(part.stop - first, columns)
        if scale is None:
            chunk.copy_(weight[part])
        elif factors is None:
            mxfp4_dequantize(weight[part], scale[part], torch.float32, chunk)
        else:
            nvfp4_dequantize(weight[part], scale[part], factors[part], torch.float32, chunk)
        torch.mm(a, chunk.t(), out=out[:, part])


def _add_rows(total: torch.Tensor, tokens: torch.Tensor, result: torch.Tensor, weights: torch.Tensor) -> None:
    """Add weight · result to the rows of `total` that distinct `tokens` name."""
    for part in _parts(*result.shape):
        weighted = result[part] * weights[part, None].float()
        total.index_copy_(0, tokens[part], weighted.add_(total.index_select(0, tokens[part])))


def _parts(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _STEP_VALUES // columns)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))
