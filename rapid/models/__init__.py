"""The three networks: autoencoder, denoiser, trajectory encoder. Each builds, saves and loads itself."""

from rapid.models.autoencoder import Autoencoder
from rapid.models.denoiser import Denoiser
from rapid.models.encoder import TrajectoryEncoder

__all__ = ["Autoencoder", "Denoiser", "TrajectoryEncoder"]
