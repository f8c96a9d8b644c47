"""Whether the run whose metrics.jsonl this is has learned: PASS or FAIL; exit code 1 if not. No torch.

python bench/gpu_learned.py METRICS LIMIT        LIMIT: the greedy accuracy before, of that after, at most
"""

import json
import sys
from pathlib import Path

rows = [json.loads(row) for row in Path(sys.argv[1]).read_text().splitlines()]
accuracy = [row["validation/greedy/accuracy"] for row in rows if "validation/greedy/accuracy" in row]
learned = len(accuracy) > 1 and accuracy[0] <= float(sys.argv[2]) * accuracy[-1]
print(f"{'PASS' if learned else 'FAIL'} greedy accuracy {accuracy}, before over after at most {sys.argv[2]}")
sys.exit(not learned)
