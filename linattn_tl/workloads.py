"""What trials of CUDA kernels time, whatever the family: sizes, tensors, floors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from linattn_tl.launchers import Launcher
from linattn_tl.spans import Walk
from tl_kernels.spec import Problem

TOKENS, HEADS, BATCH, DECODE_BATCH = 4096, 16, 4, 64
OF_KEYS = ("q", "k", "den", "z0", "z1")  # tensors with a row a q/k head; others have one a value head
TIMED_SEGMENT = 512  # tokens a span, of kernels that walk spans of sequences


class Workload(NamedTuple):
    call: Callable[[], object]  # launches once
    flops: float  # of products with the state; those inside a chunk depend on the schedule
    bytes: int  # each tensor once: the floor


class Work(NamedTuple):
    """What a kernel cannot do without; it may read more."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    products: int  # of a token with the state, or of two vectors into it

    @property
    def moved(self) -> tuple[str, ...]:
        return (*self.reads, *self.writes)


def of_launch(
    launcher: Launcher,
    packed: Any,
    ordered: Sequence[torch.Tensor | None],
    work: Work,
    walk: Walk,
    tensors: Mapping[str, torch.Tensor],
) -> Workload:
    """A launch over a walk. ordered: what the kernel takes; tensors: the same by name."""
    flops = 2.0 * work.products * walk.K * walk.V * walk.tokens * walk.HV
    return Workload(lambda: launcher.launch(packed, ordered), flops, sum(tensors[name].nbytes for name in work.moved))


def timed_walk(p: Problem, batch: int, tokens: int, heads: int, sharing: int, in_spans: bool) -> Walk:
    """Over sequences of `tokens` tokens, as wholes or in spans. sharing: how many value heads a q/k head serves."""
    segment = min(TIMED_SEGMENT, tokens) if in_spans else tokens
    return Walk(batch, tokens, batch * tokens, heads // sharing, heads, p.K, p.V, segment, cut=segment < tokens)


def timed(
    name: str, shape: tuple[str, str], walk: Walk, dtype: torch.dtype, device: torch.device | str, chunk: int = 1
) -> torch.Tensor:
    """A tensor of a timed launch.

    Args:
        name: says by OF_KEYS whether it is a q/k head's or a value head's.
        shape: rows, "tokens", "states" of sequences, "spans", or "chunks" of `chunk` tokens; and columns of each head,
            "K", "V", "KV", or "" for a number.
    """
    rows, columns = shape
    chunks = walk.sequences * -(-walk.length // chunk)
    count = {"tokens": walk.tokens, "states": walk.sequences, "spans": walk.spans, "chunks": chunks}[rows]
    widths = {"K": (walk.K,), "V": (walk.V,), "KV": (walk.K, walk.V), "": ()}
    heads = walk.H if name in OF_KEYS else walk.HV
    x = torch.zeros(count, heads, *widths[columns], dtype=dtype, device=device)
    # a scan over the results of the one before would leave the range of fp32
    return x if rows == "spans" else x.normal_()
