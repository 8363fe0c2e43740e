"""Plain, aligned text for the terminal."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right, words to the left."""
    body = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(head), *body]) for i in range(len(head))]
    right = [all(_number(line[i]) for line in body) and bool(body) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, body)])


def _number(cell: str) -> bool:
    text = cell.rstrip("x%").replace(",", "")
    try:
        float(text)
    except ValueError:
        return cell in ("", "-")
    return True


def config_text(config: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def speed_text(row: dict[str, Any]) -> tuple[object, ...]:
    """A tuned row's config, time and speed."""
    return config_text(row["config"]), row["median_us"], row["gflops"] or "-"


def head_dims(text: str) -> list[tuple[int, int]]:
    """The pairs (K, V) of a --dims argument such as 64,128x256. ValueError for what is none."""
    return [_pair(part) for part in text.split(",")]


def _pair(text: str) -> tuple[int, int]:
    K, x, V = text.partition("x")
    try:
        return int(K), int(V if x else K)
    except ValueError:
        raise ValueError(f"--dims has {text!r}; expected a number, or KxV such as 128x256") from None
