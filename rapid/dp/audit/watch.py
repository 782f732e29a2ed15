"""One training, seen from outside: what each step releases, beside what each canary would have added to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rapid.dp.audit.adversary import Adversary
from rapid.dp.audit.evidence import Evidence
from rapid.dp.gradients.forms import ROUNDING_MARGIN
from rapid.dp.releases import DpSgdSpec, Release
from rapid.dp.rows import PrivateTensor, Rows, take
from rapid.errors import RapidError

LOSS_DRAWS = 16
"""Draws of each canary's loss before and after a training."""
PIECE = 64
VALUES = 1 << 24
"""Most numbers of noise that are kept: of large networks, not every step is."""
LARGEST = 2 * 10**7
"""Most numbers in the gradients of all canaries from which coins are guessed: of larger ones, the elements in which
canaries differ most at the first step."""
SAME = 1e-3
"""Relative tolerance for a gradient that is computed again."""


class OwnDraws(Protocol):
    """Draws that can be made again; see `rapid.dp.audit.canaries.CanaryDraws`."""

    def belong_to(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Whose draws come next: canary, step and repetition of each row."""


class Watch:
    """What a training releases, step by step.

    Gradients are computed anew here, for one canary after the other by plain automatic differentiation, and clipped.
    So neither the per-example rules nor the sums of the mechanism are taken on trust.

    Args:
        network: that is trained.
        losses: of the canaries, without the mask.
        data: rows of the canaries.
        release: as claimed.
        coins: which canaries take part, bool (m,).
        draws: of the losses.
        adversary: gets what it sees.
        autocast: whether the network runs in bfloat16.
    """

    def __init__(
        self,
        network: nn.Module,
        losses: Rows,
        data: Sequence[PrivateTensor],
        release: Release,
        coins: NDArray[np.bool_],
        draws: OwnDraws,
        adversary: Adversary,
        *,
        autocast: bool,
    ) -> None:
        assert isinstance(release.spec, DpSgdSpec)
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self._device = self._parameters[0].device
        self._losses, self._data, self._coins = losses, data, coins
        self._release, self._spec, self._adversary, self._draws = release, release.spec, adversary, draws
        self._autocast = autocast
        self._drawn: Counter[int] = Counter()
        self._chosen: Tensor | None = None
        size, steps = sum(p.numel() for p in self._parameters), self._spec.steps
        kept = np.linspace(0, steps - 1, max(2, min(steps, VALUES // size)))
        self._kept_steps = set(kept.round().astype(int).tolist())
        self._evidence = Evidence(release, [(name, p.numel()) for name, p in named])

    def drawn(self, numbers: Tensor) -> None:
        """The mechanism is about to compute losses of these canaries, int64 (n,)."""
        rows = []
        for number in numbers.tolist():
            rows.append((number, self._evidence.steps, self._drawn[number]))
            self._drawn[number] += 1
        self._draws.belong_to(rows)

    def see(self) -> None:
        """The noisy gradient of the step that is about to move the weights."""
        evidence, clip_norm = self._evidence, self._spec.clip_norm
        if evidence.steps == 0:
            self._check_draws()
        flat = torch.cat([p.grad.detach().flatten() for p in self._parameters if p.grad is not None])
        # in units of the clip norm
        total = flat.double() * (self._spec.expected_batch / clip_norm)
        there, elsewhere, known = (torch.zeros_like(total) for _ in range(3))
        norms, count = [], len(self._coins)
        if self._chosen is None:
            self._chosen = self._choose(len(total), LARGEST // count)
        rows = torch.zeros(count, len(self._chosen), device=self._device)
        present = np.zeros(count, bool)
        for number in range(count):
            own = self._gradient(number)
            norm = float(own.norm())
            rows[number] = own[self._chosen]
            present[number] = self._drawn[number] > 0
            if present[number] and self._coins[number]:
                known += own
                norms.append(norm)
            if norm > 0:
                (there if present[number] and self._coins[number] else elsewhere).add_(own, alpha=1 / norm)
        self._adversary.add_step(
            rows.cpu(), total[self._chosen].cpu(), self._release.noise_multiplier, self._spec.sample_rate
        )
        rest = total - known
        if evidence.steps in self._kept_steps:
            evidence.noise.append((rest / self._release.noise_multiplier).float().cpu())
        evidence.there.add(
            len(norms), math.fsum(norms), float(there @ known), float(there @ rest), float(there.square().sum())
        )
        evidence.elsewhere.add(count - len(norms), 0.0, 0.0, float(elsewhere @ rest), float(elsewhere.square().sum()))
        evidence.present.append(present)
        self._drawn.clear()
        self._draws.belong_to(())

    def evidence(self) -> Evidence:
        """All that was seen."""
        return self._evidence

    @torch.no_grad()
    def mean_losses(self) -> Tensor:
        """Of each canary over several fresh draws, float64 (m,), on the CPU; 0 where it is not finite."""
        total = torch.zeros(len(self._coins), dtype=torch.float64)
        for _ in range(LOSS_DRAWS):
            pieces = torch.arange(len(total)).split(PIECE)
            total += torch.cat([self._losses(*take(self._data, piece)).cpu().double() for piece in pieces])
        return torch.nan_to_num(total / LOSS_DRAWS, nan=0.0, posinf=0.0, neginf=0.0)

    def _loss(self, number: int) -> Tensor:
        """The mean of a canary's losses with its draws of this step."""
        draws = self._spec.multiplicity
        self._draws.belong_to([(number, self._evidence.steps, one) for one in range(draws)])
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return self._losses(*take(self._data, torch.full((draws,), number))).mean()

    def _gradient(self, number: int) -> Tensor:
        """A canary's clipped gradient in units of the clip norm, float64 (d,); 0 if it is not finite."""
        parts = torch.autograd.grad(self._loss(number), self._parameters, allow_unused=True)
        pairs = zip(parts, self._parameters, strict=True)
        flat = torch.cat([(torch.zeros_like(p) if part is None else part).flatten() for part, p in pairs]).double()
        flat /= self._spec.clip_norm
        norm = float(flat.norm())
        return flat / max(1.0, norm * (1 + ROUNDING_MARGIN)) if math.isfinite(norm) else torch.zeros_like(flat)

    def _choose(self, size: int, most: int) -> Tensor:
        """Positions of the gradient from which coins are guessed: all, or those in which canaries differ most."""
        if size <= most:
            return torch.arange(size, device=self._device)
        squares = torch.zeros(size, dtype=torch.float64, device=self._device)
        for number in range(len(self._coins)):
            squares += self._gradient(number).square()
        return squares.topk(most).indices

    def _check_draws(self) -> None:
        """Check that a gradient can be computed again.

        Raises:
            RapidError: its loss has draws of another source.
        """
        first, again = self._gradient(0), self._gradient(0)
        if float((first - again).norm()) > SAME:
            raise RapidError(
                f"the losses of '{self._release.name}' cannot be audited: they must take all their draws from the "
                "access (PrivateAccess.draws)"
            )
