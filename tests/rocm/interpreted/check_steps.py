"""Each kernel against torch, on the CPU: run by tests/rocm/test_interpreter.py with TRITON_INTERPRET=1."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from portamoe.activations import GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep
from portamoe.formats import mxfp4_dequantize
from portamoe.spec import MoESpec
from rocm_moe import plan
from rocm_moe.layouts import BrickLayout
from rocm_moe.tiles import load_table
from rocm_moe.triton_compat import INTERPRETED, interpret
from rocm_moe.variants import kernel_variants

assert INTERPRETED, "run with TRITON_INTERPRET=1"
SITU = SiTU(4.0, 25.0)


def small(**changes):
    values = {"hidden_size": 64, "intermediate_size": 64, "num_experts": 12, "top_k": 3, "activation": SITU}
    return MoESpec(**(values | changes))


def variant(spec, name):
    return next(v for v in kernel_variants("cpu", spec) if v.name == name)


def align(spec, ids, weights, max_local_rows, tile_rows=16):
    """Run both alignment kernels and return their tables by name."""
    of = plan.sizes(spec, ids.shape[0], max_local_rows)
    slots = plan.tile_slots(spec, of.whole, tile_rows)
    kind = "i64" if ids.dtype == torch.int64 else "i32"
    table = {
        name: torch.full((region.nbytes // 4,), -7, dtype=torch.int32)
        for name, region in of.regions.items()
        if name not in ("rows", "h", "token_weights")
    }
    table["token_weights"] = torch.full((of.pairs,), float("nan"))
    table["tiles"] = torch.full((of.windows * slots * 4,), -7, dtype=torch.int32)
    counts, ranked = table["counts"].view(torch.int16), table["ranked"]
    first = spec.local_experts.start
    if of.chunks > 1:
        count = variant(spec, plan.variant_name("count", ids=kind))
        interpret(count, (of.chunks, 1), [ids, counts, ranked, of.tokens, first, of.blocks])
    maps = [table[name] for name in ("total_rows", "row_token", "row_slot", "row_expert", "token_rows")]
    tables = [table[name] for name in ("token_weights", "token_count", "tiles", "window_rows")]
    scalars = [of.tokens, first, of.chunks, of.blocks, slots, of.whole, of.divided, tile_rows]
    place = variant(spec, plan.place_name(of, kind))
    grid = (of.chunks + of.windows * plan.TILE_PROGRAMS, 1)
    interpret(place, grid, [ids, weights, counts, ranked, *maps, *tables, *scalars])
    return of, slots, table


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "rows", "local"),
    [
        (1, 999, range(12)), (9, 999, range(12)), (17, 16, range(12)), (17, 32, range(3, 8)), (40, 48, range(11, 12)),
        (65, 10**6, range(12)), (64 * 6 + 1, 400, range(2, 9)),
    ],
    ids=["one", "all-local", "windows", "a-rank", "one-expert", "two-blocks", "chunks"],
)  # fmt: skip
def test_rows_are_a_stable_sort_by_expert(tokens, rows, local, dtype, monkeypatch):
    monkeypatch.setattr(plan, "MOST_CHUNKS", 3)
    plan.sizes.cache_clear()
    spec = small(local_experts=local)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 14, (tokens, 3), generator=generator).to(dtype)  # duplicates, -1 and ids beyond E too
    if dtype == torch.int64:
        ids[0, 0] = 2**32 + local.start  # must not wrap to a local id
    weights = torch.rand(tokens, 3, generator=generator)
    of, slots, table = align(spec, ids, weights, rows)

    here = (ids >= local.start) & (ids < local.stop)
    pairs = here.flatten().nonzero().flatten()
    order = pairs[ids.flatten()[pairs].sort(stable=True).indices]
    total = len(order)
    assert table["total_rows"][0] == total
    assert torch.equal(table["row_token"][:total], (order // 3).int())
    assert torch.equal(table["row_slot"][:total], (order % 3).int())
    assert torch.equal(table["row_expert"][:total], ids.flatten()[order].int())
    # What does not exist may be indexed all the same.
    assert bool((table["row_token"][total : of.pairs] == 0).all())
    assert bool((table["row_expert"][total : of.pairs] == -1).all())

    row_of = {int(pair): row for row, pair in enumerate(order)}
    for token in range(tokens):
        mine = sorted((row_of[p], p) for p in range(3 * token, 3 * token + 3) if p in row_of)
        assert table["token_count"][token] == len(mine)
        found = table["token_rows"][3 * token : 3 * token + len(mine)].tolist()
        assert found == [row for row, _ in mine]
        expected = torch.tensor([weights.flatten()[pair] for _, pair in mine])
        assert torch.equal(table["token_weights"][3 * token : 3 * token + len(mine)], expected)

    size = of.whole if total <= of.whole else of.divided
    tiles = table["tiles"].view(of.windows, slots, 4)
    covered = []
    for window in range(of.windows):
        assert table["window_rows"][window] == min(max(total - window * size, 0), size)
        for expert, first, count, _ in tiles[window].tolist():
            assert 0 <= count <= 16
            for row in range(window * size + first, window * size + first + count):
                assert table["row_expert"][row] == local.start + expert
                covered.append(row)
    assert covered == list(range(total)), "tiles cover every row once, in order"


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("columns", [32, 96, 128, 160, 288, 512])
def test_product_is_exact_to_one_rounding(columns, partial):
    """Every E2M1 code, the ends of the E8M0 range in rows of their own, a NaN scale, biases, three rows of a tile of
    16."""
    spec = small(hidden_size=columns, intermediate_size=32, bias=True)
    generator = torch.Generator().manual_seed(columns)
    n = 64
    codes = torch.randint(0, 256, (2, n, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 130, (2, n, columns // 32), dtype=torch.uint8, generator=generator)
    scales[1, 0] = 0
    scales[1, 1] = 1
    scales[1, 2] = 250
    scales[1, 3] = 254
    scales[1, 4, -1] = 255
    x = torch.randn(7, columns, generator=generator).bfloat16()
    x[:, ::3] *= 2.0**-4
    x *= 2.0**-10  # sums of the largest weights stay finite
    bias = torch.randn(2, n, generator=generator)
    bias[1, :5] = 0
    packed = [BrickLayout().pack(codes[e], scales[e]) for e in range(2)]
    exponents = torch.stack([p.row_exponents if p.row_exponents is not None else torch.zeros(n) for p in packed]).byte()
    table = load_table("cpu")
    cell = table.cells[0]
    v = variant(spec, plan.variant_name("gemm1", cell=cell, partial=partial))
    splits = 2 if partial and columns >= 256 else 1
    steps = -(-(columns // 128) // splits)
    out = torch.full((splits, 16, n), float("nan"), dtype=torch.float32 if partial else torch.bfloat16)
    tiles = torch.tensor([[1, 2, 3, 0], [0, 0, 0, 0], [0, 0, 2, 0]], dtype=torch.int32)
    source = torch.tensor([3, 6, 0, 5, 2, 1, 1, 1], dtype=torch.int32)
    scale_bytes = torch.cat([p.scales for p in packed])
    interpret(
        v,
        (3 * -(-n // v.constexprs["BN"]), splits),
        [
            x, torch.cat([p.words for p in packed]), scale_bytes.view(torch.int32), scale_bytes, bias.flatten(),
            torch.tensor([0, 1], dtype=torch.int32), exponents.flatten(), tiles.flatten(), source,
            out if partial else out[0], 16, steps,
        ],
    )  # fmt: skip
    result = out.float().sum(0)
    weights = torch.stack([mxfp4_dequantize(codes[e], scales[e], torch.float64) for e in range(2)])
    for rows, expert in (((2, 3, 4), 1), ((0, 1), 0)):
        for row in rows:
            truth = weights[expert] @ x[source[row]].double() + bias[expert].double()
            bound = (weights[expert].abs() @ x[source[row]].double().abs() + 1e-37) * 2.0**-22
            bound += bias[expert].abs() * 2.0**-23
            bound += 0.0 if partial else truth.abs() * 2.0**-8 + 2.0**-133
            error = (result[row].double() - truth).abs()
            finite = torch.isfinite(truth)
            assert bool((error[finite] <= bound[finite]).all())
            assert torch.equal(torch.isnan(result[row]), torch.isnan(truth))
    assert bool(torch.isnan(result[5:]).all()), "rows of no tile stay untouched"


ACTIVATIONS = [
    SITU, SiTU(4.0), SiTU(1.5, 3.0), SwiGLU(), SwiGLU(limit=7.0), SwiGLUOAI(1.702, 7.0), SwiGLUOAI(1.1, 5.0, 0.5),
    SwiGLUStep(limit=7.0), GeGLU(), GeGLU(approximate="tanh"), ReLU2(),
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation(activation):
    spec = small(intermediate_size=96, activation=activation)
    gate_up = torch.randn(40, 192, generator=torch.Generator().manual_seed(0)) * 20
    gate_up[1] *= 1e-4  # the series of tanh
    gate_up[2, :8] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 88.0])
    gate_up = gate_up.bfloat16()
    out = torch.full((40, 96), -7.0).bfloat16()
    blocks = -(-37 // (plan.ACTIVATION_ELEMENTS // 32)) * 3
    interpret(variant(spec, "activation"), (blocks, 1), [gate_up, out, torch.tensor([37], dtype=torch.int32), 40, 1])
    truth = activation.apply(gate_up.double(), torch.float64)[:37]
    kept = truth.abs() < 1e30
    assert torch.equal(torch.isnan(out[:37]), torch.isnan(truth))
    error = (out[:37].double() - truth).abs()[kept]
    # 1 + erf(x) cancels where x is negative, in float32 as well.
    absolute = 1e-5 if activation == GeGLU() else 1e-9
    assert bool((error <= truth.abs()[kept] * 2.0**-7.9 + absolute).all())
    assert bool((out[37:] == -7).all()), "rows beyond the window's count stay untouched"


def test_partial_sums_meet_in_the_activation():
    spec = small(intermediate_size=96)
    parts = torch.randn(3, 16, 192, generator=torch.Generator().manual_seed(0)) * 8
    out = torch.empty(16, 96).bfloat16()
    interpret(variant(spec, "activation-partial"), (3, 1), [parts, out, torch.tensor([5], dtype=torch.int32), 16, 3])
    truth = SITU.apply(parts.sum(0), torch.float32)[:5]
    assert bool(((out[:5].float() - truth).abs() <= truth.abs() * 2.0**-7.9 + 1e-6).all())


def test_a_spec_is_frozen_into_its_kernels():
    """Swapping two parameters of an activation must change what is compiled."""
    one = variant(small(activation=SwiGLUOAI(1.702, 7.0)), "activation").constexprs
    other = variant(small(activation=SwiGLUOAI(7.0, 1.702)), "activation").constexprs
    assert one != other
    assert dataclasses.astuple(SwiGLUOAI(1.702, 7.0)) == (one["A"], one["B"], one["C"])
