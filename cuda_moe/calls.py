"""One prepared call for a number of tokens: its kernels, grids and the order of their arguments."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from cuda_moe import triton_compat
from cuda_moe.plan import SORT_TOKENS, Plan, Tile, make_plan, max_tiles, may_remain, plan_edges
from cuda_moe.triton_compat import KernelSource
from cuda_moe.workspace import ALIGN, LEAST_ROWS, Regions, arrival_counters, next_power_of_2, regions, sort_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuda_moe.prepared import FusedWeights
    from portamoe.activations import Activation
    from portamoe.spec import MoESpec

BF16, F32, I32, I16 = "*bf16:16", "*fp32:16", "*i32:16", "*i16:16"
COMBINE_COLUMNS = 512
FEW_COMBINE_COLUMNS = 128
#: Slots that combine unrolls when few of a token's experts are local; more are read in a loop.
FEW_LOCAL_SLOTS = 4
#: Tokens that one program of the sort's second launch copies for wgmma.
COPY_TOKENS = 2
#: Blocks whose counts the sort's second launch loads at once.
SUMMED_BLOCKS = 8
#: Pairs that one program of route_few places.
ROUTE_PART = 8
_ID_TYPES = {torch.int32: "*i32", torch.int64: "*i64"}
_DTYPES = {"counts": torch.int16, "token_weight": torch.float32, "tile_weight": torch.float32, "h": torch.bfloat16,
           "rest_h": torch.bfloat16, "rest_y": torch.bfloat16, "partial": torch.uint16}  # fmt: skip


def _plain(warps: int) -> Tile:
    """Launch options of a kernel without a matrix product."""
    return Tile(0, warps, 1, 1)


def _activation(activation: Activation) -> dict[str, Any]:
    values = [getattr(activation, f.name) for f in fields(activation)]
    padded = [*values, None, None, None][:3]
    return {"ACT": activation.name, **{f"P{i}": value for i, value in enumerate(padded)}}


class Kernels:
    """The kernels of one plan: what decides their machine code, nothing about a device's memory."""

    def __init__(
        self, spec: MoESpec, plan: Plan, tokens: int, ids: torch.dtype, capability: int, portable: bool = False
    ) -> None:
        self.spec, self.plan, self.tokens, self.capability = spec, plan, tokens, capability
        self.ids_type = _ID_TYPES[ids]
        self.decode = "portable" if portable else "sm90" if capability >= 90 else "sm80"
        self.hopper = capability // 10 == 9 and not portable
        self.pdl = plan.pdl and not portable
        mxfp4 = spec.weight_format == "mxfp4"
        self.lane_order = mxfp4 and triton_compat.lane_order()
        # wgmma reads its second operand from shared memory in natural order.
        self.natural = plan.wide and self.lane_order and (portable or capability // 10 == 9)
        self.ids = {"FIRST": spec.local_experts.start, "LOCAL": spec.num_local_experts}
        self.sizes = {"H": spec.hidden_size, "I": spec.intermediate_size, "HS": spec.intermediate_size}
        self.weights_type = I32 if spec.weight_format == "mxfp4" else BF16

    def _source(
        self,
        fn: Any,
        arguments: list[tuple[str, str]],
        constants: dict[str, Any],
        tile: Tile,
        pdl: bool = False,
        cooperative: bool = False,
    ) -> KernelSource:
        return KernelSource(
            fn, tuple(arguments), tuple(constants.items()), tile.warps, tile.stages, pdl, cooperative, tile.registers
        )

    def _matrix(self, suffix: str = "") -> list[tuple[str, str]]:
        names = [f"{name}{suffix}" for name in ("codes", "scales", "factor", "bias")]
        return list(zip(names, (self.weights_type, I32, F32, F32), strict=True))

    def _common(self, tile: Tile) -> dict[str, Any]:
        return {
            "UNROLL": tile.unroll,
            "STAGES": tile.stages,
            "FORMAT": self.spec.weight_format,
            "DECODE": self.decode,
            "BIAS": self.spec.bias,
        }

    def _wide(self) -> dict[str, Any]:
        lane_order = self.lane_order and not self.natural
        wait = self.plan.wide and self.hopper and self.spec.weight_format == "mxfp4"
        bases, widths = 0, 0
        for i, width in enumerate(self.plan.columns):
            bases |= 1 << width.bit_length() - 1 + 8 * i
            widths |= width << 8 * i
        return {"BASES": bases, "WIDTHS": widths, "WIDE": self.plan.wide, "MMA_ORDER": lane_order, "WAIT": wait}

    def count(self) -> KernelSource:
        """First launch of the sort."""
        from cuda_moe._routing_kernels import count_kernel

        sort = sort_shape(self.spec, self.tokens)
        arguments = [("ids", self.ids_type), ("rank_out", I32), ("counts", I16), ("masks", I32), ("tokens", "i32")]
        constants = {**self.ids, "BINS": sort.bins, "TOPK": self.spec.top_k, "KP": sort.slots, "TOKENS": SORT_TOKENS,
                     "PDL": self.pdl}  # fmt: skip
        return self._source(count_kernel, arguments, constants, _plain(8))

    def place(self) -> KernelSource:
        """Second launch of the sort."""
        from cuda_moe._routing_kernels import place_kernel

        sort = sort_shape(self.spec, self.tokens)
        names = ("rank_in", "counts", "row_token", "token_row", "token_weight", "token_rows", "tile_expert", "tile_row",
                 "tile_count", "meta")  # fmt: skip
        arguments = [("ids", self.ids_type), ("weights", "*fp32")]
        arguments += [(name, {"token_weight": F32, "counts": I16}.get(name, I32)) for name in names]
        arguments += [("x", BF16), ("x_natural", BF16)]
        arguments += [(name, "i32") for name in ("tokens", "blocks", "programs", "row_limit", "tile_limit")]
        constants = {**self.ids, "BINS": sort.bins, "TOPK": self.spec.top_k, "KP": sort.slots, "TOKENS": SORT_TOKENS,
                     "PART": sort.part, "BN": self.plan.widest, "ROUND": 8,
                     "BLOCKS": SUMMED_BLOCKS, "H": self.spec.hidden_size,
                     "COPY": COPY_TOKENS if self.natural else 0, "PDL": self.pdl}  # fmt: skip
        return self._source(place_kernel, arguments, constants, _plain(8), pdl=self.pdl)

    def gate_up(self) -> KernelSource:
        """GEMM1 of the first window."""
        from cuda_moe._expert_kernels import gate_up_kernel

        tile = self.plan.gate_up
        arguments = [("x", BF16), *self._matrix(), ("h", BF16)]
        arguments += [(n, I32) for n in ("row_token", "tile_expert", "tile_row", "tile_count", "meta")]
        constants = {**self.sizes, "MT": tile.fragments, **self._common(tile), **self._wide(),
                     "X_PERMUTED": False, "H_NATURAL": self.natural, **_activation(self.spec.activation),
                     "LOOP": self.plan.loop, "PDL": self.pdl}  # fmt: skip
        return self._source(gate_up_kernel, arguments, constants, tile, pdl=self.pdl)

    def down(self) -> KernelSource:
        """GEMM2 of the first window."""
        from cuda_moe._expert_kernels import down_kernel

        tile = self.plan.down
        arguments = [("h", BF16), *self._matrix(), ("y", BF16)]
        arguments += [(n, I32) for n in ("tile_expert", "tile_row", "tile_count", "meta")]
        constants = {**self.sizes, "MT": tile.fragments, **self._common(tile), **self._wide(), "LOOP": self.plan.loop,
                     "PDL": self.pdl}  # fmt: skip
        return self._source(down_kernel, arguments, constants, tile, pdl=self.pdl)

    def _slots(self) -> int:
        share = self.spec.num_local_experts / self.spec.num_experts
        return self.spec.top_k if share * self.spec.top_k > FEW_LOCAL_SLOTS else min(FEW_LOCAL_SLOTS, self.spec.top_k)

    def combine(self) -> KernelSource:
        """Weighted sum of the first window."""
        from cuda_moe._expert_kernels import combine_kernel

        arguments = [("y", BF16), ("token_row", I32), ("token_weight", F32), ("token_rows", I32), ("meta", I32)]
        arguments += [("out", BF16), ("low_half", "*u16:16")]
        slots = self._slots()
        constants = {"H": self.spec.hidden_size, "TOPK": self.spec.top_k, "BLOCK": COMBINE_COLUMNS, "UNROLL": slots}
        warps = 1 if slots <= FEW_LOCAL_SLOTS else 2
        return self._source(combine_kernel, arguments, {**constants, "PDL": self.pdl}, _plain(warps), pdl=self.pdl)

    def rest(self) -> KernelSource:
        """Everything behind the first window."""
        from cuda_moe._expert_kernels import rest_kernel

        up, down = self.plan.gate_up, self.plan.down
        warps = max(up.warps, down.warps)
        arguments = [("x", BF16), *self._matrix("1"), *self._matrix("2"), ("h", BF16), ("y", BF16)]
        arguments += [("low_half", "*u16:16"), ("out", BF16), ("row_token", I32), ("token_row", I32)]
        arguments += [("token_weight", F32), ("token_rows", I32)]
        arguments += [(n, I32) for n in ("tile_expert", "tile_row", "tile_count", "meta")]
        arguments += [("tokens", "i32"), ("capacity", "i32")]
        common = self._common(up)
        del common["UNROLL"]
        fragments = [max(tile.fragments, warps) for tile in (up, down)]
        constants = {**self.sizes, "MT1": fragments[0], "MT2": fragments[1], "UNROLL1": up.unroll,
                     "UNROLL2": down.unroll, **common, **self._wide(), "X_PERMUTED": self.natural,
                     "H_NATURAL": self.natural, **_activation(self.spec.activation), "TOPK": self.spec.top_k,
                     "BLOCK": COMBINE_COLUMNS}  # fmt: skip
        return self._source(
            rest_kernel, arguments, constants, Tile(0, warps, 1, up.stages), cooperative=not self._portable()
        )

    def _portable(self) -> bool:
        return self.decode == "portable"

    def _few(self) -> dict[str, Any]:
        scanned = self.tokens * self.spec.top_k if self.plan.path in {"direct", "leader"} else 1
        return {**self.ids, **self.sizes, "TOPK": self.spec.top_k, "PAIRS": max(16, next_power_of_2(scanned)),
                "KP": next_power_of_2(self.spec.top_k),
                "PATH": self.plan.path, "LOOP": self.plan.loop, "COLUMNS": self.plan.columns[0],
                "MMA_ORDER": self.lane_order}  # fmt: skip

    def _lists(self) -> list[tuple[str, str]]:
        names = ("meta", "tile_expert", "tile_count", "tile_dest", "tile_weight", "tile_need")
        return [(name, F32 if name == "tile_weight" else I32) for name in names] + [("tokens", "i32")]

    def route_few(self) -> KernelSource:
        """Order of few pairs."""
        from cuda_moe._routing_kernels import route_few_kernel

        arguments = [("ids", self.ids_type), ("weights", "*fp32"), *self._lists()]
        pairs = max(ROUTE_PART, next_power_of_2(self.tokens * self.spec.top_k))
        constants = {**self.ids, "BINS": sort_shape(self.spec, 1).bins, "TOPK": self.spec.top_k, "PAIRS": pairs,
                     "PART": ROUTE_PART, "COLUMNS": self.plan.columns[0], "PDL": self.pdl}  # fmt: skip
        return self._source(route_few_kernel, arguments, constants, _plain(4))

    def few_gate_up(self) -> KernelSource:
        """GEMM1 for few tokens."""
        from cuda_moe._few_kernels import few_gate_up_kernel

        tile = self.plan.gate_up
        arguments = [("x", BF16), ("ids", self.ids_type), ("weights", "*fp32"), *self._matrix(), ("h", BF16)]
        constants = {**self._few(), "MT": tile.fragments, "SLICES": tile.slices, **self._common(tile),
                     **_activation(self.spec.activation), "PDL": self.pdl,
                     "ARRIVALS": arrival_counters(self.spec, self.plan, self.tokens)}  # fmt: skip
        pdl = self.pdl and self.plan.path == "listed"
        return self._source(few_gate_up_kernel, [*arguments, ("arrivals", I32), *self._lists()], constants, tile, pdl)

    def few_down(self) -> KernelSource:
        """GEMM2 and the sum for few tokens."""
        from cuda_moe._few_kernels import few_down_kernel

        tile = self.plan.down
        arguments = [("h", BF16), ("ids", self.ids_type), ("weights", "*fp32"), *self._matrix(), ("y", F32)]
        arguments += [("out", BF16), ("arrivals", I32), *self._lists()]
        constants = {**self._few(), "TOKENS": next_power_of_2(self.tokens), "MT": tile.fragments,
                     "SLICES": tile.slices, **self._common(tile), "PDL": self.pdl}  # fmt: skip
        return self._source(few_down_kernel, arguments, constants, tile, self.pdl)

    def few_combine(self) -> KernelSource:
        """Sum for few tokens, where GEMM2 leaves it to a launch of its own."""
        from cuda_moe._few_kernels import few_combine_kernel

        constants = {**self.ids, "H": self.spec.hidden_size, "TOPK": self.spec.top_k,
                     "KP": next_power_of_2(self.spec.top_k), "BLOCK": FEW_COMBINE_COLUMNS, "PDL": self.pdl}  # fmt: skip
        arguments = [("y", F32), ("ids", self.ids_type), ("out", BF16)]
        return self._source(few_combine_kernel, arguments, constants, _plain(2), self.pdl)

    def all(self, rest: bool) -> list[KernelSource]:
        """Every kernel of the plan in the order of its launches."""
        if self.plan.path != "sorted":
            few = [self.few_gate_up(), self.few_down()]
            if self.plan.path == "leader":
                return [*few, self.few_combine()]
            return [self.route_few(), *few] if self.plan.path == "listed" else few
        chain = [self.count(), self.place(), self.gate_up(), self.down(), self.combine()]
        return [*chain, self.rest()] if rest else chain


def kernels_of(prepared: FusedWeights, max_tokens: int, max_local_rows: int) -> Iterator[KernelSource]:
    """Yield every kernel that calls on 1 ... max_tokens tokens launch, some of them repeatedly."""
    spec, invariant = prepared.spec, prepared.batch_invariant
    windows = min(max(max_local_rows, LEAST_ROWS), max_tokens * spec.top_k) < max_tokens * spec.top_k
    for tokens in plan_edges(spec, max_tokens, prepared.capability, invariant):
        plan = make_plan(spec, tokens, prepared.capability, invariant)
        rest = windows or may_remain(spec, tokens, plan)
        for ids in _ID_TYPES:
            yield from Kernels(spec, plan, tokens, ids, prepared.capability).all(rest)


class Call:
    """The launches of one number of tokens; holds no memory of the device."""

    def __init__(
        self, prepared: FusedWeights, tokens: int, max_local_rows: int, ids: torch.dtype, plan: Plan | None = None
    ) -> None:
        if ids not in _ID_TYPES:
            raise TypeError(f"topk_ids are {ids}, expected int32 or int64")
        self.prepared, self.spec, self.tokens, self.ids = prepared, prepared.spec, tokens, ids
        self.interpreting = triton_compat.interpreting()
        if not tokens:
            self.regions = Regions({}, {}, 0)
            return
        self.plan = plan or make_plan(self.spec, tokens, prepared.capability, prepared.batch_invariant)
        self.regions = regions(self.spec, tokens, self.plan, max_local_rows)
        self.tiles = max_tiles(self.spec, tokens, self.plan.widest)
        self.rest = self.plan.path == "sorted" and (
            self.regions.rows < tokens * self.spec.top_k or may_remain(self.spec, tokens, self.plan)
        )
        kernels = Kernels(self.spec, self.plan, tokens, ids, prepared.capability, self.interpreting)
        self.natural = kernels.natural
        self.launchers = [prepared.launcher(source) for source in kernels.all(self.rest)]
        self.gate_up_blocks = -(-2 * self.spec.intermediate_size // self.plan.gate_up.rows)
        self.down_blocks = -(-self.spec.hidden_size // self.plan.down.rows)
        self.sort = sort_shape(self.spec, tokens)
        warps = max(self.plan.gate_up.warps, self.plan.down.warps)
        # Registers bound residency: at most 255 a thread.
        self.resident = 1 if self.interpreting else prepared.processors * max(1, 8 // warps)
        self.matrices = [
            tuple(value if self.interpreting else value.data_ptr() for value in vars(matrix).values())
            for matrix in (prepared.gate_up, prepared.down)
        ]

    def check(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, workspace: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Raise TypeError or ValueError, naming the tensor, unless all five are as `forward` wants them."""
        spec, tokens = self.spec, self.tokens
        rows, pairs = (tokens, spec.hidden_size), (tokens, spec.top_k)
        wanted = (
            ("x", x, rows, torch.bfloat16),
            ("topk_ids", ids, pairs, self.ids),
            ("topk_weights", weights, pairs, torch.float32),
            ("out", out, rows, torch.bfloat16),
        )
        for name, tensor, shape, dtype in wanted:
            if tensor.dtype != dtype:
                raise TypeError(f"{name} is {tensor.dtype}, expected {dtype}")
            if tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected {shape} contiguous"
                )
        need = self.regions.nbytes
        if workspace.dtype != torch.uint8 or workspace.numel() < need:
            raise ValueError(
                f"workspace is {workspace.numel()} x {workspace.dtype}, expected at least {need} bytes of uint8"
            )
        if workspace.data_ptr() % ALIGN or x.data_ptr() % 16 or out.data_ptr() % 16:
            raise ValueError(f"workspace must be aligned to {ALIGN} bytes, x and out to 16")

    def _bind(self, workspace: torch.Tensor) -> dict[str, Any]:
        if not self.interpreting:
            base = workspace.data_ptr()
            return {name: base + offset for name, offset in self.regions.offsets.items()}
        bound = {}
        for name, offset in self.regions.offsets.items():
            few_y = name == "y" and self.plan.path != "sorted"
            default = torch.bfloat16 if name == "y" else torch.int32
            dtype = torch.float32 if few_y else _DTYPES.get(name, default)
            bound[name] = workspace[offset : offset + self.regions.sizes[name]].view(dtype)
        return bound

    def launch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, workspace: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Launch the chain on the current stream."""
        tensors: tuple[Any, ...] = (x, ids, weights, out)
        stream = 0
        if not self.interpreting:
            tensors = tuple(t.data_ptr() for t in tensors)
            stream = triton_compat.current_stream(self.prepared.device)
        at = self._bind(workspace)
        if self.plan.path == "sorted":
            self._launch_sorted(stream, at, *tensors)
        else:
            self._launch_few(stream, at, *tensors)

    def _launch_few(self, stream: int, at: dict[str, Any], x: Any, ids: Any, weights: Any, out: Any) -> None:
        lists = (at["meta"], at["tile_expert"], at["tile_count"], at["tile_dest"], at["tile_weight"],
                 at["tile_need"], self.tokens)  # fmt: skip
        launchers, slots = self.launchers, self.plan.slots
        if self.plan.path == "listed":
            parts = -(-self.tokens * self.spec.top_k // ROUTE_PART)
            launchers[0]((parts, 1), stream, (ids, weights, *lists))
        counted = (at["arrivals"], *lists)
        grids = (self.gate_up_blocks, slots), (self.down_blocks, slots)
        first = 1 if self.plan.path == "listed" else 0
        launchers[first](grids[0], stream, (x, ids, weights, *self.matrices[0], at["h"], *counted))
        launchers[first + 1](grids[1], stream, (at["h"], ids, weights, *self.matrices[1], at["y"], out, *counted))
        if self.plan.path == "leader":
            columns = -(-self.spec.hidden_size // FEW_COMBINE_COLUMNS)
            launchers[2]((self.tokens, columns), stream, (at["y"], ids, out))

    def _launch_sorted(self, stream: int, at: dict[str, Any], x: Any, ids: Any, weights: Any, out: Any) -> None:
        launchers, sort, tokens = self.launchers, self.sort, self.tokens
        tiles, meta = (at["tile_expert"], at["tile_row"], at["tile_count"]), at["meta"]
        by_token = (at["token_row"], at["token_weight"], at["token_rows"])
        limit = self.tiles if self.plan.loop else self.plan.slots
        x_main = at["y"] if self.natural else x
        launchers[0]((sort.blocks, 1), stream, (ids, at["rank"], at["counts"], at["masks"], tokens))
        programs = -(-tokens // sort.part)
        copies = -(-tokens // COPY_TOKENS) if self.natural else 0
        launchers[1]((programs + copies, 1), stream, (
            ids, weights, at["rank"], at["counts"], at["row_token"], *by_token, *tiles, meta, x, x_main, tokens,
            sort.blocks, programs, self.regions.rows, limit,
        ))  # fmt: skip
        slots = self.plan.slots
        launchers[2](
            (self.gate_up_blocks, slots), stream, (x_main, *self.matrices[0], at["h"], at["row_token"], *tiles, meta)
        )
        launchers[3]((self.down_blocks, slots), stream, (at["h"], *self.matrices[1], at["y"], *tiles, meta))
        partial = at.get("partial", at["h"] if not self.interpreting else at["h"].view(torch.uint16))
        columns = -(-self.spec.hidden_size // COMBINE_COLUMNS)
        launchers[4]((tokens, columns), stream, (at["y"], *by_token, meta, out, partial))
        if self.rest:
            launchers[5]((self.resident, 1), stream, (
                x, *self.matrices[0], *self.matrices[1], at["rest_h"], at["rest_y"], partial, out, at["row_token"],
                *by_token, *tiles, meta, tokens, self.regions.rest_rows,
            ))  # fmt: skip
