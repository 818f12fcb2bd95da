# SPDX-License-Identifier: Apache-2.0
"""Decoding rules, one file a published rule."""

from .base import BaseRule, Decision, Strategy, View
from .credit import Credit
from .dream import Dream
from .entropy import Entropy
from .entropy_threshold import EntropyThreshold
from .factor import Factor
from .full import Full
from .klass import Klass
from .leap import Leap
from .lopa import Lopa
from .prophet import Prophet
from .threshold import Threshold
from .wino import Wino

__all__ = [
    "STRATEGIES",
    "BaseRule",
    "Credit",
    "Decision",
    "Dream",
    "Entropy",
    "EntropyThreshold",
    "Factor",
    "Full",
    "Klass",
    "Leap",
    "Lopa",
    "Prophet",
    "Strategy",
    "Threshold",
    "View",
    "Wino",
]

STRATEGIES: dict[str, type[Strategy]] = {
    rule.name: rule
    for rule in (Full, Threshold, Factor, Entropy, EntropyThreshold, Klass, Prophet, Credit, Dream, Wino, Lopa, Leap)
}
