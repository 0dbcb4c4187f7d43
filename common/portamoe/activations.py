"""Gated activations between the two expert GEMMs, each with its parameters and its float32 torch formula.

g is the gate (w1·x), u is up (w3·x). None of them is homogeneous, f(s·g, s·u) != s·f(g, u), so every scale of GEMM1
must be applied before the activation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Activation(ABC):
    """Base of the gated activations: frozen, hashable, validated at construction.

    A subclass holds its parameters as fields, its `name` as in model configs and its formula in `_formula`.
    """

    name: ClassVar[str]

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return f(gate, up) without any rounding below float32.

        gate, up:  (..., I) any float dtype, same shape; float64 stays, the others become float32
        returns    (..., I) float32 or float64

        Raises TypeError for integer tensors and ValueError for shapes that differ.
        """
        if gate.shape != up.shape:
            raise ValueError(f"gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; they must be the same")
        return self._formula(_at_least_float32(gate, "gate"), _at_least_float32(up, "up"))

    def apply(self, gate_up: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return f of the halves of `[gate | up]`, rounded once to `out_dtype`.

        gate_up:    (..., 2I) float — gate in the first I columns, up in the last
        out_dtype:  dtype of the result; default: that of `gate_up`
        returns     (..., I)

        Raises TypeError for an integer tensor and ValueError for an odd last dimension.
        """
        if gate_up.shape[-1] % 2:
            raise ValueError(f"gate_up has {gate_up.shape[-1]} columns; [gate | up] needs an even number of them")
        gate, up = gate_up.chunk(2, dim=-1)
        return self(gate, up).to(gate_up.dtype if out_dtype is None else out_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: {"name": "situ", "beta": 4.0, "linear_beta": 25.0}."""
        return {"name": self.name, **asdict(self)}

    @abstractmethod
    def _formula(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Compute f on float32 or float64 tensors of one shape."""


@dataclass(frozen=True)
class SiTU(Activation):
    """SiTU (AITER: "situv2"): f = beta·tanh(g/beta)·sigmoid(g) · linear_beta·tanh(u/linear_beta).

    beta:         > 0; Kimi-K3: 4.0. There is no default: a wrong beta still gives plausible text.
    linear_beta:  > 0, or None: u is left as it is; Kimi-K3: 25.0

    The sigmoid takes the raw g, not g/beta. |f| <= beta·linear_beta where linear_beta is set.
    Source: vLLM 0.33.0, model_executor/layers/activation.py, SituAndMul.forward_native.
    """

    name: ClassVar[str] = "situ"

    beta: float
    linear_beta: float | None = None

    def __post_init__(self) -> None:
        _set_number(self, "beta", positive=True)
        if self.linear_beta is not None:
            _set_number(self, "linear_beta", positive=True)

    def _formula(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        # A real tanh: 2·sigmoid(2x) - 1 loses relative accuracy where x is small.
        gated = self.beta * (gate / self.beta).tanh() * gate.sigmoid()
        if self.linear_beta is None:
            return gated * up
        return gated * (self.linear_beta * (up / self.linear_beta).tanh())


@dataclass(frozen=True)
class SwiGLU(Activation):
    """SwiGLU, also "silu": f = g·sigmoid(g)·u, with `limit` L on g' = min(g, L) and u' = clamp(u, -L, L).

    limit:  > 0, or None: no clamps

    Source: vLLM 0.33.0, model_executor/layers/activation.py, SiluAndMul and SiluAndMulWithClamp.
    """

    name: ClassVar[str] = "swiglu"

    limit: float | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            _set_number(self, "limit", positive=True)

    def _formula(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * gate.sigmoid() * up


@dataclass(frozen=True)
class SwiGLUOAI(Activation):
    """SwiGLU of gpt-oss: f = (u' + offset)·g'·sigmoid(alpha·g') with L = limit, g' = min(g, L), u' = clamp(u, -L, L).

    alpha:   finite; gpt-oss: 1.702
    limit:   > 0; gpt-oss: 7.0
    offset:  finite; gpt-oss: 1.0 (MiniMax-M3 style models set another)

    gate and up come as separate halves; interleaved rows are a matter of `portamoe.layouts`.
    Source: vLLM 0.33.0, model_executor/layers/fused_moe/activation.py, swigluoai and swigluoai_uninterleave.
    """

    name: ClassVar[str] = "swiglu_oai"

    alpha: float
    limit: float
    offset: float = 1.0

    def __post_init__(self) -> None:
        _set_number(self, "alpha")
        _set_number(self, "limit", positive=True)
        _set_number(self, "offset")

    def _formula(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.offset) * gate * (self.alpha * gate).sigmoid()


@dataclass(frozen=True)
class SwiGLUStep(Activation):
    """SwiGLU clamped after the SiLU: f = min(g·sigmoid(g), limit)·clamp(u, -limit, limit).

    limit:  > 0; Step models: 7.0

    Source: vLLM 0.33.0, model_executor/layers/activation.py, swiglustep.
    """

    name: ClassVar[str] = "swiglu_step"

    limit: float

    def __post_init__(self) -> None:
        _set_number(self, "limit", positive=True)

    def _formula(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (gate * gate.sigmoid()).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class GeGLU(Activation):
    """GeGLU: f = gelu(g)·u.

    approximate:  "none": gelu(g) = g/2·(1 + erf(g/√2));
                  "tanh": gelu(g) = g/2·(1 + tanh(√(2/π)·(g + 0.044715·g³)))

    Source: Hendrycks and Gimpel, arXiv:1606.08415, section 2.
    """

    name: ClassVar[str] = "geglu"

    approximate: Literal["none", "tanh"] = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.approximate, str):
            raise TypeError(f'{self.name}: approximate must be "none" or "tanh", got {self.approximate!r}')
        if self.approximate not in {"none", "tanh"}:
            raise ValueError(f'{self.name}: approximate must be "none" or "tanh", got {self.approximate!r}')

    def _formula(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.nn.functional.gelu(gate, approximate=self.approximate) * up


@dataclass(frozen=True)
class ReLU2(Activation):
    """Gated squared ReLU: f = max(g, 0)²·u.

    Source: vLLM 0.33.0, model_executor/layers/quantization/utils/humming/activation.py (the gated form).
    """

    name: ClassVar[str] = "relu2"

    def _formula(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate.relu().square() * up


#: Every activation by its name; "silu" is what model configs call SwiGLU.
ACTIVATIONS: Mapping[str, type[Activation]] = MappingProxyType(
    {cls.name: cls for cls in (SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep, GeGLU, ReLU2)} | {"silu": SwiGLU}
)


def activation_from_dict(data: Mapping[str, Any]) -> Activation:
    """Build an activation from its JSON form, the inverse of `Activation.to_dict`.

    Raises ValueError for an unknown name and for unknown or missing parameters, TypeError or ValueError for a bad
    value; the message lists what is known.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f'activation must be an object such as {{"name": "situ", "beta": 4.0}}, got {data!r}')
    name = data.get("name")
    cls = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"unknown activation {name!r}; known: {', '.join(sorted(ACTIVATIONS))}")
    values = {key: value for key, value in data.items() if key != "name"}
    known = [f.name for f in fields(cls)]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"activation {name!r} has no parameters {unknown}; it takes {known}")
    required = [f.name for f in fields(cls) if f.default is MISSING]
    if missing := [key for key in required if key not in values]:
        raise ValueError(f"activation {name!r} lacks {missing}; there is no default, take it from the model")
    return cls(**values)


def _at_least_float32(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{what} is {tensor.dtype}, expected a float tensor")
    import torch

    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _set_number(activation: Activation, field: str, *, positive: bool = False) -> None:
    """Check a parameter and store it as a float, so that 4 and 4.0 give the same JSON."""
    value = getattr(activation, field)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{activation.name}: {field} must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{activation.name}: {field} must be finite, got {value!r}")
    if positive and number <= 0.0:
        optional = any(f.name == field and f.default is None for f in fields(activation))
        hint = "; leave it out (None) if the model does not set it" if optional else ""
        raise ValueError(f"{activation.name}: {field} must be greater than 0, got {value!r}{hint}")
    object.__setattr__(activation, field, number)
