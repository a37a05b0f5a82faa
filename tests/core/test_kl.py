"""KL estimators on the toy against the reference [-.7, -.8], [-1.8, -.5, -1.3]; d = n - f."""

from collections.abc import Callable

import pytest
from torch import Tensor

from art_core.training.kl import centred, k1, k2, k3, k3_weighted, penalised
from tests.core.toy import ADVANTAGE, NEW, OLD, REFERENCE, gradient, vector

GAP = [0.2, -0.2, -0.2, 0.2, 0.1]


@pytest.mark.parametrize(
    ("estimate", "each", "mean", "slope"),
    [
        pytest.param(lambda n: k1(n, REFERENCE), GAP, 0.02, [0.2] * 5, id="k1: no gradient to use"),
        pytest.param(
            lambda n: k2(n, REFERENCE), [0.02, 0.02, 0.02, 0.02, 0.005], 0.017,
            [0.04, -0.04, -0.04, 0.04, 0.02],
            id="k2",
        ),
        pytest.param(
            lambda n: k3(n, REFERENCE), [0.018731, 0.021403, 0.021403, 0.018731, 0.004837],
            0.017021, [0.036254, -0.044281, -0.044281, 0.036254, 0.019033],
            id="k3",
        ),
        pytest.param(
            lambda n: k3_weighted(n, OLD, REFERENCE),
            [0.027943, 0.023654, 0.012981, 0.018731, 0.007217],
            0.018105, [0.059673, -0.044207, -0.024261, 0.04, 0.029836],
            id="k3 times rho",
        ),
    ],
)  # fmt: skip
def test_estimators(
    estimate: Callable[[Tensor], Tensor], each: list[float], mean: float, slope: list[float]
) -> None:
    assert estimate(NEW).tolist() == pytest.approx(each, abs=1e-6)
    value, found = gradient(lambda n: estimate(n).mean())
    assert value == pytest.approx(mean, abs=1e-6)
    assert found == pytest.approx(slope, abs=1e-6)


def test_in_the_reward() -> None:
    found = penalised(ADVANTAGE, k1(NEW, REFERENCE), coef=0.1)
    assert found.tolist() == pytest.approx([0.98, 1.02, -0.98, -1.02, -1.01])


def test_centred() -> None:
    """ART's; mean d = .02."""
    gap = k1(NEW, REFERENCE)
    found = centred(ADVANTAGE, gap, gap.mean(), coef=0.1)
    assert found.tolist() == pytest.approx([0.982, 1.022, -0.978, -1.018, -1.008])
    assert float(found.sum()) == pytest.approx(float(ADVANTAGE.sum()))


def test_on_policy_distillation() -> None:
    """f - n: the penalty alone."""
    found = penalised(vector(0, 0, 0, 0, 0), k1(NEW, REFERENCE), coef=1.0)
    assert found.tolist() == pytest.approx([-0.2, 0.2, 0.2, -0.2, -0.1])
