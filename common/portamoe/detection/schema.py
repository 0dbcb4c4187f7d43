"""The types of host.json, schema 1: a recording comes from another machine, and may have been edited.

A shape is a type, a tuple of shapes of which one has to fit, a `ListOf`, a `MapOf` or an `Object`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any


@dataclass(frozen=True)
class ListOf:
    """A list whose every item has a shape."""

    item: Any


@dataclass(frozen=True)
class MapOf:
    """An object with any keys, whose every value has a shape."""

    value: Any


@dataclass(frozen=True)
class Object:
    """An object: keys that must be there, keys that may be, any others of any type."""

    required: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, Any] = field(default_factory=dict)


#: Stands for the value of a key that is not there.
MISSING = object()
#: The most characters of a value that are shown; of longer ones only the type is.
_SHOWN = 40
_TEXT = (str, NoneType)
_COUNT = (int, NoneType)
_SCALAR = (str, int, float, NoneType)
_INSTANCE = Object({}, {"uuid": _TEXT, "memory_bytes": _COUNT, "memory_free_bytes": _COUNT})
_NVIDIA = Object(
    {"name": str},
    {
        "index": int,
        "uuid": _TEXT,
        "compute_capability": (ListOf(int), NoneType),
        "memory_bytes": _COUNT,
        "memory_free_bytes": _COUNT,
        "mig": (ListOf(_INSTANCE), NoneType),
    },
)
_AITER = Object(
    {"is_amd": bool},
    {
        "version": _TEXT,
        "has_situv2": bool,
        "root": _TEXT,
        "parameters": ListOf(str),
        "situv2_defaults": (ListOf((int, float)), NoneType),
        "jit_dir": str,
        "jit_dir_writable": bool,
        "config_dir": str,
        "config_dir_writable": bool,
        "locks": ListOf(str),
        "problem": str,
    },
)
_FLASHINFER = Object(
    {},
    {
        "version": _TEXT,
        "nvcc": (Object({}, {"path": _TEXT, "version": _TEXT}), NoneType),
        "artifacts": (Object({}, {"folder": str, "cubins": int}), NoneType),
        "problem": str,
    },
)
HOST = Object(
    {},
    {
        "machine": str,
        "python": str,
        "system": _TEXT,
        "env": MapOf(str),
        "rocm": (Object({"kfd": str}, {"version": _TEXT, "driver": _TEXT}), NoneType),
        "nvml": (Object({"driver": _TEXT, "cuda": _TEXT}, {"source": str, "devices": ListOf(_NVIDIA)}), NoneType),
        "torch": (Object({"version": _TEXT}, {"hip": _TEXT, "cuda": _TEXT}), NoneType),
        "distributions": MapOf(str),
        "ptxas": (Object({"version": _TEXT, "targets": ListOf(str)}, {"path": _TEXT}), NoneType),
        "vendor": Object({}, {"aiter": (_AITER, NoneType), "flashinfer": (_FLASHINFER, NoneType), "triton": _TEXT}),
        "caches": MapOf(Object({"path": str, "writable": bool, "set": bool}, {"filesystem": _TEXT})),
        "problems": ListOf(Object({"what": str, "value": _SCALAR}, {"limit": _SCALAR, "remedy": _TEXT})),
        "unreadable": ListOf(str),
    },
)
_NAMES = {NoneType: "null", dict: "object", str: "text", bool: "true or false", int: "integer", float: "number"}


def fault(value: Any, shape: Any = HOST, path: str = "") -> str | None:
    """Return what does not fit, "nvml.devices[0].name is 3, expected text", None if all does."""
    shapes = shape if isinstance(shape, tuple) else (shape,)
    fitting = [one for one in shapes if _same_kind(value, one)]
    if fitting:
        return _first(fault(item, inner, name) for name, item, inner in _inside(value, fitting[0], path))
    if value is MISSING:
        return f"{path} is missing"
    names = {ListOf: "list", MapOf: "object", Object: "object"}
    wanted = dict.fromkeys(names.get(type(one)) or _NAMES[one] for one in shapes)
    shown = repr(value) if len(repr(value)) <= _SHOWN else type(value).__name__
    return f"{path} is {shown}, expected {' or '.join(wanted)}"


def _inside(value: Any, shape: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value and shape of everything in a list or object."""
    if isinstance(shape, ListOf):
        yield from ((f"{path}[{at}]", item, shape.item) for at, item in enumerate(value))
    elif isinstance(shape, MapOf):
        yield from ((f"{path}.{name}", item, shape.value) for name, item in value.items())
    elif isinstance(shape, Object):
        where = f"{path}." if path else ""
        yield from ((where + name, value.get(name, MISSING), inner) for name, inner in shape.required.items())
        yield from ((where + name, value[name], inner) for name, inner in shape.optional.items() if name in value)


def _first(faults: Iterable[str | None]) -> str | None:
    return next((found for found in faults if found is not None), None)


def _same_kind(value: Any, shape: Any) -> bool:
    if isinstance(shape, ListOf):
        return isinstance(value, list)
    if isinstance(shape, MapOf | Object):
        return isinstance(value, dict)
    return isinstance(value, shape) and not (isinstance(value, bool) and shape is not bool)
