"""The documents run: their python blocks in order, in one namespace each, and what they print is what is shown.

A ```text block that follows a python block is what that one prints; a block that prints has one. A block of >>> lines
shows its results itself.
"""

import contextlib
import doctest
import io
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autotune import target

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {"python", "text", ""}  # a fence of another name would be python that nobody runs


class WrongDocument(Exception):
    """What a document shows is not so; says where."""


@dataclass(frozen=True)
class Fence:
    language: str
    text: str
    start: int  # line of the document in which the text begins, from 1
    end: int  # and of the closing fence


@dataclass(frozen=True)
class Block:
    """Python, and what it is to print."""

    source: str
    start: int
    prints: str


def fences(document: str) -> list[Fence]:
    found: list[Fence] = []
    opened = None
    lines = document.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if opened is None:
            opened = (line.strip().removeprefix("```"), number + 1)
            continue
        language, start = opened
        found.append(Fence(language, "\n".join(lines[start - 1 : number - 1]) + "\n", start, number))
        opened = None
    if opened is not None:
        raise WrongDocument(f"line {opened[1] - 1}: a fence that is not closed")
    for fence in found:
        if fence.language not in LANGUAGES:
            raise WrongDocument(f"line {fence.start - 1}: {fence.language!r}; expected one of {sorted(LANGUAGES)}")
    return found


def blocks(document: str) -> list[Block]:
    """The python blocks, with the text block behind each, if nothing but empty lines is between."""
    lines, found = document.splitlines(), []
    for fence, following in pairwise([*fences(document), None]):
        if fence.language != "python":
            continue
        shown = following is not None and following.language == "text"
        between = lines[fence.end : following.start - 2] if shown else []
        shown = shown and not any(line.strip() for line in between)
        found.append(Block(fence.text, fence.start, following.text if shown else ""))
    if not found:
        raise WrongDocument("has no python blocks")
    return found


def run_document(path: Path, left_out: str | None = None) -> dict[str, Any]:
    """Run the blocks, but those that contain left_out. Returns the names that they made."""
    names: dict[str, Any] = {"__name__": path.stem}
    for block in blocks(path.read_text()):
        if left_out is not None and left_out in block.source:
            continue
        (run_session if block.source.startswith(">>>") else run_block)(block, path, names)
    return names


def run_block(block: Block, path: Path, names: dict[str, Any]) -> None:
    code = compile("\n" * (block.start - 1) + block.source, str(path), "exec")  # tracebacks name the document's lines
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    if printed.getvalue() != block.prints:
        raise WrongDocument(f"{path.name}:{block.start}: prints\n{printed.getvalue()}and shows\n{block.prints}")


def run_session(block: Block, path: Path, names: dict[str, Any]) -> None:
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(block.source, names, path.name, str(path), block.start - 1)
    if doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False).failed:
        raise WrongDocument("".join(said))
    names.update(test.globs)


# ---- the documents


@pytest.mark.usefixtures("fresh_choices")
def test_the_tutorial():
    run_document(ROOT / "docs" / "tutorial.md")


@pytest.mark.skipif(target.native() is None, reason="shows what a CPU with AVX2 says")
@pytest.mark.usefixtures("fresh_choices")
def test_the_readme():
    """But the block on models of transformers, of which there is none here: tests/test_compat_*.py have them."""
    left_out = "linattn_tl.compat"
    sources = [block.source for block in blocks((ROOT / "README.md").read_text())]
    assert [left_out in source for source in sources].count(True) == 1
    assert run_document(ROOT / "README.md", left_out)["o1"].shape == (2, 8, 64)


def test_every_block_of_the_tutorial_is_checked():
    for block in blocks((ROOT / "docs" / "tutorial.md").read_text()):
        assert "assert " in block.source or block.prints, f"line {block.start}"


def test_every_picture_has_its_command():
    text = (ROOT / "docs" / "tutorial.md").read_text()
    pictures = re.findall(r"^!\[.+\]\(measured/(\w+)\.png\)\n\n    (.+)$", text, re.MULTILINE)
    assert len(pictures) == text.count("![") == 4
    for name, command in pictures:
        assert name in command
        assert "docs/measured" in command


def test_links_within_the_tutorial_lead_somewhere():
    text = (ROOT / "docs" / "tutorial.md").read_text()
    headings = {anchor(line) for line in text.splitlines() if line.startswith("## ")}
    assert {*re.findall(r"\(#(.+?)\)", text)} <= headings
    for link in re.findall(r"\]\((?!http|#|measured/)(.+?)\)", text):
        file, _, part = link.partition("#")
        linked = ROOT / "docs" / file
        assert linked.exists(), link
        assert not part or part in {anchor(line) for line in linked.read_text().splitlines()}, link


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lstrip("# ").lower()).replace(" ", "-")


# ---- what would be noticed


def document(tmp_path: Path, *parts: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text("# Page\n\n" + "\n\n".join(parts) + "\n")
    return path


def python(source: str) -> str:
    return f"```python\n{source}\n```"


def shown(text: str) -> str:
    return f"```text\n{text}\n```"


def test_names_go_on_from_block_to_block(tmp_path):
    path = document(tmp_path, python("x = 1"), "words", python("assert x == 1\nprint(x)"), shown("1"))
    assert run_document(path)["x"] == 1


@pytest.mark.parametrize(
    "parts",
    [
        ("no code",),
        (shown("text alone"),),
        (python("print(1)"),),
        (python("print(1)"), shown("2")),
        (python("print(1)"), "words between", shown("1")),
        (python("x = 1"), shown("1")),
        (python(">>> 1 + 1\n3"),),
        ("```py\nassert False\n```", python("x = 1")),
        ("```python\nx = 1",),
    ],
    ids=lambda parts: parts[0].replace("\n", " ")[:24],
)
def test_what_is_not_so_is_refused(parts, tmp_path):
    with pytest.raises(WrongDocument):
        run_document(document(tmp_path, *parts))


def test_an_assert_that_fails_names_its_line(tmp_path):
    path = document(tmp_path, python("x = 1"), python("y = 2\nassert x == y"))
    with pytest.raises(AssertionError) as raised:
        run_document(path)
    last = raised.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(path), path.read_text().splitlines().index("assert x == y") + 1)


def test_sessions_share_the_names(tmp_path):
    path = document(tmp_path, python("x = 2"), python(">>> y = x + 1\n>>> y\n3"), python("assert y == 3"))
    assert run_document(path)["y"] == 3
