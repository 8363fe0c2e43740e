"""Linear attention on the CPU, one chunk of one q/k head and its value heads at a time.

With Q, K after the feature map, Q scaled, S and z the state before the chunk (arXiv 2006.16236, eq. 4-12):

    A = tril(Q K^T)      den = rowsum(A) + Q z + eps      O = (A V + Q S) / den
    S += K^T V           z += colsum(K)

and backward, with dN = dO / den, dD = -rowsum(dO * O) / den, R the state seen from the end:

    P = tril(dN V^T + dD)
    dQ = P K + dN S^T + dD z^T       dK = P^T Q + V R^T + rz^T        dV = A^T dN + K R
    R += Q^T dN                      rz += Q^T dD

Three switches make every pass out of these three kernels: `causal` (the terms inside the chunk), `emit` (write
outputs; 2 also writes den, for a backward pass to come), `carry` (update the state). Causal passes set all three; a
non-causal pass first carries over all keys without emitting, then emits for all queries without carrying. The
launcher walks the chunks, calls the kernel once a chunk and head, and keeps states in panels [columns / NR, rows, NR]
padded with zeros, so that a panel is contiguous in L1 and any K and V up to 256 fit. Value heads that share a q/k
head (HV > H) are walked inside: they share A, P and den.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tl_kernels.spec import MAX_HEAD_DIM, Arg, Kernel, Problem, Target

D_MAX = MAX_HEAD_DIM


@dataclass(frozen=True)
class Config:
    C: int  # tokens a chunk
    MR: int  # rows of the register tile
    NR: int  # its columns, and the width of a state panel


@dataclass(frozen=True)
class DecodeConfig:
    C: int  # tokens a call
    NR: int  # columns of the state that pass through registers together


def configs(p: Problem, target: Target) -> Sequence[Config]:
    # an AVX2 core has half the registers: 2 x 32 or 4 x 16 fills them
    tiles = ((4, 32), (8, 32), (4, 64)) if target.lanes == 16 else ((2, 32), (4, 32))
    return [Config(C, MR, NR) for C in (32, 64) for MR, NR in tiles if C % NR == 0]


def decode_configs(p: Problem, target: Target) -> Sequence[DecodeConfig]:
    return [DecodeConfig(4, NR) for NR in (128, 64)]



def chunk_fwd(p: Problem, c: Config):
    """O, den and the next state of one chunk."""
    import tilelang.language as T

    from tl_kernels import macros as m

    C, MR, NR, io = c.C, c.MR, c.NR, m.storage(p.dtype)
    load_row, store_row = m.row_format(p.dtype)
    fma, prefetch = m.register_tile(MR, NR), m.prefetcher(p.dtype)
    n = T.dynamic("n")

    @T.prim_func
    def chunk_fwd_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        v: T.Tensor([n], io),
        o: T.Tensor([n], io),
        den: T.Tensor([n], "float32"),
        kv: T.Tensor([n], "float32"),
        z: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        o_row: T.int64,
        den_row: T.int64,
        v_head: T.int64,
        o_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        causal: T.int32,
        emit: T.int32,
        carry: T.int32,
        feature_map: T.int32,
        normalize: T.int32,
        scale: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(1) as _:
            x = T.alloc_local([C * D_MAX], "float32")  # phi(k), then scale phi(q)
            kT = T.alloc_local([D_MAX * C], "float32")
            a = T.alloc_local([C * C], "float32")
            vs = T.alloc_local([C * D_MAX], "float32")
            ksum = T.alloc_local([D_MAX], "float32")
            inv = T.alloc_local([C], "float32")
            acc = T.alloc_local([MR * NR], "float32")
            tile = m.TileShape(MR, NR, acc, fma)
            total = T.alloc_local([1], "float32")
            Kp = m.round_up(K, 16)
            panels = (V + (NR - 1)) // NR

            if causal + carry > 0:
                m.load_features(x, Kp, m.Rows(k, k_row, rows, K), C, load_row, feature_map)
                m.transpose(kT, C, x, Kp, C // 16, Kp // 16)
                for d in T.serial(Kp):
                    ksum[d] = T.float32(0)
                for i in T.serial(C):
                    for d in T.serial(Kp):
                        ksum[d] += x[i * Kp + d]

            if emit > 0:
                m.load_features(x, Kp, m.Rows(q, q_row, rows, K), C, load_row, feature_map)
                m.scale_rows(x, C * Kp, scale)
                for ib, jb in T.grid(C // MR, C // NR):
                    for e in T.serial(MR * NR):
                        acc[e] = T.float32(0)
                    fma(
                        acc,
                        Kp * causal,
                        lambda i, d: x[(ib * MR + i) * Kp + d],
                        lambda d, j: kT[d * C + jb * NR + j],
                    )
                    for i, j in T.grid(MR, NR):
                        a[(ib * MR + i) * C + jb * NR + j] = T.if_then_else(
                            jb * NR + j <= ib * MR + i, acc[i * NR + j], T.float32(0)
                        )
                for i in T.serial(C):
                    total[0] = eps
                    for j in T.serial(C):
                        total[0] += a[i * C + j]
                    for d in T.serial(Kp):
                        total[0] += x[i * Kp + d] * z[d]
                    inv[i] = T.if_then_else(normalize > 0, T.float32(1) / total[0], T.float32(1))
                    if emit > 1:
                        if i < rows:
                            den[i * den_row] = total[0]

            for h in T.serial(heads):
                if causal + carry > 0:
                    m.load_panels(vs, NR, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                for jb in T.serial(panels):
                    if emit > 0:
                        for ib in T.serial(C // MR):
                            prefetch(m.Rows(q, q_row, rows, K), C + ib * MR, MR, jb * NR, NR)
                            prefetch(m.Rows(k, k_row, rows, K), C + ib * MR, MR, jb * NR, NR)
                            prefetch(m.Rows(v, v_row, rows, V, h * v_head), C + ib * MR, MR, jb * NR, NR)
                            for e in T.serial(MR * NR):
                                acc[e] = T.float32(0)
                            fma(
                                acc,
                                Kp,
                                lambda i, d: x[(ib * MR + i) * Kp + d],
                                lambda d, j: kv[((h * panels + jb) * Kp + d) * NR + j],
                            )
                            fma(
                                acc,
                                (ib + 1) * MR * causal,
                                lambda i, t: a[(ib * MR + i) * C + t],
                                lambda t, j: vs[(jb * C + t) * NR + j],
                            )
                            m.scale_tile(tile, inv, ib * MR)
                            m.store_tile_rows(
                                m.Rows(o, o_row, rows, V, h * o_head), tile, ib * MR, jb * NR, store_row
                            )
                    if carry > 0:
                        m.update_panel(
                            kv,
                            (h * panels + jb) * Kp * NR,
                            tile,
                            Kp // MR,
                            C,
                            1.0,
                            lambda i, t: kT[i * C + t],
                            lambda t, j: vs[(jb * C + t) * NR + j],
                        )
            if carry > 0:
                for d in T.serial(Kp):
                    z[d] += ksum[d]

    return chunk_fwd_kernel


def chunk_bwd_q(p: Problem, c: Config):
    """dQ of one chunk, walking forward with the state kept transposed, [V, K]."""
    import tilelang.language as T

    from tl_kernels import macros as m

    C, MR, NR, io = c.C, c.MR, c.NR, m.storage(p.dtype)
    load_row, store_row = m.row_format(p.dtype)
    fma, prefetch = m.register_tile(MR, NR), m.prefetcher(p.dtype)
    n = T.dynamic("n")

    @T.prim_func
    def chunk_bwd_q_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        v: T.Tensor([n], io),
        o: T.Tensor([n], io),
        dout: T.Tensor([n], io),
        dq: T.Tensor([n], io),
        den: T.Tensor([n], "float32"),
        kv: T.Tensor([n], "float32"),
        z: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        o_row: T.int64,
        dout_row: T.int64,
        dq_row: T.int64,
        den_row: T.int64,
        v_head: T.int64,
        o_head: T.int64,
        dout_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        causal: T.int32,
        emit: T.int32,
        carry: T.int32,
        feature_map: T.int32,
        normalize: T.int32,
        scale: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(1) as _:
            kp = T.alloc_local([D_MAX * C], "float32")  # phi(k) in panels
            x = T.alloc_local([C * D_MAX], "float32")  # v, then dN
            vT = T.alloc_local([D_MAX * C], "float32")
            b = T.alloc_local([C * C], "float32")  # P
            dx = T.alloc_local([C * D_MAX], "float32")  # dQ in panels, then in rows
            dden = T.alloc_local([C], "float32")
            inv = T.alloc_local([C], "float32")
            acc = T.alloc_local([MR * NR], "float32")
            tile = m.TileShape(MR, NR, acc, fma)
            row = T.alloc_local([D_MAX], "float32")
            total = T.alloc_local([1], "float32")
            Vp = m.round_up(V, 16)
            panels = (K + (NR - 1)) // NR

            if causal + carry > 0:
                m.load_feature_panels(kp, NR, m.Rows(k, k_row, rows, K), C, load_row, feature_map)
            m.invert(inv, dden, m.Rows(den, den_row, rows, 1), C, normalize)
            for e in T.serial(C * C):
                b[e] = T.float32(0)
            for e in T.serial(panels * C * NR):
                dx[e] = T.float32(0)

            for h in T.serial(heads):
                if causal + carry > 0:
                    m.load_rows(x, Vp, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                    m.transpose(vT, C, x, Vp, C // 16, Vp // 16)
                if emit > 0:
                    m.load_rows(x, Vp, m.Rows(dout, dout_row, rows, V, h * dout_head), C, load_row)
                    out = m.Rows(o, o_row, rows, V, h * o_head)
                    m.normalize_grads(x, Vp, dden, inv, out, row, total, load_row, normalize)
                    for ib, jb in T.grid(C // MR, C // NR):
                        for i, j in T.grid(MR, NR):
                            acc[i * NR + j] = b[(ib * MR + i) * C + jb * NR + j]
                        fma(
                            acc,
                            Vp * causal,
                            lambda i, d: x[(ib * MR + i) * Vp + d],
                            lambda d, j: vT[d * C + jb * NR + j],
                        )
                        for i, j in T.grid(MR, NR):
                            b[(ib * MR + i) * C + jb * NR + j] = acc[i * NR + j]
                for jb in T.serial(panels):
                    if emit > 0:
                        for ib in T.serial(C // MR):
                            prefetch(m.Rows(k, k_row, rows, K), C + ib * MR, MR, jb * NR, NR)
                            prefetch(m.Rows(v, v_row, rows, V, h * v_head), C + ib * MR, MR, jb * NR, NR)
                            prefetch(m.Rows(dout, dout_row, rows, V, h * dout_head), C + ib * MR, MR, jb * NR, NR)
                            prefetch(m.Rows(o, o_row, rows, V, h * o_head), C + ib * MR, MR, jb * NR, NR)
                            for e in T.serial(MR * NR):
                                acc[e] = dx[(jb * C + ib * MR) * NR + e]
                            fma(
                                acc,
                                Vp,
                                lambda i, d: x[(ib * MR + i) * Vp + d],
                                lambda d, j: kv[((h * panels + jb) * Vp + d) * NR + j],
                            )
                            for e in T.serial(MR * NR):
                                dx[(jb * C + ib * MR) * NR + e] = acc[e]
                    if carry > 0:
                        m.update_panel(
                            kv,
                            (h * panels + jb) * Vp * NR,
                            tile,
                            Vp // MR,
                            C,
                            1.0,
                            lambda i, t: vT[i * C + t],
                            lambda t, j: kp[(jb * C + t) * NR + j],
                        )

            if emit > 0:
                for ib, jb in T.grid(C // MR, C // NR):
                    for i, j in T.grid(MR, NR):
                        b[(ib * MR + i) * C + jb * NR + j] = T.if_then_else(
                            jb * NR + j <= ib * MR + i,
                            b[(ib * MR + i) * C + jb * NR + j] + dden[ib * MR + i],
                            T.float32(0),
                        )
                for jb in T.serial(panels):
                    for ib in T.serial(C // MR):
                        for i, j in T.grid(MR, NR):
                            acc[i * NR + j] = dx[(jb * C + ib * MR + i) * NR + j] + dden[ib * MR + i] * z[jb * NR + j]
                        fma(
                            acc,
                            (ib + 1) * MR * causal,
                            lambda i, t: b[(ib * MR + i) * C + t],
                            lambda t, j: kp[(jb * C + t) * NR + j],
                        )
                        for i, j in T.grid(MR, NR):
                            x[(ib * MR + i) * (panels * NR) + jb * NR + j] = acc[i * NR + j]
                m.store_slopes(
                    m.Rows(dq, dq_row, rows, K),
                    x,
                    panels * NR,
                    m.Rows(q, q_row, rows, K),
                    row,
                    load_row,
                    store_row,
                    feature_map,
                    scale,
                )
            if carry > 0:
                for jb in T.serial(panels):
                    for t in T.serial(C):
                        for j in T.serial(NR):
                            z[jb * NR + j] += kp[(jb * C + t) * NR + j]

    return chunk_bwd_q_kernel


def chunk_bwd_kv(p: Problem, c: Config):
    """dK and dV of one chunk, walking backward; kv and z hold R and rz, the gradient of the state."""
    import tilelang.language as T

    from tl_kernels import macros as m

    C, MR, NR, io = c.C, c.MR, c.NR, m.storage(p.dtype)
    load_row, store_row = m.row_format(p.dtype)
    fma, prefetch = m.register_tile(MR, NR), m.prefetcher(p.dtype)
    n = T.dynamic("n")

    @T.prim_func
    def chunk_bwd_kv_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        v: T.Tensor([n], io),
        o: T.Tensor([n], io),
        dout: T.Tensor([n], io),
        dk: T.Tensor([n], io),
        dv: T.Tensor([n], io),
        den: T.Tensor([n], "float32"),
        kv: T.Tensor([n], "float32"),
        z: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        o_row: T.int64,
        dout_row: T.int64,
        dk_row: T.int64,
        dv_row: T.int64,
        den_row: T.int64,
        v_head: T.int64,
        o_head: T.int64,
        dout_head: T.int64,
        dv_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        causal: T.int32,
        emit: T.int32,
        carry: T.int32,
        feature_map: T.int32,
        normalize: T.int32,
        scale: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(1) as _:
            x = T.alloc_local([C * D_MAX], "float32")  # phi(k), v; at the end dK in rows
            xq = T.alloc_local([C * D_MAX], "float32")  # scale phi(q)
            kT = T.alloc_local([D_MAX * C], "float32")
            vT = T.alloc_local([D_MAX * C], "float32")
            dn = T.alloc_local([C * D_MAX], "float32")  # dN in rows, for P
            dp = T.alloc_local([C * D_MAX], "float32")  # dN in panels
            a = T.alloc_local([C * C], "float32")
            b = T.alloc_local([C * C], "float32")  # P
            dkT = T.alloc_local([D_MAX * C], "float32")
            dden = T.alloc_local([C], "float32")
            inv = T.alloc_local([C], "float32")
            acc = T.alloc_local([MR * NR], "float32")
            tile = m.TileShape(MR, NR, acc, fma)
            row = T.alloc_local([D_MAX], "float32")
            total = T.alloc_local([1], "float32")
            Kp = m.round_up(K, 16)
            Vp = m.round_up(V, NR)
            panels = (V + (NR - 1)) // NR

            if emit > 0:
                m.load_features(x, Kp, m.Rows(k, k_row, rows, K), C, load_row, feature_map)
                m.transpose(kT, C, x, Kp, C // 16, Kp // 16)
                for d in T.serial(Kp):
                    for t in T.serial(C):
                        dkT[d * C + t] = z[d]
            if causal + carry > 0:
                m.load_features(xq, Kp, m.Rows(q, q_row, rows, K), C, load_row, feature_map)
                m.scale_rows(xq, C * Kp, scale)
                m.invert(inv, dden, m.Rows(den, den_row, rows, 1), C, normalize)
            for e in T.serial(C * C):
                b[e] = T.float32(0)
            for ib, jb in T.grid(C // MR, C // NR):
                for e in T.serial(MR * NR):
                    acc[e] = T.float32(0)
                fma(
                    acc,
                    Kp * causal * emit,
                    lambda i, d: xq[(ib * MR + i) * Kp + d],
                    lambda d, j: kT[d * C + jb * NR + j],
                )
                for i, j in T.grid(MR, NR):
                    a[(ib * MR + i) * C + jb * NR + j] = T.if_then_else(
                        jb * NR + j <= ib * MR + i, acc[i * NR + j], T.float32(0)
                    )

            for h in T.serial(heads):
                if causal + carry > 0:
                    m.load_rows(dn, Vp, m.Rows(dout, dout_row, rows, V, h * dout_head), C, load_row)
                    out = m.Rows(o, o_row, rows, V, h * o_head)
                    m.normalize_grads(dn, Vp, dden, inv, out, row, total, load_row, normalize)
                    for jb in T.serial(panels):
                        for t in T.serial(C):
                            for j in T.serial(NR):
                                dp[(jb * C + t) * NR + j] = dn[t * Vp + jb * NR + j]
                if emit > 0:
                    m.load_rows(x, Vp, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                    m.transpose(vT, C, x, Vp, C // 16, Vp // 16)
                    for ib, jb in T.grid(C // MR, C // NR):
                        for i, j in T.grid(MR, NR):
                            acc[i * NR + j] = b[(ib * MR + i) * C + jb * NR + j]
                        fma(
                            acc,
                            Vp * causal,
                            lambda i, d: dn[(ib * MR + i) * Vp + d],
                            lambda d, j: vT[d * C + jb * NR + j],
                        )
                        for i, j in T.grid(MR, NR):
                            b[(ib * MR + i) * C + jb * NR + j] = acc[i * NR + j]
                    for kb, jb in T.grid(Kp // MR, C // NR):
                        for i, j in T.grid(MR, NR):
                            acc[i * NR + j] = dkT[(kb * MR + i) * C + jb * NR + j]
                        fma(
                            acc,
                            Vp,
                            lambda i, d: kv[((h * panels + d // NR) * Kp + kb * MR + i) * NR + d % NR],
                            lambda d, j: vT[d * C + jb * NR + j],
                        )
                        for i, j in T.grid(MR, NR):
                            dkT[(kb * MR + i) * C + jb * NR + j] = acc[i * NR + j]
                for jb in T.serial(panels):
                    if emit > 0:
                        for ib in T.serial(C // MR):
                            prefetch(m.Rows(q, q_row, rows, K), ib * MR - C, MR, jb * NR, NR)
                            prefetch(m.Rows(k, k_row, rows, K), ib * MR - C, MR, jb * NR, NR)
                            prefetch(m.Rows(v, v_row, rows, V, h * v_head), ib * MR - C, MR, jb * NR, NR)
                            prefetch(m.Rows(dout, dout_row, rows, V, h * dout_head), ib * MR - C, MR, jb * NR, NR)
                            prefetch(m.Rows(o, o_row, rows, V, h * o_head), ib * MR - C, MR, jb * NR, NR)
                            for e in T.serial(MR * NR):
                                acc[e] = T.float32(0)
                            fma(
                                acc,
                                Kp,
                                lambda i, d: kT[d * C + ib * MR + i],
                                lambda d, j: kv[((h * panels + jb) * Kp + d) * NR + j],
                            )
                            fma(
                                acc,
                                (C - ib * MR) * causal,
                                lambda i, t: a[(ib * MR + t) * C + ib * MR + i],
                                lambda t, j: dp[(jb * C + ib * MR + t) * NR + j],
                            )
                            m.store_tile_rows(
                                m.Rows(dv, dv_row, rows, V, h * dv_head), tile, ib * MR, jb * NR, store_row
                            )
                    if carry > 0:
                        m.update_panel(
                            kv,
                            (h * panels + jb) * Kp * NR,
                            tile,
                            Kp // MR,
                            C,
                            1.0,
                            lambda i, t: xq[t * Kp + i],
                            lambda t, j: dp[(jb * C + t) * NR + j],
                        )

            if emit > 0:
                for ib, jb in T.grid(C // MR, C // NR):
                    for i, j in T.grid(MR, NR):
                        b[(ib * MR + i) * C + jb * NR + j] = T.if_then_else(
                            jb * NR + j <= ib * MR + i,
                            b[(ib * MR + i) * C + jb * NR + j] + dden[ib * MR + i],
                            T.float32(0),
                        )
                for kb, jb in T.grid(Kp // MR, C // NR):
                    for i, j in T.grid(MR, NR):
                        acc[i * NR + j] = dkT[(kb * MR + i) * C + jb * NR + j]
                    fma(
                        acc,
                        C * causal,
                        lambda i, t: xq[t * Kp + kb * MR + i],
                        lambda t, j: b[t * C + jb * NR + j],
                    )
                    for i, j in T.grid(MR, NR):
                        dkT[(kb * MR + i) * C + jb * NR + j] = acc[i * NR + j]
                m.transpose(x, Kp, dkT, C, Kp // 16, C // 16)
                m.store_slopes(
                    m.Rows(dk, dk_row, rows, K),
                    x,
                    Kp,
                    m.Rows(k, k_row, rows, K),
                    row,
                    load_row,
                    store_row,
                    feature_map,
                    1.0,
                )
            if carry > 0:
                for t in T.serial(C):
                    for d in T.serial(Kp):
                        z[d] += dden[t] * xq[t * Kp + d]

    return chunk_bwd_kv_kernel


def decode(p: Problem, c: DecodeConfig):
    """Up to C tokens of one q/k head against its states, in place.

    live = 0 marks a padded row: its output is zero and its states are not touched.
    """
    import tilelang.language as T

    from tl_kernels import macros as m

    C, NR, io = c.C, c.NR, m.storage(p.dtype)
    load_row, store_row = m.row_format(p.dtype)
    n = T.dynamic("n")

    @T.prim_func
    def decode_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        v: T.Tensor([n], io),
        o: T.Tensor([n], io),
        kv: T.Tensor([n], "float32"),
        z: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        o_row: T.int64,
        v_head: T.int64,
        o_head: T.int64,
        kv_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        live: T.int32,
        feature_map: T.int32,
        normalize: T.int32,
        scale: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(1) as _:
            xk = T.alloc_local([C * D_MAX], "float32")
            xq = T.alloc_local([C * D_MAX], "float32")
            vs = T.alloc_local([C * D_MAX], "float32")
            os = T.alloc_local([C * D_MAX], "float32")
            v1 = T.alloc_local([NR], "float32")
            o1 = T.alloc_local([NR], "float32")
            s1 = T.alloc_local([NR], "float32")
            inv = T.alloc_local([C], "float32")
            total = T.alloc_local([1], "float32")

            if live > 0:
                m.load_features(xk, D_MAX, m.Rows(k, k_row, rows, K), C, load_row, feature_map)
                m.load_features(xq, D_MAX, m.Rows(q, q_row, rows, K), C, load_row, feature_map)
                m.scale_rows(xq, rows * D_MAX, scale)
                for t in T.serial(rows):
                    for d in T.serial(K):
                        z[d] += xk[t * D_MAX + d]
                    total[0] = eps
                    for d in T.serial(K):
                        total[0] += z[d] * xq[t * D_MAX + d]
                    inv[t] = T.if_then_else(normalize > 0, T.float32(1) / total[0], T.float32(1))
                for h in T.serial(heads):
                    m.load_rows(vs, D_MAX, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                    for t in T.serial(rows):
                        # NR columns of the state pass through registers while v and o stay in them
                        for jb in T.serial(V // NR):
                            for j in T.serial(NR):
                                v1[j] = vs[t * D_MAX + jb * NR + j]
                                o1[j] = T.float32(0)
                            for d in T.serial(K):
                                for j in T.serial(NR):
                                    s1[j] = kv[h * kv_head + d * V + jb * NR + j] + xk[t * D_MAX + d] * v1[j]
                                for j in T.serial(NR):
                                    kv[h * kv_head + d * V + jb * NR + j] = s1[j]
                                for j in T.serial(NR):
                                    o1[j] += xq[t * D_MAX + d] * s1[j]
                            for j in T.serial(NR):
                                os[t * D_MAX + jb * NR + j] = o1[j]
                        for j in T.serial(V % NR):
                            os[t * D_MAX + V // NR * NR + j] = T.float32(0)
                        for d in T.serial(K):
                            for j in T.serial(V % NR):
                                kv[h * kv_head + d * V + V // NR * NR + j] += (
                                    xk[t * D_MAX + d] * vs[t * D_MAX + V // NR * NR + j]
                                )
                                os[t * D_MAX + V // NR * NR + j] += (
                                    xq[t * D_MAX + d] * kv[h * kv_head + d * V + V // NR * NR + j]
                                )
                    for t in T.serial(rows):
                        for j in T.serial(V):
                            os[t * D_MAX + j] *= inv[t]
                        store_row(o, h * o_head + t * o_row, os, t * D_MAX, m.named(V))
            else:
                for h, t, j in T.grid(heads, rows, V):
                    o[h * o_head + t * o_row + j] = T.cast(0, io)  # the bits of 0.0 in every format

    return decode_kernel


_TOKENS = (Arg("q", "token"), Arg("k", "token"), Arg("v", "token", "HV"))
_GRADS = (*_TOKENS, Arg("o", "token", "HV"), Arg("dout", "token", "HV"), Arg("den", "token", dtype="float32"))
_STATE = (Arg("kv", "state", "HV", "float32"), Arg("z", "vector", "H", "float32"))
_TRANSPOSED = (Arg("kv", "state", "HV", "float32", transposed=True), Arg("z", "vector", "H", "float32"))
_POOL = (Arg("kv", "pool", "HV", "float32"), Arg("z", "pool", "H", "float32"))
_OPTIONS = ("feature_map", "normalize", "scale", "eps")
_SWITCHES = ("causal", "emit", "carry", *_OPTIONS)

FWD = Kernel(
    "linear_attention.chunk_fwd",
    chunk_fwd,
    configs,
    (*_TOKENS, Arg("o", "token", "HV"), Arg("den", "token", dtype="float32"), *_STATE),
    _SWITCHES,
    whole=True,
)
BWD_Q = Kernel(
    "linear_attention.chunk_bwd_q",
    chunk_bwd_q,
    configs,
    (*_GRADS, Arg("dq", "token"), *_TRANSPOSED),
    _SWITCHES,
)
BWD_KV = Kernel(
    "linear_attention.chunk_bwd_kv",
    chunk_bwd_kv,
    configs,
    (*_GRADS, Arg("dk", "token"), Arg("dv", "token", "HV"), *_STATE),
    _SWITCHES,
    reverse=True,
)
DECODE = Kernel(
    "linear_attention.decode",
    decode,
    decode_configs,
    (*_TOKENS, Arg("o", "token", "HV"), *_POOL),
    _OPTIONS,
    whole=True,
)
KERNELS = (FWD, BWD_Q, BWD_KV, DECODE)
