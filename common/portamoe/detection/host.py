"""Facts of the host's software, found without importing torch or any vendor package.

Versions come from the metadata of the distributions and from files of the packages, parsed as text. Each
function returns what a recording keeps under its name in host.json.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import mmap
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.decision import Reason
from portamoe.detection.distributions import version
from portamoe.detection.files import Files

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

#: Variables that change what this library, a vendor's runtime or its communication does.
ENV_PREFIXES = (
    "HIP_", "ROCR_", "HSA_", "ROCM_", "AITER_", "TRITON_", "TORCHINDUCTOR_", "CUDA_VISIBLE", "CUDA_DEVICE_ORDER",
    "CUDA_HOME", "NVIDIA_VISIBLE", "NVIDIA_DRIVER_CAP", "PORTAMOE_", "FLASHINFER_", "NCCL_", "MIOPEN_", "FI_",
    "GPU_DEVICE_ORDINAL", "SLURM_GPU", "XDG_CACHE_HOME",
)  # fmt: skip
_SECRET = re.compile(r"secret|token|api|access|passw|credential|private|key", re.I)

DISTRIBUTIONS = (
    "portamoe", "torch", "triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton", "safetensors",
    "packaging", "tqdm", "numpy", "nvidia-ml-py", "aiter", "amd-aiter", "flydsl", "flashinfer-python",
    "flashinfer-cubin", "flashinfer-jit-cache", "nvidia-cutlass-dsl", "nvidia-cuda-nvcc", "rocm", "rocm-sdk-core",
    "vllm",
)  # fmt: skip
#: The names under which the module `triton` is distributed; ROCm images use the later ones.
TRITON_NAMES = ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton")
#: Names of older targets stand in every ptxas, also in those that no longer assemble for them.
OLDEST_TARGET = 75
#: Packages that the vendor folders describe by their files: import name -> module and function that do.
VENDOR_FACTS: Mapping[str, tuple[str, str]] = {
    "aiter": ("rocm_moe.aiter.detect", "detect_aiter"),
    "flashinfer": ("cuda_moe.flashinfer.detect", "detect_flashinfer"),
}

#: Cache folders that need to be writable: variable -> default below the home directory or /tmp.
CACHES: Mapping[str, str] = {
    "PORTAMOE_CACHE_DIR": "~/.cache/portamoe",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor",  # noqa: S108 - torch's own default, only looked at
    "AITER_JIT_DIR": "~/.aiter/jit",
    "MIOPEN_USER_DB_PATH": "~/.config/miopen",
    "FLASHINFER_WORKSPACE_BASE": "~/.cache/flashinfer",
}
#: File systems on which lock files and renames between nodes fail (triton#11512; MIOpen on Lustre).
NETWORK_FILESYSTEMS = frozenset({"lustre", "nfs", "nfs4", "gpfs", "beegfs", "ceph", "cifs", "smb3"})


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter here; names and values that look like secrets are left out."""
    return {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(ENV_PREFIXES) and not _SECRET.search(name) and "@" not in value
    }


def machine() -> str:
    """Return the CPU architecture, "x86_64"."""
    return os.uname().machine


def python() -> str:
    """Return Python's minor version, "3.12"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def distributions() -> dict[str, str]:
    """Return name -> version of the installed distributions that matter here."""
    versions = ((name, version(name)) for name in DISTRIBUTIONS)
    return {name: found for name, found in versions if found is not None}


def importable(name: str) -> bool:
    """Return whether there is a top-level module of this name, without importing it."""
    return _module_spec(name) is not None


def _module_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a stub in sys.modules
        return None


def module_folder(name: str) -> Path | None:
    """Return the folder of a top-level package that could be imported, without importing it."""
    spec = _module_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def torch() -> dict[str, Any] | None:
    """Return torch's version, hip and cuda as its version.py says, None where torch cannot be imported."""
    folder = module_folder("torch")
    if folder is None:
        return None
    values = _constants(folder / "version.py", ("__version__", "hip", "cuda"))
    return {
        "version": values.get("__version__") or version("torch"),
        "hip": values.get("hip"),
        "cuda": values.get("cuda"),
    }


def triton() -> str | None:
    """Return the version of the module `triton`, whatever distribution brought it; None if there is none."""
    folder = module_folder("triton")
    if folder is None:
        return None
    own = _constants(folder / "__init__.py", ("__version__",)).get("__version__")
    return own or next((found for found in map(version, TRITON_NAMES) if found), "unknown")


def _constants(path: Path, names: Sequence[str]) -> dict[str, str | None]:
    """Return the string constants that a Python file assigns to `names`, found in its text."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    out: dict[str, str | None] = {}
    for name in names:
        match = re.search(rf"^{name}\s*(?::[^=\n]+)?=\s*(.+?)\s*(?:#.*)?$", text, re.M)
        if not match:
            continue
        try:
            value = ast.literal_eval(match[1])
        except (ValueError, SyntaxError):
            continue
        out[name] = value if isinstance(value, str) else None
    return out


def system(files: Files) -> str | None:
    """Return kernel and distribution, "Linux 6.1.0-18-amd64, Debian GNU/Linux 12 (bookworm)"."""
    kernel = (files.readable_text("/proc/sys/kernel/osrelease") or "").strip()
    name = re.search(r'^PRETTY_NAME="?([^"\n]+)', files.readable_text("/etc/os-release") or "", re.M)
    return ", ".join(part for part in (f"Linux {kernel}" if kernel else "", name[1] if name else "") if part) or None


def rocm(kfd: str, amd: bool, driver: str | None) -> dict[str, Any] | None:
    """Return ROCm's version (its version file or TheRock's wheels), the state of /dev/kfd and the driver.

    amd:     the kernel's AMD driver is there
    driver:  its version; the in-tree amdgpu has none

    None where there is neither driver nor ROCm.
    """
    found = _rocm_version()
    if found is None and kfd == "absent" and not amd:
        return None
    return {"version": found, "kfd": kfd, "driver": driver}


def _rocm_version() -> str | None:
    folders = [Path(os.environ[name]) for name in ("ROCM_PATH", "ROCM_HOME") if os.environ.get(name)]
    folders += [Path("/opt/rocm"), *sorted(Path("/opt").glob("rocm-*"), reverse=True)]
    for folder in folders:
        try:
            return (folder / ".info/version").read_text(encoding="utf-8").strip().split("-")[0]
        except (OSError, UnicodeDecodeError):
            continue
    return version("rocm-sdk-core") or version("rocm")


def vendor() -> dict[str, Any]:
    """Return the static facts that the vendor packages find about aiter and flashinfer, and Triton's version."""
    out = {name: _vendor_facts(name, *described) for name, described in VENDOR_FACTS.items()}
    return out | {"triton": triton()}


def _vendor_facts(name: str, module: str, function: str) -> dict[str, Any] | None:
    """Return what `module` finds about the package `name`; None without the package or the vendor folder."""
    if not importable(name):
        return None
    try:
        described = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return None
    facts: dict[str, Any] | None = getattr(described, function)()
    return facts


def ptxas() -> dict[str, Any] | None:
    """Return version and targets of the assembler Triton would use for the newest devices, by reading the file.

    The binary is not run: its version line and its list of targets stand in it as text.
    """
    for path in _ptxas_paths():
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                at = data.find(b"Cuda compilation tools, release ")
                if at < 0:
                    continue
                release = re.match(rb"[^\d]*([\d.]+)", data[at : at + 64])
                window = data[at : at + (8 << 20)]
        except (OSError, ValueError):  # absent, unreadable or empty
            continue
        found = {(int(number), family) for number, family in re.findall(rb"sm_(\d{2,3})([af]?)\0", window)}
        return {
            "version": release[1].decode() if release else None,
            "targets": [f"sm_{n}{family.decode()}" for n, family in sorted(found) if n >= OLDEST_TARGET],
            "path": str(path),
        }
    return None


def _ptxas_paths() -> list[Path]:
    named = [os.environ.get(n) for n in ("TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH")]
    paths = [Path(name) for name in named if name]
    if folder := module_folder("triton"):
        paths += [folder / "backends/nvidia/bin" / name for name in ("ptxas-blackwell", "ptxas")]
    if folder := module_folder("nvidia"):
        paths += sorted(folder.glob("cu1*/bin/ptxas"), reverse=True)
    home = os.environ.get("CUDA_HOME")
    return [*paths, Path(home or "/usr/local/cuda") / "bin/ptxas"]


def caches(env: Mapping[str, str], mounts: str) -> dict[str, dict[str, Any]]:
    """Return for each cache folder: path, whether it is or could be written, its file system.

    mounts:  text of /proc/self/mounts
    """
    systems = _mounts(mounts)
    out = {}
    for name, default in CACHES.items():
        path = Path(env.get(name) or default)
        path = Path(os.path.expanduser(path)).absolute()  # noqa: PTH111 - Path.expanduser raises without a home
        mount = max((m for m in systems if path.is_relative_to(m)), key=len, default=None)
        out[name] = {
            "path": str(path),
            "writable": _writable(path),
            "set": name in env,
            "filesystem": systems[mount] if mount else None,
        }
    return out


def _mounts(text: str) -> dict[str, str]:
    fields = (line.split() for line in text.splitlines())
    return {f[1].replace("\\040", " "): f[2] for f in fields if len(f) > 2}


def _writable(path: Path) -> bool:
    """Could a process of this user make and write `path`? Nothing is written."""
    existing = next((p for p in (path, *path.parents) if p.exists()), None)
    return existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def software_problems(facts: Mapping[str, Any]) -> list[Reason]:
    """Return what looks odd about the software of a host, live or recorded."""
    out = []
    installed = [n for n in TRITON_NAMES if n in (facts.get("distributions") or {})]
    if len(installed) > 1:
        out.append(
            Reason(
                "triton",
                " and ".join(installed),
                "one distribution of the module",
                "uninstall both and install the one that belongs to torch",
            )
        )
    for name, cache in (facts.get("caches") or {}).items():
        if cache.get("filesystem") in NETWORK_FILESYSTEMS:
            remedy = f"set {name} to a folder on the node, below /tmp"
            value = f"{cache['path']} on {cache['filesystem']}"
            out.append(Reason(name, value, "a local file system (locks and renames)", remedy))
    return out
