"""Every kernel binary that this backend can launch for an arch and a spec, as data.

`warm_up`, the ISA report and CI compile exactly this list, so what is judged is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portamoe.activations import GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep
from rocm_moe import _activation_kernels, _align_kernels, _combine_kernels, _gemm_kernels
from rocm_moe.layouts import BrickLayout, FragmentLayout, KernelLayout
from rocm_moe.plan import (
    ACTIVATION_ELEMENTS,
    CHUNK_COUNTS_A_STEP,
    COMBINE_COLUMNS,
    MOST_CHUNKS,
    PAIRS_A_BLOCK,
    PLACED_BLOCKS,
    TILE_PROGRAMS,
    Step,
    activation_columns,
    expert_bins,
    token_slots,
    tokens_a_block,
    variant_name,
)
from rocm_moe.tiles import Cell, GemmTile, TileTable, TunedFileError, load_table
from rocm_moe.triton_compat import HAS_INTRINSICS, INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from portamoe.activations import Activation
    from portamoe.spec import MoESpec

_POINTERS = {"i32": "*i32", "f32": "*fp32", "bf16": "*bf16", "u8": "*u8", "i64": "*i64", "i16": "*i16"}


@dataclass(frozen=True)
class Variant:
    """One binary: a kernel with its types, constants and compiler options.

    name:        unique within the list, for reports
    step:        which step of the call launches it
    fn:          the Triton function
    signature:   parameter -> Triton type, constants as "constexpr", in the kernel's order
    constexprs:  parameter -> value
    attrs:       what the compiler may assume: pointers aligned to 16 bytes
    options:     num_warps, num_stages and the target's own
    cell, tile:  of the tile table, for the products
    """

    name: str
    step: Step
    fn: Any = field(compare=False)
    signature: Mapping[str, str] = field(compare=False)
    constexprs: Mapping[str, Any] = field(compare=False)
    attrs: Mapping[tuple[int, ...], list[list[Any]]] = field(compare=False)
    options: Mapping[str, Any] = field(compare=False)
    cell: Cell | None = field(default=None, compare=False)
    tile: GemmTile | None = field(default=None, compare=False)


def decode_flavour(arch: str) -> str:
    """Return how kernels for `arch` decode E2M1 (see _decode_kernels)."""
    if INTERPRETED or arch == "cpu":
        return "interpret"
    if arch.startswith("sm_"):
        return "fragments"
    if arch == "gfx950":
        return "convert"
    return "lut" if HAS_INTRINSICS else "portable"


def fast_math(arch: str) -> str:
    """Return whose exponential and reciprocal instructions the activation calls; "" for what Triton makes of them."""
    if not HAS_INTRINSICS:
        return ""
    return "amd" if arch.startswith("gfx") else "nvidia" if arch.startswith("sm_") else ""


def layout_for(arch: str) -> KernelLayout:
    """Return the layout in which kernels for `arch` read the weights."""
    flavour = decode_flavour(arch)
    return FragmentLayout() if flavour == "fragments" else BrickLayout(native=flavour == "convert")


def kernel_variants(arch: str, spec: MoESpec, table: TileTable | None = None) -> list[Variant]:
    """Return every binary that calls of `spec` on `arch` may launch, at most 24.

    Raises tiles.TunedFileError if there are no tiles for the arch.
    """
    table = table or load_table(arch)
    out = list(_align_variants(arch, spec))
    for cell in unique_cells(table):
        out += _gemm_variants(arch, spec, cell)
    out += _activation_variants(arch, spec, table)
    out += _combine_variants(arch, spec, table)
    return out


def unique_cells(table: TileTable) -> tuple[Cell, ...]:
    """Return the cells without repeats of the same tiles under another limit."""
    seen: dict[tuple[Any, ...], Cell] = {}
    for cell in table.cells:
        seen.setdefault((cell.tokens, cell.extra, repr(cell.gemm1), repr(cell.gemm2)), cell)
    return tuple(seen.values())


def _signature(kernel: Any, types: str, constexprs: Mapping[str, Any]) -> dict[str, str]:
    """Pair the kernel's parameters with `types` (space-separated); the constants follow."""
    names = list(kernel.arg_names)
    plain = [_POINTERS[t[1:]] if t.startswith("*") else t for t in types.split()]
    if len(plain) + len(constexprs) != len(names):
        raise AssertionError(f"{kernel}: {len(plain)} types and {len(constexprs)} constants for {names}")
    return dict(zip(names, plain + ["constexpr"] * len(constexprs), strict=True))


def _variant(step: Step, name: str, kernel: Any, types: str, constexprs: dict[str, Any], options: dict[str, Any],
             unaligned: tuple[str, ...] = (), **more: Any) -> Variant:  # fmt: skip
    signature = _signature(kernel, types, constexprs)
    attrs: dict[tuple[int, ...], list[list[Any]]] = {
        (index,): [["tt.divisibility", 16]]
        for index, (parameter, kind) in enumerate(signature.items())
        if kind.startswith("*") and parameter not in unaligned
    }
    return Variant(name, step, kernel, signature, constexprs, attrs, options, **more)


def _align_variants(arch: str, spec: MoESpec) -> Iterator[Variant]:
    bins = expert_bins(spec)
    shape = {
        "E_LOCAL": spec.num_local_experts,
        "BINS": bins,
        "TOP_K": spec.top_k,
        "SLOTS": token_slots(spec),
        "TOKENS": tokens_a_block(spec),
        # Each comparison takes a scalar register pair on AMD.
        "RANK_STEP": min(32 if arch.startswith("gfx") else 64, token_slots(spec) * tokens_a_block(spec)),
    }
    # One pair a lane.
    warps = PAIRS_A_BLOCK // (64 if arch.startswith("gfx9") else 32)
    for ids in ("i32", "i64"):
        yield _variant(
            "count",
            variant_name("count", ids=ids),
            _align_kernels.count_pairs,
            f"*{ids} *i16 *i32 i32 i32 i32",
            shape,
            {"num_warps": warps, "num_stages": 1},
            unaligned=("ids",),
        )
    # Only a call of one block reads ids in `place_pairs`.
    for name, blocks in (("", 1), ("many", PLACED_BLOCKS), ("i32", 0), ("i64", 0)):
        yield _variant(
            "place",
            variant_name("place", ids=name),
            _align_kernels.place_pairs,
            f"*{'i32' if blocks else name} *f32 *i16" + " *i32" * 6 + " *f32 *i32 *i32 *i32" + " i32" * 8,
            {
                **shape,
                "BLOCKS": max(blocks, 1),
                "STEP": max(1, min(MOST_CHUNKS, CHUNK_COUNTS_A_STEP // bins)),
                "TILE_PROGRAMS": TILE_PROGRAMS,
                "ONE_BLOCK": not blocks,
            },
            {"num_warps": 8, "num_stages": 1},
            unaligned=("ids", "weights"),
        )


def _gemm_variants(arch: str, spec: MoESpec, cell: Cell) -> Iterator[Variant]:
    decode = decode_flavour(arch)
    fragments = decode == "fragments"
    kernel = _gemm_kernels.grouped_gemm_fragments if fragments else _gemm_kernels.grouped_gemm_bricks
    little, much = cell.extra or (0, 0)
    if much and not fragments:
        raise TunedFileError(f"tiles of {cell.tokens} + {much} rows are for NVIDIA only, not for {arch}")
    hidden, inter = spec.hidden_size, spec.intermediate_size
    products: tuple[tuple[Step, int, int, GemmTile], ...] = (
        ("gemm1", 2 * inter, hidden, cell.gemm1),
        ("gemm2", hidden, inter, cell.gemm2),
    )
    for step, rows, columns, tile in products:
        for partial in (False, True) if tile.fill else (False,):
            yield _variant(
                step,
                variant_name(step, cell=cell, partial=partial),
                kernel,
                f"*bf16 *i32 *i32 *u8 *f32 *i32 *u8 *i32 *i32 {'*f32' if partial else '*bf16'} i32 i32",
                {
                    "N": rows,
                    "K": columns,
                    "BM": cell.tokens,
                    **(
                        {"LITTLE": little, "MUCH": much, "BN": tile.rows}
                        if fragments
                        else {"BN": tile.rows, "UNROLL": tile.unroll_for(columns, whole=not partial)}
                    ),
                    "GATHER": step == "gemm1",
                    "BIAS": spec.bias,
                    "PARTIAL": partial,
                    "DECODE": decode,
                },
                {"num_warps": tile.warps, "num_stages": tile.stages, **tile.options},
                cell=cell,
                tile=tile,
            )


def _activation_variants(arch: str, spec: MoESpec, table: TileTable) -> Iterator[Variant]:
    name, a, b, c = activation_constants(spec.activation)
    columns = activation_columns(spec.intermediate_size)
    for partial in (False, True) if any(cell.gemm1.fill for cell in table.cells) else (False,):
        yield _variant(
            "activation",
            variant_name("activation", partial=partial),
            _activation_kernels.activate,
            f"{'*f32' if partial else '*bf16'} *bf16 *i32 i32 i32",
            {
                "I": spec.intermediate_size,
                "ROWS": ACTIVATION_ELEMENTS // columns,
                "COLUMNS": columns,
                "NAME": name,
                "A": a,
                "B": b,
                "C": c,
                "PARTIAL": partial,
                "FAST": fast_math(arch),
                "DECODE": decode_flavour(arch),
            },
            {"num_warps": 4, "num_stages": 1},
            unaligned=("window_rows",),
        )


def _combine_variants(arch: str, spec: MoESpec, table: TileTable) -> Iterator[Variant]:
    for partial in (False, True) if any(cell.gemm2.fill for cell in table.cells) else (False,):
        yield _variant(
            "combine",
            variant_name("combine", partial=partial),
            _combine_kernels.combine,
            f"{'*f32' if partial else '*bf16'} *i32 *f32 *i32 *i32 *i16 *bf16" + " i32" * 6,
            {
                "TOP_K": spec.top_k,
                "H": spec.hidden_size,
                "COLUMNS": COMBINE_COLUMNS,
                "PARTIAL": partial,
                "DECODE": decode_flavour(arch),
            },
            {"num_warps": 1 if arch.startswith("gfx9") else 2, "num_stages": 1},
        )


def activation_constants(activation: Activation) -> tuple[str, float, float, float]:
    """Return the activation's name and up to three parameters as `_activation_kernels.gated` takes them.

    Raises TypeError for an activation that the kernel does not know: it never computes another one instead.
    """
    match activation:
        case SiTU():
            return "situ", activation.beta, activation.linear_beta or 0.0, 0.0
        case SwiGLU():
            return "swiglu", activation.limit or 0.0, 0.0, 0.0
        case SwiGLUOAI():
            return "swiglu_oai", activation.alpha, activation.limit, activation.offset
        case SwiGLUStep():
            return "swiglu_step", activation.limit, 0.0, 0.0
        case GeGLU():
            return "geglu", float(activation.approximate == "tanh"), 0.0, 0.0
        case ReLU2():
            return "relu2", 0.0, 0.0, 0.0
    raise TypeError(f"triton_unfused has no kernel for the activation {activation!r}")
