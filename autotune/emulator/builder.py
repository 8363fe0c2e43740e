"""Generated source -> a shared object, with g++ and no device. Everything built is kept under a cache folder.

    <cache>/headers/<key>/   TileLang's own portable headers, and the shims precompiled
    <cache>/runtime/<key>/   the runtime, in one object
    <cache>/kernels/<key>/   kernel.cu as TileLang emitted it, and kernel.so
    <cache>/logs/<key>.txt   what g++ said about a kernel that did not build

A key is a hash of all that shapes the contents. A folder is made under another name and renamed when it is complete, so
that processes can share a cache: one builds while the others wait for its lock.
"""

import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from autotune.build import TILELANG, tools
from autotune.emulator.errors import EmulatorError
from autotune.emulator.rewrite import rewrite
from autotune.store import make_key
from autotune.target import offered

INCLUDE = Path(__file__).parent / "include"
RUNTIME = Path(__file__).parent / "runtime"
SHIMS = INCLUDE / "tl_templates" / "cuda"
EVERYTHING = "emu/everything.h"  # includes all shims
PORTABLE = {  # TileLang's headers that compile against the shims, and the PTX in them
    "reduce.h": {
        'asm volatile("bar.sync %0, %1;" : : "r"(phase), "r"(all_threads));': "emu_barrier_sync(phase, all_threads);"
    },
    "scan.h": {},
    "threadblock_swizzle.h": {},
}
CPU = "cpu-v3"  # AVX2, FMA and F16C, of autotune.target; what every x86-64 CPU since 2013 has

_COMMON = ("-std=gnu++17", "-fPIC", "-march=x86-64-v3", "-fno-strict-aliasing", "-fwrapv", "-w")
KERNEL_FLAGS = (
    *_COMMON,
    "-O1",
    "-g1",  # line numbers, also of inlined calls
    "-fno-tree-sra",  # it would make four accesses of one to a float4
    "-fno-optimize-sibling-calls",  # return addresses are places in the source
    "-fno-math-errno",
    "-fsanitize=thread",  # for its hooks, which the runtime defines; libtsan is not linked
    "--param=tsan-instrument-func-entry-exit=0",
    "-fsanitize=bounds,object-size",  # local arrays; the runtime defines these handlers too
)
RUNTIME_FLAGS = (*_COMMON, "-O2", "-fno-math-errno")
LINK_FLAGS = ("-shared", "-Wl,-Bsymbolic", "-Wl,--build-id=none")


@dataclass(frozen=True)
class Built:
    """A kernel's shared object."""

    path: Path
    source: Path  # the generated source, whose lines findings name
    seconds: float  # that building took; 0 if it was in the cache
    cached: bool


def build(source: str, cache: Path) -> Built:
    """Compile generated source, or find it compiled. Imports nothing heavy.

    Args:
        source: what TileLang emitted, device code and host wrapper (`lowering.Lowered.source`).
        cache: a folder for what is built; made if it is missing.

    Raises:
        EmulatorError: the machine, g++ or tilelang is not what is needed, or the source needs something that is not
            covered; the text names it.
    """
    check_machine()
    start = time.perf_counter()
    code = rewrite(source)
    cache = Path(cache).resolve()
    headers_key, runtime_key = _headers_key(), _runtime_key()
    flags = [*KERNEL_FLAGS, *LINK_FLAGS]
    key = make_key(source=source, code=code, headers=headers_key, runtime=runtime_key, flags=flags)
    folder = cache / "kernels" / key
    cached = _complete(folder)
    if not cached:
        headers = _keep(cache / "headers" / headers_key, _make_headers)
        runtime = _keep(cache / "runtime" / runtime_key, _make_runtime) / "runtime.o"

        def make(temporary: Path) -> None:
            (temporary / "kernel.cu").write_text(source)
            log = cache / "logs" / f"{key}.txt"
            _compile_kernel(code, folder / "kernel.cu", temporary / "kernel.so", headers, runtime, log)

        _keep(folder, make)
    seconds = 0.0 if cached else time.perf_counter() - start
    return Built(folder / "kernel.so", folder / "kernel.cu", seconds, cached)


def check_machine() -> None:
    """EmulatorError unless kernels can be built and run here."""
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "AMD64"}:
        raise EmulatorError(f"this is {platform.machine()} {sys.platform}; the emulator needs x86-64 Linux")
    if CPU not in {target.arch for target in offered()}:
        raise EmulatorError("this CPU lacks AVX2, FMA or F16C, which the emulator needs")
    if tools().missing:
        raise EmulatorError(f"{tools().missing}; the emulator needs g++ 11 or newer and tilelang {TILELANG}")
    if int(tools().version.split(".")[0] or 0) < 11:
        raise EmulatorError(f"g++ {tools().version} is on PATH; the emulator needs 11 or newer")


# ---- folders by content


def _complete(folder: Path) -> bool:
    return folder.is_dir()  # it is renamed to this name when it is complete


def _keep(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made by make(another folder) if need be. What make raises propagates, and then there is none."""
    if _complete(folder):
        return folder
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not _complete(folder):
            with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
                inner = Path(scratch, "made")
                inner.mkdir()
                make(inner)
                inner.rename(folder)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file ends the lock


# ---- headers


def _tilelang_headers() -> Path:
    spec = importlib.util.find_spec("tilelang")  # finds the package without importing it
    if spec is None or spec.origin is None:
        raise EmulatorError("tilelang is not installed (pip install 'linattn-tl[tune]')")
    return Path(spec.origin).parent / "src" / "tl_templates" / "cuda"


def _headers_key() -> str:
    ours = sorted(path for path in INCLUDE.rglob("*") if path.is_file())
    theirs = _tilelang_headers()
    return make_key(
        shims={str(path): _digest(path) for path in ours},  # by absolute path: the precompiled header holds it
        tilelang={name: _digest(theirs / name) for name in PORTABLE},
        others=sorted(_not_covered_headers()),
        replaced=PORTABLE,
        flags=KERNEL_FLAGS,
        compiler=tools().version,
    )


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _not_covered_headers() -> set[str]:
    """TileLang's headers that are neither shimmed nor portable, by their path."""
    theirs = _tilelang_headers()
    names = {str(path.relative_to(theirs)) for path in theirs.rglob("*.h")}
    return {name for name in names if not (SHIMS / name).exists()} - set(PORTABLE)


def _make_headers(folder: Path) -> None:
    staged = folder / "tl_templates" / "cuda"
    for name, replaced in PORTABLE.items():
        text = (_tilelang_headers() / name).read_text()
        for ptx, call in replaced.items():
            if ptx not in text:
                raise EmulatorError(f"tilelang's {name} is not that of {TILELANG}: it does not contain {ptx}")
            text = text.replace(ptx, call)
        _write(staged / name, text)
    for name in _not_covered_headers():
        # Empty, so that what is missing is the function that a kernel calls, and the error names it.
        _write(staged / name, "#pragma once\n")
    precompiled = folder / f"{EVERYTHING}.gch"
    precompiled.parent.mkdir()
    command = [*_compiler(KERNEL_FLAGS, folder), "-x", "c++-header", str(INCLUDE / EVERYTHING), "-o", str(precompiled)]
    _run(command, "the emulator's headers")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _compiler(flags: tuple[str, ...], headers: Path) -> list[str]:
    # TileLang's headers include "common.h": found beside the shims, since it is not beside them
    return [tools().compiler, *flags, f"-I{headers}", f"-I{INCLUDE}", "-iquote", str(SHIMS)]


# ---- the runtime


def _runtime_key() -> str:
    files = [*sorted(RUNTIME.iterdir()), INCLUDE / "emu" / "abi.h"]
    return make_key(
        files={path.name: _digest(path) for path in files if path.is_file()},
        flags=RUNTIME_FLAGS,
        compiler=tools().version,
    )


def _make_runtime(folder: Path) -> None:
    sources = sorted(RUNTIME.glob("*.cpp"))
    objects = [folder / f"{path.stem}.o" for path in sources]
    command = [tools().compiler, *RUNTIME_FLAGS, f"-I{INCLUDE}", f"-I{RUNTIME}", "-c"]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = [[*command, str(path), "-o", str(out)] for path, out in zip(sources, objects, strict=True)]
        list(pool.map(lambda job: _run(job, "the emulator's runtime"), jobs))
    merge = [tools().compiler, "-r", "-nostdlib", *map(str, objects), "-o", str(folder / "runtime.o")]
    _run(merge, "the emulator's runtime")
    for path in objects:
        path.unlink()


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise EmulatorError(f"g++ does not compile {what}: {errors[0][:500] if errors else 'without a word'}")


# ---- the kernel


def _compile_kernel(code: str, name: Path, out: Path, headers: Path, runtime: Path, log: Path) -> None:
    """Compile rewritten code to `out`. Debug information calls it `name`, where the emitted source will be."""
    compiled = out.with_suffix(".o")
    command = [*_compiler(KERNEL_FLAGS, headers), "-include", EVERYTHING, "-c", "-x", "c++", "-", "-o", str(compiled)]
    text = f'# 1 "{name}"\n{code}'
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=english)
    if done.returncode:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stderr)
        raise EmulatorError(f"{explain(done.stderr, str(name), code)}; g++'s own words are in {log}")
    # Without -fsanitize, which would link libtsan: its hooks are the runtime's.
    _run([tools().compiler, *LINK_FLAGS, str(compiled), str(runtime), "-o", str(out)], "the kernel and the runtime")
    compiled.unlink()


_MISSING = (  # g++'s message, and what is missing
    (r"'([\w:~]+)' is not a member of '(?:struct |class )?([\w:]+)'", r"\2::\1"),
    (r"'(?:const )?(?:struct |class )?([\w:]+)' has no member named '(\w+)'", r"\1::\2"),
    (r"'([\w:]+)' (?:was not declared in this scope|has not been declared|does not name a type)", r"\1"),
    (r"no matching function for call to '([\w:~]+)(?:<.*>)?\((.*)\)'", r"\1(\2)"),
    (r"'([\w:]+)' (?:is not a class template|in namespace '[\w:]+' does not name a (?:template )?type)", r"\1"),
    (r"([\w./]+): No such file or directory", r"\1"),
)
_ASSERTED = re.compile(r"static assertion failed: (tl::\w+): not covered")


def explain(errors: str, name: str, code: str) -> str:
    """What g++'s errors (in English) say about the source called `name`: what is not covered, and on which lines."""
    found: dict[str, int] = {}  # what is missing -> the first line that needs it
    other = ""
    required = 0  # the line of the source that instantiates what the next error is in
    for row in errors.splitlines():
        match = re.match(r"(.*?):(\d+):(?:\d+:)? +(.*)", row)
        if match is None:
            continue
        file, line, message = match[1], int(match[2]), match[3]
        if file == name and message.startswith("required from"):
            required = line
        elif "error: " in message:
            line = line if file == name else required
            missing = _missing(message, code.splitlines()[line - 1] if line else "")
            if any(re.search(rf"\b{re.escape(kind)}\s+{re.escape(missing)}\b", code) for kind in found):
                continue  # a variable whose type is not known
            if missing:
                found.setdefault(missing, line)
            else:
                other = other or f"g++ does not compile line {line} of the generated source: {message[:300]}"
            required = 0
    if not found:
        return other or "g++ does not compile the generated source"
    listed = [f"{missing} (line {line} of the generated source)" for missing, line in list(found.items())[:3]]
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return f"not covered: {', '.join(listed)}{more}"


def _missing(message: str, line: str) -> str:
    """What an error says is missing; "" when it is about something else. `line` is the line of code it is about."""
    if match := _ASSERTED.search(message):
        # with its template arguments: they are what is not covered
        call = re.search(rf"{match[1]}<[^()]*>", line)
        return call.group() if call else match[1]
    for pattern, missing in _MISSING:
        if match := re.search(pattern, message):
            return match.expand(missing)
    return ""
