"""Speed of the scalar-gated family on the CPU: `python -m benchmarks.gated [--threads 1,2] [--json]`.

simple_gla at B=1, H=8, T=4096, D=128 in fp32, forward and forward with backward; ssd at Mamba-2's sizes (d_state 128,
head dim 64, 8 heads, 1 group); a decode step of B=16 sequences. Rivals are plain PyTorch, each in the fastest of the
forms that we know, eager and under torch.compile, timed in turns with ours in one run. Nothing is timed unless every
contestant agrees with the float64 definition.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import linattn_tl
from autotune import verify
from benchmarks import rivals, rows
from benchmarks.rows import Form
from linattn_tl.ops.simple_gla.definition import Options, TorchRunner, chunked

B, T, H, D = 1, 4096, 8, 128
STATE, HEAD = 128, 64  # of Mamba-2
STEPS = 16  # sequences of a decode step
CHUNKS = (64, 128)


# ---- rivals


def chunk_loop(q: Any, k: Any, v: Any, g: Any, chunk: int) -> torch.Tensor:
    """All chunks' products at once, and their states one after the other. q is scaled; heads as many as v's."""
    n = q.shape[1] // chunk
    q, k, v = (x.transpose(1, 2).unflatten(2, (n, chunk)) for x in (q, k, v))
    G = g.transpose(1, 2).unflatten(2, (n, chunk)).cumsum(-1)
    D = (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(~_lower(chunk), -torch.inf).exp()
    parts = (k * (G[..., -1:] - G).exp().unsqueeze(-1)).mT @ v
    whole, state, states = G[..., -1, None, None].exp(), torch.zeros_like(parts[:, :, 0]), []
    for i in range(n):
        states.append(state)
        state = whole[:, :, i] * state + parts[:, :, i]
    o = (q @ k.mT * D) @ v + G.exp().unsqueeze(-1) * (q @ torch.stack(states, 2))
    return o.flatten(2, 3).transpose(1, 2)


def chunk_minimal(q: Any, k: Any, v: Any, g: Any, chunk: int) -> torch.Tensor:
    """The same with the chunks' states by one product with the decays between chunks (arXiv 2405.21060, listing 1)."""
    n = q.shape[1] // chunk
    q, k, v = (x.transpose(1, 2).unflatten(2, (n, chunk)) for x in (q, k, v))
    G = g.transpose(1, 2).unflatten(2, (n, chunk)).cumsum(-1)
    D = (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(~_lower(chunk), -torch.inf).exp()
    parts = (k * (G[..., -1:] - G).exp().unsqueeze(-1)).mT @ v
    ends = torch.nn.functional.pad(G[..., -1].cumsum(-1), (1, 0))
    between = (ends[..., :-1].unsqueeze(-1) - ends[..., 1:].unsqueeze(-2)).masked_fill(~_lower(n, -1), -torch.inf).exp()
    states = (between @ parts.flatten(3)).view(parts.shape)
    o = (q @ k.mT * D) @ v + G.exp().unsqueeze(-1) * (q @ states)
    return o.flatten(2, 3).transpose(1, 2)


def _lower(n: int, diagonal: int = 0) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril(diagonal)


def step_in_place(q: Any, k: Any, v: Any, g: Any, state: Any, out: Any) -> torch.Tensor:
    """One token of each sequence, by in-place operations."""
    state.mul_(g.exp()[..., None, None]).addcmul_(k.unsqueeze(-1), v.unsqueeze(-2))
    return torch.matmul(q.unsqueeze(-2), state, out=out.unsqueeze(-2))


def step_fused(q: Any, k: Any, v: Any, g: Any, state: Any, out: Any) -> torch.Tensor:
    """The step in the form a compiler can fuse: one pass over the state that updates it and reads it."""
    state.copy_(state * g.exp()[..., None, None] + k.unsqueeze(-1) * v.unsqueeze(-2))
    return out.copy_((q.unsqueeze(-1) * state).sum(-2))


# ---- cases


def sequence(backward: bool) -> dict[str, Form]:
    r = torch.Generator().manual_seed(0)
    inputs = [torch.randn(B, T, H, D, generator=r) for _ in "qkv"] + [-torch.rand(B, T, H, generator=r) * 0.2]
    for x in inputs:
        x.requires_grad_(backward)
    upstream = torch.randn(B, T, H, D, generator=r)
    scale = D**-0.5

    def contestant(form: Form) -> Form:
        def run() -> tuple[torch.Tensor, ...]:
            o = form(*inputs)
            return (o, *torch.autograd.grad(o, inputs, upstream)) if backward else (o,)

        return run

    def scaled(form: Form, chunk: int) -> Form:
        return contestant(lambda q, k, v, g: form(q * scale, k, v, g, chunk))

    runs = {"ours": contestant(lambda *x: linattn_tl.simple_gla(*x)[0])}
    eager = {f"{f.__name__} C={c}": scaled(f, c) for f in (chunk_loop, chunk_minimal) for c in CHUNKS}
    runs["eager"] = rows.fastest(eager)
    compiled = {f"{f.__name__} C=128": scaled(rivals.compiled(f), 128) for f in (chunk_loop, chunk_minimal)}
    runs["torch.compile"] = rows.fastest(compiled)
    rows.check(runs, _exact(inputs, upstream if backward else None, scale), ("o", "dq", "dk", "dv", "dg"))
    return runs


def _exact(inputs: Sequence[torch.Tensor], upstream: Any, scale: float) -> list[torch.Tensor]:
    exact = [x.detach().double().requires_grad_(upstream is not None) for x in inputs]
    o = TorchRunner(chunked).forward((*exact, None), None, Options(scale))[0][0]
    return [o.detach(), *(torch.autograd.grad(o, exact, upstream.double()) if upstream is not None else ())]


def mamba2() -> dict[str, Form]:
    """ssd without D, z and a bias, against its minimal form."""
    r = torch.Generator().manual_seed(0)
    x, dt = torch.randn(B, T, H, HEAD, generator=r), torch.rand(B, T, H, generator=r)
    A = -torch.rand(H, generator=r)
    b, c = (torch.randn(B, T, 1, STATE, generator=r) for _ in "bc")

    def eager(form: Form, chunk: int) -> torch.Tensor:
        return form(c.expand(B, T, H, STATE), b.expand(B, T, H, STATE), x * dt.unsqueeze(-1), dt * A, chunk)

    runs: dict[str, Form] = {"ours": lambda: (linattn_tl.ssd(x, dt, A, b, c)[0],)}
    minimal = {f"{f.__name__} C={n}": partial(_one, eager, f, n) for f in (chunk_loop, chunk_minimal) for n in CHUNKS}
    runs["eager"] = rows.fastest(minimal)
    inputs = (c.expand(B, T, H, STATE), b.expand(B, T, H, STATE), x * dt.unsqueeze(-1), dt * A)
    rows.check(runs, _exact(inputs, None, 1.0), ("y",))
    return runs


def _one(function: Form, *arguments: Any) -> tuple[torch.Tensor]:
    return (function(*arguments),)


def decode() -> dict[str, Form]:
    r = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(STEPS, 2 * H, D, generator=r) for _ in "qkv")
    g, out = -torch.rand(STEPS, 2 * H, generator=r), torch.empty(STEPS, 2 * H, D)

    def contestant(step: Form) -> Form:
        state = torch.zeros(STEPS, 2 * H, D, D)
        return lambda: step(q, k, v, g, state, out)

    ours = lambda q, k, v, g, s, o: linattn_tl.simple_gla_decode(q, k, v, g, s, scale=1.0, out=o)  # noqa: E731
    steps = {"ours": ours, "eager": step_in_place, "torch.compile": rivals.compiled(step_fused)}
    want = torch.zeros(STEPS, 2 * H, D, D, dtype=torch.float64)
    for _ in range(3):
        want = want * g.double().exp()[..., None, None] + k.double().unsqueeze(-1) * v.double().unsqueeze(-2)
    for name, step in steps.items():
        state = torch.zeros(STEPS, 2 * H, D, D)
        for _ in range(3):
            step(q, k, v, g, state, out)
        verify.check_close(f"{name}: state", state, want)
        verify.check_close(f"{name}: o", out, (q.double().unsqueeze(-2) @ want).squeeze(-2))
    return {name: contestant(step) for name, step in steps.items()}


CASES: dict[str, Callable[[], dict[str, Form]]] = {
    "forward": partial(sequence, False),
    "forward + backward": partial(sequence, True),
    "ssd forward": mamba2,
    f"decode B={STEPS}": decode,
}


def main(argv: Sequence[str] | None = None) -> int:
    return rows.main("gated", "Speed of the scalar-gated family.", CASES, argv)


if __name__ == "__main__":
    sys.exit(main())
