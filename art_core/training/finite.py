"""Whether a step is finite; one that is not is left out and named by its first bad tensor.

In: gradients and weights under the names that they have in an adapter's file. Out: nothing, or a
`NonFiniteStep`. Left out: putting the old step back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from art_core.errors import NonFiniteStep


def check_gradient(gradients: Mapping[str, Tensor], *, loss: float, norm: float) -> None:
    """Look at the loss and the norm of all gradients, which is not finite if one of them is not.

    Raises:
        NonFiniteStep: one of the two is not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFiniteStep(
            "loss or gradient is not finite",
            tensor=first_bad(gradients) or _largest(gradients, loss),
            got={"loss": loss, "grad_norm": norm},
            fix="The adapter is unchanged. Lower the learning rate, or look for wild rewards.",
        )


def check_weights(weights: Mapping[str, Tensor], *, learning_rate: float) -> None:
    """Look at new weights.

    Raises:
        NonFiniteStep: one is not finite.
    """
    bad = first_bad(weights)
    if bad is not None:
        raise NonFiniteStep(
            "the update made weights that are not finite",
            tensor=bad,
            got={"learning_rate": learning_rate},
            fix="The adapter is unchanged. Lower the learning rate.",
        )


def _largest(gradients: Mapping[str, Tensor], loss: float) -> str:
    """What is to blame where every gradient is finite: the loss, or the largest of them.

    The sum of the squares of numbers above 1e19 is infinite in float32.
    """
    if not (gradients and math.isfinite(loss)):
        return "loss"
    return max(gradients, key=lambda name: float(gradients[name].abs().max()))


def first_bad(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor that holds NaN or infinity; None if none does.

    One look at their norm mostly will do; hundreds of looks would each wait for the GPU. The norm
    of finite numbers may be beyond a float.
    """
    plain = [t.detach() for t in tensors.values() if t.is_floating_point()]
    if not plain or bool(torch.nn.utils.get_total_norm(plain).isfinite()):
        return None
    return next((name for name, t in tensors.items() if not bool(t.isfinite().all())), None)
