"""Bounds and losses the slow way: loops over samples and neurons, from the paper's formulas.

Nothing of the library's bounds is used here. Numbers are 0-d tensors, so that gradients of the
slow loss can be compared too. A network is a `Sequential` of Normalize, Linear, BatchNorm1d and
ReLU that ends in a Linear.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from acert.models import Normalize


@dataclass
class SlowBounds:
    """The box of one sample on its way: ends at the output, what regularisers see, the layers."""

    lower: list
    upper: list
    inner: tuple = ()  # ends at the input of the last linear layer
    first: tuple = ()  # ends at the input of the first linear layer
    relus: list = field(default_factory=list)  # ends at the input of each ReLU


def batch_statistics(model, images):
    """Mean and biased variance in front of each batch norm, as the clean images give them."""
    found, values = [], images
    for layer in model:
        if isinstance(layer, nn.BatchNorm1d):
            mean = sum(values) / len(values)
            variance = sum((row - mean) ** 2 for row in values) / len(values)
            found.append((mean, variance))
            scale = layer.weight / torch.sqrt(variance + layer.eps)
            values = torch.stack([(row - mean) * scale + layer.bias for row in values])
        else:
            values = layer(values)
    return found


def bounds(model, image, radius, statistics):
    """Interval bounds of one sample by Eqs. 16 to 19."""
    lower = [max(x - radius, x * 0) for x in image]
    upper = [min(x + radius, x * 0 + 1) for x in image]
    result = SlowBounds(lower, upper)
    statistics = iter(statistics)
    for layer in model:
        if isinstance(layer, Normalize):
            scales = layer.std.expand(len(lower))
            shifts = layer.mean.expand(len(lower))
            lower = [(x - m) / s for x, m, s in zip(lower, shifts, scales, strict=True)]
            upper = [(x - m) / s for x, m, s in zip(upper, shifts, scales, strict=True)]
        elif isinstance(layer, nn.Linear):
            result.first = result.first or (lower, upper)
            result.inner = (lower, upper)
            lower, upper = linear(lower, upper, layer.weight, layer.bias)
        elif isinstance(layer, nn.BatchNorm1d):
            mean, variance = next(statistics)
            scale = layer.weight / torch.sqrt(variance + layer.eps)
            ends = [
                sorted([(end - m) * a + b for end in (low, high)], key=lambda x: x.item())
                for low, high, m, a, b in zip(lower, upper, mean, scale, layer.bias, strict=True)
            ]
            lower, upper = [low for low, _ in ends], [high for _, high in ends]
        else:
            assert isinstance(layer, nn.ReLU)
            result.relus.append((lower, upper))
            lower = [torch.relu(x) for x in lower]
            upper = [torch.relu(x) for x in upper]
    result.lower, result.upper = lower, upper
    return result


def linear(lower, upper, weight, bias):
    """Each output is smallest where positive weights meet lower ends and negative ones upper."""
    low, high = list(bias), list(bias)
    for i, row in enumerate(weight):
        for w, a, b in zip(row, lower, upper, strict=True):
            low[i] = low[i] + w * (a if w > 0 else b)
            high[i] = high[i] + w * (b if w > 0 else a)
    return low, high


def plain_differences(found, label):
    """Upper ends less the lower end at the label (Eq. 3), for the other classes."""
    return [end - found.lower[label] for i, end in enumerate(found.upper) if i != label]


def elided_differences(model, found, label):
    """Upper bounds of z_i - z_y with the last layer's rows subtracted first."""
    last = model[-1]
    weight = torch.stack([row - last.weight[label] for row in last.weight])
    _, high = linear(*found.inner, weight, last.bias - last.bias[label])
    return [end for i, end in enumerate(high) if i != label]


def crown_differences(model, found, image_box, label):
    """CROWN by hand for Linear, ReLU, Linear: one relaxation, then the box (Zhang et al.)."""
    first, _, last = model
    lower, upper = found.relus[0]
    result = []
    for i in range(len(last.weight)):
        if i == label:
            continue
        row = last.weight[i] - last.weight[label]
        constant = last.bias[i] - last.bias[label]
        coefficients = []
        for a, low, high in zip(row, lower, upper, strict=True):
            if low >= 0:
                slope, lift = 1.0, 0.0
            elif high <= 0:
                slope, lift = 0.0, 0.0
            elif a > 0:
                slope, lift = high / (high - low), -high * low / (high - low)
            else:
                slope, lift = (1.0 if high > -low else 0.0), 0.0
            coefficients.append(a * slope)
            constant = constant + a * lift
        for j, c in enumerate(coefficients):
            constant = constant + c * first.bias[j]
        for k in range(first.weight.shape[1]):
            slope = sum(c * first.weight[j, k] for j, c in enumerate(coefficients))
            constant = constant + slope * (image_box[1][k] if slope > 0 else image_box[0][k])
        result.append(constant)
    return result


def cross_entropy(differences):
    """log(1 + sum exp(upper bound of z_i - z_y)) of one sample."""
    return torch.log(1 + sum(torch.exp(d) for d in differences))


def robust_loss(model, images, labels, radii, statistics, *, elide=True):
    """Mean robust cross entropy (Eqs. 5 and 9), each sample at its own radius."""
    total = 0.0
    for image, label, radius in zip(images, labels.tolist(), radii, strict=True):
        found = bounds(model, image, radius, statistics)
        differences = (
            elided_differences(model, found, label) if elide else plain_differences(found, label)
        )
        total = total + cross_entropy(differences)
    return total / len(images)


def certified_radius(model, image, label, cap, statistics):
    """The leftmost root of the elided margin by 60 bisections (Def. 3.1)."""

    def margin(radius):
        found = bounds(model, image, radius, statistics)
        return max(elided_differences(model, found, label)).item()

    if margin(0.0) >= 0:
        return 0.0
    if margin(cap) < 0:
        return cap
    low, high = 0.0, cap
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if margin(middle) < 0 else (low, middle)
    return low


def standard_loss(model, images, labels, statistics):
    """Mean cross entropy (Eq. 10)."""
    return robust_loss(model, images, labels, [0.0] * len(images), statistics, elide=False)
