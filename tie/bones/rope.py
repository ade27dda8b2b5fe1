"""Frequencies of the rotary position embedding (Su et al. 2021, arXiv 2104.09864), stretched as the model asks."""

import math

import numpy as np
import numpy.typing as npt

from tie.bones.config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig) -> npt.NDArray[np.float32]:
    """Angles per position of each pair of dimensions, `[head_dim / 2]`."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / np.float32(config.rope_theta) ** exponents
    match config.rope_scaling:
        case None:
            return frequencies
        case RopeScaling(kind="linear", factor=factor):
            return frequencies / np.float32(factor)
        case RopeScaling() as scaling:
            # How many wavelengths the original context holds decides: few of them, stretch; many, keep; between, blend.
            periods = scaling.original_context * frequencies / (2 * math.pi)
            keep = (periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            keep = keep.clip(0, 1)
            stretched: npt.NDArray[np.float32] = (1 - keep) * frequencies / scaling.factor + keep * frequencies
            return stretched.astype(np.float32)
