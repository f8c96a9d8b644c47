"""Where GSM8K's and HumanEval's files are, for the tests that read them: JUDGES_DATA, or shared/data beside the folder
that holds judges/."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # it holds judges/
DATA = Path(os.environ.get("JUDGES_DATA") or ROOT.parent / "shared" / "data")
