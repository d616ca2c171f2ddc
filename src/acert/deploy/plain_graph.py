"""A network's graph as other verifiers read it, with every number of the network as it was.

PyTorch's exporter puts shapes together inside the graph and writes the batch size into every one of
them. Verifiers read few operations, take shapes only as stored numbers, and put many images at once
through a file that was written for one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["simplify"]

# What these make of sizes and parameters is the same numbers in another arrangement.
_MOVES = ("Concat", "Constant", "Expand", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# Operations that fill up the shapes of their operands, and the right operand that changes nothing.
_NEUTRAL = {"Add": None, "Div": 1.0, "Mul": 1.0, "Sub": 0.0}


def simplify(graph: Any) -> None:
    """Stores shapes, writes constants at full rank, and frees all but the input of a batch size."""
    _fold(graph)
    _align(graph)
    _free_batch(graph)


def _fold(graph: Any) -> None:
    """Stores sizes and parameters that are put together inside the graph."""
    from onnx.reference import ReferenceEvaluator
    from onnx_ir import convenience, serde

    for node in [node for node in graph if node.op_type in _MOVES]:
        (output,) = node.outputs
        known = {value.name: convenience.get_const_tensor(value) for value in node.inputs}
        arrays = {name: held.numpy() for name, held in known.items() if held is not None}
        if len(arrays) < len(known) or output.is_graph_output():
            continue
        (array,) = ReferenceEvaluator(serde.serialize_node(node)).run(None, arrays)
        convenience.replace_all_uses_with(output, _stored(graph, f"{output.name}_stored", array))


def _align(graph: Any) -> None:
    """Gives a constant operand the rank of the other, and leaves out x - 0, x * 1 and x / 1.

    alpha-beta-CROWN divides images by a tensor of four axes only. A data set without
    normalisation, as digits is, comes with a mean of 0 and a deviation of 1. Not x + 0, which
    makes 0 of -0.
    """
    from onnx_ir import convenience

    for node in [node for node in graph if node.op_type in _NEUTRAL]:
        value, constant = node.inputs[0], convenience.get_const_tensor(node.inputs[1])
        if constant is None or value.shape is None or node.outputs[0].is_graph_output():
            continue
        array = constant.numpy()
        same = node.outputs[0].shape == value.shape and node.outputs[0].dtype == value.dtype
        neutral = _NEUTRAL[node.op_type]
        # x - -0 makes 0 of -0.
        if same and neutral is not None and not (array != neutral).any() | np.signbit(array).any():
            convenience.replace_all_uses_with(node.outputs[0], value)
        elif array.ndim < value.shape.rank():
            lifted = array.reshape((1,) * (value.shape.rank() - array.ndim) + array.shape)
            name = f"{node.outputs[0].name}_operand"
            node.replace_input_with(1, _stored(graph, name, lifted))


def _free_batch(graph: Any) -> None:
    """Makes every reshaping that keeps the first size one that keeps any."""
    from onnx_ir import AttrInt64

    for node in [node for node in graph if node.op_type == "Reshape"]:
        before, after = node.inputs[0].shape, node.outputs[0].shape
        if before is None or after is None or not _keeps_first(before, after):
            continue
        if after.rank() == 2:
            node.op_type = "Flatten"
            node.resize_inputs(1)
            node.attributes.clear()
            node.attributes.add(AttrInt64("axis", 1))
        else:
            sizes = np.array([-1, *after[1:]], dtype=np.int64)
            node.replace_input_with(1, _stored(graph, f"{node.outputs[0].name}_shape", sizes))


def _keeps_first(before: Any, after: Any) -> bool:
    """Whether the first size stays, whatever it is, and the others are known."""
    ranked = before.rank() > 0 and after.rank() > 0
    return ranked and all(isinstance(size, int) for size in after[1:]) and before[0] == after[0]


def _stored(graph: Any, name: str, array: Any) -> Any:
    """A value of the graph that holds the array."""
    from onnx_ir import Shape, TensorType, Value, tensor

    held = tensor(array)
    value = Value(
        name=name, shape=Shape(array.shape), type=TensorType(held.dtype), const_value=held
    )
    graph.register_initializer(value)
    return value
