"""Random problems that tell right from wrong: weights, inputs and routing of one layer.

Gates and ups reach ±40 and beyond, because SiTU and SiLU look alike below that, and block scales differ from row to
row, from block to block and from expert to expert, so that a misplaced scale shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from portamoe.activations import SiTU
from portamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from portamoe.activations import Activation
    from portamoe.spec import MoESpec

Routing = Literal["uniform", "skew", "balanced", "same", "one_expert", "none_local", "duplicates"]

#: Root mean square of a uniformly drawn E2M1 nibble: the magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_E2M1_RMS = math.sqrt((0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
#: Binary exponents added to the scale of a row and of a block within it.
_ROW_STEPS, _BLOCK_STEPS = 3, 4
#: Factors on the rows of x in turn: a small token must not hide behind the large ones.
_TOKEN_SCALES = (1.0, 1.0, 0.5, 1.0, 0.05)
#: Factor on NVFP4's input scales, of many digits as calibrated ones are. x has eight, so beside a power of two many
#: quotients lie half-way between two values, where a quantiser's order of operations decides.
_CROOKED = 1.0371


@dataclass(frozen=True)
class Problem:
    """One call of a layer: spec, canonical weights and inputs, all on one device.

    x:             (T, H) bf16 unless asked otherwise
    topk_ids:      (T, K) int32, ids of the whole layer or -1
    topk_weights:  (T, K) float32, of sum 1 a token
    """

    spec: MoESpec
    weights: ExpertWeights
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def reference(self) -> torch.Tensor:
        """Return the float32 truth, (T, H); float64 where x is."""
        from portamoe.reference import moe_reference

        return moe_reference(self.spec, self.weights, self.x, self.topk_ids, self.topk_weights)


def make_problem(
    spec: MoESpec,
    tokens: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    routing: Routing = "uniform",
    remote: bool = True,
    minus_one: float = 0.0,
    expert: int | None = None,
    gate_std: float | None = None,
    up_std: float | None = None,
    x_dtype: torch.dtype = torch.bfloat16,
    ids_dtype: torch.dtype = torch.int32,
) -> Problem:
    """Draw random weights, inputs and routing for `spec`, straight on `device`.

    tokens:            T
    seed:              the same seed on the same kind of device gives the same problem
    routing, remote, minus_one, expert:  see `make_routing`
    gate_std, up_std:  standard deviation of the pre-activations; default: `pre_activation_std`. Their ratio is rounded
                       to a power of two.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    weights, x_std = make_weights(spec, generator, gate_std=gate_std, up_std=up_std)
    x = make_x(tokens, spec.hidden_size, x_std, generator).to(x_dtype)
    ids, weight = make_routing(
        spec, tokens, generator, routing=routing, remote=remote, minus_one=minus_one, expert=expert
    )
    return Problem(spec, weights, x, ids.to(ids_dtype), weight)


def make_x(tokens: int, hidden: int, std: float, generator: torch.Generator) -> torch.Tensor:
    """Draw (T, H) float32 of the given standard deviation; a few tokens are smaller than the rest."""
    x = torch.randn(tokens, hidden, generator=generator, device=generator.device)
    factors = torch.tensor(_TOKEN_SCALES, device=x.device)
    return x * std * factors[torch.arange(tokens, device=x.device) % len(_TOKEN_SCALES), None]


def make_routing(
    spec: MoESpec,
    tokens: int,
    generator: torch.Generator,
    *,
    routing: Routing = "uniform",
    remote: bool = True,
    minus_one: float = 0.0,
    expert: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw topk_ids (T, K) int32 and topk_weights (T, K) float32 on the generator's device.

    routing:    "uniform"     K distinct experts a token
                "skew"        the same, a few experts get most of the tokens
                "balanced"    every expert gets the same number of tokens, give or take one
                "same"        every token has the same K experts
                "one_expert"  every token has one and the same expert, the other slots are -1
                "none_local"  no id is on this rank
                "duplicates"  all K slots of a token name the same expert
    remote:     ids come from the whole layer; False: only from `spec.local_experts` (-1 where those are fewer than K)
    minus_one:  share of the slots that become -1
    expert:     the id that "one_expert" takes; default: the last of this rank
    """
    if routing not in get_args(Routing):
        raise ValueError(f"routing must be one of {', '.join(get_args(Routing))}, got {routing!r}")
    device, top_k, local = generator.device, spec.top_k, spec.local_experts
    pool = torch.arange(spec.num_experts, device=device)
    if routing == "none_local":
        pool = pool[(pool < local.start) | (pool >= local.stop)]
    elif not remote:
        pool = pool[local.start : local.stop]
    if routing == "one_expert":
        ids = torch.full((tokens, top_k), -1, device=device)
        ids[:, 0] = local.stop - 1 if expert is None else expert
    else:
        ids = _choose(pool, tokens, top_k, routing, generator)
    drop = torch.rand(ids.shape, generator=generator, device=device) < minus_one
    ids = torch.where(drop, -1, ids)
    weights = torch.rand(ids.shape, generator=generator, device=device) + 0.25
    return ids.to(torch.int32), weights / weights.sum(1, keepdim=True)


def _choose(pool: torch.Tensor, tokens: int, top_k: int, routing: Routing, generator: torch.Generator) -> torch.Tensor:
    """Return (T, K) ids out of `pool`, -1 in the last slots where it has fewer than K."""
    device, size, width = pool.device, len(pool), min(top_k, len(pool))
    if not width:
        return torch.full((tokens, top_k), -1, device=device)
    if routing == "balanced":
        start = torch.arange(tokens, device=device)[:, None] * width
        chosen = (start + torch.arange(width, device=device)) % size
    else:
        score = torch.rand(1 if routing == "same" else tokens, size, generator=generator, device=device)
        if routing == "skew":
            score = score.log() * torch.arange(1, size + 1, device=device)  # Gumbel trick for weights 1/rank
        chosen = score.topk(width, dim=1).indices.expand(tokens, width)
        if routing == "duplicates":
            return pool[chosen[:, :1]].expand(tokens, top_k).clone()
    ids = torch.full((tokens, top_k), -1, device=device)
    ids[:, :width] = pool[chosen]
    return ids


def make_weights(
    spec: MoESpec,
    generator: torch.Generator,
    *,
    gate_std: float | None = None,
    up_std: float | None = None,
) -> tuple[ExpertWeights, float]:
    """Draw all local experts, and return the standard deviation of x that gives the wanted pre-activations."""
    gate, up = pre_activation_std(spec.activation)
    gate, up = gate if gate_std is None else gate_std, up if up_std is None else up_std
    hidden, inter, count = spec.hidden_size, spec.intermediate_size, spec.num_local_experts
    gate_scale = gate / math.sqrt(hidden)
    exponent = math.floor(math.log2(gate_scale))
    steps = round(math.log2(up / gate))
    h_rms = _h_rms(spec.activation, gate, gate * 2.0**steps)
    w2_scale = 1.0 / (math.sqrt(inter) * h_rms)
    halves = (2.0**exponent, 2.0 ** (exponent + steps))
    w13 = _Matrix(count, (inter, inter), hidden, halves)
    w2 = _Matrix(count, (hidden,), inter, (w2_scale,))
    maker = {"mxfp4": _mxfp4, "nvfp4": _nvfp4, "bf16": _bf16}[spec.weight_format]
    tensors = maker(w13, "w13", generator) | maker(w2, "w2", generator)
    if spec.bias:
        device = generator.device
        std = torch.tensor([gate, up], device=device).repeat_interleave(inter)
        bias = torch.randn(count, 2 * inter, generator=generator, device=device) * std * 0.3
        tensors["w13_bias"] = bias.bfloat16()
        tensors["w2_bias"] = torch.randn(count, hidden, generator=generator, device=device).bfloat16()
    x_std = gate_scale / 2.0**exponent
    if "w13_input_scale" in tensors:  # amax of x, as a calibration would find it, over 6·448
        tensors["w13_input_scale"].fill_(_CROOKED * 4.0 * x_std / (6 * 448))
        tensors["w2_input_scale"].fill_(_CROOKED * 4.0 * h_rms / (6 * 448))
    return ExpertWeights(**tensors), x_std


def pre_activation_std(activation: Activation) -> tuple[float, float]:
    """Return the standard deviations of gate and up at which an activation shows all of its formula."""
    limit = getattr(activation, "limit", None)
    if limit is not None:
        return 0.8 * limit, 0.8 * limit
    if isinstance(activation, SiTU):
        return 20.0, 40.0
    return 6.0, 12.0  # larger gates would hide the region where SiLU, GELU and ReLU differ


def _h_rms(activation: Activation, gate_std: float, up_std: float) -> float:
    """Return the root mean square of the activation of normal inputs, by drawing some."""
    sample = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return float(activation(sample[0] * gate_std, sample[1] * up_std).square().mean().sqrt())


@dataclass(frozen=True)
class _Matrix:
    """A stack of weight matrices to draw: row groups (gate and up, or all), K, and the wanted rms of each group."""

    count: int
    groups: tuple[int, ...]
    columns: int
    rms: tuple[float, ...]

    @property
    def rows(self) -> int:
        return sum(self.groups)

    def by_row(self, values: Sequence[float], device: torch.device) -> torch.Tensor:
        """Return (rows, 1): each group's value repeated over its rows."""
        sizes = torch.tensor(self.groups, device=device)
        return torch.tensor(values, device=device).repeat_interleave(sizes)[:, None]


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw uint8 of any shape, eight at a time."""
    numel = math.prod(shape)
    words = torch.empty((numel + 7) // 8, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:numel].view(shape)


def _row_steps(matrix: _Matrix, generator: torch.Generator) -> torch.Tensor:
    """Draw (E, rows, 1) uint8 binary exponents, one a row."""
    return _random_bytes((matrix.count, matrix.rows, 1), generator) % _ROW_STEPS


def _mxfp4(matrix: _Matrix, name: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    spread = _rms_of_powers(_ROW_STEPS) * _rms_of_powers(_BLOCK_STEPS)
    base = [127 + round(math.log2(rms / (_E2M1_RMS * spread))) for rms in matrix.rms]
    scale = _random_bytes((matrix.count, matrix.rows, matrix.columns // 32), generator) % _BLOCK_STEPS
    scale += _row_steps(matrix, generator)
    scale += matrix.by_row(base, scale.device).to(torch.uint8)
    return {
        name: _random_bytes((matrix.count, matrix.rows, matrix.columns // 2), generator),
        f"{name}_scale": scale,
    }


def _nvfp4(matrix: _Matrix, name: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    # E4M3 codes 48 … 79 are the values 0.5 … 7.5 with every mantissa; a row adds 8 (one binary exponent) per step.
    scale = _random_bytes((matrix.count, matrix.rows, matrix.columns // 16), generator) % 32
    scale += 48 + 8 * _row_steps(matrix, generator)
    codes = [(1 + mantissa / 8) * 2.0**exponent for exponent in range(-1, 3) for mantissa in range(8)]
    spread = math.sqrt(sum(code**2 for code in codes) / len(codes)) * _rms_of_powers(_ROW_STEPS)
    wanted = torch.tensor(matrix.rms, device=scale.device) / (_E2M1_RMS * spread)
    # A factor per expert and projection, no power of two: w1's scale must not serve for w3.
    groups = len(matrix.groups)
    factor = 0.75 + 0.5 * torch.rand(matrix.count, groups, generator=generator, device=scale.device)
    shape = (matrix.count, groups) if groups > 1 else (matrix.count,)
    return {
        name: _random_bytes((matrix.count, matrix.rows, matrix.columns // 2), generator),
        f"{name}_scale": scale.view(torch.float8_e4m3fn),
        f"{name}_global_scale": (wanted * factor).float().view(shape),
        f"{name}_input_scale": torch.empty(shape, device=scale.device),
    }


def _bf16(matrix: _Matrix, name: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    shape = (matrix.count, matrix.rows, matrix.columns)
    weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device).normal_(generator=generator)
    weight *= torch.exp2(_row_steps(matrix, generator).float()).bfloat16()
    weight *= matrix.by_row([r / _rms_of_powers(_ROW_STEPS) for r in matrix.rms], weight.device).bfloat16()
    return {name: weight}


def _rms_of_powers(steps: int) -> float:
    """Return the root mean square of 2^0 … 2^(steps-1)."""
    return math.sqrt(sum(4.0**step for step in range(steps)) / steps)
