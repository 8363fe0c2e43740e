"""Softmax attention beside the linear layers: the same calls, with a cache that grows."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from linattn_tl.modules.packing import SequenceModule, positions_of, sequences_of
from linattn_tl.modules.states import KVState, check_kind, check_no_gradient, check_shapes


class SoftmaxAttention(SequenceModule):
    """Causal softmax attention with grouped queries and rotary positions, by torch's scaled_dot_product_attention.

        o_t = sum_{j <= t} softmax_j(D^-1/2 q_t . k_j) v_j

    Args:
        width: of the tokens, and of the result.
        heads: of q.
        kv_heads: of k and v, a divisor of heads; as many when None (multi-head), 1 is multi-query.
        head_dim: width / heads when None.
        rope_base: of the rotary positions (arXiv 2104.09864, eq. 15); None for none.
        backend: accepted for the sake of stacks, and of no account here.
        device, dtype: of the parameters.

    Source: Vaswani et al. 2017, arXiv 1706.03762, eq. 1; Ainslie et al. 2023, arXiv 2305.13245.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_base: float | None = 10000.0,
        backend: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.width, self.heads, self.rope_base = width, heads, rope_base
        self.kv_heads = heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"SoftmaxAttention: kv_heads is {self.kv_heads}; expected a divisor of heads = {heads}")
        if head_dim is None and width % heads:
            raise ValueError(f"SoftmaxAttention: width is {width}; expected a multiple of heads = {heads}, or head_dim")
        self.head_dim = width // heads if head_dim is None else head_dim
        if rope_base is not None and self.head_dim % 2:
            raise ValueError(f"SoftmaxAttention: head_dim is {self.head_dim}; rotary positions need an even one")
        made = {"bias": False, "device": device, "dtype": dtype}
        self.qkv = nn.Linear(width, (heads + 2 * self.kv_heads) * self.head_dim, **made)
        self.out = nn.Linear(heads * self.head_dim, width, **made)

    def _read(
        self, x: torch.Tensor, state: KVState | None, keep_state: bool, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, KVState | None]:
        sequences = sequences_of("SoftmaxAttention", x, cu_seqlens)
        if state is not None:
            self.check_state(state, sequences)
        q, k, v = self._project(x, cu_seqlens, None if state is None else state.lengths)
        if state is None and cu_seqlens is None:
            o = self._attend(q, k, v, None, is_causal=True)
            kept = self._kept(k, v) if keep_state else None
        else:
            o, kept = self._piecewise(q, k, v, state, keep_state, cu_seqlens)
        return self.out(o.transpose(1, 2).flatten(-2)), kept

    def step(self, x: torch.Tensor, state: KVState) -> torch.Tensor:
        """The next token of each sequence, x [B, width] -> [B, width]; the state grows in place. Has no gradient."""
        check_no_gradient(self, x)
        self.check_state(state, len(x))
        q, k, v = self._project(x.unsqueeze(1), None, state.lengths)
        there = _append(state, k, v)
        keys, values = state.k[:, :, : state.longest], state.v[:, :, : state.longest]
        o = self._attend(q.to(keys.dtype), keys, values, there)
        return self.out(o.flatten(1).to(x.dtype))

    def init_state(self, batch: int, *, room: int = 0, device: Any = None, dtype: Any = None) -> KVState:
        """No tokens yet. room: tokens for which there is space before the cache has to grow."""
        weight = self.out.weight
        made = {
            "device": weight.device if device is None else device,
            "dtype": weight.dtype if dtype is None else dtype,
        }
        k, v = (torch.zeros(batch, self.kv_heads, room, self.head_dim, **made) for _ in range(2))
        return KVState(k, v, torch.zeros(batch, dtype=torch.int64, device=made["device"]), 0, 0)

    def check_state(self, state: Any, batch: int) -> None:
        """Raise TypeError or ValueError unless `state` is one of this layer for `batch` sequences."""
        check_kind("SoftmaxAttention", state, KVState)
        shape = (batch, self.kv_heads, state.room, self.head_dim)
        check_shapes("SoftmaxAttention", state, {"k": shape, "v": shape, "lengths": (batch,)})

    def _project(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, read: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B, T, width] -> q [B, heads, T, D], k and v [B, kv_heads, T, D]; q and k rotated."""
        rows = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.rope_base is None:
            return q, k, v
        positions = positions_of(x.shape[1], cu_seqlens, read, x.device)
        turned = rotated(rows[:, : self.heads + self.kv_heads], positions, self.rope_base)
        return turned[:, : self.heads], turned[:, self.heads :], v

    def _kept(self, k: torch.Tensor, v: torch.Tensor) -> KVState:
        """Copies: k and v are views of a row that holds q too."""
        T = k.shape[2]
        lengths = torch.full((len(k),), T, dtype=torch.int64, device=k.device)
        k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
        return KVState(k, v, lengths, T, T)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool = False
    ) -> torch.Tensor:
        grouped = self.kv_heads != self.heads
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)

    def _piecewise(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: KVState | None,
        keep_state: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, KVState | None]:
        """One sequence after the other, each over its own keys: packed, or after what was read before."""
        pieces = _pieces(q, k, v, cu_seqlens)
        read = [0] * len(pieces) if state is None else state.lengths.tolist()
        results, keys, values = [], [], []
        for i, (q1, k1, v1) in enumerate(pieces):
            if state is not None:
                k1 = torch.cat([state.k[i : i + 1, :, : read[i]].to(k1.dtype), k1], 2)
                v1 = torch.cat([state.v[i : i + 1, :, : read[i]].to(v1.dtype), v1], 2)
            results.append(self._attend_after(q1, k1, v1, read[i]))
            keys.append(k1)
            values.append(v1)
        o = torch.cat(results, 0 if cu_seqlens is None else 2) if results else q
        if not keep_state:
            return o, None
        lengths = [k1.shape[2] for k1 in keys]
        longest = max(lengths, default=0)
        room = max(longest, 0 if state is None else state.room)
        k, v = (_padded(x, room) if x else k[:0] for x in (keys, values))
        return o, KVState.of(k, v, torch.tensor(lengths, device=q.device, dtype=torch.int64))

    def _attend_after(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: int) -> torch.Tensor:
        """Queries that stand behind `read` keys which they all see."""
        if read == 0 or q.shape[2] == 0:
            return self._attend(q, k, v, None, is_causal=True) if q.shape[2] else q
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(read)
        return self._attend(q, k, v, seen)


def _append(state: KVState, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """Write a token of each sequence, [N, kv_heads, 1, D], behind its others, in place.

    Returns which of the `longest` places belong to each sequence, [N, 1, 1, longest]; None if all do.
    """
    if state.longest == state.room:
        state.grow()
    even = state.shortest == state.longest
    for kept, new in ((state.k, k), (state.v, v)):
        if even:
            kept[:, :, state.longest] = new.squeeze(2)
        else:
            kept[torch.arange(len(k), device=k.device), :, state.lengths] = new.squeeze(2).to(kept.dtype)
    state.lengths += 1
    state.shortest += 1
    state.longest += 1
    return None if even else torch.arange(state.longest, device=k.device) < state.lengths[:, None, None, None]


def _pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> list[tuple[torch.Tensor, ...]]:
    """q, k, v [1, heads, T_i, D] of each sequence."""
    if cu_seqlens is None:
        return [tuple(x[i : i + 1] for x in (q, k, v)) for i in range(len(q))]
    return [tuple(x[:, :, a:b] for x in (q, k, v)) for a, b in pairwise(cu_seqlens.tolist())]


def _padded(rows: list[torch.Tensor], room: int) -> torch.Tensor:
    """[1, heads, T_i, D] of each sequence -> [N, heads, room, D]"""
    return torch.cat([F.pad(x, (0, 0, 0, room - x.shape[2])) for x in rows])


def rotated(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary positions: pairs (x_i, x_{i + D/2}) turned by positions * base^(-2i / D), angles in fp32.

    Args:
        x: [B, heads, T, D].
        positions: [B or 1, T].

    Source: Su et al. 2021, arXiv 2104.09864, eq. 14-15; pairs are D/2 apart, as in GPT-NeoX and Llama.
    """
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[:, None, :, None] * rates
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
