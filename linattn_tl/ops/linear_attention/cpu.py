"""Linear attention through compiled CPU kernels: which kernel runs over which tokens, with which switches.

Causal passes are one launch. A non-causal pass carries the state over all keys, then emits for all queries. Where
there are fewer heads than threads, time is cut into segments: their states are summed in parallel first, and each
segment then starts from the sum of those before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autotune.launcher import keep
from autotune.launcher.cpu import CpuBinary
from autotune.launcher.repeat import Call
from linattn_tl import outputs, shapes, walks
from linattn_tl.ops.linear_attention.again import pass_arguments, step_arguments
from linattn_tl.ops.linear_attention.definition import FEATURE_MAP_CODES, Options
from linattn_tl.repeats import launched
from linattn_tl.walks import (
    Walk,
    cut_in_time,
    over,
    rows,
    spread,
    step_on_copies,
    threads_as_now,
    threads_for,
    token_words,
    walk_of,
)
from tl_kernels.linear_attention import cpu as kernels

FULL, CARRY, EMIT = (1, 1, 1), (0, 0, 1), (0, 1, 0)  # causal, emit, carry
FULL_KEEP, EMIT_KEEP = (1, 2, 1), (0, 2, 0)  # and write den, for backward


def _option_words(opt: Options) -> tuple[Any, ...]:
    return (FEATURE_MAP_CODES[opt.feature_map], opt.normalize, opt.scale, opt.eps)


class States(NamedTuple):
    """kv [N, HV, K, V] and z [N, H, K], contiguous fp32, either of them possibly missing."""

    kv: torch.Tensor | None = None
    z: torch.Tensor | None = None


NO_STATES = States()


def _contiguous(kv: torch.Tensor | None, z: torch.Tensor | None) -> States:
    if kv is None and z is None:
        return NO_STATES
    return States(*(None if x is None else x.resolve_neg().contiguous() for x in (kv, z)))


def _empty_states(walk: Walk, like: torch.Tensor, count: int) -> States:
    HV = walk.H * walk.heads
    return States(
        torch.empty(count, HV, walk.K, walk.V, dtype=torch.float32, device=like.device),
        torch.empty(count, walk.H, walk.K, dtype=torch.float32, device=like.device),
    )


def launch(
    binary: CpuBinary,
    switches: tuple[int, int, int],
    walk: Walk,
    opt: Options,
    tokens: Sequence[torch.Tensor | None],
    start: States,
    end: States = NO_STATES,
) -> None:
    """Run a chunk kernel. tokens are its [B, T, H, ...] arguments in order, None where the switches leave one alone."""
    scalars = (*switches, *_option_words(opt))
    walks.launch(binary, walk, scalars, tokens, ((start.kv, end.kv), (start.z, end.z)))


class CpuRunner:
    """The binary and jit backends of linear_attention on the CPU."""

    differentiable = False

    def __init__(self, binaries: Mapping[str, CpuBinary]):
        # all three, but for a trial of one of them
        self.fwd: Any = binaries.get(kernels.FWD.name)
        self.bwd_q: Any = binaries.get(kernels.BWD_Q.name)
        self.bwd_kv: Any = binaries.get(kernels.BWD_KV.name)

    # ---- forward

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, kv, z), and for backward den and, of a non-causal call that does not return it, the state of all keys.

        keep=False: there will be no backward, and den is None.
        """
        q, k, v, kv, z = inputs
        q, k, v = rows(q), rows(k), rows(v)
        walk, initial = walk_of(q, v, lengths), _contiguous(kv, z)
        same = v.shape[1] == q.shape[1]
        o = outputs.empty_like(v) if same else outputs.empty((*q.shape[:2], *v.shape[2:]), v.dtype, v.device)
        den = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if keep else None
        full, emit = (FULL_KEEP, EMIT_KEEP) if keep else (FULL, EMIT)
        if not opt.causal:
            total = self._sum(k, v, walk, initial, opt)
            launch(self.fwd, emit, spread(walk, q), opt, (q, None, None, o, den), total)
            final, spare = (total.kv, total.z), (None, None)
            wanted, kept = (final, spare) if opt.output_final_state else (spare, final)
            return (o, *wanted), (den, *kept)
        cut = cut_in_time(walk)
        final = _empty_states(walk, q, walk.N) if opt.output_final_state else NO_STATES
        if cut.segments == 1:
            launch(self.fwd, full, walk, opt, (q, k, v, o, den), initial, final)
        else:
            starts, final = self._segment_starts(k, v, cut, initial, opt)
            launch(self.fwd, full, cut, opt, (q, k, v, o, den), starts)
        return (o, *((final.kv, final.z) if opt.output_final_state else (None, None))), (den, None, None)

    def call(self, inputs: Sequence[Any], opt: Options, results: Sequence[Any]) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py.

        Where it is one launch: causal, and not cut in time.
        """
        q, k, v, kv, z = inputs
        walk = walk_of(q, v, None)
        if not opt.causal or cut_in_time(walk).segments > 1 or (kv is None) != (z is None):
            return None
        if not (rows(q) is q and rows(k) is k and rows(v) is v and _contiguous(kv, z) == (kv, z)):
            return None
        fixed = walks.fixed_words(self.fwd, walk, (*FULL, *_option_words(opt)), (q, k, v, results[0], None))
        block = self.fwd.addresses(*[0] * 11) + fixed
        arguments = pass_arguments(inputs, results, (0, 1, 2, 3, 5, 7, 6, 8))
        return launched(self.fwd, block, arguments, "cpu", [threads_as_now()])

    def _sum(self, k: Any, v: Any, walk: Walk, initial: States, opt: Options) -> States:
        """The state after all keys."""
        walk = over(walk, k)
        cut = cut_in_time(walk)
        total = _empty_states(walk, k, walk.N * cut.segments)
        start = initial if cut.segments == 1 else NO_STATES
        launch(self.fwd, CARRY, cut, opt, (None, k, v, None, None), start, total)
        return total if cut.segments == 1 else _prefix(total, initial, cut)[1]

    def _segment_starts(self, k: Any, v: Any, cut: Walk, initial: States, opt: Options) -> tuple[States, States]:
        parts = _empty_states(cut, k, cut.N * cut.segments)
        launch(self.fwd, CARRY, cut, opt, (None, k, v, None, None), NO_STATES, parts)
        return _prefix(parts, initial, cut)

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
        q, k, v, kv, z = inputs
        o, den = results[0], saved[0]
        dout = grads[0]
        if dout is None:
            dout = v.new_zeros(v.shape[-1]).expand(o.shape)
        q, k, v, dout = rows(q), rows(k), rows(v), rows(dout)
        walk = walk_of(q, v, lengths)
        tokens = (q, k, v, o, dout, den)
        found: list[Any] = [None] * 5
        if needs[0]:
            total = results[1:] if opt.output_final_state else saved[1:]
            start = _contiguous(kv, z) if opt.causal else States(*total)
            found[0] = self._grad_q(tokens, walk, start, opt)
        if any(needs[1:]):
            start = _contiguous(grads[1], grads[2])
            found[1:] = self._grad_kv(tokens, walk, start, opt, any(needs[1:3]))
        return [g if need else None for g, need in zip(found, needs, strict=True)]

    def _grad_q(self, tokens: Sequence[Any], walk: Walk, start: States, opt: Options) -> torch.Tensor:
        q, k, v = tokens[:3]
        dq = outputs.empty_like(q)
        switches, cut = (FULL, cut_in_time(walk)) if opt.causal else (EMIT, spread(walk, q))
        if opt.causal and cut.segments > 1:
            start, _ = self._segment_starts(k, v, cut, start, opt)
        launch(self.bwd_q, switches, cut, opt, (*tokens, dq), start)
        return dq

    def _grad_kv(
        self, tokens: Sequence[Any], walk: Walk, start: States, opt: Options, emit: bool
    ) -> tuple[Any, Any, Any, Any]:
        """dk, dv and the gradient of the initial state, from that of the final state."""
        k, v = tokens[1:3]
        dk, dv = (outputs.empty_like(x) if emit else None for x in (k, v))
        cut = cut_in_time(walk)
        if opt.causal and cut.segments == 1:
            end = _empty_states(walk, k, walk.N)
            switches = FULL if emit else CARRY
            launch(self.bwd_kv, switches, walk, opt, (*tokens, dk, dv), start, end)
            return dk, dv, end.kv, end.z
        parts = _empty_states(walk, k, walk.N * cut.segments)
        launch(self.bwd_kv, CARRY, cut, opt, (*tokens, None, None), NO_STATES, parts)
        starts, end = _prefix(parts, start, cut, reverse=True)
        if emit and opt.causal:
            launch(self.bwd_kv, FULL, cut, opt, (*tokens, dk, dv), starts)
        elif emit:
            launch(self.bwd_kv, EMIT, spread(walk, k), opt, (*tokens, dk, dv), end)
        return dk, dv, end.kv, end.z


def _prefix(parts: States, initial: States, cut: Walk, reverse: bool = False) -> tuple[States, States]:
    """Segment sums [N * G, ...] -> the state each segment starts from, and the state after all of them.

    reverse: a backward pass starts from the last segment.
    """
    starts, ends = [], []
    pairs: Any = ((parts.kv, initial.kv), (parts.z, initial.z))
    for part, first in pairs:
        part = part.view(cut.N, cut.segments, *part.shape[1:])
        if reverse:
            part = part.flip(1)
        first = torch.zeros_like(part[:, 0]) if first is None else first
        sums = torch.cat([first.unsqueeze(1), part], 1).cumsum(1)
        start = sums[:, :-1].flip(1) if reverse else sums[:, :-1]
        starts.append(start.reshape(-1, *part.shape[2:]).contiguous())
        ends.append(sums[:, -1].contiguous())
    return States(*starts), States(*ends)


class CpuDecode:
    """The binary and jit backends of linear_attention_decode on the CPU."""

    def __init__(self, binaries: Mapping[str, CpuBinary]):
        self.decode = binaries[kernels.DECODE.name]

    def __call__(self, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Any:
        """q [B, H, K] or [B, n, H, K]; kv [P, HV, K, V] and z [P, H, K] change in place."""
        if slots is not None:
            slots = slots.to(torch.int64).contiguous()
        fixed = self._in_place(q, k, v, kv, z, opt, out)
        if fixed is None:
            return step_on_copies(self, (q, k, v), (kv, z), slots, opt, out)
        rows = 0 if slots is None else slots.data_ptr()
        addresses = self.decode.addresses(
            0, rows, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), kv.data_ptr(), z.data_ptr()
        )
        self.decode(addresses + fixed)
        return out

    def call(self, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py.

        Not with slots: their values are checked in each call.
        """
        fixed = self._in_place(q, k, v, kv, z, opt, out) if slots is None else None
        if fixed is None:
            return None
        block = self.decode.addresses(*[0] * 8) + fixed
        arguments = step_arguments(q, k, v, kv, z, None, out)
        return launched(self.decode, block, arguments, "cpu", [threads_as_now()])

    def _in_place(self, q: Any, k: Any, v: Any, kv: Any, z: Any, opt: Options, out: Any) -> bytes | None:
        """The fixed words of a call, or None where the kernel cannot work on the tensors where they are."""
        strides = (q.stride(), k.stride(), v.stride(), out.stride(), kv.stride(), z.stride())
        key = (q.shape, v.shape, opt, strides, torch.get_num_threads())
        fixed = self.decode.kept.get(key)
        if fixed is None:
            if not _readable(kv, z, (q, k, v, out)):
                return None
            fixed = self._fixed(q, v, opt, strides)
            keep(self.decode, key, fixed)
        if q.is_neg() or k.is_neg() or v.is_neg() or shapes.shares_memory(out, q, k, v):
            return None
        return fixed

    def _fixed(self, q: torch.Tensor, v: torch.Tensor, opt: Options, strides: Sequence[tuple[int, ...]]) -> bytes:
        B, n, H, K = q.shape if q.ndim == 4 else (q.shape[0], 1, *q.shape[1:])
        HV, V = v.shape[-2:]
        # bound by bytes: a multiply-add here costs several of a chunk's
        sizes = (B, n, H, HV // H, K, V, 1, 0, threads_for(4 * B * n * HV * K * V))
        words = [w for s in strides[:4] for w in token_words(s, q.ndim == 3)]
        return self.decode.fixed(*sizes, *_option_words(opt), *words, *strides[4][:2], *strides[5][:2])


def _readable(kv: torch.Tensor, z: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the last dimension of all is contiguous, and a head's kv is; the stride of a single element is any."""
    last = all(x.stride(-1) == 1 or x.shape[-1] < 2 for x in (*tensors, kv, z))
    return last and (kv.stride(-2) == kv.shape[-1] or kv.shape[-2] < 2)
