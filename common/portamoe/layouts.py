"""The order of w13's rows as a typed property of the bytes; padding; tensor-parallel slicing.

Everything here takes an `Expert` or stacked `ExpertWeights` (dimensions count from the end) in canonical order and
treats a weight, its scale and its bias alike. Global and input scales of w13 stay (w1, w3) whatever the row order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from portamoe.spec import BLOCK_SIZE
from portamoe.weights import Expert

if TYPE_CHECKING:
    import torch

W = TypeVar("W", bound=Expert)

#: E8M0 byte of padded blocks: 2^0. With zero nibbles any finite scale gives 0; this one survives every kernel.
PAD_E8M0: Final = 127
#: E4M3 byte of padded blocks: 1.0.
PAD_E4M3: Final = 0x38


class LayoutError(ValueError):
    """The bytes are in another layout than the launcher reads."""


@dataclass(frozen=True)
class Layout:
    """Order of the 2I rows of w13, w13_scale and w13_bias: `block` rows of one half, `block` of the other, and so on.

    first:  which half comes first, "gate" (w1) or "up" (w3)
    block:  rows taken in turn; 1 is row by row (g0, u0, g1, u1, …), None is the whole half ([w1; w3] or [w3; w1])
    """

    first: Literal["gate", "up"]
    block: int | None = None

    def __post_init__(self) -> None:
        if self.first not in {"gate", "up"}:
            raise ValueError(f'first must be "gate" or "up", got {self.first!r}')
        if self.block is not None and (isinstance(self.block, bool) or not isinstance(self.block, int)):
            raise TypeError(f"block must be an int or None, got {self.block!r}")
        if self.block is not None and self.block < 1:
            raise ValueError(f"block must be at least 1, got {self.block}")

    def __str__(self) -> str:
        one, other = ("w1", "w3") if self.first == "gate" else ("w3", "w1")
        if self.block is None:
            return f"[{one}; {other}]"
        return f"{one}/{other} interleaved by {self.block} row{'s' * (self.block > 1)}"

    def rows(self, intermediate_size: int) -> torch.Tensor:
        """Return (2I,) int64: row r of this layout is row `rows[r]` of `[w1; w3]`.

        Raises ValueError where `block` does not divide I.
        """
        import torch

        block = intermediate_size if self.block is None else self.block
        if intermediate_size % block:
            raise ValueError(f"{self}: intermediate size {intermediate_size} is no multiple of {block}; pad it first")
        halves = torch.arange(2 * intermediate_size).view(2, intermediate_size // block, block)
        if self.first == "up":
            halves = halves.flip(0)
        return halves.transpose(0, 1).flatten()

    def inverse_rows(self, intermediate_size: int) -> torch.Tensor:
        """Return (2I,) int64: row r of `[w1; w3]` is row `inverse_rows[r]` of this layout."""
        return self.rows(intermediate_size).argsort()


W13_GATE_UP: Final = Layout("gate")
W13_UP_GATE: Final = Layout("up")
W13_INTERLEAVED_GATE_UP: Final = Layout("gate", 1)
W13_INTERLEAVED_UP_GATE: Final = Layout("up", 1)
#: The order of checkpoints' separate tensors, of `Expert`, and of everything that says nothing else.
CANONICAL: Final = W13_GATE_UP
#: Every order that a kernel is known to want.
LAYOUTS: Final = (
    W13_GATE_UP,
    W13_UP_GATE,
    W13_INTERLEAVED_GATE_UP,
    W13_INTERLEAVED_UP_GATE,
    *(Layout(first, block) for block in (64, 32, 16) for first in ("gate", "up")),
)


@dataclass(frozen=True)
class LaidOut(Generic[W]):
    """Expert tensors together with the layout their w13 rows are in; the only way to hold other than canonical ones."""

    weights: W
    layout: Layout

    def to(self, layout: Layout) -> LaidOut[W]:
        """Return a copy in another layout; nothing is copied where it is the same."""
        if layout == self.layout:
            return self
        size = _intermediate_size(self.weights)
        return LaidOut(_take_rows(self.weights, self.layout.inverse_rows(size)[layout.rows(size)]), layout)

    def canonical(self) -> W:
        """Return the weights as `[w1; w3]`, byte for byte what `arrange` was given."""
        return self.to(CANONICAL).weights

    def require(self, launcher: str, *accepted: Layout) -> W:
        """Return the weights if their layout is one of `accepted`; raise LayoutError that names both otherwise."""
        if self.layout not in accepted:
            raise LayoutError(
                f"{launcher} reads w13 as {' or '.join(map(str, accepted))}, the weights are {self.layout}; "
                "convert them with LaidOut.to"
            )
        return self.weights


def arrange(weights: W, layout: Layout) -> LaidOut[W]:
    """Bring canonical weights into `layout`: rows of w13, w13_scale and w13_bias move together.

    Raises ValueError where the layout's block does not divide I.
    """
    return LaidOut(weights, CANONICAL).to(layout)


def pad_expert(weights: W, intermediate_multiple: int = 1, hidden_multiple: int = 1) -> W:
    """Round I and H up to multiples, each half of w13 by itself; the result of the experts does not change.

    Weights and biases are padded with zeros, E8M0 scales with byte 127 and E4M3 scales with byte 0x38 (both 1.0). Every
    activation is 0 at gate = up = 0, so that padded rows of w13 reach nothing.

    Returns `weights` itself where nothing is to do. Raises ValueError where a padded size cuts a block of scales.
    """
    form = _form(weights)
    inter = _padded_size("intermediate", form.intermediate_size, intermediate_multiple, form.block)
    hidden = _padded_size("hidden", form.hidden_size, hidden_multiple, form.block)
    if (inter, hidden) == (form.intermediate_size, form.hidden_size):
        return weights
    return _resized(weights, form, inter, hidden)


def unpad_expert(weights: W, intermediate_size: int, hidden_size: int) -> W:
    """Cut padded weights back to I and H, the inverse of `pad_expert`.

    Raises ValueError where the weights are smaller than that or the sizes cut a block of scales.
    """
    form = _form(weights)
    for name, size, have in (
        ("intermediate", intermediate_size, form.intermediate_size),
        ("hidden", hidden_size, form.hidden_size),
    ):
        if not 0 < size <= have or size % form.block:
            raise ValueError(
                f"{name} size {size} must be a multiple of {form.block} (the block of {form.name}) up to {have}"
            )
    return _resized(weights, form, intermediate_size, hidden_size)


def slice_tensor_parallel(weights: W, rank: int, size: int) -> W:
    """Return one of `size` ranks' share: I/size rows of each half of w13, I/size columns of w2, with their scales.

    All offsets come from the unpadded sizes, so slice first and pad after. The ranks' outputs add up to the whole:
    w2_bias is kept on rank 0 and zero on the others.

    Raises ValueError where I/size is no whole number of blocks, with the numbers, and for a rank out of range.
    """
    for name, value in (("rank", rank), ("size", size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be within 0 … {size - 1}, got {rank}")
    form = _form(weights)
    total = form.intermediate_size
    if total % (size * form.block):
        raise ValueError(
            f"intermediate size {total} over {size} ranks is {total / size:g} a rank, "
            f"{total / size / form.block:g} blocks of {form.block} ({form.name}), and a slice may not cut a block; "
            f"use a number of ranks that divides {total // form.block}, or expert parallelism"
        )
    share = total // size

    def cut(tensor: torch.Tensor, field: str) -> torch.Tensor:
        if field == "w2_bias":
            return tensor if rank == 0 else tensor.new_zeros(tensor.shape)
        if field.startswith("w2"):
            columns = form.columns(field, share)
            return tensor.narrow(-1, rank * columns, columns).contiguous()
        dim = -1 if field == "w13_bias" else -2
        return _by_half(tensor, dim, lambda half: half.narrow(dim, rank * share, share))

    return _map(weights, cut)


@dataclass(frozen=True)
class _Form:
    """Sizes and weight format read from canonical tensors."""

    intermediate_size: int
    hidden_size: int
    name: str

    @property
    def block(self) -> int:
        return BLOCK_SIZE[self.name]

    def columns(self, field: str, values: int) -> int:
        """Return how many elements of a row of `field` hold `values` consecutive K."""
        if field.endswith("_scale"):
            return values // self.block
        return values if self.name == "bf16" else values // 2

    def padding(self, field: str) -> int:
        """Return the element that fills a padded `field`."""
        if field.endswith("_scale"):
            return PAD_E8M0 if self.name == "mxfp4" else PAD_E4M3
        return 0

    def sizes(self, field: str, intermediate_size: int, hidden_size: int) -> tuple[int, ...]:
        """Return the last dimensions of `field` for given I and H."""
        rows, values = (
            (2 * intermediate_size, hidden_size) if field.startswith("w13") else (hidden_size, intermediate_size)
        )
        return (rows,) if field.endswith("_bias") else (rows, self.columns(field, values))


#: The tensors that have a row for each output of their GEMM.
_BY_ROW: Final = frozenset({"w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias"})


def _form(weights: Expert) -> _Form:
    """Read the form of canonical weights; raise where its tensors contradict each other."""
    import torch

    scale = weights.w13_scale
    if scale is None:
        name = "bf16"
    elif scale.dtype in {torch.uint8, torch.float8_e4m3fn}:
        name = "mxfp4" if scale.dtype == torch.uint8 else "nvfp4"
    else:
        raise TypeError(f"w13_scale must be uint8 (mxfp4) or float8_e4m3fn (nvfp4), got {scale.dtype}")
    form = _Form(_intermediate_size(weights), weights.w2.shape[-2], name)
    for field in sorted(_BY_ROW):
        tensor = getattr(weights, field)
        if tensor is None and (name == "bf16" or not field.endswith("_scale")):
            continue
        sizes = form.sizes(field, form.intermediate_size, form.hidden_size)
        if tensor is None or tuple(tensor.shape[-len(sizes) :]) != sizes:
            got = "missing" if tensor is None else tuple(tensor.shape)
            raise ValueError(f"{field} is {got}; with w13 {tuple(weights.w13.shape)} ({name}) it must end in {sizes}")
    return form


def _intermediate_size(weights: Expert) -> int:
    rows = weights.w13.shape[-2]
    if rows % 2:
        raise ValueError(f"w13 has {rows} rows; gate and up need an even number")
    return rows // 2


def _map(weights: W, change: Callable[[torch.Tensor, str], torch.Tensor]) -> W:
    """Return a copy whose tensors with rows went through `change(tensor, field)`; the others are kept."""
    changed: dict[str, Any] = {}
    for field in fields(weights):
        tensor = getattr(weights, field.name)
        if tensor is not None and field.name in _BY_ROW:
            changed[field.name] = _from_bytes(change(_as_bytes(tensor), field.name), tensor.dtype)
    return replace(weights, **changed)


def _by_half(tensor: torch.Tensor, dim: int, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply `change` to the gate and to the up half of a w13 tensor."""
    import torch

    gate, up = tensor.chunk(2, dim=dim)
    return torch.cat((change(gate), change(up)), dim=dim)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not less than `value`."""
    return -(-value // multiple) * multiple


def _padded_size(name: str, size: int, multiple: int, block: int) -> int:
    if isinstance(multiple, bool) or not isinstance(multiple, int):
        raise TypeError(f"{name}_multiple must be an int, got {multiple!r}")
    if multiple < 1:
        raise ValueError(f"{name}_multiple must be at least 1, got {multiple}")
    padded = round_up(size, multiple)
    if padded % block:
        raise ValueError(
            f"{name} size {size} padded to a multiple of {multiple} is {padded}, which cuts a block of {block}"
        )
    return padded


def _resized(weights: W, form: _Form, intermediate_size: int, hidden_size: int) -> W:
    """Cut or pad every tensor to I and H, both halves of w13 by themselves."""

    def change(tensor: torch.Tensor, field: str) -> torch.Tensor:
        sizes = form.sizes(field, intermediate_size, hidden_size)
        fill = form.padding(field)
        if field.startswith("w13"):
            half = (sizes[0] // 2, *sizes[1:])
            return _by_half(tensor, -len(sizes), lambda part: _resize(part, half, fill))
        return _resize(tensor, sizes, fill)

    return _map(weights, change)


def _resize(tensor: torch.Tensor, sizes: tuple[int, ...], fill: int) -> torch.Tensor:
    """Return a copy with the last dimensions set to `sizes`: cut at the end, or filled up with `fill`."""
    out = tensor.new_full((*tensor.shape[: -len(sizes)], *sizes), fill)
    for dim in range(-len(sizes), 0):
        tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], sizes[dim]))
    target = out
    for dim in range(-len(sizes), 0):
        target = target.narrow(dim, 0, tensor.shape[dim])
    target.copy_(tensor)
    return out


def _take_rows(weights: W, rows: torch.Tensor) -> W:
    def take(tensor: torch.Tensor, field: str) -> torch.Tensor:
        if not field.startswith("w13"):
            return tensor
        return tensor.index_select(-1 if field == "w13_bias" else -2, rows.to(tensor.device))

    return _map(weights, take)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View one-byte dtypes as uint8: torch has no cat or index_select of float8 on every device."""
    import torch

    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _from_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(dtype) if dtype.itemsize == 1 else tensor
