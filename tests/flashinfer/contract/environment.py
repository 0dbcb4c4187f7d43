"""Make an environment with a real FlashInfer that imports on a CPU, and run the contract tests in it.

    python tests/flashinfer/contract/environment.py 0.7.2.post1 newest       # runs under the test environment's Python

The environment lies in that of the calling Python and sees its torch, Triton and pytest through a path file, so that
only FlashInfer, CuteDSL and a few small packages are fetched; FlashInfer's own requirements are CUDA's and would be
gigabytes. It serves all versions in turn. `newest` is what the package index offers.
"""

import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(os.environ.get("PORTAMOE_FLASHINFER_VENV") or Path(sys.prefix) / "flashinfer")
PYTHON = FOLDER / "bin" / "python"
#: What FlashInfer's import needs beside torch, Triton and numpy; the contract was recorded with CuteDSL 4.8.1.
NEEDED = (
    "apache-tvm-ffi>=0.1.11,<0.2",
    "click",
    "einops",
    "filelock",
    "ninja",
    "requests",
    "charset-normalizer",
    "idna",
    "urllib3",
    "certifi",
    "tabulate",
    "protobuf",
    "cuda-bindings>=12.8",
    "cuda-pathfinder",
    "nvidia-cutlass-dsl==4.8.1",
    "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1",
)


def main(versions: list[str]) -> int:
    """Install each version in turn and run the tests against it; the first failure is the exit status."""
    create()
    pip(*NEEDED)
    for version in versions:
        started = time.monotonic()
        wanted = "flashinfer-python" if version == "newest" else f"flashinfer-python=={version}"
        pip("--upgrade", wanted)
        say(f"{wanted} installed after {time.monotonic() - started:.0f} s")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLASHINFER_LOGGING_LEVEL": "ERROR"}
        tests = [PYTHON, "-m", "pytest", "-q", "tests/flashinfer/contract"]
        status = subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
        if status:
            return status
    return 0


def create() -> None:
    """Create the environment and let it see the calling Python's packages."""
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=True, clear=True)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER), "platbase": str(FOLDER)}))
    seen = [p for p in sys.path if p and Path(p).name in {"site-packages", "dist-packages"}]
    (purelib / "inherited.pth").write_text("".join(f"{folder}\n" for folder in seen))


def pip(*packages: str) -> None:
    """Install without dependencies and without compiling FlashInfer's thousands of files."""
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", *packages]
    subprocess.run(command, check=True, stdout=sys.stderr)


def say(text: str) -> None:
    """Print progress."""
    sys.stderr.write(f"flashinfer: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
