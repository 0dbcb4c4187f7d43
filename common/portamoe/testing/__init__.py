"""For authors of backends: problems that tell right from wrong, and one tolerance table to judge the answers by.

problem = make_problem(KIMI_K3, tokens=16, device="cuda")
assert_close(my_moe(problem), problem.reference(), roundings=2)
"""

from __future__ import annotations

from portamoe.testing.edge_cases import EDGE_CASES, EdgeCase, edge_case
from portamoe.testing.problems import (
    Problem,
    Routing,
    make_problem,
    make_routing,
    make_weights,
    make_x,
    pre_activation_std,
)
from portamoe.testing.tolerances import (
    TOLERANCES,
    ErrorMetrics,
    Tolerance,
    assert_close,
    error_metrics,
    tolerance,
    tolerance_of,
)

__all__ = [
    "EDGE_CASES",
    "TOLERANCES",
    "EdgeCase",
    "ErrorMetrics",
    "Problem",
    "Routing",
    "Tolerance",
    "assert_close",
    "edge_case",
    "error_metrics",
    "make_problem",
    "make_routing",
    "make_weights",
    "make_x",
    "pre_activation_std",
    "tolerance",
    "tolerance_of",
]
