"""What is read from assembler text: loops, classes, bytes, registers."""

from __future__ import annotations

import json

import pytest

from rocm_moe.evidence import isa, isa_flow
from tests.rocm_evidence import snippets


def test_main_loop_is_the_cycle_and_not_the_exit_laid_out_before_it() -> None:
    code = isa.parse(snippets.kernel(snippets.GEMM))
    assert code.loop is not None
    assert code.loop.matrix == {"v_mfma_f32_16x16x16bf16_1k": 2}
    assert code.loop.store_bytes == 0, "the store belongs to the exit"
    assert code.straight.store_bytes == 2
    assert code.straight.classes["load"] == 1
    assert not code.side_loops.classes


def test_classes_and_slots_of_the_loop() -> None:
    loop = isa.parse(snippets.kernel(snippets.GEMM)).loop
    assert loop is not None
    expected = {"perm": 1, "packed_fma": 1, "address": 1, "transcendental": 1, "matrix": 2, "barrier": 1, "wait": 1}
    assert {name: loop.classes[name] for name in expected} == expected
    assert loop.valu == 4
    # v_mul_lo_u32 and v_exp_f32 run at a quarter of the rate.
    assert loop.valu_slots == 1 + 1 + 4 + 4


def test_bytes_of_memory_and_lds() -> None:
    loop = isa.parse(snippets.kernel(snippets.GEMM)).loop
    assert loop is not None
    assert loop.load_sizes == (16, 2)
    assert loop.load_bytes == 18
    assert loop.lds_write_bytes == 8
    assert loop.lds_read_bytes == 16, "read2 moves two of them"


def test_nested_loops() -> None:
    code = isa.parse(snippets.kernel(snippets.NESTED))
    assert code.loop is not None
    assert code.loop.matrix_total == 1
    assert code.loop.classes["move"] == 1
    assert code.side_loops.classes == {"address": 1, "move": 1, "branch": 2}
    lines = snippets.NESTED.splitlines()
    assert len(isa_flow.loops(lines)) == 3
    assert len(isa_flow.innermost(isa_flow.loops(lines))) == 2


def test_code_without_a_loop() -> None:
    code = isa.parse(snippets.kernel(snippets.STRAIGHT))
    assert code.loop is None
    assert code.straight.valu == 2
    assert (code.straight.load_bytes, code.straight.store_bytes) == (8, 4)


def test_registers_spills_and_scratch() -> None:
    facts = {"vgprs": 112, "agprs": 16, "vgpr_spills": 3, "sgpr_spills": 5, "scratch": 40}
    code = isa.parse(snippets.kernel(snippets.STRAIGHT, **facts))
    assert (code.vgprs, code.agprs, code.vgpr_spills, code.sgpr_spills, code.scratch) == (112, 16, 3, 5, 40)


@pytest.mark.parametrize("body", [snippets.GEMM, snippets.NESTED, snippets.STRAIGHT])
def test_json_round_trip(body: str) -> None:
    code = isa.parse(snippets.kernel(body))
    assert isa.Code.from_dict(json.loads(json.dumps(code.to_dict()))) == code


@pytest.mark.parametrize(
    ("mnemonic", "kind"),
    [
        ("v_perm_b32", "perm"),
        ("v_and_or_b32", "logic"),
        ("v_alignbit_b32", "shift"),
        ("v_lshlrev_b32_sdwa", "shift"),
        ("v_lshl_add_u32", "address"),
        ("v_add_co_u32_e32", "address"),
        ("v_addc_co_u32_e32", "address"),
        ("v_mad_u64_u32", "address"),
        ("v_accvgpr_write_b32", "move"),
        ("v_cndmask_b32_e32", "compare"),
        ("v_cvt_scalef32_pk_bf16_fp4", "convert"),
        ("v_readfirstlane_b32", "lane"),
        ("v_fma_f32", "float"),
        ("v_mfma_f32_32x32x8bf16_1k", "matrix"),
        ("v_wmma_f32_16x16x16_bf16", "matrix"),
        ("ds_bpermute_b32", "lds_read"),
        ("global_load_lds_dwordx4", "load"),
        ("buffer_gl0_inv", "cache"),
        ("scratch_store_dword", "scratch"),
        ("s_waitcnt", "wait"),
        ("s_add_u32", "scalar"),
    ],
)
def test_classify(mnemonic: str, kind: str) -> None:
    assert isa.classify(mnemonic) == kind


def test_text_without_metadata_and_unknown_instructions_are_refused() -> None:
    with pytest.raises(ValueError, match="vgpr_count"):
        isa.parse(snippets.STRAIGHT)
    with pytest.raises(ValueError, match="ld_global_b32"):
        isa.classify("ld_global_b32")
