"""Which devices this machine has, and which archs can be built for. Standard library only."""

import functools
import os
import re
from pathlib import Path

from tl_kernels.spec import Target

# The x86-64 psABI levels, in the names of /proc/cpuinfo (pni is SSE3, abm is LZCNT), best first.
_V2 = frozenset(["cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])
CPU_ARCHS = {"cpu-v4": _V4, "cpu-v3": _V3}
GCC_MARCH = {"cpu-v4": "x86-64-v4", "cpu-v3": "x86-64-v3"}
SHARED_LIMIT = {  # bytes of shared memory a block may have: CUDA C++ Programming Guide, "Technical Specifications"
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_120a": 99 * 1024,
}
ARCHS = (*CPU_ARCHS, *SHARED_LIMIT)  # all that we can build for


def offered(cpuinfo: str | None = None) -> tuple[Target, ...]:
    """The CPU levels this machine can run, best first; empty where it is not x86-64 Linux.

    cpuinfo replaces the text of /proc/cpuinfo.
    """
    text = _read_cpuinfo() if cpuinfo is None else cpuinfo
    flags = _flags(text)
    name, cores = _model_name(text), usable_cores()
    return tuple(Target(arch, name, cores) for arch, needs in CPU_ARCHS.items() if needs <= flags)


@functools.cache
def native() -> Target | None:
    """The best level of this machine's CPU, or None if we build for none it has."""
    return next(iter(offered()), None)


def named(arch: str) -> Target:
    """The target of a build for some other machine: it has an arch and no device.

    Raises ValueError, naming the known archs, for one we cannot build for.
    """
    if arch not in ARCHS:
        raise ValueError(f"target: arch is {arch!r}; expected one of {', '.join(ARCHS)}")
    return Target(arch, smem_bytes=SHARED_LIMIT.get(arch, 0))


def cuda_archs(major: int, minor: int) -> tuple[str, ...]:
    """The archs whose binaries a GPU of this compute capability runs, best first.

    Machine code runs on its own capability and on later ones of the same major number; that of an arch with an `a` on
    its own alone.
    """
    exact = f"sm_{major}{minor}a"
    if exact in SHARED_LIMIT:
        return (exact,)
    known = (arch for arch in SHARED_LIMIT if arch.startswith(f"sm_{major}") and len(arch) == 4 + len(str(major)))
    return tuple(sorted((arch for arch in known if int(arch[-1]) <= minor), reverse=True))


def _read_cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def _field(cpuinfo: str, name: str) -> list[str]:
    """The values of a field, one a logical CPU."""
    return re.findall(rf"^{name}[ \t]*:[ \t]*(.*?)[ \t]*$", cpuinfo, re.MULTILINE)


def _flags(cpuinfo: str) -> frozenset[str]:
    """The flags every logical CPU has: a thread may run on any of them."""
    per_cpu = [frozenset(line.replace("lzcnt", "abm").split()) for line in _field(cpuinfo, "flags")]
    return frozenset.intersection(*per_cpu) if per_cpu else frozenset()


def _model_name(cpuinfo: str) -> str:
    name = next(iter(_field(cpuinfo, "model name")), "")
    # A hypervisor often hides the model ("AMD EPYC", "Intel(R) Xeon(R) CPU @ 2.20GHz"), and a table
    # tuned on one generation is not the next one's: the numbers tell them apart.
    if re.search(r"\d", name.split("@")[0]):
        return name
    numbers = (next(iter(_field(cpuinfo, field)), "?") for field in ("cpu family", "model", "stepping"))
    return f"{name} {'/'.join(numbers)}".strip()


def usable_cores() -> int:
    """What this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
