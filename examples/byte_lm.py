"""Train a small byte-level language model, then generate from its state.

    python -m examples.byte_lm                 # one model with linear attention: under two minutes on two cores
    python -m examples.byte_lm --steps 300     # as many steps, however long they take: repeatable
    python -m examples.byte_lm --compare       # linear, gated, delta and hybrid models of one size: under five minutes

The text is what every machine has: the sources of Python's standard library.
"""

import argparse
import json
import math
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import linattn_tl
from examples import training
from examples.training import BITS, Batch, Run, Setting
from linattn_tl.modules import Cache, CausalLM, prefill

WIDTH, HEADS, LAYERS = 128, 4, 4
MLP_WIDTH = 352  # of the model with linear attention; others get what makes them as large
COMPARED = {"linear": "L", "gated": "G", "delta": "D", "gated delta": "N", "3:1 hybrid": "NNNS"}
BATCH, LENGTH = 8, 256  # sequences a step, bytes a sequence
LEARNING_RATE = 3e-3
VALID_EVERY = 20  # every 20th file is kept for validation
VALID_BATCHES = 16
PROMPT = b'"""Read a file and return its lines."""\n\nimport '
GENERATE = 512  # bytes
TOLERANCE = 1e-3  # of logits, between generating from the state and reading the whole text again
SECONDS = 75.0
COMPARE_STEPS = 600
SMOOTH = 20  # steps that a point of a curve is the mean of


def make_model(pattern: str = "L", backend: str = "auto") -> CausalLM:
    """A byte model; those of all patterns have about as many parameters."""
    torch.manual_seed(0)
    return _model(pattern, _mlp_width(pattern), backend=backend)


def _model(pattern: str, mlp_width: int, **options: Any) -> CausalLM:
    # linear attention knows no order of tokens: like the other layers it gets the short convolution
    linear = {"L": {"conv_size": 4}}
    return CausalLM(256, WIDTH, HEADS, pattern, LAYERS, mlp_width=mlp_width, options=linear, **options)


def _mlp_width(pattern: str) -> int:
    target, found = (parameters(_model(x, MLP_WIDTH, device="meta")) for x in ("L", pattern))
    return MLP_WIDTH + round((target - found) / (3 * WIDTH * LAYERS))


def parameters(model: CausalLM) -> int:
    return sum(p.numel() for p in model.parameters())


# ---- data


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library's sources as two uint8 tensors: to train on, and to validate on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    files = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    if len(files) < VALID_EVERY:
        raise SystemExit(f"{root} has {len(files)} .py files; this example trains on the standard library's sources")
    random.Random(0).shuffle(files)
    train = b"".join(p.read_bytes() for i, p in enumerate(files) if i % VALID_EVERY)
    valid = b"".join(p.read_bytes() for p in files[::VALID_EVERY])
    return as_tensor(train), as_tensor(valid)


def as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample_batch(text: torch.Tensor, generator: torch.Generator) -> Batch:
    """BATCH random windows, and the same one byte later."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(LENGTH + 1)].long()
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def bits_per_byte(model: CausalLM, text: torch.Tensor) -> float:
    generator = torch.Generator().manual_seed(1)
    losses = [training.loss_of(model, sample_batch(text, generator)).item() for _ in range(VALID_BATCHES)]
    return statistics.mean(losses) * BITS


# ---- training


@dataclass(frozen=True)
class Trained:
    """A model, and how it came about."""

    model: CausalLM
    setting: Setting
    losses: list[float]  # of each step, in bits
    seconds: float
    valid_bits_per_byte: float

    def numbers(self) -> dict[str, Any]:
        return {
            "parameters": parameters(self.model),
            "threads": self.setting.threads,
            "dtype": self.setting.dtype,
            "seconds": round(self.seconds, 1),
            "step_ms": round(1e3 * self.seconds / len(self.losses), 1),
            "losses": [round(x, 4) for x in self.losses],
            "valid_bits_per_byte": self.valid_bits_per_byte,
        }


def trained(pattern: str, texts: tuple[torch.Tensor, torch.Tensor], args: argparse.Namespace, name: str) -> Trained:
    model = make_model(pattern)

    def sample(generator: torch.Generator) -> Batch:
        return sample_batch(texts[0], generator)

    setting = training.fastest_setting(model, sample, args.threads, args.dtype)  # builds, before the clock runs
    run = Run(args.steps, args.seconds, LEARNING_RATE, dtype=setting.dtype)
    start = time.monotonic()
    losses = training.train(model, sample, run, name)
    return Trained(model, setting, losses, time.monotonic() - start, bits_per_byte(model, texts[1]))


# ---- generation


@dataclass(frozen=True)
class Generated:
    text: torch.Tensor  # [T], prompt and what was generated
    logits: torch.Tensor  # [generated, 256], from which each byte was picked
    step_s: list[float]  # time of each step
    cache: Cache


@torch.no_grad()
def generate(model: CausalLM, prompt: torch.Tensor, count: int, temperature: float = 0.0) -> Generated:
    """As linattn_tl.modules.generate, which keeps neither logits nor times. temperature 0 takes the likeliest byte."""
    generator = torch.Generator().manual_seed(2)
    row, cache = prefill(model, [prompt.long()])
    rows, picked, step_s = [], [], []
    for _ in range(count):
        rows.append(row)
        start = time.perf_counter()
        if temperature:
            byte = torch.multinomial((row / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            byte = row.argmax(-1)
        picked.append(byte)
        row = model.step(byte, cache)
        step_s.append(time.perf_counter() - start)
    text = torch.cat([prompt, *picked]).to(torch.uint8)
    return Generated(text, torch.cat(rows), step_s, cache)


@torch.no_grad()
def compare_with_rerun(model: CausalLM, made: Generated) -> tuple[float, bool]:
    """Reads the whole text again, state and all forgotten: largest difference of logits, and whether bytes agree."""
    count = len(made.logits)
    again = model(made.text[:-1].long().unsqueeze(0)).logits[0, -count:]
    same = torch.equal(again.argmax(-1), made.text[-count:].long())
    return (again - made.logits).abs().max().item(), same


# ---- one model


def measure_one(args: argparse.Namespace) -> dict[str, Any]:
    texts = read_text()
    found = trained(args.pattern, texts, args, "training")
    model = found.model
    torch.set_num_threads(1)  # one byte a step is too little work to share
    prompt = as_tensor(PROMPT)
    made = generate(model, prompt, GENERATE)
    difference, same = compare_with_rerun(model, made)
    sample = generate(model, prompt, GENERATE, temperature=0.7)
    quarter = len(made.step_s) // 4
    return {
        "pattern": model.stack.pattern,
        **found.numbers(),
        "backend": linattn_tl.last_backend("linear_attention") if "L" in model.stack.pattern else None,
        "train_bytes": len(texts[0]),
        "valid_bytes": len(texts[1]),
        "bytes_per_second": len(made.step_s) / sum(made.step_s),
        "first_step_us": statistics.median(made.step_s[:quarter]) * 1e6,
        "last_step_us": statistics.median(made.step_s[-quarter:]) * 1e6,
        "state_bytes": made.cache.nbytes,
        **cache_sizes(made.cache.nbytes),
        "max_difference": difference,
        "same_bytes": same,
        "sample": bytes(sample.text.tolist()).decode(errors="replace"),
    }


def cache_sizes(state_bytes: int) -> dict[str, Any]:
    """Bytes of the fp32 KV cache that softmax attention with the same heads would need, at several lengths."""
    D = WIDTH // HEADS
    per_token = 4 * LAYERS * linattn_tl.cache_elements(H=HEADS, K=D, V=D, T=1).kv_cache
    return {
        "kv_cache_bytes": {T: T * per_token for T in (256, 1024, 4096, 16384, 65536)},
        "crossover_length": -(-state_bytes // per_token),
    }


def show_one(found: dict[str, Any]) -> None:
    losses = found["losses"]
    tail = statistics.mean(losses[-20:])
    print(f"model: {found['parameters']:,} parameters, layers {found['pattern']}, {HEADS} heads of {WIDTH // HEADS}")
    print(f"text: {found['train_bytes']:,} bytes to train on, {found['valid_bytes']:,} bytes to validate on")
    if found["backend"]:
        print(f"served: linear_attention by {found['backend']}")
    print(
        f"trained: {len(losses)} steps in {found['seconds']:.0f} s with threads={found['threads']} in "
        f"{found['dtype']}, bits per byte {losses[0]:.2f} -> {tail:.2f}"
    )
    print(f"validation: {found['valid_bits_per_byte']:.3f} bits per byte on files it has not seen")
    print("\n--- written by the model after the first line, at temperature 0.7")
    print(found["sample"])
    print("---\n")
    print(f"generation: {found['bytes_per_second']:,.0f} bytes/s, one at a time")
    print(f"a step: {found['first_step_us']:.0f} us at the start, {found['last_step_us']:.0f} us at the end")
    print(f"state: {found['state_bytes']:,} bytes now. A KV cache of the same heads would take")
    for T, size in found["kv_cache_bytes"].items():
        print(f"  {size:>13,} bytes at {T:>6,} tokens, {size / found['state_bytes']:.1f} times the state")
    print(f"  and is the larger one from {found['crossover_length']} tokens on")
    print("generating from the state against reading the whole text again:")
    same = "the same bytes" if found["same_bytes"] else "OTHER BYTES"
    print(f"  largest difference of logits {found['max_difference']:.1e}, {same}")


# ---- models of one size


def compare(args: argparse.Namespace) -> dict[str, Any]:
    texts, found = read_text(), {}
    for name, pattern in COMPARED.items():
        model = trained(pattern, texts, args, f"{name:<12}")
        found[name] = {"pattern": model.model.stack.pattern, **model.numbers()}
    return {"models": found, "batch": BATCH, "length": LENGTH}


def show_comparison(found: dict[str, Any]) -> None:
    models = found["models"]
    print(f"{'model':<12} {'layers':<8} {'parameters':>10} {'steps':>6} {'ms/step':>8} {'bits per byte':>14}")
    for name, x in models.items():
        print(
            f"{name:<12} {x['pattern']:<8} {x['parameters']:>10,} {len(x['losses']):>6} {x['step_ms']:>8.0f} "
            f"{x['valid_bits_per_byte']:>14.3f}"
        )
    order = sorted(models, key=lambda name: models[name]["valid_bits_per_byte"])
    print(f"\nOn files that they have not seen, best first: {', '.join(order)}.")
    print(said_of_order(order))


def said_of_order(order: Sequence[str]) -> str:
    """Whether it came out as the literature has it."""
    expected = [("gated", "linear"), ("delta", "linear"), ("gated delta", "linear"), ("3:1 hybrid", "linear")]
    against = [f"{a} not before {b}" for a, b in expected if order.index(a) > order.index(b)]
    if not against:
        return "As published: what gates or replaces is ahead of plain sums."
    return f"Not as published at this size and length of training: {', '.join(against)}."


# ---- pictures


def plot_losses(curves: dict[str, Sequence[float]], valid: dict[str, float], path: Path) -> None:
    """One curve a model, smoothed where there are several."""
    figure, axes = training.figure(6.5, 4.2)
    for name, losses in curves.items():
        points = smoothed(losses) if len(curves) > 1 else (range(len(losses)), losses)
        axes.plot(*points, linewidth=1, label=f"{name}: {valid[name]:.3f} on unseen files")
    highest, lowest = (f(x for losses in curves.values() for x in losses) for f in (max, min))
    if len(curves) > 1:  # where they differ
        axes.set_ylim(lowest - 0.1, min(highest, 5.0))
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_title("Byte models on the standard library's sources", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    training.save_figure(figure, path)


def smoothed(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Steps, and means over SMOOTH of them."""
    edges = [*range(0, len(losses), SMOOTH), len(losses)]
    spans = [(a, b) for a, b in pairwise(edges) if b > a]
    return [(a + b) / 2 for a, b in spans], [statistics.mean(losses[a:b]) for a, b in spans]


# ---- the command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.byte_lm", description=__doc__.splitlines()[0])
    parser.add_argument("--compare", action="store_true", help="train linear, gated, delta and hybrid models instead")
    parser.add_argument("--pattern", default="L", help="of the one model: letters of layers, see HybridStack (L)")
    parser.add_argument("--steps", type=int, help="train so many steps, whatever the time")
    parser.add_argument("--seconds", type=float, help=f"train so long ({SECONDS:g}, or no limit with --steps)")
    parser.add_argument("--threads", type=int, default=0, help="of training (default: the faster of one and all)")
    parser.add_argument("--dtype", default="", choices=["", "float32", "bfloat16"], help="(default: the faster one)")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="where the picture goes")
    parser.add_argument("--save", type=Path, help="a folder for the numbers and the picture, such as docs/measured")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead of text")
    args = parser.parse_args(argv)
    if args.steps is None and args.seconds is None:
        args.steps, args.seconds = (COMPARE_STEPS, None) if args.compare else (None, SECONDS)
    args.steps = math.inf if args.steps is None else args.steps
    args.seconds = math.inf if args.seconds is None else args.seconds
    if args.steps < 1 or args.seconds <= 0 or args.threads < 0:
        parser.error("--steps, --seconds and --threads must be positive")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    folder = args.save or args.out
    if args.compare:
        found = compare(args)
        path = folder / "byte_lm.png"
        models = found["models"]
        curves, valid = ({n: x[key] for n, x in models.items()} for key in ("losses", "valid_bits_per_byte"))
    else:
        found = measure_one(args)
        path = folder / "loss.png"
        curves, valid = {"training": found["losses"]}, {"training": found["valid_bits_per_byte"]}
    plot_losses(curves, valid, path)
    if args.save:
        training.save_results(found, path.with_suffix(".json"))
    if args.json:
        print(json.dumps({**found, "plot": str(path)}, indent=1))
    else:
        (show_comparison if args.compare else show_one)(found)
        print(f"wrote {path}")
    if args.compare:
        return 0
    return 0 if found["same_bytes"] and found["max_difference"] <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
