"""What synthetic images are good for. Works on images on disk, whoever made them.

The report is a function of the real images that it is given: it is for open data or a public test set, and is not
covered by the guarantee of a private bundle.
"""

from rapid.evaluate.report import report
from rapid.evaluate.utility import SmallCnn, train_and_test

__all__ = ["SmallCnn", "report", "train_and_test"]
