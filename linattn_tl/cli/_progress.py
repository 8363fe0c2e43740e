"""Progress bars for the subcommands that take a while."""

import sys
from collections.abc import Mapping
from typing import Any


class Bars:
    """A bar a phase, on stderr; none without tqdm.

    labels: what a phase is called, where that is not its name. keep: bars stay when they are done, and are printed also
    where stderr is no terminal.
    """

    def __init__(self, labels: Mapping[str, str] | None = None, keep: bool = False):
        self._labels, self._keep = labels or {}, keep
        self._bar: Any = None
        self._phase = ""

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def show(self, phase: str, done: int, total: int) -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            return
        if phase != self._phase:
            self._close()
            self._phase = phase
            quiet = False if self._keep else None  # None: unless it is a terminal
            name = self._labels.get(phase, phase)
            self._bar = tqdm(total=total, desc=name, file=sys.stderr, unit="", leave=self._keep, disable=quiet)
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
