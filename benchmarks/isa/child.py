"""Compile every kernel variant for one AMD target and write what the code consists of, as JSON.

    python benchmarks/isa/child.py ARCH OUT.json [--specs EP8,TP8] [--keep DIR] [--only TEXT]

A process of its own for each target: LLVM aborts the whole process when it cannot select an instruction. Imports
Triton, needs no GPU and no driver. Binaries that two specs share are compiled once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def key_of(variant: Any) -> str:
    """Return what distinguishes a binary: kernel, types, constants and options."""
    name = variant.fn.fn.__name__
    parts = (dict(variant.signature), dict(variant.constexprs), dict(variant.attrs), dict(variant.options))
    return hashlib.sha256(repr((name, parts)).encode()).hexdigest()[:16]


def describe(variant: Any) -> dict[str, Any]:
    """Return the variant's facts that the report shows."""
    out: dict[str, Any] = {
        "key": key_of(variant),
        "name": variant.name,
        "step": variant.step,
        "kernel": variant.fn.fn.__name__,
        "constants": dict(variant.constexprs),
        "options": dict(variant.options),
        "tile": None,
    }
    if variant.tile is not None:
        constants = variant.constexprs
        out["tile"] = {"rows": constants["BM"], "columns": constants["BN"], "depth": constants["K"]}
    return out


def compile_variant(variant: Any, arch: str, keep: Path | None) -> dict[str, Any]:
    """Compile one variant; return its parsed code, or the error that the compiler raised."""
    from rocm_moe import triton_compat
    from rocm_moe.evidence import isa

    out = {**describe(variant), "arch": arch}
    started = time.perf_counter()
    try:
        kernel = triton_compat.compile_variant(variant, arch)
    except Exception as error:  # noqa: BLE001 - any compiler error is a finding of the report
        out["error"] = f"{type(error).__name__}: {str(error)[:400]}"
        return out
    out["seconds"] = round(time.perf_counter() - started, 2)
    out["shared"] = int(kernel.metadata.shared)
    out["warps"] = int(kernel.metadata.num_warps)
    out["sha256"] = hashlib.sha256(kernel.asm["hsaco"]).hexdigest()
    try:
        out["code"] = isa.parse(kernel.asm["amdgcn"]).to_dict()
    except ValueError as error:
        out["error"] = f"cannot be read: {error}"
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{out['key']}.s").write_text(kernel.asm["amdgcn"], encoding="utf-8")
        (keep / f"{out['key']}.hsaco").write_bytes(kernel.asm["hsaco"])
    return out


def compile_all(arch: str, specs: Mapping[str, Any], only: str, keep: Path | None) -> list[dict[str, Any]]:
    """Compile all variants of all `specs`, shared binaries once; each entry lists the specs that use it."""
    from rocm_moe.variants import kernel_variants

    found: dict[str, dict[str, Any]] = {}
    for spec_name, spec in specs.items():
        for variant in kernel_variants(arch, spec):
            if only not in variant.name:
                continue
            key = key_of(variant)
            if key not in found:
                found[key] = {**compile_variant(variant, arch, keep), "specs": []}
            found[key]["specs"].append(spec_name)
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch")
    parser.add_argument("out", type=Path)
    parser.add_argument("--specs", default="EP8,TP8,EP32,gpt-oss")
    parser.add_argument("--keep", type=Path, help="write assembler text and code objects there")
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    options = parser.parse_args()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    # Line information would put the checkout's path into the code object, and so into its hash.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    sys.path[:0] = [str(ROOT), str(ROOT / "common")]
    import triton

    from benchmarks.isa.shards import SPECS

    specs = {name: SPECS[name] for name in options.specs.split(",")}
    kernels = compile_all(options.arch, specs, options.only, options.keep)
    result = {"triton": triton.__version__, "arch": options.arch, "kernels": kernels}
    options.out.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
