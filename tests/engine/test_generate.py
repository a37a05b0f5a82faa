"""The lane against a plain forward pass of the same model, whatever happens in the batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.calls import Sampling
from art_core.engine import generate
from art_core.engine.base import GenerateRequest
from art_core.engine.generate import Lane
from art_core.engine.grammar import GrammarMatcher, json_grammar
from art_core.engine.sampling import sample, uniform
from art_core.engine.tokenizer import ByteTokenizer
from art_core.errors import EngineError
from art_core.nn import attention
from art_core.nn.lora import LoraModel
from tests.core.tiny_policy import NAME, in_peft, tiny_policy

END = 257
CONTEXT = 512
EXACT = 1e-9
"""Nats, in float64 (the figure that issue 2 asks for; seen: 1e-13)."""

Ids = list[int]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> LoraModel:
    return LoraModel.load(tiny_llama, dtype=torch.float64)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Any:
    """The same weights as transformers runs them."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        tiny_llama, dtype=torch.float64, attn_implementation="sdpa"
    )


@pytest.fixture
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stretches of a few ids be worth what long ones are, so that short tests go all ways."""
    monkeypatch.setattr(generate, "SHARE_FROM", 4)
    monkeypatch.setattr(generate, "SHARE_WORTH", 0)
    monkeypatch.setattr(generate, "ALONE_FROM", 9)


class Desk:
    """Drives a lane by hand and keeps what comes out of it."""

    def __init__(self, model: LoraModel, *, eos: Sequence[int] = (END,), context: int = CONTEXT):
        model.activate(None)
        self.lane = Lane(model, eos_ids=frozenset(eos), context_length=context)
        self.requests: dict[str, GenerateRequest] = {}
        self.ids: dict[str, Ids] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.ends: dict[str, str] = {}
        self.errors: dict[str, EngineError] = {}
        self.cached: dict[str, int] = {}

    def ask(self, name: str, prompt: Ids, matcher: Any = None, **sampling: Any) -> None:
        settings = Sampling(**{"seed": len(self.requests), "max_tokens": 6, **sampling})
        request = GenerateRequest(name, np.array(prompt, np.int32), None, settings)
        self.requests[name], self.ids[name], self.logprobs[name] = request, [], []
        self.lane.admit(request, matcher)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for event in self.lane.step():
                assert event.request_id not in self.ends
                self.ids[event.request_id] += event.ids
                self.logprobs[event.request_id] += event.logprobs
                self.cached[event.request_id] = event.cached_tokens
                if event.finish_reason is not None:
                    self.ends[event.request_id] = event.finish_reason
                if event.error is not None:
                    self.errors[event.request_id] = event.error

    def run(self) -> Desk:
        while len(self.lane):
            self.step()
        return self

    def prompt(self, name: str) -> Ids:
        ids: Ids = self.requests[name].prompt_ids.tolist()
        return ids

    def check(self, plain: Any, bound: float = EXACT, names: Sequence[str] | None = None) -> None:
        """Ids and logprobs are those of each sequence computed alone, without any cache."""
        for name in self.ids if names is None else names:
            ids, sampling = self.ids[name], self.requests[name].sampling
            if not ids:
                continue
            logits = plain_logits(plain, self.prompt(name), ids)
            noise = [uniform(sampling.seed or 0, i) for i in range(len(ids))]
            wanted = sample(logits, [sampling] * len(ids), noise, [None] * len(ids))
            assert ids == wanted[0], name
            np.testing.assert_allclose(self.logprobs[name], wanted[1], rtol=0, atol=bound)


def plain_logits(plain: Any, prompt: Ids, sampled: Ids) -> torch.Tensor:
    """[S, V]: what predicts each sampled id, from one forward pass over the whole sequence."""
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([prompt + sampled]), use_cache=False).logits[0]
    found: torch.Tensor = logits[len(prompt) - 1 : -1]
    return found


def words(rng: random.Random, n: int, letters: int = 256) -> Ids:
    return [rng.randrange(letters) for _ in range(n)]


def agent_prompts(seed: int) -> dict[str, Ids]:
    """Prompts of every kin: a long common stem, groups below it, doubles, prefixes, strangers,
    one id alone, and one that is long by itself."""
    rng = random.Random(seed)
    stem = words(rng, 90)
    questions = [words(rng, n) for n in (3, 40, 41)]
    prompts = {f"{q}.{i}": stem + questions[q] for q in range(3) for i in range(3)}
    prompts |= {f"tail {i}": stem + questions[1] + words(rng, 5) for i in range(3)}
    prompts |= {"stem": stem, "half": stem[:45], "half and more": stem[:45] + words(rng, 2)}
    prompts |= {"one": stem[:1], "the same one": stem[:1], "another one": [200]}
    prompts |= {"stranger": words(rng, 20), "long": words(rng, 300), "long stem": stem * 3}
    return prompts


def test_greedy_equals_transformers_generate(model: LoraModel, plain: Any) -> None:
    """All prompts at once, float64 both, 12 tokens or the end of the turn."""
    desk = Desk(model)
    for name, prompt in agent_prompts(0).items():
        desk.ask(name, prompt, temperature=0.0, max_tokens=12)
    desk.run()
    for name, prompt in agent_prompts(0).items():
        given = torch.tensor([prompt])
        out = plain.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=12,
            eos_token_id=END, pad_token_id=END,
        )  # fmt: skip
        assert desk.ids[name] == out[0, len(prompt) :].tolist(), name


@pytest.mark.parametrize("seed", [1, 2])
def test_samples_are_those_of_a_plain_forward_pass(model: LoraModel, plain: Any, seed: int) -> None:
    desk = Desk(model)
    for i, (name, prompt) in enumerate(agent_prompts(seed).items()):
        desk.ask(name, prompt, temperature=[1.0, 0.7, 1.5][i % 3], top_p=[1.0, 0.9][i % 2])
    desk.run().check(plain)
    assert set(desk.ends.values()) <= {"length", "stop"}
    assert len(desk.ends) == len(desk.ids)


def test_single_precision_differs_by_noise_only(tiny_llama: Path, plain: Any) -> None:
    """Logits of this model are below 4, of which float32 keeps 2.4e-7; seen: 7e-7."""
    desk = Desk(LoraModel.load(tiny_llama))
    for name, prompt in agent_prompts(3).items():
        desk.ask(name, prompt)
    desk.run().check(plain, bound=5e-6)


def test_an_adapter_in_the_weights_is_as_exact(
    tiny_llama: Path, tmp_path: Path, small_stretches: None
) -> None:
    policy = tiny_policy(tiny_llama)
    policy.save_adapter(NAME, tmp_path)
    desk = Desk(policy)
    policy.activate(NAME)
    assert policy._merging.weights(NAME, learns=False) is not None
    for name, prompt in agent_prompts(5).items():
        desk.ask(name, prompt)
    desk.run().check(in_peft(tiny_llama, tmp_path, torch.float64))


def test_the_way_taken_without_the_cpu_kernel(
    model: LoraModel, plain: Any, monkeypatch: pytest.MonkeyPatch, small_stretches: None
) -> None:
    monkeypatch.setattr(attention, "has_kernel", lambda q, v: False)
    desk = Desk(model)
    for name, prompt in agent_prompts(4).items():
        desk.ask(name, prompt)
    desk.run().check(plain)


def test_the_same_seed_gives_the_same_tokens_in_any_company(
    model: LoraModel, small_stretches: None
) -> None:
    alone, crowded = Desk(model), Desk(model)
    alone.ask("x", words(random.Random(5), 30), seed=77, max_tokens=20)
    alone.run()
    for i, (name, prompt) in enumerate(agent_prompts(5).items()):
        crowded.ask(name, prompt, max_tokens=3 + i)
        crowded.step()
        if i == 4:
            crowded.ask("x", words(random.Random(5), 30), seed=77, max_tokens=20)
    crowded.run()
    assert crowded.ids["x"] == alone.ids["x"]
    np.testing.assert_allclose(crowded.logprobs["x"], alone.logprobs["x"], atol=EXACT, rtol=0)


def test_arrivals_at_different_times_and_slots_that_move(
    model: LoraModel, plain: Any, small_stretches: None
) -> None:
    """Lengths differ, so that slots free up in the middle while others arrive."""
    desk = Desk(model)
    for i, (name, prompt) in enumerate(agent_prompts(6).items()):
        desk.ask(name, prompt, max_tokens=1 + (5 * i) % 7)
        if i % 2:
            desk.step()
    desk.run().check(plain)
    assert {len(ids) for ids in desk.ids.values()} >= {1, 2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("which", ["first", "middle", "last", "all"])
def test_a_cancelled_sequence_leaves_the_others_as_they_are(
    model: LoraModel, plain: Any, which: str
) -> None:
    desk = Desk(model)
    rng = random.Random(7)
    for name in ("first", "middle", "last"):
        desk.ask(name, words(rng, 12), max_tokens=9)
    desk.step(4)
    gone = ["first", "middle", "last"] if which == "all" else [which]
    for name in gone:
        desk.lane.cancel(name)
        desk.lane.cancel(name)  # a second time changes nothing
    desk.lane.cancel("nobody")
    assert len(desk.lane) == 3 - len(gone)
    desk.ask("next", words(rng, 12))
    desk.run().check(plain)
    assert [len(desk.ids[name]) for name in gone] == [4] * len(gone)
    assert set(desk.ends) == set(desk.ids) - set(gone)


def test_what_a_cancelled_sequence_computed_is_kept(model: LoraModel, plain: Any) -> None:
    """After 4 steps its prompt of 12 and 3 of its tokens are computed; the 4th was only drawn."""
    desk = Desk(model)
    prompt = words(random.Random(8), 12)
    desk.ask("first", prompt, max_tokens=9)
    desk.step(4)
    desk.lane.cancel("first")
    desk.ask("second", prompt + desk.ids["first"] + [1, 2])
    desk.run().check(plain)
    assert desk.cached["second"] == 12 + 3


def test_an_arrival_cancelled_before_its_step_leaves_nothing_uncomputed(
    model: LoraModel, plain: Any, small_stretches: None
) -> None:
    desk = Desk(model)
    rng = random.Random(9)
    stem = words(rng, 20)
    desk.ask("runs", [*stem, 1], max_tokens=12)
    desk.step(2)
    held = desk.lane.cached
    desk.ask("gone", stem + [2] * 30)
    desk.ask("stays", stem + [2] * 10 + [3])
    desk.lane.cancel("gone")
    assert desk.lane.cached == held + 10  # of "stays": all but its last id
    desk.step(2)
    desk.ask("again", stem + [2] * 30)
    assert desk.lane.missing(desk.requests["again"]) == 0
    desk.run().check(plain)
    assert desk.cached["again"] == 30
    assert "gone" not in desk.ends


def test_a_sequence_may_end_below_a_prompt_that_waits(model: LoraModel, plain: Any) -> None:
    """A prompt arrives that goes on from what a running sequence has sampled; then that sequence
    is cancelled, which fills a part of the newcomer's path."""
    desk = Desk(model)
    prompt = words(random.Random(10), 10)
    desk.ask("runs", prompt, max_tokens=12)
    desk.step(5)
    desk.ask("goes on", prompt + desk.ids["runs"] + words(random.Random(11), 6))
    desk.lane.cancel("runs")
    desk.run().check(plain)


def test_a_stretch_may_split_while_sequences_read_it(
    model: LoraModel, plain: Any, small_stretches: None
) -> None:
    """Short, shared and long stretches, copied or shared, each cut while it is in use."""
    rng = random.Random(12)
    for length in (3, 8, 30):
        desk = Desk(model)
        stem = words(rng, length)
        desk.ask("a", [*stem, 1, 2, 3], max_tokens=12)
        desk.ask("b", [*stem, 1, 2, 4], max_tokens=12)
        desk.step(2)
        for i, cut in enumerate((length - 1, length // 2, 1)):
            desk.ask(f"cut {i}", [*stem[:cut], 7, 8], max_tokens=4)
            desk.step()
        desk.run().check(plain)


@pytest.mark.parametrize("seed", range(6))
def test_a_long_random_life(model: LoraModel, plain: Any, seed: int, small_stretches: None) -> None:
    """Arrivals, cancellations before and within, evictions and rests in any order."""
    rng = random.Random(seed)
    desk = Desk(model)
    stems = [words(rng, n, 5) for n in (2, 6, 14, 25)]
    cancelled: set[str] = set()
    for turn in range(60):
        move = rng.random()
        running = [n for n in desk.ids if n not in desk.ends and n not in cancelled]
        if move < 0.5:
            prompt = rng.choice(stems)[: rng.randrange(1, 26)] + words(rng, rng.randrange(6), 3)
            past = [desk.prompt(n) + desk.ids[n] for n in desk.ends if len(desk.ids[n]) > 1]
            if past and rng.random() < 0.4:  # a second turn
                prompt = rng.choice(past) + words(rng, rng.randrange(4))
            if len(prompt) < 120:
                desk.ask(f"{turn}", prompt, max_tokens=rng.randrange(1, 9))
        elif move < 0.6 and running:
            name = rng.choice(running)
            desk.lane.cancel(name)
            cancelled.add(name)
        elif move < 0.7:
            desk.lane.trim(rng.choice([0, 10, 40]))
            desk.lane.rest()
        elif len(desk.lane):
            desk.step(rng.randrange(1, 3))
    desk.run().check(plain)
    assert len(desk.ends) > 10
    desk.lane.trim(0)
    assert desk.lane.cached == 0


def test_identical_prompts_of_one_step_are_computed_once(model: LoraModel, plain: Any) -> None:
    desk = Desk(model)
    prompt = words(random.Random(13), 40)
    for i in range(4):
        request = GenerateRequest(f"{i}", np.array(prompt, np.int32), None, Sampling())
        assert desk.lane.missing(request) == (39 if i == 0 else 0)
        desk.ask(f"{i}", prompt)
    assert desk.lane.cached == 39
    desk.run().check(plain)
    assert [desk.cached[f"{i}"] for i in range(4)] == [0, 39, 39, 39]


def test_a_second_turn_reads_the_first_from_the_cache(model: LoraModel, plain: Any) -> None:
    """Of prompt P and sample S, P + S - 1 positions are computed: the last token was never fed."""
    desk = Desk(model)
    prompt = words(random.Random(14), 30)
    desk.ask("turn 1", prompt, max_tokens=8)
    desk.run()
    assert desk.lane.cached == 30 + 8 - 1
    desk.ask("turn 2", prompt + desk.ids["turn 1"] + words(random.Random(15), 10))
    desk.run()
    desk.ask("turn 2 again", desk.prompt("turn 2"))
    desk.run().check(plain)
    assert desk.cached == {"turn 1": 0, "turn 2": 37, "turn 2 again": 47}


def test_a_cache_that_was_trimmed_is_computed_again(model: LoraModel, plain: Any) -> None:
    desk = Desk(model)
    prompt = words(random.Random(16), 30)
    desk.ask("1", prompt)
    desk.step()
    desk.lane.trim(0)
    assert desk.lane.cached == 29  # it is being read
    desk.run()
    desk.lane.trim(0)
    assert desk.lane.cached == 0
    desk.ask("2", prompt)
    desk.run().check(plain)
    assert desk.cached["2"] == 0


def test_memory_of_the_slots_is_given_back_and_taken_again(model: LoraModel, plain: Any) -> None:
    desk = Desk(model)
    desk.ask("1", words(random.Random(17), 10), max_tokens=8)
    desk.step(2)
    desk.lane.rest()  # not while a sequence runs
    desk.run()
    desk.lane.rest()
    desk.ask("2", desk.prompt("1") + desk.ids["1"])
    desk.run().check(plain)


def test_max_tokens_and_the_contexts_end(model: LoraModel) -> None:
    desk = Desk(model, eos=(), context=20)
    desk.ask("short", [1] * 10, max_tokens=3)
    desk.ask("one", [1] * 10, max_tokens=1)
    desk.ask("open", [1] * 10, max_tokens=None)
    desk.ask("capped", [1] * 15, max_tokens=50)
    desk.ask("full", [1] * 19, max_tokens=None)
    desk.run()
    lengths = {name: len(ids) for name, ids in desk.ids.items()}
    assert lengths == {"short": 3, "one": 1, "open": 10, "capped": 5, "full": 1}
    assert set(desk.ends.values()) == {"length"}


def test_the_end_of_a_turn_is_part_of_the_sample(model: LoraModel) -> None:
    """With every even id ending a turn, each sample is odd ids and then one even one."""
    desk = Desk(model, eos=range(0, 300, 2))
    for i in range(20):
        desk.ask(f"{i}", [i + 1], max_tokens=50)
    desk.run()
    assert set(desk.ends.values()) == {"stop"}
    for ids in desk.ids.values():
        assert [i % 2 for i in ids] == [1] * (len(ids) - 1) + [0]


def test_min_tokens_holds_the_end_back_and_renormalises(model: LoraModel, plain: Any) -> None:
    """Even ids end a turn; the first four tokens are drawn among the odd ones alone."""
    desk = Desk(model, eos=range(0, 300, 2))
    desk.ask("x", [5, 6, 7], min_tokens=4, max_tokens=50)
    desk.run()
    ids = desk.ids["x"]
    assert desk.ends["x"] == "stop"
    assert len(ids) > 4
    assert all(i % 2 for i in ids[:4])
    logits = plain_logits(plain, [5, 6, 7], ids)
    odd = torch.arange(300) % 2 == 1
    logits[:4, ~odd] = -torch.inf
    wanted = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
    np.testing.assert_allclose(desk.logprobs["x"], wanted, rtol=0, atol=EXACT)


def test_an_end_of_turn_that_the_model_has_no_output_for_is_ignored(model: LoraModel) -> None:
    desk = Desk(model, eos=(END, 5000))
    desk.ask("x", [1], min_tokens=2)
    assert len(desk.run().ids["x"]) > 2


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_a_grammar_holds_one_sequence_and_not_its_neighbours(model: LoraModel, plain: Any) -> None:
    """The model has 300 outputs, the tokenizer 258 ids: the rest is never allowed."""
    tokenizer, desk = ByteTokenizer(), Desk(model)
    desk.ask("json", [1, 2], GrammarMatcher(json_grammar(SCHEMA), tokenizer), max_tokens=50)
    desk.ask("free", [1, 2], max_tokens=20)
    desk.run().check(plain, names=["free"])
    text = tokenizer.decode(desk.ids["json"], skip_special=True)
    assert text in ('{"ok": true}', '{"ok": false}')
    assert desk.ends["json"] == "stop"
    forced = desk.logprobs["json"][:7]  # {"ok": and the space: one way each
    np.testing.assert_allclose(forced, 0.0, atol=EXACT)


def test_a_grammar_that_is_at_its_end_beats_min_tokens(model: LoraModel) -> None:
    desk = Desk(model)
    matcher = GrammarMatcher(json_grammar(SCHEMA), ByteTokenizer())
    desk.ask("json", [1, 2], matcher, min_tokens=40, max_tokens=50)
    desk.ask("grows", [1, 2], Only(END), min_tokens=3, max_tokens=50)
    desk.run()
    assert ByteTokenizer().decode(desk.ids["json"], skip_special=True) in (
        '{"ok": true}', '{"ok": false}',
    )  # fmt: skip
    assert desk.ids["grows"] == [END]
    assert set(desk.ends.values()) == {"stop"}


class Only:
    """A matcher that allows one id, and is at its end once that came."""

    def __init__(self, token: int) -> None:
        self._token = token
        self.finished = False

    def mask(self) -> Any:
        return np.arange(258) == self._token

    def advance(self, token_id: int) -> None:
        self.finished = True


class Broken(Only):
    """A matcher whose grammar grows too large on the way, at the mask or at the next token."""

    def __init__(self, *, at_mask: bool, after: int) -> None:
        super().__init__(65)
        self._at_mask, self._left = at_mask, after

    def mask(self) -> Any:
        self._fail(self._at_mask)
        return super().mask()

    def advance(self, token_id: int) -> None:
        self._left -= 1
        self._fail(not self._at_mask)

    def _fail(self, here: bool) -> None:
        if here and self._left <= 0:
            raise EngineError("the grammar can't be followed (too large)")


@pytest.mark.parametrize("at_mask", [True, False])
def test_a_grammar_that_fails_ends_its_own_sequence_alone(
    model: LoraModel, plain: Any, at_mask: bool
) -> None:
    desk = Desk(model)
    desk.ask("before", [1, 2, 3], max_tokens=8)
    desk.ask("broken", [1, 2, 4], Broken(at_mask=at_mask, after=2), max_tokens=8)
    desk.ask("nothing", [1, 2, 4], Only(5000), max_tokens=8)
    desk.ask("after", [1, 2, 5], max_tokens=8)
    desk.run()
    assert desk.ids["broken"] == [65, 65] if at_mask else [65]
    assert "too large" in str(desk.errors["broken"])
    assert "allows no token" in str(desk.errors["nothing"])
    assert set(desk.errors) == {"broken", "nothing"}
    desk.check(plain, names=["before", "after"])


def test_weights_that_are_not_finite_are_an_error(tiny_llama: Path) -> None:
    model = LoraModel.load(tiny_llama)
    desk = Desk(model)
    desk.ask("x", [1, 2, 3])
    model.logits(torch.zeros(1, 32))
    for parameter in model.head.matrix.parameters():
        parameter.data[3] = torch.nan
    with pytest.raises(EngineError, match="not finite"):
        desk.step()
