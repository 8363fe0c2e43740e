"""One step of the delta rule, gated or not, on NVIDIA GPUs: a few tokens of each sequence, in place."""

from tl_kernels.cuda_sizes import DecodeConfig, decode_configs
from tl_kernels.delta_rule.norm import NORM_EPS
from tl_kernels.spec import Kernel, Problem


def decode(p: Problem, c: DecodeConfig):
    """A few tokens of each sequence against its state, in place.

        u = beta (v - exp(g) S^T k)        S = exp(g) S + k u^T        o = scale q^T S

    What k and q see of the old state is summed in one go, since o = exp(g) scale q^T S + (scale q . k) u; so a token
    waits once for all threads, and not twice.

    A program holds BV columns of the state in registers while the tokens pass. The pool and slots are those of
    linear attention: kv may be a view of something larger, rows and heads any distances apart (in elements, multiples
    of 4), [K, V] of a head in one piece, no two of them overlapping; a slot that is no row of the pool makes o NaN.
    Without gates g has no rows. With norm > 0, q and k are divided by the root of their squared length plus NORM_EPS.
    """
    import tilelang.language as T

    from tl_kernels import cuda_macros as m

    BV, K, V, io, f32 = c.BV, p.K, p.V, p.dtype, "float32"
    NV = V // BV
    KP = 1 << (K - 1).bit_length()  # a power of two: what TileLang 0.1.15 sums to one number over threads
    B, G, tokens, H, HV, P, M = (T.dynamic(n) for n in ("B", "G", "tokens", "H", "HV", "P", "M"))
    kv_rows, kv_heads = (T.dynamic(n, "int64") for n in ("kv_rows", "kv_heads"))

    @T.prim_func
    def decode_kernel(
        q: T.Tensor([B, tokens, H, K], io),
        k: T.Tensor([B, tokens, H, K], io),
        v: T.Tensor([B, tokens, HV, V], io),
        g: T.Tensor([G, tokens, HV], f32),
        beta: T.Tensor([B, tokens, HV], f32),
        o: T.Tensor([B, tokens, HV, V], io),
        kv: T.StridedTensor([P, HV, K, V], [kv_rows, kv_heads, V, 1], f32),
        slots: T.Tensor([M], "int32"),
        use_slots: T.int32,
        gated: T.int32,
        norm: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(B * NV, HV, threads=c.threads) as (i_bv, i_h):
            T.assume(kv_rows % 4 == 0)
            T.assume(kv_heads % 4 == 0)
            i_v = i_bv % NV * BV
            i_b = i_bv // NV
            i_q = T.truncdiv(i_h, T.truncdiv(HV, H))
            word = m.pool_word(slots, use_slots, i_b)
            row = m.pool_row(word, slots, use_slots, i_b, P)
            S = T.alloc_fragment([K, BV], f32)
            product = T.alloc_fragment([K, BV], f32)
            kS = T.alloc_fragment([BV], f32)
            qS = T.alloc_fragment([BV], f32)
            x_f = T.alloc_fragment([KP], f32)
            qq = T.alloc_fragment([1], f32)
            kk = T.alloc_fragment([1], f32)
            qk = T.alloc_fragment([1], f32)
            q_s = T.alloc_shared([KP], f32)
            k_s = T.alloc_shared([KP], f32)
            v_s = T.alloc_shared([BV], f32)
            u_s = T.alloc_shared([BV], f32)
            decay = T.alloc_local([1], f32)
            weight = T.alloc_local([1], f32)

            if row >= 0:
                T.copy(kv[row, i_h, 0:K, i_v : i_v + BV], S)
                for d in T.Parallel(KP):
                    if d >= K:
                        q_s[d] = T.float32(0)
                        k_s[d] = T.float32(0)
                for t in T.serial(tokens):
                    decay[0] = T.float32(1)
                    if gated > 0:
                        decay[0] = T.exp(g[i_b, t, i_h])
                    weight[0] = beta[i_b, t, i_h]
                    for d in T.Parallel(K):
                        q_s[d] = T.cast(q[i_b, t, i_q, d], f32)
                        k_s[d] = T.cast(k[i_b, t, i_q, d], f32)
                    for j in T.Parallel(BV):
                        v_s[j] = T.cast(v[i_b, t, i_h, i_v + j], f32)
                    for d in T.Parallel(KP):
                        x_f[d] = q_s[d] * q_s[d]
                    T.reduce_sum(x_f, qq, dim=0)
                    for d in T.Parallel(KP):
                        x_f[d] = k_s[d] * k_s[d]
                    T.reduce_sum(x_f, kk, dim=0)
                    for d in T.Parallel(KP):
                        x_f[d] = q_s[d] * k_s[d]
                    T.reduce_sum(x_f, qk, dim=0)
                    q_unit = scale * T.if_then_else(norm > 0, T.rsqrt(qq[0] + T.float32(NORM_EPS)), T.float32(1))
                    k_unit = T.if_then_else(norm > 0, T.rsqrt(kk[0] + T.float32(NORM_EPS)), T.float32(1))
                    for d, j in T.Parallel(K, BV):
                        S[d, j] *= decay[0]
                        product[d, j] = k_s[d] * S[d, j]
                    T.reduce_sum(product, kS, dim=0)
                    for d, j in T.Parallel(K, BV):
                        product[d, j] = q_s[d] * S[d, j]
                    T.reduce_sum(product, qS, dim=0)
                    for j in T.Parallel(BV):
                        kS[j] = weight[0] * (v_s[j] - k_unit * kS[j])
                        qS[j] = q_unit * (qS[j] + k_unit * qk[0] * kS[j])
                    for j in T.Parallel(BV):
                        u_s[j] = kS[j]
                    for j in T.Parallel(BV):
                        o[i_b, t, i_h, i_v + j] = T.cast(qS[j], io)
                    for d, j in T.Parallel(K, BV):
                        S[d, j] += k_unit * k_s[d] * u_s[j]
                T.copy(S, kv[row, i_h, 0:K, i_v : i_v + BV])
            if row < 0:
                for t in T.serial(tokens):
                    for j in T.Parallel(BV):
                        o[i_b, t, i_h, i_v + j] = T.cast(m.unnamed(row), io)

    return decode_kernel


DECODE = Kernel("delta_rule.decode", decode, decode_configs, whole=True)
