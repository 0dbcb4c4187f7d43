"""What FlashInfer computes right: version x arch x mode x activation, from support.json with its sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import InvalidVersion, Version

from portamoe.activations import GeGLU, SiTU, SwiGLU

if TYPE_CHECKING:
    from portamoe.activations import Activation
    from portamoe.spec import MoESpec

Status = Literal["works", "silently_wrong", "absent", "unverified"]


@dataclass(frozen=True)
class Mode:
    """One pair of weight and activation formats of one backend.

    name, backend:         "cutedsl_w4a4", "flashinfer_cutedsl"
    weights, activations:  the spec's words for them
    quant_mode:            FlashInfer's word
    group:                 rows of up, then of gate, taken in turn in w13; 0: the whole halves
    hidden_multiple, intermediate_multiple:  what H and I are padded to
    """

    name: str
    backend: str
    weights: str
    activations: str
    quant_mode: str
    group: int
    hidden_multiple: int
    intermediate_multiple: int

    @property
    def block(self) -> int:
        """Weights that share a block scale."""
        return 16 if self.weights == "nvfp4" else 32


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    mode, archs, activations:  what it is about; "*" among the activations is all of them
    since, before:             versions, None where open
    why, source:               what was seen, and where
    """

    mode: str
    archs: tuple[str, ...]
    activations: tuple[str, ...]
    status: Status
    why: str
    source: str
    since: str | None = None
    before: str | None = None

    def covers(self, version: Version) -> bool:
        """Is `version` within since <= version < before? A release candidate comes before its release."""
        return (self.since is None or version >= Version(self.since)) and (
            self.before is None or version < Version(self.before)
        )


@dataclass(frozen=True)
class AtomicOnly:
    """Where CuteDSL's second GEMM has no finalize but the one with atomics; fields as in `Entry`."""

    archs: tuple[str, ...]
    before: str
    why: str
    source: str


@dataclass(frozen=True)
class Support:
    """All of the data file."""

    modes: Mapping[str, Mode]
    refused_variables: Mapping[str, str]
    entries: tuple[Entry, ...]
    atomic_only: tuple[AtomicOnly, ...]

    def is_atomic_only(self, arch: str, version: Version | None) -> bool:
        """Return whether CuteDSL's results may differ in the last bit on `arch`, whatever is asked for."""
        return any(
            arch in line.archs and (version is None or version < Version(line.before)) for line in self.atomic_only
        )

    def mode_for(self, backend: str, spec: MoESpec) -> Mode | None:
        """Return the backend's mode for the spec's formats, None if it has none."""
        formats = (spec.weight_format, spec.activation_format)
        found = (m for m in self.modes.values() if m.backend == backend and (m.weights, m.activations) == formats)
        return next(found, None)

    def about(self, mode: str, arch: str, activation: str) -> tuple[Entry, ...]:
        """Return the lines of all versions."""
        return tuple(
            e for e in self.entries if e.mode == mode and arch in e.archs and {activation, "*"} & set(e.activations)
        )


def activation_key(activation: Activation) -> str:
    """Return the table's word: a parameter that a kernel may lack makes a word of its own."""
    if isinstance(activation, SiTU):
        return "situ" if activation.linear_beta is not None else "situ_unclamped"
    if isinstance(activation, SwiGLU):
        return "swiglu" if activation.limit is None else "swiglu_limit"
    if isinstance(activation, GeGLU):
        return "geglu_tanh" if activation.approximate == "tanh" else "geglu"
    return activation.name


def parsed(version: str | None) -> Version | None:
    """Return a version that can be compared, None for one that cannot."""
    try:
        return Version(version or "")
    except InvalidVersion:
        return None


@cache
def support() -> Support:
    """Read support.json once."""
    path = Path(__file__).with_name("support.json")
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    entries = (
        Entry(**{**e, "archs": tuple(e["archs"]), "activations": tuple(e["activations"])}) for e in data["support"]
    )
    return Support(
        modes=MappingProxyType({name: Mode(name=name, **mode) for name, mode in data["modes"].items()}),
        refused_variables=MappingProxyType(data["refused_variables"]),
        entries=tuple(entries),
        atomic_only=tuple(AtomicOnly(**{**line, "archs": tuple(line["archs"])}) for line in data["atomic_only"]),
    )
