"""The body of a chat completion request, checked once.

In: parsed JSON. Out: a `ChatRequest`. Fields we don't know are ignored; those that would change
the answer's distribution or meaning, and that we can't honour, are refused by name. Values of
null mean the default, as OpenAI's clients send them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from art_core.calls import Sampling
from art_core.config import SamplingConfig
from art_core.engine.api_errors import ApiError
from art_core.engine.request_fields import (
    first,
    integer,
    logit_bias,
    number,
    of_type,
    required,
    stop,
    top_k,
)

_MAX_CHOICES = 128

_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "functions": (bool, "Use `tools`."),
    "function_call": (bool, "Use `tool_choice`."),
    "top_logprobs": (bool, "Leave it out, or set 0; only the sampled token's logprob is known."),
    "ignore_eos": (bool, "Use `min_tokens`."),
    "stop_token_ids": (bool, "Use `stop`."),
    "best_of": (lambda v: v != 1, "Use `n`, and choose among the answers."),
    "use_beam_search": (bool, "Leave it out; answers are sampled."),
    "prompt_logprobs": (lambda v: v is not False, "Leave it out."),
    "guided_json": (bool, "Use `response_format`."),
    "guided_regex": (bool, "Use `response_format` with a `pattern`."),
    "guided_choice": (bool, "Use `response_format` with an `enum`."),
    "guided_grammar": (bool, "Use `response_format`."),
    "structured_outputs": (bool, "Use `response_format`."),
    "chat_template": (bool, "The base model's own template is used."),
    "chat_template_kwargs": (bool, "The template takes no further settings."),
    "continue_final_message": (bool, "An answer is always a new message."),
    "add_generation_prompt": (lambda v: v is False, "An answer is always a new message."),
    "audio": (bool, "Answers are text."),
    "modalities": (lambda v: v != ["text"], 'Answers are text: ["text"].'),
    "web_search_options": (bool, "Give the model a tool that searches."),
}
"""Fields that must not be ignored: (when it matters, what to do instead)."""


@dataclass(frozen=True)
class ChatRequest:
    """A request that can be answered."""

    model: str
    messages: list[dict[str, Any]]
    """As received, at least one; none if there is a `prompt`."""
    prompt: str | list[int] | None
    """Text or ids that are gone on from as they are, without a template; None for a chat."""
    tools: list[dict[str, Any]] | None
    """As received; None if there are none."""
    tool_choice: Literal["auto", "none", "required"]
    named_tool: str | None
    """The one tool to call; `tool_choice` is "required" then."""
    parallel_tool_calls: bool
    answer_schema: dict[str, Any] | None
    """JSON schema of a plain answer; None leaves it free."""
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: tuple[tuple[int, float], ...]
    min_tokens: int
    max_tokens: int | None
    stop: tuple[str, ...]
    seed: int | None
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool

    def sampling(
        self, defaults: SamplingConfig, *, seed: int | None, grammar: str | None
    ) -> Sampling:
        """What shapes the answer's distribution: the request's settings over the model's."""
        return Sampling(
            temperature=first(self.temperature, defaults.temperature),
            top_p=first(self.top_p, defaults.top_p),
            top_k=first(self.top_k, defaults.top_k),
            min_p=first(self.min_p, defaults.min_p),
            presence_penalty=first(self.presence_penalty, 0.0),
            frequency_penalty=first(self.frequency_penalty, 0.0),
            repetition_penalty=first(self.repetition_penalty, 1.0),
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            max_tokens=first(self.max_tokens, defaults.max_tokens),
            stop=self.stop,
            seed=seed,
            grammar=grammar,
        )

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call."""
        if self.tools is None or self.tool_choice == "none":
            return []
        if self.named_tool is None:
            return self.tools
        return [tool for tool in self.tools if tool["function"]["name"] == self.named_tool][:1]


def parse_chat_request(body: object) -> ChatRequest:
    """Check `body`.

    Raises:
        ApiError: a field that is missing, of a wrong kind, out of range, or not supported.
    """
    if not isinstance(body, dict):
        raise ApiError("the body is not a JSON object", got=body)
    fields = {key: value for key, value in body.items() if value is not None}
    for name, (matters, instead) in _REFUSED.items():
        if name in fields and matters(fields[name]):
            raise ApiError(f"{name} is not supported", got=fields[name], fix=instead, param=name)
    tools = _tools(fields)
    tool_choice, named = _tool_choice(fields, tools)
    prompt = _prompt(fields)
    stream_options = of_type(fields, "stream_options", dict, {})
    return ChatRequest(
        model=required(fields, "model", str),
        messages=required(fields, "messages", list) if prompt is None else [],
        prompt=prompt,
        tools=tools,
        tool_choice=tool_choice,
        named_tool=named,
        parallel_tool_calls=of_type(fields, "parallel_tool_calls", bool, True),
        answer_schema=_answer_schema(fields),
        temperature=number(fields, "temperature", 0.0, 10.0),
        top_p=number(fields, "top_p", 0.0, 1.0, above_low=True),
        top_k=top_k(fields),
        min_p=number(fields, "min_p", 0.0, 1.0, below_high=True),
        presence_penalty=number(fields, "presence_penalty", -2.0, 2.0),
        frequency_penalty=number(fields, "frequency_penalty", -2.0, 2.0),
        repetition_penalty=number(fields, "repetition_penalty", 0.0, 10.0, above_low=True),
        logit_bias=logit_bias(fields),
        min_tokens=integer(fields, "min_tokens", 0) or 0,
        max_tokens=first(
            integer(fields, "max_completion_tokens", 1), integer(fields, "max_tokens", 1)
        ),
        stop=stop(fields),
        seed=integer(fields, "seed", -(2**63), 2**63 - 1),
        n=integer(fields, "n", 1, _MAX_CHOICES) or 1,
        stream=of_type(fields, "stream", bool, False),
        include_usage=bool(stream_options.get("include_usage")),
        logprobs=of_type(fields, "logprobs", bool, False),
        return_token_ids=of_type(fields, "return_token_ids", bool, False),
    )


def _prompt(fields: dict[str, Any]) -> str | list[int] | None:
    """What `/v1/completions` asks for here: a prompt in place of messages."""
    prompt = fields.get("prompt")
    if prompt is None:
        return None
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids) or "messages" in fields:
        raise ApiError(
            "the prompt can't be gone on from",
            got=prompt,
            expected="a text or a list of token ids, not empty, and no `messages`",
            param="prompt",
        )
    if "tools" in fields:
        raise ApiError("a prompt takes no tools", fix="Send `messages`.", param="tools")
    return cast(str | list[int], prompt)


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = of_type(fields, "tools", list, [])
    for i, tool in enumerate(tools):
        where = f"tools.[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise ApiError(
                "a tool of this type is not supported",
                got=kind if isinstance(tool, dict) else tool,
                expected='"function"',
                param=f"{where}.type",
            )
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ApiError("a tool has no name", got=tool, param=f"{where}.function.name")
        parameters = function.get("parameters")
        if not isinstance(parameters, dict | None):
            raise ApiError(
                f"the parameters of tool {name!r} are of a wrong kind",
                got=parameters,
                expected="a JSON schema object",
                param=f"{where}.function.parameters",
            )
        if not isinstance(function.get("description"), str | None):
            raise ApiError(
                f"the description of tool {name!r} is no string",
                got=function["description"],
                param=f"{where}.function.description",
            )
    return tools or None


def _tool_choice(
    fields: dict[str, Any], tools: list[dict[str, Any]] | None
) -> tuple[Literal["auto", "none", "required"], str | None]:
    choice = fields.get("tool_choice", "auto")
    named = None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else None
        choice = "required" if isinstance(named, str) else choice
    if choice not in ("auto", "none", "required"):
        raise ApiError(
            "tool_choice is not supported",
            got=fields["tool_choice"],
            expected='"auto", "none", "required" or '
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    names = [tool["function"]["name"] for tool in tools or ()]
    if (choice == "required" and not names) or (named is not None and named not in names):
        raise ApiError(
            "tool_choice asks for a tool that is not there",
            got=fields["tool_choice"],
            expected=f"one of the request's tools {names}",
            param="tool_choice",
        )
    return cast(Literal["auto", "none", "required"], choice), named


def _answer_schema(fields: dict[str, Any]) -> dict[str, Any] | None:
    form = of_type(fields, "response_format", dict, {"type": "text"})
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = form.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ApiError(
            "response_format is not supported",
            got=form,
            expected='type "text", "json_object", or "json_schema" with json_schema.schema',
            param="response_format",
        )
    return schema
