"""Static detection over installations on disk: which one it is, what it can do, and that nothing of it is executed."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rocm_moe.aiter.detect import STALE_LOCK_SECONDS, detect_aiter
from tests.aiter import trees


def look(site, **kwargs):
    kwargs.setdefault("env", {"HOME": str(site)})
    kwargs.setdefault("config_dir", site / "aiter_configs")
    return detect_aiter([str(site)], **kwargs)


@pytest.mark.parametrize("version", trees.VERSIONS)
def test_amds_versions(tmp_path, version):
    trees.amd_tree(tmp_path, version)
    facts = look(tmp_path)
    assert facts["is_amd"]
    assert "problem" not in facts
    assert facts["version"] == version
    old = version == "0.1.18"
    assert facts["has_situv2"] is not old
    assert ("beta" in facts["parameters"]) is not old
    assert "gate_mode" in facts["parameters"]
    assert ("stage2_scatter" in facts["parameters"]) is (version == trees.MAIN)
    since_floor = not version.startswith(("0.1.18", "0.1.19"))
    assert facts["situv2_defaults"] == (None if old else [4.0, 25.0] if since_floor else [2.0, 1.5])
    assert facts["install"] == "wheel"
    assert facts["flydsl"] == "0.3.1"


def test_development_install_without_metadata(tmp_path):
    trees.amd_tree(tmp_path, "0.1.20", wheel=False, distribution=False)
    facts = look(tmp_path)
    assert (facts["version"], facts["install"], facts["distribution"]) == ("0.1.20", "develop", None)
    assert facts["has_situv2"]


def test_missing(tmp_path):
    assert look(tmp_path) is None


def test_impostor(tmp_path):
    trees.impostor_tree(tmp_path)
    facts = look(tmp_path)
    assert not facts["is_amd"]
    assert facts["version"] == "0.13.20191203"
    assert "problem" not in facts


def test_broken_trees(tmp_path):
    def broken(name, change):
        site = tmp_path / name
        change(trees.amd_tree(site, "0.1.20"))
        facts = look(site)
        assert facts["is_amd"]
        return facts["problem"]

    assert "lacks jit/core.py" in broken("a", lambda root: (root / "jit" / "core.py").unlink())
    assert "lacks jit/core.py or fused_moe.py" in broken("b", lambda root: (root / "fused_moe.py").unlink())
    assert "does not define" in broken("c", lambda root: (root / "fused_moe.py").write_text("x = 1\n"))
    assert "cannot be parsed" in broken("d", lambda root: (root / "fused_moe.py").write_text("def fused_moe(:\n"))
    assert "cannot be parsed" in broken("e", lambda root: (root / "fused_moe.py").write_bytes(b"\xff\xfe"))


def test_both_packages_in_one_folder(tmp_path):
    trees.amd_tree(tmp_path, "0.1.20")
    trees.dist_info(tmp_path, "aiter", "0.13.20191203")
    assert "both installed" in look(tmp_path)["problem"]


def test_folder_of_that_name(tmp_path):
    (tmp_path / "aiter").mkdir()
    facts = look(tmp_path)
    assert not facts["is_amd"]
    assert "without __init__.py" in facts["problem"]
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "aiter.py").write_text("")
    assert "single file" in look(tmp_path / "file")["problem"]


def test_folders_and_locks(tmp_path):
    root = trees.amd_tree(tmp_path, "0.1.20")
    configs = tmp_path / "aiter_configs"
    configs.mkdir()
    lock = configs / "tuned_fmoe.csv.lock"
    lock.write_text("")
    (root / "jit" / "build").mkdir()
    other = root / "jit" / "build" / "lock_module_aiter_core"
    other.write_text("")
    now = lock.stat().st_mtime
    assert "locks" not in look(tmp_path, now=now + 60)
    assert look(tmp_path, now=now + STALE_LOCK_SECONDS + 60)["locks"] == sorted([str(lock), str(other)])
    facts = look(tmp_path)
    assert (facts["jit_dir"], facts["jit_dir_writable"]) == (str(root / "jit"), True)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    inside = str(blocked / "jit")
    facts = look(tmp_path, env={"AITER_JIT_DIR": inside})
    assert (facts["jit_dir"], facts["jit_dir_writable"]) == (inside, False)
    assert look(tmp_path, config_dir=blocked)["config_dir_writable"] is False


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_package_goes_home(tmp_path):
    root = trees.amd_tree(tmp_path, "0.1.20")
    (root / "jit").chmod(0o555)
    facts = look(tmp_path)
    assert facts["jit_dir"] == str(tmp_path / ".aiter" / "jit")


def test_nothing_is_executed(tmp_path):
    """A tree that would abort the process at import is described all the same, and stays unimported."""
    trees.raising_tree(tmp_path, "os.abort()")
    code = textwrap.dedent("""
        import sys
        from portamoe.detection import host
        facts = host.vendor()["aiter"]
        assert facts["is_amd"] and facts["version"] == "0.1.20" and facts["has_situv2"], facts
        assert "aiter" not in sys.modules and "torch" not in sys.modules
    """)
    path = os.pathsep.join([str(tmp_path), *[p for p in sys.path if p]])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_backend_decides_without_torch(tmp_path):
    """On a host whose torch cannot be imported, importing and deciding work, and no vendor package is loaded."""
    code = textwrap.dedent("""
        import sys
        sys.modules["torch"] = None
        import portamoe
        from rocm_moe.aiter.backend import BACKEND
        device = portamoe.detect("tests/data/hosts/mi355x-aiter-0.1.20").devices[0]
        assert BACKEND.check(portamoe.KIMI_K3, device) == []
        assert BACKEND.only_on_request(portamoe.KIMI_K3, device) is None
        assert "aiter" not in sys.modules
    """)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_no_requirement_is_named_aiter():
    """PyPI's `aiter` is a stranger's package and its `amd-aiter` is a year old."""
    assert not re.search(r"[\"'](amd[-_])?aiter\b", Path("pyproject.toml").read_text().replace('"aiter.*"', ""))
