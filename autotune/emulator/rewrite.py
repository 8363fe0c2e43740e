"""TileLang's CUDA C++ -> C++ that g++ compiles against the shims in include/. Text to text, line by line.

Three things are not C++, or would be slow: shared memory is declared by storage class, the built-in indices are global
variables, and a kernel may hold PTX. The first two are rewritten in place. No line is added or removed, so the line
numbers that findings name are those of the emitted source. PTX, clusters and what else has no counterpart are refused.
"""

import re
from collections.abc import Iterator

from autotune.emulator.errors import EmulatorError

INDICES = {
    "threadIdx": "const uint3 threadIdx = emu::thread_index();",
    "blockIdx": "const uint3 blockIdx = emu::block_index();",
    "blockDim": "const dim3 blockDim = emu::block_dim();",
    "gridDim": "const dim3 gridDim = emu::grid_dim();",
}

# What there is no counterpart of, and the compiler would not name well. Names that are merely not declared, it finds.
REFUSED = {
    r"\bcooperative_groups\s*::\s*[\w:]+": "cooperative groups",
    r"\b__constant__\b|\b__managed__\b": "memory outside of a kernel",
    r"\b__device__\s+(?:(?!__)[\w:<>*]+\s+)+\w+\s*(?:\[[^\]]*\]\s*)*[;={]": "memory outside of a kernel",
}
_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b")

_TYPE_AND_NAME = r"(?P<type>[A-Za-z_][\w:]*(?:\s*<[^;<>]*>)?(?:[\s*]+[A-Za-z_][\w:]*)*?)\s*\b(?P<name>[A-Za-z_]\w*)\s*"
_ALIGN = r"(?:(?:__align__|alignas)\s*\(\s*(?P<align>\d+)\s*\)\s*)?(?:alignas\s*\(\s*\d+\s*\)\s*)?"
_DYNAMIC = re.compile(rf"\bextern\s+__shared__\s+{_ALIGN}{_TYPE_AND_NAME}\[\s*\]\s*;")
_STATIC = re.compile(rf"\b__shared__\s+{_ALIGN}{_TYPE_AND_NAME}(?P<dims>(?:\[\s*[^\[\];\s][^\[\];]*\]\s*)*);")
_KERNEL = re.compile(r"\b__global__\b[^;{]*\{")
_OWN_BLOCK_INDEX = re.compile(r"\bdim3\s+blockIdx\s*=")
_BLANK = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def rewrite(source: str) -> str:
    """The same program for g++ and the shims, with the same lines.

    Raises:
        EmulatorError: the source has something that is not covered; the text names it and its line.
    """
    code = blank_text(source)
    _refuse(source, code)
    edits = [*_shared_memory(code), *_indices(code)]
    for start, end, text in sorted(edits, reverse=True):
        # What is replaced may span lines, a declaration broken by hand for instance.
        source = source[:start] + text + "\n" * source.count("\n", start, end) + source[end:]
    return source


def blank_text(source: str) -> str:
    """Comments and literals replaced by spaces: every character keeps its place, and what is left is code."""
    return _BLANK.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), source)


def _refuse(source: str, code: str) -> None:
    if match := _ASM.search(code):
        raise _not_covered(f"inline PTX, {_instruction(source[match.end() :])}", source, match.start())
    for pattern, words in REFUSED.items():
        if match := re.search(pattern, code):
            name = " ".join(match.group().split())
            raise _not_covered(f"{words}, {name}", source, match.start())
    left = _STATIC.sub("", _DYNAMIC.sub("", code))
    if stray := re.search(r"\b__shared__\b[^;\n]*", left):
        line = stray.group().strip()
        at = code.index(stray.group())
        raise _not_covered(f"a declaration of shared memory of this form, {line}", source, at)


def _instruction(after_asm: str) -> str:
    """The first instruction in the string literals that follow."""
    text = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', after_asm.split(";\n", 1)[0]))
    # labels, register declarations and moves around it say nothing
    for word in re.findall(r"[a-z][\w]*(?:\.[\w:]+)+", text.replace("\\n", " ").replace("\\t", " ")):
        if not word.startswith(("setp.", "selp.", "mov.", "reg.")):
            return word
    return text.strip()[:60] or "of no known instruction"


def _not_covered(what: str, source: str, at: int) -> EmulatorError:
    return EmulatorError(f"not covered: {what} (line {source.count(chr(10), 0, at) + 1} of the generated source)")


Edit = tuple[int, int, str]  # from, to, replacement


def _shared_memory(code: str) -> Iterator[Edit]:
    for match in _DYNAMIC.finditer(code):
        kind, name = match["type"], match["name"]
        yield *match.span(), f"{kind} *{name} = ({kind} *)emu_dynamic_shared();"
    for number, match in enumerate(_STATIC.finditer(code)):
        kind, name, dims = match["type"], match["name"], match["dims"].strip()
        array = f"{kind}{dims}"
        align = match["align"] or f"alignof({kind})"
        # A reference to an array keeps its bounds, which are then checked.
        pointer = f"({kind} (*){dims})" if dims else f"({kind} *)"
        reference = f"{kind} (&{name}){dims}" if dims else f"{kind} &{name}"
        yield *match.span(), f"{reference} = *{pointer}emu_static_shared({number}, sizeof({array}), {align});"


def _indices(code: str) -> Iterator[Edit]:
    """Constant copies of the built-in indices at the top of each kernel: their address is never taken, so that reading
    them is no memory access, and is not hooked. Emitted code with a swizzled rasterisation declares its own blockIdx.
    """
    for match in _KERNEL.finditer(code):
        body = code[match.end() : _closing_brace(code, match.end())]
        names = [name for name in INDICES if re.search(rf"\b{name}\b", body)]
        if _OWN_BLOCK_INDEX.search(body):
            names.remove("blockIdx")
        yield match.end(), match.end(), "".join(f" {INDICES[name]}" for name in names)


def _closing_brace(code: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(code, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    return len(code)
