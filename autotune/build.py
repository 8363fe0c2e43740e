"""Kernel + problem + config + target -> a shared object, with g++ and no device. cuda_build.py does it for GPUs.

TileLang compiles without -O, so its emitted source is compiled here. -ffast-math is never used: linking with it
sets flush-to-zero for the whole process.
"""

import hashlib
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autotune.launcher import cpu as launcher
from autotune.launcher import repeat
from autotune.store import make_key
from autotune.target import GCC_MARCH
from tl_kernels.spec import Kernel, Problem, Target, config_dict

ROOT = Path(__file__).parents[1]
FLAGS = (
    "-O3",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-fno-tree-loop-distribute-patterns",  # memset and memcpy would push register tiles through the stack
    "-mprefer-vector-width=512",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wl,--as-needed",  # nothing of libstdc++ is used, so it need not be there
    "-w",
)
TILELANG = "0.1.15"


class BuildError(RuntimeError):
    """A kernel could not be built; the text says which and why."""


@dataclass(frozen=True)
class Tools:
    """What building needs, or why it cannot be done: `missing` is "" when all is there."""

    missing: str
    compiler: str = ""
    version: str = ""


@cache
def tools() -> Tools:
    """Probe the compilers once. Imports nothing heavy."""
    from importlib import metadata

    try:
        found = metadata.version("tilelang")
    except metadata.PackageNotFoundError:
        return Tools("tilelang is not installed (pip install 'linattn-tl[tune]')")
    if found != TILELANG:
        return Tools(f"tilelang {found} is installed; kernels are verified with {TILELANG}")
    compiler = shutil.which("g++")
    if compiler is None:
        return Tools("g++ is not on PATH")
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=False).stdout.strip()
    return Tools("", compiler, version)


@cache
def fingerprint(op: str) -> str:
    """Hash of every source file that shapes a CPU binary of this family: a changed kernel makes old binaries misses."""
    family = ROOT / "tl_kernels" / op
    files = [
        *(file for file in sorted(family.glob("*.py")) if not file.name.startswith("cuda")),
        *(ROOT / "tl_kernels" / name for name in ("spec.py", "macros.py", "tile.h")),
        launcher.HEADER,
        repeat.HEADER,
        Path(launcher.__file__),
        Path(__file__),  # passes, pinned TileLang; not the g++ version: binaries must be found where there is none
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    digest.update(f"{' '.join(FLAGS)} {sorted(GCC_MARCH.items())}".encode())
    return digest.hexdigest()


def binary_key(kernel: Kernel, problem: Problem, config: object, target: Target, checked: bool = True) -> str:
    """The name of a binary. K and V are not in it: one CPU binary serves every head dim.

    An unchecked binary has another name, so it is never served and a checked run builds and checks its own.
    """
    if target.device == "cuda":
        from autotune import cuda_build  # it imports this module

        return cuda_build.binary_key(kernel, problem, config, target, checked)
    return make_key(
        kernel=kernel.name,
        dtype=problem.dtype,
        config=config_dict(config),
        arch=target.arch,
        source=fingerprint(kernel.op),
        checked=checked,
    )


def shaping_problem(problem: Problem, target: Target) -> Problem:
    """The problem with all that does not shape a binary at one value: a CPU binary serves every K and V."""
    if target.device == "cuda":
        return problem._replace(device="cuda", index=0)
    return problem._replace(K=64, V=64, device="cpu", index=0)


def missing_tools(target: Target) -> str:
    """Which tool building for a target lacks here; "" if none."""
    if target.device == "cuda":
        from autotune import cuda_build

        return cuda_build.missing()
    return tools().missing


def source_hash(op: str, target: Target) -> str:
    """Of every source file that shapes a family's binaries for a target."""
    if target.device == "cuda":
        from autotune import cuda_build

        return cuda_build.fingerprint(op)
    return fingerprint(op)


def compilers(target: Target) -> str:
    """What makes binaries for a target here, with versions."""
    if target.device == "cuda":
        from autotune import cuda_build

        return cuda_build.compilers()
    return f"g++ {tools().version}"


def emit(kernel: Kernel, problem: Problem, config: object) -> str:
    """The complete C++ source of a binary. Imports tilelang."""
    import tilelang
    from tilelang import tvm

    passes = {
        "tl.disable_safe_memory_legalize": True,  # the kernels guard their own rows and columns
        "tl.disable_buffer_init_check": True,  # it takes a product of no terms for a read
    }
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target("c"):
        source = tilelang.lower(kernel.build(problem, config), target="c").kernel_source
    glue = launcher.glue(kernel, problem, config, source)
    return f'#include "tile.h"\n{source}\n#include "cpu.h"\n{glue}'


def compile_source(source: str, target: Target, out: Path) -> None:
    """g++ on a temporary copy of the source; the object appears at out."""
    import tilelang

    include = [ROOT / "tl_kernels", launcher.HEADER.parent, Path(tilelang.__file__).parent / "src"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cpp")
        file.write_text(source)
        command = [
            tools().compiler,
            *FLAGS,
            f"-march={GCC_MARCH[target.arch]}",
            *(f"-I{i}" for i in include),
            str(file),
            "-o",
            str(out),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"g++ failed for {target.arch}: {errors[0][:500] if errors else 'without a word'}")


def build(kernel: Kernel, problem: Problem, config: object, target: Target, out: Path) -> dict[str, object]:
    """Build one binary at out and return its manifest. Raises BuildError when a tool is missing or fails."""
    if target.device == "cuda":
        from autotune import cuda_build

        return cuda_build.build(kernel, problem, config, target, out)
    if tools().missing:
        raise BuildError(f"{kernel.name}: {tools().missing}")
    start = time.perf_counter()
    compile_source(emit(kernel, problem, config), target, out)
    return {
        "kernel": kernel.name,
        "dtype": problem.dtype,
        "arch": target.arch,
        "config": config_dict(config),
        "tilelang": TILELANG,
        "compiler": compilers(target),
        "seconds": round(time.perf_counter() - start, 2),
    }
