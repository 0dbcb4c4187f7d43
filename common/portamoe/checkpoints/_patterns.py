"""Lists of modules that a checkpoint leaves unquantised, as configs write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate

from portamoe.checkpoints._config import Config
from portamoe.checkpoints.errors import CheckpointError, shorten


def check_not_excluded(config: Config, key: str, modules: Sequence[str]) -> None:
    """Raise CheckpointError when the quantisation section's list `key` says of any module that it is not quantised.

    An entry "re:…" is a regular expression for the start of a module's name; any other is a name, `*` allowed.
    """
    patterns = []
    for entry in config.patterns(key):
        try:
            patterns.append(re.compile(entry[3:] if entry.startswith("re:") else translate(entry)))
        except re.error as error:
            raise CheckpointError(f"{config.path}: {key} holds {entry!r}: {error}") from error
    if excluded := [module for module in modules if any(pattern.match(module) for pattern in patterns)]:
        raise CheckpointError(
            f"{config.path}: {key} says that {shorten(excluded)} are not quantized, but they are experts of a "
            "quantized checkpoint"
        )
