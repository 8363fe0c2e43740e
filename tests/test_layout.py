"""The layout rules, read from the sources without importing them.

Imports   linattn_tl -> autotune -> tl_kernels and linattn_tl -> tl_kernels, never back. A family in
          tl_kernels imports tl_kernels.spec, the modules of macros and of sizes, and itself; what families share
          imports no family.
Weight    At module level only the standard library, torch, numpy and our own packages are imported: the
          package must import without tilelang and cupy. macros.py and cuda_macros.py of tl_kernels and of its
          families, sets of tile programs, import tilelang and its tvm at the top; so others import them inside
          functions only.
Settings  Only linattn_tl/settings.py reads the environment. autotune starts processes: there
          `{**os.environ, "NAME": value}` may hand it on unread, and a context manager in autotune/pool.py
          may change it for the children it starts and put it back. Nothing else may touch it.
Kernels   No `from __future__ import annotations` in tl_kernels. No `in` and no `not in` inside a tile
          program: Python answers them while the program is traced, so that `in` drops what it guards and
          `not in` drops the guard.
Errors    No `assert` on an argument: it goes away under `python -O`. Raise ValueError or TypeError.
Names     Absolute imports, no `import *`, no module called utils, helpers or common, an __init__.py in
          each folder of modules (without one it is missing from the wheel).
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {  # each room, and the rooms it may import
    "tl_kernels": {"tl_kernels"},
    "autotune": {"autotune", "tl_kernels"},
    "linattn_tl": {"linattn_tl", "autotune", "tl_kernels"},
}
LIGHT = {*ROOMS, "torch", "numpy", *sys.stdlib_module_names}
SHARED = {"spec", "macros", "cuda_macros", "cuda_sizes"}  # the modules of tl_kernels that every family may import
TILE_PROGRAMS = {"macros", "cuda_macros"}  # modules, of tl_kernels or of a family
MACROS = "tl_kernels/macros.py"
SETTINGS = "linattn_tl/settings.py"
POOL = "autotune/pool.py"
VAGUE = {"util", "utils", "helper", "helpers", "common"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
TILE_PROGRAM = {"prim_func", "macro"}

Found = Iterator[tuple[ast.AST, str]]


def violations(path: str, source: str) -> list[str]:
    """The rules that a source file breaks, were it at `path` (relative to the root, with /)."""
    tree = ast.parse(source)
    found = [
        *names(path, tree),
        *direction(path, tree),
        *weight(path, tree),
        *environment(path, tree),
        *kernel_source(path, tree),
        *asserts(tree),
    ]
    return [f"{path}:{getattr(node, 'lineno', 1)}: {message}" for node, message in found]


def imported(node: ast.AST) -> list[str]:
    """Full names that a node imports: a.b for `from a import b`, the known start of an f-string."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in {"import_module", "__import__"}:
            first = node.args[0]
            if isinstance(first, ast.JoinedStr) and first.values:
                first = first.values[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                return [first.value]
    return []


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below that run when the module is imported: not in functions, not under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_at_import(child)


def names(path: str, tree: ast.Module) -> Found:
    for part in PurePosixPath(path).with_suffix("").parts:
        if part in VAGUE:
            yield tree, f"'{part}' says nothing about what is inside; name it after what it does"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                yield node, "relative import; write the full name"
            if any(alias.name == "*" for alias in node.names):
                yield node, "import *; name what is needed"


def direction(path: str, tree: ast.Module) -> Found:
    room, *rest = PurePosixPath(path).with_suffix("").parts
    family = rest[0] if room == "tl_kernels" and len(rest) > 1 else ""
    for node in ast.walk(tree):
        for name in imported(node):
            target, *inner = name.split(".")
            if target in ROOMS and target not in ROOMS[room]:
                yield node, f"{room} may not import {name}"
            elif room == target == "tl_kernels" and inner and inner[0] not in {*SHARED, family}:
                where = f"family {family}" if family else "what families share"
                yield node, f"{where} may not import {name}"


def weight(path: str, tree: ast.Module) -> Found:
    is_program = path.startswith("tl_kernels/") and PurePosixPath(path).stem in TILE_PROGRAMS
    light = LIGHT | {"tilelang", "tvm"} if is_program else LIGHT
    for node in run_at_import(tree):
        for name in imported(node):
            room, *inner = name.split(".")
            programs = room == "tl_kernels" and not is_program and not TILE_PROGRAMS.isdisjoint(inner)
            if room not in light or programs:
                yield node, f"{name} imported at module level; import it inside the function that needs it"


def environment(path: str, tree: ast.Module) -> Found:
    if path == SETTINGS:
        return
    modules = {
        alias.asname or "os"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] == "os"
    }
    allowed: set[int] = set()
    for node in ast.walk(tree):
        if path.startswith("autotune/") and isinstance(node, ast.Dict):  # {**os.environ, "NAME": value}
            allowed |= {id(v) for k, v in zip(node.keys, node.values, strict=True) if k is None}
        if path == POOL and isinstance(node, ast.FunctionDef) and "contextmanager" in decorators(node):
            allowed |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            taken = {alias.name for alias in node.names} & ENVIRONMENT
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in modules:
            taken = {node.attr} & ENVIRONMENT
        else:
            continue
        if taken and id(node) not in allowed:
            yield node, f"os.{taken.pop()} used; {SETTINGS} alone reads the environment"


def kernel_source(path: str, tree: ast.Module) -> Found:
    if not path.startswith("tl_kernels/"):
        return
    for node in ast.walk(tree):
        if "__future__.annotations" in imported(node):
            yield node, "from __future__ import annotations; TileLang reads annotations as values"
        if isinstance(node, ast.FunctionDef) and TILE_PROGRAM & decorators(node):
            compared = (n for n in ast.walk(node) if isinstance(n, ast.Compare))
            for test in compared:
                if any(isinstance(op, ast.In | ast.NotIn) for op in test.ops):
                    yield test, "'in' inside a tile program is answered while it is traced; use == and `or`"


def decorators(function: ast.FunctionDef) -> set[str]:
    """The last names of the decorators: @T.macro and @macro() are both "macro"."""
    called = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return {d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in called}


def asserts(node: ast.AST, arguments: frozenset[str] = frozenset()) -> Found:
    """Asserts that name an argument of a function around them. In __post_init__ self holds the arguments."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        arguments |= given if node.name == "__post_init__" else given - {"self", "cls"}
    if isinstance(node, ast.Assert):
        named = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
        for name in sorted(named & arguments):
            yield node, f"assert on the argument {name}: python -O drops it; raise ValueError or TypeError"
    for child in ast.iter_child_nodes(node):
        yield from asserts(child, arguments)


def sources(root: Path = ROOT) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for room in ROOMS for p in (root / room).rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=str)
def test_file(path):
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


def without_init(paths: list[str]) -> list[str]:
    folders = {PurePosixPath(p).parent.as_posix() for p in paths}
    return sorted(folder for folder in folders if f"{folder}/__init__.py" not in paths)


def test_every_folder_is_a_package():
    assert without_init(sources()) == []


# ---- the checker itself: each bad source is reported, each good one is not

BAD = {
    "back from kernels": (
        "tl_kernels/spec.py",
        "import autotune.store",
        "tl_kernels may not import autotune.store",
    ),
    "back from tuner": (
        "autotune/tuner.py",
        "from linattn_tl import ops",
        "autotune may not import linattn_tl.ops",
    ),
    "back inside a function": (
        "autotune/a.py",
        "def f():\n import linattn_tl",
        "a.py:2: autotune may not import",
    ),
    "back for types": (
        "autotune/a.py",
        "if TYPE_CHECKING:\n from linattn_tl.shapes import X",
        "may not import linattn_tl",
    ),
    "back by name": ("autotune/a.py", "import_module('linattn_tl.ops')", "may not import linattn_tl.ops"),
    "back by f-string": (
        "tl_kernels/x/cpu.py",
        "importlib.import_module(f'autotune.{n}')",
        "may not import autotune",
    ),
    "sideways": (
        "tl_kernels/delta_rule/cpu.py",
        "from tl_kernels.simple_gla.cpu import configs",
        "family delta_rule may not import tl_kernels.simple_gla.cpu",
    ),
    "sideways, short": (
        "tl_kernels/delta_rule/cpu.py",
        "from tl_kernels import simple_gla",
        "may not import",
    ),
    "shared takes a family": (
        "tl_kernels/spec.py",
        "import tl_kernels.simple_gla",
        "what families share may not",
    ),
    "relative": ("linattn_tl/ops/a.py", "from . import b", "relative import"),
    "star": ("linattn_tl/a.py", "from math import *", "import *"),
    "tilelang": ("autotune/build.py", "import tilelang", "tilelang imported at module level"),
    "tilelang, part": (
        "tl_kernels/x/cpu.py",
        "import tilelang.language as T",
        "tilelang.language imported at",
    ),
    "cupy": ("linattn_tl/arrays.py", "from cupy import matmul", "cupy.matmul imported at module level"),
    "matplotlib": (
        "linattn_tl/cli/bench.py",
        "import matplotlib.pyplot as plt",
        "matplotlib.pyplot imported",
    ),
    "tqdm in try": ("autotune/tuner.py", "try:\n import tqdm\nexcept ImportError:\n pass", "tqdm imported"),
    "tqdm in class": ("autotune/tuner.py", "class A:\n import tqdm", "tqdm imported"),
    "macros": (
        "tl_kernels/x/cpu.py",
        "from tl_kernels import macros",
        "tl_kernels.macros imported at module level",
    ),
    "macros, part": (
        "tl_kernels/x/cpu.py",
        "from tl_kernels.macros import exp",
        "tl_kernels.macros.exp imported",
    ),
    "macros of a family at the top": (
        "tl_kernels/gla/cuda.py",
        "from tl_kernels.gla import cuda_macros",
        "tl_kernels.gla.cuda_macros imported at module level",
    ),
    "macros take tqdm": (MACROS, "import tqdm", "tqdm imported at module level"),
    "future": ("tl_kernels/x/cuda.py", "from __future__ import annotations", "reads annotations as values"),
    "utils": ("linattn_tl/utils.py", "", "'utils' says nothing"),
    "common": ("tl_kernels/common/a.py", "", "'common' says nothing"),
    "environ": ("linattn_tl/loader.py", "import os\nos.environ['HOME']", "loader.py:2: os.environ used"),
    "environ.get": ("autotune/store.py", "import os\nos.environ.get('HOME')", "os.environ used"),
    "environ, alias": ("linattn_tl/a.py", "import os as o\no.environ.get('HOME')", "os.environ used"),
    "environ, from": ("linattn_tl/a.py", "from os import environ as e", "os.environ used"),
    "getenv": ("autotune/pool.py", "import os\nos.getenv('HOME')", "os.getenv used"),
    "pool reads": (POOL, "import os\nn = os.environ['HOME']", "os.environ used"),
    "pool sets for good": (POOL, "import os\ndef f():\n os.environ['A'] = 'b'", "os.environ used"),
    "set outside the pool": ("autotune/build.py", "import os\nos.environ['A'] = 'b'", "os.environ used"),
    "set by another": (
        "autotune/build.py",
        "import os\n@contextmanager\ndef f():\n os.environ['A'] = 'b'",
        "os.environ used",
    ),
    "environ, os.path": ("linattn_tl/a.py", "import os.path\nos.environ.get('HOME')", "os.environ used"),
    "handed on by the top room": ("linattn_tl/a.py", "import os\nenv = {**os.environ}", "os.environ used"),
    "assert": ("linattn_tl/shapes.py", "def f(x):\n assert x > 0", "shapes.py:2: assert on the argument x"),
    "assert, inner": ("autotune/a.py", "def f(x):\n def g(y):\n  assert x.ok", "argument x"),
    "assert, field": (
        "autotune/a.py",
        "class A:\n def __post_init__(self):\n  assert self.n",
        "argument self",
    ),
    "in": (
        "tl_kernels/x/cpu.py",
        "@T.prim_func\ndef f():\n if i in (3, 5):\n  a = 1",
        "cpu.py:3: 'in' inside",
    ),
    "in a name": (MACROS, "@T.macro\ndef f():\n if i in NAMES:\n  a = 1", "'in' inside a tile program"),
    "not in": (
        "tl_kernels/x/cpu.py",
        "def b():\n @T.prim_func()\n def f():\n  x = i not in {3}",
        "'in' inside",
    ),
}

GOOD = {
    "down": (
        "linattn_tl/loader.py",
        "import autotune.store\nfrom tl_kernels.spec import Problem\nimport torch, numpy, ast",
    ),
    "tuner down": ("autotune/tuner.py", "from tl_kernels.spec import Kernel\nfrom autotune.store import get"),
    "family": (
        "tl_kernels/x/cpu.py",
        "from tl_kernels.spec import Kernel\nfrom tl_kernels.x import cuda\n"
        "def build():\n import tilelang.language as T\n from tl_kernels import macros",
    ),
    "macros of a family": (
        "tl_kernels/gla/cuda_macros.py",
        "import tilelang.language as T\nfrom tl_kernels import cuda_macros",
    ),
    "macros": (MACROS, "import tilelang.language as T\nfrom tl_kernels.spec import Problem"),
    "heavy inside": ("linattn_tl/arrays.py", "def f():\n import cupy\n import matplotlib, tqdm"),
    "heavy for types": ("autotune/build.py", "if TYPE_CHECKING:\n import tilelang"),
    "listed": ("linattn_tl/registry.py", "import importlib\nimportlib.import_module(f'tl_kernels.{name}')"),
    "settings": (SETTINGS, "import os\nos.environ.get('LINATTN_TL_STRICT')"),
    "handed on": ("autotune/build.py", "import os\nrun(c, env={**os.environ, 'A': 'b'})"),
    "pool sets and restores": (
        POOL,
        "import os\n@contextlib.contextmanager\ndef f():\n old = os.environ.get(n)\n os.environ[n] = old",
    ),
    "assert on a state": ("autotune/pool.py", "class A:\n def f(self, x):\n  assert self.task is not None"),
    "another environ": ("linattn_tl/a.py", "import os\nrequest.environ['a']\nos.path.join('a')"),
    "future elsewhere": ("linattn_tl/a.py", "from __future__ import annotations"),
    "in outside": ("tl_kernels/x/cpu.py", "def f(p):\n return 1 if p.dtype in ('float32',) else 2"),
    "for in inside": (MACROS, "@T.macro\ndef f():\n for i in (1, 2):\n  a = i"),
}


@pytest.mark.parametrize(("path", "source", "message"), BAD.values(), ids=BAD)
def test_checker_reports(path, source, message):
    found = violations(path, source)
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize(("path", "source"), GOOD.values(), ids=GOOD)
def test_checker_accepts(path, source):
    assert violations(path, source) == []


def test_checker_reports_a_missing_init():
    assert without_init(["a/__init__.py", "a/x.py", "a/b/y.py"]) == ["a/b"]


def test_checker_takes_empty_folders(tmp_path):
    assert sources(tmp_path) == []
    (tmp_path / "autotune").mkdir()
    assert sources(tmp_path) == []
