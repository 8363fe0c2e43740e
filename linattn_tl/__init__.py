"""Linear-attention kernels: forward, backward and decode, compiled ahead of time and called from PyTorch."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "explain": "linattn_tl.registry",
    "last_backend": "linattn_tl.registry",
    "preload": "linattn_tl.preloading",
    "cache_elements": "linattn_tl.sizes",
    "stats": "linattn_tl.registry",
    "UnsupportedError": "linattn_tl.registry",
}

if TYPE_CHECKING:  # for editors; at run time the names of a family are found in its module's __all__
    from linattn_tl.ops.delta_rule import delta_rule, delta_rule_decode, gated_delta_rule, gated_delta_rule_decode
    from linattn_tl.ops.linear_attention import LinearState, linear_attention, linear_attention_decode
    from linattn_tl.ops.simple_gla import (
        lightning_attention,
        lightning_attention_decode,
        retention,
        retention_decode,
        simple_gla,
        simple_gla_decode,
        ssd,
        ssd_decode,
    )
    from linattn_tl.preloading import preload
    from linattn_tl.registry import UnsupportedError, explain, last_backend, stats
    from linattn_tl.sizes import cache_elements


def _families() -> Iterator[Any]:
    """The modules of linattn_tl.ops, each of which says in __all__ what it offers."""
    for found in pkgutil.iter_modules([str(Path(__file__).parent / "ops")]):
        yield importlib.import_module(f"linattn_tl.ops.{found.name}")


def __getattr__(name: str) -> Any:
    """Import on first use: importing the package costs nothing and needs nothing."""
    if name == "__all__":
        return __dir__()
    module = importlib.import_module(_WHERE[name]) if name in _WHERE else _family_of(name)
    if module is None:
        raise AttributeError(f"module 'linattn_tl' has no attribute {name!r}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def _family_of(name: str) -> Any:
    """The module of linattn_tl.ops that offers a name, or None. Not asked for what may be a module of the package:
    `from linattn_tl import registry` looks for an attribute first, and families import those modules."""
    here = Path(__file__).parent
    if name.startswith("_") or (here / name).exists() or (here / f"{name}.py").exists():
        return None
    return next((family for family in _families() if name in family.__all__), None)


def __dir__() -> list[str]:
    return sorted(["__version__", *_WHERE, *(name for family in _families() for name in family.__all__)])
