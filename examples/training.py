"""What the examples share: a training loop with a progress bar, the choice of threads, results on disk."""

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from linattn_tl.modules import CausalLM

Batch = tuple[torch.Tensor, torch.Tensor]  # ids [B, T], and the targets: the token after each, or -100
Sampler = Callable[[torch.Generator], Batch]
BITS = 1 / math.log(2)  # of a nat


@dataclass(frozen=True)
class Run:
    """How long to train, by steps or by the clock, whichever ends first, and how fast to learn."""

    steps: float = math.inf
    seconds: float = math.inf
    learning_rate: float = 3e-3
    warmup: float = 0.05  # a fraction of the run
    weight_decay: float = 0.1
    seed: int = 0
    dtype: str = "float32"  # of products; anything else by way of autocast

    def __post_init__(self) -> None:
        if min(self.steps, self.seconds) == math.inf:
            raise ValueError("Run: steps and seconds are infinite; expected one that ends the training")


def train(model: CausalLM, sample: Sampler, run: Run, name: str = "training") -> list[float]:
    """Until the steps or the seconds are used up. Returns the loss of each step in bits."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=run.weight_decay, fused=True
    )
    generator = torch.Generator().manual_seed(run.seed)
    losses: list[float] = []
    start = time.monotonic()
    with progress_bar(name) as bar:
        while (done := max(len(losses) / run.steps, (time.monotonic() - start) / run.seconds)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = run.learning_rate * (min(1, done / run.warmup + 0.01) if run.warmup else 1) * (1 - done)
            losses.append(_step(model, sample(generator), optimizer, run.dtype))
            bar.set_description_str(f"step {len(losses)}, {losses[-1]:.2f} bits", refresh=False)
            bar.update(min(done, 1) - bar.n)
        bar.update(1 - bar.n)
    return losses


def _step(model: CausalLM, batch: Batch, optimizer: torch.optim.Optimizer, dtype: str) -> float:
    loss = loss_of(model, batch, dtype)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item() * BITS


def loss_of(model: CausalLM, batch: Batch, dtype: str = "float32") -> torch.Tensor:
    """In nats."""
    ids, targets = batch
    with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
        return model(ids, targets=targets).loss


def progress_bar(name: str) -> Any:
    """The fraction done and the loss, on stderr; without a terminal one line now and then."""
    from tqdm import tqdm

    interval = 0.3 if sys.stderr.isatty() else 15.0
    layout = f"{name} {{percentage:3.0f}}%|{{bar:30}}| {{elapsed}} {{desc}}"
    return tqdm(total=1.0, file=sys.stderr, mininterval=interval, bar_format=layout)


class Setting(NamedTuple):
    threads: int
    dtype: str


def fastest_setting(model: CausalLM, sample: Sampler, threads: int = 0, dtype: str = "") -> Setting:
    """Threads (one or all) and dtype in which this machine trains fastest; what is given is not tried.

    On a machine that is busy with something else, threads that wait for each other lose time; and bfloat16 is the
    faster one only where the processor multiplies it.
    """
    counts = {threads} if threads else {1, torch.get_num_threads()}
    settings = list(starmap(Setting, product(counts, [dtype] if dtype else ["float32", "bfloat16"])))

    def best_of_three(setting: Setting) -> float:
        torch.set_num_threads(setting.threads)
        times = []
        for _ in range(4):
            batch = sample(torch.Generator())
            start = time.perf_counter()
            loss_of(model, batch, setting.dtype).backward()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    found = settings[0] if len(settings) == 1 else min(settings, key=best_of_three)
    torch.set_num_threads(found.threads)
    model.zero_grad()
    return found


def machine() -> dict[str, Any]:
    """What numbers were measured on."""
    names = [line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def save_results(found: dict[str, Any], path: Path) -> None:
    """Numbers as JSON, with the command that made them and the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    script = Path(sys.argv[0])
    command = shlex.join(["python", "-m", f"{script.parent.name}.{script.stem}", *sys.argv[1:]])
    path.write_text(json.dumps({"command": command, "machine": machine(), **found}, indent=1) + "\n")


def figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """A figure and its axes, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained")


def save_figure(drawn: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=120)
    pyplot.close(drawn)
