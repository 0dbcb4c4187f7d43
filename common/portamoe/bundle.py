"""The bundle of `portamoe verify --bundle`: what a maintainer needs to trust figures from a machine that is not here.

A zip with one manifest that names every other file with its SHA-256:

manifest.json    schema, date, portamoe's version, device, spec, and "files": name -> sha256
probe.json       the report of `portamoe probe capabilities --json`: host, devices, all versions, decisions
results.json     every check of the acceptance set
verdicts.json    what the canaries found, each with its key
timings.json     tokens, µs and bytes of weights by backend
tuned/…          the tuned tables of the backends' packages as they were used
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portamoe.spec import MoESpec
from portamoe.whole_files import written_beside

#: Of the manifest; grows when a file changes its meaning or goes away.
SCHEMA = 1


def checked_target(name: str) -> Path:
    """Return where to write, after seeing that it can be written: a long run must not end in an error.

    Raises ValueError for a folder, OSError where the folder cannot be written.
    """
    path = Path(name).absolute()
    if path.is_dir():
        raise ValueError(f"--bundle {name} is a folder, expected the name of a zip file")
    if not path.parent.is_dir():
        raise NotADirectoryError(f"--bundle {name}: {path.parent} is no folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"--bundle {name}: {path.parent} cannot be written")
    return path


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the bundle of a report of `portamoe verify`; an existing file is replaced only when all is there."""
    files = contents(report)
    with written_beside(path) as beside, zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def contents(report: Mapping[str, Any]) -> dict[str, bytes]:
    """Return name -> bytes of every file, the manifest first."""
    from portamoe import __version__
    from portamoe.probe import capabilities

    device = report["device"]
    spec = MoESpec.from_dict(report["spec"])
    probe = capabilities(spec, device=device["torch_name"]).to_dict()
    checks = report["checks"]
    passed = [check for check in checks if check["status"] == "passed"]
    verdicts = [
        {"backend": c["backend"], **{name: c["figures"][name] for name in ("key", "verdict")}}
        for c in passed
        if "verdict" in c["figures"]
    ]
    timings = [{"backend": c["backend"], **c["figures"]} for c in passed if c["group"] == "timing"]
    files = {
        "probe.json": _json(probe),
        "results.json": _json(report),
        "verdicts.json": _json(verdicts),
        "timings.json": _json(timings),
        **_tuned({decision["package"] for decision in probe["backends"]}),
    }
    manifest = {
        "schema": SCHEMA,
        "date": report["started"],
        "portamoe": __version__,
        "device": device,
        "spec": report["spec"],
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    return {"manifest.json": _json(manifest), **files}


def _tuned(packages: set[str]) -> dict[str, bytes]:
    """Return the tuned tables that lie in the backends' packages, below tuned/<package>/."""
    out = {}
    for package in sorted(packages):
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            for file in sorted((Path(folder) / "tuned").glob("*.json")):
                out[f"tuned/{package}/{file.name}"] = file.read_bytes()
    return out


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()
