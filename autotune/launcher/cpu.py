"""The Python half of the CPU launcher: the generated Spec of a kernel, and packing a call into one block of words.

The block's layout is stated in cpu.h beside this file.
"""

import ctypes
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tl_kernels.spec import Kernel, Problem

HEADER = Path(__file__).with_name("cpu.h")
ENTRY = "linattn_launch"
FLOAT_SCALARS = frozenset({"scale", "eps"})
_HEADER_WORDS = 9
_STEP_FIELDS = frozenset({"rows", "K", "V", "heads", "live", "keeps"})


def parse_signature(source: str, function: str) -> list[tuple[str, str]]:
    """(C type, name) of each parameter of a function that TileLang emitted."""
    match = re.search(rf"^int32_t {re.escape(function)}\(([^)]*)\)\s*\{{", source, re.MULTILINE)
    if match is None:
        raise ValueError(f"the emitted source has no function {function!r}")
    params = [p.rsplit(" ", 1) for p in match.group(1).split(", ")]
    return [(kind.strip(), name) for kind, name in params]


def _parameter(kernel: Kernel, kind: str, name: str) -> str:
    """The C++ expression that fills one parameter of the emitted function from a Step."""
    args = [a.name for a in kernel.args]
    if name in args:
        return f"({kind})s.data[{args.index(name)}]"
    if name in _STEP_FIELDS:
        return f"s.{name}"
    if name in kernel.scalars:
        word = f"s.scalars[{kernel.scalars.index(name)}]"
        return f"(float)linattn::as_double({word})" if name in FLOAT_SCALARS else f"(int32_t){word}"
    for suffix in ("row", "head"):
        if name.endswith("_" + suffix) and name.removesuffix("_" + suffix) in args:
            return f"s.{suffix}[{args.index(name.removesuffix('_' + suffix))}]"
    raise ValueError(f"{kernel.name}: the launcher does not know the kernel parameter {name!r}")


def glue(kernel: Kernel, problem: Problem, config: Any, source: str) -> str:
    """The C++ that binds an emitted kernel to the launcher."""
    function = f"{kernel.build.__name__}_kernel_kernel"
    parameters = ", ".join(_parameter(kernel, *p) for p in parse_signature(source, function))
    kept = [a.every for a in kernel.args if a.role == "chunk"]
    if len(kept) > 1 or any(e < 1 or e % config.C or (kernel.reverse and e != config.C) for e in kept):
        raise ValueError(
            f"{kernel.name}: states kept every {kept} tokens with chunks of {config.C}; expected at most one argument, "
            "a multiple of a chunk, and a chunk where chunks are walked from the last"
        )
    io_bytes = 4 if problem.dtype == "float32" else 2
    args = ", ".join(
        f"{{linattn::{a.role.upper()}, {str(a.heads == 'HV').lower()}, {str(a.transposed).lower()}, "
        f"{io_bytes if a.dtype == 'io' else 4}, {a.every}}}"
        for a in kernel.args
    )
    return f"""
namespace {{
struct Spec {{
  static constexpr int ARGS = {len(kernel.args)}, SCALARS = {len(kernel.scalars)};
  static constexpr int64_t CHUNK = {config.C}, BLOCK = {config.NR};
  static constexpr bool REVERSE = {str(kernel.reverse).lower()};
  static constexpr linattn::ArgSpec args[ARGS] = {{{args}}};
  static void run(const linattn::Step<ARGS>& s) {{ {function}({parameters}); }}
}};
}}
extern "C" __attribute__((visibility("default"))) int64_t {ENTRY}(const int64_t* block) {{
  linattn::Launch<Spec> launch(block);
  return launch.run();
}}
{'#include "repeat.h"' if kernel.whole else ""}
"""


class CpuBinary:
    """A loaded CPU kernel.

    A call is addresses(...), which change every time, and fixed(...), which a caller may keep for calls of the same
    shapes and options, in `kept`: binary(binary.addresses(...) + binary.fixed(...)).
    """

    def __init__(self, path: Path, kernel: Kernel, config: object):
        library = ctypes.CDLL(str(path))
        self.entry: Callable[[bytes], int] = getattr(library, ENTRY)
        self.entry.argtypes = [ctypes.c_char_p]
        self.entry.restype = ctypes.c_int64
        states = sum(a.role in ("state", "vector") for a in kernel.args)
        scalars = "".join("d" if s in FLOAT_SCALARS else "q" for s in kernel.scalars)
        strides = sum({"token": 3, "pool": 2}.get(a.role, 0) for a in kernel.args)
        # cu_seqlens, slots, then each argument's one or two addresses, in order
        self.addresses: Callable[..., bytes] = struct.Struct(f"={2 + len(kernel.args) + states}q").pack
        # the header, the scalars, each argument's strides, in order
        self.fixed: Callable[..., bytes] = struct.Struct(f"={_HEADER_WORDS}q{scalars}{strides}q").pack
        self.kept: dict[Any, bytes] = {}  # fixed blocks by whatever key the caller finds unique
        self.kernel, self.config, self.path = kernel, config, path

    def __call__(self, block: bytes) -> None:
        if status := self.entry(block):
            self.fail(status)

    def fail(self, status: int) -> NoReturn:
        raise MemoryError(f"{self.kernel.name}: no memory for the working states")
