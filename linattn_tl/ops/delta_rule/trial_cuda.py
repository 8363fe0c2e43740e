"""How the CUDA kernel of a step is tried: the check against the float64 definition, and what to time.

It is launched through a Launcher: on a GPU, or under the emulator before a binary is stored. Around every tensor lie
guards, see linattn_tl/guarded.py.
"""

import torch

from linattn_tl.guarded import Device, Step, check_step, try_cases
from linattn_tl.launchers import Launcher
from linattn_tl.ops.delta_rule.cuda import CudaDecode
from linattn_tl.ops.delta_rule.definition import Options, decode, normalized
from linattn_tl.workloads import DECODE_BATCH, HEADS, Workload
from tl_kernels.spec import Kernel, Problem

FORGETS = float("-inf")
CASES = (
    Step(Options(0.5), 2, 0, H=2),
    Step(Options(1.0, qk_l2norm=True), 3, 3, 1, 2, (3, -1, 0), pool=5, apart=2),
    Step(Options(0.3), 2, 2, 1, 1, (3, 1), pool=4, index=torch.int64),
    Step(Options(0.2, qk_l2norm=True), 4, 2, heads=2, slots=(4, 1, -2, -1), pool=4),  # two that are no rows
)


def check(kernel: Kernel, problem: Problem, launcher: Launcher, device: Device = "cpu") -> None:
    """VerificationError unless the kernel, as the launcher runs it, is right in every case, with gates and without.

    Under the emulator a finding raises NotCleanError.

    Args:
        device: where the launcher's tensors lie; "cpu" for one that emulates.
    """
    run = CudaDecode({kernel.name: launcher})
    for gated in (True, False):
        try_cases(kernel, problem, CASES, lambda case, gated=gated: _check(case, problem, run, device, gated))


def _check(case: Step, p: Problem, run: CudaDecode, device: Device, gated: bool) -> None:
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


def workload(
    kernel: Kernel,
    problem: Problem,
    launcher: Launcher,
    device: Device = "cpu",
    *,
    tokens: int = 1,
    batch: int | None = None,
    heads: int = HEADS,
) -> Workload:
    """A step of one token to time, and its floating-point operations and bytes.

    Args:
        tokens: of no account: one.
        batch: sequences.
        heads: of q, k and v alike.
    """
    p, B, io = problem, batch or DECODE_BATCH, getattr(torch, problem.dtype)
    q, k, v = (torch.randn(B, heads, width, device=device).to(io) for width in (p.K, p.K, p.V))
    g, beta = -torch.rand(B, heads, device=device), torch.rand(B, heads, device=device)
    kv, out = torch.randn(B, heads, p.K, p.V, device=device), torch.empty_like(v)
    run, opt = CudaDecode({kernel.name: launcher}), Options(p.K**-0.5, qk_l2norm=True)
    moved = sum(x.nbytes for x in (q, k, v, g, beta, out)) + 2 * kv.nbytes
    return Workload(lambda: run(q, k, v, g, beta, kv, None, opt, out), 8.0 * B * heads * p.K * p.V, moved)
