"""Who has kernels for projections of few rows: found through the vendor packages, without importing torch.

A vendor package names its providers in LINEAR_PROVIDERS, in the manner of BACKENDS.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from portamoe.backend import Announcement
from portamoe.device import Device
from portamoe.registry import VENDOR_PACKAGES

#: Rows of x up to which a provider is asked; from there on a product is bound by more than reading its weights.
MOST_ROWS = 16

#: kernel(x, weight, out, residual=None, *, pdl=False): x (M, K), weight (N, K), out and residual (M, N), contiguous.
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class LinearTable:
    """What serves one weight shape on one device: kernels[M - 1] for M rows, None where torch does.

    names:      for the reader: name of each kernel, "torch" where there is none
    dependent:  the same as kernels for launches with pdl=True; empty: kernels
    """

    kernels: tuple[Kernel | None, ...]
    names: tuple[str, ...]
    dependent: tuple[Kernel | None, ...] = ()

    def kernel(self, m: int, *, pdl: bool = False) -> Kernel | None:
        """Return what serves m rows, None for torch."""
        if not 1 <= m <= len(self.kernels):
            return None
        return (self.dependent or self.kernels)[m - 1] if pdl else self.kernels[m - 1]


@dataclass(frozen=True)
class Candidate:
    """A kernel that a tuning run may time: `choice` is the provider's own description of it."""

    label: str
    kernel: Kernel
    choice: Any


@dataclass(frozen=True)
class Timed:
    """Time of a candidate for (M, N, K) under graph replay, its result having been right.

    pdl:       launched dependent, in a row of such launches
    torch_us:  time of torch in that run where it is another than that of the rest
    """

    n: int
    k: int
    m: int
    choice: Any
    us: float
    pdl: bool = False
    torch_us: float | None = None


class LinearProvider(Protocol):
    """What a vendor package offers; nothing heavy is imported before `table`."""

    name: str

    def table(self, n: int, k: int, device: Device) -> LinearTable | None:
        """Return the kernels for bf16 weights (N, K) on `device`, None if torch serves all M."""
        ...

    def lines(self, device: Device) -> tuple[str, ...]:
        """Return what the probe says about `device`, one line each; imports neither torch nor a vendor library."""
        ...

    def shapes(self, device: Device) -> tuple[tuple[int, int], ...]:
        """Return (N, K) of the projections that are planned for `device`."""
        ...

    def candidates(self, n: int, k: int, m: int, device: Device) -> list[Candidate]:
        """Return what a tuning run should time for (M, N, K) on `device`."""
        ...

    def plan(
        self,
        device: Device,
        about: Mapping[str, Any],
        timed: Sequence[Timed],
        torch_us: Mapping[tuple[int, int, int], float],
    ) -> tuple[str, str]:
        """Return name and text of the file that makes a tuning run's winners the plan of `device`.

        about:     what the file says of its origin: device, date, command, versions
        timed:     every candidate that was right
        torch_us:  (N, K, M) -> time of torch in the same run
        """
        ...


TORCH_ONLY = LinearTable((None,) * MOST_ROWS, ("torch",) * MOST_ROWS)


def providers(device: Device) -> tuple[LinearProvider, ...]:
    """Return the providers for a device's vendor, highest priority first."""
    found: list[tuple[int, LinearProvider]] = []
    for package in VENDOR_PACKAGES:
        announced: tuple[Announcement, ...] = getattr(importlib.import_module(package), "LINEAR_PROVIDERS", ())
        for a in announced:
            if device.vendor in a.vendors:
                module, _, attribute = a.target.partition(":")
                found.append((a.priority, getattr(importlib.import_module(module), attribute)))
    return tuple(provider for _, provider in sorted(found, key=lambda pair: -pair[0]))
