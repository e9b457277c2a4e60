"""An extension of Griffe: turns what Sphinx and doctest call their own in docstrings into Markdown."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([^`]+)`")
_EXAMPLE = re.compile(r"(?:^(?:>>>|\.\.\. ).*\n?)+(?:^(?!\s*$).*\n?)*", re.MULTILINE)


class Markdown(griffe.Extension):
    """``:meth:`step``` becomes ```step```, and lines of an interactive session become a block of code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(lambda example: f"```pycon\n{example[0].rstrip()}\n```\n", text)
