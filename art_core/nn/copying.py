"""Which models compute on a processor with a copy of their weights that has the adapter in it.

What follows from it is in blocks.py and merging.py; how much memory that is, in
readiness/memory.py. It imports nothing, so that both can go by it.
"""

KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Decoders that are built so: what their class names in transformers begin with."""
LIMIT_BYTES = 4 * 2**30
"""A larger copy of the weights is not made: in single precision that is 1 billion of them."""
