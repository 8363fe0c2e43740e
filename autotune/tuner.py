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
TIMING_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Task:
    """One candidate, as plain data for a child process."""

    kernel: str
    dtype: str
    config: tuple[tuple[str, int], ...]
    arch: str
    checked: bool


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


def candidates(plan: Plan) -> list[tuple[Kernel, str, Any]]:
    """(kernel, dtype, config), the best guesses of all kernels first: whenever time runs out, all have some."""
    ranked = []
    for kernel in plan.kernels:
        for dtype in plan.dtypes:
            configs = kernel.configs(Problem(kernel.op, dtype, *plan.dims[0]), plan.device)
            ranked += [(rank, kernel, dtype, config) for rank, config in enumerate(configs)]
    ranked.sort(key=lambda r: r[0])
    return [r[1:] for r in ranked]


def _key(plan: Plan, kernel: Kernel, dtype: str, config: Any) -> str:
    return build.binary_key(kernel, Problem(kernel.op, dtype, *plan.dims[0]), config, plan.device, plan.checked)


def _build_all(
    plan: Plan,
    workers: Workers,
    journal: Journal,
    has_binary: Callable[[Kernel, Problem, Any], bool],
    progress: Progress,
    report: Report,
    failed: set[str],
    start: float,
) -> list[tuple[Kernel, str, Any]]:
    """Build and check what is not stored; returns the candidates that are right."""
    usable, todo = [], []
    everything = candidates(plan)
    report.candidates = len(everything)
    for kernel, dtype, config in everything:
        if has_binary(kernel, Problem(kernel.op, dtype, *plan.dims[0]), config):
            usable.append((kernel, dtype, config))
        elif _key(plan, kernel, dtype, config) not in failed:
            todo.append((kernel, dtype, config))
    report.found = len(usable)
    done = len(everything) - len(todo)
    progress("build", done, len(everything))

    def on_result(outcome: Outcome) -> None:
        nonlocal done
        kernel, dtype, config = todo[outcome.task_index]
        done += 1
        if outcome.status == "ok":
            report.built += 1
            usable.append((kernel, dtype, config))
        elif outcome.status == "skipped":
            report.skipped += 1
        else:
            fact = {
                "event": "dropped",
                "key": _key(plan, kernel, dtype, config),
                "kernel": kernel.name,
                "dtype": dtype,
                "config": config_dict(config),
                "device": plan.device.name,
                "why": f"{outcome.status}: {outcome.error}",
            }
            journal.append(fact)
            report.dropped.append({k: str(fact[k]) for k in ("kernel", "dtype", "config", "why")})
        progress("build", done, len(everything))

    tasks = [Task(k.name, d, config_items(c), plan.device.arch, plan.checked) for k, d, c in todo]
    run_tasks(
        tasks,
        workers.build,
        jobs=plan.jobs,
        timeout_s=BUILD_TIMEOUT_S,
        on_result=on_result,
        deadline=start + BUILD_SHARE * plan.budget_s,
    )
    return usable


def _groups(plan: Plan, usable: Sequence[tuple[Kernel, str, Any]]) -> list[Group]:
    grouped: dict[tuple[str, str], list[Any]] = {}
    for kernel, dtype, config in usable:
        grouped.setdefault((kernel.name, dtype), []).append(config_items(config))
    return [
        Group(name, dtype, K, V, plan.device.arch, tuple(sorted(configs)), plan.checked)
        for (name, dtype), configs in grouped.items()
        for K, V in plan.dims
    ]


def _identity(plan: Plan, group: Group) -> dict[str, Any]:
    """All that a timing depends on: another device, compiler, source or set of configs is timed anew."""
    return {
        **json.loads(json.dumps(asdict(group))),
        "device": plan.device.name,
        "compiler": build.tools().version,
        "source": build.fingerprint(group.kernel.split(".")[0]),
    }


def _time_all(
    plan: Plan,
    workers: Workers,
    journal: Journal,
    progress: Progress,
    usable: Sequence[tuple[Kernel, str, Any]],
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
        "tools": f"tilelang {build.TILELANG}, g++ {build.tools().version}",
    }


def write_table(plan: Plan, report: Report, path: Path) -> None:
    """Merge the report's rows into the table file. Unchecked rows are never kept."""
    if plan.checked and report.rows:
        table.write_rows(path, plan.device.arch, table.merge_rows(table.read_rows(path), report.rows))
