"""Linear attention in plain torch: the definition, token by token, and the same in chunks.

`recurrent` is the truth that everything else is checked against, in float64. `TorchRunner` is the torch backend:
chunked, on any device and dtype, differentiable any number of times.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from linattn_tl.plain import PlainRunner, full_precision
from tl_kernels.spec import ELU1, IDENTITY, RELU

FEATURE_MAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu1": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "relu": torch.relu,
    "identity": lambda x: x,
}
FEATURE_MAP_CODES = {"elu1": ELU1, "relu": RELU, "identity": IDENTITY}
CHUNK = 64


class Options(NamedTuple):
    """The plain arguments of linear_attention."""

    feature_map: str = "elu1"
    causal: bool = True
    normalize: bool = True
    scale: float = 1.0
    eps: float = 1e-6
    output_final_state: bool = False


Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # o, kv, z, den of one batch


def _features(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, opt: Options) -> tuple[torch.Tensor, ...]:
    """phi(q), phi(k), v as [B, H, T, D] in at least fp32; the q/k heads stay H."""
    acc = torch.promote_types(q.dtype, torch.float32)
    phi = FEATURE_MAPS[opt.feature_map]
    q, k, v = (x.to(acc).transpose(1, 2) for x in (q, k, v))
    return opt.scale * phi(q), phi(k), v


def _repeat(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, H, ...] -> [B, HV, ...]: one q/k head serves HV / H consecutive value heads."""
    return x if heads == 1 else x.repeat_interleave(heads, dim=1)


def recurrent(q: Any, k: Any, v: Any, kv: Any, z: Any, opt: Options) -> Outputs:
    """The recurrence as it is written, one token at a time; kv [B, HV, K, V] and z [B, H, K] are the initial state."""
    out_dtype, heads = v.dtype, v.shape[2] // q.shape[2]
    q, k, v = _features(q, k, v, opt)
    o, den = [], []

    def emit(t: int) -> None:
        d = (q[:, :, t] * z).sum(-1) + opt.eps
        num = (_repeat(q[:, :, t], heads).unsqueeze(-2) @ kv).squeeze(-2)
        o.append(num / _repeat(d, heads).unsqueeze(-1) if opt.normalize else num)
        den.append(d)

    for t in range(k.shape[2]):
        kv = kv + _repeat(k[:, :, t], heads).unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        z = z + k[:, :, t]
        if opt.causal:
            emit(t)
    if not opt.causal:
        for t in range(q.shape[2]):
            emit(t)
    return _stack(o, q, v).to(out_dtype), kv, z, _stack(den, q, None)


def _stack(rows: list[torch.Tensor], q: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
    if rows:
        return torch.stack(rows, 1)
    B = q.shape[0]
    return q.new_zeros(B, 0, q.shape[1]) if v is None else q.new_zeros(B, 0, v.shape[1], v.shape[3])


def chunked(q: Any, k: Any, v: Any, kv: Any, z: Any, opt: Options, chunk: int = CHUNK) -> Outputs:
    """The same in chunks: A = tril(Q K^T), O = (A V + Q S) / (rowsum(A) + Q z + eps)."""
    out_dtype, heads = v.dtype, v.shape[2] // q.shape[2]
    q, k, v = _features(q, k, v, opt)
    nums, dens = [q.new_zeros(*v.shape[:2], 0, v.shape[3])], [q.new_zeros(*q.shape[:2], 0)]
    if not opt.causal:
        kv, z = kv + _repeat(k, heads).mT @ v, z + k.sum(-2)
        nums, dens = [_repeat(q, heads) @ kv], [(q @ z.unsqueeze(-1)).squeeze(-1)]
    for start in range(0, k.shape[2] if opt.causal else 0, chunk):
        qc, kc, vc = (x[:, :, start : start + chunk] for x in (q, k, v))
        a = (qc @ kc.mT).tril()
        nums.append(_repeat(a, heads) @ vc + _repeat(qc, heads) @ kv)
        dens.append(a.sum(-1) + (qc @ z.unsqueeze(-1)).squeeze(-1))
        kv, z = kv + _repeat(kc, heads).mT @ vc, z + kc.sum(-2)
    o, den = torch.cat(nums, 2), torch.cat(dens, 2) + opt.eps
    if opt.normalize:
        o = o / _repeat(den, heads).unsqueeze(-1)
    return o.transpose(1, 2).to(out_dtype), kv, z, den.transpose(1, 2)


def packed(form: Callable[..., Outputs], inputs: Sequence[Any], lengths: Any, opt: Options) -> Outputs:
    """form over each packed sequence of its own, or over the batch. Missing initial states are zeros."""
    q, k, v, kv, z = inputs
    acc = torch.promote_types(q.dtype, torch.float32)
    N = q.shape[0] if lengths is None else lengths.shape[0] - 1
    if kv is None:
        kv = torch.zeros(N, v.shape[2], q.shape[3], v.shape[3], dtype=acc, device=q.device)
    if z is None:
        z = torch.zeros(N, q.shape[2], q.shape[3], dtype=acc, device=q.device)
    if lengths is None:
        return form(q, k, v, kv, z, opt)
    bounds = lengths.tolist()
    parts = [
        form(q[:, a:b], k[:, a:b], v[:, a:b], kv[i : i + 1], z[i : i + 1], opt)
        for i, (a, b) in enumerate(pairwise(bounds))
    ]
    if not parts:
        return v.new_zeros(v.shape), kv, z, torch.zeros(q.shape[:3], dtype=acc, device=q.device)
    o, kvs, zs, dens = zip(*parts, strict=True)
    return torch.cat(o, 1), torch.cat(kvs), torch.cat(zs), torch.cat(dens, 1)


class TorchRunner(PlainRunner):
    """The torch backend, and with form=recurrent the definition."""

    def __init__(self, form: Callable[..., Outputs] = chunked):
        self.form = form

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        with full_precision(inputs[0]):
            o, kv, z, den = packed(self.form, inputs, lengths, opt)
        # without a token the sums are the initial tensors themselves, which belong to the caller
        kv, z = (x.clone() if x is given else x for x, given in zip((kv, z), inputs[3:], strict=True))
        nothing = (None, None)
        if opt.output_final_state:
            return (o, kv, z), (den, *nothing)
        return (o, *nothing), (den, *(nothing if opt.causal else (kv, z)))


@torch.no_grad()
def decode(q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Any:
    """One step a token, in place on the pool's rows; q [B, H, K] or [B, n, H, K]. The decode op's torch backend."""
    if q.ndim == 3:
        decode(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), kv, z, slots, opt, out.unsqueeze(1))
        return out
    with full_precision(q):
        if slots is None:
            o, new_kv, new_z, _ = recurrent(q, k, v, kv, z, opt)
            kv.copy_(new_kv)
            z.copy_(new_z)
            return out.copy_(o)
        live = slots >= 0
        picked = slots[live].long()
        o, new_kv, new_z, _ = recurrent(q[live], k[live], v[live], kv[picked], z[picked], opt)
    kv[picked], z[picked] = new_kv.to(kv.dtype), new_z.to(z.dtype)
    out[live] = o.to(out.dtype)
    out[~live] = 0  # last: out may be one of the inputs
    return out
