"""The examples: the byte model learns and generates from its state alone, and the demo notices a wrong op."""

import json
import math
import sysconfig

import pytest
import torch

import linattn_tl
from examples import byte_lm, demo


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(byte_lm, "BATCH", 2)
    monkeypatch.setattr(byte_lm, "LENGTH", 64)
    monkeypatch.setattr(byte_lm, "GENERATE", 40)
    monkeypatch.setattr(byte_lm, "VALID_BATCHES", 2)
    monkeypatch.setattr(byte_lm, "read_text", lambda: (TEXT, TEXT[: len(TEXT) // 2]))
    torch.set_num_threads(1)


TEXT = byte_lm.as_tensor(b"for i in range(10):\n    print(i)\n" * 50)


def test_it_learns_and_the_state_is_all_it_needs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert byte_lm.main(["--steps", "40", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["losses"]) == 40
    assert sum(found["losses"][-5:]) < 0.5 * sum(found["losses"][:5])
    assert found["valid_bits_per_byte"] < 4
    assert found["same_bytes"]
    assert found["max_difference"] <= byte_lm.TOLERANCE
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_the_report_is_readable(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert byte_lm.main(["--steps", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for wanted in ("validation:", "bytes/s", "A KV cache", "the same bytes", "served: linear_attention"):
        assert wanted in out


def test_runs_are_repeatable():
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(byte_lm.train(byte_lm.ByteLM(), TEXT, steps=3, seconds=math.inf))
    assert losses[0] == losses[1]


def test_steps_equal_the_whole_sequence():
    torch.manual_seed(0)
    model = byte_lm.ByteLM()
    ids = TEXT[:50].long().unsqueeze(0)
    with torch.no_grad():
        whole, _ = model(ids)
        first, memory = model(ids[:, :20], keep_memory=True)
        steps = [model.step(ids[:, t], memory) for t in range(20, 50)]
    torch.testing.assert_close(torch.cat([first, torch.stack(steps, 1)], 1), whole, rtol=1e-4, atol=1e-4)


def test_a_prompt_shorter_than_the_convolution():
    torch.manual_seed(0)
    model = byte_lm.ByteLM()
    made = byte_lm.generate(model, TEXT[:1], 5)
    assert byte_lm.compare_with_rerun(model, made)[1]


def test_memory_does_not_grow():
    model = byte_lm.ByteLM()
    sizes = {byte_lm.memory_bytes(byte_lm.generate(model, TEXT[:10], n).memory) for n in (1, 30)}
    assert len(sizes) == 1


def test_a_state_that_forgets_is_noticed(monkeypatch):
    torch.manual_seed(0)
    model = byte_lm.ByteLM()
    right = byte_lm.ByteLM.step

    def forgetful(self, ids, memory):
        memory.states[0].kv.mul_(0.9)
        return right(self, ids, memory)

    monkeypatch.setattr(byte_lm.ByteLM, "step", forgetful)
    assert byte_lm.compare_with_rerun(model, byte_lm.generate(model, TEXT[:30], 10))[0] > byte_lm.TOLERANCE


def test_text_is_split_without_overlap_and_in_the_same_way_each_time(monkeypatch, tmp_path):
    monkeypatch.undo()
    for i in range(40):
        (tmp_path / f"m{i}.py").write_text(f"# file {i}\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_text("# a test\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    train, valid = (bytes(part.tolist()).splitlines() for part in byte_lm.read_text())
    assert (len(train), len(valid)) == (38, 2)
    assert not set(train) & set(valid)
    assert b"# a test" not in train
    assert [bytes(part.tolist()).splitlines() for part in byte_lm.read_text()] == [train, valid]


@pytest.mark.parametrize("args", [["--steps", "0"], ["--seconds", "0"]])
def test_bad_arguments_are_refused(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        byte_lm.main(args)
    assert stopped.value.code == 2
    assert "positive" in capsys.readouterr().err


def test_the_demo_compares_the_ops_with_the_definition(capsys):
    assert demo.check_ops()
    assert capsys.readouterr().out.count(" ok\n") == 3


def test_the_demo_notices_a_wrong_op(monkeypatch, capsys):
    right = linattn_tl.linear_attention
    monkeypatch.setattr(linattn_tl, "linear_attention", lambda *args: (right(*args)[0] * 1.001, None))
    assert not demo.check_ops()
    assert "WRONG" in capsys.readouterr().out
