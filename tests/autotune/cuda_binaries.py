"""What the CUDA tests build: kernels compiled once and kept, linked anew, and the stub driver."""

import ctypes
import hashlib
import os
import pickle
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autotune import cuda_build, cuda_toolkit
from autotune.cuda_toolkit import Cubin
from autotune.emulator import lowering
from autotune.emulator.lowering import Lowered
from autotune.launcher.cuda import CudaBinary
from autotune.store import make_key
from tests.autotune.emulator import kernels

HERE = Path(__file__).parent


def kept() -> Path:
    folder = Path(os.environ["LINATTN_TL_CACHE_DIR"]) / "cuda_tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def keep(key: str, make: Callable[[], bytes]) -> bytes:
    path = kept() / key
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(make())
        temporary.rename(path)
    return path.read_bytes()


@cache
def compiled(arch: str, factory: Callable[..., Any], *sizes: Any, **options: Any) -> tuple[Lowered, Cubin]:
    """A tile program of kernels.py (or of a test file), lowered and compiled; by content, so that nvcc runs once.

    Compiling takes seconds. Without a toolkit the test is skipped: what is in the cache must still be linked.
    """
    if cuda_build.missing():
        pytest.skip(cuda_build.missing())
    files = (kernels.__file__, factory.__code__.co_filename, lowering.__file__, cuda_toolkit.__file__)
    source = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    key = make_key(arch=arch, factory=factory.__name__, sizes=sizes, options=options, source=source)

    def make() -> bytes:
        lowered = lowering.lower(factory(*sizes, **options), arch, cuda_build.PASSES)
        return pickle.dumps((lowered, cuda_toolkit.compile_cubin(lowered.kernel_source, arch)))

    return pickle.loads(keep(key, make))


def linked(lowered: Lowered, cubin: Cubin, out: Path, name: str = "family.stage") -> CudaBinary:
    cuda_build.link(lowered, cubin, out, name)
    return CudaBinary(out)


# ---- the stub driver


class Stub:
    """The stub driver, as the binaries see it and as a test asks it."""

    def __init__(self, path: Path):
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.stub_record.restype = ctypes.c_char_p
        for name in ("stub_push", "stub_current"):
            getattr(self._library, name).argtypes = [ctypes.c_size_t] if name == "stub_push" else []
        self._library.stub_current.restype = ctypes.c_size_t

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, f"stub_{name}")

    def expect_sizes(self, *sizes: int) -> None:
        """The sizes of the parameters of the kernels that are launched next."""
        self.sizes((ctypes.c_int * len(sizes))(*sizes), len(sizes))

    def fail_at(self, call: str, error: int) -> None:
        self.fail(call.encode(), error)

    def lines(self, *words: str) -> list[str]:
        """What was asked for since the last time, a line a call; only calls of these names, if any are given."""
        found = self.record().decode().splitlines()
        self.forget()
        return [line for line in found if not words or line.split()[0] in words]


def build_stub(source: str, out: Path) -> Path:
    # Bsymbolic: tilelang, where a test has imported it, has functions of these names for all to see
    flags = ["-shared", "-fPIC", "-O1", "-w", "-pthread", "-Wl,-Bsymbolic"]
    command = ["gcc", *flags, "-x", "c", "-", "-o", str(out)]
    subprocess.run(command, input=source, text=True, check=True)
    return out


def words(line: str, start: str, end: str | None = None) -> list[str]:
    """The words of a line after `start` and before `end`."""
    match = re.search(rf"\b{start} (.*?)(?: {end}\b|$)" if end else rf"\b{start} (.*)$", line)
    assert match, line
    return match[1].split()
