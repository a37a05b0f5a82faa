"""What a call makes of tokens that can't be right: context with its cause, or a typed error."""

import math
from typing import Any

import numpy as np
import pytest

from art_core.calls import Cause, ModelCall
from art_core.completeness import cause_of
from art_core.errors import CaptureError
from tests.core.sample import make_call

ONE: dict[str, Any] = {"sampled_ids": [5], "logprobs": [-0.5]}


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"logprobs": [-0.1, math.nan, -0.2]}, "bad logprobs"),
        ({"logprobs": [-0.1, None, -0.2]}, "bad logprobs"),
        ({"logprobs": [-0.1, -math.inf, -0.2]}, "bad logprobs"),
        ({"logprobs": [-0.1, math.inf, -0.2]}, "bad logprobs"),
        ({"logprobs": [-0.1, 0.5, -0.2]}, "bad logprobs"),
        ({"logprobs": [-0.1, -9999.0, -0.2]}, "bad logprobs"),  # vLLM's and OpenAI's "not known"
        ({"logprobs": [-0.1, -0.2]}, "mismatch"),
        ({"logprobs": [-0.1, -0.2, -0.3, -0.4]}, "mismatch"),
        ({"sampled_ids": [5, -1, 0]}, "bad ids"),
        ({"prompt_ids": [1, -100, 3]}, "bad ids"),
        ({"prompt_ids": []}, "empty prompt"),
        ({"sampled_ids": [], "logprobs": []}, "nothing sampled"),
        ({"sampled_ids": None}, "no ids"),
        ({"sampled_ids": None, "logprobs": None}, "no ids"),
        ({"logprobs": None}, "no logprobs"),
        ({"prompt_ids": None}, "no prompt ids"),
        ({"left_out": "other model", "logprobs": [math.nan]}, "other model"),
    ],
)
def test_tokens_that_cannot_be_right_make_a_call_context(
    fields: dict[str, Any], cause: Cause
) -> None:
    call = make_call(**fields)
    assert cause_of(call) == cause
    assert not call.trainable


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": [0.0, -0.0, -30.0]},
        {"logprobs": [1e-6, -0.1, -0.2]},  # rounding lifts a certain token above 0
        ONE,
        {"prompt_ids": [7], **ONE},
        {"prompt_ids": np.array([1, 2**31 - 1], np.int64)},
        {"prompt_ids": np.array([1, 2], np.uint16)},
    ],
)
def test_tokens_that_can_be_right_are_trained(fields: dict[str, Any]) -> None:
    call = make_call(**fields)
    assert cause_of(call) is None
    assert call.trainable


@pytest.mark.parametrize("name", ["prompt_ids", "sampled_ids"])
@pytest.mark.parametrize(
    "ids",
    [[1, 2**31, 2], [1, -(2**40), 2], [1.5, 2.0, 3.0], ["1", "2", "3"], [[1, 2, 3]], [[1], [2, 3]],
     [True, False, True], [1, None, 2], [2**70, 1, 2], np.array([2**31], np.int64),
     np.ones((1, 2), np.int32), 7],
)  # fmt: skip
def test_what_is_no_list_of_ids_is_refused(name: str, ids: Any) -> None:
    with pytest.raises(CaptureError, match=f"{name} of call 'r0': got .*whole numbers below 2"):
        make_call(**{name: ids})


def test_a_long_list_is_shown_by_its_beginning() -> None:
    with pytest.raises(CaptureError) as caught:
        make_call(prompt_ids=[0.5] * 1_000_000)
    assert len(str(caught.value)) < 300


def test_what_is_no_list_of_logprobs_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"logprobs of call 'r0': got .*flat list of numbers"):
        make_call(logprobs=["a", "b", "c"])


def test_a_token_record_that_cannot_be_right_leaves_the_call_context() -> None:
    call = make_call(prompt_ids=None, sampled_ids=None, logprobs=None)
    joined = call.with_tokens(
        prompt_ids=np.array([1], np.int32),
        sampled_ids=np.array([2], np.int32),
        logprobs=np.array([np.nan], np.float32),
        sampling=call.sampling,
        step=3,
    )
    assert isinstance(joined, ModelCall)
    assert cause_of(joined) == "bad logprobs"
