"""The error tree: who may catch what, and that a message says value, limit and remedy."""

import pytest

from stepwell.base import errors


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (errors.InputError, ValueError),
        (errors.MisuseError, RuntimeError),
        (errors.StaleError, errors.MisuseError),
        (errors.ConfigError, ValueError),
        (errors.GeometryError, ValueError),
    ],
)
def test_every_error_is_caught_as_ours_and_as_pythons(kind, also):
    error = kind("it is 3")
    assert isinstance(error, errors.StepwellError)
    assert isinstance(error, also)


def test_every_error_of_the_module_is_below_the_root():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert len(kinds) == 9
    assert all(issubclass(kind, errors.StepwellError) for kind in kinds)


def test_bad_values_and_bad_order_are_not_mixed_up():
    assert not issubclass(errors.InputError, errors.MisuseError)
    assert not issubclass(errors.MisuseError, ValueError)


def test_a_message_says_what_was_given_what_is_allowed_and_what_to_do():
    error = errors.InputError("n is -1", limit="0 or more", remedy="count again")
    assert str(error) == "n is -1; allowed: 0 or more; remedy: count again"
    assert (error.fact, error.limit, error.remedy) == ("n is -1", "0 or more", "count again")


def test_a_message_leaves_out_what_is_not_known():
    assert str(errors.MisuseError("closed twice")) == "closed twice"
    assert str(errors.MisuseError("closed twice", remedy="once")) == "closed twice; remedy: once"


def test_an_invariant_error_lists_every_finding():
    error = errors.InvariantError(["one leaks", "two is lost"])
    assert isinstance(error, AssertionError)
    assert error.findings == ("one leaks", "two is lost")
    assert str(error).startswith("2 broken invariants")
    assert all(finding in str(error) for finding in error.findings)
