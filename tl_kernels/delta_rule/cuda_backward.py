"""Backward of the gated delta rule on NVIDIA GPUs: one walk from the end makes all gradients.

It walks whole sequences, or spans whose gradient behind them is known (cuda_chunks.py).

With Y, S and the letters of cuda.py, R the gradient of the state after the chunk, and Z = B X,

    X + N^T B X = scale M^T dO + l * K R             R = f_C R + scale Q^T (f * dO) - K^T (f * Z)
    P = scale D * dO (B Y)^T, lower                  G = -D * Z (B Y)^T, strictly lower
    dQ = P K + scale f * dO S^T                      dK = P^T Q + (l * B Y) R^T - f * Z S^T + (G + G^T) K
    dV = Z                                           dbeta_i = x_i y_i^T

X is found by back substitution (cuda_macros.py). The gradient of g_t is the sum of all that crosses token t, as in
tl_kernels/simple_gla/cuda_backward.py, with W = P * Q K^T + G * K K^T and

    c_i = f_i (scale q_i S dO_i^T - k_i S z_i^T)     d_j = l_j beta_j y_j R^T k_j^T

Y, and S before each chunk, are what forward has left, rounded to the tiles' type; v itself is not needed. Columns of X
do not depend on each other, nor do those of R; all other gradients are sums over columns. So a block of V is a program
of its own, which leaves its part of them, as it does for each of the value heads that share a q/k head; the caller adds
them up. Each block beyond the first reads q and k again, and writes dQ and dK.
"""

from tl_kernels.cuda_sizes import Blocks, tensor_cores, tile_dtype
from tl_kernels.delta_rule.cuda_sizes import ROWS, backward_configs, rows_of
from tl_kernels.spec import Kernel, Problem


def backward(p: Problem, c: Blocks):
    """dQ, dK, dV, dbeta and, where gates_wanted > 0, dg; where initial > 0, the gradient of the initial state."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m
    from tl_kernels.delta_rule import cuda_macros as d

    C, BV, io, f32, tile = c.C, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V, KP = p.K, p.V, rows_of(p.K)
    NV, ahead = -(-V // BV), c.stages == 1
    sizes = ("tokens", "H", "HV", "parts", "G", "N0", "N1", "chunks", "rows", "M")
    tokens, H, HV, parts, G, N0, N1, chunks, rows, M = (T.dynamic(n) for n in sizes)

    @T.macro
    def sum_from(total, A, products, cs, ones):
        """total_i = the sum over j < i of all rows from i on of A times the products, element by element. A is lost."""
        for i, j in T.Parallel(C, C):
            A[i, j] *= products[i, j]
        m.fill(cs, A)
        T.clear(A)
        T.gemm(ones, cs.high, A)
        if cs.exact:
            T.gemm(ones, cs.low, A)
        for i, j in T.Parallel(C, C):
            A[i, j] = T.Select(j < i, A[i, j], T.float32(0))
        T.reduce_sum(A, total, dim=1)

    @T.prim_func
    def backward_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        g: T.Tensor([G, HV], f32),
        beta: T.Tensor([tokens, HV], f32),
        y: T.Tensor([tokens, HV, V], tile),
        dout: T.Tensor([tokens, HV, V], io),
        states: T.Tensor([chunks, HV, K, V], tile),
        dq: T.Tensor([tokens, parts, K], io),
        dk: T.Tensor([tokens, parts, K], io),
        dv: T.Tensor([tokens, HV, V], io),
        dg: T.Tensor([rows, HV, NV], f32),
        dbeta: T.Tensor([tokens, HV, NV], f32),
        dkv1: T.Tensor([N1, HV, K, V], f32),
        dkv0: T.Tensor([N0, HV, K, V], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        final: T.int32,
        initial: T.int32,
        gated: T.int32,
        gates_wanted: T.int32,
        norm: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * HV * NV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NV, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_b = i_p % NV
            i_v = i_b * BV
            i_part = i_h * NV + i_b
            qs = d.Rows(C, KP, tile, io, ahead)
            ks = d.Rows(C, KP, tile, io, ahead)
            dos = m.Tile(C, BV, tile)
            ys = m.Tile(C, BV, tile)
            xs = m.Tile(C, BV, tile)
            ps = m.Tile(C, C, tile)
            us = m.Tile(C, C, tile, twin=False)  # ones for i <= j: what is from a token on, summed
            one = T.alloc_shared([1], f32)
            rs = m.Tile(KP, BV, tile, twin=False)  # R, then S, then R
            system = d.System(C, tile, reverse=True)  # I + N^T B
            cs = system.matrix  # M before, G behind
            x_s = d.alloc_solved(C, BV)
            dk_s = T.alloc_shared([C, KP], io)  # dq before dk
            dv_s = dk_s if BV == KP else T.alloc_shared([C, BV], io)
            dout_next = m.Ahead(C, BV, io, ahead)
            y_next = m.Ahead(C, BV, tile, ahead)
            gates = m.Gates(C)
            beta_next = T.alloc_shared([C], f32)
            beta_s = T.alloc_shared([C], f32)
            q_inverse = T.alloc_shared([C], f32)
            k_inverse = T.alloc_shared([C], f32)
            c_s = T.alloc_shared([C], f32)
            d_s = T.alloc_shared([C], f32)
            e_s = T.alloc_shared([C], f32)
            R = T.alloc_fragment([KP, BV], f32)
            acc = T.alloc_fragment([ROWS, BV], f32)
            A = T.alloc_fragment([C, C], f32)
            products = T.alloc_fragment([C, C], f32)
            dq_f = T.alloc_fragment([C, KP], f32)
            dk_f = T.alloc_fragment([C, KP], f32)
            from_f = T.alloc_fragment([C, KP], f32)  # of dk, from a state
            dout_f = T.alloc_fragment([C, BV], f32)
            y_f = T.alloc_fragment([C, BV], f32)
            x_f = T.alloc_fragment([C, BV], f32)
            z_f = T.alloc_fragment([C, BV], f32)
            part_f = T.alloc_fragment([C, KP], f32)
            sum_f = T.alloc_fragment([C], f32)
            c_f = T.alloc_fragment([C], f32)
            d_f = T.alloc_fragment([C], f32)
            p_f = T.alloc_fragment([C], f32)
            dbeta_f = T.alloc_fragment([C], f32)
            dg_f = T.alloc_fragment([C], f32)
            across = T.alloc_fragment([1], f32)  # <S, R>
            where = T.alloc_local([3], "int32")
            slot = T.alloc_local([1], "int32")
            T.annotate_layout({x: make_swizzled_layout(x) for x in (dk_s, dv_s)})

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.take_state(R, KP, BV, dkv1, final > 0, i_s, i_h, (0, i_v))
            count = T.ceildiv(where[2] - where[1], C)
            end = where[1] + (count - 1) * C
            m.find_chunk(slot, where, cu_seqlens, length, C)
            slot[0] += count - 1
            for i, j in T.Parallel(C, C):
                us.high[i, j] = T.if_then_else(i <= j, T.cast(1, tile), T.cast(0, tile))
            for i in T.Parallel(C):
                gates.raw[i] = T.float32(0)
                if i == 0:
                    one[i] = T.float32(1)
            T.sync_threads()
            if count > 0:
                m.fetch(qs.next, q, end, i_q, 0)
                m.fetch(ks.next, k, end, i_q, 0)
                m.fetch(dout_next, dout, end, i_h, i_v)
                m.fetch(y_next, y, end, i_h, i_v)
                if gated > 0:
                    m.fetch_column(gates.raw, g, end, C, i_h)
                m.fetch_column(beta_next, beta, end, C, i_h)

            for n in T.serial(count):
                t = end - n * C
                m.await_fetched(True)
                m.sum_gates(gates, where[2] - t)
                # rows of other sequences are zero
                for i in T.Parallel(C):
                    beta_s[i] = T.Select(t + i < where[2], beta_next[i], T.float32(0))
                m.load(dout_f, dout_next, dout, t, i_h, i_v)
                m.cleared(dout_f, C, BV, where[2] - t)
                m.fill(dos, dout_f)
                m.load(y_f, y_next, y, t, i_h, i_v)
                m.cleared(y_f, C, BV, where[2] - t)
                m.fill(ys, y_f)
                d.take_rows(qs, q, t, where[2] - t, i_q, norm > 0)
                T.copy(qs.inverse_f, q_inverse)
                d.take_rows(ks, k, t, where[2] - t, i_q, norm > 0)
                T.copy(ks.inverse_f, k_inverse)
                T.sync_threads()  # all have taken this chunk
                if n + 1 < count:
                    m.fetch(qs.next, q, t - C, i_q, 0)
                    m.fetch(ks.next, k, t - C, i_q, 0)
                    m.fetch(dout_next, dout, t - C, i_h, i_v)
                    m.fetch(y_next, y, t - C, i_h, i_v)
                    if gated > 0:
                        m.fetch_column(gates.raw, g, t - C, C, i_h)
                    m.fetch_column(beta_next, beta, t - C, C, i_h)

                # P, M, X
                T.clear(products)
                m.multiply(products, qs, ks, transpose_B=True)
                T.clear(A)
                m.multiply(A, dos, ys, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    A[i, j] = T.Select(j <= i, A[i, j] * gates.decay(j, i) * beta_s[j] * scale, T.float32(0))
                m.fill(ps, A)
                if gates_wanted > 0:
                    sum_from(p_f, A, products, cs, us.high)
                for i, j in T.Parallel(C, C):
                    A[i, j] = T.Select(j <= i, products[i, j] * gates.decay(j, i) * scale, T.float32(0))
                m.fill(cs, A)
                T.clear(x_f)
                m.multiply_state(x_f, ks, R, rs)
                for i, j in T.Parallel(C, BV):
                    x_f[i, j] *= gates.last(i)
                T.sync_threads()  # all are done with R
                T.async_copy(states[slot[0] - n, i_h, 0:KP, i_v : i_v + BV], rs.high)
                m.multiply(x_f, cs, dos, transpose_A=True)
                T.copy(x_f, x_s[0:C, 0:BV])
                T.clear(products)
                m.multiply(products, ks, ks, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    A[i, j] = T.Select(i < j, products[i, j] * gates.decay(i, j) * beta_s[j], T.float32(0))
                d.fill_system(system, A)
                T.sync_threads()
                d.solve(system, x_s, xs, acc)
                T.copy(x_s[0:C, 0:BV], x_f)
                m.times_tile(z_f, x_f, ys)
                T.reduce_sum(z_f, dbeta_f, dim=1)
                for i in T.Parallel(C):
                    if t + i < where[2]:
                        dbeta[t + i, i_h, i_b] = dbeta_f[i]
                for i, j in T.Parallel(C, BV):
                    x_f[i, j] *= beta_s[i]
                T.copy(x_f, dv_s)
                m.store(dv, dv_s, t, where[2], i_h, i_v, V)

                # from S
                m.await_fetched(True)
                if gates_wanted > 0:
                    m.inner_product(across, R, rs)
                T.clear(dq_f)
                m.multiply_kept(dq_f, dos, rs)
                for i, j in T.Parallel(C, KP):
                    dq_f[i, j] *= gates.first(i) * scale
                if gates_wanted > 0:
                    m.times_tile(part_f, dq_f, qs)
                    T.reduce_sum(part_f, c_f, dim=1)
                    T.copy(c_f, c_s)
                m.multiply(dq_f, ps, ks)
                d.norm_slope(dq_f, part_f, sum_f, qs, q_inverse, norm > 0)
                T.copy(dq_f, dk_s)
                m.store(dq, dk_s, t, where[2], i_part, 0, K)

                # from the chunk
                T.clear(A)
                m.multiply(A, xs, ys, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    factor = gates.decay(j, i) * beta_s[i] * beta_s[j]
                    A[i, j] = T.Select(j < i, -A[i, j] * factor, T.float32(0))
                m.fill(cs, A)
                T.clear(dk_f)
                m.multiply(dk_f, ps, qs, transpose_A=True)
                m.multiply(dk_f, cs, ks)
                m.multiply(dk_f, cs, ks, transpose_A=True)
                if gates_wanted > 0:
                    T.clear(products)
                    m.multiply(products, ks, ks, transpose_B=True)
                    sum_from(dg_f, A, products, ps, us.high)
                    for i in T.Parallel(C):
                        dg_f[i] += p_f[i]

                if rs.exact:  # S is lost
                    T.copy(states[slot[0] - n, i_h, 0:KP, i_v : i_v + BV], rs.high, annotations=m.WITHOUT_TMA)
                T.clear(from_f)
                m.multiply_kept(from_f, xs, rs)
                for i, j in T.Parallel(C, KP):
                    from_f[i, j] *= -gates.first(i) * beta_s[i]
                    dk_f[i, j] += from_f[i, j]
                if gates_wanted > 0:  # with k as the products see it
                    m.times_tile(part_f, from_f, ks)
                    T.reduce_sum(part_f, c_f, dim=1)
                    T.copy(c_f, e_s)

                # from R: as it was, but for a factor that the compiler does not know, lest it keeps what it has rounded
                for i, j in T.Parallel(KP, BV):
                    R[i, j] *= one[0]
                T.clear(from_f)
                m.multiply_state(from_f, ys, R, rs, transpose_B=True)
                for i, j in T.Parallel(C, KP):
                    from_f[i, j] *= gates.last(i) * beta_s[i]
                    dk_f[i, j] += from_f[i, j]
                if gates_wanted > 0:
                    m.times_tile(part_f, from_f, ks)
                    T.reduce_sum(part_f, d_f, dim=1)
                    T.copy(d_f, d_s)

                d.norm_slope(dk_f, part_f, sum_f, ks, k_inverse, norm > 0)
                T.copy(dk_f, dk_s)
                m.store(dk, dk_s, t, where[2], i_part, 0, K)

                if gates_wanted > 0:
                    for i, j in T.Parallel(C, C):
                        c_j = T.Select(t + j < where[2], c_s[j] + e_s[j], T.float32(0))
                        A[i, j] = T.Select(j < i, d_s[j], c_j)
                    T.reduce_sum(A, sum_f, dim=1)
                    for i in T.Parallel(C):
                        if t + i < where[2]:
                            dg[t + i, i_h, i_b] = dg_f[i] + sum_f[i] + across[0] * gates.whole

                for i, j in T.Parallel(KP, BV):
                    R[i, j] *= gates.whole
                for i, j in T.Parallel(C, BV):
                    dout_f[i, j] = gates.first(i) * scale
                m.times_tile(dout_f, dout_f, dos)
                m.fill(ys, dout_f)
                m.multiply(R, qs, ys, transpose_A=True)
                for i, j in T.Parallel(C, BV):
                    x_f[i, j] = x_s[i, j] * -gates.first(i) * beta_s[i]
                m.fill(xs, x_f)
                m.multiply(R, ks, xs, transpose_A=True)

            if initial > 0:
                T.copy(R, dkv0[i_s, i_h, 0:KP, i_v : i_v + BV])

    return backward_kernel


BACKWARD = Kernel("delta_rule.backward", backward, backward_configs, expects=tensor_cores)
