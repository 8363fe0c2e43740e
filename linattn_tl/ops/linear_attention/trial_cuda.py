"""How one CUDA kernel of this family is tried: the check against the float64 definition, and what to time.

A kernel is launched alone, through a Launcher: on a GPU, or under the emulator before a binary is stored. What other
kernels of the pass would hand it (states of spans, den, delta, o) comes from the definition, token by token in float64,
rounded once to the type of the tensor. Each value head has gradients of its own, as the kernels leave them.

Around every tensor lie guards, see linattn_tl/guarded.py.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from linattn_tl.guarded import Device, Step, Tensors, Trial, check_step, in_slots, one_thread, try_cases, watched
from linattn_tl.launchers import Launcher
from linattn_tl.ops.linear_attention.cuda import CudaDecode, option_numbers
from linattn_tl.ops.linear_attention.definition import Options, decode, recurrent
from linattn_tl.spans import Span, Walk, spans_of, walk_numbers
from linattn_tl.workloads import BATCH, DECODE_BATCH, HEADS, TOKENS, Work, Workload, of_launch, timed, timed_walk
from tl_kernels.spec import Kernel, Problem

SEGMENT = 64  # tokens a span: the shortest one there is, one chunk of the kernels with the largest
DEFAULTS = Options()
IO = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")  # in the problem's dtype; all others are fp32

# Each kernel's tensors in order. kv0 and z0 are the state before the first token, kv1 and z1 that behind the last one,
# kv and z those of spans; with a d in front, gradients.
_BACKWARD_Q = ("q", "k", "v", "o", "dout", "den", "dq", "delta", "kv0", "z0", "cu_seqlens")
_BACKWARD_KV = ("q", "k", "v", "dout", "den", "delta", "dk", "dv", "dkv1", "dz1", "dkv0", "dz0", "cu_seqlens")
TENSORS = {
    "forward": ("q", "k", "v", "o", "den", "kv0", "z0", "kv1", "z1", "cu_seqlens"),
    "carry": ("k", "v", "kv0", "z0", "kv1", "z1", "cu_seqlens"),
    "scan": ("kv", "z", "kv0", "z0", "kv1", "z1", "cu_seqlens"),
    "emit": ("q", "o", "den", "kv0", "z0", "cu_seqlens"),
    "backward_q": _BACKWARD_Q,
    "backward_q_all": _BACKWARD_Q,
    "backward_kv": _BACKWARD_KV,
    "backward_k": _BACKWARD_KV,
    "backward_v": _BACKWARD_KV,
    "backward_carry": _BACKWARD_KV,
    "backward_k_all": _BACKWARD_KV,
    "backward_v_all": _BACKWARD_KV,
}
OVER_KEYS = ("backward_k_all", "backward_v_all")  # these walk the keys where there are not as many as queries
WRITE_DK = ("backward_kv", "backward_k", "backward_k_all")
WRITE_DV = ("backward_kv", "backward_v", "backward_v_all")


# ---- cases


@dataclass(frozen=True)
class Case:
    """Sizes, options, and which of a kernel's optional tensors are there."""

    tokens: tuple[int, ...]  # of each sequence; all the same unless packed
    packed: bool = False
    H: int = 1
    heads: int = 1  # value heads of a q/k head
    options: Options = DEFAULTS
    state: bool = False  # there is an initial state; backward, its gradient is wanted
    final: bool = False  # the final state is wanted; backward, there is a gradient of it
    keep_den: bool = False
    segment: int = 0  # tokens a span, or 0 where sequences are walked as a whole
    keys: tuple[int, ...] = ()  # of each sequence, where they are not as many as the queries

    def bounds(self, over_keys: bool = False) -> list[int]:
        return list(accumulate(self.keys if over_keys and self.keys else self.tokens, initial=0))

    def walk(self, p: Problem, over_keys: bool = False) -> Walk:
        bounds = self.bounds(over_keys)
        length = 0 if self.packed else bounds[1]
        segment = self.segment or length or bounds[-1] + 1
        H, HV = self.H, self.H * self.heads
        return Walk(len(bounds) - 1, length, bounds[-1], H, HV, p.K, p.V, segment, cut=self.segment > 0)


CASES = (
    Case((70, 70), H=2, options=Options(scale=0.5)),
    Case((1,), H=2, heads=2, options=Options("relu", eps=1e-2), state=True, final=True, keep_den=True),
    Case((5, 0, 64, 33), True, heads=2, options=Options("identity", normalize=False, scale=0.3), final=True),
    Case((0, 130, 0, 20), True, 1, 2, Options(scale=0.7), state=True, final=True, keep_den=True, segment=SEGMENT),
)
SCAN_CASES = (replace(CASES[0], segment=SEGMENT), replace(CASES[1], segment=SEGMENT), CASES[3])
NONCAUSAL = ("emit", "backward_q_all", "backward_k_all", "backward_v_all")
NONCAUSAL_CASES = tuple(
    replace(case, options=case.options._replace(causal=False), keys=(33, 33) if case is CASES[0] else ())
    for case in CASES
)


def cases_of(stage: str) -> tuple[Case, ...]:
    if stage == "scan":
        return SCAN_CASES
    return NONCAUSAL_CASES if stage in NONCAUSAL else CASES


# ---- the truth


class State(NamedTuple):
    """kv [n, HV, K, V] and z [n, H or HV, K], of n sequences or spans."""

    kv: torch.Tensor
    z: torch.Tensor


@dataclass(frozen=True)
class Solved:
    """A case's inputs, and all that kernels make of them in float64. Rows are tokens, sequences, or slots of spans.

    Gradients, and z among them, have a row for each value head. Slots that no span takes are NaN.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    o: torch.Tensor
    den: torch.Tensor
    delta: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    start: State
    final: State
    dstart: State  # non-causal also of the state that queries see: the initial one and a sum over keys
    dfinal: State  # what comes in, without what o adds
    sums: State  # what each span adds to the state; this and the next three are of causal cases
    before: State  # each span
    dsums: State  # what each span adds to the gradient of the state
    behind: State  # each span, the gradient of the state


@lru_cache(maxsize=8)
def _solved(case: Case, p: Problem) -> Solved:
    """Computed once in a process that checks many candidates."""
    with one_thread():
        return _solve(case, p)


def _solve(case: Case, p: Problem) -> Solved:
    g = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))
    io, walk = getattr(torch, p.dtype), case.walk(p)
    T, keys, N, H, HV, K, V = walk.tokens, case.bounds(True)[-1], walk.sequences, walk.H, walk.HV, p.K, p.V
    new = lambda *size: torch.randn(*size, generator=g)  # noqa: E731
    q, k, v, dout = (new(*size).to(io) for size in ((T, H, K), (keys, H, K), (keys, HV, V), (T, HV, V)))
    start = State(new(N, HV, K, V) * case.state, new(N, H, K).abs() * 3 * case.state)
    dfinal = State(new(N, HV, K, V) * case.final, new(N, HV, K) * case.final)

    # each value head with a q, k and z of its own, which then have gradients of their own
    leaves = [x.double().repeat_interleave(HV // x.shape[1], 1).requires_grad_() for x in (q, k, v, *start)]
    spans = list(spans_of(walk, case.bounds()))
    o, den, before, after, final = (_causal if case.options.causal else _noncausal)(case, leaves, spans)
    loss = (o * dout.double()).sum() + (final.kv * dfinal.kv.double()).sum() + (final.z * dfinal.z.double()).sum()
    wanted = [*leaves, *(x for state in after for x in state)]
    dq, dk, dv, dkv, dz, *inner = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    dstart, behind = State(dkv, dz), [State(*pair) for pair in zip(inner[::2], inner[1::2], strict=True)]
    sums = [_minus(b, a) for a, b in zip(before, after, strict=True)]

    o, den = o.detach(), den.detach()
    return Solved(
        q=q, k=k, v=v, dout=dout, o=o, den=den[:, :: case.heads],
        delta=_delta(o, den, dout.double(), case.options), dq=dq, dk=dk, dv=dv,
        start=start, final=_narrow(final, case.heads), dstart=dstart, dfinal=dfinal,
        sums=_narrow(_in_slots(walk, spans, sums), case.heads),
        before=_narrow(_in_slots(walk, spans, before), case.heads),
        dsums=_in_slots(walk, spans, _own_gradients(spans, behind, dstart)),
        behind=_in_slots(walk, spans, behind),
    )  # fmt: skip


def _delta(o: torch.Tensor, den: torch.Tensor, dout: torch.Tensor, opt: Options) -> torch.Tensor:
    """The gradient of den."""
    return (dout * o).sum(-1) / -den if opt.normalize else torch.zeros_like(den)


def _causal(case: Case, inputs: list[torch.Tensor], spans: list[Span]) -> tuple[Any, ...]:
    """o, den, the states before and behind each span, and behind each sequence, from the definition."""
    q, k, v, kv, z = inputs
    states = [State(kv[n : n + 1], z[n : n + 1]) for n in range(len(kv))]
    outputs, dens, before, after = [], [], [], []
    for span in spans:
        rows = slice(span.first, span.last)
        start = states[span.sequence]
        o, kv1, z1, den = recurrent(q[None, rows], k[None, rows], v[None, rows], start.kv, start.z, case.options)
        # apart from what the last token's o came from
        end = states[span.sequence] = State(kv1.clone(), z1.clone())
        before.append(start)
        after.append(end)
        outputs.append(o[0])
        dens.append(den[0])
    return torch.cat(outputs), torch.cat(dens), before, after, _joined(states)


def _noncausal(case: Case, inputs: list[torch.Tensor], spans: list[Span]) -> tuple[Any, ...]:
    """As _causal, without states of spans."""
    q, k, v, kv, z = inputs
    outputs, dens, states = [], [], []
    for n, ((a, b), (c, d)) in enumerate(zip(pairwise(case.bounds()), pairwise(case.bounds(True)), strict=True)):
        one = slice(n, n + 1)
        o, kv1, z1, den = recurrent(q[None, a:b], k[None, c:d], v[None, c:d], kv[one], z[one], case.options)
        states.append(State(kv1, z1))
        outputs.append(o[0])
        dens.append(den[0])
    return torch.cat(outputs), torch.cat(dens), [], [], _joined(states)


def _joined(states: list[State]) -> State:
    return State(*(torch.cat(x) for x in zip(*states, strict=True)))


def _minus(a: State, b: State) -> State:
    return State(a.kv - b.kv, a.z - b.z)


def _narrow(x: State, heads: int) -> State:
    """With one z for the value heads of a group, which have the same."""
    return State(x.kv.detach(), x.z.detach()[:, ::heads])


def _own_gradients(spans: list[Span], behind: list[State], start: State) -> list[State]:
    """What each span adds to the gradient of the state, walking from the end."""
    found, previous = [], -1
    for i, span in enumerate(spans[: len(behind)]):
        n = slice(span.sequence, span.sequence + 1)
        entering = behind[i - 1] if span.sequence == previous else State(start.kv[n], start.z[n])
        found.append(_minus(entering, behind[i]))
        previous = span.sequence
    return found


def _in_slots(walk: Walk, spans: list[Span], states: list[State]) -> State:
    """Rows of spans, each where its slot is, and NaN in the others."""
    HV, K, V = walk.HV, walk.K, walk.V
    kv = in_slots(walk, spans, [x.kv[0] for x in states], (HV, K, V))
    return State(kv, in_slots(walk, spans, [x.z[0] for x in states], (HV, K)))


# ---- what each kernel is given, and what it is to write


def _states(name: str, x: State, present: bool = True) -> Tensors:
    """name: "kv0", "kv1", or "d" and one of them."""
    return {name: x.kv, name.replace("kv", "z"): x.z} if present else {}


def _before(case: Case, x: Solved) -> Tensors:
    return _states("kv0", x.before) if case.segment else _states("kv0", x.start, case.state)


def _empty_sums(x: State) -> State:
    """A slot without tokens holds the sum of none."""
    return State(x.kv.nan_to_num(nan=0.0), x.z.nan_to_num(nan=0.0))


def _forward(case: Case, x: Solved) -> Trial:
    wanted = {"o": x.o, **({"den": x.den} if case.keep_den else {})}
    wanted |= _states("kv1", x.final, case.final and not case.segment)
    return Trial({"q": x.q, "k": x.k, "v": x.v, **_before(case, x)}, wanted)


def _carry(case: Case, x: Solved) -> Trial:
    given = {"k": x.k, "v": x.v, **_states("kv0", x.start, case.state and not case.segment)}
    return Trial(given, _states("kv1", _empty_sums(x.sums) if case.segment else x.final))


def _emit(case: Case, x: Solved) -> Trial:
    given = {"q": x.q, **_states("kv0", x.final)}
    return Trial(given, {"o": x.o, **({"den": x.den} if case.keep_den else {})})


def _scan(case: Case, x: Solved) -> Trial:
    given = {**_states("kv", x.sums), **_states("kv0", x.start, case.state)}
    return Trial(given, {**_states("kv", x.before), **_states("kv1", x.final, case.final)})


def _scan_back(case: Case, x: Solved) -> Trial:
    given = {**_states("kv", x.dsums), **_states("kv0", x.dfinal, case.final)}
    return Trial(given, {**_states("kv", x.behind), **_states("kv1", x.dstart, case.state)}, reverse=True)


def _backward_q(case: Case, x: Solved) -> Trial:
    state = _before(case, x) if case.options.causal else _states("kv0", x.final)
    given = {"q": x.q, "k": x.k, "v": x.v, "o": x.o, "dout": x.dout, "den": x.den, **state}
    return Trial(given, {"dq": x.dq, "delta": x.delta})


def _backward_kv(stage: str, case: Case, x: Solved) -> Trial:
    given = {"q": x.q, "k": x.k, "v": x.v, "dout": x.dout, "den": x.den, "delta": x.delta}
    wanted: Tensors = {}
    for name, grad, stages in (("dk", x.dk, WRITE_DK), ("dv", x.dv, WRITE_DV)):
        # one that another kernel writes may be handed over and is left alone
        (wanted if stage in stages else given)[name] = grad if stage in stages else torch.full_like(grad, torch.nan)
    if stage in NONCAUSAL:
        return Trial(given | _states("dkv1", x.dstart), wanted)
    if stage == "backward_carry" and case.segment:
        return Trial(given, wanted | _states("dkv0", _empty_sums(x.dsums)))
    if case.segment:
        return Trial(given | _states("dkv1", x.behind), wanted)
    leaves_state = stage == "backward_carry" or (stage in WRITE_DK and case.state)
    return Trial(given | _states("dkv1", x.dfinal, case.final), wanted | _states("dkv0", x.dstart, leaves_state))


TRIALS: Mapping[str, tuple[Callable[[Case, Solved], Trial], ...]] = {
    "forward": (_forward,),
    "carry": (_carry,),
    "scan": (_scan, _scan_back),
    "emit": (_emit,),
    "backward_q": (_backward_q,),
    "backward_q_all": (_backward_q,),
    **{stage: (partial(_backward_kv, stage),) for stage, tensors in TENSORS.items() if tensors is _BACKWARD_KV},
}


# ---- the check


def check(kernel: Kernel, problem: Problem, launcher: Launcher, device: Device = "cpu") -> None:
    """VerificationError unless one kernel of the family, as the launcher runs it, is right in every case.

    Under the emulator a finding raises NotCleanError.

    Args:
        device: where the launcher's tensors lie; "cpu" for one that emulates.
    """
    stage = kernel.name.split(".")[1]
    if stage == "decode":
        try_cases(kernel, problem, DECODE_CASES, lambda case: _check_decode(case, problem, launcher, device))
        return
    cases = cases_of(stage)
    try_cases(kernel, problem, cases, lambda case: _check_case(stage, case, problem, launcher, device))


def _check_case(stage: str, case: Case, p: Problem, launcher: Launcher, device: Device) -> None:
    exact = _solved(case, p)
    for trial in (make(case, exact) for make in TRIALS[stage]):
        budget = "float32" if stage == "scan" else p.dtype  # a scan only adds
        with watched(trial, lambda name: _dtype(name, p), device, budget) as tensors:
            if case.packed:
                tensors["cu_seqlens"] = torch.tensor(case.bounds(), dtype=torch.int32, device=device)
            walk = case.walk(p, over_keys=stage in OVER_KEYS)
            numbers = _numbers(tensors, walk, case.options, trial.reverse)
            launcher.launch(launcher.pack(numbers), [tensors.get(name) for name in TENSORS[stage]])


def _dtype(name: str, p: Problem) -> torch.dtype:
    return getattr(torch, p.dtype) if name in IO else torch.float32


def _numbers(tensors: Tensors, walk: Walk, opt: Options, reverse: bool = False) -> dict[str, float]:
    """Sizes and switches by the tensors that are there: what the runner hands over with them."""

    def rows(*names: str) -> int:
        return next((tensors[name].shape[0] for name in names if name in tensors), 0)

    N0, N1 = rows("kv0", "dkv0"), rows("kv1", "dkv1")
    return {
        **walk_numbers(walk),
        **option_numbers(opt),
        "tokens": rows("q", "k"),
        "keys": rows("k"),
        "rows": rows("den"),
        "S": rows("kv"),
        "HZ": tensors["z"].shape[1] if "z" in tensors else 0,
        "N0": N0,
        "N1": N1,
        "initial": int(N0 > 0),
        "final": int(N1 > 0),
        "keep_den": int("den" in tensors),
        "reverse": int(reverse),
    }


# ---- decode


DECODE_CASES = (
    Step(Options(scale=0.5), 2, 0, H=2),
    Step(Options("relu", eps=1e-2), 3, 3, 1, 2, (3, -1, 0), pool=5, apart=2),
    Step(Options("identity", normalize=False, scale=0.3), 2, 2, 1, 1, (3, 1), pool=4, index=torch.int64),
    Step(DEFAULTS, 4, 2, heads=2, slots=(4, 1, -2, -1), pool=4),  # two that are no rows of the pool
)


def _check_decode(case: Step, p: Problem, launcher: Launcher, device: Device) -> None:
    """Through the runner of decode, which launches nothing else."""
    new = case.generator()
    tokens, HV = case.tokens_of(p, new), case.H * case.heads
    pools = {"kv": new(case.rows, HV, p.K, p.V), "z": new(case.rows, case.H, p.K).abs() * 3}
    run = CudaDecode({"linear_attention.decode": launcher})
    check_step(
        case, tokens, pools, p.dtype, device,
        definition=lambda q, k, v, kv, z, slots, out: decode(q, k, v, kv, z, slots, case.options, out),
        run=lambda q, k, v, kv, z, slots, out: run(q, k, v, kv, z, slots, case.options, out),
    )  # fmt: skip


# ---- what is timed

SHAPES = {  # rows, and columns of each head
    **dict.fromkeys(("q", "k", "dq", "dk"), ("tokens", "K")),
    **dict.fromkeys(("v", "o", "dout", "dv"), ("tokens", "V")),
    **dict.fromkeys(("den", "delta"), ("tokens", "")),
    **dict.fromkeys(("kv0", "kv1", "dkv0", "dkv1"), ("states", "KV")),
    **dict.fromkeys(("z0", "z1", "dz0", "dz1"), ("states", "K")),
    "kv": ("spans", "KV"),
    "z": ("spans", "K"),
}


WORK = {
    "forward": Work(("q", "k", "v"), ("o", "den"), 2),
    "carry": Work(("k", "v"), ("kv1", "z1"), 1),
    "scan": Work(("kv", "z"), ("kv", "z"), 0),
    "emit": Work(("q", "kv0", "z0"), ("o", "den"), 1),
    "backward_q": Work(("q", "k", "v", "o", "dout", "den"), ("dq", "delta"), 2),
    "backward_q_all": Work(("q", "o", "dout", "den", "kv0", "z0"), ("dq", "delta"), 1),
    "backward_kv": Work(("q", "k", "v", "dout", "den", "delta"), ("dk", "dv"), 3),
    "backward_k": Work(("q", "k", "v", "dout", "den", "delta"), ("dk",), 2),
    "backward_v": Work(("q", "k", "dout", "den"), ("dv",), 2),
    "backward_carry": Work(("q", "dout", "den", "delta"), ("dkv0", "dz0"), 1),
    "backward_k_all": Work(("k", "v", "dkv1", "dz1"), ("dk",), 1),
    "backward_v_all": Work(("k", "dkv1"), ("dv",), 1),
}
IN_SPANS = ("scan", *NONCAUSAL)


def workload(
    kernel: Kernel,
    problem: Problem,
    launcher: Launcher,
    device: Device = "cpu",
    *,
    tokens: int = TOKENS,
    batch: int | None = None,
    heads: int = HEADS,
    sharing: int = 1,
) -> Workload:
    """A launch to time, and its floating-point operations and bytes.

    Args:
        tokens: of each sequence; of no account to decode, which is timed with one.
        batch: sequences; decode has more of them.
        heads: value heads.
        sharing: how many of them a q/k head serves; of no account to decode.
    """
    stage = kernel.name.split(".")[1]
    if stage == "decode":
        return _decode_workload(problem, launcher, device, batch or DECODE_BATCH, heads)
    B, p = batch or BATCH, problem
    walk = timed_walk(p, B, tokens, heads, sharing, in_spans=stage in IN_SPANS)
    work = WORK[stage]
    moved = work.moved
    tensors = {name: _timed(name, walk, p, device) for name in TENSORS[stage] if _is_timed(name, moved)}
    packed = launcher.pack(_numbers(tensors, walk, Options(scale=p.K**-0.5)))
    return of_launch(launcher, packed, [tensors.get(name) for name in TENSORS[stage]], work, walk, tensors)


def _is_timed(name: str, moved: tuple[str, ...]) -> bool:
    """All tensors of tokens, for a kernel may read what it could do without; of states, kv and z go together."""
    if name == "cu_seqlens":
        return False
    return SHAPES[name][0] == "tokens" or name in moved or name.replace("z", "kv") in moved


def _timed(name: str, walk: Walk, p: Problem, device: Device) -> torch.Tensor:
    x = timed(name, SHAPES[name], walk, _dtype(name, p), device)
    return x.uniform_(1.0, 2.0) if name == "den" else x


def _decode_workload(p: Problem, launcher: Launcher, device: Device, B: int, heads: int) -> Workload:
    io = getattr(torch, p.dtype)
    q, k, v = (torch.randn(B, heads, width, device=device).to(io) for width in (p.K, p.K, p.V))
    kv, z = torch.randn(B, heads, p.K, p.V, device=device), torch.rand(B, heads, p.K, device=device)
    out, run, opt = torch.empty_like(v), CudaDecode({"linear_attention.decode": launcher}), Options(scale=p.K**-0.5)
    moved = sum(x.nbytes for x in (q, k, v, out)) + 2 * (kv.nbytes + z.nbytes)
    return Workload(lambda: run(q, k, v, kv, z, None, opt, out), 4.0 * B * heads * p.K * p.V, moved)
