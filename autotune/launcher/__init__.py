"""What loads a binary and packs a call into one block of words."""

from typing import Any

KEPT = 4096  # packed blocks that a binary remembers


def keep(binary: Any, key: Any, packed: Any) -> None:
    """Remember a packed block in binary.kept; all are forgotten when there are too many."""
    if len(binary.kept) >= KEPT:
        binary.kept.clear()
    binary.kept[key] = packed
