"""Tensors as CUDA kernels take and leave them: which can be read where they lie, copies of others, sums of groups.

A kernel reads vectors of ALIGNMENT bytes of contiguous tensors. Pools of states alone may be views of larger memory: a
step changes them in place, so that a copy would have to be written back.
"""

import torch

from linattn_tl.launchers import ALIGNMENT


def ready(x: torch.Tensor) -> bool:
    """Whether a kernel can read and write x where it lies."""
    return x.data_ptr() % ALIGNMENT == 0 and x.is_contiguous() and not x.is_neg()


def plain(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where a kernel could not read it."""
    if ready(x):
        return x
    copied = x.resolve_neg().contiguous()
    return copied if ready(copied) else copied.clone()


def indices(x: torch.Tensor | None) -> torch.Tensor | None:
    """cu_seqlens as kernels read them: int32."""
    if x is None or (x.dtype is torch.int32 and ready(x)):
        return x
    return plain(x.to(torch.int32))


def group_sums(x: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[..., HV, K] -> [..., H, K]: value heads that share a q/k head, summed, in an order that does not change.

    Args:
        heads: value heads of each q/k head.
        dim: where HV is.
    """
    return x if heads == 1 else x.unflatten(dim, (-1, heads)).sum(dim + 1)


# ---- pools of states


def pool_strides(x: torch.Tensor) -> tuple[int, int] | None:
    """How far apart rows and heads of a pool [P, heads, ...] are, or None where decode cannot work on it in place.

    It can where a head is in one piece, vectors are aligned, and no two heads overlap.
    """
    sizes, strides = x.shape[:2], list(x.stride()[:2])
    piece = x[0, 0] if x.numel() else x
    if not piece.is_contiguous():
        return None
    nearest = piece.numel()
    for i in sorted(range(2), key=strides.__getitem__):
        if sizes[i] < 2:
            strides[i] = nearest  # never used; torch may have kept anything there
        elif strides[i] < nearest or strides[i] * x.element_size() % ALIGNMENT:
            return None
        nearest = max(nearest, strides[i] * sizes[i])
    return strides[0], strides[1]


def pool(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where decode cannot work in place."""
    in_place = x.data_ptr() % ALIGNMENT == 0 and not x.is_neg() and pool_strides(x) is not None
    return x if in_place else plain(x)
