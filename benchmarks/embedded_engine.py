"""How long the embedded engine takes for a batch of answers, beside plain batched `generate`.

Both sides: the same prompts with one stem in common, the same weights in float32, T=1, the same
number of tokens, every answer to its full length. The peer pads the prompts to one length and
knows nothing of the stem; ours also gives the logprob of each token. Every run has prompts of its
own, so that no cache helps across runs. Gate: our greedy tokens are those of a plain forward pass,
and our logprobs agree with it as DESIGN section 8 says. Unit: seconds for the whole batch. Goal:
faster by the share of the stem, that is by positions computed without sharing over those with it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from art_core.calls import Ids, Sampling
from art_core.config import EngineConfig
from art_core.engine.base import GenerateRequest
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.tokenizer import HFTokenizer
from art_core.nn.base_model import resolve_base_model
from art_core.nn.lora import LoraModel
from art_core.nn.memory import keep_freed_memory
from benchmarks.comparison import MIN_REPEATS, Comparison, at_least_five, compare_seconds, machine

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MEAN, WORST = 1e-5, 2e-4
"""Nats between our logprobs and a plain forward pass (DESIGN section 8)."""
TIE = 1e-3
"""A greedy token may lose by this much in the logits: float noise decides between near equals."""

Answer: TypeAlias = tuple[list[int], list[float]]
"""Sampled ids and their logprobs."""


@dataclass(frozen=True)
class Load:
    """What one run answers."""

    prompts: int
    length: int
    """Ids of the longest prompt; the others are up to 16 shorter."""
    share: float
    """Part of `length` that all prompts have in common."""
    tokens: int
    """Sampled for each prompt."""

    @property
    def stem(self) -> int:
        return round(self.share * self.length)

    def draw(self, vocab: int, seed: int) -> list[Ids]:
        """The prompts of run `seed`: random ids."""
        rng = np.random.default_rng(seed)
        stem = rng.integers(0, vocab, self.stem, dtype=np.int32)
        own = self.length - self.stem
        lengths = own - np.arange(self.prompts) % min(16, own)
        return [np.concatenate([stem, rng.integers(0, vocab, n, dtype=np.int32)]) for n in lengths]

    def ratio(self) -> float:
        """Positions computed without sharing, over those with it."""
        own = sum(len(prompt) for prompt in self.draw(2, 0)) - self.prompts * self.stem
        sampled = self.prompts * self.tokens
        return (self.prompts * self.stem + own + sampled) / (self.stem + own + sampled)


class Ours:
    """The embedded engine, without HTTP."""

    def __init__(self, base: Path) -> None:
        self._engine = EmbeddedEngine(
            LoraModel.load(base), HFTokenizer(base), base_model=MODEL, config=EngineConfig()
        )
        self._names = itertools.count()

    def answer(
        self, prompts: Sequence[Ids], tokens: int, *, least: int, temperature: float = 1.0
    ) -> list[Answer]:
        """Answers of `least` to `tokens` tokens; prompt i is sampled with seed i."""

        async def one(prompt: Ids, seed: int) -> Answer:
            sampling = Sampling(
                temperature=temperature, max_tokens=tokens, min_tokens=least, seed=seed
            )
            name = str(next(self._names))
            ids: list[int] = []
            logprobs: list[float] = []
            async for delta in self._engine.generate(GenerateRequest(name, prompt, None, sampling)):
                ids += delta.ids
                logprobs += delta.logprobs
            return ids, logprobs

        async def everyone() -> list[Answer]:
            return await asyncio.gather(*(one(prompt, i) for i, prompt in enumerate(prompts)))

        answers = asyncio.run(everyone())
        if any(len(ids) < least for ids, _ in answers):
            raise RuntimeError("an answer is shorter than was asked for")
        return answers

    @property
    def vocab(self) -> int:
        return self._engine.tokenizer.vocab_size

    def close(self) -> None:
        asyncio.run(self._engine.close())


class Plain:
    """transformers' `generate` on a padded batch."""

    def __init__(self, base: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._model: Any = model.eval()
        self.vocab = int(model.config.vocab_size)

    def answer(self, prompts: Sequence[Ids], tokens: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        if out.shape[1] != longest + tokens:
            raise RuntimeError("an answer is shorter than was asked for")

    def logits(self, prompt: Ids, sampled: Sequence[int]) -> torch.Tensor:
        """[S, V]: what predicts each sampled id, the sequence computed alone."""
        ids = torch.tensor([[*prompt.tolist(), *sampled]])
        with torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        return logits[len(prompt) - 1 : -1]


def gate(ours: Ours, plain: Plain, prompts: Sequence[Ids], tokens: int) -> None:
    """Check a few answers of a whole batch, greedy and sampled.

    Raises:
        RuntimeError: they are not those of a plain forward pass.
    """
    some = range(0, len(prompts), max(1, len(prompts) // 4))
    greedy = ours.answer(prompts, tokens, least=0, temperature=0.0)
    sampled = ours.answer(prompts, tokens, least=0)
    differences = []
    for i in some:
        ids, _ = greedy[i]
        logits = plain.logits(prompts[i], ids)
        lost = float((logits.amax(-1) - logits[torch.arange(len(ids)), ids]).max())
        if lost > TIE:
            raise RuntimeError(f"a greedy token of prompt {i} is {lost:.1e} below the most likely")
        ids, logprobs = sampled[i]
        wanted = plain.logits(prompts[i], ids).log_softmax(-1)[torch.arange(len(ids)), ids]
        differences.append((wanted - torch.tensor(logprobs)).abs())
    found = torch.cat(differences)
    if float(found.mean()) > MEAN or float(found.max()) > WORST:
        raise RuntimeError(f"logprobs differ by {found.mean():.1e}, at most {found.max():.1e}")


def main() -> None:
    """Check, measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 prompts of 64 ids, 6 tokens")
    parser.add_argument("--model", default=MODEL, help="name or folder of the base model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=320, help="ids of the longest prompt")
    parser.add_argument("--share", type=float, default=0.85, help="part that all have in common")
    parser.add_argument("--tokens", type=int, default=44, help="sampled for each prompt")
    parser.add_argument("--repeats", type=at_least_five, default=7)
    args = parser.parse_args()
    load = Load(args.prompts, args.length, args.share, args.tokens)
    if args.quick:
        load, args.repeats = Load(8, 64, args.share, 6), MIN_REPEATS

    keep_freed_memory()
    base = resolve_base_model(args.model)
    ours, plain = Ours(base), Plain(base)
    vocab = min(ours.vocab, plain.vocab)
    gate(ours, plain, load.draw(vocab, seed=0), load.tokens)

    def runs(answer: Callable[[list[Ids]], object]) -> Callable[[], float]:
        """Times `answer` on the prompts of run 1, 2, ..., which are the same for both sides."""
        seeds = itertools.count(1)

        def run() -> float:
            prompts = load.draw(vocab, next(seeds))
            began = time.perf_counter()
            answer(prompts)
            return time.perf_counter() - began

        return run

    mine, theirs, ratio, spread = compare_seconds(
        runs(lambda prompts: ours.answer(prompts, load.tokens, least=load.tokens)),
        runs(lambda prompts: plain.answer(prompts, load.tokens)),
        repeats=args.repeats,
    )
    ours.close()
    found = Comparison(
        name="embedded_engine",
        ours=round(mine, 3),
        peer=round(theirs, 3),
        peer_name="transformers generate, padded batch",
        ratio=round(ratio, 3),
        goal=f"ratio >= {load.ratio():.2f}, the positions that sharing saves ({load})",
        spread=(round(spread[0], 3), round(spread[1], 3)),
        machine=machine(),
    )
    print(found.line())


if __name__ == "__main__":
    main()
