"""The delta rule through compiled CUDA kernels: whole sequences forward and backward, and steps.

A pass is one launch whose programs walk whole sequences. Where that leaves multiprocessors idle and sequences are long,
what chunks can do at once has launches of its own (tl_kernels/delta_rule/cuda_chunks.py), and backward walks spans.

Kernels write gradients of q, k, g and beta for each value head and block of V; their sums are taken here, in an order
that does not change. Tensors are handed over contiguous and 16-byte aligned; others are copied first.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from autotune.launcher.repeat import Argument, Call
from linattn_tl import outputs, registry
from linattn_tl.aligned import group_sums, indices, plain, ready
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner
from linattn_tl.plain import each
from linattn_tl.spans import SpanRunner, Walk, blocks, chunk_states, count, new_states, unchanged
from linattn_tl.steps import PooledStep

FAMILY = "delta_rule"


def option_numbers(opt: Options | None) -> dict[str, float]:
    """What kernels are told of the options, by the names of their arguments."""
    return {} if opt is None else {"scale": opt.scale, "norm": int(opt.qk_l2norm)}


Kept = tuple[torch.Tensor, torch.Tensor]  # Y [B, T, HV, V], and the state before each chunk of backward


class CudaRunner(SpanRunner):
    """The compiled backends of gated_delta_rule on NVIDIA GPUs."""

    op = FAMILY

    def option_numbers(self, opt: Options | None) -> dict[str, float]:
        return option_numbers(opt)

    # ---- forward

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, final state or None), and for backward what `Kept` has."""
        *tokens, start = each(plain, *inputs)
        q, v, cu = tokens[0], tokens[2], indices(lengths)
        walk, o = self._walk("forward", q, v, cu), torch.empty_like(v)
        if walk.empty:
            return (o, unchanged(start, walk, q) if opt.output_final_state else None), ()
        final = new_states(walk.sequences, walk, q) if opt.output_final_state else None
        if walk.cut:
            kept = self._forward_in_chunks(tokens, cu, walk.whole, o, start, final, opt)
            return (o, final), kept if keep and self.keeps else ()
        kept = self._new_kept(walk, q, v, self.keeps) if keep and self.keeps else None
        packed = self._numbers(walk, tokens[3], start, final, kept, opt)
        self.binaries["forward"].launch(packed, (*tokens, o, start, final, *(kept or (None, None)), cu))
        return (o, final), kept or ()

    def _forward_in_chunks(
        self, tokens: Sequence[Any], cu: Any, walk: Walk, o: Any, start: Any, final: Any, opt: Options
    ) -> Kept:
        """Fills o and the final state; a walk of two products a chunk is all that is not done at once."""
        q, k, v, g, beta = tokens
        C = self.binaries["carry"].config.C  # that of backward, too
        y, states = kept = self._new_kept(walk, q, v, C)
        y0, w = torch.empty_like(y), y.new_empty(*v.shape[:3], walk.K)
        chunks = walk._replace(segment=C)
        gates, N0, N1 = {**_gate_sizes(walk, g), "tokens": walk.tokens}, count(start), count(final)
        self._launch("prepare", chunks, opt, (q, k, v, g, beta, y0, w, cu), **gates)
        self._launch(
            "carry", walk, opt, (k, w, g, beta, y0, y, start, final, states, cu),
            **gates, N0=N0, N1=N1, initial=int(N0 > 0), final=int(N1 > 0), chunks=count(states),
        )  # fmt: skip
        self._launch("output", chunks, opt, (q, k, g, beta, y, states, o, cu), **gates, chunks=count(states))
        return kept

    @cached_property
    def keeps(self) -> int:
        """Tokens of a chunk of backward, whose states forward leaves; or 0 where no backward kernel serves."""
        return self.binaries["backward"].config.C if "backward" in self.binaries else 0

    def _new_kept(self, walk: Walk, q: torch.Tensor, v: torch.Tensor, C: int) -> Kept:
        tile = self.tile(q, v)
        return torch.empty_like(v, dtype=tile), chunk_states(walk, C, q, tile)

    def _numbers(self, walk: Walk, g: Any, start: Any, final: Any, kept: Kept | None, opt: Options) -> Any:
        N0, N1, chunks = count(start), count(final), count(kept[1]) if kept else 0
        return self._packed(
            "forward", walk, opt, **_gate_sizes(walk, g), tokens=walk.tokens, rows=walk.tokens if kept else 0,
            N0=N0, N1=N1, initial=int(N0 > 0), final=int(N1 > 0), chunks=chunks, keeps=self.keeps if kept else 0,
        )  # fmt: skip

    def call(self, inputs: Sequence[Any], opt: Options, results: Sequence[Any]) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py. Where it is one launch."""
        *tokens, start = inputs
        o, final = results
        walk = self._walk("forward", tokens[0], tokens[2], None)
        if walk.empty or walk.cut or not all(x is None or ready(x) for x in inputs):
            return None
        tensors = [*(Argument(x, i if x is not None else -1) for i, x in enumerate(tokens)), Argument(start, 6)]
        tensors += [Argument(x, w, outputs.maker(x), returned=True) for x, w in ((o, 5), (final, 7)) if x is not None]
        return self.binaries["forward"].call(self._numbers(walk, tokens[3], start, final, None, opt), tensors)

    # ---- backward

    def backward(
        self,
        inputs: Sequence[Any],
        results: Sequence[Any],
        saved: Sequence[Any],
        lengths: Any,
        grads: Sequence[Any],
        needs: Sequence[bool],
        opt: Options,
    ) -> list[Any]:
        """One gradient an input that needs one; where no kernel fits, by the chunk form in plain torch."""
        if not self.keeps:
            registry.fall_back(FAMILY, "torch", "no kernel of the backward pass fits the device")
            return TorchRunner().backward(inputs, results, saved, lengths, grads, needs, opt)
        kept = saved or self.forward(inputs, lengths, opt._replace(output_final_state=False))[1]
        q, k, v, g, beta, _ = each(plain, *inputs)
        dout, dfinal = each(plain, *grads)
        upstream = torch.zeros_like(v) if dout is None else dout, dfinal
        found = self.gradients((q, k, v, g, beta), kept, indices(lengths), upstream, needs, opt)
        return [x if need else None for x, need in zip(found, needs, strict=True)]

    def gradients(
        self, tokens: Sequence[Any], kept: Sequence[Any], cu: Any, upstream: Sequence[Any], needs: Any, opt: Options
    ) -> list[Any]:
        """dq, dk, dv, dg (None unless it is wanted), dbeta, d initial state, from those of o and of the final state."""
        (q, k, v, g, beta), (dout, dfinal) = tokens, upstream
        walk = self._walk("backward", q, v, cu)
        if walk.empty:
            zeros = each(torch.zeros_like, q, k, v, g, beta)
            return [*zeros, unchanged(dfinal, walk, q)]
        start = left = new_states(walk.sequences, walk, q) if needs[5] else None
        if walk.cut:
            dfinal, left = self._gradients_behind(tokens, cu, walk, dout, dfinal, start, opt), None
        parts = walk.HV * blocks(self.binaries["backward"].config, walk.K, walk.V)
        dq, dk = (x.new_empty(*x.shape[:2], parts, walk.K) for x in (q, k))
        dv, dbeta = torch.empty_like(v), beta.new_empty(*v.shape[:2], parts)
        dg = torch.empty_like(dbeta) if g is not None and needs[3] else None
        N0, N1 = count(left), count(dfinal)
        self._launch(
            "backward", walk, opt, (q, k, g, beta, kept[0], dout, kept[1], dq, dk, dv, dg, dbeta, dfinal, left, cu),
            **_gate_sizes(walk, g), tokens=walk.tokens, rows=0 if dg is None else walk.tokens, parts=parts,
            N0=N0, N1=N1, final=int(N1 > 0), initial=int(N0 > 0), chunks=count(kept[1]),
            gates_wanted=int(dg is not None),
        )  # fmt: skip
        dq, dk = (group_sums(x, parts // walk.H, 2) for x in (dq, dk))
        dg, dbeta = each(lambda x: group_sums(x, parts // walk.HV, 2), dg, dbeta)
        return [dq, dk, dv, dg, dbeta, start]

    def _gradients_behind(
        self, tokens: Sequence[Any], cu: Any, walk: Walk, dout: Any, dfinal: Any, start: Any, opt: Options
    ) -> torch.Tensor:
        """The gradient of the state behind each span of a walk that is cut; fills that of the initial one."""
        q, k, v, g, beta = tokens
        x0, w = (v.new_empty(*v.shape[:3], width, dtype=self.tile(q, v)) for width in (walk.V, walk.K))
        behind = new_states(walk.spans, walk, q)
        gates, N0, N1 = {**_gate_sizes(walk, g), "tokens": walk.tokens}, count(start), count(dfinal)
        chunks = walk._replace(segment=self.binaries["carry_back"].config.C)
        self._launch("prepare_back", chunks, opt, (q, k, dout, g, beta, x0, w, cu), **gates)
        self._launch(
            "carry_back", walk.whole, opt, (q, k, w, g, beta, x0, dout, dfinal, start, behind, cu), **gates,
            N0=N0, N1=N1, final=int(N1 > 0), initial=int(N0 > 0), pieces=walk.spans, piece=walk.segment,
        )  # fmt: skip
        return behind


def _gate_sizes(walk: Walk, g: Any) -> dict[str, int]:
    return {"G": 0 if g is None else walk.tokens, "gated": int(g is not None)}


class CudaDecode(PooledStep):
    """The compiled backends of gated_delta_rule_decode on NVIDIA GPUs, for one K and V.

    A slot that names no row of the pool makes o NaN, see tl_kernels/delta_rule/cuda_decode.py.
    """

    op = FAMILY
    pool_names = ("kv",)

    def option_numbers(self, opt: Options) -> dict[str, float]:
        return option_numbers(opt)

    def _numbers(self, tokens: Sequence[Any], *rest: Any) -> dict[str, float]:
        gated = tokens[3] is not None
        return {**super()._numbers(tokens, *rest), "gated": int(gated), "G": tokens[0].shape[0] if gated else 0}

    def __call__(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, slots: Any, opt: Options, out: Any
    ) -> Any:
        """q [B, H, K] or [B, n, H, K]; state [P, HV, K, V] changes in place, a view of a larger one too."""
        return self._step((q, k, v, g, beta), (state,), slots, opt, out)

    def call(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, slots: Any, opt: Options, out: Any
    ) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py."""
        packed = self._repeatable((q, k, v, g, beta), (state,), slots, opt, out)
        if packed is None:
            return None
        tensors = [
            *(Argument(x, i if x is not None else -1) for i, x in enumerate((q, k, v, g, beta))),
            Argument(state, 6, changed=True),
            Argument(slots, 7 if slots is not None else -1),
            Argument(out, 5, outputs.maker(out), apart=True, changed=True, returned=True),
        ]
        return self.decode.call(packed, tensors)
