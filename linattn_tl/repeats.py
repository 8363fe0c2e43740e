"""Calls of an op that are made again without Python's checks, because only the tensors' memory differs.

Checking seven tensors costs Python several times what launching a kernel does, and a decode loop makes the same call
over and over: same shapes, dtypes, strides, device and options. So an op keeps how a call was served that came down to
one launch of a binary, and makes it again from C, where tensors are compared with those of the kept call by way of
DLPack (autotune/launcher/repeat.h). Whatever differs takes the whole way, with all its checks.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune.launcher import KEPT
from autotune.launcher.repeat import Again, Argument, Call, Condition, Table, Torch

_functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
TORCH = Torch(
    torch.Tensor,
    torch.Tensor.is_neg,
    torch.is_grad_enabled,
    "requires_grad",
    getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version),
)
# Nobody stands between a call and its tensors' memory: no dispatch mode, no torch.func, no dual level, and no autocast
# for the device. A compiler that traces must not come here at all.
CONDITIONS: tuple[Condition, ...] = (
    (torch._C._len_torch_dispatch_stack, None, 0),
    (_functorch.peek_interpreter_stack, None, None),
    (vars(torch.autograd.forward_ad).get, "_current_level", -1),
)
NO_AUTOCAST: dict[str, Condition] = {
    "cpu": (torch.is_autocast_enabled, "cpu", False),
    "cuda": (torch.is_autocast_enabled, None, False),  # what it says of nothing; half the time that a name takes
}
KEEP_AT, GIVE_UP_AT = 2, 8  # times that calls of the same shape and options have come the whole way
last_backend: dict[str, str] = {}  # by op
_all: "weakref.WeakSet[Repeats]" = weakref.WeakSet()
_lock = threading.Lock()


def _unknown(*args: Any) -> None:
    """The function `again` of an op that has kept no call."""


class Repeats:
    """The kept calls of one op.

    again(*tensors, *plain arguments) returns what the call gives, or None if it is to be made with all checks. Not to
    be called while a compiler traces.

    Args:
        op: its name.
        given: for each argument with tensors how many it has if it is a tuple, or 0 for a tensor or None.
    """

    def __init__(self, op: str, given: Sequence[int]):
        self.op, self.given = op, given
        self.again: Again = _unknown
        self._table: Table | None = None
        self._times: Counter[Hashable] = Counter()
        _all.add(self)

    def served(self, backend: str, shape: Sequence[int], plain: Sequence[Any], call: Callable[[], Call | None]) -> None:
        """A call was made with all checks; shape is its first tensor's. From its second time on it is kept.

        call() says how to make it again, or None where it takes more than a launch.
        """
        key = (tuple(shape), *plain)
        with _lock:
            if len(self._times) >= KEPT:
                self._times.clear()
            self._times[key] += 1
            if KEEP_AT <= self._times[key] < GIVE_UP_AT:
                found = call()
                if found is not None:
                    self._keep(found, plain, backend)

    def _keep(self, call: Call, plain: Sequence[Any], backend: str) -> None:
        if self._table is None:
            args = call.binary.path, TORCH, last_backend, self.op, self.given, len(plain), CONDITIONS
            try:
                self._table = Table(*args)
            except NotImplementedError:  # an older torch: every call takes the whole way
                return
        if self._table.keep(call, plain, backend):
            self.again = self._table.again

    def forget(self) -> None:
        self.again, self._table = _unknown, None
        self._times.clear()


def launched(
    binary: Any,
    block: bytes,
    tensors: Sequence[Argument],
    device: str,
    conditions: Sequence[Condition] = (),
    **options: int,
) -> Call:
    """A launch on a type of device, given any block of it. An argument's word counts from the first tensor's address.

    options: as of Call.
    """
    placed = [replace(x, word=2 + x.word) if x.word >= 0 else x for x in tensors]
    return Call(binary, block, placed, (*conditions, NO_AUTOCAST[device]), **options)


def forget() -> None:
    """Keep nothing: which backend serves a call may have changed."""
    for repeats in _all:
        repeats.forget()
