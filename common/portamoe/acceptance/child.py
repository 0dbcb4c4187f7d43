"""A child process of `portamoe verify`: runs a share of one backend's checks and prints a marked line for each.

    python -m portamoe.acceptance.child '{"backend": …, "device": …, "spec": …, "quick": …, "share": …, …}'

Exit code BROKEN: the device is unusable in this process after the check that was printed last.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from portamoe import registry, verdicts
from portamoe.acceptance.checklist import Check, Subject, checks
from portamoe.acceptance.shares import BEGIN, BROKEN, CHECK, Share
from portamoe.detection import detect
from portamoe.spec import MoESpec


def main(text: str) -> int:
    """Run what the JSON object asks for; see `pool.Job.argument`."""
    asked = json.loads(text)
    device = detect().device(asked["device"])
    gpu = device.vendor != "cpu"
    if gpu:
        torch.cuda.set_device(device.index)
    with torch.no_grad():
        for check in _found(asked, device):
            _say(CHECK, check.to_dict())
            if check.status == "failed" and gpu and not _usable():
                return BROKEN
    return 0


def _found(asked: dict[str, Any], device: Any) -> Iterator[Check]:
    spec, share = MoESpec.from_dict(asked["spec"]), Share.from_dict(asked["share"])
    backend = registry.named(asked["backend"])
    if backend is None:
        raise ValueError(f"no backend {asked['backend']!r}")
    small = verdicts.canary_spec(backend, spec, device)
    if small is None:
        if share.has("canary", 0):
            why = "the backend accepts no small spec like this one"
            yield Check(backend.name, "canary", "spec", "not run", why)
        return
    subject = Subject(backend, spec, small, device, asked["quick"], asked["turn"])
    done = {(group, case) for group, case in asked["done"]}
    yield from checks(subject, share, done, lambda group, case: _say(BEGIN, {"group": group, "case": case}))


def _usable() -> bool:
    """Return whether the device still answers: after an illegal access nothing does until the process ends."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").sum().item()
    except RuntimeError:
        return False
    return True


def _say(mark: str, data: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{mark}{json.dumps(data)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
