"""How CUDA kernels are sent over sequences, whatever the family: cuts into spans, grids, and packed launches.

The programs of a launch walk spans of tokens, and a span is a whole sequence unless that leaves multiprocessors idle
and sequences are long. linattn_tl/walks.py does the same for CPU kernels, which cut time by threads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from autotune.launcher import keep, remember
from linattn_tl.calls import problem_of
from linattn_tl.launchers import Launcher
from linattn_tl.registry import UnsupportedError
from tl_kernels.cuda_sizes import tile_dtype
from tl_kernels.spec import DTYPES, MAX_HEAD_DIM, Kernel, Problem, Target

MULTIPLE = 16  # of K and V
MAX_GRID_X, MAX_GRID_Y = 2**31 - 1, 65535  # CUDA C++ Programming Guide, "Technical Specifications"
SPAN_MULTIPLE = 64  # tokens; the largest chunk of a kernel, so that none but the last of a sequence is ragged
# A carried span's state is written, scanned and read, which costs as much memory traffic as some 250 of its tokens at
# K = V = 128. Estimates, not measurements: nobody has timed them on a GPU.
CARRIED_TOKENS = 512  # no carried span shorter than this
CARRIED_SPANS = 4  # fewer than this a sequence gain less than three launches and a second look at k and v cost
SPREAD_TOKENS = 256  # no shorter span where each reads the state of its sequence and nothing is carried
WAVES = 2  # programs a multiprocessor that a cut aims at


def refuse_sizes(problem: Problem) -> str | None:
    """Why no CUDA kernel that walks spans serves the problem, or None."""
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype} is not one of {', '.join(DTYPES)}"
    for name, width in (("K", problem.K), ("V", problem.V)):
        if not 0 < width <= MAX_HEAD_DIM or width % MULTIPLE:
            return f"{name}={width}; CUDA kernels take multiples of {MULTIPLE} up to {MAX_HEAD_DIM}"
    return None


# ---- spans


class Walk(NamedTuple):
    """What a CUDA kernel walks: sequences of tokens, cut into spans of `segment` tokens, and heads.

    Not the Walk of linattn_tl.walks, which says how CPU threads share sequences.
    """

    sequences: int
    length: int  # tokens of each sequence, or 0 where cu_seqlens tells
    tokens: int  # of all sequences
    H: int
    HV: int
    K: int
    V: int
    segment: int
    cut: bool = False  # into more than a span a sequence

    @property
    def empty(self) -> bool:
        return self.tokens == 0 or self.HV == 0

    @property
    def whole(self) -> "Walk":
        """The same with a span a sequence: longer than all packed tokens, so that no sequence has a second slot."""
        return self._replace(segment=self.length or self.tokens + 1, cut=False)

    @property
    def spans(self) -> int:
        """Packed sequences may have a few slots more than spans: see find_span in tl_kernels/cuda_macros.py."""
        if self.length:
            return self.sequences * -(-self.length // self.segment)
        return self.tokens // self.segment + self.sequences


def carried_segment(sequences: int, tokens: int, programs: int, multiprocessors: int) -> int:
    """Tokens of a span that has a state of its own, or 0 where each sequence is walked as a whole.

    Args:
        sequences, tokens: how many there are; tokens of all sequences together.
        programs: of each span: value heads times blocks of the state.
        multiprocessors: of the device.
    """
    if sequences == 0 or 2 * sequences * programs > multiprocessors:
        return 0
    segment = max(_even_segment(tokens, programs, multiprocessors), CARRIED_TOKENS)
    return segment if tokens >= sequences * segment * CARRIED_SPANS else 0


def spread_segment(tokens: int, programs: int, multiprocessors: int) -> int:
    """Tokens of a span where nothing is carried, so that a cut costs a read of the state and no more."""
    return max(_even_segment(tokens, programs, multiprocessors), SPREAD_TOKENS)


def _even_segment(tokens: int, programs: int, multiprocessors: int) -> int:
    spans = max(1, WAVES * multiprocessors // max(programs, 1))
    return -(-max(tokens, 1) // (spans * SPAN_MULTIPLE)) * SPAN_MULTIPLE


class Span(NamedTuple):
    """Tokens of one sequence that are walked as one."""

    sequence: int
    slot: int  # where its state lies
    first: int
    last: int  # token + 1


def spans_of(walk: Walk, bounds: Sequence[int]) -> Iterator[Span]:
    """The spans that have tokens, in their order: what find_span of the kernels finds from a slot.

    Args:
        bounds: where sequences begin among all tokens, and the end of the last one.
    """
    for n, (first, last) in enumerate(pairwise(bounds)):
        slot = n * -(-walk.length // walk.segment) if walk.length else first // walk.segment + n
        for i, token in enumerate(range(first, last, walk.segment)):
            yield Span(n, slot + i, token, min(token + walk.segment, last))


# ---- memory that a launch fills


def new_states(count: int, walk: Walk, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(count, walk.HV, walk.K, walk.V, dtype=torch.float32, device=like.device)


def unchanged(start: torch.Tensor | None, walk: Walk, like: torch.Tensor) -> torch.Tensor:
    """What a walk without tokens ends with: the initial state, in memory of its own, or zeros."""
    return new_states(walk.sequences, walk, like).zero_() if start is None else start.clone()


def chunk_states(walk: Walk, C: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """For the state before each chunk of C tokens, in the slots of m.find_chunk (tl_kernels/cuda_macros.py)."""
    chunks = walk._replace(segment=C).spans
    return torch.empty(chunks, walk.HV, walk.K, walk.V, dtype=dtype, device=like.device)


def count(states: torch.Tensor | None) -> int:
    return 0 if states is None else states.shape[0]


# ---- sizes of a launch


def walk_numbers(walk: Walk) -> dict[str, int]:
    """What a kernel is told of its walk, by the names of its arguments and dynamic sizes."""
    return {
        "spans": walk.spans,
        "sequences": walk.sequences,
        "length": walk.length,
        "segment": walk.segment,
        "H": walk.H,
        "HV": walk.HV,
        "M": 0 if walk.length else walk.sequences + 1,
    }


def blocks(config: Any, K: int, V: int) -> int:
    """Programs that share a state, by the sizes of blocks that the config has."""
    if hasattr(config, "block"):
        return K * V // config.block
    return -(-K // getattr(config, "BK", K)) * -(-V // getattr(config, "BV", V))


def check_grid(op: str, name: str, heads: int, programs: int) -> None:
    """UnsupportedError for a grid that no GPU launches: most kernels have one axis for all, some a second for heads.

    Args:
        op, name: whose kernel it is, and its stage.
        heads: value heads.
        programs: of each head.
    """
    if heads > MAX_GRID_Y or programs * heads > MAX_GRID_X:
        raise UnsupportedError(
            f"{op}: {name} would have a grid of {programs} x {heads} (HV); expected at most {MAX_GRID_X} programs, "
            f"and {MAX_GRID_Y} heads"
        )


def serving(kernels: Sequence[Kernel]) -> Callable[[Problem, Target], tuple[Kernel, ...]]:
    """Which kernels of a pass a problem needs on a device: all that have a config.

    Where one for dk and dv fits (backward_kv), those for one of them are not needed.
    """

    def of(problem: Problem, device: Target) -> tuple[Kernel, ...]:
        fits = [k for k in kernels if k.configs(problem, device)]
        stages = {k.name.split(".")[1] for k in fits}
        spared = {"backward_k", "backward_v"} if "backward_kv" in stages else set()
        return tuple(k for k in fits if k.name.split(".")[1] not in spared)

    return of


# ---- the runner

Plan = tuple[Walk, Any]  # of a pass: its walk, and the packed numbers of its last launch


class SpanRunner:
    """What runners of CUDA kernels over spans have in common: binaries by stage, and what is kept of launches.

    A family sets `op` and says in option_numbers what kernels are told of its options.

    Args:
        binaries: launchers by the kernels' names.
        multiprocessors: of the device.
    """

    op: str
    differentiable = False

    def __init__(self, binaries: Mapping[str, Launcher], multiprocessors: int):
        self.binaries: dict[str, Any] = {name.split(".")[1]: binary for name, binary in binaries.items()}
        self.multiprocessors = multiprocessors
        self._walks: dict[Any, Walk] = {}
        self._plans: dict[Any, Plan] = {}  # a family's own, by all that a pass's launch depends on

    def option_numbers(self, opt: Any) -> Mapping[str, float]:
        """Of the op's options, by the names of the kernels' arguments; none where opt is None."""
        raise NotImplementedError

    def _walk(self, name: str, x: torch.Tensor, v: torch.Tensor, cu: Any, carried: bool = True) -> Walk:
        """A kernel's way over the tokens of x [B, T, H, K]."""
        key = (name, carried, x.shape, v.shape, -1 if cu is None else cu.shape[0])
        walk = self._walks.get(key)
        if walk is None:
            walk = self._new_walk(name, x, v, cu, carried)
            remember(self._walks, key, walk)
        return walk

    def _new_walk(self, name: str, x: torch.Tensor, v: torch.Tensor, cu: Any, carried: bool) -> Walk:
        B, T, H, K = x.shape
        HV, V = v.shape[2:]
        N, tokens = (B, B * T) if cu is None else (cu.shape[0] - 1, T)
        programs, length = HV * blocks(self.binaries[name].config, K, V), 0 if cu is not None else T
        if carried:
            segment = carried_segment(N, tokens, programs, self.multiprocessors)
        else:
            segment = spread_segment(tokens, programs, self.multiprocessors)
        walk = Walk(N, length, tokens, H, HV, K, V, segment, cut=True)
        return walk if 0 < segment < (length or tokens) else walk.whole

    def tile(self, q: torch.Tensor, v: torch.Tensor) -> torch.dtype:
        """What kernels compute products in, and leave for one another."""
        return getattr(torch, tile_dtype(problem_of(self.op, q, v)))

    def _launch(self, name: str, walk: Walk, opt: Any, tensors: Sequence[Any], **numbers: int) -> None:
        self.binaries[name].launch(self._packed(name, walk, opt, **numbers), tensors)

    def _packed(self, name: str, walk: Walk, opt: Any, **numbers: int) -> Any:
        """A launch's numbers, as its binary takes them. The same kernel always has the same names in the same order."""
        binary = self.binaries[name]
        key = (walk, opt, *numbers.values())
        packed = binary.kept.get(key)
        if packed is None:
            programs = max(walk.spans, walk.sequences) * blocks(binary.config, walk.K, walk.V)
            check_grid(self.op, name, walk.HV, programs)
            packed = binary.pack({**walk_numbers(walk), **self.option_numbers(opt), **numbers})
            keep(binary, key, packed)
        return packed
