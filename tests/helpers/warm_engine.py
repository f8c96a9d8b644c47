"""What the process has imported from which ranks with an engine are forked (ranks.py).

A fork copies one thread. So whatever vLLM, or what it imports, starts while it is imported would be missing in every
rank: it must start none. An LLM starts some forty, so nobody makes one here.
"""

import os

import engine

THREADS = os.listdir("/proc/self/task")
assert len(THREADS) == 1, f"importing {engine.vllm.__name__} {engine.vllm.__version__} has started {len(THREADS) - 1}"
