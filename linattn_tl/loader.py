"""Problem -> loaded kernels: the user's cache, the wheel, or a build here and now."""

import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autotune import build, table, target
from autotune.launcher.cpu import CpuBinary
from autotune.launcher.cuda import CudaBinary
from autotune.pool import Outcome, run_tasks
from autotune.store import Entry, Store
from autotune.tuner import Task, build_timeout_s
from linattn_tl import devices, registry, settings
from linattn_tl.launchers import CudaLauncher, EmulatedLauncher
from linattn_tl.registry import Compiled
from tl_kernels.spec import DTYPES, MAX_HEAD_DIM, Kernel, Problem, Target, config_items

log = logging.getLogger("linattn_tl")
WHEEL = Path(build.__file__).parent / "binaries"  # what a wheel brings along; read-only

BUILDER = "linattn_tl.trials:build_candidate"  # what a child process runs
Verify = Callable[[Kernel, Problem, Any], None]  # of a kernel and what launches it; raises if it is wrong


def user_store() -> Store:
    return Store(settings.cache_dir())


def stores() -> list[Store]:
    return [user_store(), Store(WHEEL)]


def tables(device: Target) -> list[Path]:
    """Tuned tables, most specific first."""
    return [settings.cache_dir() / "tables" / f"{device.arch}.json", table.SHIPPED / f"{device.arch}.json"]


@dataclass(frozen=True)
class Found:
    """One stored binary."""

    kernel: Kernel
    config: Any
    entry: Entry


def find(kernel: Kernel, problem: Problem, device: Target) -> Found | None:
    """The stored binary for a device of the best config that has one."""
    for config in table.ordered_configs(kernel, problem, device, tables(device)):
        key = build.binary_key(kernel, problem, config, device)
        for store in stores():
            entry = store.get(key)
            if entry is not None:
                return Found(kernel, config, entry)
    return None


def find_all(compiled: Compiled, problem: Problem) -> tuple[Target, list[Found]] | None:
    """The stored binaries of all kernels that the problem needs, at the best level that has them."""
    for device in devices.offered(problem):
        found = [find(kernel, problem, device) for kernel in compiled.serving(problem, device)]
        whole = [x for x in found if x is not None]
        if found and len(whole) == len(found):
            return device, whole
    return None


def refuse_problem(compiled: Compiled, problem: Problem) -> str | None:
    """What no compiled kernel can do here, whatever is installed."""
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype} is not one of {', '.join(DTYPES)}"
    if problem.K > MAX_HEAD_DIM or problem.V > MAX_HEAD_DIM:
        return f"K={problem.K}, V={problem.V}: head dims above {MAX_HEAD_DIM} have no kernel"
    return compiled.refuse(problem) or devices.refuse(problem)


def refuse_binary(compiled: Compiled, problem: Problem) -> str | None:
    reason = refuse_problem(compiled, problem)
    if reason or find_all(compiled, problem) is not None:
        return reason
    offered = devices.offered(problem)
    if not compiled.serving(problem, offered[0]):
        return _fits_nothing(problem, offered[0])
    missing = ", ".join(_stage(k) for k in _missing(compiled, problem, offered[0]))
    levels = " or ".join(t.arch for t in offered)
    if problem.device == "cpu":
        return f"no {levels} {problem.dtype} binary of {missing} in the cache; `linattn-tl tune` builds them"
    dims = f"{problem.K}x{problem.V}"
    return (
        f"no {levels} {problem.dtype} K={problem.K} V={problem.V} binary of {missing} in the cache; "
        f"`linattn-tl build --arch {offered[0].arch} --dims {dims}` makes them, on any machine"
    )


def _fits_nothing(problem: Problem, device: Target) -> str:
    return f"K={problem.K}, V={problem.V} in {problem.dtype}: no kernel of {problem.op} fits {device.arch}"


def refuse_jit(compiled: Compiled, problem: Problem) -> str | None:
    reason = refuse_problem(compiled, problem)
    if reason:
        return reason
    device = devices.offered(problem)[0]
    reason = build.missing_tools(device)
    if reason or not compiled.serving(problem, device):
        return reason or _fits_nothing(problem, device)
    if multiprocessing.current_process().daemon:
        return "building takes child processes, which a daemonic process may not have; `preload` in its parent"
    return None


def load_stored(compiled: Compiled, problem: Problem) -> Any:
    """The runner of binaries that refuse_binary has found. Raises BuildError if this machine cannot load them."""
    device, launchers = load_launchers(compiled, problem)
    return compiled.runner(launchers, device)


def load_launchers(compiled: Compiled, problem: Problem) -> tuple[Target, dict[str, Any]]:
    """The stored binaries that serve a problem, loaded, by the kernels' names, and the device they run on."""
    found = find_all(compiled, problem)
    if found is None:
        raise FileNotFoundError(f"{problem.op}: its binaries were removed from {settings.cache_dir()}")
    device, binaries = found
    launchers = {x.kernel.name: _opened(x.entry.path, x.kernel, x.config, device.device) for x in binaries}
    if problem.device == "cuda":
        _preload(launchers, problem)
    return device, launchers


def _preload(launchers: dict[str, Any], problem: Problem) -> None:
    """Load the kernels on the device now: a first call under graph capture may not, and an unfit driver shows."""
    for name, launcher in launchers.items():
        try:
            launcher.binary.preload(problem.index)
        except RuntimeError as error:
            raise build.BuildError(f"{name} does not load on cuda:{problem.index}: {error}") from error


def load_built(compiled: Compiled, problem: Problem) -> Any:
    """The runner of what is stored, and of what is built, verified and stored now.

    In child processes, one a core: importing the tile compiler changes a process (its environment, its excepthook),
    and a kernel that crashes while it is verified must not take the caller along.
    """
    device = devices.offered(problem)[0]
    missing = [] if find_all(compiled, problem) else _missing(compiled, problem, device)
    if missing:
        start = time.perf_counter()
        build_in_children([best_task(kernel, problem, device) for kernel in missing])
        names = ", ".join(map(_stage, missing))
        elapsed = time.perf_counter() - start
        log.info("%s %s: built and verified %s in %.1f s", problem.op, problem.dtype, names, elapsed)
    return load_stored(compiled, problem)


def _missing(compiled: Compiled, problem: Problem, device: Target) -> list[Kernel]:
    return [kernel for kernel in compiled.serving(problem, device) if find(kernel, problem, device) is None]


def _stage(kernel: Kernel) -> str:
    return kernel.name.split(".")[1]


def best_task(kernel: Kernel, problem: Problem, device: Target) -> Task:
    """Building the best known config of a kernel, as a child process is told."""
    shaping = build.shaping_problem(problem._replace(op=kernel.op), device)
    config = table.ordered_configs(kernel, shaping, device, tables(device))[0]
    return Task(kernel.name, problem.dtype, shaping.K, shaping.V, config_items(config), device.arch, True)


def build_in_children(tasks: list[Task]) -> None:
    """BuildError if one fails."""
    failed: list[str] = []

    def on_result(outcome: Outcome) -> None:
        registry.count("compile")
        if outcome.status != "ok":
            failed.append(f"{tasks[outcome.task_index].kernel}: {outcome.error or outcome.status}")

    jobs = min(len(tasks), target.usable_cores())
    timeout_s = max(build_timeout_s(task.arch) for task in tasks)
    run_tasks(tasks, BUILDER, jobs=jobs, timeout_s=timeout_s, on_result=on_result)
    if failed:
        raise build.BuildError("; ".join(failed))


def build_and_store(kernel: Kernel, problem: Problem, device: Target, verify: Verify | None, config: Any) -> Entry:
    """Build one binary, check it against the definition, and keep it; another process may do it first.

    A CPU binary is executed here; a kernel for a GPU is executed under the emulator, on any machine, as it was lowered
    for the binary. verify=None, for kernel development, keeps it under a name that no call finds; so does a CPU level
    that this machine cannot run, since nobody has executed it.
    """
    can_run = device.device == "cuda" or device.arch in [t.arch for t in target.offered()]
    start = time.perf_counter()

    def make(path: Path) -> dict[str, Any]:
        if device.device == "cuda":
            return _make_cuda(kernel, problem, config, device, path, verify)
        return _make_cpu(kernel, problem, config, device, path, verify, can_run)

    key = build.binary_key(kernel, problem, config, device, checked=verify is not None and can_run)
    entry = user_store().put(key, make)
    log.info("%s %s: built and verified in %.1f s", kernel.name, problem.dtype, time.perf_counter() - start)
    return entry


def _make_cpu(
    kernel: Kernel, problem: Problem, config: Any, device: Target, path: Path, verify: Verify | None, can_run: bool
) -> dict[str, Any]:
    manifest = build.build(kernel, problem, config, device, path)
    if verify is None:
        return {**manifest, "verified": "no"}
    if not can_run:
        return {**manifest, "verified": "not executed: built on a machine that cannot run it"}
    verify(kernel, problem, CpuBinary(path, kernel, config))
    return {**manifest, "verified": "executed against the float64 definition"}


def _make_cuda(
    kernel: Kernel, problem: Problem, config: Any, device: Target, path: Path, verify: Verify | None
) -> dict[str, Any]:
    from autotune import cuda_build
    from autotune.emulator import Emulated

    lowered = cuda_build.lower(kernel, problem, config, device)
    if verify is not None:
        with tempfile.TemporaryDirectory() as folder:
            verify(kernel, problem, EmulatedLauncher(Emulated(lowered, cache=Path(folder)), config))
    manifest = cuda_build.build(kernel, problem, config, device, path, lowered)
    return {**manifest, "verified": "no" if verify is None else "emulated: clean, and against the float64 definition"}


@cache
def _opened(path: Path, kernel: Kernel, config: Any, device: str) -> Any:
    registry.count("binary_load")
    return CudaLauncher(CudaBinary(path), config) if device == "cuda" else CpuBinary(path, kernel, config)


def impls(compiled: Mapping[str, Compiled], plain: Callable[[], Any]) -> tuple[registry.Impl, ...]:
    """An op's backends in the order they are tried. plain() makes the runner in plain torch."""

    def on(problem: Problem, call: Callable[[Compiled, Problem], Any]) -> Any:
        here = compiled.get(problem.device)
        return f"no kernel is built for {problem.device} tensors" if here is None else call(here, problem)

    return (
        registry.Impl("binary", lambda p: on(p, refuse_binary), lambda p: on(p, load_stored)),
        registry.Impl("jit", lambda p: on(p, refuse_jit), lambda p: on(p, load_built)),
        registry.Impl("torch", lambda p: None, lambda p: plain()),
    )


def stored_binary(kernel: Kernel, problem: Problem, device: Target, config: Any, checked: bool = True) -> Any:
    """What launches the stored binary of exactly this config."""
    entry = user_store().get(build.binary_key(kernel, problem, config, device, checked))
    if entry is None:
        raise FileNotFoundError(f"{kernel.name} {problem.dtype}: no binary of {config} in {settings.cache_dir()}")
    return _opened(entry.path, kernel, config, device.device)
