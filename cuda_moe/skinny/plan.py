"""Which kernel serves which projection: data in plans/<arch>.json, resolved once per layer into a small table.

A plan answers (N, K, M) and nothing else; what it has no winner for goes to torch. Every entry carries the word for
where it comes from: `measured` on that device, `published` for it by others, or `inherited` from another one's plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cuda_moe.skinny import cute_parameters
from cuda_moe.skinny.parameters import MOST_ROWS, TritonFragments, TritonGemv, TritonMma, TritonTile

SCHEMA = 1
PLANS = Path(__file__).parent.parent / "plans"
#: A folder whose linear-<arch>.json goes before the packaged plan.
FOLDER_VARIABLE = "PORTAMOE_TUNED_DIR"
ORIGINS = ("measured", "published", "unmeasured")
#: The least gain over torch under graph replay that makes an entry.
LEAST_GAIN = 1.05

Parameters = TritonTile | cute_parameters.Parameters
_TRITON: Mapping[str, type[TritonTile]] = MappingProxyType(
    {"triton_gemv": TritonGemv, "triton_mma": TritonMma, "triton_fragments": TritonFragments}
)
KERNELS = (*_TRITON, *cute_parameters.VARIANTS)


class PlanError(ValueError):
    """A plan file cannot be used; says which file and why."""


@dataclass(frozen=True)
class Choice:
    """One kernel with its parameters.

    us:        its time as measured, None where only the winner is published
    torch_us:  time of torch.mm in that run where it is not the entry's own
    """

    kernel: str
    parameters: Parameters
    us: float | None = None
    torch_us: float | None = None


@dataclass(frozen=True)
class Entry:
    """What serves `first` to `last` rows of x: the first of `choices` that can run here.

    torch_us:   time of torch.mm in the same run
    dependent:  the same for programmatic dependent launches, timed in a row of them
    """

    first: int
    last: int
    choices: tuple[Choice, ...]
    torch_us: float | None = None
    dependent: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All entries of an arch, and where they come from.

    arch:      "sm107"
    origin:    "measured", "published" or "unmeasured" (inherited from `inherits`)
    inherits:  the arch whose entries these are, None if they are its own
    about:     device, date, command, source, as the file says
    """

    arch: str
    origin: str
    entries: Mapping[tuple[int, int], tuple[Entry, ...]]
    inherits: str | None = None
    about: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def entry(self, n: int, k: int, m: int) -> Entry | None:
        """Return what serves (M, N, K), None if torch does."""
        return next((e for e in self.entries.get((n, k), ()) if e.first <= m <= e.last), None)

    def resolve(
        self, n: int, k: int, usable: Callable[[str], bool], *, dependent: bool = False
    ) -> tuple[Choice | None, ...]:
        """Return the kernel for each M from 1 to 16, None for torch.

        usable:     whether the kernel of that name can run here
        dependent:  for programmatic dependent launches, None where none is listed: an ordinary launch is what is known
        """
        table: list[Choice | None] = []
        for m in range(1, MOST_ROWS + 1):
            entry = self.entry(n, k, m)
            choices = (entry.dependent if dependent else entry.choices) if entry else ()
            table.append(next((c for c in choices if usable(c.kernel)), None))
        return tuple(table)

    def line(self) -> str:
        """Return one line for the probe: whose winners these are."""
        if self.inherits:
            return f"{self.arch} uses {self.inherits}'s winners: inherited, {self.origin}"
        where = self.about.get("device") or self.about.get("source") or "unknown source"
        date = f", {self.about['date']}" if "date" in self.about else ""
        return f"{self.arch}: {self.origin} ({where}{date}), {len(self.entries)} projections"


def arch_name(capability: tuple[int, int]) -> str:
    """Return the name of a CUDA compute capability's plan: "sm90" for (9, 0)."""
    return f"sm{capability[0]}{capability[1]}"


def load_plan(capability: tuple[int, int], environ: Mapping[str, str] = os.environ) -> Plan | None:
    """Return the plan of a compute capability, None where there is none.

    $PORTAMOE_TUNED_DIR/linear-<arch>.json goes before the packaged file. Raises PlanError for a file that is wrong.
    """
    arch = arch_name(capability)
    folder = environ.get(FOLDER_VARIABLE)
    if folder and (own := Path(folder) / f"linear-{arch}.json").is_file():
        return read_plan(own)
    packaged = PLANS / f"{arch}.json"
    return read_plan(packaged) if packaged.is_file() else None


def read_plan(path: Path) -> Plan:
    """Read one file and what it inherits; raises PlanError that names the file and the fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return _plan(data, path)
    except PlanError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path} is no plan of linear projections: {type(error).__name__}: {error}") from error


def _plan(data: Any, path: Path) -> Plan:
    if data["schema"] != SCHEMA:
        raise PlanError(f"{path} has schema {data['schema']}, this version reads {SCHEMA}")
    origin, arch = data["origin"], data["arch"]
    if origin not in ORIGINS:
        raise PlanError(f"{path}: origin {origin!r}, expected one of {', '.join(ORIGINS)}")
    about = {key: value for key, value in data.items() if key != "projections"}
    if "inherits" in data:
        if origin != "unmeasured" or "projections" in data:
            raise PlanError(f"{path}: a plan that inherits is 'unmeasured' and has no projections of its own")
        parent = read_plan(path.with_name(f"{data['inherits']}.json"))
        return Plan(arch, origin, parent.entries, parent.arch, about)
    needed = {"measured": ("device", "date", "command"), "published": ("source",)}.get(origin, ("inherits",))
    if missing := [key for key in needed if not data.get(key)]:
        raise PlanError(f"{path}: {origin} and does not say {', '.join(missing)}")
    entries: dict[tuple[int, int], tuple[Entry, ...]] = {}
    for projection in data["projections"]:
        shape = int(projection["n"]), int(projection["k"])
        if shape in entries:
            raise PlanError(f"{path}: {shape[0]}x{shape[1]} is listed twice")
        entries[shape] = _entries(projection, shape, origin, path)
    return Plan(arch, origin, MappingProxyType(entries), None, about)


def _entries(projection: Mapping[str, Any], shape: tuple[int, int], origin: str, path: Path) -> tuple[Entry, ...]:
    found: list[Entry] = []
    for data in projection["entries"]:
        first, last = (int(m) for m in data["tokens"])
        choices, dependent = (tuple(_choice(c) for c in data.get(key, ())) for key in ("choices", "dependent"))
        where = f"{path}: {shape[0]}x{shape[1]} for {first} to {last} rows"
        if not 1 <= first <= last <= MOST_ROWS or (found and first <= found[-1].last):
            raise PlanError(f"{where}: rows ascend from 1 to {MOST_ROWS} without overlap")
        if not choices and not dependent:
            raise PlanError(f"{where}: no choice; leave the entry out, so that torch serves it")
        torch_us = data.get("torch_us")
        for choice in (*choices, *dependent):
            for m in {first, last}:
                choice.parameters.check(*shape, m)
            if origin == "measured" and not _gains(choice, torch_us):
                raise PlanError(f"{where}: {choice.kernel} must beat torch by {LEAST_GAIN - 1:.0%} to be listed")
        found.append(Entry(first, last, choices, torch_us, dependent))
    return tuple(found)


def _choice(data: Mapping[str, Any]) -> Choice:
    parameters = parse(data["kernel"], dict(data["parameters"]))
    return Choice(data["kernel"], parameters, data.get("us"), data.get("torch_us"))


def _gains(choice: Choice, torch_us: float | None) -> bool:
    torch_us = choice.torch_us or torch_us
    return choice.us is not None and torch_us is not None and choice.us * LEAST_GAIN <= torch_us


def parse(kernel: str, values: dict[str, Any]) -> Parameters:
    """Return the parameters of a kernel by name; ValueError for an unknown kernel, name or value."""
    if kernel in cute_parameters.VARIANTS:
        return cute_parameters.parse(kernel, values)
    kind = _TRITON.get(kernel)
    if kind is None:
        raise ValueError(f"unknown kernel {kernel!r}; known: {', '.join(KERNELS)}")
    if unknown := set(values) - set(kind.__dataclass_fields__):
        names = ", ".join(kind.__dataclass_fields__)
        raise ValueError(f"{kernel}: unknown parameters {', '.join(sorted(unknown))}; it takes {names}")
    return kind(**values)
