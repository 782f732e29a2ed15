"""Images: read and write them, split them, fit them to the size and channels of a bundle."""

from rapid.data.fit import fit_images, to_uint8, to_unit_range
from rapid.data.image_set import ImageSet, join
from rapid.data.images import load_images, tell
from rapid.data.samples import sample_path
from rapid.data.splits import split_indices

__all__ = [
    "ImageSet",
    "fit_images",
    "join",
    "load_images",
    "sample_path",
    "split_indices",
    "tell",
    "to_uint8",
    "to_unit_range",
]
