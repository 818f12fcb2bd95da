# SPDX-License-Identifier: Apache-2.0
"""Decoding rules, one file a published rule."""

from .base import BaseRule, Decision, Strategy, View
from .entropy import Entropy
from .entropy_threshold import EntropyThreshold
from .factor import Factor
from .full import Full
from .leap import Leap
from .threshold import Threshold

__all__ = [
    "STRATEGIES",
    "BaseRule",
    "Decision",
    "Entropy",
    "EntropyThreshold",
    "Factor",
    "Full",
    "Leap",
    "Strategy",
    "Threshold",
    "View",
]

STRATEGIES: dict[str, type[Strategy]] = {
    rule.name: rule for rule in (Full, Threshold, Factor, Entropy, EntropyThreshold, Leap)
}
