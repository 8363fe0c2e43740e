"""The delta rule, gated or not, in plain torch: the definition, token by token, and the same in chunks.

`recurrent` is the truth that everything else is checked against, in float64. `TorchRunner` is the torch backend:
chunked, on any device and dtype, differentiable any number of times.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from linattn_tl.plain import FormRunner, Outputs, decays, step
from tl_kernels.delta_rule.norm import NORM_EPS

CHUNK = 64


class Options(NamedTuple):
    """The plain arguments of gated_delta_rule."""

    scale: float = 1.0
    qk_l2norm: bool = False
    output_final_state: bool = False


def normalized(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over its last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _widened(q: Any, k: Any, v: Any, g: Any, beta: Any, opt: Options) -> tuple[torch.Tensor, ...]:
    """scale q, k, v [B, HV, T, D], g and beta [B, HV, T] in at least fp32; a missing g is zeros."""
    acc, heads = torch.promote_types(q.dtype, torch.float32), v.shape[2] // max(q.shape[2], 1)
    q, k, v, beta = (x.to(acc).transpose(1, 2) for x in (q, k, v, beta))
    if opt.qk_l2norm:
        q, k = normalized(q), normalized(k)
    if heads != 1:
        q, k = q.repeat_interleave(heads, 1), k.repeat_interleave(heads, 1)
    g = torch.zeros_like(beta) if g is None else g.to(acc).transpose(1, 2)
    return opt.scale * q, k, v, g, beta


def recurrent(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, opt: Options) -> Outputs:
    """The recurrence as it is written, one token at a time; state [B, HV, K, V] is the initial one."""
    out_dtype = v.dtype
    q, k, v, g, beta = _widened(q, k, v, g, beta, opt)
    o = []
    for t in range(k.shape[2]):
        state = g[:, :, t].exp()[..., None, None] * state
        seen = (k[:, :, t].unsqueeze(-2) @ state).squeeze(-2)
        u = beta[:, :, t].unsqueeze(-1) * (v[:, :, t] - seen)
        state = state + k[:, :, t].unsqueeze(-1) * u.unsqueeze(-2)
        o.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    out = torch.stack(o, 1) if o else v.transpose(1, 2)
    return out.to(out_dtype), state


def chunked(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, opt: Options, chunk: int = CHUNK) -> Outputs:
    """The same in chunks: (I + L) U = beta (V - f * K S), O = (D * Q K^T) U + f * Q S, S = f_C S + K^T (l * U).

    L is beta_i D_ij k_i.k_j below the diagonal; D, f and l are decays.
    """
    out_dtype = v.dtype
    q, k, v, g, beta = _widened(q, k, v, g, beta, opt)
    parts = [v[:, :, :0]]
    for start in range(0, k.shape[2], chunk):
        qc, kc, vc, gc, bc = (x[:, :, start : start + chunk] for x in (q, k, v, g, beta))
        inside, first, bc = decays(gc), gc.cumsum(-1).exp().unsqueeze(-1), bc.unsqueeze(-1)
        lower = (bc * inside * (kc @ kc.mT)).tril(-1)
        u = torch.linalg.solve_triangular(
            lower + torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device),
            bc * (vc - first * (kc @ state)),
            upper=False,
            unitriangular=True,
        )
        parts.append((inside * (qc @ kc.mT)) @ u + first * (qc @ state))
        state = first[:, :, -1:] * state + kc.mT @ (inside[..., -1, :].unsqueeze(-1) * u)
    return torch.cat(parts, 2).transpose(1, 2).to(out_dtype), state


class TorchRunner(FormRunner):
    """The torch backend, and with form=recurrent the definition."""

    def __init__(self, form: Callable[..., Outputs] = chunked):
        super().__init__(form)


def decode(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, slots: Any, opt: Options, out: Any) -> Any:
    """One step in place on the pool's rows; q [B, H, K] or [B, n, H, K]. The decode op's torch backend."""
    return step(recurrent, (q, k, v, g, beta), state, slots, opt, out)
