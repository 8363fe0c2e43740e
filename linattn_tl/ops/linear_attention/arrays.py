"""Linear attention over an array namespace: the cupy backend, and the same under NumPy in the tests.

With the normaliser as one more value column, V' = [V, 1] and S' = [S, z], all passes are one primitive,

    attend(a, b, c, S):   out_t = sum over s <= t of (a_t . b_s) c_s  +  a_t S         S becomes S + b^T c

    forward   [num, den] = attend(Q, K, V', S')              Q = scale phi(q), K = phi(k), o = num / (den + eps)
    backward  G = [dO / den, -(dO . o) / den]
              dQ  = attend(G, V', K, S'^T)
              dK  = attend(V', G, Q, dS'^T)  and  [dV, _] = attend(K, Q, G, dS'),  from the last token to the first

and the last S' of dV's is the gradient of the initial state. A pass in chunks is

    A = tril(a b^T)      out = A c + a S_n      S_{n+1} = S_n + b^T c

with the chunks' products all at once and a loop over their sums alone. One q/k head serves HV/H consecutive value
heads, so their columns lie side by side, [T, HV/H * V], and every array here is [N, H, T, columns].

One token is a kernel of its own, arrays_decode.py.

Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 8-12 and 16-20; in chunks: Yang et al. 2023, arXiv 2312.06635.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from linattn_tl.arrays import Arrays
from linattn_tl.ops.linear_attention.arrays_decode import KERNEL, SOURCE, fits, launch
from linattn_tl.ops.linear_attention.definition import CHUNK, Options

STATE_BYTES = 256 << 20  # of chunk states held at once: a longer sequence goes span by span
Array = Any  # of the namespace


# ---- the primitive


def attend(xp: Any, a: Array, b: Array, c: Array, state: Array, causal: bool, reverse: bool = False) -> Any:
    """out [N, H, T, E] and the last state [N, H, D, E].

    a, b [N, H, T, D], c [N, H, T, E], state [N, H, D, E]. Not causal: b and c may have another length than a, and a
    sees the last state. reverse: from the last token to the first.
    """
    if not causal:
        state = state + _swap(b) @ c
        return a @ state, state
    T = a.shape[2]
    out = xp.empty((*a.shape[:3], c.shape[3]), dtype=a.dtype)
    tokens = _span(state)
    starts = range(0, T, tokens)
    for start in reversed(starts) if reverse else starts:
        part = (slice(None), slice(None), slice(start, start + tokens))
        out[part], state = _chunks(xp, a[part], b[part], c[part], state, reverse)
    return out, state


def _span(state: Array) -> int:
    """Tokens at once: as many chunks as have STATE_BYTES of states."""
    return CHUNK * max(1, STATE_BYTES // max(1, state.nbytes))


def _chunks(xp: Any, a: Array, b: Array, c: Array, state: Array, reverse: bool) -> Any:
    T = a.shape[2]
    C = min(CHUNK, T)
    n = -(-T // C)
    a, b, c = (_cut(xp, x, n, C) for x in (a, b, c))
    sums = _swap(b) @ c
    before = xp.empty_like(sums)  # the state that each chunk starts from
    # a loop, and not a cumulative sum: one that adds in a tree would give NaN to chunks before the one that has it
    for i in reversed(range(n)) if reverse else range(n):
        before[:, :, i] = state
        state = state + sums[:, :, i]
    triangle = xp.triu if reverse else xp.tril
    out = triangle(a @ _swap(b)) @ c + a @ before
    return out.reshape(*out.shape[:2], n * C, out.shape[4])[:, :, :T], state


def _cut(xp: Any, x: Array, n: int, C: int) -> Array:
    """[N, H, T, D] -> [N, H, n, C, D], zeros after the last token."""
    N, H, T, D = x.shape
    if n * C > T:
        padded = xp.zeros((N, H, n * C, D), dtype=x.dtype)
        padded[:, :, :T] = x
        x = padded
    return x.reshape(N, H, n, C, D)


def _swap(x: Array) -> Array:
    return x.swapaxes(-1, -2)


# ---- feature maps


def features(xp: Any, name: str, x: Array) -> Array:
    """phi(x). NaN stays NaN."""
    if name == "elu1":
        return xp.where(x > 0, x + 1, xp.exp(xp.minimum(x, 0)))
    return xp.maximum(x, 0) if name == "relu" else x


def slope(xp: Any, name: str, x: Array, grad: Array) -> Array:
    """grad phi'(x)."""
    if name == "elu1":
        return grad * xp.where(x > 0, 1, xp.exp(xp.minimum(x, 0)))
    return xp.where(x <= 0, 0, grad) if name == "relu" else grad


# ---- one batch of sequences


class Sequences(NamedTuple):
    """The inputs of one batch as arrays: q, k before the feature map [N, H, T, K], v with its ones [N, H, T, W + 1]."""

    q: Array
    k: Array
    v: Array
    state: Array  # [N, H, K, W + 1]


def forward(xp: Any, x: Sequences, opt: Options) -> tuple[Array, Array, Array]:
    """o [N, H, T, W], den [N, H, T] and the last state."""
    q, k = opt.scale * features(xp, opt.feature_map, x.q), features(xp, opt.feature_map, x.k)
    out, state = attend(xp, q, k, x.v, x.state, opt.causal)
    o, den = out[..., :-1], out[..., -1] + opt.eps
    return o / den[..., None] if opt.normalize else o, den, state


def upstream(xp: Any, o: Array, den: Array, dout: Array, opt: Options) -> Array:
    """G [N, H, T, W + 1], the gradient of the un-normalised sums."""
    if not opt.normalize:
        return _with_column(xp, dout, xp.zeros_like(den))
    dnum = dout / den[..., None]
    return _with_column(xp, dnum, -(dnum * o).sum(-1))


def backward(xp: Any, x: Sequences, g: Array, dstate: Array, needs: Sequence[bool], opt: Options) -> list[Any]:
    """dq, dk, dv and the gradient of the initial state, None for what needs (q, k, v, state) does not name.

    x.state is the initial state, or the last one where the pass is not causal; dstate is the last one's gradient.
    """
    phi = opt.feature_map
    q, k = opt.scale * features(xp, phi, x.q), features(xp, phi, x.k)
    found: list[Any] = [None] * 4
    if needs[0]:
        dq = attend(xp, g, x.v, k, _swap(x.state), True)[0] if opt.causal else g @ _swap(x.state)
        found[0] = slope(xp, phi, x.q, opt.scale * dq)
    total = dstate + _swap(q) @ g if needs[3] or not opt.causal else None
    if needs[1]:
        dk = attend(xp, x.v, g, q, _swap(dstate), True, reverse=True)[0] if opt.causal else x.v @ _swap(total)
        found[1] = slope(xp, phi, x.k, dk)
    if needs[2]:
        dv = attend(xp, k, q, g, dstate, True, reverse=True)[0] if opt.causal else k @ total
        found[2] = dv[..., :-1]
    found[3] = total if needs[3] else None
    return found


def _with_column(xp: Any, x: Array, column: Array) -> Array:
    return xp.concatenate([x, column[..., None]], -1)


# ---- between torch's layouts and these


class _Layout(NamedTuple):
    """One call's conversions. Sizes are those of torch's tensors, heads = HV / H."""

    arrays: Arrays
    dtype: torch.dtype  # what is computed in: at least fp32
    H: int
    heads: int
    K: int
    V: int

    @property
    def xp(self) -> Any:
        return self.arrays.xp

    def tokens(self, x: torch.Tensor) -> Array:
        """[B, T, H or HV, D] -> [B, H, T, D or HV/H * D]."""
        a = self.arrays.array(x, self.dtype)
        B, T = a.shape[:2]
        return a.reshape(B, T, self.H, a.shape[2] // self.H * a.shape[3]).swapaxes(1, 2)

    def from_tokens(self, a: Array, like: torch.Tensor) -> torch.Tensor:
        """As `tokens` backwards, shaped and typed like a tensor of its own, if not of its length."""
        B, _, T, _ = a.shape
        return self.arrays.tensor(a.swapaxes(1, 2).reshape(B, T, *like.shape[2:]), like.dtype)

    def values(self, v: torch.Tensor) -> Array:
        """v with a column of ones."""
        a = self.tokens(v)
        return _with_column(self.xp, a, self.xp.ones(a.shape[:3], dtype=a.dtype))

    def state(self, kv: torch.Tensor | None, z: torch.Tensor | None, N: int) -> Array:
        """kv [N, HV, K, V] and z [N, H, K] -> [N, H, K, HV/H * V + 1]; zeros for what is missing."""
        xp, H, heads, K, V = self.xp, self.H, self.heads, self.K, self.V
        a = xp.zeros((N, H, K, heads * V + 1), dtype=str(self.dtype).removeprefix("torch."))
        if kv is not None:
            by_head = self.arrays.array(kv, self.dtype).reshape(N, H, heads, K, V)
            a[..., :-1] = by_head.transpose(0, 1, 3, 2, 4).reshape(N, H, K, heads * V)
        if z is not None:
            a[..., -1] = self.arrays.array(z, self.dtype)
        return a

    def from_state(self, a: Array) -> tuple[torch.Tensor, torch.Tensor]:
        N, H, heads, K, V = a.shape[0], self.H, self.heads, self.K, self.V
        kv = a[..., :-1].reshape(N, H, K, heads, V).transpose(0, 1, 3, 2, 4).reshape(N, H * heads, K, V)
        return self.arrays.tensor(kv, self.dtype), self.arrays.tensor(a[..., -1], self.dtype)


def _layout(arrays: Arrays, q: torch.Tensor, v: torch.Tensor) -> _Layout:
    wide = torch.promote_types(q.dtype, torch.float32)
    return _Layout(arrays, wide, q.shape[2], v.shape[2] // q.shape[2], q.shape[3], v.shape[3])


Part = tuple[Any, slice]  # which sequences, and which tokens they have


def _parts(lengths: torch.Tensor | None) -> Iterator[Part]:
    """All sequences at once, or each packed one of its own."""
    if lengths is None:
        yield slice(None), slice(None)
        return
    for i, (begin, end) in enumerate(pairwise(lengths.tolist())):
        yield slice(i, i + 1), slice(begin, end)


def _take(x: Sequences, part: Part) -> Sequences:
    rows, tokens = part
    return Sequences(x.q[:, :, tokens], x.k[:, :, tokens], x.v[:, :, tokens], x.state[rows])


# ---- the runners


class ArrayRunner:
    """linear_attention over an array namespace."""

    differentiable = False

    def __init__(self, arrays: Arrays):
        self.arrays = arrays

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, kv, z), and for backward den and, of a non-causal call that does not return it, the state of all keys."""
        q, k, v, kv, z = inputs
        at = _layout(self.arrays, q, v)
        with self.arrays.using(q):
            x = Sequences(at.tokens(q), at.tokens(k), at.values(v), at.state(kv, z, _count(q, lengths)))
            o = at.xp.empty((*x.q.shape[:3], at.heads * at.V), dtype=x.q.dtype)
            den, last = at.xp.empty(x.q.shape[:3], dtype=x.q.dtype), at.xp.empty_like(x.state)
            for part in _parts(lengths):
                rows, tokens = part
                o[:, :, tokens], den[:, :, tokens], last[rows] = forward(at.xp, _take(x, part), opt)
            kept = self.arrays.tensor(den.swapaxes(1, 2), at.dtype) if keep else None
            final = at.from_state(last) if opt.output_final_state or (keep and not opt.causal) else (None, None)
            wanted, spare = (final, (None, None)) if opt.output_final_state else ((None, None), final)
            return (at.from_tokens(o, v), *wanted), (kept, *spare)

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
        q, k, v, kv, z = inputs
        o, den = results[0], saved[0]
        dout = v.new_zeros(1).expand(o.shape) if grads[0] is None else grads[0]
        at, N = _layout(self.arrays, q, v), _count(q, lengths)
        wanted = (*needs[:3], needs[3] or needs[4])
        with self.arrays.using(q):
            if not opt.causal:
                kv, z = results[1:] if opt.output_final_state else saved[1:]
            x = Sequences(at.tokens(q), at.tokens(k), at.values(v), at.state(kv, z, N))
            weights = self.arrays.array(den, at.dtype).swapaxes(1, 2)
            g = upstream(at.xp, at.tokens(o), weights, at.tokens(dout), opt)
            dstate = at.state(grads[1], grads[2], N)
            whole = (x.q, x.k, x.v[..., :-1], x.state)
            found = [at.xp.empty_like(y) if need else None for y, need in zip(whole, wanted, strict=True)]
            for part in _parts(lengths):
                rows, tokens = part
                pieces = backward(at.xp, _take(x, part), g[:, :, tokens], dstate[rows], wanted, opt)
                for i, (into, piece) in enumerate(zip(found, pieces, strict=True)):
                    if into is not None:
                        into[rows if i == 3 else (slice(None), slice(None), tokens)] = piece
            tokens_of = zip(found[:3], (q, k, v), strict=True)
            dq, dk, dv = (None if a is None else at.from_tokens(a, like) for a, like in tokens_of)
            dkv, dz = (None, None) if found[3] is None else at.from_state(found[3])
        return [dq, dk, dv, dkv if needs[3] else None, dz if needs[4] else None]


def _count(q: torch.Tensor, lengths: torch.Tensor | None) -> int:
    """Sequences."""
    return q.shape[0] if lengths is None else lengths.shape[0] - 1


class ArrayDecode:
    """linear_attention_decode over an array namespace; a kernel of its own on a GPU."""

    def __init__(self, arrays: Arrays):
        self.arrays = arrays
        self.kernel = arrays.kernel(SOURCE, KERNEL)

    @torch.no_grad()
    def __call__(self, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Any:
        """q [B, H, K] or [B, n, H, K]; kv [P, HV, K, V] and z [P, H, K] change in place."""
        if q.ndim == 3:
            self(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), kv, z, slots, opt, out.unsqueeze(1))
            return out
        if q.numel() == 0 and v.numel() == 0:
            return out
        with self.arrays.using(q):
            if self.kernel is not None and fits(q, v, kv, z):
                return launch(self.kernel, q, k, v, kv, z, slots, opt, out)
            if slots is None:
                o, new_kv, new_z = self._step(q, k, v, kv, z, opt)
                kv.copy_(new_kv)
                z.copy_(new_z)
                return out.copy_(o)
            live = slots >= 0
            picked = slots[live].long()
            o, new_kv, new_z = self._step(q[live], k[live], v[live], kv[picked], z[picked], opt)
            kv[picked], z[picked] = new_kv, new_z
            out[live] = o
            out[~live] = 0  # last: out may be one of the inputs
            return out

    def _step(self, q: Any, k: Any, v: Any, kv: Any, z: Any, opt: Options) -> tuple[Any, Any, Any]:
        """o and the state after the tokens, in memory of their own."""
        at = _layout(self.arrays, q, v)
        x = Sequences(at.tokens(q), at.tokens(k), at.values(v), at.state(kv, z, q.shape[0]))
        o, _, last = forward(at.xp, x, opt)
        return at.from_tokens(o, v), *at.from_state(last)
