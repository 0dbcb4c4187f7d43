"""Make an environment with a real vLLM that imports on a CPU, and run the contract tests in it.

    python tests/vllm/contract/environment.py 0.33.0 0.32.0       # runs under the test environment's Python

The environment lies in that of the calling Python and sees its torch and pytest through a path file, so that only vLLM
and the packages of requirements.txt are fetched, 700 MB; vLLM's own requirements are CUDA's and would be gigabytes.
Environments of other versions than NEWEST are deleted after their tests.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NEWEST = "0.33.0"
BASE = Path(os.environ.get("PORTAMOE_VLLM_VENV") or Path(sys.prefix) / "vllm")


def main(versions: list[str]) -> int:
    """Install and test each version in turn; the first failure is the exit status."""
    for version in versions or [NEWEST]:
        folder = BASE if version == NEWEST else BASE.with_name(f"{BASE.name}-{version}")
        started = time.monotonic()
        install(folder, version)
        say(f"vllm {version} installed after {time.monotonic() - started:.0f} s")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PORTAMOE_VLLM_CONTRACT": "1"}
        for name in ("TRITON_INTERPRET", "VLLM_PLUGINS", "PORTAMOE_VLLM", "PORTAMOE_BACKEND"):
            environment.pop(name, None)
        tests = [folder / "bin" / "python", "-m", "pytest", "-q", HERE]
        status = subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
        say(f"vllm {version} tested after {time.monotonic() - started:.0f} s: {'failed' if status else 'passed'}")
        if folder != BASE:
            shutil.rmtree(folder)
        if status:
            return status
    return 0


def install(folder: Path, version: str) -> None:
    """Create the environment, let it see the calling Python's packages, and install what is not there yet."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, clear=True)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    seen = [p for p in sys.path if p and Path(p).name in {"site-packages", "dist-packages"}]
    (purelib / "inherited.pth").write_text("".join(f"{path}\n" for path in seen))
    pip(python, f"vllm=={version}")
    pip(python, "-r", HERE / "requirements.txt")
    # For the entry point; its build backend is the calling environment's.
    pip(python, "--no-build-isolation", "--editable", ROOT)


def pip(python: Path, *packages: str | Path) -> None:
    """Install without dependencies; compiling vLLM's thousands of files would take longer than the tests."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", *packages]
    subprocess.run(command, check=True, stdout=sys.stderr)


def say(text: str) -> None:
    """Print progress."""
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
