"""Suffixes of the files that an image set may have, in lower case."""

IMAGES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm", ".pbm", ".pnm",
)  # fmt: skip
UNREAD = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".dcm", ".dicom", ".nii", ".nii.gz", ".svs", ".ndpi", ".dng")
"""Of images that no reader decodes."""
TABLES = (".csv", ".tsv", ".jsonl")
"""Of tables of labels."""
PARQUET = ".parquet"
ARROW = ".arrow"
"""Of the files of a folder that is not read."""
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
