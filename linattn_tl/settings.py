"""The only reader of the environment.

LINATTN_TL_CACHE_DIR  where binaries and tuned tables are kept (default: ~/.cache/linattn_tl, or XDG_CACHE_HOME)
LINATTN_TL_BACKEND    the backend to use where a call says backend="auto"
LINATTN_TL_STRICT     1: a fallback is an error
"""

import os
from pathlib import Path


def cache_dir() -> Path:
    named = os.environ.get("LINATTN_TL_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linattn_tl"


def default_backend() -> str:
    return os.environ.get("LINATTN_TL_BACKEND") or "auto"


def strict() -> bool:
    value = os.environ.get("LINATTN_TL_STRICT", "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"LINATTN_TL_STRICT is {value!r}; expected 0 or 1")
    return value == "1"
