"""Export the trained networks of a public bundle in half precision, for `rapid build-kb --networks` on other images.

What stays behind is all that holds images or is made of single ones: knowledge base, thumbnails and split.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from commands import told

from rapid.bundle import Bundle, BundleConfig, write_bundle
from rapid.bundle.components import Component
from rapid.config.presets import networks_settings
from rapid.errors import InputError
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.nn.storage import StoredNetwork
from rapid.probe.network import Probe

KINDS: dict[str, type[StoredNetwork]] = {
    "autoencoder": Autoencoder,
    "denoiser": Denoiser,
    "encoder": TrajectoryEncoder,
    "probe": Probe,
}


def export(base: Bundle, out: Path, preset: str | None, card: str) -> Bundle:
    """Write the networks of a bundle to a new folder.

    Args:
        base: a public bundle of the method rapid.
        out: new or empty.
        preset: gives the settings of private training and generation; None: those of `base`.
        card: Markdown: sources, licences, the command that made `base`.

    Raises:
        InputError: `out` holds something, or `base` is of another method.
    """
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise InputError("out", "is a file or not empty; choose another name", out)
    settings = networks_settings(base.settings_as(RapidSettings), (), preset, [])
    components: dict[str, Component] = {
        name: base.component(name, kind).half() for name, kind in KINDS.items() if base.has(name)
    }
    config = BundleConfig.model_validate(
        base.config.model_dump()
        | {"kind": "networks", "settings": settings.model_dump(mode="json")}
        | {"components": {}, "recipes": {}, "facts": {"latent": list(settings.latent_shape)}}
    )
    out.mkdir(parents=True, exist_ok=True)
    return write_bundle(out, config, components, card=card)


def _text(card: Path) -> str:
    try:
        return card.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError("card", "is no text; give a Markdown file", card) from None


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(prog="scripts/export-networks", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, metavar="DIR", help="public bundle, made by rapid build-kb")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    words = "settings of private training and generation; default: those of --base"
    parser.add_argument("--preset", metavar="NAME", help=words)
    parser.add_argument("--card", type=Path, required=True, metavar="FILE.md", help="becomes its README.md")
    options = parser.parse_args()
    with told("export-networks"):
        base, card = Bundle.open(options.base, "base", "public"), _text(options.card)
        made = export(base, options.out, options.preset, card)
    size = sum(file.stat().st_size for file in made.path.rglob("*") if file.is_file())
    print(f"{made.path}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
