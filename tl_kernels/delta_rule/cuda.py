"""The gated delta rule on NVIDIA GPUs: a program walks the chunks of one sequence, value head and block of V.

    Sbar = exp(g_t) S_{t-1}     u_t = beta_t (v_t - Sbar^T k_t)     S_t = Sbar + k_t u_t^T     o_t = scale q_t^T S_t

(Yang et al. 2024, arXiv 2412.06464, eq. 10.) With S the state before the chunk, B = diag(beta), and decays D, f and l
as in tl_kernels/simple_gla/cuda.py,

    M = D * Q K^T, lower            N = D * K K^T, strictly lower

    Y + N B Y = V - f * K S         O = scale (M B Y + f * Q S)         S = f_C S + K^T (l * B Y)

Columns of Y do not depend on each other, nor do those of S, so blocks of V are programs of their own. Y is found by
forward substitution on 16 rows at a time: what earlier rows have found by a product of tiles, the rest row by row, a
thread a column, in fp32. No inverse is formed.

S stays in registers in fp32 and goes through shared memory, rounded to the tiles' type, as an operand; so does Y, which
is kept in fp32 beside it. Tiles are those of simple_gla. A sequence is walked as a whole: what a span does to the state
is a matrix, which a scan would have to multiply.
"""

from collections.abc import Sequence
from dataclasses import replace

from tl_kernels.cuda_sizes import BYTES, Blocks, Layout, blocks_of, fitting, gated, padded, tensor_cores, tile_dtype
from tl_kernels.delta_rule import cuda_decode
from tl_kernels.delta_rule.norm import NORM_EPS
from tl_kernels.spec import Kernel, Problem, Target

ROWS = 16  # of a block of the substitution


def _rows_of(K: int) -> int:
    """Rows of the state in a tile: TileLang 0.1.15 finds no layout in which to sum rows of 192."""
    return 256 if padded(K) == 192 else padded(K)


def configs(p: Problem, target: Target) -> Sequence[Blocks]:
    """Whole rows of V first: each block of V beyond the first reads q and k again.

    None where only chunks of 16 tokens fit, or so few columns that the warps cannot share 16 rows of them: tiles of
    float32 with a large K.
    """

    def layout(BK: int, BV: int) -> Layout:
        exact = 4 * BV // BYTES[p.dtype]  # Y in fp32, in columns of outputs
        return gated(2 * BK + BV, BV + exact, 2 * BK + BV)

    found = fitting(p, target, [(_rows_of(p.K), b) for b in sorted({64, *blocks_of(p.V)}, reverse=True)], layout)
    if tile_dtype(p) == "float32":  # at 128 threads a tile of 64 x 64 spills registers on sm_80
        found = [replace(c, threads=256) if c.BK * c.BV >= 64 * 64 else c for c in found]
    return [c for c in found if c.C > ROWS and 4 * c.BV >= c.threads]


def forward(p: Problem, c: Blocks):
    """O and the final state."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m

    C, BV, io, f32, tile = c.C, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V, KP = p.K, p.V, _rows_of(p.K)
    NV, ahead = -(-V // BV), c.stages == 1
    tokens, H, HV, N0, N1, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "N0", "N1", "M"))

    @T.macro
    def normalized(x_f, square_f, sum_f, norm):
        """Rows of x_f over their lengths where norm > 0."""
        for i, d in T.Parallel(C, KP):
            square_f[i, d] = x_f[i, d] * x_f[i, d]
        T.reduce_sum(square_f, sum_f, dim=1)
        for i, d in T.Parallel(C, KP):
            x_f[i, d] *= T.Select(norm > 0, T.rsqrt(sum_f[i] + T.float32(NORM_EPS)), T.float32(1))

    @T.macro
    def solve_block(ys, y_s, ns, n_s, acc, b):
        """Rows 16 b ... of Y, in y_s and as an operand in ys; y_s has the right side, n_s what is on N's diagonal."""
        first = b * ROWS
        if b > 0:
            T.clear(acc)
            T.gemm(ns.high[first : first + ROWS, 0:first], ys.high[0:first, 0:BV], acc)
            if ns.exact:
                T.gemm(ns.low[first : first + ROWS, 0:first], ys.high[0:first, 0:BV], acc)
                T.gemm(ns.high[first : first + ROWS, 0:first], ys.low[0:first, 0:BV], acc)
            for i, j in T.Parallel(ROWS, BV):
                y_s[first + i, j] -= acc[i, j]
            T.sync_threads()
        for j in T.Parallel(BV):
            for i in T.serial(1, ROWS):
                for t in T.serial(i):
                    y_s[first + i, j] -= n_s[first + i, t] * y_s[first + t, j]
        T.sync_threads()
        for i, j in T.Parallel(ROWS, BV):
            if ys.exact:
                ys.high[first + i, j] = m.high_part(y_s[first + i, j])
                ys.low[first + i, j] = y_s[first + i, j] - m.high_part(y_s[first + i, j])
            else:
                ys.high[first + i, j] = T.cast(y_s[first + i, j], tile)
        T.sync_threads()

    @T.prim_func
    def forward_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        v: T.Tensor([tokens, HV, V], io),
        g: T.Tensor([tokens, HV], f32),
        beta: T.Tensor([tokens, HV], f32),
        o: T.Tensor([tokens, HV, V], io),
        kv0: T.Tensor([N0, HV, K, V], f32),
        kv1: T.Tensor([N1, HV, K, V], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        initial: T.int32,
        final: T.int32,
        norm: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * NV, HV, threads=c.threads) as (i_sv, i_h):
            i_v = i_sv % NV * BV
            i_s = i_sv // NV
            i_q = T.truncdiv(i_h, T.truncdiv(HV, H))  # the q/k head that serves this value head
            qs = m.Tile(C, KP, tile)
            ks = m.Tile(C, KP, tile)
            ys = m.Tile(C, BV, tile)
            cs = m.Tile(C, C, tile)  # N B, then M B
            ss = m.Tile(KP, BV, tile, twin=False)
            y_s = T.alloc_shared([C, BV], f32)
            n_s = T.alloc_shared([C, ROWS], f32)
            out_s = T.alloc_shared([C, BV], io)
            q_next = m.Ahead(C, KP, io, ahead)
            k_next = m.Ahead(C, KP, io, ahead)
            v_next = m.Ahead(C, BV, io, ahead)
            gates = m.Gates(C)
            beta_next = T.alloc_shared([C], f32)
            beta_s = T.alloc_shared([C], f32)
            S = T.alloc_fragment([KP, BV], f32)
            num = T.alloc_fragment([C, BV], f32)
            acc = T.alloc_fragment([ROWS, BV], f32)
            A = T.alloc_fragment([C, C], f32)
            q_f = T.alloc_fragment([C, KP], f32)
            k_f = T.alloc_fragment([C, KP], f32)
            square_f = T.alloc_fragment([C, KP], f32)
            sum_f = T.alloc_fragment([C], f32)
            v_f = T.alloc_fragment([C, BV], f32)
            where = T.alloc_local([3], "int32")
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.take_state(S, KP, BV, kv0, initial > 0, i_s, i_h, (0, i_v))
            if where[1] < where[2]:
                m.fetch(q_next, q, where[1], i_q, 0)
                m.fetch(k_next, k, where[1], i_q, 0)
                m.fetch(v_next, v, where[1], i_h, i_v)
                m.fetch_column(gates.raw, g, where[1], C, i_h)
                m.fetch_column(beta_next, beta, where[1], C, i_h)

            for n in T.serial(T.ceildiv(where[2] - where[1], C)):
                t = where[1] + n * C
                m.await_fetched(True)
                m.sum_gates(gates, where[2] - t)
                for i in T.Parallel(C):
                    beta_s[i] = T.Select(t + i < where[2], beta_next[i], T.float32(0))
                m.load(q_f, q_next, q, t, i_q, 0)
                normalized(q_f, square_f, sum_f, norm > 0)
                m.fill(qs, q_f)
                m.load(k_f, k_next, k, t, i_q, 0)
                m.cleared(k_f, C, KP, where[2] - t)
                normalized(k_f, square_f, sum_f, norm > 0)
                m.fill(ks, k_f)
                m.load(v_f, v_next, v, t, i_h, i_v)
                m.cleared(v_f, C, BV, where[2] - t)
                T.sync_threads()  # all have taken this chunk
                if t + C < where[2]:
                    m.fetch(q_next, q, t + C, i_q, 0)
                    m.fetch(k_next, k, t + C, i_q, 0)
                    m.fetch(v_next, v, t + C, i_h, i_v)
                    m.fetch_column(gates.raw, g, t + C, C, i_h)
                    m.fetch_column(beta_next, beta, t + C, C, i_h)

                # Y
                T.clear(A)
                m.multiply(A, ks, ks, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    A[i, j] = T.Select(j < i, A[i, j] * gates.decay(j, i) * beta_s[j], T.float32(0))
                m.fill(cs, A)
                for i, j in T.Parallel(C, C):
                    if i // ROWS == j // ROWS:
                        n_s[i, j % ROWS] = A[i, j]
                T.clear(num)
                m.multiply_state(num, ks, S, ss)
                for i, j in T.Parallel(C, BV):
                    num[i, j] = v_f[i, j] - num[i, j] * gates.first(i)
                T.copy(num, y_s)
                T.sync_threads()
                solve_block(ys, y_s, cs, n_s, acc, 0)
                solve_block(ys, y_s, cs, n_s, acc, 1)
                if C > 2 * ROWS:
                    solve_block(ys, y_s, cs, n_s, acc, 2)
                    solve_block(ys, y_s, cs, n_s, acc, 3)

                # O
                T.clear(num)
                m.multiply_state(num, qs, S, ss, filled=True)
                for i, j in T.Parallel(C, BV):
                    num[i, j] *= gates.first(i) * scale
                T.clear(A)
                m.multiply(A, qs, ks, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    A[i, j] = T.Select(j <= i, A[i, j] * gates.decay(j, i) * beta_s[j] * scale, T.float32(0))
                m.fill(cs, A)
                m.multiply(num, cs, ys)
                T.copy(num, out_s)
                m.store(o, out_s, t, where[2], i_h, i_v, V)

                for i, j in T.Parallel(KP, BV):
                    S[i, j] *= gates.whole
                for i in T.Parallel(C):
                    gates.factors[i] = gates.last(i) * beta_s[i]
                for i, j in T.Parallel(C, BV):
                    v_f[i, j] = y_s[i, j] * gates.factors[i]
                m.fill(ys, v_f)
                m.multiply(S, ks, ys, transpose_A=True)

            if final > 0:
                T.copy(S, kv1[i_s, i_h, 0:KP, i_v : i_v + BV])

    return forward_kernel


FORWARD = Kernel("delta_rule.forward", forward, configs, expects=tensor_cores, whole=True)
KERNELS = (FORWARD, cuda_decode.DECODE)
