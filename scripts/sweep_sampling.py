"""Quality against network calls for each sampler (see scripts/sweep-sampling): `sampling.json` and `sampling.svg`."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, get_args

import torch

from rapid.bundle import Bundle
from rapid.data import ImageSet, fit_images, load_images
from rapid.diffusion.samplers import SamplerName
from rapid.evaluate.utility import measure_utility
from rapid.files import replacing, write_json
from rapid.generate import Generator
from rapid.runtime import choose_device, keep_freed_memory

STEPS = (10, 20, 40, 80, 200)
COLOURS = {"ddim": "#1b6ca8", "pndm": "#b8570f", "dpm-solver++": "#3a7d2c"}
WIDTH, HEIGHT, MARGIN = 640, 400, 60


def measure(bundle: Bundle, test: ImageSet, sampler: str, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy of the small CNN after `count` images of one sampler."""
    device = choose_device(options.device)
    settings = bundle.settings.generation.model_copy(update={"sampler": sampler, "steps": steps})
    generator = Generator(bundle, device, settings)
    route = generator.route()
    calls = sum(len(part.timesteps) for part in route if part is not None)
    begin = time.perf_counter()
    samples = generator.generate(options.count, seed=options.seed)
    seconds = time.perf_counter() - begin
    images = ImageSet(samples.images, samples.labels, generator.classes, sampler)
    accuracy = measure_utility(images, test, device, f"{sampler}, {calls} calls", ["small"])["networks"]["small"][
        "accuracy"
    ]
    return {"sampler": sampler, "steps": steps, "calls": calls, "accuracy": accuracy, "seconds": round(seconds, 1)}


def plot(points: list[dict[str, Any]]) -> str:
    """Accuracy over the number of calls, as an SVG."""
    lowest = math.floor(100 * min(point["accuracy"] for point in points)) / 100
    highest = math.ceil(100 * max(point["accuracy"] for point in points)) / 100
    calls = sorted({point["calls"] for point in points})

    def x(count: int) -> float:
        span = math.log(calls[-1] / calls[0]) or 1
        return float(MARGIN + (WIDTH - 2 * MARGIN) * math.log(count / calls[0]) / span)

    def y(accuracy: float) -> float:
        return float(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (accuracy - lowest) / (highest - lowest or 1))

    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for mark in range(5):
        level = lowest + mark * (highest - lowest) / 4
        parts.append(f'<path d="M{MARGIN} {y(level):.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{100 * level:.2f} %</text>')
    for count in calls:
        parts.append(f'<text x="{x(count):.1f}" y="{HEIGHT - MARGIN + 20}" text-anchor="middle">{count}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">network calls for an image</text>')
    parts.append(f'<text x="{MARGIN}" y="24">small CNN on real test images after training on synthetic ones</text>')
    for place, sampler in enumerate(sorted({point["sampler"] for point in points})):
        own = sorted((point for point in points if point["sampler"] == sampler), key=lambda point: int(point["calls"]))
        line = " ".join(f"{x(point['calls']):.1f},{y(point['accuracy']):.1f}" for point in own)
        colour = COLOURS[sampler]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in own:
            parts.append(
                f'<circle cx="{x(point["calls"]):.1f}" cy="{y(point["accuracy"]):.1f}" r="4" fill="{colour}"/>'
            )
        parts.append(
            f'<text x="{WIDTH - MARGIN}" y="{24 + 18 * place}" text-anchor="end" fill="{colour}">{sampler}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Measure what is not yet there, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--test", type=Path, required=True, metavar="PATH", help="real test images")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--count", type=int, default=8000, help="synthetic images for each point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    keep_freed_memory()
    bundle = Bundle.open(options.model, "--model")
    test = fit_images(load_images(options.test, "--test"), bundle.settings.image, "--test")
    file = options.out / "sampling.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"points": []}
    found |= {"model": options.model.name, "images": options.count, "seed": options.seed}
    found |= {"threads": torch.get_num_threads(), "privacy": bundle.privacy and bundle.privacy["epsilon"]}
    for steps in STEPS:
        for sampler in get_args(SamplerName):
            if not any((point["sampler"], point["steps"]) == (sampler, steps) for point in found["points"]):
                found["points"].append(measure(bundle, test, sampler, steps, options))
                write_json(file, found)
    with replacing(options.out / "sampling.svg") as target:
        target.write_text(plot(found["points"]), encoding="utf-8")


if __name__ == "__main__":
    main()
