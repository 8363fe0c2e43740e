"""How a kernel of this family is tried: inputs, the check against the float64 definition, and what to time.

Used before a binary is stored, by the tuner for every candidate, and by the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from autotune.verify import VerificationError, check_close
from linattn_tl import walks
from linattn_tl.ops.delta_rule.cpu import CpuDecode, CpuRunner, Kept
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, decode, normalized, recurrent
from linattn_tl.plain import each
from linattn_tl.truths import Truth, truth
from linattn_tl.walks import Walk
from tl_kernels.delta_rule import cpu as kernels
from tl_kernels.spec import Kernel, Problem

TRUTH = TorchRunner(recurrent)
DIMS = ((64, 64), (40, 72))  # one that fills panels and tiles, and one that leaves both ragged
PLAIN = Options(scale=0.2)
FORGETS = float("-inf")


@dataclass(frozen=True)
class Case:
    """One check: sizes, options, and whether there is a state to start from and a gradient of the last one."""

    B: int = 1
    T: int = 70
    H: int = 2
    heads: int = 1
    options: Options = PLAIN
    state: bool = False
    lengths: tuple[int, ...] | None = None
    decay: str = "mixed"  # or "strong": e-12 a token, and none at all on some; "none": there is no g


CASES = (
    Case(),
    Case(T=67, H=1, heads=2, state=True, options=Options(0.3, True, output_final_state=True)),
    Case(T=130, state=True, lengths=(0, 5, 5, 69, 130), options=Options(0.2, output_final_state=True)),
    Case(B=2, T=33, heads=3, options=Options(0.1, output_final_state=True), decay="none"),
    Case(T=80, state=True, options=Options(1.0, True, output_final_state=True), decay="strong"),
)


def gates(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    """[B, T, HV]: some near 0, some strong; a token that forgets all and one that keeps all in each sequence."""
    if case.decay == "none":
        return None
    shape = case.B, case.T, case.H * case.heads
    g = -(torch.rand(shape, generator=generator) ** 3)
    if case.decay == "strong":
        g = torch.where(torch.rand(shape, generator=generator) < 0.7, -27.6, g)
    if case.T > 20:
        g[:, 17], g[:, 11] = FORGETS, 0.0
    return g


def example(case: Case, p: Problem, seed: int = 0) -> tuple[list[Any], Any]:
    """(q, k, v, g, beta, state), the first three in the problem's dtype, the rest in fp32, and lengths.

    Keys have length 1, or any where the op normalises them; beta is in [0, 2], where 1 writes all anew.
    """
    r = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, p.dtype)
    N, HV = case.B if case.lengths is None else len(case.lengths) - 1, case.H * case.heads
    q, k = (torch.randn(case.B, case.T, case.H, p.K, generator=r) for _ in "qk")
    k = k if case.options.qk_l2norm else normalized(k)
    v = torch.randn(case.B, case.T, HV, p.V, generator=r)
    beta = 2 * torch.rand(case.B, case.T, HV, generator=r)
    if case.T > 20:
        beta[:, 5], beta[:, 19] = 0.0, 1.0
    state = torch.randn(N, HV, p.K, p.V, generator=r) if case.state else None
    lengths = None if case.lengths is None else torch.tensor(case.lengths)
    return [q.to(dtype), k.to(dtype), v.to(dtype), gates(case, r), beta, state], lengths


@cache
def _solved(i: int, p: Problem) -> tuple[list[Any], Any, Truth]:
    """A case and its truth, computed once in a process that checks many candidates."""
    inputs, lengths = example(CASES[i], p, seed=i)
    return inputs, lengths, truth(TRUTH, inputs, lengths, CASES[i].options)


def check(kernel: Kernel, p: Problem, launcher: Any) -> None:
    """VerificationError unless one kernel of the family, by a loaded binary of it, is right in every case.

    Whatever mode the caller is in: a first call may be made under no_grad, inference_mode or autocast.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for K, V in DIMS:
            _check_dims(kernel, p._replace(K=K, V=V), runner_of(kernel, launcher))


def runner_of(kernel: Kernel, launcher: Any) -> Any:
    """A runner that has one kernel only."""
    return (CpuDecode if kernel.name == kernels.DECODE.name else CpuRunner)({kernel.name: launcher})


def _check_dims(kernel: Kernel, p: Problem, runner: Any) -> None:
    if kernel.name == kernels.DECODE.name:
        return _check_decode(p, runner)
    check_one = _check_forward if kernel.name == kernels.FWD.name else _check_backward
    for i, case in enumerate(CASES):
        inputs, lengths, exact = _solved(i, p)
        try:
            check_one(runner, inputs, lengths, case.options, exact)
        except VerificationError as error:
            raise VerificationError(f"{kernel.name} {p.dtype} K={p.K} V={p.V}, {case}: {error}") from None
    return None


def _check_forward(runner: CpuRunner, inputs: list[Any], lengths: Any, opt: Options, exact: Truth) -> None:
    outputs, kept = runner.forward(inputs, lengths, opt)
    for name, x, want in zip(("o", "state"), outputs, exact.outputs, strict=True):
        if x is not None:
            check_close(name, x, want, dtype=_budget(name, inputs))
    walk = walks.walk_of(inputs[0], inputs[2], lengths)
    (y, states), used = kept_by(inputs, lengths, opt, walk)
    for name, found in (("kept", kept), ("kept alone", runner.kept(inputs[:5], walk, inputs[5], opt))):
        check_close(f"{name} y", found[0], y, dtype=_budget("state", inputs))
        check_close(f"{name} states", found[1][used], states[used], dtype=_budget("state", inputs))


def _check_backward(runner: CpuRunner, inputs: list[Any], lengths: Any, opt: Options, exact: Truth) -> None:
    """The gradients, from what the definition keeps."""
    walk = walks.walk_of(inputs[0], inputs[2], lengths)
    y, states = kept_by(inputs, lengths, opt, walk)[0]
    for gates_too in {inputs[3] is not None, False}:
        found = runner.gradients(inputs[:5], walk, (y.float(), states.float()), exact.upstream, opt, gates_too)
        for name, x, want in zip(("dq", "dk", "dv", "dg", "dbeta", "dstate"), found, exact.grads, strict=True):
            if x is not None and not (name == "dstate" and inputs[5] is None):
                want = torch.zeros_like(x).double() if want is None else want
                check_close(name, x, want, dtype=_budget("o", inputs))


def kept_by(inputs: Any, lengths: Any, opt: Options, walk: Walk) -> tuple[Kept, list[int]]:
    """What forward keeps for backward, by the definition in float64, and which places of the states are used."""
    _, k, v, g, beta, initial = each(torch.Tensor.double, *inputs)
    k = (normalized(k) if opt.qk_l2norm else k).repeat_interleave(walk.heads, 2)
    g, every = torch.zeros_like(beta) if g is None else g, kernels.KEPT_EVERY
    y, states, used = torch.zeros_like(v), walks.chunk_states(walk, every).double().zero_(), []
    bounds = [(n, 0, walk.T) for n in range(walk.N)]
    if lengths is not None:
        bounds = [(0, a, b) for a, b in pairwise(lengths.tolist())]
    for n, (row, begin, end) in enumerate(bounds):
        S = torch.zeros(v.shape[2], walk.K, walk.V).double() if initial is None else initial[n]
        slot = n * -(-walk.T // every) if lengths is None else begin // every + n
        for t in range(begin, end):
            if (t - begin) % every == 0:
                used.append(slot + (t - begin) // every)
                states[used[-1], :, : walk.K, : walk.V] = S
            S = g[row, t].exp()[:, None, None] * S
            y[row, t] = v[row, t] - (k[row, t].unsqueeze(-2) @ S).squeeze(-2)
            S = S + k[row, t].unsqueeze(-1) * (beta[row, t].unsqueeze(-1) * y[row, t]).unsqueeze(-2)
    return (y, states), used


def _budget(name: str, inputs: list[Any]) -> str:
    """The dtype whose budget holds: a fp32 state made of 16-bit outputs is only as good as those."""
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    return "float32" if name == "state" else dtype


def _check_decode(p: Problem, runner: Any) -> None:
    for n, heads, slots, decay, norm in ((1, 1, None, "mixed", False), (6, 2, [2, -1, 0], "none", True)):
        case = Case(B=3, T=n, H=2, heads=heads, decay=decay, options=Options(0.3, norm, output_final_state=True))
        (*tokens, _), _ = example(case, p, seed=n)
        if tokens[3] is not None:
            tokens[3][0, 0] = FORGETS
        (*_, state), _ = example(Case(B=4 if slots else 3, T=1, H=2, heads=heads, state=True), p, seed=9)
        picked = None if slots is None else torch.tensor(slots)
        exact, opt = state.double(), case.options
        want = torch.zeros_like(tokens[2], dtype=torch.float64)
        q, k, v, g, beta = each(torch.Tensor.double, *tokens)
        decode(q, k, v, g, beta, exact, picked, opt, want)
        got = runner(*tokens, state, picked, opt, torch.full_like(tokens[2], float("nan")))
        for name, x, y in (("o", got, want), ("state", state, exact)):
            check_close(f"decode n={n}: {name}", x, y, dtype=p.dtype if name == "o" else "float32")


def workload(kernel: Kernel, p: Problem, launcher: Any) -> tuple[Callable[[], object], float]:
    """What the tuner times for a kernel, and its floating-point operations (0 where bytes bound it)."""
    runner = runner_of(kernel, launcher)
    if kernel.name == kernels.DECODE.name:
        (*tokens, state), _ = example(Case(B=4, T=1, H=8, state=True), p)
        out, opt = torch.empty_like(tokens[2]), Options(output_final_state=True)
        return lambda: runner(*tokens, state, None, opt, out), 0.0
    case = Case(B=1, T=1024, H=4)
    inputs, lengths = example(case, p)
    tokens = case.B * case.T * case.H
    if kernel.name == kernels.FWD.name:
        return lambda: runner.forward(inputs, lengths, case.options, keep=False), tokens * (6.0 * p.K * p.V)
    walk = walks.walk_of(inputs[0], inputs[2], lengths)
    kept = torch.randn(inputs[2].shape), walks.chunk_states(walk, kernels.KEPT_EVERY).zero_()
    upstream = torch.randn_like(inputs[2]), None
    run = lambda: runner.gradients(inputs[:5], walk, kept, upstream, case.options, gates=True)  # noqa: E731
    return run, tokens * (12.0 * p.K * p.V)
