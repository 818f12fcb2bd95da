# SPDX-License-Identifier: Apache-2.0
"""Every error this package raises on purpose, and the form of their messages.

A message answers four questions: which argument, what was expected, what came, what to do about it.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "BadLogitsError",
    "CheckpointError",
    "ConfigError",
    "InputError",
    "LeapError",
    "ModelError",
    "expected",
]


class LeapError(Exception):
    """Base of all errors of this package."""


class InputError(LeapError, ValueError):
    """A tensor or argument handed to an op or to `decode` cannot be used."""


class ConfigError(LeapError, ValueError):
    """A setting is out of its range, unknown, or contradicts another one."""


class BackendError(LeapError, RuntimeError):
    """A backend that was asked for by name cannot run here."""


class ModelError(LeapError, ValueError):
    """The model cannot be decoded by this package, or something it must declare is missing."""


class CheckpointError(LeapError, ValueError):
    """A checkpoint folder does not hold what its configuration promises."""


class BadLogitsError(LeapError, ArithmeticError):
    """The model produced NaN, +inf or no finite logit on a row that decides a token."""


def expected(argument: str, what: str, got: object, fix: str = "") -> str:
    """One line: `argument must be what, got got. fix`."""
    return f"{argument} must be {what}, got {got}." + (f" {fix}" if fix else "")
