"""GSM8K as two files, train.jsonl (7,473 problems) and test.jsonl (1,319), beside this script in data/.

    .venv/bin/python examples/gsm8k/prepare.py                               from the Hugging Face hub (openai/gsm8k)
    .venv/bin/python examples/gsm8k/prepare.py --from FOLDER [--to FOLDER]   from files that you have

FOLDER holds train.jsonl and test.jsonl (of github.com/openai/grade-school-math), or files whose names end so. A row is
{"question": ..., "answer": a worked solution that ends in "#### 72"}. What is written has the bytes of the files on
GitHub, at commit 3101c7d; rows that do not give them are refused with exit code 2.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.inputs.sources import open_source, with_preset
from config import DataError, DatasetConfig

# Split -> number of rows and sha256 of grade_school_math/data/SPLIT.jsonl in openai/grade-school-math.
SPLITS = {
    "train": (7473, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "test": (1319, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
}


def file_of(folder: Path, split: str) -> Path:
    """The only file there whose name ends in train.jsonl, or test.jsonl."""
    files = sorted(folder.glob(f"*{split}.jsonl"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise DataError(f"{folder}: one file whose name ends in {split}.jsonl is needed, there is: {names}")
    return files[0]


def lines_of(split: str, folder: Path | None) -> Iterator[str]:
    """The rows as JSON lines: question and answer alone, in the order of the source."""
    section = DatasetConfig(dataset_name="gsm8k", split=split)
    if folder:
        section = DatasetConfig(data_path=str(file_of(folder, split)))
    source = open_source(with_preset(section))
    for number in source.numbers:
        row = source.read(number)
        if not isinstance(row, dict) or not {"question", "answer"} <= row.keys():
            raise DataError(f"{source.where(number)}: a row of GSM8K has the keys question and answer")
        yield json.dumps({key: row[key] for key in ("question", "answer")}) + "\n"


def prepare(folder: Path | None, target: Path) -> None:
    """Writes both files; neither, if one of the splits is not GSM8K's. DataError says what differs."""
    texts = {}
    for split, (num_rows, sha256) in SPLITS.items():
        lines = list(lines_of(split, folder))
        texts[split] = "".join(lines)
        got = hashlib.sha256(texts[split].encode()).hexdigest()
        if (len(lines), got) != (num_rows, sha256):
            expected = f"{num_rows:,} rows with sha256 {sha256[:12]}"
            raise DataError(
                f"{split}: {len(lines):,} rows with sha256 {got[:12]}, GSM8K has {expected}: take its files"
            )
    target.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        file = target / f"{split}.jsonl"
        file.write_text(text, encoding="utf-8")
        print(f"{file}: {SPLITS[split][0]:,} problems, as in openai/grade-school-math")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, metavar="FOLDER")
    parser.add_argument("--to", dest="target", type=Path, metavar="FOLDER", default=Path(__file__).parent / "data")
    args = parser.parse_args()
    try:
        prepare(args.source, args.target)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
