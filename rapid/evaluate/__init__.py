"""What synthetic images are good for. Works on images on disk, whoever made them.

The report is a function of the real images that it is given: it is for open data or a public test set, and is not
covered by the guarantee of a private bundle.
"""

from rapid.evaluate.report import Report, Request, check_target, evaluate, write_report

__all__ = ["Report", "Request", "check_target", "evaluate", "write_report"]
