"""Which models train on which GPU: the README's table, by the estimate that plans every step.

`python -m benchmarks.memory_table` prints Markdown. For each model, in 16 and in 4 bits, LoRA of
rank 16: memory of a step with a row of 8k or 16k positions, the least (every layer computed again)
and at ease (nothing computed twice), and the smallest GPU for each. Figures are estimates but for
those that benchmarks/RESULTS.md has measured, which stand in bold. In GB of 10^9 bytes, with what
the program takes; a vLLM that sleeps beside it is not counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from art_core.readiness.memory import Load, training_step
from art_core.readiness.shape import Shape, shape_of
from art_core.readiness.sizes import Sizes, sizes_of
from art_core.readiness.step_memory import StepMemory

GB = 10**9
CARDS = (24, 48, 80, 141)
"""GB that GPUs are sold with; a step may have `USABLE` of it."""
USABLE = 0.92
ROWS = (8192, 16_384)
RANK = 16
Way = Literal["train", "train 4-bit"]
WAYS: tuple[tuple[Way, str], ...] = (("train", "bf16"), ("train 4-bit", "4-bit"))


def _config(kind: str, *sizes: int, tied: bool) -> dict[str, Any]:
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "vocab_size",
    )  # fmt: skip
    return {
        **dict(zip(names, sizes, strict=True)),
        "model_type": kind.lower(),
        "architectures": [f"{kind}ForCausalLM"],
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }


MODELS = {
    "Qwen2.5-0.5B": _config("Qwen2", 896, 24, 14, 2, 64, 4864, 151_936, tied=True),
    "Qwen3-0.6B": _config("Qwen3", 1024, 28, 16, 8, 128, 3072, 151_936, tied=True),
    "Qwen3-1.7B": _config("Qwen3", 2048, 28, 16, 8, 128, 6144, 151_936, tied=True),
    "Qwen3-4B": _config("Qwen3", 2560, 36, 32, 8, 128, 9728, 151_936, tied=True),
    "Qwen2.5-7B": _config("Qwen2", 3584, 28, 28, 4, 128, 18_944, 152_064, tied=False),
    "Qwen3-8B": _config("Qwen3", 4096, 36, 32, 8, 128, 12_288, 151_936, tied=False),
    "Qwen3-14B": _config("Qwen3", 5120, 40, 40, 8, 128, 17_408, 151_936, tied=False),
}
"""As their `config.json` says."""
MEASURED = {("Qwen3-0.6B", "train", 16_384): 23.4, ("Qwen3-4B", "train", 16_384): 75.5}
"""GB of torch's tensors on an H200, a row of 16,368, nothing computed twice (RESULTS.md)."""


@dataclass(frozen=True)
class Cell:
    """A model on a row."""

    model: str
    way: Way
    row: int
    least: float
    """GB, every layer computed again."""
    ease: float
    """GB, nothing computed twice."""
    measured: float | None
    """GB at ease without the program's own; None: nobody measured it."""
    card: int | None
    """GB of the smallest GPU that it fits on; None: on none of `CARDS`."""
    easy_card: int | None
    """The same, at ease."""


def cells() -> Iterator[Cell]:
    """Of all models, ways and rows."""
    for name, config in MODELS.items():
        shape = shape_of(config)
        sizes = sizes_of(shape)
        assert sizes is not None, name
        for way, _ in WAYS:
            yield from (_cell(name, way, row, shape, sizes) for row in ROWS)


def _cell(name: str, way: Way, row: int, shape: Shape, sizes: Sizes) -> Cell:
    step: StepMemory = training_step(way, shape, sizes, Load(length=row, rank=RANK))
    measured = MEASURED.get((name, way, row))
    least, ease = step.least / GB, step.total / GB
    return Cell(name, way, row, least, ease, measured, _card(least), _card(ease))


def _card(needed: float) -> int | None:
    return next((size for size in CARDS if needed <= USABLE * size), None)


def table(found: Sequence[Cell]) -> str:
    """As Markdown, a line for each model and way."""
    head = ["model", "weights"]
    for row in ROWS:
        head += [f"row {row // 1024}k: least to at ease", "GPU: least, at ease"]
    lines = [_line(head), _line(["---"] * len(head))]
    for name in MODELS:
        for way, words in WAYS:
            mine = [cell for cell in found if (cell.model, cell.way) == (name, way)]
            parts = [part for cell in mine for part in (_range(cell), _cards(cell))]
            lines.append(_line([name, words, *parts]))
    return "\n".join(lines)


def _range(cell: Cell) -> str:
    ease = f"{cell.ease:.0f}"
    if cell.measured is not None:
        ease += f" (**{cell.measured} measured**)"
    return f"{cell.least:.0f} to {ease} GB"


def _cards(cell: Cell) -> str:
    return f"{cell.card or '-'}, {cell.easy_card or '-'} GB"


def _line(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list instead")
    found = list(cells())
    print(json.dumps([vars(c) for c in found]) if parser.parse_args().json else table(found))


if __name__ == "__main__":
    main()
