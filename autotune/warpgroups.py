"""The number of a thread's warpgroup in emitted CUDA C++, said so that ptxas knows that a warp has one.

TileLang 0.1.15 writes `((int)threadIdx.x) >> 7` into the descriptors of wgmma. ptxas does not see that all threads of a
warp agree on it: the descriptors of all steps of all products lie in vector registers, and are kept there over a loop.
What a shuffle brings from one lane it takes for uniform; and what is made of a shuffle inside a loop is not kept from
one turn to the next. The largest kernels spill registers without this, and none with it.
"""

import re

from autotune.emulator.rewrite import blank_text

_NUMBER = "(((int)threadIdx.x) >> 7)"
_NAME = "uniform_warpgroup"
_DECLARED = f"const int {_NAME} = __shfl_sync(0xffffffff, ((int)threadIdx.x) >> 7, 0);"
_LOOP = re.compile(r"\s*for \(")


def make_uniform(source: str) -> str:
    """The same program, with one declaration in each outermost loop with wgmma, or in the function around it."""
    lines, code = source.split("\n"), blank_text(source).split("\n")
    opened: list[int] = []  # lines of the blocks around a line, by their braces: indents of emitted code mean nothing
    blocks = set()
    for n, line in enumerate(code):
        if "tl::wgmma_" in line and _NUMBER in line:
            lines[n] = lines[n].replace(_NUMBER, _NAME)
            blocks.add(next((b for b in opened if _is_rolled(code, b)), opened[0]))
        for brace in re.findall(r"[{}]", line):
            if brace == "{":
                opened.append(n)
            else:
                opened.pop()
    for n in sorted(blocks, reverse=True):
        lines.insert(n + 1, f"    {_DECLARED}")
    return "\n".join(lines)


def _is_rolled(code: list[str], n: int) -> bool:
    """Whether line n opens a loop that the compiler does not unroll."""
    return bool(_LOOP.match(code[n])) and "#pragma unroll" not in code[n - 1]
