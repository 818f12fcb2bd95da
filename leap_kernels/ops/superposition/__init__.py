# SPDX-License-Identifier: Apache-2.0
"""`superpose`: the rows that lookahead appends to a sequence."""

from .api import BASE, BRANCH, CANDIDATE, COPY, PADDING, Superposed, superpose

__all__ = ["BASE", "BRANCH", "CANDIDATE", "COPY", "PADDING", "Superposed", "superpose"]
