"""Faults of the tile compiler that our kernels are written around.

The first tests pass while a fault is there. When an upgrade of tilelang repairs one, its test fails: then the detour
it names may go, and the test with it. The last ones look for the same faults in our own kernels.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tile_calls

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "tl_kernels").rglob("*.py"))


def stored(func: Any) -> list[float]:
    """The constants that an emitted function stores, in order."""
    body = tile_calls.lower(func).partition("{\n")[2]  # the target is a comment with braces, on one line
    return [float(x) for x in re.findall(r"\] = ([\d.e+-]+)f;", body)]


def repaired(what: str, where: str) -> str:
    return f"tilelang no longer {what}. {where} need not avoid it any more; remove this test with the detour"


# ---- (1) an if without else in one branch of an if takes the other branch along


def two_branches(kind: str) -> Any:
    """Inside a loop: `if fm == 0: store 1`, and otherwise `store 2`, written in several ways."""
    import tilelang.language as T

    n = T.dynamic("n")
    if kind == "else if":

        @T.prim_func
        def program(a: T.Tensor([n], "float32"), fm: T.int32, rows: T.int32):
            with T.Kernel(1) as _:
                for c in T.serial(rows):
                    if fm == 0:
                        a[c] = T.float32(1)
                    else:
                        if fm == 1:
                            a[c] = T.float32(2)

    elif kind == "else for if":

        @T.prim_func
        def program(a: T.Tensor([n], "float32"), fm: T.int32, rows: T.int32):
            with T.Kernel(1) as _:
                for c in T.serial(rows):
                    if fm == 0:
                        a[c] = T.float32(1)
                    else:
                        for d in T.serial(rows):
                            if fm == 1:
                                a[c + d] = T.float32(2)

    elif kind == "then if":

        @T.prim_func
        def program(a: T.Tensor([n], "float32"), fm: T.int32, rows: T.int32):
            with T.Kernel(1) as _:
                for c in T.serial(rows):
                    if c == 0:
                        if fm == 1:
                            a[c] = T.float32(1)
                    else:
                        a[c] = T.float32(2)

    elif kind == "two ifs":

        @T.prim_func
        def program(a: T.Tensor([n], "float32"), fm: T.int32, rows: T.int32):
            with T.Kernel(1) as _:
                for c in T.serial(rows):
                    if fm == 0:
                        a[c] = T.float32(1)
                    if fm == 1:
                        a[c] = T.float32(2)

    else:

        @T.prim_func
        def program(a: T.Tensor([n], "float32"), fm: T.int32, rows: T.int32):
            with T.Kernel(1) as _:
                for c in T.serial(rows):
                    if fm == 0:
                        a[c] = T.float32(1)
                    else:
                        if fm == 1:
                            a[c] = T.float32(2)
                        else:
                            a[c] = T.float32(3)

    return program


@pytest.mark.parametrize("kind", ["else if", "else for if"])
def test_an_if_alone_in_an_else_drops_the_first_branch(kind: str):
    assert stored(two_branches(kind)) == [2], repaired("drops the first branch", "macros.map_features")


def test_an_if_alone_in_a_branch_guards_the_other_one_too():
    """The test of the inner if is moved out of the loop, and out of the if."""
    source = tile_calls.lower(two_branches("then if"))
    order = re.findall(r"if \((.*?)\) \{", source)
    assert order == ["fm == 1", "c == 0"], repaired("guards a branch with the test of the other one", "no kernel")


@pytest.mark.parametrize(("kind", "constants"), [("two ifs", [1, 2]), ("else if else", [1, 2, 3])])
def test_what_we_write_instead_keeps_every_branch(kind: str, constants: list[float]):
    assert stored(two_branches(kind)) == constants


# ---- (2) `in`


def membership(negated: bool) -> Any:
    import tilelang.language as T

    n = T.dynamic("n")
    if negated:

        @T.prim_func
        def program(a: T.Tensor([n], "float32"), rows: T.int32):
            with T.Kernel(1) as _:
                for c in T.serial(rows):
                    if c not in (3, 5):
                        a[c] = T.float32(1)
    else:

        @T.prim_func
        def program(a: T.Tensor([n], "float32"), rows: T.int32):
            with T.Kernel(1) as _:
                for c in T.serial(rows):
                    if c in (3, 5):
                        a[c] = T.float32(1)

    return program


def test_in_drops_the_guarded_store():
    assert stored(membership(False)) == [], repaired("drops what `in` guards", "a kernel")


def test_not_in_drops_the_guard():
    source = tile_calls.lower(membership(True))
    assert stored(membership(True)) == [1]
    assert "if (" not in source, repaired("drops the guard of `not in`", "a kernel")


# ---- (3) constants


def test_constants_are_printed_with_seven_digits():
    """A float needs nine: a constant is up to 5e-7 of itself, four ulp, beside what was written."""
    import tilelang.language as T

    n = T.dynamic("n")

    @T.prim_func
    def program(a: T.Tensor([n], "float32")):
        with T.Kernel(1) as _:
            a[0] = T.float32(0.6931471805599453)
            a[1] = T.float32(16777213)

    why = repaired("rounds constants to seven digits", "macros.exp")
    source = tile_calls.lower(program)
    assert "= 6.931472e-01f;" in source, why
    assert "= 1.677721e+07f;" in source, why


# ---- our own kernels


def tile_programs(trees: Iterable[ast.Module]) -> list[ast.FunctionDef]:
    found = []
    for tree in trees:
        for node in ast.walk(tree):
            decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
            if any(d.split("(")[0].split(".")[-1] in ("prim_func", "macro") for d in decorators):
                found.append(node)
    return found


def swallowed(programs: list[ast.FunctionDef]) -> list[str]:
    """Where a branch of an if with an else holds nothing but an if without one: the other branch would be dropped.

    Loops around that inner if do not help, and a call of a macro that is nothing else is the same.
    """
    bodies = {p.name: p.body for p in programs}

    def alone(body: list[ast.stmt]) -> bool:
        body = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        if len(body) != 1:
            return False
        (only,) = body
        if isinstance(only, ast.If):
            return not only.orelse
        if isinstance(only, ast.For | ast.With):
            return alone(only.body)
        if isinstance(only, ast.Expr) and isinstance(only.value, ast.Call):
            called = ast.unparse(only.value.func).split(".")[-1]
            return alone(bodies.get(called, []))
        return False

    ifs = [(p, node) for p in programs for node in ast.walk(p) if isinstance(node, ast.If)]
    return [
        f"{p.name}, line {node.lineno}" for p, node in ifs if node.orelse and (alone(node.body) or alone(node.orelse))
    ]


def test_no_kernel_has_an_if_that_swallows_a_branch():
    programs = tile_programs(ast.parse(file.read_text()) for file in SOURCES)
    assert {"chunk_fwd_kernel", "decode_kernel", "map_features", "load_panels"} <= {p.name for p in programs}
    assert swallowed(programs) == []


@pytest.mark.parametrize(
    "body",
    [
        "if a:\n  x()\n else:\n  if b:\n   y()",
        "if a:\n  x()\n elif b:\n  y()",
        "if a:\n  if b:\n   x()\n else:\n  y()",
        "if a:\n  x()\n else:\n  for i in r:\n   for j in r:\n    if b:\n     y()",
        "if a:\n  x()\n else:\n  m.inner(z)",
        "if a:\n  x()\n elif b:\n  y()\n else:\n  if c:\n   z()",
    ],
)
def test_the_search_finds(body: str):
    source = f"@T.macro\ndef inner(z):\n 'says what'\n if z:\n  w()\n@T.prim_func\ndef program():\n {body}\n"
    assert len(swallowed(tile_programs([ast.parse(source)]))) == 1


@pytest.mark.parametrize(
    "body",
    [
        "if a:\n  x()\n if b:\n  y()",
        "if a:\n  x()\n elif b:\n  y()\n else:\n  z()",
        "if a:\n  if b:\n   x()",
        "if a:\n  x()\n else:\n  y()\n  if b:\n   z()",
        "if a:\n  x()\n else:\n  m.outer(z)",
    ],
)
def test_the_search_leaves_alone(body: str):
    source = f"@T.macro\ndef outer(z):\n if z:\n  w()\n u()\n@T.prim_func\ndef program():\n {body}\n"
    assert swallowed(tile_programs([ast.parse(source)])) == []
