"""`rapid info`."""

from __future__ import annotations

import argparse
import json
import sys

from rapid.bundle.card import privacy_in_words
from rapid.bundle.format import Bundle
from rapid.bundle.info import describe


def info(options: argparse.Namespace) -> None:
    """`rapid info`."""
    bundle = Bundle.open(options.path, "DIR")
    if options.verify:
        read = bundle.verify()
        told = f"every component is the one that config.json names ({read / 1e9:,.2f} GB of large files read)"
        print(f"rapid: {told}; a signed report vouches for config.json and privacy.json, too", file=sys.stderr)
    print(json.dumps(describe(bundle), indent=2, ensure_ascii=False))
    if bundle.privacy is not None:
        print(privacy_in_words(bundle.privacy))
