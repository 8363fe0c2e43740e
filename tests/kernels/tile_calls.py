"""Tile programs made callable: lowered as autotune.build does, compiled into one object, called with numpy arrays."""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from autotune import build
from autotune.launcher import cpu as launcher
from autotune.store import Store, make_key
from linattn_tl import settings
from tl_kernels.spec import Target

C_TYPES: dict[str, Any] = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def lower(func: Any) -> str:
    """The C that TileLang emits for a prim_func."""
    import tilelang
    from tilelang import tvm

    passes = {"tl.disable_safe_memory_legalize": True}
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target("c"):
        return tilelang.lower(func, target="c").kernel_source


def named(name: str, func: Any) -> Any:
    """The prim_func under another name: several come from one function in a loop."""
    return func.with_attr("global_symbol", name)


class TileCalls:
    """A loaded object. calls.name(parameter=value, ...) calls the prim_func `name`.

    A parameter that a program does not use is not in the emitted function, and is left out of the call.
    """

    def __init__(self, path: Path, signatures: dict[str, list[tuple[str, str]]]):
        self.path, self.signatures = path, signatures
        self._library = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_") or name not in self.signatures:
            raise AttributeError(name)
        function, signature = self._library[f"call_{name}"], self.signatures[name]
        function.restype = None

        def call(**values: Any) -> None:
            function(*(_argument(kind, values[parameter]) for kind, parameter in signature))

        return call


def _argument(kind: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return C_TYPES[kind](value)
    wanted = {"float*": np.float32, "uint16_t*": np.uint16}[kind]
    if value.dtype != wanted or not value.flags.c_contiguous:
        raise TypeError(f"a {kind} was given an array of {value.dtype}")
    return ctypes.c_void_p(value.ctypes.data)


def _wrapped(name: str, source: str) -> tuple[str, list[tuple[str, str]]]:
    function = f"{name}_kernel"
    signature = launcher.parse_signature(source, function) if f"{function}()" not in source else []
    parameters = ", ".join(f"{kind} {parameter}" for kind, parameter in signature)
    arguments = ", ".join(parameter for _, parameter in signature)
    exported = 'extern "C" __attribute__((visibility("default")))'
    return f"{source}\n{exported} void call_{name}({parameters}) {{ {function}({arguments}); }}\n", signature


@dataclass(frozen=True)
class Emitted:
    """One C++ source of several programs, and the parameters (C type, name) of each."""

    text: str
    signatures: dict[str, list[tuple[str, str]]]


def emit(funcs: Iterable[Any]) -> Emitted:
    text, signatures = '#include "tile.h"\n', {}
    for func in funcs:
        name = func.attrs["global_symbol"]
        wrapped, signatures[name] = _wrapped(name, lower(func))
        text += wrapped
    return Emitted(text, signatures)


def load(emitted: Emitted, target: Target) -> TileCalls:
    """Compile for a target. The object stays in the test run's cache, under the hash of all that it depends on."""

    def make(path: Path) -> dict[str, Any]:
        build.compile_source(emitted.text, target, path)
        return {}

    header = (build.ROOT / "tl_kernels" / "tile.h").read_text()
    key = make_key(
        text=emitted.text, header=header, arch=target.arch, flags=build.FLAGS, compiler=build.tools().version
    )
    return TileCalls(Store(settings.cache_dir() / "test_kernels").put(key, make).path, emitted.signatures)


@cache
def half_bits() -> np.ndarray:
    """Every pattern of 16 bits."""
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
