"""Validate a bundle of `portamoe verify --bundle` and say which modelled cells of the tuned tables it has measured.

    python scripts/validate_bundle.py BUNDLE.zip [--write]

Checks the files against the manifest, the schema, that probe, results, verdicts and timings are of one device with one
set of versions, that every check passed, and that no timing is faster than the device's memory. With --write the cells
of rocm_moe/tuned/<arch>.json that the timings went through are marked as measured, with date, device and command.
Exit codes: 0 valid; 1 not; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from portamoe import bundle
from portamoe.spec import MoESpec
from rocm_moe import tiles

REQUIRED = ("probe.json", "results.json", "verdicts.json", "timings.json")
#: Bytes a second that a device can read, from the vendors' data sheets: one GCD of MI250X, MI300X or MI325X, MI355X,
#: RX 7900 XTX, RX 9070 XT, A100 80 GB, RTX 4090, H200, B200 and GB300, Rubin, RTX 5090.
PEAK_BYTES = {
    "gfx90a": 1.64e12,
    "gfx942": 6.0e12,
    "gfx950": 8.0e12,
    "gfx1100": 0.96e12,
    "gfx1201": 0.64e12,
    "sm_80": 2.04e12,
    "sm_89": 1.01e12,
    "sm_90": 4.8e12,
    "sm_100": 8.0e12,
    "sm_103": 8.0e12,
    "sm_107": 22.0e12,
    "sm_120": 1.8e12,
}
#: The backend whose tiles come from rocm_moe/tuned.
TILED = "triton_unfused"
COMMAND = "portamoe verify --bundle"
#: The most bytes of all files together: a bundle has some hundred kilobytes.
MOST_BYTES = 1 << 26


class InvalidBundle(ValueError):
    """The file is no bundle that could be looked at further."""


def main(argv: Sequence[str] | None = None) -> int:
    """Validate, print what was found, and write with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--write", action="store_true", help="mark the measured cells in rocm_moe/tuned")
    args = parser.parse_args(argv)
    try:
        files = read(args.bundle)
    except InvalidBundle as error:
        print(f"invalid: {error}", file=sys.stderr)
        return 1
    faults = problems(files)
    for fault in faults:
        print(f"invalid: {fault}", file=sys.stderr)
    if faults:
        return 1
    manifest = files["manifest.json"]
    device = manifest["device"]
    print(f"valid: {device['name']} ({device['arch']}), portamoe {manifest['portamoe']}, {manifest['date']}")
    cells, why_not = measured_cells(files)
    path = Path(tiles.__file__).parent / "tuned" / f"{tiles.table_file(device['arch'])}.json"
    if why_not:
        print(f"no cell becomes measured: {why_not}")
    for index, timings in cells.items():
        figures = ", ".join(f"{t['tokens']} tokens {t['us']:.1f} µs" for t in timings)
        print(f"measured: {path.name} cell {index}: {figures}")
    if args.write and cells:
        write_cells(path, cells, manifest)
        print(f"written: {path}")
    return 0


def read(path: Path) -> dict[str, Any]:
    """Return name -> parsed JSON of every file, after comparing each with the manifest; raises InvalidBundle."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
                raise InvalidBundle(f"{path} unpacks to more than {MOST_BYTES} bytes")
            raw = {name: archive.read(name) for name in archive.namelist()}
            files = {name: json.loads(data) for name, data in raw.items()}
    except (OSError, zipfile.BadZipFile, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidBundle(f"{path}: {error}") from error
    manifest = files.get("manifest.json")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise InvalidBundle("manifest.json is missing or names no files")
    if manifest.get("schema") != bundle.SCHEMA:
        raise InvalidBundle(f"schema {manifest.get('schema')!r}, this version reads {bundle.SCHEMA}")
    named = manifest["files"]
    if set(named) != set(raw) - {"manifest.json"}:
        differ = sorted(set(named) ^ (set(raw) - {"manifest.json"}))
        raise InvalidBundle(f"manifest and archive differ in {', '.join(differ)}")
    if missing := [name for name in REQUIRED if name not in named]:
        raise InvalidBundle(f"lacks {', '.join(missing)}")
    if changed := [name for name in named if hashlib.sha256(raw[name]).hexdigest() != named[name]]:
        raise InvalidBundle(f"{', '.join(changed)} changed since the manifest was written")
    return files


def problems(files: Mapping[str, Any]) -> list[str]:
    """Return what contradicts itself or cannot be true."""
    try:
        return [
            *_device_problems(files),
            *_result_problems(files),
            *_verdict_problems(files),
            *_timing_problems(files),
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return [f"not of the expected form: {type(error).__name__}: {error}"]


def _device_problems(files: Mapping[str, Any]) -> list[str]:
    manifest, results = files["manifest.json"], files["results.json"]
    device = manifest["device"]
    out = []
    if results["device"] != device:
        out.append("results are of another device than the manifest")
    if results["spec"] != manifest["spec"] or results["started"] != manifest["date"]:
        out.append("results are of another run than the manifest")
    asked = [d for d in files["probe.json"]["devices"] if d["asked"]]
    for name in ("arch", "name", "uuid", "memory_bytes", "compute_units", "vendor"):
        if [d[name] for d in asked] != [device[name]]:
            out.append(f"{name} of the probe is {[d[name] for d in asked]}, of the manifest {device[name]!r}")
    if files["probe.json"]["host"]["recorded"]:
        out.append("the probe was replayed from a recording")
    return out


def _result_problems(files: Mapping[str, Any]) -> list[str]:
    results = files["results.json"]
    if results["complete"] is not True:
        return ["the run ended early"]
    failed = [f"{c['backend']} {c['group']} {c['case']}" for c in results["checks"] if c["status"] == "failed"]
    if failed:
        return [f"failed checks: {', '.join(failed)}"]
    if results["passed"] is not True:
        return ["nothing was checked"]
    return []


def _verdict_problems(files: Mapping[str, Any]) -> list[str]:
    arch, toolchain = files["manifest.json"]["device"]["arch"], files["probe.json"]["toolchain"]
    out = []
    for entry in files["verdicts.json"]:
        key, backend = entry["key"], entry["backend"]
        if key["backend"] != backend or key["arch"] != arch:
            out.append(f"a verdict of {backend} is about {key['backend']} on {key['arch']}, not on {arch}")
        if entry["verdict"]["passed"] is not True:
            out.append(f"a verdict of {backend} did not pass")
        for name, version in key["versions"].items():
            if name in toolchain["distributions"] and toolchain["distributions"][name] != version:
                out.append(f"a verdict of {backend} has {name} {version}, the probe {toolchain['distributions'][name]}")
    return sorted(set(out))


def _timing_problems(files: Mapping[str, Any]) -> list[str]:
    device = files["manifest.json"]["device"]
    checked = {entry["backend"] for entry in files["verdicts.json"]}
    recorded = {
        (c["backend"], c["figures"]["tokens"], c["figures"]["us"])
        for c in files["results.json"]["checks"]
        if c["group"] == "timing" and c["status"] == "passed"
    }
    peak, out = PEAK_BYTES.get(device["arch"]), []
    for entry in files["timings.json"]:
        what = f"timing of {entry['backend']} at {entry['tokens']} tokens"
        MoESpec.from_dict(entry["spec"])
        if not math.isfinite(entry["us"]) or entry["us"] <= 0 or entry["provenance"] != "measured":
            out.append(f"{what}: {entry['us']} µs, {entry['provenance']}")
            continue
        if (entry["backend"], entry["tokens"], entry["us"]) not in recorded:
            out.append(f"{what} is not among the results")
        if entry["backend"] not in checked:
            out.append(f"{what}: no canary of it passed")
        rate = entry["weight_bytes"] / entry["us"] * 1e6
        if peak is not None and rate > peak:
            out.append(f"{what}: {rate / 1e12:.2f} TB/s of weights, {device['arch']} reads {peak / 1e12:.2f} TB/s")
    return out


def measured_cells(files: Mapping[str, Any]) -> tuple[dict[int, list[Any]], str | None]:
    """Return cell -> the timings that went through it, and why there are none."""
    device = files["manifest.json"]["device"]
    arch, table_name = device["arch"], tiles.table_file(device["arch"])
    if device["vendor"] == "cpu":
        return {}, "a CPU runs no tiles"
    if "PORTAMOE_TUNED_DIR" in files["probe.json"]["host"]["env"]:
        return {}, "PORTAMOE_TUNED_DIR was set, so other tiles may have been used"
    path = Path(tiles.__file__).parent / "tuned" / f"{table_name}.json"
    if not path.is_file():
        return {}, f"there is no table for {arch}"
    ours = json.loads(path.read_text(encoding="utf-8"))
    if ours["arch"] != arch:
        return {}, f"{path.name} is the table of {ours['arch']}, {arch} only borrows it"
    theirs = files.get(f"tuned/rocm_moe/{path.name}")
    if theirs is None or _tiles_of(theirs) != _tiles_of(ours):
        return {}, f"the tiles of {path.name} changed since the bundle was made"
    table = tiles.read_table(path, arch)
    out: dict[int, list[Any]] = {}
    for entry in files["timings.json"]:
        if entry["backend"] == TILED:
            cell = table.cell(MoESpec.from_dict(entry["spec"]), entry["tokens"])
            out.setdefault(table.cells.index(cell), []).append(entry)
    return dict(sorted(out.items())), None if out else f"no timing is of {TILED}"


def _tiles_of(table: Mapping[str, Any]) -> list[Any]:
    return [{name: cell[name] for name in ("rows_per_expert", "tokens", "gemm1", "gemm2")} for cell in table["cells"]]


def write_cells(path: Path, cells: Mapping[int, Sequence[Any]], manifest: Mapping[str, Any]) -> None:
    """Mark cells of a tuned table as measured; once all are, the table is."""
    table = json.loads(path.read_text(encoding="utf-8"))
    origin = {
        "date": manifest["date"][:10],
        "device": manifest["device"]["name"],
        "command": f"{COMMAND} (portamoe {manifest['portamoe']})",
    }
    for index, timings in cells.items():
        figures = [{"tokens": t["tokens"], "us": round(t["us"], 2)} for t in timings]
        table["cells"][index] |= {"provenance": "measured", **origin, "timings": figures}
    if all(cell.get("provenance") == "measured" for cell in table["cells"]):
        table |= {"provenance": "measured", **origin}
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(to_text(table), encoding="utf-8")
    beside.replace(path)


def to_text(table: Mapping[str, Any]) -> str:
    """Return the table's JSON with a line for each product of a cell, so that changes read well."""
    head = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in table.items() if name != "cells"]
    cells = []
    for cell in table["cells"]:
        rest = {name: value for name, value in cell.items() if name not in ("gemm1", "gemm2")}
        parts = [json.dumps(rest, ensure_ascii=False)[1:-1]]
        parts += [f'"{name}": {json.dumps(cell[name])}' for name in ("gemm1", "gemm2")]
        cells.append("  {" + ",\n   ".join(parts) + "}")
    return "\n".join(["{", *head, ' "cells": [', ",\n".join(cells), " ]", "}"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
