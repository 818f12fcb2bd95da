# SPDX-License-Identifier: Apache-2.0
"""`row_kl`: how far a row's distribution has moved since the forward before."""

from .api import row_kl

__all__ = ["row_kl"]
