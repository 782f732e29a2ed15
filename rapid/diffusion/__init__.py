"""Diffusion: the variance schedule, the formulas of the paper, the samplers."""

from rapid.diffusion.schedule import Schedule

__all__ = ["Schedule"]
