# SPDX-License-Identifier: Apache-2.0
"""`top_eta`: what one pass over the logits of a row tells about it."""

from .api import TopEta, max_candidates, top_eta

__all__ = ["TopEta", "max_candidates", "top_eta"]
