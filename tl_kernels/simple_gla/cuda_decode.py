"""One step of scalar-gated linear attention on NVIDIA GPUs: a few tokens of each sequence, in place."""

from tl_kernels.cuda_sizes import DecodeConfig, decode_configs
from tl_kernels.spec import Kernel, Problem


def decode(p: Problem, c: DecodeConfig):
    """A few tokens of each sequence against its state, in place: S = exp(g) S + k v^T, o = scale q^T S.

    A program holds BV columns of the state in registers while the tokens pass. The pool and slots are those of
    linear attention: kv may be a view of something larger, rows and heads any distances apart (in elements, multiples
    of 4), [K, V] of a head in one piece, no two of them overlapping; a slot that is no row of the pool makes o NaN.
    """
    import tilelang.language as T

    from tl_kernels import cuda_macros as m

    BV, K, V, io, f32 = c.BV, p.K, p.V, p.dtype, "float32"
    NV = V // BV
    B, tokens, H, HV, P, M = (T.dynamic(n) for n in ("B", "tokens", "H", "HV", "P", "M"))
    kv_rows, kv_heads = (T.dynamic(n, "int64") for n in ("kv_rows", "kv_heads"))

    @T.prim_func
    def decode_kernel(
        q: T.Tensor([B, tokens, H, K], io),
        k: T.Tensor([B, tokens, H, K], io),
        v: T.Tensor([B, tokens, HV, V], io),
        g: T.Tensor([B, tokens, HV], f32),
        o: T.Tensor([B, tokens, HV, V], io),
        kv: T.StridedTensor([P, HV, K, V], [kv_rows, kv_heads, V, 1], f32),
        slots: T.Tensor([M], "int32"),
        use_slots: T.int32,
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
            num = T.alloc_fragment([BV], f32)
            q_s = T.alloc_shared([K], f32)
            k_s = T.alloc_shared([K], f32)
            v_s = T.alloc_shared([BV], f32)
            decay = T.alloc_local([1], f32)

            if row >= 0:
                T.copy(kv[row, i_h, 0:K, i_v : i_v + BV], S)
                for t in T.serial(tokens):
                    for d in T.Parallel(K):
                        q_s[d] = T.cast(q[i_b, t, i_q, d], f32) * scale
                        k_s[d] = T.cast(k[i_b, t, i_q, d], f32)
                    for j in T.Parallel(BV):
                        v_s[j] = T.cast(v[i_b, t, i_h, i_v + j], f32)
                    decay[0] = T.exp(g[i_b, t, i_h])
                    for d, j in T.Parallel(K, BV):
                        S[d, j] = decay[0] * S[d, j] + k_s[d] * v_s[j]
                        product[d, j] = q_s[d] * S[d, j]
                    T.reduce_sum(product, num, dim=0)
                    for j in T.Parallel(BV):
                        o[i_b, t, i_h, i_v + j] = T.cast(num[j], io)
                T.copy(S, kv[row, i_h, 0:K, i_v : i_v + BV])
            if row < 0:
                for t in T.serial(tokens):
                    for j in T.Parallel(BV):
                        o[i_b, t, i_h, i_v + j] = T.cast(m.unnamed(row), io)

    return decode_kernel


DECODE = Kernel("simple_gla.decode", decode, decode_configs, whole=True)
