# SPDX-License-Identifier: Apache-2.0
"""A release of transformers that the tests have not seen is worth one warning and no more."""

from __future__ import annotations

import warnings

import pytest

from leap_kernels.models import load


@pytest.mark.parametrize("version", ["5.0.0", "5.17.2", f"{load.TESTED_TRANSFORMERS[1]}.9"])
def test_tested_releases_say_nothing(version):
    load._warn_untested.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load._warn_untested(version)


@pytest.mark.parametrize("version", ["6.0.0.dev0", "5.999.1"])
def test_newer_releases_warn_once(version):
    oldest, newest = load.TESTED_TRANSFORMERS
    load._warn_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            load._warn_untested(version)
    assert [str(w.message).split(";")[0] for w in caught] == [
        f"transformers {version} is newer than what leap_kernels is tested with ({oldest} to {newest})"
    ]
    load._warn_untested.cache_clear()
