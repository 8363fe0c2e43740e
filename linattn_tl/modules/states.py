"""What generation carries from token to token: a state of each layer, and the cache of a stack of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

FORMAT = 1  # of saved caches
State = TypeVar("State", bound="LayerState")


@dataclass
class LayerState:
    """The tensors of one layer, a row of each a sequence."""

    kind: ClassVar[str]

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}

    def changed(self: State, change: Callable[[torch.Tensor], torch.Tensor]) -> State:
        """With another tensor for each, of the same sequences."""
        return replace(self, **{name: change(x) for name, x in self.tensors().items()})

    def selected(self: State, index: torch.Tensor) -> State:
        """Some of the sequences."""
        return self.changed(lambda x: x.index_select(0, index))

    def joined(self: State, other: State) -> State:
        """The sequences of both."""
        mine, theirs = self.tensors(), other.tensors()
        if mine.keys() != theirs.keys():
            raise ValueError(f"Cache: a layer has {', '.join(mine)}, the other {', '.join(theirs)}; expected the same")
        return replace(self, **{name: torch.cat([x, theirs[name]]) for name, x in mine.items()})

    @property
    def batch(self) -> int:
        return len(next(iter(self.tensors().values())))

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors().values())


@dataclass
class RecurrentState(LayerState):
    """Of a linear-attention layer: its size does not depend on how many tokens there were."""

    kv: torch.Tensor  # [N, HV, K, V] fp32
    z: torch.Tensor | None = None  # [N, H, K] fp32, with a normaliser
    conv: torch.Tensor | None = None  # [N, size - 1, channels], with a short convolution

    kind = "recurrent"


@dataclass
class KVState(LayerState):
    """Of softmax attention: keys and values of all tokens, with room for more."""

    k: torch.Tensor  # [N, kv_heads, room, D]
    v: torch.Tensor
    lengths: torch.Tensor  # [N] tokens that are there, int64
    shortest: int  # none of them is less, and
    longest: int  # none is more; known without a look at the tensor, which would wait for a GPU

    kind = "kv"

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> "KVState":
        known = lengths.tolist()
        return cls(k, v, lengths, min(known, default=0), max(known, default=0))

    @property
    def room(self) -> int:
        return self.k.shape[2]

    def with_room(self, room: int) -> "KVState":
        """Room for that many tokens or more."""
        more = room - self.room
        return self if more <= 0 else replace(self, k=F.pad(self.k, (0, 0, 0, more)), v=F.pad(self.v, (0, 0, 0, more)))

    def grow(self) -> None:
        """Twice the room, in place: each token is moved once on average."""
        grown = self.with_room(max(2 * self.room, 64))
        self.k, self.v = grown.k, grown.v

    def selected(self, index: torch.Tensor) -> "KVState":
        return KVState.of(*(x.index_select(0, index) for x in (self.k, self.v, self.lengths)))

    def joined(self, other: "KVState") -> "KVState":
        room = max(self.room, other.room)
        mine, theirs = self.with_room(room), other.with_room(room)
        k, v, lengths = (torch.cat([getattr(x, name) for x in (mine, theirs)]) for name in ("k", "v", "lengths"))
        return KVState.of(k, v, lengths)


@dataclass
class Cache:
    """All that a stack of layers needs to go on: one state a layer, of either kind, a row of each a sequence.

    cache.reorder([2, 2, 0])     # beam search: row i goes on from what row [i] was, in place
    cache.select([0, 3])         # sequences that are done leave the batch
    cache.joined(other)          # others come
    cache.reserve(1000)          # room for so many tokens more, where softmax layers need it
    cache.save(path), Cache.load(path)
    """

    layers: list[LayerState]
    lengths: torch.Tensor  # [N] tokens that each sequence has read, int64

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Of all tensors, room that is not used yet included."""
        return self.lengths.nbytes + sum(layer.nbytes for layer in self.layers)

    def reorder(self, rows: Sequence[int] | torch.Tensor) -> None:
        """Row i becomes a copy of row rows[i], in place; as many rows as before."""
        index = self._index("reorder", rows)
        if len(index) != self.batch:
            raise ValueError(f"Cache.reorder: rows has {len(index)} entries; expected one a sequence, {self.batch}")
        for layer in self.layers:
            for x in layer.tensors().values():
                x.copy_(x.index_select(0, index))
        self.lengths.copy_(self.lengths.index_select(0, index))

    def reserve(self, tokens: int) -> None:
        """Room for that many more tokens of each sequence, so that nothing is moved while they come."""
        self.layers = [
            layer.with_room(layer.longest + tokens) if isinstance(layer, KVState) else layer for layer in self.layers
        ]

    def select(self, rows: Sequence[int] | torch.Tensor) -> "Cache":
        """A cache of some of the sequences, in the order of rows; one may be there more than once."""
        index = self._index("select", rows)
        return Cache([layer.selected(index) for layer in self.layers], self.lengths.index_select(0, index))

    def joined(self, other: "Cache") -> "Cache":
        """A cache of the sequences of both, for one model."""
        if [layer.kind for layer in self.layers] != [layer.kind for layer in other.layers]:
            raise ValueError(
                f"Cache.joined: other has layers {_kinds(other)}; expected those of this one, {_kinds(self)}"
            )
        layers = [mine.joined(theirs) for mine, theirs in zip(self.layers, other.layers, strict=True)]
        return Cache(layers, torch.cat([self.lengths, other.lengths]))

    def clone(self) -> "Cache":
        """A copy that shares no memory: to try several continuations."""
        return Cache([layer.changed(torch.clone) for layer in self.layers], self.lengths.clone())

    def to(self, device: str | torch.device) -> "Cache":
        """On another device: a copy, or this cache if it is there. dtypes are the layers' and stay."""
        device = torch.device(device)
        if device == self.lengths.device:
            return self
        return Cache([layer.changed(lambda x: x.to(device)) for layer in self.layers], self.lengths.to(device))

    def save(self, path: str | Path) -> None:
        """As one file that `load` reads, and torch.load with weights_only=True."""
        layers = [(layer.kind, layer.tensors()) for layer in self.layers]
        torch.save({"format": FORMAT, "layers": layers, "lengths": self.lengths}, path)

    @classmethod
    def load(cls, path: str | Path, device: Any = None) -> "Cache":
        saved = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise ValueError(
                f"Cache.load: {path} is no cache of format {FORMAT}; expected a file that Cache.save wrote"
            )
        return cls([_restored(kind, tensors) for kind, tensors in saved["layers"]], saved["lengths"])

    def _index(self, method: str, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        index = torch.as_tensor(rows, device=self.lengths.device).reshape(-1)
        if len(index) and (index.is_floating_point() or index.dtype == torch.bool):
            raise TypeError(f"Cache.{method}: rows has dtype {index.dtype}; expected integers, a sequence each")
        index = index.long()
        wrong = (index < 0) | (index >= self.batch)
        if bool(wrong.any()):
            raise ValueError(
                f"Cache.{method}: rows has {int(index[wrong][0])}; expected 0 to {self.batch - 1}, a sequence each"
            )
        return index


def _kinds(cache: Cache) -> str:
    return ", ".join(layer.kind for layer in cache.layers) or "none"


def _restored(kind: str, tensors: dict[str, torch.Tensor]) -> LayerState:
    if kind == RecurrentState.kind:
        return RecurrentState(**tensors)
    return KVState.of(**tensors)


def check_shapes(owner: str, state: LayerState, expected: dict[str, tuple[int, ...] | None]) -> None:
    """Each tensor of a state against the shape that a layer expects; None: there is none."""
    for name, shape in expected.items():
        x = getattr(state, name)
        got = None if x is None else tuple(x.shape)
        if got != shape:
            raise ValueError(
                f"{owner}: state.{name} is {got or 'missing'}; expected {shape or 'none'} (the layer's sizes)"
            )


def check_no_gradient(layer: nn.Module, x: torch.Tensor) -> None:
    """Refuse a step that would be recorded, before anything is written: in place it has no gradient."""
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in layer.parameters())):
        raise ValueError(f"{type(layer).__name__}.step: x or a parameter requires a gradient; expected torch.no_grad()")


def check_kind(owner: str, state: Any, kind: type[LayerState]) -> None:
    if not isinstance(state, kind):
        raise TypeError(f"{owner}: state is {type(state).__name__}; expected {kind.__name__}, as init_state makes it")
