"""Tile programs that the emulator's tests run, each beside its definition in float64.

A factory returns a prim_func; tilelang is imported inside, for it is heavy. `*_reference` is the definition: it takes
the same tensors, computes in float64 (integers in int64), and returns what the outputs should be. Python values of a
factory, such as `staged`, are answered while the program is traced and leave nothing in the generated source.

No `in` inside a tile program: Python answers it while tracing, and TileLang drops what it guards. Nor does a tool
rewrite one (SIM, B007): what means the same to Python need not mean the same to TileLang.
"""

# ruff: noqa: B007, E741, SIM102

import math
import os
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch

CHUNK = 64  # of the linear-attention programs
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"async_mode": "late", "order": "ascending"},
    {"async_mode": "early", "order": "greedy"},
    {"async_mode": "random", "order": "shuffled", "seed": 1},
    {"async_mode": "random", "order": "greedy-descending", "seed": 2},
)


@cache
def built(arch: str, factory: Callable[..., Any], *sizes: Any, **options: Any) -> Any:
    """The program for arch, built for the emulator once a session."""
    return built_with(arch, factory(*sizes, **options))


def built_with(arch: str, program: Any, **how: Any) -> Any:
    """Any program, with keywords of `emulate`; binaries are kept beside those of the other tests."""
    from autotune.emulator import emulate

    return emulate(program, arch, cache=Path(os.environ["LINATTN_TL_CACHE_DIR"]) / "emulator", **how)


# ---- numbers


def tensor(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers times scale; small integers for an integer type."""
    if dtype.is_floating_point:
        return (torch.randn(*shape) * scale).to(dtype)
    return torch.randint(-6, 7, shape, dtype=dtype)


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output nobody has written: NaN, or the least integer, so that a missed element shows."""
    return torch.full(shape, math.nan if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the mean square error over that of the expected numbers; infinite where a NaN was left."""
    error = (got.double() - expected.double()).square().mean() / expected.double().square().mean()
    return math.inf if torch.isnan(error) else math.sqrt(float(error))


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = relative_error(got, expected)
    assert error <= tolerance, f"relative RMS error {error:.2e}, allowed {tolerance:.0e}"


def rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 with the 13 low bits of the mantissa cut off: what a tensor core sees of it."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


# ---- matrices


def gemm(
    M: int,
    N: int,
    K: int,
    block: tuple[int, int, int] = (64, 64, 32),
    dtype: str = "float16",
    out: str = "float32",
    accumulate: str = "float32",
    transpose_a: bool = False,
    transpose_b: bool = False,
    a_in_registers: bool = False,
    staged: bool = False,
    stages: int = 2,
    threads: int = 128,
) -> Any:
    """C = A B. `staged`: the result goes through shared memory; `a_in_registers`: A is a fragment.

    dtype tfloat32 takes float32 and rounds it on its way into shared memory, which is what wgmma asks for.
    """
    import tilelang.language as T

    bm, bn, bk = block
    tile = T.tfloat32 if dtype == "tfloat32" else dtype
    dtype = "float32" if dtype == "tfloat32" else dtype

    @T.prim_func
    def program(
        A: T.Tensor([K, M] if transpose_a else [M, K], dtype),
        B: T.Tensor([N, K] if transpose_b else [K, N], dtype),
        C: T.Tensor([M, N], out),
    ):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=threads) as (bx, by):
            a = T.alloc_shared([bk, bm] if transpose_a else [bm, bk], tile)
            b = T.alloc_shared([bn, bk] if transpose_b else [bk, bn], tile)
            a_registers = T.alloc_fragment([bm, bk], tile)
            c = T.alloc_fragment([bm, bn], accumulate)
            c_shared = T.alloc_shared([bm, bn], out)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, bk), num_stages=stages):
                if transpose_a:
                    T.copy(A[k * bk, by * bm], a)
                else:
                    T.copy(A[by * bm, k * bk], a)
                if transpose_b:
                    T.copy(B[bx * bn, k * bk], b)
                else:
                    T.copy(B[k * bk, bx * bn], b)
                if a_in_registers:
                    T.copy(a, a_registers)
                    T.gemm(a_registers, b, c, transpose_B=transpose_b)
                else:
                    T.gemm(a, b, c, transpose_A=transpose_a, transpose_B=transpose_b)
            if staged:
                T.copy(c, c_shared)
                T.copy(c_shared, C[by * bm, bx * bn])
            else:
                T.copy(c, C[by * bm, bx * bn])

    return program


def gemm_reference(A, B, transpose_a: bool = False, transpose_b: bool = False) -> torch.Tensor:
    if A.dtype == torch.float32:
        A, B = rounded_to_tf32(A), rounded_to_tf32(B)
    wide = torch.float64 if A.dtype.is_floating_point else torch.int64
    A, B = A.to(wide), B.to(wide)
    return (A.T if transpose_a else A) @ (B.T if transpose_b else B)


def split_k(M: int, N: int, K: int, parts: int, how: str, out: str = "float32") -> Any:
    """C += A B, `parts` blocks for a tile of C, which meet in it by atomic additions of one kind or another."""
    import tilelang.language as T

    bm, bn, bk = 64, 64, 32
    steps = K // parts // bk

    @T.prim_func
    def program(A: T.Tensor([M, K], "float16"), B: T.Tensor([K, N], "float16"), C: T.Tensor([M, N], out)):
        with T.Kernel(N // bn, M // bm, parts, threads=128) as (bx, by, bz):
            a = T.alloc_shared([bm, bk], "float16")
            b = T.alloc_shared([bk, bn], "float16")
            c = T.alloc_fragment([bm, bn], "float32")
            c_shared = T.alloc_shared([bm, bn], out)
            T.use_swizzle(4)
            T.clear(c)
            for k in T.Pipelined(steps, num_stages=2):
                T.copy(A[by * bm, (bz * steps + k) * bk], a)
                T.copy(B[(bz * steps + k) * bk, bx * bn], b)
                T.gemm(a, b, c)
            if how == "scalar":
                for i, j in T.Parallel(bm, bn):
                    T.atomic_add(C[by * bm + i, bx * bn + j], c[i, j])
            elif how == "pairs":
                T.copy(c, c_shared)
                for i, j in T.Parallel(bm, bn // 2):
                    T.atomic_addx2(C[by * bm + i, bx * bn + 2 * j], c_shared[i, 2 * j])
            elif how == "fours":
                T.copy(c, c_shared)
                for i, j in T.Parallel(bm, bn // 4):
                    T.atomic_addx4(C[by * bm + i, bx * bn + 4 * j], c_shared[i, 4 * j])
            else:
                T.copy(c, c_shared)
                T.atomic_add(C[by * bm, bx * bn], c_shared, use_tma=how == "bulk")

    return program


# ---- copies


def tiles(
    rows: int,
    columns: int | None,
    block: tuple[int, int],
    stages: int,
    dtype: str = "float16",
    turned: bool = False,
) -> Any:
    """Y = X (or its transpose), tile by tile through shared memory, in a pipelined loop over the columns.

    Columns that are None are dynamic.
    """
    import tilelang.language as T

    br, bc = block
    columns = T.dynamic("columns") if columns is None else columns

    @T.prim_func
    def program(
        X: T.Tensor([rows, columns], dtype), Y: T.Tensor([columns, rows] if turned else [rows, columns], dtype)
    ):
        with T.Kernel(T.ceildiv(rows, br), threads=128) as bx:
            x = T.alloc_shared([br, bc], dtype)
            y = T.alloc_fragment([bc, br] if turned else [br, bc], dtype)
            for k in T.Pipelined(T.ceildiv(columns, bc), num_stages=stages):
                T.copy(X[bx * br, k * bc], x)
                if turned:
                    for i, j in T.Parallel(bc, br):
                        y[i, j] = x[j, i]
                    T.copy(y, Y[k * bc, bx * br])
                else:
                    T.copy(x, y)
                    T.copy(y, Y[bx * br, k * bc])

    return program


def shared_to_global(rows: int, columns: int, dtype: str = "float16") -> Any:
    """Y = X + 1 for ragged sizes, into global memory straight from shared: a TMA store where there is TMA."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([rows, columns], dtype), Y: T.Tensor([rows, columns], dtype)):
        with T.Kernel(T.ceildiv(columns, 64), T.ceildiv(rows, 32), threads=128) as (bx, by):
            x = T.alloc_shared([32, 64], dtype)
            y = T.alloc_shared([32, 64], dtype)
            T.copy(X[by * 32, bx * 64], x)
            for i, j in T.Parallel(32, 64):
                y[i, j] = x[i, j] + T.Cast(dtype, 1)
            T.copy(y, Y[by * 32, bx * 64])

    return program


def mirror(blocks: int) -> Any:
    """Y = X with every 128 numbers in reverse, through shared memory and a thread's own array. Small, to be broken."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([blocks * 128], "float32"), Y: T.Tensor([blocks * 128], "float32")):
        with T.Kernel(blocks, threads=128) as bx:
            t = T.get_thread_binding()
            x = T.alloc_shared([128], "float32")
            y = T.alloc_local([4], "float32")
            x[t] = X[bx * 128 + t]
            y[t % 4] = x[127 - t]
            Y[bx * 128 + t] = y[t % 4]

    return program


def strided(far: int, near: int, width: int = 1) -> Any:
    """Y = X for 128 threads, `width` numbers each, `far` numbers apart in Y and `near` numbers in shared memory."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([128, width], "float32"), Y: T.Tensor([128, far], "float32")):
        with T.Kernel(1, threads=128) as _:
            t = T.get_thread_binding()
            x = T.alloc_shared([128, near], "float32")
            for i in T.vectorized(width):
                x[t, i] = X[t, i]
            T.sync_threads()
            for i in T.vectorized(width):
                Y[t, i] = x[t, i]

    return program


def large(words: int) -> Any:
    """Y = X through `words` words of shared memory, nearly all of them idle."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([128], "float32"), Y: T.Tensor([128], "float32")):
        with T.Kernel(1, threads=128) as _:
            t = T.get_thread_binding()
            x = T.alloc_shared([words], "float32")
            x[t] = X[t]
            Y[t] = x[t]

    return program


# ---- along rows and columns

REDUCTIONS = ("sum", "max", "min", "abssum", "absmax")


def reductions(rows: int, columns: int, threads: int, axis: int, dtype: str = "float32") -> Any:
    """Y[r] = the r-th of REDUCTIONS of X along an axis."""
    import tilelang.language as T

    kept = columns if axis == 0 else rows

    @T.prim_func
    def program(X: T.Tensor([rows, columns], dtype), Y: T.Tensor([len(REDUCTIONS), kept], dtype)):
        with T.Kernel(1, threads=threads) as _:
            x = T.alloc_fragment([rows, columns], dtype)
            total = T.alloc_fragment([kept], dtype)
            most = T.alloc_fragment([kept], dtype)
            least = T.alloc_fragment([kept], dtype)
            absolute = T.alloc_fragment([kept], dtype)
            largest = T.alloc_fragment([kept], dtype)
            T.copy(X, x)
            T.reduce_sum(x, total, dim=axis)
            T.reduce_max(x, most, dim=axis)
            T.reduce_min(x, least, dim=axis)
            T.reduce_abssum(x, absolute, dim=axis)
            T.reduce_absmax(x, largest, dim=axis)
            T.copy(total, Y[0, 0:kept])
            T.copy(most, Y[1, 0:kept])
            T.copy(least, Y[2, 0:kept])
            T.copy(absolute, Y[3, 0:kept])
            T.copy(largest, Y[4, 0:kept])

    return program


def reductions_reference(X: torch.Tensor, axis: int) -> torch.Tensor:
    X = X.double()
    return torch.stack([X.sum(axis), X.amax(axis), X.amin(axis), X.abs().sum(axis), X.abs().amax(axis)])


SCANS = ("rows", "columns", "columns backwards", "fragment")  # of `scans_2d`


def scans(rows: int, columns: int, threads: int) -> Any:
    """V = cumulative sums of U; Y[s] = X summed up along one axis or the other, as SCANS says."""
    import tilelang.language as T

    @T.prim_func
    def program(
        U: T.Tensor([columns], "float32"),
        V: T.Tensor([columns], "float32"),
        X: T.Tensor([rows, columns], "float32"),
        Y: T.Tensor([len(SCANS), rows, columns], "float32"),
    ):
        with T.Kernel(1, threads=threads) as _:
            u = T.alloc_shared([columns], "float32")
            x = T.alloc_shared([rows, columns], "float32")
            y = T.alloc_shared([rows, columns], "float32")
            f = T.alloc_fragment([rows, columns], "float32")
            T.copy(U, u)
            T.cumsum(u, dim=0)
            T.copy(u, V)
            T.copy(X, x)
            T.cumsum(x, y, dim=0)
            T.copy(y, Y[0, 0:rows, 0:columns])
            T.cumsum(x, y, dim=1)
            T.copy(y, Y[1, 0:rows, 0:columns])
            T.cumsum(x, y, dim=1, reverse=True)
            T.copy(y, Y[2, 0:rows, 0:columns])
            T.copy(x, f)
            T.cumsum(f, dim=1)
            T.copy(f, Y[3, 0:rows, 0:columns])

    return program


def scans_reference(U: torch.Tensor, X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    U, X = U.double(), X.double()
    along = X.cumsum(1)
    return U.cumsum(0), torch.stack([X.cumsum(0), along, X.flip(1).cumsum(1).flip(1), along])


def sums_in_a_loop(chunks: int, stages: int) -> Any:
    """C = cumulative sums of G within each chunk of 64, Y = X X^T of its rows, in one pipelined loop."""
    import tilelang.language as T

    N = CHUNK

    @T.prim_func
    def program(
        X: T.Tensor([chunks * N, 64], "float16"),
        G: T.Tensor([chunks * N], "float32"),
        C: T.Tensor([chunks * N], "float32"),
        Y: T.Tensor([chunks * N, N], "float32"),
    ):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_shared([N, 64], "float16")
            g = T.alloc_shared([N], "float32")
            c = T.alloc_shared([N], "float32")
            y = T.alloc_fragment([N, N], "float32")
            for n in T.Pipelined(chunks, num_stages=stages):
                T.copy(X[n * N, 0], x)
                T.copy(G[n * N], g)
                T.cumsum(g, c, dim=0)
                T.gemm(x, x, y, transpose_B=True, clear_accum=True)
                T.copy(c, C[n * N])
                T.copy(y, Y[n * N, 0])

    return program


def softmax(columns: int, block: int = 16, dtype: str = "bfloat16", threads: int = 128) -> Any:
    """Y = softmax of X along rows; L = its logarithmic normaliser. The number of rows is dynamic."""
    import tilelang.language as T

    R = T.dynamic("R")

    @T.prim_func
    def program(X: T.Tensor([R, columns], dtype), Y: T.Tensor([R, columns], dtype), L: T.Tensor([R], "float32")):
        with T.Kernel(T.ceildiv(R, block), threads=threads) as bx:
            x = T.alloc_fragment([block, columns], "float32")
            most = T.alloc_fragment([block], "float32")
            total = T.alloc_fragment([block], "float32")
            T.copy(X[bx * block, 0], x)
            T.reduce_max(x, most, dim=1)
            for i, j in T.Parallel(block, columns):
                x[i, j] = T.exp(x[i, j] - most[i])
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(block, columns):
                x[i, j] = x[i, j] / total[i]
            for i in T.Parallel(block):
                most[i] = most[i] + T.log(total[i])
            T.copy(x, Y[bx * block, 0])
            T.copy(most, L[bx * block])

    return program


def softmax_reference(X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return X.double().softmax(1), X.double().logsumexp(1)


# ---- element by element

UNARY = ("exp", "exp2", "log", "log2", "tanh", "rsqrt", "sigmoid", "sqrt", "abs", "floor")


def unary(n: int, dtype: str) -> Any:
    """Y[f] = the f-th of UNARY of X, computed in dtype."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([n], dtype), Y: T.Tensor([len(UNARY), n], dtype)):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                Y[0, bx * 128 + i] = T.exp(X[bx * 128 + i])
                Y[1, bx * 128 + i] = T.exp2(X[bx * 128 + i])
                Y[2, bx * 128 + i] = T.log(X[bx * 128 + i])
                Y[3, bx * 128 + i] = T.log2(X[bx * 128 + i])
                Y[4, bx * 128 + i] = T.tanh(X[bx * 128 + i])
                Y[5, bx * 128 + i] = T.rsqrt(X[bx * 128 + i])
                Y[6, bx * 128 + i] = T.sigmoid(X[bx * 128 + i])
                Y[7, bx * 128 + i] = T.sqrt(X[bx * 128 + i])
                Y[8, bx * 128 + i] = T.abs(X[bx * 128 + i])
                Y[9, bx * 128 + i] = T.floor(X[bx * 128 + i])

    return program


def functions_reference(X: torch.Tensor, names: tuple[str, ...] = UNARY) -> torch.Tensor:
    return torch.stack([getattr(X.double(), name)() for name in names])


FAST = ("exp", "log", "log2", "log10", "sin", "cos", "tan")


def fast(n: int) -> Any:
    """Y[f] = the f-th of FAST of X, by the approximations of the special-function unit."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([n], "float32"), Y: T.Tensor([len(FAST), n], "float32")):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                Y[0, bx * 128 + i] = T.__exp(X[bx * 128 + i])
                Y[1, bx * 128 + i] = T.__log(X[bx * 128 + i])
                Y[2, bx * 128 + i] = T.__log2(X[bx * 128 + i])
                Y[3, bx * 128 + i] = T.__log10(X[bx * 128 + i])
                Y[4, bx * 128 + i] = T.__sin(X[bx * 128 + i])
                Y[5, bx * 128 + i] = T.__cos(X[bx * 128 + i])
                Y[6, bx * 128 + i] = T.__tan(X[bx * 128 + i])

    return program


def affine(columns: int, block: int = 64) -> Any:
    """Y[b, t] = scale X[b, t] + shift[t] for t below `limit`, zero from there on. B and T are dynamic."""
    import tilelang.language as T

    B, L = T.dynamic("B"), T.dynamic("L")

    @T.prim_func
    def program(
        X: T.Tensor([B, L, columns], "float16"),
        S: T.Tensor([L], "float32"),
        Y: T.Tensor([B, L, columns], "float16"),
        limit: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(L, block), B, threads=128) as (bx, by):
            x = T.alloc_shared([block, columns], "float16")
            y = T.alloc_fragment([block, columns], "float32")
            T.copy(X[by, bx * block, 0], x)
            for i, j in T.Parallel(block, columns):
                y[i, j] = 0.0
                if bx * block + i < limit:
                    if bx * block + i < L:
                        y[i, j] = x[i, j] * scale + S[bx * block + i]
            T.copy(y, Y[by, bx * block, 0])

    return program


def affine_reference(X: torch.Tensor, S: torch.Tensor, limit: int, scale: float) -> torch.Tensor:
    Y = X.double() * scale + S.double()[:, None]
    Y[:, limit:] = 0
    return Y


# ---- warps


def warp_exchanges() -> Any:
    """Four shuffles of X, and sums, maxima and minima over warps, for two warps: Y[7, 64]."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([64], "float32"), Y: T.Tensor([7, 64], "float32")):
        with T.Kernel(1, threads=64) as _:
            t = T.get_thread_binding()
            x = T.alloc_local([1], "float32")
            x[0] = X[t]
            Y[0, t] = T.shfl_xor(x[0], 5)
            Y[1, t] = T.shfl_down(x[0], 3)
            Y[2, t] = T.shfl_up(x[0], 2)
            Y[3, t] = T.shfl_sync(x[0], 7)
            Y[4, t] = T.warp_reduce_sum(x[0])
            Y[5, t] = T.warp_reduce_max(x[0])
            Y[6, t] = T.warp_reduce_min(x[0])

    return program


def warp_exchanges_reference(X: torch.Tensor) -> torch.Tensor:
    X, lane = X.double().view(2, 32), torch.arange(32)
    rows = [X[:, lane ^ 5], X[:, torch.where(lane < 29, lane + 3, lane)], X[:, torch.where(lane < 2, lane, lane - 2)]]
    rows += [x.view(2, 1).expand(2, 32) for x in (X[:, 7], X.sum(1), X.amax(1), X.amin(1))]
    return torch.stack(rows).view(7, 64)


def warp_votes() -> Any:
    """Votes, ballots and matches of one value a thread, for two warps: Y[6, 64], as int32."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([64], "int32"), Y: T.Tensor([6, 64], "int32")):
        with T.Kernel(1, threads=64) as _:
            t = T.get_thread_binding()
            x = T.alloc_local([1], "int32")
            x[0] = X[t]
            Y[0, t] = T.Cast("int32", T.any_sync(x[0] == 3) != 0)
            Y[1, t] = T.Cast("int32", T.all_sync(x[0] < 9) != 0)
            Y[2, t] = T.Cast("int32", T.ballot_sync(x[0] > 2))
            Y[3, t] = T.Cast("int32", T.match_any_sync(x[0]))
            Y[4, t] = T.Cast("int32", T.match_all_sync(x[0]))
            Y[5, t] = T.warp_reduce_bitor(x[0])

    return program


def block_votes() -> Any:
    """Votes of a whole block of two warps: Y[3, 64], as int32."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([64], "int32"), Y: T.Tensor([3, 64], "int32")):
        with T.Kernel(1, threads=64) as _:
            t = T.get_thread_binding()
            x = T.alloc_local([1], "int32")
            x[0] = X[t]
            Y[0, t] = T.syncthreads_count(x[0] > 2)
            Y[1, t] = T.Cast("int32", T.syncthreads_and(x[0] < 9) != 0)
            Y[2, t] = T.Cast("int32", T.syncthreads_or(x[0] == 3) != 0)

    return program


def block_votes_reference(X: torch.Tensor) -> torch.Tensor:
    return torch.stack([(X > 2).sum(), (X < 9).all(), (X == 3).any()]).int().view(3, 1).expand(3, 64)


def warp_votes_reference(X: torch.Tensor) -> torch.Tensor:
    bit = (2 ** torch.arange(32)).view(1, 32)

    def as_int32(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x >= 2**31, x - 2**32, x)

    def each(x: torch.Tensor) -> torch.Tensor:  # [2], one number a warp
        return as_int32(x.long()).view(2, 1).expand(2, 32)

    W = X.long().view(2, 32)
    same = (W[:, :, None] == W[:, None, :]).long()
    ors = [reduce(or_, row) for row in W.tolist()]
    agree = (W[:, :1] == W).all(1)
    rows = [each((W == 3).any(1)), each((W < 9).all(1)), each(((W > 2) * bit).sum(1))]
    rows += [as_int32((same * bit).sum(2)), each(torch.where(agree, 2**32 - 1, 0))]
    return torch.stack([*rows, each(torch.tensor(ors))]).view(6, 64).int()


# ---- atomics


def atomic_histogram(n: int, bins: int, dtype: str = "float32") -> Any:
    """Of n numbers with bin numbers: sums and the largest and smallest number of each bin, and how many there are."""
    import tilelang.language as T

    @T.prim_func
    def program(
        X: T.Tensor([n], dtype),
        I: T.Tensor([n], "int32"),
        total: T.Tensor([bins], dtype),
        most: T.Tensor([bins], dtype),
        least: T.Tensor([bins], dtype),
        count: T.Tensor([bins], "int32"),
        rank: T.Tensor([n], "int32"),
    ):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                T.atomic_add(total[I[bx * 128 + i]], X[bx * 128 + i])
                T.atomic_max(most[I[bx * 128 + i]], X[bx * 128 + i])
                T.atomic_min(least[I[bx * 128 + i]], X[bx * 128 + i])
                rank[bx * 128 + i] = T.atomic_add(count[I[bx * 128 + i]], 1, return_prev=True)

    return program


def shared_histogram(n: int, bins: int) -> Any:
    """How many of n numbers fall into each bin: counted in shared memory, then added to Y, which is zero before."""
    import tilelang.language as T

    @T.prim_func
    def program(X: T.Tensor([n], "int32"), Y: T.Tensor([bins], "int32")):
        with T.Kernel(n // 128, threads=128) as bx:
            t = T.get_thread_binding()
            count = T.alloc_shared([bins], "int32")
            if t < bins:
                count[t] = 0
            T.sync_threads()
            T.atomic_add(count[X[bx * 128 + t]], 1)
            T.sync_threads()
            if t < bins:
                T.atomic_add(Y[t], count[t])

    return program


# ---- linear attention


def linear_attention(H: int, D: int, dtype: str = "float16", stages: int = 0, feature: bool = False) -> Any:
    """O_t = sum over s <= t of (q_t . k_s) v_s, chunk by chunk, the state in registers; B and L (tokens) are dynamic.

    With `feature`, q and k are elu(x) + 1 first.
    """
    import tilelang.language as T

    B, L, C = T.dynamic("B"), T.dynamic("L"), CHUNK

    @T.prim_func
    def program(
        Q: T.Tensor([B, L, H, D], dtype),
        K: T.Tensor([B, L, H, D], dtype),
        V: T.Tensor([B, L, H, D], dtype),
        O: T.Tensor([B, L, H, D], dtype),
    ):
        with T.Kernel(H, B, threads=128) as (h, b):
            q = T.alloc_shared([C, D], dtype)
            k = T.alloc_shared([C, D], dtype)
            v = T.alloc_shared([C, D], dtype)
            weights = T.alloc_shared([C, C], dtype)
            state_shared = T.alloc_shared([D, D], dtype)
            scores = T.alloc_fragment([C, C], "float32")
            state = T.alloc_fragment([D, D], "float32")  # sum of k_s v_s over the chunks before
            o = T.alloc_fragment([C, D], "float32")
            T.clear(state)
            for n in T.Pipelined(T.ceildiv(L, C), num_stages=stages):
                T.copy(Q[b, n * C : (n + 1) * C, h, 0:D], q)
                T.copy(K[b, n * C : (n + 1) * C, h, 0:D], k)
                T.copy(V[b, n * C : (n + 1) * C, h, 0:D], v)
                if feature:
                    for i, j in T.Parallel(C, D):
                        q[i, j] = T.if_then_else(q[i, j] > 0, q[i, j] + T.Cast(dtype, 1), T.exp(q[i, j]))
                        k[i, j] = T.if_then_else(k[i, j] > 0, k[i, j] + T.Cast(dtype, 1), T.exp(k[i, j]))
                T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    scores[i, j] = T.if_then_else(i >= j, scores[i, j], 0)
                T.copy(scores, weights)
                T.copy(state, state_shared)
                T.gemm(weights, v, o, clear_accum=True)
                T.gemm(q, state_shared, o)
                T.gemm(k, v, state, transpose_A=True)
                T.copy(o, O[b, n * C : (n + 1) * C, h, 0:D])

    return program


def linear_attention_reference(Q, K, V, feature: bool = False) -> torch.Tensor:
    Q, K, V = Q.double(), K.double(), V.double()
    if feature:
        Q, K = torch.nn.functional.elu(Q) + 1, torch.nn.functional.elu(K) + 1
    return torch.einsum("bhlm,bmhd->blhd", torch.einsum("blhd,bmhd->bhlm", Q, K).tril(), V)


def gated_linear_attention(H: int, D: int, dtype: str = "float16", stages: int = 0) -> Any:
    """O_t = sum over s <= t of exp(g_{s+1} + ... + g_t) (q_t . k_s) v_s; R_t, the sum of those weights in t's chunk.

    N, zero before, receives the sum of R over all sequences by atomic addition. B and L (tokens) are dynamic.
    """
    import tilelang.language as T

    B, L, C = T.dynamic("B"), T.dynamic("L"), CHUNK

    @T.prim_func
    def program(
        Q: T.Tensor([B, L, H, D], dtype),
        K: T.Tensor([B, L, H, D], dtype),
        V: T.Tensor([B, L, H, D], dtype),
        G: T.Tensor([B, L, H], "float32"),
        O: T.Tensor([B, L, H, D], dtype),
        R: T.Tensor([B, L, H], "float32"),
        N: T.Tensor([H], "float32"),
    ):
        with T.Kernel(H, B, threads=128) as (h, b):
            q = T.alloc_shared([C, D], dtype)
            k = T.alloc_shared([C, D], dtype)
            v = T.alloc_shared([C, D], dtype)
            gate = T.alloc_shared([1, C], "float32")
            decay = T.alloc_shared([1, C], "float32")  # gates summed up from the start of the chunk
            weights = T.alloc_shared([C, C], dtype)
            k_decayed = T.alloc_shared([C, D], dtype)
            state_shared = T.alloc_shared([D, D], dtype)
            scores = T.alloc_fragment([C, C], "float32")
            state = T.alloc_fragment([D, D], "float32")
            o = T.alloc_fragment([C, D], "float32")
            row = T.alloc_fragment([C], "float32")
            total = T.alloc_fragment([1], "float32")
            T.clear(state)
            for n in T.Pipelined(T.ceildiv(L, C), num_stages=stages):
                T.copy(Q[b, n * C : (n + 1) * C, h, 0:D], q)
                T.copy(K[b, n * C : (n + 1) * C, h, 0:D], k)
                T.copy(V[b, n * C : (n + 1) * C, h, 0:D], v)
                for i in T.Parallel(C):
                    gate[0, i] = T.if_then_else(n * C + i < L, G[b, n * C + i, h], 0)
                T.cumsum(gate, decay, dim=1)
                T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    scores[i, j] = T.if_then_else(i >= j, scores[i, j] * T.exp(decay[0, i] - decay[0, j]), 0)
                T.reduce_sum(scores, row, dim=1)
                for i in T.Parallel(C):
                    if n * C + i < L:
                        R[b, n * C + i, h] = row[i]
                T.reduce_sum(row, total, dim=0)
                for i in T.Parallel(1):
                    T.atomic_add(N[h], total[0])
                T.copy(scores, weights)
                T.copy(state, state_shared)
                T.gemm(q, state_shared, o, clear_accum=True)
                for i, j in T.Parallel(C, D):
                    o[i, j] = o[i, j] * T.exp(decay[0, i])
                T.gemm(weights, v, o)
                for i, j in T.Parallel(C, D):
                    k_decayed[i, j] = k[i, j] * T.exp(decay[0, C - 1] - decay[0, i])
                for i, j in T.Parallel(D, D):
                    state[i, j] = state[i, j] * T.exp(decay[0, C - 1])
                T.gemm(k_decayed, v, state, transpose_A=True)
                T.copy(o, O[b, n * C : (n + 1) * C, h, 0:D])

    return program


def gated_linear_attention_reference(Q, K, V, G) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    Q, K, V = Q.double(), K.double(), V.double()
    decay = G.double().cumsum(1).permute(0, 2, 1)  # [B, H, L]
    weights = torch.einsum("blhd,bmhd->bhlm", Q, K) * (decay[..., :, None] - decay[..., None, :]).exp()
    weights = weights.tril()
    chunk = torch.arange(Q.shape[1]) // CHUNK
    within = (weights * (chunk[:, None] == chunk)).sum(-1).permute(0, 2, 1)
    return torch.einsum("bhlm,bmhd->blhd", weights, V), within, within.sum((0, 1))
