"""The tensors of calls that may be made again, in the order of the public functions; see linattn_tl/repeats.py."""

from collections.abc import Sequence
from typing import Any

from autotune.launcher.repeat import Argument
from linattn_tl import outputs

PASS = (0, 0, 0, 2)  # q, k, v, initial state (kv, z)
STEP = (0, 0, 0, 2, 0, 0)  # q, k, v, state (kv, z), slots, out


def step_arguments(q: Any, k: Any, v: Any, kv: Any, z: Any, slots: Any, out: Any) -> list[Argument]:
    """Of a step, as STEP says. The kernels take q, k, v, out, kv, z, slots."""
    return [
        Argument(q, 0),
        Argument(k, 1),
        Argument(v, 2),
        Argument(kv, 4, changed=True),
        Argument(z, 5, changed=True),
        Argument(slots, 6),
        Argument(out, 3, outputs.maker(out), apart=True, changed=True, returned=True),
    ]


def pass_arguments(inputs: Sequence[Any], results: Sequence[Any], words: Sequence[int]) -> list[Argument]:
    """Of a pass, as PASS says, then o and the final kv and z, where asked for.

    words: the places of q, k, v, o, initial kv and z, final kv and z among the addresses that a kernel takes.
    """
    made = [
        Argument(x, word, outputs.maker(x), returned=True)
        for x, word in zip(results, (words[3], *words[6:]), strict=True)
        if x is not None
    ]
    given = zip(inputs, (*words[:3], *words[4:6]), strict=True)
    return [*(Argument(x, word) for x, word in given), *made]
