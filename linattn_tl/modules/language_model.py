"""A language model over a stack: tied embedding, loss, one token at a time."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from linattn_tl import shapes
from linattn_tl.modules.norms import RMSNorm
from linattn_tl.modules.packing import packing_of, positions_of, sequences_of
from linattn_tl.modules.stacks import HybridStack
from linattn_tl.modules.states import Cache

IGNORED = -100  # a target that is not to be predicted
EMBEDDING_STD = 0.02


class Output(NamedTuple):
    logits: torch.Tensor  # [B, T, vocabulary]
    loss: torch.Tensor | None  # mean cross entropy in nats, where there are targets
    cache: Cache | None


class CausalLM(nn.Module):
    """Predicts the next token, with a head that shares the embedding's weights.

        logits, loss, cache = model(ids, targets=next_ids)
        with torch.no_grad():
            logits, _, cache = model(prompt, keep_state=True)
            logits = model.step(next_id, cache)         # [B] -> [B, vocabulary], the cache changes in place

    Args:
        vocabulary: number of tokens.
        width, heads, pattern, layers: of the stack, see HybridStack.
        positions: how many positions have a learned embedding, which bounds the length; 0 for none.
        options, mlp_width, norm_eps, backend, device, dtype: as in HybridStack.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        pattern: str = "LLLS",
        layers: int | None = None,
        *,
        positions: int = 0,
        norm_eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
        **stack: Any,
    ):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.vocabulary, self.width = vocabulary, width
        self.embedding = nn.Embedding(vocabulary, width, **made)
        self.positions = nn.Embedding(positions, width, **made) if positions else None
        self.stack = HybridStack(width, heads, pattern, layers, norm_eps=norm_eps, **made, **stack)
        self.norm = RMSNorm(width, eps=norm_eps, **made)
        self._scale()

    def reset_parameters(self) -> None:
        """Everything anew at random: also what `to_empty` has left without values."""
        for module in self.modules():
            if module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        self._scale()

    @torch.no_grad()
    def _scale(self) -> None:
        """Small embeddings, so that the shared head starts near uniform; blocks start near the identity.

        Source: Radford et al. 2019 (GPT-2), section 2.3: the last projections of n residuals are divided by n^1/2.
        """
        for table in (self.embedding, self.positions):
            if table is not None:
                nn.init.normal_(table.weight, std=EMBEDDING_STD)
        parameters = self.stack.blocks.named_parameters()
        last = [weight for name, weight in parameters if name.endswith(("layer.out.weight", "mlp.down.weight"))]
        for weight in last:
            weight.mul_(len(last) ** -0.5)

    def forward(
        self,
        ids: torch.Tensor,
        cache: Cache | None = None,
        *,
        targets: torch.Tensor | None = None,
        keep_state: bool = False,
        last_only: bool = False,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> Output:
        """Whole sequences, or their next pieces.

        Args:
            ids: [B, T] integers.
            cache: after the tokens before; None is the start.
            targets: like ids, the token after each; -100 is not counted, nor is padding.
            keep_state: also return the cache after the last token.
            last_only: logits [N, vocabulary] of the last token of each sequence alone, which must have one.
            mask: [B, T], True where a token is real; the logits of padding are 0.
            cu_seqlens: int [N + 1], N sequences packed along T, with B = 1.

        Raises:
            ValueError, TypeError: an argument has a wrong shape, dtype or value, or a cache is of another model.
        """
        ids, targets = self._checked(ids, targets, last_only)
        packing = packing_of("CausalLM", mask, ids, cu_seqlens)
        if packing is None:
            return self._read(ids, cache, targets, keep_state, last_only, cu_seqlens)
        targets = None if targets is None else packing.pack(targets)
        found = self._read(packing.pack(ids), cache, targets, keep_state, last_only, packing.cu_seqlens)
        return found if last_only else found._replace(logits=packing.unpack(found.logits))

    def _read(
        self,
        ids: torch.Tensor,
        cache: Cache | None,
        targets: torch.Tensor | None,
        keep_state: bool,
        last_only: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> Output:
        sequences_of("CausalLM", ids, cu_seqlens)
        x, kept = self.stack(self._embed(ids, cache, cu_seqlens), cache, keep_state=keep_state, cu_seqlens=cu_seqlens)
        if last_only:
            return Output(self._logits(_last_of(x, cu_seqlens)), None, kept)
        logits = self._logits(x)
        return Output(logits, None if targets is None else loss_of(logits, targets), kept)

    def step(self, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The next token of each sequence, [B] -> logits [B, vocabulary]; in place. Has no gradient."""
        if ids.ndim != 1:
            raise ValueError(f"CausalLM.step: ids has shape {tuple(ids.shape)}; expected [B]")
        self.stack.check_cache(cache, len(ids))
        x = self.embedding(ids)
        if self.positions is not None:
            self._check_positions(int(cache.lengths.max()) + 1 if len(ids) else 0)
            x = x + self.positions(cache.lengths)
        return self._logits(self.stack.step(x / EMBEDDING_STD, cache))

    def init_state(self, batch: int, **options: Any) -> Cache:
        """The cache of `batch` sequences before their first token; options as in HybridStack.init_state."""
        return self.stack.init_state(batch, **options)

    def _embed(self, ids: torch.Tensor, cache: Cache | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        x = self.embedding(ids)
        if self.positions is not None:
            read = None if cache is None else cache.lengths
            positions = positions_of(ids.shape[1], cu_seqlens, read, ids.device)
            # without packing or a cache nothing has to be read from tensors, which would wait for a GPU
            plain = cu_seqlens is None and cache is None
            self._check_positions(ids.shape[1] if plain else int(positions.max()) + 1 if positions.numel() else 0)
            x = x + self.positions(positions)
        return x / EMBEDDING_STD  # of unit size, as the layers expect it

    def _check_positions(self, needed: int) -> None:
        if needed > self.positions.num_embeddings:  # pyright: ignore[reportOptionalMemberAccess]
            room = self.positions.num_embeddings  # pyright: ignore[reportOptionalMemberAccess]
            raise ValueError(f"CausalLM: a sequence has {needed} tokens; expected at most {room} (positions)")

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), self.embedding.weight)

    def _checked(
        self, ids: torch.Tensor, targets: torch.Tensor | None, last_only: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids and targets as int64."""
        shapes.check_tensors("CausalLM", ids=ids)
        if ids.ndim != 2:
            raise ValueError(f"CausalLM: ids has shape {tuple(ids.shape)}; expected [B, T]")
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError(f"CausalLM: ids has dtype {ids.dtype}; expected integers")
        if targets is None:
            return ids.long(), None
        if last_only:
            raise ValueError("CausalLM: targets is given with last_only; expected one of them")
        if targets.shape != ids.shape:
            got, expected = tuple(targets.shape), tuple(ids.shape)
            raise ValueError(f"CausalLM: targets has shape {got}; expected that of ids, {expected}")
        return ids.long(), targets.long()


def _last_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """[B, T, width] -> [N, width], the last token of each sequence."""
    if cu_seqlens is None and x.shape[1]:
        return x[:, -1]
    if cu_seqlens is None or bool((cu_seqlens.diff() == 0).any()):
        raise ValueError("CausalLM: last_only with a sequence of no tokens; expected one or more in each")
    return x[0, cu_seqlens[1:].long() - 1]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats, in fp32, of the targets that are not -100; 0 where there are none."""
    counted = (targets != IGNORED).sum().clamp_min(1)
    rows = logits.flatten(0, -2).float()
    return F.cross_entropy(rows, targets.flatten(), ignore_index=IGNORED, reduction="sum") / counted
