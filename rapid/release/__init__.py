"""The gate before a private bundle leaves the house: it is measured against a policy, and a signed report is written.

gate.py         what is measured, in which order     policy.py        the policy file
contents.py     the bundle's files, hashes           rules.py         demands and their outcomes
accounts.py     epsilon recomputed, the ledger       report.py        canonical JSON, page, signature
audits.py       the mechanism's audit                page.py          the page for people
membership.py   attacks on canaries                  signature.py     keys and signatures (Ed25519)
nearness.py     the noisy count of near-copies       verification.py  checks of a report
inputs.py       what is decided about and checked    recorded.py      a count that is used again
"""

from rapid.release.gate import decide
from rapid.release.inputs import Request
from rapid.release.policy import Policy, read_policy
from rapid.release.report import Report, write_report
from rapid.release.signature import new_key, read_private_key, read_public_key
from rapid.release.verification import verify

__all__ = [
    "Policy",
    "Report",
    "Request",
    "decide",
    "new_key",
    "read_policy",
    "read_private_key",
    "read_public_key",
    "verify",
    "write_report",
]
