import numpy as np
import pytest
import torch

from acert.data import Augmentation, Draws, augment
from acert.errors import InvalidInput


def by_loops(
    images: np.ndarray, offsets: np.ndarray, flips: np.ndarray, padding: int
) -> np.ndarray:
    """Pad, crop, flip: one image at a time, with a padded copy."""
    result = np.empty_like(images)
    height, width = images.shape[2:]
    for i, image in enumerate(images):
        sides = ((0, 0), (padding, padding), (padding, padding))
        row, column = offsets[i]
        crop = np.pad(image, sides, mode="edge")[:, row : row + height, column : column + width]
        result[i] = crop[:, :, ::-1] if flips[i] else crop
    return result


def made_up(dtype: torch.dtype = torch.uint8, shape=(50, 3, 7, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("padding", [0, 2, 4])
@pytest.mark.parametrize("flip", [False, True])
def test_equals_a_slow_loop(dtype: torch.dtype, padding: int, flip: bool) -> None:
    images = made_up(dtype)
    generator = torch.Generator().manual_seed(1)
    draws = Augmentation(padding=padding, flip=flip).draw(len(images), generator=generator)
    found = augment(images, draws, padding=padding)
    assert found.dtype is dtype
    expected = by_loops(images.numpy(), draws.offsets.numpy(), draws.flips.numpy(), padding)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_by_hand() -> None:
    image = torch.tensor([[[[1, 2, 3], [4, 5, 6]]]], dtype=torch.uint8)

    def cropped(row: int, column: int, flip: bool) -> list:
        draws = Draws(torch.tensor([[row, column]]), torch.tensor([flip]))
        return augment(image, draws, padding=1)[0, 0].tolist()

    assert cropped(1, 1, False) == [[1, 2, 3], [4, 5, 6]]
    assert cropped(1, 1, True) == [[3, 2, 1], [6, 5, 4]]
    assert cropped(0, 0, False) == [[1, 1, 2], [1, 1, 2]]
    assert cropped(2, 2, True) == [[6, 6, 5], [6, 6, 5]]


def test_every_crop_and_both_flips_are_drawn_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = Augmentation(padding=2, flip=True).draw(50_000, generator=generator)
    counts = torch.bincount(draws.offsets[:, 0] * 5 + draws.offsets[:, 1], minlength=25)
    assert counts.numel() == 25
    assert ((counts - 2000).abs() < 250).all()
    assert draws.flips.float().mean().item() == pytest.approx(0.5, abs=0.01)


def test_without_flip_nothing_is_flipped_and_the_crops_stay_the_same() -> None:
    with_flip, without = (
        Augmentation(padding=2, flip=flip).draw(99, generator=torch.Generator().manual_seed(3))
        for flip in (True, False)
    )
    assert torch.equal(with_flip.offsets, without.offsets)
    assert with_flip.flips.any()
    assert not without.flips.any()


def test_one_compiled_graph_gives_the_same_images() -> None:
    images = made_up()
    draws = Augmentation(padding=2, flip=True).draw(50, generator=torch.Generator().manual_seed(1))

    def step(images: torch.Tensor, offsets: torch.Tensor, flips: torch.Tensor) -> torch.Tensor:
        return augment(images, Draws(offsets, flips), padding=2)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compiled(images, draws.offsets, draws.flips)
    assert torch.equal(found, augment(images, draws, padding=2))


def test_runs_on_the_device_of_its_images_without_reading_them() -> None:
    images = torch.empty(4, 3, 8, 8, dtype=torch.uint8, device="meta")
    draws = Draws(
        torch.empty(4, 2, dtype=torch.int64, device="meta"),
        torch.empty(4, dtype=torch.bool, device="meta"),
    )
    # A meta tensor has no values, so anything that needs one on the host would raise.
    assert augment(images, draws, padding=2).shape == images.shape


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match=r"`padding` must be >= 0; got -1"):
        Augmentation(padding=-1, flip=False)
    draws = Augmentation(padding=1, flip=False).draw(2, generator=torch.Generator())
    with pytest.raises(InvalidInput, match=r"shape \(B, C, H, W\); got \(2, 5\)"):
        augment(torch.zeros(2, 5), draws, padding=1)
