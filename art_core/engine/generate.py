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
from art_core.errors import EngineError
from art_core.nn.attention import (
    group_heads,
    merge,
    rectangle,
    rectangles,
    ungroup_heads,
)
from art_core.nn.linear import products
from art_core.nn.lora import LoraModel
from art_core.nn.rows import Score

SHARE_FROM, SHARE_WORTH = 32, 2048
"""A stretch that several sequences share is worth a product of its own from this length on, if its
length times their number is this at least; else it is copied into their slots."""
ALONE_FROM = 256
"""A stretch is not copied into a slot from this length on."""
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
    """Depths [start, end) of the copied stretches, joined where they touch."""
    cached_tokens: int = 0
    sampled: list[int] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """Position of the pending id."""
        return len(self.request.prompt_ids) - 1 + len(self.sampled)

    def holds(self, start: int) -> bool:
        """True if the stretch beginning at this depth lies in the slot."""
        return any(a <= start < b for a, b in self.spans)

    def hold(self, start: int, end: int) -> int:
        """Give the stretch at depths [start, end) the next place in the slot; returns the place."""
        place = self.length
        self.length = self.copied = place + end - start
        if self.spans and self.spans[-1][1] == start:
            start, _ = self.spans.pop()
        self.spans.append((start, end))
        return place


@dataclass(frozen=True)
class Event:
    """What a step did for one sequence."""

    request_id: str
    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    cached_tokens: int
    error: EngineError | None = None
    """What ended this sequence alone; it has no ids then."""


class Lane:
    """All sequences of one adapter at one step. The caller activates the adapter first.

    Args:
        eos_ids: ids that end a sequence.
        context_length: positions of prompt and sample together.
    """

    def __init__(self, model: LoraModel, *, eos_ids: frozenset[int], context_length: int) -> None:
        config = model.config
        heads = int(config.num_key_value_heads)
        head_dim = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self._model = model
        self._eos = frozenset(i for i in eos_ids if i < model.vocab_size)
        self._no_eos = torch.ones(model.vocab_size, dtype=torch.bool, device=model.device)
        self._no_eos[sorted(self._eos)] = False
        self._context = context_length
        self._cache = PrefixCache(model.layers, heads, head_dim, model.dtype, model.device)
        self._running: list[Running] = []  # a sequence's index is its slot
        self._arrivals: list[Running] = []
        self._k = torch.empty(0)
        self._v = torch.empty(0)
        self._slot_shape = (model.layers, heads, head_dim)

    def __len__(self) -> int:
        return len(self._running) + len(self._arrivals)

    @property
    def cached(self) -> int:
        """Prompt positions whose keys and values are held."""
        return self._cache.tokens

    def missing(self, request: GenerateRequest) -> int:
        """How many prompt positions `admit` would add to the next step."""
        ids = request.prompt_ids
        return len(ids) - 1 - self._cache.known(ids[:-1])

    @torch.inference_mode()
    def admit(self, request: GenerateRequest, matcher: GrammarMatcher | None) -> None:
        """Take a request into the next step."""
        ids = request.prompt_ids
        cached = self._cache.known(ids[:-1])
        node = self._cache.insert(ids[:-1])
        self._arrivals.append(Running(request, node, int(ids[-1]), matcher, cached_tokens=cached))

    @torch.inference_mode()
    def cancel(self, request_id: str) -> None:
        """Forget a sequence; unknown ids are ignored."""
        for index, arrival in enumerate(self._arrivals):
            if arrival.request.request_id == request_id:
                del self._arrivals[index]
                self._cache.prune(arrival.node, [a.node for a in self._arrivals])
                return
        for slot, running in enumerate(self._running):
            if running.request.request_id == request_id:
                self._leave(slot)
                return

    def trim(self, limit: int) -> None:
        """Forget prompts that nobody reads until at most `limit` positions are held."""
        self._cache.evict(limit, [r.node for r in (*self._running, *self._arrivals)])

    def rest(self) -> None:
        """Give the slots' memory back, if there is no sequence."""
        if not len(self):
            self._k = self._v = torch.empty(0)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One forward pass: computes the arrivals' prompts and one token of every sequence.

        Raises:
            EngineError: logits are not finite. After any exception the lane is of no more use.
        """
        if not len(self):
            return []
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
                place = below[node]
                if not _stands_alone(len(node), len(place.slots)):
                    at = running.hold(place.start, place.start + len(node))
                    copies.append((node, slot, at))
        self._reserve()
        return _StepRow(self._k, self._v, self._running, below, copies)

    def _reserve(self) -> None:
        """Make the slots' memory wide enough for every running sequence's next position."""
        slots = len(self._running)
        width = max(r.length for r in self._running) + 1
        have_slots, have_width = (
            (self._k.shape[1], self._k.shape[3]) if self._k.dim() == 5 else (0, 0)
        )
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
        allowed = [self._allowed(running) for running in self._running]
        ids, logprobs = sample(
            logits,
            [r.request.sampling for r in self._running],
            [uniform(r.request.sampling.seed or 0, len(r.sampled)) for r in self._running],
            [None if isinstance(mask, EngineError) else mask for mask in allowed],
        )
        events = [
            self._refuse(running, mask)
            if isinstance(mask, EngineError)
            else self._take(running, token, logprob)
            for running, mask, token, logprob in zip(
                self._running, allowed, ids, logprobs, strict=True
            )
        ]
        for slot in reversed(range(len(events))):
            if events[slot].finish_reason is not None:
                self._leave(slot)
        return events

    def _take(self, running: Running, token: int, logprob: float) -> Event:
        if running.matcher is not None:
            try:
                running.matcher.advance(token)
            except EngineError as error:
                return self._refuse(running, error)
        running.sampled.append(token)
        running.pending = token
        reason = self._finish_reason(running, token)
        name = running.request.request_id
        return Event(name, [token], [logprob], reason, running.cached_tokens)

    def _refuse(self, running: Running, error: EngineError) -> Event:
        """End one sequence whose grammar failed; the others go on."""
        name = running.request.request_id
        return Event(name, [], [], "cancelled", running.cached_tokens, error)

    def _allowed(self, running: Running) -> Tensor | EngineError | None:
        """[V] True where a token may come next; None if all may, an error if it can't be told."""
        mask = None
        if running.matcher is not None:
            try:
                mask = self._fitted(torch.from_numpy(running.matcher.mask()))
            except EngineError as error:
                return error
        if len(running.sampled) < running.request.sampling.min_tokens:
            longer = self._no_eos if mask is None else mask & self._no_eos
            if mask is None or longer.any():  # where a grammar can only end, it ends
                mask = longer
        return mask

    def _fitted(self, mask: Tensor) -> Tensor:
        """A mask over the tokenizer's ids -> [V]; outputs without an id are never allowed."""
        vocab = len(self._no_eos)
        mask = torch.nn.functional.pad(mask[:vocab], (0, max(0, vocab - len(mask))))
        if not mask.any():
            raise EngineError("the grammar allows no token that the model knows")
        return mask.to(self._model.device)

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
            ids = np.concatenate([running.request.prompt_ids, np.array(running.sampled, np.int32)])[
                : len(running.request.prompt_ids) - 1 + own
            ]
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


def _stands_alone(length: int, readers: int) -> bool:
    """True if a stretch is attended to by a product of its own."""
    is_worth = length >= SHARE_FROM and readers > 1 and length * readers >= SHARE_WORTH
    return is_worth or length >= ALONE_FROM


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
        if any(node.fresh for node in below):
            for node in [node for node, place in below.items() if place.start == 0]:
                self._lay(node, below)
        self._common: list[Node] = []  # read by every sequence
        self._shared: list[tuple[Node, Tensor]] = []  # read by these
        for node, place in below.items():
            readers = [slot for slot in place.slots if not running[slot].holds(place.start)]
            if len(readers) == len(running):
                self._common.append(node)
            elif readers:
                self._shared.append((node, torch.tensor(readers, device=k.device)))
        self._slots = torch.arange(len(running), device=k.device)
        self._lengths = torch.tensor([r.length for r in running], device=k.device)
        self._width = int(self._lengths.max()) + 1
        beyond = torch.arange(self._width, device=k.device) > self._lengths.unsqueeze(1)
        mask = torch.zeros(beyond.shape, dtype=k.dtype, device=k.device)
        self._mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None, :]

    def _lay(self, top: Node, below: dict[Node, _Below]) -> None:
        """Give fresh stretches at and below `top` their row positions, depth first."""
        stack: list[tuple[Node, int | None]] = [(top, None)]
        while stack:
            node, under = stack.pop()
            if under is not None:  # everything below `node` has its place, from `under` on
                if self.fresh_tokens > under:
                    self._blocks.append((node, under, self.fresh_tokens, False))
                continue
            if node.fresh:
                self._at[node] = first = self.fresh_tokens
                self.fresh.append((node, below[node].start))
                self.fresh_tokens += len(node)
                self._blocks.append((node, first, self.fresh_tokens, True))
            stack.append((node, self.fresh_tokens))
            stack += [(child, None) for child in node.children.values() if child in below]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        """q: [1, Hq, N, D]; k, v: [1, Hkv, N, D] -> [1, N, Hq, D]; stores k and v as it goes."""
        scale = score.scale  # the engine takes no model whose scores are not plain
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
        pieces = ((a, b, n.k[layer], n.v[layer], causal) for n, a, b, causal in self._blocks)
        return rectangles(q, pieces, scale)[0]

    def _attend_slots(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """q: [Hkv, B, G, D]: each sequence over its slot and what all share, then over the rest."""
        heads, batch, group, d = q.shape
        own_k, own_v = (
            slots[layer].flatten(0, 1)[: batch * heads, : self._width]
            for slots in (self._k, self._v)
        )
        scaled = q * scale
        by_slot = scaled.transpose(0, 1).reshape(batch * heads, group, d)
        scores = [torch.bmm(by_slot, own_k.transpose(1, 2)).view(batch, heads, group, -1)]
        scores[0] += self._mask
        flat = scaled.view(heads, batch * group, d)
        for node in self._common:
            part = products(flat, node.k[layer])
            scores.append(part.view(heads, batch, group, -1).transpose(0, 1))
        joined = torch.cat(scores, dim=-1)
        parts = joined.softmax(-1).split([part.shape[-1] for part in scores], dim=-1)

        out = torch.bmm(parts[0].view(batch * heads, group, -1), own_v)
        out = out.view(batch, heads, group, d).transpose(0, 1)
        for node, part in zip(self._common, parts[1:], strict=True):
            weights = part.transpose(0, 1).reshape(heads, batch * group, -1)
            out = out + products(weights, node.v[layer].transpose(1, 2)).view(q.shape)
        return self._attend_shared(layer, q, scale, out, joined) if self._shared else out

    def _attend_shared(
        self, layer: int, q: Tensor, scale: float, out: Tensor, scores: Tensor
    ) -> Tensor:
        """Join what only some sequences read. scores: [B, Hkv, G, m] of what `out` came from."""
        lse = scores.logsumexp(-1).transpose(0, 1).contiguous()
        out = out.contiguous()
        for node, readers in self._shared:
            part = rectangle(q[:, readers], node.k[layer], node.v[layer], scale)
            out[:, readers], lse[:, readers] = merge(out[:, readers], lse[:, readers], *part)
        return out
