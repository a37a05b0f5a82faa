"""Decoding many sequences of one adapter together, a forward pass a step.

In: requests; out: events, one per sequence and step. A step's row holds the prompt stretches not
yet computed (each once, whoever shares it) and one token of every running sequence. Long shared
stretches are attended to as one product for all sequences below them; everything else lies in the
sequence's slot. Synchronous and owned by one thread; batching requests over time is `embedded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from art_core.engine.base import FinishReason, GenerateRequest
from art_core.engine.grammar import GrammarMatcher
from art_core.engine.prefix_cache import Node, PrefixCache
from art_core.engine.sampling import sample, uniform
from art_core.nn.attention import group_heads, masked, merge, rectangle, ungroup_heads
from art_core.nn.lora import LoraModel

SHARE_FROM = 32
"""A stretch that several sequences share is worth a product of its own from this length on."""
ALONE_FROM = 256
"""A stretch of one sequence alone is not copied into its slot from this length on."""
_SLOT_STEP = 64


@dataclass(eq=False)
class Running:
    """A sequence being decoded."""

    request: GenerateRequest
    node: Node
    """Where the computed prompt (all but its last id) ends in the tree."""
    pending: int
    """The id that the next step feeds: the prompt's last, then each sampled one."""
    matcher: GrammarMatcher | None
    length: int = 0
    """Positions in its slot."""
    copied: int = 0
    """Those of them that are copies of prompt stretches; they lie first."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Depths [start, end) of the copied stretches."""
    cached_tokens: int = 0
    sampled: list[int] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """Position of the pending id."""
        return len(self.request.prompt_ids) - 1 + len(self.sampled)

    def holds(self, start: int) -> bool:
        """True if the stretch beginning at this depth lies in the slot."""
        return any(a <= start < b for a, b in self.spans)


@dataclass(frozen=True)
class Event:
    """What a step did for one sequence."""

    request_id: str
    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    cached_tokens: int


class Lane:
    """All sequences of one adapter at one step. The caller activates the adapter first."""

    def __init__(
        self, model: LoraModel, *, eos_ids: frozenset[int], context_length: int, cache_tokens: int
    ) -> None:
        config = model.config
        heads = int(config.num_key_value_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._model = model
        self._eos = sorted(eos_ids)
        self._context = context_length
        self._cache_tokens = cache_tokens
        self._cache = PrefixCache(model.layers, heads, head_dim, model.dtype, model.device)
        self._running: list[Running] = []  # a sequence's index is its slot
        self._arrivals: list[Running] = []
        self._k = torch.empty(0)
        self._v = torch.empty(0)
        self._slot_shape = (model.layers, heads, head_dim)

    def __len__(self) -> int:
        return len(self._running) + len(self._arrivals)

    def admit(self, request: GenerateRequest, matcher: GrammarMatcher | None) -> int:
        """Take a request into the next step; returns the prompt positions it adds to it."""
        ids = request.prompt_ids
        node = self._cache.insert(ids[:-1])
        fresh = sum(len(n) for n in node.path() if n.fresh)
        self._arrivals.append(
            Running(request, node, int(ids[-1]), matcher, cached_tokens=len(ids) - 1 - fresh)
        )
        return fresh

    def cancel(self, request_id: str) -> None:
        """Forget a sequence; unknown ids are ignored."""
        self._arrivals = [s for s in self._arrivals if s.request.request_id != request_id]
        for slot, running in enumerate(self._running):
            if running.request.request_id == request_id:
                self._leave(slot)
                return

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One forward pass: computes the arrivals' prompts and one token of every sequence."""
        row = self._compose()
        pending = [r.pending for r in self._running]
        ids = np.concatenate([*(node.ids for node, _ in row.fresh), pending]).astype(np.int64)
        depth = np.concatenate(
            [
                *(np.arange(start, start + len(node)) for node, start in row.fresh),
                [r.depth for r in self._running],
            ]
        ).astype(np.int64)
        device = self._model.device
        hidden = self._model.hidden(
            torch.from_numpy(ids).to(device), torch.from_numpy(depth).to(device), row
        )
        for node, _ in row.fresh:
            node.fresh = False
        for running in self._running:
            running.length += 1
        return self._sample(self._model.logits(hidden[row.fresh_tokens :]))

    def _compose(self) -> _StepRow:
        """Seat the arrivals and lay out the step's row."""
        newcomers = self._arrivals
        self._running += newcomers
        self._arrivals = []
        below: dict[Node, _Below] = {}
        for slot, running in enumerate(self._running):
            start = 0
            for node in running.node.path():
                below.setdefault(node, _Below(start, [])).slots.append(slot)
                start += len(node)
        copies: list[tuple[Node, int, int]] = []
        for slot in range(len(self._running) - len(newcomers), len(self._running)):
            running = self._running[slot]
            for node in running.node.path():
                if len(node) < (SHARE_FROM if len(below[node].slots) > 1 else ALONE_FROM):
                    copies.append((node, slot, running.length))
                    running.length += len(node)
                    running.spans.append((below[node].start, below[node].start + len(node)))
            running.copied = running.length
        self._reserve()
        return _StepRow(self._k, self._v, self._running, below, copies)

    def _reserve(self) -> None:
        """Make the slots' memory wide enough for every running sequence's next position."""
        slots = len(self._running)
        width = max(r.length for r in self._running) + 1
        have_slots, have_width = (self._k.shape[1], self._k.shape[3]) if self._k.dim() == 5 else (0, 0)
        if slots <= have_slots and width <= have_width:
            return
        layers, heads, head_dim = self._slot_shape
        new_slots = max(have_slots, 1 << (slots - 1).bit_length())
        new_width = max(have_width, -(-width // _SLOT_STEP) * _SLOT_STEP)
        shape = (layers, new_slots, heads, new_width, head_dim)
        for name in ("_k", "_v"):
            old = getattr(self, name)
            new = torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)
            if have_slots:
                new[:, :have_slots, :, :have_width] = old
            setattr(self, name, new)

    def _sample(self, logits: Tensor) -> list[Event]:
        settings = [r.request.sampling for r in self._running]
        noise = [uniform(s.seed or 0, len(r.sampled)) for s, r in zip(settings, self._running, strict=True)]
        allowed = [self._allowed(r, logits.shape[1]) for r in self._running]
        ids, logprobs = sample(logits, settings, noise, allowed)
        events = []
        ended = []
        for slot, (running, token, logprob) in enumerate(
            zip(self._running, ids, logprobs, strict=True)
        ):
            running.sampled.append(token)
            running.pending = token
            if running.matcher is not None:
                running.matcher.advance(token)
            reason = self._finish_reason(running, token)
            events.append(
                Event(running.request.request_id, [token], [logprob], reason, running.cached_tokens)
            )
            if reason is not None:
                ended.append(slot)
        for slot in reversed(ended):
            self._leave(slot)
        self._cache.evict(self._cache_tokens, [r.node for r in self._running])
        return events

    def _allowed(self, running: Running, vocab: int) -> Tensor | None:
        mask: Tensor | None = None
        if running.matcher is not None:
            mask = torch.from_numpy(running.matcher.mask()).to(self._model.device)
            if len(mask) < vocab:  # output rows beyond the tokenizer's ids are never allowed
                mask = torch.nn.functional.pad(mask, (0, vocab - len(mask)))
            mask = mask[:vocab]
        if len(running.sampled) < running.request.sampling.min_tokens:
            if mask is None:
                mask = torch.ones(vocab, dtype=torch.bool, device=self._model.device)
            mask = mask.clone()
            mask[self._eos] = False
        return mask

    def _finish_reason(self, running: Running, token: int) -> FinishReason | None:
        sampling = running.request.sampling
        enough = len(running.sampled) >= sampling.min_tokens
        if token in self._eos and enough:
            return "stop"
        if running.matcher is not None and running.matcher.finished:
            return "stop"
        limit = self._context - len(running.request.prompt_ids)
        if sampling.max_tokens is not None:
            limit = min(limit, sampling.max_tokens)
        return "length" if len(running.sampled) >= limit else None

    def _leave(self, slot: int) -> None:
        """Keep what the sequence computed for prompts to come; the last slot takes its place."""
        running = self._running[slot]
        own = running.length - running.copied
        if own:
            ids = np.concatenate(
                [running.request.prompt_ids, np.array(running.sampled, np.int32)]
            )[: len(running.request.prompt_ids) - 1 + own]
            at = slice(running.copied, running.length)
            self._cache.store(
                ids.astype(np.int32), self._k[:, slot, :, at], self._v[:, slot, :, at]
            )
        last = len(self._running) - 1
        if slot != last:
            moved = self._running[last]
            for buffer in (self._k, self._v):
                buffer[:, slot, :, : moved.length] = buffer[:, last, :, : moved.length]
            self._running[slot] = moved
        self._running.pop()


@dataclass(frozen=True)
class _Below:
    """Where a node lies, and which sequences read it."""

    start: int
    slots: list[int]


class _StepRow:
    """How a step's row attends: fresh prompt stretches in depth-first order, then one position per
    sequence. `fresh` lists the stretches as (node, its first depth)."""

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        running: Sequence[Running],
        below: dict[Node, _Below],
        copies: Sequence[tuple[Node, int, int]],
    ) -> None:
        self._k, self._v, self._copies = k, v, copies
        self.fresh: list[tuple[Node, int]] = []
        self._at: dict[Node, int] = {}  # row position where a fresh stretch begins
        self._blocks: list[tuple[Node, int, int, bool]] = []  # node, query range, causal
        self.fresh_tokens = 0
        for node in below:
            if node.parent is not None and node.parent.parent is None:
                self._lay(node, below)
        self._shared: list[tuple[Node, Tensor | None]] = []
        for node, place in below.items():
            readers = [slot for slot in place.slots if not running[slot].holds(place.start)]
            if readers:
                everyone = len(readers) == len(running)
                index = None if everyone else torch.tensor(readers, device=k.device)
                self._shared.append((node, index))
        self._slots = torch.arange(len(running), device=k.device)
        self._lengths = torch.tensor([r.length for r in running], device=k.device)
        self._width = int(self._lengths.max()) + 1
        beyond = torch.arange(self._width, device=k.device) > self._lengths.unsqueeze(1)
        mask = torch.zeros(beyond.shape, dtype=k.dtype, device=k.device)
        self._mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None, :]

    def _lay(self, node: Node, below: dict[Node, _Below]) -> None:
        """Give fresh stretches at and below `node` their row positions, depth first."""
        first = self.fresh_tokens
        if node.fresh:
            self._at[node] = first
            self.fresh.append((node, below[node].start))
            self.fresh_tokens += len(node)
            self._blocks.append((node, first, self.fresh_tokens, True))
        under = self.fresh_tokens
        slot = len(self._blocks)
        for child in node.children.values():
            if child in below:
                self._lay(child, below)
        if self.fresh_tokens > under:  # before its children's own blocks, after what is above it
            self._blocks.insert(slot, (node, under, self.fresh_tokens, False))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q: [1, Hq, N, D]; k, v: [1, Hkv, N, D] -> [1, N, Hq, D]; stores k and v as it goes."""
        grouped, k, v, fresh = group_heads(q, k.shape[1]), k[0], v[0], self.fresh_tokens
        for node, at in self._at.items():
            node.k[layer].copy_(k[:, at : at + len(node)])
            node.v[layer].copy_(v[:, at : at + len(node)])
        slots_k, slots_v = self._k[layer], self._v[layer]
        for node, slot, offset in self._copies:
            slots_k[slot, :, offset : offset + len(node)] = node.k[layer]
            slots_v[slot, :, offset : offset + len(node)] = node.v[layer]
        slots_k[self._slots, :, self._lengths] = k[:, fresh:].transpose(0, 1)
        slots_v[self._slots, :, self._lengths] = v[:, fresh:].transpose(0, 1)

        out = torch.empty_like(grouped)
        if fresh:
            out[:, :fresh] = self._attend_fresh(layer, grouped[:, :fresh], scale)
        out[:, fresh:] = self._attend_slots(layer, grouped[:, fresh:], scale)
        return ungroup_heads(out)

    def _attend_fresh(self, layer: int, q: Tensor, scale: float) -> Tensor:
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:3], float("-inf"))
        for node, a, b, causal in self._blocks:
            part = rectangle(q[:, a:b], node.k[layer], node.v[layer], scale, causal=causal)
            out[:, a:b], lse[:, a:b] = merge(out[:, a:b], lse[:, a:b], *part)
        return out

    def _attend_slots(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """q: [Hkv, B, G, D]: each sequence over its slot, then over the stretches it shares."""
        batch = q.shape[1]
        held = slice(0, self._width)
        out, lse = masked(
            q.transpose(0, 1), self._k[layer][:batch, :, held], self._v[layer][:batch, :, held],
            self._mask, scale,
        )
        out, lse = out.transpose(0, 1), lse.transpose(0, 1)
        for node, readers in self._shared:
            if readers is None:
                part = rectangle(q, node.k[layer], node.v[layer], scale)
                out, lse = merge(out, lse, *part)
            else:
                part = rectangle(q[:, readers], node.k[layer], node.v[layer], scale)
                joined = merge(out[:, readers], lse[:, readers], *part)
                out, lse = out.contiguous(), lse.contiguous()
                out[:, readers], lse[:, readers] = joined
        return out
