"""The toy tokenizer of the field's cases: bytes, and a few longer tokens, longest match first.

Ids 0-255 are the bytes of UTF-8, `EXTRA[i]` is id 256 + i; `<|e|>` ends a turn. The templates, and
how many ids a text has, stand in the cases.
"""

from __future__ import annotations

from collections.abc import Sequence

from art_core.engine.tokenizer import ByteTokenizer

EXTRA = ("<|s|>", "<|e|>", "<|bos|>", "<think>", "</think>", "<call>", "</call>", "<res>", "</res>")
_TURN = "<|s|>{{ m.role }}\n{{ m.content or '' }}"
_CALL = "<call>{{ {'name': c.function.name, 'arguments': c.function.arguments}|tojson }}</call>"
_END = "<|e|>\n{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
TOJSON = (
    "{% for m in messages %}" + _TURN + "{% for c in m.tool_calls or [] %}" + _CALL
    + "{% endfor %}" + _END
)  # fmt: skip
"""Tool calls as JSON."""
ITEMS = (
    "{% for m in messages %}" + _TURN + "{% for c in m.tool_calls or [] %}"
    "<call:{{ c.function.name }}>{% for k, v in c.function.arguments|items %}"
    "<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</call>{% endfor %}" + _END
)
"""Tool calls key by key."""
WITH_BOS = "<|bos|>" + TOJSON
NO_OLD_THOUGHTS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m.content or '' %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}<|s|>{{ m.role }}\n{{ c }}" + _END
)
"""Drops thinking before the last user turn."""


class GreedyBytes(ByteTokenizer):
    """The tokenizer.

    Args:
        template: Jinja source.
        more: tokens after `EXTRA`.
    """

    def __init__(self, template: str = TOJSON, *, more: Sequence[str] = ()) -> None:
        super().__init__((*EXTRA, *more), eos="<|e|>", template=template)
        self.special_ids = frozenset(range(256, 256 + len(EXTRA)))
