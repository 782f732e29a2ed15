"""rapid: synthetic images with a differential privacy guarantee."""

__version__ = "0.3.0.dev0"
