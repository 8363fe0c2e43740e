"""What loads a binary and packs a call into one block of words."""

from typing import Any

KEPT = 4096  # packed blocks that a binary remembers, and as many of anything else


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value by its key, in a memory that is emptied when it is full."""
    if len(known) >= KEPT:
        known.clear()
    known[key] = value


def keep(binary: Any, key: Any, packed: Any) -> None:
    """Remember a packed block in binary.kept."""
    remember(binary.kept, key, packed)
