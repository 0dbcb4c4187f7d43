"""The quantisation section that compressed-tensors writes.

Source: compressed-tensors 0.20.1, `QuantizationConfig` and its `config_groups`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from portamoe.checkpoints._config import Config
from portamoe.checkpoints.errors import CheckpointError


def formats(config: Config) -> dict[str, list[Mapping[str, Any]]]:
    """Return the config groups by their format; a group without one has that of the whole section."""
    out: dict[str, list[Mapping[str, Any]]] = {}
    for name, group in config.section("config_groups").items():
        if not isinstance(group, dict):
            raise CheckpointError(f"{config.path}: config_groups.{name} must be an object, got {group!r}")
        out.setdefault(str(group.get("format") or config.quantization.get("format")), []).append(group)
    return out


def check_weights(config: Config, groups: Sequence[Mapping[str, Any]], **expected: object) -> None:
    """Raise CheckpointError unless the `weights` of every group have the `expected` values."""
    for group in groups:
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise CheckpointError(f"{config.path}: a config group's weights must be an object, got {weights!r}")
        if weights.get("symmetric") is not True:
            raise CheckpointError(
                f"{config.path}: quantized weights have symmetric {weights.get('symmetric')!r}, expected True: zero "
                "points are not built"
            )
        for key, value in expected.items():
            if weights.get(key) != value:
                raise CheckpointError(
                    f"{config.path}: quantized weights have {key} {weights.get(key)!r}, expected {value!r}"
                )
