"""Verified dispatch: a backend serves a spec only after its canary has passed on this kind of device."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from portamoe import registry, verdicts
from portamoe.decision import Accepted, BackendRejected, Decision, Reason, Rejected
from portamoe.verdicts import MODE_VARIABLE, MODES, WHAT, Verdict

if TYPE_CHECKING:
    from portamoe.backend import Backend
    from portamoe.device import Device
    from portamoe.registry import Selection
    from portamoe.spec import MoESpec

Mode = Literal["auto", "force", "skip"]

_LOG = logging.getLogger("portamoe")


@dataclass(frozen=True)
class Chosen:
    """A backend and the selection that it follows from, canaries included."""

    selection: Selection
    backend: Backend


def choose_verified(
    spec: MoESpec, device: Device, backend: str | None = None, *, max_tokens: int, canary: str | None = None
) -> Chosen:
    """Return the backend that serves `spec`, after its canary has covered calls of up to `max_tokens` tokens.

    backend:  a name that is obeyed; None means $PORTAMOE_BACKEND, and if that is not set the highest priority
    canary:   "auto" runs it where no verdict is known, "force" runs it once more, "skip" trusts the backend;
              None means $PORTAMOE_CANARY, and if that is not set "auto"

    An automatic choice moves past a backend that fails and logs the reason once. Raises BackendRejected when the
    named one, or all, are rejected; ValueError for an unknown name or mode; RuntimeError inside a graph capture.
    """
    mode = mode_of(device, canary)
    automatic = backend is None and not verdicts.environment(device.host).get(registry.VARIABLE)
    decisions = registry.decide(spec, device)
    if mode != "auto":  # a known failure is about to be checked again, or is not to be looked at
        decisions = tuple(without_verdict(d, spec, device) for d in decisions)
    while True:
        selection = registry.choose(spec, device, backend, decisions)
        found = registry.named(selection.name)
        if found is None:
            raise BackendRejected(f"on {device.torch_name} ({device.arch}), {selection.why}", decisions)
        verdict = None if mode == "skip" else ensure(found, spec, device, max_tokens, force=mode == "force")
        decisions = tuple(_with(d, verdict) if d.backend == found.name else d for d in decisions)
        if verdict is None or verdict.passed:
            final = replace(selection, decisions=decisions)
            if automatic:
                _say_who_was_passed_over(final, device)
            return Chosen(final, found)


def mode_of(device: Device, canary: str | None = None) -> str:
    """Return the mode that the argument or $PORTAMOE_CANARY names; ValueError for any other."""
    source, mode = f"canary={canary!r}", canary
    if mode is None:
        mode = verdicts.environment(device.host).get(MODE_VARIABLE) or "auto"
        source = f"{MODE_VARIABLE}={mode}"
    if mode not in MODES:
        raise ValueError(f"{source} is none of {', '.join(MODES)}")
    return mode


def _with(decision: Decision, verdict: Verdict | None) -> Decision:
    return verdicts.applied(decision, verdict) if isinstance(decision, Accepted) else decision


def without_verdict(decision: Decision, spec: MoESpec, device: Device) -> Decision:
    """Return what the backend itself decides where a failed canary is all that speaks against it."""
    if not isinstance(decision, Rejected) or any(reason.what != WHAT for reason in decision.reasons):
        return decision
    backend = registry.named(decision.backend)
    if backend is None:
        return decision
    return Accepted(backend.name, backend.package, only_on_request=backend.only_on_request(spec, device))


def ensure(backend: Backend, spec: MoESpec, device: Device, max_tokens: int, *, force: bool = False) -> Verdict | None:
    """Return the verdict on `backend` for up to `max_tokens` tokens, after running what it does not cover yet.

    force:  run everything, whatever is known; in the same process only once

    None if the backend accepts no small spec, so that nothing can be run; this is logged.
    """
    small = verdicts.canary_spec(backend, spec, device)
    store, key_name = verdicts.store(device.host), f"{backend.name} on {device.torch_name}"
    if small is None:
        store.say_once(f"none {key_name}", f"no canary for {key_name}: it accepts no small spec like {spec}")
        return None
    from portamoe import canary

    key = verdicts.key_of(backend, small, device)
    known = store.read(key)
    before: Verdict | None = None
    if force and store.first_time(key):
        before, known = known, None
    if known is not None and not known.passed:
        return known
    try:
        cases = canary.cases_of(backend, spec, max_tokens)
        covered = () if known is None else known.cases
        if missing := tuple(case for case in cases if case not in covered):
            known = _joined(known, canary.run(backend, small, missing, canary.torch_device(device)))
            # What was forced and passed again leaves the other cases as they were found earlier.
            store.write(key, _joined(before, known) if before and before.passed and known.passed else known)
    except RuntimeError as error:
        if canary.capturing():
            raise
        known = _raised(store, key, error)
    except Exception as error:  # noqa: BLE001 - a backend may throw anything, and the next one can still serve
        known = _raised(store, key, error)
    return known


def _joined(before: Verdict | None, new: Verdict) -> Verdict:
    if before is None:
        return new
    return replace(
        new,
        cases=tuple(dict.fromkeys((*before.cases, *new.cases))),
        indistinct=tuple(dict.fromkeys((*before.indistinct, *new.indistinct))),
    )


def _raised(store: verdicts.VerdictStore, key: verdicts.Key, error: Exception) -> Verdict:
    """Keep a failure by exception in this process only: a full memory or a broken compiler may be gone tomorrow."""
    _LOG.debug("the canary raised", exc_info=error)
    lines = str(error).strip().splitlines()
    text = f"raised {type(error).__name__}" + (f": {lines[0]}" if lines else "")
    verdict = Verdict(False, Reason(WHAT, text, "a result", "see the traceback in the log at level DEBUG"), ())
    store.write(key, verdict, durable=False)
    return verdict


def _say_who_was_passed_over(selection: Selection, device: Device) -> None:
    """Log once a process each backend that would have been chosen if its canary had not failed."""
    store = verdicts.store(device.host)
    for decision in selection.decisions:
        if decision.backend == selection.name:
            return
        for reason in decision.reasons:
            if reason.what == WHAT:
                store.say_once(
                    f"{decision.backend} {device.arch} {reason}",
                    f"{decision.backend} is passed over on {device.torch_name} ({device.arch}), {selection.name} "
                    f"serves: {reason}",
                )
