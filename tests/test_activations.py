"""Each formula against Python's own math in double precision, where the activations differ and where they do not."""

from __future__ import annotations

import math
import pickle
from itertools import combinations

import pytest
import torch

from portamoe.activations import (
    ACTIVATIONS,
    Activation,
    GeGLU,
    ReLU2,
    SiTU,
    SwiGLU,
    SwiGLUOAI,
    SwiGLUStep,
    activation_from_dict,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def clamp(x: float, limit: float) -> float:
    return max(-limit, min(limit, x))


#: Every activation with the formula written out a second time, for one pair of Python floats.
FORMULAS = [
    (SiTU(4.0, 25.0), lambda g, u: 4 * math.tanh(g / 4) * sigmoid(g) * 25 * math.tanh(u / 25)),
    (SiTU(1.5), lambda g, u: 1.5 * math.tanh(g / 1.5) * sigmoid(g) * u),
    (SwiGLU(), lambda g, u: g * sigmoid(g) * u),
    (SwiGLU(limit=5.0), lambda g, u: min(g, 5) * sigmoid(min(g, 5)) * clamp(u, 5)),
    (SwiGLUOAI(1.702, 7.0), lambda g, u: (clamp(u, 7) + 1) * min(g, 7) * sigmoid(1.702 * min(g, 7))),
    (SwiGLUOAI(1.25, 9.0, 0.5), lambda g, u: (clamp(u, 9) + 0.5) * min(g, 9) * sigmoid(1.25 * min(g, 9))),
    (SwiGLUStep(7.0), lambda g, u: min(g * sigmoid(g), 7) * clamp(u, 7)),
    (GeGLU(), lambda g, u: g / 2 * math.erfc(-g / math.sqrt(2)) * u),
    (GeGLU("tanh"), lambda g, u: g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u),
    (ReLU2(), lambda g, u: max(g, 0.0) ** 2 * u),
]
ALL = [activation for activation, _ in FORMULAS]
GRID = [-40, -25.5, -9, -7.5, -7, -6.5, -3, -1, -0.3, -1e-3, 0.0, 1e-4, 0.25, 1, 2.5, 6.75, 7, 7.25, 11, 24, 40]
PAIRS = [(g, u) for g in GRID for u in GRID]


def columns(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g, u = torch.tensor(PAIRS, dtype=torch.float64).unbind(-1)
    return g.to(dtype), u.to(dtype)


def name_of(activation: Activation) -> str:
    return "-".join(map(str, activation.to_dict().values()))


@pytest.mark.parametrize(
    ("activation", "formula"), FORMULAS, ids=lambda v: name_of(v) if isinstance(v, Activation) else ""
)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_formula_agrees_with_plain_math(activation, formula, dtype, rtol):
    g, u = columns(dtype)
    want = torch.tensor([formula(a, b) for a, b in zip(g.tolist(), u.tolist(), strict=True)], dtype=torch.float64)
    got = activation(g, u)
    assert got.dtype == dtype
    atol = torch.full_like(want, 1e-13 if dtype == torch.float64 else 0.0)
    if isinstance(activation, GeGLU) and dtype == torch.float32:
        # 1 + erf and 1 + tanh cancel for g far below 0: there the library's erf is right to units of 1, not of the sum,
        # and how many depends on the CPU's vector code (6 were seen with AVX-512).
        atol = 8 * 2.0**-24 * (g * u).double().abs() / 2
    assert bool(((got.double() - want).abs() <= rtol * want.abs() + atol).all())


@pytest.mark.parametrize(
    ("activation", "g", "u", "value"),
    [
        (SiTU(4.0, 25.0), 40.0, 40.0, 92.17),
        (SiTU(4.0, 25.0), 1.0, 1.0, 0.71582),
        (SwiGLUOAI(1.702, 7.0), 1.0, 1.0, 1.69159),
        (SwiGLU(), 40.0, 40.0, 1600.0),
        (SwiGLUStep(7.0), 40.0, -40.0, -49.0),
        (ReLU2(), -3.0, 5.0, 0.0),
        (ReLU2(), 3.0, 5.0, 45.0),
    ],
)
def test_known_values(activation, g, u, value):
    got = float(activation(torch.tensor(g), torch.tensor(u)))
    digits = len(str(value).partition(".")[2])
    assert got == pytest.approx(value, abs=0.5 * 10.0**-digits)


@pytest.mark.parametrize(("one", "other"), list(combinations(ALL, 2)), ids=name_of)
def test_inputs_up_to_40_tell_the_activations_apart(one, other):
    """Somewhere on the grid each pair differs by a tenth of the value; the two GeGLUs, which should agree, by less."""
    g, u = columns(torch.float64)
    a, b = one(g, u), other(g, u)
    apart = float(((a - b).abs() / (1 + torch.maximum(a.abs(), b.abs()))).max())
    both_gelu = isinstance(one, GeGLU) and isinstance(other, GeGLU)
    assert 1e-5 < apart < 2e-2 if both_gelu else apart > 0.1


def test_small_inputs_do_not_tell_situ_from_silu():
    """Why tests of an activation drive the gate to ±40: at 0.01 the two agree to bf16's last bit."""
    g = u = torch.linspace(-0.01, 0.01, 101)
    torch.testing.assert_close(SiTU(4.0, 25.0)(g, u), SwiGLU()(g, u), rtol=1e-4, atol=0)


@pytest.mark.parametrize("activation", ALL, ids=name_of)
def test_gate_and_up_are_not_interchangeable(activation):
    g, u = columns(torch.float64)
    assert float((activation(g, u) - activation(u, g)).norm() / activation(g, u).norm()) > 0.1


@pytest.mark.parametrize("activation", ALL, ids=name_of)
def test_a_scale_cannot_be_deferred_past_the_activation(activation):
    g, u = columns(torch.float64)
    deferred = 0.25 * activation(g, u)
    assert float((activation(0.25 * g, 0.25 * u) - deferred).norm() / deferred.norm()) > 0.1


@pytest.mark.parametrize("activation", ALL, ids=name_of)
def test_zeros_give_zero(activation):
    """What padding relies on: a padded row of w13 is gate = up = 0."""
    assert float(activation(torch.zeros(()), torch.zeros(()))) == 0.0


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-8, 1e-20])
def test_situ_keeps_its_relative_accuracy_near_zero(scale):
    """2·sigmoid(2x) - 1 in place of tanh would be off by per cents here."""
    g = (torch.linspace(-1, 1, 2001) * scale).float()
    got = SiTU(4.0, 25.0)(g, torch.full_like(g, 0.01)).double()
    want = SiTU(4.0, 25.0)(g.double(), torch.full_like(g, 0.01).double())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_situ_stays_within_beta_times_linear_beta():
    g = torch.tensor([1e4, 3e38, math.inf, -1e4, -3e38])
    got = SiTU(4.0, 25.0)(g, torch.full_like(g, math.inf))
    assert got.abs().max() <= 100
    assert got[:3].tolist() == [100.0] * 3


@pytest.mark.parametrize("activation", ALL, ids=name_of)
def test_nan_in_gate_or_up_stays_nan(activation):
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    assert activation(nan, one).isnan().all()
    assert activation(one, nan).isnan().all()


@pytest.mark.parametrize(("dtype", "bits", "least"), [(torch.bfloat16, 8, -133), (torch.float16, 11, -24)])
@pytest.mark.parametrize("activation", ALL, ids=name_of)
def test_apply_takes_gate_then_up_and_rounds_once(activation, dtype, bits, least):
    """Within half a unit in the last place of the float32 value; an intermediate in `dtype` would be further off."""
    g, u = (column.clamp(-12, 12).to(dtype) for column in columns(torch.float64))  # within fp16's range
    exact = activation(g.float(), u.float()).double()
    gate_up = torch.cat((g, u)).expand(3, -1)
    got = activation.apply(gate_up)
    assert got.dtype == dtype
    assert got.shape == (3, len(PAIRS))
    unit = torch.exp2((torch.frexp(exact).exponent - bits).clamp(min=least).double())
    assert ((got.double() - exact).abs() <= 0.505 * unit).all()
    torch.testing.assert_close(activation.apply(gate_up, torch.float32)[1].double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(activation.apply(gate_up.double())[2], exact, rtol=1e-6, atol=1e-5)


def test_tensors_that_do_not_fit_are_refused():
    activation = SwiGLU()
    with pytest.raises(ValueError, match="5 columns"):
        activation.apply(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"\(2, 1\) and up \(2, 3\)"):
        activation(torch.zeros(2, 1), torch.zeros(2, 3))
    with pytest.raises(TypeError, match="int32"):
        activation(torch.zeros(2, dtype=torch.int32), torch.zeros(2))


# ---- parameters ----


@pytest.mark.parametrize(
    ("cls", "values", "field", "needs_positive"),
    [
        (SiTU, {"beta": 4.0, "linear_beta": 25.0}, "beta", True),
        (SiTU, {"beta": 4.0, "linear_beta": 25.0}, "linear_beta", True),
        (SwiGLU, {"limit": 7.0}, "limit", True),
        (SwiGLUOAI, {"alpha": 1.702, "limit": 7.0}, "alpha", False),
        (SwiGLUOAI, {"alpha": 1.702, "limit": 7.0}, "limit", True),
        (SwiGLUOAI, {"alpha": 1.702, "limit": 7.0, "offset": 1.0}, "offset", False),
        (SwiGLUStep, {"limit": 7.0}, "limit", True),
    ],
)
def test_parameters_are_validated(cls, values, field, needs_positive):
    """0 and -1 are how others write "unset"; here they are values, and where they make no sense they are refused."""
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"{cls.name}: {field} must be finite"):
            cls(**values | {field: bad})
    for bad in (True, "4.0", [4.0], torch.tensor(4.0)):
        with pytest.raises(TypeError, match=f"{cls.name}: {field} must be a number"):
            cls(**values | {field: bad})
    for value in (0.0, -1.0, 0):
        if needs_positive:
            with pytest.raises(ValueError, match=f"{cls.name}: {field} must be greater than 0"):
                cls(**values | {field: value})
        else:
            assert getattr(cls(**values | {field: value}), field) == value


def test_what_may_be_unset_is_none_and_nothing_else_has_a_default():
    assert SiTU(4.0).linear_beta is None
    assert SwiGLU().limit is None
    for cls in (SiTU, SwiGLUOAI, SwiGLUStep):
        with pytest.raises(TypeError):
            cls()
    for cls, values in (
        (SiTU, {"beta": None}),
        (SwiGLUStep, {"limit": None}),
        (SwiGLUOAI, {"alpha": 1.0, "limit": None}),
    ):
        with pytest.raises(TypeError, match="must be a number"):
            cls(**values)
    with pytest.raises(ValueError, match="sigmoid"):
        GeGLU("sigmoid")
    with pytest.raises(TypeError, match="approximate"):
        GeGLU(True)


@pytest.mark.parametrize("activation", ALL, ids=name_of)
def test_json_form_hash_and_pickle(activation):
    data = activation.to_dict()
    assert data["name"] == activation.name
    again = activation_from_dict(data)
    assert again == activation
    assert type(again) is type(activation)
    assert hash(again) == hash(activation)
    assert pickle.loads(pickle.dumps(activation)) == activation  # noqa: S301 — our own bytes
    assert len({*ALL, again}) == len(ALL)


def test_integers_are_stored_as_floats():
    assert SiTU(4, 25) == SiTU(4.0, 25.0)
    assert repr(SiTU(4, 25)) == repr(SiTU(4.0, 25.0))
    assert SiTU(4, 25).to_dict() == {"name": "situ", "beta": 4.0, "linear_beta": 25.0}


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"name": "situ"}, ValueError, "lacks .'beta'"),
        ({"name": "situ", "linear_beta": 25.0}, ValueError, "lacks .'beta'"),
        ({"name": "situ", "beta": None}, TypeError, "beta must be a number"),
        ({"name": "situ", "beta": 4.0, "limit": 7.0}, ValueError, "no parameters .'limit'"),
        ({"name": "relu2", "limit": 7.0}, ValueError, "no parameters .'limit'"),
        ({"name": "swiglu_oai", "limit": 7.0}, ValueError, "lacks .'alpha'"),
        ({"name": "swiglu_step"}, ValueError, "lacks .'limit'"),
        ({"name": "mish"}, ValueError, "unknown activation 'mish'; known: geglu, relu2, silu, situ"),
        ({"beta": 4.0}, ValueError, "unknown activation None"),
        ({"name": ["situ"]}, ValueError, "unknown activation"),
        ("situ", TypeError, "must be an object"),
    ],
)
def test_json_that_does_not_describe_an_activation(data, error, message):
    with pytest.raises(error, match=message):
        activation_from_dict(data)


def test_every_name_builds_its_class_and_silu_is_swiglu():
    assert activation_from_dict({"name": "silu"}) == SwiGLU()
    assert activation_from_dict({"name": "situ", "beta": 4.0, "linear_beta": None}) == SiTU(4.0)
    assert {a.name for a in ALL} | {"silu"} == set(ACTIVATIONS)
