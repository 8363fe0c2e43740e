"""Train a small byte-level language model with linear attention, then generate from its constant-size state.

    python examples/byte_lm.py                 # under two minutes on two cores
    python examples/byte_lm.py --steps 300     # as many steps, however long they take: repeatable

The text is what every machine has: the sources of Python's standard library. Two functions do the work that a
softmax-attention model would do with attention and a KV cache:

    linear_attention          whole sequences, for training and for reading a prompt
    linear_attention_decode   one token, updating the state in place
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
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import linattn_tl
from linattn_tl import LinearState, linear_attention, linear_attention_decode

WIDTH, HEADS, LAYERS, NEAR = 128, 4, 3, 4
EMBEDDING_STD = 0.02  # small, so that the shared head starts near uniform; divided out on the way in
BATCH, LENGTH = 8, 256  # sequences a step, bytes a sequence
LEARNING_RATE, WARMUP = 3e-3, 0.05  # warm-up is a fraction of the run
VALID_EVERY = 20  # every 20th file is kept for validation
VALID_BATCHES = 16
PROMPT = b'"""Read a file and return its lines."""\n\nimport '
GENERATE = 512  # bytes
TOLERANCE = 1e-3  # of logits, between generating from the state and reading the whole text again
BITS = 1 / math.log(2)


class Memory(NamedTuple):
    """All that generation carries from byte to byte: its size does not depend on how many there were."""

    recent: torch.Tensor  # [B, NEAR - 1, WIDTH], the embeddings of the last bytes
    states: list[LinearState]  # one a block


class LinearAttention(nn.Module):
    """Causal linear attention. q, k and v come from one Linear and stay views of its output."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[..., width] -> q, k, v, each [..., heads, width / heads]."""
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)

    def forward(self, x: torch.Tensor, keep_state: bool) -> tuple[torch.Tensor, LinearState | None]:
        q, k, v = self._project(x)
        o, state = linear_attention(q, k, v, output_final_state=keep_state)
        return self.out(o.flatten(-2)), state

    def step(self, x: torch.Tensor, state: LinearState) -> torch.Tensor:
        """One token, x [B, width]; the state changes in place."""
        q, k, v = self._project(x)
        o = linear_attention_decode(q, k, v, state)
        return self.out(o.flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = LinearAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, keep_state: bool) -> tuple[torch.Tensor, LinearState | None]:
        o, state = self.attention(self.norm1(x), keep_state)
        x = x + o
        return x + self.mlp(self.norm2(x)), state

    def step(self, x: torch.Tensor, state: LinearState) -> torch.Tensor:
        x = x + self.attention.step(self.norm1(x), state)
        return x + self.mlp(self.norm2(x))


class ByteLM(nn.Module):
    """Bytes in, logits of the next byte out. The head shares the embedding's weights.

    Linear attention knows no positions, so each byte also sees the NEAR - 1 before it, through a depthwise
    convolution over the embeddings.
    """

    def __init__(self, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        self.near = nn.Parameter(torch.zeros(width, 1, NEAR))
        with torch.no_grad():
            self.near[:, 0, -1] = 1  # at first a byte sees only itself
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def _embed(self, ids: torch.Tensor, recent: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T] -> [B, T, width], and the embeddings that the bytes after these will need."""
        x = self.embedding(ids)
        if recent is None:
            recent = x.new_zeros(x.shape[0], NEAR - 1, x.shape[2])
        x = torch.cat([recent, x], 1)
        near = F.conv1d(x.mT, self.near, groups=x.shape[2]).mT
        return near / EMBEDDING_STD, x[:, -(NEAR - 1) :]

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), self.embedding.weight)

    def forward(self, ids: torch.Tensor, keep_memory: bool = False) -> tuple[torch.Tensor, Memory | None]:
        """[B, T] bytes -> [B, T, 256] logits, and what generation needs to go on after them."""
        x, recent = self._embed(ids, None)
        states = []
        for block in self.blocks:
            x, state = block(x, keep_memory)
            states.append(state)
        return self._logits(x), Memory(recent, states) if keep_memory else None

    def step(self, ids: torch.Tensor, memory: Memory) -> torch.Tensor:
        """One byte a sequence, [B] -> [B, 256] logits; the memory changes in place."""
        x, recent = self._embed(ids.unsqueeze(1), memory.recent)
        memory.recent.copy_(recent)
        x = x.squeeze(1)
        for block, state in zip(self.blocks, memory.states, strict=True):
            x = block.step(x, state)
        return self._logits(x)


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


def sample_batch(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """BATCH random windows, and the same one byte later."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(LENGTH + 1)].long()
    return windows[:, :-1], windows[:, 1:]


# ---- training


def loss_of(model: ByteLM, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids)[0].flatten(0, 1), targets.flatten())


def train(model: ByteLM, text: torch.Tensor, steps: float, seconds: float) -> list[float]:
    """Until the steps or the seconds are used up, either of them may be inf. Returns the loss of each step in bits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    start = time.monotonic()
    with progress_bar() as bar:
        while (done := max(len(losses) / steps, (time.monotonic() - start) / seconds)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1, done / WARMUP + 0.01) * (1 - done)
            loss = loss_of(model, sample_batch(text, generator))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item() * BITS)
            bar.set_description_str(f"step {len(losses)}, {losses[-1]:.2f} bits per byte", refresh=False)
            bar.update(min(done, 1) - bar.n)
        bar.update(1 - bar.n)
    return losses


def progress_bar() -> Any:
    """The fraction done and the loss, on stderr; without a terminal one line now and then."""
    from tqdm import tqdm

    interval = 0.3 if sys.stderr.isatty() else 15.0
    layout = "training {percentage:3.0f}%|{bar:30}| {elapsed} {desc}"
    return tqdm(total=1.0, file=sys.stderr, mininterval=interval, bar_format=layout)


def faster_thread_count(model: ByteLM, text: torch.Tensor) -> int:
    """One or all: on a machine that is busy with something else, threads that wait for each other lose time."""

    def best_of_three(threads: int) -> float:
        torch.set_num_threads(threads)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            loss_of(model, sample_batch(text, torch.Generator())).backward()
            times.append(time.perf_counter() - start)
        return min(times)

    found = min({1, torch.get_num_threads()}, key=best_of_three)
    model.zero_grad()
    return found


@torch.no_grad()
def bits_per_byte(model: ByteLM, text: torch.Tensor) -> float:
    generator = torch.Generator().manual_seed(1)
    return statistics.mean(loss_of(model, sample_batch(text, generator)).item() for _ in range(VALID_BATCHES)) * BITS


# ---- generation


class Generated(NamedTuple):
    text: torch.Tensor  # [T], prompt and what was generated
    logits: torch.Tensor  # [generated, 256], from which each byte was picked
    step_s: list[float]  # time of each step
    memory: Memory


@torch.no_grad()
def generate(model: ByteLM, prompt: torch.Tensor, count: int, temperature: float = 0.0) -> Generated:
    """Reads the prompt at once, then makes one byte a step. temperature 0 takes the likeliest byte."""
    generator = torch.Generator().manual_seed(2)
    logits, memory = model(prompt.long().unsqueeze(0), keep_memory=True)
    row, rows, picked, step_s = logits[:, -1], [], [], []
    for _ in range(count):
        rows.append(row)
        start = time.perf_counter()
        if temperature:
            byte = torch.multinomial((row / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            byte = row.argmax(-1)
        picked.append(byte)
        row = model.step(byte, memory)
        step_s.append(time.perf_counter() - start)
    text = torch.cat([prompt, *picked]).to(torch.uint8)
    return Generated(text, torch.cat(rows), step_s, memory)


@torch.no_grad()
def compare_with_rerun(model: ByteLM, made: Generated) -> tuple[float, bool]:
    """Reads the whole text again, state and all forgotten: largest difference of logits, and whether bytes agree."""
    count = len(made.logits)
    again = model(made.text[:-1].long().unsqueeze(0))[0][0, -count:]
    same = torch.equal(again.argmax(-1), made.text[-count:].long())
    return (again - made.logits).abs().max().item(), same


def memory_bytes(memory: Memory) -> int:
    tensors = [memory.recent, *(x for state in memory.states for x in state)]
    return sum(x.numel() * x.element_size() for x in tensors)


# ---- the report


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ByteLM()
    backends = linattn_tl.preload(
        "linear_attention", K=WIDTH // HEADS, V=WIDTH // HEADS
    )  # builds before the clock runs
    train_text, valid_text = read_text()
    threads = args.threads or faster_thread_count(model, train_text)
    torch.set_num_threads(threads)
    start = time.monotonic()
    losses = train(model, train_text, args.steps, args.seconds)
    seconds = time.monotonic() - start
    bits = bits_per_byte(model, valid_text)
    torch.set_num_threads(1)  # one byte a step is too little work to share
    prompt = as_tensor(PROMPT)
    made = generate(model, prompt, GENERATE)
    difference, same = compare_with_rerun(model, made)
    sample = generate(model, prompt, GENERATE, temperature=0.7)
    quarter = len(made.step_s) // 4
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "backends": backends,
        "train_bytes": len(train_text),
        "valid_bytes": len(valid_text),
        "threads": threads,
        "seconds": round(seconds, 1),
        "losses": losses,
        "valid_bits_per_byte": bits,
        "bytes_per_second": len(made.step_s) / sum(made.step_s),
        "first_step_us": statistics.median(made.step_s[:quarter]) * 1e6,
        "last_step_us": statistics.median(made.step_s[-quarter:]) * 1e6,
        "memory_bytes": memory_bytes(made.memory),
        **cache_sizes(),
        "max_difference": difference,
        "same_bytes": same,
        "sample": bytes(sample.text.tolist()).decode(errors="replace"),
    }


def cache_sizes() -> dict[str, Any]:
    """Bytes of the fp32 KV cache that softmax attention with the same heads would need, at several lengths."""
    D = WIDTH // HEADS
    sizes = {T: linattn_tl.cache_elements(H=HEADS, K=D, V=D, T=T) for T in (256, 1024, 4096, 16384, 65536)}
    return {
        "kv_cache_bytes": {T: 4 * LAYERS * size.kv_cache for T, size in sizes.items()},
        "state_bytes": 4 * LAYERS * sizes[256].state,
        "crossover_length": sizes[256].crossover,
    }


def show(found: dict[str, Any]) -> None:
    losses = found["losses"]
    tail = statistics.mean(losses[-20:])
    served = ", ".join(f"{call} by {backend}" for call, backend in found["backends"].items())
    print(f"model: {found['parameters']:,} parameters, {LAYERS} blocks, {HEADS} heads of {WIDTH // HEADS}")
    print(f"text: {found['train_bytes']:,} bytes to train on, {found['valid_bytes']:,} bytes to validate on")
    print(f"served: {served}")
    print(
        f"trained: {len(losses)} steps in {found['seconds']:.0f} s with threads={found['threads']}, "
        f"bits per byte {losses[0]:.2f} -> {tail:.2f}"
    )
    print(f"validation: {found['valid_bits_per_byte']:.3f} bits per byte on files it has not seen")
    print("\n--- written by the model after the first line, at temperature 0.7")
    print(found["sample"])
    print("---\n")
    print(f"generation: {found['bytes_per_second']:,.0f} bytes/s, one at a time")
    print(f"a step: {found['first_step_us']:.0f} us at the start, {found['last_step_us']:.0f} us at the end")
    print(f"state: {found['state_bytes']:,} bytes at every length. A KV cache of the same heads would take")
    for T, size in found["kv_cache_bytes"].items():
        print(f"  {size:>13,} bytes at {T:>6,} tokens, {size / found['state_bytes']:.1f} times the state")
    print(f"  and is the larger one from {found['crossover_length']} tokens on")
    print("generating from the state against reading the whole text again:")
    same = "the same bytes" if found["same_bytes"] else "OTHER BYTES"
    print(f"  largest difference of logits {found['max_difference']:.1e}, {same}")


def plot_losses(losses: Sequence[float], valid: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(losses, linewidth=0.8, label="training")
    axes.axhline(valid, color="tab:red", linestyle="--", label=f"validation, at the end: {valid:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_title("Byte model with linear attention", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte model with linear attention and generate with it.")
    parser.add_argument("--steps", type=int, help="train so many steps, whatever the time")
    parser.add_argument("--seconds", type=float, help="train so long (default 75, or no limit with --steps)")
    parser.add_argument("--threads", type=int, default=0, help="of training (default: the faster of one and all)")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="where loss.png goes")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead of text")
    args = parser.parse_args(argv)
    if args.seconds is None:
        args.seconds = math.inf if args.steps is not None else 75.0
    if args.steps is None:
        args.steps = math.inf
    if args.steps < 1 or args.seconds <= 0 or args.threads < 0:
        parser.error("--steps, --seconds and --threads must be positive")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    found = measure_all(args)
    path = args.out / "loss.png"
    plot_losses(found["losses"], found["valid_bits_per_byte"], path)
    if args.json:
        print(json.dumps({**found, "plot": str(path)}, indent=1))
    else:
        show(found)
        print(f"wrote {path}")
    return 0 if found["same_bytes"] and found["max_difference"] <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
