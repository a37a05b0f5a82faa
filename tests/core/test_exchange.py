"""What a server said, read into calls: the cases of the field, each with its stated right value.

Cases are those collected from public bug reports; their numbers name where an input comes from.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from art_core.calls import ModelCall, Origin, Sampling
from art_core.exchange import calls_of_reply
from art_core.reply import read_reply
from tests.stub_endpoint import call, completion, event, logprobs, usage


def plain(body: Any, **request: Any) -> list[ModelCall]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read(raw, streamed=False, **request)


def stream(*events: Any, ending: bytes = b"data: [DONE]\n\n", **request: Any) -> list[ModelCall]:
    parts = [b"data: " + json.dumps(e).encode() + b"\n\n" for e in events]
    return read(b"".join(parts) + ending, streamed=True, **request)


def read(
    raw: bytes,
    *,
    streamed: bool,
    status: int | None = 200,
    error: str | None = None,
    **request: Any,
) -> list[ModelCall]:
    return calls_of_reply(
        read_reply(raw, status, streamed=streamed, error=error),
        {"model": "agent@3", "messages": [], **request},
        raw,
        origin=Origin(node="agent"),
        started=1.0,
        ended=2.0,
    )


def ids(call: ModelCall) -> list[int] | None:
    return None if call.sampled_ids is None else call.sampled_ids.tolist()


# --- what is kept


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_and_every_id_are_kept(name: str) -> None:
    """Case 001: 4 ids, where the content alone would encode to 1; reasoning by either name."""
    body = completion("4", [901, 902, 903, 904])
    body["choices"][0]["message"][name] = "two and two"
    (kept,) = plain(body)
    assert ids(kept) == [901, 902, 903, 904]
    assert kept.prompt_ids is not None
    assert kept.prompt_ids.tolist() == [11, 12, 13]
    assert kept.logprobs is not None
    np.testing.assert_allclose(kept.logprobs, [-0.1, -0.11, -0.12, -0.13], rtol=1e-6)
    assert kept.message[name] == "two and two"
    assert kept.message["content"] == "4"
    assert kept.trainable
    assert kept.error is None


@pytest.mark.parametrize("arguments", ["", "null", "[]", '{"a": NaN}', '{"path":"a.txt","te'])
def test_tool_arguments_are_kept_as_they_were_spelled(arguments: str) -> None:
    """Cases 003 and 005: never turned into another call."""
    (kept,) = plain(completion(None, [41, 42], tool_calls=[call("add", arguments)]))
    assert kept.message["tool_calls"][0]["function"]["arguments"] == arguments
    assert ids(kept) == [41, 42]


def test_policy_and_sampling_are_those_that_the_server_tells() -> None:
    told = {"temperature": 0.7, "top_k": 40, "stop": ["\n"], "seed": 5, "grammar": None}
    (kept,) = plain(
        completion(art_policy="shop@12", art_sampling=told), model="shop", temperature=1.0
    )
    assert (kept.model, kept.step) == ("shop", 12)
    assert kept.sampling == Sampling(temperature=0.7, top_k=40, stop=("\n",), seed=5)


def test_without_them_they_are_those_that_were_asked_for() -> None:
    (kept,) = plain(
        completion(),
        model="agent@3",
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        max_completion_tokens=8,
        stop="END",
        response_format={"type": "json_schema"},
    )
    assert (kept.model, kept.step) == ("agent", 3)
    assert kept.sampling == Sampling(
        temperature=0.5, top_p=0.9, max_tokens=8, stop=("END",), grammar="json_schema"
    )


@pytest.mark.parametrize("name", ["gpt-4o", "org/model@main", "@3", "agent@"])
def test_a_name_without_a_step_is_whole(name: str) -> None:
    (kept,) = plain(completion(), model=name)
    assert (kept.model, kept.step) == (name, None)


def test_identity_is_the_servers_record_or_the_calls_own() -> None:
    """Server ids can be constant (case 028): only our record id identifies a call."""
    body = completion(id="chatcmpl-constant")
    first, second = plain(body) + plain(body)
    assert first.key != second.key
    body["choices"][0]["art_record_id"] = "r7"
    assert plain(body)[0].key == ("r7", 0)


# --- where the ids come from


def test_ids_spelled_in_logprobs_are_enough() -> None:
    """Case 040, token_id_strings: four tokens of one emoji."""
    body = completion("😊", [240, 159, 152, 138])
    del body["choices"][0]["token_ids"]
    assert ids(plain(body)[0]) == [240, 159, 152, 138]


def test_text_is_never_encoded_again() -> None:
    """Case 040, replacement_chars, and case 035, ids_missing: no ids, nothing to train."""
    body = completion("😊", None)
    entry = {"token": "\ufffd", "bytes": [239, 191, 189], "logprob": -0.1, "top_logprobs": []}
    body["choices"][0]["logprobs"] = {"content": [entry] * 4}
    body["usage"] = usage(3, 4)
    (kept,) = plain(body)
    assert ids(kept) is None
    assert kept.logprobs is None
    assert not kept.trainable
    assert kept.error is None


def test_text_that_looks_like_an_id_is_text() -> None:
    """Case 040, literal_text: one of two tokens reads token_id:7."""
    body = completion("token_id:7", [116, 111])
    body["choices"][0]["logprobs"]["content"][0]["token"] = "token_id:7"
    body["choices"][0]["logprobs"]["content"][1]["token"] = "x"
    assert ids(plain(body)[0]) == [116, 111]


def test_a_contradiction_is_an_error_not_a_pick() -> None:
    """Case 040, both: token_ids say 97, logprobs say 98."""
    body = completion("a", [97])
    body["choices"][0]["logprobs"]["content"] = logprobs([98])
    (kept,) = plain(body)
    assert ids(kept) is None
    assert kept.error is not None
    assert "[97]" in kept.error
    assert "[98]" in kept.error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"usage": usage(3, 9)}, ("2 token ids", "9 completion tokens")),
        ({"usage": usage(5, 2)}, ("3 prompt ids", "5 prompt tokens")),
        ({"prompt_token_ids": [1, -2, 3]}, ("prompt_token_ids[1]", "-2")),
        ({"prompt_token_ids": [1, 2.5, 3]}, ("prompt_token_ids[1]", "2.5")),
    ],
)
def test_counts_and_ids_must_agree(change: dict[str, Any], words: tuple[str, str]) -> None:
    (kept,) = plain(completion("ab", [1, 2]) | change)
    assert not kept.trainable
    assert kept.error is not None
    assert all(word in kept.error for word in words)


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("-inf"), "x", 10**400, -(10**400), -1e39]
)
def test_a_logprob_that_is_no_number_is_an_error(value: Any) -> None:
    body = completion("ab", [1, 2])
    body["choices"][0]["logprobs"]["content"][1]["logprob"] = value
    (kept,) = plain(body)
    assert not kept.trainable
    assert kept.error is not None
    assert "logprob 1" in kept.error


def test_a_logprob_short_is_an_error() -> None:
    body = completion("ab", [1, 2])
    body["choices"][0]["logprobs"]["content"].pop()
    (kept,) = plain(body)
    assert kept.error == "2 token ids came with 1 logprobs"


def test_choices_keep_their_own_ids_whatever_their_order() -> None:
    """Case 020: index 1 comes first; r1's ids must not be paired with r0's text."""
    body = completion("r1", [8])
    body["choices"][0]["index"] = 1
    body["choices"].append(completion("r0", [7])["choices"][0])
    body["usage"] = usage(3, 2)
    first, second = plain(body)
    assert (first.choice_index, first.message["content"], ids(first)) == (0, "r0", [7])
    assert (second.choice_index, second.message["content"], ids(second)) == (1, "r1", [8])


# --- streams


def test_a_stream_is_put_together() -> None:
    (kept,) = stream(
        {**event("he", [1]), "prompt_token_ids": [11], "art_policy": "agent@4"},
        event("y", [2, 3]),
        event(finish_reason="stop"),
        {**event(), "choices": [], "usage": usage(1, 3)},
    )
    assert kept.message == {"role": "assistant", "content": "hey"}
    assert ids(kept) == [1, 2, 3]
    assert kept.trainable
    assert (kept.step, kept.finish_reason) == (4, "stop")


def test_streamed_tool_calls_are_put_together() -> None:
    def part(**delta: Any) -> dict[str, Any]:
        return {**event(), "choices": [{"index": 0, "delta": {"tool_calls": [delta]}}]}

    (kept,) = stream(
        part(index=0, id="c1", function={"name": "add", "arguments": ""}),
        part(index=0, function={"arguments": '{"a": '}),
        part(index=1, id="c2", function={"name": "now", "arguments": "{}"}),
        part(index=0, function={"arguments": "1}"}),
        event(ids=[5, 6], finish_reason="tool_calls"),
    )
    assert kept.message["tool_calls"] == [call("add", '{"a": 1}', "c1"), call("now", "{}", "c2")]


def delta_of(
    index: int | None, call_id: str | None = None, name: str = "", arguments: str = ""
) -> dict[str, Any]:
    """A part of a tool call, its name and id left out where they are not given."""
    function = {"arguments": arguments} | ({"name": name} if name else {})
    part = {"index": index, "function": function} | ({"id": call_id} if call_id else {})
    return {**event(), "choices": [{"index": 0, "delta": {"tool_calls": [part]}}]}


@pytest.mark.parametrize(
    "parts",
    [
        # One index for all calls: a new id opens a new one.
        [
            delta_of(0, "a", "f", '{"x": 1}'),
            delta_of(0, "b", "g", '{"y":'),
            delta_of(0, None, "", " 2}"),
        ],
        # No index, the id in every part.
        [
            delta_of(None, "a", "f", '{"x":'),
            delta_of(None, "a", "", " 1}"),
            delta_of(None, "b", "g", '{"y": 2}'),
        ],
        # No index, the id in the first part only.
        [
            delta_of(None, "a", "f", '{"x":'),
            delta_of(None, None, "", " 1}"),
            delta_of(None, "b", "g", '{"y": 2}'),
        ],
        # Counted from 1.
        [delta_of(1, "a", "f", '{"x": 1}'), delta_of(2, "b", "g", '{"y": 2}')],
        # One id for all calls, by index and without.
        [delta_of(0, "a", "f", '{"x": 1}'), delta_of(1, "a", "g", '{"y": 2}')],
        [delta_of(None, "a", "f", '{"x": 1}'), delta_of(None, "a", "g", '{"y": 2}')],
        # A new id in every part; the end of a call told once more.
        [
            delta_of(0, "a", "f"),
            delta_of(0, "b", "", '{"x": 1}'),
            delta_of(1, "c", "g", '{"y":'),
            delta_of(1, "d", "", " 2}"),
        ],
        [
            delta_of(None, "a", "f", '{"x": 1}'),
            delta_of(None, "a"),
            delta_of(None, "b", "g", '{"y": 2}'),
            delta_of(None, "b"),
        ],
        # By turns.
        [
            delta_of(0, "a", "f", '{"x":'),
            delta_of(1, "b", "g", '{"y":'),
            delta_of(0, None, "", " 1}"),
            delta_of(1, None, "", " 2}"),
        ],
    ],
)
def test_calls_are_told_apart_however_a_server_numbers_them(parts: list[dict[str, Any]]) -> None:
    (kept,) = stream(*parts, event(ids=[5, 6], finish_reason="tool_calls"))
    functions = [c["function"] for c in kept.message["tool_calls"]]
    assert [(f["name"], f["arguments"]) for f in functions] == [
        ("f", '{"x": 1}'),
        ("g", '{"y": 2}'),
    ]
    assert ids(kept) == [5, 6]


def test_ids_swallowed_by_a_tool_parser_are_noticed() -> None:
    """Case 011: 4 ids and logprobs came, usage says 9; the reason names both numbers."""
    (kept,) = stream(
        event("", [5, 6, 7]),
        event(ids=[9], finish_reason="tool_calls"),
        {**event(), "choices": [], "usage": usage(4, 9)},
    )
    assert not kept.trainable
    assert kept.error == "4 token ids received, usage says 9 completion tokens"


def test_two_final_chunks_are_one_ending() -> None:
    """Case 012, two_finish_chunks."""
    (kept,) = stream(
        event("a", [3]),
        event(finish_reason="stop"),
        event(ids=[4], finish_reason="stop"),
        {**event(), "choices": [], "usage": usage(2, 2)},
    )
    assert kept.finish_reason == "stop"
    assert ids(kept) == [3, 4]


@pytest.mark.parametrize("ending", [b"data: [DONE]\n\n", b""])
def test_an_error_in_a_stream_fails_the_call_and_keeps_what_came(ending: bytes) -> None:
    """Cases 012, error_midway, and 069, error_after_two."""
    (kept,) = stream(
        event("par", [3]), event("t", [4]), {"error": {"message": "out of blocks"}}, ending=ending
    )
    assert kept.error is not None
    assert "out of blocks" in kept.error
    assert kept.message["content"] == "part"
    assert ids(kept) is None


WHOLE = (event("a", [3]), event(finish_reason="stop"))


@pytest.mark.parametrize(
    ("events", "ending", "whole"),
    [
        (WHOLE, b"data: [DONE]\n\n", True),
        (WHOLE, b"", True),
        (WHOLE[:1], b"", False),
        (WHOLE[:1], b"data: [DONE]\n\n", False),
        (({"choices": [], "error": {"message": "worker full"}},), b"", False),
        ((), b"", False),
    ],
    ids=["clean", "no_done", "no_finish", "done_without_finish", "empty_with_error", "nothing"],
)
def test_endings_of_streams(events: tuple[Any, ...], ending: bytes, whole: bool) -> None:
    """Case 069, endings."""
    (kept,) = stream(*events, ending=ending)
    assert kept.trainable is False  # no prompt ids here
    assert (kept.error is None) is whole


def test_a_break_after_the_end_is_no_break() -> None:
    """A client may close the response once it has read [DONE]; before, the answer is not whole."""
    assert stream(*WHOLE, error="closed")[0].error is None
    assert stream(*WHOLE, ending=b"", error="closed")[0].error == "closed"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("space", [b" ", b""])
def test_framing_does_not_change_the_text(size: int, line_end: bytes, space: bytes) -> None:
    """Case 069: line ends, comments, a body over two data lines, no blank line at the end.

    The text holds U+2028, which is a line end to some parsers but not to this protocol.
    """
    text = "a bc 😀\u2028 end"
    first = json.dumps(event(text, [3]), ensure_ascii=False).encode()
    head, tail = first[: first.index(b"{", 1)], first[first.index(b"{", 1) :]
    lines = [
        b"data:" + space + head,
        b"data:" + space + tail,
        b"",
        b": ping",
        b"",
        b"data:" + space + json.dumps(event(finish_reason="stop")).encode(),
    ]
    raw = line_end.join(lines)
    chunks = [raw[i : i + size] for i in range(0, len(raw), size)]
    (kept,) = read(b"".join(chunks), streamed=True)
    assert kept.error is None
    assert kept.message["content"] == text


# --- what is no answer


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"error": {"message": "too long", "code": "context_length_exceeded"}}, 400, "too long"),
        (b"<html>Bad gateway</html>", 502, "HTTP 502: '<html>Bad gateway</html>'"),
        (b"", 503, "HTTP 503: an empty body"),
        (b"<html>ok</html>", 200, "not a JSON object"),
        ([1], 200, "not a JSON object"),
        ({"choices": []}, 200, "no choices"),
        ({"choices": None, "error": {"message": "quota"}}, 200, "quota"),
        (b"\xff\xfe\x00", 200, "not a JSON object"),
        (b"[" * 20000, 200, "not a JSON object"),
    ],
)
def test_what_is_no_answer_is_an_error_call(body: Any, status: int, words: str) -> None:
    (kept,) = plain(body, status=status)
    assert kept.error is not None
    assert words in kept.error
    assert kept.request["model"] == "agent@3"
    assert not kept.trainable


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled"])
def test_an_answer_that_the_server_broke_off_is_not_trained(reason: str) -> None:
    (kept,) = plain(completion("a", [1], finish_reason=reason))
    assert not kept.trainable
    assert kept.error is not None
    assert reason in kept.error


def test_no_response_is_an_error_call() -> None:
    (kept,) = read(b"", streamed=False, status=None, error="ConnectError: refused")
    assert kept.error == "ConnectError: refused"
    assert kept.finish_reason is None


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "stop", "max_tokens"])
@pytest.mark.parametrize("value", ["high", {"a": 1}, True])
def test_a_setting_of_no_sense_is_the_servers_to_refuse(name: str, value: Any) -> None:
    """The caller gets the server's 400, and the call is recorded with it."""
    refused = json.dumps({"error": {"message": f"{name} is odd"}}).encode()
    (kept,) = read(refused, streamed=False, status=400, **{name: value})
    assert (kept.error, kept.left_out) == (f"HTTP 400: {name} is odd", "not answered")
