"""The package on this machine, from start to end, in a few minutes: `make demo`, or `python examples/demo.py`.

1  look at the machine              4  benchmark against other implementations
2  tune the kernels for it          5  train and run a small language model
3  call the ops from PyTorch, and compare them with the definition
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 5
BUDGET_S, MODEL_S = 150.0, 60.0
T, HEADS, DIM = 512, 4, 64  # of step 3: every token is also computed one by one, in float64
TOLERANCE = 1e-4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tune, check, benchmark and use the kernels on this machine.")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of tuning (default 150)")
    parser.add_argument("--seconds", type=float, default=MODEL_S, help="seconds of training (default 60)")
    parser.add_argument("--out", type=Path, default=ROOT / "demo_output", help="where plots and numbers go")
    args = parser.parse_args(argv)
    start, out = time.monotonic(), args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    announce(1, "what this machine has, and what would serve each op now")
    if run("-m", "linattn_tl", "doctor"):
        return stopped(1)
    announce(2, f"build, check and time kernels for this CPU, for at most {args.budget:.0f} s. Kept for later runs")
    if run("-m", "linattn_tl", "tune", "--arch", "native", "--budget", f"{args.budget:g}"):
        print("No kernel could be tuned here, the reason is above. The plain torch backend serves the rest.")
    announce(3, "call the ops from PyTorch on real text, and compare with the definition in float64")
    if not check_ops():
        return stopped(3)
    announce(4, "measure against other implementations, one or two minutes. torch.compile takes most of it")
    if run("-m", "benchmarks.run", "--quick", "--json", str(out / "benchmark.json"), "--plot", str(out)):
        return stopped(4)
    announce(5, f"train a small byte-level language model for {args.seconds:.0f} s, then generate with it")
    if run("-m", "examples.byte_lm", "--seconds", f"{args.seconds:g}", "--out", str(out)):
        return stopped(5)
    print(f"\nDone in {time.monotonic() - start:.0f} s. Files in {shown(out)}:")
    for path in sorted(out.iterdir()):
        print(f"  {path.name:<16} {path.stat().st_size:>9,} bytes")
    return 0


def announce(step: int, what: str) -> None:
    print(f"\n[{step}/{STEPS}] {what}\n", flush=True)


def run(*args: str) -> int:
    """A command of this Python, from the root of the source tree; its exit code."""
    return subprocess.run([sys.executable, *args], cwd=ROOT, check=False).returncode


def stopped(step: int) -> int:
    print(f"\nStopped: step {step} failed, the reason is above.", file=sys.stderr)
    return 1


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


# ---- step 3


@dataclass(frozen=True)
class Check:
    what: str
    backend: str
    error: float  # the largest difference from the definition, over the largest value
    ms: float

    def __str__(self) -> str:
        verdict = "ok" if self.error <= TOLERANCE else "WRONG"
        return f"{self.what:<30} {self.backend:<8} {self.error:>12.1e} {self.ms:>9.2f}  {verdict}"


def check_ops() -> bool:
    """Forward, backward and decode on this file's own bytes, each against the token-by-token definition."""
    import torch

    torch.manual_seed(0)
    text = Path(__file__).read_bytes()[:T]
    embedded = torch.nn.Embedding(256, HEADS * DIM)(torch.tensor(list(text)))
    projected = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)(embedded).detach()
    q, k, v = projected.view(1, T, 3, HEADS, DIM).unbind(2)
    print(f"{'':<30} {'served':<8} {'max rel err':>12} {'ms':>9}")
    checks = [*sequence_checks(q, k, v), decode_check(q, k, v)]
    for check in checks:
        print(check)
    return all(check.error <= TOLERANCE for check in checks)


def sequence_checks(*inputs: Any) -> list[Check]:
    import torch

    from linattn_tl import last_backend, linear_attention
    from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, recurrent

    leaves = [x.detach().requires_grad_() for x in inputs]
    exact_leaves = [x.detach().double().requires_grad_() for x in inputs]
    upstream = torch.randn(inputs[2].shape)
    torch.autograd.grad(linear_attention(*leaves)[0], leaves, upstream)  # loads the kernels, and autograd's modules
    forward_ms, (o, _) = timed(lambda: linear_attention(*leaves))
    backward_ms, grads = timed(lambda: torch.autograd.grad(o, leaves, upstream))
    served = last_backend("linear_attention") or ""
    exact = TorchRunner(recurrent).forward((*exact_leaves, None, None), None, Options())[0][0]
    exact_grads = torch.autograd.grad(exact, exact_leaves, upstream.double())
    error = max(relative(g, e) for g, e in zip(grads, exact_grads, strict=True))
    what = f"linear_attention, T={inputs[0].shape[1]}"
    return [
        Check(what, served, relative(o, exact), forward_ms),
        Check("  its backward: dq, dk, dv", served, error, backward_ms),
    ]


def decode_check(q: Any, k: Any, v: Any) -> Check:
    """Token by token from an empty state must give what the whole sequence gives."""
    import torch

    import linattn_tl
    from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, recurrent

    exact = TorchRunner(recurrent).forward((q.double(), k.double(), v.double(), None, None), None, Options())[0][0]
    B, length, H, K = q.shape
    state = linattn_tl.LinearState(torch.zeros(B, H, K, v.shape[3]), torch.zeros(B, H, K))

    @torch.no_grad()
    def walk() -> Any:
        step = linattn_tl.linear_attention_decode
        return torch.stack([step(q[:, t], k[:, t], v[:, t], state) for t in range(length)], 1)

    ms, o = timed(walk)
    served = linattn_tl.last_backend("linear_attention_decode") or ""
    return Check(f"linear_attention_decode, {length} x", served, relative(o, exact), ms)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    value = call()
    return (time.perf_counter() - start) * 1e3, value


def relative(actual: Any, exact: Any) -> float:
    return ((actual.double() - exact).abs().max() / exact.abs().max()).item()


if __name__ == "__main__":
    sys.exit(main())
