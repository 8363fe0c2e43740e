"""Transformers are RNNs: the example finds its forms equal, and notices each of them when it is broken."""

import json

import pytest
import torch

from examples import rnn_identity
from examples.rnn_identity import CHUNK, DIM, HEADS
from linattn_tl.modules import LAYERS, CausalLM, LinearAttention

# as they are, for tests that put something else in their place
CHECK_ALL, READ, WRITTEN = rnn_identity.check_all, rnn_identity.read, rnn_identity.written


def failed(checks):
    return {check.what for check in checks if not check.passed}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def short(monkeypatch):
    """Runs of the command in which what is not looked at is small."""
    monkeypatch.setattr(rnn_identity, "REPEATS", 1)
    monkeypatch.setattr(rnn_identity, "LENGTH", 20)
    monkeypatch.setattr(rnn_identity, "check_all", lambda: CHECK_ALL(("L",)))


def test_forms_of_attention_are_equal_forward_and_backward():
    checks = rnn_identity.check_attention()
    assert not failed(checks)
    assert [set(check.differences) for check in checks] == [{"o", "dq", "dk", "dv"}] * 3
    assert [check.tolerance for check in checks] == [1e-12, 1e-12, 1e-5]


@pytest.mark.parametrize("T", [1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_chunks_of_any_length(T):
    q, k, v = (torch.randn(1, T, HEADS, DIM, dtype=torch.float64) for _ in range(3))
    assert rnn_identity.relative(rnn_identity.chunk_form(q, k, v), rnn_identity.matrix_form(q, k, v)) < 1e-12


def test_no_form_looks_ahead():
    q, k, v = (torch.randn(1, 40, HEADS, DIM, dtype=torch.float64) for _ in range(3))
    for form in rnn_identity.FORMS.values():
        whole = form(q, k, v)
        assert torch.allclose(form(q[:, :23], k[:, :23], v[:, :23]), whole[:, :23], rtol=1e-12)


def test_a_layer_is_an_rnn():
    checks = rnn_identity.check_layer()
    assert not failed(checks)
    assert set(checks[0].differences) == {"y", "dx", "dw"}


@pytest.mark.parametrize("pattern", rnn_identity.PATTERNS)
def test_models_of_every_kind_of_layer(pattern):
    check = rnn_identity.check_model(pattern)
    assert check.passed, check
    assert set(check.differences) == {"logits", "state"}


def test_all_kinds_of_layers_are_there():
    assert {*"".join(rnn_identity.PATTERNS)} == {*LAYERS}


# ---- broken on purpose


def test_a_recurrence_without_z_is_noticed(monkeypatch):
    monkeypatch.setattr(rnn_identity, "written", lambda s, z, k, v: (WRITTEN(s, z, k, v)[0], z + 1))
    assert failed(rnn_identity.check_attention()) == {"attention: recurrence"}
    assert failed(rnn_identity.check_layer()) == {"layer: as an RNN"}


def test_a_recurrence_that_forgets_is_noticed(monkeypatch):
    monkeypatch.setattr(rnn_identity, "written", lambda s, z, k, v: WRITTEN(s * (1 - 1e-9), z, k, v))
    assert failed(rnn_identity.check_attention()) == {"attention: recurrence"}


def test_an_op_that_is_off_is_noticed(monkeypatch):
    right = rnn_identity.linear_attention
    monkeypatch.setattr(rnn_identity, "linear_attention", lambda q, k, v, eps: (right(q, k, v * 1.0001, eps=eps)[0],))
    assert failed(rnn_identity.check_attention()) == {"attention: linear_attention, fp32"}


def test_a_gradient_that_is_missing_is_noticed(monkeypatch):
    right = rnn_identity.recurrence
    monkeypatch.setattr(rnn_identity, "recurrence", lambda q, k, v: right(q, k.detach(), v) + 0 * k)
    check = rnn_identity.check_attention()[0]
    assert not check.passed
    assert check.differences["o"] <= check.tolerance < check.differences["dk"]


def test_a_layer_whose_step_forgets_is_noticed(monkeypatch):
    monkeypatch.setattr(LinearAttention, "step", forgetful(LinearAttention.step))
    assert failed(rnn_identity.check_layer()) == {"layer: block.step"}
    assert not rnn_identity.check_model("LLLS").passed


def forgetful(right):
    def step(self, x, state):
        state.kv.mul_(0.999)
        return right(self, x, state)

    return step


def test_a_state_that_is_off_is_noticed():
    model = CausalLM(8, 32, 2, "LS")
    ids = torch.randint(8, (1, 5))
    with torch.no_grad():
        mine, theirs = (model(ids, keep_state=True).cache for _ in range(2))
    assert rnn_identity.state_difference(mine, theirs) == 0
    mine.layers[1].v[0, 0, 4] += 1
    assert rnn_identity.state_difference(mine, theirs) > 0.1


def test_nan_does_not_pass():
    assert not rnn_identity.Check("", "", {"o": float("nan")}, 1.0).passed


# ---- the command


@pytest.mark.usefixtures("short")
def test_the_table(capsys):
    assert rnn_identity.main(["--lengths", "32,64"]) == 0
    out = capsys.readouterr().out
    assert out.count("  ok\n") == 6
    assert "WRONG" not in out
    assert out.splitlines()[-5].split()[-5:] == ["T=32", "T=64", "2", "x", "T"]
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.usefixtures("short")
def test_one_length_is_enough(capsys):
    assert rnn_identity.main(["--lengths", "32"]) == 0
    assert "1 x T" in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_the_plot_and_the_numbers(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert rnn_identity.main(["--lengths", "64,32", "--json", "--plot", str(tmp_path / "cost.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(check["passed"] for check in found["checks"])
    assert {name: list(row) for name, row in found["ms"].items()} == {x: ["32", "64"] for x in rnn_identity.FORMS}
    assert (tmp_path / "cost.png").stat().st_size > 1000


@pytest.mark.usefixtures("short")
def test_the_exit_code_says_that_something_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(rnn_identity, "read", lambda s, z, q: READ(s, z * 0 + 1, q))
    assert rnn_identity.main(["--lengths", "32"]) == 1
    assert capsys.readouterr().out.count("WRONG") == 2


@pytest.mark.parametrize("lengths", ["", "0", "32,x", "-1", "1.5"])
def test_lengths_that_are_none_are_refused(lengths, capsys):
    with pytest.raises(SystemExit) as stopped:
        rnn_identity.main([f"--lengths={lengths}"])
    assert stopped.value.code == 2
    assert "--lengths" in capsys.readouterr().err


def test_threads_are_as_before(short, capsys):
    before = torch.get_num_threads()
    assert rnn_identity.main(["--lengths", "32"]) == 0
    assert torch.get_num_threads() == before
