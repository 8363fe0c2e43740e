"""The nouns every room shares: target, problem, kernel. Standard library only."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

DTYPES = ("float32", "bfloat16", "float16")  # what q, k, v and o may be in a compiled kernel
MAX_HEAD_DIM = 256
ELU1, RELU, IDENTITY = range(3)  # feature maps, as kernels know them


@dataclass(frozen=True)
class Target:
    """A device as the compiler and the tuner see it."""

    arch: str  # "cpu-v3", "cpu-v4", "sm_90a"
    name: str = ""  # the model name the device reports
    cores: int = 0  # cores or multiprocessors
    smem_bytes: int = 0  # GPU: largest dynamic shared memory one block may opt in to

    @property
    def device(self) -> str:
        """The torch device type: "cpu" or "cuda"."""
        return "cpu" if self.arch.startswith("cpu") else "cuda"

    @property
    def lanes(self) -> int:
        """fp32 lanes of one CPU vector register."""
        return 16 if self.arch == "cpu-v4" else 8


class Problem(NamedTuple):
    """What may change a kernel or its schedule: one call without its tensors and its lengths.

    A tuple, because every call makes one and looks it up.
    """

    op: str
    dtype: str
    K: int
    V: int
    device: str = "cpu"  # the torch device type
    index: int = 0  # of the device among those of its type: two GPUs of a machine may differ


def check_dtype_name(dtype: str, *more: str) -> None:
    """ValueError for a dtype that no compiled kernel (and none of `more`) knows."""
    known = (*DTYPES, *more)
    if dtype not in known:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(known)}")


class Config(Protocol):
    """A schedule: a frozen dataclass of ints, one point of a kernel's search space."""

    __dataclass_fields__: dict[str, Any]


@dataclass(frozen=True)
class Arg:
    """One tensor of a CPU kernel, as the launcher walks it.

    role "token":  rows along T; the launcher hands the kernel the first row of the chunk.
    role "state":  [K, V] of each value head, read from an initial and left in a final buffer;
                   the kernel works on a padded copy in panels: [columns / block, rows, block].
    role "vector": [K] of each q/k head, handled as a state.
    role "chunk":  [K, V] of each value head at every `every` tokens, both sizes rounded up to 16, in the caller's
                   memory: what one kernel leaves for another. `keeps` tells the kernel whether its chunk begins at one.
    role "pool":   [K, V] or [K] in the caller's own memory, picked by slot and updated in place.
    heads "H" or "HV" says whose head stride counts.
    transposed: the working copy of a state is [V, K].
    """

    name: str
    role: str
    heads: str = "H"
    dtype: str = "io"  # "io" is the problem's dtype
    transposed: bool = False
    every: int = 0


@dataclass(frozen=True)
class Kernel:
    """A kernel of a family: how to build it and which schedules make sense.

    build(problem, config) returns a TileLang prim_func and imports tilelang itself;
    configs(problem, target) lists what may launch, best guess first, and imports nothing heavy.
    args and scalars name the prim_func's parameters for the CPU launcher.
    expects(problem, target) names instructions that its CUDA binary must have, `A|B` for either: without them it is
    right, but slow.
    whole: a call of an op may be one launch of it, so its binary has what makes such a call again without Python
    (autotune/launcher/repeat.h).
    """

    name: str  # "linear_attention.chunk_fwd"
    build: Callable[[Problem, Any], Any]
    configs: Callable[[Problem, Target], Sequence[Any]]
    args: tuple[Arg, ...] = ()
    scalars: tuple[str, ...] = ()
    reverse: bool = False  # the launcher walks the chunks from the last to the first
    expects: Callable[[Problem, Target], Sequence[str]] = lambda problem, target: ()
    whole: bool = False

    @property
    def op(self) -> str:
        return self.name.split(".")[0]

    def find_config(self, problem: Problem, target: Target, wanted: Any) -> Any:
        """The offered config that equals `wanted`, which is given as plain data; KeyError if none does."""
        return {config_items(c): c for c in self.configs(problem, target)}[config_items(wanted)]


def config_dict(config: Any) -> dict[str, int]:
    """The config as plain data, for keys, tables and manifests."""
    return asdict(config)


def config_items(config: Any) -> tuple[tuple[str, int], ...]:
    """A config, or its plain data in any form, as one sorted value that can be a key."""
    return tuple(sorted(dict(config if isinstance(config, dict | tuple) else config_dict(config)).items()))
