"""Code offsets of a built kernel -> lines of the generated source."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SHIMS = Path(__file__).with_name("include")


@dataclass(frozen=True)
class Place:
    """A line of the generated source."""

    line: int = 0  # 0: unknown
    text: str = ""  # of the line, stripped
    inner: str = ""  # where in a TileLang header that the line inlines: "reduce.h:88"
    offset: int = 0  # in the shared object; tells places apart whose line is unknown

    def __str__(self) -> str:
        known = f"line {self.line}" if self.line else f"code +0x{self.offset:x}" if self.offset else "no line"
        return f"{known}, {self.inner}" if self.inner else known


NOWHERE = Place()


def resolve(library: Path, pcs: Iterable[int], source: str) -> dict[int, Place]:
    """The source line of each code offset, by one run of addr2line. Without binutils every line is unknown."""
    wanted = sorted(pcs)
    tool = shutil.which("addr2line")
    if tool is None or not wanted:
        return {}
    # a pc is where a call returns to; one byte before it lies in the call, on the call's line
    addresses = "".join(f"0x{pc - 1:x}\n" for pc in wanted)
    command = [tool, "--inlines", "--addresses", "--exe", str(library)]
    done = subprocess.run(command, input=addresses, capture_output=True, text=True, check=False)
    if done.returncode:
        return {}
    lines = source.splitlines()
    frames = parse_frames(done.stdout)
    return {pc: _place(pc, frames.get(pc - 1, []), lines) for pc in wanted}


def parse_frames(text: str) -> dict[int, list[tuple[str, int]]]:
    """addr2line's output: for each address its frames, (file, line), innermost first."""
    frames: dict[int, list[tuple[str, int]]] = {}
    current: list[tuple[str, int]] = []
    for row in text.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", row):
            current = frames.setdefault(int(row, 16), [])
        elif match := re.match(r"(.+):(\d+)(?: \(discriminator \d+\))?$", row):
            current.append((match[1], int(match[2])))
    return frames


def _place(pc: int, frames: list[tuple[str, int]], lines: list[str]) -> Place:
    """The kernel's line is the outermost frame in the generated file; a TileLang header inside it is named too."""
    in_kernel = [line for file, line in frames if file.endswith(".cu")]
    if not in_kernel:
        return Place(offset=pc)
    line = in_kernel[-1]
    headers = [f"{Path(f).name}:{n}" for f, n in frames if not f.endswith(".cu") and not _is_shim(f)]
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return Place(line, text, headers[0] if headers else "", pc)


def _is_shim(file: str) -> bool:
    return Path(file).is_relative_to(SHIMS)
