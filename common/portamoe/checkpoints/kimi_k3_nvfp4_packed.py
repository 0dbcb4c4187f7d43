"""Kimi-K3 in NVFP4 by compressed-tensors, format `nvfp4-pack-quantized`.

Per projection: `.weight_packed` U8 (N, K/2), `.weight_scale` F8_E4M3 (N, K/16), `.weight_global_scale` F32, and with
quantised activations `.input_global_scale` F32. The global scales are stored as reciprocals:
value = e2m1 · weight_scale / weight_global_scale.
Source: compressed-tensors, `NVFP4PackedCompressor`; vLLM, compressed_tensors_moe (`1 / weight_global_scale`).
"""

from __future__ import annotations

from collections.abc import Sequence

from portamoe.checkpoints import _compressed_tensors as compressed
from portamoe.checkpoints._config import Config
from portamoe.checkpoints._kimi import KimiReader, Storage
from portamoe.checkpoints._patterns import check_not_excluded

FORMAT = "nvfp4-pack-quantized"


def _storage(config: Config, modules: Sequence[str]) -> Storage:
    groups = compressed.formats(config)[FORMAT]
    compressed.check_weights(config, groups, num_bits=4, type="float", group_size=16)
    check_not_excluded(config, "ignore", modules)
    quantized_inputs = any(group.get("input_activations") is not None for group in groups)
    return Storage(
        "nvfp4",
        ("F8_E4M3",),
        weight=".weight_packed",
        global_scale=".weight_global_scale",
        input_scale=".input_global_scale" if quantized_inputs else None,
        reciprocal=True,
    )


READER = KimiReader(f"Kimi-K3, compressed-tensors {FORMAT}", "nvfp4", _storage)
