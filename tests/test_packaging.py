"""What the wheel holds, and that installing it leaves an image's torch and Triton alone."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent

# What a ROCm image carries: torch with a local version, and Triton under another distribution's name.
IMAGE = {
    "torch": "2.9.1+rocm6.4",
    "pytorch-triton-rocm": "3.5.1",
    "packaging": "25.0",
    "safetensors": "0.7.0",
    "tqdm": "4.67.1",
    "nvidia-ml-py": "13.610.43",
}
MODULES = {"torch": "torch", "pytorch-triton-rocm": "triton"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder))
    (path,) = folder.glob("portamoe-*.whl")
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return the Python of a fake ROCm image: distributions with metadata, without their real content."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "image"], check=True)
    (site,) = (tmp_path / "image" / "lib").glob("python*/site-packages")
    for name, version in IMAGE.items():
        module = site / MODULES.get(name, name.replace("-", "_"))
        module.mkdir()
        (module / "__init__.py").write_text(f"__version__ = {version!r}\n")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{module.name}/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    return tmp_path / "image" / "bin" / "python"


def test_wheel_is_pure_python_and_holds_the_three_packages_and_their_data(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"portamoe", "rocm_moe", "cuda_moe"}
    assert {f"{top}/py.typed" for top in tops} <= set(names)
    data = {
        path.relative_to(ROOT).as_posix()
        for package in ("rocm_moe", "cuda_moe")
        for path in (ROOT / package).rglob("*.json")
    }
    assert data <= set(names)


def test_installing_changes_neither_torch_nor_triton(wheel: Path, image: Path) -> None:
    site = next(image.parent.parent.glob("lib/python*/site-packages"))
    before = digest(site)
    # Without an index, a requirement that the image does not already satisfy makes pip fail.
    pip("--python", str(image), "install", "--no-index", str(wheel))
    after = digest(site)
    assert {name: after[name] for name in before} == before


def test_wheel_works_beside_a_users_own_common_module(wheel: Path, image: Path, tmp_path: Path) -> None:
    pip("--python", str(image), "install", "--no-index", str(wheel))
    user = tmp_path / "user"
    user.mkdir()
    (user / "common.py").write_text("raise RuntimeError('the user\\'s own common.py was imported')\n")
    probe = subprocess.run(
        [image, "-m", "portamoe", "probe", "capabilities"], cwd=user, capture_output=True, text=True, check=False
    )
    assert probe.returncode == 0, probe.stderr
    assert "torch" in probe.stdout


def test_requirements_name_no_stranger_and_no_triton() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {Requirement(line).name for line in project["dependencies"]}
    assert core == {"torch", "packaging", "safetensors", "tqdm", "nvidia-ml-py"}
    everything = core | {
        Requirement(line).name for lines in project["optional-dependencies"].values() for line in lines
    }
    # PyPI's aiter and amdsmi are not AMD's current ones.
    assert not everything & {"aiter", "amd-aiter", "amdsmi"}


def pip(*arguments: str) -> None:
    """Run this interpreter's pip and fail with its output."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def digest(folder: Path) -> dict[str, str]:
    """Return the hash of every file below `folder` by its relative path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
