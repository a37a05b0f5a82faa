"""Small real records for tests of the core."""

from __future__ import annotations

from typing import Any

import numpy as np

from art_core.calls import ModelCall, Origin, Sampling


def make_call(**changes: Any) -> ModelCall:
    """A whole call: a prompt of four ids, a sample of three, at step 2 of "agent"."""
    fields: dict[str, Any] = {
        "record_id": "r0",
        "model": "agent",
        "step": 2,
        "request": {"model": "agent", "messages": [{"role": "user", "content": "Hi"}]},
        "message": {"role": "assistant", "content": "Hello"},
        "finish_reason": "stop",
        "response": b'{"id": "r0"}',
        "prompt_ids": np.array([1, 2, 3, 4]),
        "sampled_ids": np.array([5, 6, 0]),
        "logprobs": np.array([-0.1, -2.5, -1e-7], np.float32),
        "sampling": Sampling(seed=7, stop=("END",)),
        "origin": Origin(node="agent", graph_step=1),
        "started": 1.0,
        "ended": 2.0,
    }
    return ModelCall(**fields | changes)
