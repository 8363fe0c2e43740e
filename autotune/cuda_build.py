"""A TileLang prim_func -> a shared object with its kernels for one NVIDIA architecture. No GPU is needed.

TileLang emits CUDA C++ and a host wrapper, nvcc makes machine code of the one, and g++ links it with the other and the
launcher. Lowering is the emulator's (emulator/lowering.py), and one edit of what it emits follows (warpgroups.py); what
the emulator executes of it is what is built here.
"""

import hashlib
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import build as cpu_build
from autotune import cuda_toolkit
from autotune.build import TILELANG, BuildError, tools
from autotune.cuda_toolkit import Cubin, toolkit
from autotune.launcher import cuda as launcher
from autotune.launcher import repeat
from autotune.launcher.cuda import About, KernelFunction, LauncherError
from autotune.store import make_key
from autotune.target import SHARED_LIMIT
from tl_kernels.spec import Kernel, Problem, Target, config_dict

if TYPE_CHECKING:  # it imports torch
    from autotune.emulator.lowering import Lowered

LOWERING = Path(__file__).parent / "emulator" / "lowering.py"
EDITING = Path(__file__).parent / "warpgroups.py"

HOST_FLAGS = (
    "-O2",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fwrapv",
    "-w",
)
LINK_FLAGS = (
    "-ldl",
    "-s",
    "-Wl,--as-needed",
    "-Wl,--build-id=none",
    "-Wl,--hash-style=gnu",
    "-Wl,-z,noseparate-code",  # this and the next: fewer pages that are mostly empty
    "-Wl,-z,norelro",
)
# TileLang's pass configs; whoever verifies a kernel must lower it with the same. A caller's tensors are aligned to 16
# bytes, and 256-bit accesses would fault on them.
PASSES: dict[str, Any] = {"tl.disable_vectorize_256": True}


def missing() -> str:
    """Which tool building for CUDA lacks here; "" if none."""
    return tools().missing or toolkit().missing


def compilers() -> str:
    return f"nvcc {toolkit().version}, g++ {tools().version}"


@cache
def fingerprint(op: str) -> str:
    """Hash of every source file that shapes a CUDA binary of this family."""
    family = cpu_build.ROOT / "tl_kernels" / op
    files = [
        *(file for file in sorted(family.glob("*.py")) if not file.name.startswith("cpu")),
        cpu_build.ROOT / "tl_kernels" / "spec.py",
        *sorted((cpu_build.ROOT / "tl_kernels").glob("cuda_*.py")),
        launcher.HEADER,
        launcher.DRIVER_HEADER,
        repeat.HEADER,
        Path(launcher.__file__),
        LOWERING,
        EDITING,
        Path(cuda_toolkit.__file__),
        Path(__file__),
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    digest.update(f"{TILELANG} {' '.join((*HOST_FLAGS, *LINK_FLAGS))} {sorted(PASSES.items())}".encode())
    return digest.hexdigest()


def binary_key(kernel: Kernel, problem: Problem, config: object, target: Target, checked: bool = True) -> str:
    """The name of a binary. Unlike on the CPU, the head dims are in it: they shape the tiles."""
    return make_key(
        kernel=kernel.name,
        dtype=problem.dtype,
        static=static_dims(problem),
        config=config_dict(config),
        arch=target.arch,
        source=fingerprint(kernel.op),
        checked=checked,
    )


def static_dims(problem: Problem) -> dict[str, int]:
    return {"K": problem.K, "V": problem.V}


def lower(kernel: Kernel, problem: Problem, config: object, target: Target) -> "Lowered":
    """The source of a binary, as the emulator executes it and build compiles it. Raises BuildError."""
    return lower_function(kernel.build(problem, config), target.arch, kernel.name)


def lower_function(func: Any, arch: str, name: str = "") -> "Lowered":
    """Lower a prim_func; `name` is what messages call it. Raises BuildError."""
    from autotune.emulator import lowering
    from autotune.emulator.errors import EmulatorError
    from autotune.warpgroups import make_uniform

    if missing():
        raise BuildError(f"{name}: {missing()}")
    try:
        lowered = lowering.lower(func, arch, PASSES)
    except (EmulatorError, ValueError) as error:
        raise BuildError(f"{name}: {error}" if name else str(error)) from error
    return replace(lowered, kernel_source=make_uniform(lowered.kernel_source), source=make_uniform(lowered.source))


def build(
    kernel: Kernel, problem: Problem, config: object, target: Target, out: Path, lowered: "Lowered | None" = None
) -> dict[str, object]:
    """Build one binary at out and return its manifest. Raises BuildError when a tool is missing or fails."""
    start = time.perf_counter()
    said = build_lowered(lowered or lower(kernel, problem, config, target), out, kernel.name, kernel.whole)
    return {
        **said,
        "dtype": problem.dtype,
        "static": static_dims(problem),
        "config": config_dict(config),
        "seconds": round(time.perf_counter() - start, 2),
    }


def build_function(func: Any, arch: str, out: Path, name: str = "") -> dict[str, object]:
    """Build a prim_func at out.

    Args:
        func: a `T.prim_func`.
        arch: one of autotune.target.SHARED_LIMIT.
        out: where the shared object goes; nothing is left there if it cannot be built.
        name: what messages call it; the prim_func's own name if there is none.

    Returns:
        What is known of the binary, as a manifest holds it: kernel, arch, threads, registers, smem_bytes (dynamic) and
        static_smem_bytes, spill_bytes, the same of each of its functions, sizes and checksums, what it was built with,
        minimum_driver and minimum_cuda, and, where there is a disassembler, counts of instructions.

    Raises:
        BuildError: a tool is missing or fails, TileLang does not lower the kernel, or it cannot be launched.
    """
    return build_lowered(lower_function(func, arch, name), out, name)


def build_lowered(lowered: "Lowered", out: Path, name: str = "", whole: bool = False) -> dict[str, object]:
    """As build_function, of a function that is lowered already. whole: as in Kernel."""
    name = name or lowered.name
    try:
        cubin = cuda_toolkit.compile_cubin(lowered.kernel_source, lowered.arch)
        return link(lowered, cubin, out, name, whole)
    except BuildError as error:
        raise BuildError(f"{name}: {error}") from error


def link(lowered: "Lowered", cubin: Cubin, out: Path, name: str, whole: bool = False) -> dict[str, object]:
    """Make the shared object of a lowered function and its machine code; its manifest. Raises BuildError."""
    about = About(
        name,
        lowered.arch,
        toolkit().cuda,
        tuple(p.name for p in lowered.parameters if p.kind == "tensor"),
        (
            *((p.name, p.c_type) for p in lowered.parameters if p.kind == "scalar"),
            *((s.name, s.c_type) for s in lowered.symbols),
        ),
        whole,
    )
    arguments = [*((p.name, p.c_type) for p in lowered.parameters), *((s.name, s.c_type) for s in lowered.symbols)]
    try:
        functions = launcher.read_functions(lowered.source)
        _check_shared(functions, cubin, lowered.arch)
        host = launcher.glue(about, lowered.source, arguments, cuda_toolkit.parameter_sizes(cubin.data))
    except LauncherError as error:
        raise BuildError(str(error)) from error
    image = cuda_toolkit.pack_image(cubin.data, lowered.arch)
    _compile_host(host, image, lowered.arch, out)
    return _describe(about, functions, cubin, image, lowered.source)


def _check_shared(functions: Sequence[KernelFunction], cubin: Cubin, arch: str) -> None:
    for function in functions:
        needed = function.shared_bytes + cubin.functions[function.name].static_smem_bytes
        if needed > SHARED_LIMIT[arch]:
            raise BuildError(f"{function.name} needs {needed} bytes of shared memory; {arch} has {SHARED_LIMIT[arch]}")


def _describe(
    about: About, functions: Sequence[KernelFunction], cubin: Cubin, image: bytes, source: str
) -> dict[str, object]:
    """The manifest, less what only a family knows. Sums and maxima are over the kernels of the binary."""
    each = {
        f.name: {**vars(cubin.functions[f.name]), "threads": f.threads, "smem_bytes": f.shared_bytes} for f in functions
    }
    cuda = about.minimum_cuda
    said: dict[str, object] = {
        "kernel": about.kernel,
        "arch": about.arch,
        "functions": each,
        **{
            key: max(f[key] for f in each.values())
            for key in ("threads", "registers", "smem_bytes", "static_smem_bytes")
        },
        "spill_bytes": sum(f["spill_bytes"] for f in each.values()),
        "cubin_bytes": len(cubin.data),
        "image_bytes": len(image),
        "cubin_sha256": hashlib.sha256(cubin.data).hexdigest(),
        "source_sha256": hashlib.sha256(source.encode()).hexdigest(),
        "tilelang": TILELANG,
        "compiler": compilers(),
        "minimum_driver": about.minimum_driver,
        "minimum_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
    }
    counts = cuda_toolkit.count_instructions(cubin.data)
    return said if counts is None else {**said, "instructions": counts}


def _compile_host(source: str, image: bytes, arch: str, out: Path) -> None:
    """g++ on the host code; the object appears at out."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "host.cpp").write_text(source)
        Path(folder, "kernel.image").write_bytes(image)
        include = [f"-I{launcher.HEADER.parent}", f"-Wa,-I{folder}"]
        command = [tools().compiler, *HOST_FLAGS, *include, "host.cpp", *LINK_FLAGS, "-o", str(out.resolve())]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"g++ failed for {arch}: {errors[0][:500] if errors else 'without a word'}")
