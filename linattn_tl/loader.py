"""Problem -> loaded kernels: the user's cache, the wheel, or a build here and now."""

import logging
import multiprocessing
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from autotune import build, table, target
from autotune.launcher.cpu import CpuBinary
from autotune.pool import Outcome, run_tasks
from autotune.store import Entry, Store
from autotune.tuner import BUILD_TIMEOUT_S, Task
from linattn_tl import registry, settings
from tl_kernels.spec import DTYPES, MAX_HEAD_DIM, Kernel, Problem, Target, config_items

log = logging.getLogger("linattn_tl")
WHEEL = Path(build.__file__).parent / "binaries"  # what a wheel brings along; read-only

BUILDER = "linattn_tl.trials:build_candidate"  # what a child process runs
Verify = Callable[[Kernel, Problem, CpuBinary], None]


def user_store() -> Store:
    return Store(settings.cache_dir())


def stores() -> list[Store]:
    return [user_store(), Store(WHEEL)]


def tables(device: Target) -> list[Path]:
    """Tuned tables, most specific first."""
    return [settings.cache_dir() / "tables" / f"{device.arch}.json", table.SHIPPED / f"{device.arch}.json"]


def refuse_problem(problem: Problem) -> str | None:
    """What no compiled CPU kernel can do, whatever is installed."""
    if problem.device != "cpu":
        return f"no kernel is built for {problem.device} tensors yet"
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype} is not one of {', '.join(DTYPES)}"
    if problem.K > MAX_HEAD_DIM or problem.V > MAX_HEAD_DIM:
        return f"K={problem.K}, V={problem.V}: head dims above {MAX_HEAD_DIM} have no kernel"
    if target.native() is None:
        return "this CPU is neither x86-64-v3 nor x86-64-v4"
    return None


def find(kernel: Kernel, problem: Problem) -> Entry | None:
    """The stored binary of the best config that has one, at the highest level this CPU can run."""
    for device in target.offered():
        for config in table.ordered_configs(kernel, problem, device, tables(device)):
            key = build.binary_key(kernel, problem, config, device)
            for store in stores():
                entry = store.get(key)
                if entry is not None:
                    return entry
    return None


def refuse_binary(kernels: Sequence[Kernel], problem: Problem) -> str | None:
    reason = refuse_problem(problem)
    if reason:
        return reason
    missing = [k.name.split(".")[1] for k in kernels if find(k, problem) is None]
    if not missing:
        return None
    levels = " or ".join(t.arch for t in target.offered())
    return f"no {levels} {problem.dtype} binary of {', '.join(missing)} in the cache; `linattn-tl tune` builds them"


def refuse_jit(kernels: Sequence[Kernel], problem: Problem) -> str | None:
    reason = refuse_problem(problem) or build.tools().missing
    if reason:
        return reason
    if multiprocessing.current_process().daemon:
        return "building takes child processes, which a daemonic process may not have; `preload` in its parent"
    return None


def load_stored(kernels: Sequence[Kernel], problem: Problem) -> dict[str, CpuBinary]:
    """Load binaries that refuse_binary has found."""
    loaded = {}
    for kernel in kernels:
        entry = find(kernel, problem)
        if entry is None:
            raise FileNotFoundError(f"{kernel.name}: its binary was removed from {settings.cache_dir()}")
        loaded[kernel.name] = _open(kernel, problem, entry)
    return loaded


def load_built(kernels: Sequence[Kernel], problem: Problem) -> dict[str, CpuBinary]:
    """Load what is stored, and build, verify and store what is not.

    In child processes, one a core: importing the tile compiler changes a process (its environment, its excepthook),
    and a kernel that crashes while it is verified must not take the caller along.
    """
    missing = [kernel for kernel in kernels if find(kernel, problem) is None]
    if missing:
        start = time.perf_counter()
        _build_in_children([best_task(kernel, problem.dtype, _native()) for kernel in missing])
        names = ", ".join(k.name.split(".")[1] for k in missing)
        elapsed = time.perf_counter() - start
        log.info("%s %s: built and verified %s in %.1f s", problem.op, problem.dtype, names, elapsed)
    return load_stored(kernels, problem)


def best_task(kernel: Kernel, dtype: str, device: Target) -> Task:
    """Building the best known config of a kernel, as a child process is told."""
    problem = Problem(kernel.op, dtype, 64, 64)
    config = table.ordered_configs(kernel, problem, device, tables(device))[0]
    return Task(kernel.name, dtype, config_items(config), device.arch, True)


def _build_in_children(tasks: list[Task]) -> None:
    failed: list[str] = []

    def on_result(outcome: Outcome) -> None:
        registry.count("compile")
        if outcome.status != "ok":
            failed.append(f"{tasks[outcome.task_index].kernel}: {outcome.error or outcome.status}")

    jobs = min(len(tasks), _native().cores)
    run_tasks(tasks, BUILDER, jobs=jobs, timeout_s=BUILD_TIMEOUT_S, on_result=on_result)
    if failed:
        raise build.BuildError("; ".join(failed))


def build_and_store(kernel: Kernel, problem: Problem, device: Target, verify: Verify | None, config: Any) -> Entry:
    """Build one binary, check it against the definition, and keep it; another process may do it first.

    verify=None, for kernel development, keeps it under a name that no call finds; so does a level that this machine
    cannot run, since nobody has executed it.
    """
    can_run = device.arch in [t.arch for t in target.offered()]
    start = time.perf_counter()

    def make(path: Path) -> dict[str, Any]:
        manifest = build.build(kernel, problem, config, device, path)
        if verify is None:
            return {**manifest, "verified": "no"}
        if not can_run:
            return {**manifest, "verified": "not executed: built on a machine that cannot run it"}
        verify(kernel, problem, CpuBinary(path, kernel, config))
        return {**manifest, "verified": "executed against the float64 definition"}

    key = build.binary_key(kernel, problem, config, device, checked=verify is not None and can_run)
    entry = user_store().put(key, make)
    log.info("%s %s: built and verified in %.1f s", kernel.name, problem.dtype, time.perf_counter() - start)
    return entry


@cache
def _opened(path: Path, kernel: Kernel, config: Any) -> CpuBinary:
    registry.count("binary_load")
    return CpuBinary(path, kernel, config)


def _open(kernel: Kernel, problem: Problem, entry: Entry) -> CpuBinary:
    device = target.named(entry.manifest["arch"])
    return _opened(entry.path, kernel, kernel.find_config(problem, device, entry.manifest["config"]))


def _native() -> Target:
    device = target.native()
    if device is None:
        raise RuntimeError("this CPU has no compiled kernels; refuse_problem says so first")
    return device


def impls(
    kernels: Sequence[Kernel], compiled: Callable[[Any], Any], plain: Callable[[], Any]
) -> tuple[registry.Impl, ...]:
    """An op's backends in the order they are tried. compiled(binaries) and plain() make the runners."""

    return (
        registry.Impl("binary", lambda p: refuse_binary(kernels, p), lambda p: compiled(load_stored(kernels, p))),
        registry.Impl("jit", lambda p: refuse_jit(kernels, p), lambda p: compiled(load_built(kernels, p))),
        registry.Impl("torch", lambda p: None, lambda p: plain()),
    )


def stored_binary(kernel: Kernel, problem: Problem, device: Target, config: Any, checked: bool = True) -> CpuBinary:
    """The stored binary of exactly this config."""
    entry = user_store().get(build.binary_key(kernel, problem, config, device, checked))
    if entry is None:
        raise FileNotFoundError(f"{kernel.name} {problem.dtype}: no binary of {config} in {settings.cache_dir()}")
    return _opened(entry.path, kernel, config)
