"""Installations of `aiter` on disk, as small as static detection and a strict call need them.

AMD's trees take the signature of the version from contract.json and compute through strict_moe.py, which is copied into
them, so that they also work in a child process.
"""

import json
import shutil
from pathlib import Path

HERE = Path(__file__).parent
CONTRACT = json.loads((HERE / "contract.json").read_text(encoding="utf-8"))
#: The main branch of 2026-08-22 calls itself this.
MAIN = "0.1.21.dev7+ge4048607a"
VERSIONS = ("0.1.18", "0.1.19", "0.1.19.post2", "0.1.20", "0.1.20.post1", MAIN)

_ENUM_PY = """
from enum import IntEnum

class ActivationType(IntEnum):
{activations}

class QuantType(IntEnum):
{quants}
"""

_FUSED_MOE_PY = """
from __future__ import annotations

from enum import Enum
from typing import Optional

import torch

from aiter import _strict
from aiter.ops.enum import ActivationType, QuantType

CALLS = []

class GateMode(Enum):
{gate_modes}

def fused_moe{signature}:
    call = dict(locals())
    CALLS.append(call)
    return _strict.fused_moe(call, {release})

{situv2}
"""


def amd_tree(site: Path, version: str, *, wheel: bool = True, distribution: bool = True) -> Path:
    """Write AMD's package of `version` into `site`; return the package folder."""
    root = site / "aiter"
    (root / "jit").mkdir(parents=True)
    (root / "ops").mkdir()
    release = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:3])
    tag = tag_of(version)
    activations = dict(CONTRACT["enums"]["ActivationType"])
    if release >= (0, 1, 19):
        activations |= CONTRACT["enums"]["ActivationType since v0.1.19"]
    (root / "__init__.py").write_text("from aiter.ops.enum import ActivationType, QuantType\n")
    (root / "ops" / "__init__.py").write_text("")
    (root / "ops" / "enum.py").write_text(
        _ENUM_PY.format(activations=_members(activations), quants=_members(CONTRACT["enums"]["QuantType"]))
    )
    (root / "jit" / "core.py").write_text("# stands for AITER's just-in-time compiler\n")
    signature = record("fused_moe", tag)
    situv2 = record("situv2", tag)
    (root / "fused_moe.py").write_text(
        _FUSED_MOE_PY.format(
            gate_modes=_members(CONTRACT["enums"]["GateMode"]),
            signature=signature,
            release=release,
            situv2="" if situv2 is None else f"def situv2{situv2}:\n    raise NotImplementedError\n",
        )
    )
    shutil.copy(HERE / "strict_moe.py", root / "_strict.py")
    include = (site / "aiter_meta" if wheel else site) / "csrc" / "include"
    include.mkdir(parents=True)
    enums = {"ActivationType": activations, "QuantType": CONTRACT["enums"]["QuantType"]}
    (include / "aiter_enum.h").write_text("\n".join(_cpp_enum(name, members) for name, members in enums.items()))
    (root / "ops" / "flydsl").mkdir()
    gate_modes = _members(CONTRACT["enums"]["GateMode"])
    (root / "ops" / "flydsl" / "moe_common.py").write_text(f"class GateMode:\n{gate_modes}\n")
    if distribution:
        dist_info(site, "amd-aiter", version)
        dist_info(site, "flydsl", "0.3.1")
    else:
        (root / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return root


def impostor_tree(site: Path) -> Path:
    """Write what PyPI's `aiter` installs: helpers for asynchronous iterators, with the higher version number."""
    root = site / "aiter"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text(
        "def map_aiter(f, it): ...\n\ndef join_aiters(it): ...\n\n__version__ = '0.13.20191203'\n"
    )
    dist_info(site, "aiter", "0.13.20191203")
    return root


def pypi_amd_tree(site: Path) -> Path:
    """Write AMD's own package as PyPI has it: 0.1.7, long before SiTU and gate modes."""
    root = amd_tree(site, "0.1.18", distribution=False)
    (root / "_version.py").unlink()
    dist_info(site, "amd-aiter", "0.1.7.post2.dev18")
    dist_info(site, "flydsl", "0.3.1")
    return root


def raising_tree(site: Path, statement: str, version: str = "0.1.20") -> Path:
    """Write AMD's package whose import runs `statement`, such as a `raise`."""
    root = amd_tree(site, version)
    (root / "__init__.py").write_text(f"import os\n{statement}\n")
    return root


def dist_info(site: Path, name: str, version: str) -> None:
    """Write the metadata that importlib.metadata finds for a distribution."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _cpp_enum(name: str, members: dict) -> str:
    body = ",\n    ".join(f"{member} = {value}" for member, value in members.items())
    return f"enum class {name} : int\n{{\n    {body}\n}};\n"


def _members(names: dict) -> str:
    return "\n".join(f"    {name} = {value!r}" for name, value in names.items())


def tag_of(version: str) -> str:
    """Return the key of contract.json for a version; what is newer than the recorded releases counts as main."""
    release = version.split("+", maxsplit=1)[0]
    return "main" if "dev" in release or _key(release) >= (0, 1, 21) else f"v{release}"


def record(name: str, tag: str) -> str | None:
    """Return the signature that holds at `tag`."""
    position = _key(tag)
    return [r["signature"] for r in CONTRACT[name] if _key(r["since"]) <= position][-1]


def _key(tag: str) -> tuple[int, ...]:
    if tag.startswith("main"):
        return (9,)
    return tuple(int(part.removeprefix("post")) for part in tag.removeprefix("v").split("."))
