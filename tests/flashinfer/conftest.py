"""A fake FlashInfer that can be imported for the length of one test."""

import importlib
import sys

import pytest
import torch

from tests.flashinfer import trees


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


def _loaded():
    return [n for n in sys.modules if n == "flashinfer" or n.startswith("flashinfer.")]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that makes `import flashinfer` find a fresh tree of a version."""

    def put(version="0.7.2.post1", **options):
        site = tmp_path / "site"
        trees.tree(site, version, **options)
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        return site

    for name in _loaded():
        monkeypatch.delitem(sys.modules, name)
    for variable in (
        "FLASHINFER_NVFP4_4OVER6",
        "FLASHINFER_CUBIN_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "PORTAMOE_BACKEND",
    ):
        monkeypatch.delenv(variable, raising=False)
    yield put
    for name in _loaded():
        del sys.modules[name]


@pytest.fixture
def calls():
    """Return a function that gives every call of the fake so far, (name, arguments)."""

    def recorded():
        moe = importlib.import_module("flashinfer.fused_moe")
        return importlib.import_module("flashinfer").CALLS + moe.CALLS

    return recorded
