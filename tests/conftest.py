"""What all tests share: few threads, the data sets, and memory that is poisoned before use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# Before torch is imported: the tests' matrices are small, and runners have few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class DataSet:
    """A small checkpoint in a real format with float64 expected outputs; see tests/data/README.md."""

    name: str
    layer: int

    @property
    def checkpoint(self) -> Path:
        return DATA / self.name

    @property
    def expected(self) -> Path:
        return self.checkpoint / "expected" / f"layer_{self.layer}.safetensors"

    def load(self, experts=None):
        """Return the spec, the experts and the expected file's tensors."""
        from safetensors.torch import load_file

        from portamoe.checkpoints import load_experts

        spec, source = load_experts(self.checkpoint, self.layer, experts)
        return spec, source, load_file(self.expected)


DATA_SETS = (
    DataSet("kimi-k3-tiny", 1),
    DataSet("kimi-k3-tiny", 2),
    DataSet("gpt-oss-tiny", 0),
    DataSet("kimi-k3-nvfp4-tiny", 1),
)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Keep verdicts of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PORTAMOE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def seeded():
    """Draw the same numbers in every run, so that a failure can be repeated."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(params=DATA_SETS, ids=lambda d: f"{d.name}-{d.layer}")
def data_set(request) -> DataSet:
    """Each data set in turn."""
    return request.param


@pytest.fixture
def kimi() -> DataSet:
    """The Kimi-K3 data set, layer 1."""
    return DATA_SETS[0]


@pytest.fixture
def poison(monkeypatch) -> Callable[[int], None]:
    """Return a function that fills all memory torch hands out uninitialised from then on with a byte.

    0xFF is NaN in every float format and in E8M0, 0x7B is 3e36 in float32 and bf16.
    """
    import torch

    originals = {(owner, name): getattr(owner, name) for owner, name in _allocators(torch)}

    def poisoned(original, byte):
        def allocate(*args, **kwargs):
            tensor = original(*args, **kwargs)
            if tensor.numel():
                tensor.detach().untyped_storage().fill_(byte)
            return tensor

        return allocate

    def install(byte: int) -> None:
        for (owner, name), original in originals.items():
            monkeypatch.setattr(owner, name, poisoned(original, byte))

    return install


def _allocators(torch):
    return (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    )
