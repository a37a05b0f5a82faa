"""What goes through the door into vLLM: a request as bytes, and the frames of its answer.

In: a `GenerateRequest`. Out: the bytes that `inside_vllm/art_token_door.py` reads; and, of the
bytes that it writes, ids with logprobs and how the call ended. Pure; its other half stands in
vLLM's process, which knows nothing of this package.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from art_core.calls import Ids, Logprobs, Sampling
from art_core.engine.api_errors import ApiError
from art_core.engine.base import GenerateRequest
from art_core.errors import EngineError

PATH, VERSION_PATH = "/art/generate", "/art/version"
DOOR = "art_token_door.TokenDoor"
"""What vLLM's `--middleware` is given."""
COLDEST = 0.01
"""Lower temperatures than this one vLLM raises to it, without a word."""

_HEAD = struct.Struct("<I")
_FRAME = struct.Struct("<BI")
_TOKENS, _END = 0, 1
_BYTES_A_TOKEN = 8


@dataclass(frozen=True)
class Tokens:
    """A frame of what was sampled, or scored."""

    ids: Ids
    logprobs: Logprobs


@dataclass(frozen=True)
class End:
    """How the call ended."""

    finish_reason: str | None
    cached_tokens: int


def generate_body(
    request: GenerateRequest, adapter: str | None, *, eos_ids: Collection[int], room: int
) -> bytes:
    """A call to be sampled.

    Args:
        adapter: the name it was loaded under; None: the base model.
        eos_ids: ids that end a turn. vLLM itself knows but one of them.
        room: tokens that fit behind the prompt, at least 1.

    Raises:
        ApiError: a temperature that vLLM would change.
    """
    settings = sampling_settings(request.sampling, eos_ids=eos_ids, room=room)
    if request.grammar is not None:
        settings["grammar"] = request.grammar.lark
    return _body(request.request_id, adapter, request.prompt_ids, settings, request.stream)


def score_body(request_id: str, adapter: str | None, ids: Ids) -> bytes:
    """A sequence whose ids are to be scored, each after those before it, at temperature 1."""
    settings = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
    return _body(request_id, adapter, ids, settings, stream=False)


def sampling_settings(sampling: Sampling, *, eos_ids: Collection[int], room: int) -> dict[str, Any]:
    """`sampling` as vLLM's SamplingParams take it.

    Stop strings are not among them: `Answer` finds them in the text that the client sees, and
    closes the call.

    Raises:
        ApiError: a temperature that vLLM would change.
    """
    if 0 < sampling.temperature < COLDEST:
        raise ApiError(
            "vLLM can't sample at this temperature",
            got=sampling.temperature,
            expected=f"0, or at least {COLDEST}",
            fix="Set 0, which takes the most likely token.",
            param="temperature",
        )
    limit = min(room, sampling.max_tokens or room)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "seed": None if sampling.seed is None else sampling.seed % 2**63,  # -1 means none, too
        "max_tokens": limit,
        "min_tokens": min(sampling.min_tokens, limit),  # vLLM refuses more
        "stop_token_ids": sorted(eos_ids),
        "logprobs": 0,  # of the sampled token alone
    }


class FrameReader:
    """Bytes, however they are cut, to frames."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[Tokens | End]:
        """The frames that `data` completes.

        Raises:
            EngineError: vLLM failed in the midst of the call.
        """
        self._held += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Tokens | End | None:
        if len(self._held) < _FRAME.size:
            return None
        kind, count = _FRAME.unpack_from(self._held)
        size = count * _BYTES_A_TOKEN if kind == _TOKENS else count
        stop = _FRAME.size + size
        if len(self._held) < stop:
            return None
        data, self._held = self._held[_FRAME.size : stop], self._held[stop:]
        if kind == _TOKENS:
            half = 4 * count
            return Tokens(np.frombuffer(data[:half], "<i4"), np.frombuffer(data[half:], "<f4"))
        told = json.loads(data)
        if "error" in told:
            raise EngineError(f"vLLM failed in the midst of a call ({told['message']})")
        return End(told["finish_reason"], told["cached_tokens"])


def _body(
    request_id: str, adapter: str | None, ids: Ids, settings: dict[str, Any], stream: bool
) -> bytes:
    head = {"request_id": request_id, "adapter": adapter, "sampling": settings, "stream": stream}
    text = json.dumps(head).encode()
    return _HEAD.pack(len(text)) + text + np.asarray(ids, "<i4").tobytes()
