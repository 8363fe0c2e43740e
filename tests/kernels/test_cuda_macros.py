"""Tile programs of tl_kernels/cuda_macros.py by themselves, under the emulator."""

import re
from typing import Any

import pytest
import torch

from autotune import cuda_build, target
from linattn_tl import trials
from tests.autotune.emulator import kernels
from tl_kernels.spec import Problem

pytestmark = pytest.mark.skipif(bool(cuda_build.missing()), reason=cuda_build.missing())


def places(blocks: int) -> Any:
    """found[i] = (span, value head, q/k head, block) of program i."""
    import tilelang.language as T

    from tl_kernels import cuda_macros as m

    HV, H, programs = (T.dynamic(n) for n in ("HV", "H", "programs"))

    @T.prim_func
    def program(
        found: T.Tensor([programs, 4], "int32"), v: T.Tensor([HV], "int32"), q: T.Tensor([H], "int32"), spans: T.int32
    ):
        with T.Kernel(spans * HV * blocks, threads=32) as i:
            place = T.alloc_local([3], "int32")
            m.find_place(place, i, blocks, (HV, H))
            for j in T.Parallel(32):
                if j == 0:
                    found[i, 0] = place[0]
                    found[i, 1] = place[1]
                    found[i, 2] = place[2]
                    found[i, 3] = i % blocks

    return program


@pytest.mark.parametrize(("spans", "HV", "H", "blocks"), [(3, 6, 2, 1), (2, 4, 4, 3), (1, 1, 1, 2)])
def test_programs_that_read_the_same_rows_are_neighbours(spans: int, HV: int, H: int, blocks: int):
    found = torch.full((spans * HV * blocks, 4), -1, dtype=torch.int32)
    heads = torch.zeros(HV, dtype=torch.int32), torch.zeros(H, dtype=torch.int32)
    kernels.built("sm_80", places, blocks)(found, *heads, spans).assert_clean()
    every = [(s, h, h * H // HV, b) for s in range(spans) for h in range(HV) for b in range(blocks)]
    assert [tuple(row) for row in found.tolist()] == every


@pytest.mark.parametrize("family", trials.families("cuda"))
def test_shared_buffers_have_names_of_their_own(family: str):
    """TileLang calls what is kept in an attribute v, and lays out buffers of one name in no lasting order."""
    problem, device = Problem(family, "bfloat16", 32, 32, "cuda"), target.named("sm_80")
    kernel = trials.find_kernel(f"{family}.forward", "cuda")[1]
    lowered = cuda_build.lower(kernel, problem, kernel.configs(problem, device)[0], device)
    names = re.findall(r"void\* (\w+) = .*buf_dyn_shmem", lowered.kernel_source)
    assert len(names) > 3 and not [name for name in names if re.fullmatch(r"v(_\d+)?", name)]
