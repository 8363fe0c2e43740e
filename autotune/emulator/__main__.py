"""python -m autotune.emulator FILE.py::factory --arch sm_90a: one's own kernel, run on the CPU, with the report.

    python -m autotune.emulator kernel.py::forward --arch sm_80 --arch sm_90a --arg D=64 dtype=float16 --size S=200

With --mutate the kernel is broken in every way that its synchronisation can be broken, one at a time, and what the
checks catch is counted. Inputs are random; what the kernel writes starts as NaN, or as zeros where it is updated
atomically. Exit status: 0 when every run is clean (every mutant caught or covered), 1 when one is not, 2 when nothing
could be run.
"""

import argparse
import importlib.util
import inspect
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autotune.emulator.arguments import evaluate, torch_dtype
from autotune.emulator.errors import EmulatorError
from autotune.emulator.lowering import SHARED_LIMIT, Lowered, Parameter, check_arch, lower
from autotune.emulator.mutation import Score, mutate
from autotune.emulator.report import Report
from autotune.emulator.runner import Emulated

ORDER_OF = {"late": "ascending", "early": "greedy", "random": "shuffled"}


class UsageError(Exception):
    """The command cannot be carried out as given; one line."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m autotune.emulator",
        description="Run a TileLang kernel's CUDA code on the CPU, and report.",
    )
    add = parser.add_argument
    many: dict[str, Any] = {"action": "extend", "nargs": "+", "default": [], "metavar": "NAME=VALUE"}
    add("target", metavar="FILE.py::factory", help="a function that returns a prim_func, or a prim_func; give it first")
    add("--arch", action="append", required=True, help=f"{', '.join(SHARED_LIMIT)}; may be repeated")
    add("--arg", **many, help="keyword arguments of the factory")
    add("--size", **many, help="dynamic sizes and scalar arguments of the kernel; L=200,37 runs both")
    add("--pass", **many, dest="passes", help="pass configs of TileLang: tl.disable_tma_lower=true")
    add("--schedule", choices=[*ORDER_OF, "all"], default="late", help="when copies land and which thread runs next")
    add("--seed", type=int, default=0, help="of the inputs and of --schedule random")
    add("--check", metavar="NAME", help="a function of FILE: named arrays in, {name: expected array} out")
    add("--tolerance", type=float, default=2e-2, help="relative RMS error that --check allows (default: 0.02)")
    add("--mutate", action="store_true", help="break its synchronisation in every way and count what is caught")
    add("--json", action="store_true", help="reports as JSON on stdout")
    add("--source", action="store_true", help="print the generated source, with line numbers, first")
    add("--cache", type=Path, help="folder for built kernels")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except (UsageError, EmulatorError) as error:
        print(f"autotune.emulator: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """All architectures, one after the other. Returns the exit status."""
    for arch in args.arch:
        try:
            check_arch(arch)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if args.mutate and (args.check or args.schedule != "late"):
        raise UsageError("--mutate runs every schedule and compares with the kernel itself: no --schedule, no --check")
    file, _, name = args.target.partition("::")
    if not name:
        raise UsageError(f"got {args.target}; expected FILE.py::factory")
    module = load(Path(file))
    expected_of = attribute(module, file, args.check) if args.check else None
    func = make(attribute(module, file, name), args.target, pairs("--arg", args.arg))
    shown, good = [], True
    for arch in args.arch:
        lowered, all_sizes, kernel = prepare_kernel(func, arch, args)
        if args.mutate:
            score = score_kernel(lowered, all_sizes, args)
            good = good and not score.uncovered
            shown.append(score.to_dict())
            if not args.json:
                print(score)
            continue
        for sizes in all_sizes:
            report, errors = run_kernel(lowered, sizes, kernel, args, expected_of)
            good = good and report.clean and all(e <= args.tolerance for e in errors.values())
            shown.append({**report.to_dict(), **({"errors": errors} if args.check else {})})
            if not args.json:
                print(report)
                print_errors(errors, args.tolerance)
    if args.json:
        print(json.dumps(shown, indent=1))
    return 0 if good else 1


def print_errors(errors: Mapping[str, float], tolerance: float) -> None:
    for output, error in errors.items():
        verdict = "ok" if error <= tolerance else "WRONG"
        print(f"  {output}: relative RMS error {error:.2e}, {verdict} (at most {tolerance:g})")


# ---- from the command line to a prim_func


def pairs(option: str, words: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE words; values as Python would read them, where it can: 64, 1e-3, true; else text."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise UsageError(f"{option} {word}: expected NAME=VALUE")
        if name in values:
            raise UsageError(f"{option} {word}: {name} is given twice")
        values[name] = parse_value(text)
    return values


def each_size(words: Sequence[str]) -> list[dict[str, Any]]:
    """NAME=VALUE,VALUE words: every combination."""
    values = {name: str(text).split(",") for name, text in pairs("--size", words).items()}
    return [dict(zip(values, map(parse_value, chosen), strict=True)) for chosen in itertools.product(*values.values())]


def parse_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def load(file: Path) -> ModuleType:
    """Import a file by its path, with its folder on sys.path as a script has it."""
    if not file.is_file():
        raise UsageError(f"no file {file}")
    name = f"emulated_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[name] = module  # TileLang and dataclasses look their definitions up there
    _call(f"{file} cannot be imported", spec.loader.exec_module, module)
    return module


def attribute(module: ModuleType, file: str, name: str) -> Any:
    if not hasattr(module, name):
        defined = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UsageError(f"{file} has no {name}; it defines {', '.join(defined) or 'no functions'}")
    return getattr(module, name)


def make(factory: Any, target: str, arguments: dict[str, Any]) -> Any:
    """The prim_func that a factory makes. Of a function under tilelang.jit, its program before it is compiled."""
    from tilelang import tvm

    if isinstance(factory, tvm.tirx.PrimFunc):
        return factory
    if hasattr(factory, "get_tir"):
        factory = factory.get_tir
    if not callable(factory):
        raise UsageError(f"{target} is {type(factory).__name__}; expected a function that returns a prim_func")
    func = _call(f"{target} failed", factory, **arguments)
    if not isinstance(func, tvm.tirx.PrimFunc):
        raise UsageError(f"{target} returned {type(func).__name__}; expected a prim_func")
    return func


def _call(failed: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the user's code. What it raises is shown with its traceback: the fault is likely to be there."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        traceback.print_exc()
        raise UsageError(f"{failed}: {type(error).__name__}: {error}") from None


# ---- running


def prepare_kernel(func: Any, arch: str, args: argparse.Namespace) -> tuple[Lowered, list[dict[str, Any]], Emulated]:
    """Lower and build, with a line of progress; in between, what the command lacks is known."""
    try:
        _progress(f"{arch}: lowering ...")
        lowered = lower(func, arch, pairs("--pass", args.passes))
        sizes = [complete_sizes(lowered, given) for given in each_size(args.size)]
        _progress(f" {lowered.seconds:.1f} s, building ...")
        if args.source and not args.json:
            _progress("\n")
            print(numbered(lowered.source), flush=True)
        kernel = Emulated(lowered, cache=args.cache)
        _progress(f" {kernel.build_seconds:.1f} s")
    finally:
        _progress("\n")
    return lowered, sizes, kernel


def _progress(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def numbered(source: str) -> str:
    return "\n".join(f"{number:5} {line}" for number, line in enumerate(source.splitlines(), 1))


def run_kernel(
    lowered: Lowered,
    sizes: Mapping[str, Any],
    kernel: Emulated,
    args: argparse.Namespace,
    expected_of: Callable[..., Any] | None,
) -> tuple[Report, dict[str, float]]:
    """The report, and the error of each output that --check has an expectation for."""
    arrays = make_arrays(lowered, sizes, args.seed)
    before = {name: value.clone() for name, value in arrays.items()}
    given = positional(lowered, arrays, sizes)
    try:
        if args.schedule == "all":
            report = kernel.check(*given)
        else:
            how = {"async_mode": args.schedule, "order": ORDER_OF[args.schedule], "seed": args.seed}
            report = kernel(*given, **how)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    if expected_of is None:
        return report, {}
    expected = _call(f"--check {args.check} failed", expected_of, **_accepted(expected_of, {**sizes, **before}))
    return report, errors_of(arrays, expected, args.check)


def score_kernel(lowered: Lowered, sizes: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> Score:
    """What the checks catch of the kernel's mutants, with a line of progress."""
    try:
        return mutate(
            lowered,
            *(partial(fresh_arguments, lowered, one, args.seed) for one in sizes),
            cache=args.cache,
            progress=lambda done, total: _progress(f"\r{lowered.arch}: {done} of {total} mutants"),
        )
    finally:
        _progress("\n")


def fresh_arguments(lowered: Lowered, sizes: Mapping[str, Any], seed: int) -> list[Any]:
    return positional(lowered, make_arrays(lowered, sizes, seed), sizes)


def positional(lowered: Lowered, arrays: Mapping[str, torch.Tensor], sizes: Mapping[str, Any]) -> list[Any]:
    return [arrays[p.name] if p.kind == "tensor" else sizes[p.name] for p in lowered.parameters]


def complete_sizes(lowered: Lowered, given: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and scalars by name: exactly those that the kernel has."""
    scalars = [p.name for p in lowered.parameters if p.kind == "scalar"]
    needed = list(dict.fromkeys([*(s.name for s in lowered.symbols), *scalars]))
    missing = [n for n in needed if n not in given]
    unknown = [n for n in given if n not in needed]
    if unknown:
        raise UsageError(f"--size {unknown[0]}: {lowered.name} has {', '.join(needed) or 'no dynamic sizes'}")
    if missing:
        raise UsageError(f"{lowered.name} needs --size {' '.join(f'{n}=...' for n in missing)}")
    for symbol in lowered.symbols:
        if not isinstance(given[symbol.name], int) or given[symbol.name] < 0:
            raise UsageError(f"--size {symbol.name}={given[symbol.name]}: expected a whole number, 0 or more")
    return dict(given)


def make_arrays(lowered: Lowered, sizes: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """A tensor for each tensor argument: inputs random, outputs filled with what no kernel should leave."""
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for parameter in lowered.parameters:
        if parameter.kind != "tensor":
            continue
        shape = [evaluate(d, sizes) for d in parameter.shape]
        known = [s for s in shape if s is not None]
        if len(known) < len(shape):
            raise UsageError(f"{lowered.name}: the shape {parameter.shape} of {parameter.name} cannot be worked out")
        arrays[parameter.name] = _filled(parameter, known, generator)
    return arrays


def _filled(parameter: Parameter, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    dtype = torch_dtype(parameter.dtype)
    if parameter.atomic:
        return torch.zeros(shape, dtype=dtype)
    if parameter.written:
        if dtype.is_floating_point:
            return torch.full(shape, float("nan")).to(dtype)
        return torch.full(shape, 1, dtype=dtype) if dtype == torch.bool else _largest(shape, dtype)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 0.5).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    lowest = -4 if dtype.is_signed else 0
    return torch.randint(lowest, 5, shape, generator=generator).to(dtype)


def _largest(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    signed = getattr(torch, str(dtype).removeprefix("torch.u"), dtype)  # torch fills no uint16, uint32 or uint64
    value = torch.iinfo(dtype).max if signed == dtype else -1
    return torch.full(shape, value, dtype=signed).view(dtype)


def _accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(values)
    return {p.name: values[p.name] for p in parameters if p.name in values}


def errors_of(arrays: Mapping[str, torch.Tensor], expected: Any, check: str) -> dict[str, float]:
    """Relative RMS error of each array against what is expected of it; NaN in the wrong place is infinitely wrong."""
    if not isinstance(expected, Mapping):
        raise UsageError(f"--check {check} returned {type(expected).__name__}; expected a dict of arrays by name")
    errors = {}
    for name, value in expected.items():
        if name not in arrays:
            raise UsageError(f"--check {check} returned {name}; the kernel has {', '.join(arrays)}")
        want, got = torch.as_tensor(value).double(), arrays[name].double()
        if want.shape != got.shape:
            raise UsageError(f"--check {check}: {name} has shape {tuple(want.shape)}; the kernel's {tuple(got.shape)}")
        error = float((got - want).norm() / want.norm().clamp_min(1e-30))
        errors[name] = error if error == error else float("inf")
    return errors


if __name__ == "__main__":
    sys.exit(main())
