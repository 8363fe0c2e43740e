"""Associative recall: sums collide, the delta rule corrects, softmax attention keeps everything.

    python -m examples.recall                # under five minutes on two cores
    python -m examples.recall --steps 1500   # as many steps for each model, however long they take: repeatable

A sequence lists N pairs of a key and a value, then asks for every key once, in random order; only the answers count
(multi-query associative recall, Arora et al. 2023, arXiv 2312.04927, section 4). Two forms of it:

    once        keys are distinct, each is listed once: how much fits into a state (Schlag et al. 2021, arXiv
                2102.11174, sections 4.1 and 6.1)
    rewritten   each key is listed three times with other values, and the last one counts: whether a state can be
                edited (same paper, sections 4.2 and 6.1; Yang et al. 2024, arXiv 2406.06484)

Models of the same size, data, steps and learning rate differ in what their layers do with a pair. Beside them, what the
ops do with N random pairs and no training at all, over N / K: the error of sums is ((N - 1) / K)^1/2.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import linattn_tl
from examples.training import Batch, Run, fastest_setting, figure, save_figure, save_results, train
from linattn_tl import delta_rule, linear_attention
from linattn_tl.modules import CausalLM
from linattn_tl.modules.language_model import IGNORED

KEYS, VALUES = 64, 64  # tokens of the vocabulary: keys first
ONCE, REWRITTEN = "once", "rewritten"
WRITES = {ONCE: 1, REWRITTEN: 3}
PAIRS = {ONCE: (2, 3, 4, 6, 8, 16, 32, 64), REWRITTEN: (2, 4, 8, 16, 32)}  # up to 192 and 224 tokens
WIDTH, HEADS, MLP_WIDTH = 64, 2, 32
DIM = 16  # of a head's keys and values: a state that is small on purpose
BATCH_TOKENS = 2048  # a step
LEARNING_RATE = 1e-2  # of all models; with 3e-3 and 5e-3 more of them stay where they guess among the values listed
STEPS, SECONDS = 1500, 40.0  # of training a model, whichever ends first: equal steps where the machine is fast enough
TESTED = 64  # fresh sequences of each number of pairs
ENOUGH = 0.9  # of the answers
HARDEST = 3  # numbers of pairs by whose mean accuracy models are compared
CLOSE = 0.02  # means nearer than this are called equal
ALIKE = 0.9  # of the other's steps: models that were trained less than that are not compared

UNTRAINED_DIM, UNTRAINED_MEMORIES, ROUNDS = 32, 16, 8
LOADS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # N / K
EXACT = 1e-4  # relative error, in fp32


# ---- data


class Task(NamedTuple):
    kind: str
    pairs: int

    @property
    def length(self) -> int:
        return self.pairs * (2 * WRITES[self.kind] + 1)


def tasks() -> list[Task]:
    return [Task(kind, pairs) for kind, numbers in PAIRS.items() for pairs in numbers]


def make_batch(task: Task, batch: int, generator: torch.Generator) -> Batch:
    """ids and targets [batch, task.length]: every key with each of its values, in any order; then every key."""
    pairs, writes = task.pairs, WRITES[task.kind]
    keys = shuffled(batch, KEYS, generator)[:, :pairs]
    values = shuffled(batch * pairs, VALUES, generator)[:, :writes].unflatten(0, (batch, pairs)) + KEYS
    times = shuffled(batch, pairs * writes, generator).unflatten(1, (pairs, writes)).sort(2).values
    order = times.flatten(1).argsort(1)  # of the writes; those of one key stay as they are, so its last value is last
    listed = torch.stack([keys.gather(1, order // writes), values.flatten(1).gather(1, order)], 2).flatten(1)
    asked = shuffled(batch, pairs, generator)
    ids = torch.cat([listed, keys.gather(1, asked)], 1)
    targets = torch.full_like(ids, IGNORED)
    targets[:, -pairs:] = values[:, :, -1].gather(1, asked)
    return ids, targets


def shuffled(rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, count], 0 to count - 1 in a random order a row."""
    return torch.rand(rows, count, generator=generator).argsort(1)


def sample_batch(generator: torch.Generator) -> Batch:
    """Any of the tasks, as many tokens in each batch.

    The easy ones are learnt first, and lead to the others: with fewer of them softmax attention goes on guessing.
    """
    every = tasks()
    task = every[int(torch.randint(len(every), (), generator=generator))]
    return make_batch(task, max(1, BATCH_TOKENS // task.length), generator)


def same_sized_batch(generator: torch.Generator) -> Batch:
    """For timing."""
    task = Task(ONCE, max(PAIRS[ONCE]))
    return make_batch(task, max(1, BATCH_TOKENS // task.length), generator)


# ---- models


def unit(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=-1)


STATE = {"key_dim": DIM, "value_dim": DIM, "conv_size": 4, "norm": True}  # the convolution joins a key and its value
GATELESS = {**STATE, "gate": False}
# as the delta rule, without its subtraction
SUMS = {**STATE, "feature_map": unit, "normalize": False, "conv_silu": True}


@dataclass(frozen=True)
class Plan:
    """Layers by their letters, as in HybridStack, and their options."""

    pattern: str
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


SOFTMAX = {"head_dim": DIM}
MODELS = {
    "sums, normalised": Plan("LL", {"L": STATE}),  # arXiv 2006.16236: elu + 1, divided by the sum of weights
    "sums": Plan("LL", {"L": SUMS}),
    "delta rule": Plan("DD", {"D": STATE}),
    "gated delta rule": Plan("NN", {"N": GATELESS}),
    "softmax + sums": Plan("SL", {"L": SUMS, "S": SOFTMAX}),
    "softmax + delta rule": Plan("SD", {"D": STATE, "S": SOFTMAX}),
    "softmax": Plan("SS", {"S": SOFTMAX}),
}


def build(plan: Plan, parameters: int | None = None) -> CausalLM:
    """From the same seed. parameters: as many as the MLP's width allows."""

    def made(mlp_width: int) -> CausalLM:
        torch.manual_seed(0)
        return CausalLM(KEYS + VALUES, WIDTH, HEADS, plan.pattern, options=dict(plan.options), mlp_width=mlp_width)

    model = made(MLP_WIDTH)
    if parameters is None:
        return model
    a_unit = 3 * WIDTH * len(plan.pattern)
    return made(MLP_WIDTH + round((parameters - size_of(model)) / a_unit))


def size_of(model: CausalLM) -> int:
    return sum(p.numel() for p in model.parameters())


def memory_numbers(model: CausalLM) -> int:
    """Numbers that one sequence is remembered by, after the longest list of pairs."""
    longest = max(task.length - task.pairs for task in tasks())
    cache = model.init_state(1, room=longest)
    tensors = (x for layer in cache.layers for x in layer.tensors().values() if x is not None)
    return sum(x.numel() for x in tensors if x.is_floating_point())


@torch.no_grad()
def accuracy(model: CausalLM, task: Task, generator: torch.Generator) -> float:
    ids, targets = make_batch(task, TESTED, generator)
    asked = targets != IGNORED
    return (model(ids).logits.argmax(-1) == targets)[asked].float().mean().item()


def accuracies(model: CausalLM) -> dict[str, dict[int, float]]:
    """On sequences that training has not seen: of another seed, the same for every model."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, dict[int, float]] = {kind: {} for kind in PAIRS}
    for task in tasks():
        found[task.kind][task.pairs] = accuracy(model, task, generator)
    return found


def falls_at(found: Mapping[int, float]) -> int | None:
    """The first number of pairs with too few right answers."""
    return next((pairs for pairs, right in found.items() if right < ENOUGH), None)


def measure_model(name: str, args: argparse.Namespace, parameters: int) -> dict[str, Any]:
    model = build(MODELS[name], parameters)
    start = time.monotonic()
    run = Run(steps=args.steps, seconds=args.seconds, learning_rate=LEARNING_RATE)
    losses = train(model, sample_batch, run, name)
    seconds = time.monotonic() - start
    found = accuracies(model)
    return {
        "pattern": MODELS[name].pattern,
        "parameters": size_of(model),
        "memory_numbers": memory_numbers(model),
        "steps": len(losses),
        "seconds": round(seconds, 1),
        "losses_bits": [round(x, 3) for x in averaged(losses)],
        "accuracy": found,
        "falls_at": {kind: falls_at(of_kind) for kind, of_kind in found.items()},
    }


def averaged(losses: Sequence[float], parts: int = 50) -> list[float]:
    """Tasks differ in how hard they are, so single losses say little."""
    size = max(1, len(losses) // parts)
    return [statistics.mean(losses[i : i + size]) for i in range(0, len(losses), size)]


# ---- what the ops do with random pairs, untrained


Memory = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # k, v [B, N, 1, K] -> what each k reads, after all


def sums(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """sum_j (k_i . k_j) v_j"""
    return linear_attention(k, k, v, feature_map="identity", normalize=False, causal=False)[0]


def normalised_sums(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """sum_j (phi(k_i) . phi(k_j)) v_j / sum_j phi(k_i) . phi(k_j), phi = elu + 1 (arXiv 2006.16236, eq. 7 and 9)"""
    return linear_attention(k, k, v, causal=False)[0]


def delta(k: torch.Tensor, v: torch.Tensor, rounds: int = 1) -> torch.Tensor:
    """S += k (v - S^T k)^T, pair after pair (arXiv 2406.06484, eq. 3-4 with beta = 1); beta = 0 reads and keeps S."""
    state, ones = None, torch.ones(v.shape[:3])
    for _ in range(rounds):
        _, state = delta_rule(k, k, v, ones, scale=1.0, initial_state=state, output_final_state=True)
    return delta_rule(k, k, v, torch.zeros_like(ones), scale=1.0, initial_state=state)[0]


def repeated_delta(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return delta(k, v, ROUNDS)


def softmax(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax_j(K k_i . k_j) v_j: sharp, as a trained model makes it (arXiv 2008.02217, eq. 3)"""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(k, k, v, scale=float(k.shape[-1])).transpose(1, 2)


MEMORIES: dict[str, Memory] = {
    "sums, normalised": normalised_sums,
    "sums": sums,
    "delta rule": delta,
    f"delta rule, {ROUNDS} rounds": repeated_delta,
    "softmax": softmax,
}


def random_pairs(N: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of length 1, [UNTRAINED_MEMORIES, N, 1, UNTRAINED_DIM]."""
    k, v = torch.randn(2, UNTRAINED_MEMORIES, N, 1, UNTRAINED_DIM, generator=generator)
    return unit(k), unit(v)


def relative_error(o: torch.Tensor, v: torch.Tensor) -> float:
    return ((o - v).norm() / v.norm()).item()


def picked_right(o: torch.Tensor, v: torch.Tensor) -> float:
    """The share of o [B, N, 1, V] whose largest product with any v is that with its own."""
    o, v = o.squeeze(2), v.squeeze(2)
    return ((o @ v.mT).argmax(-1) == torch.arange(v.shape[1])).float().mean().item()


def measure_untrained() -> dict[str, Any]:
    numbers = [max(1, round(load * UNTRAINED_DIM)) for load in LOADS]
    found: dict[str, Any] = {"dim": UNTRAINED_DIM, "rounds": ROUNDS, "pairs": numbers, "error": {}, "right": {}}
    for name, memory in MEMORIES.items():
        read = []
        for N in numbers:
            k, v = random_pairs(N, torch.Generator().manual_seed(N))
            o = memory(k, v)
            read.append((relative_error(o, v), picked_right(o, v), relative_error(o[:, -1], v[:, -1])))
        found["error"][name], found["right"][name] = ([row[i] for row in read] for i in (0, 1))
        if memory is delta:
            found["delta_last_pair"] = max(row[2] for row in read)
    found["sums_expected"] = [math.sqrt((N - 1) / UNTRAINED_DIM) for N in numbers]
    return {**found, **measure_orthonormal()}


def measure_orthonormal() -> dict[str, Any]:
    """K orthonormal keys, once, and again with other values, of which the later ones are wanted."""
    generator = torch.Generator().manual_seed(0)
    first, v = random_pairs(UNTRAINED_DIM, generator)[1], random_pairs(UNTRAINED_DIM, generator)[1]
    k = torch.linalg.qr(random_pairs(UNTRAINED_DIM, generator)[0].squeeze(2)).Q.unsqueeze(2)
    twice, both = torch.cat([k, k], 1), torch.cat([first, v], 1)
    late = UNTRAINED_DIM
    return {
        "orthonormal": {name: relative_error(memory(k, v), v) for name, memory in MEMORIES.items()},
        "rewritten": {name: relative_error(memory(twice, both)[:, late:], v) for name, memory in MEMORIES.items()},
    }


# ---- what was found


class Claim(NamedTuple):
    """The literature expects `better` to recall more than `worse`."""

    better: str
    worse: str
    kind: str
    source: str


CLAIMS = (
    Claim("delta rule", "sums, normalised", ONCE, "2102.11174, section 4"),
    Claim("delta rule", "sums, normalised", REWRITTEN, "2102.11174, section 6.1"),
    Claim("delta rule", "sums", ONCE, "2102.11174, section 4.2"),
    Claim("delta rule", "sums", REWRITTEN, "2102.11174, section 6.1"),
    Claim("gated delta rule", "sums", REWRITTEN, "2412.06464, section 3"),
    Claim("softmax + sums", "sums", ONCE, "2312.04927, section 5"),
    Claim("softmax + delta rule", "delta rule", ONCE, "2312.04927, section 5"),
    Claim("softmax", "delta rule", ONCE, "2312.04927, section 4"),
)


def hard_mean(rights: Mapping[int, float]) -> float:
    return statistics.mean(rights[pairs] for pairs in sorted(rights)[-HARDEST:])


def judge(claim: Claim, models: Mapping[str, Any]) -> dict[str, Any]:
    means = [hard_mean(models[x]["accuracy"][claim.kind]) for x in (claim.better, claim.worse)]
    difference = means[0] - means[1]
    steps = sorted(models[x]["steps"] for x in (claim.better, claim.worse))
    if steps[0] < ALIKE * steps[1]:
        return {**claim._asdict(), "means": means, "verdict": "cut short"}
    verdict = "equal" if abs(difference) < CLOSE else "as expected" if difference > 0 else "the opposite"
    return {**claim._asdict(), "means": means, "verdict": verdict}


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    backends: dict[str, str] = {}
    for op in ("linear_attention", "delta_rule"):
        backends |= linattn_tl.preload(op, K=DIM, V=DIM)  # builds before the clock runs
        linattn_tl.preload(op, K=UNTRAINED_DIM, V=UNTRAINED_DIM)
    untrained = measure_untrained()
    first = build(next(iter(MODELS.values())))
    # two threads save a fifth of the time at this size, and cost a hundredfold once another process wants a core
    threads = fastest_setting(first, same_sized_batch, args.threads, "float32").threads
    models = {name: measure_model(name, args, size_of(first)) for name in MODELS}
    return {
        "keys": KEYS,
        "values": VALUES,
        "head_dim": DIM,
        "heads": HEADS,
        "layers": len(first.stack.blocks),
        "learning_rate": LEARNING_RATE,
        "batch_tokens": BATCH_TOKENS,
        "threads": threads,
        "backends": backends,
        "models": models,
        "claims": [judge(claim, models) for claim in CLAIMS],
        "untrained": untrained,
    }


# ---- the report


def show(found: dict[str, Any]) -> None:
    models = found["models"]
    sizes = [about["parameters"] for about in models.values()]
    served = ", ".join(f"{call} by {backend}" for call, backend in found["backends"].items() if "decode" not in call)
    print(f"task: {found['keys']} keys, {found['values']} values; {ENOUGH:.0%} of the answers right is enough")
    print(f"models: {found['layers']} layers, {found['heads']} heads of {found['head_dim']}, ", end="")
    print(f"{min(sizes):,} to {max(sizes):,} parameters; the same batches for all,")
    print(f"  {found['batch_tokens']:,} tokens a step, and the same learning rate, {found['learning_rate']:g}")
    print(f"trained with threads={found['threads']}; served: {served}")
    show_accuracies(models)
    print()
    for name, about in models.items():
        print(f"{name:<22}" + ", ".join(fall(kind, about) for kind in PAIRS))
    if len({about["steps"] for about in models.values()}) > 1:
        print("the clock cut some models short, so their steps differ: --steps gives all as many")
    print("\nthe literature expects the first to recall more than the second; mean accuracy over the ", end="")
    print(f"{HARDEST} largest N,\n  of one training each, so that a small difference may be the seed's")
    for claim in found["claims"]:
        print(verdict_line(claim))
    show_untrained(found["untrained"])


def show_accuracies(models: Mapping[str, Any]) -> None:
    heads = [*PAIRS[ONCE], *(f"{N}'" for N in PAIRS[REWRITTEN])]
    print(f"\nright answers in % over the pairs; ' rewritten\n{'':<22}{'state':>6}{'steps':>6}{'':>2}", end="")
    print("".join(f"{N:>5}" for N in heads))
    for name, about in models.items():
        rights = [about["accuracy"][kind][N] for kind in PAIRS for N in PAIRS[kind]]
        print(f"{name:<22}{about['memory_numbers']:>6}{about['steps']:>6}{'':>2}", end="")
        print("".join(f"{100 * x:>5.0f}" for x in rights))


def fall(kind: str, about: Mapping[str, Any]) -> str:
    pairs = about["falls_at"][kind]
    return f"{kind}: enough up to {max(PAIRS[kind])}" if pairs is None else f"{kind}: too few from {pairs} pairs on"


VERDICTS = {
    "as expected": "as the literature says",
    "equal": "NOT SEEN HERE: no difference",
    "the opposite": "NOT AS THE LITERATURE SAYS: the opposite",
    "cut short": "NOT COMPARED: the clock gave one of them fewer steps",
}


def verdict_line(claim: Mapping[str, Any]) -> str:
    more, less = claim["means"]
    seen = f"{claim['kind']}: {claim['better']} {more:.2f}, {claim['worse']} {less:.2f}"
    return f"  {seen}: {VERDICTS[claim['verdict']]} (arXiv {claim['source']})"


def show_untrained(found: Mapping[str, Any]) -> None:
    K = found["dim"]
    print(
        f"\nuntrained: N random pairs in a state of {K} x {K}, read back: relative error, and % nearest to their own;"
    )
    print(f"  error of {K} orthonormal keys, and of the same ones when each is then given another value")
    print(f"{'N / K':<22}" + "".join(f"{N / K:>12g}" for N in found["pairs"]) + " orthonormal   rewritten")
    for name, errors in found["error"].items():
        cells = [f"{e:.2f} {100 * r:3.0f}%" for e, r in zip(errors, found["right"][name], strict=True)]
        cells += [f"{found[key][name]:.1g}" for key in ("orthonormal", "rewritten")]
        print(f"{name:<22}" + "".join(f"{x:>12}" for x in cells))
    print(f"{'((N - 1) / K)^1/2':<22}" + "".join(f"{x:>7.2f}{'':>5}" for x in found["sums_expected"]).rstrip())
    print(f"the last pair that the delta rule wrote: error {found['delta_last_pair']:.0e} at most, whatever N")
    nearest = {name: found["right"][name][found["pairs"].index(K)] for name in ("sums", "delta rule")}
    error = {name: found["error"][name][found["pairs"].index(K)] for name in nearest}
    print(
        f"at N = K the delta rule errs by {error['delta rule']:.2f} and sums by {error['sums']:.2f}; the nearest value "
        f"is the right one for {nearest['delta rule']:.0%} and {nearest['sums']:.0%}"
    )
    if nearest["sums"] > nearest["delta rule"] and error["sums"] > error["delta rule"]:
        print("  so a smaller error is no better choice: later writes take from what earlier ones left, sums only add")


def draw(found: dict[str, Any], path: Path) -> None:
    drawn, axes = figure(15, 4.4, columns=3)
    draw_untrained(axes[0], found["untrained"])
    for kind, panel in zip(PAIRS, axes[1:], strict=True):
        draw_accuracies(panel, kind, found["models"])
    axes[1].legend(fontsize=8)
    save_figure(drawn, path)


STYLES = {  # of a name, in all panels
    "sums, normalised": "C0o",
    "sums": "C1s",
    "delta rule": "C2D",
    f"delta rule, {ROUNDS} rounds": "C8^",
    "gated delta rule": "C3v",
    "softmax + sums": "C5P",
    "softmax + delta rule": "C9X",
    "softmax": "C4*",
}


def style(name: str) -> dict[str, Any]:
    return {"color": STYLES[name][:2], "marker": STYLES[name][2:], "markersize": 5}


def draw_untrained(axes: Any, found: Mapping[str, Any]) -> None:
    loads = [N / found["dim"] for N in found["pairs"]]
    for name, errors in found["error"].items():
        axes.plot(loads, errors, **style(name), label=name)
    axes.plot(loads, found["sums_expected"], color="black", linestyle=":", label="((N - 1) / K)^1/2")
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.set_xlabel("pairs / key dimension, N / K")
    axes.set_ylabel("relative error")
    axes.set_title("Random pairs read back by the ops, untrained", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_accuracies(axes: Any, kind: str, models: Mapping[str, Any]) -> None:
    for name, about in models.items():
        of_kind = about["accuracy"][kind]
        label = f"{name} ({about['pattern']})"
        axes.plot(list(of_kind), [100 * x for x in of_kind.values()], **style(name), label=label)
    axes.axhline(100 * ENOUGH, color="gray", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(PAIRS[kind], [str(N) for N in PAIRS[kind]])
    axes.set_ylim(0, 103)
    axes.set_xlabel("pairs, N")
    axes.set_ylabel("right answers (%)")
    titles = {
        ONCE: "Trained: each key listed once",
        REWRITTEN: f"Trained: each key listed {WRITES[REWRITTEN]} times, the last value counts",
    }
    axes.set_title(titles[kind], fontsize=10)
    axes.grid(alpha=0.3)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.recall", description="Recall of key-value pairs by sums, delta rule and softmax."
    )
    parser.add_argument("--steps", type=int, help=f"train each model so many steps (default {STEPS})")
    parser.add_argument(
        "--seconds", type=float, help=f"but no longer than this (default {SECONDS:.0f}, or no limit with --steps)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of training (default 1); 0: the faster of one and all")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="where recall.png goes")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/recall.json and DIR/recall.png")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead of text")
    args = parser.parse_args(argv)
    if args.seconds is None:
        args.seconds = math.inf if args.steps is not None else SECONDS
    if args.steps is None:
        args.steps = STEPS
    if args.steps < 1 or not args.seconds > 0 or args.threads < 0:
        parser.error("--steps and --seconds must be positive, --threads 0 or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """1 if the delta rule does not keep orthonormal keys, which is no matter of training."""
    args = parse(argv)
    found = measure_all(args)
    pictures = [folder / "recall.png" for folder in (args.out, args.save) if folder]
    for path in pictures:
        draw(found, path)
    if args.save:
        save_results(found, args.save / "recall.json")
    if args.json:
        print(json.dumps({**found, "pictures": [str(path) for path in pictures]}, indent=1))
    else:
        show(found)
        print(f"wrote {', '.join(map(str, pictures))}")
    kept = found["untrained"]["orthonormal"]["delta rule"], found["untrained"]["rewritten"]["delta rule"]
    return 0 if max(kept) <= EXACT else 1


if __name__ == "__main__":
    sys.exit(main())
