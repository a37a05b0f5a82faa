"""OpenPipe ART's tokenise-and-pack, for benchmarks/pack.py: a program of the peer's environment.

In: a file of conversations, a model folder, a row's length; then one word a line. Out: one line of
JSON for each. "run" tokenises and packs as ART's local backend does before a step, and tells the
CPU seconds; "check" writes what it would train to the file given. Knows nothing of art_core.
"""

# It runs where our packages are not installed, and the other way round:
# mypy: ignore-errors

import gc
import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "WANDB_MODE": "offline",
}  # fmt: skip

import numpy as np
import torch
from art import Trajectory, TrajectoryGroup
from art.preprocessing.pack import packed_tensors_from_tokenized_results
from art.preprocessing.tokenize import tokenize_trajectory_groups
from openai.types.chat.chat_completion import Choice
from transformers import AutoTokenizer


def choice(content, ids, logprobs):
    """The answer as a server with `return_tokens_as_token_ids` sends it."""
    entries = [
        {"token": f"token_id:{i}", "bytes": [0], "logprob": p, "top_logprobs": []}
        for i, p in zip(ids, logprobs, strict=True)
    ]
    message = {"role": "assistant", "content": content}
    return Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": message, "logprobs": {"content": entries}}
    )


def trajectory(told):
    turns = iter(told["turns"])
    items = [
        choice(m["content"], *next(turns)) if m["role"] == "assistant" else m
        for m in told["messages"]
    ]
    return Trajectory(messages_and_choices=items, reward=told["reward"])


def tokenized(tokenizer, groups, *, shuffle):
    return list(
        tokenize_trajectory_groups(
            tokenizer,
            groups,
            allow_training_without_logprobs=False,
            scale_rewards=False,
            shuffle_group_trajectories=shuffle,
        )
    )


def run(tokenizer, groups, row):
    gc.collect()
    began = time.process_time()
    results = tokenized(tokenizer, groups, shuffle=True)
    packed = packed_tensors_from_tokenized_results(
        results, row, pad_token_id=tokenizer.eos_token_id, truncate_long_results=False
    )
    seconds = time.process_time() - began
    used = int((packed["group_ids"] != -1).sum())
    return {"seconds": seconds, "rows": len(packed["tokens"]), "positions": used}


def check(tokenizer, groups, file):
    results = tokenized(tokenizer, groups, shuffle=False)
    np.savez(
        file,
        lengths=[len(r.token_ids) for r in results],
        ids=np.concatenate([r.token_ids for r in results]),
        mask=np.concatenate([r.assistant_mask for r in results]),
        logprobs=np.concatenate([r.logprobs for r in results]),
        advantages=[r.advantage for r in results],
    )
    return {"file": file}


def main(conversations, model, row, file):
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    told = json.loads(Path(conversations).read_text("utf-8"))
    groups = [TrajectoryGroup([trajectory(one) for one in group]) for group in told]
    print(json.dumps({"ready": len(groups)}), flush=True)
    for line in sys.stdin:
        if line.strip() == "check":
            answer = check(tokenizer, groups, file)
        else:
            answer = run(tokenizer, groups, int(row))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
