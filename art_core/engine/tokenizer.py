"""Tokenizers behind `base.Tokenizer`: one over Hugging Face's, one of plain bytes.

In: a model folder (or nothing). Out: text to ids and back, and the chat template. Templates that
know no tools (SmolLM2) are replaced by our own one if the model speaks ChatML; how answers are read
is found in the template (`AnswerForm`). transformers is imported when an `HFTokenizer` is made,
never before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from art_core.engine.api_errors import ApiError
from art_core.engine.chat_template import ChatTemplate, hermes_chatml, refused
from art_core.engine.forms.answer_form import AnswerForm, find_form
from art_core.engine.messages import template_messages
from art_core.errors import BaseModelError
from art_core.readiness.dialogue import Dialogue
from art_core.readiness.tool_parser import writes_calls

_PROBE = "art-probe"


class TemplatedTokenizer:
    """What a tokenizer with a chat template of its own choice renders."""

    _template: ChatTemplate
    form = AnswerForm()
    """That of our own template, unless one is given."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text for `messages`, which may be as a client sent them.

        Raises:
            ApiError: the messages can't be rendered.
        """
        plain = self.form.for_template(template_messages(messages))
        return self._template.render(
            plain, tools=tools, add_generation_prompt=add_generation_prompt
        )


class ByteTokenizer(TemplatedTokenizer):
    """Ids 0-255 are the bytes of UTF-8; `extra[i]` is id 256+i, longest match first.

    For tests and the scripted engine: any text is ids and back without loss.

    Args:
        extra: special tokens.
        eos: the one of them that ends a turn.
        template: Jinja source; our Hermes ChatML template if None.
        form: how answers are read.
    """

    def __init__(
        self,
        extra: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
        *,
        eos: str = "<|im_end|>",
        template: str | None = None,
        form: AnswerForm | None = None,
    ) -> None:
        self._bytes = [bytes([i]) for i in range(256)] + [text.encode() for text in extra]
        self._ids = {text: 256 + i for i, text in enumerate(extra)}
        longest_first = sorted(extra, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._template = ChatTemplate(template or hermes_chatml())
        self.vocab_size = len(self._bytes)
        self.special_ids = frozenset(self._ids.values())
        self.eos_ids = frozenset({self._ids[eos]})
        self.form = form or self.form

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        ids: list[int] = []
        for i, part in enumerate(self._pattern.split(text)):
            if i % 2:
                ids.append(self._ids[part])
            else:
                ids.extend(part.encode("utf-8"))
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; broken UTF-8 becomes U+FFFD."""
        return _join(self.token_bytes(i) for i in _wanted(self, ids, skip_special))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that `token_id` stands for."""
        return self._bytes[token_id]


class HFTokenizer:
    """The tokenizer of a base model in Hugging Face's format.

    Args:
        path: folder with `tokenizer.json` and its neighbours.
        tool_parser, reasoning_parser: as in `EngineConfig`.

    Raises:
        BaseModelError: no tokenizer there, or one without a usable chat template.
        ConfigError: a parser that is not known.
    """

    def __init__(
        self, path: Path | str, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> None:
        from transformers import AutoTokenizer

        try:
            self._hf: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise BaseModelError(
                f"no tokenizer can be loaded from {str(path)!r} ({error})",
                fix="Give the folder of a whole base model in Hugging Face's format.",
            ) from error
        if not getattr(self._hf, "is_fast", False):
            raise BaseModelError(
                f"the tokenizer in {str(path)!r} has no tokenizer.json",
                expected="a fast tokenizer",
                fix="Convert it with transformers and save it again.",
            )
        self._backend: Any = self._hf.backend_tokenizer
        self.vocab_size = len(self._hf)
        self.special_ids = frozenset(
            i for i, token in self._hf.added_tokens_decoder.items() if token.special
        )
        self._own = self._stand_in(path)
        own = _source(self._hf.chat_template)
        self.form = find_form(
            self._own.source if self._own is not None else own or "",
            self._special_tokens(),
            own_template=own,
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
        )
        self.eos_ids = self._end_of_turn_ids(Path(path))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special-token text becomes its id, nothing is added in front."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; broken UTF-8 becomes U+FFFD."""
        return _join(self.token_bytes(i) for i in _wanted(self, ids, skip_special))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that `token_id` stands for; none for an id the tokenizer has no token for."""
        table = self._byte_table
        return table[token_id] if token_id < len(table) else b""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text for `messages`, which may be as a client sent them.

        Raises:
            ApiError: the messages can't be rendered, or there are tools and the base model's
                calls can't be read.
        """
        plain = self.form.for_template(template_messages(messages))
        if self._own is not None:
            return self._own.render(plain, tools=tools, add_generation_prompt=add_generation_prompt)
        if tools and not self.form.reads_calls:
            raise ApiError(
                "this base model's calls of tools can't be read: " + self.form.why_no_calls,
                fix="Leave `tools` out, choose a base model that is made for tools (Qwen2.5, "
                "Qwen3, Llama 3), or name the form of its calls: EngineConfig(tool_parser=...).",
                param="tools",
            )
        return self._native(plain, tools, add_generation_prompt)

    def _native(
        self,
        plain: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        try:
            text: str = self._hf.apply_chat_template(
                plain,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise refused(error) from error
        return text

    def _special_tokens(self) -> frozenset[str]:
        return frozenset(token.content for token in self._hf.added_tokens_decoder.values())

    def _stand_in(self, path: Path | str) -> ChatTemplate | None:
        """Our template, where the model's own is missing or shows no tools; None: its own."""
        is_chatml = {"<|im_start|>", "<|im_end|>"} <= set(self._hf.get_vocab())
        source = _source(self._hf.chat_template)
        if source is None:
            if not is_chatml:
                raise BaseModelError(
                    f"the tokenizer in {str(path)!r} has no chat template",
                    expected="a model tuned for chat",
                    fix="Choose the -Instruct or -Chat variant of the base model.",
                )
            return ChatTemplate(hermes_chatml())
        dialogue = Dialogue(source, self._special_tokens())
        knows_tools = dialogue.takes_tools() and writes_calls(dialogue)
        return ChatTemplate(hermes_chatml()) if is_chatml and not knows_tools else None

    def _end_of_turn_ids(self, path: Path) -> frozenset[int]:
        """The tokenizer's own, the generation config's, and what the template ends a turn with."""
        ids = {self._hf.eos_token_id}
        config = path / "generation_config.json"
        if config.is_file():
            listed = json.loads(config.read_text("utf-8")).get("eos_token_id")
            ids.update(listed if isinstance(listed, list) else [listed])
        turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _PROBE}]
        tail = self.encode(self.render(turn, add_generation_prompt=False).split(_PROBE)[-1])
        if tail and tail[0] in self.special_ids:
            ids.add(tail[0])
        return frozenset(i for i in ids if i is not None)

    @cached_property
    def _byte_table(self) -> list[bytes]:
        """Bytes of every token, by id."""
        added = {i: token.content for i, token in self._hf.added_tokens_decoder.items()}
        is_byte_level = '"ByteLevel"' in json.dumps(
            json.loads(self._backend.to_str()).get("decoder")
        )
        to_bytes = _byte_level_bytes if is_byte_level else _sentencepiece_bytes
        table = []
        for i in range(self.vocab_size):
            token = self._backend.id_to_token(i)
            if i in added:
                table.append(added[i].encode())
            else:
                table.append(b"" if token is None else to_bytes(token))
        return table


def _source(template: object) -> str | None:
    """Of several templates by name, the one for tools."""
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    return template if isinstance(template, str) and template else None


def _wanted(
    tokenizer: ByteTokenizer | HFTokenizer, ids: Sequence[int], skip_special: bool
) -> Iterable[int]:
    if not skip_special:
        return ids
    return (i for i in ids if i not in tokenizer.special_ids)


def _join(pieces: Iterable[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: those that print stand for themselves,
    the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    return b"".join(
        bytes([_ALPHABET[char]]) if char in _ALPHABET else char.encode() for char in token
    )


def _sentencepiece_bytes(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
