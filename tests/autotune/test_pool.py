"""The pool against workers that raise, crash, hang and outlive their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autotune.pool
from autotune.pool import Outcome, run_tasks

WORKER = "pool_workers:act"
HERE = Path(__file__).parent
SOURCE = Path(autotune.pool.__file__).parents[1]


@pytest.fixture(autouse=True)
def importable_workers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(HERE))


def run(
    tasks: list[Any], worker: str = WORKER, *, jobs: int = 2, timeout_s: float = 20, **options: Any
) -> list[Outcome]:
    """The outcomes, by task."""
    outcomes: list[Outcome] = []
    run_tasks(tasks, worker, jobs=jobs, timeout_s=timeout_s, on_result=outcomes.append, **options)
    assert sorted(o.task_index for o in outcomes) == list(range(len(tasks)))
    return sorted(outcomes, key=lambda o: o.task_index)


def is_running(pid: int) -> bool:
    """False for a zombie: nobody may be there to reap the orphans of a test."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 8.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def pids_in(folder: Path) -> list[int]:
    return [int(p.name) for p in folder.iterdir() if p.name.isdigit()]


def test_results_come_back():
    outcomes = run([("square", i) for i in range(20)])
    assert [(o.status, o.value, o.error) for o in outcomes] == [("ok", i * i, "") for i in range(20)]


def test_no_tasks_no_children():
    assert run([]) == []


def test_children_are_reused():
    assert len({o.value for o in run([("pid", None)] * 10)}) <= 2


def test_jobs_run_at_the_same_time(tmp_path: Path):
    assert [o.value for o in run([("meet", str(tmp_path))] * 2)] == [2, 2]
    assert run([("meet", str(tmp_path / "alone"))] * 2, jobs=1, timeout_s=0.3)[0].status == "timeout"


def test_children_have_one_thread_and_the_parent_is_unchanged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run([("env", "OMP_NUM_THREADS")])[0].value == "1"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    main = sys.modules["__main__"]
    assert run([("env", "OMP_NUM_THREADS")])[0].value == "1"
    assert "OMP_NUM_THREADS" not in os.environ
    assert sys.modules["__main__"] is main


def test_children_do_not_import_what_the_parent_has():
    assert not {"pytest", "torch", "numpy"} & set(run([("modules", None)])[0].value)


def test_an_exception_is_an_error_of_its_task_only():
    outcomes = run([("square", 2), ("fail", "first\nsecond"), ("square", 3)], jobs=1)
    assert [o.status for o in outcomes] == ["ok", "error", "ok"]
    assert outcomes[1].error == "second"
    assert "in _fail" in outcomes[1].traceback
    assert run([("fail", "why")])[0].error == "ValueError: why"


@pytest.mark.parametrize(
    ("worker", "error"),
    [
        ("no_such_module:act", "ModuleNotFoundError"),
        ("pool_workers:no_such", "AttributeError"),
        ("pool_workers", "AttributeError"),
    ],
)
def test_a_worker_that_cannot_be_imported_is_an_error(worker: str, error: str):
    assert [o.error.split(":")[0] for o in run([1, 2], worker=worker)] == [error] * 2


def test_what_cannot_be_pickled_is_an_error():
    from pool_workers import Unloadable

    outcomes = run([("lambda", None), Unloadable(), ("square", 3)], jobs=1)
    assert [o.status for o in outcomes] == ["error", "error", "ok"]
    assert "pickle" in outcomes[0].error
    assert outcomes[1].error == "ValueError: cannot load this task"


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (("kill", signal.SIGSEGV.value), "SIGSEGV"),
        (("kill", signal.SIGKILL.value), "SIGKILL"),
        (("exit", 3), "exit code 3"),
        (("exit", 0), "exit code 0"),
        (("leave", 5), "exit code 5"),
        (("hang_up", 6), "exit code 6"),
    ],
)
def test_a_crash_costs_its_own_task(task: tuple[str, int], error: str):
    outcomes = run([("square", 2), task, ("square", 3), ("square", 4)], jobs=1)
    assert [o.status for o in outcomes] == ["ok", "crashed", "ok", "ok"]
    assert outcomes[1].error == error


def test_every_task_crashing_ends():
    errors = [o.error for o in run([("exit", code) for code in range(1, 6)])]
    assert errors == [f"exit code {code}" for code in range(1, 6)]


def statuses_when_a_child_dies_idle() -> list[str]:
    outcomes: list[Outcome] = []

    def wait_for_its_death(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if outcome.task_index == 0:
            assert wait_until(lambda: not is_running(outcome.value))

    tasks = [("die_later", 0.2), ("square", 3)]
    run_tasks(tasks, WORKER, jobs=1, timeout_s=20, on_result=wait_for_its_death)
    return [o.status for o in outcomes]


def test_a_child_that_dies_idle_is_not_the_next_tasks_fault():
    assert statuses_when_a_child_dies_idle() == ["ok", "ok"]


def test_a_child_that_dies_as_it_is_given_a_task_has_crashed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(autotune.pool, "_replace_dead", lambda children: None)
    assert statuses_when_a_child_dies_idle() == ["ok", "crashed"]


def test_a_slow_caller_is_not_a_slow_task():
    outcomes: list[Outcome] = []

    def slow(outcome: Outcome) -> None:
        outcomes.append(outcome)
        time.sleep(1.0 - outcome.task_index)

    run_tasks([("sleep", 0.2), ("sleep", 0.4)], WORKER, jobs=2, timeout_s=0.8, on_result=slow)
    assert [o.status for o in outcomes] == ["ok", "ok"]


def test_a_hanging_task_is_killed_with_what_it_started(tmp_path: Path):
    start = time.monotonic()
    outcomes = run([("hang", str(tmp_path)), ("square", 3)], jobs=1, timeout_s=0.5)
    assert [o.status for o in outcomes] == ["timeout", "ok"]
    assert outcomes[0].error == "took more than 0.5 s"
    assert time.monotonic() - start < 5
    assert len(pids_in(tmp_path)) == 2
    assert wait_until(lambda: not any(map(is_running, pids_in(tmp_path))))


def test_a_slow_import_is_not_a_slow_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "slow_worker.py").write_text("import time\ntime.sleep(0.6)\ndef act(task): return task\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run([1], worker="slow_worker:act", timeout_s=0.4)[0].status == "ok"


def test_a_hanging_import_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "stuck_worker.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(autotune.pool, "_START_S", 0.3)
    assert run([1], worker="stuck_worker:act", timeout_s=0.2)[0].status == "timeout"


def test_nothing_starts_after_the_deadline():
    outcomes = run([("sleep", 0.3)] * 2 + [("square", 3)] * 3, deadline=time.monotonic() + 0.1)
    assert [o.status for o in outcomes] == ["ok", "ok", "skipped", "skipped", "skipped"]
    assert [o.status for o in run([("square", 3)] * 2, deadline=time.monotonic())] == ["skipped"] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_no_children(tmp_path: Path, error: type[BaseException]):
    def stop(outcome: Outcome) -> None:
        assert wait_until(lambda: len(pids_in(tmp_path)) == 2)
        raise error

    with pytest.raises(error):
        run_tasks([("hang", str(tmp_path)), ("square", 3)], WORKER, jobs=2, timeout_s=20, on_result=stop)
    assert wait_until(lambda: not any(map(is_running, pids_in(tmp_path))))


def test_children_leave_in_their_own_way(tmp_path: Path):
    run([("register_exit", str(tmp_path / "left"))])
    assert (tmp_path / "left").exists()


def test_no_jobs_are_refused():
    with pytest.raises(ValueError, match="jobs is 0"):
        run([1], jobs=0)


# What follows has a parent of its own.

PARENT = """
import sys
from autotune.pool import run_tasks

def show(outcome):
    print(outcome.status, outcome.value, flush=True)

run_tasks(eval(sys.argv[1]), "pool_workers:act", jobs=2, timeout_s=30, on_result=show)
"""


def start_parent(*command: str, task: Any, stdin: str = "") -> subprocess.Popen[str]:
    # a shell's background jobs ignore SIGINT, and so would the children
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, *command, repr([task] * 2)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.close()
    process.stdin = None
    return process


@pytest.mark.parametrize("how", ["package", "script", "stdin", "command"])
def test_any_kind_of_main_may_be_the_parent(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """None of them guards its main."""
    (tmp_path / "some_package").mkdir()
    for path in (tmp_path / "some_package" / "__main__.py", tmp_path / "script.py"):
        path.write_text(PARENT)
    monkeypatch.chdir(tmp_path)
    command = {
        "package": ["-m", "some_package"],
        "script": ["script.py"],
        "stdin": ["-"],
        "command": ["-c", PARENT],
    }[how]
    parent = start_parent(*command, task=("square", 3), stdin=PARENT)
    assert parent.communicate(timeout=20) == ("ok 9\nok 9\n", "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_and_what_they_started_die_with_the_parent(number: signal.Signals, tmp_path: Path):
    parent = start_parent("-c", PARENT, task=("hang", str(tmp_path)))
    assert wait_until(lambda: len(pids_in(tmp_path)) == 4)
    assert all(map(is_running, pids_in(tmp_path)))
    parent.send_signal(number)
    _, said = parent.communicate(timeout=10)
    assert wait_until(lambda: not any(map(is_running, pids_in(tmp_path))))
    if number == signal.SIGINT:
        assert said.count("Traceback") == 1  # its own; the children say nothing
    else:
        assert said == ""
