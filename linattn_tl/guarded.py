"""What trials of CUDA kernels share, whatever the family: tensors with guards around them, and what a launch changed.

A launch is right if its results are within the budget and it changed nothing else. So that this shows, every tensor is
part of a larger one filled with NaN: GUARD rows lie in front of it, and GUARD rows at its end belong to no sequence and
no span. A chunk that reaches over the end of its sequence reads them, and a store that does so changes them. NaN is
also where results are to come, in slots that no span takes, and in rows of a pool that no slot names.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autotune.verify import VerificationError, check_close
from linattn_tl.spans import Span, Walk
from tl_kernels.spec import Kernel, Problem

Tensors = dict[str, torch.Tensor]
Device = torch.device | str
GUARD = 4  # rows; that many of any tensor are a multiple of 16 bytes


class Guarded:
    """A tensor with rows of NaN around it. `part`, which kernels see, has those behind it too."""

    def __init__(self, x: torch.Tensor, dtype: torch.dtype, device: Device):
        size = (GUARD + x.shape[0] + GUARD, *x.shape[1:])
        self.whole = torch.full(size, torch.nan, dtype=dtype, device=device)
        self.part = self.whole[GUARD:]
        self.rows = self.whole[GUARD:-GUARD]
        self.rows.copy_(x)

    def clear(self) -> None:
        self.rows.fill_(torch.nan)


def compare(name: str, x: Guarded, before: torch.Tensor, wanted: torch.Tensor | None, budget: str) -> None:
    """VerificationError unless rows of x that are wanted are close, and all others are as they were.

    Args:
        before: x.whole before the launch.
        wanted: of x.rows; rows with a NaN are not to be written, and None says that none is.
        budget: the dtype whose error is allowed.
    """
    after = x.whole.cpu()
    written = torch.zeros(len(after), dtype=torch.bool)
    if wanted is not None:
        written[GUARD:-GUARD] = ~wanted.flatten(1).isnan().any(1)
    changed = (after.view(torch.uint8) != before.cpu().view(torch.uint8)).flatten(1).any(1) & ~written
    if changed.any():
        row, count, rows = int(changed.nonzero()[0, 0]) - GUARD, int(changed.sum()), len(after) - 2 * GUARD
        raise VerificationError(
            f"{name} changed in {count} rows, the first of them row {row} of {rows}, which are not this launch's to "
            f"write; expected writes to {int(written.sum())} rows only"
        )
    if wanted is not None:
        check_close(name, after[written], wanted[written[GUARD:-GUARD]], dtype=budget)


class Trial(NamedTuple):
    """Tensors by name. In a wanted one, rows of NaN are not to be written. What is in both changes in place."""

    given: Tensors
    wanted: Tensors
    reverse: bool = False  # of a scan: from the last span to the first


@contextmanager
def watched(trial: Trial, dtype: Callable[[str], torch.dtype], device: Device, budget: str) -> Iterator[Tensors]:
    """A trial's tensors for one launch inside the block; at its end all are compared with what is wanted.

    Args:
        dtype: of a tensor, by its name.
        budget: the dtype whose error is allowed.
    """
    guarded = {name: Guarded(x, dtype(name), device) for name, x in {**trial.wanted, **trial.given}.items()}
    for name in trial.wanted.keys() - trial.given.keys():
        guarded[name].clear()
    before = {name: x.whole.clone() for name, x in guarded.items()}
    yield {name: x.part for name, x in guarded.items()}
    direction = " of the reverse scan" if trial.reverse else ""
    for name, x in guarded.items():
        compare(name + direction, x, before[name], trial.wanted.get(name), budget)


def try_cases(kernel: Kernel, p: Problem, cases: Sequence[Any], check: Callable[[Any], None]) -> None:
    """check(case) for each; a VerificationError names the kernel and the case.

    Whatever mode the caller is in: a first call may be made under no_grad, inference_mode or autocast.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for case in cases:
            try:
                check(case)
            except VerificationError as error:
                raise VerificationError(f"{kernel.name} {p.dtype} K={p.K} V={p.V}, {case}: {error}") from None


# ---- the truth in rows of its own


def in_slots(walk: Walk, spans: Sequence[Span], rows: Sequence[torch.Tensor], size: Sequence[int]) -> torch.Tensor:
    """[walk.spans, *size] in float64: a row for each span, where its slot is, and NaN in the others.

    Args:
        rows: in the order of the spans; none at all where spans have no states.
    """
    found = torch.full((walk.spans, *size), torch.nan, dtype=torch.float64)
    for span, row in zip(spans, rows, strict=False):
        found[span.slot] = row.detach()
    return found


def apart(x: torch.Tensor, step: int) -> torch.Tensor:
    """x in every step-th row, and NaN in the others."""
    found = torch.full((len(x) * step, *x.shape[1:]), torch.nan, dtype=x.dtype)
    found[::step] = x
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """For a definition, token by token, whose products are so small that threads would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---- steps


@dataclass(frozen=True)
class Step:
    """A decode step of a batch. slots picks rows of a pool of `pool` rows; without them sequence i has row i."""

    options: Any
    B: int
    tokens: int  # 0: one, in tensors without that dim
    H: int = 1
    heads: int = 1
    slots: tuple[int, ...] = ()
    pool: int = 0
    index: torch.dtype = torch.int32  # of slots
    apart: int = 1  # the pool's rows lie that many rows apart, as in a pool of several layers

    @property
    def rows(self) -> int:
        return self.pool or self.B

    def generator(self) -> Callable[..., torch.Tensor]:
        """Normal numbers of a size, the same ones for the same step."""
        g = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))
        return lambda *size: torch.randn(*size, generator=g)

    def shape(self, heads: int) -> tuple[int, ...]:
        """[B, n, heads], or [B, heads]."""
        return (self.B, *((self.tokens,) if self.tokens else ()), heads)

    def tokens_of(self, p: Problem, new: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """q, k and v."""
        heads = ((self.H, p.K), (self.H, p.K), (self.H * self.heads, p.V))
        return [new(*self.shape(h), width).to(getattr(torch, p.dtype)) for h, width in heads]


def check_step(
    case: Step,
    tokens: Sequence[torch.Tensor],
    pools: Mapping[str, torch.Tensor],
    dtype: str,
    device: Device,
    definition: Callable[..., object],
    run: Callable[..., object],
) -> None:
    """VerificationError unless a step is right: what it writes, and that it writes nothing else.

    Args:
        tokens: q, k and v first.
        pools: by name, [P, heads, ...] fp32.
        dtype: of o.
        definition, run: of (*tokens, *pools, slots, out), in place; the definition in float64, of live slots alone.
    """
    v, P = tokens[2], case.rows
    slots = torch.tensor(case.slots or range(case.B))
    live, outside = (slots >= 0) & (slots < P), (slots < -1) | (slots >= P)
    unnamed = [i for i in range(P) if i not in slots.tolist()]
    for x in pools.values():
        x[unnamed] = torch.nan

    wanted, o = {name: x.double() for name, x in pools.items()}, torch.zeros(v.shape, dtype=torch.float64)
    found = torch.zeros_like(o[live])
    definition(*(x[live].double() for x in tokens), *wanted.values(), slots[live], found)
    o[live], o[outside] = found, torch.nan

    out = Guarded(o, v.dtype, device)
    out.clear()
    out.rows[outside] = 0
    guarded = {name: Guarded(apart(x, case.apart), torch.float32, device) for name, x in pools.items()}
    before = {name: x.whole.clone() for name, x in {"o": out, **guarded}.items()}
    picked = slots.to(device=device, dtype=case.index) if case.slots else None
    run(*(x.to(device) for x in tokens), *(x.rows[:: case.apart] for x in guarded.values()), picked, out.rows)

    if not out.rows[outside].isnan().all():
        raise VerificationError("o is not NaN where the slot is outside of the pool")
    out.rows[outside] = 0
    if (out.rows.cpu()[slots == -1] != 0).any():
        raise VerificationError("o is not 0 where the slot is -1")
    compare("o", out, before["o"], o, dtype)
    for name, x in guarded.items():
        compare(name, x, before[name], apart(wanted[name], case.apart), "float32")
