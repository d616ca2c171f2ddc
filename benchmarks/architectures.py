"""Which of timm's architectures have bounds, as they are: one of each family, untrained.

    python benchmarks/architectures.py                 builds them, writes the record and the page
    python benchmarks/architectures.py --from-record   writes the list of docs/architectures.md anew

It needs timm. Every model is timm's own, with ten classes and random weights, on the smallest
images of 32, 64 or 224 pixels that it takes; a model that takes none of these gets its own size.
Weights that start at 0 are drawn too, or some logits would not depend on the image. What the rules
compute of an image alone is compared with its logits, the bounds of a small box with logits at
points of it, corners and where gradients lead among them. What has no rule is refused by name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # where `benchmarks` is, if this is run as a script

from benchmarks import measuring  # noqa: E402

import acert  # noqa: E402
from acert.bounds import propagate  # noqa: E402
from acert.bounds.bound_pass import BoundPass  # noqa: E402
from acert.bounds.margin import box  # noqa: E402
from acert.errors import UnsupportedOperation  # noqa: E402
from acert.experiments.paper.comparison import filled  # noqa: E402

RECORD, PAGE = ROOT / "results" / "architectures.json", ROOT / "docs" / "architectures.md"
RADIUS, POINTS = 1e-4, 4
CPU = torch.device("cpu")
NAMES = """
beit_base_patch16_224 cait_xxs24_224 coat_lite_tiny convit_tiny convmixer_768_32 convnext_atto
convnextv2_atto crossvit_tiny_240 cspresnet50 darknet53 davit_tiny deit_tiny_distilled_patch16_224
densenet121 dla34 dm_nfnet_f0 dpn48b ecaresnet26t edgenext_xx_small efficientformer_l1
efficientnet_b0 efficientnet_lite0 efficientvit_b0 eva02_tiny_patch14_224 fastvit_t8 fbnetc_100
focalnet_tiny_srf gernet_s ghostnet_050 gmlp_ti16_224 hardcorenas_a hiera_tiny_224 hrnet_w18_small
inception_next_atto inception_v3 lcnet_050 levit_128s mixer_s32_224 mixnet_s mobilenetv2_050
mobilenetv3_small_050 mobilenetv4_conv_small mobileone_s0 mobilevit_xxs mobilevitv2_050 nest_tiny
nextvit_small nfnet_l0 pit_ti_224 pnasnet5large poolformer_s12 pvt_v2_b0 regnetx_002 regnety_002
repvgg_a0 repvit_m0_9 res2net50_14w_8s resmlp_12_224 resnest14d resnet10t resnet18 resnext26ts
rexnet_100 selecsls42 semnasnet_050 sequencer2d_s seresnet18 skresnet18 starnet_s1
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tinynet_e tiny_vit_5m_224 tnt_s_patch16_224
twins_pcpvt_small vgg11 vgg11_bn visformer_tiny vit_tiny_patch16_224 volo_d1_224 vovnet39a
wide_resnet50_2 xception41 xcit_nano_12_p8_224
"""


def fitting(model: nn.Module, own: int) -> Tensor:
    """Two random images of the smallest size that the model takes."""
    for size in (32, 64, 224):
        images = torch.rand(2, 3, size, size)
        try:
            model(images)
        except Exception:  # Models say in many ways that an image is too small.
            continue
        return images
    return torch.rand(2, 3, own, own)


def moves(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Steps in [-1, 1]: drawn ones, corners, and the corners where the slopes of logits lead."""
    drawn = [2 * torch.rand_like(images) - 1 for _ in range(POINTS)]
    with torch.enable_grad():
        images = images.clone().requires_grad_()
        logits = model(images).sum(0)
        slopes = [torch.autograd.grad(one, images, retain_graph=True)[0] for one in logits[:2]]
    corners = [move.sign() for move in (*drawn[::2], *slopes)]
    return [*drawn[1::2], *corners, *(-corner for corner in corners)]


def at_a_point(model: nn.Module, images: Tensor) -> float:
    """How far the rules are from the logits at the images alone, in units of the largest logit.

    By centers: what is rounded on the way is a width, which the layers of a transformer make a
    thousand times as large each.
    """
    logits, start = model(images), box(images, torch.zeros(len(images)).to(images), None)
    found = propagate(model, start.within(BoundPass(points=True))).center
    return float((found - logits).abs().amax() / logits.abs().amax())


def examined(model: nn.Module, own: int = 224) -> dict[str, Any]:
    """What becomes of a model, and how long a bound pass takes in units of a forward pass."""
    with torch.no_grad():
        images = fitting(model.eval(), own)
        found: dict[str, Any] = {
            "size": images.shape[-1],
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }

        def bounds() -> acert.Interval:
            return acert.interval_bounds(model, images - RADIUS, images + RADIUS)

        try:
            ends = bounds()
        except UnsupportedOperation as problem:
            return found | {"refused": str(problem)}
        off = at_a_point(model, images)
        logits = torch.stack([model(images + RADIUS * move) for move in moves(model, images)])
        beyond = torch.maximum(ends.lower - logits, logits - ends.upper).amax().item()
        runs = {"forward": lambda: model(images), "bounds": bounds}
        seconds = measuring.in_turns(runs, CPU, repeats=3, clock="cpu")
    return found | {
        "off": off,
        # Both are float32, which rounds; an unbounded box holds anything.
        "beyond": max(0.0, beyond / logits.abs().amax().item()),
        "finite": bool((ends.upper - ends.lower).isfinite().all()),
        "times": measuring.median_ratio(seconds["bounds"], seconds["forward"]),
    }


def record(names: list[str]) -> dict[str, Any]:
    """What becomes of every model."""
    import timm

    rows = {}
    for name in names:
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False, num_classes=10)
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        rows[name] = examined(model, model.default_cfg["input_size"][-1])
        print(name, rows[name], flush=True)
    environment = measuring.facts(CPU) | {"timm": timm.__version__}
    return {"radius": RADIUS, "rows": rows, "environment": environment}


def listed(content: dict[str, Any]) -> str:
    """The record as Markdown."""
    rows, facts = content["rows"], content["environment"]
    bounded = {name: row for name, row in rows.items() if "refused" not in row}
    reasons = defaultdict(list)
    for name, row in rows.items():
        if "refused" in row:
            reasons[row["refused"].partition(" (in ")[0].partition(". ")[0]].append(name)
    times = sorted(row["times"] for row in bounded.values())
    wide = ", ".join(f"`{name}`" for name, row in bounded.items() if not row["finite"])
    most = max(row["beyond"] for row in bounded.values())
    outside = "outside of its bounds" + (f" by more than {most:.0e} of that" if most else "")
    lines = [
        f"**{len(bounded)} of {len(rows)}** have bounds, in the median at "
        f"{times[len(times) // 2]:.1f} times the time of a forward pass (from {times[0]:.1f} to "
        f"{times[-1]:.1f}): {', '.join(f'`{name}`' for name in bounded)}.",
        "",
        *([f"- Infinite already at a radius of {content['radius']:g}: {wide}."] if wide else []),
        *(f"- Refused, {reason}: {', '.join(f'`{one}`' for one in names)}."
          for reason, names in reasons.items()),
        "",
        f"timm {facts['timm']}, torch {facts['torch']}, {facts['cpu']}, commit "
        f"{facts['commit'][:7]}: `{facts['command']}`. Of the images themselves the rules compute "
        f"the model's own logits, to {max(row['off'] for row in bounded.values()):.0e} of the "
        f"largest. At {content['radius']:g} no point, corners and where gradients lead among them, "
        f"has a logit {outside}.",
    ]  # fmt: skip
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--from-record", action="store_true", help="build nothing")
    parser.add_argument("--names", default=NAMES, type=str.split, help="separated by spaces")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args(words)
    if not options.from_record:
        measuring.write(options.out, record(options.names))
    if options.out == RECORD:
        content = listed(json.loads(RECORD.read_text(encoding="utf-8")))
        page = filled(PAGE.read_text(encoding="utf-8"), {"architectures": content})
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
