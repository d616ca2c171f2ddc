"""Run folders become values whose figures are the records'; what is damaged is named."""

import json
import math

import numpy as np
import pytest
from tests.made_runs import make_run

import acert
from acert import metrics, records
from acert.errors import InvalidInput, RunError
from acert.experiments.experiment import to_config
from acert.report import collect, group_runs, read_run, read_runs, series_of, smallest_kappa


def test_a_run_is_what_its_records_say(tmp_path):
    folder = make_run(tmp_path / "a", method="Acert", kappa=0.25, seed=3, max_radius=0.3)
    run, columns = read_run(folder), records.read_certificates(folder)
    found = run.certification
    correct = columns["status"] != 0
    assert (run.name, run.dataset, run.method) == ("a", "digits", "ACERT")
    assert (run.kappa, run.seed, run.epochs, run.root_steps) == (0.25, 3, 4, 2)
    assert run.radius_schedule == "SmoothRadius"
    assert found.accuracy == np.mean(correct)
    assert found.acr == np.mean(columns["radius"]) / 0.3
    assert found.art == math.sqrt(found.accuracy * found.acr)
    assert found.curve.accuracy[0] == found.accuracy
    assert found.curve.accuracy[-1] == np.mean(columns["radius"] == 0.3)
    assert found.curve.radius.size == 65
    for label in range(4):
        mean = columns["radius"][columns["label"] == label].mean()
        assert found.class_radius[label] == pytest.approx(mean)
    shares = found.distribution
    assert shares.share.sum() + shares.at_zero + shares.at_max == pytest.approx(1)
    assert found.attack is None
    assert run.environment.hardware == "EPYC, 2 cores"
    assert run.environment.commit == "c0ffee0123456789"
    assert run.environment.seconds == 61.5


def test_examples_carry_their_radii(tmp_path):
    folder = make_run(tmp_path / "a")
    run, columns = read_run(folder), records.read_certificates(folder)
    most, least = run.certification.most, run.certification.least
    assert len(most) == 16
    assert most.radius[0] == columns["radius"].max()
    assert least.radius[0] == 0
    for index, label, radius in zip(most.index, most.label, most.radius, strict=True):
        assert columns["label"][index] == label
        assert columns["radius"][index] == radius


def test_a_class_without_samples_has_no_radius(tmp_path):
    folder = make_run(tmp_path / "a", classes=4, names=[*"abcde"])
    assert np.isnan(read_run(folder).certification.class_radius).tolist() == [False] * 4 + [True]


def test_long_histories_are_thinned_and_keep_their_ends(tmp_path):
    run = read_run(make_run(tmp_path / "a", epochs=500))
    loss, art = run.history["loss"], run.history["art"]
    assert loss.epoch.size == art.epoch.size == 100
    assert (loss.epoch[0], loss.epoch[-1]) == (1, 500)
    assert (art.epoch[0], art.epoch[-1]) == (2, 500)
    assert loss.value[-1] == 2 / 500
    assert "seconds" not in run.history


def test_runs_on_arrays_and_unknown_methods(tmp_path):
    run = read_run(make_run(tmp_path / "a", arrays=True, method="Mine"))
    assert (run.dataset, run.method, run.root_steps) == ("arrays", "Mine", None)


def test_a_run_that_is_only_trained(tmp_path):
    folder = make_run(tmp_path / "a", certified=False)
    (folder / records.ENVIRONMENT).unlink()
    run = read_run(folder)
    assert run.certification is None
    assert run.max_radius == run.trained_to == 0.3
    assert run.environment.seconds is None


@pytest.mark.parametrize(
    ("facts", "hardware"),
    [({"gpu": "H200", "cpu": "Xeon"}, "H200"), ({"cpu": "Xeon"}, "Xeon"), ({}, "")],
)
def test_hardware(tmp_path, facts, hardware):
    folder = make_run(tmp_path / "a")
    records.write_environment(folder, facts)
    assert read_run(folder).environment.hardware == hardware


@pytest.mark.parametrize("seconds", [math.inf, math.nan, "long", True])
def test_a_time_that_is_none_is_left_out(tmp_path, seconds):
    folder = make_run(tmp_path / "a")
    records.write_environment(folder, {"seconds": seconds})
    assert read_run(folder).environment.seconds is None


def test_a_solver_without_steps_has_none(tmp_path):
    method = {"class": "Acert", "kappa": 0.0, "solver": {"class": "Brent", "max_steps": None}}
    assert read_run(make_run(tmp_path / "a", settings={"method": method})).root_steps is None


@pytest.mark.parametrize("steps", [math.inf, "2", 1.5])
def test_root_steps_that_are_no_number_are_damage(tmp_path, steps):
    method = {"class": "Acert", "kappa": 0.0, "solver": {"class": "Brent", "max_steps": steps}}
    with pytest.raises(RunError, match="'max_steps' must be of type int"):
        read_run(make_run(tmp_path / "a", settings={"method": method}))


def test_images_that_are_no_pictures_are_left_out(tmp_path):
    assert read_run(make_run(tmp_path / "a", pictures=(2,))).certification.most is None
    assert read_run(make_run(tmp_path / "b", pictures=None)).certification.least is None


# -- attacks ------------------------------------------------------------------------------


def test_attack_radii_give_an_upper_curve(tmp_path):
    folder = make_run(tmp_path / "a", attacked=True)
    attack, columns = read_run(folder).certification.attack, records.read_certificates(folder)
    radius = columns["attack_radius"].astype(np.float64)
    correct = columns["status"] != 0
    assert attack.samples == 40
    assert attack.inside == 0
    assert attack.acr == pytest.approx(np.mean(np.minimum(radius, 0.3)) / 0.3, rel=1e-12)
    for at, share in zip(attack.curve.radius, attack.curve.accuracy, strict=True):
        assert share == np.mean(correct & (radius > at))
    assert (attack.curve.accuracy >= attack.certified.accuracy).all()


def test_only_attacked_samples_are_compared(tmp_path):
    columns = records.read_certificates(make_run(tmp_path / "a", attacked=True))
    half = np.where(np.arange(40) < 20, columns["attack_radius"], np.nan)
    attack = read_run(make_run(tmp_path / "b", attack_radius=half)).certification.attack
    assert attack.samples == 20
    assert attack.certified.accuracy[0] == np.mean(columns["status"][:20] != 0)


@pytest.mark.parametrize(
    ("arithmetic", "words"),
    [("float32", "bounds are wrong"), ("real", "--attack tells which"), ("nearest", "nothing")],
)
def test_an_attack_at_a_certified_radius_raises_the_alarm(tmp_path, arithmetic, words):
    columns = records.read_certificates(make_run(tmp_path / "x" / "a", attacked=True))
    # Sample 1 is certified to max_radius, and here broken exactly there; sample 2 within.
    broken = columns["attack_radius"].astype(np.float64)
    broken[1], broken[2] = 0.3, columns["radius"][2] / 2
    make_run(tmp_path / "y" / "a", attack_radius=broken, arithmetic=arithmetic)
    collection = collect([tmp_path / "y"])
    (alarm,) = collection.alarms
    assert "ACERT" in alarm
    assert "2 of 40 attacked images were broken inside their certified radius" in alarm
    assert words in alarm
    assert collect([tmp_path / "x"]).alarms == ()
    # A record that says which of them are more than rounding is believed.
    make_run(tmp_path / "z" / "a", attack_radius=broken, arithmetic=arithmetic, violations=0)
    assert collect([tmp_path / "z"]).alarms == ()
    make_run(tmp_path / "v" / "a", attack_radius=broken, arithmetic=arithmetic, violations=1)
    (alarm,) = collect([tmp_path / "v"]).alarms
    assert "1 of 40 attacked images" in alarm
    # As `acert certify --attack` says: no bound is wrong that was never promised.
    assert ("nothing" if arithmetic == "nearest" else "the bounds are wrong") in alarm


# -- damage -------------------------------------------------------------------------------


def _text(name, text):
    return lambda folder: (folder / name).write_text(text)


def _config(change):
    def damage(folder):
        config = json.loads((folder / records.CONFIG).read_text())
        change(config)
        (folder / records.CONFIG).write_text(json.dumps(config))

    return damage


def _settings(**values):
    return _config(lambda config: config["experiment"]["settings"].update(values))


def _arrays(name, **values):
    def damage(folder):
        with np.load(folder / name) as archive:
            held = dict(archive)
        held |= values
        np.savez(folder / name, **{key: held[key] for key in held if held[key] is not None})

    return damage


def _half(name):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


DAMAGES = {
    "config no JSON": (_text("config.json", "{"), "config.json is damaged"),
    "config a list": (_text("config.json", "[1]"), "does not hold an object"),
    "config not ours": (_text("config.json", '{"a": 1}'), "names no schema"),
    "config from the future": (_text("config.json", '{"schema": 99}'), "newer acert"),
    "config without settings": (_text("config.json", '{"schema": 1}'), "no object 'settings'"),
    "settings a number": (_config(lambda c: c.update(experiment=3)), "no object 'settings'"),
    "method a word": (_settings(method="acert"), "no object 'method'"),
    "kappa a word": (_settings(method={"class": "Acert", "kappa": "x"}), "'kappa' must be"),
    "kappa not finite": (_settings(method={"class": "A", "kappa": math.nan}), "'kappa' must be"),
    "seed a truth value": (_settings(seed=True), "'seed' must be of type int; got True"),
    "classes missing": (_config(lambda c: c["data"].pop("classes")), "'classes' must be"),
    "metrics cut": (_half("metrics.jsonl"), "metrics.jsonl is damaged in line"),
    "metrics without epochs": (_text("metrics.jsonl", '{"loss": 1}\n'), "line 1: no epoch"),
    "environment": (_text("env.json", "?"), "env.json is damaged"),
    "certificates cut": (_half("certificates.npz"), "certificates.npz is damaged"),
    "certificates without radii": (_arrays("certificates.npz", radius=None), "index, radius"),
    "columns of two lengths": (_arrays("certificates.npz", status=np.zeros(3)), "shapes"),
    "radius not a number": (
        _arrays("certificates.npz", radius=np.full(40, np.nan, np.float32)),
        "`radius` must be in",
    ),
    "no samples": (
        _arrays("certificates.npz", index=np.zeros(0, int), label=np.zeros(0, int),
                prediction=np.zeros(0, int), radius=np.zeros(0), status=np.zeros(0, np.uint8),
                margin=np.zeros(0), attack_radius=np.zeros(0)),
        "at least one",
    ),
    "max_radius a list": (_arrays("certificates.npz", max_radius=np.ones(2)), "`max_radius`"),
    "labels beyond the classes": (
        _arrays("certificates.npz", label=np.full(40, 7), prediction=np.full(40, 7)),
        "labels must be in [0, 3]; got 7 to 7",
    ),
    "labels of other samples": (
        _arrays("certificates.npz", label=np.full(40, 2)), "`prediction` must be the label unless"
    ),
    "examples cut": (_half("examples.npz"), "examples.npz is damaged"),
    "examples without images": (_arrays("examples.npz", most_images=None), "no most certified"),
    "examples of other samples": (
        _arrays("examples.npz", least_index=np.full(16, 999)), "has no image 999"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_record_is_named_and_skipped(tmp_path, kind):
    damage, words = DAMAGES[kind]
    make_run(tmp_path / "good")
    damage(make_run(tmp_path / "bad", seed=1))
    collection = collect([tmp_path])
    assert [run.name for run in collection.runs] == ["good"]
    (complaint,) = collection.complaints
    assert complaint.startswith("skipped: ")
    assert str(tmp_path / "bad") in complaint
    assert words in complaint
    assert "\n" not in complaint


def test_certificates_without_a_config_are_named(tmp_path):
    make_run(tmp_path / "good")
    (make_run(tmp_path / "own", seed=1) / records.CONFIG).unlink()
    (complaint,) = collect([tmp_path]).complaints
    assert "own is no run folder: it has no config.json" in complaint


# -- what is found ------------------------------------------------------------------------


def test_runs_are_found_below_and_named_by_their_path(tmp_path):
    make_run(tmp_path / "one" / "deep" / "a")
    make_run(tmp_path / "one" / "b", seed=1)
    make_run(tmp_path / "two" / "b", seed=2)
    found, complaints = read_runs([tmp_path / "one", tmp_path / "two", tmp_path])
    assert [run.name for run in found] == ["b", "deep/a", str(tmp_path / "two" / "b")]
    assert complaints == []
    (alone,) = read_runs([tmp_path / "one" / "b"])[0]
    assert alone.name == "b"


def test_a_link_to_runs_elsewhere_is_named(tmp_path):
    make_run(tmp_path / "elsewhere" / "a")
    top = make_run(tmp_path / "runs" / "b", seed=1).parent
    for name, target in (
        ("one", "../elsewhere/a"), ("all", "../elsewhere"), ("own", "b"), ("loop", "loop"),
        ("unlike", tmp_path / "runs" / "b" / "events"),
    ):  # fmt: skip
        (top / name).symlink_to(target)
    (top / "b" / "events").mkdir()
    found, complaints = read_runs([top])
    assert [run.name for run in found] == ["b"]
    assert [line.split(" is a link")[0] for line in complaints] == [
        f"skipped: {top / 'all'}",
        f"skipped: {top / 'one'}",
    ]
    # Where it leads to is given too, nothing is left out.
    found, complaints = read_runs([top, tmp_path / "elsewhere"])
    assert [run.name for run in found] == ["b", "a"]
    assert complaints == []


def test_names_a_terminal_would_obey_are_made_harmless(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "x" / "a\x1b[31m\nb").parent])[0]
    assert run.name == "a\ufffd[31m\ufffdb"


def test_no_runs(tmp_path):
    with pytest.raises(RunError, match=r"no runs found below .*t_no_runs"):
        collect([tmp_path])
    with pytest.raises(InvalidInput, match=r"there is no folder .*nowhere"):
        collect([tmp_path / "nowhere"])
    (make_run(tmp_path / "bad") / records.CONFIG).write_text("{")
    with pytest.raises(RunError, match=r"no runs found .*bad.config.json is damaged"):
        collect([tmp_path])


def test_nothing_certified(tmp_path):
    make_run(tmp_path / "a", certified=False)
    with pytest.raises(RunError, match=r"none of the 1 runs .* is certified: acert certify .*/a"):
        collect([tmp_path])


def test_no_command_is_named_for_runs_on_arrays(tmp_path):
    make_run(tmp_path / "a", certified=False, dataset="arrays")
    with pytest.raises(RunError, match=r"none of the 1 runs .* is certified$"):
        collect([tmp_path])
    make_run(tmp_path / "b c", certified=False)
    with pytest.raises(RunError, match=r"is certified: acert certify '.*/b c'$"):
        collect([tmp_path])


def test_uncertified_runs_are_listed(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", seed=1, certified=False)
    collection = collect([tmp_path])
    assert [run.name for run in collection.uncertified] == ["b"]
    assert collection.groups[0].n == 1
    assert len(collection.groups[0].runs) == 2


def test_a_copy_counts_once_and_the_certified_one_wins(tmp_path):
    make_run(tmp_path / "a", certified=False)
    make_run(tmp_path / "b")
    collection = collect([tmp_path])
    assert [run.name for run in collection.runs] == ["b"]
    assert collection.complaints == ("skipped: a repeats b, with equal settings and seed",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": "mnist"}, "data sets .* a has digits, b has mnist; choose one with --dataset"),
        ({"max_radius": 0.4}, "max radii .* a has 0.3, b has 0.4; choose one with --max-radius"),
        ({"samples": 60}, "numbers of test samples .* a has 40, b has 60"),
        ({"label": np.zeros(40, int)}, "test labels .* a has checksum"),
        ({"bounds": "crown-ibp"}, "bounds .* a has ibp, b has crown-ibp; choose .* --bounds"),
        ({"arithmetic": "float32"}, "arithmetic .* a has real, b has float32"),
        ({"elide": False}, "margins .* a has elided ones, b has plain ones"),
        ({"domain": (-1.0, 1.0)}, r"domains .* a has \[0.0, 1.0\], b has \[-1.0, 1.0\]"),
        ({"names": list("abcd")}, "classes .* a has 0, 1, 2, 3, b has a, b, c, d; give"),
        ({"names": list("ab"), "certified": False}, "classes .* b has a, b"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, changes, words):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", method="FastIBP", **changes)
    with pytest.raises(InvalidInput, match=words):
        collect([tmp_path])


def test_other_test_images_are_refused_where_records_tell(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", seed=1, images=7)
    make_run(tmp_path / "c", seed=2, images=7)
    assert collect([tmp_path]).groups[0].n == 3  # older records do not tell
    make_run(tmp_path / "d", seed=3, images=8)
    with pytest.raises(InvalidInput, match=r"test images .* b has checksum 00000007, d has"):
        collect([tmp_path])


def test_choices_leave_one_kind(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", dataset="mnist", max_radius=8.8 / 255)
    make_run(tmp_path / "c", dataset="mnist", bounds="crown-ibp", arithmetic="float32")
    assert [run.name for run in collect([tmp_path], dataset="digits").runs] == ["a"]
    assert [run.name for run in collect([tmp_path], max_radius=0.03451).runs] == ["b"]
    assert [run.name for run in collect([tmp_path], bounds="crown-ibp").runs] == ["c"]
    assert [run.name for run in collect([tmp_path], arithmetic="float32").runs] == ["c"]
    with pytest.raises(InvalidInput, match=r"`dataset` must be .* digits, mnist; got cifar10"):
        collect([tmp_path], dataset="cifar10")


# -- groups -------------------------------------------------------------------------------


def test_seeds_make_a_group_with_their_mean_and_spread(tmp_path):
    runs = [read_run(make_run(tmp_path / str(seed), seed=seed)) for seed in (2, 0, 1)]
    (group,) = group_runs(runs)
    assert [run.seed for run in group.runs] == [0, 1, 2]
    assert group.label == "ACERT, \u03ba 0"
    for name in ("accuracy", "acr", "art"):
        values = [getattr(run.certification, name) for run in runs]
        assert getattr(group, name).mean == pytest.approx(np.mean(values), rel=1e-12)
        assert getattr(group, name).std == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    curves = [run.certification.curve.accuracy for run in runs]
    assert group.curve.mean == pytest.approx(np.mean(curves, axis=0))
    assert (group.curve.low == np.min(curves, axis=0)).all()
    assert (group.curve.high == np.max(curves, axis=0)).all()
    loss = group.track("loss")
    assert loss.x.tolist() == [1, 2, 3, 4]
    assert loss.mean[0] == pytest.approx(2.1)
    assert loss.high[0] - loss.low[0] == pytest.approx(0.2)
    assert group.track("art").x.tolist() == [2, 4]
    assert group.track("unheard") is None
    assert group.gap is None
    assert group.attacked_acr is None


def test_a_whole_number_is_one_setting_however_it_is_written(tmp_path):
    make_run(tmp_path / "a", kappa=0, max_radius=1, settings={"domain": [0, 1]})
    make_run(tmp_path / "b", kappa=0.0, max_radius=1.0, seed=1, settings={"domain": [0.0, 1.0]})
    (group,) = collect([tmp_path]).groups
    assert group.n == 2
    assert group.label == "ACERT, \u03ba 0"


@pytest.mark.parametrize("arrays", [False, True])
def test_a_run_from_before_optimizers_were_a_setting_is_one_of_adam(tmp_path, arrays):
    adam = {"optimizer": to_config(acert.Adam())}
    make_run(tmp_path / "older", seed=0, arrays=arrays)
    make_run(tmp_path / "newer", seed=1, arrays=arrays, settings=adam)
    make_run(tmp_path / "again", seed=1, arrays=arrays)
    (group,) = collect([tmp_path]).groups
    assert [run.seed for run in group.runs] == [0, 1]


def test_a_track_needs_a_common_epoch(tmp_path):
    runs = [read_run(make_run(tmp_path / str(seed), seed=seed)) for seed in (0, 1)]
    records.write_metrics(runs[1].folder, [{"epoch": 9, "loss": 1.0}])
    (group,) = group_runs([runs[0], read_run(runs[1].folder)])
    assert group.track("loss") is None


def test_the_gap_of_a_group_is_that_of_its_attacked_runs(tmp_path):
    runs = [
        read_run(make_run(tmp_path / str(seed), seed=seed, attacked=seed > 0)) for seed in (0, 1, 2)
    ]
    (group,) = group_runs(runs)
    attacks = [run.certification.attack for run in runs[1:]]
    lower, upper = group.gap
    assert upper.mean == pytest.approx(np.mean([one.curve.accuracy for one in attacks], axis=0))
    assert lower.mean == pytest.approx(np.mean([one.certified.accuracy for one in attacks], axis=0))
    assert group.attacked_acr == metrics.spread([one.acr for one in attacks])


def test_groups_and_series_come_in_the_order_of_legends(tmp_path):
    for method in ("Standard", "Zeta", "FastIBP", "Alpha", "Acert"):
        for kappa in (0.5, 0.0):
            make_run(tmp_path / f"{method}-{kappa}", method=method, kappa=kappa)
    groups = collect([tmp_path]).groups
    methods = ["ACERT", "FastIBP", "Standard", "Alpha", "Zeta"]
    assert [series.label for series in series_of(groups)] == methods
    assert [group.kappa for group in groups] == [0.0, 0.5] * 5
    assert [group.kappa for group in smallest_kappa(groups)] == [0.0] * 5


def test_settings_are_told_apart_where_a_class_and_the_data_differ_too(tmp_path):
    def solver(kind: str, steps: int) -> dict[str, object]:
        return {"method": {"class": "Acert", "kappa": 0.0,
                           "solver": {"class": kind, "max_steps": steps}}}  # fmt: skip

    make_run(tmp_path / "a", settings=solver("Brent", 1))
    make_run(tmp_path / "b", settings=solver("Brent", 2))
    for name, sha in (("c", "11"), ("d", "22")):
        folder = make_run(tmp_path / name, settings=solver("PowerLaw", 2))
        _config(lambda config, sha=sha: config["data"].update(sha256=sha))(folder)
    variants = {group.runs[0].name: group.variant for group in collect([tmp_path]).groups}
    assert variants["a"] == "solver Brent, root steps 1"
    assert variants["b"] == "solver Brent, root steps 2"
    # These two differ in their data alone.
    assert variants["c"] == "solver PowerLaw, data.sha256 11"
    assert variants["d"] == "solver PowerLaw, data.sha256 22"


def test_variants_of_a_method_are_told_apart(tmp_path):
    full = {"radius_schedule": {"class": "FullRadius"}}
    many = {
        "method": {"class": "Acert", "kappa": 0.0, "solver": {"class": "Brent", "max_steps": 9}}
    }
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", settings=many)
    make_run(tmp_path / "c", settings=full)
    make_run(tmp_path / "d", method="FastIBP")
    labels = {group.runs[0].name: group.label for group in collect([tmp_path]).groups}
    assert labels == {
        "a": "ACERT, root steps 2, schedule SmoothRadius, \u03ba 0",
        "b": "ACERT, root steps 9, schedule SmoothRadius, \u03ba 0",
        "c": "ACERT, root steps 2, schedule FullRadius, \u03ba 0",
        "d": "FastIBP, \u03ba 0",
    }


def test_of_many_settings_those_that_most_share_go_without_saying(tmp_path):
    def changed(name, **settings):
        make_run(tmp_path / name, settings=settings)

    adam = {"class": "Adam", "momentum": 0.9, "peak_momentum": None}
    for kappa in (0.0, 0.25, 0.5):
        method = {"class": "Acert", "kappa": kappa, "solver": {"class": "Brent", "max_steps": 2}}
        changed(f"kappa {kappa}", optimizer=adam, method=method)
    one = {"class": "Acert", "kappa": 0.0, "solver": {"class": "Brent", "max_steps": 1}}
    changed("one step", optimizer=adam, method=one)
    changed("cycle", optimizer={**adam, "peak_momentum": 0.85})
    changed("tf32", optimizer=adam, precision="tf32")
    changed("longer", optimizer=adam, epochs=9)
    groups = collect([tmp_path]).groups
    assert {group.runs[0].name: group.variant for group in groups} == {
        "kappa 0.0": "", "kappa 0.25": "", "kappa 0.5": "", "one step": "root steps 1",
        "cycle": "peak momentum 0.85", "tf32": "precision tf32", "longer": "epochs 9",
    }  # fmt: skip


def test_runs_without_a_field_are_not_taken_for_those_with_its_usual_value(tmp_path):
    """As records are that are older than the field."""
    base = {"l1": 0.1, "regularization": 0.5}
    make_run(tmp_path / "older", settings=base)
    for name, change in (("usual", {}), ("l1", {"l1": 0.2}), ("weight", {"regularization": 0.7})):
        make_run(tmp_path / name, settings={**base, **change, "elide": True, "clip_norm": 9.0})
    variants = [group.variant for group in collect([tmp_path]).groups]
    assert len(set(variants)) == 4


def test_a_share_of_bounds_is_always_named(tmp_path):
    make_run(tmp_path / "a", settings={"method": {"class": "CcIBP", "kappa": 0.0,
                                                  "bound_share": 0.3}})  # fmt: skip
    make_run(tmp_path / "b", method="FastIBP")
    assert [group.variant for group in collect([tmp_path]).groups] == ["", "bound share 0.3"]
    method = {"class": "CcIBP", "kappa": 0.0, "bound_share": 0.3}
    for name, change in (("c", {"epochs": 9}), ("d", {"l1": 0.2}), ("e", {"clip_norm": 3.0})):
        make_run(tmp_path / name, settings={"method": method, **change})
    make_run(tmp_path / "f", settings={"method": {**method, "bound_share": 0.5}})
    groups = [group for group in collect([tmp_path]).groups if group.method == "CC-IBP"]
    assert all("bound share" in group.variant for group in groups)
    assert len({group.variant for group in groups}) == 5


def test_numbers_of_variants_have_six_digits_where_those_tell_them_apart(tmp_path):
    make_run(tmp_path / "a", settings={"max_radius": 8 / 255})
    make_run(tmp_path / "b", settings={"max_radius": 8.8 / 255})
    variants = [group.variant for group in collect([tmp_path]).groups]
    assert variants == ["max radius 0.0313725", "max radius 0.0345098"]
    make_run(tmp_path / "c", settings={"max_radius": 0.0313725})
    variants = [group.variant for group in collect([tmp_path]).groups]
    assert variants == [f"max radius {radius}" for radius in (0.0313725, 8 / 255, 8.8 / 255)]


def test_training_data_are_named_only_where_nothing_else_differs(tmp_path):
    for name, sha in (("a", "11"), ("b", "22")):
        folder = make_run(tmp_path / name)
        _config(lambda config, sha=sha: config["data"].update(sha256=sha))(folder)
    assert [group.variant for group in collect([tmp_path]).groups] == [
        "data.sha256 11", "data.sha256 22",
    ]  # fmt: skip
    _settings(epochs=9)(tmp_path / "b")
    assert [group.variant for group in collect([tmp_path]).groups] == ["epochs 4", "epochs 9"]
