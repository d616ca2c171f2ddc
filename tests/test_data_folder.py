import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from acert import data
from acert.data.pictures import Form, decode, form_of
from acert.errors import DataError


def picture(array: np.ndarray, mode: str | None = None, form: str = "PNG", **more) -> bytes:
    stream = io.BytesIO()
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(stream, form, **more)
    return stream.getvalue()


def colours(seed: int, height: int = 6, width: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def deep_png(height: int = 6, width: int = 5) -> bytes:
    """A black PNG in colour with 16 bits a channel, which Pillow cannot write."""
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(height * (1 + 6 * width)))))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in (*parts, (b"IEND", b""))
    )


def animation(form: str) -> bytes:
    stream = io.BytesIO()
    first, second = (Image.fromarray(colours(seed)) for seed in (0, 1))
    first.save(stream, form, save_all=True, append_images=[second])
    return stream.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes of five training images and one test image each."""
    for label, name in enumerate(("cat", "dog")):
        for part, numbers in (("train", range(5)), ("test", range(5, 6))):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in numbers:
                (folder / f"{number}.png").write_bytes(picture(colours(10 * label + number)))
    (tmp_path / "train" / ".hidden").mkdir()
    (tmp_path / "train" / "cat" / ".DS_Store").write_bytes(b"left by a file manager")
    (tmp_path / "train" / "read me.txt").write_bytes(b"not a class")
    return tmp_path


def test_images_are_taken_as_stored_whatever_their_exif_orientation():
    tag = Image.Exif()
    tag[0x0112] = 6  # to be turned by a quarter for a viewer
    stored = picture(colours(0), form="JPEG")
    turned = picture(colours(0), form="JPEG", exif=tag)
    assert Image.open(io.BytesIO(turned)).getexif()[0x0112] == 6
    form = form_of(turned, source="x")
    assert form == form_of(stored, source="x") == Form(3, 6, 5)
    found = [decode(content, form=form, source="x") for content in (stored, turned)]
    assert np.array_equal(*found)


def test_reads_classes_in_order(root: Path) -> None:
    whole = data.load("folder", data_dir=root, train_on_all=True)
    assert (whole.classes, whole.input_shape) == (("cat", "dog"), (3, 6, 5))
    assert whole.train.labels.tolist() == [0] * 5 + [1] * 5
    expected = np.stack([colours(seed) for seed in (*range(5), *range(10, 15))])
    np.testing.assert_array_equal(whole.train.images.numpy(), expected.transpose(0, 3, 1, 2))
    assert data.facts("folder", data_dir=root).num_classes == whole.num_classes
    test = data.load_test("folder", data_dir=root)
    assert test.labels.tolist() == [0, 1]
    np.testing.assert_array_equal(test.images[1].numpy(), colours(15).transpose(2, 0, 1))


def test_few_bits_a_channel_are_read_as_eight() -> None:
    content = b"P6 5 6 15\n" + bytes([0, 5, 15] * 30)
    image = decode(content, form=Form(3, 6, 5), source="few.ppm")
    assert image[:, 0, 0].tolist() == [0, 85, 255]


def test_validation_is_a_fifth(root: Path) -> None:
    found = data.load("folder", data_dir=root)
    assert found.validation is not None
    assert found.validation.labels.tolist() == [0, 1]
    np.testing.assert_array_equal(found.validation.images[0].numpy(), colours(4).transpose(2, 0, 1))


def test_grey_images_have_one_channel(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.bmp").write_bytes(picture(colours(0)[:, :, 0], form="BMP"))
    whole = data.load("folder", data_dir=tmp_path, train_on_all=True)
    assert whole.input_shape == (1, 6, 5)
    np.testing.assert_array_equal(whole.train.images[0, 0].numpy(), colours(0)[:, :, 0])


def test_a_palette_is_colour(root: Path) -> None:
    flat = np.full((6, 5, 3), (0, 204, 51), np.uint8)
    (root / "train" / "dog" / "0.png").write_bytes(picture(flat, "P"))
    images = data.load("folder", data_dir=root, train_on_all=True).train.images
    np.testing.assert_array_equal(images[5].numpy(), flat.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (picture(colours(0, height=7)), "is 5 x 7 in colour, the others are 5 x 6 in colour"),
        (picture(colours(0)[:, :, 0]), "is 5 x 6 in grey, the others are 5 x 6 in colour"),
        (picture(colours(0), "RGBA"), "must be 8-bit grey or RGB without transparency; is RGBA"),
        (picture(colours(0), "P", transparency=0), "without transparency; is P"),
        (picture(np.zeros((6, 5), np.uint16)), "must be 8-bit grey or RGB"),
        (deep_png(), "must be 8-bit grey or RGB; is RGB with 16 bits"),
        (b"P6 5 6 65535\n" + bytes(180), "must be 8-bit grey or RGB; is RGB with 16 bits"),
        (animation("PNG"), "must be a single image; is an animation of 2"),
        (animation("WEBP"), "must be a single image; is an animation of 2"),
        (picture(colours(0))[:80], "is damaged"),
        (b"text", "is not a readable image"),
    ],
    ids=lambda value: "file" if isinstance(value, bytes) else None,
)
def test_an_image_that_does_not_fit_is_named(root: Path, content: bytes, message: str) -> None:
    (root / "train" / "dog" / "3.png").write_bytes(content)
    with pytest.raises(DataError, match=rf"dog/3\.png .*{message}"):
        data.load("folder", data_dir=root)


def huge_png(side: int) -> bytes:
    """A PNG of a few bytes whose header declares a large image."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    # Pillow reads on to the start of the pixels.
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\x10IDAT"


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_header_that_declares_too_much_takes_no_memory(root: Path, side: int) -> None:
    (root / "train" / "cat" / "0.png").write_bytes(huge_png(side))
    with pytest.raises(DataError, match=r"cat/0\.png is not .*: it declares more than"):
        data.load("folder", data_dir=root)


def test_folders_are_checked(root: Path, tmp_path: Path) -> None:
    (root / "test" / "bird").mkdir()
    with pytest.raises(DataError, match=r"test/bird is a class that train does not have"):
        data.load_test("folder", data_dir=root)
    with pytest.raises(DataError, match=r"train is missing: put a folder of images a class under"):
        data.load("folder", data_dir=root / "test")
    (tmp_path / "one" / "train" / "only").mkdir(parents=True)
    with pytest.raises(DataError, match=r"one/train must hold a folder a class, at least two"):
        data.load("folder", data_dir=tmp_path / "one")
    (tmp_path / "one" / "train" / "other").mkdir()
    with pytest.raises(DataError, match=r"one/train holds no images"):
        data.load("folder", data_dir=tmp_path / "one")


def test_a_class_without_images_is_named(root: Path) -> None:
    (root / "train" / "bird").mkdir()
    with pytest.raises(DataError, match=r"train/bird holds no images: fill it, or remove the cla"):
        data.load("folder", data_dir=root)


def test_a_test_folder_may_lack_classes_but_not_images(root: Path) -> None:
    (root / "test" / "cat" / "5.png").unlink()
    (root / "test" / "cat").rmdir()
    assert data.load_test("folder", data_dir=root).labels.tolist() == [1]
    (root / "test" / "dog" / "5.png").unlink()
    with pytest.raises(DataError, match=r"test holds no images"):
        data.load_test("folder", data_dir=root)


def test_without_pillow_the_message_says_so(root: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        DataError, match=r"image files needs the package PIL: pip install 'acert\[data\]'"
    ):
        data.load("folder", data_dir=root)


FILES = {form: picture(colours(0), form=form) for form in ("PNG", "JPEG", "BMP", "WEBP", "PPM")}


@pytest.mark.parametrize("form", sorted(FILES))
def test_every_format_is_read(form: str) -> None:
    assert form_of(FILES[form], source="x") == Form(channels=3, height=6, width=5)
    found = decode(FILES[form], form=Form(3, 6, 5), source="x")
    if form not in ("JPEG", "WEBP"):
        np.testing.assert_array_equal(found, colours(0).transpose(2, 0, 1))


@given(st.sampled_from(sorted(FILES)), st.floats(0, 1, exclude_max=True), st.binary(max_size=3))
def test_a_damaged_image_is_named_or_read(form: str, share: float, patch: bytes) -> None:
    content = FILES[form]
    position = int(share * len(content))
    damaged = content[:position] + patch + content[position + 1 :]
    try:
        found = decode(damaged, form=Form(3, 6, 5), source="this.file")
    except DataError as error:
        message = str(error)
    else:
        message = f"this.file is {found.shape}"
    assert message.startswith("this.file ")


def test_links_stay_under_the_root(root: Path, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "private.png"
    outside.write_bytes(picture(colours(99)))
    link = root / "train" / "cat" / "9.png"
    link.symlink_to(root / "train" / "dog" / "0.png")
    assert len(data.load("folder", data_dir=root, train_on_all=True).train) == 11
    link.unlink()
    link.symlink_to(outside)
    with pytest.raises(DataError, match=r"9\.png .*it leads out of its folder"):
        data.load("folder", data_dir=root)
