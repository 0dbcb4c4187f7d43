"""The canary: a small problem on which a backend has to prove its numbers before it serves a spec on a device.

Pre-activations reach ±40 and beyond, scales differ from expert to expert, one slot is -1. A result passes if it is
within the tolerance of its number format around the reference that rounds where the spec rounds, and at least 4 times
nearer to it than to any other activation, to swapped halves and to a dropped clamp.

A backend may say what has to be covered; without that, a sweep over the numbers of tokens finds what it picks by T:

canary_token_buckets(spec, max_tokens) -> tuple[int, ...]    numbers of tokens, one for each kernel it may pick
tactics(spec, max_tokens) -> tuple[str, ...]                 names of tactics that its runtime or autotuner may pick
pinned(prepared, tactic) -> context manager                  `forward` uses that tactic inside
canary_spec(spec) -> MoESpec                                 the small spec, where its shapes ask for another
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from portamoe.activations import SiTU
from portamoe.alternatives import Alternative, alternatives, label
from portamoe.decision import Reason
from portamoe.reference import dequantized, full_precision, moe_reference, round_activations
from portamoe.testing import (
    Problem,
    assert_close,
    error_metrics,
    make_routing,
    make_weights,
    make_x,
    tolerance,
    tolerance_of,
)
from portamoe.verdicts import WHAT, Case, Verdict

if TYPE_CHECKING:
    from portamoe.backend import Backend
    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertWeights

#: A right result is this many times nearer to the reference than to any alternative.
MARGIN = 4.0
#: Tokens with values of their own; larger calls repeat them.
TOKENS = 20
#: Stride through them, so that calls of few tokens meet all: it has no divisor in common with TOKENS.
_STRIDE = 7
#: Standard deviation of gate and up: ±40 is two of them.
_STD = 20.0
#: Rows judged at once: a single wrong tile must not drown in the mean.
_CHUNK = 2048
#: The most rows of a window, which bounds the memory.
_MOST_ROWS = 65536
#: The tokens at which an alternative differs at least this share of the most count in telling it apart.
_TELLING = 0.7
#: Alternatives this near to the nearest fit as well; the first of them is named.
_ALIKE = 1.2
REMEDY = "use another backend; PORTAMOE_CANARY=force checks again"


class CanaryFault(Exception):
    """A result is not what was asked; says what it is instead."""


def cases_of(backend: Backend, spec: MoESpec, max_tokens: int) -> tuple[Case, ...]:
    """Return every (tactic, tokens) that has to be run for calls of up to `max_tokens` tokens."""
    own_buckets = getattr(backend, "canary_token_buckets", None)
    buckets = token_buckets(max_tokens) if own_buckets is None else tuple(own_buckets(spec, max_tokens))
    own_tactics = getattr(backend, "tactics", None)
    tactics = (None,) if own_tactics is None else (tuple(own_tactics(spec, max_tokens)) or (None,))
    return tuple((tactic, tokens) for tactic in tactics for tokens in buckets)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Return powers of two, those plus one, and `max_tokens`, none above it: tiles change there."""
    powers = [1 << bit for bit in range(max_tokens.bit_length())]
    return tuple(sorted({t for power in powers for t in (power, power + 1) if t <= max_tokens} | {max_tokens}))


@dataclass(frozen=True)
class References:
    """What TOKENS tokens give, each (TOKENS, H) float32 on the device.

    truth:   the reference
    others:  by the words for it, what a fault would give
    """

    problem: Problem
    truth: torch.Tensor
    others: Mapping[str, torch.Tensor]


def canary_problem(small: MoESpec) -> Problem:
    """Draw weights, tokens and routing on the CPU, the same everywhere."""
    generator = torch.Generator().manual_seed(20)
    gate, up = _stds(small)
    weights, x_std = make_weights(small, generator, gate_std=gate, up_std=up)
    x = make_x(TOKENS, small.hidden_size, x_std, generator).bfloat16()
    ids, weight = make_routing(small, TOKENS, generator)
    # A slot that is not on this rank, at the front and with as much weight as the others together.
    ids[1, 0], weight[1, 0] = -1, 1.0
    return Problem(small, _distinct(weights, small), x, ids, weight)


def _stds(small: MoESpec) -> tuple[float, float]:
    limit = getattr(small.activation, "limit", None) or 0.0
    if isinstance(small.activation, SiTU):
        return _STD, 2 * _STD
    return max(_STD, 0.8 * limit), max(_STD, 0.8 * limit)


def _distinct(weights: ExpertWeights, small: MoESpec) -> ExpertWeights:
    """Give neighbouring experts scales apart by powers of two, which are exact."""
    index = torch.arange(len(weights), device=weights.w13.device)
    first, second = index % 2, index % 3
    changes: dict[str, torch.Tensor] = {}
    if small.weight_format == "mxfp4":
        assert weights.w13_scale is not None  # noqa: S101 - the format has scales
        assert weights.w2_scale is not None  # noqa: S101
        changes["w13_scale"] = weights.w13_scale + first.to(torch.uint8)[:, None, None]
        changes["w2_scale"] = weights.w2_scale + second.to(torch.uint8)[:, None, None]
    elif small.weight_format == "nvfp4":
        assert weights.w13_global_scale is not None  # noqa: S101
        assert weights.w2_global_scale is not None  # noqa: S101
        # One scale for w1 and w3: some kernels take no more, and say so when weights bring two.
        changes["w13_global_scale"] = weights.w13_global_scale[:, :1].repeat(1, 2) * (2.0**first)[:, None]
        changes["w2_global_scale"] = weights.w2_global_scale * 2.0**second
    else:
        changes["w13"] = weights.w13 * (2.0**first).to(weights.w13.dtype)[:, None, None]
        changes["w2"] = weights.w2 * (2.0**second).to(weights.w2.dtype)[:, None, None]
    return replace(weights, **changes)


@functools.lru_cache(maxsize=4)
def references(small: MoESpec, device: torch.device) -> References:
    """Return the problem on `device` with its reference and what each fault would give."""
    problem = on_device(canary_problem(small), device)
    truth = problem.reference()
    others = _with_formulas(problem, alternatives(small.activation))
    for words, expert in (("first", small.local_experts.start), ("last", small.local_experts.stop - 1)):
        ids = torch.where(problem.topk_ids == -1, expert, problem.topk_ids)
        others[f"the {words} expert for a slot of -1"] = moe_reference(
            small, problem.weights, problem.x, ids, problem.topk_weights
        )
    return References(problem, truth, others)


def on_device(problem: Problem, device: torch.device) -> Problem:
    """Return the problem with all its tensors on `device`."""
    weights = problem.weights
    moved = {n: v.to(device) for n, v in vars(weights).items() if isinstance(v, torch.Tensor)}
    tensors = (problem.x, problem.topk_ids, problem.topk_weights)
    return Problem(problem.spec, replace(weights, **moved), *(t.to(device) for t in tensors))


def _with_formulas(problem: Problem, formulas: tuple[Alternative, ...]) -> dict[str, torch.Tensor]:
    """Return the layer's result by each formula, as `moe_reference` computes it, with one GEMM1 for all."""
    spec, x = problem.spec, problem.x.float()
    total = x.new_zeros(len(formulas), *x.shape)
    with full_precision():
        for index, expert_id in enumerate(spec.local_experts):
            slots = problem.topk_ids == expert_id
            weight = torch.where(slots, problem.topk_weights, 0.0).sum(1, keepdim=True)
            expert = problem.weights.expert(index)
            w13, w2 = (matrix.float() for matrix in dequantized(expert))
            gate_up = round_activations(x, spec, expert.w13_input_scale) @ w13.T
            if expert.w13_bias is not None:
                gate_up += expert.w13_bias.float()
            h = torch.cat([alternative.formula(*gate_up.chunk(2, dim=-1)) for alternative in formulas])
            result = round_activations(h, spec, expert.w2_input_scale) @ w2.T
            if expert.w2_bias is not None:
                result += expert.w2_bias.float()
            total += weight * result.view_as(total)
    return {alternative.name: values for alternative, values in zip(formulas, total, strict=True)}


def run(backend: Backend, small: MoESpec, cases: tuple[Case, ...], device: torch.device) -> Verdict:
    """Run `cases` on the small spec and judge every result.

    Raises RuntimeError inside a graph capture, CanaryFault never: a fault is a verdict. What a backend raises comes
    through.
    """
    if capturing():
        raise RuntimeError(
            "a canary cannot run inside a graph capture; construct RoutedExperts before it, or set PORTAMOE_CANARY=skip"
        )
    start = time.perf_counter()
    reason: Reason | None = None
    indistinct: tuple[str, ...] = ()
    done: list[Case] = []
    with torch.no_grad(), _current(device):
        known = references(small, device)
        prepared = backend.prepare(known.problem.weights, small, device)
        for tactic, tokens in cases:
            y, rows = _call(backend, prepared, known.problem, tactic, tokens)
            done.append((tactic, tokens))
            try:
                indistinct = judge(y, rows, known, tolerance_of(small, backend))
            except CanaryFault as fault:
                where = f"at {tokens} tokens" + (f" with tactic {tactic}" if tactic is not None else "")
                reason = Reason(WHAT, f"{fault} ({where})", "the reference's numbers", REMEDY)
                break
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Verdict(reason is None, reason, tuple(done), indistinct, round(time.perf_counter() - start, 3), date)


def capturing() -> bool:
    """Is the current stream being captured in a graph?"""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def torch_device(device: Device) -> torch.device:
    """Return the torch device of a detected one."""
    return torch.device(device.torch_name)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _call(
    backend: Backend, prepared: Any, problem: Problem, tactic: str | None, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y (R, H) and the token of the problem that each row is, over as many calls as show every token."""
    pinned = getattr(backend, "pinned", None)
    context = pinned(prepared, tactic) if pinned is not None and tactic is not None else nullcontext()
    with context:
        calls = [_one_call(backend, prepared, problem, rows) for rows in _rows(tokens, problem.x.device)]
    return torch.cat([y for y, _ in calls]), torch.cat([rows for _, rows in calls])


def _rows(tokens: int, device: torch.device) -> Iterator[torch.Tensor]:
    every = torch.arange(tokens * math.ceil(TOKENS / tokens), device=device) * _STRIDE % TOKENS
    yield from every.split(tokens)


def _one_call(
    backend: Backend, prepared: Any, problem: Problem, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, spec = len(rows), problem.spec
    window = min(backend.default_max_local_rows(spec, tokens), _MOST_ROWS)
    x, ids, weights = problem.x[rows], problem.topk_ids[rows], problem.topk_weights[rows]
    out = torch.full_like(x, torch.nan)
    workspace = poisoned(backend.workspace_bytes(spec, tokens, window), x.device)
    backend.forward(prepared, x, ids, weights, workspace, out, max_local_rows=window)
    return out, rows


def poisoned(nbytes: int, device: torch.device, byte: int = 0xFF) -> torch.Tensor:
    """Return (nbytes,) uint8 from an address that 256 divides, all of one byte: 0xFF is NaN in every float format."""
    spare = torch.full((nbytes + 255,), byte, dtype=torch.uint8, device=device)
    first = -spare.data_ptr() % 256
    return spare[first : first + nbytes]


def judge(y: torch.Tensor, rows: torch.Tensor, known: References, roundings: str) -> tuple[str, ...]:
    """Compare a result with the reference and the alternatives; return those that cannot be told apart.

    y:          (R, H) float
    rows:       (R,) int64 — the token of the problem that each row is
    roundings:  a row of `portamoe.testing.TOLERANCES`

    Raises CanaryFault.
    """
    asked = type(known.problem.spec.activation).__name__
    for start in range(0, len(y), _CHUNK):
        chunk, tokens = y[start : start + _CHUNK], rows[start : start + _CHUNK]
        try:
            assert_close(chunk, known.truth[tokens], roundings=roundings)
        except AssertionError:
            raise CanaryFault(_explain(chunk, tokens, known, roundings)) from None
    bound, indistinct = tolerance(roundings).rms, []
    for name, other in known.others.items():
        apart = _by_row(other, known.truth, known.truth)
        telling = apart >= _TELLING * apart.max()
        if float(_mean(apart[telling])) < (1 + MARGIN) * bound:
            indistinct.append(name)
            continue
        picked = telling[rows].nonzero().flatten()[:_CHUNK]
        tokens = rows[picked]
        to_truth = float(_mean(_by_row(y[picked], known.truth[tokens], known.truth[tokens])))
        to_other = float(_mean(_by_row(y[picked], other[tokens], known.truth[tokens])))
        if not to_other >= MARGIN * to_truth:
            raise CanaryFault(
                f"cannot be told from {name}, asked for {asked}: relative RMS {to_truth:.2g} to the one and "
                f"{to_other:.2g} to the other"
            )
    return tuple(indistinct)


def _explain(y: torch.Tensor, rows: torch.Tensor, known: References, roundings: str) -> str:
    """Say what the rows that are wrong are instead."""
    truth, asked = known.truth[rows], known.problem.spec.activation
    nonfinite = ~torch.isfinite(y).all(1)
    if bool(nonfinite.any()):
        return f"computed NaN or Inf in {int(nonfinite.sum())} of {len(y)} rows instead of {label(asked)}"
    error = _by_row(y, truth, truth)
    wrong = error > tolerance(roundings).token
    picked = wrong.nonzero().flatten() if bool(wrong.any()) else torch.arange(len(y), device=y.device)
    found = y[picked]
    # Relative to what came out: next to a small truth, the rounding of a large wrong value looks large.
    own = float(_mean(_by_row(found, truth[picked], found)))
    scores = {name: float(_mean(_by_row(found, other[rows[picked]], found))) for name, other in known.others.items()}
    nearest = next(name for name, score in scores.items() if score <= _ALIKE * min(scores.values()))
    share = "" if len(picked) == len(y) else f" in {len(picked)} of {len(y)} rows"
    if scores[nearest] * MARGIN <= own:
        name = type(asked).__name__
        what = "nothing" if "-1" in nearest else (label(asked) if nearest.startswith(f"{name} ") else name)
        figures = f"relative RMS {own:.2g} to the one asked for, {scores[nearest]:.2g} to the other"
        return f"computed {nearest} instead of {what}{share}: {figures}"
    worst, rms = error_metrics(y, truth), float(_mean(error[picked]))
    return (
        f"computed something else instead of {label(asked)}{share}: relative RMS {rms:.2g}, worst {worst.actual:.4g} "
        f"where {worst.expected:.4g} is expected"
    )


def _by_row(value: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return rms(value - other) / rms(scale) of each row; 0 where both are 0."""
    error = (value.float() - other.float()).square().mean(1)
    size = scale.float().square().mean(1)
    return torch.where(size > 0, error / size.clamp(min=1e-38), (error > 0).float()).sqrt()


def _mean(by_row: torch.Tensor) -> torch.Tensor:
    """Return the root of the mean square."""
    return by_row.square().mean().sqrt()
