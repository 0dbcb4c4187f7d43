"""What is there and what serves it: the typed answer behind `portamoe probe`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from portamoe import registry
from portamoe.decision import Accepted, Decision, Rejected
from portamoe.detection import detect
from portamoe.device import Device, Host
from portamoe.spec import KIMI_K3, MoESpec

#: Of the JSON form; grows when a key changes its meaning or goes away.
SCHEMA = 1
#: Fields of Host that the report shows under "toolchain".
TOOLCHAIN = ("torch", "rocm", "nvml", "ptxas", "distributions", "vendor")


@dataclass(frozen=True)
class Capabilities:
    """Host, visible devices, and every backend's decision on `selection.spec` for `selection.device`."""

    host: Host
    devices: tuple[Device, ...]
    selection: registry.Selection

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
        """Return the JSON form: schema, host, devices, toolchain, backends, selected."""
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
            "toolchain": _plain({name: getattr(self.host, name) for name in TOOLCHAIN}),
            "backends": [_decision(decision) for decision in self.decisions],
            "selected": self.selected,
        }

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
) -> Capabilities:
    """Return what is there and each backend's decision on a spec.

    spec:     the question, by default Kimi-K3's routed experts
    device:   "cuda:1", "cpu" as torch names it; by default the first visible one
    backend:  a name that is chosen or rejected, as in `portamoe.select`
    root:     folder of a recording to replay instead of the live machine

    Raises DetectionError, and ValueError for an unknown backend or device.
    """
    detection = detect(root, toolchain=root is None)
    asked = detection.devices[0] if device is None else detection.device(device)
    selection = registry.choose(KIMI_K3 if spec is None else spec, asked, backend)
    return Capabilities(detection.host, detection.devices, selection)
