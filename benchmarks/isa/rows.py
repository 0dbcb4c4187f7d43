"""From compiled kernels to the report's rows: modelled bounds, and what breaks a rule or misses a goal."""

from __future__ import annotations

from typing import Any

from rocm_moe.evidence import clock_model
from rocm_moe.evidence.clock_model import MACHINES, Tile
from rocm_moe.evidence.isa import Code

#: One workgroup may take this much LDS on every target here (gfx950 has more, the product does not use it).
LDS_LIMIT = 65536
#: K of which one word holds the scales.
SCALE_WORD_DEPTH = 128
#: Decode tiles hold at most 16 rows, prefill tiles at least 64.
DECODE_ROWS, PREFILL_ROWS = 16, 64
#: (arch, Triton up to this minor version) -> share of the HBM peak with full and with no overlap, whole kernel.
DECODE_GOALS = {
    ("gfx90a", 6): (1.15, 0.75),
    ("gfx90a", 9): (1.35, 0.85),
    ("gfx942", 9): (1.25, 1.0),
    ("gfx950", 9): (1.25, 0.0),
}
#: gfx90a prefill tiles: TFLOP/s with full and with no overlap.
PREFILL_GOAL = (170.0, 130.0)


def is_gemm(kernel: dict[str, Any]) -> bool:
    """Return whether the kernel is one of the two GEMMs."""
    return kernel.get("tile") is not None


def tile_of(kernel: dict[str, Any]) -> Tile:
    """Return the tile that a compiled GEMM works on."""
    return Tile(rows=kernel["tile"]["rows"], columns=kernel["tile"]["columns"], warps=kernel["warps"])


def row_of(kernel: dict[str, Any]) -> dict[str, Any]:
    """Return the report's row of one compiled kernel: its code and the modelled bound, marked as such."""
    if "error" in kernel:
        return {**kernel, "evidence": "not compiled"}
    code = Code.from_dict(kernel["code"])
    machine = MACHINES[kernel["arch"]]
    row = {**kernel, "evidence": "compiled", "model": {"evidence": "modelled"}}
    row["model"]["workgroups_per_cu"] = clock_model.resident_workgroups(
        code, kernel["shared"], kernel["warps"], machine
    )
    if not is_gemm(kernel):
        row["model"]["stream_share"] = round(clock_model.stream_share(code, machine), 2)
        return row
    if not has_matrix(code):
        return row
    tile, depth = tile_of(kernel), kernel["tile"]["depth"]
    bounds = {"whole": clock_model.whole(code, tile, machine, depth)}
    if code.loop is not None and code.loop.matrix:
        bounds = {"loop": clock_model.bound(code.loop, tile, machine), **bounds}
    for name, bound in bounds.items():
        row["model"][name] = {
            "valu_clocks": round(bound.issue),
            "mfma_clocks": round(bound.matrix),
            "lds_clocks": round(bound.lds),
            "hbm_clocks": round(bound.hbm),
            "limit": bound.limit,
            "share": round(bound.share, 2),
            "share_no_overlap": round(bound.share_no_overlap, 2),
            "tflops": round(bound.tflops(machine, tile.rows, overlap=True), 1),
            "tflops_no_overlap": round(bound.tflops(machine, tile.rows, overlap=False), 1),
        }
    return row


def has_matrix(code: Code) -> bool:
    """Return whether there are matrix instructions, in the main loop or in code without one."""
    return bool(code.loop.matrix if code.loop is not None else code.straight.matrix)


def excess_in_lds(code: Code, tile: Tile, depth: int, wave: int) -> float:
    """Return how many bytes of LDS a decode tile writes beyond activations and scales: in a loop step, or at all.

    A row's four scales of 128 K are a word, which a tile with as many rows as lanes spreads through LDS. Without a
    loop the result, which is turned around in LDS before it is stored, counts as expected too.
    """
    if code.loop is not None and code.loop.matrix:
        written = code.loop.lds_write_bytes
        step = clock_model.elements_of(code.loop, tile) / tile.columns
        expected = tile.rows * step * 2 + tile.columns * step / SCALE_WORD_DEPTH * 4
    else:
        written = code.straight.lds_write_bytes
        expected = tile.rows * (depth * 2 + tile.columns * 4) + tile.columns * depth / SCALE_WORD_DEPTH * 4
    return written * wave * tile.warps - expected


def violations(kernel: dict[str, Any]) -> list[str]:
    """Return every rule that the compiled kernel breaks; these fail the check.

    Rules: it compiles; no spill, no scratch; LDS within the limit; a workgroup fits a compute unit; a GEMM has
    matrix instructions, and its decode tiles take weights from global memory to registers without LDS.
    """
    where = f"{kernel['arch']} {kernel['name']} [{','.join(kernel['specs'])}]"
    if "error" in kernel:
        return [f"{where}: does not compile: {kernel['error']}"]
    code = Code.from_dict(kernel["code"])
    found = [
        f"{where}: {name} {value}"
        for name, value in (
            ("VGPR spills", code.vgpr_spills),
            ("SGPR spills", code.sgpr_spills),
            ("scratch bytes", code.scratch),
        )
        if value
    ]
    if kernel["shared"] > LDS_LIMIT:
        found.append(f"{where}: LDS {kernel['shared']} bytes, the limit is {LDS_LIMIT}")
    machine = MACHINES[kernel["arch"]]
    if not clock_model.resident_workgroups(code, kernel["shared"], kernel["warps"], machine):
        found.append(f"{where}: no workgroup fits a compute unit ({code.vgprs} registers a lane)")
    if is_gemm(kernel):
        if not has_matrix(code):
            found.append(f"{where}: no matrix instruction in the main loop")
        elif kernel["tile"]["rows"] <= DECODE_ROWS and kernel["arch"].startswith("gfx9"):
            excess = excess_in_lds(code, tile_of(kernel), kernel["tile"]["depth"], machine.wave)
            if excess > 0:
                found.append(f"{where}: weights pass through LDS ({excess:.0f} bytes beyond activations and scales)")
    return found


def missed_goals(row: dict[str, Any], triton_version: str) -> list[str]:
    """Return the goals of code quality that a row of a GEMM misses; these are reported, they do not fail the check."""
    model = row.get("model", {}).get("whole")
    if model is None:
        return []
    arch, rows = row["arch"], row["tile"]["rows"]
    minor = int(triton_version.split(".")[1])
    where = f"{arch} {row['name']} Triton {triton_version}"
    if rows <= DECODE_ROWS:
        goal = next((g for (a, m), g in DECODE_GOALS.items() if a == arch and minor <= m), None)
        got = model["share"], model["share_no_overlap"]
        unit = "of the HBM peak"
    elif rows >= PREFILL_ROWS and arch == "gfx90a":
        goal, got, unit = PREFILL_GOAL, (model["tflops"], model["tflops_no_overlap"]), "TFLOP/s"
    else:
        return []
    if goal is None or (got[0] >= goal[0] and got[1] >= goal[1]):
        return []
    return [f"{where}: {got[0]} / {got[1]} {unit}, the goal is {goal[0]} / {goal[1]}"]
