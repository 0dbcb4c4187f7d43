"""Device code read as text: offsets are 64 bits wide, and nothing divides an id that may be -1.

A layer of Kimi-K3 has 2·10^10 weights, so a row times a width passes 2^31; and -1 // 32 is 0 on HIP, -1 elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in ("rocm_moe", "cuda_moe", "common/portamoe")
    for path in (ROOT / folder).rglob("_*_kernels.py")
    if "triton" in path.read_text(encoding="utf-8")
)
#: Widths of tensors whose rows are so many that row times width passes 2^31: compile-time constants of the kernels.
WIDTHS = frozenset({"H", "HS", "I", "N", "K", "D", "N16"})
#: File or function -> why its products stay below 2^31 although no operand is cast.
BOUNDED = {
    "_few_kernels.py": "calls of few tokens: rows of tokens times K",
    "_triton_kernels.py": "skinny products: at most 64 tokens",
    "_skinny_gemv_kernels.py": "at most 16 tokens",
    "weight_pointers": "rows within a tile; the expert's part is cast",
    "gate_up_result": "biases: E times 2I values",
    "down_result": "biases: E times H values",
    "store_rows": "rows within a tile, and E times N bytes; the base is cast",
    "multiply_rows": "the callers load `expert` as 64 bits",
}


def kernels(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


def names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def assignments(function: ast.FunctionDef) -> Iterator[tuple[set[str], ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            yield set().union(*map(names, node.targets)), node.value
        elif isinstance(node, ast.AugAssign):
            yield names(node.target), node.value


def spread(function: ast.FunctionDef, seed: set[str], starts, read=names) -> set[str]:
    """Return the variables that are computed from `seed` or from an expression that `starts` says is one.

    read:  the names of an expression that count
    """
    known = set(seed)
    for _ in range(8):  # assignments in loops come round
        for targets, value in assignments(function):
            if starts(value) or read(value) & known:
                known |= targets
    return known


def constant(node: ast.expr) -> bool:
    """Is it a number or a compile-time constant, which are written in capitals?"""
    return all(name.isupper() or name in {"tl", "core"} for name in names(node))


def narrow_products(function: ast.FunctionDef) -> Iterator[ast.BinOp]:
    """Yield products of a run-time row with a width that no operand makes 64 bits wide."""
    text = (ast.get_docstring(function) or "").splitlines()
    documented = {line.split(":")[0].split("(")[0].strip() for line in text if "int64" in line}
    wide = spread(function, documented, lambda value: "tl.int64" in ast.unparse(value))
    for node in ast.walk(function):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            continue
        sides = (node.left, node.right)
        widths = [side for side in sides if names(side) & WIDTHS and constant(side)]
        others = [side for side in sides if not constant(side)]
        text = ast.unparse(node)
        if widths and others and "tl.int64" not in text and not names(node) & wide:
            yield node


def valued(node: ast.AST) -> set[str]:
    """Return the names whose values reach the result; a comparison gives 0 or 1, whatever is compared."""
    if isinstance(node, ast.Compare):
        return set()
    own = {node.id} if isinstance(node, ast.Name) else set()
    return own.union(*map(valued, ast.iter_child_nodes(node)))


def divided_ids(function: ast.FunctionDef) -> Iterator[ast.BinOp]:
    """Yield divisions whose left side is computed from loaded expert ids, -1 included."""
    ids = spread(function, set(), lambda value: "tl.load(ids" in ast.unparse(value), valued)
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod) and names(node.left) & ids:
            yield node


def found(look, tree: ast.Module, bounded=frozenset()) -> list[str]:
    return [
        f"{function.name}:{node.lineno} {ast.unparse(node)}"
        for function in kernels(tree)
        if function.name not in bounded
        for node in look(function)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_rows_times_widths_are_64_bits_wide(path):
    if path.name not in BOUNDED:
        assert found(narrow_products, ast.parse(path.read_text(encoding="utf-8")), BOUNDED) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_id_that_may_be_negative_is_divided(path):
    assert found(divided_ids, ast.parse(path.read_text(encoding="utf-8"))) == []


HEAD = "@triton.jit\ndef k(x, at, H: tl.constexpr, I: tl.constexpr):\n    "
FAULTS = {
    "expert * (2 * I)": "expert = tl.program_id(0)\n    tl.load(x + expert * (2 * I))",
    "row * H": "row = tl.load(at)\n    tl.load(x + row * H)",
}
WIDE = (
    "row = tl.load(at).to(tl.int64)\n    tl.load(x + row * H)",
    "row = tl.load(at).to(tl.int64)\n    other = row + 1\n    tl.load(x + other * H)",
    "tl.load(x + 2 * I * H)",
)


@pytest.mark.parametrize("product", FAULTS)
def test_the_look_finds_a_narrow_product(product):
    assert [line.split(" ", 1)[1] for line in found(narrow_products, ast.parse(HEAD + FAULTS[product]))] == [product]


@pytest.mark.parametrize("text", WIDE)
def test_the_look_passes_what_is_wide_or_constant(text):
    assert found(narrow_products, ast.parse(HEAD + text)) == []


@pytest.mark.parametrize("operator", ["//", "%"])
def test_the_look_finds_a_divided_id(operator):
    text = f"@triton.jit\ndef k(ids, at):\n    e = tl.load(ids + at)\n    local = e - 3\n    word = local {operator} 32"
    assert found(divided_ids, ast.parse(text)) == [f"k:5 local {operator} 32"]
    assert found(divided_ids, ast.parse(text.replace(f"local {operator}", f"at {operator}"))) == []
    assert found(divided_ids, ast.parse(text.replace("e - 3", "tl.sum(e == 3)"))) == []


def test_there_is_device_code_to_look_at():
    assert len(FILES) >= 10
