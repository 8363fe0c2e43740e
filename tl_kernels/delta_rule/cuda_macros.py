"""Tile programs of the delta rule: rows made unit vectors, and unit triangular systems solved in shared memory.

Imports tilelang; import it inside a builder.

A system is solved by substitution, 16 rows at a time: what rows found before have of them by a product of tiles, the
rest row by row, in fp32 and in registers, a column a thread. No inverse is formed.
"""

import tilelang.language as T

from tl_kernels import cuda_macros as m
from tl_kernels.delta_rule.norm import NORM_EPS
from tl_kernels.delta_rule.cuda_sizes import PAD, ROWS


@T.macro
def normalized(x_f, square_f, inverse_f, rows, columns, given):
    """Rows of x_f over their lengths if given, a condition; inverse_f = one over the length, or 1."""
    for i, d in T.Parallel(rows, columns):
        square_f[i, d] = x_f[i, d] * x_f[i, d]
    T.reduce_sum(square_f, inverse_f, dim=1)
    for i in T.Parallel(rows):
        inverse = T.rsqrt(inverse_f[i] + T.float32(NORM_EPS))
        inverse_f[i] = T.Select(given, inverse, T.float32(1))
    for i, d in T.Parallel(rows, columns):
        x_f[i, d] *= inverse_f[i]


class Rows(m.Tile):
    """Rows of q or k as an operand, copied a chunk ahead if `ahead`."""

    def __init__(self, C, columns, dtype, io, ahead=False):
        super().__init__(C, columns, dtype)
        self.next = m.Ahead(C, columns, io, ahead)
        self.x_f, self.square_f = (T.alloc_fragment([C, columns], "float32") for _ in "xs")
        self.inverse_f = T.alloc_fragment([C], "float32")  # one over their lengths, if those are asked for


@T.macro
def take_rows(tile, x, t, left, head, given):
    """tile = rows of x from t on, over their lengths if given, a condition; zero from row `left` on."""
    m.load(tile.x_f, tile.next, x, t, head, 0)
    m.cleared(tile.x_f, tile.rows, tile.columns, left)
    normalized(tile.x_f, tile.square_f, tile.inverse_f, tile.rows, tile.columns, given)
    m.fill(tile, tile.x_f)


@T.macro
def norm_slope(dx_f, product_f, sum_f, tile, inverse_s, given):
    """The gradient of rows, from that of the unit vectors in a tile: dx = (dx - u <u, dx>) / length, if given."""
    if given:
        m.times_tile(product_f, dx_f, tile)
        T.reduce_sum(product_f, sum_f, dim=1)
        for i, d in T.Parallel(tile.rows, tile.columns):
            if tile.exact:
                dx_f[i, d] = (dx_f[i, d] - (tile.high[i, d] + tile.low[i, d]) * sum_f[i]) * inverse_s[i]
            else:
                dx_f[i, d] = (dx_f[i, d] - T.cast(tile.high[i, d], "float32") * sum_f[i]) * inverse_s[i]


@T.macro
def take_columns(gates, beta_s, g, beta, t, last, head, given):
    """Gates of the tokens from t up to `last` and their sums, and beta; zeros behind it, and for gates unless given."""
    for i in T.Parallel(gates.rows):
        gates.raw[i] = T.float32(0)
        beta_s[i] = T.if_then_else(t + i < last, beta[t + i, head], T.float32(0))
    if given:
        for i in T.Parallel(gates.rows):
            gates.raw[i] = T.if_then_else(t + i < last, g[t + i, head], T.float32(0))
    T.sync_threads()
    m.sum_gates(gates, last - t)


def alloc_solved(rows, columns):
    """fp32 in shared memory for what is solved for; rows lie so that they do not share banks as accumulators lie."""
    return m.alloc_shared([rows, columns + PAD], "float32")


class System:
    """A triangular system of C rows with ones on its diagonal, which are not stored.

    reverse: what is stored lies above the diagonal, and the last row is found first.
    """

    def __init__(self, C, dtype, reverse=False):
        self.matrix = m.Tile(C, C, dtype)
        self.diagonal = m.alloc_shared([C, ROWS], "float32")  # its blocks on the diagonal
        self.rows, self.reverse = C, reverse

    def at(self, first, i):
        """The row of a block from `first` on that is found after i others."""
        return first + (ROWS - 1 - i if self.reverse else i)


@T.macro
def fill_system(system, A):
    """The system = the fragment A, which is zero elsewhere."""
    m.fill(system.matrix, A)
    for i, j in T.Parallel(system.rows, system.rows):
        if i // ROWS == j // ROWS:
            system.diagonal[i, j % ROWS] = A[i, j]


@T.macro
def solve(system, x_s, found, acc):
    """x_s = the solution, where it holds the right side; found = the same as an operand.

    x_s is fp32 in shared memory, acc a fragment of 16 rows.
    """
    _solve_block(system, x_s, found, acc, 0)
    if system.rows > ROWS:
        _solve_block(system, x_s, found, acc, 1)
    if system.rows > 2 * ROWS:
        _solve_block(system, x_s, found, acc, 2)
        _solve_block(system, x_s, found, acc, 3)


@T.macro
def store_solved(x, x_s, found, t, last, head, column, width):
    """As store of tl_kernels/cuda_macros.py, of what solve has left: in float32 of x_s, whose rows are longer."""
    exact = x_s if found.exact else found.high
    for i, j in T.Parallel(found.rows, found.columns):
        if (t + i < last) & (column + j < width):
            x[t + i, head, column + j] = exact[i, j]


@T.macro
def _solve_block(system, x_s, found, acc, n):
    """The n-th 16 rows to be found."""
    first = system.rows - (n + 1) * ROWS if system.reverse else n * ROWS
    begin = first + ROWS if system.reverse else 0
    end = begin + n * ROWS
    a, tile = system.matrix, found
    if n > 0:
        T.clear(acc)
        T.gemm(a.high[first : first + ROWS, begin:end], tile.high[begin:end, 0 : tile.columns], acc)
        if tile.exact:
            T.gemm(a.low[first : first + ROWS, begin:end], tile.high[begin:end, 0 : tile.columns], acc)
            T.gemm(a.high[first : first + ROWS, begin:end], tile.low[begin:end, 0 : tile.columns], acc)
        for i, j in T.Parallel(ROWS, tile.columns):
            x_s[first + i, j] -= acc[i, j]
        T.sync_threads()
    thread = T.get_thread_binding()
    if thread < tile.columns:
        column = T.alloc_local([ROWS], "float32")
        for i in T.unroll(ROWS):
            column[i] = x_s[system.at(first, i), thread]
        for i in T.unroll(ROWS - 1):
            for r in T.unroll(ROWS - 1 - i):
                column[i + 1 + r] -= system.diagonal[system.at(first, i + 1 + r), system.at(0, i)] * column[i]
        for i in T.unroll(ROWS):
            x_s[system.at(first, i), thread] = column[i]
            if tile.exact:
                tile.high[system.at(first, i), thread] = m.high_part(column[i])
                tile.low[system.at(first, i), thread] = column[i] - m.high_part(column[i])
            else:
                tile.high[system.at(first, i), thread] = T.cast(column[i], tile.high.dtype)
    T.sync_threads()
