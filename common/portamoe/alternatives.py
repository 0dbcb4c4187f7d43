"""What a faulty backend may have computed in place of an activation: the formulas that a canary tells apart.

Each maps gate and up, (R, I) float32, to h. Other libraries have computed another activation than asked, swapped the
halves, or dropped a clamp, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from portamoe.activations import Activation, GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep

Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: gpt-oss's and Kimi-K3's parameters, where the activation asked for brings none of its own.
_ALPHA, _LIMIT = 1.702, 7.0
_BETAS = (4.0, 25.0)
#: No pre-activation comes near, so a limit of this is none.
_NO_LIMIT = 1e30


@dataclass(frozen=True)
class Alternative:
    """A formula and what to call it in "computed <name> instead of SiTU"."""

    name: str
    formula: Formula


def label(activation: Activation) -> str:
    """Return the activation's name with the parameters that are set: "SiTU(beta=4.0, linear_beta=25.0)"."""
    values = {name: value for name, value in vars(activation).items() if value is not None}
    inner = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return type(activation).__name__ + (f"({inner})" if inner else "")


def alternatives(activation: Activation) -> tuple[Alternative, ...]:
    """Return every other activation of the core, its own with other parameters, and what is swapped or dropped."""
    others = [Alternative(_short(other, activation), other) for other in _others(activation) if other != activation]
    return (*_dropped(activation), *_rearranged(activation), *others)


def _short(other: Activation, asked: Activation) -> str:
    """Leave out the parameters where the class alone tells the two apart, unless the class has several here."""
    plain = type(other) is not type(asked) and not isinstance(other, GeGLU)
    return type(other).__name__ if plain and getattr(other, "limit", None) is None else label(other)


def _others(asked: Activation) -> Iterator[Activation]:
    limit = getattr(asked, "limit", None) or _LIMIT
    yield SwiGLU()
    yield SwiGLU(limit=limit)
    yield SwiGLUOAI(alpha=getattr(asked, "alpha", _ALPHA), limit=limit)
    yield SwiGLUStep(limit=limit)
    yield GeGLU()
    yield GeGLU(approximate="tanh")
    yield ReLU2()
    if isinstance(asked, SiTU):
        yield SiTU(*_BETAS)
        yield SiTU(asked.beta, asked.beta)
        if asked.linear_beta is not None:
            yield SiTU(asked.linear_beta, asked.beta)
    else:
        yield SiTU(*_BETAS)


def _dropped(asked: Activation) -> Iterator[Alternative]:
    """Yield the activation without its clamps, both and one at a time."""
    if isinstance(asked, SiTU):
        linear = asked.linear_beta
        if linear is not None:
            yield Alternative("SiTU without linear_beta", SiTU(asked.beta))
            yield Alternative(
                "SiTU without beta", lambda g, u: SwiGLU()(g, torch.ones_like(u)) * linear * (u / linear).tanh()
            )
        yield Alternative(
            "SiTU with sigmoid(g / beta)",
            lambda g, u: asked(g, u) * (g / asked.beta).sigmoid() / g.sigmoid().clamp(min=1e-30),
        )
    elif isinstance(asked, SwiGLU | SwiGLUOAI | SwiGLUStep) and asked.limit is not None:
        limit, name = asked.limit, type(asked).__name__
        free = replace(asked, limit=_NO_LIMIT)
        yield Alternative(f"{name} without its clamps", free)
        yield Alternative(f"{name} without the clamp of the gate", lambda g, u: free(g, u.clamp(-limit, limit)))
        yield Alternative(f"{name} without the clamp of up", lambda g, u: _without_up_clamp(asked, g, u))


def _without_up_clamp(asked: SwiGLU | SwiGLUOAI | SwiGLUStep, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Take the factor of u + offset from the values at a small u, below the clamp, where f is linear in it."""
    small = min(1.0, asked.limit or 1.0)
    offset = asked.offset if isinstance(asked, SwiGLUOAI) else 0.0
    at = torch.full_like(up, small)
    slope = (asked(gate, at) - asked(gate, -at)) / (2 * small)
    return slope * (up + offset)


def _rearranged(asked: Activation) -> Iterator[Alternative]:
    name = type(asked).__name__
    yield Alternative(f"{name} with the halves swapped", lambda g, u: asked(u, g))

    def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        rows = torch.cat((gate, up), dim=-1)
        return asked(rows[..., 0::2], rows[..., 1::2])

    yield Alternative(f"{name} with the halves read as interleaved", interleaved)
