"""Why FlashInfer cannot serve a spec on a device, from facts alone: the parts of the backends' `check`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cuda_moe.flashinfer.support import Entry, Mode, Support, activation_key, parsed, support
from portamoe.checks import (
    cache_reason,
    distribution_reason,
    memory_reason,
    present,
    torch_reason,
    vendor_reason,
)
from portamoe.decision import Reason

if TYPE_CHECKING:
    from portamoe.device import Device, Host
    from portamoe.spec import MoESpec

#: CuteDSL's package, and its first version with Rubin's helpers.
CUTE_DSL, CUTE_DSL_FLOOR = "nvidia-cutlass-dsl", "4.8.0"
#: First CUDA toolkit whose nvcc knows sm_107.
RUBIN_TOOLKIT = "13.4"
_BINARY_CACHE = "flashinfer-jit-cache"


def remedy_for(spec: MoESpec) -> str:
    """Return what to use instead."""
    if spec.weight_format == "nvfp4":
        return "use the torch backend, or MXFP4 weights with triton_fused"
    return "use triton_fused" if spec.activation_format == "bf16" else "use the torch backend"


def table_reasons(backend: str, spec: MoESpec, device: Device, data: Support | None = None) -> list[Reason]:
    """Compare vendor, formats, version, arch and activation with the table."""
    data = support() if data is None else data
    if reason := vendor_reason(device, "nvidia"):
        return [reason]
    out = []
    if spec.bias:
        out.append(Reason("biases", "yes", "none: this adapter passes no bias", remedy_for(spec)))
    mode = data.mode_for(backend, spec)
    if mode is None:
        pairs = " or ".join(f"{m.weights} with {m.activations}" for m in data.modes.values() if m.backend == backend)
        asked = f"{spec.weight_format} weights with {spec.activation_format} activations"
        return [*out, Reason("formats", asked, pairs, remedy_for(spec))]
    return out + _allowed(mode, spec, device, data)


def _allowed(mode: Mode, spec: MoESpec, device: Device, data: Support) -> list[Reason]:
    key = activation_key(spec.activation)
    lines = data.about(mode.name, device.arch, key)
    working = [e for e in lines if e.status == "works"]
    facts: Mapping[str, Any] | None = device.host.vendor.get("flashinfer")
    if facts is None:
        hopeless = _hopeless(mode, key, spec, device, data, lines)
        return hopeless or [Reason("flashinfer", "not installed", _floor(working), "pip install 'portamoe[cuda]'")]
    if problem := facts.get("problem"):
        return [Reason("flashinfer", f"broken: {problem}", "a whole installation", "reinstall flashinfer-python")]
    version = parsed(facts.get("version"))
    if version is None:
        value = f"version {facts.get('version') or 'unknown'}"
        return [Reason("flashinfer", value, "a released version: it decides what is computed", "install a wheel")]
    line = next((e for e in lines if e.covers(version)), None)
    if line is not None and line.status == "works":
        return []
    silent = line is not None and line.status == "silently_wrong"
    if not silent and (hopeless := _hopeless(mode, key, spec, device, data, lines)):
        return hopeless
    return [_refusal(line, working, str(version), key, mode, device, spec)]


def _floor(working: list[Entry]) -> str | None:
    return f">= {working[0].since}" if working else None


def _hopeless(
    mode: Mode, key: str, spec: MoESpec, device: Device, data: Support, lines: tuple[Entry, ...]
) -> list[Reason]:
    """Return the reason that holds for every version, if there is one."""
    if any(e.status == "works" for e in lines):
        return []
    known = {a for e in data.entries if e.mode == mode.name and e.status == "works" for a in e.archs}
    if device.arch not in known and not lines:
        return [Reason("arch", device.arch, " or ".join(sorted(known)), remedy_for(spec))]
    if not lines:
        known = {
            a
            for e in data.entries
            if e.mode == mode.name and device.arch in e.archs and e.status == "works"
            for a in e.activations
        }
        return [Reason("activation", key, ", ".join(sorted(known)) + f" ({mode.name})", remedy_for(spec))]
    words = {"silently_wrong": "computed wrong without an error", "absent": "absent", "unverified": "unverified"}
    value = f"{key} on {device.arch} is {words[lines[0].status]} in {mode.name}: {lines[0].why}"
    return [Reason("activation", value, None, remedy_for(spec))]


def _refusal(
    line: Entry | None, working: list[Entry], version: str, key: str, mode: Mode, device: Device, spec: MoESpec
) -> Reason:
    """Say why this version is not the one."""
    why = f": {line.why}" if line is not None else ""
    if line is not None and line.status == "silently_wrong":
        value = f"{version} computes {key} wrong on {device.arch}, without an error{why}"
    else:
        value = f"{version} has no {key} on {device.arch} in {mode.name}{why}"
    upgrade = "upgrade flashinfer-python, or " if working else ""
    return Reason("flashinfer", value, _floor(working), upgrade + remedy_for(spec))


def package_reasons(device: Device, *, cute_dsl: bool) -> list[Reason]:
    """Say what beside FlashInfer is missing: torch, Triton and CuteDSL, nvcc for its just-in-time parts, folders."""
    host = device.host
    out = present(torch_reason(device))
    if cute_dsl:
        remedy = f"pip install '{CUTE_DSL}>={CUTE_DSL_FLOOR}'"
        out += present(distribution_reason(host, (CUTE_DSL,), CUTE_DSL_FLOOR, remedy))
        if host.vendor.get("triton") is None:
            limit = "installed: FlashInfer leaves its CuteDSL functions out without it, and says nothing"
            out.append(Reason("triton", "not installed", limit, "pip install triton"))
    return out + _compiler_reasons(device) + present(cache_reason(host, "FLASHINFER_WORKSPACE_BASE"))


def _compiler_reasons(device: Device) -> list[Reason]:
    facts: Mapping[str, Any] = device.host.vendor.get("flashinfer") or {}
    if "nvcc" not in facts or _BINARY_CACHE in device.host.distributions:
        return []
    nvcc = facts["nvcc"]
    if nvcc is None:
        remedy = f"install a CUDA toolkit or {_BINARY_CACHE}"
        return [Reason("nvcc", "not found", "FlashInfer compiles parts of itself at first use", remedy)]
    found = parsed(nvcc.get("version"))
    if device.arch == "sm_107" and found is not None and found < (parsed(RUBIN_TOOLKIT) or found):
        return [Reason("nvcc", str(found), f">= {RUBIN_TOOLKIT}: older ones do not know sm_107", "use a newer toolkit")]
    return []


def artifact_reasons(host: Host) -> list[Reason]:
    """Say that trtllm-gen's compiled kernels are not on this machine; FlashInfer would download them at first use."""
    facts: Mapping[str, Any] = host.vendor.get("flashinfer") or {}
    if not facts:
        return []
    found = facts.get("artifacts")
    if found and found["cubins"]:
        return []
    version = facts.get("version")
    if "artifacts" not in facts and host.distributions.get("flashinfer-cubin") == version:
        return []
    where = f"none in {found['folder']}" if found else "none found"
    remedy = f"install flashinfer-cubin=={version}, or run `flashinfer download-cubin` where there is a network"
    return [Reason("flashinfer's compiled kernels", where, "the files of trtllm-gen, which is closed", remedy)]


def environment_reasons(env: Mapping[str, str] | None = None) -> list[Reason]:
    """Return what in `env` would make FlashInfer compute something else."""
    env = os.environ if env is None else env
    return [
        Reason(name, env[name], f"unset: {why}", "unset it")
        for name, why in support().refused_variables.items()
        if env.get(name, "0") not in {"", "0"}
    ]


def memory_reasons(needed: int, device: Device) -> list[Reason]:
    """Say that the converted weights do not fit."""
    return present(memory_reason(needed, device))
