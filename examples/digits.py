"""Paint digits pixel by pixel: linear attention with its constant state beside softmax attention with a KV cache.

    python -m examples.digits                # under five minutes on two cores
    python -m examples.digits --steps 500    # as many steps for each model, however long they take: repeatable

An image is a sentence of 64 pixels, read row by row, each one of 17 grey levels; a model predicts the next pixel. As
in section 4.2 of "Transformers are RNNs" (Katharopoulos et al. 2020, arXiv 2006.16236), two models that differ in their
attention alone are trained on the same images, and asked three things:

    how well    bits/dim on images that were held out, beside a histogram of each pixel's levels
    how fast    images/s, each model from what it carries: the state of eq. 16-20, or the keys and values so far
    how far     time a token when the sequence grows to thousands of tokens: constant, or growing

The paper's own numbers are of MNIST; here are scikit-learn's digits, 8 x 8 pixels, which need no download.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import linattn_tl
from examples.training import (
    BITS,
    Batch,
    Run,
    fastest_setting,
    figure,
    save_figure,
    save_results,
    train,
)
from linattn_tl.modules import CausalLM, generate

SIDE = 8
PIXELS, HALF = SIDE * SIDE, SIDE * SIDE // 2
LEVELS = 17  # of grey, 0 to 16
START = LEVELS  # the token before the first pixel
PATTERNS = {"linear": "L", "softmax": "S"}
WIDTH, HEADS, LAYERS = 64, 2, 4
BATCH = 16  # images a step
LEARNING_RATE = 8e-3
STEPS, SECONDS = 3000, 100.0  # of training a model, whichever ends first; with more steps it knows its images by heart
SHIFTED = 0.4  # of the training images are moved by up to one pixel: 1497 are few, and soon known by heart
VALID_EVERY = 6  # every 6th image, in random order, is held out
CHECKED = 16  # images that are painted twice, from the state and by reading all again
TOLERANCE = 1e-3  # of logits, between the two
BATCHES, ROUNDS = (1, 16, 128), 5  # images at once, and how often each is timed
LONG, BLOCK = 4096, 64  # tokens of the long sequence, and those over which a median is taken
SHADES = " .:-=+*#%@"


class Split(NamedTuple):
    train: torch.Tensor  # [N, 64] levels
    valid: torch.Tensor


# ---- data


def load_images() -> Split:
    """All images in one random order, the same each time; every 6th is held out."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images).long().flatten(1)
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    held_out = torch.arange(len(images)) % VALID_EVERY == 0
    return Split(images[~held_out], images[held_out])


def as_batch(images: torch.Tensor) -> Batch:
    """[B, 64] -> the start token and all pixels but the last, and the pixels."""
    return with_start(images)[:, :-1], images


def with_start(images: torch.Tensor) -> torch.Tensor:
    return F.pad(images, (1, 0), value=START)


def sample_batch(images: torch.Tensor, generator: torch.Generator) -> Batch:
    """BATCH images at random, some of them moved."""
    chosen = images[torch.randint(len(images), (BATCH,), generator=generator)]
    moves = torch.randint(-1, 2, (BATCH, 2), generator=generator)
    still = torch.rand(BATCH, 1, generator=generator) >= SHIFTED
    return as_batch(moved(chosen, moves.masked_fill(still, 0)))


def moved(images: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
    """Images [B, 64] by moves [B, 2], rows and columns, of -1, 0 or 1; black comes in."""
    framed = F.pad(images.unflatten(1, (SIDE, SIDE)), (1, 1, 1, 1))
    inside = torch.arange(SIDE)
    rows, columns = ((1 - move).unsqueeze(1) + inside for move in moves.unbind(1))
    return framed[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]].flatten(1)


def histogram_bits(images: Split) -> float:
    """Bits/dim of the held-out images when each pixel is drawn from the levels seen there, every one seen once more."""
    counts = F.one_hot(images.train, LEVELS).sum(0) + 1
    logs = (counts / counts.sum(-1, keepdim=True)).log2()
    return -logs[torch.arange(PIXELS), images.valid].mean().item()


# ---- models


def make_model(name: str, positions: int = PIXELS + 1) -> CausalLM:
    """The two differ in their attention alone. Without learned positions a sequence may be of any length."""
    torch.manual_seed(0)
    options = {"S": {"rope_base": None}}
    return CausalLM(LEVELS + 1, WIDTH, HEADS, PATTERNS[name], LAYERS, positions=positions, options=options)


@torch.no_grad()
def bits_per_dim(model: CausalLM, images: torch.Tensor) -> float:
    """Mean of -log2 p(pixel | those before it)."""
    ids, targets = as_batch(images)
    return model(ids, targets=targets).loss.item() * BITS


def paint(model: CausalLM, count: int, seed: int = 0) -> torch.Tensor:
    """New images [count, 64], at temperature 1."""
    return complete(model, torch.empty(count, 0, dtype=torch.int64), seed)


def complete(model: CausalLM, given: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Images [B, 64] that begin with the pixels given [B, n], at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    missing = PIXELS - given.shape[1]
    made = generate(model, with_start(given), missing, temperature=1.0, generator=generator, progress=False)
    # a model that has learned little may say "start" in the middle of an image; that is no level
    return torch.cat([given, torch.stack(made).clamp(max=LEVELS - 1)], 1)


@dataclass(frozen=True)
class Identity:
    """Painting from the state against reading the whole image again."""

    max_difference: float  # of logits
    same_pixels: bool

    @property
    def holds(self) -> bool:
        return self.same_pixels and self.max_difference <= TOLERANCE


@torch.no_grad()
def check_identity(model: CausalLM, images: torch.Tensor) -> Identity:
    """Lower halves are painted from the state, likeliest pixels first; then everything is read anew, state forgotten.

    The logits compared are those of every pixel: from an empty state one at a time, and from the whole image.
    """
    given = with_start(images[:, :HALF])
    made = torch.stack(generate(model, given, PIXELS - HALF, progress=False))
    ids = torch.cat([given, made], 1)[:, :-1]
    whole = model(ids).logits
    cache = model.init_state(len(ids))
    stepped = torch.stack([model.step(column, cache) for column in ids.unbind(1)], 1)
    same = torch.equal(whole[:, HALF:].argmax(-1), made)
    return Identity((whole - stepped).abs().max().item(), same)


# ---- speed


def images_per_s(models: dict[str, CausalLM], batch: int) -> dict[str, float]:
    """Medians of rounds in which the models take turns.

    An image is short: with few at once the calls of small ops take the time, not the arithmetic in them.
    """
    times_s: dict[str, list[float]] = {name: [] for name in models}
    for seed in range(ROUNDS):
        for name, model in models.items():
            start = time.perf_counter()
            paint(model, batch, seed)
            times_s[name].append(time.perf_counter() - start)
    return {name: batch / statistics.median(times) for name, times in times_s.items()}


def long_sequences() -> dict[str, Any]:
    """Time a token while one sequence grows, by untrained models of the same shape that take turns, a block each.

    A block's time is the median of its tokens'; the totals also have the moves of a cache that is given more room.
    """
    models = {name: make_model(name, positions=0) for name in PATTERNS}
    streams = {name: generate(model, [START], LONG, stream=True) for name, model in models.items()}
    times_us: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(LONG // BLOCK):
        for name, stream in streams.items():
            times_us[name] += [_next_us(stream) for _ in range(BLOCK)]
    ends = range(BLOCK, LONG + 1, BLOCK)
    token_us = {name: [statistics.median(times[end - BLOCK : end]) for end in ends] for name, times in times_us.items()}
    return {
        "lengths": list(ends),
        "token_us": token_us,
        "total_s": {name: sum(times) / 1e6 for name, times in times_us.items()},
        "crossover_tokens": crossover(ends, token_us["linear"], token_us["softmax"]),
    }


def _next_us(stream: Any) -> float:
    start = time.perf_counter()
    next(stream)
    return (time.perf_counter() - start) * 1e6


def crossover(lengths: Sequence[int], flat: Sequence[float], growing: Sequence[float]) -> int | None:
    """The length from which on `growing` is the larger one, 0 if it always is, None if never. Outliers do not decide.

    Of all cuts between blocks, the one that fewest blocks contradict: those before it where `growing` is larger, and
    those after it where it is not.
    """
    larger = [b > a for a, b in zip(flat, growing, strict=True)]
    against = [sum(larger[:cut]) + larger[cut:].count(False) for cut in range(len(larger) + 1)]
    best = against.index(min(against))
    return None if best == len(lengths) else [0, *lengths][best]


def memory() -> dict[str, Any]:
    """Bytes that a sequence needs, in fp32: the state at any length, and the KV cache of the same heads."""
    D = WIDTH // HEADS
    sizes = {T: linattn_tl.cache_elements(H=HEADS, K=D, V=D, T=T) for T in (PIXELS, LONG)}
    return {
        "state_bytes": 4 * LAYERS * sizes[PIXELS].state,
        "kv_cache_bytes": {T: 4 * LAYERS * size.kv_cache for T, size in sizes.items()},
        "crossover_tokens": sizes[PIXELS].crossover,
    }


# ---- all of it


def train_one(name: str, images: Split, run: Run) -> tuple[CausalLM, dict[str, Any]]:
    """A trained model, and what is to be said of it."""
    model = make_model(name)
    start = time.monotonic()
    losses = train(model, lambda generator: sample_batch(images.train, generator), run, f"training {name}")
    return model, {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": len(losses),
        "seconds": round(time.monotonic() - start, 1),
        "first_loss_bits": losses[0],
        "last_loss_bits": statistics.mean(losses[-20:]),
        "train_bits_per_dim": bits_per_dim(model, images.train),
        "valid_bits_per_dim": bits_per_dim(model, images.valid),
        "identity": asdict(check_identity(model, images.valid[:CHECKED])),
    }


def measure_all(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, CausalLM]]:
    """All numbers, and the trained models."""
    D = WIDTH // HEADS
    backends = linattn_tl.preload("linear_attention", K=D, V=D)  # builds before the clock runs
    images = load_images()
    setting = fastest_setting(make_model("linear"), lambda g: sample_batch(images.train, g), args.threads, args.dtype)
    run = Run(steps=args.steps, seconds=args.seconds, learning_rate=LEARNING_RATE, dtype=setting.dtype)
    trained = {name: train_one(name, images, run) for name in PATTERNS}
    models = {name: model for name, (model, _) in trained.items()}
    torch.set_num_threads(1)  # a pixel a step is too little work to share
    return {
        "train_images": len(images.train),
        "valid_images": len(images.valid),
        "backends": backends,
        "threads": setting.threads,
        "dtype": setting.dtype,
        "histogram_bits_per_dim": histogram_bits(images),
        "models": {name: about for name, (_, about) in trained.items()},
        "images_per_s": {batch: images_per_s(models, batch) for batch in BATCHES},
        "long": long_sequences(),
        "memory": memory(),
    }, models


# ---- the report


def show(found: dict[str, Any], painted: torch.Tensor) -> None:
    show_models(found)
    print("\npainted by the linear model at temperature 1:\n")
    for row in as_text(painted):
        print(f"  {row}")
    show_speed(found)
    print("painting from the state or cache against reading the whole image again:")
    for name, about in found["models"].items():
        same = "the same pixels" if about["identity"]["same_pixels"] else "OTHER PIXELS"
        print(f"  {name}: largest difference of logits {about['identity']['max_difference']:.1e}, {same}")


def show_models(found: dict[str, Any]) -> None:
    served = ", ".join(f"{call} by {backend}" for call, backend in found["backends"].items())
    print(f"served: {served}; softmax attention by torch")
    print(f"images: {found['train_images']} to train on, with threads={found['threads']}, and")
    print(f"{found['valid_images']} held out; bits/dim of these:")
    print(f"  histogram  {found['histogram_bits_per_dim']:.3f}  each pixel by itself")
    for name, about in found["models"].items():
        print(
            f"  {name:9}  {about['valid_bits_per_dim']:.3f}  {about['parameters']:,} parameters, "
            f"{about['steps']} steps in {about['seconds']:.0f} s; {about['train_bits_per_dim']:.3f} of training images"
        )


def show_speed(found: dict[str, Any]) -> None:
    print(f"\nimages/s of {PIXELS} pixels, one thread   linear   softmax   ratio")
    for batch, speeds in found["images_per_s"].items():
        linear, softmax = speeds["linear"], speeds["softmax"]
        print(f"  {batch:>4} at once {linear:24,.0f} {softmax:9,.0f} {linear / softmax:7.2f}")
    long = found["long"]
    print("us a token of one long sequence")
    for length in shown_lengths(long["lengths"]):
        linear, softmax = (long["token_us"][name][long["lengths"].index(length)] for name in PATTERNS)
        print(f"  {length:>5} tokens {linear:24,.0f} {softmax:9,.0f} {softmax / linear:7.2f}")
    sizes = found["memory"]
    linear, softmax = (times[-1] - times[0] for times in long["token_us"].values())
    print(f"  softmax is slower {_from(long['crossover_tokens'])}; from the first block of {BLOCK} to the last one")
    print(f"  a token's time changed by {linear:+,.0f} us (linear) and {softmax:+,.0f} us (softmax)")
    kept = ", ".join(f"{size:,} at {length} tokens" for length, size in sizes["kv_cache_bytes"].items())
    print(f"memory: state {sizes['state_bytes']:,} bytes at any length; KV cache {kept},")
    print(f"  larger {_from(sizes['crossover_tokens'])}")


def _from(length: int | None) -> str:
    if length is None:
        return f"at no length up to {LONG}"
    return f"from {length} tokens on" if length else "at every length"


def shown_lengths(lengths: Sequence[int]) -> list[int]:
    """The first, and each that is four times the one before; the last in any case."""
    shown = [length for length in lengths if math.log(length / lengths[0], 4).is_integer()]
    return shown if shown[-1] == lengths[-1] else [*shown, lengths[-1]]


def as_text(images: torch.Tensor) -> list[str]:
    """Rows of text with the images side by side; a pixel is about as wide as high."""
    squares = images.unflatten(1, (SIDE, SIDE)).transpose(0, 1).tolist()  # row, image, column
    return ["  ".join("".join(_shade(level) for level in part) for part in row).rstrip() for row in squares]


def _shade(level: int) -> str:
    return 2 * SHADES[level * len(SHADES) // LEVELS]


def mosaic(images: torch.Tensor, columns: int) -> torch.Tensor:
    """Images [N, 64] as one, row by row, with gaps; NaN where there is nothing."""
    framed = F.pad(images.float().unflatten(1, (SIDE, SIDE)), (1, 1, 1, 1), value=math.nan)
    rows = framed.unflatten(0, (-1, columns)).transpose(1, 2)
    return rows.flatten(2, 3).flatten(0, 1)


def draw(found: dict[str, Any], model: CausalLM, held_out: torch.Tensor, path: Path) -> None:
    """Samples, completions of held-out images, and the time a token."""
    drawn, (left, middle, right) = figure(15, 5.2, columns=3)
    draw_images(left, mosaic(paint(model, 64), 8))
    left.set_title("Painted by the linear model, temperature 1", fontsize=10)
    draw_images(middle, mosaic(completions(model, held_out[:16]), 8))
    middle.set_title("Held-out images: upper half given,\ntwo completions, the original; two images a row", fontsize=10)
    draw_times(right, found["long"])
    save_figure(drawn, path)


def completions(model: CausalLM, images: torch.Tensor) -> torch.Tensor:
    """Four images for each: what is given, NaN below; two completions; the original."""
    given = images[:, :HALF]
    first, second = (complete(model, given, seed) for seed in (1, 2))
    halves = F.pad(given.float(), (0, PIXELS - HALF), value=math.nan)
    return torch.stack([halves, first.float(), second.float(), images.float()], 1).flatten(0, 1)


def draw_images(axes: Any, image: torch.Tensor) -> None:
    axes.imshow(image.tolist(), cmap=_gray(), vmin=0, vmax=LEVELS - 1, interpolation="nearest")
    axes.set_axis_off()


def _gray() -> Any:
    """Black to white, and a light blue for NaN."""
    from matplotlib import colormaps

    return colormaps["gray"].with_extremes(bad="#c8d8ec")


def draw_times(axes: Any, long: dict[str, Any]) -> None:
    for name, times in long["token_us"].items():
        axes.plot(long["lengths"], times, label=f"{name}, {long['total_s'][name]:.1f} s in all")
    if long["crossover_tokens"]:
        axes.axvline(long["crossover_tokens"], color="gray", linestyle=":", linewidth=1)
    axes.set_xlabel("tokens so far")
    axes.set_ylabel("time a token (us)")
    axes.set_ylim(bottom=0)
    axes.set_title("One long sequence, one thread, untrained models", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.digits", description="Paint digits with linear and with softmax attention."
    )
    parser.add_argument("--steps", type=int, help=f"train each model so many steps (default {STEPS})")
    parser.add_argument("--seconds", type=float, help=f"but so long at most ({SECONDS:g}, or no limit with --steps)")
    parser.add_argument("--threads", type=int, default=0, help="of training (default: the faster of one and all)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of training (float32)")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="where digits.png goes")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/digits.json and DIR/digits.png")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead of text")
    args = parser.parse_args(argv)
    if args.seconds is None:
        args.seconds = SECONDS if args.steps is None else math.inf
    if args.steps is None:
        args.steps = STEPS
    if args.steps < 1 or not args.seconds > 0 or args.threads < 0:
        parser.error("--steps, --seconds and --threads must be positive")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    found, models = measure_all(args)
    pictures = [args.out / "digits.png"]
    draw(found, models["linear"], load_images().valid, pictures[0])
    if args.save:
        save_results(found, args.save / "digits.json")
        pictures.append(Path(shutil.copy(pictures[0], args.save)))
    if args.json:
        print(json.dumps({**found, "pictures": [str(path) for path in pictures]}, indent=1))
    else:
        show(found, paint(models["linear"], 5))
        print(f"wrote {', '.join(map(str, pictures))}")
    return 0 if all(Identity(**about["identity"]).holds for about in found["models"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
