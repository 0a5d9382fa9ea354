"""Findings: all of them at once."""

import pytest

from stepwell.base.errors import InvariantError
from stepwell.core.check import Findings


def test_nothing_broken_raises_nothing():
    findings = Findings()
    findings.expect(True, "one")
    findings.expect([0], "two")
    findings.raise_if_any()
    assert findings.broken == []


def test_everything_broken_is_reported_in_one_error():
    """A checker that stops at the first leaves the rest to be found one run at a time."""
    findings = Findings()
    findings.expect(False, "one leaks")
    findings.expect(True, "fine")
    findings.expect(0, "two is lost")
    with pytest.raises(InvariantError) as caught:
        findings.raise_if_any()
    assert caught.value.findings == ("one leaks", "two is lost")
