"""Backward of linear attention on NVIDIA GPUs: dQ walks the chunks forward, dK and dV walk them from the end.

With dN = dO / den, dD = -rowsum(dO * O) / den, S and z the state before the chunk, R and rz the state seen from the end
(the forward pass of un-normalised attention in other roles, arXiv 2006.16236, eq. 16-20):

    P = tril(dN V^T + dD)     A = tril(Q K^T)
    dQ = P K + dN S^T + dD z^T       dK = P^T Q + V R^T + rz^T        dV = A^T dN + K R
    S += K^T V  z += colsum(K)       R += Q^T dN  rz += Q^T dD

R and rz start as the gradients of the final state and end as those of the initial one. Without causality there are no
terms inside a chunk: dQ comes from the state of all keys, R is carried over all queries, dK and dV come from R.

dQ needs all of V for P, and so does dK: their programs own BK columns of K. dV needs all of K: its programs own BV
columns of V. Where both fit into one program they are one kernel, which reads each tensor once. Every value head writes
gradients of its own, dq and dk [tokens, HV, K] and dz0 [N, HV, K]: a group's sum is the gradient, with no atomics.

Gradients have a wide range, so that float16 is computed as float32 is: from two tf32 parts.

P and A come before the products with S and R, which have barriers of their own. Where two products without a barrier
between them share an operand, nvcc loads it once and keeps all of it, 64 registers and more a thread, and spills.
"""

from collections.abc import Sequence
from dataclasses import replace

from tl_kernels.cuda_sizes import Blocks, Layout, blocks_of, fitting, padded, tensor_cores, tile_dtype
from tl_kernels.spec import Kernel, Problem, Target


def configs_q(p: Problem, target: Target) -> Sequence[Blocks]:
    shapes = [(b, padded(p.V)) for b in blocks_of(p.K)]
    return fitting(p, target, shapes, lambda BK, BV: Layout(BK + 2 * BV, BK, 2 * BK + 3 * BV))


def configs_kv(p: Problem, target: Target) -> Sequence[Blocks]:
    """None where K and V are too large for one program: then backward_k and backward_v do it."""
    shapes = [(padded(p.K), padded(p.V))]
    found = fitting(p, target, shapes, lambda BK, BV: Layout(2 * (BK + BV), BK + BV, 2 * (BK + BV)))
    # In float32 128 threads spill with 64 x 64 (sm_100a), for K is kept as it came in until dK has left. They would be
    # alone as well: no multiprocessor's shared memory has room for two such programs, as some have in float16
    least = 256 if p.dtype == "float32" and padded(p.K) * padded(p.V) >= 64 * 64 else 128
    return [replace(c, threads=max(c.threads, least)) for c in found if c.C > 16]  # two warps spill registers


def configs_v(p: Problem, target: Target) -> Sequence[Blocks]:
    shapes = [(padded(p.K), b) for b in blocks_of(p.V)]
    return fitting(p, target, shapes, lambda BK, BV: Layout(2 * BK + BV, BV, 2 * BK + BV))


def _walk_q(p: Problem, c: Blocks, causal: bool):
    """dQ and delta = dD. Causal: from the initial state and the keys; else from the state of all keys."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m

    C, BK, io, f32, tile = c.C, c.BK, p.dtype, "float32", tile_dtype(p)
    K, V, VP = p.K, p.V, padded(p.V)
    NK, ahead = -(-K // BK), c.stages == 1
    if c.BV < V:
        raise ValueError(f"linear_attention backward: {c} splits a sum; dQ needs all {V} columns of V")
    tokens, keys, H, HV, N0, M = (T.dynamic(n) for n in ("tokens", "keys", "H", "HV", "N0", "M"))

    @T.prim_func
    def backward_q_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([keys, H, K], io),
        v: T.Tensor([keys, HV, V], io),
        o: T.Tensor([tokens, HV, V], io),
        dout: T.Tensor([tokens, HV, V], io),
        den: T.Tensor([tokens, H], f32),
        dq: T.Tensor([tokens, HV, K], io),
        delta: T.Tensor([tokens, HV], f32),
        kv0: T.Tensor([N0, HV, K, V], f32),
        z0: T.Tensor([N0, H, K], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        initial: T.int32,
        feature_map: T.int32,
        normalize: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * HV * NK, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NK, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_k = i_p % NK * BK
            dns = m.Tile(C, VP, tile)
            ss = m.Tile(BK, VP, tile, twin=False)
            S = T.alloc_fragment([BK, VP], f32)
            dout_next = m.Ahead(C, VP, io, ahead)
            out_next = m.Ahead(C, VP, io, ahead)
            q_next = m.Ahead(C, BK, io, ahead)
            dout_f = T.alloc_fragment([C, VP], f32)
            out_f = T.alloc_fragment([C, VP], f32)
            q_f = T.alloc_fragment([C, BK], io)
            dq_f = T.alloc_fragment([C, BK], f32)
            dq_s = T.alloc_shared([C, BK], io)
            dq_o = T.alloc_fragment([C, BK], io)
            z_s = T.alloc_shared([BK], f32)
            den_f = T.alloc_fragment([C], f32)
            dd_f = T.alloc_fragment([C], f32)
            dd_s = T.alloc_shared([C], f32)
            inv_s = T.alloc_shared([C], f32)
            where = T.alloc_local([3], "int32")
            T.annotate_layout({dq_s: make_swizzled_layout(dq_s)})
            if causal:
                ks = m.Tile(C, BK, tile)
                vs = m.Tile(C, VP, tile)
                ps = m.Tile(C, C, tile)
                k_next = m.Ahead(C, BK, io, ahead)
                v_next = m.Ahead(C, VP, io, ahead)
                P = T.alloc_fragment([C, C], f32)
                k_f = T.alloc_fragment([C, BK], f32)
                v_f = T.alloc_fragment([C, VP], f32)
                z_f = T.alloc_fragment([BK], f32)

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            state = T.alloc_local([1], "int32")
            state[0] = i_s
            if not causal:
                state[0] = where[0]
            m.start_state(S, z_s, BK, VP, kv0, z0, initial > 0, state[0], (i_h, i_q), (i_k, 0), K)
            if ahead:
                if where[1] < where[2]:
                    m.fetch(dout_next, dout, where[1], i_h, 0)
                    m.fetch(out_next, o, where[1], i_h, 0)
                    m.fetch(q_next, q, where[1], i_q, i_k)
                    if causal:
                        m.fetch(k_next, k, where[1], i_q, i_k)
                        m.fetch(v_next, v, where[1], i_h, 0)
            m.load_column(den_f, den, where[1], where[2], C, i_q, normalize > 0, T.float32(1))

            for n in T.serial(T.ceildiv(where[2] - where[1], C)):
                t = where[1] + n * C
                # dN and dD
                for i in T.Parallel(C):
                    inv_s[i] = T.float32(1) / den_f[i]
                m.await_fetched(ahead)
                m.load(dout_f, dout_next, dout, t, i_h, 0)
                m.load(q_f, q_next, q, t, i_q, i_k)
                # dD from the rounded dN, as P is: dN (v - o) is a small difference
                for i, j in T.Parallel(C, VP):
                    dout_f[i, j] = T.cast(T.cast(dout_f[i, j] * inv_s[i], tile), f32)
                m.fill(dns, dout_f)
                m.load(out_f, out_next, o, t, i_h, 0)
                for i, j in T.Parallel(C, VP):
                    if dns.exact:  # what dout_f holds, whose registers are free by now
                        out_f[i, j] *= -(dns.high[i, j] + dns.low[i, j])
                    else:
                        out_f[i, j] *= -dout_f[i, j]
                T.reduce_sum(out_f, dd_f, dim=1)
                for i in T.Parallel(C):
                    dd_s[i] = T.if_then_else(normalize > 0, dd_f[i], T.float32(0))
                if causal:
                    m.load(k_f, k_next, k, t, i_q, i_k)
                    m.mapped(k_f, C, BK, where[2] - t, K - i_k, feature_map, T.float32(1))
                    m.fill(ks, k_f)
                    m.load(v_f, v_next, v, t, i_h, 0)
                    m.cleared(v_f, C, VP, where[2] - t)
                    m.fill(vs, v_f)
                if ahead:
                    T.sync_threads()  # all have taken this chunk
                    if t + C < where[2]:
                        m.fetch(dout_next, dout, t + C, i_h, 0)
                        m.fetch(out_next, o, t + C, i_h, 0)
                        m.fetch(q_next, q, t + C, i_q, i_k)
                        if causal:
                            m.fetch(k_next, k, t + C, i_q, i_k)
                            m.fetch(v_next, v, t + C, i_h, 0)
                m.load_column(den_f, den, t + C, where[2], C, i_q, normalize > 0, T.float32(1))

                # dQ
                if causal:
                    T.clear(P)
                    m.multiply(P, dns, vs, transpose_B=True)
                    for i, j in T.Parallel(C, C):
                        P[i, j] = T.Select(j <= i, P[i, j] + dd_s[i], T.float32(0))
                    m.fill(ps, P)
                T.clear(dq_f)
                m.multiply_state(dq_f, dns, S, ss, transpose_B=True)
                if causal:
                    m.multiply(dq_f, ps, ks)
                for i, d in T.Parallel(C, BK):
                    dq_f[i, d] += dd_s[i] * z_s[d]
                if i_k == 0:
                    for i in T.Parallel(C):
                        if t + i < where[2]:
                            delta[t + i, i_h] = dd_s[i]

                # the state
                if causal:
                    m.multiply(S, ks, vs, transpose_A=True)
                    for d in T.Parallel(BK):
                        z_f[d] = z_s[d]
                    m.add_rows(z_f, ks)
                    for d in T.Parallel(BK):
                        z_s[d] = z_f[d]

                # through phi
                for i, d in T.Parallel(C, BK):
                    dq_f[i, d] *= scale
                T.copy(dq_f, dq_s)
                m.through_map(dq_o, dq_s, q_f, feature_map)
                m.store(dq, dq_o, t, where[2], i_h, i_k, K)

    return backward_q_kernel


def _walk_kv(p: Problem, c: Blocks, want_k: bool, want_v: bool, emit: bool = True, carry: bool = True):
    """dK, dV or both, and the gradient of the initial state. emit alone takes R as it is, carry alone leaves it."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m

    C, BK, BV, io, f32, tile = c.C, c.BK, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V = p.K, p.V
    NK, NV = -(-K // BK), -(-V // BV)
    NB = NK * NV  # programs of a head
    causal, ahead = emit and carry, c.stages == 1
    if want_v and NK > 1 or want_k and NV > 1:
        raise ValueError(f"linear_attention backward: {c} splits a sum; dK needs all {V} columns of V, dV all {K} of K")
    tokens, keys, H, HV, N0, N1, M = (T.dynamic(n) for n in ("tokens", "keys", "H", "HV", "N0", "N1", "M"))

    @T.prim_func
    def backward_kv_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([keys, H, K], io),
        v: T.Tensor([keys, HV, V], io),
        dout: T.Tensor([tokens, HV, V], io),
        den: T.Tensor([tokens, H], f32),
        delta: T.Tensor([tokens, HV], f32),
        dk: T.Tensor([keys, HV, K], io),
        dv: T.Tensor([keys, HV, V], io),
        dkv1: T.Tensor([N1, HV, K, V], f32),
        dz1: T.Tensor([N1, HV, K], f32),
        dkv0: T.Tensor([N0, HV, K, V], f32),
        dz0: T.Tensor([N0, HV, K], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        final: T.int32,
        initial: T.int32,
        feature_map: T.int32,
        normalize: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * HV * NB, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NB, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_k = i_p % NB // NV * BK
            i_v = i_p % NB % NV * BV
            R = T.alloc_fragment([BK, BV], f32)
            rz_s = T.alloc_shared([BK], f32)
            where = T.alloc_local([3], "int32")
            state = T.alloc_local([1], "int32")
            if carry:
                qs = m.Tile(C, BK, tile)
                dns = m.Tile(C, BV, tile)
                q_next = m.Ahead(C, BK, io, ahead)
                dout_next = m.Ahead(C, BV, io, ahead)
                q_f = T.alloc_fragment([C, BK], f32)
                dn_f = T.alloc_fragment([C, BV], f32)
                rz_f = T.alloc_fragment([BK], f32)
                den_f = T.alloc_fragment([C], f32)
                dd_f = T.alloc_fragment([C], f32)
                dd_s = T.alloc_shared([C], f32)
                inv_s = T.alloc_shared([C], f32)
            if emit:
                rs = m.Tile(BK, BV, tile, twin=False)
                k_next = m.Ahead(C, BK, io, ahead)
            if causal:
                cs = m.Tile(C, C, tile)  # P, then A
                P = T.alloc_fragment([C, C], f32)
            if emit and want_k:
                vs = m.Tile(C, BV, tile)
                v_next = m.Ahead(C, BV, io, ahead)
                v_f = T.alloc_fragment([C, BV], f32)
                k_in = T.alloc_fragment([C, BK], io)
                dk_f = T.alloc_fragment([C, BK], f32)
                dk_s = T.alloc_shared([C, BK], io)
                dk_o = T.alloc_fragment([C, BK], io)
                T.annotate_layout({dk_s: make_swizzled_layout(dk_s)})
            if emit and want_v:
                ks = m.Tile(C, BK, tile)
                k_f = T.alloc_fragment([C, BK], f32)
                dv_f = T.alloc_fragment([C, BV], f32)
                dv_s = T.alloc_shared([C, BV], io)
                T.annotate_layout({dv_s: make_swizzled_layout(dv_s)})

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            state[0] = i_s
            if not carry:
                state[0] = where[0]
            m.start_state(R, rz_s, BK, BV, dkv1, dz1, final > 0, state[0], (i_h, i_h), (i_k, i_v), K)
            chunks = T.ceildiv(where[2] - where[1], C)
            end = where[1] + (chunks - 1) * C
            if ahead:
                if chunks > 0:
                    if carry:
                        m.fetch(q_next, q, end, i_q, i_k)
                        m.fetch(dout_next, dout, end, i_h, i_v)
                    if emit:
                        m.fetch(k_next, k, end, i_q, i_k)
                    if emit and want_k:
                        m.fetch(v_next, v, end, i_h, i_v)
            if carry:
                m.load_column(den_f, den, T.max(end, where[1]), where[2], C, i_q, normalize > 0, T.float32(1))
                m.load_column(dd_f, delta, T.max(end, where[1]), where[2], C, i_h, normalize > 0, T.float32(0))

            for n in T.serial(chunks):
                t = end - n * C
                if carry:
                    for i in T.Parallel(C):
                        inv_s[i] = T.float32(1) / den_f[i]
                        dd_s[i] = dd_f[i]
                m.await_fetched(ahead)
                if emit and want_k:
                    m.load(k_in, k_next, k, t, i_q, i_k)
                if carry:
                    # Q and dN; rows of other sequences are zero
                    m.load(q_f, q_next, q, t, i_q, i_k)
                    m.mapped(q_f, C, BK, where[2] - t, K - i_k, feature_map, scale)
                    m.fill(qs, q_f)
                    m.load(dn_f, dout_next, dout, t, i_h, i_v)
                    for i, j in T.Parallel(C, BV):
                        dn_f[i, j] = T.Select(t + i < where[2], dn_f[i, j] * inv_s[i], T.float32(0))
                    m.fill(dns, dn_f)
                if emit and want_k:
                    m.load(v_f, v_next, v, t, i_h, i_v)
                    m.fill(vs, v_f)
                if emit and want_v:
                    if want_k:
                        T.copy(k_in, k_f)
                    else:
                        m.load(k_f, k_next, k, t, i_q, i_k)
                    m.mapped(k_f, C, BK, C, K - i_k, feature_map, T.float32(1))
                    m.fill(ks, k_f)
                if ahead:
                    T.sync_threads()  # all have taken this chunk
                    if n + 1 < chunks:
                        if carry:
                            m.fetch(q_next, q, t - C, i_q, i_k)
                            m.fetch(dout_next, dout, t - C, i_h, i_v)
                        if emit:
                            m.fetch(k_next, k, t - C, i_q, i_k)
                        if emit and want_k:
                            m.fetch(v_next, v, t - C, i_h, i_v)
                if carry:
                    m.load_column(den_f, den, T.max(t - C, where[1]), where[2], C, i_q, normalize > 0, T.float32(1))
                    m.load_column(dd_f, delta, T.max(t - C, where[1]), where[2], C, i_h, normalize > 0, T.float32(0))

                if emit and want_k:
                    if causal:
                        T.clear(P)
                        m.multiply(P, dns, vs, transpose_B=True)
                        for i, j in T.Parallel(C, C):
                            P[i, j] = T.Select(j <= i, P[i, j] + dd_s[i], T.float32(0))
                        m.fill(cs, P)
                    T.clear(dk_f)
                    m.multiply_state(dk_f, vs, R, rs, transpose_B=True)
                    if causal:
                        m.multiply(dk_f, cs, qs, transpose_A=True)
                    for i, d in T.Parallel(C, BK):
                        dk_f[i, d] += rz_s[d]
                    T.copy(dk_f, dk_s)
                    m.through_map(dk_o, dk_s, k_in, feature_map)
                    m.store(dk, dk_o, t, where[2], i_h, i_k, K)

                if emit and want_v:
                    if causal:
                        T.clear(P)
                        m.multiply(P, qs, ks, transpose_B=True)
                        for i, j in T.Parallel(C, C):
                            P[i, j] = T.Select(j <= i, P[i, j], T.float32(0))
                        m.fill(cs, P)
                    T.clear(dv_f)
                    m.multiply_state(dv_f, ks, R, rs, filled=want_k)
                    if causal:
                        m.multiply(dv_f, cs, dns, transpose_A=True)
                    T.copy(dv_f, dv_s)
                    m.store(dv, dv_s, t, where[2], i_h, i_v, V)

                if carry:
                    m.multiply(R, qs, dns, transpose_A=True)
                    for d in T.Parallel(BK):
                        rz_f[d] = rz_s[d]
                        for i in T.serial(C):
                            rz_f[d] += dd_s[i] * T.cast(qs.high[i, d], f32)
                            if qs.exact:
                                rz_f[d] += dd_s[i] * qs.low[i, d]
                    for d in T.Parallel(BK):
                        rz_s[d] = rz_f[d]

            if carry and (want_k or not emit):
                if initial > 0:
                    T.copy(R, dkv0[i_s, i_h, i_k : i_k + BK, i_v : i_v + BV])
                    if i_v == 0:
                        for d in T.Parallel(BK):
                            if i_k + d < K:
                                dz0[i_s, i_h, i_k + d] = rz_s[d]

    return backward_kv_kernel


def backward_q(p: Problem, c: Blocks):
    return _walk_q(p, c, causal=True)


def backward_q_all(p: Problem, c: Blocks):
    return _walk_q(p, c, causal=False)


def backward_kv(p: Problem, c: Blocks):
    return _walk_kv(p, c, want_k=True, want_v=True)


def backward_k(p: Problem, c: Blocks):
    return _walk_kv(p, c, want_k=True, want_v=False)


def backward_v(p: Problem, c: Blocks):
    return _walk_kv(p, c, want_k=False, want_v=True)


def backward_carry(p: Problem, c: Blocks):
    return _walk_kv(p, c, want_k=False, want_v=False, emit=False)


def backward_k_all(p: Problem, c: Blocks):
    return _walk_kv(p, c, want_k=True, want_v=False, carry=False)


def backward_v_all(p: Problem, c: Blocks):
    return _walk_kv(p, c, want_k=False, want_v=True, carry=False)


KERNELS = (
    Kernel("linear_attention.backward_q", backward_q, configs_q, expects=tensor_cores),
    Kernel("linear_attention.backward_kv", backward_kv, configs_kv, expects=tensor_cores),
    Kernel("linear_attention.backward_k", backward_k, configs_q, expects=tensor_cores),
    Kernel("linear_attention.backward_v", backward_v, configs_v, expects=tensor_cores),
    Kernel("linear_attention.backward_q_all", backward_q_all, configs_q, expects=tensor_cores),
    Kernel("linear_attention.backward_carry", backward_carry, configs_v, expects=tensor_cores),
    Kernel("linear_attention.backward_k_all", backward_k_all, configs_q, expects=tensor_cores),
    Kernel("linear_attention.backward_v_all", backward_v_all, configs_v, expects=tensor_cores),
)
