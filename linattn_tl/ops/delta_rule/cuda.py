"""A step of the delta rule through a compiled CUDA kernel. Whole sequences have no CUDA kernels yet."""

from collections.abc import Sequence
from typing import Any

from autotune.launcher.repeat import Argument, Call
from linattn_tl import outputs
from linattn_tl.ops.delta_rule.definition import Options
from linattn_tl.steps import PooledStep


class CudaDecode(PooledStep):
    """The compiled backends of gated_delta_rule_decode on NVIDIA GPUs, for one K and V.

    A slot that names no row of the pool makes o NaN, see tl_kernels/delta_rule/cuda_decode.py.
    """

    op = "delta_rule"
    pool_names = ("kv",)

    def option_numbers(self, opt: Options) -> dict[str, float]:
        return {"scale": opt.scale, "norm": int(opt.qk_l2norm)}

    def _numbers(self, tokens: Sequence[Any], *rest: Any) -> dict[str, float]:
        gated = tokens[3] is not None
        return {**super()._numbers(tokens, *rest), "gated": int(gated), "G": tokens[0].shape[0] if gated else 0}

    def __call__(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, slots: Any, opt: Options, out: Any
    ) -> Any:
        """q [B, H, K] or [B, n, H, K]; state [P, HV, K, V] changes in place, a view of a larger one too."""
        return self._step((q, k, v, g, beta), (state,), slots, opt, out)

    def call(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, slots: Any, opt: Options, out: Any
    ) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py."""
        packed = self._repeatable((q, k, v, g, beta), (state,), slots, opt, out)
        if packed is None:
            return None
        tensors = [
            *(Argument(x, i if x is not None else -1) for i, x in enumerate((q, k, v, g, beta))),
            Argument(state, 6, changed=True),
            Argument(slots, 7 if slots is not None else -1),
            Argument(out, 5, outputs.maker(out), apart=True, changed=True, returned=True),
        ]
        return self.decode.call(packed, tensors)
