"""How one CUDA kernel of this family is tried: the check against the float64 definition, and what to time.

A kernel is launched alone, through a Launcher: on a GPU, or under the emulator before a binary is stored. What other
kernels of the pass would hand it (states of spans and of chunks, what crosses a token) comes from the recurrence, token
by token in float64, rounded once to the type of the tensor. Each value head has gradients of its own, as the kernels
leave them.

Around every tensor lie guards, see linattn_tl/guarded.py.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from linattn_tl.guarded import Device, Step, Tensors, Trial, check_step, in_slots, one_thread, try_cases, watched
from linattn_tl.launchers import Launcher
from linattn_tl.ops.simple_gla.cuda import CudaDecode, option_numbers
from linattn_tl.ops.simple_gla.definition import Options, decode
from linattn_tl.spans import Span, Walk, spans_of, walk_numbers
from linattn_tl.workloads import BATCH, DECODE_BATCH, HEADS, TOKENS, Work, Workload, of_launch, timed, timed_walk
from tl_kernels.cuda_sizes import tile_dtype
from tl_kernels.spec import Kernel, Problem

SEGMENT = 64  # tokens a span: the shortest one there is, one chunk of the kernels with the largest
KEEPS = 64  # tokens a state that forward leaves: two of its chunks, where those are short
IO = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")  # in the problem's dtype; states are a tile's, all others fp32

# Each kernel's tensors in order. kv0 is the state before the first token, kv1 that behind the last one, kv those of
# spans, `states` those before chunks; with a d in front, gradients.
_BACKWARD = (
    "q", "k", "v", "g", "dout", "crossing", "states", "dq", "dk", "dv", "dg", "dkv1", "dkv0", "cu_seqlens",
)  # fmt: skip
TENSORS = {
    "forward": ("q", "k", "v", "g", "o", "kv0", "kv1", "states", "cu_seqlens"),
    "carry": ("k", "v", "g", "kv0", "kv1", "decay", "cu_seqlens"),
    "scan": ("kv", "decay", "kv0", "kv1", "cu_seqlens"),
    "backward_q": ("q", "k", "v", "g", "dout", "dq", "crossing", "states", "kv0", "cu_seqlens"),
    "backward": _BACKWARD,
    "backward_kv": _BACKWARD,
    "backward_k": _BACKWARD,
    "backward_v": _BACKWARD,
}
CARRY_BACK = ("q", "dout", "g", "kv0", "kv1", "decay", "cu_seqlens")  # the same kernel from the end
WRITE_DK, WRITE_DV = ("backward", "backward_kv", "backward_k"), ("backward", "backward_kv", "backward_v")
FORGETS = float("-inf")


# ---- cases


@dataclass(frozen=True)
class Case:
    """Sizes, options, and which of a kernel's optional tensors are there."""

    tokens: tuple[int, ...]  # of each sequence; all the same unless packed
    packed: bool = False
    H: int = 1
    heads: int = 1  # value heads of a q/k head
    options: Options = Options()  # noqa: RUF009
    state: bool = False  # there is an initial state; backward, its gradient is wanted
    final: bool = False  # the final state is wanted; backward, there is a gradient of it
    gates: bool = True  # backward, the gradient of g is wanted
    strong: bool = False  # most tokens decay by 1e-12; a few forget all, and a few keep all
    segment: int = 0  # tokens a span, or 0 where sequences are walked as a whole

    @property
    def bounds(self) -> list[int]:
        return list(accumulate(self.tokens, initial=0))

    def walk(self, p: Problem, segment: int = 0) -> Walk:
        length = 0 if self.packed else self.tokens[0]
        segment = segment or self.segment or length or self.bounds[-1] + 1
        H, HV = self.H, self.H * self.heads
        return Walk(len(self.tokens), length, self.bounds[-1], H, HV, p.K, p.V, segment, cut=self.segment > 0)


CASES = (
    Case((70, 70), H=2, options=Options(0.5)),
    Case((1,), H=2, heads=2, options=Options(1.0), state=True, final=True),
    Case((5, 0, 64, 33), True, heads=2, options=Options(0.3), final=True, gates=False),
    Case((0, 130, 0, 20), True, 1, 2, Options(0.7), state=True, final=True, segment=SEGMENT),
    Case((90,), options=Options(0.4), state=True, final=True, strong=True),
)
SCAN_CASES = (replace(CASES[0], segment=SEGMENT), replace(CASES[1], segment=SEGMENT), CASES[3])


# ---- the truth


@dataclass(frozen=True)
class Solved:
    """A case's inputs, and all that kernels make of them in float64. Rows are tokens, sequences, or slots of spans.

    Gradients have a row for each value head. Slots that no span takes are NaN.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    dout: torch.Tensor
    o: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    start: torch.Tensor
    final: torch.Tensor
    dstart: torch.Tensor
    dfinal: torch.Tensor
    sums: torch.Tensor  # what each span adds to the state
    decay: torch.Tensor  # what each span leaves of it, [slots, HV]
    before: torch.Tensor  # each span
    dsums: torch.Tensor  # what each span adds to the gradient of the state
    behind: torch.Tensor  # each span, the gradient of the state
    dg: torch.Tensor  # [T, HV, K]: of each row of the state, whose sum is the gradient
    crossing: torch.Tensor  # the same of what reaches a token's o from the state before its chunk
    reached: torch.Tensor  # of it, what is from a token to the end of its chunk, summed: a part of dg
    states: torch.Tensor  # before each chunk
    case: Case

    def dg_of_blocks(self, width: int) -> torch.Tensor:
        """As programs leave it: the first block has all of what backward_q has found."""
        found = _of_blocks(self.dg - self.reached, width)
        found[..., 0] += self.reached.sum(-1)
        return found


def _of_blocks(rows: torch.Tensor, width: int) -> torch.Tensor:
    """[T, HV, K] -> [T, HV, blocks], sums over blocks of `width` rows of the state."""
    return torch.stack([x.sum(-1) for x in rows.split(width, -1)], -1)


def forward_path(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The state [T + 1, HV, K, V] before k [T, HV, K] and behind each token."""
    states = [start]
    for t in range(len(k)):
        states.append(g[t].exp()[:, None, None] * states[-1] + k[t].unsqueeze(-1) * v[t].unsqueeze(-2))
    return torch.stack(states)


def backward_path(q: torch.Tensor, dout: torch.Tensor, g: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """The gradient of the state [T + 1, HV, K, V] before q [T, HV, K], scaled, and behind each token.

    Behind a token it has what the token's own o adds; `end` is without.
    """
    gradients, behind = [], end
    for t in reversed(range(len(q))):
        gradients.append(behind + q[t].unsqueeze(-1) * dout[t].unsqueeze(-2))
        behind = g[t].exp()[:, None, None] * gradients[-1]
    return torch.stack([*gradients, behind][::-1] if gradients else [end])


@lru_cache(maxsize=8)
def solved(case: Case, p: Problem, chunk: int) -> Solved:
    """Computed once in a process that checks many candidates. chunk: tokens of a chunk of the backward pass."""
    with one_thread():
        return _solve(case, p, chunk)


def gates(case: Case, T: int, HV: int, generator: torch.Generator) -> torch.Tensor:
    """Some near 0, some strong; one that forgets all and one that keeps all."""
    g = -(torch.rand(T, HV, generator=generator) ** 3)
    if case.strong:
        g = torch.where(torch.rand(T, HV, generator=generator) < 0.7, -27.6, g)
    if T > 20:
        g[17], g[11] = FORGETS, 0.0
    return g


def _solve(case: Case, p: Problem, chunk: int) -> Solved:
    r = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))
    io, walk = getattr(torch, p.dtype), case.walk(p)
    T, N, H, HV, K, V = walk.tokens, walk.sequences, walk.H, walk.HV, p.K, p.V
    new = lambda *size: torch.randn(*size, generator=r)  # noqa: E731
    q, k, v, dout = (new(*size).to(io) for size in ((T, H, K), (T, H, K), (T, HV, V), (T, HV, V)))
    g, start, dfinal = gates(case, T, HV, r), new(N, HV, K, V) * case.state, new(N, HV, K, V) * case.final

    wide = [x.double().repeat_interleave(HV // x.shape[1], 1) for x in (q, k, v, g, dout)]
    scaled = [case.options.scale * wide[0], *wide[1:]]
    parts = []
    for n, (first, last) in enumerate(pairwise(case.bounds)):
        parts.append(_sequence([x[first:last] for x in scaled], start[n].double(), dfinal[n].double()))
    tokens = {name: torch.cat([part[name] for part in parts]) for name in ("o", "dq", "dk", "dv", "dg")}
    ends = {name: torch.stack([part[name] for part in parts]) for name in ("final", "dstart")}
    spans, chunks = list(spans_of(walk, case.bounds)), case.walk(p, chunk)
    every = list(spans_of(chunks, case.bounds))
    return Solved(
        q=q, k=k, v=v, g=g, dout=dout, start=start, dfinal=dfinal,
        **{**tokens, "dq": case.options.scale * tokens["dq"]}, **ends, **_of_spans(walk, case, spans, scaled, parts),
        **_crossing(case, every, scaled, parts),
        states=in_slots(chunks, every, [_at(case, parts, x, "states") for x in every], (HV, K, V)),
        case=case,
    )  # fmt: skip


def _sequence(tokens: Sequence[torch.Tensor], start: torch.Tensor, dfinal: torch.Tensor) -> Tensors:
    """All of one sequence's q, which is scaled, k, v, g and dO."""
    q, k, v, g, dout = tokens
    states, gradients = forward_path(k, v, g, start), backward_path(q, dout, g, dfinal)
    own, left = gradients[1:], g.exp()[..., None, None] * states[:-1]
    return {
        "states": states, "gradients": gradients, "final": states[-1], "dstart": gradients[0],
        "o": torch.einsum("thk,thkv->thv", q, states[1:]),
        "dq": torch.einsum("thv,thkv->thk", dout, states[1:]),
        "dk": torch.einsum("thv,thkv->thk", v, own),
        "dv": torch.einsum("thk,thkv->thv", k, own),
        "dg": (left * own).sum(-1),
    }  # fmt: skip


def _at(case: Case, parts: Sequence[Tensors], span: Span, name: str) -> torch.Tensor:
    """A sequence's state before a span."""
    return parts[span.sequence][name][span.first - case.bounds[span.sequence]]


def _of_spans(walk: Walk, case: Case, spans: list[Span], scaled: list[Any], parts: list[Tensors]) -> Tensors:
    """What spans add, leave and start from, in their slots."""
    q, k, v, g, dout = scaled
    HV, K, V = walk.HV, walk.K, walk.V
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ("sums", "decay", "before", "dsums", "behind")}
    for x in spans:
        rows, nothing = slice(x.first, x.last), torch.zeros(HV, K, V, dtype=torch.float64)
        found["sums"].append(forward_path(k[rows], v[rows], g[rows], nothing)[-1])
        found["dsums"].append(backward_path(q[rows], dout[rows], g[rows], nothing)[0])
        found["decay"].append(g[rows].sum(0).exp())
        found["before"].append(_at(case, parts, x, "states"))
        end = x.last - case.bounds[x.sequence]
        gradients = parts[x.sequence]["gradients"]
        # behind the span: without what its last token's o adds
        own = q[x.last - 1].unsqueeze(-1) * dout[x.last - 1].unsqueeze(-2)
        found["behind"].append(gradients[end] - own)
    return {name: in_slots(walk, spans, x, (HV,) if name == "decay" else (HV, K, V)) for name, x in found.items()}


def _crossing(case: Case, chunks: list[Span], scaled: list[Any], parts: list[Tensors]) -> Tensors:
    """c of each token and row of the state, see tl_kernels/simple_gla/cuda_backward.py, and its sums in a chunk."""
    q, _, _, g, dout = scaled
    found, reached = torch.zeros_like(q), torch.zeros_like(q)
    for x in chunks:
        rows = slice(x.first, x.last)
        from_state = torch.einsum("thv,hkv->thk", dout[rows], _at(case, parts, x, "states"))
        found[rows] = g[rows].cumsum(0).exp().unsqueeze(-1) * q[rows] * from_state
        reached[rows] = found[rows].flip(0).cumsum(0).flip(0)
    return {"crossing": found, "reached": reached}


# ---- what each kernel is given, and what it is to write


def _state(name: str, x: torch.Tensor, present: bool = True) -> Tensors:
    return {name: x} if present else {}


def _before(x: Solved) -> Tensors:
    return _state("kv0", x.before) if x.case.segment else _state("kv0", x.start, x.case.state)


def _forward(x: Solved, width: int) -> Trial:
    wanted = {"o": x.o, **_state("kv1", x.final, x.case.final and not x.case.segment)}
    wanted |= _state("states", x.states, x.case.gates)
    return Trial({"q": x.q, "k": x.k, "v": x.v, "g": x.g, **_before(x)}, wanted)


def _carry(x: Solved, width: int) -> Trial:
    """A slot without tokens holds the sum of none, and leaves all."""
    given = {"k": x.k, "v": x.v, "g": x.g, **_state("kv0", x.start, x.case.state and not x.case.segment)}
    return Trial(given, {"kv1": x.sums.nan_to_num(nan=0.0) if x.case.segment else x.final, "decay": _decays(x)})


def _carry_back(x: Solved, width: int) -> Trial:
    given = {"q": x.q, "dout": x.dout, "g": x.g, **_state("kv0", x.dfinal, x.case.final and not x.case.segment)}
    wanted = {"kv1": x.dsums.nan_to_num(nan=0.0) if x.case.segment else x.dstart, "decay": _decays(x)}
    return Trial(given, wanted, reverse=True)


def _decays(x: Solved) -> torch.Tensor:
    return x.decay.nan_to_num(nan=1.0)


def _scan(x: Solved, width: int) -> Trial:
    given = {"kv": x.sums, "decay": x.decay, **_state("kv0", x.start, x.case.state)}
    return Trial(given, {"kv": x.before, **_state("kv1", x.final, x.case.final)})


def _scan_back(x: Solved, width: int) -> Trial:
    given = {"kv": x.dsums, "decay": x.decay, **_state("kv0", x.dfinal, x.case.final)}
    return Trial(given, {"kv": x.behind, **_state("kv1", x.dstart, x.case.state)}, reverse=True)


def _backward_q(x: Solved, width: int) -> Trial:
    wanted = {"dq": x.dq}
    if x.case.gates:
        wanted |= {"crossing": _of_blocks(x.crossing, width), "states": x.states}
    return Trial({"q": x.q, "k": x.k, "v": x.v, "g": x.g, "dout": x.dout, **_before(x)}, wanted)


def _backward_kv(stage: str, x: Solved, width: int) -> Trial:
    """With `backward`, which finds c itself, and reads states whatever is wanted."""
    given = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "dout": x.dout}
    wanted = _state("dq", x.dq, stage == "backward")
    given |= _state("states", x.states, x.case.gates or stage == "backward")
    grads = {"dk": (x.dk, WRITE_DK), "dv": (x.dv, WRITE_DV)}
    if x.case.gates:
        given |= _state("crossing", x.crossing.sum(-1), stage != "backward")
        grads["dg"] = (x.dg_of_blocks(width), WRITE_DK)
    for name, (grad, stages) in grads.items():
        # one that another kernel writes may be handed over and is left alone
        (wanted if stage in stages else given)[name] = grad if stage in stages else torch.full_like(grad, torch.nan)
    if x.case.segment:
        return Trial(given | _state("dkv1", x.behind), wanted)
    leaves_state = stage in WRITE_DK and x.case.state
    return Trial(given | _state("dkv1", x.dfinal, x.case.final), wanted | _state("dkv0", x.dstart, leaves_state))


TRIALS: Mapping[str, tuple[Callable[..., Trial], ...]] = {
    "forward": (_forward,),
    "carry": (_carry, _carry_back),
    "scan": (_scan, _scan_back),
    "backward_q": (_backward_q,),
    **{stage: (partial(_backward_kv, stage),) for stage, tensors in TENSORS.items() if tensors is _BACKWARD},
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
    cases = SCAN_CASES if stage == "scan" else CASES
    try_cases(kernel, problem, cases, lambda case: _check_case(stage, case, problem, launcher, device))


def _check_case(stage: str, case: Case, p: Problem, launcher: Launcher, device: Device) -> None:
    chunk = KEEPS if stage == "forward" else getattr(launcher.config, "C", SEGMENT)
    width = getattr(launcher.config, "BK", p.K)
    exact = solved(case, p, chunk)
    for trial in (make(exact, width) for make in TRIALS[stage]):
        budget = "float32" if stage == "scan" else p.dtype  # a scan only adds
        with watched(trial, lambda name: _dtype(name, p), device, budget) as tensors:
            if case.packed:
                tensors["cu_seqlens"] = torch.tensor(case.bounds, dtype=torch.int32, device=device)
            numbers = _numbers(tensors, case.walk(p), case.options, trial.reverse)
            launcher.launch(launcher.pack(numbers), [tensors.get(name) for name in _order(stage, trial.reverse)])


def _order(stage: str, reverse: bool) -> tuple[str, ...]:
    return CARRY_BACK if stage == "carry" and reverse else TENSORS[stage]


def _dtype(name: str, p: Problem) -> torch.dtype:
    if name == "states":
        return getattr(torch, tile_dtype(p))
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
        "rows": rows("crossing", "dg"),
        "chunks": rows("states"),
        "S": rows("kv"),
        "N0": N0,
        "N1": N1,
        "initial": int(N0 > 0),
        "final": int(N1 > 0),
        "gated": int("crossing" in tensors or "dg" in tensors),
        "keeps": KEEPS * ("states" in tensors),
        "reverse": int(reverse),
    }


# ---- decode

DECODE_CASES = (
    Step(Options(0.5), 2, 0, H=2),
    Step(Options(1.0), 3, 3, 1, 2, (3, -1, 0), pool=5, apart=2),
    Step(Options(0.3), 2, 2, 1, 1, (3, 1), pool=4, index=torch.int64),
    Step(Options(0.2), 4, 2, heads=2, slots=(4, 1, -2, -1), pool=4),  # two that are no rows of the pool
)


def _check_decode(case: Step, p: Problem, launcher: Launcher, device: Device) -> None:
    """Through the runner of decode, which launches nothing else."""
    new = case.generator()
    HV = case.H * case.heads
    g = -(new(*case.shape(HV)).abs() ** 3)
    g[0] = FORGETS
    run = CudaDecode({"simple_gla.decode": launcher})
    check_step(
        case, [*case.tokens_of(p, new), g], {"kv": new(case.rows, HV, p.K, p.V)}, p.dtype, device,
        definition=lambda q, k, v, g, kv, slots, out: decode(q, k, v, g, kv, slots, case.options, out),
        run=lambda q, k, v, g, kv, slots, out: run(q, k, v, g, kv, slots, case.options, out),
    )  # fmt: skip


# ---- what is timed

SHAPES = {  # rows, and columns of each head
    **dict.fromkeys(("q", "k", "dq", "dk"), ("tokens", "K")),
    **dict.fromkeys(("v", "o", "dout", "dv"), ("tokens", "V")),
    "g": ("tokens", ""),
    **dict.fromkeys(("kv0", "kv1", "dkv0", "dkv1"), ("states", "KV")),
    "kv": ("spans", "KV"),
    "decay": ("spans", ""),
    "states": ("chunks", "KV"),
}
WORK = {
    "forward": Work(("q", "k", "v", "g"), ("o",), 2),
    "carry": Work(("k", "v", "g"), ("kv1", "decay"), 1),
    "scan": Work(("kv", "decay"), ("kv",), 0),
    "backward_q": Work(("q", "k", "v", "g", "dout"), ("dq",), 2),
    "backward": Work(("q", "k", "v", "g", "dout", "states"), ("dq", "dk", "dv"), 4),
    "backward_kv": Work(("q", "k", "v", "g", "dout"), ("dk", "dv"), 3),
    "backward_k": Work(("q", "k", "v", "g", "dout"), ("dk",), 2),
    "backward_v": Work(("q", "k", "g", "dout"), ("dv",), 2),
}


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
    """A launch to time, and its floating-point operations and bytes. The gradient of g is not asked for.

    Args:
        tokens: of each sequence; of no account to decode, which is timed with one.
        batch: sequences; decode has more of them.
        heads: value heads.
        sharing: how many of them a q/k head serves; of no account to decode.
    """
    stage = kernel.name.split(".")[1]
    if stage == "decode":
        return _decode_workload(problem, launcher, device, batch or DECODE_BATCH, heads)
    p, work = problem, WORK[stage]
    walk = timed_walk(p, batch or BATCH, tokens, heads, sharing, in_spans=stage == "scan")
    moved, chunk = work.moved, getattr(launcher.config, "C", SEGMENT)
    tensors = {name: _timed(name, walk, chunk, p, device) for name in TENSORS[stage] if _is_timed(name, moved)}
    packed = launcher.pack(_numbers(tensors, walk, Options(p.K**-0.5)))
    return of_launch(launcher, packed, [tensors.get(name) for name in TENSORS[stage]], work, walk, tensors)


def _is_timed(name: str, moved: tuple[str, ...]) -> bool:
    """What moves, and all other tensors of tokens but those for the gradient of g: a kernel may read more."""
    return name in SHAPES and (SHAPES[name][0] == "tokens" or name in moved)


def _timed(name: str, walk: Walk, chunk: int, p: Problem, device: Device) -> torch.Tensor:
    x = timed(name, SHAPES[name], walk, _dtype(name, p), device, chunk)
    return -x.abs() if name == "g" else x


def _decode_workload(p: Problem, launcher: Launcher, device: Device, B: int, heads: int) -> Workload:
    io = getattr(torch, p.dtype)
    q, k, v = (torch.randn(B, heads, width, device=device).to(io) for width in (p.K, p.K, p.V))
    g, kv = -torch.rand(B, heads, device=device), torch.randn(B, heads, p.K, p.V, device=device)
    out, run, opt = torch.empty_like(v), CudaDecode({"simple_gla.decode": launcher}), Options(p.K**-0.5)
    moved = sum(x.nbytes for x in (q, k, v, g, out)) + 2 * kv.nbytes
    return Workload(lambda: run(q, k, v, g, kv, None, opt, out), 4.0 * B * heads * p.K * p.V, moved)
