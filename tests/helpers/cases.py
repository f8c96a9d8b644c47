"""Which of many cases run always: the others are marked `long`."""

from collections.abc import Collection

import pytest


def long_but(few: Collection, cases: list) -> list:
    """The cases for pytest.mark.parametrize, those that are not among `few` marked `long`; ids by what they hold."""

    def text(value) -> str:
        return str(getattr(value, "__name__", value)).removeprefix("torch.").replace(" ", "")

    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if case in few else pytest.mark.long
        found.append(pytest.param(*values, marks=marks, id="-".join(map(text, values))))
    assert sum(case in few for case in cases) == len(few), "each of the few is one of the cases"
    return found
