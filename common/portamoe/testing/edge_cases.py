"""Small shapes, each with the one thing that it alone covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portamoe.activations import GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep
from portamoe.spec import MoESpec

if TYPE_CHECKING:
    from portamoe.testing.problems import Routing


@dataclass(frozen=True)
class EdgeCase:
    """A small shape with the one thing that it alone covers."""

    name: str
    spec: MoESpec
    tokens: int
    covers: str
    routing: Routing = "uniform"


def _small(**changes: Any) -> MoESpec:
    """Return a small spec; a new `num_experts` brings all its experts with it."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_experts": 8,
        "top_k": 2,
        "activation": SiTU(beta=4.0, linear_beta=25.0),
    }
    return MoESpec(**(values | changes))


_OAI = SwiGLUOAI(alpha=1.702, limit=7.0)

#: Small shapes for every backend; those with biases, another activation or format may be refused by name.
EDGE_CASES: tuple[EdgeCase, ...] = (
    EdgeCase("typical", _small(hidden_size=256, intermediate_size=192, top_k=4), 9, "nothing special"),
    EdgeCase(
        "smallest",
        _small(hidden_size=32, intermediate_size=32, num_experts=1, top_k=1),
        1,
        "one block of scales, one expert, one token",
    ),
    EdgeCase(
        "three_blocks",
        _small(hidden_size=96, intermediate_size=96),
        5,
        "K of both GEMMs is no power of two",
    ),
    EdgeCase(
        "gpt_oss",
        _small(hidden_size=160, intermediate_size=160, activation=_OAI, bias=True),
        9,
        "an odd number of 32-blocks (2880 has 90), biases, and no padding to 64 that reaches the result",
    ),
    EdgeCase("tall", _small(hidden_size=512, intermediate_size=32), 7, "H much larger than I"),
    EdgeCase("wide", _small(hidden_size=32, intermediate_size=512), 7, "I much larger than H"),
    EdgeCase(
        "896_experts",
        _small(intermediate_size=32, num_experts=896, top_k=16),
        17,
        "more experts than 512 and than tokens, none a power of two",
    ),
    EdgeCase("40_experts", _small(num_experts=40, top_k=3), 33, "expert 31 and 32, odd top-k"),
    EdgeCase("22_of_160", _small(num_experts=160, top_k=22), 3, "top-k above 16, no power of two"),
    EdgeCase("all_experts", _small(top_k=8), 5, "K = E"),
    EdgeCase("rank_in_middle", _small(num_experts=12, top_k=4, local_experts=range(5, 8)), 16, "a rank"),
    EdgeCase("no_tokens", _small(), 0, "T = 0"),
    EdgeCase("129_tokens", _small(), 129, "one row beyond a tile of 128"),
    EdgeCase("all_to_one", _small(top_k=4), 130, "one expert gets every token", "one_expert"),
    EdgeCase("skew", _small(num_experts=64, top_k=6), 65, "experts with many, few and no rows", "skew"),
    EdgeCase(
        "none_local",
        _small(local_experts=range(2, 4)),
        6,
        "nothing to do: the result is exactly 0",
        "none_local",
    ),
    EdgeCase("duplicates", _small(top_k=3), 6, "one expert in all slots of a token", "duplicates"),
    EdgeCase("situ_without_linear_beta", _small(activation=SiTU(beta=4.0)), 9, "up is left alone"),
    EdgeCase("swiglu", _small(activation=SwiGLU()), 9, "plain SwiGLU"),
    EdgeCase("swiglu_limit", _small(activation=SwiGLU(limit=7.0)), 9, "both clamps"),
    EdgeCase("swiglu_step", _small(activation=SwiGLUStep(limit=7.0)), 9, "clamp after the SiLU"),
    EdgeCase("geglu", _small(activation=GeGLU()), 9, "erf"),
    EdgeCase("geglu_tanh", _small(activation=GeGLU(approximate="tanh")), 9, "tanh form"),
    EdgeCase("relu2", _small(activation=ReLU2()), 9, "h as large as 1e5"),
    EdgeCase(
        "nvfp4",
        _small(hidden_size=80, intermediate_size=48, weight_format="nvfp4"),
        9,
        "odd numbers of 16-blocks, w1 and w3 with global scales of their own",
    ),
    EdgeCase("bf16", _small(hidden_size=50, intermediate_size=35, weight_format="bf16"), 9, "any size"),
)


def edge_case(name: str) -> EdgeCase:
    """Return the edge case of that name; ValueError lists the known ones."""
    for case in EDGE_CASES:
        if case.name == name:
            return case
    raise ValueError(f"no edge case {name!r}; known: {', '.join(case.name for case in EDGE_CASES)}")
