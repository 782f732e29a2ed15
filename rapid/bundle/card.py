"""The words that go with a bundle: model cards and the privacy statement in plain language."""

from __future__ import annotations

from typing import Any

from rapid.bundle.format import BundleConfig

_RETRIEVAL = {
    "rapid": "late denoising steps, trained from retrieved public intermediates (Eq. 5 of the RAPID paper)",
    "late": "late denoising steps, trained with Gaussian noise",
    "ldm": "all denoising steps, trained with the plain diffusion loss",
}


_PROBE = ", and the linear layer of the probe, which checks the class of what is sampled"


def privacy_in_words(statement: dict[str, Any]) -> str:
    """The content of `privacy.json` as a few sentences."""
    epsilon, delta = statement["epsilon"], statement["delta"]
    group = statement.get("group")
    people = (
        f" For a person with {group['size']} images, all of them together, epsilon is {group['epsilon']:.3g} at the "
        f"same delta; accountant: {group['accountant']}."
        if group
        else ""
    )
    return (
        f"The model is ({epsilon:.3g}, {delta:.2g})-differentially private with respect to the "
        f"{statement['dataset_size']:,} private images: whether any one image was among them changes the probability "
        f"of every possible outcome by a factor of at most e^{epsilon:.3g}, except for a probability of "
        f"{delta:.2g}. This holds for the model and for all images made with it, however many. "
        f"Adjacency: {statement['adjacency']}; unit: {statement['unit']}; accountant: {statement['accountant']}."
        f"{people} {_overlap_in_words(statement)} "
        "The number of private images and the list of classes count as public. Choosing settings by looking at the "
        "private images is not covered."
    )


def public_card(config: BundleConfig) -> str:
    """Model card of a public bundle, Markdown."""
    settings, public = config.settings, config.public
    return f"""# Public bundle ({settings.preset})

Made by rapid {config.rapid} from public images only: {", ".join(public.sources)} ({public.pre_training:,} images to
train the networks, {public.reference:,} others for the knowledge base; the split is in `split.npz`).
`thumbnails.npy` holds a grey thumbnail of each, by which `train-private` sees that no private images are among them.

Latents: {"x".join(str(n) for n in settings.latent_shape)}. Query at step k = {settings.retrieval.k}, value at step
v = {settings.retrieval.v}, of T = {settings.schedule.timesteps}.
Classes: {", ".join(config.classes) or "none (unlabelled)"}.
{_retrieval(config)}
It holds no private information. Next: `rapid train-private --base THIS --private PATH --epsilon 1 --out DIR`.
"""


def _retrieval(config: BundleConfig) -> str:
    found = config.retrieval
    if found is None:
        return ""
    return (
        f"Retrieval: of {found.queries:,} public queries {found.top1:.1%} have a nearest neighbour of their class, and "
        f"{found.top5:.1%} one among the five nearest; by chance {found.chance:.1%} of the neighbours would.\n"
    )


def private_card(config: BundleConfig, statement: dict[str, Any]) -> str:
    """Model card of a private bundle, Markdown."""
    settings, public = config.settings, config.public
    return f"""# Synthetic images with differential privacy

{privacy_in_words(statement)}

| | |
|---|---|
| epsilon, delta | {statement["epsilon"]}, {statement["delta"]:.3g} (by RDP: {statement["epsilon_rdp"]}) |
| noise_multiplier | {statement["noise_multiplier"]:.4g} |
| sample_rate, steps | {statement["sample_rate"]:.4g}, {statement["steps"]} |
| clip_norm | {statement["clip_norm"]} |
| probe | {_probe(statement)} |
| overlap check | {_overlap(statement)} |
| noise | {statement["noise_source"]} |
| made | {statement["created"]}, rapid {config.rapid} |

What was trained privately: {_RETRIEVAL[settings.private.objective]}{_PROBE if "probe" in statement else ""}.
Everything else comes from public images ({", ".join(public.sources)}): autoencoder, encoder, knowledge base, the
features of the probe, and the denoiser that makes queries.
Classes: {", ".join(config.classes) or "none (unconditional)"}.

Use: `rapid generate --model THIS --count 100 --out images.npz`, or `rapid serve --model THIS`.

Not for: facts about single people, or conclusions that rest on rare cases; differential privacy hides exactly these.
Synthetic images can show public neighbours' traits and are not a substitute for validation on real data.
"""


def _checked(statement: dict[str, Any]) -> dict[str, Any] | None:
    """The overlap check of a statement; None if it was not made, as by earlier versions."""
    check = statement.get("overlap_check")
    return check if isinstance(check, dict) else None


def _overlap_in_words(statement: dict[str, Any]) -> str:
    check = _checked(statement)
    if check is None:
        return "It was not checked whether private images are among the public ones, which have no protection."
    least = check["almost_surely_refused_from"]
    if least > statement["dataset_size"]:
        return (
            "Whether private images are among the public ones, which have no protection, is not known: a noisy count, "
            "part of epsilon, gave no sign of it, but the private images are too few for it to be sure."
        )
    return (
        "A noisy count, part of epsilon, gave no sign that private images are among the public ones, which have no "
        f"protection; copies of {least:,} of them or more would almost surely have been seen, but none that are moved, "
        "turned or cropped."
    )


def _overlap(statement: dict[str, Any]) -> str:
    check = _checked(statement)
    if check is None:
        return "not made"
    return f"noise_multiplier {check['noise_multiplier']:.4g}, once on all images, counted in epsilon"


def _probe(statement: dict[str, Any]) -> str:
    probe = statement.get("probe")
    if probe is None:
        return "none"
    return f"noise_multiplier {probe['noise_multiplier']:.4g}, {probe['steps']} steps on all images, counted in epsilon"
