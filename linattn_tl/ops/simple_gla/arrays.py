"""Scalar-gated linear attention over an array namespace: the cupy backend, and the same under NumPy in the tests.

All chunks of a span of tokens at once, with a loop over their states alone. Every array is [N, HV, n, C, columns], n
chunks of C tokens, q scaled, q and k repeated for each value head. With the decays D, f and l of a chunk
(tl_kernels/simple_gla/cpu.py has the formulas), S the state before it and R the gradient of the one after it,

    O  = (D * Q K^T) V + f * Q S                     S' = f_C S + K^T (l * V)
    P  = D * dO V^T                                  R' = f_C R + Q^T (f * dO)
    dQ = P K + f * dO S^T        dK = P^T Q + l * V R^T        dV = (D * Q K^T)^T dO + l * K R
    dg_t = sum_{j < t <= i} (P * Q K^T)_ij + sum_{i >= t} f_i q_i S dO_i^T + sum_{j < t} l_j v_j R^T k_j^T + f_C <S, R>

Source: Dao and Gu 2024, arXiv 2405.21060, section 6.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from linattn_tl.arrays import Arrays
from linattn_tl.ops.simple_gla.definition import CHUNK, Options

STATE_BYTES = 256 << 20  # of chunk states held at once: a longer sequence goes span by span
Array = Any  # of the namespace


class Tokens(NamedTuple):
    """Arrays of a span of tokens: scale q and k [N, HV, T, K], v and dO [N, HV, T, V], g [N, HV, T]."""

    q: Array
    k: Array
    v: Array
    g: Array
    dout: Array | None = None

    def at(self, rows: Any, tokens: slice) -> "Tokens":
        return Tokens(*(None if x is None else x[rows][:, :, tokens] for x in self))


class Decays(NamedTuple):
    """Of each chunk: inside [..., C, C], first and last [..., C, 1], whole [..., 1, 1]."""

    inside: Array
    first: Array
    last: Array
    whole: Array


def decays(xp: Any, g: Array) -> Decays:
    """Of g [..., C]. Each sum is made by itself: a difference of running sums would lose a small gate behind a large
    one, and -inf - -inf is no number."""
    C = g.shape[-1]
    i, j = xp.arange(C)[:, None], xp.arange(C)[None]
    sums = xp.cumsum(xp.where(j < i, xp.broadcast_to(g[..., None], (*g.shape, C)), 0), axis=-2)
    inside = xp.where(j <= i, xp.exp(sums), 0).astype(g.dtype)
    first = xp.exp(xp.cumsum(g, axis=-1))[..., None]
    return Decays(inside, first, inside[..., -1, :, None], first[..., -1:, :])


def _swap(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _cut(xp: Any, x: Array) -> Array:
    """[N, HV, T, ...] -> [N, HV, n, C, ...]; zeros after the last token, so that a gate there keeps all."""
    T = x.shape[2]
    C = min(CHUNK, T)
    n = -(-T // C)
    if n * C > T:
        padded = xp.zeros((*x.shape[:2], n * C, *x.shape[3:]), dtype=x.dtype)
        padded[:, :, :T] = x
        x = padded
    return x.reshape(*x.shape[:2], n, C, *x.shape[3:])


def _whole(x: Array, T: int) -> Array:
    """_cut backwards."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])[:, :, :T]


def _before(xp: Any, sums: Array, whole: Array, state: Array, reverse: bool = False) -> tuple[Array, Array]:
    """The state that each chunk starts from, and the one after the last; from the other end where reverse."""
    before, n = xp.empty_like(sums), sums.shape[2]
    for i in reversed(range(n)) if reverse else range(n):
        before[:, :, i] = state
        state = whole[:, :, i] * state + sums[:, :, i]
    return before, state


def _states(xp: Any, x: Tokens, d: Decays, state: Array) -> tuple[Array, Array]:
    return _before(xp, _swap(x.k) @ (d.last * x.v), d.whole, state)


def forward(xp: Any, x: Tokens, state: Array) -> tuple[Array, Array]:
    """o [N, HV, T, V] of a span, and the state [N, HV, K, V] after it."""
    T = x.q.shape[2]
    x = Tokens(*(None if a is None else _cut(xp, a) for a in x))
    d = decays(xp, x.g)
    before, state = _states(xp, x, d, state)
    return _whole((d.inside * (x.q @ _swap(x.k))) @ x.v + d.first * (x.q @ before), T), state


def backward(xp: Any, x: Tokens, state: Array, grad: Array) -> tuple[list[Array], Array]:
    """Gradients of scale q, k, v and g of a span, and that of the state before it.

    state: before the span; grad: the gradient of the one after it.
    """
    T = x.q.shape[2]
    x = Tokens(*(None if a is None else _cut(xp, a) for a in x))
    d = decays(xp, x.g)
    S, _ = _states(xp, x, d, state)
    R, grad = _before(xp, _swap(x.q) @ (d.first * x.dout), d.whole, grad, reverse=True)
    A, P = x.q @ _swap(x.k), d.inside * (x.dout @ _swap(x.v))
    dq = P @ x.k + d.first * (x.dout @ _swap(S))
    dk = _swap(P) @ x.q + d.last * (x.v @ _swap(R))
    from_later = d.last * (x.k @ R)
    dv = _swap(d.inside * A) @ x.dout + from_later
    C = A.shape[-1]
    below = xp.flip(xp.cumsum(xp.flip(P * A, -2), axis=-2), -2)
    earlier = xp.arange(C)[None] < xp.arange(C)[:, None]
    dg = xp.where(earlier, below, 0).sum(-1)
    c = (d.first * (x.q @ S) * x.dout).sum(-1)
    dg = dg + xp.flip(xp.cumsum(xp.flip(c, -1), axis=-1), -1)
    dg = dg + xp.where(earlier, (from_later * x.v).sum(-1)[..., None, :], 0).sum(-1)
    dg = dg + (d.whole * S * R).sum((-2, -1))[..., None]
    return [_whole(a, T) for a in (dq, dk, dv, dg)], grad


# ---- between torch's layouts and these


class _Layout(NamedTuple):
    """One call's conversions; heads = HV / H."""

    arrays: Arrays
    dtype: torch.dtype  # what is computed in: at least fp32
    heads: int

    @property
    def xp(self) -> Any:
        return self.arrays.xp

    def tokens(self, x: torch.Tensor) -> Array:
        """[B, T, HV, ...] -> [B, HV, T, ...]."""
        return self.arrays.array(x, self.dtype).swapaxes(1, 2)

    def shared(self, x: torch.Tensor) -> Array:
        """[B, T, H, K] -> [B, HV, T, K]."""
        return self.xp.repeat(self.tokens(x), self.heads, axis=1)

    def from_tokens(self, a: Array, like: torch.Tensor) -> torch.Tensor:
        return self.arrays.tensor(a.swapaxes(1, 2), like.dtype)

    def from_shared(self, a: Array, like: torch.Tensor) -> torch.Tensor:
        """The sum over the value heads of each q/k head."""
        N, HV = a.shape[:2]
        return self.from_tokens(a.reshape(N, HV // self.heads, self.heads, *a.shape[2:]).sum(2), like)

    def state(self, x: torch.Tensor | None, N: int, v: Array, K: int) -> Array:
        if x is not None:
            return self.arrays.array(x, self.dtype)
        return self.xp.zeros((N, v.shape[1], K, v.shape[3]), dtype=v.dtype)


def _layout(arrays: Arrays, q: torch.Tensor, v: torch.Tensor) -> _Layout:
    return _Layout(arrays, torch.promote_types(q.dtype, torch.float32), v.shape[2] // max(q.shape[2], 1))


def _given(at: _Layout, inputs: Sequence[Any], dout: Any, opt: Options) -> Tokens:
    q, k, v, g, _ = inputs
    upstream = None if dout is None else at.tokens(dout)
    return Tokens(opt.scale * at.shared(q), at.shared(k), at.tokens(v), at.tokens(g), upstream)


def _parts(lengths: torch.Tensor | None, T: int) -> Iterator[tuple[slice, int, int]]:
    """Rows, first token, last + 1: of all sequences at once, or of each packed one."""
    if lengths is None:
        yield slice(None), 0, T
        return
    for i, (begin, end) in enumerate(pairwise(lengths.tolist())):
        yield slice(i, i + 1), begin, end


def _spans(begin: int, end: int, state: Array) -> list[slice]:
    """As many chunks at once as have STATE_BYTES of states."""
    tokens = CHUNK * max(1, STATE_BYTES // max(1, state.nbytes))
    return [slice(a, min(a + tokens, end)) for a in range(begin, end, tokens)]


# ---- the runners


class ArrayRunner:
    """simple_gla over an array namespace."""

    differentiable = False

    def __init__(self, arrays: Arrays):
        self.arrays = arrays

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, final state or None); nothing is kept for backward."""
        q, _, v, _, initial = inputs
        at, N = _layout(self.arrays, q, v), q.shape[0] if lengths is None else lengths.shape[0] - 1
        with self.arrays.using(q):
            x = _given(at, inputs, None, opt)
            o, last = at.xp.empty_like(x.v), at.state(initial, N, x.v, q.shape[3]).copy()
            for rows, begin, end in _parts(lengths, q.shape[1]):
                for span in _spans(begin, end, last[rows]):
                    mine = slice(None) if lengths is not None else rows
                    o[mine][:, :, span], last[rows] = forward(at.xp, x.at(mine, span), last[rows])
            final = self.arrays.tensor(last, at.dtype) if opt.output_final_state else None
            return (at.from_tokens(o, v), final), ()

    def backward(
        self,
        inputs: Sequence[Any],
        results: Sequence[Any],
        saved: Sequence[Any],
        lengths: Any,
        grads: Sequence[Any],
        needs: Sequence[bool],
        opt: Options,
    ) -> list[Any]:
        """One gradient an input that needs one."""
        q, k, v, g, initial = inputs
        dout = v.new_zeros(1).expand(v.shape) if grads[0] is None else grads[0]
        at, N = _layout(self.arrays, q, v), q.shape[0] if lengths is None else lengths.shape[0] - 1
        with self.arrays.using(q):
            x = _given(at, inputs, dout, opt)
            found = [at.xp.empty_like(a) for a in x[:4]]
            start = at.state(initial, N, x.v, q.shape[3])
            end = at.state(grads[1], N, x.v, q.shape[3]).copy()
            for rows, begin, stop in _parts(lengths, q.shape[1]):
                mine = slice(None) if lengths is not None else rows
                spans, states = _spans(begin, stop, end[rows]), [start[rows]]
                for span in spans[:-1]:
                    states.append(forward(at.xp, x.at(mine, span), states[-1])[1])
                for span, state in zip(reversed(spans), reversed(states[: len(spans)]), strict=True):
                    pieces, end[rows] = backward(at.xp, x.at(mine, span), state, end[rows])
                    for into, piece in zip(found, pieces, strict=True):
                        into[mine][:, :, span] = piece
            dq, dk, dv, dg = found
            makers = (
                lambda: at.from_shared(opt.scale * dq, q),
                lambda: at.from_shared(dk, k),
                lambda: at.from_tokens(dv, v),
                lambda: at.from_tokens(dg, g),
                lambda: self.arrays.tensor(end, at.dtype),
            )
            return [make() if need else None for make, need in zip(makers, needs, strict=True)]


class ArrayDecode:
    """simple_gla_decode over an array namespace."""

    def __init__(self, arrays: Arrays):
        self.runner = ArrayRunner(arrays)

    @torch.no_grad()
    def __call__(self, q: Any, k: Any, v: Any, g: Any, state: Any, slots: Any, opt: Options, out: Any) -> Any:
        """q [B, H, K] or [B, n, H, K]; state [P, HV, K, V] changes in place."""
        if q.ndim == 3:
            q, k, v, g = (x.unsqueeze(1) for x in (q, k, v, g))
            self(q, k, v, g, state, slots, opt, out.unsqueeze(1))
            return out
        if q.numel() == 0 and v.numel() == 0:
            return out
        if slots is None:
            (o, new), _ = self.runner.forward((q, k, v, g, state), None, opt)
            state.copy_(new)
            return out.copy_(o)
        live = slots >= 0
        picked = slots[live].long()
        (o, new), _ = self.runner.forward((q[live], k[live], v[live], g[live], state[picked]), None, opt)
        state[picked] = new
        out[live] = o
        out[~live] = 0  # last: out may be one of the inputs
        return out
