"""Linear attention on NVIDIA GPUs: one program walks the chunks of one sequence, value head and block of V.

With Q, K after the feature map, Q scaled, S and z the state before the chunk (arXiv 2006.16236, eq. 4-12):

    A = tril(Q K^T)      den = rowsum(A) + Q z + eps      O = (A V + Q S) / den
    S += K^T V           z += colsum(K)

S stays in registers in fp32 and goes through shared memory, rounded to the tiles' type, as an operand; z and den are
fp32. Q, K and A are rounded once and the rounded values are used in num and den alike, so that O remains an average
of V. A tile of 16 bits is multiplied by tensor cores (wgmma on sm_90a, mma.sync elsewhere); a float32 tile is split in
two and multiplied by three tf32 products.

While a chunk is worked on the next one is loaded, where shared memory has room: in the forward pass on sm_90a by TMA
and a warp group of its own, in all other kernels by cp.async, issued once a chunk has been made into operands and
before its products. That order is in the machine code; what it is worth has not been timed on a GPU.

float16 has too small a range for the sums: S is divided by a power of two above max z, and row i of A by one above
den_i. Both are exact and undone in fp32.

Tokens of all sequences lie behind one another: q, k [tokens, H, K], v, o [tokens, HV, V]. A program walks a span of
them: sequence n, whose tokens are n length to (n + 1) length, or cu_seqlens[n] to cu_seqlens[n + 1] where length is 0,
or a segment of it (find_span). Two schedules of a causal pass: `forward` alone, with spans that are sequences;
or, where heads are few and sequences long, `carry` over segments, `scan`, and `forward` from the state before each
segment. Non-causal attention is `carry` over the keys, then `emit` over segments of the queries.

H and HV are dynamic, as a binary is built for a dtype, K and V; they appear in addresses only. The loads of a last
chunk may run into the next sequence, so that its keys and values are cleared: 0 times the neighbour's NaN would be NaN.
A state that is not given or not wanted is a tensor of no rows, and its switch is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tl_kernels.linear_attention import cuda_backward, cuda_decode
from tl_kernels.cuda_sizes import (
    BYTES,
    OFFERED,
    SLACK_BYTES,
    Blocks,
    Layout,
    ScanConfig,
    blocks_of,
    fitting,
    padded,
    scan_configs,
    tensor_cores,
    tile_dtype,
)
from tl_kernels.spec import Kernel, Problem, Target


@dataclass(frozen=True)
class Config:
    C: int  # tokens a chunk
    BV: int  # columns of the state in a program; with more than one block of V, q and k are read by each
    stages: int  # 0: a chunk is loaded when needed; 1: while the last one is worked on; 2: by TMA and 128 more threads
    threads: int  # that compute


def smem_bytes(p: Problem, c: Config) -> int:
    """Dynamic shared memory of the forward pass, at most."""
    K, size = padded(p.K), BYTES[p.dtype]
    loads = c.C * (2 * K + c.BV)  # q, k, v
    state = K * c.BV
    low = c.C * (K + c.BV + c.C) if p.dtype == "float32" else 0
    return size * ((2 if c.stages else 1) * loads + state + c.C * c.C + low) + SLACK_BYTES


def configs(p: Problem, target: Target) -> Sequence[Config]:
    """Whole rows of V first: each block of V beyond the first reads q and k again."""
    K, exact = padded(p.K), p.dtype == "float32"
    found: list[Config] = []
    for BV in sorted({min(padded(p.V), b) for b in (256, 128, 64, 32, 16)}, reverse=True):
        for C in (32, 16) if exact else (64, 32):
            # two warps, for four cannot share a tile of 16 x 16; the last resort
            if (C == 16) != (BV == 16) or (C == 16 and found):
                continue
            threads = 64 if C == 16 else 256 if K * BV >= (4097 if exact else 128 * 64) else 128
            # registers of a thread for S, O, A and, in float32, a copy of K; with more they would spill
            if (K * BV + C * BV + C * C + exact * C * K) // threads > (110 if exact and C > 16 else 144):
                continue
            # float32 and 256 threads: TileLang 0.1.15 finds no place for a barrier in a warp-specialised kernel
            tma = target.arch == "sm_90a" and not (exact and threads == 256)
            for stages in (2,) if tma else (1, 0):
                c = Config(C, BV, stages, threads)
                if smem_bytes(p, c) <= target.smem_bytes:
                    found.append(c)
                    break
    return sorted(found, key=lambda c: (-c.BV, -c.stages, -c.C))[:OFFERED]


def state_configs(p: Problem, target: Target) -> Sequence[Blocks]:
    return fitting(p, target, [(padded(p.K), b) for b in blocks_of(p.V)], lambda BK, BV: Layout(BK + BV, BV, BK + BV))


def forward(p: Problem, c: Config):
    """O, den and the final state of causal attention."""
    import tilelang.language as T

    from tl_kernels import cuda_macros as m

    C, BV, io, f32 = c.C, c.BV, p.dtype, "float32"
    K, V, KP = p.K, p.V, padded(p.K)
    NV = -(-V // BV)
    ahead, tma = c.stages == 1, c.stages == 2
    exact, guarded = io == "float32", io == "float16"
    tokens, H, HV, rows, N0, N1, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "rows", "N0", "N1", "M"))

    @T.prim_func
    def forward_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        v: T.Tensor([tokens, HV, V], io),
        o: T.Tensor([tokens, HV, V], io),
        den: T.Tensor([rows, H], f32),
        kv0: T.Tensor([N0, HV, K, V], f32),
        z0: T.Tensor([N0, H, K], f32),
        kv1: T.Tensor([N1, HV, K, V], f32),
        z1: T.Tensor([N1, H, K], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        initial: T.int32,
        final: T.int32,
        keep_den: T.int32,
        feature_map: T.int32,
        normalize: T.int32,
        scale: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(spans * HV * NV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NV, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_v = i_p % NV
            owner = (i_v == 0) & (i_h == i_q * T.truncdiv(HV, H))  # one program writes what belongs to a q/k head
            q_s = T.alloc_shared([C, KP], io)
            k_s = T.alloc_shared([C, KP], io)
            v_s = T.alloc_shared([C, BV], io)
            a_s = T.alloc_shared([C, C], io)
            s_s = T.alloc_shared([KP, BV], io)  # S, then O on its way out
            q_next = m.Ahead(C, KP, io, ahead)
            k_next = m.Ahead(C, KP, io, ahead)
            v_next = m.Ahead(C, BV, io, ahead)
            z_s = T.alloc_shared([KP], f32)
            qz_s = T.alloc_shared([C], f32)
            S = T.alloc_fragment([KP, BV], f32)
            num = T.alloc_fragment([C, BV], f32)
            A = T.alloc_fragment([C, C], f32)
            q_f = T.alloc_fragment([C, KP], f32)
            qz_f = T.alloc_fragment([C, KP], f32)
            k_f = T.alloc_fragment([C, KP], f32)
            v_f = T.alloc_fragment([C, BV], f32)
            zq_f = T.alloc_fragment([KP], f32)
            z_f = T.alloc_fragment([KP], f32)
            zm_f = T.alloc_fragment([KP], f32)
            z_most = T.alloc_fragment([1], f32)
            qz = T.alloc_fragment([C], f32)
            a_f = T.alloc_fragment([C, C], f32)
            sum_f = T.alloc_fragment([C], f32)
            den_f = T.alloc_fragment([C], f32)
            den_s = T.alloc_shared([C], f32)
            w_s = T.alloc_shared([C], f32)  # what float16 multiplies the rows of A and O by
            if C > KP:
                o_s = T.alloc_shared([C, BV], io)
            if exact:
                x_low = T.alloc_shared([C, KP], io)  # of Q, then of K
                v_low = T.alloc_shared([C, BV], io)
                a_low = T.alloc_shared([C, C], io)

            where = T.alloc_local([3], "int32")
            if tma:
                T.annotate_producer_reg_dealloc(24)
                T.annotate_consumer_reg_alloc(240)
            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            first = where[1]
            last = where[2]
            m.start_state(S, z_s, KP, BV, kv0, z0, initial > 0, i_s, (i_h, i_q), (0, i_v * BV), K)
            if ahead:
                if first < last:
                    m.fetch(q_next, q, first, i_q, 0)
                    m.fetch(k_next, k, first, i_q, 0)
                    m.fetch(v_next, v, first, i_h, i_v * BV)

            for n in T.Pipelined(T.ceildiv(last - first, C), num_stages=2 if tma else 0):
                t = first + n * C
                if tma:
                    T.copy(q[t : t + C, i_q, 0:KP], q_s)
                    T.copy(k[t : t + C, i_q, 0:KP], k_s)
                    T.copy(v[t : t + C, i_h, i_v * BV : i_v * BV + BV], v_s)
                    T.copy(q_s, q_f)
                else:
                    m.await_fetched(ahead)
                    m.load(q_f, q_next, q, t, i_q, 0)
                    if not exact:  # all at once; float32 has no registers for that
                        m.load(k_f, k_next, k, t, i_q, 0)
                        m.load(v_f, v_next, v, t, i_h, i_v * BV)

                # Q and Q z
                T.copy(z_s, zq_f)
                for i, d in T.Parallel(C, KP):
                    q_f[i, d] = T.cast(T.cast(m.feature(q_f[i, d], feature_map) * scale, io), f32)
                    qz_f[i, d] = q_f[i, d] * zq_f[d]
                T.reduce_sum(qz_f, qz, dim=1)
                T.copy(qz, qz_s)  # A's rows lie with other threads
                if exact:
                    # Q S, and A as far as it needs the low part of Q, whose tile is then that of K
                    m.split(q_s, x_low, q_f, C, KP)
                    for i, j in T.Parallel(KP, BV):
                        s_s[i, j] = S[i, j] - m.high_part(S[i, j])
                    T.gemm(q_s, s_s, num, clear_accum=True)
                    for i, j in T.Parallel(KP, BV):
                        s_s[i, j] = m.high_part(S[i, j])
                    T.gemm(q_s, s_s, num)
                else:
                    T.copy(q_f, q_s)

                # K
                if tma:
                    T.copy(k_s, k_f)
                if exact and not tma:
                    m.load(k_f, k_next, k, t, i_q, 0)
                m.mapped(k_f, C, KP, last - t, K, feature_map, T.float32(1))
                if exact:
                    for i, d in T.Parallel(C, KP):
                        q_f[i, d] = m.high_part(k_f[i, d])
                    T.copy(q_f, k_s)
                    # not beside the product before: with no barrier between them nvcc keeps their S, and spills
                    T.gemm(x_low, s_s, num)
                    T.gemm(x_low, k_s, A, transpose_B=True, clear_accum=True)
                    for i, d in T.Parallel(C, KP):
                        k_f[i, d] -= m.high_part(k_f[i, d])
                    T.copy(k_f, x_low)
                else:
                    T.copy(k_f, k_s)
                # z += colsum(K), after Q z and before V: TileLang 0.1.15 takes a barrier under an `if` for one that
                # always comes, so that what is read in an `if` was read, or waited for, before it
                if guarded:
                    T.copy(z_s, zm_f)
                    T.reduce_absmax(zm_f, z_most, dim=0)
                for d in T.Parallel(KP):
                    z_f[d] = z_s[d]
                    for i in T.serial(C):
                        z_f[d] += T.cast(k_s[i, d], f32)
                        if exact:
                            z_f[d] += x_low[i, d]
                for d in T.Parallel(KP):
                    z_s[d] = z_f[d]

                # V
                if exact or not tma:
                    if tma:
                        T.copy(v_s, v_f)
                    if exact and not tma:
                        m.load(v_f, v_next, v, t, i_h, i_v * BV)
                    m.cleared(v_f, C, BV, last - t)
                    if exact:
                        m.split(v_s, v_low, v_f, C, BV)
                    else:
                        T.copy(v_f, v_s)
                if tma and not exact:
                    if t + C > last:
                        for i, d in T.Parallel(C, BV):
                            v_s[i, d] = T.if_then_else(t + i < last, v_s[i, d], T.cast(0, io))
                if ahead:
                    T.sync_threads()  # all have taken this chunk; and the operands are there
                    if t + C < last:
                        m.fetch(q_next, q, t + C, i_q, 0)
                        m.fetch(k_next, k, t + C, i_q, 0)
                        m.fetch(v_next, v, t + C, i_h, i_v * BV)

                # products; a float32 tile takes three
                if exact:
                    T.gemm(q_s, k_s, A, transpose_B=True)
                    T.gemm(q_s, x_low, A, transpose_B=True)
                    T.gemm(k_s, v_s, S, transpose_A=True)
                    T.gemm(k_s, v_low, S, transpose_A=True)
                    T.gemm(x_low, v_s, S, transpose_A=True)
                else:
                    T.gemm(q_s, k_s, A, transpose_B=True, clear_accum=True)
                    if guarded:
                        for i, j in T.Parallel(KP, BV):
                            s_s[i, j] = T.cast(S[i, j] * m.inverse_power_above(z_most[0]), io)
                    else:
                        T.copy(S, s_s)
                    T.gemm(q_s, s_s, num, clear_accum=True)
                    T.gemm(k_s, v_s, S, transpose_A=True)

                for i, j in T.Parallel(C, C):
                    A[i, j] = T.Select(j <= i, A[i, j], T.float32(0))
                if guarded:
                    T.reduce_sum(A, sum_f, dim=1)
                    for i in T.Parallel(C):
                        w_s[i] = m.inverse_power_above(sum_f[i] + qz_s[i] + eps)
                    for i, j in T.Parallel(C, C):
                        A[i, j] *= w_s[i]
                    for i, j in T.Parallel(C, BV):
                        num[i, j] *= m.power_above(z_most[0]) * w_s[i]
                if exact:
                    m.split(a_s, a_low, A, C, C)
                else:
                    for i, j in T.Parallel(C, C):
                        A[i, j] = T.cast(T.cast(A[i, j], io), f32)
                    T.copy(A, a_s)
                T.gemm(a_s, v_s, num)
                if exact:
                    T.gemm(a_s, v_low, num)
                    T.gemm(a_low, v_s, num)
                # A once more, in whole rows: warps share the rows of the product's own, whose sums take many barriers
                T.copy(a_s, a_f)
                if exact:
                    for i, j in T.Parallel(C, C):
                        a_f[i, j] += a_low[i, j]
                T.reduce_sum(a_f, den_f, dim=1)
                if guarded:
                    for i in T.Parallel(C):
                        den_s[i] = den_f[i] / w_s[i] + qz_s[i] + eps
                    for i, j in T.Parallel(C, BV):
                        num[i, j] /= w_s[i]
                else:
                    for i in T.Parallel(C):
                        den_s[i] = den_f[i] + qz_s[i] + eps
                for i, j in T.Parallel(C, BV):
                    num[i, j] /= T.if_then_else(normalize > 0, den_s[i], T.float32(1))
                if (keep_den > 0) & owner:
                    for i in T.Parallel(C):
                        if t + i < last:
                            den[t + i, i_q] = den_s[i]

                # through shared memory, for stores of 16 bytes
                if C > KP:
                    T.copy(num, o_s)
                    for i, j in T.Parallel(C, BV):
                        if (t + i < last) & (i_v * BV + j < V):
                            o[t + i, i_h, i_v * BV + j] = o_s[i, j]
                else:
                    T.copy(num, s_s[0:C, 0:BV])
                    for i, j in T.Parallel(C, BV):
                        if (t + i < last) & (i_v * BV + j < V):
                            o[t + i, i_h, i_v * BV + j] = s_s[i, j]

            if final > 0:
                T.copy(S, kv1[i_s, i_h, 0:KP, i_v * BV : i_v * BV + BV])
                if owner:
                    for d in T.Parallel(KP):
                        if d < K:
                            z1[i_s, i_q, d] = z_s[d]

    return forward_kernel


def carry(p: Problem, c: Blocks):
    """The state of each span: S = S_0 + K^T V, z = z_0 + colsum(K) over all its keys."""
    import tilelang.language as T

    from tl_kernels import cuda_macros as m

    C, BV, io, f32 = c.C, c.BV, p.dtype, "float32"
    K, V, KP = p.K, p.V, padded(p.K)
    tile, ahead = tile_dtype(p), c.stages == 1
    NV = -(-V // BV)
    tokens, H, HV, N0, N1, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "N0", "N1", "M"))

    @T.prim_func
    def carry_kernel(
        k: T.Tensor([tokens, H, K], io),
        v: T.Tensor([tokens, HV, V], io),
        kv0: T.Tensor([N0, HV, K, V], f32),
        z0: T.Tensor([N0, H, K], f32),
        kv1: T.Tensor([N1, HV, K, V], f32),
        z1: T.Tensor([N1, H, K], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        initial: T.int32,
        feature_map: T.int32,
    ):
        with T.Kernel(spans * HV * NV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NV, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_v = i_p % NV * BV
            ks = m.Tile(C, KP, tile)
            vs = m.Tile(C, BV, tile)
            k_next = m.Ahead(C, KP, io, ahead)
            v_next = m.Ahead(C, BV, io, ahead)
            S = T.alloc_fragment([KP, BV], f32)
            k_f = T.alloc_fragment([C, KP], f32)
            v_f = T.alloc_fragment([C, BV], f32)
            z_f = T.alloc_fragment([KP], f32)
            where = T.alloc_local([3], "int32")
            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.start_state(S, z_f, KP, BV, kv0, z0, initial > 0, i_s, (i_h, i_q), (0, i_v), K)
            if ahead:
                if where[1] < where[2]:
                    m.fetch(k_next, k, where[1], i_q, 0)
                    m.fetch(v_next, v, where[1], i_h, i_v)
            for n in T.serial(T.ceildiv(where[2] - where[1], C)):
                t = where[1] + n * C
                m.await_fetched(ahead)
                m.load(k_f, k_next, k, t, i_q, 0)
                m.load(v_f, v_next, v, t, i_h, i_v)
                m.mapped(k_f, C, KP, where[2] - t, K, feature_map, T.float32(1))
                m.cleared(v_f, C, BV, where[2] - t)
                m.fill(ks, k_f)
                m.fill(vs, v_f)
                if ahead:
                    T.sync_threads()  # all have taken this chunk
                    if t + C < where[2]:
                        m.fetch(k_next, k, t + C, i_q, 0)
                        m.fetch(v_next, v, t + C, i_h, i_v)
                m.multiply(S, ks, vs, transpose_A=True)
                m.add_rows(z_f, ks)
            T.copy(S, kv1[i_s, i_h, 0:KP, i_v : i_v + BV])
            if (i_v == 0) & (i_h == i_q * T.truncdiv(HV, H)):
                for d in T.Parallel(KP):
                    if d < K:
                        z1[i_s, i_q, d] = z_f[d]

    return carry_kernel


def scan(p: Problem, c: ScanConfig):
    """States of spans -> the state before each span, in place, and the final state; from the end for gradients.

    With `carry` before it and `forward` of spans after it, a long sequence is computed in parallel. z has H heads, or
    HV where it is a gradient.
    """
    import tilelang.language as T

    from tl_kernels import cuda_macros as m

    KV, K, block, f32 = p.K * p.V, p.K, c.block, "float32"
    S, N0, N1, HZ, HV, M = (T.dynamic(n) for n in ("S", "N0", "N1", "HZ", "HV", "M"))

    @T.prim_func
    def scan_kernel(
        kv: T.Tensor([S, HV, KV], f32),
        z: T.Tensor([S, HZ, K], f32),
        kv0: T.Tensor([N0, HV, KV], f32),
        z0: T.Tensor([N0, HZ, K], f32),
        kv1: T.Tensor([N1, HV, KV], f32),
        z1: T.Tensor([N1, HZ, K], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        initial: T.int32,
        final: T.int32,
        reverse: T.int32,
    ):
        with T.Kernel(sequences * (KV // block), HV, threads=c.threads) as (i_nb, i_h):
            first = i_nb % (KV // block) * block
            i_n = i_nb // (KV // block)
            total = T.alloc_fragment([block], f32)
            x = T.alloc_fragment([block], f32)
            where = T.alloc_local([2], "int32")
            m.find_slots(where, i_n, cu_seqlens, length, segment)
            T.clear(total)
            if initial > 0:
                T.copy(kv0[i_n, i_h, first : first + block], total)
            for n in T.serial(where[1]):
                slot = where[0] + T.if_then_else(reverse > 0, where[1] - 1 - n, n)
                T.copy(kv[slot, i_h, first : first + block], x)
                T.copy(total, kv[slot, i_h, first : first + block])
                for e in T.Parallel(block):
                    total[e] += x[e]
            if final > 0:
                T.copy(total, kv1[i_n, i_h, first : first + block])

        with T.Kernel(sequences, HZ, threads=K) as (i_zn, i_zh):  # an element a thread, so that nobody writes another's
            z_total = T.alloc_fragment([K], f32)
            z_x = T.alloc_fragment([K], f32)
            z_where = T.alloc_local([2], "int32")
            m.find_slots(z_where, i_zn, cu_seqlens, length, segment)
            T.clear(z_total)
            if initial > 0:
                T.copy(z0[i_zn, i_zh, 0:K], z_total)
            for n in T.serial(z_where[1]):
                z_slot = z_where[0] + T.if_then_else(reverse > 0, z_where[1] - 1 - n, n)
                T.copy(z[z_slot, i_zh, 0:K], z_x)
                T.copy(z_total, z[z_slot, i_zh, 0:K])
                for d in T.Parallel(K):
                    z_total[d] += z_x[d]
            if final > 0:
                T.copy(z_total, z1[i_zn, i_zh, 0:K])

    return scan_kernel


def emit(p: Problem, c: Blocks):
    """O = Q S / (Q z + eps) of each query, from the state of its sequence: non-causal attention after `carry`."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m

    C, BV, io, f32 = c.C, c.BV, p.dtype, "float32"
    K, V, KP = p.K, p.V, padded(p.K)
    tile, ahead = tile_dtype(p), c.stages == 1
    NV = -(-V // BV)
    tokens, H, HV, rows, N0, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "rows", "N0", "M"))

    @T.prim_func
    def emit_kernel(
        q: T.Tensor([tokens, H, K], io),
        o: T.Tensor([tokens, HV, V], io),
        den: T.Tensor([rows, H], f32),
        kv: T.Tensor([N0, HV, K, V], f32),
        z: T.Tensor([N0, H, K], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        keep_den: T.int32,
        feature_map: T.int32,
        normalize: T.int32,
        scale: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(spans * HV * NV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NV, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_v = i_p % NV * BV
            qs = m.Tile(C, KP, tile)
            ss = m.Tile(KP, BV, tile, twin=False)
            out_s = T.alloc_shared([C, BV], io)
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})
            S = T.alloc_fragment([KP, BV], f32)
            num = T.alloc_fragment([C, BV], f32)
            q_next = m.Ahead(C, KP, io, ahead)
            q_f = T.alloc_fragment([C, KP], f32)
            qz_f = T.alloc_fragment([C, KP], f32)
            z_s = T.alloc_shared([KP], f32)
            d_f = T.alloc_fragment([C], f32)
            d_s = T.alloc_shared([C], f32)
            where = T.alloc_local([3], "int32")
            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            T.copy(kv[where[0], i_h, 0:KP, i_v : i_v + BV], S)
            for d in T.Parallel(KP):
                z_s[d] = T.if_then_else(d < K, z[where[0], i_q, d], T.float32(0))
            if ahead:
                if where[1] < where[2]:
                    m.fetch(q_next, q, where[1], i_q, 0)
            for n in T.serial(T.ceildiv(where[2] - where[1], C)):
                t = where[1] + n * C
                m.await_fetched(ahead)
                m.load(q_f, q_next, q, t, i_q, 0)
                for i, d in T.Parallel(C, KP):
                    q_f[i, d] = T.cast(T.cast(m.feature(q_f[i, d], feature_map) * scale, tile), f32)
                    qz_f[i, d] = q_f[i, d] * z_s[d]
                T.reduce_sum(qz_f, d_f, dim=1)
                for i in T.Parallel(C):
                    d_f[i] += eps
                T.copy(d_f, d_s)
                m.fill(qs, q_f)
                if ahead:
                    T.sync_threads()  # all have taken this chunk
                    if t + C < where[2]:
                        m.fetch(q_next, q, t + C, i_q, 0)
                T.clear(num)
                m.multiply_state(num, qs, S, ss)
                for i, j in T.Parallel(C, BV):
                    num[i, j] /= T.if_then_else(normalize > 0, d_s[i], T.float32(1))
                T.copy(num, out_s)
                for i, j in T.Parallel(C, BV):
                    if (t + i < where[2]) & (i_v + j < V):
                        o[t + i, i_h, i_v + j] = out_s[i, j]
                if (keep_den > 0) & (i_v == 0) & (i_h == i_q * T.truncdiv(HV, H)):
                    for i in T.Parallel(C):
                        if t + i < where[2]:
                            den[t + i, i_q] = d_s[i]

    return emit_kernel


def expects(p: Problem, target: Target) -> Sequence[str]:
    """Of the forward kernel."""
    if target.arch == "sm_90a" and p.dtype != "float32":
        return ("HGMMA", "UTMALDG")
    return tensor_cores(p, target)


KERNELS = (
    Kernel("linear_attention.forward", forward, configs, expects=expects, whole=True),
    Kernel("linear_attention.carry", carry, state_configs, expects=tensor_cores),
    Kernel("linear_attention.scan", scan, scan_configs),
    Kernel("linear_attention.emit", emit, state_configs, expects=tensor_cores),
    cuda_decode.DECODE,
    *cuda_backward.KERNELS,
)
