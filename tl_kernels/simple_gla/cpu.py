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

S is known walking forward and R walking backward: chunk_fwd leaves S at every KEPT_EVERY tokens, 4 K V / KEPT_EVERY
bytes a token and value head, and chunk_bwd, which walks backward, reads it. So every input is read once.

Switches: `emit` (write outputs), `carry` (update the state), `gates` (the gradient of g is wanted), `keeps` (there is a
place for the state before this chunk). The states that are walked are in panels [columns / NR, rows, NR] padded with
zeros, as for linear_attention; kept ones are rows [K, V]. Value heads of a q/k head are walked inside: they share
Q K^T, but have gates of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        states: T.Tensor([n], "float32"),
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
        keeps: T.int32,
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
            Vs = m.round_up(V, 16)  # columns of a kept state
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
                    if keeps > 0:
                        m.keep_panel(states, h * Kp * Vs + jb * NR, Vs, T.min(NR, Vs - jb * NR), kv,
                                     (h * panels + jb) * Kp * NR, NR, Kp)
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


def chunk_bwd(p: Problem, config: Config):
    """dQ, dK, dV and dg of one chunk, walking backward; kv holds R, states the S that chunk_fwd has left.

    All that is not V-sized is kept transposed, [D, C]: tokens are then the columns of every product but dV's, a decay
    scales a column, and the dot products of dg are sums of rows.
    """
    import tilelang.language as T

    from tl_kernels import macros as m

    C, MR, NR, io = config.C, config.MR, config.NR, m.storage(p.dtype)
    load_row, store_row = m.row_format(p.dtype)
    fma, prefetch, prefetch_state = m.register_tile(MR, NR), m.prefetcher(p.dtype), m.prefetcher("float32")
    n, f32, f64 = T.dynamic("n"), "float32", "float64"

    @T.prim_func
    def chunk_bwd_kernel(
        q: T.Tensor([n], io),
        k: T.Tensor([n], io),
        v: T.Tensor([n], io),
        g: T.Tensor([n], "float32"),
        dout: T.Tensor([n], io),
        dq: T.Tensor([n], io),
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
        dq_row: T.int64,
        dk_row: T.int64,
        dv_row: T.int64,
        dg_row: T.int64,
        v_head: T.int64,
        g_head: T.int64,
        dout_head: T.int64,
        dv_head: T.int64,
        dg_head: T.int64,
        states_row: T.int64,
        rows: T.int32,
        K: T.int32,
        V: T.int32,
        heads: T.int32,
        emit: T.int32,
        gates: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(1) as _:
            x = T.alloc_local([C * D_MAX], f32)  # rows on their way in or out; of a value head, dO
            qT = T.alloc_local([D_MAX * C], f32)  # scale q
            kT = T.alloc_local([D_MAX * C], f32)
            vT = T.alloc_local([D_MAX * C], f32)
            doT = T.alloc_local([D_MAX * C], f32)
            dqT = T.alloc_local([D_MAX * C], f32)
            dkT = T.alloc_local([D_MAX * C], f32)
            df = T.alloc_local([C * NR], f32)  # f * dO, a panel of it
            a = T.alloc_local([C * C], f32)
            b = T.alloc_local([C * C], f32)  # the sum of P over the value heads
            bT = T.alloc_local([C * C], f32)
            w = T.alloc_local([C * C], f32)  # D, then D * A
            u = T.alloc_local([C * C], f32)  # P, then P * A
            below = T.alloc_local([C], f64)  # of u, the sum of the rows from one on
            grad = T.alloc_local([C], f64)  # dg
            c = T.alloc_local([C], f64)
            d = T.alloc_local([C], f64)
            total = T.alloc_local([1], f64)
            lanes = T.alloc_local([NR], f32)
            step = T.alloc_local([C], f32)
            first = T.alloc_local([C], f32)
            last = T.alloc_local([C], f32)
            deep = m.deep_register_tile(MR, NR, T.alloc_local([MR * NR], f32))
            tile = m.TileShape(MR, NR, T.alloc_local([MR * NR], f32), fma)
            deep_tile = m.TileShape(MR, NR, tile.acc, deep)
            Kp = m.round_up(K, 16)
            Vs = m.round_up(V, 16)  # columns of a kept state
            Vp = m.round_up(V, NR)
            panels = (V + (NR - 1)) // NR

            m.load_rows(x, Kp, m.Rows(q, q_row, rows, K), C, load_row)
            m.scale_rows(x, C * Kp, scale)
            m.transpose(qT, C, x, Kp, C // 16, Kp // 16)
            if emit > 0:
                m.load_rows(x, Kp, m.Rows(k, k_row, rows, K), C, load_row)
                m.transpose(kT, C, x, Kp, C // 16, Kp // 16)
                for e in T.serial(Kp * C):
                    dqT[e] = T.float32(0)
                    dkT[e] = T.float32(0)
                for e in T.serial(C * C):
                    b[e] = T.float32(0)
                m.lower_product(a, C, deep_tile, Kp, lambda i, e: qT[e * C + i], lambda e, j: kT[e * C + j])

            for h in T.serial(heads):
                m.decays(w, first, last, step, m.Rows(g, g_row, rows, 1, h * g_head), C)
                if emit > 0:
                    m.load_rows(x, Vp, m.Rows(v, v_row, rows, V, h * v_head), C, load_row)
                    m.transpose(vT, C, x, Vp, C // 16, Vs // 16)
                m.load_rows(x, Vp, m.Rows(dout, dout_row, rows, V, h * dout_head), C, load_row)
                if emit > 0:
                    m.transpose(doT, C, x, Vp, C // 16, Vs // 16)
                    m.lower_product(u, C, deep_tile, Vs, lambda i, e: doT[e * C + i], lambda e, j: vT[e * C + j])
                    for e in T.serial(C * C):
                        u[e] *= w[e]
                        b[e] += u[e]
                        u[e] *= a[e]
                        w[e] *= a[e]
                    for i in T.serial(C):
                        c[i] = T.float64(0)
                        d[i] = T.float64(0)
                    for jb in T.serial(C // NR):
                        for kb in T.serial(Kp // MR):
                            m.clear_tile(tile)
                            deep(
                                tile.acc,
                                Vs,
                                lambda i, e: states[(h * Kp + kb * MR + i) * Vs + e],
                                lambda e, j: doT[e * C + jb * NR + j],
                            )
                            m.add_columns(dqT, c, tile, first, qT, kb * MR, jb * NR, C, m.named(gates))
                        for kb in T.serial(Kp // MR):
                            m.clear_tile(tile)
                            deep(
                                tile.acc,
                                Vs,
                                lambda i, e: kv[((h * panels + e // NR) * Kp + kb * MR + i) * NR + e % NR],
                                lambda e, j: vT[e * C + jb * NR + j],
                            )
                            if jb == 0:
                                kept = m.Rows(states, T.cast(Vs, "int64"), MR, Vs, states_row)
                                prefetch_state(kept, h * Kp + kb * MR, MR, 0, Vs)
                            m.add_columns(dkT, d, tile, last, kT, kb * MR, jb * NR, C, m.named(gates))
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
                            m.store_tile_rows(
                                m.Rows(dv, dv_row, rows, V, h * dv_head), tile, ib * MR, jb * NR, store_row
                            )
                    if emit * gates > 0:
                        m.add_inner(
                            total, lanes, states, h * Kp * Vs + jb * NR, Vs, T.min(NR, Vs - jb * NR), kv,
                            (h * panels + jb) * Kp * NR, NR, Kp,
                        )  # fmt: skip
                    for t in T.serial(C):
                        for j in T.serial(NR):
                            df[t * NR + j] = x[t * Vp + jb * NR + j] * first[t]
                    m.update_panel(
                        kv,
                        (h * panels + jb) * Kp * NR,
                        tile,
                        Kp // MR,
                        C,
                        first[C - 1],
                        lambda i, t: qT[i * C + t],
                        lambda t, j: df[t * NR + j],
                    )
                if emit * gates > 0:
                    m.crossing(grad, below, u, C)
                    total[0] *= T.cast(first[C - 1], f64)  # all that crosses the whole chunk
                    for i in T.serial(C):
                        grad[i] += total[0]
                        total[0] += d[i]
                    total[0] = T.float64(0)
                    for i in T.serial(rows):
                        total[0] += c[rows - 1 - i]
                        dg[h * dg_head + (rows - 1 - i) * dg_row] = T.cast(grad[rows - 1 - i] + total[0], f32)

            if emit > 0:
                m.transpose(bT, C, b, C, C // 16, C // 16)
                for kb, jb in T.grid(Kp // MR, C // NR):
                    m.add_product(
                        dqT,
                        (kb * MR) * C + jb * NR,
                        C,
                        tile,
                        (jb + 1) * NR,
                        lambda i, t: kT[(kb * MR + i) * C + t],
                        lambda t, j: bT[t * C + jb * NR + j],
                    )
                    m.add_product(
                        dkT,
                        (kb * MR) * C + jb * NR,
                        C,
                        tile,
                        C - jb * NR,
                        lambda i, t: qT[(kb * MR + i) * C + jb * NR + t],
                        lambda t, j: b[(jb * NR + t) * C + jb * NR + j],
                    )
                m.transpose(x, Kp, dqT, C, Kp // 16, C // 16)
                m.scale_rows(x, C * Kp, scale)
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
FWD = Kernel(
    "simple_gla.chunk_fwd",
    chunk_fwd,
    configs,
    (
        *_TOKENS,
        Arg("o", "token", "HV"),
        Arg("states", "chunk", "HV", "float32", every=KEPT_EVERY),
        Arg("kv", "state", "HV", "float32"),
    ),
    ("emit", "carry", "scale"),
    whole=True,
)
BWD = Kernel(
    "simple_gla.chunk_bwd",
    chunk_bwd,
    backward_configs,
    (
        *_TOKENS,
        Arg("dout", "token", "HV"),
        Arg("dq", "token"),
        Arg("dk", "token"),
        Arg("dv", "token", "HV"),
        Arg("dg", "token", "HV", "float32"),
        Arg("states", "chunk", "HV", "float32", every=KEPT_EVERY),
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
KERNELS = (FWD, BWD, DECODE)
