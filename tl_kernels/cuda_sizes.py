"""Sizes of tiles and of shared memory that the CUDA kernels of all families agree on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tl_kernels.spec import Problem, Target

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
OFFERED = 3  # schedules of a problem: each is built and verified before it is kept
SLACK_BYTES = 6144  # vectors, reductions across warps, barriers, alignment of tiles


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def padded(n: int) -> int:
    """The width of a tile that holds n columns: what four or eight warps can share."""
    return round_up(n, 32) if n <= 64 else round_up(n, 64)


def tile_dtype(p: Problem) -> str:
    """What products of float16 that have no scaling of their own are computed in has the range of float32."""
    return "bfloat16" if p.dtype == "bfloat16" else "float32"


@dataclass(frozen=True)
class Blocks:
    """A schedule of the kernels that load a chunk at a time."""

    C: int  # tokens a chunk
    BK: int  # rows of the state in a program
    BV: int  # columns of the state in a program
    threads: int
    stages: int = 0  # 1: a chunk is loaded while the one before is worked on; 0: when it is needed


def tensor_cores(p: Problem, target: Target) -> Sequence[str]:
    """What a kernel that multiplies tiles is slow without."""
    return ("HGMMA|HMMA",)


def blocks_of(width: int) -> list[int]:
    """Widths of a block that are worth a try, widest first."""
    return sorted({min(b, padded(width)) for b in (256, 128, 64, 32, 16)}, reverse=True)


def blocks_smem_bytes(p: Problem, c: Blocks, operands: int, staged: int, loads: int = 0) -> int:
    """Dynamic shared memory at most.

    Args:
        operands: columns of all operand tiles of C rows.
        staged: columns of all outputs that go through shared memory.
        loads: columns of all that is loaded a chunk ahead.
    """
    tile, state = (8, 4) if tile_dtype(p) == "float32" else (2, 2)
    rows = tile * (operands + c.C) + BYTES[p.dtype] * (staged + c.stages * loads)
    return c.C * rows + state * c.BK * c.BV + SLACK_BYTES


def fitting(
    p: Problem, target: Target, shapes: Sequence[tuple[int, int]], columns: Callable[[int, int], tuple[int, int, int]]
) -> list[Blocks]:
    """The schedules with a state of one of these shapes that fit; columns(BK, BV) as for blocks_smem_bytes."""
    found: list[Blocks] = []
    for C in (32, 16) if tile_dtype(p) == "float32" else (64, 32, 16):
        if C == 16 and found:  # two warps, for four cannot share a tile of 16 x 16: the last resort
            break
        for BK, BV in shapes:
            threads = 64 if C == 16 else 256 if BK * BV >= 128 * 64 else 128
            # registers of a thread: the state, accumulators, products inside the chunk, an operand being loaded.
            # Tiles of float32, whose parts are kept as well, spilled at 120
            most = 112 if C == 32 and tile_dtype(p) == "float32" else 224
            if (BK * BV + C * (BK + BV) + 2 * C * C + C * max(BK, BV)) // threads > most:
                continue
            for stages in (1, 0):
                c = Blocks(C, BK, BV, threads, stages)
                if blocks_smem_bytes(p, c, *columns(BK, BV)) <= target.smem_bytes:
                    found.append(c)
                    break
    # the fewest bytes first, then loads that are hidden behind products, then long chunks
    return sorted(found, key=lambda c: (-c.BK * c.BV, -c.stages, -c.C))[:OFFERED]
