"""Quality against network calls for each sampler (see scripts/sweep-sampling): `sampling.json` and `sampling.svg`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, get_args

import torch
from charts import chart
from commands import at_least, begin_with, told

from rapid.bundle import Bundle
from rapid.data import ImageSet, fit_images, load_images
from rapid.diffusion.solvers import SamplerName
from rapid.evaluate.utility import measure_utility
from rapid.files import replacing, write_json
from rapid.heap import prepare_heap
from rapid.methods import generator_of
from rapid.runtime import choose_device
from rapid.sampling.generate import generate

STEPS = (10, 20, 40, 80, 200)


def measure(bundle: Bundle, test: ImageSet, sampler: str, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy of the small CNN after `count` images of one sampler."""
    device = choose_device(options.device)
    generator = generator_of(bundle, device, [f"generation.sampler={sampler}", f"generation.steps={steps}"])
    calls = generator.calls()
    begin = time.perf_counter()
    samples = generate(generator, options.count, seed=options.seed)
    seconds = time.perf_counter() - begin
    images = ImageSet(samples.images, samples.labels, generator.classes, sampler)
    accuracy = measure_utility(images, test, device, f"{sampler}, {calls} calls", ["small"])["networks"]["small"][
        "accuracy"
    ]
    return {"sampler": sampler, "steps": steps, "calls": calls, "accuracy": accuracy, "seconds": round(seconds, 1)}


def plot(points: list[dict[str, Any]]) -> str:
    """Accuracy by the number of calls, as an SVG."""
    calls = [str(count) for count in sorted({point["calls"] for point in points})]
    lines: dict[str, dict[str, float]] = {}
    for point in points:
        lines.setdefault(point["sampler"], {})[str(point["calls"])] = 100 * point["accuracy"]
    title = "small CNN on real test images after training on synthetic ones, %"
    return chart(title, "network calls for an image", calls, lines)


def main() -> None:
    """Measure what is not yet there, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--test", type=Path, required=True, metavar="PATH", help="real test images")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--count", type=at_least(1), default=8000, help="synthetic images for each point")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    prepare_heap()
    with told("sweep-sampling"):
        bundle = Bundle.open(options.model, "model")
        test = fit_images(load_images(options.test, "test"), bundle.config.image, "test")
        begin_with(
            options.out,
            {"model": bundle.digest, "test": test.fingerprint(), "count": options.count, "seed": options.seed},
        )
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
