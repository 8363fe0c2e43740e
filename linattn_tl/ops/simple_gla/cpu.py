"""Scalar-gated linear attention through compiled CPU kernels: which kernel runs over which tokens.

A pass is one launch. Where there are fewer heads than threads, time is cut into segments: the state that each leaves is
computed in parallel first, and each then starts from what those before it have left, decayed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autotune.launcher import keep
from autotune.launcher.cpu import CpuBinary
from autotune.launcher.repeat import Argument, Call
from linattn_tl import outputs, shapes, walks
from linattn_tl.ops.simple_gla.definition import Options
from linattn_tl.repeats import launched
from linattn_tl.walks import (
    Walk,
    cut_in_time,
    rows,
    step_on_copies,
    threads_as_now,
    threads_for,
    token_words,
    walk_of,
)
from tl_kernels.simple_gla import cpu as kernels

PASS = (0, 0, 0, 0, 0)  # q, k, v, g, initial state
STEP = (0, 0, 0, 0, 0, 0, 0)  # q, k, v, g, state, slots, out
EMIT, CARRY = 1, 1
SEGMENT_ALIGN = 256  # tokens, as in autotune/launcher/cpu.h


def _contiguous(state: torch.Tensor | None) -> torch.Tensor | None:
    return None if state is None else state.resolve_neg().contiguous()


def _new_states(walk: Walk, count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(count, walk.H * walk.heads, walk.K, walk.V, dtype=torch.float32, device=like.device)


class CpuRunner:
    """The binary and jit backends of simple_gla on the CPU."""

    differentiable = False

    def __init__(self, binaries: Mapping[str, CpuBinary]):
        # both, but for a trial of one of them
        self.fwd: Any = binaries.get(kernels.FWD.name)
        self.bwd: Any = binaries.get(kernels.BWD.name)

    # ---- forward

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, final state or None), and for backward the state before each chunk."""
        q, k, v, g, initial = inputs
        q, k, v, g = rows(q), rows(k), rows(v), rows(g)
        walk, start = walk_of(q, v, lengths), _contiguous(initial)
        cut = cut_in_time(walk)
        o = outputs.empty_like(v)
        final = _new_states(walk, walk.N, q) if opt.output_final_state else None
        left = final
        if cut.segments > 1:
            start, ends = self._segment_starts(k, v, g, cut, start, opt)
            final, left = (ends if opt.output_final_state else None), None
        states = walks.chunk_states(walk, kernels.KEPT_EVERY) if keep else None
        walks.launch(self.fwd, cut, (EMIT, CARRY, opt.scale), (q, k, v, g, o), [(start, left)], [states])
        return (o, final), (states,) if keep else ()

    def call(self, inputs: Sequence[Any], opt: Options, results: Sequence[Any]) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py. Where it is one launch: not cut in time."""
        *tokens, initial = inputs
        walk = walk_of(tokens[0], tokens[2], None)
        if (
            cut_in_time(walk).segments > 1
            or not all(rows(x) is x for x in tokens)
            or _contiguous(initial) is not initial
        ):
            return None
        o, final = results
        fixed = walks.fixed_words(self.fwd, walk, (EMIT, CARRY, opt.scale), (*tokens, o))
        tensors = [*(Argument(x, i) for i, x in enumerate(tokens)), Argument(initial, 6)]
        tensors += [Argument(x, w, outputs.maker(x), returned=True) for x, w in ((o, 4), (final, 7)) if x is not None]
        return launched(self.fwd, self.fwd.addresses(*[0] * 10) + fixed, tensors, "cpu", [threads_as_now()])

    def _segment_starts(self, k: Any, v: Any, g: Any, cut: Walk, initial: Any, opt: Options) -> tuple[Any, Any]:
        """The state that each segment starts from, and the final ones."""
        parts = _new_states(cut, cut.N * cut.segments, k)
        walks.launch(self.fwd, cut, (0, CARRY, opt.scale), (None, k, v, g, None), [(None, parts)], [None])
        return _linked(parts, initial, segment_decays(g, cut), cut)

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
        """One gradient an input that needs one."""
        tokens, walk, (initial, dfinal) = self.prepared(inputs, lengths, grads)
        states = saved[0] if saved else self.states(tokens, walk, initial, opt)
        found = self.gradients(tokens, walk, states, dfinal, opt, gates=needs[3])
        return [x if need else None for x, need in zip(found, needs, strict=True)]

    def prepared(self, inputs: Sequence[Any], lengths: Any, grads: Sequence[Any]) -> tuple[Any, Walk, Any]:
        """(q, k, v, g, dO) and (initial state, gradient of the final one) as kernels read them."""
        q, k, v, g, initial = inputs
        dout, dfinal = grads
        if dout is None:
            dout = v.new_zeros(v.shape[-1]).expand(v.shape)
        states = _contiguous(initial), _contiguous(dfinal)
        return tuple(map(rows, (q, k, v, g, dout))), walk_of(q, v, lengths), states

    def states(self, tokens: Sequence[Any], walk: Walk, start: Any, opt: Options) -> torch.Tensor:
        """The state before each chunk, where forward has not kept them."""
        _, k, v, g, _ = tokens
        cut, states = cut_in_time(walk), walks.chunk_states(walk, kernels.KEPT_EVERY)
        if cut.segments > 1:
            start, _ = self._segment_starts(k, v, g, cut, start, opt)
        walks.launch(self.fwd, cut, (0, CARRY, opt.scale), (None, k, v, g, None), [(start, None)], [states])
        return states

    def gradients(
        self, tokens: Sequence[Any], walk: Walk, states: torch.Tensor, start: Any, opt: Options, gates: bool
    ) -> list[Any]:
        """dq, dk, dv, dg (None without gates), d initial state, from the gradient of the final state."""
        q, k, v, g, _ = tokens
        dq, dk, dv = (outputs.empty_like(x) for x in (q, k, v))
        dg = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device) if gates else None
        cut = cut_in_time(walk)
        if cut.segments > 1:
            parts = _new_states(cut, cut.N * cut.segments, k)
            left_out = (None, None, None, None)
            walks.launch(self.bwd, cut, (0, 0, opt.scale), (*tokens, *left_out), [(None, parts)], [None])
            start, end = _linked(parts, start, segment_decays(g, cut), cut, reverse=True)
            left = None
        else:
            end = left = _new_states(walk, walk.N, k)
        given = (*tokens, dq, dk, dv, dg)
        walks.launch(self.bwd, cut, (EMIT, int(gates), opt.scale), given, [(start, left)], [states])
        return [dq, dk, dv, dg, end]


def segment_decays(g: torch.Tensor, cut: Walk) -> torch.Tensor:
    """exp of the sum of g [B, T, HV] over each segment: [N, segments, HV]."""
    bounds = [n * cut.T for n in range(cut.N + 1)] if cut.cu is None else cut.cu.tolist()
    flat = g.reshape(-1, g.shape[2]).float()
    sums = torch.zeros(cut.N, cut.segments, g.shape[2])
    for n in range(cut.N):
        begin, end = bounds[n], bounds[n + 1]
        blocks = math.ceil((end - begin) / SEGMENT_ALIGN)
        share = math.ceil(blocks / cut.segments) * SEGMENT_ALIGN
        for s in range(cut.segments):
            a, b = min(begin + s * share, end), min(begin + (s + 1) * share, end)
            sums[n, s] = flat[a:b].sum(0)
    return sums.exp()


def _linked(parts: Any, initial: Any, decays: Any, cut: Walk, reverse: bool = False) -> tuple[Any, Any]:
    """What each segment leaves by itself [N * segments, ...] -> what each starts from, and what the last one leaves.

    reverse: a backward pass starts from the last segment.
    """
    parts = parts.view(cut.N, cut.segments, *parts.shape[1:])
    starts = torch.empty_like(parts)
    state = torch.zeros_like(parts[:, 0]) if initial is None else initial
    for s in reversed(range(cut.segments)) if reverse else range(cut.segments):
        starts[:, s] = state
        state = decays[:, s, :, None, None] * state + parts[:, s]
    return starts.flatten(0, 1), state.contiguous()


class CpuDecode:
    """The binary and jit backends of simple_gla_decode on the CPU."""

    def __init__(self, binaries: Mapping[str, CpuBinary]):
        self.decode = binaries[kernels.DECODE.name]

    def __call__(self, q: Any, k: Any, v: Any, g: Any, state: Any, slots: Any, opt: Options, out: Any) -> Any:
        """q [B, H, K] or [B, n, H, K]; state [P, HV, K, V] changes in place."""
        if slots is not None:
            slots = slots.to(torch.int64).contiguous()
        fixed = self._in_place(q, k, v, g, state, opt, out)
        if fixed is None:
            return step_on_copies(self, (q, k, v, g), (state,), slots, opt, out)
        at = [0 if x is None else x.data_ptr() for x in (slots, q, k, v, g, out, state)]
        self.decode(self.decode.addresses(0, *at) + fixed)
        return out

    def call(self, q: Any, k: Any, v: Any, g: Any, state: Any, slots: Any, opt: Options, out: Any) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py.

        Not with slots: their values are checked in each call.
        """
        fixed = self._in_place(q, k, v, g, state, opt, out) if slots is None else None
        if fixed is None:
            return None
        tensors = [
            *(Argument(x, i) for i, x in enumerate((q, k, v, g))),
            Argument(state, 5, changed=True),
            Argument(None),
            Argument(out, 4, outputs.maker(out), apart=True, changed=True, returned=True),
        ]
        return launched(self.decode, self.decode.addresses(*[0] * 8) + fixed, tensors, "cpu", [threads_as_now()])

    def _in_place(self, q: Any, k: Any, v: Any, g: Any, state: Any, opt: Options, out: Any) -> bytes | None:
        """The fixed words of a call, or None where the kernel cannot work on the tensors where they are."""
        strides = tuple(x.stride() for x in (q, k, v, g, out, state))
        key = (q.shape, v.shape, opt, strides, torch.get_num_threads())
        fixed = self.decode.kept.get(key)
        if fixed is None:
            last = all(x.stride(-1) == 1 or x.shape[-1] < 2 for x in (q, k, v, out, state))
            if not last or (state.stride(-2) != state.shape[-1] and state.shape[-2] > 1):
                return None
            fixed = self._fixed(q, v, opt, strides)
            keep(self.decode, key, fixed)
        if any(x.is_neg() for x in (q, k, v, g)) or shapes.shares_memory(out, q, k, v, g):
            return None
        return fixed

    def _fixed(self, q: torch.Tensor, v: torch.Tensor, opt: Options, strides: Sequence[tuple[int, ...]]) -> bytes:
        B, n, H, K = q.shape if q.ndim == 4 else (q.shape[0], 1, *q.shape[1:])
        HV, V = v.shape[-2:]
        # bound by bytes: a multiply-add here costs several of a chunk's
        sizes = (B, n, H, HV // H, K, V, 1, 0, threads_for(4 * B * n * HV * K * V))
        *given, state = strides
        words = [w for s in given for w in token_words(s, q.ndim == 3)]
        return self.decode.fixed(*sizes, opt.scale, *words, *state[:2])
