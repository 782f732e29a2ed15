"""The networks: autoencoder, denoiser, trajectory encoder, judge. Each builds, saves and loads itself."""

from rapid.models.autoencoder import Autoencoder
from rapid.models.denoiser import Denoiser
from rapid.models.encoder import TrajectoryEncoder
from rapid.models.judge import Judge

__all__ = ["Autoencoder", "Denoiser", "Judge", "TrajectoryEncoder"]
