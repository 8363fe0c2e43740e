"""What the children of test_pool run."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def act(task: tuple[str, Any]) -> Any:
    verb, value = task
    return globals()[f"_{verb}"](value)


def _square(value: int) -> int:
    return value * value


def _env(name: str) -> str | None:
    return os.environ.get(name)


def _pid(_: None) -> int:
    return os.getpid()


def _modules(_: None) -> list[str]:
    return sorted(sys.modules)


def _fail(text: str) -> None:
    raise ValueError(text)


def _kill(number: int) -> None:
    os.kill(os.getpid(), signal.Signals(number))


def _exit(code: int) -> None:
    os._exit(code)


def _leave(code: int) -> None:
    sys.exit(code)


def _hang_up(code: int) -> None:
    """Is gone some time after its pipe."""
    multiprocessing.current_process()._args[0].close()  # type: ignore[attr-defined]
    time.sleep(0.3)
    os._exit(code)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def _meet(folder: str) -> int:
    """Waits until two processes are here."""
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / str(os.getpid())).touch()
    while (met := len(list(Path(folder).iterdir()))) < 2:
        time.sleep(0.005)
    return met


def _lambda(_: None) -> Any:
    return lambda: None


def _die_later(seconds: float) -> int:
    """Answers, and is dead soon after."""
    threading.Timer(seconds, os._exit, [7]).start()
    return os.getpid()


def _hang(folder: str) -> None:
    """Starts a process, as a worker does a compiler, leaves both ids in the folder and hangs."""
    child = subprocess.Popen(["sleep", "60"])
    for pid in (os.getpid(), child.pid):
        (Path(folder) / str(pid)).touch()
    time.sleep(60)


def _register_exit(path: str) -> None:
    atexit.register(Path(path).touch)


class Unloadable:
    """Pickles, and raises when unpickled."""

    def __reduce__(self) -> Any:
        return _fail, ("cannot load this task",)
