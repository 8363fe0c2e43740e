"""Calls that are made again from C give what the whole way gives, and anything else takes the whole way."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.launcher import repeat
from linattn_tl import LinearState, last_backend, linear_attention, linear_attention_decode, registry, repeats
from linattn_tl.ops import linear_attention as family

B, H, HV, K, V, T = 2, 2, 4, 16, 24, 40
Whole = list[str]
pytestmark = pytest.mark.usefixtures("binaries", "fresh_choices")


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Whole:
    """Names of the functions that have gone the whole way since it was cleared."""
    seen: Whole = []

    def noting(name: str) -> Callable[..., Any]:
        real = getattr(family, name)
        return lambda *args: (seen.append(name), real(*args))[1]

    for name in ("_pass", "_step"):
        monkeypatch.setattr(family, name, noting(name))
    return seen


def step_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    q, k, v = (torch.randn(B, heads, d).to(dtype) for heads, d in ((H, K), (H, K), (HV, V)))
    return {"q": q, "k": k, "v": v, "state": (torch.rand(B, HV, K, V), torch.rand(B, H, K)), "out": torch.empty_like(v)}


def copied(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(y.clone() for y in x) if isinstance(x, tuple) else x.clone() if torch.is_tensor(x) else x
        for name, x in tensors.items()
    }


def decode(tensors: dict[str, Any], **options: Any) -> torch.Tensor:
    return linear_attention_decode(**{**tensors, **options})


def known_step(whole: Whole, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """Tensors of a step that is made again from now on."""
    tensors = step_tensors(dtype)
    for _ in range(repeats.KEEP_AT):
        decode(tensors, **options)
    assert whole == ["_step"] * repeats.KEEP_AT
    whole.clear()
    return tensors


def assert_same_step(tensors: dict[str, Any], **options: Any) -> None:
    """Of new values, what a call with all checks makes of them."""
    again, checked = copied({**tensors, **options}), copied({**tensors, **options})
    got = linear_attention_decode(**again)
    repeats.forget()
    want = linear_attention_decode(**checked)
    assert torch.equal(got, want)
    for x, y in zip(again["state"], checked["state"], strict=True):
        assert torch.equal(x, y)


# ---- what is made again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [True, False])
def test_a_step_is_made_again(whole: Whole, dtype: torch.dtype, given: bool):
    known_step(whole, dtype)
    tensors = step_tensors(dtype)
    if not given:
        del tensors["out"]
    assert_same_step(tensors)
    assert whole == ["_step"]  # the checked one


def test_a_step_of_several_tokens(whole: Whole):
    tensors = {name: x for name, x in step_tensors().items() if name == "state"}
    q, k, v = (torch.randn(B, 3, heads, d) for heads, d in ((H, K), (H, K), (HV, V)))
    tensors |= {"q": q, "k": k, "v": v}
    decode(tensors), decode(tensors)
    whole.clear()
    assert_same_step(tensors)
    assert whole == ["_step"]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_a_pass_is_made_again(whole: Whole, state: bool, final: bool):
    def tensors() -> dict[str, Any]:
        q, k, v = (torch.randn(B, T, heads, d) for heads, d in ((H, K), (H, K), (HV, V)))
        return {"q": q, "k": k, "v": v, "initial_state": step_tensors()["state"] if state else None}

    first, second = tensors(), tensors()
    for _ in range(repeats.KEEP_AT):
        linear_attention(**first, output_final_state=final)
    whole.clear()
    got, got_state = linear_attention(**second, output_final_state=final)
    assert not whole
    repeats.forget()
    want, want_state = linear_attention(**second, output_final_state=final)
    assert torch.equal(got, want) and got.data_ptr() != want.data_ptr()
    assert (got_state is None) == (want_state is None) == (not final)
    if got_state is not None and want_state is not None:
        assert isinstance(got_state, LinearState)
        assert torch.equal(got_state.kv, want_state.kv) and torch.equal(got_state.z, want_state.z)


def test_several_layouts_and_options_are_kept_side_by_side(whole: Whole):
    pools = torch.rand(B, 3, HV, K, V), torch.rand(B, 3, H, K)  # a layer's state is a view
    plain = known_step(whole)
    strided = {**plain, "state": (pools[0][:, 1], pools[1][:, 1])}
    others: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (strided, {}),
        (plain, {"scale": None}),
        (plain, {"eps": 0.1}),
    ]
    for tensors, options in others:
        for _ in range(repeats.KEEP_AT):
            decode(tensors, **options)
    whole.clear()
    untouched = pools[0][:, 0].clone()
    for tensors, options in (*others, (plain, {})):
        decode(tensors, **options)
    assert not whole
    assert torch.equal(pools[0][:, 0], untouched)
    again, checked = copied(strided), copied(strided)
    again["state"] = tuple(x.clone()[:, 1] for x in pools)
    got = decode(again)
    assert not whole
    repeats.forget()
    assert torch.equal(got, decode(checked)) and torch.equal(again["state"][0], checked["state"][0])


def test_it_is_the_backend_of_the_call_before(whole: Whole):
    tensors = known_step(whole)
    served = last_backend("linear_attention_decode")
    assert served in registry.COMPILED
    decode(tensors, backend="torch")
    assert last_backend("linear_attention_decode") == "torch"
    whole.clear()
    decode(tensors)
    assert not whole and last_backend("linear_attention_decode") == served


def test_versions_go_up(whole: Whole):
    tensors = known_step(whole)
    written = (*tensors["state"], tensors["out"])
    before = [x._version for x in written]
    decode(tensors)
    assert not whole
    assert [x._version for x in written] == [n + 1 for n in before]
    assert tensors["q"]._version == 0


def test_a_saved_state_that_a_step_changes_is_noticed(whole: Whole):
    tensors = known_step(whole)
    kv = tensors["state"][0]
    weight = torch.ones(V, requires_grad=True)
    y = kv @ weight
    decode(tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_inference_mode(whole: Whole):
    known_step(whole)
    with torch.inference_mode():
        tensors = step_tensors()
        decode(tensors)
        assert not whole
        assert_same_step(tensors)


def test_in_threads(whole: Whole):
    """Each its own state, all through one kept call; the interpreter is let go of meanwhile."""
    known_step(whole)
    mine = [step_tensors() for _ in range(4)]
    theirs = [copied(x) for x in mine]

    def work(tensors: dict[str, Any]) -> None:
        for _ in range(200):
            decode(tensors)

    threads = [threading.Thread(target=work, args=(x,)) for x in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not whole
    for x, y in zip(mine, theirs, strict=True):
        for _ in range(200):
            decode(parameter(y))
        assert torch.equal(x["state"][0], y["state"][0])
    assert len(whole) == 800


def test_nothing_is_held_on_to(whole: Whole):
    tensors = known_step(whole)
    everything = (*tensors["state"], tensors["q"], tensors["out"], True, False, None, "auto", torch.Tensor)
    decode(tensors)
    before = [sys.getrefcount(x) for x in everything]
    for _ in range(1000):
        assert decode(tensors) is tensors["out"]
    # None has other users, too
    assert all(abs(sys.getrefcount(x) - n) < 100 for x, n in zip(everything, before, strict=True))
    made = weakref.ref(decode({**tensors, "out": None}))
    assert made() is None  # it was the caller's alone, who has let go of it
    assert not whole
    state = tensors.pop("state")[0]
    count = sys.getrefcount(state)
    repeats.forget()
    gc.collect()
    assert sys.getrefcount(state) == count  # it was not the kept call's to begin with


# ---- what takes the whole way


def other_dtype(t: dict[str, Any]) -> dict[str, Any]:
    return {**t, **{name: t[name].bfloat16() for name in ("q", "k", "v", "out")}}


def mixed_dtypes(t: dict[str, Any]) -> dict[str, Any]:
    return {**t, "k": t["k"].bfloat16()}


def other_sizes(t: dict[str, Any]) -> dict[str, Any]:
    kv, z = t["state"]
    return {**{name: t[name][:1] for name in ("q", "k", "v", "out")}, "state": (kv[:1], z[:1])}


def other_value_heads(t: dict[str, Any]) -> dict[str, Any]:
    kv, z = t["state"]
    return {**t, "v": t["v"][:, :2], "out": t["out"][:, :2].clone(), "state": (kv[:, :2].clone(), z)}


def other_strides(t: dict[str, Any]) -> dict[str, Any]:
    return {**t, "k": t["k"].transpose(1, 2).contiguous().transpose(1, 2)}


def negated(t: dict[str, Any]) -> dict[str, Any]:
    return {**t, "k": torch._neg_view(t["k"])}


def slots(t: dict[str, Any]) -> dict[str, Any]:
    return {**t, "slots": torch.tensor([1, 0])}


def over_q(t: dict[str, Any]) -> dict[str, Any]:
    """out begins where q does."""
    memory = torch.cat([t["q"].flatten(), torch.zeros(B * HV * V)])
    return {**t, "q": memory[: B * H * K].view(B, H, K), "out": memory[: B * HV * V].view(B, HV, V)}


def parameter(t: dict[str, Any]) -> dict[str, Any]:
    return {**t, "q": torch.nn.Parameter(t["q"], requires_grad=False)}


@pytest.mark.parametrize(
    "change",
    [other_dtype, mixed_dtypes, other_sizes, other_value_heads, other_strides, negated, slots, over_q, parameter],
)
def test_other_tensors_take_the_whole_way(whole: Whole, change: Callable[[dict[str, Any]], dict[str, Any]]):
    tensors = change(known_step(whole))
    want = copied(tensors)
    got = decode(tensors)
    assert whole == ["_step"]
    expected = decode({**want, "out": None}, backend="torch")
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("option", [{"normalize": 1}, {"scale": 1}, {"eps": 1e-5}, {"feature_map": "relu"}])
def test_other_options_take_the_whole_way(whole: Whole, option: dict[str, Any]):
    decode(known_step(whole), **option)
    assert whole == ["_step"]


def test_another_number_of_threads_takes_the_whole_way(whole: Whole):
    tensors = known_step(whole)
    torch.set_num_threads(torch.get_num_threads() + 1)
    decode(tensors)
    assert whole == ["_step"]


class Notes(TorchDispatchMode):
    """A mode that lets everything pass and remembers what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_call(whole: Whole):
    tensors = known_step(whole)
    with Notes() as mode:
        decode(tensors)
    assert any("linear_attention_decode" in name for name in mode.seen)


def test_autocast_casts(whole: Whole):
    tensors = known_step(whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decode({**tensors, "out": None})
    assert whole == ["_step"]


def test_gradients_are_refused(whole: Whole):
    tensors = known_step(whole)
    tensors["v"].requires_grad_()
    with pytest.raises(ValueError, match="v requires a gradient"):
        decode(tensors)
    whole.clear()
    with torch.no_grad():
        decode(tensors)
    assert not whole


def test_a_pass_with_gradients_has_them(whole: Whole):
    q, k, v = (torch.randn(B, T, H, K) for _ in "qkv")
    for _ in range(repeats.KEEP_AT):
        linear_attention(q, k, v)
    q.requires_grad_()
    linear_attention(q, k, v)[0].sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0


@pytest.mark.parametrize("level", ["vmap", "dual"])
def test_torch_func_is_refused(whole: Whole, level: str):
    tensors = known_step(whole)
    kv = tensors["state"][0].clone()
    with pytest.raises(NotImplementedError, match="no derivative and no batch rule"):
        if level == "vmap":
            torch.func.vmap(lambda x: decode(tensors) + x)(torch.zeros(3, 1))
        else:
            with torch.autograd.forward_ad.dual_level():
                decode(tensors)
    assert torch.equal(kv, tensors["state"][0])


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: {**t, "state": list(t["state"])}, TypeError, "state is list"),
        (lambda t: {**t, "state": (*t["state"], t["q"])}, TypeError, "state is tuple"),
        (lambda t: {**t, "state": None}, TypeError, "state is NoneType"),
        (lambda t: {**t, "state": (t["state"][0], None)}, TypeError, r"state\.z is NoneType"),
        (lambda t: {**t, "q": None}, TypeError, "q is NoneType"),
        (lambda t: {**t, "q": t["q"].numpy()}, TypeError, "q is ndarray"),
        (lambda t: {**t, "k": 3}, TypeError, "k is int"),
        (lambda t: {**t, "v": t["v"].to("meta")}, ValueError, "v is on meta"),
        (lambda t: {**t, "q": t["q"].to_sparse()}, ValueError, "q has layout"),
        (lambda t: {**t, "out": t["state"][0][..., 0, :]}, ValueError, r"out shares memory with state\.kv"),
        (lambda t: {**t, "feature_map": ["elu1"]}, TypeError, "feature_map is list"),
        (lambda t: {**t, "scale": torch.ones(2)}, TypeError, "scale is Tensor"),
        (lambda t: {**t, "backend": "cuda"}, ValueError, "backend is 'cuda'"),
    ],
)
def test_what_is_refused_stays_refused(
    whole: Whole, change: Callable[[dict[str, Any]], dict[str, Any]], error: type[Exception], said: str
):
    tensors = known_step(whole)
    before = copied(tensors)
    with pytest.raises(error, match=said):
        decode(change(tensors))
    assert torch.equal(before["state"][0], tensors["state"][0])


def test_packed_sequences_are_checked_each_time(whole: Whole):
    q, k, v = (torch.randn(1, T, H, K) for _ in "qkv")
    for _ in range(4):
        linear_attention(q, k, v, cu_seqlens=torch.tensor([0, 7, T]))
    assert whole == ["_pass"] * 4
    with pytest.raises(ValueError, match="cu_seqlens"):
        linear_attention(q, k, v, cu_seqlens=torch.tensor([0, 7, T + 1]))


# ---- when nothing is kept


def test_choices_that_are_forgotten_are_made_anew(whole: Whole):
    tensors = known_step(whole)
    registry.forget_choices()
    decode(tensors)
    assert whole == ["_step"]


def test_a_torch_without_an_exchange_table(whole: Whole, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repeats, "TORCH", repeats.TORCH._replace(tensor=SimpleNamespace))
    tensors = step_tensors()
    for _ in range(4):
        decode(tensors)
    assert whole == ["_step"] * 4


def test_a_table_that_is_full(whole: Whole, monkeypatch: pytest.MonkeyPatch):
    """Calls that find no room take the whole way; those that are kept go on."""
    tensors = known_step(whole)
    table = family._steps._table
    assert table is not None
    monkeypatch.setattr(table, "_keep", lambda *args: 0)
    for _ in range(4):
        decode(tensors, eps=1e-3)
    assert whole == ["_step"] * 4
    decode(tensors)
    assert len(whole) == 4


def test_a_thousand_shapes_fit(whole: Whole):
    tensors = known_step(whole)
    table, kept = family._steps._table, 0
    assert table is not None
    kernel = next(iter(registry._state.chosen.values())).runner
    call = kernel.call(*(tensors[x] for x in "qkv"), *tensors["state"], None, _options(), tensors["out"])
    while kept < 2000 and table.keep(call, ("elu1", True, float(kept), 1e-6, "auto"), "binary"):
        kept += 1
    assert kept == 1023
    decode(tensors)
    assert not whole


def _options() -> Any:
    return family.Options(output_final_state=True)


# ---- what fails


def test_a_launch_that_fails_raises(whole: Whole):
    tensors = known_step(whole)
    repeats.forget()
    choice = next(iter(registry._state.chosen.values()))
    call = choice.runner.call(*(tensors[x] for x in "qkv"), *tensors["state"], None, _options(), tensors["out"])

    def fail(status: int) -> None:
        raise MemoryError(f"status {status}")

    failing = repeat.Call(_Failing(call.binary.path, fail), call.block, call.tensors)
    family._steps._keep(failing, ("elu1", True, 1.0, 1e-6, "auto"), "binary")
    whole.clear()
    with pytest.raises(MemoryError, match="status 7"):
        decode(tensors)
    assert not whole
    silent = repeat.Call(_Failing(call.binary.path, lambda status: None), call.block, call.tensors)
    repeats.forget()
    family._steps._keep(silent, ("elu1", True, 1.0, 1e-6, "auto"), "binary")
    with pytest.raises(ValueError, match="a launch failed, and nothing was raised"):
        decode(tensors)


class _Failing:
    """A binary whose entry says 7."""

    def __init__(self, path: Path, fail: Callable[[int], None]):
        import ctypes

        self.path, self.fail = path, fail
        self.entry = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(lambda block: 7)


def test_memory_that_torch_has_not_got_is_its_error(whole: Whole):
    tensors = known_step(whole)
    repeats.forget()
    choice = next(iter(registry._state.chosen.values()))
    call = choice.runner.call(*(tensors[x] for x in "qkv"), *tensors["state"], None, _options(), tensors["out"])

    def make() -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    last = call.tensors[-1]
    changed = repeat.Argument(last.tensor, last.word, make, last.apart, last.changed, last.returned)
    family._steps._keep(
        repeat.Call(call.binary, call.block, [*call.tensors[:-1], changed]), ("elu1", True, 1.0, 1e-6, "auto"), "binary"
    )
    before = tensors["state"][0].clone()
    with pytest.raises(torch.OutOfMemoryError):
        decode({**tensors, "out": None})
    assert torch.equal(before, tensors["state"][0])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So that no case is large enough to be cut in time, and the condition on threads has a value to differ from."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
