"""The tests' own settings: warnings are errors, but an interrupted run still says what it found."""

from __future__ import annotations

import warnings

import pytest
from syrupy.utils import warn_incomplete_worker_reports


def test_missing_reports_of_workers_do_not_raise() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warn_incomplete_worker_reports(received=0, expected=2)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)
    assert len(seen) == 1
