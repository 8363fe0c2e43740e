"""Linear attention through compiled CUDA kernels: which kernel runs over which tokens, with which switches.

A causal pass is one launch whose programs walk whole sequences. Where sequences, heads and blocks of the state leave
multiprocessors idle and sequences are long, they are cut into spans: the state of each span (`carry`), the state before
each (`scan`), then the pass itself over all spans at once. A non-causal pass carries the state over all keys and emits
for all queries.

Kernels write gradients of q and k, and of the initial z, for each value head; a group's sum is taken here, in an order
that does not change. No kernel is launched without tokens. Tensors are handed over contiguous and 16-byte aligned;
others are copied first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autotune.launcher import KEPT
from autotune.launcher import keep as keep_packed
from autotune.launcher.repeat import Call
from linattn_tl import shapes
from linattn_tl.launchers import ALIGNMENT, Launcher
from linattn_tl.ops.linear_attention.again import pass_arguments, step_arguments
from linattn_tl.ops.linear_attention.definition import FEATURE_MAP_CODES, Options
from linattn_tl.registry import UnsupportedError
from tl_kernels.spec import DTYPES, MAX_HEAD_DIM, Problem

MULTIPLE = 16  # of K and V
MAX_GRID_X, MAX_GRID_Y = 2**31 - 1, 65535  # CUDA C++ Programming Guide, "Technical Specifications"
SPAN_MULTIPLE = 64  # tokens; the largest chunk of a kernel, so that none but the last of a sequence is ragged
# A carried span's state is written, scanned and read, which costs as much memory traffic as some 250 of its tokens at
# K = V = 128. Estimates, not measurements: nobody has timed them on a GPU.
CARRIED_TOKENS = 512  # no carried span shorter than this
CARRIED_SPANS = 4  # fewer than this a sequence gain less than three launches and a second look at k and v cost
SPREAD_TOKENS = 256  # no shorter span where each reads the state of its sequence and nothing is carried
WAVES = 2  # programs a multiprocessor that a cut aims at


def refuse_sizes(problem: Problem) -> str | None:
    """Why no CUDA kernel of this family serves the problem, or None."""
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype} is not one of {', '.join(DTYPES)}"
    for name, width in (("K", problem.K), ("V", problem.V)):
        if not 0 < width <= MAX_HEAD_DIM or width % MULTIPLE:
            return f"{name}={width}; CUDA kernels take multiples of {MULTIPLE} up to {MAX_HEAD_DIM}"
    return None


# ---- spans


class Walk(NamedTuple):
    """What a kernel walks: sequences of tokens, cut into spans of `segment` tokens, and heads."""

    sequences: int
    length: int  # tokens of each sequence, or 0 where cu_seqlens tells
    tokens: int  # of all sequences
    H: int
    HV: int
    K: int
    V: int
    segment: int
    cut: bool = False  # into more than a span a sequence

    @property
    def empty(self) -> bool:
        return self.tokens == 0 or self.HV == 0

    @property
    def spans(self) -> int:
        """Packed sequences may have a few slots more than spans: see find_span in tl_kernels/cuda_macros.py."""
        if self.length:
            return self.sequences * -(-self.length // self.segment)
        return self.tokens // self.segment + self.sequences


def carried_segment(sequences: int, tokens: int, programs: int, multiprocessors: int) -> int:
    """Tokens of a span that has a state of its own, or 0 where each sequence is walked as a whole.

    Args:
        sequences, tokens: how many there are; tokens of all sequences together.
        programs: of each span: value heads times blocks of the state.
        multiprocessors: of the device.
    """
    if sequences == 0 or 2 * sequences * programs > multiprocessors:
        return 0
    segment = max(_even_segment(tokens, programs, multiprocessors), CARRIED_TOKENS)
    return segment if tokens >= sequences * segment * CARRIED_SPANS else 0


def spread_segment(tokens: int, programs: int, multiprocessors: int) -> int:
    """Tokens of a span where nothing is carried, so that a cut costs a read of the state and no more."""
    return max(_even_segment(tokens, programs, multiprocessors), SPREAD_TOKENS)


def _even_segment(tokens: int, programs: int, multiprocessors: int) -> int:
    spans = max(1, WAVES * multiprocessors // max(programs, 1))
    return -(-max(tokens, 1) // (spans * SPAN_MULTIPLE)) * SPAN_MULTIPLE


# ---- tensors


class States(NamedTuple):
    """kv [n, HV, K, V] and z [n, H, K], or gradients with z [n, HV, K]; contiguous fp32. Both or neither."""

    kv: torch.Tensor | None = None
    z: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return 0 if self.kv is None else self.kv.shape[0]


NO_STATES = States()
_Plan = tuple[Walk, Any]  # of a causal pass: its walk, and the packed numbers of its last launch


def _ready(x: torch.Tensor) -> bool:
    """Whether a kernel can read and write x where it lies."""
    return x.data_ptr() % ALIGNMENT == 0 and x.is_contiguous() and not x.is_neg()


def plain(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where a kernel could not read it."""
    if _ready(x):
        return x
    copied = x.resolve_neg().contiguous()
    return copied if _ready(copied) else copied.clone()


def _indices(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None or (x.dtype is torch.int32 and _ready(x)):
        return x
    return plain(x.to(torch.int32))


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


def _group_sums(x: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[..., HV, K] -> [..., H, K]: value heads that share a q/k head, summed."""
    return x if heads == 1 else x.unflatten(dim, (-1, heads)).sum(dim + 1)


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


class CudaRunner:
    """The compiled backends of linear_attention on NVIDIA GPUs.

    Args:
        binaries: launchers by the kernels' names. backward_kv, or both backward_k and backward_v; a trial of one kernel
            needs no other than those that a call of it launches.
        multiprocessors: of the device.
    """

    differentiable = False

    def __init__(self, binaries: Mapping[str, Launcher], multiprocessors: int):
        self.binaries: dict[str, Any] = {name.split(".")[1]: binary for name, binary in binaries.items()}
        self.multiprocessors = multiprocessors
        self._walks: dict[Any, Walk] = {}
        self._plans: dict[Any, _Plan] = {}

    # ---- forward

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, kv, z), and for backward den and, of a non-causal call that does not return it, the state of all keys.

        keep=False: there will be no backward, and den is None.
        """
        q, k, v, kv, z = inputs
        if opt.causal:
            return self._forward(q, k, v, None if lengths is None else _indices(lengths), kv, z, opt, keep)
        q, k, v = plain(q), plain(k), plain(v)
        cu = _indices(lengths)
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
            _remember(self._plans, key, plan)
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

    def _plan_forward(self, q: Any, v: Any, cu: Any, given: bool, opt: Options, keep: bool) -> _Plan:
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
        if not opt.causal or (kv is None) != (z is None) or not all(map(_ready, given)):
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
        o, den, cu = plain(results[0]), None if saved[0] is None else plain(saved[0]), _indices(lengths)
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
            found[0] = _group_sums(dq, heads, 2) if needs[0] else None
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
        dz = None if end.z is None else _group_sums(end.z, heads, 1)
        return [None if dk is None else _group_sums(dk, heads, 2), dv, end.kv, dz]

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

    # ---- launches

    def _walk(self, name: str, x: torch.Tensor, v: torch.Tensor, cu: Any, carried: bool = True) -> Walk:
        """A kernel's way over the tokens of x [B, T, H, K]."""
        key = (name, carried, x.shape, v.shape, -1 if cu is None else cu.shape[0])
        walk = self._walks.get(key)
        if walk is None:
            walk = self._new_walk(name, x, v, cu, carried)
            _remember(self._walks, key, walk)
        return walk

    def _new_walk(self, name: str, x: torch.Tensor, v: torch.Tensor, cu: Any, carried: bool) -> Walk:
        B, T, H, K = x.shape
        HV, V = v.shape[2:]
        N, tokens = (B, B * T) if cu is None else (cu.shape[0] - 1, T)
        programs, length = HV * _blocks(self.binaries[name].config, K, V), 0 if cu is not None else T
        if carried:
            segment = carried_segment(N, tokens, programs, self.multiprocessors)
        else:
            segment = spread_segment(tokens, programs, self.multiprocessors)
        if 0 < segment < (length or tokens):
            return Walk(N, length, tokens, H, HV, K, V, segment, cut=True)
        # a segment longer than all packed tokens: no sequence takes a second slot, not even an empty last one
        return Walk(N, length, tokens, H, HV, K, V, length or tokens + 1)

    def _launch(self, name: str, walk: Walk, opt: Options | None, tensors: Sequence[Any], **numbers: int) -> None:
        self.binaries[name].launch(self._packed(name, walk, opt, **numbers), tensors)

    def _packed(self, name: str, walk: Walk, opt: Options | None, **numbers: int) -> Any:
        binary = self.binaries[name]
        key = (walk, opt, *numbers.values())
        packed = binary.kept.get(key)
        if packed is None:
            blocks = _blocks(binary.config, walk.K, walk.V)
            _check_grid(name, walk.HV, max(walk.spans, walk.sequences) * blocks)
            packed = binary.pack({**_walk_numbers(walk), **_option_numbers(opt), **numbers})
            keep_packed(binary, key, packed)
        return packed


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= KEPT:
        known.clear()
    known[key] = value


def _walk_numbers(walk: Walk) -> dict[str, int]:
    return {
        "spans": walk.spans,
        "sequences": walk.sequences,
        "length": walk.length,
        "segment": walk.segment,
        "H": walk.H,
        "HV": walk.HV,
        "M": 0 if walk.length else walk.sequences + 1,
    }


def _option_numbers(opt: Options | None) -> dict[str, float]:
    if opt is None:
        return {}
    return {
        "feature_map": FEATURE_MAP_CODES[opt.feature_map],
        "normalize": int(opt.normalize),
        "scale": opt.scale,
        "eps": opt.eps,
    }


def _blocks(config: Any, K: int, V: int) -> int:
    """Programs that share a state, by the sizes of blocks that the config has."""
    if hasattr(config, "block"):
        return K * V // config.block
    return -(-K // getattr(config, "BK", K)) * -(-V // getattr(config, "BV", V))


def _check_grid(name: str, heads: int, blocks: int) -> None:
    if heads > MAX_GRID_Y or blocks > MAX_GRID_X:
        raise UnsupportedError(
            f"linear_attention: {name} would have a grid of {blocks} x {heads} (HV); expected at most "
            f"{MAX_GRID_X} x {MAX_GRID_Y}"
        )


class CudaDecode:
    """The compiled backends of linear_attention_decode on NVIDIA GPUs, for one K and V.

    A call reads no value from the device and waits for nothing, so that a graph may be captured: a slot that names no
    row of the pools makes o NaN, see tl_kernels/linear_attention/cuda_decode.py.
    """

    def __init__(self, binaries: Mapping[str, Launcher]):
        self.decode: Any = next(b for name, b in binaries.items() if name.split(".")[1] == "decode")

    def __call__(self, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Any:
        """q [B, H, K] or [B, n, H, K]; kv [P, HV, K, V] and z [P, H, K] change in place, views of larger ones too."""
        if out.numel() == 0:
            return out
        packed = self._in_place(q, k, v, kv, z, slots, opt, out)
        if packed is None:
            return self._copied(q, k, v, kv, z, slots, opt, out)
        self.decode.launch(packed, (q, k, v, out, kv, z, None if slots is None else plain(slots)))
        return out

    def call(self, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py."""
        if out.numel() == 0 or not (slots is None or _ready(slots)):
            return None
        packed = self._in_place(q, k, v, kv, z, slots, opt, out)
        if packed is None:
            return None
        return self.decode.call(packed, step_arguments(q, k, v, kv, z, slots, out))

    def _in_place(self, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Any:
        """The packed numbers, or None where the kernel cannot work on the tensors where they are."""
        if not all(map(_ready, (q, k, v, out))) or any(x.data_ptr() % ALIGNMENT or x.is_neg() for x in (kv, z)):
            return None
        if shapes.shares_memory(out, q, k, v):  # a program might read what another has written
            return None
        layout = kv.stride(), z.stride()
        key = q.shape, kv.shape, layout, None if slots is None else slots.dtype, opt  # kv's shape tells v's
        packed = self.decode.kept.get(key)
        if packed is None:
            strides = [_pool_strides(x) for x in (kv, z)]
            if None in strides:
                return None
            packed = self.decode.pack(self._numbers(q, v, kv, strides, slots, opt))
            keep_packed(self.decode, key, packed)
        return packed

    def _copied(self, q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, opt: Options, out: Any) -> Any:
        """The step with copies of what the kernel cannot read or write in place, and of out always."""
        o = torch.empty_like(out, memory_format=torch.contiguous_format)
        pool_kv, pool_z = _pool(kv), _pool(z)
        self(plain(q), plain(k), plain(v), pool_kv, pool_z, slots, opt, o)
        for mine, copy in ((kv, pool_kv), (z, pool_z), (out, o)):
            if mine is not copy:
                mine.copy_(copy)
        return out

    def _numbers(self, q: Any, v: Any, kv: Any, strides: Sequence[Any], slots: Any, opt: Options) -> dict[str, float]:
        B, n, H, K = q.shape if q.ndim == 4 else (q.shape[0], 1, *q.shape[1:])
        HV, V = v.shape[-2:]
        _check_grid("decode", HV, B * _blocks(self.decode.config, K, V))
        words = 0 if slots is None else slots.element_size() // 4  # of 32 bits, which is how the kernel reads slots
        sizes = {"B": B, "tokens": n, "H": H, "HV": HV, "P": kv.shape[0], "M": words * B}
        names = ("kv_rows", "kv_heads", "z_rows", "z_heads")
        distances = dict(zip(names, (*strides[0], *strides[1]), strict=True))
        return {**sizes, **distances, "use_slots": words, **_option_numbers(opt)}


def _pool_strides(x: torch.Tensor) -> tuple[int, int] | None:
    """How far apart rows and heads of a pool [P, heads, ...] are, or None where decode cannot work on it in place.

    It can where a head is in one piece, vectors are aligned, and no two heads overlap.
    """
    sizes, strides = x.shape[:2], list(x.stride()[:2])
    piece = x[0, 0] if x.numel() else x
    if not piece.is_contiguous():
        return None
    nearest = piece.numel()
    for i in sorted(range(2), key=strides.__getitem__):
        if sizes[i] < 2:
            strides[i] = nearest  # never used; torch may have kept anything there
        elif strides[i] < nearest or strides[i] * x.element_size() % ALIGNMENT:
            return None
        nearest = max(nearest, strides[i] * sizes[i])
    return strides[0], strides[1]


def _pool(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where decode cannot work in place."""
    in_place = x.data_ptr() % ALIGNMENT == 0 and not x.is_neg() and _pool_strides(x) is not None
    return x if in_place else plain(x)
