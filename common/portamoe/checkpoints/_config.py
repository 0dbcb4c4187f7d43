"""`config.json` of a checkpoint, read with errors that name the key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portamoe.checkpoints._json import read_object
from portamoe.checkpoints.errors import CheckpointError


@dataclass(frozen=True)
class Config:
    """The model's config and its quantisation section.

    path:          of config.json, for messages
    model_type:    of the model ("kimi_k3"), not of its text part ("kimi_linear")
    text:          `text_config` where there is one, else the whole config
    quantization:  `quantization_config`, which may stand in either; empty where there is none
    """

    path: Path
    model_type: str
    text: Mapping[str, Any]
    quantization: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer of the text config; raises CheckpointError if it is none."""
        value = self.text.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(f"{self.path} lacks {key}, a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str) -> float:
        """Return a finite positive number of the text config; raises CheckpointError if it is none."""
        value = self.text.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"{self.path}: {key} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a bool of the text config; raises CheckpointError if it is none."""
        value = self.text.get(key)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key} must be true or false, got {value!r}")
        return value

    def expect(self, key: str, expected: object) -> None:
        """Raise CheckpointError unless the text config's `key` is `expected`."""
        if (value := self.text.get(key)) != expected:
            raise CheckpointError(f"{self.path}: {key} is {value!r}, expected {expected!r} for {self.model_type}")

    def section(self, key: str) -> Mapping[str, Any]:
        """Return the object `key` of the quantisation section, empty if absent; CheckpointError if it is none."""
        value = self.quantization.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: quantization_config.{key} must be an object, got {value!r}")
        return value

    def patterns(self, key: str) -> tuple[str, ...]:
        """Return the list of names `key` of the quantisation section, empty if absent."""
        value = self.quantization.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"{self.path}: quantization_config.{key} must be a list of names, got {value!r}")
        return tuple(value)


def read_config(directory: Path) -> Config:
    """Read `config.json` in `directory`; raises CheckpointError when it is absent or contradicts itself."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no config.json, which names the model, its sizes and its activation")
    top = read_object(path)
    text = _object(path, top, "text_config")
    of_text, of_top = (_object(path, part or {}, "quantization_config") for part in (text, top))
    if of_text and of_top and of_text != of_top:
        raise CheckpointError(f"{path} has two quantization_config that differ, in text_config and at the top level")
    model_type = top.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{path}: model_type must be a string, got {model_type!r}")
    return Config(path, model_type, top if text is None else text, of_text or of_top or {})


def _object(path: Path, parent: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    value = parent.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{path}: {key} must be an object, got {value!r}")
    return value
