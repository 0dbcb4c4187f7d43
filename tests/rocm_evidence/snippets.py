"""Small hand-written assembler texts in the form in which Triton keeps a compiled AMD kernel."""

METADATA = """
amdhsa.kernels:
  - .agpr_count:     {agprs}
    .private_segment_fixed_size: {scratch}
    .sgpr_count:     20
    .sgpr_spill_count: {sgpr_spills}
    .vgpr_count:     {vgprs}
    .vgpr_spill_count: {vgpr_spills}
"""


def kernel(body: str, **facts: int) -> str:
    """Return `body` with the metadata that follows a kernel."""
    values = {"agprs": 0, "scratch": 0, "sgpr_spills": 0, "vgprs": 64, "vgpr_spills": 0} | facts
    return body + METADATA.format(**values)


#: A GEMM: prologue, a loop of two MFMA, one VALU of each kind, an exit that is laid out before the loop.
GEMM = """
gemm:
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	v_lshlrev_b32_e32 v1, 2, v0
	global_load_dwordx4 v[2:5], v[1:2], off
	s_branch .LBB0_2
.LBB0_1:
	v_mul_f32_e32 v9, 0.25, v9
	global_store_short v[1:2], v9, off
	s_endpgm
.LBB0_2:
	s_waitcnt vmcnt(0)
	ds_write_b64 v1, v[2:3]
	s_barrier
	ds_read2st64_b64 v[6:9], v1 offset1:1
	v_perm_b32 v2, v2, v3, s0
	v_pk_fma_f32 v[4:5], v[4:5], v[6:7], v[8:9]
	v_mul_lo_u32 v8, v8, v9
	v_exp_f32_e32 v9, v9
	global_load_dwordx4 v[2:5], v[1:2], off
	buffer_load_ushort v7, v1, s[0:3], 0 offen
	v_mfma_f32_16x16x16bf16_1k v[4:7], v[2:3], v[8:9], v[4:7]
	v_mfma_f32_16x16x16bf16_1k v[4:7], v[4:5], v[8:9], v[4:7]
	s_cbranch_scc0 .LBB0_1
	s_cbranch_scc1 .LBB0_2
	s_branch .LBB0_1
"""

#: Two loops, the second inside a third; only the innermost of those has matrix instructions.
NESTED = """
nested:
.LBB0_1:
	v_add_u32_e32 v1, v1, v2
	s_cbranch_scc1 .LBB0_1
.LBB0_2:
	v_mov_b32_e32 v3, 0
.LBB0_3:
	v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
	v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v3, v4
	s_cbranch_vccnz .LBB0_3
	s_cbranch_scc0 .LBB0_2
	s_endpgm
"""

#: No loop at all.
STRAIGHT = """
straight:
	global_load_dwordx2 v[2:3], v[0:1], off
	v_rcp_f32_e32 v2, v2
	v_add_f32_e32 v2, v2, v3
	global_store_dword v[0:1], v2, off
	s_endpgm
"""
