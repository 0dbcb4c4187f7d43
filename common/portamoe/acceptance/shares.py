"""The acceptance set in parts that run in processes of their own, because most of its time is compiling."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: What a child prints before and after a check, with JSON behind it.
BEGIN, CHECK = "portamoe-begin:", "portamoe-check:"
#: A child's exit code: the device is unusable in that process after the check that was printed last.
BROKEN = 75
#: In the order of the set. "process" is what the parent says of a child that crashed between checks.
GROUPS = ("canary", "activation", "shape", "tokens", "routing", "repeat", "windows", "graph", "timing", "process")
#: They share the kernels of one small spec, so one process compiles those once.
_SMALL = ("canary", "tokens", "routing", "repeat", "windows", "graph")
#: From so many processes on, the groups whose every case has kernels of its own are split.
_MANY = 8
_SHAPE_PARTS, _ACTIVATION_PARTS = 5, 3


@dataclass(frozen=True)
class Share:
    """Part `part` of `of` of the checks of `groups`; every check is in one share."""

    groups: tuple[str, ...]
    part: int = 0
    of: int = 1

    def __str__(self) -> str:
        name = self.groups[0] if len(self.groups) == 1 else "all" if "timing" in self.groups else "small spec"
        return name if self.of == 1 else f"{name} {self.part + 1} of {self.of}"

    def has(self, group: str, number: int) -> bool:
        """Return whether check `number` of its group is in this share."""
        return group in self.groups and number % self.of == self.part

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Share:
        """Read the JSON form."""
        return cls(tuple(data["groups"]), data["part"], data["of"])


def shares(jobs: int) -> tuple[Share, ...]:
    """Return the shares of one backend for `jobs` processes, the longest first; timing is the last."""
    if jobs == 1:
        return (Share(GROUPS),)
    shape, activation = (_SHAPE_PARTS, _ACTIVATION_PARTS) if jobs >= _MANY else (1, 1)
    split = [Share(("shape",), part, shape) for part in range(shape)]
    split += [Share(("activation",), part, activation) for part in range(activation)]
    return (Share(_SMALL), *split, Share(("timing",)))
