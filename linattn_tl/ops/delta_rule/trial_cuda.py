"""How a CUDA kernel of this family is tried: the check against the float64 definition, and what to time.

It is launched through a Launcher: on a GPU, or under the emulator before a binary is stored. Around every tensor lie
guards, see linattn_tl/guarded.py.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from linattn_tl.guarded import Device, Step, Tensors, Trial, check_step, one_thread, try_cases, watched
from linattn_tl.launchers import Launcher
from linattn_tl.ops.delta_rule.cuda import CudaDecode, option_numbers
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, decode, normalized, recurrent
from linattn_tl.spans import Walk, walk_numbers
from linattn_tl.workloads import BATCH, DECODE_BATCH, HEADS, TOKENS, Work, Workload, of_launch, timed, timed_walk
from tl_kernels.spec import Kernel, Problem

TRUTH = TorchRunner(recurrent)
FORGETS = float("-inf")
TENSORS = ("q", "k", "v", "g", "beta", "o", "kv0", "kv1", "cu_seqlens")  # of forward, in order
IO = ("q", "k", "v", "o")  # in the problem's dtype; all others fp32


# ---- forward


@dataclass(frozen=True)
class Case:
    """Sizes, options, and which of the optional tensors are there."""

    tokens: tuple[int, ...]  # of each sequence; all the same unless packed
    packed: bool = False
    H: int = 1
    heads: int = 1  # value heads of a q/k head
    options: Options = Options()  # noqa: RUF009
    state: bool = False  # there is an initial state
    final: bool = False  # the final state is wanted
    strong: bool = False  # most tokens decay by 1e-12; a few forget all, and a few keep all

    def walk(self, p: Problem) -> Walk:
        length, total = 0 if self.packed else self.tokens[0], sum(self.tokens)
        H, HV = self.H, self.H * self.heads
        return Walk(len(self.tokens), length, total, H, HV, p.K, p.V, length or total + 1)


CASES = (
    Case((70, 70), H=2, options=Options(0.5)),
    Case((1,), H=2, heads=2, options=Options(1.0, qk_l2norm=True), state=True, final=True),
    Case((5, 0, 64, 33), True, heads=2, options=Options(0.3), final=True),
    Case((0, 130, 0, 20), True, 1, 2, Options(0.7, qk_l2norm=True), state=True, final=True),
    Case((90,), options=Options(0.4), state=True, final=True, strong=True),
)


def example(case: Case, p: Problem) -> list[torch.Tensor]:
    """q, k, v, g, beta, rows of tokens, and the initial states. beta is in [0, 2], keys have length 1 or get it."""
    r = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))
    io, walk = getattr(torch, p.dtype), case.walk(p)
    T, H, HV = walk.tokens, walk.H, walk.HV
    q, k = (torch.randn(T, H, p.K, generator=r) for _ in "qk")
    k = k if case.options.qk_l2norm else normalized(k)
    v = torch.randn(T, HV, p.V, generator=r)
    g = -(torch.rand(T, HV, generator=r) ** 3)
    if case.strong:
        g = torch.where(torch.rand(T, HV, generator=r) < 0.7, -27.6, g)
    if T > 20:
        g[17], g[11] = FORGETS, 0.0
    beta = 2 * torch.rand(T, HV, generator=r)
    state = torch.randn(walk.sequences, HV, p.K, p.V, generator=r) * case.state
    return [q.to(io), k.to(io), v.to(io), g, beta, state]


@lru_cache(maxsize=16)
def _solved(case: Case, p: Problem) -> Trial:
    """Computed once in a process that checks many candidates."""
    *tokens, state = example(case, p)
    lengths = torch.tensor([0, *accumulate(case.tokens)])
    with one_thread():
        opt = case.options._replace(output_final_state=True)
        wide = [x.double().unsqueeze(0) for x in tokens]
        (o, final), _ = TRUTH.forward((*wide, state.double()), lengths, opt)
    given = dict(zip(TENSORS, tokens, strict=False)) | ({"kv0": state} if case.state else {})
    return Trial(given, {"o": o[0]} | ({"kv1": final} if case.final else {}))


def check(kernel: Kernel, problem: Problem, launcher: Launcher, device: Device = "cpu") -> None:
    """VerificationError unless the kernel, as the launcher runs it, is right in every case.

    Under the emulator a finding raises NotCleanError.

    Args:
        device: where the launcher's tensors lie; "cpu" for one that emulates.
    """
    if kernel.name.endswith("decode"):
        run = CudaDecode({kernel.name: launcher})
        for gated in (True, False):
            check_one = lambda case, gated=gated: _check_decode(case, problem, run, device, gated)  # noqa: E731
            try_cases(kernel, problem, DECODE_CASES, check_one)
        return
    try_cases(kernel, problem, CASES, lambda case: _check_forward(case, problem, launcher, device))


def _check_forward(case: Case, p: Problem, launcher: Launcher, device: Device) -> None:
    with watched(_solved(case, p), lambda name: _dtype(name, p), device, p.dtype) as tensors:
        if case.packed:
            bounds = [0, *accumulate(case.tokens)]
            tensors["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
        packed = launcher.pack(_numbers(tensors, case.walk(p), case.options))
        launcher.launch(packed, [tensors.get(name) for name in TENSORS])


def _dtype(name: str, p: Problem) -> torch.dtype:
    return getattr(torch, p.dtype) if name in IO else torch.float32


def _numbers(tensors: Tensors, walk: Walk, opt: Options) -> dict[str, float]:
    """Sizes and switches by the tensors that are there: what the runner hands over with them."""
    N0, N1 = (tensors[name].shape[0] if name in tensors else 0 for name in ("kv0", "kv1"))
    sizes = {"tokens": tensors["q"].shape[0], "N0": N0, "N1": N1, "initial": int(N0 > 0), "final": int(N1 > 0)}
    return {**walk_numbers(walk), **option_numbers(opt), **sizes}


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

SHAPES = {  # columns of each value head
    **dict.fromkeys(("q", "k"), "K"),
    **dict.fromkeys(("v", "o"), "V"),
    **dict.fromkeys(("g", "beta"), ""),
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
) -> Workload:
    """A launch to time, and its floating-point operations and bytes.

    Args:
        tokens: of each sequence; of no account to decode, which is timed with one.
        batch: sequences; decode has more of them.
        heads: of q, k and v alike.
    """
    if kernel.name.endswith("decode"):
        return _decode_workload(kernel, problem, launcher, device, batch or DECODE_BATCH, heads)
    p, work = problem, Work(("q", "k", "v", "g", "beta"), ("o",), 3)
    walk = timed_walk(p, batch or BATCH, tokens, heads, in_spans=False)
    tensors = {name: timed("tokens", columns, walk, _dtype(name, p), device) for name, columns in SHAPES.items()}
    tensors["g"], tensors["beta"] = -tensors["g"].abs(), tensors["beta"].sigmoid()
    packed = launcher.pack(_numbers(tensors, walk, Options(p.K**-0.5, qk_l2norm=True)))
    return of_launch(launcher, packed, [tensors.get(name) for name in TENSORS], work, walk, tensors)


def _decode_workload(kernel: Kernel, p: Problem, launcher: Launcher, device: Device, B: int, heads: int) -> Workload:
    io = getattr(torch, p.dtype)
    q, k, v = (torch.randn(B, heads, width, device=device).to(io) for width in (p.K, p.K, p.V))
    g, beta = -torch.rand(B, heads, device=device), torch.rand(B, heads, device=device)
    kv, out = torch.randn(B, heads, p.K, p.V, device=device), torch.empty_like(v)
    run, opt = CudaDecode({kernel.name: launcher}), Options(p.K**-0.5, qk_l2norm=True)
    moved = sum(x.nbytes for x in (q, k, v, g, beta, out)) + 2 * kv.nbytes
    return Workload(lambda: run(q, k, v, g, beta, kv, None, opt, out), 8.0 * B * heads * p.K * p.V, moved)
