"""A whole training step compiles as one graph and equals eager."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F

import acert
from acert import RootStatus, models
from acert.bounds.margin import margin

# Made outside: Dynamo cannot call the method of an object that was made inside the graph.
SOLVERS = {steps: acert.Brent(max_steps=steps) for steps in (1, 2)}
CAP = 1e-3


def step(model, images, labels, solver):
    """Radii and loss of one adaptive step: clean pass, root finding, worst-case logits."""
    logits, statistics = acert.clean_pass(model, images)
    with torch.no_grad():
        cap = torch.full_like(images[:, 0, 0, 0], CAP)
        root = solver.solve(
            lambda r: acert.certified_margin(model, images, labels, r, statistics=statistics),
            torch.zeros_like(cap),
            cap,
            f_lower=margin(logits, labels),
            fixed_steps=True,
        )
    worst_case = acert.worst_case_logits(
        model, images, labels, root.estimate, statistics=statistics
    )
    loss = 0.75 * F.cross_entropy(worst_case, labels) + 0.25 * F.cross_entropy(logits, labels)
    return loss, root


def small_cnn7(dtype):
    model = models.ibp_init_(models.cnn7((1, 4, 4), 3, width=1)).train().to(dtype)
    images = torch.rand(6, 1, 4, 4).to(dtype)
    with torch.no_grad():
        labels = copy.deepcopy(model)(images).argmax(1)
    labels[0] = (labels[0] + 1) % 3
    return model, images, labels


def outcome(function, model, images, labels, solver):
    """All that a step produces and changes."""
    model.zero_grad()
    loss, root = function(model, images, labels, solver)
    loss.backward()
    return {
        "loss": loss.detach(),
        **{f"root.{name}": value for name, value in root._asdict().items()},
        **{f"grad.{name}": p.grad.clone() for name, p in model.named_parameters()},
        **{f"buffer.{name}": buffer.clone() for name, buffer in model.named_buffers()},
    }


def assert_equals_eager(compiled, model, images, labels, solver, *, ends, **tolerance):
    twin = copy.deepcopy(model)
    found = outcome(compiled, model, images, labels, solver)
    expected = outcome(step, twin, images, labels, solver)
    for name, value in expected.items():
        # A step close to the root may fall on either side of it, which moves an end far.
        if ends or name not in ("root.lower", "root.upper"):
            torch.testing.assert_close(
                found[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
    return found


def check(backend, steps, *, dtype=torch.float32, **options):
    model, images, labels = small_cnn7(dtype)
    solver = SOLVERS[steps]
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    first = assert_equals_eager(compiled, model, images, labels, solver, **options)
    # The step is worth comparing: all kinds of samples, and every weight gets a gradient.
    statuses = set(first["root.status"].tolist())
    assert {RootStatus.POSITIVE_THROUGHOUT, RootStatus.UNCONVERGED} <= statuses
    # Biases in front of batch norm have none.
    weights = [name for name, _ in model.named_parameters() if name.endswith("weight")]
    assert all(bool(first[f"grad.{name}"].any()) for name in weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    with torch.compiler.set_stance("fail_on_recompile"):
        second = assert_equals_eager(compiled, model, images, labels, solver, **options)
    assert not torch.allclose(first["loss"], second["loss"])
    assert not torch.equal(first["buffer.1.running_mean"], second["buffer.1.running_mean"])


@pytest.mark.slow
def test_a_step_under_aot_eager_equals_eager():
    check("aot_eager", 2, dtype=torch.float64, ends=True, rtol=1e-10, atol=1e-13)


# PyTorch's own warning: Inductor imports modules that still use TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler"
)
def test_a_step_under_inductor_equals_eager():
    # Radii are of the order of 1e-3, and gradients of 1e-2.
    check("inductor", 1, ends=False, rtol=1e-4, atol=1e-6)
