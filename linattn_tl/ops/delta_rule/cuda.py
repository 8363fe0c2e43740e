"""The delta rule through compiled CUDA kernels: whole sequences forward, and steps.

There is no kernel for the backward pass yet: gradients come from the chunk form in plain torch, which computes the
forward pass again.
"""

from collections.abc import Sequence
from typing import Any

import torch

from autotune.launcher.repeat import Argument, Call
from linattn_tl import outputs, registry
from linattn_tl.aligned import indices, plain, ready
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner
from linattn_tl.spans import SpanRunner, Walk
from linattn_tl.steps import PooledStep

FAMILY = "delta_rule"
NEVER_CUT = 0  # multiprocessors: a span does to the state what only a matrix says, so sequences are walked as a whole


def option_numbers(opt: Options | None) -> dict[str, float]:
    """What kernels are told of the options, by the names of their arguments."""
    return {} if opt is None else {"scale": opt.scale, "norm": int(opt.qk_l2norm)}


def _count(state: torch.Tensor | None) -> int:
    return 0 if state is None else state.shape[0]


class CudaRunner(SpanRunner):
    """The compiled backends of gated_delta_rule on NVIDIA GPUs."""

    op = FAMILY

    def __init__(self, binaries: Any):
        super().__init__(binaries, NEVER_CUT)

    def option_numbers(self, opt: Options | None) -> dict[str, float]:
        return option_numbers(opt)

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Options, keep: bool = True) -> tuple[Any, Any]:
        """(o, final state or None); nothing is kept for backward."""
        q, k, v, beta = (plain(inputs[i]) for i in (0, 1, 2, 4))
        g = torch.zeros_like(beta) if inputs[3] is None else plain(inputs[3])
        start, cu = None if inputs[5] is None else plain(inputs[5]), indices(lengths)
        walk = self._walk("forward", q, v, cu)
        o, final = torch.empty_like(v), None
        if opt.output_final_state:
            final = torch.empty(walk.sequences, walk.HV, walk.K, walk.V, dtype=torch.float32, device=q.device)
        if walk.empty:
            if final is not None:
                final.copy_(start) if start is not None else final.zero_()
            return (o, final), ()
        self.binaries["forward"].launch(self._numbers(walk, start, final, opt), (q, k, v, g, beta, o, start, final, cu))
        return (o, final), ()

    def _numbers(self, walk: Walk, start: Any, final: Any, opt: Options) -> Any:
        N0, N1 = _count(start), _count(final)
        sizes = {"tokens": walk.tokens, "N0": N0, "N1": N1, "initial": int(N0 > 0), "final": int(N1 > 0)}
        return self._packed("forward", walk, opt, **sizes)

    def call(self, inputs: Sequence[Any], opt: Options, results: Sequence[Any]) -> Call | None:
        """How to make this call again, see linattn_tl/repeats.py. Without gates there is a tensor of zeros to make."""
        *tokens, start = inputs
        o, final = results
        if tokens[3] is None or not all(map(ready, tokens)) or not (start is None or ready(start)):
            return None
        walk = self._walk("forward", tokens[0], tokens[2], None)
        if walk.empty:
            return None
        tensors = [*(Argument(x, i) for i, x in enumerate(tokens)), Argument(start, 6)]
        tensors += [Argument(x, w, outputs.maker(x), returned=True) for x, w in ((o, 5), (final, 7)) if x is not None]
        return self.binaries["forward"].call(self._numbers(walk, start, final, opt), tensors)

    def backward(
        self,
        inputs: Sequence[Any],
        results: Sequence[Any],
        saved: Sequence[Any],
        lengths: Any,
        grads: Sequence[Any],
        needs: Sequence[bool],
        opt: Options,
    ) -> list[Any]:
        """One gradient an input that needs one, by the chunk form in plain torch: a fallback, which says so."""
        registry.fall_back(
            FAMILY, "torch", "the backward pass has no CUDA kernel yet: the chunk form computes gradients"
        )
        return TorchRunner().backward(inputs, results, saved, lengths, grads, needs, opt)


class CudaDecode(PooledStep):
    """The compiled backends of gated_delta_rule_decode on NVIDIA GPUs, for one K and V.

    A slot that names no row of the pool makes o NaN, see tl_kernels/delta_rule/cuda_decode.py.
    """

    op = FAMILY
    pool_names = ("kv",)

    def option_numbers(self, opt: Options) -> dict[str, float]:
        return option_numbers(opt)

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
