"""Tile programs whose launches differ from those of emulator/kernels.py. They are built, and not executed."""

from typing import Any


def two_stages(columns: int) -> Any:
    """Y = X + 1, then Z = 2 Y, in two kernels; the second one has more shared memory. The rows are dynamic."""
    import tilelang.language as T

    rows = T.dynamic("rows")

    @T.prim_func
    def program(
        X: T.Tensor([rows, columns], "float32"),
        Y: T.Tensor([rows, columns], "float32"),
        Z: T.Tensor([rows, columns], "float32"),
    ):
        with T.Kernel(rows, threads=128) as i:
            x = T.alloc_shared([columns], "float32")
            T.copy(X[i, 0:columns], x)
            for j in T.Parallel(columns):
                Y[i, j] = x[j] + 1.0
        with T.Kernel(T.ceildiv(rows, 4), threads=64) as i:
            y = T.alloc_shared([4, columns], "float32")
            T.copy(Y[i * 4 : i * 4 + 4, 0:columns], y)
            for k, j in T.Parallel(4, columns):
                if i * 4 + k < rows:
                    Z[i * 4 + k, j] = y[k, j] * 2.0

    return program


def rows_by_tiles(columns: int) -> Any:
    """Y = X through shared memory, 64 rows a block, by TMA where there is TMA. The rows are dynamic."""
    import tilelang.language as T

    rows = T.dynamic("rows")

    @T.prim_func
    def program(X: T.Tensor([rows, columns], "float16"), Y: T.Tensor([rows, columns], "float16")):
        with T.Kernel(T.ceildiv(rows, 64), threads=128) as i:
            x = T.alloc_shared([64, columns], "float16")
            T.copy(X[i * 64, 0], x)
            T.copy(x, Y[i * 64, 0])

    return program
