"""oneDNN's linear layers against torch's own, and what the allocator is told."""

import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from art_core.nn.linear import OneDnnLinear, packed, product, products, use_onednn

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="not on this platform: torch without oneDNN"
)


def two(inputs: int, outputs: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """A plain layer and its twin by oneDNN."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias)
    ours = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    ours[0].load_state_dict(plain.state_dict())
    assert use_onednn(ours)
    assert type(ours[0]) is OneDnnLinear
    return plain, ours[0]


@needs_onednn
@pytest.mark.parametrize("shape", [(7,), (2, 5), (1, 1, 3)])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 4), (4, 24), (16, 16)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_values_and_gradients_are_torchs(
    shape: tuple[int, ...], inputs: int, outputs: int, bias: bool, frozen: bool
) -> None:
    """To float noise: 1e-6 at values of order 1."""
    x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1))
    pull = torch.randn(*shape, outputs, generator=torch.Generator().manual_seed(2))
    seen: list[list[Tensor | None]] = []
    for layer in two(inputs, outputs, bias):
        layer.requires_grad_(not frozen)
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        (out * pull).sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        seen.append([out.detach(), leaf.grad, *gradients])
    for ours, expected in zip(seen[1], seen[0], strict=True):
        assert (ours is None) == (expected is None) or frozen
        if expected is not None:
            assert ours is not None
            assert ours.shape == expected.shape
            assert (ours - expected).abs().max() <= 1e-5


@needs_onednn
@pytest.mark.parametrize("positions", [1, 2, 64, 300])
def test_a_packed_weight_gives_the_same(positions: int) -> None:
    """Whatever number of positions it was packed for; to float noise: 1e-5 at values of order 5."""
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    x = torch.randn(positions, 24, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ weight.double().t()
    assert (product(x, packed(weight, 64)) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [3, 200])
def test_products_side_by_side(rows: int, dtype: torch.dtype) -> None:
    """Small ones and large ones, also of a transposed second side; bounds as above."""
    x = torch.randn(2, rows, 100, generator=torch.Generator().manual_seed(0), dtype=dtype)
    weight = torch.randn(2, 100, 110, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected = x.double() @ weight.double()
    bound = 1e-4 if dtype == torch.float32 else 1e-11
    assert (products(x, weight.transpose(1, 2)) - expected).abs().max() <= bound


@needs_onednn
def test_an_input_without_gradient_still_trains_the_weight() -> None:
    """The first layer of a model reads frozen embeddings."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    plain, ours = two(8, 3, bias=False)
    for layer in (plain, ours):
        layer(x).sum().backward()
    assert plain.weight.grad is not None
    assert ours.weight.grad is not None
    assert (ours.weight.grad - plain.weight.grad).abs().max() <= 1e-6


def test_other_dtypes_and_kinds_of_layers_stay_as_they_are() -> None:
    class Own(nn.Linear):
        pass

    double = nn.Sequential(nn.Linear(2, 2).double())
    assert not use_onednn(double)
    assert type(double[0]) is nn.Linear
    mixed = nn.Sequential(Own(2, 2))
    use_onednn(mixed)
    assert type(mixed[0]) is Own


@needs_onednn
def test_the_weights_are_the_same_objects() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    weight = model[0].weight
    use_onednn(model)
    use_onednn(model)
    assert model[0].weight is weight


def test_memory_is_kept_where_glibc_is() -> None:
    """In a process of its own: the setting is for good."""
    code = "from art_core.nn.memory import keep_freed_memory as keep; print(keep(), keep())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    obeyed = platform.libc_ver()[0] == "glibc"
    assert out.stdout.split() == [str(obeyed)] * 2
