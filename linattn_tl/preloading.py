"""Everything a later call can need, loaded now: no compile, tune or load event while serving."""

from collections.abc import Sequence

import torch

from linattn_tl import devices, registry
from tl_kernels.spec import Problem


def preload(
    op: str,
    *,
    K: int,
    V: int,
    H: int | None = None,
    HV: int | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    device: torch.device | str | None = None,
    backend: str = "auto",
) -> dict[str, str]:
    """Build or load what any call of an op can need: forward, backward, packed, stateful, and its decode op.

    Args:
        op: the op's name, e.g. "linear_attention", or that of a form of it, e.g. "ssd"; its `_decode` comes along.
        K, V: head dims of key and value.
        H, HV: head counts, where binaries depend on them (CPU binaries do not).
        dtypes: of q, k and v.
        device: "cpu" (default) or a CUDA device, the current one where it has no index.
        backend: as in the call that follows.

    Returns:
        {"<op> <dtype>": the backend that will serve it}.

    Raises:
        ValueError: an unknown op or backend, or heads that do not divide.
        UnsupportedError: the named backend cannot serve it, or nothing compiled can with LINATTN_TL_STRICT=1.
    """
    whole = registry.named(op)[0].name
    if H is not None and HV is not None and HV % H:
        raise ValueError(f"preload: HV is {HV}; expected a multiple of H = {H}")
    for name, size in (("K", K), ("V", V)):
        if size < 1:
            raise ValueError(f"preload: {name} is {size}; expected at least 1")
    where = torch.device(device or "cpu").type, devices.index_of(device)
    served: dict[str, str] = {}
    for name in (whole, f"{whole}_decode"):
        found = registry.all_ops().get(name)
        if found is None:
            continue
        for dtype in dtypes:
            dtype_name = str(dtype).removeprefix("torch.")
            choice = registry.choose(found, Problem(name, dtype_name, K, V, *where), backend)
            served[f"{name} {dtype_name}"] = choice.backend
    return served
