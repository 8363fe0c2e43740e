"""Scalar-gated linear attention on NVIDIA GPUs: a program walks the chunks of one sequence, value head and block of V.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale q_t^T S_t

(Mamba-2, arXiv 2405.21060, section 6; RetNet, arXiv 2307.08621, eq. 7). With S the state before the chunk and decays

    D_ij = exp(g_{j+1} + ... + g_i) for j <= i, else 0
    f_i  = exp(g_1 + ... + g_i)                             l_j = exp(g_{j+1} + ... + g_C)

    O = scale ((D * Q K^T) V + f * Q S)         S = f_C S + K^T (l * V)

S stays in registers in fp32 and goes through shared memory, rounded to the tiles' type, as an operand. Tiles are
bfloat16, or two tf32 parts for float32, and for float16, whose range is too small for sums that nothing normalises.
Decays are those of m.Gates: exact for a gate of 0 and of -inf, and nothing cancels or overflows between.

Tokens, spans, and the two schedules of a pass are those of linear attention: `forward` alone over whole sequences; or,
where heads are few and sequences long, `carry` over spans of them, `scan`, and `forward` from the state before each
span. A span also leaves its decay, exp of the sum of its gates, for the scan. While a chunk is worked on the next one
is loaded by cp.async, where shared memory has room. For a backward pass `forward` leaves states, rounded to the tiles'
type, in slots that go by position (see m.find_chunk): spans and whole sequences leave the same ones.
"""

from collections.abc import Sequence

from tl_kernels.cuda_sizes import (
    Blocks,
    ScanConfig,
    blocks_of,
    fitting,
    gated,
    padded,
    scan_configs,
    tensor_cores,
    tile_dtype,
)
from tl_kernels.simple_gla import cuda_backward, cuda_decode
from tl_kernels.spec import Kernel, Problem, Target


def configs(p: Problem, target: Target) -> Sequence[Blocks]:
    """Whole rows of V first: each block of V beyond the first reads q and k again."""
    shapes = [(padded(p.K), b) for b in blocks_of(p.V)]
    return fitting(p, target, shapes, lambda BK, BV: gated(2 * BK + BV, BV, 2 * BK + BV))


def carry_configs(p: Problem, target: Target) -> Sequence[Blocks]:
    return fitting(p, target, [(padded(p.K), b) for b in blocks_of(p.V)], lambda BK, BV: gated(BK + BV, 0, BK + BV))


def forward(p: Problem, c: Blocks):
    """O and the final state; where keeps > 0, the state before each chunk of `keeps` tokens too, a multiple of C."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m

    C, BV, io, f32, tile = c.C, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V, KP = p.K, p.V, padded(p.K)
    NV, ahead = -(-V // BV), c.stages == 1
    tokens, H, HV, N0, N1, chunks, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "N0", "N1", "chunks", "M"))

    @T.prim_func
    def forward_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        v: T.Tensor([tokens, HV, V], io),
        g: T.Tensor([tokens, HV], f32),
        o: T.Tensor([tokens, HV, V], io),
        kv0: T.Tensor([N0, HV, K, V], f32),
        kv1: T.Tensor([N1, HV, K, V], f32),
        states: T.Tensor([chunks, HV, K, V], tile),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        initial: T.int32,
        final: T.int32,
        keeps: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * HV * NV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NV, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_v = i_p % NV * BV
            qs = m.Tile(C, KP, tile)
            ks = m.Tile(C, KP, tile)
            vs = m.Tile(C, BV, tile)
            cs = m.Tile(C, C, tile)
            ss = m.Tile(KP, BV, tile, twin=False)
            out_s = T.alloc_shared([C, BV], io)
            q_next = m.Ahead(C, KP, io, ahead)
            k_next = m.Ahead(C, KP, io, ahead)
            v_next = m.Ahead(C, BV, io, ahead)
            gates = m.Gates(C)
            S = T.alloc_fragment([KP, BV], f32)
            num = T.alloc_fragment([C, BV], f32)
            A = T.alloc_fragment([C, C], f32)
            q_f = T.alloc_fragment([C, KP], f32)
            k_f = T.alloc_fragment([C, KP], f32)
            v_f = T.alloc_fragment([C, BV], f32)
            where = T.alloc_local([3], "int32")
            slot = T.alloc_local([1], "int32")
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.find_chunk(slot, where, cu_seqlens, length, T.max(keeps, 1))
            m.take_state(S, KP, BV, kv0, initial > 0, i_s, i_h, (0, i_v))
            if where[1] < where[2]:
                m.fetch(q_next, q, where[1], i_q, 0)
                m.fetch(k_next, k, where[1], i_q, 0)
                m.fetch(v_next, v, where[1], i_h, i_v)
                m.fetch_column(gates.raw, g, where[1], C, i_h)

            for n in T.serial(T.ceildiv(where[2] - where[1], C)):
                t = where[1] + n * C
                m.await_fetched(True)
                m.sum_gates(gates, where[2] - t)
                m.load(q_f, q_next, q, t, i_q, 0)
                m.fill(qs, q_f)
                m.load(k_f, k_next, k, t, i_q, 0)
                m.cleared(k_f, C, KP, where[2] - t)
                m.fill(ks, k_f)
                m.load(v_f, v_next, v, t, i_h, i_v)
                m.cleared(v_f, C, BV, where[2] - t)
                m.fill(vs, v_f)
                T.sync_threads()  # all have taken this chunk
                if t + C < where[2]:
                    m.fetch(q_next, q, t + C, i_q, 0)
                    m.fetch(k_next, k, t + C, i_q, 0)
                    m.fetch(v_next, v, t + C, i_h, i_v)
                    m.fetch_column(gates.raw, g, t + C, C, i_h)

                T.clear(num)
                m.multiply_state(num, qs, S, ss)
                if (keeps > 0) & (T.truncmod(n * C, T.max(keeps, 1)) == 0):
                    kept = slot[0] + T.truncdiv(n * C, T.max(keeps, 1))
                    m.keep_state(states, kept, i_h, (0, i_v), S, ss)
                for i, j in T.Parallel(C, BV):
                    num[i, j] *= gates.first(i) * scale
                T.clear(A)
                m.multiply(A, qs, ks, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    A[i, j] = T.Select(j <= i, A[i, j] * gates.decay(j, i) * scale, T.float32(0))
                m.fill(cs, A)
                m.multiply(num, cs, vs)
                T.copy(num, out_s)
                m.store(o, out_s, t, where[2], i_h, i_v, V)

                for i, j in T.Parallel(KP, BV):
                    S[i, j] *= gates.whole
                for i in T.Parallel(C):
                    gates.factors[i] = gates.last(i)
                m.scale_tile(vs, v_f, gates.factors)
                m.multiply(S, ks, vs, transpose_A=True)

            if final > 0:
                T.copy(S, kv1[i_s, i_h, 0:KP, i_v : i_v + BV])

    return forward_kernel


def carry(p: Problem, c: Blocks):
    """What each span adds to a state, and what it leaves of it: exp of the sum of the span's gates.

    Forward, of x = k and y = v: S = f_C S + X^T (l * Y). Reverse, from the last chunk to the first, of x = q and
    y = dO, the same of the gradient of the state: R = f_C R + scale X^T (f * Y).
    """
    import tilelang.language as T

    from tl_kernels import cuda_macros as m

    C, BV, io, f32, tile = c.C, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V, KP = p.K, p.V, padded(p.K)
    NV, ahead = -(-V // BV), c.stages == 1
    tokens, H, HV, N0, N1, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "N0", "N1", "M"))

    @T.prim_func
    def carry_kernel(
        x: T.Tensor([tokens, H, K], io),
        y: T.Tensor([tokens, HV, V], io),
        g: T.Tensor([tokens, HV], f32),
        kv0: T.Tensor([N0, HV, K, V], f32),
        kv1: T.Tensor([N1, HV, K, V], f32),
        decay: T.Tensor([N1, HV], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        initial: T.int32,
        reverse: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * HV * NV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NV, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_v = i_p % NV * BV
            xs = m.Tile(C, KP, tile)
            ys = m.Tile(C, BV, tile)
            x_next = m.Ahead(C, KP, io, ahead)
            y_next = m.Ahead(C, BV, io, ahead)
            gates = m.Gates(C)
            S = T.alloc_fragment([KP, BV], f32)
            x_f = T.alloc_fragment([C, KP], f32)
            y_f = T.alloc_fragment([C, BV], f32)
            kept = T.alloc_local([1], f32)
            where = T.alloc_local([3], "int32")
            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.take_state(S, KP, BV, kv0, initial > 0, i_s, i_h, (0, i_v))
            kept[0] = T.float32(1)
            count = T.ceildiv(where[2] - where[1], C)
            begin = where[1] + T.if_then_else(reverse > 0, (count - 1) * C, 0)
            step = T.if_then_else(reverse > 0, -C, C)
            if count > 0:
                m.fetch(x_next, x, begin, i_q, 0)
                m.fetch(y_next, y, begin, i_h, i_v)
                m.fetch_column(gates.raw, g, begin, C, i_h)
            for n in T.serial(count):
                t = begin + n * step
                m.await_fetched(True)
                m.sum_gates(gates, where[2] - t)
                for i in T.Parallel(C):
                    gates.factors[i] = T.if_then_else(reverse > 0, gates.first(i) * scale, gates.last(i))
                m.load(x_f, x_next, x, t, i_q, 0)
                m.cleared(x_f, C, KP, where[2] - t)
                m.fill(xs, x_f)
                m.load(y_f, y_next, y, t, i_h, i_v)
                m.cleared(y_f, C, BV, where[2] - t)
                for i, j in T.Parallel(C, BV):
                    y_f[i, j] *= gates.factors[i]
                m.fill(ys, y_f)
                T.sync_threads()  # all have taken this chunk
                if n + 1 < count:
                    m.fetch(x_next, x, t + step, i_q, 0)
                    m.fetch(y_next, y, t + step, i_h, i_v)
                    m.fetch_column(gates.raw, g, t + step, C, i_h)
                for i, j in T.Parallel(KP, BV):
                    S[i, j] *= gates.whole
                kept[0] *= gates.whole
                m.multiply(S, xs, ys, transpose_A=True)
            T.copy(S, kv1[i_s, i_h, 0:KP, i_v : i_v + BV])
            if (i_v == 0) & (T.get_thread_binding() == 0):
                decay[i_s, i_h] = kept[0]

    return carry_kernel


def scan(p: Problem, c: ScanConfig):
    """States of spans -> the state before each span, in place, and the final state; from the end for gradients."""
    import tilelang.language as T

    from tl_kernels import cuda_macros as m

    KV, block, f32 = p.K * p.V, c.block, "float32"
    S, N0, N1, HV, M = (T.dynamic(n) for n in ("S", "N0", "N1", "HV", "M"))

    @T.prim_func
    def scan_kernel(
        kv: T.Tensor([S, HV, KV], f32),
        decay: T.Tensor([S, HV], f32),
        kv0: T.Tensor([N0, HV, KV], f32),
        kv1: T.Tensor([N1, HV, KV], f32),
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
                    total[e] = total[e] * decay[slot, i_h] + x[e]
            if final > 0:
                T.copy(total, kv1[i_n, i_h, first : first + block])

    return scan_kernel


KERNELS = (
    Kernel("simple_gla.forward", forward, configs, expects=tensor_cores, whole=True),
    Kernel("simple_gla.carry", carry, carry_configs, expects=tensor_cores),
    Kernel("simple_gla.scan", scan, scan_configs),
    cuda_decode.DECODE,
    *cuda_backward.KERNELS,
)
