"""Which tensor a step that is not finite is blamed on."""

import math

import pytest
import torch

from art_core.errors import NonFiniteStep
from art_core.training.finite import check_gradient


@pytest.mark.parametrize(
    ("second", "loss", "blamed"),
    [(1e30, 0.5, "second"), (math.nan, 0.5, "second"), (math.inf, math.nan, "second")],
)
def test_a_gradient_is_named(second: float, loss: float, blamed: str) -> None:
    """Case 090, inf_norm: 1e30 is finite, its square is not."""
    gradients = {"first": torch.ones(2), "second": torch.full((2,), second)}
    norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
    with pytest.raises(NonFiniteStep) as caught:
        check_gradient(gradients, loss=loss, norm=norm)
    assert caught.value.tensor == blamed


def test_a_loss_is_named_where_no_gradient_is_bad() -> None:
    with pytest.raises(NonFiniteStep) as caught:
        check_gradient({"first": torch.ones(2)}, loss=math.inf, norm=1.0)
    assert caught.value.tensor == "loss"
