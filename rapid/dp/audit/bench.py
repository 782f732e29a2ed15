"""What is audited, and the bench on which its mechanism is run: canaries can be switched between two steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.dp.mechanism import Losses, PrivateMechanism
from rapid.dp.releases import DpSgdSpec, Release
from rapid.ranks import Ranks

GAIN = 1e4
"""Factor of all losses: so the gradients are far above the clip norm, and each canary counts with its full weight."""

Build = Callable[..., PrivateMechanism]
"""(release, network, losses, physical_batch=..., ...) -> the mechanism that is audited."""


@dataclass(frozen=True)
class Subject:
    """A network with the losses of its canaries.

    Attributes:
        name: in the findings.
        network: parameters that require gradients are trained; they stay as they are during the audit.
        losses: indices int64 (n,) in 0..count-1 -> float (n,); the same draws whenever it is called.
        count: number of canaries, of different gradients.
        clip_norm: of the mechanism.
        multiplicity: of the mechanism.
        autocast: of the mechanism.
        physical_batch: of the mechanism.
    """

    name: str
    network: nn.Module
    losses: Losses
    count: int
    clip_norm: float
    multiplicity: int = 1
    autocast: bool = False
    physical_batch: int = 64

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Names and sizes of the trained parameters."""
        return [(name, p.numel()) for name, p in self.network.named_parameters() if p.requires_grad]

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(size for _, size in self.parts)

    def with_autocast(self) -> Subject:
        """The same in bfloat16."""
        return replace(self, name=f"{self.name}, bfloat16", autocast=True)


class Bench:
    """A mechanism whose examples and their losses can be changed between two steps.

    An example with weight 0 contributes nothing, as the adjacency of the guarantee has it.

    Args:
        subject: what is audited.
        build: makes the mechanism.
        steps: of the release.
        noise_multiplier: of the release.
        examples: N; example i is canary `canaries[i]`, at first i modulo the number of canaries.
        expected_batch: B; by default N / band, so that every example is in every batch, or in each of its turns.
        steps_taken: steps of an earlier run that this one resumes.
        band: of the release.
        ranks: the processes that share the work.
    """

    def __init__(
        self,
        subject: Subject,
        build: Build,
        *,
        steps: int,
        noise_multiplier: float,
        examples: int | None = None,
        expected_batch: int | None = None,
        steps_taken: int = 0,
        band: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        count = examples or subject.count
        self.canaries = torch.arange(count) % subject.count
        self.weights = torch.full((count,), GAIN)
        spec = DpSgdSpec(
            name="audit",
            dataset_size=count,
            expected_batch=expected_batch or count // band,
            steps=steps,
            clip_norm=subject.clip_norm,
            multiplicity=subject.multiplicity,
            band=band,
        )
        self.release = Release(spec=spec, noise_multiplier=noise_multiplier)
        ranks = ranks or Ranks()
        own = torch.tensor(list(ranks.part(count)), dtype=torch.int64)

        def losses(indices: Tensor) -> Tensor:
            chosen = own[indices.cpu()]
            found = subject.losses(self.canaries[chosen])
            return found * self.weights[chosen].to(found)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* has no per-example rule", UserWarning)
            self.mechanism = build(
                self.release,
                subject.network,
                losses,
                physical_batch=subject.physical_batch,
                autocast=subject.autocast,
                steps_taken=steps_taken,
                ranks=ranks,
            )

    def step(self) -> Tensor:
        """The noisy sum of one step in units of the clip norm, float64 (d,), on the CPU."""
        spec = self.release.spec
        assert isinstance(spec, DpSgdSpec)
        gradient = torch.cat([part.detach().flatten() for part in self.mechanism.gradient()])
        return gradient.cpu().double() * (spec.expected_batch / spec.clip_norm)

    def silent(self) -> None:
        """Take all examples out: what a step returns is noise."""
        self.weights.zero_()


def own_rows(count: int) -> Subject:
    """Canaries whose gradients are orthogonal: each is a row of one table."""
    table = nn.Embedding(count, 2)
    return Subject("sampling", table, lambda indices: table(indices).sum(1), count, 1.0, physical_batch=4096)


class EveryRule(nn.Module):
    """One layer of each type that has a built-in rule, used as one matrix product and at several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6, padding_idx=0)
        self.grid = nn.Conv2d(1, 4, 3, padding=1)
        self.strided = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.groups = nn.GroupNorm(2, 8)
        self.positions = nn.Linear(8, 24)
        self.layers = nn.LayerNorm(24)
        self.wide = nn.Linear(24, 96)
        self.no_rule = nn.PReLU(96)
        self.last = nn.Linear(96, 6)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """Images float (n, 1, 8, 8), words int64 (n, 3) -> float (n, 6)."""
        maps = self.groups(self.strided(F.silu(self.grid(images))))
        hidden = self.layers(self.positions(maps.flatten(2).mT))
        pooled = self.no_rule(self.wide(hidden.mean(1)))
        found: Tensor = self.last(pooled) * self.table(words).sum(1)
        return found


def every_rule(count: int = 16, multiplicity: int = 2) -> Subject:
    """A small network with all layer rules, a layer without one, and several draws of an example."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = EveryRule().eval()
    images = torch.randn(count, 1, 8, 8, generator=generator)
    words = torch.randint(12, (count, 3), generator=generator)

    def losses(indices: Tensor) -> Tensor:
        found: Tensor = network(images[indices], words[indices])
        return found.square().sum(1)

    return Subject("every layer rule", network, losses, count, 1.0, multiplicity, physical_batch=32)


def alone(network: nn.Module) -> Sequence[tuple[str, list[nn.Parameter]]]:
    """The trained parameters by layer."""
    layers: dict[str, list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.rpartition(".")[0] or name, []).append(parameter)
    return list(layers.items())
