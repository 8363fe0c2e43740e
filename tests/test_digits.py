"""The digits: both models learn, painting keeps what is given, and a state that forgets is noticed."""

import json
import math

import pytest
import torch

from examples import digits
from linattn_tl.modules import CausalLM

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

FLAGS = ["--threads", "1", "--steps"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"WIDTH": 32, "HEADS": 1, "LAYERS": 1, "BATCH": 8, "CHECKED": 4}
    speed = {"BATCHES": (1, 2), "ROUNDS": 1, "LONG": 64, "BLOCK": 16}
    for name, value in {**sizes, **speed}.items():
        monkeypatch.setattr(digits, name, value)
    torch.set_num_threads(1)


@pytest.fixture
def few_images(monkeypatch):
    """Four images, to be learned by heart."""
    four = digits.load_images().train[:4]
    monkeypatch.setattr(digits, "load_images", lambda: digits.Split(four, four))
    monkeypatch.setattr(digits, "SHIFTED", 0.0)


def numbers(capsys, *args):
    assert digits.main([*FLAGS, *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_both_models_learn_and_all_is_said(few_images, tmp_path, capsys):
    found = numbers(capsys, "100", "--out", str(tmp_path / "out"), "--save", str(tmp_path / "saved"))
    parameters = {about["parameters"] for about in found["models"].values()}
    assert len(parameters) == 1
    for about in found["models"].values():
        assert about["steps"] == 100
        assert about["last_loss_bits"] < 0.5 * about["first_loss_bits"]
        assert about["valid_bits_per_dim"] < found["histogram_bits_per_dim"]
        assert about["identity"]["same_pixels"]
        assert about["identity"]["max_difference"] <= digits.TOLERANCE
    assert found["images_per_s"].keys() == {"1", "2"}
    assert found["long"]["lengths"] == [16, 32, 48, 64]
    assert {len(times) for times in found["long"]["token_us"].values()} == {4}
    for path in found["pictures"]:
        assert path.endswith("digits.png")
    saved = json.loads((tmp_path / "saved" / "digits.json").read_text())
    assert saved.keys() - {"command", "machine"} == found.keys() - {"pictures"}
    for folder in ("out", "saved"):
        assert (tmp_path / folder / "digits.png").stat().st_size > 1000


def test_the_report_is_readable(tmp_path, capsys):
    assert digits.main([*FLAGS, "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    wanted = (
        "histogram",
        "held out",
        "images/s",
        "softmax is slower",
        "KV cache",
        "the same pixels",
        "served: linear_",
    )
    for words in wanted:
        assert words in out
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 120


def test_runs_are_repeatable():
    images = digits.load_images()
    run = digits.Run(steps=3)
    first, second = (digits.train_one("linear", images, run) for _ in range(2))
    assert first[1]["last_loss_bits"] == second[1]["last_loss_bits"]
    assert torch.equal(digits.paint(first[0], 3), digits.paint(second[0], 3))


def test_completion_keeps_what_is_given():
    images = digits.load_images().valid[:3]
    model = digits.make_model("linear")
    for given in (0, 1, digits.HALF, digits.PIXELS - 1):
        made = digits.complete(model, images[:, :given])
        assert made.shape == images.shape
        assert torch.equal(made[:, :given], images[:, :given])
        assert 0 <= made.min() <= made.max() < digits.LEVELS
    assert not torch.equal(digits.complete(model, images[:, :5], 0), digits.complete(model, images[:, :5], 1))


def test_a_state_that_forgets_is_noticed(monkeypatch, tmp_path, capsys):
    right = CausalLM.step

    def forgetful(self, ids, cache):
        state = cache.layers[0]
        (state.kv if state.kind == "recurrent" else state.v).mul_(0.9)
        return right(self, ids, cache)

    monkeypatch.setattr(CausalLM, "step", forgetful)
    for name in digits.PATTERNS:
        identity = digits.check_identity(digits.make_model(name), digits.load_images().valid[:4])
        assert identity.max_difference > digits.TOLERANCE
        assert not identity.holds
    assert digits.main([*FLAGS, "1", "--out", str(tmp_path)]) == 1
    assert "largest difference" in capsys.readouterr().out


def test_generation_that_picks_other_pixels_is_noticed(monkeypatch):
    right = digits.generate
    monkeypatch.setattr(
        digits, "generate", lambda *args, **options: [(x + 1) % digits.LEVELS for x in right(*args, **options)]
    )
    identity = digits.check_identity(digits.make_model("linear"), digits.load_images().valid[:2])
    assert identity.max_difference <= digits.TOLERANCE
    assert not identity.holds


def test_not_a_number_is_no_identity():
    assert not digits.Identity(math.nan, True).holds


def test_the_split_does_not_overlap_and_is_the_same_each_time():
    train, valid = digits.load_images()
    assert (len(train), len(valid)) == (1497, 300)
    as_rows = [{tuple(image) for image in part.tolist()} for part in (train, valid)]
    assert not as_rows[0] & as_rows[1]
    assert (train.min(), train.max()) == (0, digits.LEVELS - 1)
    again = digits.load_images()
    assert torch.equal(again.train, train)
    assert torch.equal(again.valid, valid)


def test_moved_images():
    image = torch.arange(digits.PIXELS).unflatten(0, (8, 8))
    right, up = digits.moved(image.flatten().repeat(2, 1), torch.tensor([[0, 1], [-1, 0]])).unflatten(1, (8, 8))
    assert torch.equal(right[:, 1:], image[:, :-1])
    assert torch.equal(up[:-1], image[1:])
    assert right[:, 0].sum() == up[-1].sum() == 0


def test_a_model_is_asked_for_each_pixel_from_those_before():
    images = digits.load_images().valid[:2]
    ids, targets = digits.as_batch(images)
    assert torch.equal(targets, images)
    assert ids[:, 0].tolist() == [digits.START] * 2
    assert torch.equal(ids[:, 1:], images[:, :-1])


def test_the_histogram_counts_every_level_once_more():
    """One image, 18 counts for each pixel, two of them right."""
    image = digits.load_images().train[:1]
    assert digits.histogram_bits(digits.Split(image, image)) == pytest.approx(math.log2(18 / 2))


@pytest.mark.parametrize(
    ("growing", "expected"),
    [([2, 2, 2, 2], 0), ([0, 2, 2, 2], 10), ([0, 0, 2, 0, 2, 2, 2], 20), ([0, 0, 0], None), ([2, 2, 2, 0, 2], 0)],
)
def test_the_crossover_is_not_moved_by_an_outlier(growing, expected):
    lengths = [10 * (i + 1) for i in range(len(growing))]
    assert digits.crossover(lengths, [1] * len(growing), growing) == expected


def test_the_memory_stated_is_that_of_the_caches():
    state, cache = (digits.make_model(name, 0).init_state(1, room=digits.LONG) for name in digits.PATTERNS)
    found = digits.memory()
    assert sum(layer.nbytes for layer in state.layers) == found["state_bytes"]
    assert sum(layer.k.nbytes + layer.v.nbytes for layer in cache.layers) == found["kv_cache_bytes"][digits.LONG]


@pytest.mark.parametrize("args", [["--steps", "0"], ["--seconds", "0"], ["--seconds", "nan"], ["--threads", "-1"]])
def test_bad_arguments_are_refused(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        digits.main(args)
    assert stopped.value.code == 2
    assert "positive" in capsys.readouterr().err
