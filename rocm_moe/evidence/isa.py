"""What a compiled AMD kernel consists of, read from the assembler text that Triton keeps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from rocm_moe.evidence import isa_flow

#: Instruction classes in the order of the report; the first pattern that matches a mnemonic names its class.
CLASSES: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        name: re.compile(pattern)
        for name, pattern in {
            "matrix": r"v_s?mfmac?_|v_wmma_|v_swmmac_",
            "wait": r"s_wait|s_delay_alu",
            "nop": r"s_nop|s_set_inst_prefetch|s_clause|s_sleep|s_setprio|v_nop",
            "barrier": r"s_barrier",
            "branch": r"s_c?branch|s_endpgm|s_setpc|s_swappc",
            "scalar_load": r"s_load|s_buffer_load",
            "scalar": r"s_",
            "atomic": r"(global|buffer|flat|ds)_atomic|ds_(add|min|max|and|or|inc|cmpst)_",
            "load": r"(global|buffer|flat)_load",
            "store": r"(global|buffer|flat)_store",
            "scratch": r"scratch_",
            "cache": r"(buffer|global)_(gl[01]_inv|inv|wb|wbl2|wbinvl1|invl2)",
            "lds_read": r"ds_(read|load|bpermute|permute|swizzle)",
            "lds_write": r"ds_(write|store)",
            "lds_other": r"ds_",
            "transcendental": r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_",
            "perm": r"v_perm_b32",
            "packed_fma": r"v_pk_(fma|mul|add)_f32|v_dual_fma",
            "shift": r"v_(lshl|lshr|ashr)[a-z]*_?(b|i|u)?(16|32|64)|v_align|v_lshlrev|v_lshrrev|v_ashrrev",
            "address": r"v_(add|sub|subrev|addc|subb|mad|mul)[a-z_0-9]*_(u|i)(16|24|32|64)"
            r"|v_(lshl_add|add_lshl|add3|add_co|addc_co|lshl_add_u64)|v_(min|max)_(u|i)",
            "logic": r"v_(and|or|xor|not|bfe|bfi|bfm|and_or|or3|lshl_or)_?",
            "compare": r"v_cmpx?_|v_cndmask|v_dual_cndmask",
            "convert": r"v_cvt_",
            "move": r"v_(dual_)?mov|v_accvgpr|v_swap",
            "lane": r"v_(read|write)(first)?lane|v_permlane|v_mbcnt|v_mov_b32_dpp",
            "float": r"v_",
        }.items()
    }
)

#: Classes that take the vector ALU's issue slots.
VALU_CLASSES = (
    "transcendental",
    "perm",
    "packed_fma",
    "shift",
    "address",
    "logic",
    "compare",
    "convert",
    "move",
    "lane",
    "float",
)

#: Integer multiplies of full width run at a quarter of the rate, like the transcendentals (CDNA2 ISA guide, section 6).
_QUARTER_RATE = re.compile(r"v_(mul_lo_u32|mul_hi_[ui]32|mad_[ui]64_[ui]32|exp_|log_|rcp_|rsq_|sqrt_|sin_|cos_)")

_MNEMONIC = re.compile(r"^\s+((?:s|v|ds|global|buffer|flat|scratch)_[a-z0-9_]+)")
_LDS_WIDTH = re.compile(r"ds_(?:read|write|load|store)(2|_2addr)?(?:_?st(?:ride)?64)?_[biu](8|16|32|64|96|128)")
_MEMORY_WIDTH = re.compile(r"_(dwordx4|dwordx3|dwordx2|dword|b128|b96|b64|b32|[ui]?short|[bui]16|[us]?byte|[ui]8)")
_MEMORY_BYTES = MappingProxyType(
    {"dwordx4": 16, "b128": 16, "dwordx3": 12, "b96": 12, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4}
)


@dataclass(frozen=True)
class Counts:
    """Instructions of one stretch of code, as one wave executes it.

    classes:      class of `CLASSES` -> number of instructions
    matrix:       mnemonic of a matrix instruction -> number
    valu_slots:   VALU issue slots: 1 an instruction, 4 for those of quarter rate; matrix instructions not counted
    lds_read_bytes, lds_write_bytes:  per lane
    load_bytes, store_bytes:  of global memory, per lane
    load_sizes:   bytes per lane of each global load, in the order of the text
    """

    classes: Mapping[str, int]
    matrix: Mapping[str, int]
    valu_slots: int
    lds_read_bytes: int
    lds_write_bytes: int
    load_bytes: int
    store_bytes: int
    load_sizes: tuple[int, ...]

    @property
    def valu(self) -> int:
        """VALU instructions, matrix instructions not counted."""
        return sum(self.classes.get(name, 0) for name in VALU_CLASSES)

    @property
    def matrix_total(self) -> int:
        """Matrix instructions of all kinds."""
        return sum(self.matrix.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out |= {"classes": dict(self.classes), "matrix": dict(self.matrix), "load_sizes": list(self.load_sizes)}
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Counts:
        """Build from the JSON form."""
        return cls(**{**data, "load_sizes": tuple(data["load_sizes"])})


@dataclass(frozen=True)
class Code:
    """One compiled kernel.

    vgprs, agprs, sgprs:  as the kernel descriptor allocates them (vgprs includes agprs on gfx90a and later)
    spills:     vector and scalar registers spilled
    scratch:    bytes of private memory a lane
    loop:       one iteration of the main loop, None if the code has no loop
    straight:   everything outside all loops, executed at most once
    side_loops: one iteration of each other loop
    """

    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    loop: Counts | None
    straight: Counts
    side_loops: Counts

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out |= {"loop": self.loop.to_dict() if self.loop else None, "straight": self.straight.to_dict()}
        out["side_loops"] = self.side_loops.to_dict()
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Code:
        """Build from the JSON form."""
        loop = Counts.from_dict(data["loop"]) if data["loop"] else None
        parts = {name: Counts.from_dict(data[name]) for name in ("straight", "side_loops")}
        return cls(**{**data, "loop": loop, **parts})


def parse(amdgcn: str) -> Code:
    """Read the assembler text of one kernel.

    The main loop is the innermost one with most matrix instructions, without any the longest innermost one. Raises
    ValueError if the text carries no kernel metadata.
    """
    lines = amdgcn.splitlines()
    loops = isa_flow.loops(lines)
    main = _main_loop(lines, loops)
    looping = frozenset[int]().union(*loops)
    return Code(
        vgprs=_metadata(amdgcn, "vgpr_count"),
        agprs=_metadata(amdgcn, "agpr_count", default=0),
        sgprs=_metadata(amdgcn, "sgpr_count"),
        vgpr_spills=_metadata(amdgcn, "vgpr_spill_count"),
        sgpr_spills=_metadata(amdgcn, "sgpr_spill_count"),
        scratch=_metadata(amdgcn, "private_segment_fixed_size"),
        loop=None if main is None else count(line for i, line in enumerate(lines) if i in main),
        straight=count(line for i, line in enumerate(lines) if i not in looping),
        side_loops=count(line for i, line in enumerate(lines) if i in looping - (main or frozenset())),
    )


def count(lines: Iterable[str]) -> Counts:
    """Count the instructions in `lines` of assembler text by class."""
    classes: Counter[str] = Counter()
    matrix: Counter[str] = Counter()
    slots = read = write = stored = 0
    loads: list[int] = []
    for line in lines:
        if not (match := _MNEMONIC.match(line)):
            continue
        mnemonic = match.group(1)
        kind = classify(mnemonic)
        classes[kind] += 1
        if kind == "matrix":
            matrix[mnemonic] += 1
        elif kind in VALU_CLASSES:
            slots += 4 if _QUARTER_RATE.match(mnemonic) else 1
        elif kind == "lds_read":
            read += _lds_bytes(mnemonic)
        elif kind == "lds_write":
            write += _lds_bytes(mnemonic)
        elif kind == "load":
            loads.append(_memory_bytes(mnemonic))
        elif kind == "store":
            stored += _memory_bytes(mnemonic)
    return Counts(
        classes=MappingProxyType(dict(classes)),
        matrix=MappingProxyType(dict(matrix)),
        valu_slots=slots,
        lds_read_bytes=read,
        lds_write_bytes=write,
        load_bytes=sum(loads),
        store_bytes=stored,
        load_sizes=tuple(loads),
    )


def classify(mnemonic: str) -> str:
    """Return the class of one instruction, a key of `CLASSES`."""
    for name, pattern in CLASSES.items():
        if pattern.match(mnemonic):
            return name
    raise ValueError(f"{mnemonic!r} is no AMD instruction this report knows; add it to CLASSES")


def _main_loop(lines: list[str], loops: list[frozenset[int]]) -> frozenset[int] | None:
    def weight(loop: frozenset[int]) -> tuple[int, int]:
        body = count(lines[i] for i in sorted(loop))
        return body.matrix_total, sum(body.classes.values())

    return max(isa_flow.innermost(loops), key=weight, default=None)


def _metadata(amdgcn: str, name: str, default: int | None = None) -> int:
    match = re.search(rf"\.{name}:\s+(\d+)", amdgcn)
    if match:
        return int(match.group(1))
    if default is not None:
        return default
    raise ValueError(f"the assembler text has no .{name}: is it the amdgcn text of one kernel?")


def _lds_bytes(mnemonic: str) -> int:
    match = _LDS_WIDTH.match(mnemonic)
    if not match:
        return 4  # permutes and swizzles move one dword a lane
    return int(match.group(2)) // 8 * (2 if match.group(1) else 1)


def _memory_bytes(mnemonic: str) -> int:
    match = _MEMORY_WIDTH.search(mnemonic)
    if not match:
        return 4
    width = match.group(1)
    if width in _MEMORY_BYTES:
        return _MEMORY_BYTES[width]
    return 2 if "short" in width or "16" in width else 1
