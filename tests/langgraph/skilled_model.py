"""A model with the skills that LangChain's standard tests ask for, as a script.

In: the prompt, and the grammar that the request holds the answer to. Out: the right answer to the
standard tests' questions. The grammar says which tools may be called, and every answer is checked
against it, so that the engine's own grammars are tried and not only believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from art_core.capture import Target
from art_core.engine.base import AdapterRef, GenerateRequest
from art_core.engine.chat_service import ChatService
from art_core.engine.grammar import GrammarMatcher
from art_core.engine.model_registry import ModelRegistry
from art_core.engine.openai_routes import create_app
from art_core.engine.scripted import ScriptedEngine
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import ByteTokenizer
from art_core.records import RecordStore

KEY = "key-of-the-server"
_JOKE = {"setup": "Why do cats purr?", "punchline": "Nobody has found the switch."}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "my_adder_tool": {"a": 3, "b": 4},
    "get_weather": {"location": "San Francisco, CA"},
    "greeting_generator": {"answer_style": "pirate"},
    "Joke": _JOKE,
    "JokeDict": _JOKE,
}
_TOKENIZER = ByteTokenizer()
_CALLABLE = re.compile(r'\{\\"name\\": \\"(\w+)\\", \\"arguments\\": ')
"""A tool's name in the grammar of tool calls."""


def says(prompt: str, request: GenerateRequest) -> str:
    """The answer of the model."""
    question = prompt.rsplit("<|im_start|>user\n", 1)[-1].split("<|im_end|>")[0]
    if request.grammar is None:
        wants_weather = "What is the weather" in question and "tool_response" not in question
        return _call("get_weather", question) if wants_weather else "Hello, I am well. And you?"
    answer = json.dumps(_JOKE)
    if request.grammar.kind == "tool_call":
        answer = _call(_CALLABLE.findall(request.grammar.lark)[0], question)
    matcher = GrammarMatcher(request.grammar, _TOKENIZER)
    for token_id in _TOKENIZER.encode(answer):
        matcher.advance(token_id)
    return answer


def _call(name: str, question: str) -> str:
    customer = re.search("'(.+?)'", question)
    arguments = _ARGUMENTS.get(name)
    if arguments is None:
        arguments = {"customer_name": customer[1] if customer else "", "description": "a company"}
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


@contextmanager
def skilled_server() -> Iterator[Target]:
    """The model on a free port of this machine, under the names "agent@3" and "scripted"."""
    engine = ScriptedEngine(says, tokenizer=_TOKENIZER, delta_tokens=7)
    models = ModelRegistry("scripted")
    records = RecordStore(None)
    _load(engine, AdapterRef("agent", 3))
    models.publish("agent", 3)
    app = create_app(ChatService(engine, records, models))
    with LoopbackServer(app, api_key=KEY) as server:
        yield Target(server.base_url, KEY, "agent@3")
    records.close()


def _load(engine: ScriptedEngine, adapter: AdapterRef) -> None:
    loading = engine.load_adapter(adapter, Path())
    try:
        loading.send(None)  # it has nothing to wait for
    except StopIteration:
        return
