"""linattn-tl cache: bytes of a model's states over its length, against the softmax caches that they replace."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from linattn_tl.cli._text import table
from linattn_tl.sizes import SOFTMAX, Growth, LayerShape, ModelShape, SizeError

NAME = "cache"
HELP = "bytes of linear states against softmax caches, and the length from which they are smaller"
LENGTHS = "1024,4096,16384,65536,262144"
FLAGS = {"H": "--heads", "HV": "--value-heads", "K": "--key-dim", "V": "--value-dim"}  # others as they are called
SHOWN = {"linear": "linear", "hybrid": "hybrid", **{kind: kind.upper() for kind in SOFTMAX}}
COLORS = dict(zip(SHOWN, ("red", "orange", "gray", "blue", "green", "purple"), strict=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--heads", type=int, default=32, help="heads of q and k, H (default 32)")
    add("--value-heads", type=int, help="heads of v, HV, a multiple of H (default H)")
    add("--key-dim", type=int, default=128, help="head dim of q and k, K (default 128)")
    add("--value-dim", type=int, help="head dim of v, V (default K)")
    add("--no-normalizer", action="store_true", help="the state has no z, as in all but linear_attention")
    add("--conv-size", type=int, default=1, help="taps of a short convolution over q, k and v (default 1: none)")
    add("--kv-heads", type=int, help="heads of GQA, of K + V elements a token (default HV / 4)")
    add("--latent", type=int, help="latent of MLA, shared by all heads (default 4 K)")
    add("--rope", type=int, help="rotated key of MLA, shared by all heads (default K / 2)")
    add("--layers", type=int, default=32, help="layers of the model (default 32)")
    add("--pattern", default="LLLS", help="the hybrid's layers, repeated: S softmax, others linear (default LLLS)")
    add("--softmax", default="gqa", help="cache of the hybrid's S layers: mha, gqa, mqa or mla (default gqa)")
    add("--lengths", default=LENGTHS, help=f"tokens (default {LENGTHS})")
    add("--state-bytes", type=int, default=4, help="bytes of a state's element (default 4: fp32)")
    add("--kv-bytes", type=int, default=2, help="bytes of a cache's element (default 2: bf16)")
    add("--plot", type=Path, metavar="FILE.png", help="draw bytes over length; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    lengths, model = _lengths(args.lengths), _model(args)
    growths = _growths(model)
    if args.plot:
        _plot(model, growths, lengths, args.plot)
    if args.json:
        print(json.dumps(_as_json(model, growths, lengths, args.plot), indent=1))
    else:
        print(_text(model, growths, lengths) + (f"\nwrote {args.plot}" if args.plot else ""))
    return 0


def _lengths(text: str) -> list[int]:
    """The token counts of --lengths, in rising order, each once."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part)):
            raise ValueError(f"--lengths has {part!r}; expected tokens, at least 1, such as 1024,65536")
    return sorted({int(part) for part in parts})


def _model(args: argparse.Namespace) -> ModelShape:
    V = args.key_dim if args.value_dim is None else args.value_dim
    named = {name: getattr(args, name) for name in ("conv_size", "kv_heads", "latent", "rope")}
    sizes = {name: getattr(args, name) for name in ("layers", "pattern", "softmax", "state_bytes", "kv_bytes")}
    try:
        layer = LayerShape(
            H=args.heads, K=args.key_dim, V=V, HV=args.value_heads, normalizer=not args.no_normalizer, **named
        )
        return ModelShape(layer=layer, **sizes)
    except SizeError as error:
        raise error.renamed(FLAGS.get(error.name) or "--" + error.name.replace("_", "-")) from None


def _growths(model: ModelShape) -> dict[str, Growth]:
    """The model as it is, the hybrid, and with layers of one kind alone."""
    alone = {kind: replace(model, pattern="S", softmax=kind).growth() for kind in SOFTMAX}
    return {"linear": replace(model, pattern="L").growth(), "hybrid": model.growth(), **alone}


def _crossovers(growths: dict[str, Growth], kind: str) -> dict[str, int | None]:
    """From which length on a kind is at least as large as linear, and as the hybrid: not asked of these themselves."""
    rivals = {"linear": (), "hybrid": ("linear",)}.get(kind, ("linear", "hybrid"))
    return {rival: growths[kind].crossover(growths[rival]) for rival in rivals}


def _title(model: ModelShape) -> str:
    layer = model.layer
    extras = [" with z" if layer.normalizer else "", f", convolution of {layer.conv_size}" * (layer.conv_size > 1)]
    return (
        f"{model.layers} layers, H={layer.H} HV={layer.value_heads} K={layer.K} V={layer.V}{''.join(extras)}; "
        f"{model.state_bytes} bytes an element of a state, {model.kv_bytes} of a cache"
    )


def _layers(model: ModelShape) -> dict[str, str]:
    """What the layers of each kind of model are."""
    pattern = model.pattern if len(model.pattern) <= 16 else model.pattern[:13] + "..."
    latent, rope = model.layer.latents
    return {
        "linear": "states alone",
        "hybrid": f"{pattern}, S = {model.softmax.upper()}",
        "mha": "the same heads",
        "gqa": f"{model.layer.groups} KV heads" if model.layer.groups > 1 else "1 KV head",
        "mqa": "1 KV head",
        "mla": f"latent {latent}, rope {rope}",
    }


def _unit(smallest: int) -> tuple[str, int]:
    """One unit for a whole table: the largest in which no cell is below 1."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((unit for unit in units if smallest >= unit[1]), ("bytes", 1))


def _text(model: ModelShape, growths: dict[str, Growth], lengths: list[int]) -> str:
    unit, size = _unit(min(g.at(T) for g in growths.values() for T in lengths))
    layers = _layers(model)
    rows = []
    for kind, growth in growths.items():
        found = _crossovers(growths, kind)
        crossovers = [_whole(found.get(rival)) for rival in ("linear", "hybrid")]
        cells = [_whole(growth.at(T)) if size == 1 else f"{growth.at(T) / size:,.1f}" for T in lengths]
        rows.append((SHOWN[kind], layers[kind], *cells, *crossovers))
    head = ("model", "layers", *(f"T={T:,}" for T in lengths), ">= linear", ">= hybrid")
    return "\n".join(
        [
            f"{_title(model)}; {unit} a sequence",
            table(head, rows),
            "\n>=: the smallest T at which it is at least as large; - where there is none.",
        ]
    )


def _whole(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _as_json(model: ModelShape, growths: dict[str, Growth], lengths: list[int], plot: Path | None) -> dict[str, Any]:
    layer, (latent, rope) = model.layer, model.layer.latents
    used = {"HV": layer.value_heads, "kv_heads": layer.groups, "latent": latent, "rope": rope}
    kinds = {
        kind: {
            "fixed_bytes": growth.fixed,
            "bytes_per_token": growth.per_token,
            "bytes": [growth.at(T) for T in lengths],
            "crossover": _crossovers(growths, kind),
        }
        for kind, growth in growths.items()
    }
    shape = {**asdict(model), "layer": {**asdict(layer), **used}}
    return {"model": shape, "lengths": lengths, "kinds": kinds, "plot": plot and str(plot)}


def _plot(model: ModelShape, growths: dict[str, Growth], lengths: list[int], path: Path) -> None:
    """Bytes over length, both logarithmic, with a dot where a cache reaches the linear states."""
    if path.suffix != ".png":
        raise ValueError(f"--plot is {str(path)!r}; expected a name that ends in .png")
    pyplot = _pyplot()
    dots = [T for kind in growths for T in [_crossovers(growths, kind).get("linear")] if T]
    first, last = max(1, min(lengths + dots) // 2), 2 * max(lengths + dots)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    layers = _layers(model)
    points = [round(first * (last / first) ** (i / 100)) for i in range(101)]
    for kind, growth in growths.items():
        bytes_ = [growth.at(T) for T in points]
        width, label = 1 + (kind not in SOFTMAX), f"{SHOWN[kind]}: {layers[kind]}"
        axes.plot(points, bytes_, color=f"tab:{COLORS[kind]}", linewidth=width, label=label)
    axes.plot(dots, [growths["linear"].at(T) for T in dots], "o", color="black", markersize=4, zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("T (tokens)")
    axes.set_ylabel("bytes a sequence")
    axes.set_title(_title(model), fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise RuntimeError(f"--plot needs matplotlib ({error}): pip install 'linattn-tl[plot]'") from None
    return pyplot
