"""Exactness of packing: a row of trees against each call alone, and drift of token ids.

Agents' conversations with tool calls and non-Latin text, in ChatML: rollouts of one prompt that
branch, each turn a call. Logprobs and LoRA gradients of the tree, and those of transformers' own
forward pass of each call: float64 on a tiny model, float32 on SmolLM2, and on a GPU bfloat16 in the
shape of Qwen3-0.6B with random weights, where both are also held against float32 on the same GPU.
Drift: of appended turns through our chat service with a scripted engine, those whose prompt does
not extend the call before. Goals: DESIGN section 8 and issue 4.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from art_core.batch.sample import Sample
from art_core.config import LoraSettings
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import entry_logprobs
from art_core.training.rows import rows_for

NAME = "live"
FLOAT32 = {"mean": 1e-5, "most": 2e-4}
"""Nats (DESIGN section 8)."""
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SAYINGS = (
    "Wo ist meine Bestellung 48213? Ich warte seit zwei Wochen.",
    "注文番号 7751 の返金をお願いします。届いた箱が壊れていました。",
    "Заказ 90-17 так и не пришёл, верните деньги.",
    "¿Dónde está el pedido A-003? 😀 نعم، أريد استرداد المبلغ",
    "Order 5512 arrived,\n\n\tbut the tea set is broken: 100% refund please.",
)
_TOOL_CALL = (
    "<tool_call>\n"
    '{"name": "order_status", "arguments": {"order": "%s", "note": "é ✓"}}\n'
    "</tool_call>"
)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "order_status",
            "description": "Where an order is",
            "parameters": {"type": "object", "properties": {"order": {"type": "string"}}},
        },
    }
]


class AllFloat64(TorchFunctionMode):
    """What transformers computes in float32 whatever the model's dtype stays in float64: norms,
    rotary angles, the softmax of eager attention. For our rows and for the peer alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def exact(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        named = {key: exact(value) for key, value in (kwargs or {}).items()}
        chosen = Tensor.double if func is Tensor.float else func
        return chosen(*(exact(value) for value in args), **named)


@dataclass(frozen=True)
class Found:
    """How far a tree and calls alone are from each other."""

    mean_nats: float
    max_nats: float
    gradient: float
    """||tree - alone|| / ||alone|| over all LoRA weights."""


def conversations(encode: Any, eos: int, seed: int, *, groups: int, rollouts: int) -> list[Sample]:
    """Calls of agents: a stem, a customer a group, rollouts that say different things."""
    rng = np.random.default_rng(seed)
    stem = encode(
        f"<|im_start|>system\nYou are a shop's assistant.\n{json.dumps(_TOOLS)}<|im_end|>\n"
    )
    samples: list[Sample] = []
    for group in range(groups):
        ask = encode(f"<|im_start|>user\n{_SAYINGS[group % len(_SAYINGS)]}<|im_end|>\n")
        for rollout in range(rollouts):
            history = [*stem, *ask]
            for turn in range(3):
                history += encode("<|im_start|>assistant\n")
                said = _TOOL_CALL % rng.integers(3) if turn < 2 else str(rng.choice(_SAYINGS))
                answer = [*encode(said), eos]
                samples.append(
                    _sample(rng, history, answer, len(samples), group * rollouts + rollout)
                )
                result = json.dumps({"state": str(rng.choice(["到着", "unterwegs", "lost"]))})
                history += [*answer, *encode(f"\n<|im_start|>tool\n{result}<|im_end|>\n")]
    return samples


def _sample(
    rng: np.random.Generator, prompt: Sequence[int], sampled: Sequence[int], call: int, rollout: int
) -> Sample:
    return Sample(
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.zeros(len(sampled), np.float32),
        advantage=float(rng.normal()),
        weight=0.0,
        temperature=1.0,
        distorted=False,
        call=call,
        trajectory=rollout,
    )


def with_adapter(model: LoraModel) -> LoraModel:
    """A LoRA of rank 8 that changes something."""
    model.create_adapter(NAME, LoraSettings(rank=8, alpha=16.0), seed=0)
    generator = torch.Generator().manual_seed(0)
    for weight in model.adapter_weights(NAME).values():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.copy_((noise / weight.shape[1] ** 0.5 * 0.1).to(weight))
    return model


Result = tuple[list[Tensor], Tensor]
"""Logprobs by call, and the gradient of their advantage-weighted mean."""


def in_trees(model: LoraModel, samples: Sequence[Sample]) -> Result:
    """Ours."""
    total = sum(len(s.sampled_ids) for s in samples)
    found: dict[int, Tensor] = {}
    with model.training(NAME) as parameters:
        gradient = torch.zeros(())
        for row in rows_for(model, samples, 32_768):
            values, _ = entry_logprobs(model, row)
            weights = torch.from_numpy(row.entries.advantage).to(values) / total
            gradient = gradient + _flat(torch.autograd.grad((weights * values).sum(), parameters))
            for call in np.unique(row.entries.call):
                at = torch.from_numpy(row.entries.call == call).to(values.device)
                found[int(call)] = values.detach()[at].double().cpu()
    return [found[s.call] for s in samples], gradient


def alone(model: LoraModel, samples: Sequence[Sample]) -> Result:
    """The same weights through transformers' own attention, a call at a time."""
    causal = model._causal
    ours = causal.config._attn_implementation
    causal.set_attn_implementation("sdpa")
    total = sum(len(s.sampled_ids) for s in samples)
    found, gradient = [], torch.zeros(())
    try:
        with model.training(NAME) as parameters:
            for sample in samples:
                ids = torch.from_numpy(sample.path.astype(np.int64))[None].to(model.device)
                logits = causal(input_ids=ids, use_cache=False).logits[
                    0, len(sample.prompt_ids) - 1 :
                ]
                exact = torch.promote_types(logits.dtype, torch.float32)
                target = torch.from_numpy(sample.sampled_ids.astype(np.int64)).to(logits.device)
                values = torch.log_softmax(logits.to(exact), -1).gather(1, target[:, None])[:, 0]
                loss = sample.advantage * values.sum() / total
                gradient = gradient + _flat(torch.autograd.grad(loss, parameters))
                found.append(values.detach().double().cpu())
    finally:
        causal.set_attn_implementation(ours)
    return found, gradient


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten().double().cpu() for part in parts])


def compare(got: Result, want: Result) -> Found:
    """Of two results, the second is the measure."""
    apart = (torch.cat(got[0]) - torch.cat(want[0])).abs()
    gradient = float((got[1] - want[1]).norm() / want[1].norm())
    return Found(float(apart.mean()), float(apart.max()), gradient)


def check(name: str, found: Found, *, mean: float, most: float, gradient: float) -> None:
    """Print what was found.

    Raises:
        RuntimeError: it is above what is allowed.
    """
    print(json.dumps({"what": name, **asdict(found)}))
    if found.mean_nats > mean or found.max_nats > most or found.gradient > gradient:
        raise RuntimeError(f"{name}: {found}, allowed {mean}, {most}, {gradient}")


def float64_tiny() -> None:
    """A random Llama of two layers."""
    from art_core.engine.tokenizer import HFTokenizer
    from art_core.nn.tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory() as work:
        texts = [*_SAYINGS, _TOOL_CALL, json.dumps(_TOOLS)]
        folder = write_tiny_model(Path(work) / "tiny", texts)
        tokenizer = HFTokenizer(folder)
        with AllFloat64():
            model = with_adapter(LoraModel.load(folder, dtype=torch.float64))
            samples = conversations(
                tokenizer.encode, min(tokenizer.eos_ids), 0, groups=3, rollouts=4
            )
            found = compare(in_trees(model, samples), alone(model, samples))
    check("float64, tiny model", found, mean=1e-10, most=1e-10, gradient=1e-10)


def float32_smollm2(groups: int, rollouts: int) -> None:
    """SmolLM2-135M-Instruct on the CPU; the measure is transformers' own pass in float64.

    Float32 is not exact itself: a gradient may be as far from float64 as the peer's own is.
    """
    from art_core.engine.tokenizer import HFTokenizer
    from art_core.nn.base_model import resolve_base_model

    folder = resolve_base_model(MODEL)
    tokenizer = HFTokenizer(folder)
    samples = conversations(
        tokenizer.encode, min(tokenizer.eos_ids), 1, groups=groups, rollouts=rollouts
    )
    model = with_adapter(LoraModel.load(folder))
    trees, each = in_trees(model, samples), alone(model, samples)
    exact = alone(with_adapter(LoraModel.load(folder, dtype=torch.float64)), samples)
    peer = compare(each, exact)
    print(json.dumps({"what": "float32 alone against float64: the noise", **asdict(peer)}))
    noise = max(1e-5, peer.gradient)
    check("float32, tree against float64", compare(trees, exact), **FLOAT32, gradient=noise)
    check("float32, tree against alone", compare(trees, each), **FLOAT32, gradient=2 * noise)


def on_gpu() -> None:
    """Qwen3-0.6B's shape: bfloat16 trees, bfloat16 alone and float32 alone, of the same weights."""
    from benchmarks.gpu_update import build, draw

    def model(dtype: torch.dtype) -> LoraModel:
        base = build("0.6b", "cuda", torch.bfloat16).to(dtype)
        return with_adapter(LoraModel(base, Path("qwen3-0.6b")))

    samples = draw("agent", 4, 151_936, seed=0)
    exact = alone(model(torch.float32), samples)
    check(
        "float32, tree",
        compare(in_trees(model(torch.float32), samples), exact),
        **FLOAT32,
        gradient=1e-5,
    )
    half = model(torch.bfloat16)
    trees, each = in_trees(half, samples), alone(half, samples)
    allowed = {"mean": 0.05, "most": 0.5, "gradient": 0.1}
    check("bfloat16, alone against float32 alone: the noise", compare(each, exact), **allowed)
    check("bfloat16, tree against float32 alone", compare(trees, exact), **allowed)
    check("bfloat16, tree against bfloat16 alone", compare(trees, each), **allowed)
    ratio = torch.cat(trees[0]) - torch.cat(each[0])
    kl = float((ratio.exp() - 1 - ratio).mean())
    print(json.dumps({"what": "bfloat16, k3 between tree and alone", "nats": kl}))


async def drift(turns: int, turns_a_rollout: int = 12) -> dict[str, int]:
    """Turns played, and those whose prompt does not extend prompt and sample of the one before."""
    from art_core.engine.chat_service import ChatService
    from art_core.engine.model_registry import ModelRegistry
    from art_core.engine.scripted import ScriptedEngine
    from art_core.engine.tokenizer import HFTokenizer
    from art_core.nn.base_model import resolve_base_model
    from art_core.records import RecordStore

    rng = random.Random(0)

    def script(prompt: str, request: Any) -> str:
        kind = rng.randrange(4)
        calls = "\n".join(_TOOL_CALL % rng.randrange(99) for _ in range(rng.randint(1, 2)))
        return (rng.choice(_SAYINGS), calls, f"Let me see.\n{calls}", _TOOL_CALL[:30])[kind]

    engine = ScriptedEngine(script, tokenizer=HFTokenizer(resolve_base_model(MODEL)))
    service = ChatService(engine, RecordStore(None), ModelRegistry(engine.base_model))
    played = drifted = 0
    while played < turns:
        messages: list[dict[str, Any]] = [{"role": "user", "content": rng.choice(_SAYINGS)}]
        before: list[int] = []
        for _ in range(min(turns_a_rollout, turns - played)):
            body = {
                "model": engine.base_model,
                "messages": messages,
                "tools": _TOOLS,
                "return_token_ids": True,
            }
            done = await service.complete(body, rollout_id=f"rollout-{played // turns_a_rollout}")
            choice, prompt = done["choices"][0], done["prompt_token_ids"]
            drifted += list(prompt[: len(before)]) != before
            before = [*prompt, *choice["token_ids"]]
            messages = [*messages, choice["message"], *_replies(choice["message"], rng)]
            played += 1
    return {"turns": played, "drifted": drifted, "named": sum(service.drifts.values())}


def _replies(message: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """What a client appends: a result for each tool call, else the customer's next words."""
    calls = message.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": rng.choice(_SAYINGS)}]
    result = json.dumps({"state": "到着 ✓", "days": rng.randrange(9)})
    return [{"role": "tool", "tool_call_id": c["id"], "content": result} for c in calls]


def main() -> None:
    """Check each part and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 x 2 rollouts, 200 turns, no GPU")
    parser.add_argument("--gpu", action="store_true", help="the GPU's part alone")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10_000)
    args = parser.parse_args()
    if args.quick:
        args.groups, args.rollouts, args.turns = 2, 2, 200
    if args.gpu:
        on_gpu()
        return
    float64_tiny()
    float32_smollm2(args.groups, args.rollouts)
    seen = asyncio.run(drift(args.turns))
    print(json.dumps({"what": "drift", **seen}))
    if seen["drifted"] or seen["named"]:
        raise RuntimeError(f"prompts drifted: {seen}")


if __name__ == "__main__":
    main()
