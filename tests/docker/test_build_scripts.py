"""install.py and check_base.py: a base's torch is kept or the build fails, and only loadable code passes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import packaging.requirements  # noqa: F401 - the base below has no packaging of its own
import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"docker_{name}", DOCKER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load("install")
check_base = load("check_base")


@pytest.mark.parametrize(
    ("flag", "loads"),
    [
        ("sm_107", True),
        ("sm_107a", True),
        ("sm_107f", True),
        ("sm_100", True),
        ("sm_103", True),
        ("sm_100f", False),  # not established
        ("sm_100a", False),
        ("sm_90", False),
        ("sm_120", False),
        ("sm_110", False),
        ("compute_107", True),
        ("compute_100", True),
        ("compute_100f", True),
        ("compute_103f", True),
        ("compute_100a", False),
        ("compute_90", True),
        ("compute_90a", False),
        ("compute_80", True),
        ("compute_120", False),
        ("compute_110", False),
        ("compute_120f", False),
        ("gfx90a", False),
    ],
)
def test_what_a_rubin_device_loads(flag: str, loads: bool) -> None:
    assert (check_base.loadable(flag, 10, 7) is not None) is loads


@pytest.fixture
def torch_of(monkeypatch: pytest.MonkeyPatch):
    """Replace the torch that check_base.py looks at."""

    def replace(archs: str, *, hip: str | None = None, cuda: str | None = None) -> None:
        fake = types.SimpleNamespace(
            __version__="2.9.1+fake",
            version=types.SimpleNamespace(hip=hip, cuda=cuda),
            _C=types.SimpleNamespace(_cuda_getArchFlags=lambda: archs),
        )
        monkeypatch.setattr(check_base, "torch", fake)

    return replace


def test_cuda_build_of_today_reaches_rubin_by_its_sm100_code(torch_of) -> None:
    torch_of("sm_80 sm_90 sm_100 sm_120 compute_120", cuda="13.2")
    assert "reaches 10.7 by sm_100 (machine code of an earlier minor number)" in check_base.check_cuda(10, 7)


def test_cuda_build_without_a_way_is_refused_with_its_list(torch_of) -> None:
    torch_of("sm_90a sm_100a sm_120 compute_120", cuda="13.2")
    with pytest.raises(SystemExit, match=r"can load nothing.*sm_90a, sm_100a, sm_120, compute_120"):
        check_base.check_cuda(10, 7)


def test_torch_of_the_other_vendor_is_refused(torch_of) -> None:
    torch_of("gfx90a", hip="6.4")
    with pytest.raises(SystemExit, match="not a CUDA build"):
        check_base.check_cuda(10, 7)
    torch_of("sm_100", cuda="13.2")
    with pytest.raises(SystemExit, match="not a ROCm build"):
        check_base.check_rocm(["gfx90a"])


def test_rocm_needs_every_named_architecture(torch_of) -> None:
    torch_of("gfx90a:xnack- gfx942", hip="6.4")
    assert "has code for gfx90a, gfx942" in check_base.check_rocm(["gfx90a", "gfx942"])
    with pytest.raises(SystemExit, match="no code for gfx950, only for gfx90a, gfx942"):
        check_base.check_rocm(["gfx90a", "gfx950"])


def test_ptxas_must_exist_and_assemble(tmp_path: Path) -> None:
    ptxas = tmp_path / "ptxas"
    with pytest.raises(SystemExit, match="does not exist"):
        check_base.check_ptxas(ptxas, "107")
    # 13.3 knows sm_103 and nothing newer.
    ptxas.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 13.3, V13.3.73" && exit\n'
        '[ "$1" = -arch=sm_103 ] || { echo "ptxas fatal: not defined for option gpu-name" >&2; exit 1; }\n'
    )
    ptxas.chmod(0o755)
    assert "release 13.3) assembles for sm_103" in check_base.check_ptxas(ptxas, "103")
    with pytest.raises(SystemExit, match=r"release 13.3\) does not assemble for sm_107.*not defined"):
        check_base.check_ptxas(ptxas, "107")


def test_requirements_of_the_wheel_leave_out_torch_and_extras(tmp_path: Path) -> None:
    wheel = tmp_path / "portamoe-0.1.0-py3-none-any.whl"
    metadata = (
        "Metadata-Version: 2.1\nName: portamoe\nVersion: 0.1.0\nRequires-Dist: torch>=2.6\nRequires-Dist: tqdm>=4.60\n"
        "Requires-Dist: triton>=3.3; extra == 'triton'\nRequires-Dist: nvidia-ml-py>=12\n"
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("portamoe-0.1.0.dist-info/METADATA", metadata)
    assert install.only_wheel(tmp_path) == wheel
    assert install.others(install.requirements(wheel)) == ["tqdm>=4.60", "nvidia-ml-py>=12"]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the site-packages of a base with a stub torch, in which install.py looks."""
    folder = tmp_path / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    stub = [DOCKER / "ci/stub/make_stub.py", "--torch", "2.9.1+rocm6.4", "--triton-name", "pytorch-triton-rocm"]
    subprocess.run([folder / "bin/python", *stub, "--hip", "6.4", "--archs", "gfx90a"], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    monkeypatch.setattr(sys, "path", [str(site)])
    return site


def test_snapshot_sees_every_change_of_torch_and_triton(base: Path) -> None:
    before = install.snapshot()
    assert set(before) == {"torch", "pytorch-triton-rocm"}
    assert install.difference(before, install.snapshot()) == []
    (base / "torch/__pycache__").mkdir()
    (base / "torch/__pycache__/version.pyc").write_text("compiled")
    assert install.difference(before, install.snapshot()) == []
    (base / "torch/_C.py").write_text("# another\n")
    (base / "triton/__init__.py").unlink()
    assert install.difference(before, install.snapshot()) == ["pytorch-triton-rocm", "torch"]


def test_snapshot_sees_an_added_triton(base: Path) -> None:
    before = install.snapshot()
    info = base / "triton-3.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.9.0\n")
    assert install.difference(before, install.snapshot()) == ["triton"]


def test_torch_that_is_too_old_for_portamoe_is_named(base: Path) -> None:
    info = base / "portamoe-0.1.0.dist-info"
    info.mkdir()
    needs = "Name: portamoe\nVersion: 0.1.0\nRequires-Dist: torch>={}\nRequires-Dist: x; extra == 'y'\n"
    (info / "METADATA").write_text(needs.format("2.6"))
    install.check_requirements()
    (info / "METADATA").write_text(needs.format("2.10"))
    with pytest.raises(SystemExit, match=r"portamoe needs torch>=2.10, but this base has torch 2.9.1\+rocm6.4"):
        install.check_requirements()


def test_torch_comes_with_numpy_into_a_base_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NumPy torch warns in every process; a base that brings its own torch is left as it is."""
    ran: list[tuple[str, ...]] = []
    with zipfile.ZipFile(tmp_path / "portamoe-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("portamoe-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: portamoe\nVersion: 0.1.0\n")
    monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path), "--torch", "torch==2.13.0+cpu"])
    monkeypatch.setattr(install, "pip", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(install, "check_requirements", lambda: None)
    monkeypatch.setattr(install, "describe", lambda _: "")
    monkeypatch.setattr(install, "snapshot", dict)
    install.main()
    assert ran[0] == ("install", "torch==2.13.0+cpu", "numpy")
    ran.clear()
    monkeypatch.setattr(install, "snapshot", lambda: {"torch": frozenset()})
    install.main()
    assert not any("numpy" in arguments for arguments in ran)
