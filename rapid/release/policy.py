"""The policy of a release: a YAML file that says what a private bundle must fulfil before it leaves the house.

Every number has a strict default. `required` says whether something must be measured; what was measured must hold in
any case. `examples/policy.yaml` explains each setting.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rapid.dp.releases import MIN_DELTA
from rapid.parsing import read_yaml

EXPONENT = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+")
"""Numbers such as 1e-5, which YAML 1.1 takes for text."""

Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LedgerPolicy(_Part):
    """What the ledger must show.

    Attributes:
        required: it must be intact and hold the run that made the model, for the images of --private.
        max_epsilon: of everything that was ever released of these images, the count of near-copies included; None: any.
    """

    required: bool = True
    max_epsilon: Positive | None = 3.0


class AuditPolicy(_Part):
    """The audit of the mechanism.

    Attributes:
        required: the steps of the mechanism must have been tested, and no test may refute the claim.
        max_undetected: the tests must find noise and sensitivity that are off by this share, with 95 % power.
    """

    required: bool = True
    max_undetected: Share = 0.1


class CopiesPolicy(_Part):
    """Near-copies of private images among the synthetic ones.

    Attributes:
        required: they must be counted.
        max_share: of the private images (or people) that may have a near-copy.
        reference_share: share of public images that are as near to a synthetic image as a near-copy; it sets the
            distance.
        epsilon: what the noisy count may spend.
        confidence: with which the true number must be within `max_share`.
        min_synthetic: least number of synthetic images to search.
    """

    required: bool = True
    max_share: Share = 0.02
    reference_share: Share = 0.01
    epsilon: Positive = 0.1
    confidence: Share = 0.95
    min_synthetic: int = Field(1000, ge=1)


class MembershipPolicy(_Part):
    """Membership inference on canaries.

    Attributes:
        required: attacks must be tried.
        max_advantage: largest true minus false positive rate that an attack may have.
        false_positive_rates: at which attacks are measured.
        confidence: of all bounds together.
    """

    required: bool = True
    max_advantage: Share = 0.1
    false_positive_rates: tuple[Share, ...] = Field((0.01, 0.1, 0.3), min_length=1, strict=False)
    confidence: Share = 0.95


class Policy(_Part):
    """What a bundle must fulfil.

    Attributes:
        max_epsilon: of the model.
        max_delta: of the model.
        delta_under_one_over_n: delta must also be under 1/N.
        unit: of the guarantee.
        cryptographic_noise: all noise comes from a cryptographic generator.
        declared_classes: the classes were declared, not taken from the labels.
        only_bundle_files: nothing else lies in the bundle's folder.
        ledger: what the ledger must show.
        audit: the audit of the mechanism.
        copies: near-copies of private images.
        membership: membership inference on canaries.
        signature: the report must be signed.
        valid_days: how long the report holds.
    """

    max_epsilon: Positive = 1.0
    max_delta: Annotated[float, Field(ge=MIN_DELTA, lt=1)] = 1e-5
    delta_under_one_over_n: bool = True
    unit: Literal["one image", "one person"] = "one person"
    cryptographic_noise: bool = True
    declared_classes: bool = True
    only_bundle_files: bool = True
    ledger: LedgerPolicy = LedgerPolicy()
    audit: AuditPolicy = AuditPolicy()
    copies: CopiesPolicy = CopiesPolicy()
    membership: MembershipPolicy = MembershipPolicy()
    signature: bool = True
    valid_days: int = Field(365, ge=1, le=3650)

    @model_validator(mode="before")
    @classmethod
    def _exponents(cls, content: Any) -> Any:
        return _with_exponents(content)


def read_policy(path: Path, field: str = "policy") -> Policy:
    """Read a policy.

    Args:
        path: the YAML file.
        field: name of the argument that gave it; for messages.

    Raises:
        InputError: it cannot be read, or has an unknown setting, one that stands twice, or a bad value.
    """
    return read_yaml(path, Policy, field, "settings such as max_epsilon: 1")


def _with_exponents(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_exponents(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_exponents(inner) for inner in value]
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value
