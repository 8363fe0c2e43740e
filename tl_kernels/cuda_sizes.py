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


def chunk_sizes(p: Problem) -> tuple[int, ...]:
    """Tokens of a chunk, longest first."""
    return (32, 16) if tile_dtype(p) == "float32" else (64, 32, 16)


def blocks_of(width: int) -> list[int]:
    """Widths of a block that are worth a try, widest first."""
    return sorted({min(b, padded(width)) for b in (256, 128, 64, 32, 16)}, reverse=True)


@dataclass(frozen=True)
class Layout:
    """What a kernel with blocks keeps in shared memory beside its state and vectors."""

    operands: int  # columns of all operand tiles of C rows
    staged: int  # columns of all outputs that go through shared memory
    loads: int  # columns of all that is loaded a chunk ahead
    squares: float = 1  # tiles of C x C; one that needs no low part is half of one where others have it
    slack: int = SLACK_BYTES

    def smem_bytes(self, p: Problem, c: Blocks) -> int:
        """Dynamic shared memory at most."""
        tile, state = (8, 4) if tile_dtype(p) == "float32" else (2, 2)
        rows = tile * (self.operands + int(self.squares * c.C)) + BYTES[p.dtype] * (self.staged + c.stages * self.loads)
        return c.C * rows + state * c.BK * c.BV + self.slack


def gated(operands: int, staged: int, loads: int, squares: float = 1) -> Layout:
    """Of a kernel with gates, and so with more vectors and sums over warps."""
    return Layout(operands, staged, loads, squares, slack=10 * 1024)


def fitting(
    p: Problem,
    target: Target,
    shapes: Sequence[tuple[int, int]],
    layout: Callable[[int, int], Layout],
    chunks: Sequence[int] = (),
) -> list[Blocks]:
    """The schedules that fit, best first.

    Args:
        shapes: (BK, BV), of the state in a program.
        layout: by BK and BV, what else there is.
        chunks: sizes of a chunk, all that make sense unless given.
    """
    found: list[Blocks] = []
    for C in chunks or chunk_sizes(p):
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
                if layout(BK, BV).smem_bytes(p, c) <= target.smem_bytes:
                    found.append(c)
                    break
    # the fewest bytes first, then loads that are hidden behind products, then long chunks
    return sorted(found, key=lambda c: (-c.BK * c.BV, -c.stages, -c.C))[:OFFERED]


@dataclass(frozen=True)
class ScanConfig:
    block: int  # elements of the state in a program
    threads: int


def scan_configs(p: Problem, target: Target) -> Sequence[ScanConfig]:
    return [ScanConfig(n, n // 4) for n in (1024, 256) if p.K * p.V % n == 0]


@dataclass(frozen=True)
class DecodeConfig:
    BV: int  # columns of the state in a program
    threads: int


def decode_configs(p: Problem, target: Target) -> Sequence[DecodeConfig]:
    """Every thread holds K / 16 vectors of 16 bytes of the state: many small programs, for few sequences fill a GPU."""
    return [DecodeConfig(BV, 4 * BV) for BV in (32, 64, 16) if p.V % BV == 0]
