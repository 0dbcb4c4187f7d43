"""Make .venv ready for a make target, using the torch and Triton that are already there.

    python3 scripts/bootstrap.py run|test|dev

An importable torch or Triton of the calling Python (a ROCm or CUDA image's, the user's own) is inherited and never
replaced: .venv then sees that Python's packages through a path file, and pip is held to their exact versions. Only
where torch is not importable is it installed, then Triton if torch did not bring one, then the project.
Standard library only, since it runs before anything is installed. Messages go to stderr.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("PORTAMOE_VENV", ROOT / ".venv"))
PYTHON = VENV / "bin" / "python"

#: One pin for torch. A CUDA build of it names the Triton that it needs, so none is pinned beside it.
TORCH = "torch==2.13.0"
#: For a torch that brings no Triton (the CPU builds), installed in a step of its own.
TRITON = "triton==3.9.0"

EXTRAS = {"run": "", "test": "[test]", "dev": "[dev]"}
#: Distributions that carry the modules torch and triton; whichever is there must stay as it is.
KEEP = ("torch", "triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton")


def main(target: str) -> None:
    """Create or update .venv for `target`."""
    stamp = VENV / f".ready-{target}"
    wanted = fingerprint(target)
    if stamp.is_file() and stamp.read_text() == wanted and PYTHON.exists():
        return
    if not PYTHON.exists():
        create_venv()
    if not importable(PYTHON, "torch"):
        say(f"no importable torch: installing {TORCH}")
        pip("install", TORCH, "numpy")  # torch warns at every start where numpy is missing
    if not importable(PYTHON, "triton"):
        say(f"this torch brought no Triton: installing {TRITON}")
        pip("install", TRITON)
    pip("install", "--editable", f"{ROOT}{EXTRAS[target]}", "--constraint", str(write_constraints()))
    stamp.write_text(wanted)


def fingerprint(target: str) -> str:
    """Return a hash of what decides the environment's content."""
    parts = [target, TORCH, TRITON, sys.executable, sys.version, (ROOT / "pyproject.toml").read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def create_venv() -> None:
    """Create .venv; let it see the calling Python's packages if those hold torch or Triton."""
    say(f"creating {VENV}")
    try:
        venv.create(VENV, with_pip=True, clear=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"bootstrap: cannot create {VENV}: {error}. Debian and Ubuntu keep ensurepip in the package python3-venv"
        ) from error
    here = Path(sys.executable)
    if not (importable(here, "torch") or importable(here, "triton")):
        return
    folders = [p for p in sys.path if p and Path(p).name in {"site-packages", "dist-packages"}]
    say(f"using the torch or Triton of {here} ({', '.join(folders)})")
    purelib = sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)})
    (Path(purelib) / "inherited.pth").write_text("".join(f"{folder}\n" for folder in folders))


def importable(python: Path, module: str) -> bool:
    """Return whether `python` really imports `module`; a package that is there but broken is not importable."""
    done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False, cwd=VENV.parent)
    return done.returncode == 0


def write_constraints() -> Path:
    """Pin torch and Triton to what .venv sees now, so that no dependency can move them."""
    code = (
        "import importlib.metadata as m\n"
        f"for name in {KEEP!r}:\n"
        "    try: print(f'{name}=={m.version(name)}')\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    path = VENV / "constraints.txt"
    path.write_text(subprocess.run([PYTHON, "-c", code], capture_output=True, check=True, text=True).stdout)
    return path


def pip(*arguments: str) -> None:
    """Run .venv's pip; stop with its exit status if it fails."""
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    done = subprocess.run(command, check=False, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f"bootstrap: pip {' '.join(arguments)} failed with exit status {done.returncode}")


def say(text: str) -> None:
    """Print progress."""
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in EXTRAS:
        raise SystemExit(__doc__)
    main(sys.argv[1])
