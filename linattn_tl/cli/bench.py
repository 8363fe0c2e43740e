"""linattn-tl bench: the backends that can serve a call, timed against each other."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from linattn_tl.cli._text import table

NAME = "bench"
HELP = "time the backends that can serve a call against each other"
ROUNDS = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", default="linear_attention", help="an op, or its _decode (default linear_attention)")
    parser.add_argument("--B", type=int, default=1, help="sequences (default 1)")
    parser.add_argument("--T", type=int, help="tokens a sequence (default 4096; in decode 1)")
    parser.add_argument("--H", type=int, default=8, help="heads of q and k (default 8)")
    parser.add_argument("--HV", type=int, help="heads of v, a multiple of H (default H)")
    parser.add_argument("--K", type=int, default=64, help="head dim of q and k (default 64)")
    parser.add_argument("--V", type=int, help="head dim of v (default K)")
    parser.add_argument("--dtype", default="float32", help="of q, k and v (default float32)")
    parser.add_argument("--threads", type=int, help="threads (default: as torch has it)")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"samples of each (default {ROUNDS})")


@dataclass(frozen=True)
class Row:
    """One backend's time, and what it means."""

    backend: str
    median_us: float
    spread_us: float
    speed: float  # GFLOP/s; in decode GB/s
    ratio: float  # its time over the first one's


def run(args: argparse.Namespace) -> int:
    import torch

    from autotune import measure
    from linattn_tl import registry

    op = registry.get_op(args.op)
    _complete(args, op)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads or before)
    try:
        calls, reasons = _calls(op, args)
        times = measure.interleaved(calls, rounds=args.rounds, min_round_s=5e-3)
        threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    work, unit = _work(op, args)
    first = times[next(iter(calls))].median_us
    rows = [
        Row(name, t.median_us, t.iqr_us, work / t.median_us / 1e3, t.median_us / first) for name, t in times.items()
    ]
    if args.json:
        print(json.dumps(_as_json(op, args, threads, rows, unit, reasons), indent=1))
    else:
        print(_text(op, args, threads, rows, unit, reasons))
    return 0


def _complete(args: argparse.Namespace, op: Any) -> None:
    """Sizes that were left out, and refusals of what makes no sense together."""
    decodes = op.autograd is None
    args.T = args.T or (1 if decodes else 4096)
    args.HV, args.V = args.HV or args.H, args.V or args.K
    for name in ("B", "T", "H", "HV", "K", "V", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; expected at least 1")
    if args.HV % args.H:
        raise ValueError(f"--HV is {args.HV}; expected a multiple of --H = {args.H}")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads is {args.threads}; expected at least 1")
    if args.backward and decodes:
        raise ValueError(f"--backward: {op.name} works in place and has no backward")


def _calls(op: Any, args: argparse.Namespace) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """A call for each backend that serves the shape, fastest expected first, and why the others do not."""
    from linattn_tl import registry
    from tl_kernels.spec import Problem

    problem = Problem(op.name, args.dtype, args.K, args.V)
    calls, reasons = {}, {}
    for impl in op.impls:
        reason = impl.refuse(problem)
        if reason is None and impl.backend == "jit" and "binary" in calls:
            reason = "the same kernels as binary"
        if reason is None:
            if impl.backend == "jit":
                print(f"building {op.name} for {args.dtype}, about ten seconds", file=sys.stderr)
            registry.choose(op, problem, impl.backend)  # builds here, not while something is timed
            calls[impl.backend] = _call(op, args, problem, impl.backend)
        else:
            reasons[impl.backend] = reason
    return calls, reasons


def _call(op: Any, args: argparse.Namespace, problem: Any, backend: str) -> Callable[[], object]:
    import torch

    from linattn_tl import apply

    q, k, v, *state = _example(op, args)
    if op.autograd is None:
        out = torch.empty_like(v)
        return lambda: op.call(q, k, v, tuple(state), out=out, backend=backend)
    options, missing = op.autograd.options(), [None] * len(state)
    forward = lambda: apply.apply(op, problem, (q, k, v, *missing), None, options, backend)[0]  # noqa: E731
    if not args.backward:
        return forward
    upstream = torch.randn_like(v)
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(forward(), (q, k, v), upstream)


def _example(op: Any, args: argparse.Namespace) -> list[Any]:
    """q, k, v and a zero state (kv, z), the same for every backend."""
    import torch

    if args.dtype not in ("float32", "bfloat16", "float16", "float64"):
        raise ValueError(f"--dtype is {args.dtype}; expected float32, bfloat16, float16 or float64")
    dtype, g = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    sizes = ((args.H, args.K), (args.H, args.K), (args.HV, args.V))
    tokens = [torch.randn(args.B, args.T, *size, generator=g).to(dtype) for size in sizes]
    kv = torch.zeros(args.B, args.HV, args.K, args.V, dtype=wide)
    return [*tokens, kv, torch.zeros(args.B, args.H, args.K, dtype=wide)]


def _work(op: Any, args: argparse.Namespace) -> tuple[float, str]:
    """Floating-point operations in the state, or bytes of the state in decode, and the unit of their speed."""
    state = args.B * args.HV * args.K * args.V
    if op.autograd is None:
        size = 8 if args.dtype == "float64" else 4
        return 2.0 * size * state, "GB/s"
    return (14.0 if args.backward else 4.0) * args.T * state, "GFLOP/s"


def _text(op: Any, args: argparse.Namespace, threads: int, rows: list[Row], unit: str, reasons: dict[str, str]) -> str:
    sizes = " ".join(f"{name}={getattr(args, name)}" for name in ("B", "T", "H", "HV", "K", "V"))
    what = "forward + backward" if args.backward else "decode" if op.autograd is None else "forward"
    cells = [(r.backend, f"{r.median_us:.1f}", f"{r.spread_us:.1f}", f"{r.speed:.1f}", f"{r.ratio:.2f}x") for r in rows]
    lines = [
        f"{op.name}, {what}, {args.dtype}, {sizes}, threads={threads}",
        table(("backend", "median us", "spread us", unit, "time"), cells),
        *(f"{name}: not timed, {reason}" for name, reason in reasons.items()),
    ]
    counted = "the state read and written once" if unit == "GB/s" else "work on the state only"
    return "\n".join([*lines, f"{unit} count {counted}."])


def _as_json(
    op: Any, args: argparse.Namespace, threads: int, rows: list[Row], unit: str, reasons: dict[str, str]
) -> dict[str, Any]:
    sizes = {name: getattr(args, name) for name in ("B", "T", "H", "HV", "K", "V")}
    head = {"op": op.name, **sizes, "dtype": args.dtype, "threads": threads, "backward": args.backward}
    return {**head, "unit": unit, "rows": [asdict(r) for r in rows], "not_timed": reasons}
