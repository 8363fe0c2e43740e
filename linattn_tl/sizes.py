"""How large a linear-attention state is, against the softmax caches that it replaces: of a layer, and of a model.

H heads of q and k, HV of v, head dims K and V, elements a layer and sequence:

    state    HV K V  (+ H K with the normaliser z)  (+ (conv_size - 1) (2 H K + HV V) with a short convolution)
    mha      T (H K + HV V)         the same heads
    gqa      T kv_heads (K + V)     arXiv 2305.13245
    mqa      T (K + V)              arXiv 1911.02150
    mla      T (latent + rope)      arXiv 2405.04434 sec. 2.1: one latent and one rotated key, shared by all heads
"""

import operator
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

SOFTMAX = ("mha", "gqa", "mqa", "mla")


class SizeError(ValueError):
    """An argument of which no size can be made: its name, what came, what was expected."""

    def __init__(self, name: str, came: object, expected: str) -> None:
        super().__init__(name, came, expected)
        self.name, self.came, self.expected = name, came, expected

    def __str__(self) -> str:
        return f"{self.name} is {self.came!r}; expected {self.expected}"

    def renamed(self, name: str) -> "SizeError":
        """The same, for a caller who knows the argument by another name."""
        return SizeError(name, self.came, self.expected)


class Growth(NamedTuple):
    """What is kept of T tokens, fixed + per_token T: elements, or bytes."""

    fixed: int
    per_token: int

    def at(self, T: int) -> int:
        """The size at T tokens. SizeError unless T is an integer of at least 0."""
        _check_least("T", T, 0)
        return self.fixed + self.per_token * T

    def crossover(self, other: "Growth") -> int | None:
        """The smallest T at which this is at least as large as the other; None if there is none."""
        behind, gain = other.fixed - self.fixed, self.per_token - other.per_token
        if behind <= 0:
            return 0
        return -(-behind // gain) if gain > 0 else None


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Heads and head dims of a layer, as linear attention and as each kind of softmax attention.

    H, K, V       heads and head dim of q and k, head dim of v
    HV            heads of v, a multiple of H (default H)
    normalizer    whether the state has z
    conv_size     taps of the short convolution over q, k and v; 1 is none
    kv_heads      heads of a GQA cache, a divisor of HV (default HV / 4 where that is whole, as in Llama 3 8B, else 1)
    latent, rope  of an MLA cache (default 4 K and K // 2, DeepSeek-V2's)

    SizeError, a ValueError, names an argument that is no integer, too small, or does not divide.
    """

    H: int
    K: int
    V: int
    HV: int | None = None
    normalizer: bool = True
    conv_size: int = 1
    kv_heads: int | None = None
    latent: int | None = None
    rope: int | None = None

    def __post_init__(self) -> None:
        for name in ("H", "K", "V", "HV", "conv_size", "kv_heads", "latent", "rope"):
            size = getattr(self, name)
            if size is not None:
                _check_least(name, size, 0 if name == "rope" else 1)
        if self.value_heads % self.H:
            raise SizeError("HV", self.HV, f"a multiple of H = {self.H}")
        if self.value_heads % self.groups:
            raise SizeError("kv_heads", self.kv_heads, f"a divisor of HV = {self.value_heads}")

    @property
    def value_heads(self) -> int:
        return self.H if self.HV is None else self.HV

    @property
    def groups(self) -> int:
        """Heads of the GQA cache."""
        if self.kv_heads is not None:
            return self.kv_heads
        return 1 if self.value_heads % 4 else self.value_heads // 4

    @property
    def latents(self) -> tuple[int, int]:
        """latent and rope of the MLA cache."""
        latent = 4 * self.K if self.latent is None else self.latent
        return latent, self.K // 2 if self.rope is None else self.rope

    @property
    def state(self) -> int:
        """Elements of the linear state, whatever T."""
        keys, values = self.H * self.K, self.value_heads * self.V
        z = keys if self.normalizer else 0
        return values * self.K + z + (self.conv_size - 1) * (2 * keys + values)

    @property
    def per_token(self) -> dict[str, int]:
        """Elements that a token adds to each kind of softmax cache."""
        head = self.K + self.V
        same_heads = self.H * self.K + self.value_heads * self.V
        return dict(zip(SOFTMAX, (same_heads, self.groups * head, head, sum(self.latents)), strict=True))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Layers of one shape, in a pattern that is repeated and cut after the last layer.

    pattern  a capital letter a layer: S is softmax attention, any other a linear state. "LLLS" is every fourth softmax
    softmax  the kind of cache in layers S: mha, gqa, mqa or mla
    state_bytes, kv_bytes  bytes of an element. 1 and 1 count elements; states are fp32, 4, and caches mostly 2

    SizeError, a ValueError, names an argument that is none of that.
    """

    layer: LayerShape
    layers: int
    pattern: str = "L"
    softmax: str = "mha"
    state_bytes: int = 1
    kv_bytes: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "state_bytes", "kv_bytes"):
            _check_least(name, getattr(self, name), 1)
        if not re.fullmatch("[A-Z]+", str(self.pattern)):
            raise SizeError("pattern", self.pattern, "capital letters, S for softmax and others for linear, as in LLLS")
        if self.softmax not in SOFTMAX:
            raise SizeError("softmax", self.softmax, f"one of {', '.join(SOFTMAX)}")

    def growth(self) -> Growth:
        """Elements, or bytes, of one sequence over T: `.at(T)`."""
        rounds, rest = divmod(self.layers, len(self.pattern))
        softmax = rounds * self.pattern.count("S") + self.pattern[:rest].count("S")
        return Growth(
            fixed=(self.layers - softmax) * self.layer.state * self.state_bytes,
            per_token=softmax * self.layer.per_token[self.softmax] * self.kv_bytes,
        )


class CacheSize(NamedTuple):
    """Elements of one kind of cache at T, and the smallest T at which it is at least as large as the state."""

    elements: int
    crossover: int


class CacheElements(NamedTuple):
    """Elements per layer and sequence. kv_cache and crossover are those of the same heads, caches["mha"]."""

    state: int
    kv_cache: int
    crossover: int
    caches: dict[str, CacheSize]  # of mha, gqa, mqa and mla


def cache_elements(
    *,
    H: int,
    K: int,
    V: int,
    T: int,
    HV: int | None = None,
    normalizer: bool = True,
    conv_size: int = 1,
    kv_heads: int | None = None,
    latent: int | None = None,
    rope: int | None = None,
) -> CacheElements:
    """Elements per layer and sequence of a linear-attention state, and of the softmax caches of T tokens.

        state    = HV K V (+ H K with the normaliser) (+ (conv_size - 1) (2 H K + HV V) with a short convolution)
        KV cache = T (H K + HV V)

    `caches` has elements and crossover of each kind: mha (the KV cache above), gqa T kv_heads (K + V), mqa T (K + V),
    mla T (latent + rope). Defaults are LayerShape's; whole models are ModelShape's.

    crossover is the smallest T at which the cache is at least as large, counted in elements: for K = V = D and HV = H,
    (D + 1) / 2 with the normaliser and D / 2 without, rounded up. In bytes it doubles for an fp32 state and a
    16-bit cache. ValueError names an argument that is too small, or does not divide.
    """
    try:
        layer = LayerShape(
            H=H,
            K=K,
            V=V,
            HV=HV,
            normalizer=normalizer,
            conv_size=conv_size,
            kv_heads=kv_heads,
            latent=latent,
            rope=rope,
        )
        _check_least("T", T, 0)
    except SizeError as error:
        raise error.renamed(f"cache_elements: {error.name}") from None
    state = layer.state
    caches = {kind: CacheSize(T * each, -(-state // each)) for kind, each in layer.per_token.items()}
    return CacheElements(state, *caches["mha"], caches)


def _check_least(name: str, size: Any, least: int) -> None:
    try:
        operator.index(size)
    except TypeError:
        raise SizeError(name, size, f"an integer of at least {least}") from None
    if size < least:
        raise SizeError(name, size, f"at least {least}")
