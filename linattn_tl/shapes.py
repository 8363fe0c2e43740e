"""Arguments, checked once at the public boundary: shape letters, dtypes, devices."""

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch


def bind_shapes(op: str, **args: tuple[Any, str]) -> dict[str, int]:
    """Match tensors, or shapes, to shape letters and return the size of each letter.

    bind_shapes("simple_gla", q=(q, "B T H K"), v=(v, "B T HV V")) -> {"B": 2, "T": 64, ...}

    A letter takes its size from the first argument that has it. None is skipped. Raises ValueError that names the
    op, the argument, both shapes and the letter's owner.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (x, letters) in args.items():
        if x is None:
            continue
        want = letters.split()
        got = tuple(getattr(x, "shape", x))
        if len(got) != len(want):
            raise ValueError(f"{op}: {name} has shape {got}; expected {len(want)} axes [{', '.join(want)}]")
        for letter, n in zip(want, got, strict=True):
            sizes.setdefault(letter, n)
            owner.setdefault(letter, name)
        expected = tuple(sizes[letter] for letter in want)
        if got != expected:
            why = ", ".join(f"{w} from {owner[w]}" for w, n in zip(want, got, strict=True) if sizes[w] != n)
            raise ValueError(f"{op}: {name} has shape {got}; expected [{', '.join(want)}] = {expected} ({why})")
    return sizes


def check_tensors(op: str, **args: Any) -> None:
    """Strided tensors, all of them."""
    for name, x in args.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{op}: {name} is {type(x).__name__}; expected a tensor")
        if x.layout is not torch.strided:
            raise ValueError(f"{op}: {name} has layout {x.layout}; expected torch.strided")


def check_writable(op: str, name: str, x: torch.Tensor) -> None:
    """Memory that a step may write to: no two elements share it, and it is not a lazy view."""
    if torch._debug_has_internal_overlap(x) == 1:  # pyright: ignore[reportPrivateImportUsage]
        raise ValueError(f"{op}: {name} has elements that share memory (strides {x.stride()}); expected none")
    if x.is_neg():
        raise ValueError(f"{op}: {name} is a lazily negated view; expected plain memory (resolve_neg())")


def span(x: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last; equal without memory (empty, or on meta)."""
    begin = x.data_ptr()
    if begin == 0 or x.numel() == 0:
        return begin, begin
    if x.is_contiguous():
        return begin, begin + x.nbytes
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()


def shares_memory(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether x and one of the others may have a byte in common: by their first and last bytes."""
    begin, end = span(x)
    return any(begin < other_end and other_begin < end for other_begin, other_end in map(span, others))


def check_heads(op: str, H: int, HV: int) -> None:
    if H < 1 or HV % H:
        raise ValueError(f"{op}: v has HV = {HV} heads; expected a multiple of H = {H} (H from q)")


def check_dtype(op: str, name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    if dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{op}: {name} has dtype {str(dtype).removeprefix('torch.')}; expected {names}")


def check_device(op: str, owner: str, device: Any, **args: Any) -> None:
    for name, x in args.items():
        if x is not None and x.device != device:
            raise ValueError(f"{op}: {name} is on {x.device}; expected {device} (the device of {owner})")


def check_cu_seqlens(op: str, values: Sequence[int], T: int) -> None:
    """0 = values[0] <= values[1] <= ... = T: every token belongs to one sequence."""
    if not values or values[0] != 0:
        raise ValueError(f"{op}: cu_seqlens starts with {values[0] if values else 'nothing'}; expected 0")
    for i, (a, b) in enumerate(pairwise(values)):
        if b < a:
            raise ValueError(f"{op}: cu_seqlens decreases from {a} to {b} at index {i + 1}; expected no decrease")
    if values[-1] != T:
        raise ValueError(f"{op}: cu_seqlens ends with {values[-1]}; expected T = {T} (T from q)")


def check_lengths(op: str, lengths: torch.Tensor, T: int) -> None:
    """The values of cu_seqlens, as check_cu_seqlens.

    On a GPU, where reading them waits for all work before: once for a tensor as long as it is not written to, and not
    while a graph is captured.
    """
    if not lengths.is_cuda:
        check_cu_seqlens(op, lengths.tolist(), T)
    elif not torch.cuda.is_current_stream_capturing():
        _check_lengths_once(op, lengths, T)


def _check_lengths_once(op: str, lengths: torch.Tensor, T: int) -> None:
    version = -1 if lengths.is_inference() else lengths._version  # an inference tensor counts no writes
    known = _checked_lengths.get(id(lengths))
    if version >= 0 and known is not None and known[0]() is lengths and known[1:] == (version, T):
        return
    check_cu_seqlens(op, lengths.tolist(), T)
    if len(_checked_lengths) >= _REMEMBERED:
        _checked_lengths.clear()
    _checked_lengths[id(lengths)] = (weakref.ref(lengths), version, T)


_REMEMBERED = 256  # a training step has one tensor of lengths, or a few
_checked_lengths: dict[int, tuple[Any, int, int]] = {}


def check_slots(op: str, values: Sequence[int], P: int) -> None:
    """-1 (padding) or a row of the pool, each row at most once."""
    seen: set[int] = set()
    for i, slot in enumerate(values):
        if not -1 <= slot < P:
            raise ValueError(f"{op}: slots[{i}] is {slot}; expected -1 (padding) or 0 to {P - 1} (P from state)")
        if slot >= 0 and slot in seen:
            raise ValueError(f"{op}: slots[{i}] is {slot} again; expected every row of the pool at most once")
        seen.add(slot)
