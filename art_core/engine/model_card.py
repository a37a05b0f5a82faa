"""What `GET /v1/models` says of the served names.

In: names, and the engine behind them. Out: OpenAI's model cards; `max_model_len` as vLLM spells it;
and `art_profile`, what the model can do, under the names of LangChain's `ModelProfile`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from art_core.engine.api_errors import ApiError
from art_core.engine.base import Engine, Tokenizer

_PROBE = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}


def model_cards(names: Iterable[str], engine: Engine) -> list[dict[str, Any]]:
    """The cards of `names`."""
    profile = _profile(engine.tokenizer)
    return [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "art-langgraph",
            "max_model_len": engine.context_length,
            "art_profile": profile,
        }
        for name in names
    ]


def _profile(tokenizer: Tokenizer) -> dict[str, bool]:
    can_call = _knows_tools(tokenizer)
    return {
        "text_inputs": True,
        "image_inputs": False,
        "image_url_inputs": False,
        "pdf_inputs": False,
        "audio_inputs": False,
        "video_inputs": False,
        "image_tool_message": False,
        "pdf_tool_message": False,
        "text_outputs": True,
        "tool_calling": can_call,
        "tool_choice": can_call,
        "tool_call_streaming": can_call,
        "structured_output": True,
        "temperature": True,
    }


def _knows_tools(tokenizer: Tokenizer) -> bool:
    """True if the chat template can show tools; a tokenizer that can't refuses them."""
    try:
        tokenizer.render([{"role": "user", "content": "q"}], tools=[_PROBE])
    except ApiError:
        return False
    return True
