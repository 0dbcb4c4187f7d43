"""Why AITER cannot serve a spec on a device, from facts alone: the parts of the backend's `check`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from portamoe.activations import SiTU
from portamoe.checks import at_least, memory_reason, present, torch_reason, vendor_reason
from portamoe.decision import Reason
from rocm_moe.aiter.call import parameter_reason
from rocm_moe.aiter.support import Support

if TYPE_CHECKING:
    from portamoe.device import Device
    from portamoe.spec import MoESpec

REMEDY = "use triton_unfused"
#: First torch with float4_e2m1fn_x2, the dtype that AITER's FP4 weights are passed as.
TORCH_FLOOR = "2.8"
#: Where a usable AITER comes from; PyPI has none.
INSTALL = "install AMD's AITER from its GitHub releases or a ROCm image, not from PyPI; or use triton_unfused"


def arch_and_activation_reasons(spec: MoESpec, device: Device, data: Support) -> list[Reason]:
    """Compare vendor, weights, activation and arch with the allowlist."""
    if reason := vendor_reason(device, "amd"):
        return [reason]
    out = []
    if spec.weight_format != "mxfp4":
        out.append(Reason("weight format", spec.weight_format, "mxfp4", REMEDY))
    if spec.bias:
        out.append(Reason("biases", "yes", "none: AITER's SiTU takes no bias", REMEDY))
    if isinstance(spec.activation, SiTU) and spec.activation.linear_beta is None:
        out.append(Reason("linear_beta", "None", "a number: AITER has no SiTU without it", REMEDY))
    mode = data.mode_for(spec.activation_format)
    if mode is None:
        formats = ", ".join(m.activation_format for m in data.modes.values())
        return [*out, Reason("activation format", spec.activation_format, formats, REMEDY)]
    return out + _allowlist(spec, device, mode.name, data)


def _allowlist(spec: MoESpec, device: Device, mode: str, data: Support) -> list[Reason]:
    activation = spec.activation.name
    entry = data.entry_for(device.arch, activation, mode)
    if entry is None:
        archs = sorted({e.arch for e in data.entries if e.status == "supported"})
        if device.arch not in archs:
            return [Reason("arch", device.arch, " or ".join(archs), REMEDY)]
        return [Reason("activation", activation, "situ", REMEDY)]
    if entry.status == "supported":
        return []
    status = entry.status.replace("_", " ")
    if entry.status == "known_bad":
        return [Reason("activation", f"{activation} is {status} on {device.arch}: {entry.why}", "situ", REMEDY)]
    return [Reason("arch", f"{device.arch} is {status} in AITER: {entry.why}", "gfx950", REMEDY)]


def floor_for(spec: MoESpec, device: Device, data: Support) -> str:
    """Return the first version that serves this arch, activation and mode; where none does, the general floor."""
    mode = data.mode_for(spec.activation_format)
    entry = None if mode is None else data.entry_for(device.arch, spec.activation.name, mode.name)
    return (entry.since if entry is not None else None) or data.floor


def aiter_reasons(device: Device, floor: str, data: Support) -> list[Reason]:
    """Say what is wrong with the AITER that is there: missing, another package, broken, too old, without SiTU."""
    host = device.host
    facts: Mapping[str, Any] | None = host.vendor.get("aiter")
    if facts is None:
        return [Reason("aiter", "not installed", f">= {floor}", INSTALL)]
    version = facts.get("version")
    if not facts.get("is_amd"):
        if problem := facts.get("problem"):
            return [Reason("aiter", problem, "AMD's package", INSTALL)]
        value = f"{version or 'this module'} is another package of that name (async-iterator helpers), not AMD's"
        return [Reason("aiter", value, f"AMD's AITER >= {floor}", f"pip uninstall aiter; {INSTALL}")]
    if problem := facts.get("problem"):
        return [Reason("aiter", f"broken: {problem}", "a whole installation", f"reinstall it; {INSTALL}")]
    out = _version_reasons(facts, floor, data)
    if not out and not facts.get("has_situv2"):
        out.append(Reason("aiter", f"{version} has no ActivationType.Situv2", f">= {floor}", INSTALL))
    if not out and facts.get("parameters") is not None:
        out += present(parameter_reason(facts["parameters"]))
    if "flydsl" not in host.distributions and not facts.get("flydsl"):
        remedy = f"pip install flydsl=={data.flydsl} (the version your AITER names), or {REMEDY}"
        out.append(Reason("flydsl", "not installed", "AITER's SiTU kernels need it", remedy))
    return out


def _version_reasons(facts: Mapping[str, Any], floor: str, data: Support) -> list[Reason]:
    """The weight order follows from the release: SiTU's before the floor is another one, and nothing would say so."""
    version = facts.get("version")
    defaults = facts.get("situv2_defaults")
    # What setuptools_scm writes where it finds no tags: the version says nothing.
    if not version or version.startswith(("0.1.0", "0.0", "0.1.dev")):
        remedy = f"fetch AITER's tags and reinstall, so that it knows its version; {INSTALL}"
        return [Reason("aiter", f"version {version or 'unknown'}", f">= {floor}", remedy)]
    if not at_least(version, floor) or _is_before(version, floor):
        return [Reason("aiter", version, f">= {floor}: {data.floor_reason}", INSTALL)]
    if defaults is not None and tuple(defaults) != data.situv2_defaults:
        value = f"{version} with situv2 defaults {tuple(defaults)}"
        limit = f"{data.situv2_defaults}, as since {floor}; other defaults mean older kernels and another layout"
        return [Reason("aiter", value, limit, INSTALL)]
    return []


def _is_before(version: str, floor: str) -> bool:
    """A development or release candidate of the floor itself comes before it: "0.1.20.dev5", "0.1.20rc1"."""
    rest = version.removeprefix(floor)
    return rest != version and rest.lstrip(".").startswith(("dev", "rc", "a", "b"))


def host_reasons(device: Device, needed_bytes: int) -> list[Reason]:
    """Say what outside AITER would make a call fail: torch, folders that cannot be written, locks, memory."""
    facts: Mapping[str, Any] = device.host.vendor.get("aiter") or {}
    out = present(torch_reason(device, TORCH_FLOOR))
    if facts.get("jit_dir_writable") is False:
        value = f"{facts.get('jit_dir')} cannot be written"
        out.append(
            Reason(
                "AITER_JIT_DIR", value, "a writable folder", f"set AITER_JIT_DIR to a folder of this job, or {REMEDY}"
            )
        )
    if facts.get("config_dir_writable") is False:
        value = f"{facts.get('config_dir')} cannot be written"
        remedy = f"the path is fixed in AITER: have its owner open it, give the job a private /tmp, or {REMEDY}"
        out.append(Reason("aiter's tuned tables", value, "a writable folder", remedy))
    if locks := facts.get("locks"):
        remedy = f"AITER waits for them: if no other process is building, rm {' '.join(locks)}; or {REMEDY}"
        out.append(Reason("aiter's lock files", ", ".join(locks), "none older than 30 minutes", remedy))
    return out + present(memory_reason(needed_bytes, device))
