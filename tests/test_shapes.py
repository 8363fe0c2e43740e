"""The checks that have no op of their own to be seen through."""

from collections.abc import Iterator

import pytest
import torch

from linattn_tl import shapes


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How long the tensors were whose values were looked at, in order."""
    seen: list[int] = []
    check = shapes.check_cu_seqlens
    monkeypatch.setattr(
        shapes, "check_cu_seqlens", lambda op, values, T: (seen.append(len(values)), check(op, values, T))
    )
    monkeypatch.setattr(shapes, "_checked_lengths", {})
    yield seen


def test_lengths_are_read_once(reads: list[int]):
    """As on a GPU, where each look waits for the stream."""
    lengths = torch.tensor([0, 3, 5])
    for _ in range(3):
        shapes._check_lengths_once("op", lengths, 5)
    assert reads == [3]
    shapes._check_lengths_once("op", lengths.clone(), 5)
    assert reads == [3, 3]


def test_lengths_are_read_again_after_a_write(reads: list[int]):
    lengths = torch.tensor([0, 3, 5])
    shapes._check_lengths_once("op", lengths, 5)
    lengths[1] = 7
    with pytest.raises(ValueError, match="cu_seqlens decreases from 7 to 5"):
        shapes._check_lengths_once("op", lengths, 5)
    with pytest.raises(ValueError, match="cu_seqlens decreases"):  # what was refused is not remembered
        shapes._check_lengths_once("op", lengths, 5)


def test_lengths_are_read_again_for_other_tokens(reads: list[int]):
    lengths = torch.tensor([0, 3, 5])
    shapes._check_lengths_once("op", lengths, 5)
    with pytest.raises(ValueError, match="expected T = 6"):
        shapes._check_lengths_once("op", lengths, 6)


def test_an_inference_tensor_is_read_every_time(reads: list[int]):
    """It does not count the writes to it."""
    with torch.inference_mode():
        lengths = torch.tensor([0, 3, 5])
        shapes._check_lengths_once("op", lengths, 5)
        lengths[1] = 7
        with pytest.raises(ValueError, match="cu_seqlens decreases"):
            shapes._check_lengths_once("op", lengths, 5)


def test_another_tensor_in_the_same_place_is_read(reads: list[int]):
    first = torch.tensor([0, 3, 5])
    shapes._check_lengths_once("op", first, 5)
    known = shapes._checked_lengths[id(first)]
    other = torch.tensor([0, 9, 5])
    shapes._checked_lengths[id(other)] = known  # as after first is gone, and its id is given again
    with pytest.raises(ValueError, match="cu_seqlens decreases"):
        shapes._check_lengths_once("op", other, 5)


def test_few_tensors_are_remembered(reads: list[int]):
    for _ in range(shapes._REMEMBERED + 2):
        shapes._check_lengths_once("op", torch.tensor([0, 5]), 5)
    assert len(shapes._checked_lengths) <= shapes._REMEMBERED
