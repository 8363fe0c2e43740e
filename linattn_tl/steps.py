"""Decode steps through compiled CUDA kernels, whatever the family: states in place, in rows of pools."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autotune.launcher import keep
from linattn_tl import shapes
from linattn_tl.aligned import plain, pool, pool_strides, ready
from linattn_tl.launchers import ALIGNMENT, Launcher
from linattn_tl.plain import each
from linattn_tl.spans import blocks, check_grid

Tensors = Sequence[Any]  # None for one that is missing


class PooledStep:
    """What runners of decode kernels have in common, for one K and V.

    A kernel's tensors are those of the tokens (q, k and v first), the output, the pools, and slots. A family sets `op`
    and `pool_names`, and says in option_numbers what kernels are told of its options.

    A call reads no value from the device and waits for nothing, so that a graph may be captured.
    """

    op: str
    pool_names: Sequence[str]  # as the kernel names the distances of their rows and heads: kv_rows, kv_heads

    def __init__(self, binaries: Mapping[str, Launcher]):
        self.decode: Any = next(b for name, b in binaries.items() if name.split(".")[1] == "decode")

    def option_numbers(self, opt: Any) -> Mapping[str, float]:
        """Of the op's options, by the names of the kernel's arguments."""
        raise NotImplementedError

    def _step(self, tokens: Tensors, pools: Tensors, slots: Any, opt: Any, out: Any) -> Any:
        """out, filled.

        Args:
            tokens: q [B, H, K] or [B, n, H, K], k and v alike, and whatever else comes a token.
            pools: [P, heads, ...] each; they change in place, views of larger ones too.
            slots: rows of the pools, int32 or int64 [B], or None where sequence i has row i.
        """
        if out.numel() == 0:
            return out
        packed = self._in_place(tokens, pools, slots, opt, out)
        if packed is None:
            return self._copied(tokens, pools, slots, opt, out)
        self.decode.launch(packed, (*tokens, out, *pools, None if slots is None else plain(slots)))
        return out

    def _repeatable(self, tokens: Tensors, pools: Tensors, slots: Any, opt: Any, out: Any) -> Any:
        """The packed numbers, or None where the call does not come down to a launch on the tensors that it is given."""
        if out.numel() == 0 or not (slots is None or ready(slots)):
            return None
        return self._in_place(tokens, pools, slots, opt, out)

    def _in_place(self, tokens: Tensors, pools: Tensors, slots: Any, opt: Any, out: Any) -> Any:
        """The packed numbers, or None where the kernel cannot work on the tensors where they are."""
        given = [x for x in tokens if x is not None]
        if not (all(map(ready, given)) and ready(out)) or any(x.data_ptr() % ALIGNMENT or x.is_neg() for x in pools):
            return None
        if shapes.shares_memory(out, *given):  # a program might read what another has written
            return None
        layout = tuple([x.stride() for x in pools])
        # the first pool's shape tells v's
        key = tokens[0].shape, len(given), pools[0].shape, layout, None if slots is None else slots.dtype, opt
        packed = self.decode.kept.get(key)
        if packed is None:
            strides = [pool_strides(x) for x in pools]
            if None in strides:
                return None
            packed = self.decode.pack(self._numbers(tokens, pools, strides, slots, opt))
            keep(self.decode, key, packed)
        return packed

    def _copied(self, tokens: Tensors, pools: Tensors, slots: Any, opt: Any, out: Any) -> Any:
        """The step with copies of what the kernel cannot read or write in place, and of out always."""
        o, copies = torch.empty_like(out, memory_format=torch.contiguous_format), [pool(x) for x in pools]
        self._step(each(plain, *tokens), copies, slots, opt, o)
        for mine, copy in zip((*pools, out), (*copies, o), strict=True):
            if mine is not copy:
                mine.copy_(copy)
        return out

    def _numbers(
        self, tokens: Tensors, pools: Tensors, strides: Sequence[Any], slots: Any, opt: Any
    ) -> dict[str, float]:
        q, v = tokens[0], tokens[2]
        B, n, H, K = q.shape if q.ndim == 4 else (q.shape[0], 1, *q.shape[1:])
        HV, V = v.shape[-2:]
        check_grid(self.op, "decode", HV, B * blocks(self.decode.config, K, V))
        words = 0 if slots is None else slots.element_size() // 4  # of 32 bits, which is how the kernel reads slots
        sizes = {"B": B, "tokens": n, "H": H, "HV": HV, "P": pools[0].shape[0], "M": words * B}
        distances: dict[str, int] = {}
        for name, (rows, heads) in zip(self.pool_names, strides, strict=True):
            distances |= {f"{name}_rows": rows, f"{name}_heads": heads}
        return {**sizes, **distances, "use_slots": words, **self.option_numbers(opt)}
