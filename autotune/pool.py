"""Tasks in child processes, so that a compiler or kernel that crashes or hangs costs one task. Linux, macOS.

Standard library only; nothing heavy is imported in the parent.
"""

import collections
import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

_START_S = 120.0  # what a child may spend importing torch and tilelang before its first task starts
_EXIT_S = 2.0  # what a child may spend leaving
_CHILD_ENV = {"OMP_NUM_THREADS": "1"}  # the parallelism is in the number of children

_spawning = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    task_index: int
    status: str  # "ok", "error" (it raised), "crashed", "timeout", "skipped" (the deadline had passed)
    value: Any = None  # what the worker returned
    error: str = ""  # one line
    traceback: str = ""


def run_tasks(
    tasks: Sequence[Any],
    worker: str,
    *,
    jobs: int,
    timeout_s: float,
    on_result: Callable[[Outcome], None],
    deadline: float | None = None,
) -> None:
    """Calls the worker on every task, in jobs child processes, and on_result here as each one ends.

    Args:
        tasks: picklable; started in order, reported as they end.
        worker: "package.module:function"; the children import it, with this process's sys.path.
        timeout_s: how long one call may take. Its child, and what that child started, is then killed.
        on_result: what it raises ends the run, as KeyboardInterrupt does; all children are killed first.
        deadline: in time.monotonic() seconds. No task starts after it; those that run may finish.

    The children import neither the caller's __main__ nor inherit its threads, so a caller needs no
    `if __name__ == "__main__"`. They die with this process.
    """
    if jobs < 1:
        raise ValueError(f"run_tasks: jobs is {jobs}; expected at least 1")
    pending = collections.deque(enumerate(tasks))
    children: list[_Child] = []
    try:
        while pending or any(child.busy for child in children):
            if deadline is not None and time.monotonic() >= deadline:
                _skip(pending, on_result)
            _replace_dead(children)
            _assign(pending, children, worker, jobs, timeout_s)
            for outcome in _wait(children):
                on_result(outcome)
        _dismiss(children)
    finally:
        for child in children:
            child.kill()


def _skip(pending: collections.deque[tuple[int, Any]], on_result: Callable[[Outcome], None]) -> None:
    while pending:
        index, _ = pending.popleft()
        on_result(Outcome(index, "skipped", error="the deadline had passed"))


def _replace_dead(children: list["_Child"]) -> None:
    """Forgets the children that died while idle: no task shall be blamed for the one before it."""
    for child in children[:]:
        if not child.busy and not child.process.is_alive():
            child.kill()  # closes the pipe
            children.remove(child)


def _assign(
    pending: collections.deque[tuple[int, Any]],
    children: list["_Child"],
    worker: str,
    jobs: int,
    timeout_s: float,
) -> None:
    """Gives every idle child a task, starting children as there is work for them."""
    idle = [child for child in children if not child.busy]
    while pending and (idle or len(children) < jobs):
        if not idle:
            children.append(_Child(worker, timeout_s))
            idle.append(children[-1])
        idle.pop().start(*pending.popleft())


def _wait(children: list["_Child"]) -> Iterator[Outcome]:
    """Waits until a child says something, ends or is overdue. Those that ended leave the list."""
    busy = [child for child in children if child.busy]
    if not busy:
        return
    patience_s = max(0.0, min(child.due for child in busy) - time.monotonic())
    ready = connection.wait([child.pipe for child in busy], patience_s)
    now = time.monotonic()  # what the caller does with one outcome is not on another child's time
    for child in busy:
        outcome = child.answer() if child.pipe in ready else child.overdue(now)
        if outcome is None:
            continue
        if outcome.status in ("crashed", "timeout"):
            children.remove(child)
        yield outcome


def _dismiss(children: list["_Child"]) -> None:
    """Lets idle children leave by themselves, so that what they registered at exit runs."""
    for child in children:
        child.pipe.close()
    patience = time.monotonic() + _EXIT_S
    for child in children:
        connection.wait([child.process.sentinel], max(0.0, patience - time.monotonic()))


class _Child:
    """A child process and the one task it works on."""

    def __init__(self, worker: str, timeout_s: float):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, worker), daemon=True)
        with _bare_children():
            self.process.start()
        theirs.close()  # so that the child's end closes when the child dies
        self.timeout_s = timeout_s
        self.task_index: int | None = None
        self.due = 0.0

    @property
    def busy(self) -> bool:
        return self.task_index is not None

    def start(self, index: int, task: Any) -> None:
        self.task_index = index
        self.due = time.monotonic() + _START_S + self.timeout_s
        # A child that died meanwhile is seen by answer(): its pipe is at its end.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(task)

    def answer(self) -> Outcome | None:
        """What the child has said; None if that is only that the call begins."""
        assert self.task_index is not None
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_EXIT_S)  # sys.exit closes the pipe some time before there is an exit code
            self.kill()
            return Outcome(self.task_index, "crashed", error=_how_it_ended(self.process.exitcode))
        if message is None:
            self.due = time.monotonic() + self.timeout_s
            return None
        outcome = Outcome(self.task_index, **message)
        self.task_index = None
        return outcome

    def overdue(self, now: float) -> Outcome | None:
        """Kills the child if its time is up."""
        assert self.task_index is not None
        if now < self.due:
            return None
        self.kill()
        return Outcome(self.task_index, "timeout", error=f"took more than {self.timeout_s:g} s")

    def kill(self) -> None:
        """Ends the child and the compilers it started. One that is dead keeps its own exit code."""
        if self.process.pid is not None and self.process.is_alive():  # once dead, its id may be another's
            with contextlib.suppress(ProcessLookupError):  # too young to lead a group
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.process.join()
        self.pipe.close()


@contextlib.contextmanager
def _bare_children() -> Iterator[None]:
    """Processes started here get _CHILD_ENV, and do not run the caller's __main__ again.

    multiprocessing would import it before our first line: too late for the environment, slow if it
    imports torch, endless if it is a script that calls us unguarded, impossible if it came by stdin.
    """
    with _spawning:
        main = sys.modules["__main__"]
        before = {name: os.environ.get(name) for name in _CHILD_ENV}
        sys.modules["__main__"] = types.ModuleType("__main__")
        os.environ.update(_CHILD_ENV)
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return signal.Signals(-exitcode).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-exitcode}"


def _serve(pipe: connection.Connection, worker: str) -> None:
    """The child: answers tasks until the parent closes the pipe or dies."""
    os.setsid()  # Ctrl-C is the parent's to handle, and kill() reaches the compilers we start
    threading.Thread(target=_die_with_parent, daemon=True).start()
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_reply(pipe, worker, task))


def _reply(pipe: connection.Connection, worker: str, pickled_task: bytes) -> bytes:
    """The pickled fields of an Outcome. Says None first, when the imports are done and the call begins."""
    try:
        module, _, name = worker.partition(":")
        function = getattr(importlib.import_module(module), name)
        task = pickle.loads(pickled_task)
        pipe.send(None)
        return pickle.dumps({"status": "ok", "value": function(task)})
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
        return pickle.dumps({"status": "error", "error": last, "traceback": traceback.format_exc()})


def _die_with_parent() -> None:
    """Ends a child that is inside a task, where it cannot see that the pipe was closed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os.killpg(os.getpgrp(), signal.SIGKILL)
