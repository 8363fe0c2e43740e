"""Calls of binaries that are made again without Python's checks: the Python half of repeat.h beside this.

What torch is here, is handed in: this package needs none.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

HEADER = Path(__file__).with_name("repeat.h")
_APART, _CHANGED, _RETURNED = 1, 2, 4
Condition = tuple[Callable[..., Any], Any, Any]  # function, its argument or None, and the object it has to give
Again = Callable[..., Any]  # the result, or a tuple of results; None, with nothing done, for a call that is not known


class Torch(NamedTuple):
    """What is asked of torch in a call that is made again."""

    tensor: type
    is_neg: Callable[[Any], bool]
    is_grad_enabled: Callable[[], bool]
    requires_grad: str  # the name of the attribute
    increment_version: Callable[[list[Any]], None]


@dataclass(frozen=True)
class Argument:
    """A tensor of a call. None is one that is missing, and has to be missing again."""

    tensor: Any
    word: int = -1  # of the block: its address; -1 for one that the kernel does not get
    make: Callable[[], Any] | None = None  # makes one like it, where none is handed in
    apart: bool = False  # the kernel writes it: it may share memory with no other
    changed: bool = False  # it is the caller's and written: its version goes up
    returned: bool = False

    @property
    def fields(self) -> tuple[Any, ...]:
        flags = self.apart * _APART | self.changed * _CHANGED | self.returned * _RETURNED
        return self.tensor, self.word, flags, self.make


@dataclass(frozen=True)
class Call:
    """A call as it was made.

    binary: whose entry(block) it was.
    tensors: in the order of the public function, then results that no argument stands for.
    conditions: of whatever else has to be as it was; results are compared by identity.
    place: which of the block's words are the device's index and, behind it, the stream; -1 where there are none.
    alignment: bytes that every address is a multiple of.
    """

    binary: Any
    block: bytes
    tensors: Sequence[Argument]
    conditions: Sequence[Condition] = ()
    place: int = -1
    alignment: int = 1


class Table:
    """The kept calls of one op.

    Args:
        path: of any binary; its code keeps the table, of calls of this binary and others.
        served, op: served[op] becomes the backend of each call that is made again.
        given: for each argument with tensors how many it has if it is a tuple, or 0 for a tensor or None.
        plain: how many arguments follow them.
        conditions: of what has to be as it is whatever the call.

    Raises NotImplementedError where torch has no way to read a tensor's layout from C.
    """

    def __init__(
        self,
        path: Path,
        torch: Torch,
        served: dict[str, str],
        op: str,
        given: Sequence[int],
        plain: int,
        conditions: Sequence[Condition],
    ):
        library = ctypes.PyDLL(str(path))
        library.linattn_table.restype = ctypes.py_object
        library.linattn_table.argtypes = [*[ctypes.py_object] * 4, ctypes.c_int, ctypes.py_object]
        library.linattn_keep.argtypes = [
            ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
            ctypes.py_object,
        ]  # fmt: skip
        made = library.linattn_table(tuple(torch), served, op, tuple(given), plain, tuple(conditions))
        if made is None:
            raise NotImplementedError("torch has no DLPack exchange table of version 1")
        self._capsule, self.again = made
        self._keep = library.linattn_keep

    def keep(self, call: Call, plain: Sequence[Any], backend: str) -> bool:
        """Make such calls again, given the same plain arguments. Returns whether that can be done."""
        tensors = tuple(x.fields for x in call.tensors)
        entry = ctypes.cast(call.binary.entry, ctypes.c_void_p)
        fields = tensors, tuple(plain), tuple(call.conditions), call.binary.fail, backend
        return bool(
            self._keep(self._capsule, entry, call.block, len(call.block) // 8, call.place, call.alignment, fields)
        )
