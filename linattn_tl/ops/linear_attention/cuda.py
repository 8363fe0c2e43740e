"""Linear attention through compiled CUDA kernels: which kernel runs over which tokens, with which switches.

A causal pass is one launch whose programs walk whole sequences. Where sequences, heads and blocks of the state leave
multiprocessors idle and sequences are long, they are cut into spans: the state of each span (`carry`), the state before
each (`scan`), then the pass itself over all spans at once. A non-causal pass carries the state over all keys and emits
for all queries.

Kernels write gradients of q and k, and of the initial z, for each value head; a group's sum is taken here, in an order
that does not change. No kernel is launched without tokens. Tensors are handed over contiguous and 16-byte aligned;
others are copied first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autotune.launcher import remember
from autotune.launcher.repeat import Call
from linattn_tl.aligned import group_sums, indices, plain, ready
from linattn_tl.ops.linear_attention.again import pass_arguments, step_arguments
from linattn_tl.ops.linear_attention.definition import FEATURE_MAP_CODES, Options
from linattn_tl.spans import Plan, SpanRunner, Walk
from linattn_tl.steps import PooledStep

FAMILY = "linear_attention"


def option_numbers(opt: Options | None) -> dict[str, float]:
    """What kernels are told of the options, by the names of their arguments; a scan is told nothing."""
    if opt is None:
        return {}
    return {
        "feature_map": FEATURE_MAP_CODES[opt.feature_map],
        "normalize": int(opt.normalize),
        "scale": opt.scale,
        "eps": opt.eps,
    }


# ---- tensors


class States(NamedTuple):
    """kv [n, HV, K, V] and z [n, H, K], or gradients with z [n, HV, K]; contiguous fp32. Both or neither."""

    kv: torch.Tensor | None = None
    z: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return 0 if self.kv is None else self.kv.shape[0]


NO_STATES = States()


def _new_states(count: int, q: torch.Tensor, v: torch.Tensor, z_heads: int) -> States:
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    return States(
        torch.empty(count, HV, K, V, dtype=torch.float32, device=q.device),
        torch.empty(count, z_heads, K, dtype=torch.float32, device=q.device),
    )


def _given(kv: torch.Tensor | None, z: torch.Tensor | None, count: int, q: torch.Tensor, v: torch.Tensor) -> States:
    """States that were handed in, zeros for one that is missing."""
    if kv is None and z is None:
        return NO_STATES
    if kv is None:
        kv = torch.zeros(count, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32, device=q.device)
    if z is None:
        z = torch.zeros(count, q.shape[2], q.shape[3], dtype=torch.float32, device=q.device)
    return States(plain(kv), plain(z))


def _unchanged(start: States, count: int, q: torch.Tensor, v: torch.Tensor, z_heads: int) -> States:
    """What a walk without tokens ends with: the initial states, in memory of their own, or zeros."""
    if start.kv is None or start.z is None:
        return States(*(x.zero_() for x in _new_states(count, q, v, z_heads) if x is not None))
    return States(start.kv.clone(), start.z.clone())


def _by_value_head(z: torch.Tensor, heads: int) -> torch.Tensor:
    """[N, H, K] -> [N, HV, K] whose sum over a group is z."""
    if heads == 1:
        return z
    spread = torch.zeros(z.shape[0], z.shape[1], heads, z.shape[2], dtype=z.dtype, device=z.device)
    spread[:, :, 0] = z
    return spread.flatten(1, 2)


class _Tokens(NamedTuple):
    """What backward kernels read, made plain: [B, T, ...], k and v [B, T_k, ...]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    dout: torch.Tensor
    den: torch.Tensor | None  # missing where there are no queries
    delta: torch.Tensor  # [B, T, HV] fp32, rowsum(dO * O) / -den
    cu: torch.Tensor | None

    @property
    def sizes(self) -> dict[str, int]:
        return {"tokens": self.q.shape[0] * self.q.shape[1], "keys": self.k.shape[0] * self.k.shape[1]}


# ---- the runners


class CudaRunner(SpanRunner):
    """The compiled backends of linear_attention on NVIDIA GPUs.

    Of its kernels backward_kv is there, or both backward_k and backward_v; a trial of one kernel needs no other than
    those that a call of it launches.
    """

    op = FAMILY

    def option_numbers(self, opt: Options | None) -> dict[str, float]:
        return option_numbers(opt)

    # ---- forward

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, kv, z), and for backward den and, of a non-causal call that does not return it, the state of all keys.

        keep=False: there will be no backward, and den is None.
        """
        q, k, v, kv, z = inputs
        if opt.causal:
            return self._forward(q, k, v, indices(lengths), kv, z, opt, keep)
        q, k, v = plain(q), plain(k), plain(v)
        cu = indices(lengths)
        o = torch.empty_like(v) if v.shape[1] == q.shape[1] else v.new_empty(*q.shape[:2], *v.shape[2:])
        den = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if keep else None
        start = _given(kv, z, q.shape[0] if cu is None else cu.shape[0] - 1, q, v)
        total = self._sum(q, k, v, cu, start, opt)
        walk = self._walk("emit", q, v, cu, carried=False)
        if not walk.empty:
            tensors = (q, o, den, *total, cu)
            rows = walk.tokens if keep else 0
            self._launch("emit", walk, opt, tensors, tokens=walk.tokens, rows=rows, N0=total.count, keep_den=int(keep))
        if opt.output_final_state:
            return (o, *total), (den, None, None)
        return (o, None, None), (den, *total)

    def _forward(self, q: Any, k: Any, v: Any, cu: Any, kv: Any, z: Any, opt: Options, keep: bool) -> tuple[Any, Any]:
        """A causal pass, as forward returns it."""
        q, k, v = plain(q), plain(k), plain(v)
        new = kv is None and z is None
        key = q.shape, v.shape, None if cu is None else cu.shape[0], new, keep, opt
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan_forward(q, v, cu, not new, opt, keep)
            remember(self._plans, key, plan)
        walk, packed = plan
        o = torch.empty_like(v)
        den = torch.empty(*q.shape[:3], dtype=torch.float32, device=q.device) if keep else None
        N, want = walk.sequences, opt.output_final_state
        start = NO_STATES if new else _given(kv, z, N, q, v)
        if walk.empty:
            final = _unchanged(start, N, q, v, walk.H) if want else NO_STATES
            return (o, *final), (den, None, None)
        final = left = _new_states(N, q, v, walk.H) if want else NO_STATES
        if walk.cut:
            start, left = self._span_states(q, k, v, cu, walk, start, final, opt), NO_STATES
        self.binaries["forward"].launch(packed, (q, k, v, o, den, *start, *left, cu))
        return (o, *final), (den, None, None)

    def _plan_forward(self, q: Any, v: Any, cu: Any, given: bool, opt: Options, keep: bool) -> Plan:
        walk = self._walk("forward", q, v, cu)
        if walk.empty:
            return walk, None
        start = walk.spans if walk.cut else walk.sequences if given else 0
        left = walk.sequences if opt.output_final_state and not walk.cut else 0
        packed = self._packed(
            "forward", walk, opt, tokens=walk.tokens, rows=walk.tokens if keep else 0, N0=start, N1=left,
            initial=int(start > 0), final=int(left > 0), keep_den=int(keep),
        )  # fmt: skip
        return walk, packed

    def call(self, inputs: Sequence[Any], opt: Options, results: Sequence[Any]) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py.

        Where it is one launch: causal, and not cut into spans.
        """
        q, k, v, kv, z = inputs
        given = [x for x in inputs if x is not None]
        if not opt.causal or (kv is None) != (z is None) or not all(map(ready, given)):
            return None
        walk, packed = self._plan_forward(q, v, None, kv is not None, opt, keep=False)
        if walk.empty or walk.cut:
            return None
        arguments = pass_arguments(inputs, results, (0, 1, 2, 3, 5, 6, 7, 8))
        return self.binaries["forward"].call(packed, arguments)

    def _sum(self, q: Any, k: Any, v: Any, cu: Any, start: States, opt: Options) -> States:
        """The state after all keys."""
        walk = self._walk("carry", k, v, cu)
        if walk.empty:
            return _unchanged(start, walk.sequences, q, v, walk.H)
        total = _new_states(walk.sequences, q, v, walk.H)
        if walk.cut:
            self._span_states(q, k, v, cu, walk, start, total, opt)
        else:
            self._carry(k, v, cu, walk, start, total, opt)
        return total

    def _carry(self, k: Any, v: Any, cu: Any, walk: Walk, start: States, end: States, opt: Options) -> None:
        self._launch(
            "carry", walk, opt, (k, v, *start, *end, cu),
            tokens=walk.tokens, N0=start.count, N1=end.count, initial=int(start.count > 0),
        )  # fmt: skip

    def _span_states(
        self, q: Any, k: Any, v: Any, cu: Any, walk: Walk, start: States, final: States, opt: Options
    ) -> States:
        """The state before each span; fills the final state of each sequence, where there is one to fill."""
        spans = _new_states(walk.spans, q, v, walk.H)
        self._carry(k, v, cu, walk, NO_STATES, spans, opt)
        self._scan(spans, cu, walk, start, final, walk.H)
        return spans

    def _scan(
        self, spans: States, cu: Any, walk: Walk, start: States, final: States, z_heads: int, reverse: bool = False
    ) -> None:
        self._launch(
            "scan", walk, None, (*spans, *start, *final, cu),
            S=spans.count, HZ=z_heads, N0=start.count, N1=final.count,
            initial=int(start.count > 0), final=int(final.count > 0), reverse=int(reverse),
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
        q, k, v = map(plain, inputs[:3])
        o, den, cu = plain(results[0]), None if saved[0] is None else plain(saved[0]), indices(lengths)
        dout = torch.zeros_like(o) if grads[0] is None else plain(grads[0])
        delta = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
        x = _Tokens(q, k, v, o, dout, den, delta, cu)
        N, heads = q.shape[0] if cu is None else cu.shape[0] - 1, v.shape[2] // max(q.shape[2], 1)
        found: list[Any] = [None] * 5
        wants_rest = any(needs[1:])
        if needs[0] or (opt.normalize and wants_rest):  # the others read delta
            kv, z = inputs[3:] if opt.causal else results[1:] if opt.output_final_state else saved[1:]
            start = _given(kv, z, N, q, v)
            dq = self._grad_q(x, start, opt)
            found[0] = group_sums(dq, heads, 2) if needs[0] else None
        if wants_rest:
            final = _given(grads[1], grads[2], N, q, v)
            if final.z is not None:
                final = States(final.kv, plain(_by_value_head(final.z, heads)))
            found[1:] = self._grad_kv(x, final, needs[1:], heads, opt)
        return [g if need else None for g, need in zip(found, needs, strict=True)]

    def _grad_q(self, x: _Tokens, start: States, opt: Options) -> torch.Tensor:
        """The gradient of q for each value head, [B, T, HV, K]; fills delta. start: non-causal, of all keys."""
        name = "backward_q" if opt.causal else "backward_q_all"
        walk = self._walk(name, x.q, x.v, x.cu, carried=opt.causal)
        dq = torch.empty(*x.q.shape[:2], walk.HV, x.q.shape[3], dtype=x.q.dtype, device=x.q.device)
        if walk.empty:
            return dq
        if walk.cut and opt.causal:
            start = self._span_states(x.q, x.k, x.v, x.cu, walk, start, NO_STATES, opt)
        tensors = (x.q, x.k, x.v, x.o, x.dout, x.den, dq, x.delta, *start, x.cu)
        self._launch(name, walk, opt, tensors, **x.sizes, N0=start.count, initial=int(start.count > 0))
        return dq

    def _grad_kv(self, x: _Tokens, final: States, needs: Sequence[bool], heads: int, opt: Options) -> list[Any]:
        """Gradients of k, v and the initial state, from that of the final state (z for each value head)."""
        wants_k, wants_v, wants_state = needs[0], needs[1], any(needs[2:])
        B, T = x.k.shape[:2]
        dk = torch.empty(B, T, x.v.shape[2], x.k.shape[3], dtype=x.k.dtype, device=x.k.device) if wants_k else None
        dv = torch.empty_like(x.v) if wants_v else None
        if not opt.causal:
            end = self._carry_back(x, final, opt)
            if wants_k or wants_v:
                self._emit_back(x, end, dk, dv, opt)
        elif not (wants_k or wants_v):
            end = self._carry_back(x, final, opt)
        else:
            end = self._walk_back(x, final, dk, dv, wants_state, opt)
        dz = None if end.z is None else group_sums(end.z, heads, 1)
        return [None if dk is None else group_sums(dk, heads, 2), dv, end.kv, dz]

    def _walk_back(self, x: _Tokens, final: States, dk: Any, dv: Any, wants_state: bool, opt: Options) -> States:
        """Fills dk and dv; the gradient of the initial state."""
        names = self._names_back(dk, dv)
        walk = self._walk(names[0], x.k, x.v, x.cu)
        N, HV = walk.sequences, walk.HV
        if walk.empty:
            return _unchanged(final, N, x.q, x.v, HV)
        end = _new_states(N, x.q, x.v, HV) if wants_state else NO_STATES
        left = end
        if walk.cut:
            spans = _new_states(walk.spans, x.q, x.v, HV)
            self._launch_back("backward_carry", walk, x, None, None, NO_STATES, spans, opt)
            self._scan(spans, x.cu, walk, final, end, HV, reverse=True)
            final, left = spans, NO_STATES
        if names[0] == "backward_kv":  # it writes both, whoever asked
            dk = torch.empty(*x.k.shape[:2], HV, x.k.shape[3], dtype=x.k.dtype, device=x.k.device) if dk is None else dk
            dv = torch.empty_like(x.v) if dv is None else dv
        for name in names:
            self._launch_back(name, walk, x, dk, dv, final, NO_STATES if name == "backward_v" else left, opt)
        if names == ("backward_v",) and left.count:  # which alone leaves no state
            self._launch_back("backward_carry", walk, x, None, None, final, left, opt)
        return end

    def _names_back(self, dk: Any, dv: Any) -> tuple[str, ...]:
        """The kernels that make the wanted ones of dk and dv: one for both where it exists."""
        names = tuple(name for name, x in (("backward_k", dk), ("backward_v", dv)) if x is not None)
        split = self.binaries.keys() >= set(names)
        return names if split and (len(names) == 1 or "backward_kv" not in self.binaries) else ("backward_kv",)

    def _carry_back(self, x: _Tokens, final: States, opt: Options) -> States:
        """The gradient of the initial state; non-causal, that of the state of all keys, which is the same."""
        walk = self._walk("backward_carry", x.q, x.v, x.cu)
        N, HV = walk.sequences, walk.HV
        if walk.empty:
            return _unchanged(final, N, x.q, x.v, HV)
        end = _new_states(N, x.q, x.v, HV)
        if not walk.cut:
            self._launch_back("backward_carry", walk, x, None, None, final, end, opt)
            return end
        spans = _new_states(walk.spans, x.q, x.v, HV)
        self._launch_back("backward_carry", walk, x, None, None, NO_STATES, spans, opt)
        self._scan(spans, x.cu, walk, final, end, HV, reverse=True)
        return end

    def _emit_back(self, x: _Tokens, end: States, dk: Any, dv: Any, opt: Options) -> None:
        """Fills dk and dv of a non-causal pass from the gradient of the state of all keys."""
        for name, wanted in (("backward_k_all", dk), ("backward_v_all", dv)):
            walk = self._walk(name, x.k, x.v, x.cu, carried=False)
            if wanted is not None and not walk.empty:
                self._launch_back(name, walk, x, dk, dv, end, NO_STATES, opt)

    def _launch_back(
        self, name: str, walk: Walk, x: _Tokens, dk: Any, dv: Any, final: States, initial: States, opt: Options
    ) -> None:
        tensors = (x.q, x.k, x.v, x.dout, x.den, x.delta, dk, dv, *final, *initial, x.cu)
        self._launch(
            name, walk, opt, tensors, **x.sizes,
            N0=initial.count, N1=final.count, final=int(final.count > 0), initial=int(initial.count > 0),
        )  # fmt: skip


class CudaDecode(PooledStep):
    """The compiled backends of linear_attention_decode on NVIDIA GPUs, for one K and V.

    A slot that names no row of the pools makes o NaN, see tl_kernels/linear_attention/cuda_decode.py.
    """

    op, pool_names = FAMILY, ("kv", "z")

    def option_numbers(self, opt: Options) -> dict[str, float]:
        return option_numbers(opt)

    def __call__(self, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Any:
        """q [B, H, K] or [B, n, H, K]; kv [P, HV, K, V] and z [P, H, K] change in place, views of larger ones too."""
        return self._step((q, k, v), (kv, z), slots, opt, out)

    def call(self, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py."""
        packed = self._repeatable((q, k, v), (kv, z), slots, opt, out)
        if packed is None:
            return None
        return self.decode.call(packed, step_arguments(q, k, v, kv, z, slots, out))
