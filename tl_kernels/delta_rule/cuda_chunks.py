"""The gated delta rule on NVIDIA GPUs where sequences are long and heads few: what chunks can do at once, they do.

With the letters of cuda.py, the system of a chunk is solved before the state is known:

    (I + N B) Y0 = V      (I + N B) W = f * K      Y = Y0 - W S      S = f_C S + K^T (l * B Y)

`prepare` finds Y0 and W, a program a chunk. `carry` walks the chunks of a sequence, two products each, and leaves Y
and the state before each chunk. `output` makes O, a program a chunk and block of V. Y and the states are what backward
reads, too.

From the end, with the letters of cuda_backward.py, it is the same for the gradient of the state:

    (I + N^T B) X0 = scale M^T dO     (I + N^T B) W = l * K
    X = X0 + W R                      R = f_C R + scale Q^T (f * dO) - K^T (f * B X)

`prepare_back` finds X0 and W, `carry_back` leaves R behind each span, and `backward` does all spans at once.

More is read, written and computed than in one walk: it pays where a walk leaves most multiprocessors idle
(linattn_tl/ops/delta_rule/cuda.py).

Source: Yang et al. 2024, arXiv 2406.06484, eq. 8-11, with both systems solved by substitution.
"""

from functools import partial

from tl_kernels.cuda_sizes import Blocks, tensor_cores, tile_dtype
from tl_kernels.delta_rule.cuda_sizes import ROWS, chunk_configs, rows_of
from tl_kernels.spec import Kernel, Problem


def prepare(p: Problem, c: Blocks):
    return _prepare(p, c, back=False)


def prepare_back(p: Problem, c: Blocks):
    return _prepare(p, c, back=True)


def _prepare(p: Problem, c: Blocks, back: bool):
    """Y0 and W of each chunk, or X0 and its W. Spans are chunks.

    Y0 comes from v alone; X0 from q, k and dO, which takes the place of v.
    """
    import tilelang.language as T

    from tl_kernels import cuda_macros as m
    from tl_kernels.delta_rule import cuda_macros as d

    C, BV, io, f32, tile = c.C, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V, KP = p.K, p.V, rows_of(p.K)
    tokens, H, HV, G, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "G", "M"))

    @T.prim_func
    def prepare_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        v: T.Tensor([tokens, HV, V], io),
        g: T.Tensor([G, HV], f32),
        beta: T.Tensor([tokens, HV], f32),
        y0: T.Tensor([tokens, HV, V], tile),
        w: T.Tensor([tokens, HV, K], tile),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        gated: T.int32,
        norm: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * HV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, 1, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            ks = d.Rows(C, KP, tile, io)
            found = m.Tile(C, BV, tile)
            system = d.System(C, tile, reverse=back)
            x_s = d.alloc_solved(C, BV)
            gates = m.Gates(C)
            beta_s = T.alloc_shared([C], f32)
            if back:
                qs = d.Rows(C, KP, tile, io)
                ms = m.Tile(C, C, tile)
                num = T.alloc_fragment([C, BV], f32)
            acc = T.alloc_fragment([ROWS, BV], f32)
            A = T.alloc_fragment([C, C], f32)
            v_f = T.alloc_fragment([C, BV], f32)
            where = T.alloc_local([3], "int32")

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            t = where[1]
            if where[1] < where[2]:
                d.take_columns(gates, beta_s, g, beta, t, where[2], i_h, gated > 0)
                d.take_rows(ks, k, t, where[2] - t, i_q, norm > 0)
                T.clear(A)
                m.multiply(A, ks, ks, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    if back:
                        A[i, j] = T.Select(i < j, A[i, j] * gates.decay(i, j) * beta_s[j], T.float32(0))
                    else:
                        A[i, j] = T.Select(j < i, A[i, j] * gates.decay(j, i) * beta_s[j], T.float32(0))
                d.fill_system(system, A)
                if back:
                    d.take_rows(qs, q, t, where[2] - t, i_q, norm > 0)
                    T.clear(A)
                    m.multiply(A, qs, ks, transpose_B=True)
                    for i, j in T.Parallel(C, C):
                        A[i, j] = T.Select(j <= i, A[i, j] * gates.decay(j, i) * scale, T.float32(0))
                    m.fill(ms, A)
                for n in T.serial(-(-V // BV)):
                    T.copy(v[t : t + C, i_h, n * BV : n * BV + BV], v_f)
                    m.cleared(v_f, C, BV, where[2] - t)
                    if back:
                        m.fill(found, v_f)
                        T.clear(num)
                        m.multiply(num, ms, found, transpose_A=True)
                        T.copy(num, x_s[0:C, 0:BV])
                    else:
                        T.copy(v_f, x_s[0:C, 0:BV])
                    T.sync_threads()
                    d.solve(system, x_s, found, acc)
                    d.store_solved(y0, x_s, found, t, where[2], i_h, n * BV, V)
                    T.sync_threads()
                for i in T.Parallel(C):
                    gates.factors[i] = gates.last(i) if back else gates.first(i)
                for n in T.serial(-(-K // BV)):
                    for i, j in T.Parallel(C, BV):
                        if n * BV + j < KP:
                            if ks.exact:
                                x_s[i, j] = (ks.high[i, n * BV + j] + ks.low[i, n * BV + j]) * gates.factors[i]
                            else:
                                x_s[i, j] = T.cast(ks.high[i, n * BV + j], f32) * gates.factors[i]
                        else:
                            x_s[i, j] = T.float32(0)
                    T.sync_threads()
                    d.solve(system, x_s, found, acc)
                    d.store_solved(w, x_s, found, t, where[2], i_h, n * BV, K)
                    T.sync_threads()

    return prepare_kernel


def carry(p: Problem, c: Blocks):
    """Y, the state before each chunk, and where final > 0 the final one.

    Y does not take the place of Y0: a chunk that reaches over the end of its sequence reads rows of the next one.
    """
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m
    from tl_kernels.delta_rule import cuda_macros as d

    C, BV, io, f32, tile = c.C, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V, KP = p.K, p.V, rows_of(p.K)
    NV, ahead = -(-V // BV), c.stages == 1
    sizes = ("tokens", "H", "HV", "N0", "N1", "G", "chunks", "M")
    tokens, H, HV, N0, N1, G, chunks, M = (T.dynamic(n) for n in sizes)

    @T.prim_func
    def carry_kernel(
        k: T.Tensor([tokens, H, K], io),
        w: T.Tensor([tokens, HV, K], tile),
        g: T.Tensor([G, HV], f32),
        beta: T.Tensor([tokens, HV], f32),
        y0: T.Tensor([tokens, HV, V], tile),
        y: T.Tensor([tokens, HV, V], tile),
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
        gated: T.int32,
        norm: T.int32,
    ):
        with T.Kernel(spans * HV * NV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NV, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_v = i_p % NV * BV
            ks = d.Rows(C, KP, tile, io, ahead)
            ws = m.Tile(C, KP, tile)
            ys = m.Tile(C, BV, tile)
            ss = m.Tile(KP, BV, tile, twin=False)
            y_s = T.alloc_shared([C, BV], tile)
            w_next = m.Ahead(C, KP, tile, ahead)
            y_next = m.Ahead(C, BV, tile, ahead, swizzled=True)  # read as Y lies
            gates = m.Gates(C)
            beta_next = T.alloc_shared([C], f32)
            S = T.alloc_fragment([KP, BV], f32)
            num = T.alloc_fragment([C, BV], f32)
            w_f = T.alloc_fragment([C, KP], f32)
            y_f = T.alloc_fragment([C, BV], f32)
            where = T.alloc_local([3], "int32")
            slot = T.alloc_local([1], "int32")
            T.annotate_layout({y_s: make_swizzled_layout(y_s)})

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.find_chunk(slot, where, cu_seqlens, length, C)
            m.take_state(S, KP, BV, kv0, initial > 0, i_s, i_h, (0, i_v))
            for i in T.Parallel(C):
                gates.raw[i] = T.float32(0)
            T.sync_threads()
            if where[1] < where[2]:
                m.fetch(ks.next, k, where[1], i_q, 0)
                m.fetch(w_next, w, where[1], i_h, 0)
                m.fetch(y_next, y0, where[1], i_h, i_v)
                if gated > 0:
                    m.fetch_column(gates.raw, g, where[1], C, i_h)
                m.fetch_column(beta_next, beta, where[1], C, i_h)

            for n in T.serial(T.ceildiv(where[2] - where[1], C)):
                t = where[1] + n * C
                m.await_fetched(True)
                m.sum_gates(gates, where[2] - t)
                for i in T.Parallel(C):
                    gates.factors[i] = T.Select(t + i < where[2], gates.last(i) * beta_next[i], T.float32(0))
                d.take_rows(ks, k, t, where[2] - t, i_q, norm > 0)
                m.load(w_f, w_next, w, t, i_h, 0)
                m.cleared(w_f, C, KP, where[2] - t)
                m.fill(ws, w_f)
                m.load(y_f, y_next, y0, t, i_h, i_v)
                m.cleared(y_f, C, BV, where[2] - t)
                T.sync_threads()  # all have taken this chunk
                if t + C < where[2]:
                    m.fetch(ks.next, k, t + C, i_q, 0)
                    m.fetch(w_next, w, t + C, i_h, 0)
                    m.fetch(y_next, y0, t + C, i_h, i_v)
                    if gated > 0:
                        m.fetch_column(gates.raw, g, t + C, C, i_h)
                    m.fetch_column(beta_next, beta, t + C, C, i_h)

                T.clear(num)
                m.multiply_state(num, ws, S, ss)
                m.keep_state(states, slot[0] + n, i_h, (0, i_v), S, ss)
                for i, j in T.Parallel(C, BV):
                    num[i, j] = y_f[i, j] - num[i, j]
                T.copy(num, y_s)
                m.store(y, y_s, t, where[2], i_h, i_v, V)
                for i, j in T.Parallel(KP, BV):
                    S[i, j] *= gates.whole
                for i, j in T.Parallel(C, BV):
                    num[i, j] *= gates.factors[i]
                m.fill(ys, num)
                m.multiply(S, ks, ys, transpose_A=True)

            if final > 0:
                T.copy(S, kv1[i_s, i_h, 0:KP, i_v : i_v + BV])

    return carry_kernel


def output(p: Problem, c: Blocks):
    """O of each chunk, from Y and the state before it. Spans are chunks."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    from tl_kernels import cuda_macros as m
    from tl_kernels.delta_rule import cuda_macros as d

    C, BV, io, f32, tile = c.C, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V, KP = p.K, p.V, rows_of(p.K)
    NV = -(-V // BV)
    tokens, H, HV, G, chunks, M = (T.dynamic(n) for n in ("tokens", "H", "HV", "G", "chunks", "M"))

    @T.prim_func
    def output_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        g: T.Tensor([G, HV], f32),
        beta: T.Tensor([tokens, HV], f32),
        y: T.Tensor([tokens, HV, V], tile),
        states: T.Tensor([chunks, HV, K, V], tile),
        o: T.Tensor([tokens, HV, V], io),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        gated: T.int32,
        norm: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(spans * HV * NV, threads=c.threads) as i_p:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i_p, NV, (HV, H))
            i_s, i_h, i_q = place[0], place[1], place[2]
            i_v = i_p % NV * BV
            qs = d.Rows(C, KP, tile, io)
            ks = d.Rows(C, KP, tile, io)
            ys = m.Tile(C, BV, tile)
            cs = m.Tile(C, C, tile)
            ss = m.Tile(KP, BV, tile, twin=False)
            out_s = T.alloc_shared([C, BV], io)
            gates = m.Gates(C)
            beta_s = T.alloc_shared([C], f32)
            S = T.alloc_fragment([KP, BV], f32)
            num = T.alloc_fragment([C, BV], f32)
            A = T.alloc_fragment([C, C], f32)
            y_f = T.alloc_fragment([C, BV], f32)
            where = T.alloc_local([3], "int32")
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            t = where[1]
            if where[1] < where[2]:
                if ss.exact:
                    T.copy(states[i_s, i_h, 0:KP, i_v : i_v + BV], S)
                else:
                    T.async_copy(states[i_s, i_h, 0:KP, i_v : i_v + BV], ss.high)
                d.take_columns(gates, beta_s, g, beta, t, where[2], i_h, gated > 0)
                d.take_rows(qs, q, t, where[2] - t, i_q, norm > 0)
                d.take_rows(ks, k, t, where[2] - t, i_q, norm > 0)
                T.copy(y[t : t + C, i_h, i_v : i_v + BV], y_f)
                m.cleared(y_f, C, BV, where[2] - t)
                m.fill(ys, y_f)
                T.clear(A)
                m.multiply(A, qs, ks, transpose_B=True)
                for i, j in T.Parallel(C, C):
                    A[i, j] = T.Select(j <= i, A[i, j] * gates.decay(j, i) * beta_s[j] * scale, T.float32(0))
                m.fill(cs, A)
                m.await_fetched(True)
                T.clear(num)
                m.multiply_state(num, qs, S, ss, filled=True)
                for i, j in T.Parallel(C, BV):
                    num[i, j] *= gates.first(i) * scale
                m.multiply(num, cs, ys)
                T.copy(num, out_s)
                m.store(o, out_s, t, where[2], i_h, i_v, V)

    return output_kernel


def carry_back(p: Problem, c: Blocks):
    """The gradient of the state behind each span, and where initial > 0 that of the initial one.

    A span is `piece` tokens, a multiple of C; sequences are walked as a whole.
    """
    import tilelang.language as T

    from tl_kernels import cuda_macros as m
    from tl_kernels.delta_rule import cuda_macros as d

    C, BV, io, f32, tile = c.C, c.BV, p.dtype, "float32", tile_dtype(p)
    K, V, KP = p.K, p.V, rows_of(p.K)
    NV, ahead = -(-V // BV), c.stages == 1
    sizes = ("tokens", "H", "HV", "N0", "N1", "G", "pieces", "M")
    tokens, H, HV, N0, N1, G, pieces, M = (T.dynamic(n) for n in sizes)

    @T.prim_func
    def carry_back_kernel(
        q: T.Tensor([tokens, H, K], io),
        k: T.Tensor([tokens, H, K], io),
        w: T.Tensor([tokens, HV, K], tile),
        g: T.Tensor([G, HV], f32),
        beta: T.Tensor([tokens, HV], f32),
        x0: T.Tensor([tokens, HV, V], tile),
        dout: T.Tensor([tokens, HV, V], io),
        dkv1: T.Tensor([N1, HV, K, V], f32),
        dkv0: T.Tensor([N0, HV, K, V], f32),
        behind: T.Tensor([pieces, HV, K, V], f32),
        cu_seqlens: T.Tensor([M], "int32"),
        spans: T.int32,
        sequences: T.int32,
        length: T.int32,
        segment: T.int32,
        piece: T.int32,
        final: T.int32,
        initial: T.int32,
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
            ws = m.Tile(C, KP, tile)
            xs = m.Tile(C, BV, tile)
            dos = m.Tile(C, BV, tile)
            rs = m.Tile(KP, BV, tile, twin=False)
            w_next = m.Ahead(C, KP, tile, ahead)
            x_next = m.Ahead(C, BV, tile, ahead, swizzled=True)  # read as X lies
            dout_next = m.Ahead(C, BV, io, ahead)
            gates = m.Gates(C)
            beta_next = T.alloc_shared([C], f32)
            R = T.alloc_fragment([KP, BV], f32)
            num = T.alloc_fragment([C, BV], f32)
            w_f = T.alloc_fragment([C, KP], f32)
            x_f = T.alloc_fragment([C, BV], f32)
            dout_f = T.alloc_fragment([C, BV], f32)
            where = T.alloc_local([3], "int32")
            slot = T.alloc_local([1], "int32")

            m.find_span(where, i_s, cu_seqlens, sequences, length, segment)
            m.find_chunk(slot, where, cu_seqlens, length, T.max(piece, 1))
            m.take_state(R, KP, BV, dkv1, final > 0, i_s, i_h, (0, i_v))
            count = T.ceildiv(where[2] - where[1], C)
            end = where[1] + (count - 1) * C
            for i in T.Parallel(C):
                gates.raw[i] = T.float32(0)
            T.sync_threads()
            if count > 0:
                m.fetch(qs.next, q, end, i_q, 0)
                m.fetch(ks.next, k, end, i_q, 0)
                m.fetch(w_next, w, end, i_h, 0)
                m.fetch(x_next, x0, end, i_h, i_v)
                m.fetch(dout_next, dout, end, i_h, i_v)
                if gated > 0:
                    m.fetch_column(gates.raw, g, end, C, i_h)
                m.fetch_column(beta_next, beta, end, C, i_h)

            for n in T.serial(count):
                t = end - n * C
                m.await_fetched(True)
                m.sum_gates(gates, where[2] - t)
                for i in T.Parallel(C):
                    gates.factors[i] = T.Select(t + i < where[2], -gates.first(i) * beta_next[i], T.float32(0))
                d.take_rows(qs, q, t, where[2] - t, i_q, norm > 0)
                d.take_rows(ks, k, t, where[2] - t, i_q, norm > 0)
                m.load(w_f, w_next, w, t, i_h, 0)
                m.cleared(w_f, C, KP, where[2] - t)
                m.fill(ws, w_f)
                m.load(dout_f, dout_next, dout, t, i_h, i_v)
                m.cleared(dout_f, C, BV, where[2] - t)
                for i, j in T.Parallel(C, BV):
                    dout_f[i, j] *= gates.first(i) * scale
                m.fill(dos, dout_f)
                m.load(x_f, x_next, x0, t, i_h, i_v)
                m.cleared(x_f, C, BV, where[2] - t)
                T.sync_threads()  # all have taken this chunk
                if n + 1 < count:
                    m.fetch(qs.next, q, t - C, i_q, 0)
                    m.fetch(ks.next, k, t - C, i_q, 0)
                    m.fetch(w_next, w, t - C, i_h, 0)
                    m.fetch(x_next, x0, t - C, i_h, i_v)
                    m.fetch(dout_next, dout, t - C, i_h, i_v)
                    if gated > 0:
                        m.fetch_column(gates.raw, g, t - C, C, i_h)
                    m.fetch_column(beta_next, beta, t - C, C, i_h)

                if (n == 0) | (T.truncmod(t + C - where[1], piece) == 0):
                    T.copy(R, behind[slot[0] + T.truncdiv(t - where[1], piece), i_h, 0:KP, i_v : i_v + BV])
                T.clear(num)
                m.multiply_state(num, ws, R, rs)
                for i, j in T.Parallel(C, BV):
                    num[i, j] = (x_f[i, j] + num[i, j]) * gates.factors[i]
                m.fill(xs, num)
                for i, j in T.Parallel(KP, BV):
                    R[i, j] *= gates.whole
                m.multiply(R, qs, dos, transpose_A=True)
                m.multiply(R, ks, xs, transpose_A=True)

            if initial > 0:
                T.copy(R, dkv0[i_s, i_h, 0:KP, i_v : i_v + BV])

    return carry_back_kernel


KERNELS = tuple(
    Kernel(f"delta_rule.{stage}", build, partial(chunk_configs, stage), expects=tensor_cores)
    for stage, build in (
        ("prepare", prepare),
        ("carry", carry),
        ("output", output),
        ("prepare_back", prepare_back),
        ("carry_back", carry_back),
    )
)
