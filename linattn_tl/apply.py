"""How an op reaches autograd, torch.compile and plain calls: one path for all families.

A runner computes

    forward(inputs, lengths, options, keep=True) -> (outputs, saved), None for an output that was not asked for, or for
        what only backward needs when keep is False. A runner may keep more than its op's `saved` names, if its backward
        can do without: under torch.compile it gets no more than those
    backward(inputs, outputs, saved, lengths, grads, needs, options) -> a gradient or None for each input

One with differentiable = True is written in plain torch; any other goes through the autograd.Function here, whose
backward is itself differentiable by way of the op's definition.

Three ways in, cheapest first: no gradient wanted - the runner itself; gradient wanted - the Function; tensors that
are not plain memory (torch.compile, fake tensors, dispatch modes) - a library op, whose fake half is the op's `meta`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from linattn_tl import registry
from linattn_tl.registry import Choice, Op, Problem

_functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_LIBRARY = torch.library.Library("linattn_tl", "FRAGMENT")


def apply(
    op: Op,
    problem: Problem,
    inputs: Sequence[Any],
    lengths: Any,
    options: Any,
    backend: str,
    remember: Callable[[Choice, Sequence[Any]], None] | None = None,
    called: str = "",
) -> tuple[Any, ...]:
    """Compute op on checked inputs. Returns the op's outputs, None where not asked for.

    called: what messages call it, where that is another form of it.

    remember(choice, outputs) is told of a plain call that compiled kernels have served, see linattn_tl.repeats.
    """
    if traced(*inputs[:3]):
        return _library_call(op, inputs, lengths, options, backend)
    if transformed():
        if lengths is not None and _functorch.is_batchedtensor(lengths):
            raise NotImplementedError(f"{op.name}: vmap over sequence lengths has no batch rule; expected one for all")
        if backend not in ("auto", "torch"):
            raise NotImplementedError(
                f"{op.name}: the {backend} backend cannot run under torch.func or forward-mode AD; "
                'expected backend="auto" or "torch"'
            )
        if backend == "auto":
            registry.fall_back(op.name, "torch", "torch.func and forward-mode AD: their tensors have no memory to read")
        backend = "torch"
    op.autograd.check_values(inputs, lengths, called or op.name)
    choice = registry.choose(op, problem, backend)
    registry.note_backend(op.name, choice.backend)
    if choice.runner.differentiable:
        return choice.runner.forward(inputs, lengths, options)[0]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _Apply.apply(choice.runner, op, lengths, options, *inputs)
    outputs = choice.runner.forward(inputs, lengths, options, keep=False)[0]
    if remember is not None and choice.backend in registry.COMPILED:
        remember(choice, outputs)
    return outputs


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def traced(*tensors: Any) -> bool:
    """Whether somebody stands between us and memory: a compiler, a dispatch mode or a tensor subclass."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return not _PLAIN.issuperset(map(type, tensors))


def transformed() -> bool:
    """Under vmap, grad, jvp or a dual level, where tensors have no memory that a kernel could read.

    torch.compile traces under levels of its own, which are none of the caller's.
    """
    if torch.compiler.is_compiling():
        return False
    return _functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: Any, op: Op, lengths: Any, options: Any, *inputs: Any) -> tuple[Any, ...]:
        outputs, saved = runner.forward(inputs, lengths, options)
        ctx.save_for_backward(*inputs, *outputs, *saved, lengths)  # lengths too: a change in place is then noticed
        ctx.runner, ctx.op, ctx.options = runner, op, options
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        *tensors, lengths = ctx.saved_tensors
        inputs, outputs, saved = _split(ctx.op, tensors)
        needs = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():  # create_graph: differentiate the definition instead
            found = _differentiable_backward(ctx.op, inputs, lengths, ctx.options, grads, needs)
        else:
            found = ctx.runner.backward(inputs, outputs, saved, lengths, grads, needs, ctx.options)
        return (None, None, None, None, *found)


def _split(op: Op, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Inputs, outputs and all that forward kept, out of one run of tensors."""
    a = len(op.autograd.inputs)
    b = a + len(op.autograd.outputs)
    return tensors[:a], tensors[a:b], tensors[b:]


def _differentiable_backward(
    op: Op, inputs: Sequence[Any], lengths: Any, options: Any, grads: Sequence[Any], needs: Sequence[bool]
) -> list[Any]:
    outputs = op.autograd.reference.forward(inputs, lengths, options)[0]
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None]
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    found = iter(
        torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if need else None for need in needs]


# ---- the library ops that torch.compile sees

_SCHEMA_TYPES = {str: "str", bool: "bool", float: "float", int: "int"}


def _or_empty(x: Any, like: Any) -> Any:
    return like.new_empty(0) if x is None else x


def _or_none(x: Any) -> Any:
    return None if x is None or x.numel() == 0 else x


def register(op: Op) -> None:
    """Define linattn_tl::<op> and its backward for torch.compile, from the op's inputs, options and meta.

    A missing tensor travels as an empty one, since a library op returns tensors only.
    """
    tensors = [f"Tensor{'' if name in op.autograd.required else '?'} {name}" for name in op.autograd.inputs]
    plain = [f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in op.autograd.options.__annotations__.items()]
    results = ", ".join(["Tensor"] * (len(op.autograd.outputs) + len(op.autograd.saved)))
    _LIBRARY.define(f"{op.name}({', '.join([*tensors, 'Tensor? lengths', *plain, 'str backend'])}) -> ({results})")
    results_in = [f"Tensor {name}_" for name in (*op.autograd.outputs, *op.autograd.saved)]
    grads = [f"Tensor? grad_{name}" for name in op.autograd.outputs]
    returns = ", ".join(["Tensor"] * len(op.autograd.inputs))
    arguments = ", ".join([*tensors, *results_in, *grads, "Tensor? lengths", "bool[] needs", *plain, "str backend"])
    _LIBRARY.define(f"{op.name}_backward({arguments}) -> ({returns})")
    n_in, n_out = len(op.autograd.inputs), len(op.autograd.outputs)
    n_results = n_out + len(op.autograd.saved)

    def forward(*args: Any) -> tuple[Any, ...]:
        inputs, lengths, options, backend = args[:n_in], args[n_in], args[n_in + 1 : -1], args[-1]
        op.autograd.check_values(inputs, lengths, op.name)
        choice = registry.choose(op, op.autograd.problem(inputs), backend)
        registry.note_backend(op.name, choice.backend)
        opt, keep = op.autograd.options(*options), bool(op.autograd.saved)
        outputs, kept = choice.runner.forward(inputs, lengths, opt, keep)
        kept = kept[: len(op.autograd.saved)]
        return tuple(_or_empty(x, inputs[0]).contiguous() for x in (*outputs, *kept))

    def backward(*args: Any) -> tuple[Any, ...]:
        inputs, outputs, saved = _split(op, args[: n_in + n_results])
        grad_outputs, rest = args[n_in + n_results :][:n_out], args[n_in + n_results + n_out :]
        lengths, needs, options, backend = rest[0], rest[1], op.autograd.options(*rest[2:-1]), rest[-1]
        runner = registry.choose(op, op.autograd.problem(inputs), backend).runner
        results = ([_or_none(x) for x in xs] for xs in (outputs[1:], saved, grad_outputs))
        others, saved, grad_outputs = results
        found = runner.backward(inputs, [outputs[0], *others], saved, lengths, grad_outputs, needs, options)
        return tuple(_or_empty(x, inputs[0]).contiguous() for x in found)

    def fake_forward(*args: Any) -> tuple[Any, ...]:
        inputs, lengths, options = args[:n_in], args[n_in], op.autograd.options(*args[n_in + 1 : -1])
        return tuple(_or_empty(x, inputs[0]) for x in op.autograd.meta(inputs, lengths, options))

    def fake_backward(*args: Any) -> tuple[Any, ...]:
        needs = args[n_in + n_results + n_out + 1]
        found = zip(args[:n_in], needs, strict=True)
        return tuple(args[0].new_empty(x.shape if need else 0, dtype=x.dtype if need else None) for x, need in found)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.save_for_backward(*inputs[:n_in], *output, inputs[n_in])
        ctx.rest = inputs[n_in + 1 :]

    def autograd(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        *tensors, lengths = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:n_in])
        call = getattr(torch.ops.linattn_tl, f"{op.name}_backward")
        found = call(*tensors, *grads[:n_out], lengths, needs, *ctx.rest)
        wanted = [g if need else None for g, need in zip(found, needs, strict=True)]
        return (*wanted, None, *(None for _ in ctx.rest))

    for name, real, fake in ((op.name, forward, fake_forward), (f"{op.name}_backward", backward, fake_backward)):
        _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"linattn_tl::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(f"linattn_tl::{op.name}", autograd, setup_context=setup_context, lib=_LIBRARY)


def _library_call(op: Op, inputs: Sequence[Any], lengths: Any, options: Any, backend: str) -> tuple[Any, ...]:
    results = getattr(torch.ops.linattn_tl, op.name)(*inputs, lengths, *options, backend)
    wanted = op.autograd.wanted(options)
    return tuple(x if want else None for x, want in zip(results, wanted, strict=False))


def register_inplace(name: str, schema: str, call: Any) -> None:
    """Define linattn_tl::<name>, which only writes to its arguments: its fake half does nothing."""
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linattn_tl::{name}", lambda *args: None, lib=_LIBRARY)
