"""The networks: autoencoder, denoisers, trajectory encoder, GAN, wide ResNet. Each can build, save and load itself."""

from rapid.nn.autoencoder import Autoencoder
from rapid.nn.denoiser import Denoiser
from rapid.nn.encoder import TrajectoryEncoder

__all__ = ["Autoencoder", "Denoiser", "TrajectoryEncoder"]
