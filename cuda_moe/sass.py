"""What compiled kernels show: registers, spills, and A registers overwritten while a wgmma still reads them.

Triton 3.6 issues asynchronous wgmmas whose first operand lies in registers and may decode the next operand into the
same registers before the reads are over (triton-lang/triton issue 9433). The walk below follows each loop of the
machine code and reports every such write; numerics may not show it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA(?:\.\w+)* (?:\w+, )?`?\(?(0x[0-9a-f]+)")
_WGMMA = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\S* gsb0, (0x[0-9a-f]+)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
#: Instructions without a destination register.
_MEMORY = frozenset(("STS", "STG", "STL", "LDGSTS", "RED"))
_CONTROL = frozenset(("BAR", "BRA", "DEPBAR", "WARPGROUP", "LDGDEPBAR", "EXIT", "HGMMA"))
_UNIFORM = frozenset(("ISETP", "PLOP3", "UIADD3", "R2UR", "UISETP", "S2UR", "UMOV"))
_NO_RESULT = _MEMORY | _CONTROL | _UNIFORM
#: Registers of the first operand of one bf16 wgmma (64 x 16 over 128 threads).
A_REGISTERS = 4


@dataclass(frozen=True)
class Loop:
    """A loop with wgmmas: instructions, wgmmas, waits (pending groups allowed) and (wgmma, write) hazards."""

    instructions: int
    wgmmas: int
    waits: tuple[int, ...]
    hazards: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Resources:
    """Registers a thread, bytes of stack and of local memory a thread (spills live there)."""

    registers: int
    stack: int
    local: int


def _tool(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        command = [str(_tool("cuobjdump")), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)  # noqa: PTH108 - the file was made by name


def resources(cubin: bytes) -> Resources:
    """Return what a compiled kernel takes of each thread."""
    found = _RESOURCES.search(_cuobjdump(cubin, "--dump-resource-usage"))
    if found is None:
        raise ValueError("cuobjdump names no resources for this binary")
    registers, stack, _, local = (int(value) for value in found.groups())
    return Resources(registers, stack, local)


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a compiled kernel."""
    return _cuobjdump(cubin, "--dump-sass")


def _written(text: str) -> set[int]:
    text = re.sub(r"^@!?U?P\w+\s+", "", text)
    name = text.split()[0]
    found = re.match(r"\S+\s+R(\d+)\b", text)
    if name.split(".")[0] in _NO_RESULT or found is None:
        return set()
    count = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
    return set(range(int(found.group(1)), int(found.group(1)) + count))


def _walk(body: list[tuple[int, str]]) -> Loop:
    flying: list[list[tuple[int, set[int]]]] = []
    open_group: list[tuple[int, set[int]]] = []
    hazards: set[tuple[int, int]] = set()
    waits: set[int] = set()
    for turn in range(3):
        for address, text in body:
            if "HGMMA" in text:
                found = _WGMMA.search(text)
                first = int(found.group(1)) if found else 0
                open_group.append((address, set(range(first, first + A_REGISTERS)) if found else set()))
                if "gsb0" in text:
                    flying.append(open_group)
                    open_group = []
            elif wait := _WAIT.search(text):
                pending = int(wait.group(1), 16)
                waits.add(pending)
                del flying[: max(0, len(flying) - pending)]
            elif turn and (written := _written(text)):
                for group in (*flying, open_group):
                    hazards.update((at, address) for at, registers in group if registers & written)
    count = sum("HGMMA" in text for _, text in body)
    return Loop(len(body), count, tuple(sorted(waits)), tuple(sorted(hazards)))


def wgmma_loops(sass: str) -> list[Loop]:
    """Return every loop of the machine code that holds a wgmma, with its hazards."""
    code = [(int(m.group(1), 16), m.group(2).strip()) for m in _INSTRUCTION.finditer(sass)]
    loops = []
    for address, text in code:
        branch = _BRANCH.search(text)
        if branch and int(branch.group(1), 16) < address:
            body = [line for line in code if int(branch.group(1), 16) <= line[0] <= address]
            if any("HGMMA" in line for _, line in body):
                loops.append(_walk(body))
    return loops


def problems(cubin: bytes, capability: int) -> list[str]:
    """Return what speaks against a compiled kernel: spills, and on Hopper wgmma operands overwritten in flight."""
    found = []
    taken = resources(cubin)
    if taken.local or taken.stack:
        found.append(f"{taken.local} bytes of local memory and {taken.stack} of stack a thread: it spills")
    # Only Hopper has wgmma; the disassembler that Triton brings does not know every later target.
    for loop in wgmma_loops(disassemble(cubin)) if capability // 10 == 9 else []:
        if loop.hazards:
            at, write = loop.hazards[0]
            found.append(f"{len(loop.hazards)} writes to operands in flight, first {write:#x} (wgmma {at:#x})")
    return found
