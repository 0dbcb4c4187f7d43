"""Importing: cheap, without torch or a vendor package, safe to fork after, and whatever the surroundings are."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATH = [str(ROOT / "common"), str(ROOT)]
HEAVY = ("torch", "triton", "aiter", "flashinfer", "cutlass", "vllm", "safetensors", "numpy", "amdsmi", "tqdm")
#: Libraries that would mean that a GPU runtime was started.
GPU_LIBRARIES = ("libcuda.so", "libamdhip64", "libhsa-runtime64", "libcudart")


def python(code: str, *before: Path, cwd: Path | None = None, **env: str) -> str:
    """Run code in a fresh interpreter that finds `before` first, then this project; return what it printed."""
    path = os.pathsep.join([*map(str, before), *PATH])
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    return child.stdout


LOADED = f"import sys; print([m for m in {HEAVY} if m in sys.modules])"


@pytest.mark.parametrize(
    "code",
    [
        "import portamoe",
        "import portamoe; portamoe.selected, portamoe.capabilities(), portamoe.decide, dir(portamoe)",
        "import rocm_moe, cuda_moe",
        "from portamoe import registry; registry.backends()",
        "import portamoe.cli.probe, portamoe.cli.run",
    ],
)
def test_nothing_heavy_is_imported(code):
    assert python(f"{code}\n{LOADED}").strip() == "[]"


def test_no_gpu_runtime_is_loaded():
    maps = python("import portamoe; print(portamoe.selected.name); print(open('/proc/self/maps').read())")
    assert not [library for library in GPU_LIBRARIES if library in maps]


def test_the_choice_is_made_at_import():
    out = python("import portamoe; s = portamoe.selected; print(s.name, s.spec == portamoe.KIMI_K3, len(s.decisions))")
    name, is_kimi, decisions = out.split()
    assert (name, is_kimi) == ("torch", "True")
    assert int(decisions) >= 2
    out = python("import portamoe; print(portamoe.selected)", PORTAMOE_BACKEND="aiter")
    assert "no backend" in out
    assert "PORTAMOE_BACKEND=aiter is rejected: device: cpu (needs vendor amd)" in out


@pytest.mark.parametrize(
    "first", ["cuda_moe", "cuda_moe.triton_fused", "rocm_moe", "rocm_moe.triton_unfused", "some_plug_in"]
)
def test_a_backend_may_be_imported_before_portamoe(tmp_path, first):
    source = "from portamoe.registry import backends\nfrom portamoe.torch_backend import TorchBackend\n"
    source += "class Backend(TorchBackend):\n    name, package = 'plugged', 'some_plug_in'\nBACKEND = Backend()\n"
    (tmp_path / "some_plug_in.py").write_text(source)
    (tmp_path / "some_plug_in-1.dist-info").mkdir()
    (tmp_path / "some_plug_in-1.dist-info/METADATA").write_text("Name: some_plug_in\nVersion: 1\n")
    entry_point = "[portamoe.backends]\nplugged = some_plug_in:BACKEND\n"
    (tmp_path / "some_plug_in-1.dist-info/entry_points.txt").write_text(entry_point)
    show = "import portamoe; from portamoe import registry\n"
    show += "chosen = portamoe.selected\n"
    show += "print([b.name for b in registry.backends()], chosen, [d.backend for d in chosen.decisions])"
    alone = python(show, tmp_path)
    assert "'triton_fused'" in alone
    assert "'plugged'" in alone
    assert python(f"import {first}\n{show}", tmp_path) == alone


def test_an_unknown_wish_does_not_break_the_import():
    out = python("import portamoe; print(portamoe.selected)", PORTAMOE_BACKEND="nope")
    assert "unknown backend 'nope'; known: " in out


def test_a_failed_detection_does_not_break_the_import():
    code = (
        "import portamoe.detection.host as h\n"
        "def broken(): raise OSError(5, 'Input/output error')\n"
        "h.distributions = broken\n"
        "from portamoe.registry import choose_at_import\n"
        "import portamoe.detection as d; d._cached.cache_clear()\n"
        "print(choose_at_import())"
    )
    assert "no backend on cpu (cpu): detection failed: OSError" in python(code)


def test_forking_afterwards_is_safe():
    code = (
        "import os, portamoe\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    ok = portamoe.capabilities().selected == 'torch'\n"
        "    os._exit(0 if ok else 1)\n"
        "print(os.waitpid(pid, 0)[1])"
    )
    assert python(code).strip() == "0"


def test_no_process_is_started_and_nothing_is_written(tmp_path):
    code = (
        "import sys\n"
        "def hook(event, args):\n"
        "    if event in ('subprocess.Popen', 'os.system', 'os.fork', 'os.mkdir', 'os.rename', 'socket.connect'):\n"
        "        raise RuntimeError(f'{event} {args}')\n"
        "    if event == 'open' and isinstance(args[2], int) and args[2] & 3:\n"
        "        raise RuntimeError(f'{event} {args}')\n"
        "sys.dont_write_bytecode = True\n"
        "sys.addaudithook(hook)\n"
        "import portamoe; portamoe.capabilities()"
    )
    assert python(code, HOME=str(tmp_path)) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("home", ["read-only", "absent", "unset"])
def test_any_home(tmp_path, home):
    code = "import portamoe; print(portamoe.selected.name); portamoe.capabilities()"
    if home == "unset":
        code = "import os; del os.environ['HOME']\n" + code
    folder = tmp_path / home
    if home == "read-only":
        folder.mkdir(mode=0o500)
    assert python(code, HOME=str(folder)).strip() == "torch"
    assert not folder.exists() or list(folder.iterdir()) == []


@pytest.mark.parametrize("error", ["RuntimeError('x')", "OSError(30, 'x')", "PermissionError('x')", "SystemExit(1)"])
def test_vendor_packages_that_raise_are_never_imported(tmp_path, error):
    for name in ("aiter", "flashinfer", "triton", "torch", "amdsmi", "pynvml"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise {error}")
    code = "import portamoe; d = portamoe.detect(); print(d.host.vendor['aiter']['is_amd'], d.devices[-1].vendor)"
    out = python(code, tmp_path)
    assert out.split() == ["False", "cpu"]


def test_the_impostor_is_recognised_by_its_files(tmp_path):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter/__init__.py").write_text("__version__ = '0.13.20191203'\ndef map_aiter(): ...\n")
    folder = tmp_path / "aiter-0.13.20191203.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: aiter\nVersion: 0.13.20191203\n")
    out = python(
        "import portamoe; f = portamoe.detect().host.vendor['aiter']; print(f['is_amd'], f['version'])", tmp_path
    )
    assert out.split() == ["False", "0.13.20191203"]


def test_without_triton():
    """Neither importing nor choosing needs Triton; what needs it says that it is missing."""
    code = (
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n.split('.')[0] == 'triton' else find(n, *a)\n"
        "import portamoe; print(portamoe.selected.name, portamoe.detect().host.vendor['triton'])"
    )
    assert python(code).split() == ["torch", "None"]


def test_beside_the_users_own_modules(tmp_path):
    """A module of the current folder that is called like a source folder, or like one of ours, hides nothing."""
    for name in ("common", "probe", "device", "registry"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    out = python("import portamoe; print(portamoe.capabilities().selected)", cwd=tmp_path)
    assert out.strip() == "torch"


def test_every_public_name_is_there():
    code = (
        "import portamoe\n"
        "missing = [n for n in portamoe.__all__ if n not in dir(portamoe)]\n"
        "print(missing, [n for n in portamoe.__all__ if n != '__version__' and not hasattr(portamoe, n)])\n"
        "print(portamoe.RoutedExperts.__module__, portamoe.testing.__name__)\n"
        "try: portamoe.nonsense\n"
        "except AttributeError as e: print(e)\n"
        "import torch; print(torch.cuda.is_initialized())"
    )
    assert python(code).splitlines() == [
        "[] []",
        "portamoe.layer portamoe.testing",
        "module 'portamoe' has no attribute 'nonsense'",
        "False",
    ]


def test_lazy_names_are_known_to_type_checkers():
    """Every lazy name is imported under TYPE_CHECKING, so that a user's type checker sees what it is."""
    tree = ast.parse((ROOT / "common/portamoe/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    declared = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    lazy = next(
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_LAZY"
    )
    assert declared == set(ast.literal_eval(lazy))


def test_a_plug_in_may_import_the_library_while_it_is_being_imported(tmp_path):
    (tmp_path / "plug.py").write_text(
        "from portamoe import MoESpec, Reason, SiTU\n"
        "class B:\n"
        "    name, package, priority = 'plug', 'plug', 99999\n"
        "    def check(self, spec, device): return []\n"
        "    def only_on_request(self, spec, device): return None\n"
        "BACKEND = B()\n"
    )
    folder = tmp_path / "plug-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: plug\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[portamoe.backends]\nplug = plug:BACKEND\n")
    assert python("import portamoe; print(portamoe.selected.name)", tmp_path).strip() == "plug"


def test_no_dependency_is_called_aiter():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"""["'](?:amd-)?aiter\s*[\[<>=!~;@"']""", text) == []
