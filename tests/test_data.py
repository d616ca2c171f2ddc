"""Loading by name, the split, and what a data set is; digits, because they need no file."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acert import data
from acert.data.dataset import held_out
from acert.errors import AcertError, DataError, InvalidInput


def test_digits_are_sixteenths_and_every_one_is_in_exactly_one_split() -> None:
    from sklearn.datasets import load_digits

    digits, test = data.load("digits"), data.load_test("digits")
    assert digits.validation is not None
    parts = [digits.train, digits.validation, test]
    assert [len(part) for part in parts] == [1150, 288, 359]
    images = torch.cat([part.images for part in parts])
    assert images.dtype is torch.float32
    assert images.shape[1:] == (1, 8, 8) == digits.input_shape
    stored = sorted((images * 16).flatten(1).tolist())
    assert stored == sorted(load_digits().data.tolist())
    assert (digits.num_classes, digits.domain, digits.augmentation) == (10, (0.0, 1.0), None)


def test_digits_are_stratified() -> None:
    digits, test = data.load("digits"), data.load_test("digits")
    assert digits.validation is not None
    whole = data.load("digits", train_on_all=True).train
    for part, share in ((test, 359 / 1797), (digits.validation, 288 / 1797)):
        counts = torch.bincount(part.labels, minlength=10)
        expected = torch.bincount(torch.cat([whole.labels, test.labels])) * share
        assert (counts - expected).abs().max() < 1.5


def test_train_on_all_leaves_nothing_to_choose_on() -> None:
    digits = data.load("digits", train_on_all=True)
    assert digits.validation is None
    assert len(digits.train) == 1797 - 359


def test_the_same_split_every_time() -> None:
    one, other = data.load("digits"), data.load("digits")
    assert torch.equal(one.train.images, other.train.images)
    assert torch.equal(one.train.labels, other.train.labels)


def test_training_does_not_open_the_test_set(monkeypatch) -> None:
    def opened(root) -> data.Split:
        raise AssertionError("the test set was opened")

    source = data._Source(data.digits.read_train, opened)
    monkeypatch.setitem(data._SOURCES, "digits", source)
    data.load("digits")
    with pytest.raises(AssertionError, match=r"the test set was opened"):
        data.load_test("digits")


def test_digits_without_scikit_learn(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(
        DataError, match=r"digits needs the package sklearn: pip install 'acert\[data\]'"
    ):
        data.load("digits")


@pytest.mark.parametrize("load", [data.load, data.load_test])
def test_unknown_names_are_refused_with_the_nearest(load) -> None:
    with pytest.raises(InvalidInput, match=r"got 'minst'; did you mean 'mnist'\?"):
        load("minst")
    with pytest.raises(InvalidInput, match=r"one of digits, mnist, .* got 'xyz'$"):
        load("xyz")


def test_held_out_takes_the_last_of_every_class() -> None:
    labels = np.array([0, 1, 0, 1, 0, 1, 0, 0, 1, 0])
    assert np.flatnonzero(held_out(labels, 5)).tolist() == [5, 6, 7, 8, 9]
    # 6 and 4 samples give 1.2 and 0.8: the larger remainder goes up.
    assert np.flatnonzero(held_out(labels, 2)).tolist() == [8, 9]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.data())
def test_held_out_is_proportional_and_leaves_every_class(labels: list[int], draw) -> None:
    count = draw.draw(st.integers(1, len(labels) - 1))
    array = np.array(labels)
    marks = held_out(array, count)
    assert marks.sum() <= count
    for label in set(labels):
        of_class = array == label
        assert abs((marks & of_class).sum() - count * of_class.sum() / len(labels)) <= 1
        assert not marks[of_class].all()
        # The last ones: no marked sample comes before an unmarked one of its class.
        assert (np.diff(marks[of_class].astype(int)) >= 0).all()


def test_held_out_is_exact_where_classes_are_large() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    assert held_out(labels, 5000).sum() == 5000


def test_hold_out_refuses_what_leaves_a_side_empty() -> None:
    few = data.from_arrays(np.zeros((2, 3), np.uint8), [0, 1])
    with pytest.raises(InvalidInput, match=r"`train_on_all` must be set .* 0 of 2 samples"):
        data.hold_out(few)
    with pytest.raises(InvalidInput, match=r"2 of 2 samples"):
        data.hold_out(few, 2)
    one_each = data.from_arrays(np.zeros((5, 3), np.uint8), [0, 1, 2, 3, 4])
    with pytest.raises(InvalidInput, match=r"`train_on_all` must be set .* one sample only"):
        data.hold_out(one_each)


@pytest.mark.parametrize(
    "images",
    [
        [[0.1, 0.2], [0.3]],
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, 2, device="meta"),
    ],
    ids=["ragged", "sparse", "meta"],
)
def test_what_is_no_array_is_named(images: object) -> None:
    with pytest.raises(InvalidInput, match=r"`images` must be one array of numbers; got another: "):
        data.from_arrays(images, [0, 1])  # type: ignore[arg-type]


def test_to_float_divides_bytes_by_255_and_leaves_floats() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(data.to_float(every), torch.arange(256) / 255)
    floats = torch.tensor([0.0, 0.3])
    assert data.to_float(floats) is floats


def test_arrays_of_a_user_become_a_data_set() -> None:
    images = np.linspace(-2, 2, 40, dtype=np.float64).reshape(10, 4)
    mine = data.from_arrays(images, torch.arange(10) % 3, domain=(-2.0, 2.0))
    assert mine.train.images.dtype is torch.float32
    assert mine.train.labels.dtype is torch.int64
    assert (mine.classes, mine.domain, mine.input_shape) == (("0", "1", "2"), (-2.0, 2.0), (4,))
    np.testing.assert_allclose(mine.train.images.numpy(), images, rtol=1e-6)


def test_bfloat16_images_keep_their_values() -> None:
    images = torch.linspace(0, 1, 12).reshape(4, 3).bfloat16()
    assert torch.equal(data.from_arrays(images, [0, 1, 0, 1]).train.images, images.float())


def test_arrays_of_a_user_are_copied() -> None:
    images = np.zeros((2, 3), np.float32)
    mine = data.from_arrays(images, [0, 1])
    images[:] = 1
    assert mine.train.images.max() == 0


@pytest.mark.parametrize(
    ("images", "labels", "domain", "message"),
    [
        (np.zeros((2, 3), np.int32), [0, 1], (0, 1), "`images` must be uint8 or float; got int32"),
        (np.zeros(2, np.uint8), [0, 1], (0, 1), r"`images` must have shape .* got \(2,\)"),
        (np.zeros((0, 3), np.uint8), [], (0, 1), r"`images` must have shape .* got \(0, 3\)"),
        (np.zeros((2, 3), np.uint8), [0, 1], (0, 2), r"`domain` must be \(0, 1\) for uint8"),
        (np.full((2, 3), 1.5), [0, 1], (0, 1), r"inside the domain \[0, 1\]; got .* 1\.5 to 1\.5"),
        (np.full((2, 3), np.nan), [0, 1], (0, 1), "inside the domain .* got values from nan"),
        (np.zeros((2, 3)), [0, 1], (1, 1), "`domain` must be two finite numbers"),
        (np.zeros((2, 3)), [0, 1], (0, np.inf), "`domain` must be two finite numbers"),
        (np.full((2, 3), 1e39), [0, 1], (0, 1e40), "`domain` must be two finite numbers"),
        (np.zeros((2, 3)), [0.0, 1.0], (0, 1), "`labels` must be 2 integers; got float64"),
        (np.zeros((2, 3)), [0, 1, 1], (0, 1), r"`labels` must be 2 integers; .* \(3,\)"),
        (np.zeros((2, 3)), [-1, 1], (0, 1), r"`labels` must be in \[0, 99999\]; got -1 to 1"),
        (np.zeros((2, 3)), [0, 10**12], (0, 1), "`labels` must be in .* got 0 to 1000000000000"),
        (np.zeros((2, 3)), [0, 0], (0, 1), "`labels` must hold at least two classes"),
    ],
)
def test_bad_arrays_are_refused(images, labels, domain, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        data.from_arrays(images, labels, domain=domain)


def test_a_split_is_checked_and_moves_as_one() -> None:
    split = data.Split(torch.zeros(4, 2, dtype=torch.uint8), torch.arange(4))
    moved = split.to("meta")
    assert moved.images.device.type == moved.labels.device.type == "meta"
    with pytest.raises(InvalidInput, match=r"`images` must be uint8 or float32 .* got torch\.int6"):
        data.Split(torch.zeros(4, 2, dtype=torch.int64), torch.arange(4))
    with pytest.raises(InvalidInput, match=r"`labels` must be int64 of shape \(4,\)"):
        data.Split(torch.zeros(4, 2), torch.arange(3))


def test_every_refusal_is_an_error_of_ours() -> None:
    assert issubclass(DataError, AcertError)
    assert set(data.NAMES) == {"digits", "mnist", "cifar10", "tinyimagenet", "npz", "folder"}


def test_facts_are_those_of_the_training_set() -> None:
    digits = data.load("digits")
    assert data.facts("digits") == data.Facts(digits.num_classes, digits.domain)
    assert data.facts("tinyimagenet").num_classes == 200
