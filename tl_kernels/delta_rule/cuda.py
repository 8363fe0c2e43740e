"""The gated delta rule on NVIDIA GPUs: a program walks the chunks of one sequence, value head and block of V.

    Sbar = exp(g_t) S_{t-1}     u_t = beta_t (v_t - Sbar^T k_t)     S_t = Sbar + k_t u_t^T     o_t = scale q_t^T S_t

(Yang et al. 2024, arXiv 2412.06464, eq. 10.) With S the state before the chunk, B = diag(beta), and decays D, f and l
as in tl_kernels/simple_gla/cuda.py,

    M = D * Q K^T, lower            N = D * K K^T, strictly lower

    Y + N B Y = V - f * K S         O = scale (M B Y + f * Q S)         S = f_C S + K^T (l * B Y)

Columns of Y do not depend on each other, nor do those of S, so blocks of V are programs of their own. Y is found by
forward substitution (cuda_macros.py).

S stays in registers in fp32 and goes through shared memory, rounded to the tiles' type, as an operand; so does Y, which
is kept in fp32 beside it. Tiles are those of simple_gla. A sequence is walked as a whole: what a span does to the state
is a matrix, which a scan would have to multiply.
"""

from tl_kernels.cuda_sizes import Blocks, tensor_cores, tile_dtype
from tl_kernels.delta_rule import cuda_backward, cuda_chunks, cuda_decode
from tl_kernels.delta_rule.cuda_sizes import ROWS, forward_configs, rows_of
from tl_kernels.spec import Kernel, Problem


def forward(p: Problem, c: Blocks):
    """O and the final state; where keeps > 0, what backward reads.

    That is Y, and the state before each chunk of `keeps` tokens, a multiple of C.
    """
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m
    from tl_kernels.delta_rule import cuda_macros as d

    C, BV, io, f32, tile = c.C, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V, KP = p.K, p.V, rows_of(p.K)
    NV, ahead = -(-V // BV), c.stages == 1
    tokens, H, HV, N0, N1, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "N0", "N1", "M"))
    G, rows, chunks = (T.dynamic(n) for n in ("G", "rows", "chunks"))

    @T.prim_func
    def forward_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        v: T.Tensor([tokens, HV, V], io),
        g: T.Tensor([G, HV], f32),
        beta: T.Tensor([tokens, HV], f32),
        o: T.Tensor([tokens, HV, V], io),
        kv0: T.Tensor([N0, HV, K, V], f32),
        kv1: T.Tensor([N1, HV, K, V], f32),
        y: T.Tensor([rows, HV, V], tile),
        states: T.Tensor([chunks, HV, K, V], tile),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        initial: T.int32,
        final: T.int32,
        keeps: T.int32,
        gated: T.int32,
        norm: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * HV * NV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NV, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_v = i_p % NV * BV
            qs = d.Rows(C, KP, tile, io, ahead)
            ks = d.Rows(C, KP, tile, io, ahead)
            ys = m.Tile(C, BV, tile)
            system = d.System(C, tile)  # I + N B
            cs = system.matrix  # M B, when Y is found
            ss = m.Tile(KP, BV, tile, twin=False)
            y_s = d.alloc_solved(C, BV)
            out_s = T.alloc_shared([C, BV], io)
            v_next = m.Ahead(C, BV, io, ahead, swizzled=True)  # read as Y lies
            gates = m.Gates(C)
            beta_next = T.alloc_shared([C], f32)
            beta_s = T.alloc_shared([C], f32)
            S = T.alloc_fragment([KP, BV], f32)
            num = T.alloc_fragment([C, BV], f32)
            acc = T.alloc_fragment([ROWS, BV], f32)
            A = T.alloc_fragment([C, C], f32)
            v_f = T.alloc_fragment([C, BV], f32)
            where = T.alloc_local([3], "int32")
            slot = T.alloc_local([1], "int32")
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.find_chunk(slot, where, cu_seqlens, length, T.max(keeps, 1))
            m.take_state(S, KP, BV, kv0, initial > 0, i_s, i_h, (0, i_v))
            for i in T.Parallel(C):
                gates.raw[i] = T.float32(0)
            T.sync_threads()
            if where[1] < where[2]:
                m.fetch(qs.next, q, where[1], i_q, 0)
                m.fetch(ks.next, k, where[1], i_q, 0)
                m.fetch(v_next, v, where[1], i_h, i_v)
                if gated > 0:
                    m.fetch_column(gates.raw, g, where[1], C, i_h)
                m.fetch_column(beta_next, beta, where[1], C, i_h)

            for n in T.serial(T.ceildiv(where[2] - where[1], C)):
                t = where[1] + n * C
                m.await_fetched(True)
                m.sum_gates(gates, where[2] - t)
                for i in T.Parallel(C):
                    beta_s[i] = T.Select(t + i < where[2], beta_next[i], T.float32(0))
                d.take_rows(qs, q, t, where[2] - t, i_q, norm > 0)
                d.take_rows(ks, k, t, where[2] - t, i_q, norm > 0)
                m.load(v_f, v_next, v, t, i_h, i_v)
                m.cleared(v_f, C, BV, where[2] - t)
                T.sync_threads()  # all have taken this chunk
                if t + C < where[2]:
                    m.fetch(qs.next, q, t + C, i_q, 0)
                    m.fetch(ks.next, k, t + C, i_q, 0)
                    m.fetch(v_next, v, t + C, i_h, i_v)
                    if gated > 0:
                        m.fetch_column(gates.raw, g, t + C, C, i_h)
                    m.fetch_column(beta_next, beta, t + C, C, i_h)

                # Y
                T.clear(A)
                m.multiply(A, ks, ks, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    A[i, j] = T.Select(j < i, A[i, j] * gates.decay(j, i) * beta_s[j], T.float32(0))
                d.fill_system(system, A)
                T.clear(num)
                m.multiply_state(num, ks, S, ss)
                if (keeps > 0) & (T.truncmod(n * C, T.max(keeps, 1)) == 0):
                    m.keep_state(states, slot[0] + T.truncdiv(n * C, T.max(keeps, 1)), i_h, (0, i_v), S, ss)
                for i, j in T.Parallel(C, BV):
                    num[i, j] = v_f[i, j] - num[i, j] * gates.first(i)
                T.copy(num, y_s[0:C, 0:BV])
                T.sync_threads()
                d.solve(system, y_s, ys, acc)
                if keeps > 0:
                    d.store_solved(y, y_s, ys, t, where[2], i_h, i_v, V)

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


FORWARD = Kernel("delta_rule.forward", forward, forward_configs, expects=tensor_cores, whole=True)
BACKWARD = cuda_backward.BACKWARD
PASSES = (FORWARD, BACKWARD, *cuda_chunks.KERNELS)
KERNELS = (*PASSES, cuda_decode.DECODE)
