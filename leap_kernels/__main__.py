# SPDX-License-Identifier: Apache-2.0
"""`python -m leap_kernels` is `leap-kernels`."""

import sys

from .cli import main

sys.exit(main())
