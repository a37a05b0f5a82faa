"""Prompts of calls whose server sent sampled ids but not those of the prompt.

In: trajectories, and the base model's tokenizer with its template. Out: their calls with the prompt
that the template makes of the messages, marked and so counted: it is what such a server most likely
read, but nobody knows. Sampled ids are never made from text, since text to ids is not the inverse
of ids to text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from art_core.batch.template import Renderer, render_prompt
from art_core.calls import ModelCall
from art_core.completeness import cause_of
from art_core.errors import ARTError
from art_core.trajectories import Trajectory

_log = logging.getLogger(__name__)


def render_missing_prompts(
    trajectories: Iterable[Trajectory], renderer: Renderer, *, model: str
) -> int:
    """Give the calls of `model` that lack nothing but prompt ids rendered ones, in place.

    A call whose messages the template refuses stays as it is: context, "no prompt ids".

    Args:
        renderer: of the base model of `model`; other models' calls have other ids.

    Returns:
        how many prompts were rendered.
    """
    count = 0
    for trajectory in trajectories:
        for at, call in enumerate(trajectory.calls):
            if call.model == model and cause_of(call) == "no prompt ids":
                whole = _rendered(call, renderer)
                if whole is not None:
                    trajectory.calls[at] = whole
                    count += 1
    return count


def _rendered(call: ModelCall, renderer: Renderer) -> ModelCall | None:
    try:
        ids = render_prompt(renderer, call.messages, call.request.get("tools"))
    except ARTError as error:
        _log.warning("a call of %s is not trained, its prompt has no ids: %s", call.origin, error)
        return None
    return replace(call, prompt_ids=ids, prompt_rendered=True)
