"""A fake AITER that can be imported for the length of one test."""

import importlib
import sys

import pytest
import torch

from tests.aiter import trees


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that makes `import aiter` find a fresh AMD tree of a version (or what `write(site)` wrote)."""

    def put(version: str = "0.1.20", write=None):
        site = tmp_path / "site"
        (write or (lambda where: trees.amd_tree(where, version)))(site)
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        return site

    for name in [n for n in sys.modules if n == "aiter" or n.startswith("aiter.")]:
        monkeypatch.delitem(sys.modules, name)
    for variable in ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4", "AITER_MXFP4_INTERMEDIATE", "AITER_JIT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    yield put
    for name in [n for n in sys.modules if n == "aiter" or n.startswith("aiter.")]:
        del sys.modules[name]
