"""Install a stub torch and Triton: metadata, a version, and the constants that check_base.py reads.

The metadata requires a package that does not exist, as a vendor's torch names packages of its own index: an
installation that resolves torch's requirements fails.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

TORCH = """__version__ = {torch!r}
from torch import _C, version
"""
VERSION = "hip = {hip!r}\ncuda = {cuda!r}\n"
EXTENSION = "def _cuda_getArchFlags():\n    return {archs!r}\n"


def main() -> None:
    """Write both distributions into this Python's site-packages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", metavar="VERSION", help="default: the base has Triton only")
    parser.add_argument("--triton-name", required=True, metavar="DISTRIBUTION")
    parser.add_argument("--archs", default="")
    parser.add_argument("--hip")
    parser.add_argument("--cuda")
    args = parser.parse_args()
    if args.torch:
        sources = {"__init__.py": TORCH, "version.py": VERSION, "_C.py": EXTENSION}
        files = {f"torch/{name}": text.format(**vars(args)) for name, text in sources.items()}
        write("torch", args.torch, files, requires="portamoe-absent-vendor-runtime")
    write(args.triton_name, "3.5.1", {"triton/__init__.py": "__version__ = '3.5.1'\n"})


def write(name: str, version: str, files: dict[str, str], requires: str | None = None) -> None:
    """Write a distribution's files, METADATA and RECORD."""
    site = Path(sysconfig.get_path("purelib"))
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if requires:
        metadata += f"Requires-Dist: {requires}\n"
    files = {**files, f"{info}/METADATA": metadata, f"{info}/INSTALLER": "conda\n"}
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


if __name__ == "__main__":
    main()
