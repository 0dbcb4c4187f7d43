"""The clock and call models on numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portamoe.spec import KIMI_K3
from rocm_moe.evidence import call_model, clock_model, isa
from rocm_moe.evidence.call_model import Gemm, Product
from rocm_moe.evidence.clock_model import MACHINES, MXFP4_BYTES, Tile
from rocm_moe.evidence.isa import Counts
from rocm_moe.tiles import expected_hits
from tests.rocm_evidence import snippets

GFX90A = MACHINES["gfx90a"]
TILE = Tile(rows=16, columns=64, warps=4)
MFMA = "v_mfma_f32_16x16x16bf16_1k"


def counts(valu: int, matrix: int, **more: int) -> Counts:
    """Return plain counts: `valu` full-rate instructions, of which `perm` and `packed_fma` are in `more`."""
    classes = {"logic": valu - more.get("perm", 0) - more.get("packed_fma", 0)}
    classes |= {name: more[name] for name in ("perm", "packed_fma") if name in more}
    lds = more.get("lds_read_bytes", 0), more.get("lds_write_bytes", 0)
    return Counts(classes, {MFMA: matrix} if matrix else {}, valu, *lds, more.get("load_bytes", 0), 0, ())


def test_reference_point_of_gfx90a() -> None:
    """77 VALU and 8 MFMA a step of 16 x 64 x 128 are the known 1.50 and 0.90 of the HBM peak."""
    bound = clock_model.bound(counts(77, 8, lds_read_bytes=64, lds_write_bytes=16), TILE, GFX90A)
    assert bound.elements == 64 * 128
    assert bound.issue == 4 * (77 + 8)
    assert bound.matrix == 8 * 32
    assert bound.lds == 160
    assert bound.hbm == pytest.approx(8192 * MXFP4_BYTES * 110 * 1.7e9 / 1.6e12)
    assert (round(bound.share, 2), round(bound.share_no_overlap, 2)) == (1.50, 0.90)
    assert bound.limit == "VALU"


def test_flop_ceiling_is_the_published_peak() -> None:
    bound = clock_model.bound(counts(10, 64), Tile(64, 128, 4), GFX90A)
    assert bound.tflops(GFX90A, 64, overlap=True) == pytest.approx(191.5, abs=0.1)
    assert bound.tflops(GFX90A, 64, overlap=False) < 191.5


def test_measured_rates_change_what_they_measure() -> None:
    slow = replace(GFX90A, perm_clocks=8.0)
    before = clock_model.bound(counts(77, 8, perm=32), TILE, GFX90A)
    after = clock_model.bound(counts(77, 8, perm=32), TILE, slow)
    assert after.issue - before.issue == 4 * 32
    packed = clock_model.bound(counts(77, 8, packed_fma=8), TILE, replace(GFX90A, packed_fma_clocks=8.0))
    assert packed.issue - before.issue == 4 * 8


def test_whole_kernel_counts_prologue_and_epilogue_once() -> None:
    code = isa.Code(64, 0, 20, 0, 0, 0, loop=counts(77, 8), straight=counts(200, 0), side_loops=counts(0, 0))
    whole = clock_model.whole(code, TILE, GFX90A, 128 * 10)
    assert whole.issue == 4 * (200 + 10 * (77 + 8))
    peeled = replace(code, straight=counts(200, 8))
    assert clock_model.whole(peeled, TILE, GFX90A, 128 * 10).issue == 4 * (200 + 8 + 9 * (77 + 8))
    unrolled = clock_model.whole(replace(peeled, loop=None), TILE, GFX90A, 128)
    assert (unrolled.issue, unrolled.elements) == (4 * (200 + 8), 128 * TILE.columns)
    with pytest.raises(ValueError, match="no matrix instructions"):
        clock_model.whole(replace(code, loop=None), TILE, GFX90A, 128)


@pytest.mark.parametrize(
    ("vgprs", "shared", "warps", "expected"),
    [
        (64, 4096, 4, 8),  # 8 waves a SIMD, the limit
        (70, 4096, 4, 7),  # 72 registers: 7 waves
        (64, 20480, 4, 3),  # LDS holds three
        (64, 70000, 4, 0),  # LDS holds none
        (256, 0, 8, 1),  # 2 waves a SIMD, 8 waves a workgroup
    ],
)
def test_resident_workgroups(vgprs: int, shared: int, warps: int, expected: int) -> None:
    code = isa.parse(snippets.kernel(snippets.STRAIGHT, vgprs=vgprs))
    assert clock_model.resident_workgroups(code, shared, warps, GFX90A) == expected


def test_unknown_matrix_instruction_is_refused() -> None:
    strange = replace(counts(1, 0), matrix={"v_mfma_f32_4x4x4_16b_bf16": 1})
    with pytest.raises(ValueError, match="4x4x4"):
        clock_model.matrix_clocks(strange, GFX90A)


@pytest.mark.parametrize(
    ("mnemonic", "flop"),
    [(MFMA, 8192), ("v_mfma_f32_32x32x8bf16_1k", 16384), ("v_wmma_f32_16x16x16_bf16", 8192)],
)
def test_flop_from_the_name(mnemonic: str, flop: int) -> None:
    assert clock_model.matrix_flop(mnemonic) == flop


def test_stream_share_of_a_kernel_without_matrix_instructions() -> None:
    code = isa.parse(snippets.kernel(snippets.STRAIGHT))
    moved = (8 + 4) * 64 / GFX90A.hbm_bytes_clock
    assert clock_model.stream_share(code, GFX90A) == pytest.approx(moved / (4 * (4 + 1) / 4))


EP8 = replace(KIMI_K3, local_experts=range(112))


def gemm(valu: int = 77) -> Gemm:
    """Return a GEMM of the reference point with a short prologue."""
    code = isa.Code(64, 0, 20, 0, 0, 0, loop=counts(valu, 8), straight=counts(100, 0), side_loops=counts(0, 0))
    return Gemm("reference", code, 4096, TILE)


def gemm1_time(product: Product, experts: float) -> call_model.LaunchTime:
    return call_model.gemm_time(
        "gemm1", product, GFX90A, tiles=experts, rows=experts, experts=experts, columns=6144, depth=3584
    )


def test_few_workgroups_wait_for_memory_and_splitting_k_helps() -> None:
    whole, split = (gemm1_time(Product(gemm(), s, 96 * s), 1) for s in (1, 4))
    assert whole.limit == "latency"
    assert split.seconds < whole.seconds
    assert split.bytes_in_flight_cu > whole.bytes_in_flight_cu
    assert split.workgroups == 4 * whole.workgroups


def test_many_workgroups_stream_at_the_reachable_rate() -> None:
    time = gemm1_time(Product(gemm(), 1, 96 * 112), 112)
    stream = time.hbm_bytes / (GFX90A.hbm_bytes_s * GFX90A.hbm_efficiency)
    assert time.limit == "HBM"
    assert time.seconds == pytest.approx(stream + GFX90A.launch_s + 2 * GFX90A.latency_s)
    assert gemm1_time(Product(gemm(valu=300), 1, 96 * 112), 112).limit == "compute"


def test_a_huge_grid_costs_dispatch() -> None:
    assert gemm1_time(Product(gemm(), 1, 10_000_000), 1).limit == "dispatch"


def test_call_has_six_launches_and_more_tokens_cost_more() -> None:
    product = Product(gemm(), 1, 1000)
    calls = [call_model.call_time(EP8, t, product, product, GFX90A) for t in (1, 16, 256)]
    assert [launch.step for launch in calls[2]] == ["count", "place", "gemm1", "activation", "gemm2", "combine"]
    assert [launch.step for launch in calls[0]] == ["place", "gemm1", "activation", "gemm2", "combine"]
    totals = [sum(launch.seconds for launch in call) for call in calls]
    assert totals == sorted(totals)


def test_expected_tiles_and_hits() -> None:
    assert call_model.expected_tiles(EP8, 1, 16) == pytest.approx(2.0)
    assert call_model.expected_tiles(EP8, 1, 16) == pytest.approx(expected_hits(EP8, 1))
    # With one row a tile there are as many tiles as routed rows.
    assert call_model.expected_tiles(EP8, 64, 1) == pytest.approx(64 * 2)
    assert call_model.expected_tiles(EP8, 64, 16) < 64 * 2


def test_slowest_rank_is_hit_more_than_the_mean_and_the_same_in_every_run() -> None:
    slow = call_model.slowest_hits(EP8, 1)
    assert 3.5 < slow < 5.0
    assert slow == call_model.slowest_hits(EP8, 1)
    assert call_model.slowest_hits(KIMI_K3, 1) == expected_hits(KIMI_K3, 1)
