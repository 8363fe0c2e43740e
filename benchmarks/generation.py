"""Whole models on the CPU: `python -m benchmarks.generation [--threads 1,2] [--json] [--save DIR]`.

1  Generation: 1024 tokens after a prompt of 2048, batches of 4; models of one shape with linear attention, with gated
   delta rule, 3:1 hybrid, and with softmax attention and a KV cache, a token of each in turn. Time per token at the
   start and at the end.
2  Crossover: a step of each after 64 to 32768 tokens, and where softmax becomes the slower and the larger one.
3  Training: a step of the byte models of examples/byte_lm.py, forward, backward and optimizer, against the same models
   on the torch backend, in the dtype in which ours is faster.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autotune import measure
from examples import byte_lm, training
from linattn_tl.modules import Cache, CausalLM, KVState, generate

WIDTH, HEADS, LAYERS, VOCABULARY, BATCH = 256, 4, 4, 256, 4
PROMPT, NEW = 2048, 1024
MODELS = {"linear": "L", "gated delta": "N", "3:1 hybrid": "NNNS", "softmax": "S"}
LENGTHS = (16, 64, 256, 1024, 4096, 16384, 32768)
EDGE = 128  # tokens that make up the start and the end
STEPS = 24  # of each model at a length
TRAINED = {"linear": "L", "gated": "G", "delta": "D", "3:1 hybrid": "NNNS"}
ROUNDS = 9


@dataclass(frozen=True)
class Tokens:
    """Generation by one model."""

    model: str
    threads: int
    first_ms: float  # a token of each sequence, median of the first EDGE
    last_ms: float
    cache_mb: float  # at the end

    @property
    def growth(self) -> float:
        return self.last_ms / self.first_ms


@dataclass(frozen=True)
class Steps:
    """A step of one model after tokens of each length."""

    model: str
    threads: int
    step_ms: list[float]  # by LENGTHS
    cache_mb: list[float]


@dataclass(frozen=True)
class Training:
    """A training step of one model, and of the same on the torch backend."""

    model: str
    threads: int
    dtype: str
    ours_ms: float
    torch_ms: float

    @property
    def ratio(self) -> float:
        return self.torch_ms / self.ours_ms


def make_model(pattern: str) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(VOCABULARY, WIDTH, HEADS, pattern, LAYERS)


# ---- generation


def generation(threads: int) -> list[Tokens]:
    torch.set_num_threads(threads)
    prompt = torch.randint(VOCABULARY, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    streams, times = {}, {name: [] for name in MODELS}
    caches: dict[str, Cache] = {}
    for name, pattern in MODELS.items():
        model = make_model(pattern)
        _watch(model, caches, name)
        streams[name] = generate(model, prompt, NEW + 1, stream=True)
        next(streams[name])  # reads the prompt
    for _ in range(NEW):
        for name, stream in streams.items():
            start = time.perf_counter()
            next(stream)
            times[name].append(time.perf_counter() - start)
    return [
        Tokens(
            name,
            threads,
            1e3 * statistics.median(seconds[:EDGE]),
            1e3 * statistics.median(seconds[-EDGE:]),
            caches[name].nbytes / 1e6,
        )
        for name, seconds in times.items()
    ]


def _watch(model: CausalLM, caches: dict[str, Cache], name: str) -> None:
    """Note the cache that each step is given."""
    step = model.step

    def watched(ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        caches[name] = cache
        return step(ids, cache)

    model.step = watched  # pyright: ignore[reportAttributeAccessIssue]


# ---- crossover


@torch.no_grad()
def steps_by_length(threads: int) -> list[Steps]:
    torch.set_num_threads(threads)
    models = {name: make_model(pattern) for name, pattern in MODELS.items()}
    found: dict[str, Steps] = {name: Steps(name, threads, [], []) for name in MODELS}
    ids = torch.zeros(BATCH, dtype=torch.int64)
    for length in LENGTHS:
        caches = {name: filled(model, length) for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in MODELS}
        for _ in range(STEPS):
            for name, model in models.items():
                start = time.perf_counter()
                model.step(ids, caches[name])
                times[name].append(1e3 * (time.perf_counter() - start))
        for name, ms in times.items():
            found[name].step_ms.append(statistics.median(ms[2:]))
            found[name].cache_mb.append(models[name].init_state(BATCH, room=length).nbytes / 1e6)
    return list(found.values())


def filled(model: CausalLM, length: int) -> Cache:
    """A cache as it is after `length` tokens, with numbers of about the right size."""
    cache = model.init_state(BATCH, room=length + STEPS)
    for layer in cache.layers:
        for name, x in layer.tensors().items():
            if name != "lengths":
                x.normal_(std=0.1)
        if isinstance(layer, KVState):
            layer.lengths.fill_(length)
            layer.shortest = layer.longest = length
    cache.lengths.fill_(length)
    return cache


def crossover(rival: Sequence[float], ours: Sequence[float]) -> str:
    """The length from which `rival` is the larger of the two to the end, between LENGTHS on a straight line."""
    smaller = [i for i, (a, b) in enumerate(zip(rival, ours, strict=True)) if a < b]
    if not smaller:
        return f"{LENGTHS[0]:,} tokens or fewer"
    i = smaller[-1]
    if i == len(LENGTHS) - 1:
        return f"more than {LENGTHS[-1]:,} tokens"
    before, after = ours[i] - rival[i], rival[i + 1] - ours[i + 1]
    return f"{LENGTHS[i] + (LENGTHS[i + 1] - LENGTHS[i]) * before / (before + after):,.0f} tokens"


# ---- training


def training_steps(threads: int) -> list[Training]:
    texts = byte_lm.read_text()[0]
    batch = byte_lm.sample_batch(texts, torch.Generator().manual_seed(0))
    found = []
    for name, pattern in TRAINED.items():
        models = {backend: byte_lm.make_model(pattern, backend) for backend in ("auto", "torch")}
        setting = training.fastest_setting(models["auto"], lambda _: batch, threads)
        check_same_gradients(name, *models.values(), batch, setting.dtype)
        runs = {backend: stepping(model, batch, setting.dtype) for backend, model in models.items()}
        times = measure.interleaved(runs, rounds=ROUNDS)
        ours, rival = (times[backend].median_us / 1e3 for backend in ("auto", "torch"))
        found.append(Training(name, threads, setting.dtype, ours, rival))
    return found


def stepping(model: CausalLM, batch: training.Batch, dtype: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        training.loss_of(model, batch, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check_same_gradients(name: str, ours: CausalLM, rival: CausalLM, batch: training.Batch, dtype: str) -> None:
    """Nothing is timed that is not right: the gradients of both backends agree."""
    grads = []
    for model in (ours, rival):
        training.loss_of(model, batch, dtype).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    difference = ((grads[0] - grads[1]).norm() / grads[1].norm()).item()
    allowed = 1e-4 if dtype == "float32" else 3e-2
    if not difference <= allowed:
        raise SystemExit(f"{name}: gradients differ by {difference:.1e} of their size; at most {allowed:g} are allowed")


# ---- the report


def text(found: dict[str, list[Any]]) -> str:
    lines = [f"generation after {PROMPT:,} tokens, batch {BATCH}, {LAYERS} layers of {HEADS} heads of {WIDTH // HEADS}"]
    lines.append(
        f"  {'':<12} {'threads':>7} {'ms/token, first':>16} {f'{NEW} later':>11} {'growth':>7} {'cache MB':>9}"
    )
    for x in found["generation"]:
        row = f"{x.first_ms:>16.2f} {x.last_ms:>11.2f} {x.growth:>7.2f} {x.cache_mb:>9.1f}"
        lines.append(f"  {x.model:<12} {x.threads:>7} {row}")
    lines += ["", "a step after so many tokens, ms", f"  {'':<12} {'threads':>7} " + _cells(LENGTHS, ",")]
    for x in found["steps"]:
        lines.append(f"  {x.model:<12} {x.threads:>7} " + _cells(x.step_ms, ".2f"))
    lines += _crossovers(found["steps"])
    lines += ["", f"a training step of the byte models, batch {byte_lm.BATCH} x {byte_lm.LENGTH}"]
    lines.append(f"  {'':<12} {'threads':>7} {'dtype':>9} {'ours, ms':>9} {'torch backend':>14}")
    for x in found["training"]:
        lines.append(f"  {x.model:<12} {x.threads:>7} {x.dtype:>9} {x.ours_ms:>9.1f} {x.ratio:>13.2f}x")
    return "\n".join(lines)


def _cells(values: Sequence[float], form: str) -> str:
    return " ".join(f"{value:>9{form}}" for value in values)


def _crossovers(steps: Sequence[Steps]) -> list[str]:
    lines = []
    for threads in dict.fromkeys(x.threads for x in steps):
        rows = {x.model: x for x in steps if x.threads == threads}
        softmax = rows.pop("softmax")
        for name, x in rows.items():
            slower, larger = crossover(softmax.step_ms, x.step_ms), crossover(softmax.cache_mb, x.cache_mb)
            lines.append(
                f"  threads={threads}: softmax is slower than {name} from {slower} on, larger from {larger} on"
            )
    return lines


def plot(found: dict[str, list[Any]], path: Path) -> None:
    figure, (times, sizes) = training.figure(9, 3.8, columns=2)
    threads = found["steps"][0].threads
    for x in found["steps"]:
        if x.threads == threads:
            times.plot(LENGTHS, x.step_ms, marker="o", markersize=3, label=x.model)
            sizes.plot(LENGTHS, x.cache_mb, marker="o", markersize=3, label=x.model)
    for axes, label in ((times, f"ms a token, threads={threads}"), (sizes, "cache, MB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens read before", ylabel=label)
        axes.grid(alpha=0.3)
    times.legend()
    training.save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.generation", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="1,2", help="comma-separated (default 1,2)")
    parser.add_argument("--parts", default="generation,steps,training", help="comma-separated (default: all)")
    parser.add_argument("--json", action="store_true", help="numbers as JSON on stdout")
    parser.add_argument("--save", type=Path, help="a folder for generation.json and generation.png")
    args = parser.parse_args(argv)
    parts = {"generation": generation, "steps": steps_by_length, "training": training_steps}
    wanted = args.parts.split(",")
    for name in wanted:
        if name not in parts:
            parser.error(f"--parts has {name!r}; expected {', '.join(parts)}")
    found: dict[str, list[Any]] = {name: [] for name in parts}
    for threads in map(int, args.threads.split(",")):
        for name in wanted:
            print(f"{name}, threads={threads}", file=sys.stderr)
            found[name] += parts[name](threads)
    numbers = {"lengths": LENGTHS, **{name: [asdict(x) for x in values] for name, values in found.items()}}
    if args.save:
        training.save_results(numbers, args.save / "generation.json")
        if found["steps"]:
            plot(found, args.save / "generation.png")
    print(json.dumps({"machine": training.machine(), **numbers}, indent=1) if args.json else text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
