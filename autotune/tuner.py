"""The search: build candidates in parallel, check every one, time those that are right, keep the fastest.

Building and checking happen in child processes, so that a candidate that crashes or hangs costs itself only. What is
right goes to the store at once, and what was timed to a journal, so a run that is killed goes on where it was.
Timing happens in one child, alone, config against config in one interleaved run.

The definition to check against comes from above: the caller passes the names of the two functions that children run.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune import build, table
from autotune.pool import Outcome, run_tasks
from tl_kernels.spec import Kernel, Problem, Target, config_dict, config_items

BUILD_SHARE = 0.7  # of the time budget; the rest is for timing what was built
BUILD_TIMEOUT_S = 120.0
CUDA_BUILD_TIMEOUT_S = 1200.0  # lowering, a check under the emulator and nvcc: a minute or two on a core of its own
TIMING_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Task:
    """One candidate, as plain data for a child process."""

    kernel: str
    dtype: str
    K: int
    V: int
    config: tuple[tuple[str, int], ...]
    arch: str
    checked: bool


@dataclass(frozen=True)
class Candidate:
    """A kernel, a config of it, and the problem as far as it shapes the binary."""

    kernel: Kernel
    problem: Problem
    config: Any


@dataclass(frozen=True)
class Group:
    """Configs of one kernel to time against each other at one size."""

    kernel: str
    dtype: str
    K: int
    V: int
    arch: str
    configs: tuple[tuple[tuple[str, int], ...], ...]
    checked: bool


@dataclass(frozen=True)
class Plan:
    """What to tune: kernels x dtypes x head dims on one device, within a time budget."""

    kernels: Sequence[Kernel]
    dtypes: Sequence[str]
    dims: Sequence[tuple[int, int]]
    device: Target
    budget_s: float
    jobs: int
    checked: bool = True  # False: for kernel development; nothing is stored as served, no row is written
    wanted: Callable[[Kernel, Problem], bool] = lambda kernel, problem: True  # whether a call would use a kernel


@dataclass(frozen=True)
class Workers:
    """Functions that children run, "module:function": task -> None, and group -> [(median us, GFLOP/s)]."""

    build: str
    measure: str


@dataclass
class Report:
    """What a run did."""

    candidates: int = 0
    built: int = 0  # in this run
    found: int = 0  # already in the store
    skipped: int = 0  # candidates not built, and groups not timed, for lack of time
    dropped: list[dict[str, str]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class Journal:
    """Facts one a line, appended and fsynced; a line cut short by a kill is skipped when read."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                fact = json.loads(line)
            except ValueError:
                continue
            if isinstance(fact, dict):
                yield fact

    def append(self, fact: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write("\n" if self._cut_short() else "")
            file.write(json.dumps(fact, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _cut_short(self) -> bool:
        size = self.path.stat().st_size
        if size == 0:
            return False
        with self.path.open("rb") as file:
            file.seek(size - 1)
            return file.read(1) != b"\n"


Progress = Callable[[str, int, int], None]  # (phase, done, of how many)


def tune(
    plan: Plan,
    workers: Workers,
    *,
    journal: Journal,
    has_binary: Callable[[Kernel, Problem, Any], bool],
    progress: Progress,
) -> Report:
    """Run the plan. Rows of the fastest verified config of every (kernel, dtype, K, V) are in the report."""
    start = time.monotonic()
    report = Report()
    failed = {f["key"] for f in journal.read() if f.get("event") == "dropped" and f.get("device") == plan.device.name}
    usable = _build_all(plan, workers, journal, has_binary, progress, report, failed, start)
    report.rows = _time_all(plan, workers, journal, progress, usable, report, start)
    report.seconds = time.monotonic() - start
    return report


def candidates(plan: Plan) -> list[Candidate]:
    """The best guesses of all kernels first: whenever time runs out, all have some."""
    ranked: list[tuple[int, Candidate]] = []
    for kernel in plan.kernels:
        for problem in _problems(plan, kernel):
            configs = kernel.configs(problem, plan.device)
            ranked += [(rank, Candidate(kernel, problem, config)) for rank, config in enumerate(configs)]
    ranked.sort(key=lambda r: r[0])
    return [candidate for _, candidate in ranked]


def _problems(plan: Plan, kernel: Kernel) -> list[Problem]:
    """Those that need binaries of their own."""
    every = (Problem(kernel.op, dtype, K, V) for dtype in plan.dtypes for K, V in plan.dims)
    shaping = dict.fromkeys(build.shaping_problem(p, plan.device) for p in every)
    return [p for p in shaping if plan.wanted(kernel, p)]


def _key(plan: Plan, c: Candidate) -> str:
    return build.binary_key(c.kernel, c.problem, c.config, plan.device, plan.checked)


def build_timeout_s(arch: str) -> float:
    """How long building and checking one candidate may take."""
    return CUDA_BUILD_TIMEOUT_S if arch.startswith("sm_") else BUILD_TIMEOUT_S


def _task(plan: Plan, c: Candidate) -> Task:
    p = c.problem
    return Task(c.kernel.name, p.dtype, p.K, p.V, config_items(c.config), plan.device.arch, plan.checked)


def _build_all(
    plan: Plan,
    workers: Workers,
    journal: Journal,
    has_binary: Callable[[Kernel, Problem, Any], bool],
    progress: Progress,
    report: Report,
    failed: set[str],
    start: float,
) -> list[Candidate]:
    """Build and check what is not stored; returns the candidates that are right."""
    usable, todo = [], []
    everything = candidates(plan)
    report.candidates = len(everything)
    for candidate in everything:
        if has_binary(candidate.kernel, candidate.problem, candidate.config):
            usable.append(candidate)
        elif _key(plan, candidate) not in failed:
            todo.append(candidate)
    report.found = len(usable)
    done = len(everything) - len(todo)
    progress("build", done, len(everything))

    def on_result(outcome: Outcome) -> None:
        nonlocal done
        candidate = todo[outcome.task_index]
        done += 1
        if outcome.status == "ok":
            report.built += 1
            usable.append(candidate)
        elif outcome.status == "skipped":
            report.skipped += 1
        else:
            fact = {
                "event": "dropped",
                "key": _key(plan, candidate),
                "kernel": candidate.kernel.name,
                "dtype": candidate.problem.dtype,
                "config": config_dict(candidate.config),
                "device": plan.device.name,
                "why": f"{outcome.status}: {outcome.error}",
            }
            journal.append(fact)
            report.dropped.append({k: str(fact[k]) for k in ("kernel", "dtype", "config", "why")})
        progress("build", done, len(everything))

    tasks = [_task(plan, c) for c in todo]
    run_tasks(
        tasks,
        workers.build,
        jobs=plan.jobs,
        timeout_s=build_timeout_s(plan.device.arch),
        on_result=on_result,
        deadline=start + BUILD_SHARE * plan.budget_s,
    )
    return usable


def _groups(plan: Plan, usable: Sequence[Candidate]) -> list[Group]:
    """One a kernel, dtype and head dims, with the configs that have a binary for those."""
    groups = []
    for name, dtype in dict.fromkeys((c.kernel.name, c.problem.dtype) for c in usable):
        for K, V in plan.dims:
            shaping = build.shaping_problem(Problem(name.split(".")[0], dtype, K, V), plan.device)
            configs = [config_items(c.config) for c in usable if (c.kernel.name, c.problem) == (name, shaping)]
            if configs:
                groups.append(Group(name, dtype, K, V, plan.device.arch, tuple(sorted(configs)), plan.checked))
    return groups


def _identity(plan: Plan, group: Group) -> dict[str, Any]:
    """All that a timing depends on: another device, compiler, source or set of configs is timed anew."""
    return {
        **json.loads(json.dumps(asdict(group))),
        "device": plan.device.name,
        "compiler": build.compilers(plan.device),
        "source": build.source_hash(group.kernel.split(".")[0], plan.device),
    }


def _time_all(
    plan: Plan,
    workers: Workers,
    journal: Journal,
    progress: Progress,
    usable: Sequence[Candidate],
    report: Report,
    start: float,
) -> list[dict[str, Any]]:
    groups = _groups(plan, usable)
    known = {json.dumps(f["group"], sort_keys=True): f["row"] for f in journal.read() if f.get("event") == "timed"}
    rows = [known.get(json.dumps(_identity(plan, g), sort_keys=True)) for g in groups]
    todo = [i for i, row in enumerate(rows) if row is None]
    done = len(groups) - len(todo)
    progress("time", done, len(groups))

    def on_result(outcome: Outcome) -> None:
        nonlocal done
        i = todo[outcome.task_index]
        done += 1
        if outcome.status == "ok":
            rows[i] = _row(plan, groups[i], outcome.value)
            journal.append({"event": "timed", "group": _identity(plan, groups[i]), "row": rows[i]})
        elif outcome.status == "skipped":
            report.skipped += 1
        else:  # not journaled: what crashed here may have been another process's doing, and is tried again
            g = groups[i]
            what = {"kernel": g.kernel, "dtype": g.dtype, "config": f"timing at K={g.K} V={g.V}"}
            report.dropped.append({**what, "why": f"{outcome.status}: {outcome.error}"})
        progress("time", done, len(groups))

    run_tasks(
        [groups[i] for i in todo],
        workers.measure,
        jobs=1,
        timeout_s=TIMING_TIMEOUT_S,
        on_result=on_result,
        deadline=start + plan.budget_s,
    )
    return [row for row in rows if row is not None]


def _row(plan: Plan, group: Group, timings: Sequence[tuple[float, float]]) -> dict[str, Any]:
    best = min(range(len(timings)), key=lambda i: timings[i][0])
    return {
        "kernel": group.kernel,
        "dtype": group.dtype,
        "K": group.K,
        "V": group.V,
        "config": dict(group.configs[best]),
        "median_us": round(timings[best][0], 1),
        "gflops": round(timings[best][1], 1),
        "candidates": len(timings),
        "device": plan.device.name,
        "tools": f"tilelang {build.TILELANG}, {build.compilers(plan.device)}",
    }


def write_table(plan: Plan, report: Report, path: Path) -> None:
    """Merge the report's rows into the table file. Unchecked rows are never kept."""
    if plan.checked and report.rows:
        table.write_rows(path, plan.device.arch, table.merge_rows(table.read_rows(path), report.rows))
