"""The delta rule over an array namespace: the cupy backend, and the same under NumPy in the tests.

What does not depend on the state is computed for all chunks of a span at once, the rest chunk by chunk. With the
decays D, f and l of a chunk, S the state before it and R the gradient of the one after it, q scaled, and

    M = D * Q K^T, lower      N = D * K K^T, strictly lower      B = diag(beta)

    (I + B N) U = B (V - f * K S)          O = M U + f * Q S                S' = f_C S + K^T (l * U)
    (I + B N)^T X = M^T dO + l * K R       Z = B X                          R' = f_C R + Q^T (f * dO) - K^T (f * Z)
    P = D * dO U^T, lower                  G = -D * Z U^T, strictly lower   Y = V - f * K S - N U, so U = B Y
    dQ = P K + f * dO S^T                  dK = P^T Q + l * U R^T - f * Z S^T + (G + G^T) K
    dV = Z                                 dbeta_i = x_i y_i^T

The gradient of g_t is the sum of all that crosses token t (linattn_tl/chunks.py: gate_gradient).

Source: Yang et al. 2024, arXiv 2406.06484, section 3, and arXiv 2412.06464, eq. 8-10, with the systems solved for U
and X themselves instead of the WY representation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from linattn_tl.arrays import Arrays
from linattn_tl.chunks import (
    Array,
    ChunkDecode,
    ChunkRunner,
    Layout,
    cut,
    decays,
    gate_gradient,
    strictly_lower,
    swap,
    whole,
)
from linattn_tl.ops.delta_rule.definition import Options
from tl_kernels.delta_rule.norm import NORM_EPS


def _inverse_norm(xp: Any, x: Array) -> Array:
    return 1 / xp.sqrt((x * x).sum(-1, keepdims=True) + NORM_EPS)


def _solve(xp: Any, lower: Array, right: Array, transposed: bool = False) -> Array:
    """(I + lower)^-1 right."""
    system = lower + xp.eye(lower.shape[-1], dtype=lower.dtype)
    return xp.linalg.solve(swap(system) if transposed else system, right)


class _Chunks:
    """All that a span's chunks need of each other's states and not of the gradients."""

    def __init__(self, xp: Any, x: Sequence[Array], state: Array):
        self.q, self.k, self.v = (cut(xp, a) for a in x[:3])
        self.decays, self.beta = decays(xp, cut(xp, x[3])), cut(xp, x[4])[..., None]
        self.M = self.decays.inside * (self.q @ swap(self.k))
        self.N = strictly_lower(xp, self.decays.inside * (self.k @ swap(self.k)))
        self.before, self.U, d = (
            xp.empty((*self.k.shape[:3], *state.shape[2:]), dtype=state.dtype),
            self.v * 0,
            self.decays,
        )
        for i in range(self.k.shape[2]):
            at = (slice(None), slice(None), i)
            self.before[at] = state
            right = self.beta[at] * (self.v[at] - d.first[at] * (self.k[at] @ state))
            self.U[at] = _solve(xp, self.beta[at] * self.N[at], right)
            state = d.whole[at] * state + swap(self.k[at]) @ (d.last[at] * self.U[at])
        self.after = state


def forward(xp: Any, x: Sequence[Array], state: Array) -> tuple[Array, Array]:
    """o [N, HV, T, V] of a span, and the state [N, HV, K, V] after it; x is scale q, k, v, g and beta."""
    c = _Chunks(xp, x, state)
    return whole(c.M @ c.U + c.decays.first * (c.q @ c.before), x[0].shape[2]), c.after


def backward(xp: Any, x: Sequence[Array], dout: Array, state: Array, grad: Array) -> tuple[list[Array], Array]:
    """Gradients of scale q, k, v, g and beta of a span, and that of the state before it.

    state: before the span; grad: the gradient of the one after it.
    """
    T, c, dout = x[0].shape[2], _Chunks(xp, x, state), cut(xp, dout)
    q, k, d, S, U = c.q, c.k, c.decays, c.before, c.U
    R, X = xp.empty_like(S), xp.empty_like(U)
    for i in reversed(range(k.shape[2])):
        at = (slice(None), slice(None), i)
        R[at] = grad
        right = swap(c.M[at]) @ dout[at] + d.last[at] * (k[at] @ grad)
        X[at] = _solve(xp, c.beta[at] * c.N[at], right, transposed=True)
        outer = swap(q[at]) @ (d.first[at] * dout[at]) - swap(k[at]) @ (d.first[at] * c.beta[at] * X[at])
        grad = d.whole[at] * grad + outer
    Z, seen = c.beta * X, k @ S
    P, G = d.inside * (dout @ swap(U)), strictly_lower(xp, -d.inside * (Z @ swap(U)))
    dq = P @ k + d.first * (dout @ swap(S))
    dk = swap(P) @ q + d.last * (U @ swap(R)) - d.first * (Z @ swap(S)) + (G + swap(G)) @ k
    dbeta = (X * (c.v - d.first * seen - c.N @ U)).sum(-1)
    dg = gate_gradient(
        xp,
        P * (q @ swap(k)) + G * (k @ swap(k)),
        (d.first * ((q @ S) * dout - seen * Z)).sum(-1),
        (d.last * (k @ R) * U).sum(-1),
        (d.whole * S * R).sum((-2, -1)),
    )
    return [whole(a, T) for a in (dq, dk, Z, dg, dbeta)], grad


class ArrayRunner(ChunkRunner):
    """gated_delta_rule over an array namespace."""

    forward_span, backward_span = staticmethod(forward), staticmethod(backward)

    def given(self, at: Layout, inputs: Sequence[Any], opt: Options) -> list[Array]:
        q, k, v, g, beta, _ = inputs
        q, k, beta = at.tokens(q), at.tokens(k), at.tokens(beta)
        if opt.qk_l2norm:
            q, k = q * _inverse_norm(at.xp, q), k * _inverse_norm(at.xp, k)
        gates = at.xp.zeros_like(beta) if g is None else at.tokens(g)
        return [opt.scale * at.repeated(q), at.repeated(k), at.tokens(v), gates, beta]

    def gradients(
        self, at: Layout, found: Sequence[Array], inputs: Sequence[Any], opt: Options
    ) -> Sequence[Callable[[], torch.Tensor]]:
        dq, dk, dv, dg, dbeta = found
        q, k, v, g, beta, _ = inputs

        def of_row(x: torch.Tensor, grad: Array) -> torch.Tensor:
            """The gradient of q or k from that of what the products saw."""
            grad = at.summed(grad)
            if opt.qk_l2norm:
                inverse = _inverse_norm(at.xp, at.tokens(x))
                unit = at.tokens(x) * inverse
                grad = inverse * (grad - unit * (unit * grad).sum(-1, keepdims=True))
            return at.from_tokens(grad, x)

        return (
            lambda: of_row(q, opt.scale * dq),
            lambda: of_row(k, dk),
            lambda: at.from_tokens(dv, v),
            lambda: at.from_tokens(dg, g),
            lambda: at.from_tokens(dbeta, beta),
        )


class ArrayDecode(ChunkDecode):
    """gated_delta_rule_decode over an array namespace."""

    def __init__(self, arrays: Arrays):
        super().__init__(ArrayRunner(arrays))
