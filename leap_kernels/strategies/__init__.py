# SPDX-License-Identifier: Apache-2.0
"""Decoding rules, one file a published rule."""

from .base import Decision, Strategy, View
from .full import Full
from .leap import Leap
from .threshold import Threshold

__all__ = ["STRATEGIES", "Decision", "Full", "Leap", "Strategy", "Threshold", "View"]

STRATEGIES: dict[str, type[Strategy]] = {rule.name: rule for rule in (Full, Threshold, Leap)}
