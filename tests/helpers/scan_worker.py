"""A rank that loads datasets as a run does: torchrun scan_worker.py FOLDER. Writes what it got to rank_<rank>.json."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from config import DataError, DatasetConfig
from dataset.scan import load_dataset
from hf.tokenizer import Tokenizer
from system.ranks import on_rank0, start_process_group

if __name__ == "__main__":
    folder, results = Path(sys.argv[1]), []
    ranks, _ = start_process_group(tp_size=1)
    tokenizer = Tokenizer(folder)
    for name in ("good.jsonl", "bad.jsonl", "good.jsonl"):
        try:
            cfg = DatasetConfig(data_path=str(folder / name))
            dataset, _ = load_dataset(cfg, tokenizer, 20, {}, lambda *answers: None, on_rank0=on_rank0)
            answers = [problem.answer for problem in dataset.problems]
            results.append([answers, dataset.fingerprint, dataset.left_out])
        except DataError as error:
            results.append(str(error))
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()  # else gloo's threads may abort the process at its end
