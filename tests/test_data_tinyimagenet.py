import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from acert import data
from acert.data import Augmentation, npz, tinyimagenet
from acert.errors import DataError

WNIDS = ["n03000000", "n01000000", "n02000000"]
COLOURS = {"n01000000": (255, 0, 0), "n02000000": (0, 255, 0), "n03000000": (0, 0, 255)}
PER_CLASS = 4


def jpeg(colour: tuple[int, int, int] | int, size: tuple[int, int] = (64, 64)) -> bytes:
    stream = io.BytesIO()
    mode = "L" if isinstance(colour, int) else "RGB"
    Image.new(mode, size, colour).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def shade(wnid: str, number: int) -> tuple[int, int, int]:
    """The class's colour, darker with each image, so that order shows in the pixels."""
    red, green, blue = (value * (10 - number) // 10 for value in COLOURS[wnid])
    return red, green, blue


@pytest.fixture
def tree(tmp_path: Path, monkeypatch) -> Path:
    """A small tree in the official layout, and the reader told of its size."""
    root = tmp_path / "tiny-imagenet-200"
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    for wnid in WNIDS:
        folder = root / "train" / wnid / "images"
        folder.mkdir(parents=True)
        for number in range(PER_CLASS):
            (folder / f"{wnid}_{number}.JPEG").write_bytes(jpeg(shade(wnid, number)))
    rows = [("val_0.JPEG", "n03000000"), ("val_1.JPEG", "n01000000")]
    for name, wnid in rows:
        (root / "val" / "images" / name).write_bytes(jpeg(COLOURS[wnid]))
    table = "".join(f"{name}\t{wnid}\t0\t0\t63\t63\n" for name, wnid in rows)
    (root / "val" / "val_annotations.txt").write_text(table)
    monkeypatch.setattr(tinyimagenet, "_CLASSES", 3)
    monkeypatch.setattr(tinyimagenet, "_TRAIN_PER_CLASS", PER_CLASS)
    monkeypatch.setattr(tinyimagenet, "_TEST_COUNT", 2)
    source = data._Source(tinyimagenet.read_train, tinyimagenet.read_test, validation=3)
    monkeypatch.setitem(data._SOURCES, "tinyimagenet", source)
    return root


def zipped(tree: Path) -> Path:
    path = tree.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(tree.rglob("*")):
            archive.write(file, file.relative_to(tree.parent))
    shutil.rmtree(tree)
    return path


def load(root: Path) -> data.Dataset:
    return data.load("tinyimagenet", data_dir=root, train_on_all=True)


def check_content(whole: data.Dataset) -> None:
    assert whole.classes == ("n01000000", "n02000000", "n03000000")
    assert whole.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for index in range(12):
        wnid = whole.classes[index // 4]
        found = whole.train.images[index, :, 30, 30].tolist()
        assert found == pytest.approx(shade(wnid, index % 4), abs=4)


def test_reads_the_tree(tree: Path, tmp_path: Path) -> None:
    whole = load(tmp_path)
    check_content(whole)
    assert whole.train.images.dtype is torch.uint8
    assert whole.input_shape == (3, 64, 64)
    assert whole.augmentation == Augmentation(padding=4, flip=True)
    assert whole.mean == (0.4802, 0.4481, 0.3975)
    assert whole.std == (0.2302, 0.2265, 0.2262)


def test_validation_takes_the_last_of_every_class(tree: Path, tmp_path: Path) -> None:
    found, whole = data.load("tinyimagenet", data_dir=tmp_path), load(tmp_path)
    assert found.validation is not None
    assert found.validation.labels.tolist() == [0, 1, 2]
    assert torch.equal(found.validation.images, whole.train.images[3::4])


def test_the_val_folder_is_the_test_set(tree: Path, tmp_path: Path) -> None:
    test = data.load_test("tinyimagenet", data_dir=tmp_path)
    assert test.labels.tolist() == [2, 0]
    assert test.images[0, :, 5, 5].tolist() == pytest.approx([0, 0, 255], abs=4)


def test_training_opens_no_test_image(tree: Path, tmp_path: Path) -> None:
    shutil.rmtree(tree / "val")
    check_content(load(tmp_path))


def test_reads_the_zip(tree: Path, tmp_path: Path) -> None:
    zipped(tree)
    check_content(load(tmp_path))
    assert data.load_test("tinyimagenet", data_dir=tmp_path).labels.tolist() == [2, 0]


def test_decodes_once(tree: Path, tmp_path: Path, monkeypatch) -> None:
    first = load(tmp_path)
    shutil.rmtree(tree)
    monkeypatch.setattr(tinyimagenet, "decode", None)
    again = load(tmp_path)
    assert torch.equal(first.train.images, again.train.images)
    assert (again.classes, len(list(tmp_path.iterdir()))) == (first.classes, 1)


def test_grey_images_become_colour(tree: Path, tmp_path: Path) -> None:
    path = tree / "train" / "n01000000" / "images" / "n01000000_0.JPEG"
    path.write_bytes(jpeg(100))
    assert load(tmp_path).train.images[0, :, 9, 9].tolist() == pytest.approx([100] * 3, abs=2)


@pytest.mark.parametrize("damage", ["cut", "flip", "other", "label"])
def test_a_damaged_cache_is_decoded_again_and_said(tree: Path, tmp_path: Path, damage: str) -> None:
    load(tmp_path)
    cache = tmp_path / "tiny-imagenet-200-train.npz"
    content = bytearray(cache.read_bytes())
    if damage == "cut":
        cache.write_bytes(content[:1000])
    elif damage == "flip":
        content[5000] ^= 1
        cache.write_bytes(content)
    elif damage == "label":
        kept = npz.read_arrays(cache, ("images", "classes"))
        np.savez(cache, images=kept["images"], classes=kept["classes"], labels=np.full(12, 3))
    else:
        np.savez(cache, images=np.zeros((2, 3, 64, 64), np.uint8))
    with pytest.warns(UserWarning, match=r"tiny-imagenet-200-train.npz.*decoding the images again"):
        check_content(load(tmp_path))
    check_content(load(tmp_path))


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    tree: Path, tmp_path: Path, monkeypatch
) -> None:
    def full(*values: object, **arrays: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match=r"not kept: .*No space left on device"):
        check_content(load(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-imagenet-200"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_missing_image_is_named(tree: Path, tmp_path: Path, packed: bool) -> None:
    (tree / "train" / "n02000000" / "images" / "n02000000_3.JPEG").unlink()
    if packed:
        zipped(tree)
    with pytest.raises(DataError, match=r"n02000000_3\.JPEG"):
        load(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (jpeg((1, 2, 3))[:400], "is damaged|is not a readable image"),
        (b"GIF89a", "is not a readable image"),
        (jpeg((1, 2, 3), (64, 32)), "is 64 x 32 in colour, the others are 64 x 64 in colour"),
        (bytes(1_000_001), "1000001 bytes are too many"),
    ],
    ids=lambda value: "file" if isinstance(value, bytes) else None,
)
def test_a_damaged_image_is_named(
    tree: Path, tmp_path: Path, packed: bool, content: bytes, message: str
) -> None:
    (tree / "train" / "n02000000" / "images" / "n02000000_1.JPEG").write_bytes(content)
    if packed:
        zipped(tree)
    with pytest.raises(DataError, match=rf"n02000000_1\.JPEG.* ({message})"):
        load(tmp_path)


def test_links_are_followed_inside_the_tree_only(tree: Path, tmp_path: Path) -> None:
    folder = tree / "train" / "n02000000" / "images"
    for place in (tree / "elsewhere", tmp_path / "outside"):
        folder.rename(place)
        folder.symlink_to(place)
        if place.is_relative_to(tree):
            check_content(load(tmp_path))
            (tmp_path / "tiny-imagenet-200-train.npz").unlink()
        else:
            with pytest.raises(DataError, match=r"n02000000_0\.JPEG .*it leads out of its folder"):
                load(tmp_path)
        folder.unlink()
        place.rename(folder)


def test_a_folder_is_checked_once_for_all_its_files(
    tree: Path, tmp_path: Path, monkeypatch
) -> None:
    checked: list[Path] = []
    monkeypatch.setattr(tinyimagenet, "within", lambda path, folder: checked.append(path))
    check_content(load(tmp_path))
    assert checked == [tree, *(tree / "train" / wnid / "images" for wnid in sorted(WNIDS))]


def test_a_damaged_zip_is_named(tree: Path, tmp_path: Path) -> None:
    path = zipped(tree)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"tiny-imagenet-200\.zip cannot be read or is damaged"):
        load(tmp_path)


def test_tables_are_checked(tree: Path, tmp_path: Path) -> None:
    table = tree / "val" / "val_annotations.txt"
    rows = table.read_text()
    table.write_text(rows + "val_2.JPEG\tn09999999\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match=r"val_annotations.txt .* no class is called 'n09999999'"):
        data.load_test("tinyimagenet", data_dir=tmp_path)
    table.write_text(rows.splitlines()[0])
    with pytest.raises(DataError, match=r"3 classes and 1 images, the official set has 3 and 2"):
        data.load_test("tinyimagenet", data_dir=tmp_path)
    (tree / "wnids.txt").write_text("n01000000")
    with pytest.raises(DataError, match=r"1 classes and 4 images, the official set has 3 and 12"):
        load(tmp_path)


def test_nothing_there_names_the_zip(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pooch", None)
    with pytest.raises(DataError, match=r"tiny-imagenet-200\.zip is missing: put it at"):
        load(tmp_path)


def test_the_cache_is_an_ordinary_npz(tree: Path, tmp_path: Path) -> None:
    load(tmp_path)
    found = npz.read_arrays(tmp_path / "tiny-imagenet-200-train.npz", ("labels",))
    assert found["labels"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
