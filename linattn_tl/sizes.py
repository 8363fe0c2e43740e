"""How large a state is, against the KV cache that it replaces."""

from typing import NamedTuple


class CacheElements(NamedTuple):
    """Elements per layer and sequence, and the length from which the state is the smaller of the two."""

    state: int
    kv_cache: int
    crossover: int


def cache_elements(*, H: int, K: int, V: int, T: int, HV: int | None = None, normalizer: bool = True) -> CacheElements:
    """Elements of a linear-attention state, and of a softmax KV cache of T tokens with the same heads.

        state    = HV K V (+ H K with the normaliser)
        KV cache = T (H K + HV V)

    crossover is the smallest T at which the cache is at least as large: for K = V = D and HV = H, (D + 1) / 2.
    """
    HV = H if HV is None else HV
    for name, size, least in (("H", H, 1), ("HV", HV, 1), ("K", K, 1), ("V", V, 1), ("T", T, 0)):
        if size < least:
            raise ValueError(f"cache_elements: {name} is {size}; expected at least {least}")
    if HV % H:
        raise ValueError(f"cache_elements: HV is {HV}; expected a multiple of H = {H}")
    state = HV * K * V + (H * K if normalizer else 0)
    per_token = H * K + HV * V
    return CacheElements(state, T * per_token, -(-state // per_token))
