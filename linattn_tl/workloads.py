"""What trials of CUDA kernels time, whatever the family: sizes, tensors, floors."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from linattn_tl.spans import Walk
from tl_kernels.spec import Problem

TOKENS, HEADS, BATCH, DECODE_BATCH = 4096, 16, 4, 64
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


def timed_walk(p: Problem, batch: int, tokens: int, heads: int, in_spans: bool) -> Walk:
    """Over sequences of `tokens` tokens, as wholes or in spans."""
    segment = min(TIMED_SEGMENT, tokens) if in_spans else tokens
    return Walk(batch, tokens, batch * tokens, heads, heads, p.K, p.V, segment, cut=segment < tokens)


def timed(rows: str, columns: str, walk: Walk, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor of a timed launch.

    Args:
        rows: "tokens", "states" of sequences, or "spans".
        columns: of each value head: "K", "V", "KV", or "" for a number.
    """
    count = {"tokens": walk.tokens, "states": walk.sequences, "spans": walk.spans}[rows]
    widths = {"K": (walk.K,), "V": (walk.V,), "KV": (walk.K, walk.V), "": ()}
    x = torch.zeros(count, walk.HV, *widths[columns], dtype=dtype, device=device)
    # a scan over the results of the one before would leave the range of fp32
    return x if rows == "spans" else x.normal_()
