"""What AITER installation is there, found by looking at its files: nothing of it is imported or executed.

The import name `aiter` belongs to two projects: AMD's AI Tensor Engine (distribution `amd-aiter`) and the
async-iterator helpers that PyPI's `aiter` installs, whose version 0.13.20191203 is numerically newer than AMD's 0.1.2x.
Importing AMD's package compiles C++, runs rocminfo and raises RuntimeError or KeyError on hosts it does not know, so a
probe must not. None of this needs a GPU or /dev/kfd: it works while an image is being built.

Sources: ROCm/aiter v0.1.20, aiter/jit/core.py (directories and lock files), aiter/fused_moe.py (parameters),
csrc/include/aiter_enum.h (activations).
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Where AITER merges its tuned tables on the first fused MoE call; the path is fixed in AITER.
CONFIG_DIR = Path("/tmp/aiter_configs")  # noqa: S108 - AITER's own choice
#: A lock file this old belongs to no running build: AITER's longest single builds take minutes.
STALE_LOCK_SECONDS = 1800.0


def detect_aiter(
    search_path: Sequence[str] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    config_dir: Path = CONFIG_DIR,
    now: float | None = None,
) -> dict[str, Any] | None:
    """Return the static facts of the module that `import aiter` would load, or None if there is none.

    search_path:  folders to look in instead of sys.path
    env:          the environment that decides AITER's directories; default: this process's
    config_dir:   AITER's folder of merged tables
    now:          seconds since the epoch, to judge the age of lock files; default: the clock

    Keys: `is_amd`, `version`, `has_situv2`, `root`, `install` ("wheel", "develop" or "tree"), `distribution`,
    `parameters` (of fused_moe), `situv2_defaults`, `prebuilt` (how many compiled modules), `flydsl`, `jit_dir`,
    `jit_dir_writable`, `config_dir`, `config_dir_writable`; and only where there are any: `problem` (why the tree
    cannot be used), `locks` (old lock files).
    """
    root, problem = _find_root(search_path)
    if root is None:
        return None if problem is None else _facts(is_amd=False, problem=problem)
    if not (root / "jit" / "core.py").is_file() or not (root / "fused_moe.py").is_file():
        looks_like_amd = (root / "jit").is_dir() or (root / "fused_moe.py").is_file()
        distribution = (
            _distribution("amd-aiter", search_path) if looks_like_amd else _distribution("aiter", search_path)
        )
        return _facts(
            is_amd=looks_like_amd,
            problem=f"{root} lacks jit/core.py or fused_moe.py" if looks_like_amd else None,
            version=distribution,
            root=str(root),
            distribution="amd-aiter" if looks_like_amd else "aiter",
        )
    environ = os.environ if env is None else env
    facts = _facts(is_amd=True, root=str(root), **_amd_facts(root, search_path))
    jit_dir = _jit_dir(root, environ)
    facts |= {"jit_dir": str(jit_dir), "jit_dir_writable": _writable(jit_dir)}
    facts |= {"config_dir": str(config_dir), "config_dir_writable": _writable(config_dir)}
    if locks := _old_locks((config_dir, jit_dir / "build"), time.time() if now is None else now):
        facts["locks"] = locks
    return facts


def _facts(**known: Any) -> dict[str, Any]:
    facts = {"is_amd": False, "version": None, "has_situv2": False} | known
    return {name: value for name, value in facts.items() if name != "problem" or value is not None}


def _find_root(search_path: Sequence[str] | None) -> tuple[Path | None, str | None]:
    """Return the package folder, or None and what is there instead."""
    try:
        if search_path is None:
            spec = importlib.util.find_spec("aiter")
        else:
            spec = importlib.machinery.PathFinder.find_spec("aiter", list(search_path))
    except (ImportError, ValueError, AttributeError) as error:
        return None, f"looking for the module failed: {type(error).__name__}: {error}"
    if spec is None:
        return None, None
    if spec.origin is None or not spec.submodule_search_locations:
        where = ", ".join(spec.submodule_search_locations or ()) or spec.origin
        if spec.origin is not None:
            return None, f"{where} is a single file, not AMD's package"
        return None, f"{where} is a folder without __init__.py (a clone's parent folder on the path?)"
    return Path(spec.origin).parent, None


def _amd_facts(root: Path, search_path: Sequence[str] | None) -> dict[str, Any]:
    distribution = _distribution("amd-aiter", search_path)
    stranger = _distribution("aiter", search_path)
    out: dict[str, Any] = {
        "version": distribution or _version_file(root),
        "distribution": "amd-aiter" if distribution else ("aiter" if stranger else None),
        "install": _install_kind(root),
        "prebuilt": sum(1 for _ in (root / "jit").glob("*.so")),
        "flydsl": _distribution("flydsl", search_path),
    }
    if distribution and stranger:
        out["problem"] = (
            f"amd-aiter {distribution} and PyPI's unrelated aiter {stranger} are both installed, in one folder: "
            "one has overwritten files of the other"
        )
        return out
    try:
        source = (root / "fused_moe.py").read_text(encoding="utf-8")
        signature = _definition(source, "fused_moe")
        situv2 = _definition(source, "situv2")
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        out["problem"] = f"fused_moe.py cannot be parsed: {type(error).__name__}: {error}"
        return out
    if signature is None:
        out["problem"] = "fused_moe.py does not define fused_moe"
        return out
    out["parameters"] = [argument.arg for argument in _arguments(signature)]
    out["situv2_defaults"] = None if situv2 is None else _number_defaults(situv2)
    out["has_situv2"] = _enum_names_situv2(root, situv2 is not None)
    return out


def _distribution(name: str, search_path: Sequence[str] | None) -> str | None:
    if search_path is None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None
    for found in importlib.metadata.distributions(name=name, path=list(search_path)):
        return found.version
    return None


def _version_file(root: Path) -> str | None:
    """Read `_version.py`, which setuptools_scm writes into source trees."""
    try:
        text = (root / "_version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)|^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return next((group for group in found.groups() if group), None) if found else None


def _install_kind(root: Path) -> str:
    """A wheel brings its headers as `aiter_meta`; a development install sits beside `csrc`."""
    if (root.parent / "aiter_meta").is_dir():
        return "wheel"
    return "develop" if (root.parent / "csrc").is_dir() else "tree"


def _definition(source: str, name: str) -> ast.FunctionDef | None:
    """Parse one top-level function; the whole file has thousands of lines."""
    found = re.search(rf"^def {name}\(.*?(?=^[A-Za-z_@]|\Z)", source, re.MULTILINE | re.DOTALL)
    if found is None:
        return None
    node = ast.parse(found.group()).body[0]
    return node if isinstance(node, ast.FunctionDef) else None


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _number_defaults(function: ast.FunctionDef) -> list[float]:
    """Return the numeric defaults in order: (beta, linear_beta), 2.0 and 1.5 before 0.1.20, 4.0 and 25.0 since."""
    values = (default.value for default in function.args.defaults if isinstance(default, ast.Constant))
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _enum_names_situv2(root: Path, has_function: bool) -> bool:
    for header in (
        root.parent / "aiter_meta" / "csrc" / "include" / "aiter_enum.h",
        root.parent / "csrc" / "include" / "aiter_enum.h",
    ):
        if header.is_file():
            return re.search(r"\bSituv2\b", header.read_text(encoding="utf-8", errors="replace")) is not None
    return has_function


def _jit_dir(root: Path, env: Mapping[str, str]) -> Path:
    """Return the folder AITER compiles into: AITER_JIT_DIR, else the package's own, else a copy in the home folder."""
    if chosen := env.get("AITER_JIT_DIR"):
        return Path(chosen)
    own = root / "jit"
    if os.access(own, os.W_OK):
        return own
    return Path(env.get("HOME") or "/") / ".aiter" / "jit"


def _writable(path: Path) -> bool:
    """Would creating a file in `path` work, the folder itself made if need be? Creates nothing."""
    for folder in (path, *path.parents):
        if folder.exists():
            return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    return False


def _old_locks(folders: Sequence[Path], now: float) -> list[str]:
    """Return lock files on which AITER would wait although nobody builds any more."""
    out = []
    for folder in folders:
        try:
            entries = [*folder.glob("*.lock"), *folder.glob("lock_*")]
            out += [str(entry) for entry in entries if now - entry.stat().st_mtime > STALE_LOCK_SECONDS]
        except OSError:
            continue  # unreadable or gone while looking: `writable` reports what matters
    return sorted(out)
