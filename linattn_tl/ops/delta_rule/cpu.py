"""The delta rule through compiled CPU kernels: which kernel runs over which tokens.

A pass is one launch, of every sequence and head from its first token to its last: what a chunk does to the state is a
matrix, so there is no cheap sum over segments of time. Where there are fewer heads than threads, some have no work.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autotune.launcher import keep
from autotune.launcher.cpu import CpuBinary
from autotune.launcher.repeat import Argument, Call
from linattn_tl import outputs, shapes, walks
from linattn_tl.ops.delta_rule.definition import Options
from linattn_tl.repeats import launched
from linattn_tl.walks import Walk, rows, step_on_copies, threads_as_now, threads_for, token_words, walk_of
from tl_kernels.delta_rule import cpu as kernels

PASS = (0, 0, 0, 0, 0, 0)  # q, k, v, g, beta, initial state
STEP = (0, 0, 0, 0, 0, 0, 0, 0)  # q, k, v, g, beta, state, slots, out


def _contiguous(state: torch.Tensor | None) -> torch.Tensor | None:
    return None if state is None else state.resolve_neg().contiguous()


def _rows(x: Any) -> Any:
    return None if x is None else rows(x)


def _new_states(walk: Walk, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(walk.N, walk.H * walk.heads, walk.K, walk.V, dtype=torch.float32, device=like.device)


Kept = tuple[torch.Tensor, torch.Tensor]  # Y [B, T, HV, V], and the state before each chunk


class CpuRunner:
    """The binary and jit backends of gated_delta_rule on the CPU."""

    differentiable = False

    def __init__(self, binaries: Mapping[str, CpuBinary]):
        # both, but for a trial of one of them
        self.fwd: Any = binaries.get(kernels.FWD.name)
        self.bwd: Any = binaries.get(kernels.BWD.name)

    # ---- forward

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, final state or None), and for backward what `Kept` has."""
        *tokens, initial = inputs
        tokens = [_rows(x) for x in tokens]
        walk = walk_of(tokens[0], tokens[2], lengths)
        o = outputs.empty_like(tokens[2])
        final = _new_states(walk, tokens[0]) if opt.output_final_state else None
        kept = self._new_kept(tokens, walk) if keep else None
        self._run(tokens, walk, opt, o, kept, _contiguous(initial), final)
        return (o, final), kept or ()

    def _new_kept(self, tokens: Sequence[Any], walk: Walk) -> Kept:
        v = tokens[2]
        y = outputs.empty(tuple(v.shape), torch.float32, v.device)
        return y, walks.chunk_states(walk, kernels.KEPT_EVERY)

    def _run(
        self, tokens: Sequence[Any], walk: Walk, opt: Options, o: Any, kept: Kept | None, start: Any, end: Any
    ) -> None:
        y, states = kept or (None, None)
        scalars = _scalars(tokens, opt, o, y)
        walks.launch(self.fwd, walk, scalars, (*tokens, o, y), [(start, end)], [states])

    def call(self, inputs: Sequence[Any], opt: Options, results: Sequence[Any]) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py."""
        *tokens, initial = inputs
        walk = walk_of(tokens[0], tokens[2], None)
        if not all(_rows(x) is x for x in tokens) or _contiguous(initial) is not initial:
            return None
        o, final = results
        fixed = walks.fixed_words(self.fwd, walk, _scalars(tokens, opt, o, None), (*tokens, o, None))
        tensors = [*(Argument(x, i if x is not None else -1) for i, x in enumerate(tokens)), Argument(initial, 8)]
        tensors += [Argument(x, w, outputs.maker(x), returned=True) for x, w in ((o, 5), (final, 9)) if x is not None]
        return launched(self.fwd, self.fwd.addresses(*[0] * 12) + fixed, tensors, "cpu", [threads_as_now()])

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
        *tokens, initial = inputs
        tokens = [_rows(x) for x in tokens]
        walk = walk_of(tokens[0], tokens[2], lengths)
        kept = (saved[0], saved[1]) if saved else self.kept(tokens, walk, initial, opt)
        dout = tokens[2].new_zeros(walk.V).expand(tokens[2].shape) if grads[0] is None else grads[0]
        found = self.gradients(tokens, walk, kept, (dout, grads[1]), opt, gates=needs[3])
        return [x if need else None for x, need in zip(found, needs, strict=True)]

    def kept(self, tokens: Sequence[Any], walk: Walk, initial: Any, opt: Options) -> Kept:
        """What forward leaves for backward, where it has not kept it."""
        found = self._new_kept(tokens, walk)
        self._run((None, *tokens[1:]), walk, opt, None, found, _contiguous(initial), None)
        return found

    def gradients(
        self, tokens: Sequence[Any], walk: Walk, kept: Kept, upstream: Sequence[Any], opt: Options, gates: bool
    ) -> list[Any]:
        """dq, dk, dv, dg (None without gates), dbeta, d initial state, from those of o and of the final state."""
        q, k, v, g, beta = tokens
        (y, states), (dout, dfinal) = kept, upstream
        dq, dk, dv = (outputs.empty_like(x) for x in (q, k, v))
        dg = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device) if gates else None
        dbeta = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device)
        end = _new_states(walk, k)
        given = (q, k, g, beta, y, rows(dout), dq, dk, dv, dg, dbeta)
        scalars = (int(g is not None), int(gates), int(opt.qk_l2norm), opt.scale)
        walks.launch(self.bwd, walk, scalars, given, [(_contiguous(dfinal), end)], [states])
        return [dq, dk, dv, dg, dbeta, end]


def _scalars(tokens: Sequence[Any], opt: Options, o: Any, y: Any) -> tuple[Any, ...]:
    """emit, leave, gated, norm, scale."""
    return int(o is not None), int(y is not None), int(tokens[3] is not None), int(opt.qk_l2norm), opt.scale


class CpuDecode:
    """The binary and jit backends of gated_delta_rule_decode on the CPU."""

    def __init__(self, binaries: Mapping[str, CpuBinary]):
        self.decode = binaries[kernels.DECODE.name]

    def __call__(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, slots: Any, opt: Options, out: Any
    ) -> Any:
        """q [B, H, K] or [B, n, H, K]; state [P, HV, K, V] changes in place."""
        if slots is not None:
            slots = slots.to(torch.int64).contiguous()
        tokens = (q, k, v, g, beta)
        fixed = self._in_place(tokens, state, opt, out)
        if fixed is None:
            if g is None:  # the copies are of all tokens
                return step_on_copies(self._without_gates, (q, k, v, beta), (state,), slots, opt, out)
            return step_on_copies(self, tokens, (state,), slots, opt, out)
        at = [0 if x is None else x.data_ptr() for x in (slots, *tokens, out, state)]
        self.decode(self.decode.addresses(0, *at) + fixed)
        return out

    def _without_gates(self, q: Any, k: Any, v: Any, beta: Any, *rest: Any) -> Any:
        return self(q, k, v, None, beta, *rest)

    def call(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, slots: Any, opt: Options, out: Any
    ) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py.

        Not with slots: their values are checked in each call.
        """
        tokens = (q, k, v, g, beta)
        fixed = self._in_place(tokens, state, opt, out) if slots is None else None
        if fixed is None:
            return None
        tensors = [
            *(Argument(x, i if x is not None else -1) for i, x in enumerate(tokens)),
            Argument(state, 6, changed=True),
            Argument(None),
            Argument(out, 5, outputs.maker(out), apart=True, changed=True, returned=True),
        ]
        return launched(self.decode, self.decode.addresses(*[0] * 9) + fixed, tensors, "cpu", [threads_as_now()])

    def _in_place(self, tokens: Sequence[Any], state: Any, opt: Options, out: Any) -> bytes | None:
        """The fixed words of a call, or None where the kernel cannot work on the tensors where they are."""
        given = (*tokens, out, state)
        strides = tuple(None if x is None else x.stride() for x in given)
        q, _, v = tokens[:3]
        key = (q.shape, v.shape, opt, strides, torch.get_num_threads())
        fixed = self.decode.kept.get(key)
        if fixed is None:
            last = all(x is None or x.stride(-1) == 1 or x.shape[-1] < 2 for x in (*tokens[:3], out, state))
            if not last or (state.stride(-2) != state.shape[-1] and state.shape[-2] > 1):
                return None
            fixed = self._fixed(q, v, opt, strides)
            keep(self.decode, key, fixed)
        present = [x for x in tokens if x is not None]
        if any(x.is_neg() for x in present) or shapes.shares_memory(out, *present):
            return None
        return fixed

    def _fixed(self, q: torch.Tensor, v: torch.Tensor, opt: Options, strides: Sequence[Any]) -> bytes:
        B, n, H, K = q.shape if q.ndim == 4 else (q.shape[0], 1, *q.shape[1:])
        HV, V = v.shape[-2:]
        # bound by bytes: a multiply-add here costs several of a chunk's
        sizes = (B, n, H, HV // H, K, V, 1, 0, threads_for(4 * B * n * HV * K * V))
        *given, state = strides
        words = [w for s in given for w in ((0, 0, 0) if s is None else token_words(s, q.ndim == 3))]
        return self.decode.fixed(*sizes, int(given[3] is not None), int(opt.qk_l2norm), opt.scale, *words, *state[:2])
