"""An environment inside the calling one, for contract tests against a real library.

It sees the calling Python's torch, Triton and pytest through a path file, so that only the library and what its
import needs are fetched: the library's own requirements are CUDA's and would be gigabytes.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def create(folder: Path) -> Path:
    """Create the environment if it is not there, let it see the calling Python's packages, and return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, clear=True)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    seen = [path for path in sys.path if path and Path(path).name in {"site-packages", "dist-packages"}]
    (purelib / "inherited.pth").write_text("".join(f"{path}\n" for path in seen))
    return python


def install(python: Path, *packages: str | Path) -> None:
    """Install without dependencies, and without compiling thousands of files, which takes longer than the tests."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", *packages]
    subprocess.run(command, check=True, stdout=sys.stderr)
