"""The report as text: one table of code, one of modelled bounds, one of whole calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rocm_moe.evidence.isa import VALU_CLASSES, Code


def text(report: dict[str, Any]) -> str:
    """Return the whole report of one arch."""
    head = (
        f"{report['arch']}, Triton {report['triton']}, {report['date']}: {report['command']}\n"
        "Code: compiled. Clocks, shares, TFLOP/s and µs: modelled from it; nothing was run on a GPU.\n"
    )
    parts = [head, code_table(report), loop_table(report), bound_table(report), call_table(report), verdict(report)]
    return "\n".join(parts) + "\n"


def json_text(report: dict[str, Any]) -> str:
    """Return the JSON form with one kernel or call a line, so that differences can be read."""
    out = []
    for key, value in report.items():
        if isinstance(value, list) and value:
            lines = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value)
            out.append(f' "{key}": [\n  {lines}\n ]')
        else:
            out.append(f' "{key}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(out) + "\n}\n"


def summary(report: dict[str, Any]) -> str:
    """Return one line for CI."""
    return (
        f"{report['arch']} Triton {report['triton']}: {len(report['kernels'])} binaries in {report['seconds']} s, "
        f"{len(report['violations'])} violations, {len(report['missed_goals'])} goals missed"
    )


def compiled(report: dict[str, Any]) -> Iterable[tuple[dict[str, Any], Code]]:
    """Yield the kernels that compiled, with their parsed code."""
    for kernel in report["kernels"]:
        if "error" not in kernel:
            yield kernel, Code.from_dict(kernel["code"])


def label(kernel: dict[str, Any]) -> str:
    """Return the kernel's name and the specs that use it."""
    return f"{kernel['name']} [{','.join(kernel['specs'])}]"


def code_table(report: dict[str, Any]) -> str:
    """Return registers, spills, scratch, LDS, resident workgroups and size of each binary."""
    rows = [
        (
            label(kernel),
            code.vgprs,
            code.agprs,
            code.sgprs,
            f"{code.vgpr_spills}/{code.sgpr_spills}",
            code.scratch,
            kernel["shared"],
            kernel["model"]["workgroups_per_cu"],
            sum((code.loop or code.straight).matrix.values()),
            kernel["sha256"][:12],
        )
        for kernel, code in compiled(report)
    ]
    heads = ("binary", "VGPR", "AGPR", "SGPR", "spills", "scratch", "LDS", "WG/CU", "matrix", "sha256")
    return table("compiled code", heads, rows)


def loop_table(report: dict[str, Any]) -> str:
    """Return the instructions of one main-loop step by class."""
    classes = (*VALU_CLASSES, "matrix", "lds_read", "lds_write", "load", "store", "scalar", "wait", "barrier")
    rows = []
    for kernel, code in compiled(report):
        counts = code.loop or code.straight
        rows.append(
            (label(kernel), counts.valu, *(counts.classes.get(name, 0) for name in classes), code.straight.valu)
        )
    return table(
        "main loop by class (whole code where there is no loop)", ("binary", "VALU", *classes, "outside"), rows
    )


def bound_table(report: dict[str, Any]) -> str:
    """Return the modelled bound of each GEMM and the streaming share of the other kernels."""
    rows: list[tuple[Any, ...]] = []
    for kernel, _ in compiled(report):
        model = kernel["model"]
        if "stream_share" in model:
            rows.append((label(kernel), "", "", "", "", "", f"stream {model['stream_share']:.2f}", "", ""))
            continue
        for part in ("loop", "whole"):
            if part in model:
                b = model[part]
                rows.append(
                    (
                        label(kernel),
                        part,
                        b["valu_clocks"],
                        b["mfma_clocks"],
                        b["lds_clocks"],
                        b["hbm_clocks"],
                        f"{b['share']:.2f} / {b['share_no_overlap']:.2f}",
                        f"{b['tflops']:.0f} / {b['tflops_no_overlap']:.0f}",
                        b["limit"],
                    )
                )
    heads = ("binary", "part", "VALU clk", "MFMA clk", "LDS clk", "HBM clk", "HBM share ovl/none", "TFLOP/s", "limit")
    return table("modelled bounds, full / no VALU-MFMA overlap", heads, rows)


def call_table(report: dict[str, Any]) -> str:
    """Return the modelled time of whole calls, with the two GEMM launches."""
    rows = []
    for call in report["calls"]:
        gemms = [launch for launch in call["each"] if launch["step"].startswith("gemm")]
        cells = [
            f"{g['workgroups']}x{g['waves']}w k{g['splits']} {g['kib_in_flight_cu']}K {g['us']}us {g['limit']}"
            for g in gemms
        ]
        rows.append(
            (call["shard"], call["tokens"], call["rank"], call["experts_hit"], call["launches"], call["us"], *cells)
        )
    heads = ("shard", "T", "rank", "experts", "launches", "µs", "gemm1: WGs x waves, split, KiB/CU in flight", "gemm2")
    return table("modelled whole calls, Kimi-K3", heads, rows)


def verdict(report: dict[str, Any]) -> str:
    """Return broken rules and missed goals."""
    lines = [f"VIOLATION {v}" for v in report["violations"]] or ["no rule is broken"]
    lines += [f"GOAL MISSED {g}" for g in report["missed_goals"]] or ["no goal is missed"]
    return "\n".join(lines)


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a plain-text table with aligned columns."""
    cells = [tuple(map(str, heads)), *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:], ""])
