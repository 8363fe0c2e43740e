"""Tuning a device of this machine, and building for any: what by default, where results go, and the runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import build, target, tuner
from autotune.pool import Outcome, run_tasks
from autotune.tuner import Plan, Report, Task, Workers
from linattn_tl import devices, loader, registry, settings, trials
from tl_kernels.spec import DTYPES, MAX_HEAD_DIM, Kernel, Problem, Target, check_dtype_name, config_items

WORKERS = Workers(loader.BUILDER, "linattn_tl.trials:time_group")
DIMS = ((64, 64), (128, 128))


def make_plan(
    *,
    arch: str = "native",
    budget_s: float,
    dtypes: Sequence[str] = DTYPES,
    dims: Sequence[tuple[int, int]] = DIMS,
    ops: Sequence[str] | None = None,
    jobs: int = 0,
    checked: bool = True,
) -> Plan:
    """A plan for all kernels of the named families; jobs=0 is one build a core.

    Raises ValueError naming what is not known, RuntimeError for what is not possible here.
    """
    device = _device(arch)
    _check(device, dtypes, dims)
    families = _families(device, ops)
    chosen = [k for k in trials.all_kernels(device.device) if k.op in families]
    wanted = lambda kernel, problem: kernel.name in {k.name for k in trials.needed_kernels(problem, device)}  # noqa: E731
    jobs = jobs or target.usable_cores()
    return Plan(chosen, list(dtypes), list(dims), device, budget_s, jobs, checked, wanted)


def _check(device: Target, dtypes: Sequence[str], dims: Sequence[tuple[int, int]]) -> None:
    if missing := build.missing_tools(device):
        raise RuntimeError(f"kernels for {device.arch} cannot be built here: {missing}")
    for dtype in dtypes:
        check_dtype_name(dtype)
    for K, V in dims:
        if not (1 <= K <= MAX_HEAD_DIM and 1 <= V <= MAX_HEAD_DIM):
            raise ValueError(f"head dims are {K}x{V}; expected 1 to {MAX_HEAD_DIM}")


def _families(device: Target, ops: Sequence[str] | None) -> list[str]:
    """The named families, or all that have kernels for the device. ValueError for one that has none."""
    known = trials.families(device.device)
    for op in ops or ():
        if op not in known:
            raise ValueError(f"op is {op!r}; expected one of {', '.join(known)}")
    return [f for f in known if ops is None or f in ops]


def _device(arch: str) -> Target:
    """A device of this machine: its CPU, or a GPU that torch sees."""
    cpus = target.offered()
    gpus = devices.gpu()[:1]
    if arch == "native" and not cpus:
        raise RuntimeError("this CPU has no compiled kernels: neither x86-64-v3 nor x86-64-v4")
    for device in cpus if arch == "native" else (*cpus, *gpus):
        if arch in ("native", device.arch):
            return device
    known = ", ".join(["native", *(t.arch for t in (*cpus, *gpus))])
    raise ValueError(f"arch is {arch!r}; this machine can tune {known}")


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


@dataclass(frozen=True)
class Built:
    """What became of one binary that was to be built."""

    kernel: str
    arch: str
    dtype: str
    K: int  # head dims that shaped it; a CPU binary serves all
    V: int
    config: dict[str, int]
    status: str
    error: str


def build_best(
    archs: Sequence[str],
    dtypes: Sequence[str],
    dims: Sequence[tuple[int, int]] = DIMS,
    *,
    ops: Sequence[str] | None = None,
    every_config: bool = False,
    jobs: int = 0,
    say: Callable[[Built, int, int], None] = lambda built, done, total: None,
) -> list[Built]:
    """Build the best known config of every kernel, or every one that may launch, for each architecture.

    What this machine's CPU can run is executed, and what is for a GPU is executed under the emulator, before it is
    kept. Raises ValueError naming what is not known, RuntimeError for want of a tool.
    """
    tasks: list[Task] = []
    for device in (target.named(a) for a in archs):
        _check(device, dtypes, dims)
        families = _families(device, ops)
        for problem in (Problem(f, d, K, V, device.device) for f in families for d in dtypes for K, V in dims):
            tasks += _build_tasks(problem, device, every_config)
    tasks = list(dict.fromkeys(tasks))
    done: list[Built] = []

    def on_result(outcome: Outcome) -> None:
        t = tasks[outcome.task_index]
        done.append(Built(t.kernel, t.arch, t.dtype, t.K, t.V, dict(t.config), outcome.status, outcome.error))
        say(done[-1], len(done), len(tasks))

    run_tasks(
        tasks,
        WORKERS.build,
        jobs=jobs or target.usable_cores(),
        timeout_s=max(map(tuner.build_timeout_s, archs)),
        on_result=on_result,
    )
    registry.forget_choices()
    return done


def _build_tasks(problem: Problem, device: Target, every_config: bool) -> list[Task]:
    kernels = trials.needed_kernels(problem, device)
    if not kernels:
        p = problem
        raise ValueError(f"{p.op} {p.dtype} K={p.K} V={p.V} for {device.arch}: {trials.refusal(problem)}")
    best = [loader.best_task(kernel, problem, device) for kernel in kernels]
    if not every_config:
        return best
    shaping = build.shaping_problem(problem, device)
    return [
        Task(k.name, problem.dtype, shaping.K, shaping.V, config_items(c), device.arch, True)
        for k in kernels
        for c in k.configs(shaping, device)
    ]
