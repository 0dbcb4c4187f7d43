"""Which of the devices that the driver shows this process may use, by the visibility variables.

Rules: torch.cuda._parse_visible_devices (torch 2.13) for lists of either vendor, ROCm's "GPU isolation" page for
the order: ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES, which counts within what ROCR left over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from portamoe.decision import Reason

#: The first that is set acts as HIP's list; HIP reads CUDA_VISIBLE_DEVICES too (ROCm clr, rocdevice.cpp).
HIP_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


@dataclass(frozen=True)
class Visible:
    """The devices left, as positions in the driver's order, in the order torch counts them.

    because:   the variables that decided, "ROCR_VISIBLE_DEVICES=2,1", or "no variable set"
    problems:  entries that end or empty a list, and variables that contradict each other
    """

    order: tuple[int, ...]
    because: str
    problems: tuple[Reason, ...] = ()


def amd_visible(uuids: Sequence[str | None], env: Mapping[str, str]) -> Visible:
    """Apply ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES (or what stands in for it) to AMD devices.

    uuids:  one entry a device in KFD's order, "GPU-<16 hex>" or None
    """
    order = tuple(range(len(uuids)))
    because: list[str] = []
    problems: list[Reason] = []
    rocr = env.get("ROCR_VISIBLE_DEVICES")
    if rocr is not None:
        order, problem = _pick("ROCR_VISIBLE_DEVICES", rocr, uuids)
        because.append(f"ROCR_VISIBLE_DEVICES={rocr}")
        problems += [problem] if problem else []
    name = next((n for n in HIP_VARIABLES if n in env), None)
    if name is None:
        return Visible(order, ", then ".join(because) or "no variable set", tuple(problems))
    hip = env[name]
    because.append(f"{name}={hip}")
    problems += _contradictions(name, env)
    if rocr is not None and len(hip.split(",")) > len(rocr.split(",")):
        problems.append(
            Reason(
                name,
                hip,
                f"at most as many entries as ROCR_VISIBLE_DEVICES={rocr}, whose devices it counts",
                f"unset {name}: torch refuses to start with these two",
            )
        )
        return Visible((), ", then ".join(because), tuple(problems))
    within, problem = _pick(name, hip, [uuids[i] for i in order])
    problems += [problem] if problem else []
    return Visible(tuple(order[i] for i in within), ", then ".join(because), tuple(problems))


def _contradictions(name: str, env: Mapping[str, str]) -> list[Reason]:
    others = [n for n in HIP_VARIABLES[:2] if n != name and env.get(n, env[name]) != env[name]]
    return [
        Reason(
            other,
            env[other],
            f"the value of {name}, {env[name]!r}, which HIP obeys",
            f"unset {other}",
        )
        for other in others
    ]


def nvidia_visible(uuids: Sequence[str | None], env: Mapping[str, str]) -> Visible:
    """Apply CUDA_VISIBLE_DEVICES to NVIDIA devices (NVML does not).

    uuids:  one entry a device in NVML's order, "GPU-…" or "MIG-…" or None
    """
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return Visible(tuple(range(len(uuids))), "no variable set")
    order, problem = _pick("CUDA_VISIBLE_DEVICES", value, uuids)
    return Visible(order, f"CUDA_VISIBLE_DEVICES={value}", (problem,) if problem else ())


def _pick(name: str, value: str, uuids: Sequence[str | None]) -> tuple[tuple[int, ...], Reason | None]:
    """Resolve one list of indices (the digits an entry starts with) and UUID prefixes; say what looks wrong in it.

    A negative, unknown or out-of-range entry ends the list, a repeated one empties it.
    """
    order: list[int] = []
    if not value.strip():
        return (), Reason(name, "empty", None, f"no device is visible; unset {name} to see all")
    for entry in (e.strip() for e in value.split(",")):
        index = _resolve(entry, uuids)
        if index is None:
            return tuple(order), _ended(name, value, entry, len(uuids))
        if index in order:
            return (), Reason(name, value, "no device twice", "a repeated entry hides all devices")
        order.append(index)
    return tuple(order), None


def _ended(name: str, value: str, entry: str, count: int) -> Reason | None:
    """Return the note on an entry that ends the list; a negative one is the usual way to say so."""
    if entry.startswith("-"):
        return None
    limit = f"indices below {count} or UUIDs of devices that are there"
    return Reason(name, value, limit, f"{entry!r} and all entries after it are ignored")


def _resolve(entry: str, uuids: Sequence[str | None]) -> int | None:
    if entry.startswith(("GPU-", "MIG-")):
        found = [i for i, uuid in enumerate(uuids) if uuid and uuid.lower().startswith(entry.lower())]
        return found[0] if len(found) == 1 else None
    digits = re.match(r"\+?(\d+)", entry)
    index = int(digits[1]) if digits else -1
    return index if 0 <= index < len(uuids) else None
