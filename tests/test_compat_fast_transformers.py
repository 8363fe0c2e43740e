"""linattn_tl.compat.fast_transformers: names, order and defaults as there, the sums as they are written, in float64."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.verify import check_close
from linattn_tl import last_backend
from linattn_tl.compat import fast_transformers as fast

pytestmark = pytest.mark.usefixtures("binaries")
N, L, S, H, E, M = 3, 29, 37, 2, 16, 24

MADE = "query_dimensions feature_map eps event_dispatcher"
WHOLE = "queries keys values attn_mask query_lengths key_lengths"
MODULES = {  # what forward of fast_transformers 0.4 takes
    "LinearAttention": WHOLE,
    "CausalLinearAttention": WHOLE,
    "RecurrentLinearAttention": "query key value state memory",
    "RecurrentCrossLinearAttention": "query keys values key_lengths state",
}
OTHERS = {
    "causal_dot_product": "Q K V",
    "FullMask": "mask N M device",
    "LengthMask": "lengths max_len device",
    "TriangularCausalMask": "N device",
    "elu_feature_map": "query_dims",
}


def test_signatures():
    assert {*MODULES, *OTHERS} == set(fast.__all__)
    for name, arguments in OTHERS.items():
        assert " ".join(inspect.signature(getattr(fast, name)).parameters) == arguments, name
    for name, arguments in MODULES.items():
        made = getattr(fast, name)
        assert " ".join(inspect.signature(made).parameters) == MADE, name
        assert " ".join(inspect.signature(made(E).forward).parameters) == arguments, name
        module = made(E)
        assert (module.eps, module.event_dispatcher, module.state_dict()) == (1e-6, "", {})


# ---- the definition


def phi(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def exact(q: Any, k: Any, v: Any, *, causal: bool, weights: Any = None, eps: float = 1e-6, maps: Any = (phi, phi)):
    """o, S and z, token by token; q, k [N, L, H, E] and v [N, L, H, M] in float64. A key counts as its weight says."""
    q, k = maps[0](q), maps[1](k)
    k = k if weights is None else k * weights.double()[:, :, None, None]
    sums, z, o = q.new_zeros(*k[:, 0].shape, v.shape[-1]), q.new_zeros(k[:, 0].shape), []

    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nhd,nhdm->nhm", x, sums) / ((x * z).sum(-1, keepdim=True) + eps)

    for t in range(k.shape[1]):
        sums, z = sums + torch.einsum("nhd,nhm->nhdm", k[:, t], v[:, t]), z + k[:, t]
        if causal and t < q.shape[1]:
            o.append(read(q[:, t]))
    o += [read(q[:, t]) for t in range(len(o), q.shape[1])]
    return torch.stack(o, 1), sums, z


def tokens(queries: int = L, keys: int = S, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    sizes = ((queries, E), (keys, E), (keys, M))
    return [torch.randn(N, n, H, width, generator=g).requires_grad_() for n, width in sizes]


def wide(given: Any) -> list[torch.Tensor]:
    return [x.detach().double().requires_grad_() for x in given]


def compare(found: torch.Tensor, right: torch.Tensor, given: Any, exactly: Any) -> None:
    """Outputs, and the gradients of both in what they came from."""
    check_close("o", found, right, dtype="float32")
    dout = torch.randn(right.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(found, given, dout)
    for name, x, y in zip("qkv", grads, torch.autograd.grad(right, exactly, dout.double()), strict=True):
        check_close(f"d{name}", x, y, dtype="float32")


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The feature maps that were left to kernels, call by call."""
    seen: list[str] = []

    def watched(op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, feature_map: str, **more: Any) -> Any:
            seen.append(feature_map)
            return op(*given, feature_map=feature_map, **more)

        return call

    for name in ("linear_attention", "linear_attention_decode"):
        monkeypatch.setattr(fast, name, watched(getattr(fast, name)))
    return seen


# ---- masks


LENGTHS = torch.tensor([S, 5, 1])


def masks_of_keys() -> dict[str, Any]:
    gaps = torch.rand(N, S, generator=torch.Generator().manual_seed(2)) < 0.5
    gaps[:, 0] = True
    return {
        "none": None,
        "ones": fast.FullMask(N, S),
        "lengths": fast.LengthMask(LENGTHS, S),
        "gaps": fast.FullMask(gaps),
        "theirs": SimpleNamespace(float_matrix=gaps.float(), all_ones=torch.tensor(False)),
        "bare": SimpleNamespace(float_matrix=0.5 * gaps.float()),
        "row": SimpleNamespace(float_matrix=gaps[:1].float()),
    }


def weights_of(mask: Any) -> Any:
    return None if mask is None else mask.float_matrix.expand(N, S)


def test_masks():
    full = fast.FullMask(3, 5)
    assert full.shape == (3, 5) and full.all_ones and not full.lower_triangular and full.float_matrix.sum() == 15
    assert fast.FullMask(4).shape == fast.FullMask(N=4).shape == (4, 4) and fast.FullMask(N=2, M=3).shape == (2, 3)
    assert full.lengths.tolist() == [5, 5, 5]
    lengths = fast.LengthMask(LENGTHS)
    assert lengths.shape == (3, S) and lengths.lengths.tolist() == LENGTHS.tolist() and not lengths.all_ones
    assert lengths.bool_matrix.sum(-1).tolist() == LENGTHS.tolist() and lengths.bool_matrix[1, :5].all()
    assert fast.LengthMask(LENGTHS, 50).shape == (3, 50) and fast.LengthMask(torch.tensor([4, 4])).all_ones
    causal = fast.TriangularCausalMask(4)
    assert causal.lower_triangular and not causal.all_ones and causal.float_matrix.equal(torch.ones(4, 4).tril())
    assert fast.FullMask(torch.ones(4, 4).tril().bool()).lower_triangular
    assert fast.FullMask(torch.ones(2, 3).bool()).all_ones and not fast.FullMask(torch.ones(4, 4).tril() > 0).all_ones
    assert not lengths.lower_triangular and not fast.FullMask(torch.ones(2, 2).bool()).lower_triangular
    gaps = fast.FullMask(torch.tensor([[True, False, True]]))
    with pytest.raises(ValueError, match="FullMask: lengths of a mask with gaps"):
        gaps.lengths  # noqa: B018


def test_masks_keep_a_copy():
    mask = torch.ones(2, 2, dtype=torch.bool)
    full = fast.FullMask(mask)
    mask[0, 0] = False
    assert full.bool_matrix.all()
    lengths = LENGTHS.clone()
    mask = fast.LengthMask(lengths)
    lengths.zero_()
    assert mask.bool_matrix.any()


# ---- whole sequences


@pytest.mark.parametrize("kind", masks_of_keys())
def test_every_query_sees_all_keys(kind: str, maps: list[str]):
    given, mask = tokens(), masks_of_keys()[kind]
    exactly = wide(given)
    o = fast.LinearAttention(E, eps=0.1)(*given, fast.FullMask(L, S), fast.LengthMask(torch.tensor([L, 2, 3])), mask)
    compare(o, exact(*exactly, causal=False, weights=weights_of(mask), eps=0.1)[0], given, exactly)
    assert maps == ["elu1" if kind in ("none", "ones") else "identity"]
    assert last_backend("linear_attention") == "binary"


@pytest.mark.parametrize("kind", masks_of_keys())
def test_causal(kind: str, maps: list[str]):
    given, mask = tokens(S), masks_of_keys()[kind]
    exactly = wide(given)
    o = fast.CausalLinearAttention(E, eps=0.1)(*given, fast.TriangularCausalMask(S), None, mask)
    compare(o, exact(*exactly, causal=True, weights=weights_of(mask), eps=0.1)[0], given, exactly)
    assert maps == ["elu1" if kind in ("none", "ones") else "identity"]


@pytest.mark.parametrize("kind", ["none", "gaps"])
@pytest.mark.parametrize("queries", [L, S + 8])
def test_causal_with_fewer_or_more_queries_than_keys(queries: int, kind: str):
    given, mask = tokens(queries), masks_of_keys()[kind]
    exactly = wide(given)
    o = fast.CausalLinearAttention(E)(*given, key_lengths=mask)
    compare(o, exact(*exactly, causal=True, weights=weights_of(mask))[0], given, exactly)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_and_memory(dtype: torch.dtype):
    """Layers there view what comes out as [N, L, H * M]."""
    q, k, v = (x.detach().to(dtype) for x in tokens(S))
    for module, causal in ((fast.LinearAttention(E), False), (fast.CausalLinearAttention(E), True)):
        for mask in (None, fast.LengthMask(LENGTHS, S)):
            right, *_ = exact(*wide((q, k, v)), causal=causal, weights=weights_of(mask))
            o = module(q, k, v, key_lengths=mask)
            assert o.view(N, S, H * M).dtype == dtype
            check_close("o", o, right, dtype="bfloat16" if dtype == torch.bfloat16 else "float32")


# ---- feature maps


class Lopsided(nn.Module):
    """Another one for queries than for keys, with E + 2 features, and a parameter; counts how often it is drawn."""

    def __init__(self, dims: int):
        super().__init__()
        self.dims, self.devices = dims, []
        self.scale = nn.Parameter(torch.tensor(1.5))

    def new_feature_map(self, device: Any) -> None:
        self.devices.append(device)

    def forward_queries(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x.square(), (0, 2), value=0.5) * self.scale

    def forward_keys(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(torch.relu(x), (1, 1), value=0.25) + self.scale


def lopsided() -> tuple[Any, Any]:
    def queries(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x * x, (0, 2), value=0.5) * 1.5

    def keys(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x.clamp(min=0), (1, 1), value=0.25) + 1.5

    return queries, keys


@pytest.mark.parametrize("causal", [False, True])
def test_feature_map_of_ones_own(causal: bool):
    given, mask = tokens(S), masks_of_keys()["gaps"]
    exactly = wide(given)
    module = (fast.CausalLinearAttention if causal else fast.LinearAttention)(E, Lopsided)
    assert module.feature_map.dims == E and list(module.state_dict()) == ["feature_map.scale"]
    for weights in (None, mask):
        right, *_ = exact(*exactly, causal=causal, weights=weights_of(weights), maps=lopsided())
        o = module(*given, key_lengths=weights)
        compare(o, right, given, exactly)
    assert module.feature_map.devices == [torch.device("cpu")] * 2
    module(*given).sum().backward()
    assert module.feature_map.scale.grad


def test_feature_map_of_a_derived_class_is_not_taken_for_ours(maps: list[str]):
    class Doubled(fast.EluFeatureMap):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x)

    given = tokens(S)
    o = fast.CausalLinearAttention(E, Doubled)(*given)
    check_close("o", o, exact(*wide(given), causal=True, maps=(lambda x: phi(2 * x),) * 2)[0])
    fast.CausalLinearAttention(E, fast.elu_feature_map)(*given)
    assert maps == ["identity", "elu1"]


# ---- a token at a time


def walk(module: Any, given: Any, state: Any = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    o = []
    for t in range(given[0].shape[1]):
        x, state = module(*(x[:, t] for x in given), state)
        o.append(x)
    return torch.stack(o, 1), state


@pytest.mark.parametrize("form", [None, Lopsided])
def test_recurrent_is_causal(form: Any):
    given, module = tokens(S), fast.RecurrentLinearAttention(E, form, eps=0.1)
    exactly = wide(given)
    right, sums, z = exact(*exactly, causal=True, eps=0.1, maps=lopsided() if form else (phi, phi))
    o, state = walk(module, given)
    compare(o, right, given, exactly)
    with torch.no_grad():
        o, stepped = walk(module, given)
    check_close("o", o, right)
    for found in (state, stepped):
        assert isinstance(found, list) and len(found) == 2
        check_close("S", found[0], sums)
        check_close("z", found[1], z)
    if form:
        assert module.feature_map.devices == [torch.device("cpu")] * 2


@pytest.mark.parametrize("form", [None, Lopsided])
def test_recurrent_in_place_only_without_gradients(form: Any):
    given, module = tokens(S), fast.RecurrentLinearAttention(E, form)
    with torch.no_grad():
        _, state = walk(module, [x[:, :3] for x in given])
        kept = [x.clone() for x in state]
    token = [x[:, 3] for x in given]
    o, after = module(*token, state)
    assert all(x.equal(y) for x, y in zip(state, kept, strict=True)) and after[0].requires_grad
    with torch.no_grad():
        module(*token, after)
    torch.autograd.grad(o.sum() + after[0].sum(), given)  # autograd would refuse, had a step written to its tensors
    with torch.no_grad():
        again, last = module(*token, state)
    check_close("o", again, o.double())
    assert last[0] is state[0] and last[1] is state[1] and not state[0].equal(kept[0])
    check_close("S", state[0], after[0].double())


def test_recurrent_under_vmap_and_compiled():
    """Without a derivative, but where a step in place cannot be; and where it can."""
    q, k, v = (x.detach()[:, 0] for x in tokens())
    module = fast.RecurrentLinearAttention(E)
    right, after = module(q, k, v, start := [torch.ones(N, H, E, M), torch.ones(N, H, E)])
    alone = torch.vmap(lambda *x: module(*(y[None] for y in x), [torch.ones(1, H, E, M), torch.ones(1, H, E)])[0][0])
    check_close("o", alone(q, k, v), right.double())
    state = [torch.ones(N, H, E, M), torch.ones(N, H, E)]
    o, last = torch.compile(module, fullgraph=True, backend="eager")(q, k, v, state)
    check_close("o", o, right.double())
    assert last[0] is state[0] and state[0].equal(start[0]) and after[0] is start[0]


def test_compiled_with_masks():
    given = [x.detach() for x in tokens(S)]
    module, masks = fast.CausalLinearAttention(E), (fast.TriangularCausalMask(S), None, fast.LengthMask(LENGTHS, S))
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    check_close("o", compiled(*given, *masks), module(*given, *masks).double())


def test_recurrent_gradient_of_a_state_alone():
    given = [x.detach()[:, 0] for x in tokens()]
    state = [torch.randn(N, H, E, M).requires_grad_(), torch.rand(N, H, E).requires_grad_()]
    o, after = fast.RecurrentLinearAttention(E)(*given, state)
    grads = torch.autograd.grad(o.sum() + after[0].sum() + after[1].sum(), state)
    assert all(x.isfinite().all() and (x != 1).any() for x in grads)


def test_recurrent_states_of_other_dtypes():
    given = [x.detach().bfloat16()[:, 0] for x in tokens()]
    module = fast.RecurrentLinearAttention(E)
    o, state = module(*given)
    assert o.dtype == torch.bfloat16 and state[0].dtype == state[1].dtype == torch.float32
    halves = [x.bfloat16() for x in state]
    kept = halves[0].clone()
    _, after = module(*given, halves)
    assert halves[0].equal(kept) and after[0].dtype == torch.float32
    _, state = module(*(x.double() for x in given))
    assert state[0].dtype == torch.float64


def test_memory_is_deprecated():
    given, module = [x.detach()[:, 0] for x in tokens()], fast.RecurrentLinearAttention(E)
    state, other = [torch.ones(N, H, E, M), torch.ones(N, H, E)], [torch.zeros(N, H, E, M), torch.zeros(N, H, E)]
    right, _ = module(*given, [x.clone() for x in state])
    with pytest.warns(DeprecationWarning, match="memory is deprecated") as said:
        found, _ = module(*given, memory=[x.clone() for x in state])
        first, _ = module(*given, state, other)
    assert found.equal(right) and first.equal(right)
    assert said[0].filename == __file__


@pytest.mark.parametrize("form", [None, Lopsided])
@pytest.mark.parametrize("kind", ["none", "lengths", "gaps"])
def test_recurrent_cross(kind: str, form: Any):
    given, mask = tokens(), masks_of_keys()[kind]
    exactly, module = wide(given), fast.RecurrentCrossLinearAttention(E, form, eps=0.1)
    right, sums, z = exact(
        *exactly, causal=False, weights=weights_of(mask), eps=0.1, maps=lopsided() if form else (phi, phi)
    )  # fmt: skip
    q, k, v = given
    x, state = module(q[:, 0], k, v, mask)
    o, first = [x], [x.clone() for x in state]
    for t in range(1, L):
        x, state = module(q[:, t], None, None, None, state=state)
        o.append(x)
    compare(torch.stack(o, 1), right, given, exactly)
    check_close("S", state[0], sums.mT)
    check_close("z", state[1], z)
    assert all(x.equal(y) for x, y in zip(state, first, strict=True))
    if form:
        assert module.feature_map.devices == [torch.device("cpu")]


# ---- the product


def test_causal_dot_product():
    given = [x.transpose(1, 2) for x in tokens(S)]
    exactly = wide(given)
    q, k, v = exactly
    right = torch.stack([torch.einsum("nhe,nhse,nhsm->nhm", q[:, :, t], k[:, :, : t + 1], v[:, :, : t + 1])
                         for t in range(S)], 2)  # fmt: skip
    o = fast.causal_dot_product(*given)
    assert o.shape == (N, H, S, M) and o.is_contiguous()
    compare(o, right, given, exactly)


# ---- what is refused


def module_of(name: str, *given: Any, **more: Any) -> Any:
    return getattr(fast, name)(*given, **more)


class Half:
    def __init__(self, dims: int):
        pass

    new_feature_map = forward_keys = lambda self, x: x

    def forward_queries(self, x: torch.Tensor) -> Any:
        return x[:, :1]


class Numbers(Half):
    def forward_queries(self, x: torch.Tensor) -> Any:
        return 1


def refused_when_made() -> dict[str, tuple[Any, str]]:
    return {
        "map for dims": ((torch.relu,), "query_dimensions is builtin_function_or_method; expected an int"),
        "name": ((E, "elu"), "feature_map is str; expected None or a callable that makes an object with new_feature"),
        "no factory": ((E, lambda x: x + 1), "feature_map made int, which has no new_feature_map; expected None or"),
        "eps": ((E, None, torch.tensor(1e-6)), "eps is Tensor; expected a number"),
    }


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("case", refused_when_made())
def test_refused_when_made(name: str, case: str):
    given, said = refused_when_made()[case]
    with pytest.raises(TypeError, match=f"{name}: {said}"):
        module_of(name, *given)
    with pytest.raises(TypeError, match="unexpected keyword"):
        module_of(name, E, softmax_temp=1.0)


Refused = dict[str, tuple[Callable[[Any, Any, Any], Any], type[Exception], str]]


def refused() -> Refused:
    linear, causal = fast.LinearAttention(E), fast.CausalLinearAttention(E)
    step, cross = fast.RecurrentLinearAttention(E), fast.RecurrentCrossLinearAttention(E)
    tril, ones = fast.TriangularCausalMask(L), fast.FullMask(L)
    state = lambda n=N, *more: [torch.zeros(n, H, *more or (E, M)), torch.zeros(n, H, E)]  # noqa: E731
    away, off = [x.to("meta") for x in state()], SimpleNamespace(float_matrix=torch.ones(N, S, device="meta"))
    short = fast.LengthMask(LENGTHS, S - 1)
    return {
        "mask": (lambda q, k, v: linear(q, k, v, tril), RuntimeError, "LinearAttention: attn_mask has all_ones = F"),
        "causal": (lambda q, k, v: causal(q, k, v, ones), RuntimeError, "CausalL.*attn_mask has lower_triangular = F"),
        "no mask": (lambda q, k, v: linear(q, k, v, q), TypeError, "attn_mask is Tensor; expected None or a mask with"),
        "bool": (lambda q, k, v: linear(q, k, v, key_lengths=LENGTHS), TypeError, "key_lengths is Tensor; expected No"),
        "short": (lambda q, k, v: causal(q, k, v, key_lengths=short), ValueError, r"has shape \(3, 36\); expected \[N"),
        "heads": (lambda q, k, v: linear(q, k, v.repeat(1, 1, 2, 1)), ValueError, "LinearAttention: values has shape"),
        "sizes": (lambda q, k, v: causal(q, k[..., 1:], v), ValueError, "CausalLinearAttention: keys has shape"),
        "type": (lambda q, k, v: linear(q, k, 1), TypeError, "LinearAttention: values is int; expected a tensor"),
        "word": (lambda q, k, v: linear(q, k, v, mask=None), TypeError, "unexpected keyword"),
        "batch": (lambda q, k, v: step(q[:, 0], k[:, 0], v[:, 0], state(2)), ValueError, r"state\[0\] has shape \(2, "),
        "pair": (lambda q, k, v: step(q[:, 0], k[:, 0], v[:, 0], q), TypeError, "state is Tensor; expected None or"),
        "part": (lambda q, k, v: step(q[:, 0], k[:, 0], v[:, 0], [q, None]), TypeError, r"state\[1\] is NoneType"),
        "axes": (step, ValueError, "RecurrentLinearAttention: query has shape"),
        "no keys": (lambda q, k, v: cross(q[:, 0], None, None), TypeError, "RecurrentC.*keys is NoneType; exp"),
        "turned": (lambda q, k, v: cross(q[:, 0], k, v, state=state()), ValueError, r"state\[0\] has.*\[N, H, M, D\]"),
        "crowd": (lambda q, k, v: cross(q[:, 0], k, v, None, state(4, M, E)), ValueError, r"state\[0\] has shape \(4"),
        "wide": (lambda q, k, v: cross(q[:, 0], k, v[:, 1:]), ValueError, "RecurrentC.*: values has shape"),
        "query": (lambda q, k, v: cross(1, k, v), TypeError, "RecurrentCross.*: query is int; expected a tensor"),
        "four": (lambda q, k, v: cross(q, k, v, state=state()), ValueError, r"RecurrentC.*\(query\) has shape"),
        "away": (lambda q, k, v: step(q[:, 0], k[:, 0], v[:, 0], away), ValueError, r"state\[0\] is on meta"),
        "off": (lambda q, k, v: linear(q, k, v, key_lengths=off), ValueError, "LinearA.*key_lengths is on meta; exp"),
        "features": (fast.LinearAttention(E, Half), ValueError, r"feature_map made \(3, 1, 2,"),
        "numbers": (fast.LinearAttention(E, Numbers), TypeError, "feature_map made int of que"),
        "product": (fast.causal_dot_product, ValueError, "causal_dot_product: K has shape"),
        "empty": (lambda q, k, v: fast.FullMask(), ValueError, "FullMask: mask is None and N is None; expected a bool"),
        "float": (lambda q, k, v: fast.FullMask(torch.ones(2, 2)), ValueError, "FullMask: mask has dtype torch.float"),
    }  # fmt: skip


@pytest.mark.parametrize("case", refused())
def test_refused(case: str):
    call, error, said = refused()[case]
    with pytest.raises(error, match=said):
        call(*tokens())
