"""Kimi-K3 as released: compressed-tensors, format `mxfp4-pack-quantized`.

Per projection: `.weight_packed` U8 (N, K/2) and `.weight_scale` U8 (N, K/32), E8M0. Only the routed experts are
quantised; whether a module is, is decided by the tensors that exist, because `ignore` does not name all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from portamoe.checkpoints import _compressed_tensors as compressed
from portamoe.checkpoints._config import Config
from portamoe.checkpoints._experts import E8M0
from portamoe.checkpoints._kimi import KimiReader, Storage
from portamoe.checkpoints._patterns import check_not_excluded

FORMAT = "mxfp4-pack-quantized"


def _storage(config: Config, modules: Sequence[str]) -> Storage:
    compressed.check_weights(config, compressed.formats(config)[FORMAT], num_bits=4, type="float", group_size=32)
    check_not_excluded(config, "ignore", modules)
    return Storage("mxfp4", E8M0, weight=".weight_packed")


READER = KimiReader(f"Kimi-K3, compressed-tensors {FORMAT}", "mxfp4", _storage)
