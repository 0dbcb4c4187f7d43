"""Install the portamoe wheel into the Python that runs this, without changing a torch or Triton that is already there.

    python install.py WHEEL_FOLDER [--torch REQUIREMENT --torch-index URL] [--bin FOLDER]

Nothing is resolved: the wheel and those of its requirements that are missing are installed with --no-deps. torch is
only installed where the base has none and --torch names one. The files of torch and Triton are compared before and
after; a difference fails the build. Standard library and pip only.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

#: Path, size and modification time of each file of a distribution, and its version.
Content = frozenset[tuple[str, int, int]]

#: Distributions that carry the modules torch and triton, whatever image they come from.
KEEP = ("torch", "triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton")


def main() -> None:
    """Install, compare, and link the command into a folder on every image's PATH."""
    parser = argparse.ArgumentParser(description="Install the portamoe wheel; keep the base's torch and Triton.")
    parser.add_argument("wheels", type=Path, help="folder with the portamoe wheel")
    parser.add_argument("--torch", help="requirement to install if the base has no torch")
    parser.add_argument("--torch-index", help="package index for --torch, beside the configured one")
    parser.add_argument("--bin", type=Path, help="folder that gets a link to the portamoe command")
    args = parser.parse_args()

    before = snapshot()
    if "torch" in before:
        say(f"install: keeping the base's {describe(before)}")
    elif args.torch:
        index = ["--extra-index-url", args.torch_index] if args.torch_index else []
        # torch does not require NumPy, but warns at the first tensor of every process without it.
        pip("install", *index, args.torch, "numpy")
        before = snapshot()
        say(f"install: the base had no torch; installed {describe(before)}")
    else:
        raise SystemExit("install: this base has no torch; use a base that brings one (BASE_IMAGE)")

    wheel = only_wheel(args.wheels)
    pip("install", "--no-deps", str(wheel), *others(requirements(wheel)))
    if changed := difference(before, snapshot()):
        raise SystemExit(f"install: the base's {', '.join(changed)} changed while portamoe was installed")
    check_requirements()
    if args.bin:
        link(args.bin / "portamoe")


def snapshot() -> dict[str, Content]:
    """Return path, size and time of every file of each distribution in KEEP that is installed."""
    importlib.invalidate_caches()
    found = {}
    for name in KEEP:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        # Python writes .pyc files whenever it imports something; they are not content.
        paths = [Path(str(distribution.locate_file(f))) for f in distribution.files or () if f.suffix != ".pyc"]
        stats = [(path, path.stat()) for path in paths if path.is_file()]
        entries = {(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats}
        found[name] = frozenset({*entries, (f"version {distribution.version}", 0, 0)})
    return found


def difference(before: dict[str, Content], after: dict[str, Content]) -> list[str]:
    """Return the names of distributions that were added, removed or changed."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def describe(found: dict[str, Content]) -> str:
    """Return names and versions."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in found)


def only_wheel(folder: Path) -> Path:
    """Return the one portamoe wheel in `folder`."""
    wheels = sorted(folder.glob("portamoe-*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"install: expected one portamoe wheel in {folder}, found {[w.name for w in wheels]}")
    return wheels[0]


def requirements(wheel: Path) -> list[str]:
    """Return the wheel's requirements without those of its extras."""
    (distribution,) = metadata.Distribution.discover(path=[str(wheel)])
    return [line for line in distribution.requires or () if "extra ==" not in line]


def others(lines: list[str]) -> list[str]:
    """Return the requirements that name nothing in KEEP; pip leaves those alone that are satisfied."""
    return [line for line in lines if re.split(r"[^A-Za-z0-9._-]", line)[0].lower() not in KEEP]


def check_requirements() -> None:
    """Fail if an installed version, torch's above all, does not satisfy portamoe's requirements."""
    importlib.invalidate_caches()
    from packaging.requirements import Requirement  # noqa: PLC0415 - installed a moment ago

    for line in metadata.requires("portamoe") or ():
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        have = metadata.version(wanted.name)
        if not wanted.specifier.contains(have, prereleases=True):
            raise SystemExit(f"install: portamoe needs {wanted}, but this base has {wanted.name} {have}")


def link(path: Path) -> None:
    """Link the installed command, whose first line names this Python, from `path`."""
    command = Path(sysconfig.get_path("scripts")) / "portamoe"
    if not command.is_file():
        raise SystemExit(f"install: pip did not create {command}")
    if path != command:
        path.unlink(missing_ok=True)
        path.symlink_to(command)


def say(text: str) -> None:
    """Print progress at once, between pip's lines."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def pip(*arguments: str) -> None:
    """Run this Python's pip; stop with its exit status if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise SystemExit(f"install: pip {' '.join(arguments)} failed with exit status {done.returncode}")


if __name__ == "__main__":
    main()
