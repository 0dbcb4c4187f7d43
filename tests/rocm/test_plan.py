"""Sizes, windows and launches of a call, from the spec alone."""

from __future__ import annotations

import dataclasses
import json

import pytest

from portamoe.spec import GPT_OSS, KIMI_K3
from rocm_moe import plan
from rocm_moe.tiles import Cell, GemmTile, TunedFileError, load_table, read_table, table_to_dict

EP8 = dataclasses.replace(KIMI_K3, local_experts=range(112))
TP8 = dataclasses.replace(KIMI_K3, intermediate_size=384)
SPECS = {"ep8": EP8, "tp8": TP8, "tp32": dataclasses.replace(KIMI_K3, intermediate_size=96), "gpt-oss": GPT_OSS}
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201", "sm_80", "sm_90", "sm_120", "cpu")
TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 129, 256, 1024, 4096, 8192)


def test_memory_of_kimi_k3_at_8192_tokens():
    rows = 16640  # what uniform routing brings to one of eight ranks, and a little more
    assert plan.workspace_bytes(EP8, 8192, rows) <= 330e6
    assert plan.default_max_local_rows(EP8, 8192) == 2 * 8192 * 16 // 8
    assert plan.default_max_local_rows(TP8, 8192) == 8192 * 16


@pytest.mark.parametrize("name", SPECS)
def test_smaller_calls_fit_the_workspace_of_the_largest(name):
    for rows in (16, 100, 4096, 10**7):
        limit = plan.workspace_bytes(SPECS[name], 8192, rows)
        for tokens in TOKENS:
            of = plan.sizes(SPECS[name], tokens, rows)
            assert of.nbytes <= limit
            assert of.whole <= plan.round_up(rows, 16)
            assert of.windows == 1 or of.windows * of.divided >= of.pairs


@pytest.mark.parametrize("name", SPECS)
def test_regions_lie_apart_and_carried_halves_behind_the_divided_rows(name):
    spec = SPECS[name]
    for rows in (16, 100, 4096, 10**7):
        for tokens in (1, 129, 8192):
            of = plan.sizes(spec, tokens, rows)
            regions = sorted(of.regions.values(), key=lambda region: region.offset)
            ends = [region.offset + region.nbytes for region in regions]
            assert all(end <= after.offset for end, after in zip(ends, regions[1:], strict=False))
            assert ends[-1] <= of.nbytes
            if of.windows > 1:
                start = plan.carry_offset(spec, of)
                width = max(2 * spec.intermediate_size, spec.hidden_size)
                assert start >= of.regions["rows"].offset + of.divided * width * 2
                assert start + tokens * spec.hidden_size * 2 <= of.regions["rows"].offset + of.regions["rows"].nbytes


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SPECS)
def test_launches_and_partial_sums(arch, name):
    spec, table = SPECS[name], load_table(arch, {})
    for tokens in TOKENS:
        for rows in (16, 10**7):
            made = plan.make_plan(spec, table, tokens, rows)
            launches = plan.launches(spec, table, tokens, rows)
            assert len(launches) == (1 if made.sizes.chunks == 1 else 2) + 4 * made.sizes.windows
            assert made.slots <= made.sizes.slots, "the workspace has a record for every tile slot"
            for gemm, columns in ((made.gemm1, spec.hidden_size), (made.gemm2, spec.intermediate_size)):
                assert gemm.splits * gemm.steps >= columns // 128
                assert gemm.splits == 1 or (gemm.splits - 1) * gemm.steps < columns // 128, "no split is empty"
                width = max(2 * spec.intermediate_size, spec.hidden_size)
                if gemm.partial:
                    assert gemm.splits * made.sizes.whole * width * 4 <= made.sizes.regions["rows"].nbytes
            whole = plan.make_plan(spec, table, tokens, rows, whole_rows=True)
            assert whole.gemm1.splits == whole.gemm2.splits == 1
            # The order of additions, and so every bit, does not depend on the windows.
            other = plan.make_plan(spec, table, tokens, 10**7)
            assert (made.gemm1.splits, made.gemm1.steps) == (other.gemm1.splits, other.gemm1.steps)


def test_few_tokens_fill_an_mi250x():
    """At least four workgroups a compute unit where K allows it: 16 KiB in flight."""
    for spec in (EP8, dataclasses.replace(KIMI_K3, local_experts=range(28))):
        made = plan.make_plan(spec, load_table("gfx90a", {}), 1, 10**6)
        assert made.gemm1.partial
        assert made.gemm2.partial


def test_an_own_table_comes_first_and_faults_name_the_file(tmp_path):
    table = load_table("gfx90a", {})
    assert table.provenance == "modelled"
    own = dataclasses.replace(table, provenance="measured", cells=table.cells[:1])
    path = tmp_path / "gfx90a.json"
    path.write_text(json.dumps(table_to_dict(own)))
    read = load_table("gfx90a", {"PORTAMOE_TUNED_DIR": str(tmp_path)})
    assert read.source == str(path)
    assert read.cells == own.cells
    assert load_table("gfx942", {"PORTAMOE_TUNED_DIR": str(tmp_path)}).source != str(path)
    for text, match in (
        ("[]", "no table of tiles"),
        (json.dumps(table_to_dict(own) | {"schema": 9}), "schema 9"),
        (json.dumps(table_to_dict(own) | {"provenance": "guessed"}), "'guessed' is none of"),
        (json.dumps(table_to_dict(own) | {"cells": []}), "ascending"),
    ):
        path.write_text(text)
        with pytest.raises(TunedFileError, match=match):
            read_table(path, "gfx90a")
    with pytest.raises(TunedFileError, match="no tiles for gfx803"):
        load_table("gfx803", {})


def test_a_split_never_cuts_a_loop_iteration():
    tile = GemmTile(rows=64, warps=4, unroll=2, fill=10**6)
    assert tile.split_for(3584, 1, 8) == (7, 4)
    assert tile.split_for(384, 1, 8) == (3, 1), "unroll 2 does not divide 3 steps"
    assert tile.split_for(96, 1, 8) == (1, 0)
    assert Cell(1, 64, tile, tile, (16, 32)).tile_rows == 96
