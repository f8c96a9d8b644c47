"""What NeMo RL's filter leaves of rows of logits: its own function, executed. Prints what sampling_filter.json holds.

    python tests/helpers/peers/sampling_filter.py CHECKOUT_OF_NEMO_RL > tests/helpers/peers/sampling_filter.json

Of NVIDIA-NeMo/RL at 7ea279a: apply_top_k_top_p in nemo_rl/algorithms/logits_sampling_utils.py, which needs torch alone.
"""

import json
import sys
from importlib import util
from pathlib import Path

import torch

LOGITS = [  # the last two rows have equal ones at many places of a cut
    [2.1, -0.3, 0.7, 1.9, -1.4, 0.2, 3.3, -2.2, 1.1],
    [9.0, 1.0, 2.0, -3.0, 0.5, 8.5, 1.5, 0.0, -1.0],
    [-1.2, -1.1, -1.3, -1.0, -1.4, -0.9, -1.5, -0.8, -1.6],
    [1.0, 2.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0, 1.0],
    [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
]
CASES = [  # top_k, top_p, temperature
    (1, 1.0, 1.0),
    (4, 1.0, 1.0),
    (9, 1.0, 0.7),
    (None, 0.9, 1.0),
    (None, 0.55, 0.7),
    (None, 1e-6, 1.0),
    (4, 0.8, 1.0),
    (6, 0.4, 0.7),
    (2, 0.999, 1.5),
]


def main() -> None:
    file = Path(sys.argv[1]) / "nemo_rl/algorithms/logits_sampling_utils.py"
    spec = util.spec_from_file_location(file.stem, file)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = []
    for top_k, top_p, temperature in CASES:
        logits = torch.tensor(LOGITS, requires_grad=True)
        filtered, kept = module.apply_top_k_top_p(logits / temperature, top_k, top_p)
        logp = filtered.log_softmax(-1)
        weight = torch.arange(1.0, 1 + logits.shape[1])  # of the gradient of each kept token's log-probability
        (torch.where(kept, logp, 0.0) * weight).sum().backward()
        rows = [[round(x, 6) if x > -torch.inf else None for x in row] for row in logp.tolist()]
        gradient = [[round(x, 6) for x in row] for row in logits.grad.tolist()]
        found.append({"logp": rows, "gradient": gradient})
    print("[\n" + ",\n".join(map(json.dumps, found)) + "\n]")


if __name__ == "__main__":
    main()
