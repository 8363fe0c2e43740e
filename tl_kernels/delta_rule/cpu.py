"""The gated delta rule on the CPU, one chunk of one q/k head and its value heads at a time.

    Sbar = exp(g_t) S_{t-1}      u_t = beta_t (v_t - Sbar^T k_t)      S_t = Sbar + k_t u_t^T      o_t = scale q_t^T S_t

(Yang et al. 2024, arXiv 2406.06484, eq. 3-4, and arXiv 2412.06464, eq. 10.) With S the state before a chunk, and the
decays D, f and l inside it as in tl_kernels/simple_gla/cpu.py (products of exp(g_t), token by token and in double),

    M = D * Q K^T, lower            N = D * K K^T, strictly lower            B = diag(beta)

    Y + N B Y = V - f * K S         U = B Y
    O = M U + f * Q S               S = f_C S + K^T (l * U)

Y is found by forward substitution, a tile of rows at a time: what earlier tiles have found by a product, the rest row
by row. It is what a token changes before beta weighs it, y_t = v_t - Sbar^T k_t, whatever the chunk.

Backward, with R the gradient of the state after the chunk, walking from the end:

    X + N^T B X = M^T dO + l * K R      (by substitution from the last row on)          Z = B X
    P = D * dO U^T, lower               G = -D * Z U^T, strictly lower
    dQ = P K + f * dO S^T               dK = P^T Q + (G + G^T) K + l * U R^T - f * Z S^T
    dV = Z                              dbeta_t = x_t y_t^T
    R = f_C R + Q^T (f * dO) - K^T (f * Z)

    dg_t = sum_{j < t <= i} (P * Q K^T + G * K K^T)_ij + sum_{i >= t} c_i + sum_{j < t} d_j + f_C <S, R>
    c_i = f_i (q_i S dO_i^T - k_i S z_i^T)            d_j = l_j u_j R^T k_j^T

chunk_fwd leaves Y, and S at every KEPT_EVERY tokens, for chunk_bwd, which reads neither v nor o. scale multiplies q in
the forward pass, and dO in the backward one. With `norm` > 0, q and k are divided by the root of their squared length
(plus NORM_EPS) when they are loaded; the gradient then goes through that:

    n = r x, r = (x x^T + eps)^-1/2                     dx = r (dn - n (n dn^T))

Switches: `emit` (write outputs), `leave` (write Y), `gated` (there is a g), `gates` (its gradient is wanted), `norm`,
`keeps` (there is a place for the state before this chunk). Value heads of a q/k head are walked inside: they share
Q K^T and K K^T, but have gates of their own. States are walked in panels [columns / NR, rows, NR] padded with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tl_kernels.delta_rule.norm import NORM_EPS
from tl_kernels.spec import MAX_HEAD_DIM, Arg, Kernel, Problem, Target

D_MAX = MAX_HEAD_DIM
KEPT_EVERY = 64  # tokens from one state that chunk_fwd leaves for chunk_bwd to the next


@dataclass(frozen=True)
class Config:
    C: int  # tokens a chunk
    MR: int  # rows of the register tile
    NR: int  # its columns, and the width of a state panel


@dataclass(frozen=True)
class DecodeConfig:
    C: int  # tokens a call
    NR: int  # columns of the state that pass through registers together


def _tiles(target: Target) -> tuple[tuple[int, int], ...]:
    """Register tiles (MR, NR). An AVX2 core has half the registers: 2 x 32 or 4 x 16 fills them."""
    return ((4, 32), (8, 32), (4, 64)) if target.lanes == 16 else ((2, 32), (4, 32))


def configs(p: Problem, target: Target) -> Sequence[Config]:
    return [Config(C, MR, NR) for C in (32, 64) for MR, NR in _tiles(target) if C % NR == 0]


def backward_configs(p: Problem, target: Target) -> Sequence[Config]:
    """One chunk a kept state. The largest tile of two vectors comes first: its products read what L1 cannot hold."""
    tiles = sorted(_tiles(target), key=lambda tile: (tile[1], -tile[0]))
    return [Config(KEPT_EVERY, MR, NR) for MR, NR in tiles]


def decode_configs(p: Problem, target: Target) -> Sequence[DecodeConfig]:
    return [DecodeConfig(4, NR) for NR in (64, 32, 128)]


def chunk_fwd(p: Problem, c: Config):
    """O, Y and the next state of one chunk."""
    import tilelang.language as T

    from tl_kernels import macros as m

    C, MR, NR, io = c.C, c.MR, c.NR, m.storage(p.dtype)
    load_row, store_row = m.row_format(p.dtype)
    fma, prefetch = m.register_tile(MR, NR), m.prefetcher(p.dtype)
    n, f32 = T.dynamic("n"), "float32"

    @T.prim_func
    def chunk_fwd_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        v: T.Tensor([n], io),
        g: T.Tensor([n], "float32"),
        beta: T.Tensor([n], "float32"),
        o: T.Tensor([n], io),
        y: T.Tensor([n], "float32"),
        states: T.Tensor([n], "float32"),
        kv: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        g_row: T.int64,
        beta_row: T.int64,
        o_row: T.int64,
        y_row: T.int64,
        v_head: T.int64,
        g_head: T.int64,
        beta_head: T.int64,
        o_head: T.int64,
        y_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        keeps: T.int32,
        emit: T.int32,
        leave: T.int32,
        gated: T.int32,
        norm: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(1) as _:
            x = T.alloc_local([C * D_MAX], f32)  # k, then scale q
            kT = T.alloc_local([D_MAX * C], f32)
            a = T.alloc_local([C * C], f32)  # Q K^T
            b = T.alloc_local([C * C], f32)  # K K^T
            w = T.alloc_local([C * C], f32)  # D, then M B
            s = T.alloc_local([C * C], f32)  # -N B
            vs = T.alloc_local([C * D_MAX], f32)
            ys = T.alloc_local([C * NR], f32)  # a panel of Y
            ul = T.alloc_local([C * NR], f32)  # l * U, a panel of it
            bt = T.alloc_local([C], f32)  # beta
            inverse = T.alloc_local([C], f32)
            step = T.alloc_local([C], f32)
            first = T.alloc_local([C], f32)
            last = T.alloc_local([C], f32)
            tile = m.TileShape(MR, NR, T.alloc_local([MR * NR], f32), fma)
            deep = m.TileShape(MR, NR, tile.acc, m.deep_register_tile(MR, NR, T.alloc_local([MR * NR], f32)))
            Kp = m.round_up(K, 16)
            Vs = m.round_up(V, 16)  # columns of a kept state
            panels = (V + (NR - 1)) // NR

            m.load_rows(x, Kp, m.Rows(k, k_row, rows, K), C, load_row)
            if norm > 0:
                m.normalize_rows(x, Kp, inverse, C, NORM_EPS)
            m.transpose(kT, C, x, Kp, C // 16, Kp // 16)
            m.lower_product(b, C, deep, Kp, lambda i, e: x[i * Kp + e], lambda e, j: kT[e * C + j])
            if emit > 0:
                m.load_rows(x, Kp, m.Rows(q, q_row, rows, K), C, load_row)
                if norm > 0:
                    m.normalize_rows(x, Kp, inverse, C, NORM_EPS)
                m.scale_rows(x, C * Kp, scale)
                m.lower_product(a, C, tile, Kp, lambda i, e: x[i * Kp + e], lambda e, j: kT[e * C + j])

            for h in T.serial(heads):
                m.decays_if(w, first, last, step, m.Rows(g, g_row, rows, 1, h * g_head), C, m.named(gated))
                m.load_gates(bt, m.Rows(beta, beta_row, rows, 1, h * beta_head), C)
                m.load_panels(vs, NR, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                for i in T.serial(C):
                    for j in T.serial(C):
                        s[i * C + j] = -(w[i * C + j] * b[i * C + j] * bt[j])
                    if emit > 0:
                        for j in T.serial(C):
                            w[i * C + j] *= a[i * C + j] * bt[j]
                for i in T.serial(C):
                    last[i] *= bt[i]
                for jb in T.serial(panels):
                    for ib in T.serial(C // MR):
                        prefetch(m.Rows(q, q_row, rows, K), C + ib * MR, MR, jb * NR, NR)
                        prefetch(m.Rows(k, k_row, rows, K), C + ib * MR, MR, jb * NR, NR)
                        prefetch(m.Rows(v, v_row, rows, V, h * v_head), C + ib * MR, MR, jb * NR, NR)
                        m.clear_tile(tile)
                        deep.fma(
                            tile.acc,
                            Kp,
                            lambda i, e: kT[e * C + ib * MR + i],
                            lambda e, j: kv[((h * panels + jb) * Kp + e) * NR + j],
                        )
                        for i, j in T.grid(MR, NR):
                            tile.acc[i * NR + j] = (
                                vs[(jb * C + ib * MR + i) * NR + j] - tile.acc[i * NR + j] * first[ib * MR + i]
                            )
                        fma(
                            tile.acc,
                            ib * MR,
                            lambda i, t: s[(ib * MR + i) * C + t],
                            lambda t, j: ys[t * NR + j],
                        )
                        m.substitute(ys, tile, s, C, ib * MR)
                    if leave > 0:
                        for i in T.serial(C):
                            if i < rows:
                                for j in T.serial(T.min(NR, V - jb * NR)):
                                    y[h * y_head + i * y_row + jb * NR + j] = ys[i * NR + j]
                    if keeps > 0:
                        m.keep_panel(states, h * Kp * Vs + jb * NR, Vs, T.min(NR, Vs - jb * NR), kv,
                                     (h * panels + jb) * Kp * NR, NR, Kp)
                    if emit > 0:
                        for ib in T.serial(C // MR):
                            m.clear_tile(tile)
                            fma(
                                tile.acc,
                                Kp,
                                lambda i, e: x[(ib * MR + i) * Kp + e],
                                lambda e, j: kv[((h * panels + jb) * Kp + e) * NR + j],
                            )
                            m.scale_tile(tile, first, ib * MR)
                            fma(
                                tile.acc,
                                (ib + 1) * MR,
                                lambda i, t: w[(ib * MR + i) * C + t],
                                lambda t, j: ys[t * NR + j],
                            )
                            m.store_tile_rows(
                                m.Rows(o, o_row, rows, V, h * o_head), tile, ib * MR, jb * NR, store_row
                            )
                    m.multiply_rows(ul, ys, 0, last, C, NR)
                    m.update_panel(
                        kv,
                        (h * panels + jb) * Kp * NR,
                        tile,
                        Kp // MR,
                        C,
                        first[C - 1],
                        lambda i, t: kT[i * C + t],
                        lambda t, j: ul[t * NR + j],
                    )

    return chunk_fwd_kernel


def chunk_bwd(p: Problem, config: Config):
    """dQ, dK, dV, dg and dbeta of one chunk, walking backward; kv holds R, states and y what chunk_fwd has left.

    All that is not V-sized is kept transposed, [D, C]: tokens are then the columns of every product but X's, a decay
    scales a column, and the dot products of dg are sums of rows.
    """
    import tilelang.language as T

    from tl_kernels import macros as m

    C, MR, NR, io = config.C, config.MR, config.NR, m.storage(p.dtype)
    (load_row, store_row), (load_fp32, _) = m.row_format(p.dtype), m.row_format("float32")
    fma, prefetch, prefetch_fp32 = m.register_tile(MR, NR), m.prefetcher(p.dtype), m.prefetcher("float32")
    n, f32, f64 = T.dynamic("n"), "float32", "float64"

    @T.prim_func
    def chunk_bwd_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        g: T.Tensor([n], "float32"),
        beta: T.Tensor([n], "float32"),
        y: T.Tensor([n], "float32"),
        dout: T.Tensor([n], io),
        dq: T.Tensor([n], io),
        dk: T.Tensor([n], io),
        dv: T.Tensor([n], io),
        dg: T.Tensor([n], "float32"),
        dbeta: T.Tensor([n], "float32"),
        states: T.Tensor([n], "float32"),
        kv: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        g_row: T.int64,
        beta_row: T.int64,
        y_row: T.int64,
        dout_row: T.int64,
        dq_row: T.int64,
        dk_row: T.int64,
        dv_row: T.int64,
        dg_row: T.int64,
        dbeta_row: T.int64,
        g_head: T.int64,
        beta_head: T.int64,
        y_head: T.int64,
        dout_head: T.int64,
        dv_head: T.int64,
        dg_head: T.int64,
        dbeta_head: T.int64,
        states_row: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        gated: T.int32,
        gates: T.int32,
        norm: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(1) as _:
            x = T.alloc_local([C * D_MAX], f32)  # rows on their way in or out; of a value head, scale dO
            xs = T.alloc_local([C * D_MAX], f32)  # U, then X, then Z in rows
            qT = T.alloc_local([D_MAX * C], f32)
            kT = T.alloc_local([D_MAX * C], f32)
            uT = T.alloc_local([D_MAX * C], f32)
            doT = T.alloc_local([D_MAX * C], f32)
            zT = T.alloc_local([D_MAX * C], f32)
            dqT = T.alloc_local([D_MAX * C], f32)
            dkT = T.alloc_local([D_MAX * C], f32)
            xp = T.alloc_local([C * NR], f32)  # a panel of X
            fz = T.alloc_local([C * NR], f32)  # f * dO, then -f * Z, a panel of it
            a = T.alloc_local([C * C], f32)  # Q K^T
            b = T.alloc_local([C * C], f32)  # K K^T
            w = T.alloc_local([C * C], f32)  # D, then M
            s = T.alloc_local([C * C], f32)  # -(N B)^T
            u = T.alloc_local([C * C], f32)  # P, then what of dg is inside
            z = T.alloc_local([C * C], f32)  # G
            ps = T.alloc_local([C * C], f32)  # the sum of P over the value heads
            pT = T.alloc_local([C * C], f32)
            gs = T.alloc_local([C * C], f32)  # of G
            gT = T.alloc_local([C * C], f32)
            below = T.alloc_local([C], f64)
            grad = T.alloc_local([C], f64)  # dg
            c = T.alloc_local([C], f64)
            d = T.alloc_local([C], f64)
            xy = T.alloc_local([C], f64)  # dbeta
            total = T.alloc_local([1], f64)
            lanes = T.alloc_local([NR], f32)
            bt = T.alloc_local([C], f32)  # beta
            iq = T.alloc_local([C], f32)  # 1 / |q|
            ik = T.alloc_local([C], f32)
            step = T.alloc_local([C], f32)
            first = T.alloc_local([C], f32)
            minus = T.alloc_local([C], f32)  # -first
            last = T.alloc_local([C], f32)
            tile = m.TileShape(MR, NR, T.alloc_local([MR * NR], f32), fma)
            deep = m.TileShape(MR, NR, tile.acc, m.deep_register_tile(MR, NR, T.alloc_local([MR * NR], f32)))
            Kp = m.round_up(K, 16)
            Vs = m.round_up(V, 16)  # columns of a kept state
            Vp = m.round_up(V, NR)
            panels = (V + (NR - 1)) // NR

            m.load_rows(x, Kp, m.Rows(q, q_row, rows, K), C, load_row)
            if norm > 0:
                m.normalize_rows(x, Kp, iq, C, NORM_EPS)
            m.transpose(qT, C, x, Kp, C // 16, Kp // 16)
            m.load_rows(x, Kp, m.Rows(k, k_row, rows, K), C, load_row)
            if norm > 0:
                m.normalize_rows(x, Kp, ik, C, NORM_EPS)
            m.transpose(kT, C, x, Kp, C // 16, Kp // 16)
            for e in T.serial(Kp * C):
                dqT[e] = T.float32(0)
                dkT[e] = T.float32(0)
            for e in T.serial(C * C):
                ps[e] = T.float32(0)
                gs[e] = T.float32(0)
            m.lower_product(a, C, deep, Kp, lambda i, e: qT[e * C + i], lambda e, j: kT[e * C + j])
            m.lower_product(b, C, deep, Kp, lambda i, e: kT[e * C + i], lambda e, j: kT[e * C + j])

            for h in T.serial(heads):
                m.decays_if(w, first, last, step, m.Rows(g, g_row, rows, 1, h * g_head), C, m.named(gated))
                m.load_gates(bt, m.Rows(beta, beta_row, rows, 1, h * beta_head), C)
                for i in T.serial(C):
                    minus[i] = -first[i]
                for i in T.serial(C):
                    for j in T.serial(C):
                        z[i * C + j] = T.if_then_else(j < i, w[i * C + j], T.float32(0))  # D below the diagonal
                    for j in T.serial(C):
                        s[i * C + j] = -(z[i * C + j] * b[i * C + j] * bt[i])
                m.load_rows(xs, Vp, m.Rows(y, y_row, rows, V, h * y_head), C, load_fp32)
                for i in T.serial(C):
                    for j in T.serial(Vp):
                        xs[i * Vp + j] *= bt[i]
                m.transpose(uT, C, xs, Vp, C // 16, Vs // 16)
                m.load_rows(x, Vp, m.Rows(dout, dout_row, rows, V, h * dout_head), C, load_row)
                m.scale_rows(x, C * Vp, scale)
                m.transpose(doT, C, x, Vp, C // 16, Vs // 16)
                m.lower_product(u, C, deep, Vs, lambda i, e: doT[e * C + i], lambda e, j: uT[e * C + j])
                for e in T.serial(C * C):
                    u[e] *= w[e]
                    ps[e] += u[e]
                    u[e] *= a[e]
                    w[e] *= a[e]
                for i in T.serial(C):
                    c[i] = T.float64(0)
                    d[i] = T.float64(0)
                    xy[i] = T.float64(0)

                # X, a tile of rows at a time from the last on
                for jb in T.serial(panels):
                    for tb in T.serial(C // MR):
                        ib = C // MR - 1 - tb
                        prefetch(m.Rows(q, q_row, rows, K), ib * MR - C, MR, jb * NR, NR)
                        prefetch(m.Rows(k, k_row, rows, K), ib * MR - C, MR, jb * NR, NR)
                        prefetch(m.Rows(dout, dout_row, rows, V, h * dout_head), ib * MR - C, MR, jb * NR, NR)
                        prefetch_fp32(m.Rows(y, y_row, rows, V, h * y_head), ib * MR - C, MR, jb * NR, NR)
                        m.clear_tile(tile)
                        deep.fma(
                            tile.acc,
                            Kp,
                            lambda i, e: kT[e * C + ib * MR + i],
                            lambda e, j: kv[((h * panels + jb) * Kp + e) * NR + j],
                        )
                        m.scale_tile(tile, last, ib * MR)
                        fma(
                            tile.acc,
                            C - ib * MR,
                            lambda i, t: w[(ib * MR + t) * C + ib * MR + i],
                            lambda t, j: x[(ib * MR + t) * Vp + jb * NR + j],
                        )
                        fma(
                            tile.acc,
                            C - (ib + 1) * MR,
                            lambda i, t: s[((ib + 1) * MR + t) * C + ib * MR + i],
                            lambda t, j: xp[((ib + 1) * MR + t) * NR + j],
                        )
                        m.substitute_back(xp, tile, s, C, ib * MR)
                    for i in T.serial(C):
                        if i < rows:
                            for j in T.serial(T.min(NR, V - jb * NR)):
                                xy[i] += T.cast(
                                    xp[i * NR + j] * y[h * y_head + i * y_row + jb * NR + j], f64
                                )
                        for j in T.serial(NR):
                            xs[i * Vp + jb * NR + j] = xp[i * NR + j] * bt[i]
                for i in T.serial(C):
                    if i < rows:
                        store_row(dv, h * dv_head + i * dv_row, xs, i * Vp, m.named(V))
                        dbeta[h * dbeta_head + i * dbeta_row] = T.cast(xy[i], f32)
                m.transpose(zT, C, xs, Vp, C // 16, Vs // 16)
                m.lower_product(s, C, deep, Vs, lambda i, e: zT[e * C + i], lambda e, j: uT[e * C + j])
                for e in T.serial(C * C):
                    z[e] *= -s[e]
                    gs[e] += z[e]
                    u[e] += z[e] * b[e]

                # from the states
                for jb in T.serial(C // NR):
                    for kb in T.serial(Kp // MR):
                        m.clear_tile(tile)
                        deep.fma(
                            tile.acc,
                            Vs,
                            lambda i, e: states[(h * Kp + kb * MR + i) * Vs + e],
                            lambda e, j: doT[e * C + jb * NR + j],
                        )
                        m.add_columns(dqT, c, tile, first, qT, kb * MR, jb * NR, C, m.named(gates))
                    for kb in T.serial(Kp // MR):
                        m.clear_tile(tile)
                        deep.fma(
                            tile.acc,
                            Vs,
                            lambda i, e: states[(h * Kp + kb * MR + i) * Vs + e],
                            lambda e, j: zT[e * C + jb * NR + j],
                        )
                        m.add_columns(dkT, c, tile, minus, kT, kb * MR, jb * NR, C, m.named(gates))
                    for kb in T.serial(Kp // MR):
                        m.clear_tile(tile)
                        deep.fma(
                            tile.acc,
                            Vs,
                            lambda i, e: kv[((h * panels + e // NR) * Kp + kb * MR + i) * NR + e % NR],
                            lambda e, j: uT[e * C + jb * NR + j],
                        )
                        if jb == 0:
                            kept = m.Rows(states, T.cast(Vs, "int64"), MR, Vs, states_row)
                            prefetch_fp32(kept, h * Kp + kb * MR, MR, 0, Vs)
                        m.add_columns(dkT, d, tile, last, kT, kb * MR, jb * NR, C, m.named(gates))

                total[0] = T.float64(0)
                for jb in T.serial(panels):
                    if gates > 0:
                        m.add_inner(total, lanes, states, h * Kp * Vs + jb * NR, Vs, T.min(NR, Vs - jb * NR), kv,
                                    (h * panels + jb) * Kp * NR, NR, Kp)
                    for t in T.serial(C):
                        for j in T.serial(NR):
                            fz[t * NR + j] = x[t * Vp + jb * NR + j] * first[t]
                            xp[t * NR + j] = xs[t * Vp + jb * NR + j] * minus[t]
                    for ib in T.serial(Kp // MR):
                        for e in T.serial(MR * NR):
                            tile.acc[e] = kv[((h * panels + jb) * Kp + ib * MR) * NR + e] * first[C - 1]
                        fma(tile.acc, C, lambda i, t: qT[(ib * MR + i) * C + t], lambda t, j: fz[t * NR + j])
                        fma(tile.acc, C, lambda i, t: kT[(ib * MR + i) * C + t], lambda t, j: xp[t * NR + j])
                        for e in T.serial(MR * NR):
                            kv[((h * panels + jb) * Kp + ib * MR) * NR + e] = tile.acc[e]
                if gates > 0:
                    m.crossing(grad, below, u, C)
                    total[0] *= T.cast(first[C - 1], f64)  # all that crosses the whole chunk
                    for i in T.serial(C):
                        grad[i] += total[0]
                        total[0] += d[i]
                    total[0] = T.float64(0)
                    for i in T.serial(rows):
                        total[0] += c[rows - 1 - i]
                        dg[h * dg_head + (rows - 1 - i) * dg_row] = T.cast(grad[rows - 1 - i] + total[0], f32)

            m.transpose(pT, C, ps, C, C // 16, C // 16)
            m.transpose(gT, C, gs, C, C // 16, C // 16)
            for e in T.serial(C * C):
                gT[e] += gs[e]
            for kb, jb in T.grid(Kp // MR, C // NR):
                m.add_product(
                    dqT,
                    (kb * MR) * C + jb * NR,
                    C,
                    tile,
                    (jb + 1) * NR,
                    lambda i, t: kT[(kb * MR + i) * C + t],
                    lambda t, j: pT[t * C + jb * NR + j],
                )
                m.add_product(
                    dkT,
                    (kb * MR) * C + jb * NR,
                    C,
                    tile,
                    C - jb * NR,
                    lambda i, t: qT[(kb * MR + i) * C + jb * NR + t],
                    lambda t, j: ps[(jb * NR + t) * C + jb * NR + j],
                )
                m.add_product(
                    dkT,
                    (kb * MR) * C + jb * NR,
                    C,
                    tile,
                    C,
                    lambda i, t: kT[(kb * MR + i) * C + t],
                    lambda t, j: gT[t * C + jb * NR + j],
                )
            if norm > 0:
                m.norm_slopes(dqT, qT, iq, step, C, Kp)
                m.norm_slopes(dkT, kT, ik, step, C, Kp)
            m.transpose(x, Kp, dqT, C, Kp // 16, C // 16)
            for i in T.serial(C):
                if i < rows:
                    store_row(dq, i * dq_row, x, i * Kp, m.named(K))
            m.transpose(x, Kp, dkT, C, Kp // 16, C // 16)
            for i in T.serial(C):
                if i < rows:
                    store_row(dk, i * dk_row, x, i * Kp, m.named(K))

    return chunk_bwd_kernel


def decode(p: Problem, c: DecodeConfig):
    """Up to C tokens of one q/k head against its states, in place.

    The state is read once from memory: what k and q see of NR columns is summed first, o = q Sbar + (q k^T) u, and the
    columns, near by then, are updated.

    live = 0 marks a padded row: its output is zero and its states are not touched.
    """
    import tilelang.language as T

    from tl_kernels import macros as m

    C, NR, io = c.C, c.NR, m.storage(p.dtype)
    load_row, store_row = m.row_format(p.dtype)
    n, f32 = T.dynamic("n"), "float32"

    @T.prim_func
    def decode_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        v: T.Tensor([n], io),
        g: T.Tensor([n], "float32"),
        beta: T.Tensor([n], "float32"),
        o: T.Tensor([n], io),
        kv: T.Tensor([n], "float32"),
        q_row: T.int64,
        k_row: T.int64,
        v_row: T.int64,
        g_row: T.int64,
        beta_row: T.int64,
        o_row: T.int64,
        v_head: T.int64,
        g_head: T.int64,
        beta_head: T.int64,
        o_head: T.int64,
        kv_head: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        live: T.int32,
        gated: T.int32,
        norm: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(1) as _:
            xk = T.alloc_local([C * D_MAX], f32)
            xq = T.alloc_local([C * D_MAX], f32)
            vs = T.alloc_local([C * D_MAX], f32)
            os = T.alloc_local([C * D_MAX], f32)
            kS = T.alloc_local([NR], f32)
            qS = T.alloc_local([NR], f32)
            qk = T.alloc_local([C], f32)
            bt = T.alloc_local([C], f32)
            step = T.alloc_local([C], f32)
            inverse = T.alloc_local([C], f32)

            if live > 0:
                m.load_rows(xk, D_MAX, m.Rows(k, k_row, rows, K), C, load_row)
                m.load_rows(xq, D_MAX, m.Rows(q, q_row, rows, K), C, load_row)
                if norm > 0:
                    m.normalize_rows(xk, D_MAX, inverse, m.named(rows), NORM_EPS)
                    m.normalize_rows(xq, D_MAX, inverse, m.named(rows), NORM_EPS)
                m.scale_rows(xq, rows * D_MAX, scale)
                for t in T.serial(C):
                    qk[t] = T.float32(0)
                    step[t] = T.float32(1)
                for t in T.serial(rows):
                    for d in T.serial(K):
                        qk[t] += xq[t * D_MAX + d] * xk[t * D_MAX + d]
                for h in T.serial(heads):
                    if gated > 0:
                        m.gate_steps(step, m.Rows(g, g_row, rows, 1, h * g_head), C)
                    m.load_gates(bt, m.Rows(beta, beta_row, rows, 1, h * beta_head), C)
                    m.load_rows(vs, D_MAX, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                    for t in T.serial(rows):
                        for jb in T.serial((V + (NR - 1)) // NR):
                            if (jb + 1) * NR <= V:
                                m.delta_step(
                                    kv, h * kv_head + jb * NR, m.named(V), K, NR, kS, qS, xk, xq, vs, os, t * D_MAX,
                                    jb * NR, step[t], bt[t], qk[t],
                                )
                            else:
                                m.delta_step(
                                    kv, h * kv_head + jb * NR, m.named(V), K, V - jb * NR, kS, qS, xk, xq, vs, os,
                                    t * D_MAX, jb * NR, step[t], bt[t], qk[t],
                                )
                    for t in T.serial(rows):
                        store_row(o, h * o_head + t * o_row, os, t * D_MAX, m.named(V))
            else:
                for h, t, j in T.grid(heads, rows, V):
                    o[h * o_head + t * o_row + j] = T.cast(0, io)  # the bits of 0.0 in every format

    return decode_kernel


_GATES = (Arg("g", "token", "HV", "float32"), Arg("beta", "token", "HV", "float32"))
_TOKENS = (Arg("q", "token"), Arg("k", "token"), Arg("v", "token", "HV"), *_GATES)
_KEPT = (
    Arg("y", "token", "HV", "float32"),
    Arg("states", "chunk", "HV", "float32", every=KEPT_EVERY),
    Arg("kv", "state", "HV", "float32"),
)

FWD = Kernel(
    "delta_rule.chunk_fwd",
    chunk_fwd,
    configs,
    (*_TOKENS, Arg("o", "token", "HV"), *_KEPT),
    ("emit", "leave", "gated", "norm", "scale"),
    whole=True,
)
BWD = Kernel(
    "delta_rule.chunk_bwd",
    chunk_bwd,
    backward_configs,
    (
        Arg("q", "token"),
        Arg("k", "token"),
        *_GATES,
        Arg("y", "token", "HV", "float32"),
        Arg("dout", "token", "HV"),
        Arg("dq", "token"),
        Arg("dk", "token"),
        Arg("dv", "token", "HV"),
        Arg("dg", "token", "HV", "float32"),
        Arg("dbeta", "token", "HV", "float32"),
        *_KEPT[1:],
    ),
    ("gated", "gates", "norm", "scale"),
    reverse=True,
)
DECODE = Kernel(
    "delta_rule.decode",
    decode,
    decode_configs,
    (*_TOKENS, Arg("o", "token", "HV"), Arg("kv", "pool", "HV", "float32")),
    ("gated", "norm", "scale"),
    whole=True,
)
KERNELS = (FWD, BWD, DECODE)
