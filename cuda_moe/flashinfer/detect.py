"""Static facts of FlashInfer, from its files alone: importing it takes seconds and may touch the device."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portamoe.detection.distributions import version

#: The class attribute of artifacts.py that names the folder of the batched GEMMs, which trtllm-gen's MoE is made of.
_ARTIFACT = "TRTLLM_GEN_BMM"


def detect_flashinfer() -> dict[str, Any] | None:
    """Return the facts, None where no module `flashinfer` can be imported.

    version:    of the distribution flashinfer-python, None if the module came otherwise
    artifacts:  {"folder", "cubins": number of compiled kernels of trtllm-gen's MoE there}; nothing is downloaded
    nvcc:       {"path", "version"} of the compiler that FlashInfer's just-in-time kernels need, None if there is none
    problem:    what kept the files from being read, absent if nothing did
    """
    try:
        spec = importlib.util.find_spec("flashinfer")
    except (ImportError, ValueError, AttributeError):  # a stub in sys.modules
        return None
    if spec is None:
        return None
    facts: dict[str, Any] = {"version": version("flashinfer-python"), "nvcc": _nvcc(os.environ)}
    root = next(iter(spec.submodule_search_locations or ()), None)
    try:
        facts["artifacts"] = None if root is None else artifacts(Path(root), os.environ)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        facts["problem"] = f"{type(error).__name__}: {error}"
    return facts


def artifacts(root: Path, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return where the kernels of trtllm-gen's MoE lie and how many there are; None if artifacts.py names none.

    Order of the folders as in flashinfer/jit/env.py: FLASHINFER_CUBIN_DIR, the package flashinfer_cubin, the cache.
    """
    source = root / "artifacts.py"
    if not source.is_file():
        return None
    relative = _artifact_path(ast.parse(source.read_text(encoding="utf-8")))
    if relative is None:
        return None
    folder = _cubin_folder(env) / relative
    return {"folder": str(folder), "cubins": sum(1 for _ in folder.glob("*.cubin")) if folder.is_dir() else 0}


def _artifact_path(tree: ast.Module) -> str | None:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ClassDef) and node.name == "ArtifactPath"):
            continue
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id == _ARTIFACT:
                value = ast.literal_eval(item.value) if item.value is not None else None
                return value if isinstance(value, str) else None
    return None


def _cubin_folder(env: Mapping[str, str]) -> Path:
    if chosen := env.get("FLASHINFER_CUBIN_DIR"):
        return Path(chosen)
    try:
        package = importlib.util.find_spec("flashinfer_cubin")
    except (ImportError, ValueError, AttributeError):
        package = None
    if package is not None and package.submodule_search_locations:
        return Path(package.submodule_search_locations[0]) / "cubins"
    base = env.get("FLASHINFER_WORKSPACE_BASE") or env.get("HOME") or "/"
    return Path(base) / ".cache" / "flashinfer" / "cubins"


def _nvcc(env: Mapping[str, str]) -> dict[str, str | None] | None:
    """Return path and version of nvcc, read from version.json beside it: nothing is run."""
    homes = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := env.get(name))]
    found = next((home / "bin" / "nvcc" for home in homes if (home / "bin" / "nvcc").is_file()), None)
    if found is None:
        named = shutil.which("nvcc", path=env.get("PATH")) or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if named is None:
            return None
        found = Path(named)
    return {"path": str(found), "version": _toolkit_version(found.resolve().parent.parent)}


def _toolkit_version(home: Path) -> str | None:
    try:
        text = (home / "version.json").read_text(encoding="utf-8")
    except OSError:
        match = re.search(r"cuda-(\d+\.\d+)", str(home))
        return match[1] if match else None
    match = re.search(r'"cuda_nvcc"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"', text)
    return match[1] if match else None
