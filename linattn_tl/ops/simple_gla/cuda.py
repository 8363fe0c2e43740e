"""Scalar-gated linear attention through compiled CUDA kernels: which kernel runs over which tokens.

A pass is one launch whose programs walk whole sequences. Where sequences, heads and blocks of the state leave
multiprocessors idle and sequences are long, they are cut into spans: what each adds to the state and what it leaves of
it (`carry`), the state before each (`scan`), then the pass itself over all spans at once.

Kernels write gradients of q and k for each value head; a group's sum is taken here, in an order that does not change.
No kernel is launched without tokens. Tensors are handed over contiguous and 16-byte aligned; others are copied first.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from autotune.launcher.repeat import Argument, Call
from linattn_tl import outputs
from linattn_tl.aligned import group_sums, indices, plain, ready
from linattn_tl.ops.simple_gla.definition import Options
from linattn_tl.spans import SpanRunner, Walk, chunk_states, count, new_states, unchanged
from linattn_tl.steps import PooledStep

FAMILY = "simple_gla"
State = torch.Tensor | None


def option_numbers(opt: Options | None) -> dict[str, float]:
    """What kernels are told of the options, by the names of their arguments; a scan is told nothing."""
    return {} if opt is None else {"scale": opt.scale}


class Tokens(NamedTuple):
    """What backward kernels read, made plain: [B, T, ...], g in fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    dout: torch.Tensor
    cu: torch.Tensor | None


class Crossing(NamedTuple):
    """What walks forward leave for those from the end: c [B, T, HV] of backward_q, and the state before each chunk.

    Both for the gradient of g; `backward` reads states alone, which forward has left, whatever it is asked for.
    """

    c: torch.Tensor | None = None
    states: torch.Tensor | None = None


NOTHING = Crossing()


def _gate_sizes(x: torch.Tensor | None, states: torch.Tensor | None) -> dict[str, int]:
    """Of a launch that makes c or dg, x [B, T, HV, blocks], or neither."""
    rows = 0 if x is None else x.shape[0] * x.shape[1]
    return {"rows": rows, "chunks": count(states), "gated": int(x is not None)}


class CudaRunner(SpanRunner):
    """The compiled backends of simple_gla on NVIDIA GPUs.

    Of its kernels backward_kv is there, or both backward_k and backward_v; a trial of one kernel needs no other than
    those that a call of it launches. Where `backward` is there, forward keeps the states that it starts from; without
    them (see linattn_tl/apply.py) the others do its work.
    """

    op = FAMILY

    def option_numbers(self, opt: Options | None) -> dict[str, float]:
        return option_numbers(opt)

    # ---- forward

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, final state or None), and for `backward` the state before each of its chunks."""
        q, k, v, g = map(plain, inputs[:4])
        start, cu = None if inputs[4] is None else plain(inputs[4]), indices(lengths)
        walk = self._walk("forward", q, v, cu)
        o = torch.empty_like(v)
        if walk.empty:
            return (o, unchanged(start, walk, q) if opt.output_final_state else None), ()
        final = left = new_states(walk.sequences, walk, q) if opt.output_final_state else None
        if walk.cut:
            start, left = self._states_before(k, v, g, cu, walk, start, final, opt), None
        states = chunk_states(walk, self.keeps, q, self.tile(q, v)) if keep and self.keeps else None
        packed = self._forward_numbers(walk, start, left, states, opt)
        self.binaries["forward"].launch(packed, (q, k, v, g, o, start, left, states, cu))
        return (o, final), () if states is None else (states,)

    @cached_property
    def keeps(self) -> int:
        """Tokens of a chunk of `backward`, whose states forward can leave; or 0."""
        C = self.binaries["backward"].config.C if "backward" in self.binaries else 0
        return 0 if C % self.binaries["forward"].config.C else C

    def _forward_numbers(self, walk: Walk, start: State, left: State, states: State, opt: Options) -> Any:
        N0, N1, chunks = count(start), count(left), count(states)
        sizes = {"tokens": walk.tokens, "N0": N0, "N1": N1, "initial": int(N0 > 0), "final": int(N1 > 0)}
        return self._packed("forward", walk, opt, **sizes, chunks=chunks, keeps=self.keeps if chunks else 0)

    def call(self, inputs: Sequence[Any], opt: Options, results: Sequence[Any]) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py. Where it is one launch: not cut into spans."""
        q, k, v, g, start = inputs
        o, final = results
        walk = self._walk("forward", q, v, None)
        if walk.empty or walk.cut or not all(map(ready, (q, k, v, g))) or not (start is None or ready(start)):
            return None
        tensors = [*(Argument(x, i) for i, x in enumerate((q, k, v, g))), Argument(start, 5)]
        tensors += [Argument(x, w, outputs.maker(x), returned=True) for x, w in ((o, 4), (final, 6)) if x is not None]
        return self.binaries["forward"].call(self._forward_numbers(walk, start, final, None, opt), tensors)

    def _states_before(
        self, x: Any, y: Any, g: Any, cu: Any, walk: Walk, start: State, end: State, opt: Options, reverse: bool = False
    ) -> torch.Tensor:
        """The state before each span, from k and v; reverse, its gradient behind each, from q and dO.

        Fills `end`, that of whole sequences, where there is one to fill.
        """
        spans = new_states(walk.spans, walk, x)
        decay = torch.empty(walk.spans, walk.HV, dtype=torch.float32, device=x.device)
        self._carry((x, y, g), cu, walk, None, spans, decay, opt, reverse)
        N0, N1 = count(start), count(end)
        self._launch(
            "scan", walk, None, (spans, decay, start, end, cu),
            S=walk.spans, N0=N0, N1=N1, initial=int(N0 > 0), final=int(N1 > 0), reverse=int(reverse),
        )  # fmt: skip
        return spans

    def _carry(
        self, tokens: Any, cu: Any, walk: Walk, start: State, end: Any, decay: Any, opt: Options, reverse: bool
    ) -> None:
        N0 = count(start)
        self._launch(
            "carry", walk, opt, (*tokens, start, end, decay, cu),
            tokens=walk.tokens, N0=N0, N1=count(end), initial=int(N0 > 0), reverse=int(reverse),
        )  # fmt: skip

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
        q, k, v, g = map(plain, inputs[:4])
        initial, dout, dfinal = (None if x is None else plain(x) for x in (inputs[4], *grads))
        x = Tokens(q, k, v, g, torch.zeros_like(v) if dout is None else dout, indices(lengths))
        found: list[Any] = [None] * 5
        if saved and (needs[3] or (needs[0] and any(needs[1:3]))):  # for fewer gradients the others move less
            found = self.grad_back(("backward",), x, dfinal, Crossing(None, saved[0]), needs, opt)
        else:
            found = self._grads_in_two(x, initial, dfinal, needs, opt)
        heads = v.shape[2] // max(q.shape[2], 1)
        for i in (0, 1):
            found[i] = None if found[i] is None else group_sums(found[i], heads, 2)
        return [grad if need else None for grad, need in zip(found, needs, strict=True)]

    def _grads_in_two(self, x: Tokens, start: State, final: State, needs: Sequence[bool], opt: Options) -> list[Any]:
        """As grad_back, from a walk forward, which makes dq and what the gradient of g needs, and one from the end."""
        dq, crossing, found = None, NOTHING, [None] * 5
        if needs[0] or needs[3]:
            if needs[3]:
                crossing = self.new_crossing(x)
            dq, crossing = self.grad_q(x, start, crossing, opt)
        if any(needs[1:]):
            names = self._names_back(needs[1] or needs[3], needs[2])
            found = self.grad_back(names, x, final, crossing, needs, opt)
        return [dq, *found[1:]]

    def new_crossing(self, x: Tokens) -> Crossing:
        """Memory that backward_q is to fill; c with a column for each of its blocks of K."""
        walk, C = self._walk("backward_q", x.q, x.v, x.cu), self.binaries["backward_q"].config.C
        states = chunk_states(walk, C, x.q, self.tile(x.q, x.v))
        return Crossing(self._new_gates(x, "backward_q"), states)

    def _new_gates(self, x: Tokens, name: str) -> torch.Tensor:
        """A number for each token and head, with a column for each block of K that a kernel has programs for."""
        blocks = -(-x.k.shape[3] // self.binaries[name].config.BK)
        return torch.empty(*x.v.shape[:3], blocks, dtype=torch.float32, device=x.k.device)

    def grad_q(self, x: Tokens, start: State, crossing: Crossing, opt: Options) -> tuple[torch.Tensor, Crossing]:
        """The gradient of q for each value head, and crossing, filled where there is something to fill."""
        walk = self._walk("backward_q", x.q, x.v, x.cu)
        dq = _of_value_heads(x.q, x.v)
        if walk.empty:
            return dq, Crossing(None if crossing.c is None else crossing.c.sum(-1), crossing.states)
        if walk.cut:
            start = self._states_before(x.k, x.v, x.g, x.cu, walk, start, None, opt)
        tensors = (*x[:5], dq, *crossing, start, x.cu)
        N0 = count(start)
        sizes = {"tokens": walk.tokens, "N0": N0, "initial": int(N0 > 0)}
        self._launch("backward_q", walk, opt, tensors, **sizes, **_gate_sizes(*crossing))
        return dq, Crossing(None if crossing.c is None else _block_sums(crossing.c), crossing.states)

    def grad_back(
        self, names: Sequence[str], x: Tokens, final: State, crossing: Crossing, needs: Sequence[bool], opt: Options
    ) -> list[Any]:
        """What kernels that walk from the end make, from the gradient of the final state.

        dq (of `backward` alone) and dk for each value head, dv, dg and the gradient of the initial state.
        """
        walk = self._walk(names[0], x.k, x.v, x.cu)
        dk, dv = _of_value_heads(x.k, x.v), torch.empty_like(x.v)
        dq = _of_value_heads(x.q, x.v) if "backward" in names else None
        dg = self._new_gates(x, names[0]) if needs[3] else None
        if walk.empty:
            return [dq, dk, dv, None if dg is None else dg.sum(-1), unchanged(final, walk, x.q)]
        end = left = new_states(walk.sequences, walk, x.q) if needs[4] else None
        if walk.cut:
            final, left = self._states_before(x.q, x.dout, x.g, x.cu, walk, final, end, opt, reverse=True), None
        elif left is not None and names[0] in ("backward_v", "carry"):  # alone, backward_v leaves no state
            decay = torch.empty(walk.spans, walk.HV, dtype=torch.float32, device=x.q.device)
            self._carry((x.q, x.dout, x.g), x.cu, walk, final, left, decay, opt, reverse=True)
            left = None
        for name in names:
            if name != "carry":
                self._launch_back(name, walk, x, crossing, (dq, dk, dv, dg), final, left, opt)
                left = None
        return [dq, dk, dv, None if dg is None else _block_sums(dg), end]

    def _names_back(self, wants_k: bool, wants_v: bool) -> tuple[str, ...]:
        """The kernels that make what is wanted: one for both dk and dv where it exists."""
        wanted = (("backward_k", wants_k), ("backward_v", wants_v))
        names = tuple(name for name, want in wanted if want) or ("carry",)
        if not self.binaries.keys() >= set(names) or ("backward_kv" in self.binaries and len(names) == 2):
            return ("backward_kv",)
        return names

    def _launch_back(
        self, name: str, walk: Walk, x: Tokens, crossing: Crossing, grads: Any, final: State, left: State, opt: Options
    ) -> None:
        tensors = (*x[:5], *crossing, *grads, final, left, x.cu)
        N0, N1 = count(left), count(final)
        sizes = {"tokens": walk.tokens, "N0": N0, "N1": N1, "final": int(N1 > 0), "initial": int(N0 > 0)}
        self._launch(name, walk, opt, tensors, **sizes, **_gate_sizes(grads[3], crossing.states))


def _of_value_heads(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Memory for x with a row for each value head."""
    return torch.empty(*v.shape[:3], x.shape[3], dtype=x.dtype, device=x.device)


def _block_sums(x: torch.Tensor) -> torch.Tensor:
    """[..., blocks] -> [...]"""
    return x.squeeze(-1) if x.shape[-1] == 1 else x.sum(-1)


class CudaDecode(PooledStep):
    """The compiled backends of simple_gla_decode on NVIDIA GPUs, for one K and V.

    A slot that names no row of the pool makes o NaN, see tl_kernels/simple_gla/cuda_decode.py.
    """

    op = FAMILY
    pool_names = ("kv",)

    def option_numbers(self, opt: Options) -> dict[str, float]:
        return option_numbers(opt)

    def __call__(self, q: Any, k: Any, v: Any, g: Any, state: Any, slots: Any, opt: Options, out: Any) -> Any:
        """q [B, H, K] or [B, n, H, K]; state [P, HV, K, V] changes in place, a view of a larger one too."""
        return self._step((q, k, v, g), (state,), slots, opt, out)

    def call(self, q: Any, k: Any, v: Any, g: Any, state: Any, slots: Any, opt: Options, out: Any) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py."""
        packed = self._repeatable((q, k, v, g), (state,), slots, opt, out)
        if packed is None:
            return None
        tensors = [
            *(Argument(x, i) for i, x in enumerate((q, k, v, g))),
            Argument(state, 5, changed=True),
            Argument(slots, 6),
            Argument(out, 4, outputs.maker(out), apart=True, changed=True, returned=True),
        ]
        return self.decode.call(packed, tensors)
