"""Tuning this device: what to tune by default, where results go, and the tuner's run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune import build, target, tuner
from autotune.pool import Outcome, run_tasks
from autotune.tuner import Plan, Report, Workers
from linattn_tl import loader, registry, settings, trials
from tl_kernels.spec import DTYPES, MAX_HEAD_DIM, Kernel, Problem, Target, check_dtype_name

WORKERS = Workers(loader.BUILDER, "linattn_tl.trials:time_group")


def make_plan(
    *,
    arch: str = "native",
    budget_s: float,
    dtypes: Sequence[str] = DTYPES,
    dims: Sequence[tuple[int, int]] = ((64, 64), (128, 128)),
    ops: Sequence[str] | None = None,
    jobs: int = 0,
    checked: bool = True,
) -> Plan:
    """A plan for all kernels of the named families; jobs=0 is one build a core.

    Raises ValueError naming what is not known, RuntimeError for what is not possible here.
    """
    if build.tools().missing:
        raise RuntimeError(f"tuning builds kernels, and {build.tools().missing}")
    for dtype in dtypes:
        check_dtype_name(dtype)
    for K, V in dims:
        if not (1 <= K <= MAX_HEAD_DIM and 1 <= V <= MAX_HEAD_DIM):
            raise ValueError(f"head dims are {K}x{V}; expected 1 to {MAX_HEAD_DIM}")
    kernels = trials.all_kernels()
    families = list(dict.fromkeys(k.op for k in kernels))
    for op in ops or ():
        if op not in families:
            raise ValueError(f"op is {op!r}; expected one of {', '.join(families)}")
    chosen = [k for k in kernels if ops is None or k.op in ops]
    device = _device(arch)
    return Plan(chosen, list(dtypes), list(dims), device, budget_s, jobs or device.cores, checked)


def _device(arch: str) -> Target:
    offered = target.offered()
    if not offered:
        raise RuntimeError("this CPU has no compiled kernels: neither x86-64-v3 nor x86-64-v4")
    if arch == "native":
        return offered[0]
    for device in offered:
        if device.arch == arch:
            return device
    raise ValueError(f"arch is {arch!r}; this machine can tune native, {', '.join(t.arch for t in offered)}")


def run(plan: Plan, *, progress: tuner.Progress, fresh: bool = False) -> tuple[Report, Path]:
    """Tune, write the table, and serve its winners from the next call on."""
    journal = tuner.Journal(settings.cache_dir() / "tuning" / f"{plan.device.arch}.jsonl")
    if fresh:
        journal.path.unlink(missing_ok=True)
    registry.count("tune")

    def has_binary(kernel: Kernel, problem: Problem, config: Any) -> bool:
        return loader.user_store().get(build.binary_key(kernel, problem, config, plan.device, plan.checked)) is not None

    report = tuner.tune(plan, WORKERS, journal=journal, has_binary=has_binary, progress=progress)
    path = settings.cache_dir() / "tables" / f"{plan.device.arch}.json"
    tuner.write_table(plan, report, path)
    registry.forget_choices()
    return report, path


def build_best(
    archs: Sequence[str], dtypes: Sequence[str], jobs: int, say: Callable[[dict[str, Any], int, int], None]
) -> list[dict[str, Any]]:
    """Build the best known config of every kernel for each architecture; checked where this machine can run it."""
    if build.tools().missing:
        raise RuntimeError(f"building needs a compiler, and {build.tools().missing}")
    for dtype in dtypes:
        check_dtype_name(dtype)
    tasks = []
    for device in (target.named(a) for a in archs):
        for kernel in trials.all_kernels():
            for dtype in dtypes:
                tasks.append(loader.best_task(kernel, dtype, device))
    done: list[dict[str, Any]] = []

    def on_result(outcome: Outcome) -> None:
        task = tasks[outcome.task_index]
        fact = {"kernel": task.kernel, "dtype": task.dtype, "arch": task.arch}
        done.append({**fact, "status": outcome.status, "error": outcome.error})
        say(done[-1], len(done), len(tasks))

    here = target.native()
    jobs = jobs or (here.cores if here else 1)
    run_tasks(tasks, WORKERS.build, jobs=jobs, timeout_s=tuner.BUILD_TIMEOUT_S, on_result=on_result)
    registry.forget_choices()
    return done
