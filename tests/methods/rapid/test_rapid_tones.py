"""Tones: the released histogram of pixels, and the curve that gives it to generated images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize
from skimage.exposure import match_histograms

from rapid.bundle import Bundle
from rapid.data import ImageSet, load_images
from rapid.dp import PrivateAccess, PublicFacts, calibrate
from rapid.methods import apply_overrides, open_generator
from rapid.methods.rapid.generator import RapidSampler
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.settings import RapidSettings
from rapid.methods.rapid.tone_curve import LEVELS, ToneCurve
from rapid.methods.rapid.tones import (
    INNER,
    bins_of_levels,
    fit_tones,
    image_row,
    matching_table,
    nearest_distribution,
    release_tones,
    tones_spec,
)
from rapid.sampling.generate import generate
from rapid.sampling.streams import make_streams
from rapid.stages.private import train_private_bundle
from rapid.training import RunFolder

CPU = torch.device("cpu")
