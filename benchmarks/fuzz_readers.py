"""Every reader of files that a stranger may have made, with valid tiny files to start from.

Where a check would end every try at the first byte (a digest, a zip's checksum), inputs are also
what lies behind it: the member of an archive, the facts in a state, the pickle in a `.pt` file.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.fuzz_watch import Reader
from PIL import Image
from safetensors.numpy import save
from tests import pickled
from tests.made_records import made_run
from tests.made_runs import make_run

import acert
import acert.cli.parser  # every verb, so that their code guides too
from acert import data, models, records
from acert.data import cifar10, mnist, plain_pickle, tinyimagenet
from acert.data.files import check_digest
from acert.errors import AcertError
from acert.evaluation import Certificates
from acert.experiments.budget import measured
from acert.experiments.paper.publication import publish, read_record
from acert.experiments.paper.root_steps import RootSteps
from acert.experiments.paper.rows import selected
from acert.experiments.sweeps.plan import make_plan
from acert.experiments.sweeps.sweep import Sweep
from acert.report.collection import collect
from acert.report.page import page
from acert.report.run import read_run
from acert.report.tables import latex_table, markdown_table
from acert.state_dict import read_state_dict
from acert.zoo import _WEIGHTS, load_model, load_weights

FILES = (
    "config.json", "env.json", "metrics.jsonl", "local.json", "model.safetensors",
    "certificates.npz", "examples.npz", "state.safetensors", "root-steps.json", "sweep.json",
    ".certificates.npz.tmp", ".probe.tmp", ".sweep.json.tmp", "events",
)  # fmt: skip


def each(*calls: Callable[[], object]) -> None:
    """Makes every call; what the last refusal said is raised once all are made."""
    refused = None
    for call in calls:
        try:
            call()
        except AcertError as error:
            refused = error
    if refused is not None:
        raise refused


# -- JSON, edited -------------------------------------------------------------------------


# What a field can be instead, besides being left out; JSON texts, so that they can be anything.
HOSTILE = (
    "null", "true", "[]", "{}", '""', "-1", "0", "1e308", "NaN", "-Infinity", "1" + 400 * "0",
    "1.5", '"../../outside"', '"/etc"', '"\\u001b[2J\\u202e"', '"</script><script>"', '"\\ud800"',
    "[[]]", '[{"class": "Settings"}]', '{"class": []}', '"acert_evil:net"', "[1, 2]", '["a", "b"]',
    40 * "[" + 40 * "]", 2000 * "[" + 2000 * "]", "9223372036854775808", '"Acert"', '"\'"',
    "1e-320",
)  # fmt: skip
# No JSON text starts with it: what follows are edits, two bytes each.
EDITS = b"\xff"


def edited(text: bytes, edits: bytes) -> bytes:
    """JSON texts, a line each, with any of their fields replaced or left out."""
    value: list[Any] = [json.loads(line) for line in text.splitlines()]
    for place, choice in zip(edits[::2], edits[1::2], strict=False):
        spots = list(_spots(value))
        holder, key = spots[place % len(spots)]
        if choice >= 224 and holder is not value:
            del holder[key]
        else:
            holder[key] = _Text(choice % len(HOSTILE))
    lines = []
    for line in value:
        written = json.dumps(line, default=lambda text: f"\x00{text.place}\x00")
        for place, hostile in enumerate(HOSTILE):
            written = written.replace(f'"\\u0000{place}\\u0000"', hostile)
        lines.append(written)
    return "\n".join(lines).encode()


class _Text:
    """Stands for a hostile text until all is written."""

    def __init__(self, place: int) -> None:
        self.place = place


def _spots(value: Any) -> Iterable[tuple[Any, Any]]:
    """Every field below, with what holds it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _spots(value[key])


def json_reader(
    name: str,
    prepare: Callable[[Path], Sequence[bytes]],
    read: Callable[[bytes, Path], None],
    *,
    compact: bool = True,
) -> Reader:
    """A reader of JSON: inputs are texts, or edits of the first seed."""
    kept: list[bytes] = []

    def prepared(folder: Path) -> list[bytes]:
        seeds = prepare(folder)
        kept[:] = [json.dumps(json.loads(seeds[0])).encode() if compact else seeds[0]]
        return [*seeds, *(EDITS + bytes([place, 3 * place % 256]) for place in range(64))]

    def read_either(content: bytes, folder: Path) -> None:
        raw = not content.startswith(EDITS)
        # At most a dozen: what is edited away altogether tells little.
        read(content if raw else edited(kept[0], content[1:25]), folder)

    return Reader(name, prepared, read_either)


# -- run folders --------------------------------------------------------------------------


def record(folder: Path, epochs: int | None = None) -> Path:
    """A finished, certified run of the paper, with everything that a run folder can hold."""
    steps = RootSteps(
        samples=9, misclassified=1, certified_to_max=2, arrived=((2, 3),), proven=((3, 6),)
    )
    run = folder / "run"
    training = selected(["mnist"])[0].training
    return made_run(run, training, epochs=epochs, steps=steps, samples=16)


def without_pictures(folder: Path) -> Path:
    """The same, several times faster to read."""
    run = record(folder, epochs=3)
    (run / "examples.npz").unlink()
    return run


def shipped(folder: Path) -> Path:
    return shutil.copytree(_WEIGHTS / "digits-acert", folder / "run")


def of_file(name: str, made: Callable[[Path], Path]) -> Callable[[Path], Sequence[bytes]]:
    """Prepares a run; the seed is one of its files."""
    return lambda folder: [(made(folder) / name).read_bytes()]


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / "run" / name).write_bytes(content)
    return folder / "run"


def read_config(content: bytes, folder: Path) -> None:
    run = write(folder, "config.json", content)
    each(lambda: load_model(run), lambda: read_run(run))


def read_published(name: str) -> Callable[[bytes, Path], None]:
    """A file of a record, through everything that a record is read by."""

    def read(content: bytes, folder: Path) -> None:
        run, results = write(folder, name, content), folder / "results"
        each(
            lambda: read_record(run), lambda: read_run(run), lambda: measured(run),
            lambda: publish(run, results, name="record"),
        )  # fmt: skip
        shutil.rmtree(results, ignore_errors=True)

    return read


def read_report(content: bytes, folder: Path) -> None:
    """A config through the page and the tables, which must stay the elements that they are."""
    write(folder, "config.json", content)
    found = collect([folder])
    text = page(found)
    assert text.count("<script") == text.count("</script>") == 2, "text of a file ends a script"
    assert "\x1b" not in found.summary + "".join(found.complaints), "text drives the terminal"
    markdown_table(found)
    latex_table(found)


def seeds_of_reports(folder: Path) -> list[bytes]:
    evil = "</script><script>alert(1)</script>\x1b[2J"
    for method in ("Acert", evil):
        shutil.rmtree(folder / "run", ignore_errors=True)
        make_run(folder / "run", method=method, names=[evil, "b", "c", "d"], samples=16)
    make_run(folder / "other" / "run", samples=16)
    return [path.read_bytes() for path in folder.rglob("config.json")]


def read_plan(content: bytes, folder: Path) -> None:
    """A sweep's plan; whatever it names, no run may lie outside of the folder."""
    (folder / "sweep.json").write_bytes(content)
    sweep = Sweep(make_plan(methods=["acert", "fastibp"]), folder)
    for run in sweep.plan.runs:
        place = (folder / run.name).resolve()
        assert place.parent == folder.resolve(), f"the run {run.name!r} is outside"
    sweep.plan.record(folder)


def seeds_of_plans(folder: Path) -> list[bytes]:
    make_plan(methods=["acert", "fastibp"]).record(folder)
    text = (folder / "sweep.json").read_bytes()
    return [text, text.replace(b'"acert-k0-s0"', b'".."')]


def read_local(content: bytes, folder: Path) -> None:
    run = write(folder, "local.json", content)
    records.place_of_data(run)


def seeds_of_local(folder: Path) -> list[bytes]:
    records.write_local(shipped(folder), {"data_dir": "data"})
    return [(folder / "run" / "local.json").read_bytes()]


# -- arrays -------------------------------------------------------------------------------


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)
    return stream.getvalue()


def npz(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return stream.getvalue()


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}


def read_certificates(content: bytes, folder: Path) -> None:
    run = write(folder, "certificates.npz", content)
    each(
        lambda: Certificates(**records.read_certificates(run)).art,
        lambda: read_record(run), lambda: read_run(run),
    )  # fmt: skip


def read_examples(content: bytes, folder: Path) -> None:
    run = write(folder, "examples.npz", content)
    found = read_run(run)
    assert found.certification is not None


def behind(
    name: str, read: Callable[[bytes, Path], None]
) -> tuple[Callable[[Path], Sequence[bytes]], Callable[[bytes, Path], None]]:
    """Seeds and reader of single members: the first byte says which, the archive is sound."""
    kept: dict[str, bytes] = {}

    def prepare(folder: Path) -> list[bytes]:
        kept.update(members_of(record(folder) / name))
        return [bytes([place]) + content for place, content in enumerate(kept.values())]

    def read_member(content: bytes, folder: Path) -> None:
        chosen = list(kept)[content[0] % len(kept)] if content else next(iter(kept))
        read(npz(kept | {chosen: content[1:]}), folder)

    return prepare, read_member


def read_npz(content: bytes, folder: Path) -> None:
    path = folder / "data.npz"
    path.write_bytes(content)
    each(
        lambda: data.load("npz", data_dir=path), lambda: data.load_test("npz", data_dir=path),
        lambda: data.facts("npz", data_dir=path),
    )  # fmt: skip


_ARRAYS = {
    "x_train": npy(np.zeros((6, 2), np.uint8)), "y_train": npy(np.arange(6) % 2),
    "x_test": npy(np.zeros((2, 2), np.float32)), "y_test": npy(np.arange(2)),
    "domain": npy([0.0, 1.0]),
}  # fmt: skip


def seeds_of_npz(folder: Path) -> list[bytes]:
    packed = io.BytesIO()
    np.savez_compressed(packed, x_train=np.zeros((6, 2), np.uint8), y_train=np.arange(6) % 2)
    return [npz(_ARRAYS), packed.getvalue()]


def read_npy(content: bytes, folder: Path) -> None:
    name = list(_ARRAYS)[content[0] % len(_ARRAYS)] if content else "domain"
    read_npz(npz(_ARRAYS | {name: content[1:]}), folder)


# -- weights and states -------------------------------------------------------------------


def read_weights(content: bytes, folder: Path) -> None:
    run = write(folder, "model.safetensors", content)
    each(lambda: load_model(run), lambda: read_state_dict(run / "model.safetensors"))


def small_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.mlp(2, [3], 2)


_IMAGES, _LABELS = torch.rand(8, 2), torch.tensor([0, 1] * 4)


def train(folder: Path, *, resume: bool) -> None:
    acert.train(
        small_net(), (_IMAGES, _LABELS), method=acert.Acert(), max_radius=0.1, epochs=2,
        out=folder / "run", resume=resume, progress=False,
    )  # fmt: skip


def without_checksum() -> None:
    """Every changed byte of a tensor would fail it."""
    vars(records.tensors)["_checksum"] = lambda arrays: 0


def seeds_of_weights(folder: Path) -> list[bytes]:
    run = shipped(folder)
    weights = records.read_weights(run)
    without_checksum()
    records.write_weights(run, weights)
    return [(run / "model.safetensors").read_bytes()]


def seeds_of_states(folder: Path) -> list[bytes]:
    without_checksum()
    train(folder, resume=False)
    (folder / "run" / "model.safetensors").unlink()
    return [(folder / "run" / "state.safetensors").read_bytes()]


def read_state(content: bytes, folder: Path) -> None:
    run = write(folder, "state.safetensors", content)
    rows = (run / "metrics.jsonl").read_bytes()
    (run / "state.previous.safetensors").unlink(missing_ok=True)
    try:
        train(folder, resume=True)
    finally:
        (run / "model.safetensors").unlink(missing_ok=True)
        (run / "metrics.jsonl").write_bytes(rows)


_STATE: dict[str, np.ndarray] = {}


def seeds_of_facts(folder: Path) -> list[bytes]:
    seeds_of_states(folder)
    found = records.read_state(folder / "run")
    assert found is not None
    _STATE.update(found.arrays)
    return [json.dumps(found.facts).encode()]


def read_facts(content: bytes, folder: Path) -> None:
    """The plain facts of a state, with a checksum that fits wherever they are an object."""
    text = content.decode("utf-8", "replace")
    try:
        facts = dict(json.loads(text)) | {"crc32": records.tensors._checksum(_STATE)}
        text = json.dumps(facts)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        packed = save(_STATE, metadata={"acert": text})
    except UnicodeEncodeError:  # half a pair of surrogates, which no file can hold
        return
    read_state(packed, folder)


def seeds_of_torch(folder: Path) -> list[bytes]:
    stream = io.BytesIO()
    torch.save(small_net().state_dict(), stream)
    return [stream.getvalue()]


def read_torch(content: bytes, folder: Path) -> None:
    path = folder / "net.pt"
    path.write_bytes(content)
    load_weights(small_net(), read_state_dict(path), source=path)


def torch_members() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(seeds_of_torch(Path())[0])) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def read_torch_pickle(content: bytes, folder: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, old in torch_members().items():
            archive.writestr(name, content if name.endswith("data.pkl") else old)
    read_torch(stream.getvalue(), folder)


def seeds_of_torch_pickle(folder: Path) -> list[bytes]:
    return [content for name, content in torch_members().items() if name.endswith("data.pkl")]


# -- data sets ----------------------------------------------------------------------------


def unchecked(*arguments: object, **named: object) -> None:
    """Stands for a digest that every changed byte would fail."""


def seeds_of_mnist(folder: Path) -> list[bytes]:
    small = mnist._IdxFile("t10k-images-idx3-ubyte", (2, 28, 28), "", "")
    mnist._TEST_IMAGES = small
    mnist._TEST_LABELS = mnist._IdxFile("t10k-labels-idx1-ubyte", (2,), "", "")
    vars(mnist)["check_digest"] = unchecked
    (folder / "MNIST" / "raw").mkdir(parents=True)
    labels = bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])
    (folder / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(labels)
    content = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(2 * 28 * 28)
    return [b"\x00" + content, b"\x01" + gzip.compress(content, mtime=0)]


def read_mnist(content: bytes, folder: Path) -> None:
    raw = folder / "MNIST" / "raw"
    for name in ("t10k-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz"):
        (raw / name).unlink(missing_ok=True)
    (raw / ("t10k-images-idx3-ubyte" + (".gz" if content[:1] == b"\x01" else ""))).write_bytes(
        content[1:]
    )
    data.load_test("mnist", data_dir=folder)


def seeds_of_cifar(folder: Path) -> list[bytes]:
    cifar10._RECORDS = 2
    vars(cifar10)["check_digest"] = unchecked
    (folder / "cifar-10-batches-py").mkdir()
    return [pickled.batch(np.zeros((2, 3072), np.uint8), [3, 7])]


def read_cifar(content: bytes, folder: Path) -> None:
    (folder / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    data.load_test("cifar10", data_dir=folder)


def seeds_of_archives(folder: Path) -> list[bytes]:
    import tarfile

    cifar10._RECORDS = 2
    content, stream = bytes(2 * 3073), io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    cifar10._ARCHIVE_MD5 = hashlib.md5(stream.getvalue()).hexdigest()
    cifar10._BINARY_SHA1["test_batch"] = hashlib.sha1(content).hexdigest()
    vars(cifar10)["check_digest"] = check_digest
    return [stream.getvalue()]


def read_archive(content: bytes, folder: Path) -> None:
    (folder / "cifar-10-binary.tar.gz").write_bytes(content)
    data.load_test("cifar10", data_dir=folder)


def picture(kind: str, mode: str = "RGB", size: int = 8) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (size, size), 90 if mode == "L" else (200, 10, 90)).save(stream, kind)
    return stream.getvalue()


_WNIDS = ("n01000000", "n02000000")


def tiny_tree(folder: Path) -> dict[str, bytes]:
    tinyimagenet._CLASSES, tinyimagenet._TRAIN_PER_CLASS, tinyimagenet._TEST_COUNT = 2, 1, 2
    files = {f"train/{wnid}/images/{wnid}_0.JPEG": picture("JPEG", size=64) for wnid in _WNIDS}
    files |= {f"val/images/val_{i}.JPEG": picture("JPEG", "L", 64) for i in range(2)}
    files["wnids.txt"] = "\n".join(_WNIDS).encode()
    table = "".join(f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63\n" for i, wnid in enumerate(_WNIDS))
    files["val/val_annotations.txt"] = table.encode()
    return files


def seeds_of_tables(folder: Path) -> list[bytes]:
    files = tiny_tree(folder)
    for name, content in files.items():
        path = folder / "tiny-imagenet-200" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    both = files["wnids.txt"] + b"\n\n" + files["val/val_annotations.txt"]
    return [both, both.replace(b"val_0", b"../../../outside/private")]


def read_tables(content: bytes, folder: Path) -> None:
    tree = folder / "tiny-imagenet-200"
    classes, _, table = content.partition(b"\n\n")
    (tree / "wnids.txt").write_bytes(classes)
    (tree / "val" / "val_annotations.txt").write_bytes(table)
    each(lambda: read_tiny(folder, data.load_test), lambda: read_tiny(folder, load_all))


def load_all(name: str, *, data_dir: Path) -> object:
    return data.load(name, data_dir=data_dir, train_on_all=True)


def read_tiny(folder: Path, load: Callable[..., object]) -> None:
    for part in ("train", "val"):
        (folder / f"tiny-imagenet-200-{part}.npz").unlink(missing_ok=True)
    load("tinyimagenet", data_dir=folder)


def seeds_of_zips(folder: Path) -> list[bytes]:
    contents = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", method) as archive:
            for name, content in tiny_tree(folder).items():
                archive.writestr(f"tiny-imagenet-200/{name}", content)
        contents.append(stream.getvalue())
    return contents


def read_zip(content: bytes, folder: Path) -> None:
    (folder / "tiny-imagenet-200.zip").write_bytes(content)
    each(lambda: read_tiny(folder, data.load_test), lambda: read_tiny(folder, load_all))


def seeds_of_caches(folder: Path) -> list[bytes]:
    seeds_of_tables(folder)
    data.load_test("tinyimagenet", data_dir=folder)
    cache = folder / "tiny-imagenet-200-val.npz"
    # Smaller by a thousand: the pixels are all alike.
    np.savez_compressed(cache, **members_as_arrays(cache))
    return [cache.read_bytes()]


def members_as_arrays(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as found:
        return dict(found)


def read_cache(content: bytes, folder: Path) -> None:
    (folder / "tiny-imagenet-200-val.npz").write_bytes(content)
    data.load_test("tinyimagenet", data_dir=folder)


def seeds_of_images(folder: Path) -> list[bytes]:
    for name in ("a", "b"):
        (folder / "train" / name).mkdir(parents=True)
    (folder / "train" / "b" / "1.png").write_bytes(picture("PNG"))
    kinds = ("PNG", "JPEG", "BMP", "PPM", "WEBP")
    return [picture(kind, mode) for kind in kinds for mode in ("RGB", "L")]


def read_image(content: bytes, folder: Path) -> None:
    (folder / "train" / "a" / "1.png").write_bytes(content)
    load_all("folder", data_dir=folder)


# -- links --------------------------------------------------------------------------------


def seeds_of_links(folder: Path) -> list[bytes]:
    record(folder / "template")
    targets = ("../../outside/private.json", "config.json", "/etc/hostname", "..", ".")
    harmless = bytes([FILES.index("events"), 0]) + b"config.json"
    return [harmless] + [
        bytes([place, kind]) + os.fsencode(target)
        for place in range(len(FILES))
        for kind, target in enumerate((targets[place % len(targets)], targets[0], "", ""))
    ]


def read_links(content: bytes, folder: Path) -> None:
    """One file of a run is a link, a pipe or a folder instead; then all is read and written."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    run = shutil.copytree(folder / "template" / "run", folder / "run")
    place, kind, target = content[:1] or b"\0", content[1:2] or b"\0", content[2:]
    file = run / FILES[place[0] % len(FILES)]
    file.unlink(missing_ok=True)
    if kind[0] % 4 == 3:
        file.mkdir()
    elif kind[0] % 4 == 2:
        os.mkfifo(file)
    else:
        try:
            file.symlink_to(os.fsdecode(target))
        except (OSError, ValueError):  # a name that no file can have
            return
    certificates = {
        name: np.zeros(1, dtype) for name, dtype in records.certification._COLUMNS.items()
    }
    values = {"max_radius": 0.1, "arithmetic": "real", "bounds": "ibp", "elide": True}
    each(
        lambda: read_record(run), lambda: read_run(run), lambda: records.read_state(run),
        lambda: records.read_weights(run), lambda: records.read_local(run),
        lambda: Sweep(make_plan(), run), lambda: records.make_writable(run),
        lambda: make_plan().record(run), lambda: publish(run, folder / "results"),
        lambda: records.write_certificates(run, {**certificates, **values, "domain": (0, 1),
                                                 "violations": -1}),
    )  # fmt: skip


def readers() -> Iterable[Reader]:
    """All of them, in the order they are fuzzed."""
    yield json_reader("config.json", of_file("config.json", shipped), read_config)
    yield json_reader("the page", seeds_of_reports, read_report)
    for name in ("metrics.jsonl", "env.json", "root-steps.json"):
        lines = name.endswith(".jsonl")
        yield json_reader(
            name, of_file(name, without_pictures), read_published(name), compact=not lines
        )
    yield json_reader("local.json", seeds_of_local, read_local)
    yield json_reader("sweep.json", seeds_of_plans, read_plan)
    yield Reader("links in a run", seeds_of_links, read_links)
    yield Reader(
        "certificates.npz", of_file("certificates.npz", record), read_certificates, ours=False
    )
    yield Reader("certificates.npz, members", *behind("certificates.npz", read_certificates))
    yield Reader("examples.npz, members", *behind("examples.npz", read_examples))
    yield Reader("model.safetensors", seeds_of_weights, read_weights, ours=False)
    yield Reader("state.safetensors", seeds_of_states, read_state, ours=False)
    yield json_reader("state.safetensors, facts", seeds_of_facts, read_facts)
    yield Reader(".pt weights", seeds_of_torch, read_torch, ours=False)
    yield Reader(".pt weights, pickle", seeds_of_torch_pickle, read_torch_pickle)
    yield Reader("npz data", seeds_of_npz, read_npz, ours=False)
    yield Reader("npz data, members", lambda _: [
        bytes([place]) + content for place, content in enumerate(_ARRAYS.values())
    ], read_npy)  # fmt: skip
    yield Reader("MNIST's idx", seeds_of_mnist, read_mnist)
    yield Reader("CIFAR-10's pickle", seeds_of_cifar, read_cifar)
    yield Reader("plain pickle", lambda _: [pickled.batch(np.zeros((2, 5), np.uint8), [3, 7])],
                 lambda content, _: plain_pickle.loads(content))  # fmt: skip
    yield Reader("CIFAR-10's archive", seeds_of_archives, read_archive, ours=False)
    yield Reader("TinyImageNet's tables", seeds_of_tables, read_tables)
    yield Reader("TinyImageNet's zip", seeds_of_zips, read_zip, ours=False)
    yield Reader("TinyImageNet's cache", seeds_of_caches, read_cache, ours=False)
    yield Reader("image files", seeds_of_images, read_image, ours=False)
