"""How a kernel of this family is tried: inputs, the check against the float64 definition, and what to time.

Used before a binary is stored, by the tuner for every candidate, and by the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autotune.verify import VerificationError, check_close
from linattn_tl import truths
from linattn_tl.ops.linear_attention.cpu import CpuDecode, CpuRunner
from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, decode, recurrent
from linattn_tl.truths import Truth
from tl_kernels.linear_attention import cpu as kernels
from tl_kernels.spec import Kernel, Problem

TRUTH = TorchRunner(recurrent)
DEFAULTS = Options()
DIMS = ((64, 64), (40, 72))  # one that fills panels and tiles, and one that leaves both ragged


@dataclass(frozen=True)
class Case:
    """One check: sizes, options, and whether there is a state to start from and a gradient of the last one."""

    B: int = 1
    T: int = 70
    H: int = 2
    heads: int = 1
    options: Options = DEFAULTS
    state: bool = False
    lengths: tuple[int, ...] | None = None


CASES = (
    Case(),
    Case(T=67, H=1, heads=2, state=True, options=Options(scale=0.3, output_final_state=True)),
    Case(T=130, state=True, lengths=(0, 5, 5, 69, 130), options=Options("relu", eps=1e-2, output_final_state=True)),
    Case(B=2, T=33, options=Options("identity", normalize=False, scale=0.1, output_final_state=True)),
    Case(T=40, H=3, state=True, options=Options(causal=False, output_final_state=True)),
    Case(T=40, options=Options(causal=False)),
)


def example(case: Case, p: Problem, seed: int = 0) -> tuple[list[Any], Any]:
    """(q, k, v, kv, z) in the problem's dtype, and lengths."""
    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, p.dtype)
    N = case.B if case.lengths is None else len(case.lengths) - 1
    HV = case.H * case.heads
    new = lambda *size: torch.randn(*size, generator=g)  # noqa: E731
    q, k = (new(case.B, case.T, case.H, p.K).to(dtype) for _ in "qk")
    v = new(case.B, case.T, HV, p.V).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    kv, z = new(N, HV, p.K, p.V).to(wide), (new(N, case.H, p.K).abs() * 3).to(wide)
    lengths = None if case.lengths is None else torch.tensor(case.lengths)
    return [q, k, v, kv if case.state else None, z if case.state else None], lengths


@cache
def _solved(i: int, p: Problem) -> tuple[list[Any], Any, Truth]:
    """A case and its truth, computed once in a process that checks many candidates."""
    inputs, lengths = example(CASES[i], p, seed=i)
    return inputs, lengths, truth(inputs, lengths, CASES[i].options)


def truth(inputs: list[Any], lengths: Any, opt: Options) -> Truth:
    """By the definition, token by token."""
    return truths.truth(TRUTH, inputs, lengths, opt)


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
    for i, case in enumerate(CASES):
        inputs, lengths, exact = _solved(i, p)
        try:
            if kernel.name == kernels.FWD.name:
                _check_forward(runner, inputs, lengths, case.options, exact)
            else:
                needs = [True] + [False] * 4 if kernel.name == kernels.BWD_Q.name else [False] + [True] * 4
                _check_backward(runner, inputs, lengths, case.options, exact, needs)
        except VerificationError as error:
            raise VerificationError(f"{kernel.name} {p.dtype} K={p.K} V={p.V}, {case}: {error}") from None
    return None


def _check_forward(runner: CpuRunner, inputs: list[Any], lengths: Any, opt: Options, exact: Truth) -> None:
    outputs, _ = runner.forward(inputs, lengths, opt)
    for name, x, want in zip(("o", "kv", "z"), outputs, exact.outputs, strict=True):
        if x is not None:
            check_close(name, x, want, dtype=_budget(name, inputs))


def _check_backward(
    runner: CpuRunner, inputs: list[Any], lengths: Any, opt: Options, exact: Truth, needs: list[bool]
) -> None:
    o, kv, z = exact.outputs
    wide = torch.float32
    outputs = (o.to(inputs[2].dtype), kv.to(wide), z.to(wide))
    saved = (exact.saved[0].to(wide).contiguous(), kv.to(wide), z.to(wide))
    needs = [n and x is not None for n, x in zip(needs, inputs, strict=True)]
    found = runner.backward(inputs, outputs, saved, lengths, exact.upstream, needs, opt)
    for name, x, want, need in zip(("dq", "dk", "dv", "dkv", "dz"), found, exact.grads, needs, strict=True):
        if need:
            check_close(name, x, torch.zeros_like(x).double() if want is None else want, dtype=_budget(name, inputs))


def _budget(name: str, inputs: list[Any]) -> str:
    """The dtype whose budget holds: a fp32 state made of 16-bit outputs is only as good as those."""
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    return dtype if name not in ("kv", "z") or dtype == "float64" else "float32"


def _check_decode(p: Problem, runner: CpuDecode) -> None:
    for n, heads, slots in ((1, 1, None), (6, 2, [2, -1, 0])):
        case = Case(B=3, T=n, H=2, heads=heads, state=True)
        (q, k, v, _, _), _ = example(case, p, seed=n)
        pool = Case(B=4 if slots else 3, T=1, H=2, heads=heads, state=True)
        (_, _, _, kv, z), _ = example(pool, p, seed=9)
        picked = None if slots is None else torch.tensor(slots)
        exact_kv, exact_z = kv.double(), z.double()
        opt = Options(output_final_state=True)
        want = decode(q.double(), k.double(), v.double(), exact_kv, exact_z, picked, opt, torch.zeros_like(v).double())
        got = runner(q, k, v, kv, z, picked, opt, torch.full_like(v, float("nan")))
        for name, x, y in (("o", got, want), ("kv", kv, exact_kv), ("z", z, exact_z)):
            check_close(f"decode n={n}: {name}", x, y, dtype=p.dtype if name == "o" else "float32")


def workload(kernel: Kernel, p: Problem, launcher: Any) -> tuple[Callable[[], object], float]:
    """What the tuner times for a kernel, and its floating-point operations (0 where bytes bound it)."""
    runner = runner_of(kernel, launcher)
    if kernel.name == kernels.DECODE.name:
        (q, k, v, kv, z), _ = example(Case(B=4, T=1, H=8, state=True), p)
        out, opt = torch.empty_like(v), Options(output_final_state=True)
        return lambda: runner(q, k, v, kv, z, None, opt, out), 0.0
    case = Case(B=1, T=1024, H=4)
    inputs, lengths = example(case, p)
    tokens = case.B * case.T * case.H
    if kernel.name == kernels.FWD.name:
        return lambda: runner.forward(inputs, lengths, case.options), tokens * (4.0 * p.K * p.V)
    o = torch.randn_like(inputs[2])
    den = torch.rand(case.B, case.T, case.H) + 1.0
    needs = [kernel.name == kernels.BWD_Q.name] + [kernel.name == kernels.BWD_KV.name] * 2 + [False] * 2
    flops = tokens * (4.0 if needs[0] else 6.0) * p.K * p.V
    grads = (torch.randn_like(o), None, None)
    return lambda: runner.backward(inputs, (o, None, None), (den, None, None), None, grads, needs, case.options), flops
