"""Generation: a prompt is read in pieces, then every token costs one step from a state; nothing is computed twice."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import index
from typing import Any

import torch

from linattn_tl.modules.language_model import CausalLM
from linattn_tl.modules.states import Cache

RESERVED = 1024  # tokens for which softmax layers get room at once; many sequences end early
Prompt = torch.Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """How a token is picked from logits.

    Args:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_k: only the likeliest k; 0 for all.
        top_p: only the likeliest whose probabilities sum to p, the one that passes it included; 1 for all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"generate: temperature is {self.temperature}; expected 0 or more")
        if self.top_k < 0:
            raise ValueError(f"generate: top_k is {self.top_k}; expected 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p is {self.top_p}; expected more than 0, and at most 1")

    def pick(self, logits: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """[B, vocabulary] -> [B]"""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float()
        logits = logits - logits.amax(-1, keepdim=True)  # so that no temperature makes them infinite
        weights = self.kept(logits / self.temperature).softmax(-1)
        return torch.multinomial(weights, 1, generator=generator).squeeze(1)

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """-inf in place of what top_k and top_p leave out. Source of top_p: Holtzman et al. 2019, arXiv 1904.09751."""
        if 0 < self.top_k < logits.shape[-1]:
            likeliest = logits.topk(self.top_k).indices
            left = torch.ones_like(logits, dtype=torch.bool).scatter(-1, likeliest, False)
            logits = logits.masked_fill(left, float("-inf"))
        if self.top_p < 1:
            ordered, index = logits.sort(descending=True, dim=-1)
            weights = ordered.softmax(-1)
            before = weights.cumsum(-1) - weights
            left = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= self.top_p)
            logits = logits.masked_fill(left, float("-inf"))
        return logits


def generate(
    model: CausalLM,
    prompt: Prompt,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: int | Iterable[int] | None = None,
    stream: bool = False,
    generator: torch.Generator | None = None,
    prefill_chunk: int = 2048,
    progress: bool | None = None,
) -> Any:
    """Continue one prompt, or several of unequal length.

    The prompts are read in pieces of prefill_chunk tokens, packed, so that memory does not grow with their length; then
    each token is one step. A sequence that has met a stop token leaves the batch.

    Args:
        model: a CausalLM.
        prompt: [T] tokens as a tensor or a list; or several: a list of them, or a tensor [B, T].
        max_new_tokens: for each sequence.
        temperature, top_k, top_p: see Sampling; the default takes the likeliest token.
        stop: tokens after which a sequence ends; they are part of the result.
        stream: return an iterator that yields each step's tokens at once, a list with one entry a prompt, None for one
            that has ended; one prompt yields numbers.
        generator: of random numbers, on the model's device.
        prefill_chunk: tokens of each sequence that are read at once.
        progress: a bar on stderr; None for one where stderr is a terminal and there is no stream.

    Returns:
        The new tokens, int64: a tensor for one prompt, a list of tensors for several. With stream, an iterator.

    Raises:
        ValueError, TypeError: an argument has a wrong value; a prompt is empty or has unknown tokens.
    """
    sampling = Sampling(temperature, top_k, top_p)
    rows, single = _prompts(model, prompt)
    ends = _stops(model, stop)
    if max_new_tokens < 0:
        raise ValueError(f"generate: max_new_tokens is {max_new_tokens}; expected 0 or more")
    _check_chunk(prefill_chunk)
    longest = max(map(len, rows)) + max_new_tokens - 1  # the last token is not read
    if model.positions is not None and longest > model.positions.num_embeddings:
        raise ValueError(
            f"generate: max_new_tokens is {max_new_tokens}, which makes {longest} positions with the longest prompt;"
            f" expected at most {model.positions.num_embeddings}"
        )
    steps = _steps(model, rows, max_new_tokens, sampling, ends, generator, prefill_chunk)
    if stream:
        return (row[0] for row in steps) if single else steps
    shown = sys.stderr.isatty() if progress is None else progress
    made = _collected(_with_bar(steps, max_new_tokens) if shown else steps, len(rows))
    made = [torch.tensor(tokens, dtype=torch.int64, device=_device(model)) for tokens in made]
    return made[0] if single else made


def prefill(model: CausalLM, prompt: Prompt, chunk: int = 2048) -> tuple[torch.Tensor, Cache]:
    """Read prompts in pieces of `chunk` tokens, as generate does.

    Returns:
        (the logits after the last token of each, [N, vocabulary], the cache)

    Raises:
        ValueError, TypeError: as generate.
    """
    rows, _ = _prompts(model, prompt)
    _check_chunk(chunk)
    return _read(model, rows, chunk)


@torch.no_grad()
def _read(model: CausalLM, rows: list[torch.Tensor], chunk: int) -> tuple[torch.Tensor, Cache]:
    """Prompts that end leave the batch, and all are put together at the end: nothing is copied but then."""
    cache, live = model.init_state(len(rows)), list(range(len(rows)))
    order: list[int] = []
    logits, caches = [], []
    for start in range(0, max(map(len, rows)), chunk):
        pieces = [rows[i][start : start + chunk] for i in live]
        sizes = torch.tensor([0, *map(len, pieces)], device=_device(model))
        packed = torch.cat(pieces).unsqueeze(0)
        found = model(packed, cache, keep_state=True, last_only=True, cu_seqlens=sizes.cumsum(0))
        ended = [j for j, i in enumerate(live) if len(rows[i]) <= start + chunk]
        going = [j for j, i in enumerate(live) if len(rows[i]) > start + chunk]
        if ended:
            logits.append(found.logits[ended])
            caches.append(found.cache.select(ended) if going else found.cache)
            order += [live[j] for j in ended]
        cache = found.cache.select(going) if ended and going else found.cache
        live = [live[j] for j in going]
    cache = reduce(Cache.joined, caches)
    if len(caches) == 1:
        return logits[0], cache
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(logits)[back], cache.select(back)


@torch.no_grad()
def _steps(
    model: CausalLM,
    rows: list[torch.Tensor],
    count: int,
    sampling: Sampling,
    stop: frozenset[int],
    generator: torch.Generator | None,
    chunk: int,
) -> Iterator[list[int | None]]:
    if count == 0:
        return
    logits, cache = _read(model, rows, chunk)
    cache.reserve(min(count, RESERVED))
    live = list(range(len(rows)))
    for i in range(count):
        tokens = sampling.pick(logits, generator)
        numbers = tokens.tolist()
        made: list[int | None] = [None] * len(rows)
        for row, number in zip(live, numbers, strict=True):
            made[row] = number
        yield made
        going = [j for j, number in enumerate(numbers) if number not in stop]
        if not going or i == count - 1:
            return
        if len(going) < len(live):
            cache, tokens, live = cache.select(going), tokens[going], [live[j] for j in going]
        logits = model.step(tokens, cache)


def _collected(steps: Iterable[list[int | None]], count: int) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in range(count)]
    for tokens in steps:
        for row, token in zip(made, tokens, strict=True):
            if token is not None:
                row.append(token)
    return made


def _with_bar(steps: Iterable[list[int | None]], count: int) -> Iterable[list[int | None]]:
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, total=count, desc="generating", unit="token", file=sys.stderr, leave=False)


def _device(model: CausalLM) -> torch.device:
    return model.embedding.weight.device


def _prompts(model: CausalLM, prompt: Any) -> tuple[list[torch.Tensor], bool]:
    """The prompts as tensors, and whether there is but one that is no list."""
    if isinstance(prompt, (str, bytes)):
        raise TypeError(f"generate: prompt is {type(prompt).__name__}; expected tokens, as numbers")
    if isinstance(prompt, torch.Tensor) and prompt.ndim not in (1, 2):
        raise ValueError(f"generate: prompt has shape {tuple(prompt.shape)}; expected [T] or [B, T]")
    if len(prompt) == 0:
        raise ValueError("generate: prompt is empty; expected at least one token")
    first = prompt[0]
    single = not isinstance(first, Sequence) and (not isinstance(first, torch.Tensor) or first.ndim == 0)
    rows = [torch.as_tensor(row, device=_device(model)) for row in ([prompt] if single else prompt)]
    for i, row in enumerate(rows):
        name = "prompt" if single else f"prompt[{i}]"
        if row.ndim != 1 or len(row) == 0:
            raise ValueError(f"generate: {name} has shape {tuple(row.shape)}; expected [T], at least one token")
        if row.is_floating_point() or row.dtype == torch.bool:
            raise TypeError(f"generate: {name} has dtype {row.dtype}; expected integers")
        rows[i] = row.long()
        _check_tokens(model, name, rows[i])
    return rows, single


def _stops(model: CausalLM, stop: Any) -> frozenset[int]:
    if stop is None:
        return frozenset()
    if isinstance(stop, torch.Tensor):
        stop = stop.reshape(-1).tolist()
    try:
        tokens = [index(token) for token in (stop if isinstance(stop, Iterable) else [stop])]
    except TypeError as wrong:
        raise TypeError(f"generate: stop is {stop!r}; expected a token, or several, as integers") from wrong
    _check_tokens(model, "stop", torch.tensor(tokens, dtype=torch.int64))
    return frozenset(tokens)


def _check_tokens(model: CausalLM, name: str, tokens: torch.Tensor) -> None:
    wrong = (tokens < 0) | (tokens >= model.vocabulary)
    if bool(wrong.any()):
        raise ValueError(
            f"generate: {name} has token {int(tokens[wrong][0])}; expected 0 to {model.vocabulary - 1} (vocabulary)"
        )


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"generate: prefill_chunk is {chunk}; expected at least 1")
