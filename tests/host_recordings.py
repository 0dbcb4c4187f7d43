"""Recorded and made-up hosts for the tests of detection and selection."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from portamoe.decision import Reason
from portamoe.detection import Detection, replay
from portamoe.detection.files import Files
from portamoe.detection.kfd import NODES
from portamoe.detection.recording import load
from portamoe.device import Device, Host

HOSTS = Path(__file__).parent / "data" / "hosts"
FACTS = json.loads((HOSTS / "kfd_fixtures.json").read_text())
HOST_NAMES = sorted(path.parent.name for path in HOSTS.glob("*/host.json"))
#: The control group of this shared node gives the job node 4 and hides the GPUs 5 to 11.
ONE_GCD_UNREADABLE = tuple(f"{NODES}/{node}/properties" for node in range(5, 12))


def recorded(
    name: str, env: Mapping[str, str] | None = None, unreadable: Iterable[str] | None = None, **facts: Any
) -> Detection:
    """Replay a recorded host with other variables, unreadable files or facts.

    Root may read everything whatever the modes say, so EPERM is injected through the reader.
    """
    if unreadable is None:
        unreadable = ONE_GCD_UNREADABLE if name == "lumi-g-one-gcd" else ()
    merged = {**load(HOSTS / name), **facts}
    if env is not None:
        merged["env"] = dict(env)
    return replay(merged, Files(HOSTS / name, tuple(unreadable)))


def write_node(root: Path, node: int, values: Mapping[str, int], banks: Iterable[Mapping[str, int]] = ()) -> None:
    """Write one KFD node below `root` as the kernel shows it."""
    folder = root / NODES.lstrip("/") / str(node)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "properties").write_text("".join(f"{name} {value}\n" for name, value in values.items()))
    for index, bank in enumerate(banks):
        bank_folder = folder / "mem_banks" / str(index)
        bank_folder.mkdir(parents=True)
        (bank_folder / "properties").write_text("".join(f"{n} {v}\n" for n, v in bank.items()))


def amd(target: int = 90010, **values: int) -> dict[str, int]:
    """Return the properties of a GPU node."""
    return {"vendor_id": 4098, "gfx_target_version": target, "simd_count": 440, "simd_per_cu": 4} | values


CPU_NODE = {"cpu_cores_count": 64, "simd_count": 0, "vendor_id": 0, "gfx_target_version": 0}


def device(vendor: Any = "amd", arch: str = "gfx90a", /, *, problems: tuple[Reason, ...] = (), **host: Any) -> Device:
    """Return a device on a host of which nothing but `host` is known."""
    facts = Host("x86_64", "3.12", problems=problems, **host)
    return Device(vendor, arch, 0, f"a {arch}", facts)
