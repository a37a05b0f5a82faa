"""`visible`: text that somebody else wrote, made safe to show, letter for letter.

In: what a model, a tool or an exception said. Out: the same, with control characters spelled out
and lone surrogates replaced, so that it can neither clear a screen, nor set a title, nor turn the
direction of what follows, nor fail to be encoded. Markup of HTML or of a terminal library is not
its business: escape or refuse that where it is drawn.
"""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""All control characters but tab and line end; separators and marks that steer direction."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with its control characters as Python spells them ("\\x1b", "\\r")."""
    whole = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), whole)
