"""The body of a tokenize request in vLLM's shape, checked once, and the answer to it.

In: parsed JSON with a `prompt`, or with `messages` and `tools`. Out: a `TokenizeRequest`. What
would change the ids and can't be honoured is refused by name. Nothing is ever put in front of a
prompt, whatever `add_special_tokens` says: the base model's template writes all that is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from art_core.engine.api_errors import ApiError
from art_core.engine.base import Tokenizer
from art_core.engine.chat_request import parse_chat_request

_REFUSED = {
    "chat_template": "The base model's own template is used.",
    "chat_template_kwargs": "The template takes no further settings.",
    "continue_final_message": "An answer is always a new message.",
}


@dataclass(frozen=True)
class TokenizeRequest:
    """What is to be tokenised: a text, or a chat."""

    model: str | None
    """None: whatever is served; all of it has one tokenizer."""
    prompt: str | None
    """None for a chat."""
    messages: list[dict[str, Any]]
    """As received; empty for a text."""
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    """Ids of a chat end with the opening of the answer."""
    return_token_strs: bool


def parse_tokenize_request(body: object) -> TokenizeRequest:
    """Check `body`.

    Raises:
        ApiError: neither a prompt nor messages, or a field of a wrong kind, or one not supported.
    """
    if not isinstance(body, dict):
        raise ApiError("the body is not a JSON object", got=body)
    fields = {key: value for key, value in body.items() if value is not None}
    for name, instead in _REFUSED.items():
        if fields.get(name):
            raise ApiError(f"{name} is not supported", got=fields[name], fix=instead, param=name)
    prompt = fields.get("prompt")
    if not isinstance(prompt, str | None) or (prompt is None) == ("messages" not in fields):
        raise ApiError(
            "there is nothing to tokenise, or too much",
            got={name: fields[name] for name in ("prompt", "messages") if name in fields},
            expected="either a string `prompt` or a list of `messages`",
            param="prompt",
        )
    asked = {"model": "any", **{k: fields[k] for k in ("messages", "tools") if k in fields}}
    chat = parse_chat_request(asked) if prompt is None else None
    return TokenizeRequest(
        model=fields.get("model"),
        prompt=prompt,
        messages=chat.messages if chat else [],
        tools=chat.tools if chat else None,
        add_generation_prompt=fields.get("add_generation_prompt") is not False,
        return_token_strs=fields.get("return_token_strs") is True,
    )


def tokenize_response(
    request: TokenizeRequest, ids: list[int], tokenizer: Tokenizer, context_length: int
) -> dict[str, Any]:
    """The body of the response."""
    spelled = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
    return {
        "count": len(ids),
        "max_model_len": context_length,
        "tokens": ids,
        "token_strs": spelled if request.return_token_strs else None,
    }
