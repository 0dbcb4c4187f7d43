"""A call of `triton_unfused`: its plan bound to memory once, then launched with nothing but pointers to fill in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rocm_moe import plan as planning
from rocm_moe.triton_compat import INTERPRETED, Binary, current_stream, interpret
from rocm_moe.unfused_weights import own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from portamoe.backend import PreparedWeights
    from portamoe.spec import MoESpec
    from rocm_moe.plan import GemmPlan, Plan
    from rocm_moe.unfused_weights import Matrix, UnfusedWeights

    Hook = Callable[[torch.Tensor, "RowMap"], None]

_IDS = {torch.int32: "i32", torch.int64: "i64"}
#: Inputs and output of a call in the order of `Tensors`.
_INPUTS = ("x", "ids", "weights", "out")
#: Planned calls kept for one layer; a serving process uses a few hundred numbers of tokens.
_MOST_CALLS = 1024


class Tensors(NamedTuple):
    """Inputs and output of a call, as in `portamoe.backend.Backend.forward`."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class RowMap:
    """Which (token, slot, expert) each row of a window belongs to, as tensors on the device that a capture may read.

    token, slot:  (R,) int32; 0 in rows that do not exist
    expert:       (R,) int32, ids of the whole layer; -1 in rows that do not exist
    count:        (1,) int32 — rows that exist; they come first
    """

    token: torch.Tensor
    slot: torch.Tensor
    expert: torch.Tensor
    count: torch.Tensor


class _Part(NamedTuple):
    """A piece of the workspace as a kernel argument: the region, how it is read, elements to skip."""

    region: str
    dtype: torch.dtype = torch.int32
    skip: int = 0


#: A kernel argument: a number, a tensor of the weights, a piece of the workspace or the name of an input.
_Argument = int | torch.Tensor | _Part | str


class _Step(NamedTuple):
    """A launch before it is bound: the variant, its grid and arguments; the hook that follows it and the window."""

    variant: str
    grid: tuple[int, int]
    arguments: tuple[_Argument, ...]
    hook: str | None = None
    window: int = 0


class _Bound(NamedTuple):
    """A launch with every pointer filled in but those of `open`: (position, index into Tensors)."""

    binary: Binary
    grid: tuple[int, int]
    arguments: list[Any]
    open: tuple[tuple[int, int], ...]
    hook: str | None
    window: int


def run(
    weights: PreparedWeights,
    inputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor,
    max_local_rows: int,
    hooks: Mapping[str, Hook | None],
) -> None:
    """Launch a call on x, ids, weights and out; see TritonUnfusedBackend.forward."""
    prepared, tensors = own(weights), Tensors(*inputs)
    tokens = tensors.x.shape[0]
    if tokens == 0:
        return
    hooked = any(hook is not None for hook in hooks.values()) if hooks else False
    if INTERPRETED:
        _interpret(prepared, tensors, workspace, max_local_rows, hooks, hooked)
        return
    key = (tokens, max_local_rows, tensors.ids.dtype, hooked, workspace.data_ptr(), workspace.numel())
    bound = prepared.calls.get(key)
    if bound is None:
        if len(prepared.calls) >= _MOST_CALLS:
            prepared.calls.clear()
        bound = prepared.calls[key] = _bind(prepared, tensors, workspace, max_local_rows, hooked)
    pointers = [tensor.data_ptr() for tensor in tensors]
    if (pointers[0] | pointers[3]) & 15:
        raise ValueError("x and out must start at a multiple of 16 bytes; pass tensors of their own")
    stream = current_stream(tensors.x.get_device())
    for step in bound:
        arguments = step.arguments.copy()
        for position, index in step.open:
            arguments[position] = pointers[index]
        step.binary.launch(step.grid, stream, arguments)
        if hooked and step.hook is not None:
            _call_hook(step.hook, step.window, prepared.spec, tensors, workspace, max_local_rows, hooks)


def _bind(
    prepared: UnfusedWeights, tensors: Tensors, workspace: torch.Tensor, max_local_rows: int, hooked: bool
) -> list[_Bound]:
    plan = _plan(prepared, tensors, workspace, max_local_rows, hooked)
    base = workspace.data_ptr()
    if base % 256:
        raise ValueError("the workspace must start at a multiple of 256 bytes; pass a tensor of its own")
    out = []
    for step in _steps(prepared, plan, _IDS[tensors.ids.dtype]):
        values, free = [], []
        for position, argument in enumerate(step.arguments):
            if isinstance(argument, _Part):
                offset = plan.sizes.regions[argument.region].offset
                values.append(base + offset + argument.skip * argument.dtype.itemsize)
            elif isinstance(argument, torch.Tensor):
                values.append(argument.data_ptr())
            elif isinstance(argument, str):
                free.append((position, _INPUTS.index(argument)))
                values.append(0)
            else:
                values.append(argument)
        binary = prepared.binaries.get(step.variant)
        out.append(_Bound(binary, step.grid, binary.arguments(values), tuple(free), step.hook, step.window))
    return out


def _interpret(
    prepared: UnfusedWeights,
    tensors: Tensors,
    workspace: torch.Tensor,
    max_local_rows: int,
    hooks: Mapping[str, Hook | None],
    hooked: bool,
) -> None:
    plan = _plan(prepared, tensors, workspace, max_local_rows, hooked)
    for step in _steps(prepared, plan, _IDS[tensors.ids.dtype]):
        values: list[Any] = []
        for argument in step.arguments:
            if isinstance(argument, _Part):
                values.append(_view(workspace, plan, argument))
            elif isinstance(argument, str):
                values.append(tensors[_INPUTS.index(argument)])
            else:
                values.append(argument)
        interpret(prepared.binaries.variant(step.variant), step.grid, values)
        if hooked and step.hook is not None:
            _call_hook(step.hook, step.window, prepared.spec, tensors, workspace, max_local_rows, hooks)


def _plan(
    prepared: UnfusedWeights, tensors: Tensors, workspace: torch.Tensor, max_local_rows: int, hooked: bool
) -> Plan:
    plan = planning.make_plan(prepared.spec, prepared.table, tensors.x.shape[0], max_local_rows, whole_rows=hooked)
    if workspace.numel() < plan.sizes.nbytes:
        raise ValueError(
            f"the workspace has {workspace.numel()} bytes, {plan.sizes.tokens} tokens in windows of {max_local_rows} "
            f"rows need {plan.sizes.nbytes}"
        )
    return plan


def _steps(prepared: UnfusedWeights, plan: Plan, ids: str) -> Iterator[_Step]:
    """Yield every launch in order; the arguments are those of the kernels, without their constants."""
    spec, of = prepared.spec, plan.sizes
    first = spec.local_experts.start
    if of.chunks > 1:
        counts = _Part("counts", torch.int16)
        count: tuple[_Argument, ...] = ("ids", counts, _Part("ranked"), of.tokens, first, of.blocks)
        yield _Step(planning.variant_name("count", ids=ids), (of.chunks, 1), count)
    place: tuple[_Argument, ...] = (
        "ids", "weights", _Part("counts", torch.int16), _Part("ranked"), _Part("total_rows"), _Part("row_token"),
        _Part("row_slot"), _Part("row_expert"), _Part("token_rows"), _Part("token_weights", torch.float32),
        _Part("token_count"), _Part("tiles"), _Part("window_rows"), of.tokens, first, of.chunks, of.blocks, plan.slots,
        of.whole, of.divided, plan.cell.tile_rows,
    )  # fmt: skip
    yield _Step(planning.place_name(of, ids), (plan.place_grid, 1), place)
    for window in range(of.windows):
        yield from _window_steps(prepared, plan, window)


def _window_steps(prepared: UnfusedWeights, plan: Plan, window: int) -> Iterator[_Step]:
    of, one, two = plan.sizes, plan.gemm1, plan.gemm2
    rows1 = _Part("rows", torch.float32 if one.partial else torch.bfloat16)
    rows2 = _Part("rows", torch.float32 if two.partial else torch.bfloat16)
    h, window_rows = _Part("h", torch.bfloat16), _Part("window_rows", skip=window)
    yield _gemm_step("gemm1", plan, window, one, prepared.w13, "x", rows1)
    yield _Step(
        planning.variant_name("activation", partial=one.partial),
        (plan.later(plan.activation_grid, window), 1),
        (rows1, h, window_rows, of.whole, one.splits),
    )
    yield _gemm_step("gemm2", plan, window, two, prepared.w2, h, rows2)
    carry = (planning.carry_offset(prepared.spec, of) - of.regions["rows"].offset) // torch.int16.itemsize
    yield _Step(
        planning.variant_name("combine", partial=two.partial),
        (plan.later(plan.combine_grid, window), 1),
        (
            rows2, _Part("token_rows"), _Part("token_weights", torch.float32), _Part("token_count"),
            _Part("total_rows"), _Part("rows", torch.int16, carry), "out", of.tokens, window, of.whole, of.divided,
            of.whole, two.splits,
        ),
    )  # fmt: skip


def _gemm_step(
    step: planning.Step, plan: Plan, window: int, gemm: GemmPlan, matrix: Matrix, x: _Argument, out: _Part
) -> _Step:
    scale_words = matrix.scales.view(torch.int32)
    # A window other than the first has rows only if none of them holds everything.
    first_row = window * plan.sizes.divided
    return _Step(
        planning.variant_name(step, cell=plan.cell, partial=gemm.partial),
        gemm.grid,
        (
            x, matrix.words, scale_words, matrix.scales, matrix.bias, matrix.flags, matrix.row_exponents,
            _Part("tiles", skip=window * plan.slots * 4), _Part("row_token", skip=first_row), out, plan.sizes.whole,
            gemm.steps,
        ),
        f"after_{step}",
        window,
    )  # fmt: skip


def _view(workspace: torch.Tensor, plan: Plan, part: _Part) -> torch.Tensor:
    region = plan.sizes.regions[part.region]
    whole = workspace[region.offset : region.offset + region.nbytes]
    return whole[: region.nbytes // part.dtype.itemsize * part.dtype.itemsize].view(part.dtype)[part.skip :]


def _call_hook(
    name: str,
    window: int,
    spec: MoESpec,
    tensors: Tensors,
    workspace: torch.Tensor,
    max_local_rows: int,
    hooks: Mapping[str, Hook | None],
) -> None:
    hook = hooks.get(name)
    if hook is None:
        return
    of = planning.sizes(spec, tensors.x.shape[0], max_local_rows)
    rows = of.divided if window else of.whole
    width = 2 * spec.intermediate_size if name == "after_gemm1" else spec.hidden_size

    def view(region: str, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
        start = of.regions[region].offset + first * dtype.itemsize
        return workspace[start : start + count * dtype.itemsize].view(dtype)

    first = window * of.divided
    count = min(rows, of.pairs - first)
    row_map = RowMap(
        token=view("row_token", torch.int32, first, count),
        slot=view("row_slot", torch.int32, first, count),
        expert=view("row_expert", torch.int32, first, count),
        count=view("window_rows", torch.int32, window, 1),
    )
    hook(view("rows", torch.bfloat16, 0, count * width).view(count, width), row_map)
