"""One step of linear attention on NVIDIA GPUs: a few tokens of each sequence against its state, in place."""

from tl_kernels.cuda_sizes import DecodeConfig, decode_configs
from tl_kernels.spec import Kernel, Problem


def decode(p: Problem, c: DecodeConfig):
    """A few tokens of each sequence against its state, in place: S += phi(k) v^T, z += phi(k), o as above.

    A program holds BV columns of the state in registers while the tokens pass. All programs of a q/k head read z, so
    that a launch of its own writes it, after them.

    kv and z may be views of something larger: rows and heads lie any distances apart (in elements, multiples of 4 for
    vectors of 16 bytes), [K, V] of a head in one piece. No two of them overlap.

    use_slots: 0, sequence i has row i; 1, row slots[i]; 2, slots is int64 [B], seen as pairs of int32. Slot -1 is
    padding: o is 0. Any other that is no row of the pools leaves them alone, and o is NaN: nothing else tells of it,
    since a host that looked at slots would wait for the device.
    """
    import tilelang.language as T

    from tl_kernels import cuda_macros as m

    BV, K, V, io, f32 = c.BV, p.K, p.V, p.dtype, "float32"
    NV = V // BV
    B, tokens, H, HV, P, M = (T.dynamic(n) for n in ("B", "tokens", "H", "HV", "P", "M"))
    strides = ("kv_rows", "kv_heads", "z_rows", "z_heads")
    kv_rows, kv_heads, z_rows, z_heads = (T.dynamic(n, "int64") for n in strides)

    @T.prim_func
    def decode_kernel(
        q: T.Tensor([B, tokens, H, K], io),
        k: T.Tensor([B, tokens, H, K], io),
        v: T.Tensor([B, tokens, HV, V], io),
        o: T.Tensor([B, tokens, HV, V], io),
        kv: T.StridedTensor([P, HV, K, V], [kv_rows, kv_heads, V, 1], f32),
        z: T.StridedTensor([P, H, K], [z_rows, z_heads, 1], f32),
        slots: T.Tensor([M], "int32"),
        use_slots: T.int32,
        feature_map: T.int32,
        normalize: T.int32,
        scale: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(B * NV, HV, threads=c.threads) as (i_bv, i_h):
            T.assume(kv_rows % 4 == 0)
            T.assume(kv_heads % 4 == 0)
            T.assume(z_rows % 4 == 0)
            T.assume(z_heads % 4 == 0)
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
            z_s = T.alloc_shared([K], f32)
            qz_f = T.alloc_fragment([K, BV], f32)  # the same in every column: den lies with the columns of num
            den = T.alloc_fragment([BV], f32)

            if row >= 0:
                T.copy(kv[row, i_h, 0:K, i_v : i_v + BV], S)
                for d in T.Parallel(K):
                    z_s[d] = z[row, i_q, d]
                for t in T.serial(tokens):
                    for d in T.Parallel(K):
                        q_s[d] = m.feature(T.cast(q[i_b, t, i_q, d], f32), feature_map) * scale
                        k_s[d] = m.feature(T.cast(k[i_b, t, i_q, d], f32), feature_map)
                    for j in T.Parallel(BV):
                        v_s[j] = T.cast(v[i_b, t, i_h, i_v + j], f32)
                    for d in T.Parallel(K):
                        z_s[d] += k_s[d]
                    for d, j in T.Parallel(K, BV):
                        S[d, j] += k_s[d] * v_s[j]
                        product[d, j] = q_s[d] * S[d, j]
                        qz_f[d, j] = q_s[d] * z_s[d]
                    T.reduce_sum(product, num, dim=0)
                    T.reduce_sum(qz_f, den, dim=0)
                    for j in T.Parallel(BV):
                        o[i_b, t, i_h, i_v + j] = T.cast(
                            num[j] / T.if_then_else(normalize > 0, den[j] + eps, T.float32(1)), io
                        )
                T.copy(S, kv[row, i_h, 0:K, i_v : i_v + BV])
            if row < 0:
                for t in T.serial(tokens):
                    for j in T.Parallel(BV):
                        o[i_b, t, i_h, i_v + j] = T.cast(m.unnamed(row), io)

        with T.Kernel(B, H, threads=K) as (i_zb, i_zh):
            z_word = m.pool_word(slots, use_slots, i_zb)
            z_row = m.pool_row(z_word, slots, use_slots, i_zb, P)
            z_new = T.alloc_fragment([K], f32)
            if z_row >= 0:
                for d in T.Parallel(K):
                    z_new[d] = z[z_row, i_zh, d]
                for t in T.serial(tokens):
                    for d in T.Parallel(K):
                        z_new[d] += m.feature(T.cast(k[i_zb, t, i_zh, d], f32), feature_map)
                for d in T.Parallel(K):
                    z[z_row, i_zh, d] = z_new[d]

    return decode_kernel


DECODE = Kernel("linear_attention.decode", decode, decode_configs, whole=True)
