"""Linear-attention kernels: forward, backward and decode, compiled ahead of time and called from PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "linear_attention": "linattn_tl.ops.linear_attention",
    "linear_attention_decode": "linattn_tl.ops.linear_attention",
    "LinearState": "linattn_tl.ops.linear_attention",
    "explain": "linattn_tl.registry",
    "last_backend": "linattn_tl.registry",
    "preload": "linattn_tl.preloading",
    "cache_elements": "linattn_tl.sizes",
    "stats": "linattn_tl.registry",
    "UnsupportedError": "linattn_tl.registry",
}
__all__ = [
    "LinearState",
    "UnsupportedError",
    "__version__",
    "cache_elements",
    "explain",
    "last_backend",
    "linear_attention",
    "linear_attention_decode",
    "preload",
    "stats",
]

if TYPE_CHECKING:
    from linattn_tl.ops.linear_attention import LinearState, linear_attention, linear_attention_decode
    from linattn_tl.preloading import preload
    from linattn_tl.registry import UnsupportedError, explain, last_backend, stats
    from linattn_tl.sizes import cache_elements


def __getattr__(name: str) -> Any:
    """Import on first use: importing the package costs nothing and needs nothing."""
    if name not in _WHERE:
        raise AttributeError(f"module 'linattn_tl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
