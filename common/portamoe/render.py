"""The probe's report: JSON as it is, and the same object as text to paste into a bug report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Json = Mapping[str, Any]


def to_json(report: Json) -> str:
    """Return the report as one JSON object."""
    return json.dumps(report, indent=2)


def to_text(report: Json, *, question: str = "", why: str = "") -> str:
    """Return the report as text.

    report:    `Capabilities.to_dict()`
    question:  what was asked, one line
    why:       why that backend was selected, or none
    """
    host = report["host"]
    sections = {
        "host": _host(host),
        "devices": _devices(report),
        "toolchain": _toolchain(report["toolchain"]),
        "environment": [f"{name}={value}" for name, value in host["env"].items()] or ["(nothing relevant set)"],
        "caches": _caches(host["caches"]),
        "problems": [reason_line(problem) for problem in host["problems"]],
        f"backends{f' for {question}' if question else ''}": _backends(report["backends"]),
        "projections": report.get("projections", ()),
        "selected": [f"{report['selected'] or 'none'}{f': {why}' if why else ''}", *_note(report)],
    }
    return "\n".join(_section(title, lines) for title, lines in sections.items() if lines)


def _note(report: Json) -> list[str]:
    return [report["note"]] if report.get("note") else []


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def reason_line(reason: Json) -> str:
    """Return one structured reason as text: "what: value (needs limit); remedy"."""
    text = f"{reason['what']}: {reason['value']}"
    if reason["limit"] is not None:
        text += f" (needs {reason['limit']})"
    return text + (f"; {reason['remedy']}" if reason["remedy"] else "")


def _host(host: Json) -> list[str]:
    system = f"{host['system']}, " if host["system"] else ""
    lines = [f"{system}{host['machine']}, Python {host['python']}, memory {_memory(host)}"]
    if host["recorded"]:
        lines.append(f"replayed from {host['recorded']}")
        if host["live"]:
            lines.append(f"not in the recording, taken from this machine: {', '.join(host['live'])}")
    return lines


def _devices(report: Json) -> list[str]:
    lines = []
    for device in report["devices"]:
        mark = "*" if device["asked"] else " "
        units = f", {device['compute_units']} CU" if device["compute_units"] else ""
        uuid = f", {device['uuid']}" if device["uuid"] else ""
        lines.append(
            f"{mark} {device['torch_name']:<7} {device['arch']:<8} {device['name']}, memory {_memory(device)}"
            f"{units}{uuid}, found by {device['found_by']}"
        )
    for vendor, facts in report["host"]["visibility"].items():
        hidden = f", {facts['unreadable']} of other jobs" if facts["unreadable"] else ""
        visible = ", ".join(map(str, facts["visible"])) or "none"
        lines.append(f"{vendor}: {facts['present']} present{hidden}; visible: {visible} ({facts['because']})")
    return lines


def _memory(facts: Json) -> str:
    total, free = facts["memory_bytes"], facts["memory_free_bytes"]
    if total is None:
        return "unknown"
    return f"{total / 1e9:.1f} GB" + (f" ({free / 1e9:.1f} GB free)" if free is not None else "")


def _toolchain(toolchain: Json) -> list[str]:
    lines = []
    if torch := toolchain["torch"]:
        build = next((f"{k} {torch[k]}" for k in ("hip", "cuda") if torch.get(k)), "CPU build")
        lines.append(f"torch {torch['version']} ({build})")
    else:
        lines.append("torch: not installed")
    lines.append(f"triton {toolchain['vendor'].get('triton') or ': not installed'}".replace(" :", ":"))
    if rocm := toolchain["rocm"]:
        driver = f", amdgpu driver {rocm['driver']}" if rocm.get("driver") else ""
        lines.append(f"ROCm {rocm.get('version') or 'not installed'}, /dev/kfd {rocm['kfd']}{driver}")
    if nvml := toolchain["nvml"]:
        lines.append(f"NVIDIA driver {nvml['driver']}, CUDA {nvml['cuda'] or 'unknown'}")
    if ptxas := toolchain["ptxas"]:
        knows = "knows" if any(t.startswith("sm_107") for t in ptxas["targets"]) else "does not know"
        where = f" ({ptxas['path']})" if ptxas.get("path") else ""
        lines.append(f"ptxas {ptxas['version']}, {knows} sm_107{where}")
    for name in sorted(set(toolchain["vendor"]) - {"triton"}):
        lines.append(f"{name}: {_facts(toolchain['vendor'][name])}")
    lines += [f"import {name}: {result}" for name, result in toolchain.get("imports", {}).items()]
    versions = (f"{name} {version}" for name, version in sorted(toolchain["distributions"].items()))
    lines.append(f"distributions: {', '.join(versions) or 'none of interest'}")
    return lines


def _facts(facts: Any) -> str:
    if facts is None:
        return "not installed"
    if not isinstance(facts, Mapping):
        return str(facts)
    return ", ".join(f"{name} {'unknown' if value is None else value}" for name, value in facts.items())


def _caches(caches: Json) -> list[str]:
    return [
        f"{name}: {c['path']}{'' if c['set'] else ' (default)'}, "
        f"{'writable' if c['writable'] else 'NOT writable'}{f', {fs}' if (fs := c.get('filesystem')) else ''}"
        for name, c in caches.items()
    ]


def _backends(backends: Iterable[Json]) -> list[str]:
    lines = []
    for backend in backends:
        state = f"accepted, {backend['verification']}" if backend["accepted"] else "rejected"
        lines.append(f"{backend['name']} ({backend['package']}): {state}")
        if backend["only_on_request"]:
            lines.append(f"  only on request: {reason_line(backend['only_on_request'])}")
        lines += [f"  {reason_line(reason)}" for reason in backend["reasons"]]
    return lines
