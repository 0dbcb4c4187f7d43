"""Which reader reads which checkpoint, by model and quantisation as config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from portamoe.checkpoints import (
    _compressed_tensors,
    gpt_oss,
    kimi_k3,
    kimi_k3_nvfp4,
    kimi_k3_nvfp4_packed,
    kimi_k3_quark,
)
from portamoe.checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    from portamoe.checkpoints._config import Config
    from portamoe.checkpoints._experts import ReadExpert, Share
    from portamoe.checkpoints._safetensors import TensorFolder
    from portamoe.spec import MoESpec


class Reader(Protocol):
    """One checkpoint format."""

    @property
    def description(self) -> str:
        """Model and format, for people."""
        ...

    def spec(self, config: Config, layer: int) -> MoESpec:
        """Return the spec of the whole layer, unsliced; raises a ValueError or TypeError that names the key."""
        ...

    def open(self, config: Config, folder: TensorFolder, layer: int, spec: MoESpec, share: Share) -> ReadExpert:
        """Check `spec.local_experts` in the headers and return how to read one by its id in the layer.

        spec:   of the whole layer but for the local experts; intermediate_size is not yet the rank's
        share:  what the rank keeps of the intermediate dimension

        Raises CheckpointError.
        """
        ...


#: (model, quantisation) -> reader.
READERS: Mapping[tuple[str, str], Reader] = MappingProxyType(
    {
        ("kimi_k3", f"compressed-tensors {kimi_k3.FORMAT}"): kimi_k3.READER,
        ("kimi_k3", f"compressed-tensors {kimi_k3_nvfp4_packed.FORMAT}"): kimi_k3_nvfp4_packed.READER,
        ("kimi_k3", "modelopt_mixed"): kimi_k3_nvfp4.READER,
        ("kimi_k3", "modelopt"): kimi_k3_nvfp4.READER,
        ("kimi_k3", "quark"): kimi_k3_quark.READER,
        ("gpt_oss", "mxfp4"): gpt_oss.READER,
    }
)

#: A checkpoint of Kimi-K3's text part alone says kimi_linear, as the text_config of the whole does.
_SAME_MODEL = MappingProxyType({"kimi_linear": "kimi_k3"})


def choose_reader(config: Config) -> Reader:
    """Return the reader for the config's model and quantisation; raises CheckpointError that names both if none."""
    model = _SAME_MODEL.get(config.model_type, config.model_type)
    quantisations = _quantisations(config)
    readers = [READERS[model, q] for q in quantisations if (model, q) in READERS]
    if len(readers) != 1:
        known = "; ".join(f"{m} with {q}" for m, q in READERS)
        found = " and ".join(quantisations) or "no quantization_config"
        raise CheckpointError(
            f"{config.path}: model_type {config.model_type!r} with {found} is not read; read are {known}"
        )
    return readers[0]


def _quantisations(config: Config) -> list[str]:
    method = config.quantization.get("quant_method")
    if method == "compressed-tensors":
        return [f"{method} {name}" for name in _compressed_tensors.formats(config)] or [method]
    return [] if method is None else [str(method)]
