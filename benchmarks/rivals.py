"""The other ways to compute linear attention in PyTorch, each written as well as we know how.

All compute, with phi(x) = elu(x) + 1 (arXiv 2006.16236, eq. 4-12),

    o_t = phi(q_t)^T S_t / (phi(q_t) . z_t + eps)       S_t = sum of phi(k_i) v_i^T       z_t = sum of phi(k_i)

for q, k [B, T, H, K] and v [B, T, H, V], except `sdpa`, which is softmax attention and stands here for scale.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

EPS = 1e-6
Form = Callable[..., torch.Tensor]


def chunk_textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int) -> torch.Tensor:
    """The chunked form as it is usually written: all chunks at once, states by a cumulative sum. T = n chunk."""
    B, T, H, K = q.shape
    q, k, v = (x.transpose(1, 2).reshape(B, H, T // chunk, chunk, -1) for x in (q, k, v))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    states, sums = (k.mT @ v).cumsum(2), k.sum(-2, keepdim=True).cumsum(2)
    states = torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1]], 2)
    sums = torch.cat([torch.zeros_like(sums[:, :, :1]), sums[:, :, :-1]], 2)
    weights = (q @ k.mT).tril()
    numerator = weights @ v + q @ states
    denominator = weights.sum(-1, keepdim=True) + (q * sums).sum(-1, keepdim=True) + EPS
    return (numerator / denominator).reshape(B, H, T, -1).transpose(1, 2)


def chunk_parallel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int) -> torch.Tensor:
    """The same with every pass over memory that we could save saved: the fastest eager form that we know.

    T must be a multiple of chunk. One copy makes each chunk contiguous, since a batched matmul would copy its
    operands every time; sums go into the matmul that comes next (baddbmm) and cost no pass of their own.
    """
    B, T, H, K = q.shape
    n = T // chunk
    q, k, v = (x.transpose(1, 2).reshape(B * H * n, chunk, -1).contiguous() for x in (q, k, v))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = (q @ k.mT).tril()
    states, sums = (k.mT @ v).view(B, H, n, K, -1), k.sum(-2).view(B, H, n, K)
    states = (states.cumsum(2) - states).flatten(0, 2)  # before each chunk
    sums = (sums.cumsum(2) - sums).flatten(0, 2).unsqueeze(-1)
    numerator = torch.baddbmm(weights @ v, q, states)
    denominator = torch.baddbmm(weights.sum(-1, keepdim=True) + EPS, q, sums)
    return (numerator / denominator).view(B, H, T, -1).transpose(1, 2)


def chunk_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int) -> torch.Tensor:
    """One chunk after the other, so that only one state is alive. A compiler unrolls the loop."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    B, H, _, K = q.shape
    state, total, out = q.new_zeros(B, H, K, v.shape[-1]), q.new_zeros(B, H, K, 1), []
    for qc, kc, vc in zip(q.split(chunk, 2), k.split(chunk, 2), v.split(chunk, 2), strict=True):
        weights = (qc @ kc.mT).tril()
        out.append((weights @ vc + qc @ state) / (weights.sum(-1, keepdim=True) + qc @ total + EPS))
        state, total = state + kc.mT @ vc, total + kc.sum(-2).unsqueeze(-1)
    return torch.cat(out, 2).transpose(1, 2)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention: another function of the same tensors, quadratic in T."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# ---- one decode step: q, k [B, H, K], v [B, H, V]; kv [B, H, K, V], z [B, H, K] and out [B, H, V] change in place


def step_addcmul(q: Any, k: Any, v: Any, kv: Any, z: Any, out: Any) -> torch.Tensor:
    """The rank-one update as a broadcast addcmul_."""
    q, k = F.elu(q).add_(1), F.elu(k).add_(1)
    kv.addcmul_(k.unsqueeze(-1), v.unsqueeze(-2))
    return _read(q, z.add_(k), kv, out)


def step_baddbmm(q: Any, k: Any, v: Any, kv: Any, z: Any, out: Any) -> torch.Tensor:
    """The rank-one update as a batched matmul."""
    q, k = F.elu(q).add_(1), F.elu(k).add_(1)
    kv.flatten(0, 1).baddbmm_(k.flatten(0, 1).unsqueeze(-1), v.flatten(0, 1).unsqueeze(-2))
    return _read(q, z.add_(k), kv, out)


def _read(q: torch.Tensor, z: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.matmul(q.unsqueeze(-2), kv, out=out.unsqueeze(-2))
    return out.div_(torch.linalg.vecdot(q, z).add_(EPS).unsqueeze(-1))


def step_fused(q: Any, k: Any, v: Any, kv: Any, z: Any, out: Any) -> torch.Tensor:
    """The step in the form a compiler can fuse: one pass over kv that updates it and reads it."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    z.add_(k)
    kv.add_(k.unsqueeze(-1) * v.unsqueeze(-2))
    return out.copy_((q.unsqueeze(-1) * kv).sum(-2) / ((q * z).sum(-1, keepdim=True) + EPS))


def compiled(form: Form) -> Form:
    return torch.compile(form, fullgraph=True, dynamic=False)
