"""Classifiers as ONNX files: with their radius, or plain.

Nothing is optimised while writing: exporters and runtimes compare constants with 0 and 1 to a
tolerance, so that a network divided by 1.000001 would come out as another one.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from acert.bounds.checks import check_images, check_model
from acert.deploy.classifier import CertifiedClassifier
from acert.deploy.plain_graph import simplify
from acert.errors import AcertError, InvalidInput, UnsupportedOperation
from acert.extras import needs
from acert.radius import certified_radius
from acert.records import make_writable
from acert.records.files import write
from acert.version import __version__

__all__ = ["check_evaluation", "write_certified", "write_plain"]

_PACKAGES = ("onnx", "onnxscript")
_OLDEST = "2.11"
_MEANING = (
    "largest distance proven: no image inside the domain whose pixels each differ from the given "
    "ones by at most this much is predicted as another class; 0 where the image is outside the "
    "domain or not finite, where the logits are not finite or tie, or where nothing is proven"
)
_HOLDS = (
    "this network evaluated in IEEE float32 as sums of products in any order, as onnxruntime's "
    "CPU provider does, the radius itself in IEEE float64; not TF32, float16, bfloat16, quantised "
    "layers, Winograd or FFT convolutions"
)
# Float64 operations without a kernel in onnxruntime's CPU provider, as far as bounds may use them.
_NO_DOUBLE = (
    "AveragePool", "Celu", "Col2Im", "Conv", "ConvTranspose", "Elu", "Erf", "Gelu",
    "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "LeakyRelu", "LpPool", "Mish",
    "PRelu", "Resize", "Selu", "Softplus",
)  # fmt: skip

# What a runtime computes by other means than PyTorch, and not within the bounds' rounding.
_INEXACT = {
    "aten.log_sigmoid.default": "logsigmoid comes out as log(sigmoid(x)), minus infinity below -18 "
    "in onnxruntime; write it as x.clamp(max=0) - torch.log(1 + torch.exp(-x.abs()))",
}


def write_certified(
    classifier: CertifiedClassifier,
    images: Tensor,
    path: Path,
    *,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Writes one ONNX file: `images` in; `logits`, `prediction` and `radius` out, any batch size.

    `images` are a few inputs of the kind that it will get: the model is certified on them first,
    and refused if that fails. `record` says how the model was trained; it is kept as JSON in the
    file's metadata, beside the largest radius, the domain and what the radius means.
    """
    if torch.__version__ < _OLDEST:
        raise AcertError(
            f"exporting a model with its radius needs PyTorch {_OLDEST} or newer; "
            f"{torch.__version__} is installed. The exporter of older ones fails on bounds"
        )
    certified_radius(
        classifier.model, images[:2], max_radius=classifier.max_radius, arithmetic="float32",
        domain=classifier.domain, elide=classifier.elide,
    )  # fmt: skip
    outputs = ["logits", "prediction", "radius"]
    program = _program(classifier, images, outputs, batch=None, refused=_INEXACT)
    lacking = sorted(set(_lacking(program.model.graph)))
    if lacking:
        raise UnsupportedOperation(
            f"the model cannot be exported with its radius: the bounds need {', '.join(lacking)} "
            "in float64, which onnxruntime's CPU provider lacks"
        )
    _write(program, path, {
        "max_radius": repr(classifier.max_radius),
        "domain": json.dumps(classifier.domain),
        "norm": "linf",
        "steps": str(classifier.steps),
        "radius": _MEANING,
        "holds_for": _HOLDS,
        "training": json.dumps(record or {}),
    })  # fmt: skip


def write_plain(
    model: nn.Module,
    images: Tensor,
    path: Path,
    *,
    batch: int | None = None,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Writes the model alone as one ONNX file: `images` in, `logits` out.

    `images` are as for `write_certified`; the model is in evaluation mode. `batch` fixes the
    batch size, which some verifiers need.
    """
    check_model(model, images)
    check_evaluation(model)
    check_images(images, None)
    program = _program(model, images, ["logits"], batch=batch)
    simplify(program.model.graph)
    _write(program, path, {"training": json.dumps(record or {})})


def check_evaluation(model: nn.Module) -> None:
    """Refuses a model that would be written as it trains: with noise, and a batch's statistics."""
    training = [name or "itself" for name, module in model.named_modules() if module.training]
    if training:
        raise InvalidInput(
            f"`model` must be in evaluation mode (`model.eval()`); got {training[0]} in training"
        )


class _Refused(Exception):
    """An operation that is not to be in an exported graph."""


def _program(
    model: nn.Module, images: Tensor, outputs: list[str], *, batch: int | None,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Any:  # fmt: skip
    """The model as an ONNX program; a failure names the operation that has no counterpart.

    `refused` are operations that are not to be in it, with the reason.
    """
    _check_installed()
    # Two, because PyTorch takes a size of one for a constant.
    count = 2 if batch is None else batch
    example = images[:1].expand(count, *images.shape[1:]).clone()
    shapes = ({0: torch.export.Dim("batch")} if batch is None else None,)
    try:
        with _quiet():
            exported = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
            for node in exported.graph.nodes:
                if str(node.target) in refused:
                    raise _Refused(refused[str(node.target)])
            return torch.onnx.export(
                exported, dynamo=True, optimize=False, verbose=False,
                input_names=["images"], output_names=outputs,
            )  # fmt: skip
    except _Refused as reason:
        raise UnsupportedOperation(
            f"the model cannot be exported with its radius: {reason}"
        ) from None
    # Everything: PyTorch's exporter wraps what went wrong in errors of its own, and a model may
    # raise anything while it is traced.
    except Exception as error:
        raise UnsupportedOperation(f"the model cannot be exported: {_reason(error)}") from error


def _write(program: Any, path: Path, facts: Mapping[str, str]) -> None:
    from onnx_ir.passes import common

    model = program.model
    # The exporter notes where each node came from, with the paths of this machine.
    common.ClearMetadataAndDocStringPass()(model)
    _cast_by_type(model.graph)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.DeduplicateInitializersPass()(model)
    model.producer_name, model.producer_version = "acert", __version__
    for name, text in facts.items():
        model.metadata_props[name] = text
    make_writable(path.parent)
    write(path, [program.model_proto.SerializeToString()])


def _cast_by_type(graph: Any) -> None:
    """Casts to the type of another value become casts to a type: no runtime has a kernel else."""
    from onnx_ir import convenience, node, traversal

    for old in list(traversal.RecursiveGraphIterator(graph)):
        if old.op_type != "CastLike":
            continue
        value, like = old.inputs
        assert value is not None and like is not None and old.graph is not None
        kind = _kind(like)
        assert kind is not None
        new = node("Cast", [value], {"to": kind.value})
        new.outputs[0].dtype, new.outputs[0].shape = kind, value.shape
        convenience.replace_nodes_and_values(old.graph, old, [old], [new], old.outputs, new.outputs)


def _kind(value: Any) -> Any:
    """The type of a value; None if that is not known.

    The exporter leaves it out inside what it takes apart, such as Softplus and attention. There an
    operation has a result of the type of its first input, or of the second behind a condition.
    """
    from onnx_ir import convenience

    constant = convenience.get_const_tensor(value)
    if constant is not None:
        return constant.dtype
    producer = value.producer()
    inputs = [] if producer is None else [each for each in producer.inputs if each is not None]
    if value.dtype is not None or producer is None or not inputs:
        return value.dtype
    return _kind(inputs[1] if producer.op_type == "Where" else inputs[0])


def _lacking(graph: Any) -> Iterator[str]:
    """Operations of the graph, loops included, that onnxruntime does not have in float64."""
    import onnx_ir

    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        if node.op_type in _NO_DOUBLE:
            kinds = [_kind(x) for x in node.inputs if x is not None]
            if onnx_ir.DataType.DOUBLE in kinds:
                yield node.op_type


def _check_installed() -> None:
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise AcertError(f"exporting {needs(name)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch's exporter tells of itself, such as that torchvision is not there."""
    exporter = logging.getLogger("torch.onnx")
    before = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for kind in (FutureWarning, DeprecationWarning, UserWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        exporter.setLevel(before)


def _reason(error: BaseException) -> str:
    """The operation that the chain of errors names, or the first line of its first cause."""
    text = str(error).strip()
    named = re.search(r"No ONNX function found for .*?op='([\w.]+)'", text)
    if named:
        return f"{named[1]} has no counterpart in ONNX"
    if error.__cause__ is not None:
        return _reason(error.__cause__)
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"
