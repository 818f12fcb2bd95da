# SPDX-License-Identifier: Apache-2.0
"""`superposed_attention`: attention whose visibility follows from row metadata."""

from .api import Attention, Switches, superposed_attention

__all__ = ["Attention", "Switches", "superposed_attention"]
