"""Your own images end to end: train on public images, then privately on yours, and write synthetic ones.

python examples/own_images.py --public letters/ --private digits/ --epsilon 1 --out run/
"""

import argparse
from pathlib import Path

from rapid.bundle.card import privacy_in_words
from rapid.bundle.info import provenance
from rapid.data.export import write_samples
from rapid.data.private import PrivateImages
from rapid.methods import load_settings, open_generator
from rapid.runtime import choose_device
from rapid.sampling.generate import generate
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle


def main() -> None:
    """Both stages and the images; what `--out` holds already is not made again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public", type=Path, required=True, help="a folder of images or an .npz file")
    parser.add_argument("--private", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args()

    settings, device = load_settings("demo", options.overrides), choose_device("auto")
    public = build_public_bundle([options.public], options.out / "public", settings, device, resume=True)
    private = train_private_bundle(
        public.path,
        PrivateImages(options.private),
        options.out / "private",
        settings,
        epsilon=options.epsilon,
        delta=None,
        device=device,
        resume=True,
    )
    assert private is not None and private.privacy is not None
    print(privacy_in_words(private.privacy))

    generator = open_generator(private.path)
    samples = generate(generator, options.count)
    target = options.out / "synthetic.npz"
    write_samples(target, samples.images, samples.labels, generator.classes, provenance(private))
    print(f"{target}: {options.count} images, seed {samples.seed}")


if __name__ == "__main__":
    main()
