# SPDX-License-Identifier: Apache-2.0
"""`sample_rows`: a token a row by the Gumbel-max trick, from noise that any device computes alike."""

from .api import Sampled, sample_rows

__all__ = ["Sampled", "sample_rows"]
