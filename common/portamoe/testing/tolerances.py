"""How far a result may be from the reference: one table by number format, and the comparison that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from portamoe.spec import MoESpec


@dataclass(frozen=True)
class Tolerance:
    """Bounds on an error e = actual - expected.

    rms:    rms(e) / rms(expected) over all tokens
    max:    max|e| / max|expected|
    token:  rms(e) / rms(expected) of the worst single token
    """

    rms: float
    max: float
    token: float


#: By the number format and where a backend rounds; the float32 reference on the dequantised weights is the other side.
#: bf16 has 8 significant bits: one rounding costs about 1.7e-3 relative RMS, and independent ones add in squares.
TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        # float32 throughout, in another order of summation
        "float32": Tolerance(rms=2e-6, max=1e-5, token=1e-5),
        # float64 throughout
        "float64": Tolerance(rms=1e-12, max=1e-11, token=1e-11),
        # float32 inside, the result rounded once
        "bf16_1": Tolerance(rms=0.0025, max=0.025, token=1e-2),
        # h and the result rounded to bf16
        "bf16_2": Tolerance(rms=0.0035, max=0.025, token=1e-2),
        # gate, up and each expert's result rounded to bf16 as well
        "bf16_4": Tolerance(rms=0.005, max=0.025, token=1e-2),
        # fp16 has 3 bits more than bf16
        "fp16_1": Tolerance(rms=0.0025 / 8, max=0.025 / 8, token=1e-2 / 8),
        "fp16_2": Tolerance(rms=0.0035 / 8, max=0.025 / 8, token=1e-2 / 8),
        # Quantised activations: a last-bit difference before the quantiser moves a value by a whole step. With gate, up
        # and h rounded to bf16 first, RMS comes to 0.016 (8 bits) and 0.036 (4 bits); unquantised it is 0.06 and 0.19.
        "mxfp8": Tolerance(rms=0.02, max=0.05, token=0.08),
        "mxfp4": Tolerance(rms=0.05, max=0.12, token=0.15),
        "nvfp4": Tolerance(rms=0.05, max=0.12, token=0.15),
    }
)


@dataclass(frozen=True)
class ErrorMetrics:
    """How far a result is from what was expected; see `Tolerance` for rms, max and token.

    worst_token, worst_column:    where |e| is largest
    actual, expected:             the two values there
    token_index:                  the token of the largest relative RMS
    nonfinite, misplaced:         NaN or Inf in the result, and how many of them the reference does not have alike
    """

    rms: float
    max: float
    token: float
    worst_token: int
    worst_column: int
    actual: float
    expected: float
    token_index: int
    nonfinite: int
    misplaced: int

    def __str__(self) -> str:
        return (
            f"relative RMS {self.rms:.3g}, max {self.max:.3g} of max|expected| at token {self.worst_token} column "
            f"{self.worst_column} ({self.actual:.6g}, expected {self.expected:.6g}), worst token "
            f"{self.token_index} with relative RMS {self.token:.3g}, {self.nonfinite} not finite"
            + (f" ({self.misplaced} where the reference has another value)" if self.misplaced else "")
        )


def error_metrics(actual: torch.Tensor, expected: torch.Tensor) -> ErrorMetrics:
    """Compare two results in float64.

    actual, expected:  (T, N) float, on any devices

    Where the reference is NaN or Inf, the result must be alike; those elements count in no mean. Raises ValueError for
    shapes that differ.
    """
    if actual.shape != expected.shape or actual.dim() != 2:
        raise ValueError(f"expected two equal (T, N) shapes, got {tuple(actual.shape)}, {tuple(expected.shape)}")
    if actual.numel() == 0:
        return ErrorMetrics(0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0, 0, 0)
    truth = expected.detach().double()
    value = actual.detach().to(truth.device).double()
    finite = torch.isfinite(truth)
    alike = (value == truth) | (value.isnan() & truth.isnan())
    both = finite & torch.isfinite(value)
    error = torch.where(both, value - truth, 0.0)
    truth_finite = torch.where(both, truth, 0.0)
    worst = int(error.abs().argmax())
    row, column = divmod(worst, value.shape[1])
    tokens = _ratio(error.square().mean(1).sqrt(), truth_finite.square().mean(1).sqrt())
    return ErrorMetrics(
        rms=float(_ratio(error.square().mean().sqrt(), truth_finite.square().mean().sqrt())),
        max=float(_ratio(error.abs().max(), truth_finite.abs().max())),
        token=float(tokens.max()),
        worst_token=row,
        worst_column=column,
        actual=float(value[row, column]),
        expected=float(truth[row, column]),
        token_index=int(tokens.argmax()),
        nonfinite=int((~torch.isfinite(value)).sum()),
        misplaced=int((~both & ~alike).sum()),
    )


def _ratio(error: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return error / scale; 0 where both are 0, Inf where only the scale is."""
    return torch.where(error == 0, 0.0, error / scale)


def tolerance(roundings: int | str) -> Tolerance:
    """Return the row of `TOLERANCES`: 1, 2 or 4 mean that many roundings to bf16.

    Raises ValueError that lists the known rows.
    """
    key = f"bf16_{roundings}" if isinstance(roundings, int) else roundings
    if key not in TOLERANCES:
        raise ValueError(f"no tolerance {roundings!r}; known: {', '.join(TOLERANCES)}, or 1, 2, 4 for bf16")
    return TOLERANCES[key]


def tolerance_of(spec: MoESpec, backend: object) -> str:
    """Return the row of `TOLERANCES` for a bf16 result of a backend: by the activation format, else by its roundings.

    backend:  its attribute `roundings` says how often it rounds to bf16 (1, 2 or 4); without it 4 are allowed
    """
    if spec.activation_format != "bf16":
        return spec.activation_format
    return f"bf16_{getattr(backend, 'roundings', 4)}"


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, roundings: int | str = 2, context: str = ""
) -> ErrorMetrics:
    """Raise AssertionError unless `actual` is within the bounds of its number format; return the metrics.

    actual, expected:  (T, N) float — the result and the float32 (or float64) reference
    roundings:         a row of `TOLERANCES`, or 1, 2, 4 roundings to bf16
    context:           put before the message

    A token without experts must be exactly 0, NaN and Inf must stand where the reference has them.
    """
    bounds = tolerance(roundings)
    metrics = error_metrics(actual, expected)
    broken = [
        f"{name} {value:.3g} > {limit:.3g}"
        for name, value, limit in (
            ("relative RMS", metrics.rms, bounds.rms),
            ("max", metrics.max, bounds.max),
            ("relative RMS of the worst token", metrics.token, bounds.token),
        )
        if not value <= limit
    ]
    if metrics.misplaced:
        broken.insert(0, f"{metrics.misplaced} NaN or Inf differ")
    if broken:
        prefix = f"{context}: " if context else ""
        raise AssertionError(f"{prefix}{'; '.join(broken)} (tolerance {roundings!r})\n  {metrics}")
    return metrics
