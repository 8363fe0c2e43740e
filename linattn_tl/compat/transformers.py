"""Models of Hugging Face transformers on our gated delta rule: Qwen3-Next, Qwen3.5 and what else calls its functions.

    from linattn_tl.compat import transformers as compat
    print(compat.enable())          # for all models, those that exist already too
    with compat.enabled(): ...      # for a while
    compat.disable()

A model there calls torch_chunk_gated_delta_rule and torch_recurrent_gated_delta_rule of its own module (in 4.57 and 5.0
what its layers took of them when they were made). These are replaced, on the CPU and on GPUs, whatever optional kernel
packages are installed; outputs, states and gradients are the same up to rounding. Packed sequences (cu_seq_lens_q,
seq_idx) are kept apart, also in the short convolution before the rule, which transformers does only where
causal-conv1d is installed; 4.57 and 5.0 do not tell these layers where sequences begin, and mix them with or without
us. Tested with transformers 4.57, 5.0 and 5.24; 4.57 is the first version with these models.
"""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from linattn_tl import apply
from linattn_tl.compat.fla import chunk_gated_delta_rule
from linattn_tl.ops.delta_rule import gated_delta_rule_decode

__all__ = ["Enabled", "disable", "enable", "enabled"]

CHUNK, STEP, CONVOLUTION = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"
OLDEST = "4.57"


@dataclass(frozen=True)
class Enabled:
    """What enable() has replaced: "module.name" of every function, or of a class whose layers hold them.

    skipped: modules that have the functions and could not be served, and why.
    """

    version: str
    replaced: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        models = sorted({name.split(".")[2] for name in self.replaced})
        lines = [f"transformers {self.version}: linattn-tl serves the gated delta rule of {', '.join(models)}"]
        return "\n".join([*lines, *(f"  not of {why}" for why in self.skipped)])


@dataclass
class _State:
    undo: list[Callable[[], None]] = field(default_factory=list)
    found: Enabled | None = None


_state = _State()


def enable() -> Enabled:
    """Serve the gated delta rule of transformers' models by our ops from now on; a second call changes nothing.

    Raises:
        ImportError: transformers is not installed, or has none of the functions that are replaced.
    """
    if _state.found is not None:
        return _state.found
    version = _version()
    replaced: list[str] = []
    skipped: list[str] = []
    for name in _modules():
        try:
            replaced += _replace(importlib.import_module(name))
        except ImportError as error:  # of a module alone: one that needs a package, or is of another make
            skipped.append(f"{name}: {error}")
    if not replaced:
        raise ImportError(
            "; ".join(
                [
                    f"linattn_tl.compat.transformers: transformers {version} has no model with {CHUNK} that can be "
                    f"served; expected {OLDEST} or newer",
                    *skipped,
                ]
            )
        )
    _state.found = Enabled(version, tuple(replaced), tuple(skipped))
    return _state.found


def disable() -> None:
    """Give transformers its own functions back."""
    while _state.undo:
        _state.undo.pop()()
    _state.found = None


@contextmanager
def enabled() -> Iterator[Enabled]:
    """enable() for a while; what was enabled before stays so."""
    was = _state.found is not None
    try:
        yield enable()
    finally:
        if not was:
            disable()


# ---- where the functions are


def _version() -> str:
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            f"linattn_tl.compat.transformers: transformers is not installed; expected {OLDEST} or newer "
            "(pip install transformers)"
        )
    return importlib.import_module("transformers").__version__


@cache
def _modules() -> list[str]:
    """The modelling modules that define the functions, by their text: importing all would take minutes."""
    models = importlib.import_module("transformers.models")
    found = []
    for model in pkgutil.iter_modules(models.__path__):
        file = Path(models.__path__[0], model.name, f"modeling_{model.name}.py")
        if file.exists() and f"def {CHUNK}" in file.read_text(encoding="utf-8"):
            found.append(f"transformers.models.{model.name}.modeling_{model.name}")
    return found


def _replace(module: ModuleType) -> list[str]:
    """Put our functions into a module; what was replaced, by name."""
    if not hasattr(module, STEP):
        raise ImportError(f"it has {CHUNK} and no {STEP}")
    layers = _layers_with_own(module)
    for layer in layers:
        for name, function in (("chunk_gated_delta_rule", _chunk), ("recurrent_gated_delta_rule", _step)):
            _set(layer, name, _Served(function, name))
    if layers:
        return [f"{module.__name__}.{layer.__name__}" for layer in layers]
    replaced: dict[str, Any] = {CHUNK: _chunk, STEP: _step}
    if callable(getattr(module, CONVOLUTION, None)):
        replaced[CONVOLUTION] = _apart(getattr(module, CONVOLUTION))
    for name, function in replaced.items():
        _set(module, name, function)
    return [f"{module.__name__}.{name}" for name in replaced]


def _layers_with_own(module: ModuleType) -> list[type]:
    """Classes whose layers take the functions when they are made, as in 4.57 and 5.0."""
    if not hasattr(module, "chunk_gated_delta_rule"):
        return []
    mine = (x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__)
    return [x for x in mine if x.__name__.endswith("GatedDeltaNet")]


class _Served:
    """An attribute of a layer that is ours while it is installed in the class; what the layer has stays in it."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.function, self.name = function, name

    def __get__(self, layer: Any, owner: type) -> Any:
        return self.function

    def __set__(self, layer: Any, value: Any) -> None:
        vars(layer)[self.name] = value


def _set(owner: Any, name: str, value: Any) -> None:
    before = vars(owner).get(name)

    def undo() -> None:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, value)
    _state.undo.append(undo)


# ---- the functions


def _chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch_chunk_gated_delta_rule; of what else a model hands on, for its attention layers, seq_idx counts."""
    return chunk_gated_delta_rule(
        query, key, value, g, beta, None, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens=_lengths(cu_seqlens, kwargs.get("seq_idx")),
    )  # fmt: skip


def _step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch_recurrent_gated_delta_rule: a step on a copy of the state, which a cache may want to keep."""
    given = (query, key, value, g, beta)
    plain = query.shape[1] == 1 and cu_seqlens is None and not apply.transformed()
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*given, initial_state))
    if initial_state is None or learns or not plain:
        return _chunk(
            *given, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, **kwargs,
        )  # fmt: skip
    state = initial_state.to(torch.promote_types(query.dtype, torch.float32), copy=True)
    with torch.no_grad():
        o = gated_delta_rule_decode(*given, state, qk_l2norm=use_qk_l2norm_in_kernel)
    return o, state if output_final_state else None


def _apart(convolution: Callable[..., Any]) -> Callable[..., Any]:
    """causal_conv1d_fn that keeps packed sequences apart; without any it is transformers' own."""

    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        sequence = _sequence_of_tokens(hidden_states.shape[-1], kwargs)
        if sequence is None or (kwargs.get("seq_idx") is not None and _has_convolution()):
            return convolution(hidden_states, weight, bias, activation=activation, **kwargs)
        x = hidden_states.to(weight.dtype)
        taps, T = weight.shape[-1], x.shape[-1]
        out = x * weight[:, -1, None]
        for back in range(1, min(taps, T)):
            near = sequence[..., back:] == sequence[..., :-back]
            term = x[..., : T - back] * near.to(x.dtype).unsqueeze(-2) * weight[:, -1 - back, None]
            out = out + torch.nn.functional.pad(term, (back, 0))
        if bias is not None:
            out = out + bias[:, None]
        return (out if activation is None else _activation(activation)(out)).to(hidden_states.dtype)

    return causal_conv1d_fn


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return sys.modules["transformers"].activations.ACT2FN[name]


@cache
def _has_convolution() -> bool:
    """Whether transformers has a convolution that knows seq_idx."""
    return importlib.util.find_spec("causal_conv1d") is not None


def _sequence_of_tokens(columns: int, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """[B or 1, columns], the number of each column's sequence, or None where nothing is packed.

    A cache puts columns of the past in front: they belong to the first sequence, which goes on from there.
    """
    found, cu = kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q", kwargs.get("cu_seqlens"))
    if found is None:
        if cu is None:
            return None
        found = torch.bucketize(torch.arange(int(cu[-1]), device=cu.device), cu[1:], right=True).unsqueeze(0)
    past = columns - found.shape[-1]
    return found if past <= 0 else torch.cat([found[..., :1].expand(*found.shape[:-1], past), found], -1)


def _lengths(cu_seqlens: torch.Tensor | None, seq_idx: torch.Tensor | None) -> torch.Tensor | None:
    """cu_seqlens, or what seq_idx [1, T] says of it."""
    if cu_seqlens is not None or seq_idx is None:
        return cu_seqlens
    if seq_idx.shape[0] != 1:
        raise ValueError(
            f"linattn_tl.compat.transformers: seq_idx has shape {tuple(seq_idx.shape)}; expected [1, T], "
            "or cu_seq_lens_q"
        )
    begins = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero().flatten() + 1
    return torch.nn.functional.pad(torch.nn.functional.pad(begins, (1, 0)), (0, 1), value=seq_idx.shape[1])
