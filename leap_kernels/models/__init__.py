# SPDX-License-Identifier: Apache-2.0
"""Models: what they are (`ModelSpec`), which are known (`registry`), how they are loaded and called."""

from .spec import ModelSpec

__all__ = ["ModelSpec"]
