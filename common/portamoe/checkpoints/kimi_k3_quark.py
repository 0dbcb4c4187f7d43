"""Kimi-K3 in MXFP4 by AMD's Quark, quant_method `quark`.

Per projection: `.weight` U8 (N, K/2) and `.weight_scale` U8 (N, K/32), E8M0. Quark packs MXFP4 linearly, low nibble
first, whatever `pack_method` says. Activations are quantised only if the
caller's spec asks.
Source: amd/Quark, export of OCP MX types and pull request 30 (`pack_method`); vLLM, quark_moe, QuarkOCP_MX_MoEMethod.
The layout is that of those; no released Kimi-K3 checkpoint of this kind was at hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from portamoe.checkpoints._config import Config
from portamoe.checkpoints._experts import E8M0
from portamoe.checkpoints._kimi import KimiReader, Storage
from portamoe.checkpoints._patterns import check_not_excluded
from portamoe.checkpoints.errors import CheckpointError

_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


def _storage(config: Config, modules: Sequence[str]) -> Storage:
    method = config.section("export").get("pack_method") or config.quantization.get("pack_method")
    if method not in ("reorder", "order", None):
        raise CheckpointError(f"{config.path}: pack_method is {method!r}, expected 'reorder' or 'order'")
    by_name = config.section("layer_quant_config")
    # Hundreds of entries are plain names; only the few patterns are tried on every module.
    patterns = [key for key in by_name if re.search(r"[*?\[]", key)]
    check_not_excluded(config, "exclude", modules)
    for module in modules:
        key = module if module in by_name else next((p for p in patterns if fnmatchcase(module, p)), None)
        where = "global_quant_config" if key is None else f"layer_quant_config {key!r}"
        _check(config, where, config.section("global_quant_config") if key is None else by_name[key])
    return Storage("mxfp4", E8M0, weight=".weight")


def _check(config: Config, where: str, entry: Mapping[str, Any]) -> None:
    weight = entry.get("weight") if isinstance(entry, dict) else None
    found = {key: weight.get(key) for key in _MXFP4} if isinstance(weight, dict) else weight
    if found != _MXFP4:
        raise CheckpointError(f"{config.path}: {where} has the weights as {found!r}, expected {_MXFP4!r}")


READER = KimiReader("Kimi-K3, Quark MXFP4", "mxfp4", _storage)
