"""What a log of vLLM is understood to say. The lines are as vLLM 0.32, argparse and torch write
them."""

from __future__ import annotations

import pytest

from art_core.engine.vllm_faults import find_fault

LINES = {
    "api_server.py: error: unrecognized arguments: --no-such-flag 3": (
        "this version of vLLM does not know --no-such-flag 3",
        "extra_args",
    ),
    "api_server.py: error: argument --max-lora-rank: invalid choice: 7 (choose from 1, 8, 16)": (
        "vLLM refuses --max-lora-rank: invalid choice: 7 (choose from 1, 8, 16)",
        "another value",
    ),
    "ValueError: Free memory on device cuda:0 (3.2/139.8 GiB) on startup is less than desired GPU "
    "memory utilization (0.9, 125.8 GiB). Decrease GPU memory utilization": (
        "the GPU has 3.2 of its 139.8 GiB free, and vLLM was to take a share of 0.9",
        "gpu_memory_utilization",
    ),
    "ValueError: To serve at least one request with the models's max seq len (131072), (8.00 GiB "
    "KV cache is needed, which is larger than the available KV cache memory (1.50 GiB).": (
        "a sequence of max_model_len needs 8.00 GiB of keys and values and 1.50 GiB are left",
        "max_model_len",
    ),
    "ValueError: Available memory on node 0 (3.20/23.44 GiB) on kv cache allocation is less than "
    "requested memory for kv (64.0 GiB). Decrease --kv-cache-memory-bytes, ...": (
        "the machine has 3.20 of its 23.44 GiB free, and 64.0 were to hold keys and values",
        "cpu_cache_gb",
    ),
    "ValueError: No available memory for the cache blocks. Try increasing": (
        "the weights leave no memory for keys and values",
        "smaller model",
    ),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": (
        "the GPU is out of memory",
        "max_loras",
    ),
    "OSError: [Errno 12] Cannot allocate memory": ("the machine is out of memory", "cpu_cache_gb"),
    "Value error, User-specified max_model_len (9000) is greater than the derived max_model_len "
    "(max_position_embeddings=2048 or model_max_length=None in model's config.json).": (
        "max_model_len is 9000, and the model was made for 2048",
        "max_model_len",
    ),
    "ValueError: MambaForCausalLM does not support LoRA yet.": (
        "vLLM can't put adapters on a MambaForCausalLM",
        "embedded engine",
    ),
    "Value error, Model architectures ['NewForCausalLM'] are not supported for now.": (
        "this version of vLLM does not know the architecture ['NewForCausalLM']",
        "another base model",
    ),
    "The checkpoint you are trying to load has model type `new` but Transformers does not "
    "recognize this architecture.": (
        "the transformers beside vLLM does not know the model type new",
        "another base model",
    ),
    "ModuleNotFoundError: No module named 'vllm'": ("its environment has no module vllm", "setup"),
    "RuntimeError: Failed to infer device type, please set the environment variable": (
        "this build of vLLM is for GPUs, and it finds none",
        "--cpu",
    ),
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).": (
        "the NVIDIA driver is too old for this build of vLLM",
        "Update",
    ),
    "OSError: [Errno 28] No space left on device": ("the disk is full", "Free space"),
}


@pytest.mark.parametrize("line", LINES)
def test_a_known_line_is_understood_and_has_a_fix(line: str) -> None:
    cause, fix = LINES[line]
    fault = find_fault(f"INFO starting\n{line}\nTraceback follows", 1)
    assert fault.cause == cause
    assert fix in fault.fix
    assert fault.tail.endswith(f"{line}\nTraceback follows")


def test_what_is_told_at_every_end_is_no_part_of_the_tail() -> None:
    noise = (
        'nanobind: leaked 64 types!\n - leaked type "ATOMIC_OP"\n - ... skipped remainder\n'
        "nanobind: this is likely caused by a reference counting issue in the binding code.\n"
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html\n"
    )
    fault = find_fault("ValueError: No available memory for the cache blocks.\n" + noise * 9, 1)
    assert fault.tail == "ValueError: No available memory for the cache blocks."


def test_what_was_told_long_before_the_end_is_not_its_cause() -> None:
    earlier = "CUDA out of memory\n" + "INFO all is well\n" * 300
    assert find_fault(earlier, 3).cause == "it ended with status 3"


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (-9, "it was killed, as the system does when memory runs out"),
        (-4, "this processor lacks instructions that the build was made with"),
        (-11, "it was ended by signal 11"),
        (3, "it ended with status 3"),
        (None, "it does not answer"),
    ],
)
def test_without_a_known_line_its_end_is_told(status: int | None, cause: str) -> None:
    assert find_fault("all is well", status).cause == cause


def test_only_a_taken_port_is_worth_another_try() -> None:
    taken = find_fault(
        "OSError: [Errno 98] error while attempting to bind: Address already in use", 1
    )
    assert taken.is_port_taken
    assert not find_fault("CUDA out of memory", 1).is_port_taken
