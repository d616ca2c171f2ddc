"""Every benchmark runs in seconds with tiny settings, and writes what it says."""

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks import architectures, certify, crown, gradients, measuring, performance, step, train
from benchmarks.products import Layout, Products
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import acert
from acert import models
from acert.methods import METHODS

CPU = torch.device("cpu")


def written(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    place = record.get("environment") or record["runs"][-1]["environment"]
    assert place["device"] == "cpu"
    assert place["commit"]
    assert place["torch"] == torch.__version__
    return record


# -- counting and timing -------------------------------------------------------------------


def convolution_and_product():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    hidden = torch.conv2d(images, weight, padding=1).flatten(1)
    (hidden @ torch.randn(256, 5, requires_grad=True)).sum().backward()


def test_products_are_counted_by_hand_and_as_pytorch_counts_them():
    with Products() as products:
        convolution_and_product()
    forward = 2 * (2 * 64 * 4 * 27) + 2 * (2 * 256 * 5)  # multiplications and additions
    assert products.flop == {torch.float32: 3 * forward}
    with FlopCounterMode(display=False) as counter:
        convolution_and_product()
    assert products.gflop == counter.get_total_flops() / 1e9


@pytest.mark.parametrize("shared", [False, True])
def test_bare_products_are_the_same_calls_again(shared):
    with Products() as products:
        convolution_and_product()
    again = products.bare(shared=shared)
    with Products() as second:
        again()
    assert second.flop == products.flop
    assert [call[1:] for call in second.calls] == [call[1:] for call in products.calls]


def test_a_tensor_is_made_with_its_strides_expanded_ones_included():
    for tensor in (torch.ones(3, 1).expand(3, 4), torch.ones(2, 3).T, torch.ones(5)[::2]):
        layout = Layout.of(tensor)
        assert Layout.of(layout.random()) == layout


def test_subjects_take_turns_and_warm_ups_do_not_count():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    seconds = measuring.in_turns(runs, CPU, repeats=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert [len(values) for values in seconds.values()] == [2, 2]


def test_times_and_ratios():
    assert measuring.timed(lambda: time.sleep(0.02), CPU) >= 0.02
    assert measuring.median_ratio([2.0, 9.0, 4.0], [1.0, 1.0, 1.0]) == 4.0


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # PyTorch's, before 2.12
def test_peak_memory_is_that_of_the_tensors_alive_together():
    def run():
        first = torch.zeros(1000, 1000)
        del first
        second, third = torch.zeros(1000, 500), torch.zeros(1000, 500)
        return second, third

    peak = measuring.peak_bytes(run, CPU)
    assert 4_000_000 <= peak < 4_100_000


def test_a_table_has_a_dash_for_what_a_row_lacks():
    rows = [{"name": "a", "ms": 1.23456}, {"name": "bc", "kernels": 7}]
    assert measuring.table(rows).splitlines() == [
        "name     ms  kernels", "a     1.235        -", "bc        -        7",
    ]  # fmt: skip


# -- step.py -------------------------------------------------------------------------------


def test_step_measures_every_method(tmp_path, capsys):
    out = tmp_path / "step.json"
    step.main([
        "--device", "cpu", "--width", "1", "--batch-size", "4", "--epoch", "1", "--repeats", "1",
        "--peer", "off", "--shape", "mnist", "--out", str(out),
    ])  # fmt: skip
    rows = written(out)["rows"]
    assert {row["method"] for row in rows} == set(METHODS)
    found = {(row["method"], row["regularized"]): row for row in rows}
    assert ("standard", True) not in found
    assert len(rows) == 2 * len(METHODS) - 1
    for row in rows:
        assert row["ms"] > 0
        assert row["peak_mib"] > 0
        assert 0 < row["share"] < 1
    # One pass with center and radius beside the clean one; the image needs no gradient. ACERT
    # adds three passes without gradient, each twice the forward pass of the standard step.
    plain, fast, acert = (found[name, False]["gflop"] for name in ("standard", "fastibp", "acert"))
    assert 2.9 * plain < fast < 3.1 * plain
    assert 1.8 * plain < acert - fast < 2.4 * plain
    printed = capsys.readouterr().out
    assert printed.count("acert-fast") == 4  # two rows as they come, two in the table


def test_step_leaves_out_what_leaves_the_range(tmp_path, capsys):
    out = tmp_path / "step.json"
    step.main([
        "--device", "cpu", "--width", "1", "--batch-size", "4", "--epoch", "1", "--repeats", "1",
        "--peer", "off", "--methods", "crown-ibp,standard", "--precisions", "float16",
        "--out", str(out),
    ])  # fmt: skip
    assert [row["method"] for row in written(out)["rows"]] == ["standard"]
    assert "crown-ibp, float16: left out" in capsys.readouterr().out


def test_step_measures_the_same_in_processes_of_their_own(tmp_path, capsys):
    words = [
        "--device", "cpu", "--width", "1", "--batch-size", "4", "--epoch", "1", "--repeats", "1",
        "--peer", "off", "--methods", "standard,fastibp", "--out", str(tmp_path / "step.json"),
    ]  # fmt: skip
    alone, apart = [], []
    for found, jobs in ((alone, "1"), (apart, "2")):
        step.main([*words, "--jobs", jobs])
        record = written(tmp_path / "step.json")
        assert record["peaks_tflops"].keys() == {"float32"}
        names = ("method", "precision", "regularized", "gflop")
        found += [[row[name] for name in names] for row in record["rows"]]
    assert alone == apart
    assert len(apart) == 3


def test_step_says_which_process_failed_and_keeps_the_others(tmp_path, monkeypatch, capsys):
    out = tmp_path / "step.json"
    whole = step.cases

    def broken(options):
        standard, *_ = whole(options)
        yield replace(standard, network="none")
        yield standard

    monkeypatch.setattr(step, "cases", broken)
    with pytest.raises(SystemExit, match="rows without figures failed"):
        step.main([
            "--device", "cpu", "--width", "1", "--batch-size", "4", "--epoch", "1",
            "--repeats", "1", "--peer", "off", "--jobs", "2", "--out", str(out),
        ])  # fmt: skip
    assert [row["method"] for row in written(out)["rows"]] == ["standard"]
    lines = capsys.readouterr().out.splitlines()
    assert "method standard, precision float32, regularized False" in lines  # and no figures


def test_step_refuses_unknown_names(tmp_path, capsys):
    with pytest.raises(SystemExit):
        step.main(["--methods", "magic", "--out", str(tmp_path / "x.json")])
    assert "--methods must be of standard" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="`--peer` must be auto, off or a folder"):
        step.main(["--device", "cpu", "--peer", str(tmp_path)])


def test_cpu_targets_compare_the_step_with_its_own_products(tmp_path):
    out = tmp_path / "targets.json"
    threads = torch.get_num_threads()
    step.main([
        "--cpu-targets", "--widths", "1,1", "--batch-size", "4", "--repeats", "3", "--peer", "off",
        "--threads", "1", "--shape", "mnist", "--out", str(out),
    ])  # fmt: skip
    assert torch.get_num_threads() == threads
    targets = written(out)["targets"]
    assert list(targets) == ["cnn7", "small_cnn"]
    for found in targets.values():
        assert found["times_bare"] > 1
        assert "times_faster" not in found
        assert found["ms"]["acert"] >= found["ms_least"]["acert"]


# -- certify.py ----------------------------------------------------------------------------


def test_certify_says_where_the_time_goes(tmp_path, capsys):
    out = tmp_path / "certify.json"
    certify.main([
        "--quick", "--device", "cpu", "--width", "1", "--images", "6", "--batch-sizes", "6,4",
        "--arithmetics", "real,float32", "--peer", "off", "--profile", "--out", str(out),
    ])  # fmt: skip
    record = written(out)
    assert [(row["arithmetic"], row["batch_size"]) for row in record["rows"]] == [
        ("real", 6), ("real", 4), ("float32", 6), ("float32", 4),
    ]  # fmt: skip
    first, second = record["rows"][:2]
    # Batches change the time, not the result.
    assert first["accuracy"] == second["accuracy"] > 0
    assert first["acr"] == pytest.approx(second["acr"], rel=1e-4)
    for row in record["rows"]:
        assert row["seconds"] > 0
        assert min(row["guess_s"], row["proof_s"], row["rest_s"]) > 0
        assert 1 <= row["proven_evaluations"] <= row["most_evaluations"]
    assert [row["library"] for row in record["passes"]] == ["acert", "acert"]
    assert record["profile"]["host_waits"] > 0
    assert "aten::mkldnn_convolution" in capsys.readouterr().out


# -- train.py ------------------------------------------------------------------------------


def test_train_appends_a_finished_run_with_its_art(tmp_path):
    out = tmp_path / "train.json"
    words = ["--device", "cpu", "--dataset", "digits", "--epochs", "1", "--images", "16"]
    for seed in ("0", "1"):
        train.main([*words, "--seed", seed, "--out", str(out)])
    runs = written(out)["runs"]
    assert [run["seed"] for run in runs] == [0, 1]
    for run in runs:
        assert run["certified"] == 16
        assert run["art"] == pytest.approx((run["accuracy"] * run["acr"]) ** 0.5)
        assert min(run["first_step_s"], run["training_s"], run["certify_s"]) > 0


def test_the_clock_starts_with_the_process():
    assert 0 < time.time() - train.process_start() < 3600


# -- gradients.py --------------------------------------------------------------------------


def test_gradients_with_each_rounding(tmp_path, capsys):
    out = tmp_path / "gradients.json"
    words = ["--device", "cpu", "--quick", "--images", "256", "--width", "2", "--epochs", "1"]
    gradients.main([*words, "--batches", "1", "--out", str(out)])
    assert "noise_percent" in capsys.readouterr().out
    found = {row["rounded"]: row for row in written(out)["rows"]}
    assert found.keys() == gradients.CASES.keys()
    assert all(row["noise_percent"] > 0 for row in found.values())
    # Of one batch the bias is the noise; rounding gradients alone moves no radius.
    for row in found.values():
        assert row["bias_percent"] == pytest.approx(row["noise_percent"], rel=1e-4)
    assert found["float16: all of the backward pass"]["radius_percent"] == 0
    assert found["bfloat16: all"]["radius_percent"] > found["float16: all"]["radius_percent"] > 0


def test_tf32_keeps_ten_bits():
    x = torch.tensor([1.0, 1 + 2.0**-10, 1 + 2.0**-11 + 2.0**-20, -3.14159])
    assert gradients.tf32(x).tolist() == [1.0, 1 + 2.0**-10, 1 + 2.0**-10, -3.140625]


def test_the_command_is_that_of_the_repository_wherever_it_was_called(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [step.__file__, "--repeats", "3"])
    found = measuring.facts(torch.device("cpu"))["command"]
    assert found == "python benchmarks/step.py --repeats 3"
    monkeypatch.setattr("sys.argv", ["pytest", "-q"])
    assert measuring.facts(torch.device("cpu"))["command"] == "python pytest -q"


# -- performance.py ------------------------------------------------------------------------


def test_the_page_shows_the_records():
    texts = [page.read_text(encoding="utf-8") for page in performance.PAGES]
    for name in performance.COMMANDS:
        assert sum(f"<!-- {name}:begin -->" in text for text in texts) == 1
    assert [*map(performance.rendered, texts)] == texts, "run `python benchmarks/performance.py`"


def test_a_page_without_records_says_how_to_make_them(tmp_path):
    page = "<!-- step-cpu:begin -->old<!-- step-cpu:end -->"
    assert "--cpu-targets` writes it" in performance.rendered(page, tmp_path)


def test_tables_of_made_up_records(tmp_path):
    place = {"gpu": "H200", "torch": "2.11", "commit": "0123456789", "command": "python x.py"}
    row = {"method": "acert", "precision": "tf32", "regularized": False, "ms": 5.0,
           "peak_mib": 900.0, "gflop": 575.0, "floor_ms": 1.5, "share": 0.3}  # fmt: skip
    record = {"rows": [row, row | {"regularized": True, "ms": 6.0}], "peaks_tflops": {"tf32": 380},
              "shape": "cifar10", "width": 64, "batch_size": 128, "root_steps": 2,
              "environment": place}  # fmt: skip
    (tmp_path / "step-cuda.json").write_text(json.dumps(record))
    made = performance.rendered("<!-- step-cuda:begin --><!-- step-cuda:end -->", tmp_path)
    assert "| acert, tf32 | 5 | 6 | - | - | 900 | 575 | 1.5 | 30 % |" in made
    assert "commit 0123456" in made
    passes = [{"library": "acert", "batch_size": 500, "seconds": 1.7}]
    row = dict.fromkeys(("seconds", "guess_s", "proof_s", "rest_s", "peak_mib"), 1.0)
    row |= {"arithmetic": "real", "batch_size": 500, "proven_evaluations": 4.5}
    record = {"rows": [row], "passes": passes, "images": 10_000, "network": "c0",
              "environment": place}  # fmt: skip
    (tmp_path / "certify-cuda.json").write_text(json.dumps(record))
    made = performance.rendered("<!-- certify-cuda:begin --><!-- certify-cuda:end -->", tmp_path)
    assert "| real | 500 | 1 | 1 | 1 | 1 | 4.5 | 1 |" in made
    assert "| acert | 500 | 1.7 |" in made
    run = {"dataset": "cifar10", "method": "acert", "kappa": 0.0, "precision": "tf32",
           "epochs": 200, "seed": 1, "first_step_s": 50.0, "training_s": 300.0, "epoch_s": 1.5,
           "certify_s": 4.0, "certified": 10_000, "accuracy": 62.0, "acr": 41.5, "art": 50.7239,
           "environment": place}  # fmt: skip
    (tmp_path / "train-cuda.json").write_text(json.dumps({"runs": [run]}))
    made = performance.rendered("<!-- train-cuda:begin --><!-- train-cuda:end -->", tmp_path)
    assert "| 50 | 300 | 1.5 | 4 | 62.00 | 41.50 | 50.72 |" in made
    made = performance.rendered("<!-- targets:begin --><!-- targets:end -->", tmp_path)
    step = "tf32 5.00; in training tf32 3.84"  # 1.5 s for 391 steps
    assert f"| ACERT step, two root steps, ms | 4.2 | 2.2 | {step} |" in made
    assert "| FastIBP step, ms | 3.2 | 1.8 | - |" in made
    assert "| 200 epochs of ACERT from the first step, min | 5.6 | 3 | tf32 5.00 |" in made
    assert "| ART, mean of seeds 0 and 1 | 50.7 | 51.3 | - |" in made  # no run folder there
    # 33 passes over 48 MB of weights at 4.8 TB/s are 0.33 ms of the step that no GPU shares.
    record = {"ms": {"plain": 6.33, "joined": 6.83}, "gradient_mib": 48e6 / 2**20,
              "precision": "tf32", "steps": 5, "largest_loss_difference": 1e-6,
              "shape": "cifar10", "width": 64, "batch_size": 128, "environment": place}  # fmt: skip
    (tmp_path / "processes-cuda.json").write_text(json.dumps(record))
    made = performance.rendered("<!-- scale:begin --><!-- scale:end -->", tmp_path)
    two = 0.33 + 3.0 + 0.5 + 1e3 * (48e6 / 360e9 + 30 * 1e-5)
    assert f"| 2 | {two:.1f} ({6.33 / two:.1f} times faster) |" in made
    assert "| 1 | 6.3 (1.0 times faster) |" in made


def test_bounds_of_networks_trained_without_them(tmp_path):
    out = tmp_path / "crown.json"
    crown.main(["--images", "3", "--epochs", "1", "--peer", "off", "--out", str(out)])
    record = written(out)
    assert len(record["rows"]) == len(crown.networks()) + 1
    for row in record["rows"].values():
        assert row["radius"]["ibp"] <= row["radius"]["crown"] <= row["attack"]
    assert "| 2 x 64, ReLU |" in crown.table(record)


def test_the_table_of_bounds_is_that_of_its_record():
    wanted = crown.table(json.loads(crown.RECORD.read_text(encoding="utf-8")))
    page = crown.PAGE.read_text(encoding="utf-8")
    assert f"<!-- crown-cpu:begin -->\n{wanted}\n<!-- crown-cpu:end -->" in page


# -- architectures -------------------------------------------------------------------------


def test_architectures_have_bounds_or_are_refused_by_name(tmp_path, monkeypatch):
    class Hyperbolic(nn.Module):
        def forward(self, images):
            return torch.cosh(images.flatten(1)[:, :4])

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(40 * 40 * 3, 2)

        def forward(self, images):
            return self.head(images.flatten(1))

    made = {
        "small": models.small_resnet((3, 32, 32), 10, width=2),
        "cosh": Hyperbolic(),
        "own": Large(),
    }

    def create_model(name, **words):
        assert words == {"pretrained": False, "num_classes": 10}
        made[name].default_cfg = {"input_size": (3, 40, 40)}
        return made[name]

    timm = SimpleNamespace(create_model=create_model, __version__="0")
    monkeypatch.setitem(sys.modules, "timm", timm)
    out = tmp_path / "record.json"
    architectures.main(["--names", "small cosh own", "--out", str(out)])
    record = written(out)
    small, cosh, own = record["rows"].values()
    assert (small["size"], cosh["size"], own["size"]) == (32, 32, 40)
    assert cosh["refused"].startswith("torch.cosh: it has no bound rule")
    for row in (small, own):
        assert row["times"] > 0
        assert row["finite"]
        assert row["beyond"] < 1e-5
        assert row["off"] < 1e-5
    text = architectures.listed(record)
    assert "**2 of 3** have bounds" in text
    assert "- Refused, torch.cosh: it has no bound rule: `cosh`." in text


def test_the_list_of_architectures_is_that_of_its_record():
    wanted = architectures.listed(json.loads(architectures.RECORD.read_text(encoding="utf-8")))
    page = architectures.PAGE.read_text(encoding="utf-8")
    assert f"<!-- architectures:begin -->\n{wanted}\n<!-- architectures:end -->" in page


def test_a_logit_outside_of_its_bounds_is_seen(monkeypatch):
    interval_bounds = acert.interval_bounds

    def narrow(model, lower, upper):
        box = interval_bounds(model, lower, upper)
        return acert.Interval.ball(box.center, 0.1 * box.radius)

    monkeypatch.setattr(acert, "interval_bounds", narrow)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3))
    assert architectures.examined(model)["beyond"] > 1e-3
