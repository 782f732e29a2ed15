"""Evaluation of synthetic images of any method: utility, fidelity, diversity, and the search for copies.

The report is computed from the real images without noise. It is meant for open data or a public test set, and the
guarantee of a private bundle does not cover it.
"""

from rapid.evaluate.report import Report, Request, check_target, evaluate, write_report

__all__ = ["Report", "Request", "check_target", "evaluate", "write_report"]
