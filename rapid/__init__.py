"""rapid: synthetic images with a differential privacy guarantee, by retrieval-augmented diffusion."""

__version__ = "0.1.0"
