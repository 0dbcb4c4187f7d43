"""The allowlist of AITER's fused MoE: arch x activation x mode x version, from support.json with its sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Mode:
    """One way AITER runs SiTU on MXFP4 weights.

    name:                   "a16w4", "a8w4", "a4w4": width of activations and weights
    activation_format:      the spec's word for it
    environment:            what AITER's selecting variables must be during the call; those not named must be unset
    interleaved, gate_mode: order of gate and up rows and the argument that says so
    hidden_multiple, intermediate_multiple:  what H and I are padded to
    """

    name: str
    activation_format: str
    environment: Mapping[str, str]
    interleaved: bool
    gate_mode: str
    hidden_multiple: int
    intermediate_multiple: int


@dataclass(frozen=True)
class Entry:
    """One line of the allowlist.

    arch, activation, mode:  what it is about; "*" is all of them
    status:                  "supported", "unsupported", "unverified" or "known_bad"
    label:                   where that comes from: "compiled", "inherited"
    since:                   first version that is served, where supported
    """

    arch: str
    activation: str
    mode: str
    status: str
    label: str
    why: str
    source: str
    since: str | None = None


@dataclass(frozen=True)
class Support:
    """All of the data file."""

    floor: str
    floor_reason: str
    situv2_defaults: tuple[float, ...]
    flydsl: str
    modes: Mapping[str, Mode]
    mode_variables: tuple[str, ...]
    refused_variables: Mapping[str, str]
    entries: tuple[Entry, ...]

    def mode_for(self, activation_format: str) -> Mode | None:
        """Return the mode whose activations have that format."""
        return next((m for m in self.modes.values() if m.activation_format == activation_format), None)

    def entry_for(self, arch: str, activation: str, mode: str) -> Entry | None:
        """Return the first line that matches."""
        for entry in self.entries:
            if entry.arch == arch and entry.activation in (activation, "*") and entry.mode in (mode, "*"):
                return entry
        return None


@cache
def support() -> Support:
    """Read support.json once."""
    path = Path(__file__).with_name("support.json")
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    modes = {
        name: Mode(
            name=name,
            activation_format=mode["activation_format"],
            environment=MappingProxyType(mode["environment"]),
            interleaved=mode["interleaved"],
            gate_mode=mode["gate_mode"],
            hidden_multiple=mode["hidden_multiple"],
            intermediate_multiple=mode["intermediate_multiple"],
        )
        for name, mode in data["modes"].items()
    }
    return Support(
        floor=data["floor"],
        floor_reason=data["floor_reason"],
        situv2_defaults=tuple(data["situv2_defaults_since_floor"]),
        flydsl=data["flydsl"],
        modes=MappingProxyType(modes),
        mode_variables=tuple(data["mode_variables"]),
        refused_variables=MappingProxyType(data["refused_variables"]),
        entries=tuple(Entry(**entry) for entry in data["support"]),
    )
