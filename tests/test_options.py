"""What the values of options have to be, where more than one command has the option."""

from __future__ import annotations

import pytest

from dcr_cli.cli.options import bytes_per_second_of, storage_options_of
from dcr_cli.errors import UsageError


def test_storage_options() -> None:
    assert storage_options_of(None) == storage_options_of([]) == {}
    given = ["region=eu-west-1", "secret=a=b=", "empty=", "two words= x "]
    assert storage_options_of(given) == {"region": "eu-west-1", "secret": "a=b=", "empty": "", "two words": " x "}


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["hunter2"], "KEY=VALUE expected"),
        (["=hunter2"], "KEY=VALUE expected"),
        (["a=b", ""], "KEY=VALUE expected"),
        (["token=hunter2", "token=hunter2"], "token is given twice"),
        (["to\nken=hunter2", "to\nken=hunter2"], r"to\nken is given twice"),
    ],
)
def test_malformed_storage_options_are_not_repeated(given: list[str], facts: str) -> None:
    with pytest.raises(UsageError) as caught:
        storage_options_of(given)
    assert str(caught.value) == f"--storage-option: {facts}"
    assert "hunter2" not in f"{caught.value.hint}"


def test_limit_rate() -> None:
    assert bytes_per_second_of(None) is None
    assert bytes_per_second_of("20M") == 20_000_000
    with pytest.raises(UsageError, match=r"^--limit-rate: a size expected, found 'fast'$"):
        bytes_per_second_of("fast")
