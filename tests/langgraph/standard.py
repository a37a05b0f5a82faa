"""LangChain's own standard tests of a chat model, ready to be run on ChatArt over any server.

In: a fixture `target` that says where a server is, and names in `OTHER_MODEL` another model it
serves. Out: the whole suite inside a rollout's scope, as a graph's node would run it; and after
each test, that every call of it was recorded token for token. A server whose model lacks a skill
marks the tests that need it with xfail and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from art_core.capture import Target, open_scope
from art_langgraph import ChatArt

PASSAGE = " ".join(f"Line {i}: the shop opens at nine and closes at five." for i in range(12))
"""A prompt that is long enough for a server to keep its keys and values."""


@pytest.mark.filterwarnings(  # ChatOpenAI's own: it goes on with function calling
    "ignore:Received a Pydantic BaseModel V1 schema"
)
@pytest.mark.filterwarnings(  # ChatOpenAI's own: it dumps streamed answers that the SDK has parsed
    "ignore:Pydantic serializer warnings"
)
class ChatArtIntegration(ChatModelIntegrationTests):
    """The suite; subclasses give the fixture `target`."""

    OTHER_MODEL: str | None = None
    """Another name that the server answers under; None leaves those tests out."""
    METHOD = "json_schema"
    """How structured output is asked for."""
    MAX_TOKENS: int | None = None
    """Bounds the answers of a real model."""

    @pytest.fixture(autouse=True)
    def around(self, target: Target) -> Iterator[None]:
        """The rollout around each test."""
        with open_scope(None, {None: target}) as scope:
            yield
        assert scope.incomplete == []
        assert [call.error for call in scope.calls if not call.trainable] == []

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatArt

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": self.MAX_TOKENS}

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": self.METHOD}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str | None:
        return self.OTHER_MODEL

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """The second answer to a prompt that was just read."""
        llm = self.chat_model_class(**self.chat_model_params)
        llm.invoke(PASSAGE)
        if not stream:
            return llm.invoke(PASSAGE)
        return reduce(add, llm.stream(PASSAGE))
