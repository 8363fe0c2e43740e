"""What chunk forms over an array namespace share: chunks of tokens, decays inside them, torch's layouts and theirs.

Arrays are [N, HV, T, columns], cut into [N, HV, n, C, columns] for n chunks of C tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from linattn_tl.arrays import Arrays
from linattn_tl.plain import each

CHUNK = 64  # tokens
STATE_BYTES = 256 << 20  # of chunk states held at once: a longer sequence goes span by span
Array = Any  # of the namespace


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


def strictly_lower(xp: Any, x: Array) -> Array:
    """x [..., C, C] below the diagonal, 0 elsewhere."""
    i = xp.arange(x.shape[-1])
    return xp.where(i[None] < i[:, None], x, 0).astype(x.dtype)


def gate_gradient(xp: Any, inside: Array, c: Array, d: Array, across: Array) -> Array:
    """The gradient of each gate g_t of a chunk: the sum of all that crosses token t.

        sum_{j < t <= i} inside_ij + sum_{i >= t} c_i + sum_{j < t} d_j + across

    Args:
        inside: [..., C, C], what query i has of key j.
        c: [..., C], what query i has of the state before the chunk.
        d: [..., C], what key j leaves to what comes after the chunk.
        across: [...], what comes after has of the state before.
    """
    i = xp.arange(c.shape[-1])
    earlier = i[None] < i[:, None]
    below = xp.flip(xp.cumsum(xp.flip(inside, -2), axis=-2), -2)
    dg = xp.where(earlier, below, 0).sum(-1)
    dg = dg + xp.flip(xp.cumsum(xp.flip(c, -1), axis=-1), -1)
    return dg + xp.where(earlier, d[..., None, :], 0).sum(-1) + across[..., None]


def swap(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def cut(xp: Any, x: Array) -> Array:
    """[N, HV, T, ...] -> [N, HV, n, C, ...]; zeros after the last token, so that a gate there keeps all."""
    T = x.shape[2]
    C = min(CHUNK, T)
    n = -(-T // C)
    if n * C > T:
        padded = xp.zeros((*x.shape[:2], n * C, *x.shape[3:]), dtype=x.dtype)
        padded[:, :, :T] = x
        x = padded
    return x.reshape(*x.shape[:2], n, C, *x.shape[3:])


def whole(x: Array, T: int) -> Array:
    """cut backwards."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])[:, :, :T]


class Layout(NamedTuple):
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
        return self.repeated(self.tokens(x))

    def repeated(self, a: Array) -> Array:
        """[B, H, ...] -> [B, HV, ...]."""
        return self.xp.repeat(a, self.heads, axis=1)

    def from_tokens(self, a: Array, like: torch.Tensor) -> torch.Tensor:
        return self.arrays.tensor(a.swapaxes(1, 2), like.dtype)

    def from_shared(self, a: Array, like: torch.Tensor) -> torch.Tensor:
        return self.from_tokens(self.summed(a), like)

    def summed(self, a: Array) -> Array:
        """The sum over the value heads of each q/k head."""
        N, HV = a.shape[:2]
        return a.reshape(N, HV // self.heads, self.heads, *a.shape[2:]).sum(2)

    def state(self, x: torch.Tensor | None, N: int, v: Array, K: int) -> Array:
        if x is not None:
            return self.arrays.array(x, self.dtype)
        return self.xp.zeros((N, v.shape[1], K, v.shape[3]), dtype=v.dtype)


def layout(arrays: Arrays, q: torch.Tensor, v: torch.Tensor) -> Layout:
    return Layout(arrays, torch.promote_types(q.dtype, torch.float32), v.shape[2] // max(q.shape[2], 1))


def _sequences(lengths: torch.Tensor | None, T: int) -> Iterator[tuple[slice, int, int]]:
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


class ChunkRunner:
    """An op whose inputs are tokens (q, k, v and gates, None for one that is missing) and an initial state.

    A family says what its arrays are and how a span of them is computed:

        given(at, inputs, dout, options) -> its arrays [N, HV, T, ...], q, k and v first
        forward_span(xp, arrays, state) -> o and the state after the span
        backward_span(xp, arrays, dout, state, grad) -> gradients of the arrays, and of the state before the span, from
            the state before it and the gradient of the one after it
        gradients(at, found, inputs, options) -> for each input but the state, how its gradient is made of those
    """

    differentiable = False

    def __init__(self, arrays: Arrays):
        self.arrays = arrays

    def given(self, at: Layout, inputs: Sequence[Any], opt: Any) -> list[Array]:
        raise NotImplementedError

    @staticmethod
    def forward_span(xp: Any, x: Sequence[Array], state: Array) -> tuple[Array, Array]:
        raise NotImplementedError

    @staticmethod
    def backward_span(
        xp: Any, x: Sequence[Array], dout: Array, state: Array, grad: Array
    ) -> tuple[Sequence[Array], Array]:
        raise NotImplementedError

    def gradients(
        self, at: Layout, found: Sequence[Array], inputs: Sequence[Any], opt: Any
    ) -> Sequence[Callable[[], torch.Tensor]]:
        raise NotImplementedError

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Any, keep: bool = True) -> tuple[Any, Any]:
        """(o, final state or None); nothing is kept for backward."""
        q, v, initial = inputs[0], inputs[2], inputs[-1]
        at, N = layout(self.arrays, q, v), q.shape[0] if lengths is None else lengths.shape[0] - 1
        with self.arrays.using(q):
            x = self.given(at, inputs, opt)
            o, last = at.xp.empty_like(x[2]), at.state(initial, N, x[2], q.shape[3]).copy()
            for rows, begin, end in _sequences(lengths, q.shape[1]):
                mine = slice(None) if lengths is not None else rows
                for span in _spans(begin, end, last[rows]):
                    o[mine][:, :, span], last[rows] = self.forward_span(at.xp, _at(x, mine, span), last[rows])
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
        opt: Any,
    ) -> list[Any]:
        """One gradient an input that needs one."""
        q, v, initial = inputs[0], inputs[2], inputs[-1]
        at, N = layout(self.arrays, q, v), q.shape[0] if lengths is None else lengths.shape[0] - 1
        with self.arrays.using(q):
            x = self.given(at, inputs, opt)
            dout = at.tokens(v.new_zeros(1).expand(v.shape) if grads[0] is None else grads[0])
            found = [at.xp.empty_like(a) for a in x]
            start = at.state(initial, N, x[2], q.shape[3])
            end = at.state(grads[1], N, x[2], q.shape[3]).copy()
            for rows, begin, stop in _sequences(lengths, q.shape[1]):
                mine = slice(None) if lengths is not None else rows
                spans, states = _spans(begin, stop, end[rows]), [start[rows]]
                for span in spans[:-1]:
                    states.append(self.forward_span(at.xp, _at(x, mine, span), states[-1])[1])
                for span, state in zip(reversed(spans), reversed(states[: len(spans)]), strict=True):
                    tokens, (upstream,) = _at(x, mine, span), _at([dout], mine, span)
                    pieces, end[rows] = self.backward_span(at.xp, tokens, upstream, state, end[rows])
                    for into, piece in zip(found, pieces, strict=True):
                        into[mine][:, :, span] = piece
            makers = (*self.gradients(at, found, inputs, opt), lambda: self.arrays.tensor(end, at.dtype))
            return [make() if need else None for make, need in zip(makers, needs, strict=True)]


def _at(x: Sequence[Array], rows: slice, tokens: slice) -> list[Array]:
    return [a[rows][:, :, tokens] for a in x]


class ChunkDecode:
    """The step of such an op, by its runner."""

    def __init__(self, runner: ChunkRunner):
        self.runner = runner

    @torch.no_grad()
    def __call__(self, *given: Any) -> torch.Tensor:
        """Tokens [B, H, K] or [B, n, H, K], then state [P, HV, K, V], which changes in place, slots, options, out."""
        *tokens, state, slots, opt, out = given
        if tokens[0].ndim == 3:
            tokens = each(lambda x: x.unsqueeze(1), *tokens)
            self(*tokens, state, slots, opt, out.unsqueeze(1))
            return out
        if tokens[0].numel() == 0 and tokens[2].numel() == 0:
            return out
        if slots is None:
            (o, new), _ = self.runner.forward((*tokens, state), None, opt)
            state.copy_(new)
            return out.copy_(o)
        live = slots >= 0
        picked = slots[live].long()
        tokens = each(lambda x: x[live], *tokens)
        (o, new), _ = self.runner.forward((*tokens, state[picked]), None, opt)
        state[picked] = new
        out[live] = o
        out[~live] = 0  # last: out may be one of the inputs
        return out
