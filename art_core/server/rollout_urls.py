"""`/rollouts/<signed id>/v1/...`: the OpenAI surface for one rollout, and its calls afterwards.

In: calls of any client, with no code of ours in it. Out: the same answers as below /v1, each
recorded for the rollout; and, of the records, a trajectory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from art_core.calls import ModelCall
from art_core.engine.api_errors import ApiError
from art_core.engine.request_body import ROLLOUT_HEADER
from art_core.records import TokenRecord
from art_core.server.signed import Signer
from art_core.trajectories import Trajectory

PREFIX = "/rollouts/"


class RolloutUrls:
    """ASGI middleware that takes the rollout out of a path and puts it into the header."""

    def __init__(self, app: ASGIApp, signer: Signer, refuse: Any) -> None:
        self._app, self._signer, self._refuse = app, signer, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        signed, _, rest = scope["path"].removeprefix(PREFIX).partition("/")
        rollout_id = self._signer.read(signed)
        if rollout_id is None or not (rest == "tokenize" or rest.startswith("v1/")):
            error = ApiError(
                "no rollout is known by this URL", expected="one of POST /api/rollouts", status=404
            )
            await self._refuse(error)(scope, receive, send)
            return
        name = ROLLOUT_HEADER.encode()
        headers = [(n, v) for n, v in scope["headers"] if n != name]
        path = f"/{rest}"
        await self._app(
            {
                **scope,
                "path": path,
                "raw_path": path.encode(),
                "headers": [*headers, (name, rollout_id.encode())],
            },
            receive,
            send,
        )


def trajectory_of(rollout_id: str, records: Iterable[TokenRecord]) -> Trajectory:
    """The calls of a rollout as its server recorded them, in the order they began.

    One that broke off is context, with its cause.
    """
    calls = [_call(record) for record in records]
    return Trajectory(
        calls=calls,
        rollout_id=rollout_id,
        start_time=calls[0].started if calls else time.time(),
    )


def _call(record: TokenRecord) -> ModelCall:
    request: dict[str, Any] = {"model": record.model, "messages": record.request_messages}
    return ModelCall(
        record_id=record.record_id,
        model=record.model,
        step=record.step,
        request=request | ({"tools": record.tools} if record.tools else {}),
        message=record.message,
        finish_reason=record.finish_reason,
        choice_index=record.choice_index,
        prompt_ids=record.prompt_ids,
        sampled_ids=record.sampled_ids,
        logprobs=record.logprobs,
        sampling=record.sampling,
        started=record.created,
        ended=record.created,
        error=None if record.complete else "the call broke off before its end",
        left_out=None if record.complete else "broken answer",
    )
