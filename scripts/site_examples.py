"""Shows the examples of docstrings as code on the site's reference page: without a fence, Markdown quotes them."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # up to a blank line


class Examples(griffe.Extension):
    """Puts a fence around every example when its docstring has been read."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
