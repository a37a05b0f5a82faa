"""How long `import art_core` takes in a fresh process, beside `import openai`, which it stands on.

Gate: no heavy package may come along. Unit: seconds of the import alone, the interpreter's start
left out. Goal: under 1 s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from benchmarks.comparison import Comparison, compare_seconds, machine

HEAVY = ["torch", "transformers", "vllm", "peft", "pandas", "pyarrow"]

TIMED_IMPORT = """
import json, sys, time
began = time.perf_counter()
import {module}
print(json.dumps([time.perf_counter() - began, [m for m in {heavy} if m in sys.modules]]))
"""


def import_seconds(module: str) -> float:
    """Seconds that importing `module` takes in a process of its own.

    Raises:
        RuntimeError: a heavy package came along.
    """
    code = TIMED_IMPORT.format(module=module, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, heavy = json.loads(done.stdout)
    if heavy:
        raise RuntimeError(f"importing {module} also imported {', '.join(heavy)}")
    return float(seconds)


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 15")
    repeats = 5 if parser.parse_args().quick else 15
    ours, peer, ratio, spread = compare_seconds(
        lambda: import_seconds("art_core"), lambda: import_seconds("openai"), repeats=repeats
    )
    found = Comparison(
        name="import_time",
        ours=round(ours, 4),
        peer=round(peer, 4),
        peer_name="import openai",
        ratio=round(ratio, 3),
        goal="ours < 1 s",
        spread=(round(spread[0], 3), round(spread[1], 3)),
        machine=machine(),
    )
    print(found.line())


if __name__ == "__main__":
    main()
