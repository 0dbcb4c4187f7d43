"""Which backends there are, and which of them serves a spec on a device.

This library's own backends are known by module name, others through the entry-point group `portamoe.backends`
(name = "package.module:instance"). `decide` serves the choice at import, the probe, layer construction and error
messages alike, so they cannot disagree.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portamoe import verdicts
from portamoe.backend import Announcement
from portamoe.checks import vendor_reason
from portamoe.decision import Accepted, BackendRejected, Decision, Reason, Rejected
from portamoe.detection import DetectionError, detect
from portamoe.detection.distributions import entry_points
from portamoe.device import Device, Host
from portamoe.spec import KIMI_K3, MoESpec

if TYPE_CHECKING:
    from portamoe.backend import Backend

#: "module:attribute" of the core's own backends; each vendor package lists its own in BACKENDS.
CORE_BACKENDS = ("portamoe.torch_backend:BACKEND",)
VENDOR_PACKAGES = ("rocm_moe", "cuda_moe")
ENTRY_POINT_GROUP = "portamoe.backends"
VARIABLE = "PORTAMOE_BACKEND"


@dataclass(frozen=True)
class Broken:
    """A backend that was announced but cannot be used at all: rejected for everything."""

    name: str
    package: str
    reason: Reason


@dataclass(frozen=True)
class Deferred:
    """A backend that is imported when a device of its vendors is asked about."""

    announcement: Announcement
    package: str

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.announcement.name

    @property
    def priority(self) -> int:
        """The backend's priority."""
        return self.announcement.priority

    @functools.cached_property
    def loaded(self) -> Backend | Broken:
        """The backend, imported at first use."""
        return _load(self.announcement.target, self.name, self.package)


@dataclass(frozen=True)
class Selection:
    """The choice for a spec on a device: `name` of the chosen backend or None, why, and every decision."""

    spec: MoESpec
    device: Device
    decisions: tuple[Decision, ...]
    name: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.name or 'no backend'} on {self.device.torch_name} ({self.device.arch}): {self.why}"


@functools.cache
def backends() -> tuple[Backend | Deferred | Broken, ...]:
    """Return all announced backends, highest priority first, ties by name; the unusable ones last."""
    found: list[Backend | Deferred | Broken] = []
    for target, label, package in _announced():
        backend = target if isinstance(target, Broken | Deferred) else _load(target, label, package)
        if any(backend.name == other.name for other in found):
            taken = Reason("name", backend.name, "a name that no other backend has", f"rename it in {package}")
            backend = Broken(label, package, taken)
        found.append(backend)
    return tuple(sorted(found, key=lambda b: (isinstance(b, Broken), -getattr(b, "priority", 0), b.name)))


def being_imported() -> list[str]:
    """Return the announced packages and modules whose import has begun and not ended."""
    modules = (target.partition(":")[0].strip() for _, target in entry_points(ENTRY_POINT_GROUP))
    names = {*VENDOR_PACKAGES, *(part for module in modules for part in (module, module.partition(".")[0]))}
    specs = {name: getattr(sys.modules.get(name), "__spec__", None) for name in names}
    return sorted(name for name, spec in specs.items() if getattr(spec, "_initializing", False))


def _announced() -> list[tuple[str | Deferred | Broken, str, str]]:
    """Return (target, label, package) of every backend: the core's, the vendor packages', the plug-ins'."""
    out: list[tuple[str | Deferred | Broken, str, str]] = [(t, _label(t), "portamoe") for t in CORE_BACKENDS]
    for package in VENDOR_PACKAGES:
        try:
            targets = importlib.import_module(package).BACKENDS
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a vendor package may throw anything
            out.append((Broken(package, package, _import_reason(package, error)), package, package))
        else:
            for target in targets:
                if isinstance(target, Announcement):
                    out.append((Deferred(target, package), target.name, package))
                else:
                    out.append((target, _label(target), package))
    for name, target in sorted(entry_points(ENTRY_POINT_GROUP)):
        out.append((target, name, target.partition(":")[0].partition(".")[0]))
    return out


def _label(target: str) -> str:
    return target.partition(":")[0].rpartition(".")[2]


def _load(target: str, label: str, package: str) -> Backend | Broken:
    module_name, _, attribute = target.partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module_name), attribute.strip() or "BACKEND")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may throw anything at import
        return Broken(label, package, _import_reason(module_name, error))
    types = {"name": str, "package": str, "priority": int}
    wrong = [n for n, t in types.items() if not isinstance(getattr(backend, n, None), t)]
    wrong += [n for n in ("check", "only_on_request") if not callable(getattr(backend, n, None))]
    if wrong:
        remedy = "see portamoe.backend.Backend for what a backend has"
        return Broken(label, package, Reason(target, f"lacks {', '.join(wrong)}", "a Backend", remedy))
    return backend


def _import_reason(name: str, error: BaseException) -> Reason:
    text = f"import failed: {type(error).__name__}: {error}"
    return Reason(name, text, "a module that can be imported", f"repair or uninstall {name.partition('.')[0]}")


def decide(spec: MoESpec, device: Device) -> tuple[Decision, ...]:
    """Return a decision for every backend, in the order of preference; never raises for what a backend does."""
    return tuple(_decide_one(backend, spec, device) for backend in backends())


def _decide_one(backend: Backend | Deferred | Broken, spec: MoESpec, device: Device) -> Decision:
    if isinstance(backend, Deferred):
        if reason := vendor_reason(device, *backend.announcement.vendors):
            return Rejected(backend.name, backend.package, (reason,))
        backend = backend.loaded
    if isinstance(backend, Broken):
        return Rejected(backend.name, backend.package, (backend.reason,))
    try:
        if reasons := tuple(backend.check(spec, device)):
            return Rejected(backend.name, backend.package, reasons)
        on_request = backend.only_on_request(spec, device)
        verdict = verdicts.cached(backend, spec, device)
    except Exception as error:  # noqa: BLE001 - a faulty check must not take the other backends down
        text = f"{type(error).__name__}: {error}"
        fault = Reason("check", text, "no exception", f"report this to {backend.package}")
        return Rejected(backend.name, backend.package, (fault,))
    accepted = Accepted(backend.name, backend.package, only_on_request=on_request)
    return verdicts.applied(accepted, verdict, verdicts.environment(device.host).get(verdicts.MODE_VARIABLE))


def choose(
    spec: MoESpec, device: Device, backend: str | None = None, decisions: tuple[Decision, ...] | None = None
) -> Selection:
    """Return the choice and its reasons; a rejection is an answer here, not an error.

    backend:    a name that is obeyed; None means $PORTAMOE_BACKEND, and if that is not set the highest priority
    decisions:  to choose from in place of those of `decide`

    Raises ValueError for a name that no backend has; it lists those there are.
    """
    if decisions is None:
        decisions = decide(spec, device)
    name, source = backend, f"backend={backend!r}"
    if name is None and (wanted := _environment(device.host).get(VARIABLE)):
        name, source = wanted, f"{VARIABLE}={wanted}"
    if name is None:
        return _automatic(spec, device, decisions)
    decision = next((d for d in decisions if d.backend == name), None)
    if decision is None:
        known = ", ".join(d.backend for d in decisions)
        raise ValueError(f"{source}: unknown backend {name!r}; known: {known}")
    if isinstance(decision, Rejected):
        return Selection(spec, device, decisions, None, f"{source} is rejected: {_join(decision)}")
    return Selection(spec, device, decisions, name, f"asked for by {source}")


def _automatic(spec: MoESpec, device: Device, decisions: tuple[Decision, ...]) -> Selection:
    accepted = [d for d in decisions if isinstance(d, Accepted)]
    for decision in accepted:
        if decision.only_on_request is None:
            return Selection(spec, device, decisions, decision.backend, "first in order of those that accept")
    parts = [f"{d.backend}: only on request: {d.only_on_request}" for d in accepted]
    parts += [f"{d.backend}: {_join(d)}" for d in decisions if isinstance(d, Rejected)]
    return Selection(spec, device, decisions, None, "every backend is rejected: " + " | ".join(parts))


def _join(decision: Rejected) -> str:
    return "; ".join(str(reason) for reason in decision.reasons)


def _environment(host: Host) -> dict[str, str]:
    return dict(host.env) if host.recorded else dict(os.environ)


def choose_at_import() -> Selection:
    """Return the choice for Kimi-K3's routed experts on the first visible device; never raises.

    A failed detection or an unknown name in $PORTAMOE_BACKEND leaves no backend chosen and says so.
    """
    try:
        device = detect().devices[0]
    except DetectionError as error:
        nothing = Host(machine="unknown", python="unknown")
        return Selection(KIMI_K3, Device("cpu", "cpu", 0, "unknown", nothing), (), None, str(error))
    return choose_or_explain(KIMI_K3, device, decide(KIMI_K3, device))


def choose_or_explain(spec: MoESpec, device: Device, decisions: tuple[Decision, ...]) -> Selection:
    """Return the choice that $PORTAMOE_BACKEND or the priorities make; an unknown name there chooses nothing."""
    try:
        return choose(spec, device, None, decisions)
    except ValueError as error:
        return Selection(spec, device, decisions, None, str(error))


def select(spec: MoESpec, device: Device, backend: str | None = None) -> Backend:
    """Return the backend that serves `spec` on `device`.

    backend:  a name that is obeyed; None means $PORTAMOE_BACKEND, and if that is not set the highest priority

    Raises BackendRejected with every reason when the named one, or all, are rejected; ValueError for an unknown name.
    """
    selection = choose(spec, device, backend)
    if found := named(selection.name):
        return found
    raise BackendRejected(f"on {device.torch_name} ({device.arch}), {selection.why}", selection.decisions)


def named(name: str | None) -> Backend | None:
    """Return the usable backend of that name, None if there is none."""
    found = next((backend for backend in backends() if backend.name == name), None)
    if isinstance(found, Deferred):
        found = found.loaded
    return None if isinstance(found, Broken) else found
