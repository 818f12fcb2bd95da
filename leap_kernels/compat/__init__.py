# SPDX-License-Identifier: Apache-2.0
"""Drop-in functions: the names, arguments and returns of public decoding code, run by `decode`.

An argument that `decode` has nothing for is refused, never ignored. docs/swap.md has the lines before and after.
"""

from . import dream, fast_dllm, llada

__all__ = ["dream", "fast_dllm", "llada"]
