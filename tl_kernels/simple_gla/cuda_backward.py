"""Backward of scalar-gated linear attention on NVIDIA GPUs: one walk from the end for all gradients, or two.

With S the state before the chunk, R the gradient of the state after it, and decays D, f and l as in the forward pass:

    P = scale D * dO V^T      A = Q K^T      W = P * A
    dQ = P K + scale f * dO S^T      dK = P^T Q + l * V R^T      dV = (scale D * A)^T dO + l * K R
    S = f_C S + K^T (l * V)          R = f_C R + scale Q^T (f * dO)

The gradient of g_t is the sum of all that crosses token t, on its way from a key before it to a query from it on:

    dg_t = sum_{j < t <= i} W_ij + sum_{i >= t} c_i + sum_{j < t} d_j + f_C <S, R>
    c_i = scale f_i q_i S dO_i^T                     d_j = l_j v_j R^T k_j^T

The usual sum of q_i dq_i - k_i dk_i over all i >= t is the same in exact arithmetic; but where decays are strong it is
a small difference of large sums, and its rounding errors are carried on to all tokens before.

S is known walking forward and R walking from the end. `backward` walks from the end, reads the state before each chunk,
which the forward pass has left, and makes all gradients: it reads each tensor once. Where nobody has left states, or
few gradients are wanted, or K and V are too large for one program, two walks do it: backward_q, forward, leaves c, and
S before each chunk, rounded to the tiles' type, or neither where nobody asks for dg; the others walk from the end.
Chunks of all of them have one size, therefore.

dQ needs all of V for P, and so does dK: their programs own BK columns of K, and dg is a sum over those programs, taken
by the caller. dV needs all of K: its programs own BV columns of V. Where both fit into one program they are one kernel,
and there is `backward`. Every value head writes gradients of its own.
"""

from collections.abc import Sequence
from functools import lru_cache

from tl_kernels.cuda_sizes import Blocks, blocks_of, chunk_sizes, fitting, gated, padded, tensor_cores, tile_dtype
from tl_kernels.spec import Kernel, Problem, Target


def configs_q(p: Problem, target: Target) -> Sequence[Blocks]:
    return _chunked(p, target)[0]


def configs_all(p: Problem, target: Target) -> Sequence[Blocks]:
    """Of backward: those of backward_kv. Larger tiles of float32 spill registers."""
    found = configs_kv(p, target)
    return [c for c in found if tile_dtype(p) == "bfloat16" or c.BK * c.BV < 64 * 64]


def configs_kv(p: Problem, target: Target) -> Sequence[Blocks]:
    """None where K and V are too large for one program: then backward_k and backward_v do it."""
    return _chunked(p, target)[1]


def configs_k(p: Problem, target: Target) -> Sequence[Blocks]:
    return _chunked(p, target)[2]


def configs_v(p: Problem, target: Target) -> Sequence[Blocks]:
    shapes = [(padded(p.K), b) for b in blocks_of(p.V)]
    return fitting(p, target, shapes, lambda BK, BV: gated(2 * BK + BV, BV, 2 * BK + BV))


Found = tuple[Sequence[Blocks], Sequence[Blocks], Sequence[Blocks]]


@lru_cache(maxsize=256)
def _chunked(p: Problem, target: Target) -> Found:
    """Configs of backward_q, backward_kv and backward_k, with chunks of one size: that which reads the fewest bytes."""

    def order(found: Found) -> tuple[int, int]:
        """Each block of K reads v and dO again; a longer chunk leaves fewer states."""
        return (found[0][0].BK, found[0][0].C) if found[0][0].C > 16 else (0, 0)

    every = [_of_chunk(p, target, C) for C in chunk_sizes(p)]
    return max((x for x in every if x[0] and x[2]), key=order)


def _of_chunk(p: Problem, target: Target, C: int) -> Found:
    rows, whole = [(b, padded(p.V)) for b in blocks_of(p.K)], [(padded(p.K), padded(p.V))]
    q = fitting(p, target, rows, lambda BK, BV: gated(BK + 2 * BV, BK, 2 * (BK + BV)), (C,))
    both = fitting(p, target, whole, lambda BK, BV: gated(2 * (BK + BV), BK + BV, 2 * (BK + BV), squares=2), (C,))
    k = fitting(p, target, rows, lambda BK, BV: gated(2 * (BK + BV), BK, 2 * (BK + BV), squares=2), (C,))
    return q, both if C > 16 else (), k  # two warps would spill registers


def backward_q(p: Problem, c: Blocks):
    """dQ and, where gates > 0, c for each block of K, and the state before each chunk."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m

    C, BK, io, f32, tile = c.C, c.BK, p.dtype, "float32", tile_dtype(p)
    K, V, VP = p.K, p.V, padded(p.V)
    NK, ahead = -(-K // BK), c.stages == 1
    if c.BV < V:
        raise ValueError(f"simple_gla backward: {c} splits a sum; dQ needs all {V} columns of V")
    tokens, H, HV, N0, chunks, rows, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "N0", "chunks", "rows", "M"))

    @T.prim_func
    def backward_q_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        v: T.Tensor([tokens, HV, V], io),
        g: T.Tensor([tokens, HV], f32),
        dout: T.Tensor([tokens, HV, V], io),
        dq: T.Tensor([tokens, HV, K], io),
        crossing: T.Tensor([rows, HV, NK], f32),
        states: T.Tensor([chunks, HV, K, V], tile),
        kv0: T.Tensor([N0, HV, K, V], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        initial: T.int32,
        gated: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * HV * NK, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NK, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_k = i_p % NK * BK
            dos = m.Tile(C, VP, tile)
            ks = m.Tile(C, BK, tile)
            vs = m.Tile(C, VP, tile)
            ps = m.Tile(C, C, tile)
            ss = m.Tile(BK, VP, tile, twin=False)
            dq_s = T.alloc_shared([C, BK], io)
            dout_next = m.Ahead(C, VP, io, ahead)
            q_next = m.Ahead(C, BK, io, ahead, swizzled=True)  # read as dq lies
            k_next = m.Ahead(C, BK, io, ahead)
            v_next = m.Ahead(C, VP, io, ahead)
            gates = m.Gates(C)
            S = T.alloc_fragment([BK, VP], f32)
            P = T.alloc_fragment([C, C], f32)
            dout_f = T.alloc_fragment([C, VP], f32)
            q_f = T.alloc_fragment([C, BK], f32)
            k_f = T.alloc_fragment([C, BK], f32)
            v_f = T.alloc_fragment([C, VP], f32)
            dq_f = T.alloc_fragment([C, BK], f32)
            c_f = T.alloc_fragment([C], f32)
            where = T.alloc_local([3], "int32")
            slot = T.alloc_local([1], "int32")
            T.annotate_layout({dq_s: make_swizzled_layout(dq_s)})

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.find_chunk(slot, where, cu_seqlens, length, C)
            m.take_state(S, BK, VP, kv0, initial > 0, i_s, i_h, (i_k, 0))
            if where[1] < where[2]:
                m.fetch(dout_next, dout, where[1], i_h, 0)
                m.fetch(q_next, q, where[1], i_q, i_k)
                m.fetch(k_next, k, where[1], i_q, i_k)
                m.fetch(v_next, v, where[1], i_h, 0)
                m.fetch_column(gates.raw, g, where[1], C, i_h)

            for n in T.serial(T.ceildiv(where[2] - where[1], C)):
                t = where[1] + n * C
                m.await_fetched(True)
                m.sum_gates(gates, where[2] - t)
                m.load(dout_f, dout_next, dout, t, i_h, 0)
                m.fill(dos, dout_f)
                m.load(k_f, k_next, k, t, i_q, i_k)
                m.cleared(k_f, C, BK, where[2] - t)
                m.fill(ks, k_f)
                m.load(v_f, v_next, v, t, i_h, 0)
                m.cleared(v_f, C, VP, where[2] - t)
                m.fill(vs, v_f)
                m.load(q_f, q_next, q, t, i_q, i_k)
                T.sync_threads()  # all have taken this chunk
                if t + C < where[2]:
                    m.fetch(dout_next, dout, t + C, i_h, 0)
                    m.fetch(q_next, q, t + C, i_q, i_k)
                    m.fetch(k_next, k, t + C, i_q, i_k)
                    m.fetch(v_next, v, t + C, i_h, 0)
                    m.fetch_column(gates.raw, g, t + C, C, i_h)

                # from the state
                T.clear(dq_f)
                m.multiply_state(dq_f, dos, S, ss, transpose_B=True)
                for i, d in T.Parallel(C, BK):
                    dq_f[i, d] *= gates.first(i) * scale
                if gated > 0:
                    m.keep_state(states, slot[0] + n, i_h, (i_k, 0), S, ss)
                for i, d in T.Parallel(C, BK):
                    q_f[i, d] *= dq_f[i, d]
                T.reduce_sum(q_f, c_f, dim=1)
                for i in T.Parallel(C):
                    if (gated > 0) & (t + i < where[2]):
                        crossing[t + i, i_h, i_p % NK] = c_f[i]

                # from the chunk
                T.clear(P)
                m.multiply(P, dos, vs, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    P[i, j] = T.Select(j <= i, P[i, j] * gates.decay(j, i) * scale, T.float32(0))
                m.fill(ps, P)
                m.multiply(dq_f, ps, ks)
                T.copy(dq_f, dq_s)
                m.store(dq, dq_s, t, where[2], i_h, i_k, K)

                for i, j in T.Parallel(BK, VP):
                    S[i, j] *= gates.whole
                for i in T.Parallel(C):
                    gates.factors[i] = gates.last(i)
                m.scale_tile(vs, v_f, gates.factors)
                m.multiply(S, ks, vs, transpose_A=True)

    return backward_q_kernel


def _walk_back(p: Problem, c: Blocks, want_q: bool = False, want_k: bool = False, want_v: bool = False):
    """dQ, dK, dV, dg and the gradient of the initial state: the last two with dK, and dQ with dK and dV alone.

    Where gated > 0 dg is wanted, and so c: with dQ it is found here, else it is given.
    """
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m

    C, BK, BV, io, f32, tile = c.C, c.BK, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V = p.K, p.V
    NK, NV = -(-K // BK), -(-V // BV)
    NB = NK * NV  # programs of a head
    ahead, given_c = c.stages == 1, want_k and not want_q
    if want_v and NK > 1 or want_k and NV > 1:
        raise ValueError(f"simple_gla backward: {c} splits a sum; dK needs all {V} columns of V, dV all {K} of K")
    sizes = ("tokens", "H", "HV", "N0", "N1", "chunks", "rows", "M")
    tokens, H, HV, N0, N1, chunks, rows, M = (T.dynamic(n) for n in sizes)

    @T.prim_func
    def backward_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        v: T.Tensor([tokens, HV, V], io),
        g: T.Tensor([tokens, HV], f32),
        dout: T.Tensor([tokens, HV, V], io),
        crossing: T.Tensor([rows, HV], f32),
        states: T.Tensor([chunks, HV, K, V], tile),
        dq: T.Tensor([tokens, HV, K], io),
        dk: T.Tensor([tokens, HV, K], io),
        dv: T.Tensor([tokens, HV, V], io),
        dg: T.Tensor([rows, HV, NK], f32),
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
        scale: T.float32,
    ):
        with T.Kernel(spans * HV * NB, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NB, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_k = i_p % NB // NV * BK
            i_v = i_p % NB % NV * BV
            qs = m.Tile(C, BK, tile)
            ks = m.Tile(C, BK, tile)
            dos = m.Tile(C, BV, tile)
            cs = m.Tile(C, C, tile)
            rs = m.Tile(BK, BV, tile, twin=False)  # S, then R
            q_next = m.Ahead(C, BK, io, ahead, swizzled=want_q)  # read as dq lies
            k_next = m.Ahead(C, BK, io, ahead, swizzled=want_k)  # read as dk lies
            dout_next = m.Ahead(C, BV, io, ahead)
            gates = m.Gates(C)
            A = T.alloc_fragment([C, C], f32)
            R = T.alloc_fragment([BK, BV], f32)
            q_f = T.alloc_fragment([C, BK], f32)
            k_f = T.alloc_fragment([C, BK], f32)
            dout_f = T.alloc_fragment([C, BV], f32)
            where = T.alloc_local([3], "int32")
            if want_k:
                vs = m.Tile(C, BV, tile)
                us = m.Tile(C, C, tile, twin=False)  # ones for i <= j: what is from a token on, summed
                v_next = m.Ahead(C, BV, io, ahead)
                v_f = T.alloc_fragment([C, BV], f32)
                dk_f = T.alloc_fragment([C, BK], f32)
                dk_s = T.alloc_shared([C, BK], io)  # dq before dk
                P = T.alloc_fragment([C, C], f32)
                slot = T.alloc_local([1], "int32")
                c_s = T.alloc_shared([C], f32)
                d_f = T.alloc_fragment([C], f32)
                d_s = T.alloc_shared([C], f32)
                across = T.alloc_fragment([1], f32)  # <S, R>
                dg_f = T.alloc_fragment([C], f32)
                T.annotate_layout({dk_s: make_swizzled_layout(dk_s)})
            if want_q:
                dq_f = T.alloc_fragment([C, BK], f32)
                c_f = T.alloc_fragment([C], f32)
            if want_v:
                dv_f = T.alloc_fragment([C, BV], f32)
                dv_s = T.alloc_shared([C, BV], io)
                T.annotate_layout({dv_s: make_swizzled_layout(dv_s)})

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.take_state(R, BK, BV, dkv1, final > 0, i_s, i_h, (i_k, i_v))
            count = T.ceildiv(where[2] - where[1], C)
            end = where[1] + (count - 1) * C
            if want_k:
                m.find_chunk(slot, where, cu_seqlens, length, C)
                slot[0] += count - 1
                for i, j in T.Parallel(C, C):
                    us.high[i, j] = T.if_then_else(i <= j, T.cast(1, tile), T.cast(0, tile))
            if count > 0:
                m.fetch(q_next, q, end, i_q, i_k)
                m.fetch(dout_next, dout, end, i_h, i_v)
                m.fetch(k_next, k, end, i_q, i_k)
                if want_k:
                    m.fetch(v_next, v, end, i_h, i_v)
                m.fetch_column(gates.raw, g, end, C, i_h)
                if want_q:
                    T.async_copy(states[slot[0], i_h, i_k : i_k + BK, i_v : i_v + BV], rs.high)
                if given_c:
                    if gated > 0:
                        m.fetch_column(c_s, crossing, end, C, i_h)

            for n in T.serial(count):
                t = end - n * C
                m.await_fetched(True)
                m.sum_gates(gates, where[2] - t)
                # rows of other sequences are zero
                m.load(q_f, q_next, q, t, i_q, i_k)
                m.cleared(q_f, C, BK, where[2] - t)
                m.fill(qs, q_f)
                m.load(dout_f, dout_next, dout, t, i_h, i_v)
                m.cleared(dout_f, C, BV, where[2] - t)
                m.fill(dos, dout_f)
                m.load(k_f, k_next, k, t, i_q, i_k)
                m.cleared(k_f, C, BK, where[2] - t)
                m.fill(ks, k_f)
                if want_k:
                    m.load(v_f, v_next, v, t, i_h, i_v)
                    m.cleared(v_f, C, BV, where[2] - t)
                    m.fill(vs, v_f)
                T.sync_threads()  # all have taken this chunk
                if n + 1 < count:
                    m.fetch(q_next, q, t - C, i_q, i_k)
                    m.fetch(dout_next, dout, t - C, i_h, i_v)
                    m.fetch(k_next, k, t - C, i_q, i_k)
                    if want_k:
                        m.fetch(v_next, v, t - C, i_h, i_v)
                    m.fetch_column(gates.raw, g, t - C, C, i_h)

                if want_q:
                    if gated > 0:
                        m.inner_product(across, R, rs)
                if want_k:
                    T.clear(P)
                    m.multiply(P, dos, vs, transpose_B=True)
                    for i, j in T.Parallel(C, C):
                        P[i, j] = T.Select(j <= i, P[i, j] * gates.decay(j, i) * scale, T.float32(0))
                    m.fill(cs, P)
                if want_q:
                    # before R takes the place of S
                    T.clear(dq_f)
                    m.multiply_kept(dq_f, dos, rs)
                    for i, d in T.Parallel(C, BK):
                        dq_f[i, d] *= gates.first(i) * scale
                    if gated > 0:  # c, with q as the products see it
                        m.times_tile(q_f, dq_f, qs)
                        T.reduce_sum(q_f, c_f, dim=1)
                        T.copy(c_f, c_s)
                    m.multiply(dq_f, cs, ks)
                    T.copy(dq_f, dk_s)
                    m.store(dq, dk_s, t, where[2], i_h, i_k, K)
                if want_k:
                    T.clear(dk_f)
                    m.multiply_state(dk_f, vs, R, rs, transpose_B=True)
                    for i, d in T.Parallel(C, BK):
                        dk_f[i, d] *= gates.last(i)
                    if gated > 0:  # d, with k as the products see it
                        m.times_tile(k_f, dk_f, ks)
                        T.reduce_sum(k_f, d_f, dim=1)
                        T.copy(d_f, d_s)
                    m.multiply(dk_f, cs, qs, transpose_A=True)
                    T.copy(dk_f, dk_s)
                    m.store(dk, dk_s, t, where[2], i_h, i_k, K)
                if want_v:
                    T.clear(dv_f)
                    m.multiply_state(dv_f, ks, R, rs, filled=want_k)
                    for i, j in T.Parallel(C, BV):
                        dv_f[i, j] *= gates.last(i)
                if want_q:
                    T.sync_threads()  # all are done with R
                    if n + 1 < count:
                        T.async_copy(states[slot[0] - n - 1, i_h, i_k : i_k + BK, i_v : i_v + BV], rs.high)

                T.clear(A)
                m.multiply(A, qs, ks, transpose_B=True)
                if want_k:
                    for i, j in T.Parallel(C, C):
                        P[i, j] *= A[i, j]  # W, summed when dv_f has left its registers
                if want_v:
                    for i, j in T.Parallel(C, C):
                        A[i, j] = T.Select(j <= i, A[i, j] * gates.decay(j, i) * scale, T.float32(0))
                    m.fill(cs, A)
                    m.multiply(dv_f, cs, dos, transpose_A=True)
                    T.copy(dv_f, dv_s)
                    m.store(dv, dv_s, t, where[2], i_h, i_v, V)
                if want_k:
                    if gated > 0:
                        # what of W is from a token on
                        m.fill(cs, P)
                        T.clear(P)
                        T.gemm(us.high, cs.high, P)
                        if cs.exact:
                            T.gemm(us.high, cs.low, P)
                        for i, j in T.Parallel(C, C):
                            c_j = T.Select((i_k == 0) & (t + j < where[2]), c_s[j], T.float32(0))
                            P[i, j] = T.Select(j < i, P[i, j] + d_s[j], c_j)
                        T.reduce_sum(P, dg_f, dim=1)
                        if given_c:
                            T.sync_threads()  # all have read c
                            if n + 1 < count:
                                m.fetch_column(c_s, crossing, t - C, C, i_h)
                            kept = states[slot[0] - n, i_h, i_k : i_k + BK, i_v : i_v + BV]
                            T.copy(kept, rs.high, annotations=m.WITHOUT_TMA)
                            m.inner_product(across, R, rs)
                        for i in T.Parallel(C):
                            if t + i < where[2]:
                                dg[t + i, i_h, i_p % NB // NV] = dg_f[i] + across[0] * gates.whole

                for i, j in T.Parallel(BK, BV):
                    R[i, j] *= gates.whole
                for i in T.Parallel(C):
                    gates.factors[i] = gates.first(i) * scale
                m.scale_tile(dos, dout_f, gates.factors)
                m.multiply(R, qs, dos, transpose_A=True)

            if want_k:
                if initial > 0:
                    T.copy(R, dkv0[i_s, i_h, i_k : i_k + BK, i_v : i_v + BV])

    return backward_kernel


def backward(p: Problem, c: Blocks):
    return _walk_back(p, c, want_q=True, want_k=True, want_v=True)


def backward_kv(p: Problem, c: Blocks):
    return _walk_back(p, c, want_k=True, want_v=True)


def backward_k(p: Problem, c: Blocks):
    return _walk_back(p, c, want_k=True)


def backward_v(p: Problem, c: Blocks):
    return _walk_back(p, c, want_v=True)


KERNELS = (
    Kernel("simple_gla.backward", backward, configs_all, expects=tensor_cores),
    Kernel("simple_gla.backward_q", backward_q, configs_q, expects=tensor_cores),
    Kernel("simple_gla.backward_kv", backward_kv, configs_kv, expects=tensor_cores),
    Kernel("simple_gla.backward_k", backward_k, configs_k, expects=tensor_cores),
    Kernel("simple_gla.backward_v", backward_v, configs_v, expects=tensor_cores),
)
