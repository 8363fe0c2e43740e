"""What the children of test_tuner run: candidates that are right, wrong, crash or hang, in place of real kernels.

They keep a log, and a store of what was "built", in the folder that TUNER_TEST_DIR names. As a script,
`python tuner_workers.py CONFIGS SECONDS` tunes candidates that each take that long, until it is killed.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune import build, tuner
from autotune.store import Store
from autotune.target import named
from autotune.tuner import Group, Journal, Plan, Report, Task, Workers
from autotune.verify import VerificationError
from tl_kernels.spec import Kernel, Problem, Target

RIGHT, WRONG, CRASHES, HANGS, CRASHES_TIMED = range(5)
WORKERS = Workers("tuner_workers:make", "tuner_workers:measure")
DEVICE = Target("cpu-v3", "a model", 8)


@dataclass(frozen=True)
class Config:
    """A candidate: what it does, how long that takes, and how fast it is."""

    id: int
    act: int = RIGHT
    sleep_ms: int = 0
    us: int = 100


def kernel(*configs: Config, name: str = "imagined.fwd") -> Kernel:
    def builder(*_: Any) -> Any:
        raise AssertionError("the tuner itself builds nothing")

    return Kernel(name, builder, lambda problem, target: configs)


def folder() -> Path:
    return Path(os.environ["TUNER_TEST_DIR"])


def store() -> Store:
    return Store(folder())


def log(event: str, what: str) -> None:
    with (folder() / "log").open("a") as file:
        file.write(json.dumps([event, what]) + "\n")


def logged(event: str) -> list[str]:
    path = folder() / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [what for kind, what in map(json.loads, lines) if kind == event]


def make(task: Task) -> None:
    config = Config(**dict(task.config))
    label = f"{task.kernel} {task.dtype} {config.id}"
    log("make", label)
    time.sleep(config.sleep_ms / 1e3)
    if config.act == CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    if config.act == HANGS:
        time.sleep(60)
    if config.act == WRONG and task.checked:
        raise VerificationError("o has relative RMS error 1.00e+00; expected at most 1.00e-05")
    key = build.binary_key(
        kernel(name=task.kernel), Problem("", task.dtype, 1, 1), config, named(task.arch), task.checked
    )
    store().put(key, lambda path: {"bytes": path.write_bytes(label.encode())})
    log("made", label)


def measure(group: Group) -> list[tuple[float, float]]:
    configs = [Config(**dict(items)) for items in group.configs]
    log("measure", f"{group.kernel} {group.dtype} {group.K}x{group.V}: {' '.join(str(c.id) for c in configs)}")
    time.sleep(max(c.sleep_ms for c in configs) / 1e3)
    if any(c.act == CRASHES_TIMED for c in configs):
        os.kill(os.getpid(), signal.SIGSEGV)
    return [(float(c.us), 1e3 / c.us) for c in configs]


def plan(*kernels: Kernel, **changes: Any) -> Plan:
    usual = {"dtypes": ["float32"], "dims": [(64, 64)], "device": DEVICE, "budget_s": 300.0, "jobs": 2}
    return Plan(kernels=list(kernels), **{**usual, **changes})


def tune(planned: Plan) -> Report:
    """A run of the tuner, with its journal and its store in the folder, as linattn_tl.tuning does."""

    def has_binary(kernel: Kernel, problem: Problem, config: Any) -> bool:
        return store().get(build.binary_key(kernel, problem, config, planned.device, planned.checked)) is not None

    journal = Journal(folder() / "journal.jsonl")
    return tuner.tune(planned, WORKERS, journal=journal, has_binary=has_binary, progress=lambda *_: None)


def slow_plan(configs: int, sleep_ms: int) -> Plan:
    """Candidates to build, and as many groups to time."""
    slow = [Config(i, sleep_ms=sleep_ms, us=100 + i) for i in range(configs)]
    return plan(kernel(*slow), dims=[(16 * (i + 1), 16) for i in range(configs)], jobs=2)


if __name__ == "__main__":
    print(json.dumps(asdict(tune(slow_plan(int(sys.argv[1]), int(sys.argv[2]))))))
