"""Fail an image's build if its torch or its assembler cannot serve the GPUs that the image is for.

    python check_base.py rocm gfx90a [gfx942 …]     torch has code for every named architecture
    python check_base.py cuda 10.7 --ptxas FILE     torch has code or PTX for that capability, ptxas assembles for it

No GPU is needed: torch's architecture list is a constant of its build. AITER is not looked at, since importing it runs
rocminfo, which needs /dev/kfd.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

#: An empty kernel. 9.4 is the PTX version from which ptxas accepts sm_107 targets (CUDA 13.4); 9.3 is refused.
PTX = """.version 9.4
.target sm_{arch}
.address_size 64
.visible .entry nothing() {{ ret; }}
"""


def main() -> None:
    """Check what the command line names; print what was found."""
    parser = argparse.ArgumentParser(description="Check an image's torch and assembler against its GPUs.")
    vendors = parser.add_subparsers(dest="vendor", required=True)
    rocm = vendors.add_parser("rocm")
    rocm.add_argument("archs", nargs="+", metavar="gfx…")
    cuda = vendors.add_parser("cuda")
    cuda.add_argument("capability", help="compute capability, such as 10.7")
    cuda.add_argument("--ptxas", type=Path, required=True)
    args = parser.parse_args()
    if args.vendor == "rocm":
        found = [check_rocm(args.archs)]
    else:
        major, minor = (int(part) for part in args.capability.split("."))
        found = [check_cuda(major, minor), check_ptxas(args.ptxas, f"{major}{minor}")]
    sys.stdout.write("".join(f"{line}\n" for line in found))


def check_rocm(archs: list[str]) -> str:
    """Return a line about torch's code for `archs`; raise SystemExit if one is missing."""
    if torch.version.hip is None:
        raise SystemExit(f"check: torch {torch.__version__} is not a ROCm build; use another BASE_IMAGE")
    built = [flag.split(":")[0] for flag in arch_flags()]
    if missing := [arch for arch in archs if arch not in built]:
        raise SystemExit(
            f"check: torch {torch.__version__} has no code for {', '.join(missing)}, only for {', '.join(built)}; "
            "use another BASE_IMAGE or ROCM_ARCH"
        )
    return f"check: torch {torch.__version__} (HIP {torch.version.hip}) has code for {', '.join(archs)}"


def check_cuda(major: int, minor: int) -> str:
    """Return how torch's code reaches a device of capability `major`.`minor`; raise SystemExit if it does not."""
    if torch.version.cuda is None:
        raise SystemExit(f"check: torch {torch.__version__} is not a CUDA build; set TORCH and TORCH_INDEX_URL")
    built = arch_flags()
    ways = [way for flag in built if (way := loadable(flag, major, minor))]
    if not ways:
        raise SystemExit(
            f"check: a {major}.{minor} device can load nothing of torch {torch.__version__}, which is built for "
            f"{', '.join(built)}; set TORCH and TORCH_INDEX_URL to a build with sm_{major}0 or older PTX"
        )
    return f"check: torch {torch.__version__} (CUDA {torch.version.cuda}) reaches {major}.{minor} by {'; '.join(ways)}"


def loadable(flag: str, major: int, minor: int) -> str | None:
    """Return why a device of that capability loads code built as `flag`, or None.

    CUDA's rules: PTX without suffix runs on every later device, PTX with `f` on later ones of its family, PTX with `a`
    on its own device only; machine code runs on devices of the same major and the same or a later minor number.
    Machine code with `f` is not counted: that it loads across the family is not established for 10.7.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", flag)
    if match is None:
        return None
    kind, own_major, own_minor, suffix = match[1], int(match[2]), int(match[3]), match[4]
    if (own_major, own_minor) == (major, minor):
        return f"{flag} (exact)"
    earlier = (own_major, own_minor) < (major, minor)
    earlier_in_family = earlier and own_major == major
    if kind == "compute" and ((earlier and not suffix) or (earlier_in_family and suffix == "f")):
        return f"{flag} (PTX)"
    if kind == "sm" and earlier_in_family and not suffix:
        return f"{flag} (machine code of an earlier minor number)"
    return None


def arch_flags() -> list[str]:
    """Return the architectures that torch was built for, without asking for a device."""
    return str(torch._C._cuda_getArchFlags() or "").split()


def check_ptxas(ptxas: Path, arch: str) -> str:
    """Return a line about `ptxas`; raise SystemExit unless it assembles an empty kernel for sm_`arch`."""
    if not ptxas.is_file():
        raise SystemExit(f"check: {ptxas} does not exist; the base must be a CUDA devel image of 13.4 or newer")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "nothing.ptx"
        source.write_text(PTX.format(arch=arch))
        command = [ptxas, f"-arch=sm_{arch}", "-o", Path(folder) / "nothing.cubin", source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    version = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=False).stdout
    release = ", ".join(re.findall(r"release [\d.]+", version)) or "unknown release"
    if done.returncode:
        raise SystemExit(
            f"check: {ptxas} ({release}) does not assemble for sm_{arch}; SM107 needs CUDA 13.4: {done.stderr.strip()}"
        )
    return f"check: {ptxas} ({release}) assembles for sm_{arch}"


if __name__ == "__main__":
    main()
