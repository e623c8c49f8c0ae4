"""Parameters of tests of arithmetic, of which `make test` takes a few."""

from collections.abc import Iterable
from typing import Any

import pytest


def each(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All values as parameters, tuples as several; those not `kept` are of the suite `numerics`."""
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if one in kept else pytest.mark.numerics,
        )
        for one in values
    ]
