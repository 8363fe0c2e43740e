"""How a CUDA kernel of this family is tried: the check against the float64 definition, and what to time.

It is launched through a Launcher: on a GPU, or under the emulator before a binary is stored. Around every tensor lie
guards, see linattn_tl/guarded.py.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from linattn_tl.guarded import Device, Step, Tensors, Trial, check_step, in_slots, one_thread, try_cases, watched
from linattn_tl.launchers import Launcher
from linattn_tl.ops.delta_rule.cuda import CudaDecode, option_numbers
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, decode, normalized, recurrent
from linattn_tl.plain import decays
from linattn_tl.spans import Span, Walk, blocks, spans_of, walk_numbers
from linattn_tl.workloads import BATCH, DECODE_BATCH, HEADS, TOKENS, Work, Workload, of_launch, timed, timed_walk
from tl_kernels.cuda_sizes import Blocks, tile_dtype
from tl_kernels.spec import Kernel, Problem

TRUTH = TorchRunner(recurrent)
FORGETS = float("-inf")
SEGMENT = 64  # tokens of a span, where a case has spans: the shortest there is
KEEPS = 64  # tokens a state that forward leaves: two of its chunks, where those are short
TENSORS = {  # of each kernel, in order
    "forward": ("q", "k", "v", "g", "beta", "o", "kv0", "kv1", "y", "states", "cu_seqlens"),
    "prepare": ("q", "k", "v", "g", "beta", "y0", "w", "cu_seqlens"),
    "carry": ("k", "w", "g", "beta", "y0", "y", "kv0", "kv1", "states", "cu_seqlens"),
    "output": ("q", "k", "g", "beta", "y", "states", "o", "cu_seqlens"),
    "prepare_back": ("q", "k", "dout", "g", "beta", "x0", "back", "cu_seqlens"),
    "carry_back": ("q", "k", "back", "g", "beta", "x0", "dout", "dkv1", "dkv0", "behind", "cu_seqlens"),
    "backward": (
        "q", "k", "g", "beta", "y", "dout", "states", "dq", "dk", "dv", "dg", "dbeta", "dkv1", "dkv0", "cu_seqlens",
    ),
}  # fmt: skip
IO = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")  # in the problem's dtype; what is kept is a tile's, all others fp32


# ---- cases


@dataclass(frozen=True)
class Case:
    """Sizes, options, and which of the optional tensors are there."""

    tokens: tuple[int, ...]  # of each sequence; all the same unless packed
    packed: bool = False
    H: int = 1
    heads: int = 1  # value heads of a q/k head
    options: Options = Options()  # noqa: RUF009
    state: bool = False  # there is an initial state; backward, its gradient is wanted
    final: bool = False  # the final state is wanted; backward, there is a gradient of it
    gated: bool = True  # there is a g
    keeps: bool = True  # forward leaves what backward reads; backward, the gradient of g is wanted
    strong: bool = False  # most tokens decay by 1e-12; a few forget all, and a few keep all
    cut: bool = False  # backward, into spans of SEGMENT tokens

    @property
    def bounds(self) -> list[int]:
        return list(accumulate(self.tokens, initial=0))

    def walk(self, p: Problem) -> Walk:
        length, H, HV = 0 if self.packed else self.tokens[0], self.H, self.H * self.heads
        return Walk(len(self.tokens), length, self.bounds[-1], H, HV, p.K, p.V, SEGMENT).whole

    def spans(self, p: Problem) -> Walk:
        return self.walk(p)._replace(segment=SEGMENT) if self.cut else self.walk(p)


CASES = (
    Case((70, 70), H=2, options=Options(0.5)),
    Case((1,), H=2, heads=2, options=Options(1.0, qk_l2norm=True), state=True, final=True),
    Case((5, 0, 64, 33), True, heads=2, options=Options(0.3), final=True, gated=False),
    Case((0, 130, 0, 20), True, 1, 2, Options(0.7, qk_l2norm=True), state=True, final=True, keeps=False, cut=True),
    Case((90,), options=Options(0.4), state=True, final=True, strong=True),
)


# ---- the truth


@dataclass(frozen=True)
class Solved:
    """A case's inputs, and all that kernels make of them in float64. Rows are tokens, sequences, or slots of chunks.

    Gradients of q, k, g and beta have a row for each value head and block of V.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    dout: torch.Tensor
    start: torch.Tensor
    dfinal: torch.Tensor
    o: torch.Tensor
    final: torch.Tensor
    y: torch.Tensor
    y0: torch.Tensor  # Y if the state before each chunk were zero
    w: torch.Tensor  # what of that state Y lacks: Y = Y0 - W S
    x0: torch.Tensor  # X if the gradient of the state behind each chunk were zero
    back: torch.Tensor  # W of X = X0 + W R
    states: torch.Tensor  # before each chunk
    behind: torch.Tensor  # each span, the gradient of the state
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dstart: torch.Tensor
    case: Case


def example(case: Case, p: Problem) -> list[torch.Tensor]:
    """q, k, v, g, beta and dO, rows of tokens; the initial states, and the gradients of the final ones.

    beta is in [0, 2], keys have length 1 or get it.
    """
    r = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))
    io, walk = getattr(torch, p.dtype), case.walk(p)
    T, H, HV = walk.tokens, walk.H, walk.HV
    q, k = (torch.randn(T, H, p.K, generator=r) for _ in "qk")
    k = k if case.options.qk_l2norm else normalized(k)
    v, dout = (torch.randn(T, HV, p.V, generator=r) for _ in "vo")
    g = -(torch.rand(T, HV, generator=r) ** 3)
    if case.strong:
        g = torch.where(torch.rand(T, HV, generator=r) < 0.7, -27.6, g)
    if T > 20:
        g[17], g[11] = FORGETS, 0.0
    beta = 2 * torch.rand(T, HV, generator=r)
    start, dfinal = (torch.randn(walk.sequences, HV, p.K, p.V, generator=r) for _ in "SR")
    g = g if case.gated else torch.zeros_like(g)
    return [q.to(io), k.to(io), v.to(io), g, beta, dout.to(io), start * case.state, dfinal * case.final]


@lru_cache(maxsize=16)
def solved(case: Case, p: Problem, chunk: int, width: int) -> Solved:
    """Computed once in a process that checks many candidates.

    Args:
        chunk: tokens of a chunk of backward.
        width: columns of a block of V.
    """
    with one_thread():
        return _solve(case, p, chunk, width)


def _solve(case: Case, p: Problem, chunk: int, width: int) -> Solved:
    q, k, v, g, beta, dout, start, dfinal = example(case, p)
    walk = case.walk(p)
    wide = [x.double().repeat_interleave(walk.HV // x.shape[1], 1) for x in (q, k, v, g, beta)]
    parts = [
        _of_block([*wide[:2], wide[2][..., at], *wide[3:]], start[..., at], (dout[..., at], dfinal[..., at]), case)
        for at in (slice(i, i + width) for i in range(0, p.V, width))
    ]
    every = list(spans_of(walk._replace(segment=chunk), case.bounds))
    y, path = _writes(wide, start, case)
    y0, w, x0, back = _prepared(wide, dout, every, case)
    spans = list(spans_of(case.spans(p), case.bounds))
    gradients = _gradient_path(wide, dout, dfinal, case)
    return Solved(
        q=q, k=k, v=v, g=g, beta=beta, dout=dout, start=start, dfinal=dfinal, case=case,
        y=y, y0=y0, w=w, x0=x0, back=back,
        behind=in_slots(case.spans(p), spans, [gradients[x.last] for x in spans], (walk.HV, p.K, p.V)),
        states=in_slots(walk._replace(segment=chunk), every, [path[x.first] for x in every], (walk.HV, p.K, p.V)),
        **{name: torch.cat([part[name] for part in parts], -1) for name in ("o", "final", "dv", "dstart")},
        **{name: torch.stack([part[name] for part in parts], 2) for name in ("dg", "dbeta")},
        **{name: torch.stack([part[name] for part in parts], 2).flatten(1, 2) for name in ("dq", "dk")},
    )  # fmt: skip


def _of_block(tokens: Any, start: torch.Tensor, upstream: Any, case: Case) -> Tensors:
    """Results and gradients of some columns of V, which do not depend on the others."""
    leaves = [x.detach().clone().requires_grad_() for x in (*(x.unsqueeze(0) for x in tokens), start.double())]
    opt, lengths = case.options._replace(output_final_state=True), torch.tensor(case.bounds)
    (o, final), _ = TRUTH.forward(leaves, lengths, opt)
    dout, dfinal = (x.double() for x in upstream)
    found = torch.autograd.grad((o, final), leaves, (dout.unsqueeze(0), dfinal), allow_unused=True)
    grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, found, strict=True)]
    names = ("dq", "dk", "dv", "dg", "dbeta")
    return {"o": o[0].detach(), "final": final.detach(), "dstart": grads.pop(),
            **{name: x[0] for name, x in zip(names, grads, strict=True)}}  # fmt: skip


def _writes(tokens: Any, start: torch.Tensor, case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What each token writes before beta, v - Sbar^T k; and the state before each token."""
    _, k, v, g, beta = tokens
    k = normalized(k) if case.options.qk_l2norm else k
    y, path = torch.empty_like(v), []
    for n, (first, last) in enumerate(pairwise(case.bounds)):
        state = start[n].double()
        for t in range(first, last):
            path.append(state)
            left = g[t].exp()[:, None, None] * state
            y[t] = v[t] - torch.einsum("hkv,hk->hv", left, k[t])
            state = left + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * y[t])
    return y, path


def _gradient_path(tokens: Any, dout: torch.Tensor, dfinal: torch.Tensor, case: Case) -> dict[int, torch.Tensor]:
    """The gradient of the state behind token t - 1, by t, without what later tokens of other sequences make of it."""
    q, k, _, g, beta = tokens
    q, k = (normalized(x) if case.options.qk_l2norm else x for x in (q, k))
    found = {}
    for n, (first, last) in enumerate(pairwise(case.bounds)):
        behind = dfinal[n].double()
        for t in reversed(range(first, last)):
            found[t + 1] = behind
            own = behind + case.options.scale * torch.einsum("hk,hv->hkv", q[t], dout[t].double())
            z = beta[t, :, None] * torch.einsum("hkv,hk->hv", own, k[t])
            behind = g[t].exp()[:, None, None] * (own - torch.einsum("hk,hv->hkv", k[t], z))
    return found


def _prepared(tokens: Any, dout: torch.Tensor, chunks: Sequence[Span], case: Case) -> tuple[torch.Tensor, ...]:
    """Y0 and W, and X0 and its W: see tl_kernels/delta_rule/cuda_chunks.py."""
    q, k, v, g, beta = tokens
    q, k = (normalized(x) if case.options.qk_l2norm else x for x in (q, k))
    y0, w, x0, back = torch.empty_like(v), torch.empty_like(k), torch.empty_like(v), torch.empty_like(k)
    for x in chunks:
        at = slice(x.first, x.last)
        qc, kc, vc, gc, oc = (a[at].transpose(0, 1) for a in (q, k, v, g, dout.double()))
        inside = decays(gc)
        N, M = (inside * (kc @ kc.mT)).tril(-1), case.options.scale * inside * (qc @ kc.mT)
        first, last = gc.cumsum(-1).exp().unsqueeze(-1), inside[..., -1, :].unsqueeze(-1)
        one, b = torch.eye(N.shape[-1], dtype=N.dtype), beta[at].T.unsqueeze(-2)
        y0[at], w[at] = (torch.linalg.solve(one + N * b, a).transpose(0, 1) for a in (vc, first * kc))
        x0[at], back[at] = (torch.linalg.solve(one + N.mT * b, a).transpose(0, 1) for a in (M.mT @ oc, last * kc))
    return y0, w, x0, back


# ---- what each kernel is given, and what it is to write


def _optional(**tensors: tuple[torch.Tensor, bool]) -> Tensors:
    return {name: x for name, (x, present) in tensors.items() if present}


def _forward(x: Solved) -> Trial:
    given = {"q": x.q, "k": x.k, "v": x.v, "beta": x.beta}
    given |= _optional(g=(x.g, x.case.gated), kv0=(x.start, x.case.state))
    kept = _optional(y=(x.y, x.case.keeps), states=(x.states, x.case.keeps))
    return Trial(given, {"o": x.o, **_optional(kv1=(x.final, x.case.final)), **kept})


def _backward(x: Solved) -> Trial:
    given = {"q": x.q, "k": x.k, "beta": x.beta, "y": x.y, "dout": x.dout, "states": x.states}
    given |= _optional(g=(x.g, x.case.gated), dkv1=(x.behind, x.case.final or x.case.cut))
    wanted = {"dq": x.dq, "dk": x.dk, "dv": x.dv, "dbeta": x.dbeta}
    wanted |= _optional(dg=(x.dg, x.case.gated and x.case.keeps))
    return Trial(given, wanted | _optional(dkv0=(x.dstart, x.case.state and not x.case.cut)))


def _prepare_back(x: Solved) -> Trial:
    given = {"q": x.q, "k": x.k, "dout": x.dout, "beta": x.beta, **_optional(g=(x.g, x.case.gated))}
    return Trial(given, {"x0": x.x0, "back": x.back})


def _carry_back(x: Solved) -> Trial:
    given = {"q": x.q, "k": x.k, "back": x.back, "beta": x.beta, "x0": x.x0, "dout": x.dout}
    given |= _optional(g=(x.g, x.case.gated), dkv1=(x.dfinal, x.case.final))
    return Trial(given, {"behind": x.behind, **_optional(dkv0=(x.dstart, x.case.state))})


def _prepare(x: Solved) -> Trial:
    given = {"q": x.q, "k": x.k, "v": x.v, "beta": x.beta, **_optional(g=(x.g, x.case.gated))}
    return Trial(given, {"y0": x.y0, "w": x.w})


def _carry(x: Solved) -> Trial:
    given = {"k": x.k, "w": x.w, "beta": x.beta, "y0": x.y0}
    given |= _optional(g=(x.g, x.case.gated), kv0=(x.start, x.case.state))
    return Trial(given, {"y": x.y, "states": x.states, **_optional(kv1=(x.final, x.case.final))})


def _output(x: Solved) -> Trial:
    given = {"q": x.q, "k": x.k, "beta": x.beta, "y": x.y, "states": x.states}
    return Trial(given | _optional(g=(x.g, x.case.gated)), {"o": x.o})


TRIALS = {
    "forward": _forward,
    "prepare": _prepare,
    "carry": _carry,
    "output": _output,
    "prepare_back": _prepare_back,
    "carry_back": _carry_back,
    "backward": _backward,
}
IN_CHUNKS = ("prepare", "output", "prepare_back")  # kernels whose spans are chunks


# ---- the check


def check(kernel: Kernel, problem: Problem, launcher: Launcher, device: Device = "cpu") -> None:
    """VerificationError unless the kernel, as the launcher runs it, is right in every case.

    Under the emulator a finding raises NotCleanError.

    Args:
        device: where the launcher's tensors lie; "cpu" for one that emulates.
    """
    stage = kernel.name.split(".")[1]
    if stage == "decode":
        run = CudaDecode({kernel.name: launcher})
        for gated in (True, False):
            check_one = lambda case, gated=gated: _check_decode(case, problem, run, device, gated)  # noqa: E731
            try_cases(kernel, problem, DECODE_CASES, check_one)
        return
    try_cases(kernel, problem, CASES, lambda case: _check_pass(stage, case, problem, launcher, device))


def _check_pass(stage: str, case: Case, p: Problem, launcher: Launcher, device: Device) -> None:
    chunk, width = (KEEPS, p.V) if stage == "forward" else (launcher.config.C, launcher.config.BV)
    with watched(
        TRIALS[stage](solved(case, p, chunk, width)), lambda name: _dtype(name, p), device, p.dtype
    ) as tensors:
        if case.packed:
            tensors["cu_seqlens"] = torch.tensor(case.bounds, dtype=torch.int32, device=device)
        walk = case.spans(p) if stage == "backward" else case.walk(p)
        walk = walk._replace(segment=chunk) if stage in IN_CHUNKS else walk
        packed = launcher.pack(_numbers(tensors, walk, case.options, case.spans(p).segment))
        launcher.launch(packed, [tensors.get(name) for name in TENSORS[stage]])


def _dtype(name: str, p: Problem) -> torch.dtype:
    if name in ("y", "y0", "w", "x0", "back", "states"):
        return getattr(torch, tile_dtype(p))
    return getattr(torch, p.dtype) if name in IO else torch.float32


def _numbers(tensors: Tensors, walk: Walk, opt: Options, piece: int) -> dict[str, float]:
    """Sizes and switches by the tensors that are there: what the runner hands over with them."""

    def rows(*names: str) -> int:
        return next((tensors[name].shape[0] for name in names if name in tensors), 0)

    N0, N1 = rows("kv0", "dkv0"), rows("kv1", "dkv1")
    return {
        **walk_numbers(walk),
        **option_numbers(opt),
        "tokens": rows("k"),
        "G": rows("g"),
        "rows": rows("dg") if "dout" in tensors else rows("y"),
        "chunks": rows("states"),
        "parts": tensors["dq"].shape[1] if "dq" in tensors else 0,
        "N0": N0,
        "N1": N1,
        "initial": int(N0 > 0),
        "final": int(N1 > 0),
        "gated": int("g" in tensors),
        "gates_wanted": int("dg" in tensors),
        "keeps": KEEPS * ("states" in tensors),
        "pieces": rows("behind"),
        "piece": piece,
    }


# ---- decode

DECODE_CASES = (
    Step(Options(0.5), 2, 0, H=2),
    Step(Options(1.0, qk_l2norm=True), 3, 3, 1, 2, (3, -1, 0), pool=5, apart=2),
    Step(Options(0.3), 2, 2, 1, 1, (3, 1), pool=4, index=torch.int64),
    Step(Options(0.2, qk_l2norm=True), 4, 2, heads=2, slots=(4, 1, -2, -1), pool=4),  # two that are no rows
)


def _check_decode(case: Step, p: Problem, run: CudaDecode, device: Device, gated: bool) -> None:
    """Through the runner of decode, which launches nothing else; with gates, or without."""
    new = case.generator()
    HV, opt = case.H * case.heads, case.options
    q, k, v = case.tokens_of(p, new)
    k = k if opt.qk_l2norm else normalized(k.float()).to(k.dtype)
    beta, g = new(*case.shape(HV)).sigmoid() * 2, -(new(*case.shape(HV)).abs() ** 3)
    g[0] = FORGETS
    tokens, pools = [q, k, v, *((g,) if gated else ()), beta], {"kv": new(case.rows, HV, p.K, p.V)}

    def with_gates(*given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return given if gated else (*given[:3], None, *given[3:])

    def by_definition(*given: torch.Tensor) -> None:
        q, k, v, g, beta, kv, slots, out = with_gates(*given)
        decode(q, k, v, g, beta, kv, slots, opt, out)

    def by_kernel(*given: torch.Tensor) -> None:
        q, k, v, g, beta, kv, slots, out = with_gates(*given)
        run(q, k, v, g, beta, kv, slots, opt, out)

    check_step(case, tokens, pools, p.dtype, device, by_definition, by_kernel)


# ---- what is timed

SHAPES = {  # rows, and columns of each head
    **dict.fromkeys(("q", "k", "w", "back", "dq", "dk"), ("tokens", "K")),
    **dict.fromkeys(("v", "o", "y0", "y", "x0", "dout", "dv"), ("tokens", "V")),
    **dict.fromkeys(("g", "beta", "dg", "dbeta"), ("tokens", "")),
    "states": ("chunks", "KV"),
    "behind": ("spans", "KV"),
}
WORK = {
    "forward": Work(("q", "k", "v", "g", "beta"), ("o",), 3),
    "prepare": Work(("k", "v", "g", "beta"), ("y0", "w"), 0),
    "carry": Work(("k", "w", "g", "beta", "y0"), ("y", "states"), 2),
    "output": Work(("q", "k", "g", "beta", "y", "states"), ("o",), 1),
    "prepare_back": Work(("q", "k", "dout", "g", "beta"), ("x0", "back"), 0),
    "carry_back": Work(("q", "k", "back", "g", "beta", "x0", "dout"), ("behind",), 3),
    "backward": Work(("q", "k", "g", "beta", "y", "dout", "states"), ("dq", "dk", "dv", "dg", "dbeta"), 6),
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
    """A launch to time, and its floating-point operations and bytes.

    Args:
        tokens: of each sequence; of no account to decode, which is timed with one.
        batch: sequences; decode has more of them.
        heads: value heads.
        sharing: how many of them a q/k head serves; of no account to decode.
    """
    stage = kernel.name.split(".")[1]
    if stage == "decode":
        return _decode_workload(kernel, problem, launcher, device, batch or DECODE_BATCH, heads)
    p, work = problem, WORK[stage]
    walk = timed_walk(p, batch or BATCH, tokens, heads, sharing, in_spans=False)
    walk = walk._replace(segment=launcher.config.C) if stage in IN_CHUNKS else walk
    tensors = {name: _timed(name, walk, launcher.config, p, device) for name in work.moved}
    packed = launcher.pack(_numbers(tensors, walk, Options(p.K**-0.5, qk_l2norm=True), walk.segment))
    return of_launch(launcher, packed, [tensors.get(name) for name in TENSORS[stage]], work, walk, tensors)


def _timed(name: str, walk: Walk, config: Blocks, p: Problem, device: Device) -> torch.Tensor:
    x = timed(name, SHAPES[name], walk, _dtype(name, p), device, config.C)
    if name in ("dq", "dk", "dg", "dbeta"):  # a part for each block of V
        x = x.repeat_interleave(blocks(config, p.K, p.V), 1)
    return {"g": -x.abs(), "beta": x.sigmoid()}.get(name, x)


def _decode_workload(kernel: Kernel, p: Problem, launcher: Launcher, device: Device, B: int, heads: int) -> Workload:
    io = getattr(torch, p.dtype)
    q, k, v = (torch.randn(B, heads, width, device=device).to(io) for width in (p.K, p.K, p.V))
    g, beta = -torch.rand(B, heads, device=device), torch.rand(B, heads, device=device)
    kv, out = torch.randn(B, heads, p.K, p.V, device=device), torch.empty_like(v)
    run, opt = CudaDecode({kernel.name: launcher}), Options(p.K**-0.5, qk_l2norm=True)
    moved = sum(x.nbytes for x in (q, k, v, g, beta, out)) + 2 * kv.nbytes
    return Workload(lambda: run(q, k, v, g, beta, kv, None, opt, out), 8.0 * B * heads * p.K * p.V, moved)
