"""What is there and what serves it: the typed answer behind `portamoe probe`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from portamoe import registry
from portamoe.decision import Accepted, Decision, Reason, Rejected
from portamoe.detection import detect
from portamoe.detection.host import module_folder
from portamoe.device import Device, Host
from portamoe.linear_provider import providers
from portamoe.spec import KIMI_K3, MoESpec

#: Of the JSON form; grows when a key changes its meaning or goes away.
SCHEMA = 1
#: Packages that a deep probe imports where they are installed.
VENDOR_MODULES = ("triton", "aiter", "flashinfer", "cutlass")
#: Fields of Host that the report shows under "toolchain".
TOOLCHAIN = ("torch", "rocm", "nvml", "ptxas", "distributions", "vendor")


@dataclass(frozen=True)
class Capabilities:
    """Host, visible devices, and every backend's decision on `selection.spec` for `selection.device`."""

    host: Host
    devices: tuple[Device, ...]
    selection: registry.Selection
    #: What importing each vendor package in a child process did; only `deep` does so.
    imports: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    #: What a layer makes of NVFP4 weights that no fast backend takes as they are.
    note: str | None = None
    #: Whose kernels serve projections of few rows on `selection.device`, one line each; empty where torch does.
    projections: tuple[str, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One decision for every backend, in the order of preference."""
        return self.selection.decisions

    @property
    def selected(self) -> str | None:
        """Name of the chosen backend, None if every one is rejected."""
        return self.selection.name

    def decision(self, backend: str) -> Decision:
        """Return the decision of one backend; ValueError lists the known names."""
        for decision in self.decisions:
            if decision.backend == backend:
                return decision
        known = ", ".join(d.backend for d in self.decisions)
        raise ValueError(f"unknown backend {backend!r}; known: {known}")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: schema, host, devices, toolchain, backends, selected, note, projections."""
        host = {
            f.name: getattr(self.host, f.name)
            for f in fields(self.host)
            if f.name not in TOOLCHAIN and f.name != "problems"
        }
        host["problems"] = [problem.to_dict() for problem in self.host.problems]
        return {
            "schema": SCHEMA,
            "host": _plain(host),
            "devices": [self._device(device) for device in self.devices],
            "toolchain": _plain({name: getattr(self.host, name) for name in TOOLCHAIN} | self._imports()),
            "backends": [_decision(decision) for decision in self.decisions],
            "selected": self.selected,
            "note": self.note,
            "projections": list(self.projections),
        }

    def _imports(self) -> dict[str, Any]:
        return {"imports": self.imports} if self.imports else {}

    def _device(self, device: Device) -> dict[str, Any]:
        out = {f.name: getattr(device, f.name) for f in fields(device) if f.name != "host"}
        return {**out, "torch_name": device.torch_name, "asked": device is self.selection.device}


def _decision(decision: Decision) -> dict[str, Any]:
    on_request = decision.only_on_request if isinstance(decision, Accepted) else None
    return {
        "name": decision.backend,
        "package": decision.package,
        "accepted": not isinstance(decision, Rejected),
        "reasons": [reason.to_dict() for reason in decision.reasons],
        "verification": decision.verification if isinstance(decision, Accepted) else None,
        "only_on_request": on_request.to_dict() if on_request else None,
    }


def _plain(value: Any) -> Any:
    """Return `value` with mappings and tuples as JSON knows them."""
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def capabilities(
    spec: MoESpec | None = None,
    *,
    device: str | None = None,
    backend: str | None = None,
    root: str | Path | None = None,
    deep: bool = False,
    timeout: float = 300.0,
) -> Capabilities:
    """Return what is there and each backend's decision on a spec.

    spec:     the question, by default Kimi-K3's routed experts
    device:   "cuda:1", "cpu" as torch names it; by default the first visible one
    backend:  a name that is chosen or rejected, as in `portamoe.select`
    root:     folder of a recording to replay instead of the live machine
    deep:     import vendor packages and run each accepted backend on a small problem, in child processes; one that
              fails there is rejected
    timeout:  seconds that each child may take; a first run may compile for minutes

    Raises DetectionError, and ValueError for an unknown backend or device.
    """
    from portamoe.deep import try_import

    if deep and root is not None:
        raise ValueError("a deep probe runs on this machine and cannot replay a recording; leave out deep or root")
    detection = detect(root, toolchain=root is None)
    asked = detection.devices[0] if device is None else detection.device(device)
    question = KIMI_K3 if spec is None else spec
    decisions = registry.decide(question, asked)
    imports: dict[str, str] = {}
    if deep:
        decisions = tuple(_deep_decision(decision, question, asked, timeout) for decision in decisions)
        imports = {name: str(try_import(name, timeout)) for name in VENDOR_MODULES if module_folder(name)}
    if backend is None:
        selection = registry.choose_or_explain(question, asked, decisions)
    else:
        selection = registry.choose(question, asked, backend, decisions)
    note = _served_as(question, asked, backend)
    lines = tuple(line for provider in providers(asked) for line in provider.lines(asked))
    return Capabilities(detection.host, detection.devices, selection, MappingProxyType(imports), note, lines)


def _served_as(spec: MoESpec, device: Device, backend: str | None) -> str | None:
    """Say what becomes of NVFP4 weights on this device, None where they are served as they are."""
    from portamoe.nvfp4 import mxfp4_choice

    choice = mxfp4_choice(spec, device, backend)
    recode = "NVFP4 weights that are a recode of MXFP4, as nvidia/Kimi-K3-NVFP4's are,"
    if isinstance(choice, Reason):
        other = replace(spec, activation_format="bf16")
        if isinstance(better := mxfp4_choice(other, device, backend), str):
            return f'{recode} would be served as MXFP4 by {better} with activation_format="bf16"'
        return None
    return f"{recode} are served as MXFP4 by {choice}, with the same values" if choice else None


def _deep_decision(decision: Decision, spec: MoESpec, device: Device, timeout: float) -> Decision:
    from portamoe.deep import try_backend

    if isinstance(decision, Rejected):
        return decision
    reason = try_backend(decision.backend, spec, device, timeout).reason("forward")
    if reason:
        return Rejected(decision.backend, decision.package, (reason,))
    return replace(decision, verification="verified")
