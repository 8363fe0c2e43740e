"""Runs tests/conformance.py: every op x backend x case, then what must hold between calls."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from autotune.verify import check_close
from linattn_tl import registry
from tests.conformance import COMPILED, DTYPES, Case, check, differentiate, sequences, subjects, tensors_of

pytestmark = pytest.mark.usefixtures("binaries", "nan_filled")
ROWS = [(s.op, c, b) for s in subjects().values() for c in s.cases for b in c.backends]


@pytest.mark.parametrize(("op", "case", "backend"), ROWS, ids=[f"{op}-{b}-{c.id}" for op, c, b in ROWS])
def test_equals_the_definition(op, case, backend):
    check(subjects()[op], case, backend)


def test_every_op_has_rows():
    assert set(registry.all_ops()) == set(subjects())
    for subject in subjects().values():
        ids = [c.id for c in subject.cases]
        assert len(ids) == len(set(ids)), "an id seeds the inputs of its case: two cases may not share one"


# ---- between calls


@pytest.mark.parametrize("backend", ["binary", "torch"])
@pytest.mark.parametrize("op", list(subjects()))
def test_a_sequence_alone_is_the_same_as_in_a_batch(op, backend):
    subject, case = subjects()[op], Case("batch", B=3, T=70, HV=4, V=24, state=True, final=True)
    tensors = tensors_of(subject, case)
    together = subject.call(tensors, case, backend)
    for i in range(case.B):
        one = {n: x[i : i + 1] for n, x in tensors.items()}
        alone = subject.call(one, replace(case, B=1), backend)
        for name, x in alone.items():
            same(name, x, together[name][i : i + 1], backend)


@pytest.mark.parametrize("backend", ["binary", "torch"])
@pytest.mark.parametrize("op", [s.op for s in sequences()])
def test_a_packed_sequence_is_the_same_as_alone(op, backend):
    cu = (0, 40, 40, 73, 74)
    subject, case = subjects()[op], Case("pack", B=1, T=74, HV=4, V=24, cu=cu, state=True, final=True)
    tensors = tensors_of(subject, case)
    together = subject.call(tensors, case, backend)
    for i, (a, b) in enumerate(itertools.pairwise(cu)):
        cut = {n: x[:, a:b] if n in subject.tokens else x[i : i + 1] for n, x in tensors.items()}
        alone = subject.call(cut, replace(case, T=b - a, cu=None), backend)
        for name, x in alone.items():
            theirs = together[name][i : i + 1] if name in subject.states else together[name][:, a:b]
            same(name, x, theirs, backend)


def same(name, x, y, backend):
    """Bit for bit from a compiled kernel, within budget from torch's matrix products."""
    if backend in COMPILED:
        different = int((x != y).sum())
        assert different == 0, f"{name} differs in {different} of {x.numel()} elements"
    else:
        check_close(name, x, y.double(), dtype=str(x.dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("op", [s.op for s in sequences()])
def test_threads_change_no_bit(op, heads, dtype):
    """But for one head and a long sequence: time itself is cut for the threads, and sums are added in another order."""
    case = Case("threads", B=1, T=1100, H=heads, HV=heads, K=64, V=64, state=True, final=True, dtype=dtype)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        subject = subjects()[op]
        tensors = tensors_of(subject, case)
        outputs = subject.call(tensors, case, "binary")
        grads = differentiate(subject, case, outputs, tensors)
        results.append({**outputs, **{f"d{n}": g for n, g in grads.items()}})
    for name, x in results[0].items():
        same(f"{name} on 1 and 2 threads", x, results[1][name], "binary" if heads > 1 else "torch")


@pytest.mark.parametrize("op", [s.op for s in subjects().values() if not s.differentiable])
def test_threads_change_no_bit_of_decode(op):
    case = Case("threads", B=8, T=4, H=4, HV=8, K=128, V=128)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(subjects()[op].call(tensors_of(subjects()[op], case), case, "binary"))
    for name, x in results[0].items():
        same(f"{name} on 1 and 2 threads", x, results[1][name], "binary")


@pytest.mark.parametrize("backend", ["binary", "torch"])
@pytest.mark.parametrize("op", [s.op for s in sequences()])
def test_the_final_state_of_no_tokens_is_a_copy(op, backend):
    """Decode changes a state in place: it must not be the caller's initial state."""
    subject, case = subjects()[op], Case("copy", B=1, T=0, state=True, final=True)
    with torch.no_grad():
        tensors = subject.inputs(case)
        outputs = subject.call(tensors, case, backend)
    for name in subject.states:
        same(name, outputs[name], tensors[name], "binary")
        shared = outputs[name].data_ptr() == tensors[name].data_ptr()
        assert not shared, f"the final {name} is the initial {name} itself"


@pytest.mark.parametrize("backend", ["binary", "torch"])
@pytest.mark.parametrize("op", list(subjects()))
def test_inference_mode_changes_no_bit(op, backend):
    subject, case = subjects()[op], Case("inference", T=40, HV=4, state=True, final=True)
    tensors = {n: x.detach() for n, x in tensors_of(subject, case).items()}
    usual = subject.call(tensors, case, backend)
    with torch.inference_mode():
        tensors = {n: x.clone() for n, x in tensors.items()}
        found = subject.call(tensors, case, backend)
    for name, x in found.items():
        same(name, x, usual[name], backend)


@pytest.mark.parametrize("op", [s.op for s in sequences()])
def test_calls_from_several_python_threads(op):
    """The kernels run without the interpreter's lock."""
    subject, case = subjects()[op], Case("concurrent", T=300, H=4, HV=4, K=64, V=64, state=True, final=True)

    def run(_):
        tensors = tensors_of(subject, case)
        outputs = subject.call(tensors, case, "binary")
        return {**outputs, **{f"d{n}": g for n, g in differentiate(subject, case, outputs, tensors).items()}}

    usual = run(None)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(24)):
            for name, x in found.items():
                same(name, x, usual[name], "binary")
