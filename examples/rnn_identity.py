"""Transformers are RNNs, as an identity that runs: the same numbers from a matrix, from a recurrence and from chunks.

    python -m examples.rnn_identity                  # a table of differences and of times: seconds
    python -m examples.rnn_identity --plot cost.png  # the times over the length, drawn

1  attention alone: the matrix form, the recurrence and the chunk form, forward and gradients, and our op beside them
2  a whole transformer layer, written as an RNN from its weights
3  whole language models of every kind of layer, hybrids included, one token at a time against all at once
4  what each form of attention costs as the length grows

The exit code is 1 where a difference is larger than rounding explains.

Source: Katharopoulos et al. 2020, arXiv 2006.16236; equation numbers below are the article's.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from examples import training
from linattn_tl import linear_attention
from linattn_tl.modules import CausalLM, LinearAttention, RecurrentState, TransformerBlock

BATCH, LENGTH, HEADS, DIM = 2, 100, 2, 32
CHUNK = 16  # does not divide LENGTH: the last chunk is a short one
EPS = 1e-6  # as in our op
PATTERNS = ("L", "R", "G", "M", "D", "N", "S", "LLLS", "NNNS")
VOCABULARY = 64
EXACT, ROUNDING = 1e-12, 1e-5  # allowed relative difference: in float64, and where float32 takes part
LENGTHS = (256, 1024, 4096)
REPEATS = 5

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q, k, v, o: [B, T, heads, D]


class Check(NamedTuple):
    what: str
    against: str
    differences: dict[str, float]  # relative to the largest value
    tolerance: float

    @property
    def passed(self) -> bool:
        return all(x <= self.tolerance for x in self.differences.values())  # false for NaN


# ---- 1: attention in three forms


def phi(x: torch.Tensor) -> torch.Tensor:
    """The feature map, eq. 7."""
    return F.elu(x) + 1


def matrix_form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Eq. 2-4 with the similarity phi(q) . phi(k), and eq. 8-9: what lies ahead is masked. T^2 numbers a head."""
    similarity = torch.einsum("bthd,bshd->bhts", phi(q), phi(k)).tril()
    o = torch.einsum("bhts,bshd->bthd", similarity, v)
    return o / (similarity.sum(-1).mT.unsqueeze(-1) + EPS)


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Eq. 16-20: a state s [B, heads, D, D] and z [B, heads, D], one token after the other."""
    B, T, H, D = q.shape
    s, z, made = q.new_zeros(B, H, D, D), q.new_zeros(B, H, D), []
    for t in range(T):
        s, z = written(s, z, k[:, t], v[:, t])
        made.append(read(s, z, q[:, t]))
    return torch.stack(made, 1)


def written(s: torch.Tensor, z: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The state with one token more, eq. 18-19. k and v [B, heads, D]"""
    return s + phi(k).unsqueeze(-1) * v.unsqueeze(-2), z + phi(k)


def read(s: torch.Tensor, z: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What a query finds in the state: the fraction in eq. 20."""
    return torch.einsum("bhd,bhde->bhe", phi(q), s) / ((phi(q) * z).sum(-1, keepdim=True) + EPS)


def chunk_form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Both at once: the matrix form inside chunks of tokens, the state from chunk to chunk. CHUNK T numbers a head."""
    B, T, H, D = q.shape
    s, z, made = q.new_zeros(B, H, D, D), q.new_zeros(B, H, 1, D), []
    for q_c, k_c, v_c in zip(*(x.transpose(1, 2).split(CHUNK, 2) for x in (phi(q), phi(k), v)), strict=True):
        similarity = (q_c @ k_c.mT).tril()
        total = similarity.sum(-1, keepdim=True) + (q_c * z).sum(-1, keepdim=True) + EPS
        made.append((similarity @ v_c + q_c @ s) / total)
        s, z = s + k_c.mT @ v_c, z + k_c.sum(2, keepdim=True)
    return torch.cat(made, 2).transpose(1, 2)


def our_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return linear_attention(q, k, v, eps=EPS)[0]


def check_attention() -> list[Check]:
    """Each form against the matrix form in float64: the output, and the gradients by q, k and v."""
    inputs = [torch.randn(BATCH, LENGTH, HEADS, DIM, dtype=torch.float64) for _ in range(4)]
    exact = with_gradients(matrix_form, inputs)
    found = [
        ("recurrence", with_gradients(recurrence, inputs), EXACT),
        (f"chunks of {CHUNK}", with_gradients(chunk_form, inputs), EXACT),
        ("linear_attention, fp32", with_gradients(our_op, [x.float() for x in inputs]), ROUNDING),
    ]
    return [compared(f"attention: {name}", "matrix form", results, exact, limit) for name, results, limit in found]


def with_gradients(form: Attention, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """inputs: q, k, v, and the gradient of the output."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    o = form(*leaves)
    dq, dk, dv = torch.autograd.grad(o, leaves, inputs[3])
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


def compared(
    what: str, against: str, found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], limit: float
) -> Check:
    return Check(what, against, {name: relative(x, exact[name]) for name, x in found.items()}, limit)


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact.double()).abs().max() / exact.double().abs().max()).item()


# ---- 2: a transformer layer


def layer_as_rnn(block: TransformerBlock, x: torch.Tensor) -> torch.Tensor:
    """Eq. 16-20 for a whole layer, from its weights alone: y_t = f(attention_t + x_t). x [B, T, width]

    The article's x_t W is here a projection of the normed x_t, several heads share a token, and f is all that a
    token passes through by itself: the residual, the norm and the MLP.
    """
    attention = block.layer
    B, T, width = x.shape
    by_head = (attention.heads, attention.key_dim)
    s, z = x.new_zeros(B, *by_head, attention.value_dim), x.new_zeros(B, *by_head)  # eq. 16-17
    made = []
    for x_t in x.unbind(1):
        q, k, v = (y.unflatten(-1, by_head) for y in attention.qkv(block.norm(x_t)).chunk(3, -1))
        s, z = written(s, z, k, v)
        h = attention.out(read(s, z, q).flatten(1)) + x_t
        made.append(h + block.mlp(block.mlp_norm(h)))
    return torch.stack(made, 1)


def check_layer() -> list[Check]:
    """The parallel layer against the RNN above, gradients too, and against its own `step`."""
    width = HEADS * DIM
    block = TransformerBlock(LinearAttention(width, HEADS), width)
    x, dy = (torch.randn(BATCH, LENGTH, width) for _ in range(2))
    parallel = layer_gradients(block, lambda x: block(x)[0], x, dy)
    rnn = layer_gradients(block, lambda x: layer_as_rnn(block, x), x, dy)
    with torch.no_grad():
        state = block.init_state(BATCH)
        steps = {"y": torch.stack([block.step(x_t, state) for x_t in x.unbind(1)], 1)}
    return [
        compared("layer: as an RNN", "in parallel", rnn, parallel, ROUNDING),
        compared("layer: block.step", "in parallel", steps, parallel, ROUNDING),
    ]


def layer_gradients(
    block: TransformerBlock, form: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The result, and the gradients by x and by all weights in a row."""
    x = x.clone().requires_grad_()
    y = form(x)
    dx, *dw = torch.autograd.grad(y, [x, *block.parameters()], dy)
    return {"y": y.detach(), "dx": dx, "dw": torch.cat([w.flatten() for w in dw])}


# ---- 3: language models


@torch.no_grad()
def check_model(pattern: str) -> Check:
    """Logits of a model that reads a text token by token, against those of all at once; and both of their states."""
    model = CausalLM(VOCABULARY, HEADS * DIM, HEADS, pattern)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    logits, _, after = model(ids, keep_state=True)
    cache = model.init_state(BATCH)
    steps = torch.stack([model.step(column, cache) for column in ids.unbind(1)], 1)
    differences = {"logits": relative(steps, logits), "state": state_difference(cache, after)}
    return Check(f"model: {pattern}, by steps", "in parallel", differences, ROUNDING)


def state_difference(cache: Any, after: Any) -> float:
    """The largest of all tensors of all layers; of keys and values, the tokens that are there."""
    found = []
    for mine, theirs in zip(cache.layers, after.layers, strict=True):
        for name in ("kv", "z", "conv") if isinstance(mine, RecurrentState) else ("k", "v"):
            x, exact = getattr(mine, name), getattr(theirs, name)
            if exact is not None:
                found.append(relative(x if x.shape == exact.shape else x[:, :, : exact.shape[2]], exact))
    return max(found)


# ---- 4: cost

FORMS: dict[str, Attention] = {
    "matrix": matrix_form,
    "recurrence": recurrence,
    "chunks": chunk_form,
    "linear_attention": our_op,
}


@torch.no_grad()
def cost(lengths: Iterable[int]) -> dict[str, dict[int, float]]:
    """Milliseconds of each form at each length, forward, in float32: the least of some, forms taking turns."""
    found: dict[str, dict[int, float]] = {name: {} for name in FORMS}
    for T in lengths:
        q, k, v = (torch.randn(1, T, HEADS, DIM) for _ in range(3))
        times: dict[str, list[float]] = {name: [] for name in FORMS}
        for turn in range(REPEATS + 1):
            for name, form in FORMS.items():
                start = time.perf_counter()
                form(q, k, v)
                if turn:  # the first is the warm-up
                    times[name].append((time.perf_counter() - start) * 1e3)
        for name, measured in times.items():
            found[name][T] = min(measured)
    return found


def plot_cost(found: dict[str, dict[int, float]], path: Path) -> None:
    drawn, axes = training.figure(6, 4)
    for name, times in found.items():
        axes.plot(list(times), list(times.values()), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms, forward, one thread")
    lengths = list(next(iter(found.values())))
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axes.set_xticks([], minor=True)
    axes.set_title("The same attention in four ways", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    training.save_figure(drawn, path)


# ---- the report


def check_all(patterns: Sequence[str] = PATTERNS) -> list[Check]:
    torch.manual_seed(0)
    return [*check_attention(), *check_layer(), *map(check_model, patterns)]


def as_text(checks: Sequence[Check], times: dict[str, dict[int, float]]) -> str:
    lines = [f"largest difference over largest value; B={BATCH} T={LENGTH} heads={HEADS} D={DIM}", ""]
    lines += [check_line(check) for check in checks]
    lengths = list(next(iter(times.values())))
    *_, before, last = [lengths[0], *lengths]
    lines += ["", cost_line("ms, forward, one thread", [f"T={T:,}" for T in lengths], f"{last / before:g} x T")]
    for name, row in times.items():
        lines.append(cost_line(name, [f"{row[T]:.2f}" for T in lengths], f"{row[last] / row[before]:.1f} x"))
    return "\n".join(lines)


def check_line(check: Check) -> str:
    numbers = "  ".join(f"{name} {x:.0e}" for name, x in check.differences.items())
    verdict = "ok" if check.passed else f"WRONG: more than {check.tolerance:.0e}"
    return f"{check.what:<34} = {check.against:<11}  {numbers:<42}  {verdict}"


def cost_line(name: str, cells: Sequence[str], growth: str) -> str:
    """growth: from the last length but one to the last."""
    return f"{name:<34}" + "".join(f"{cell:>10}" for cell in [*cells, growth])


def as_json(checks: Sequence[Check], times: dict[str, dict[int, float]]) -> str:
    rows = [{**check._asdict(), "passed": check.passed} for check in checks]
    return json.dumps({"checks": rows, "ms": times, "machine": training.machine()}, indent=1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check that transformers with linear attention are RNNs.")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="tokens of the timings, rising")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead of text")
    args = parser.parse_args(argv)
    parts = args.lengths.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        parser.error(f"--lengths is {args.lengths!r}; expected tokens, at least 1 each, such as 256,1024")
    args.lengths = sorted({int(part) for part in parts})
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the recurrence has too little work a token to share
    try:
        checks, times = check_all(), cost(args.lengths)
    finally:
        torch.set_num_threads(threads)
    print((as_json if args.json else as_text)(checks, times))
    if args.plot:
        plot_cost(times, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
