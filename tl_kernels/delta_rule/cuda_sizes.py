"""Which schedules the delta rule's CUDA kernels have: tiles, and chunks that its passes agree on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from tl_kernels.cuda_sizes import BYTES, Blocks, Layout, blocks_of, chunk_sizes, fitting, gated, padded, tile_dtype
from tl_kernels.spec import Problem, Target

ROWS = 16  # of a block of the substitution
PAD = 8  # columns behind those of what is solved for
SUM_BYTES = 84  # a thread of backward, of sums over warps, each of which has a place of its own; and vectors


def rows_of(K: int) -> int:
    """Rows of the state in a tile: TileLang 0.1.15 finds no layout in which to sum rows of 192."""
    return 256 if padded(K) == 192 else padded(K)


# ---- shared memory


def _forward(p: Problem, BK: int, BV: int) -> Layout:
    return gated(2 * BK + BV, BV + _solved(p, BV), 2 * BK + BV)


def _backward(p: Problem, BK: int, BV: int) -> Layout:
    slack = SUM_BYTES * _threads("backward", p, BK, BV, 128)
    staged = BK + (BV if BV != BK else 0)  # dK, and dV in the same place where it has the same size
    return Layout(2 * BK + 3 * BV, staged + _solved(p, BV), 2 * (BK + BV), squares=2.5, slack=slack)


def _prepare(p: Problem, BK: int, BV: int) -> Layout:
    """No chunk is loaded ahead of another; a program has one."""
    return gated(BK + BV, _solved(p, BV), 0)


def _carry(p: Problem, BK: int, BV: int) -> Layout:
    """W, Y0 and Y are of the tiles' type."""
    wide = 4 // BYTES[p.dtype] if tile_dtype(p) == "float32" else 1
    return gated(2 * BK + BV, wide * BV, BK + wide * (BK + BV), squares=0)


def _prepare_back(p: Problem, BK: int, BV: int) -> Layout:
    return gated(2 * BK + BV, _solved(p, BV), 0, squares=2)


def _carry_back(p: Problem, BK: int, BV: int) -> Layout:
    wide = 4 // BYTES[p.dtype] if tile_dtype(p) == "float32" else 1
    return gated(3 * BK + 2 * BV, 0, 2 * BK + BV + wide * (BK + BV), squares=0)


def _output(p: Problem, BK: int, BV: int) -> Layout:
    return gated(2 * BK + BV, BV, 0)


def _solved(p: Problem, BV: int) -> int:
    """What is solved for, in fp32, and blocks on the diagonal of the system, in columns of outputs."""
    return 4 * (BV + PAD + ROWS) // BYTES[p.dtype]


LAYOUTS: Mapping[str, Callable[[Problem, int, int], Layout]] = {
    "forward": _forward,
    "backward": _backward,
    "prepare": _prepare,
    "carry": _carry,
    "output": _output,
    "prepare_back": _prepare_back,
    "carry_back": _carry_back,
}


# ---- configs


class Found(NamedTuple):
    """Configs by pass. A chunk of backward is one of forward's or several, since forward leaves states for it."""

    forward: Sequence[Blocks] = ()
    backward: Sequence[Blocks] = ()

    @property
    def C(self) -> int:
        """Tokens of a chunk of what goes with them: whose states backward can read, where there is one."""
        return (self.backward or self.forward)[0].C


def forward_configs(p: Problem, target: Target) -> Sequence[Blocks]:
    """Whole rows of V first: each block of V beyond the first reads q and k again.

    None where only chunks of 16 tokens fit, or so few columns that the warps cannot share 16 rows of them: tiles of
    float32 with a large K.
    """
    return _paired(p, target).forward


def backward_configs(p: Problem, target: Target) -> Sequence[Blocks]:
    return _paired(p, target).backward


def chunk_configs(stage: str, p: Problem, target: Target) -> Sequence[Blocks]:
    """Chunks of one size, since one kernel reads what another leaves. None where forward has none."""
    found = _paired(p, target)
    needed = found.backward if stage.endswith("back") else found.forward
    return _fitting(stage, p, target, [found.C]) if needed else ()


@lru_cache(maxsize=256)
def _paired(p: Problem, target: Target) -> Found:
    """The chunk of backward that moves the fewest bytes, and forward's configs that can leave states for it."""
    pairs = []
    for C in chunk_sizes(p):
        forward = _fitting("forward", p, target, [c for c in chunk_sizes(p) if c <= C])
        pairs.append(Found(forward, _fitting("backward", p, target, [C]) if forward else ()))
    whole = [x for x in pairs if x.backward]
    return min(whole, key=lambda x: _moved(p, x.backward[0])) if whole else pairs[0]


def _moved(p: Problem, c: Blocks) -> float:
    """Bytes a token of q, k, dq and dk, which each block of V reads and writes, and of states, written and read."""
    state = 4 if tile_dtype(p) == "float32" else 2
    return -(-p.V // c.BV) * 4 * p.K * BYTES[p.dtype] + 2 * p.K * p.V * state / c.C


def _fitting(stage: str, p: Problem, target: Target, chunks: Sequence[int]) -> list[Blocks]:
    shapes = [(rows_of(p.K), b) for b in sorted({64, *blocks_of(p.V)}, reverse=True)]
    found = fitting(p, target, shapes, partial(LAYOUTS[stage], p), chunks)
    found = [replace(c, threads=_threads(stage, p, c.BK, c.BV, c.threads)) for c in found]
    return [c for c in found if c.C > ROWS and c.BV <= c.threads <= 4 * c.BV]


def _threads(stage: str, p: Problem, BK: int, BV: int, usual: int) -> int:
    """Of a program: at 128 threads tiles of 64 x 64 spill registers, in backward and in float32."""
    large = BK * BV >= 64 * 64 and (stage == "backward" or tile_dtype(p) == "float32")
    return 256 if large else usual
