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

from collections.abc import Callable, Sequence
from typing import Any

import torch

from linattn_tl.arrays import Arrays
from linattn_tl.chunks import Array, ChunkDecode, ChunkRunner, Decays, Layout, cut, decays, gate_gradient, swap, whole
from linattn_tl.ops.simple_gla.definition import Options


def _before(xp: Any, sums: Array, whole: Array, state: Array, reverse: bool = False) -> tuple[Array, Array]:
    """The state that each chunk starts from, and the one after the last; from the other end where reverse."""
    before, n = xp.empty_like(sums), sums.shape[2]
    for i in reversed(range(n)) if reverse else range(n):
        before[:, :, i] = state
        state = whole[:, :, i] * state + sums[:, :, i]
    return before, state


def _states(xp: Any, k: Array, v: Array, d: Decays, state: Array) -> tuple[Array, Array]:
    return _before(xp, swap(k) @ (d.last * v), d.whole, state)


def forward(xp: Any, x: Sequence[Array], state: Array) -> tuple[Array, Array]:
    """o [N, HV, T, V] of a span, and the state [N, HV, K, V] after it; x is scale q, k, v and g."""
    T = x[0].shape[2]
    q, k, v, g = (cut(xp, a) for a in x)
    d = decays(xp, g)
    before, state = _states(xp, k, v, d, state)
    return whole((d.inside * (q @ swap(k))) @ v + d.first * (q @ before), T), state


def backward(xp: Any, x: Sequence[Array], dout: Array, state: Array, grad: Array) -> tuple[list[Array], Array]:
    """Gradients of scale q, k, v and g of a span, and that of the state before it.

    state: before the span; grad: the gradient of the one after it.
    """
    T = x[0].shape[2]
    q, k, v, g = (cut(xp, a) for a in x)
    dout = cut(xp, dout)
    d = decays(xp, g)
    S, _ = _states(xp, k, v, d, state)
    R, grad = _before(xp, swap(q) @ (d.first * dout), d.whole, grad, reverse=True)
    A, P = q @ swap(k), d.inside * (dout @ swap(v))
    dq = P @ k + d.first * (dout @ swap(S))
    dk = swap(P) @ q + d.last * (v @ swap(R))
    from_later = d.last * (k @ R)
    dv = swap(d.inside * A) @ dout + from_later
    dg = gate_gradient(
        xp,
        P * A,
        (d.first * (q @ S) * dout).sum(-1),
        (from_later * v).sum(-1),
        (d.whole * S * R).sum((-2, -1)),
    )
    return [whole(a, T) for a in (dq, dk, dv, dg)], grad


class ArrayRunner(ChunkRunner):
    """simple_gla over an array namespace."""

    forward_span, backward_span = staticmethod(forward), staticmethod(backward)

    def given(self, at: Layout, inputs: Sequence[Any], opt: Options) -> list[Array]:
        q, k, v, g, _ = inputs
        return [opt.scale * at.shared(q), at.shared(k), at.tokens(v), at.tokens(g)]

    def gradients(
        self, at: Layout, found: Sequence[Array], inputs: Sequence[Any], opt: Options
    ) -> Sequence[Callable[[], torch.Tensor]]:
        dq, dk, dv, dg = found
        q, k, v, g, _ = inputs
        return (
            lambda: at.from_shared(opt.scale * dq, q),
            lambda: at.from_shared(dk, k),
            lambda: at.from_tokens(dv, v),
            lambda: at.from_tokens(dg, g),
        )


class ArrayDecode(ChunkDecode):
    """simple_gla_decode over an array namespace."""

    def __init__(self, arrays: Arrays):
        super().__init__(ArrayRunner(arrays))
