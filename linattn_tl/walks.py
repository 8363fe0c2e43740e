"""How compiled CPU kernels are sent over sequences: sizes, cuts of time, and one launch.

A kernel computes one chunk of one q/k head; the launcher in its binary (autotune/launcher/cpu.h) walks sequences, heads
and chunks. Where there are fewer heads than threads, time is cut into segments, which are walked at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autotune.launcher import keep
from autotune.launcher.cpu import CpuBinary
from autotune.launcher.repeat import Condition
from linattn_tl import outputs

SERIAL_MACS = 3_000_000  # multiply-adds of state work below which threads cost more than they give: about 0.2 ms
SEGMENT_TOKENS = 256  # no segment shorter than this: its states cost as much as its tokens
Tensor = torch.Tensor | None


class Walk(NamedTuple):
    """What the launcher walks: sequences, heads, cuts of time, and where packed sequences begin."""

    N: int
    T: int
    H: int
    heads: int  # value heads of each
    K: int
    V: int
    segments: int = 1
    segment_states: bool = False
    cu: Tensor = None

    @property
    def threads(self) -> int:
        return threads_for(self.T * self.N * self.H * self.heads * self.K * self.V)


def walk_of(q: torch.Tensor, v: torch.Tensor, lengths: Tensor) -> Walk:
    """Over tokens q [B, T, H, K], v [B, T, HV, V]."""
    B, T, H, K = q.shape
    cu = None if lengths is None else lengths.to(torch.int64).contiguous()
    return Walk(B if cu is None else cu.shape[0] - 1, T, H, v.shape[2] // H, K, v.shape[3], cu=cu)


def over(walk: Walk, x: torch.Tensor) -> Walk:
    """The same walk over x's tokens: in cross attention keys and queries differ in number."""
    return walk._replace(T=x.shape[1])


def cut_in_time(walk: Walk) -> Walk:
    """Cut into segments that have states of their own, where heads alone do not give every thread work."""
    segments = _segments(walk)
    return walk if segments == 1 else walk._replace(segments=segments, segment_states=True)


def spread(walk: Walk, x: torch.Tensor) -> Walk:
    """Cut into segments that read one state, over x's tokens: nothing is carried, so a cut costs nothing."""
    walk = over(walk, x)
    tokens = walk.T if walk.cu is None else walk.T // max(walk.N, 1)
    segments = max(1, min(walk.threads, tokens // SEGMENT_TOKENS))
    return walk._replace(segments=segments)


def _segments(walk: Walk) -> int:
    """Cuts of time that give every thread work: 1 when sequences and heads already do."""
    sequences = walk.N * walk.H
    if sequences == 0 or 2 * sequences > walk.threads:
        return 1
    tokens = walk.T if walk.cu is None else walk.T // walk.N
    return max(1, min(walk.threads // sequences, tokens // SEGMENT_TOKENS))


# ---- threads


def threads_for(macs: int) -> int:
    return 1 if macs < SERIAL_MACS else torch.get_num_threads()


def threads_as_now() -> Condition:
    """That a block which says how many threads to take is launched with as many as torch has now."""
    return torch.get_num_threads, None, torch.get_num_threads()


# ---- one launch


def rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its last dimension is not contiguous: a kernel reads any other strides."""
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


def launch(
    binary: CpuBinary,
    walk: Walk,
    scalars: Sequence[Any],
    tokens: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    chunks: Sequence[Tensor] = (),
) -> None:
    """Run a chunk kernel.

    Args:
        scalars: the kernel's, in order.
        tokens: its [B, T, H, ...] arguments in order, None where the scalars leave one alone.
        states: the initial and the final value of each of its states.
        chunks: what it leaves for another kernel, or takes from one, for each chunk, see chunk_states.
    """
    addresses = [_address(x) for x in (*tokens, *chunks)] + [_address(x) for pair in states for x in pair]
    binary(binary.addresses(_address(walk.cu), 0, *addresses) + fixed_words(binary, walk, scalars, tokens))


def chunk_states(walk: Walk, chunk: int) -> torch.Tensor:
    """Memory for a state of each value head for each chunk of tokens."""
    slots = walk.N * -(-walk.T // chunk) if walk.cu is None else walk.T // chunk + walk.N
    padded = (-(-walk.K // 16) * 16, -(-walk.V // 16) * 16)
    return outputs.empty((slots, walk.H * walk.heads, *padded), torch.float32, torch.device("cpu"))


def fixed_words(binary: CpuBinary, walk: Walk, scalars: Sequence[Any], tokens: Sequence[Tensor]) -> bytes:
    """What of a launch depends on sizes and strides alone."""
    strides = tuple([None if x is None else x.stride() for x in tokens])
    key = (walk[:-1], scalars, strides, torch.get_num_threads())
    fixed = binary.kept.get(key)
    if fixed is None:
        words = [w for s in strides for w in ((0, 0, 0) if s is None else s[:3])]
        fixed = binary.fixed(*walk[:-1], walk.threads, *scalars, *words)
        keep(binary, key, fixed)
    return fixed


def _address(x: Tensor) -> int:
    return 0 if x is None else x.data_ptr()


# ---- steps


def token_words(strides: Sequence[int], single: bool) -> tuple[int, int, int]:
    """Sequence, token and head stride; [B, H, ...] of a single token has no second one."""
    return (strides[0], 0, strides[1]) if single else (strides[0], strides[1], strides[2])


def step_on_copies(
    step: Any,
    tokens: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    slots: Tensor,
    opt: Any,
    out: torch.Tensor,
) -> torch.Tensor:
    """The step on copies of what the kernel cannot read or write in place."""
    copies = [*(x.contiguous() for x in states), torch.empty_like(out, memory_format=torch.contiguous_format)]
    step(*(x.resolve_neg().contiguous() for x in tokens), *copies[:-1], slots, opt, copies[-1])
    for mine, copy in zip((*states, out), copies, strict=True):
        if mine is not copy:
            mine.copy_(copy)
    return out
