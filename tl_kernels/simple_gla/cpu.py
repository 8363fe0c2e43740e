"""Scalar-gated linear attention on the CPU, one chunk of one q/k head and its value heads at a time.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale q_t^T S_t

(Mamba-2, arXiv 2405.21060, section 6; RetNet, arXiv 2307.08621, eq. 7). With Q scaled, S the state before the chunk,
and for a value head the decays inside the chunk

    D_ij = exp(g_{j+1} + ... + g_i) for j <= i, else 0
    f_i  = exp(g_1 + ... + g_i)                             l_j = exp(g_{j+1} + ... + g_C)

    O = (D * Q K^T) V + f * Q S                 S = f_C S + K^T (l * V)
    P = D * dO V^T                              R the gradient of the state after the chunk
    dQ = P K + f * dO S^T                       dK = P^T Q + l * V R^T         dV = (D * Q K^T)^T dO + l * K R
    R = f_C R + Q^T (f * dO)

D, f and l are products of the exp(g_t), token by token and in double: each factor is at most 1, so nothing overflows
whatever the decay, nothing cancels, and exp(-inf) = 0 and exp(0) = 1 are exact. For the same reason the gradient of
g_t is the sum of all that crosses token t, and not a difference of sums over all tokens:

    dg_t = sum_{j < t <= i} (P * Q K^T)_ij + sum_{i >= t} c_i + sum_{j < t} d_j + f_C <S, R>
    c_i = f_i q_i S dO_i^T                     d_j = l_j v_j R^T k_j^T

S is known walking forward and R walking backward: chunk_bwd_q writes c and leaves the S of each chunk for chunk_bwd_kv.

Switches: `emit` (write outputs), `carry` (update the state), `gates` (the gradient of g is wanted). States are kept as
for linear_attention, in panels [columns / NR, rows, NR] padded with zeros. Value heads of a q/k head are walked inside:
they share Q K^T, but have gates of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tl_kernels.spec import MAX_HEAD_DIM, Arg, Kernel, Problem, Target

D_MAX = MAX_HEAD_DIM
BACKWARD_CHUNK = 32  # tokens


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


def backward_configs(p: Problem, target: Target) -> Sequence[Config]:
    """Chunks of one size: chunk_bwd_kv reads the states that chunk_bwd_q leaves."""
    return [c for c in configs(p, target) if c.C == BACKWARD_CHUNK]


def decode_configs(p: Problem, target: Target) -> Sequence[DecodeConfig]:
    return [DecodeConfig(4, NR) for NR in (128, 64)]


def chunk_fwd(p: Problem, c: Config):
    """O and the next state of one chunk."""
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
        g: T.Tensor([n], "float32"),
        o: T.Tensor([n], io),
        kv: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        g_row: T.int64,
        o_row: T.int64,
        v_head: T.int64,
        g_head: T.int64,
        o_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        emit: T.int32,
        carry: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(1) as _:
            x = T.alloc_local([C * D_MAX], "float32")  # k, then scale q
            kT = T.alloc_local([D_MAX * C], "float32")
            a = T.alloc_local([C * C], "float32")
            w = T.alloc_local([C * C], "float32")  # D, then D * A
            vs = T.alloc_local([C * D_MAX], "float32")
            vl = T.alloc_local([C * NR], "float32")  # l * V, a panel of it
            step = T.alloc_local([C], "float32")
            first = T.alloc_local([C], "float32")
            last = T.alloc_local([C], "float32")
            tile = m.TileShape(MR, NR, T.alloc_local([MR * NR], "float32"), fma)
            Kp = m.round_up(K, 16)
            panels = (V + (NR - 1)) // NR

            m.load_rows(x, Kp, m.Rows(k, k_row, rows, K), C, load_row)
            m.transpose(kT, C, x, Kp, C // 16, Kp // 16)
            if emit > 0:
                m.load_rows(x, Kp, m.Rows(q, q_row, rows, K), C, load_row)
                m.scale_rows(x, C * Kp, scale)
                m.product(a, C, tile, C // MR, C // NR, Kp, lambda i, d: x[i * Kp + d], lambda d, j: kT[d * C + j])

            for h in T.serial(heads):
                m.decays(w, first, last, step, m.Rows(g, g_row, rows, 1, h * g_head), C)
                m.load_panels(vs, NR, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                if emit > 0:
                    for e in T.serial(C * C):
                        w[e] *= a[e]
                for jb in T.serial(panels):
                    if emit > 0:
                        for ib in T.serial(C // MR):
                            prefetch(m.Rows(q, q_row, rows, K), C + ib * MR, MR, jb * NR, NR)
                            prefetch(m.Rows(k, k_row, rows, K), C + ib * MR, MR, jb * NR, NR)
                            prefetch(m.Rows(v, v_row, rows, V, h * v_head), C + ib * MR, MR, jb * NR, NR)
                            m.clear_tile(tile)
                            fma(
                                tile.acc,
                                Kp,
                                lambda i, d: x[(ib * MR + i) * Kp + d],
                                lambda d, j: kv[((h * panels + jb) * Kp + d) * NR + j],
                            )
                            m.scale_tile(tile, first, ib * MR)
                            fma(
                                tile.acc,
                                (ib + 1) * MR,
                                lambda i, t: w[(ib * MR + i) * C + t],
                                lambda t, j: vs[(jb * C + t) * NR + j],
                            )
                            m.store_tile_rows(
                                m.Rows(o, o_row, rows, V, h * o_head), tile, ib * MR, jb * NR, store_row
                            )
                    if carry > 0:
                        m.multiply_rows(vl, vs, jb * C * NR, last, C, NR)
                        m.update_panel(
                            kv,
                            (h * panels + jb) * Kp * NR,
                            tile,
                            Kp // MR,
                            C,
                            first[C - 1],
                            lambda i, t: kT[i * C + t],
                            lambda t, j: vl[t * NR + j],
                        )

    return chunk_fwd_kernel


def chunk_bwd_q(p: Problem, config: Config):
    """dQ and c of one chunk, walking forward with the state kept transposed, [V, K]; leaves the state before it."""
    import tilelang.language as T

    from tl_kernels import macros as m

    C, MR, NR, io = config.C, config.MR, config.NR, m.storage(p.dtype)
    load_row, store_row = m.row_format(p.dtype)
    fma, prefetch = m.register_tile(MR, NR), m.prefetcher(p.dtype)
    n, f32 = T.dynamic("n"), "float32"

    @T.prim_func
    def chunk_bwd_q_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        v: T.Tensor([n], io),
        g: T.Tensor([n], "float32"),
        dout: T.Tensor([n], io),
        dq: T.Tensor([n], io),
        c: T.Tensor([n], "float32"),
        states: T.Tensor([n], "float32"),
        kv: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        g_row: T.int64,
        dout_row: T.int64,
        dq_row: T.int64,
        c_row: T.int64,
        v_head: T.int64,
        g_head: T.int64,
        dout_head: T.int64,
        c_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        gates: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(1) as _:
            kp = T.alloc_local([D_MAX * C], "float32")  # k in panels
            kl = T.alloc_local([C * NR], "float32")  # l * K, a panel of it
            xq = T.alloc_local([C * D_MAX], "float32")  # q in rows
            x = T.alloc_local([C * D_MAX], "float32")  # v, then dO
            vT = T.alloc_local([D_MAX * C], "float32")
            b = T.alloc_local([C * C], "float32")  # D, then P
            u = T.alloc_local([C * C], "float32")  # dO V^T
            dx = T.alloc_local([C * D_MAX], "float32")  # dQ in rows
            dot = T.alloc_local([C], "float64")
            step = T.alloc_local([C], "float32")
            first = T.alloc_local([C], "float32")
            last = T.alloc_local([C], "float32")
            spare = T.alloc_local([MR * NR], "float32")
            deep = m.deep_register_tile(MR, NR, spare)
            tile = m.TileShape(MR, NR, T.alloc_local([MR * NR], "float32"), fma)
            deep_tile = m.TileShape(MR, NR, tile.acc, deep)
            Vp = m.round_up(V, 16)
            panels = (K + (NR - 1)) // NR
            Kp = panels * NR

            m.load_panels(kp, NR, m.Rows(k, k_row, rows, K), C, load_row)
            m.load_rows(xq, Kp, m.Rows(q, q_row, rows, K), C, load_row)
            for e in T.serial(C * Kp):
                dx[e] = T.float32(0)

            for h in T.serial(heads):
                m.decays(b, first, last, step, m.Rows(g, g_row, rows, 1, h * g_head), C)
                m.load_rows(x, Vp, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                m.transpose(vT, C, x, Vp, C // 16, Vp // 16)
                m.load_rows(x, Vp, m.Rows(dout, dout_row, rows, V, h * dout_head), C, load_row)
                m.product(u, C, deep_tile, C // MR, C // NR, Vp, lambda i, d: x[i * Vp + d], lambda d, j: vT[d * C + j])
                for e in T.serial(C * C):
                    b[e] *= u[e]
                for i in T.serial(C):
                    dot[i] = T.float64(0)
                if gates > 0:
                    for kb, vb in T.grid((K + 15) // 16, Vp // 16):
                        m.transpose_tile(
                            states,
                            (h * m.round_up(K, 16) + kb * 16) * Vp + vb * 16,
                            Vp,
                            kv,
                            ((h * panels + kb * 16 // NR) * Vp + vb * 16) * NR + kb * 16 % NR,
                            NR,
                        )
                for jb in T.serial(panels):
                    for ib in T.serial(C // MR):
                        prefetch(m.Rows(q, q_row, rows, K), C + ib * MR, MR, jb * NR, NR)
                        prefetch(m.Rows(k, k_row, rows, K), C + ib * MR, MR, jb * NR, NR)
                        prefetch(m.Rows(v, v_row, rows, V, h * v_head), C + ib * MR, MR, jb * NR, NR)
                        prefetch(m.Rows(dout, dout_row, rows, V, h * dout_head), C + ib * MR, MR, jb * NR, NR)
                        m.clear_tile(tile)
                        deep(
                            tile.acc,
                            Vp,
                            lambda i, d: x[(ib * MR + i) * Vp + d],
                            lambda d, j: kv[((h * panels + jb) * Vp + d) * NR + j],
                        )
                        m.scale_tile(tile, first, ib * MR)
                        m.add_dots(dot, tile, xq, Kp, ib * MR, jb * NR)
                        fma(
                            tile.acc,
                            (ib + 1) * MR,
                            lambda i, t: b[(ib * MR + i) * C + t],
                            lambda t, j: kp[(jb * C + t) * NR + j],
                        )
                        for i in T.serial(MR):
                            for j in T.serial(NR):
                                dx[(ib * MR + i) * Kp + jb * NR + j] += tile.acc[i * NR + j]
                    m.multiply_rows(kl, kp, jb * C * NR, last, C, NR)
                    m.update_panel(
                        kv,
                        (h * panels + jb) * Vp * NR,
                        tile,
                        Vp // MR,
                        C,
                        first[C - 1],
                        lambda i, t: vT[i * C + t],
                        lambda t, j: kl[t * NR + j],
                    )
                for i in T.serial(C):
                    if i < rows:
                        c[h * c_head + i * c_row] = T.cast(dot[i], f32) * scale

            m.scale_rows(dx, C * Kp, scale)
            for i in T.serial(C):
                if i < rows:
                    store_row(dq, i * dq_row, dx, i * Kp, m.named(K))

    return chunk_bwd_q_kernel


def chunk_bwd_kv(p: Problem, config: Config):
    """dK, dV and dg of one chunk, walking backward; kv holds R, the gradient of the state."""
    import tilelang.language as T

    from tl_kernels import macros as m

    C, MR, NR, io = config.C, config.MR, config.NR, m.storage(p.dtype)
    load_row, store_row = m.row_format(p.dtype)
    fma, prefetch = m.register_tile(MR, NR), m.prefetcher(p.dtype)
    n, f32, f64 = T.dynamic("n"), "float32", "float64"

    @T.prim_func
    def chunk_bwd_kv_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        v: T.Tensor([n], io),
        g: T.Tensor([n], "float32"),
        dout: T.Tensor([n], io),
        c: T.Tensor([n], "float32"),
        dk: T.Tensor([n], io),
        dv: T.Tensor([n], io),
        dg: T.Tensor([n], "float32"),
        states: T.Tensor([n], "float32"),
        kv: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        g_row: T.int64,
        dout_row: T.int64,
        c_row: T.int64,
        dk_row: T.int64,
        dv_row: T.int64,
        dg_row: T.int64,
        v_head: T.int64,
        g_head: T.int64,
        dout_head: T.int64,
        c_head: T.int64,
        dv_head: T.int64,
        dg_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        emit: T.int32,
        gates: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(1) as _:
            x = T.alloc_local([C * D_MAX], "float32")  # k; at the end dK in rows
            xq = T.alloc_local([C * D_MAX], "float32")  # scale q
            xv = T.alloc_local([C * D_MAX], "float32")  # v
            kT = T.alloc_local([D_MAX * C], "float32")
            vT = T.alloc_local([D_MAX * C], "float32")
            dn = T.alloc_local([C * D_MAX], "float32")  # dO in rows, for P
            dp = T.alloc_local([C * D_MAX], "float32")  # dO in panels
            df = T.alloc_local([C * NR], "float32")  # f * dO, a panel of it
            a = T.alloc_local([C * C], "float32")
            b = T.alloc_local([C * C], "float32")  # the sum of P over the value heads
            w = T.alloc_local([C * C], "float32")  # D, then D * A
            u = T.alloc_local([C * C], "float32")  # P, then P * A
            below = T.alloc_local([C], "float64")  # of u, the sum of the rows from one on
            grad = T.alloc_local([C], "float64")  # dg
            total = T.alloc_local([1], "float64")
            dkT = T.alloc_local([D_MAX * C], "float32")
            dot = T.alloc_local([C], "float64")
            step = T.alloc_local([C], "float32")
            first = T.alloc_local([C], "float32")
            last = T.alloc_local([C], "float32")
            spare = T.alloc_local([MR * NR], "float32")
            deep = m.deep_register_tile(MR, NR, spare)
            tile = m.TileShape(MR, NR, T.alloc_local([MR * NR], "float32"), fma)
            deep_tile = m.TileShape(MR, NR, tile.acc, deep)
            Kp = m.round_up(K, 16)
            Vp = m.round_up(V, NR)
            panels = (V + (NR - 1)) // NR

            m.load_rows(xq, Kp, m.Rows(q, q_row, rows, K), C, load_row)
            m.scale_rows(xq, C * Kp, scale)
            if emit > 0:
                m.load_rows(x, Kp, m.Rows(k, k_row, rows, K), C, load_row)
                m.transpose(kT, C, x, Kp, C // 16, Kp // 16)
                for e in T.serial(Kp * C):
                    dkT[e] = T.float32(0)
                for e in T.serial(C * C):
                    b[e] = T.float32(0)
                m.product(
                    a, C, deep_tile, C // MR, C // NR, Kp, lambda i, d: xq[i * Kp + d], lambda d, j: kT[d * C + j]
                )

            for h in T.serial(heads):
                m.decays(w, first, last, step, m.Rows(g, g_row, rows, 1, h * g_head), C)
                m.load_rows(dn, Vp, m.Rows(dout, dout_row, rows, V, h * dout_head), C, load_row)
                for jb in T.serial(panels):
                    for t in T.serial(C):
                        for j in T.serial(NR):
                            dp[(jb * C + t) * NR + j] = dn[t * Vp + jb * NR + j]
                if emit > 0:
                    m.load_rows(xv, Vp, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                    m.transpose(vT, C, xv, Vp, C // 16, Vp // 16)
                    m.product(
                        u, C, deep_tile, C // MR, C // NR, Vp, lambda i, d: dn[i * Vp + d], lambda d, j: vT[d * C + j]
                    )
                    for e in T.serial(C * C):
                        u[e] *= w[e]
                        b[e] += u[e]
                        u[e] *= a[e]
                        w[e] *= a[e]
                    for kb, jb in T.grid(Kp // MR, C // NR):
                        m.clear_tile(tile)
                        deep(
                            tile.acc,
                            Vp,
                            lambda i, d: kv[((h * panels + d // NR) * Kp + kb * MR + i) * NR + d % NR],
                            lambda d, j: vT[d * C + jb * NR + j],
                        )
                        for i, j in T.grid(MR, NR):
                            dkT[(kb * MR + i) * C + jb * NR + j] += tile.acc[i * NR + j] * last[jb * NR + j]
                    for i in T.serial(C):
                        dot[i] = T.float64(0)
                    total[0] = T.float64(0)
                for jb in T.serial(panels):
                    if emit > 0:
                        for ib in T.serial(C // MR):
                            prefetch(m.Rows(q, q_row, rows, K), ib * MR - C, MR, jb * NR, NR)
                            prefetch(m.Rows(k, k_row, rows, K), ib * MR - C, MR, jb * NR, NR)
                            prefetch(m.Rows(v, v_row, rows, V, h * v_head), ib * MR - C, MR, jb * NR, NR)
                            prefetch(m.Rows(dout, dout_row, rows, V, h * dout_head), ib * MR - C, MR, jb * NR, NR)
                            m.clear_tile(tile)
                            deep(
                                tile.acc,
                                Kp,
                                lambda i, d: kT[d * C + ib * MR + i],
                                lambda d, j: kv[((h * panels + jb) * Kp + d) * NR + j],
                            )
                            m.scale_tile(tile, last, ib * MR)
                            m.add_dots(dot, tile, xv, Vp, ib * MR, jb * NR)
                            fma(
                                tile.acc,
                                C - ib * MR,
                                lambda i, t: w[(ib * MR + t) * C + ib * MR + i],
                                lambda t, j: dp[(jb * C + ib * MR + t) * NR + j],
                            )
                            m.store_tile_rows(
                                m.Rows(dv, dv_row, rows, V, h * dv_head), tile, ib * MR, jb * NR, store_row
                            )
                    if emit * gates > 0:
                        for d in T.serial(Kp):
                            for j in T.serial(T.min(NR, V - jb * NR)):
                                total[0] += T.cast(
                                    states[(h * Kp + d) * m.round_up(V, 16) + jb * NR + j]
                                    * kv[((h * panels + jb) * Kp + d) * NR + j],
                                    f64,
                                )
                    m.multiply_rows(df, dp, jb * C * NR, first, C, NR)
                    m.update_panel(
                        kv,
                        (h * panels + jb) * Kp * NR,
                        tile,
                        Kp // MR,
                        C,
                        first[C - 1],
                        lambda i, t: xq[t * Kp + i],
                        lambda t, j: df[t * NR + j],
                    )
                if emit * gates > 0:
                    m.crossing(grad, below, u, C)
                    total[0] *= T.cast(first[C - 1], f64)  # all that crosses the whole chunk
                    for i in T.serial(C):
                        grad[i] += total[0]
                        total[0] += dot[i]
                    total[0] = T.float64(0)
                    for i in T.serial(rows):
                        total[0] += T.cast(c[h * c_head + (rows - 1 - i) * c_row], f64)
                        dg[h * dg_head + (rows - 1 - i) * dg_row] = T.cast(grad[rows - 1 - i] + total[0], f32)

            if emit > 0:
                for kb, jb in T.grid(Kp // MR, C // NR):
                    for i, j in T.grid(MR, NR):
                        tile.acc[i * NR + j] = dkT[(kb * MR + i) * C + jb * NR + j]
                    fma(
                        tile.acc,
                        C,
                        lambda i, t: xq[t * Kp + kb * MR + i],
                        lambda t, j: b[t * C + jb * NR + j],
                    )
                    for i, j in T.grid(MR, NR):
                        dkT[(kb * MR + i) * C + jb * NR + j] = tile.acc[i * NR + j]
                m.transpose(x, Kp, dkT, C, Kp // 16, C // 16)
                for i in T.serial(C):
                    if i < rows:
                        store_row(dk, i * dk_row, x, i * Kp, m.named(K))

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
        g: T.Tensor([n], "float32"),
        o: T.Tensor([n], io),
        kv: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        g_row: T.int64,
        o_row: T.int64,
        v_head: T.int64,
        g_head: T.int64,
        o_head: T.int64,
        kv_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        live: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(1) as _:
            xk = T.alloc_local([C * D_MAX], "float32")
            xq = T.alloc_local([C * D_MAX], "float32")
            vs = T.alloc_local([C * D_MAX], "float32")
            os = T.alloc_local([C * D_MAX], "float32")
            v1 = T.alloc_local([NR], "float32")
            o1 = T.alloc_local([NR], "float32")
            s1 = T.alloc_local([NR], "float32")
            step = T.alloc_local([C], "float32")

            if live > 0:
                m.load_rows(xk, D_MAX, m.Rows(k, k_row, rows, K), C, load_row)
                m.load_rows(xq, D_MAX, m.Rows(q, q_row, rows, K), C, load_row)
                m.scale_rows(xq, rows * D_MAX, scale)
                for h in T.serial(heads):
                    m.gate_steps(step, m.Rows(g, g_row, rows, 1, h * g_head), C)
                    m.load_rows(vs, D_MAX, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                    for t in T.serial(rows):
                        # NR columns of the state pass through registers while v and o stay in them
                        for jb in T.serial(V // NR):
                            for j in T.serial(NR):
                                v1[j] = vs[t * D_MAX + jb * NR + j]
                                o1[j] = T.float32(0)
                            for d in T.serial(K):
                                for j in T.serial(NR):
                                    s1[j] = (
                                        kv[h * kv_head + d * V + jb * NR + j] * step[t] + xk[t * D_MAX + d] * v1[j]
                                    )
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
                                kv[h * kv_head + d * V + V // NR * NR + j] = (
                                    kv[h * kv_head + d * V + V // NR * NR + j] * step[t]
                                    + xk[t * D_MAX + d] * vs[t * D_MAX + V // NR * NR + j]
                                )
                                os[t * D_MAX + V // NR * NR + j] += (
                                    xq[t * D_MAX + d] * kv[h * kv_head + d * V + V // NR * NR + j]
                                )
                    for t in T.serial(rows):
                        store_row(o, h * o_head + t * o_row, os, t * D_MAX, m.named(V))
            else:
                for h, t, j in T.grid(heads, rows, V):
                    o[h * o_head + t * o_row + j] = T.cast(0, io)  # the bits of 0.0 in every format

    return decode_kernel


_TOKENS = (Arg("q", "token"), Arg("k", "token"), Arg("v", "token", "HV"), Arg("g", "token", "HV", "float32"))
_GRADS = (*_TOKENS, Arg("dout", "token", "HV"))

FWD = Kernel(
    "simple_gla.chunk_fwd",
    chunk_fwd,
    configs,
    (*_TOKENS, Arg("o", "token", "HV"), Arg("kv", "state", "HV", "float32")),
    ("emit", "carry", "scale"),
    whole=True,
)
BWD_Q = Kernel(
    "simple_gla.chunk_bwd_q",
    chunk_bwd_q,
    backward_configs,
    (
        *_GRADS,
        Arg("dq", "token"),
        Arg("c", "token", "HV", "float32"),
        Arg("states", "chunk", "HV", "float32"),
        Arg("kv", "state", "HV", "float32", transposed=True),
    ),
    ("gates", "scale"),
)
BWD_KV = Kernel(
    "simple_gla.chunk_bwd_kv",
    chunk_bwd_kv,
    backward_configs,
    (
        *_GRADS,
        Arg("c", "token", "HV", "float32"),
        Arg("dk", "token"),
        Arg("dv", "token", "HV"),
        Arg("dg", "token", "HV", "float32"),
        Arg("states", "chunk", "HV", "float32"),
        Arg("kv", "state", "HV", "float32"),
    ),
    ("emit", "gates", "scale"),
    reverse=True,
)
DECODE = Kernel(
    "simple_gla.decode",
    decode,
    decode_configs,
    (*_TOKENS, Arg("o", "token", "HV"), Arg("kv", "pool", "HV", "float32")),
    ("scale",),
    whole=True,
)
KERNELS = (FWD, BWD_Q, BWD_KV, DECODE)
