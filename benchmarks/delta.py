"""Speed of the gated delta rule on the CPU: `python -m benchmarks.delta [--threads 1,2] [--json]`.

gated_delta_rule at B=1, H=8, T=4096 in fp32 (and bf16) with q and k normalised, forward and forward with backward, and
a decode step of 16 sequences with 16 heads, against the functions that Hugging Face transformers runs where no optional
kernel package is installed. Timed in turns in one run; nothing is timed unless every contestant agrees with the float64
definition.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import linattn_tl
from benchmarks import rows
from benchmarks.rows import Form
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, chunked

B, T, H = 1, 4096, 8
STEPS, HEADS, D_STEP = 16, 16, 128  # sequences and heads of a decode step


def theirs(name: str) -> Form:
    """A plain torch function of transformers, without what would look for a faster one."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    function = getattr(modeling_qwen3_next, name)
    return getattr(function, "__wrapped__", function)


def sequence(D: int, backward: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Form]:
    r = torch.Generator().manual_seed(0)
    inputs = [torch.randn(B, T, H, D, generator=r).to(dtype) for _ in "qkv"]
    inputs += [-torch.rand(B, T, H, generator=r) * 0.2, torch.rand(B, T, H, generator=r)]
    for x in inputs:
        x.requires_grad_(backward)
    upstream = torch.randn(B, T, H, D, generator=r).to(dtype)

    def contestant(form: Form) -> Form:
        def run() -> tuple[torch.Tensor, ...]:
            o = form(*inputs)[0]
            return (o, *torch.autograd.grad(o, inputs, upstream)) if backward else (o,)

        return run

    chunk = theirs("torch_chunk_gated_delta_rule")
    runs = {"ours": contestant(partial(linattn_tl.gated_delta_rule, qk_l2norm=True))}
    runs["transformers"] = contestant(lambda q, k, v, g, b: chunk(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=True))
    exact = _exact(inputs, upstream if backward else None, D**-0.5)
    rows.check(runs, exact, ("o", "dq", "dk", "dv", "dg", "dbeta"), dtype=str(dtype).removeprefix("torch."))
    return runs


def _exact(inputs: Sequence[torch.Tensor], upstream: Any, scale: float) -> list[torch.Tensor]:
    exact = [x.detach().double().requires_grad_(upstream is not None) for x in inputs]
    o = TorchRunner(chunked).forward((*exact, None), None, Options(scale, qk_l2norm=True))[0][0]
    return [o.detach(), *(torch.autograd.grad(o, exact, upstream.double()) if upstream is not None else ())]


def decode() -> dict[str, Form]:
    r = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(STEPS, HEADS, D_STEP, generator=r) for _ in "qkv")
    g, beta = -torch.rand(STEPS, HEADS, generator=r), torch.rand(STEPS, HEADS, generator=r)
    start, out = torch.randn(STEPS, HEADS, D_STEP, D_STEP, generator=r), torch.empty(STEPS, HEADS, D_STEP)
    own, recurrent = start.clone(), theirs("torch_recurrent_gated_delta_rule")
    tokens = [x.unsqueeze(1) for x in (q, k, v)]

    def ours(state: torch.Tensor = own) -> tuple[torch.Tensor]:
        return (linattn_tl.gated_delta_rule_decode(q, k, v, g, beta, state, qk_l2norm=True, out=out),)

    def others() -> tuple[torch.Tensor]:
        o, _ = recurrent(
            *tokens, g=g.unsqueeze(1), beta=beta.unsqueeze(1), initial_state=start, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return (o[:, 0],)

    exact = [x.double().unsqueeze(1) for x in (q, k, v, g, beta)]
    (o, _), _ = TorchRunner(chunked).forward((*exact, start.double()), None, Options(D_STEP**-0.5, qk_l2norm=True))
    rows.check({"ours": lambda: ours(start.clone()), "transformers": others}, [o[:, 0]], ("o",))
    return {"ours": ours, "transformers": others}


CASES: dict[str, Callable[[], dict[str, Form]]] = {
    "forward D=64": partial(sequence, 64),
    "forward D=128": partial(sequence, 128),
    "forward D=128 bf16": partial(sequence, 128, dtype=torch.bfloat16),
    "fwd + backward D=64": partial(sequence, 64, backward=True),
    "fwd + backward D=128": partial(sequence, 128, backward=True),
    "fwd + backward 128 bf16": partial(sequence, 128, backward=True, dtype=torch.bfloat16),
    f"decode B={STEPS}": decode,
}


def main(argv: Sequence[str] | None = None) -> int:
    return rows.main("delta", "Speed of the gated delta rule.", CASES, argv)


if __name__ == "__main__":
    sys.exit(main())
