"""Memory of the loss: logprobs and entropies of a row's entries, and their gradient.

One row of 32,768 positions, a fifth of them trained, a vocabulary of 151,936, hidden size 1024.
Unit: memory beyond the hidden states, their gradient and the output matrix, in full logits tensors
(every position, the model's dtype). Peers, written here: logits of all positions with a log-softmax
in float32; and the head taken in chunks that autograd keeps, which is how ART's loss was read to
work (4.03 by the project's notes). Gate: all agree. On a GPU memory is the allocator's peak, in
bfloat16; on a CPU the bytes of all tensors that live at once, in float32.
"""

from __future__ import annotations

import argparse
import json
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from art_core.nn.head import Head
from art_core.training.logprobs import head_logprobs
from benchmarks.comparison import MIN_REPEATS, Comparison, at_least_five, compare_seconds, machine

TRAINED = 0.2
ART_CHUNK = 1024
GOAL = "extra memory <= 0.02 of one full logits tensor, time <= 1.05x"
Loss = Callable[[Tensor], Tensor]
"""Hidden states [N, H] -> a scalar."""


@dataclass(frozen=True)
class Case:
    """One row."""

    head: Head
    hidden: Tensor
    position: Tensor
    target: Tensor
    weight: Tensor

    @classmethod
    def draw(cls, positions: int, vocab: int, size: int, device: str, dtype: torch.dtype) -> Case:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        matrix = torch.nn.Linear(size, vocab, bias=False, device=device, dtype=dtype)
        matrix.weight.data = normal(vocab, size) / size**0.5
        trained = int(TRAINED * positions)
        place = torch.randperm(positions, generator=generator, device=device)[:trained]
        target = torch.randint(0, vocab, (trained,), generator=generator, device=device)
        return cls(
            Head(matrix.requires_grad_(False)),
            normal(positions, size).requires_grad_(),
            place.sort().values,
            target,
            torch.randn(trained, generator=generator, device=device),
        )

    @property
    def full_bytes(self) -> int:
        """Of one full logits tensor."""
        vocab, _ = self.head.weight.shape
        return len(self.hidden) * vocab * self.hidden.dtype.itemsize

    def ours(self, hidden: Tensor) -> Tensor:
        ones = torch.ones_like(self.weight)
        logprobs, entropies = head_logprobs(self.head, hidden, self.position, self.target, ones)
        return (self.weight * (logprobs + 0.01 * entropies)).sum()

    def full(self, hidden: Tensor) -> Tensor:
        logprobs = torch.log_softmax(self.head.logits(hidden).float(), dim=-1)[self.position]
        return self._loss(logprobs, slice(None))

    def chunked(self, hidden: Tensor) -> Tensor:
        """Every position in chunks, none of them computed again."""
        found = torch.zeros((), device=hidden.device)
        for a in range(0, len(hidden), ART_CHUNK):
            logprobs = torch.log_softmax(
                self.head.logits(hidden[a : a + ART_CHUNK]).float(), dim=-1
            )
            first, last = torch.searchsorted(
                self.position, torch.tensor([a, a + ART_CHUNK], device=hidden.device)
            ).tolist()
            at = slice(first, last)
            found = found + self._loss(logprobs[self.position[at] - a], at)
        return found

    def _loss(self, logprobs: Tensor, at: slice) -> Tensor:
        picked = logprobs.gather(1, self.target[at].unsqueeze(1)).squeeze(1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return (self.weight[at] * (picked + 0.01 * entropy)).sum()


def run(case: Case, loss: Loss) -> Tensor:
    """Forward and backward; returns the gradient."""
    (gradient,) = torch.autograd.grad(loss(case.hidden), case.hidden)
    return gradient


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made within it that live at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's stub
        self.now = self.worst = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [args, kwargs or {}]
        old = {x.untyped_storage()._cdata for x in _tensors(inputs)}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            storage = x.untyped_storage()
            key = storage._cdata
            if key in old or key in self._seen:
                continue
            self._seen.add(key)
            self.now += storage.nbytes()
            self.worst = max(self.worst, self.now)
            weakref.finalize(storage, self._free, key, storage.nbytes())
        return result

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _tensors(values: Any) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def extra(case: Case, loss: Loss) -> float:
    """Full logits tensors' worth of memory beyond the gradient that comes out."""
    gradient_bytes = case.hidden.numel() * case.hidden.dtype.itemsize
    if case.hidden.is_cuda:
        run(case, loss)  # kernels are compiled
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(case, loss)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with LiveBytes() as live:
            run(case, loss)
        peak = live.worst
    return (peak - gradient_bytes) / case.full_bytes


def seconds(case: Case, loss: Loss) -> Callable[[], float]:
    def once() -> float:
        began = time.perf_counter()
        run(case, loss)
        if case.hidden.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return once


def gate(case: Case) -> None:
    """Raises RuntimeError if the ways differ."""
    expected = run(case, case.full).double()
    for name, loss in (("ours", case.ours), ("chunked", case.chunked)):
        error = float((run(case, loss).double() - expected).norm() / expected.norm())
        if not error <= (1e-5 if case.hidden.dtype == torch.float32 else 1e-2):
            raise RuntimeError(f"the gradient of {name} differs by {error:.1e}")


def main() -> None:
    """Check, measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8192 positions, vocabulary 2000")
    parser.add_argument("--positions", type=int, default=32_768)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--repeats", type=at_least_five, default=MIN_REPEATS)
    args = parser.parse_args()
    if args.quick:
        args.positions, args.vocab, args.size = 8192, 2000, 32
    on_gpu = torch.cuda.is_available() and not args.quick
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    small = Case.draw(4096, min(args.vocab, 8000), args.size, device, dtype)
    gate(small)
    case = Case.draw(args.positions, args.vocab, args.size, device, dtype)
    ours, chunked, full = (extra(case, w) for w in (case.ours, case.chunked, case.full))
    mine, theirs, ratio, _ = compare_seconds(
        seconds(case, case.ours), seconds(case, case.chunked), repeats=args.repeats
    )
    details = {
        "full": round(full, 4),
        "seconds": round(mine, 4),
        "chunked_seconds": round(theirs, 4),
        "times_faster": round(ratio, 2),
    }
    print(json.dumps(details))
    found = Comparison(
        name="loss_memory",
        ours=round(ours, 5),
        peer=round(chunked, 4),
        peer_name="chunks of all positions kept by autograd (ART by the notes: 4.03)",
        ratio=round(chunked / ours, 1),
        goal=GOAL,
        spread=(round(chunked / ours, 1), round(chunked / ours, 1)),
        machine=torch.cuda.get_device_name() if on_gpu else machine(),
    )
    print(found.line())


if __name__ == "__main__":
    main()
