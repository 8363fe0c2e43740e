"""Speed of the gated delta rule on the CPU: `python -m benchmarks.delta [--threads 1,2] [--json]`.

gated_delta_rule at B=1, H=8, T=4096 in fp32 (and bf16) with q and k normalised, forward and forward with backward, and
a decode step of 16 sequences with 16 heads, against the functions that Hugging Face transformers runs where no optional
kernel package is installed. Timed in turns in one run; nothing is timed unless every contestant agrees with the float64
definition. Then a whole model of the shape of Qwen3.5 (4 layers, hidden size 1024) reads a prompt of 2048 tokens with
linattn_tl.compat.transformers and without it, and a table says where its time goes.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import linattn_tl
from benchmarks import rows
from benchmarks.rows import Form
from linattn_tl.compat import transformers as compat
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, chunked

B, T, H = 1, 4096, 8
PROMPT = 2048  # tokens
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


# ---- a whole model


def model() -> torch.nn.Module:
    """Three layers with the gated delta rule and one with attention, random weights."""
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    torch.manual_seed(0)
    config = configuration_qwen3_5.Qwen3_5TextConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    return modeling_qwen3_5.Qwen3_5ForCausalLM(config).eval()


def prompt() -> dict[str, Form]:
    read, tokens = model(), torch.randint(0, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def without() -> tuple[torch.Tensor]:
        return (read(input_ids=tokens, use_cache=False, logits_to_keep=1).logits,)

    def ours() -> tuple[torch.Tensor]:
        with compat.enabled():
            return without()

    (found,), (right,) = ours(), without()
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    return {"ours": ours, "transformers": without}


def where_it_goes(threads: int) -> str:
    """The share of each operator's own time in a prompt that is read with our ops."""
    torch.set_num_threads(threads)
    ours = prompt()["ours"]
    with torch.no_grad(), torch.profiler.profile() as seen:
        start = time.perf_counter()
        ours()
        total = time.perf_counter() - start
    spent = sorted(seen.key_averages(), key=lambda x: -x.self_cpu_time_total)[:6]
    known = sum(x.self_cpu_time_total for x in seen.key_averages()) / 1e6
    lines = [f"prompt of {PROMPT} tokens, {threads} thread{'s' if threads > 1 else ''}, ours, by operator:"]
    lines += [f"  {x.key[:27]:28}{x.self_cpu_time_total / total / 1e4:>6.1f} %" for x in spent]
    return "\n".join(
        [*lines, f"  {'outside of torch operators':28}{100 * (1 - known / total):>6.1f} %   our kernels among it"]
    )


CASES: dict[str, Callable[[], dict[str, Form]]] = {
    "forward D=64": partial(sequence, 64),
    "forward D=128": partial(sequence, 128),
    "forward D=128 bf16": partial(sequence, 128, dtype=torch.bfloat16),
    "fwd + backward D=64": partial(sequence, 64, backward=True),
    "fwd + backward D=128": partial(sequence, 128, backward=True),
    "fwd + backward 128 bf16": partial(sequence, 128, backward=True, dtype=torch.bfloat16),
    "prompt, whole model": prompt,
    f"decode B={STEPS}": decode,
}


def main(argv: Sequence[str] | None = None) -> int:
    status = rows.main("delta", "Speed of the gated delta rule.", CASES, argv)
    if "--json" not in (sys.argv[1:] if argv is None else argv):
        print(where_it_goes(1))
    return status


if __name__ == "__main__":
    sys.exit(main())
