"""Sequences of unequal length as one row of tokens: what padding and cu_seqlens have in common.

A layer never computes on padding: the tokens that a mask marks as real are put in a row, one sequence after the other,
as cu_seqlens says, and the results go back to where they came from. So padding does not change the numbers, on
whichever side it is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from linattn_tl import shapes


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of a padded batch are."""

    index: torch.Tensor  # [total] of [B * T]
    cu_seqlens: torch.Tensor  # [B + 1]
    batch: int
    length: int

    @classmethod
    def of_mask(cls, mask: torch.Tensor) -> "Packing":
        """mask: bool [B, T], True where a token is real."""
        cu_seqlens = torch.zeros(mask.shape[0] + 1, dtype=torch.int64, device=mask.device)
        torch.cumsum(mask.sum(1), 0, out=cu_seqlens[1:])
        return cls(mask.flatten().nonzero().flatten(), cu_seqlens, *mask.shape)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] -> [1, total, ...]"""
        return x.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def unpack(self, y: torch.Tensor) -> torch.Tensor:
        """[1, total, ...] -> [B, T, ...], zero where there is padding."""
        padded = y.new_zeros(self.batch * self.length, *y.shape[2:])
        return padded.index_copy(0, self.index, y[0]).unflatten(0, (self.batch, self.length))


class SequenceModule(nn.Module):
    """A module over sequences, whose forward leaves padding out. A subclass reads what has none, in `_read`."""

    def forward(
        self,
        x: torch.Tensor,
        state: Any = None,
        *,
        keep_state: bool = False,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Whole sequences, or their next pieces.

        Args:
            x: [B, T, width].
            state: after the tokens before; None is the start. It is not changed, and gradients flow through it.
            keep_state: also return the state after the last token.
            mask: [B, T], True where a token is real. The others are left out, wherever they are: those around them are
                neighbours then, and the result for them is 0.
            cu_seqlens: int [N + 1], N sequences packed along T, with B = 1; instead of a mask.

        Returns:
            (y [B, T, width], the state or None)

        Raises:
            ValueError, TypeError: an argument, or a tensor of the state, is not of this module or batch.
        """
        packing = packing_of(type(self).__name__, mask, x, cu_seqlens)
        if packing is None:
            return self._read(x, state, keep_state, cu_seqlens)
        y, state = self._read(packing.pack(x), state, keep_state, packing.cu_seqlens)
        return packing.unpack(y), state

    def _read(
        self, x: torch.Tensor, state: Any, keep_state: bool, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not say how it reads sequences")


def packing_of(owner: str, mask: torch.Tensor | None, x: torch.Tensor, cu_seqlens: Any) -> Packing | None:
    """The packing of a padded batch x [B, T, ...], or None if no token of it is padding."""
    if mask is None:
        return None
    shapes.check_tensors(owner, mask=mask)
    if cu_seqlens is not None:
        raise ValueError(f"{owner}: mask and cu_seqlens are both given; expected one of them")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{owner}: mask has shape {tuple(mask.shape)}; expected [B, T] = {tuple(x.shape[:2])}")
    if mask.is_floating_point():
        raise TypeError(f"{owner}: mask has dtype {mask.dtype}; expected bool, or integers that are 1 or 0")
    real = mask.bool()
    if mask.dtype != torch.bool and not torch.equal(mask, real.to(mask.dtype)):
        raise ValueError(f"{owner}: mask has {int(mask[mask != real][0])}; expected 1 (real) or 0 (padding)")
    return None if bool(real.all()) else Packing.of_mask(real)


def sequences_of(owner: str, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """How many sequences x [B, T, ...] holds. Checks cu_seqlens, but for its values while torch.compile traces."""
    if cu_seqlens is None:
        return x.shape[0]
    shapes.check_tensors(owner, cu_seqlens=cu_seqlens)
    shapes.check_dtype(owner, "cu_seqlens", cu_seqlens.dtype, (torch.int32, torch.int64))
    if cu_seqlens.ndim != 1 or not len(cu_seqlens) or x.shape[0] != 1:
        raise ValueError(
            f"{owner}: cu_seqlens has shape {tuple(cu_seqlens.shape)} and x {tuple(x.shape)};"
            " expected [N + 1], and B = 1 for packed sequences"
        )
    if not torch.compiler.is_compiling():
        shapes.check_lengths(owner, cu_seqlens, x.shape[1])
    return len(cu_seqlens) - 1


def positions_of(length: int, cu_seqlens: torch.Tensor | None, read: torch.Tensor | None, device: Any) -> torch.Tensor:
    """The position of each token in its own sequence, counted from 0.

    Args:
        length: T, of each sequence, or of all that are packed.
        read: [N] tokens that each sequence has had before, none when None.

    Returns:
        [B or 1, T]
    """
    tokens = torch.arange(length, device=device)
    if cu_seqlens is None:
        return tokens.unsqueeze(0) if read is None else tokens + read.unsqueeze(1)
    starts = cu_seqlens[:-1].long() if read is None else cu_seqlens[:-1].long() - read
    return (tokens - owners_of(length, cu_seqlens, starts)).unsqueeze(0)


def owners_of(length: int, cu_seqlens: torch.Tensor, of_each: torch.Tensor) -> torch.Tensor:
    """[N, ...], a value of each packed sequence -> [length, ...], that of each token's."""
    return of_each.repeat_interleave(cu_seqlens.diff(), 0, output_size=length)
