# SPDX-License-Identifier: Apache-2.0
"""The version, in one place; the build reads it without importing torch."""

__version__ = "0.1.0.dev0"
