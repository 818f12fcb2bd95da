# SPDX-License-Identifier: Apache-2.0
"""`check_consistency`: which predictions survived the lookahead."""

from .api import CONFIDENT, CONVERGED, FORCED, Consistency, check_consistency

__all__ = ["CONFIDENT", "CONVERGED", "FORCED", "Consistency", "check_consistency"]
