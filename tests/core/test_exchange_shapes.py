"""Answers with something of a wrong shape in any place: each is still a call, and none is lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from art_core.slim import slim_body
from tests.core.test_exchange import plain, stream
from tests.stub_endpoint import call, completion, event

WRONG: tuple[Any, ...] = (None, True, 1, -1, 1.5, 10**12, "x", [], [None], ["x"], {}, {"a": 1})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of a JSON value, itself left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inner:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from places(part, (*path, key))


def changed(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    """A copy of `value` with `wrong` at `path`."""
    made = part = copy.deepcopy(value)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = wrong
    return made


def whole() -> dict[str, Any]:
    extras: dict[str, Any] = {
        "art_policy": "agent@3",
        "art_sampling": {"temperature": 1.0, "stop": []},
    }
    body = completion("4", [1, 2], tool_calls=[call("f", '{"a": 1}')], **extras)
    body["choices"][0]["art_record_id"] = "r"
    return body


def opening() -> dict[str, Any]:
    part = event("a", [3], prompt_token_ids=[1], art_policy="agent@3")
    part["choices"][0]["delta"]["tool_calls"] = [{"index": 0, **call("f", '{"a"')}]
    return part


def ending() -> dict[str, Any]:
    part = event("b", [4], finish_reason="stop")
    part["choices"][0]["delta"]["tool_calls"] = [{"index": 0, "function": {"arguments": ":1}"}}]
    return part


def test_whatever_a_body_holds_it_is_a_call() -> None:
    for path in places(whole()):
        for wrong in WRONG:
            body = changed(whole(), path, wrong)
            assert plain(body), (path, wrong)
            if isinstance(body["choices"], list):
                assert isinstance(json.loads(slim_body(body, {})), dict)


def test_whatever_a_stream_holds_it_is_a_call() -> None:
    for path in places(opening()):
        for wrong in WRONG:
            odd = changed(opening(), path, wrong)
            assert stream(odd, ending()), (path, wrong)
            assert stream(opening(), odd, ending()), (path, wrong)


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        (("choices", 0, "message"), "x", "message is 'x'"),
        (("choices", 0, "finish_reason"), ["stop"], "finish_reason is ['stop']"),
        (("choices", 0, "token_ids"), 7, "token_ids is 7"),
    ],
)
def test_a_wrong_shape_is_said_and_not_trained(path: Any, wrong: Any, words: str) -> None:
    (found,) = plain(changed(whole(), path, wrong))
    assert words in str(found.error)
    assert not found.trainable


def test_streamed_arguments_that_come_as_an_object_are_its_text() -> None:
    odd = opening()
    odd["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    (found,) = stream(odd, event(finish_reason="tool_calls"))
    assert found.message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert found.error is None
