"""Scalar-gated linear attention in plain torch: the definition, token by token, and the same in chunks.

`recurrent` is the truth that everything else is checked against, in float64. `TorchRunner` is the torch backend:
chunked, on any device and dtype, differentiable any number of times.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from linattn_tl.plain import FormRunner, Outputs, decays, step

CHUNK = 64


class Options(NamedTuple):
    """The plain arguments of simple_gla."""

    scale: float = 1.0
    output_final_state: bool = False


def _widened(q: Any, k: Any, v: Any, g: Any, opt: Options) -> tuple[torch.Tensor, ...]:
    """scale q, k, v [B, HV, T, D] and g [B, HV, T] in at least fp32."""
    acc, heads = torch.promote_types(q.dtype, torch.float32), v.shape[2] // max(q.shape[2], 1)
    q, k, v = (x.to(acc).transpose(1, 2) for x in (q, k, v))
    if heads != 1:
        q, k = q.repeat_interleave(heads, 1), k.repeat_interleave(heads, 1)
    return opt.scale * q, k, v, g.to(acc).transpose(1, 2)


def recurrent(q: Any, k: Any, v: Any, g: Any, state: Any, opt: Options) -> Outputs:
    """The recurrence as it is written, one token at a time; state [B, HV, K, V] is the initial one."""
    out_dtype = v.dtype
    q, k, v, g = _widened(q, k, v, g, opt)
    o = []
    for t in range(k.shape[2]):
        state = g[:, :, t].exp()[..., None, None] * state + k[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        o.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    out = torch.stack(o, 1) if o else v.transpose(1, 2)
    return out.to(out_dtype), state


def chunked(q: Any, k: Any, v: Any, g: Any, state: Any, opt: Options, chunk: int = CHUNK) -> Outputs:
    """The same in chunks: O = (D * Q K^T) V + f * Q S, S = f_C S + K^T (l * V); D, f and l are decays."""
    out_dtype = v.dtype
    q, k, v, g = _widened(q, k, v, g, opt)
    parts = [v[:, :, :0]]
    for start in range(0, k.shape[2], chunk):
        qc, kc, vc, gc = (x[:, :, start : start + chunk] for x in (q, k, v, g))
        inside, first = decays(gc), gc.cumsum(-1).exp()
        parts.append((inside * (qc @ kc.mT)) @ vc + first.unsqueeze(-1) * (qc @ state))
        state = first[..., -1, None, None] * state + kc.mT @ (inside[..., -1, :].unsqueeze(-1) * vc)
    return torch.cat(parts, 2).transpose(1, 2).to(out_dtype), state


class TorchRunner(FormRunner):
    """The torch backend, and with form=recurrent the definition."""

    def __init__(self, form: Callable[..., Outputs] = chunked):
        super().__init__(form)


def decode(q: Any, k: Any, v: Any, g: Any, state: Any, slots: Any, opt: Options, out: Any) -> Any:
    """One step in place on the pool's rows; q [B, H, K] or [B, n, H, K]. The decode op's torch backend."""
    return step(recurrent, (q, k, v, g), state, slots, opt, out)
