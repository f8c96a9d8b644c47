"""The report of runs: `report.html`, one file that needs no network and no library, or text for a terminal. No torch.

    python -m tools.report logs/exp_001 [logs/exp_002 ...] [--text] [--live]

docs/report.md: what it shows, which samples it keeps. What cannot be read is left out, and said. Text of samples may be
hostile: it is compressed data for the script of the page (report.html), which makes text nodes of it, never HTML.
"""

import argparse
import base64
import gzip
import hashlib
import json
import math
import random
import re
import shutil
import statistics
import sys
import textwrap
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file

from config import ConfigError
from hf.files import open_file
from system.exits import describe_os_error

MAX_SAMPLES, MAX_STEPS = 8000, 2000  # samples of all runs together; steps in the curves of each
MAX_DUMPS, MAX_DUMPED = 60, 240  # dumped steps of a run, and their samples
MAX_TOKENS = 2000  # in colour, of such a sample
MAX_KEYS = 8  # of configs that differ
MAX_TEXT, MAX_PAGE = 8_000_000, 9_500_000  # characters of prompts and replies; bytes of the file
LIVE_SECONDS = 5.0
PHASE = r"timing/train/(?!.*(total_step_time|_per_gpu)$).*"
FIELDS = """step kind env_name outcome finish_reason row_id index prompt reply reward unshaped_reward advantage
num_tokens weight_version line""".split()
CHARTS = """train/reward train/accuracy train/loss train/grad_norm train/entropy train/logp_gap_mean
train/mean_gen_tokens_per_sample train/truncation_rate train/ratio_clip_low_fraction+train/ratio_clip_high_fraction
train/outcome/wrong+train/outcome/parse_fail+train/outcome/timeout+train/outcome/error train/zero_variance_fraction
performance/tokens_per_sec""".split()  # what is looked at first; + joins curves in one chart


def read_run(folder: Path, name: str, max_samples: int) -> dict:
    """What the report shows of a run, as `read_metrics` and `read_samples` say."""
    notes: list[str] = []
    ending = "no exit.json: it goes on, or it was killed"
    for _, end in read_lines(folder / "exit.json", notes, step=0) if (folder / "exit.json").exists() else ():
        ending = f"exit code {end.get('code')}: {end.get('reason')}"
    steps, series, held = read_metrics(folder / "metrics.jsonl", notes)
    if (folder / "eval.json").exists() and not steps:
        notes[-1] = "made by eval.py: its numbers are in eval.json"  # and not that there are no metrics
    samples, kept = read_samples(folder / "samples.jsonl", notes, max_samples)
    dumps = sorted((folder / "rollouts").glob("step_*[0-9]"))
    for dump in evenly(dumps, MAX_DUMPS):
        samples += read_dump(dump, notes, MAX_DUMPED // min(len(dumps), MAX_DUMPS))
    kept += f", and of {min(len(dumps), MAX_DUMPS)} of {len(dumps)} dumped steps" if dumps else ""
    run = {"name": name, "ending": ending, "notes": notes, "steps": steps, "series": series, "held": held}
    return run | {"samples": samples, "kept": kept}


def differences(folders: list[Path]) -> str:
    """The keys that differ between the runs' config.yaml; "" where a run has none."""
    if not all((folder / "config.yaml").exists() for folder in folders):
        return ""
    try:
        configs = [dict(leaves(yaml.safe_load((folder / "config.yaml").read_bytes()))) for folder in folders]
    except (OSError, yaml.YAMLError, RecursionError) as error:
        return f"differs: unknown, a config.yaml cannot be read ({error!r:.200})"
    rows = {key: [settings.get(key, "null") for settings in configs] for names in configs for key in names}
    differ = [f"{key} {' | '.join(values):.200}" for key, values in rows.items() if len({*values}) > 1]
    more = [f"{len(differ) - MAX_KEYS} more"] * (len(differ) > MAX_KEYS)
    return f"differs: {', '.join(differ[:MAX_KEYS] + more)}" if differ else ""


def leaves(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """(full key, value as JSON) of a config."""
    items = value.items() if isinstance(value, dict) else [*enumerate(value)] if isinstance(value, list) else ()
    for key, below in items:
        yield from leaves(below, f"{name}{key}.")
    if not items:
        yield name.rstrip("."), value if isinstance(value, str) else json.dumps(value, default=str)


def rounded(text: str) -> float | str:
    """A number of JSON with five digits. NaN and infinities, which the page's JSON must not have, stay words."""
    value = float(text)
    return float(f"{value:.5g}") if math.isfinite(value) else text


DECODER = json.JSONDecoder(parse_float=rounded, parse_constant=rounded)


def is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 2**53


def as_record(line: bytes, step: int | None) -> dict | None:
    """The object of a line, if it has a step or is given one."""
    try:
        record = {"step": step} | DECODER.decode(line.decode())
        return record if is_number(record["step"]) else None
    except (ValueError, TypeError, RecursionError):
        return None


def read_lines(file: Path, notes: list[str], step: int | None = None) -> Iterator[tuple[int, dict]]:
    """(offset, object) of each line that a run wrote; of the others a note."""
    offset = 0
    bad = []
    try:
        with open_file(file) as lines:
            for number, line in enumerate(lines, 1):
                if record := as_record(line, step):
                    yield offset, record
                else:
                    bad.append(str(number) if line.endswith(b"\n") else "the last, half written")
                offset += len(line)
    except ConfigError as error:
        notes.append(str(error))
    if bad:
        notes.append(f"{file.name}: {len(bad)} lines are no records, and left out: {', '.join(evenly(bad, 5))}")


def evenly(items: Sequence, limit: int) -> Sequence:
    return items if len(items) <= limit else [items[i] for i in np.linspace(0, len(items) - 1, limit).astype(int)]


def read_metrics(file: Path, notes: list[str]) -> tuple[list[int], dict[str, list], dict[str, list[int]]]:
    """(steps to draw; metric -> its value at each of them, None where it has none; health rule -> where it held, of all
    steps)."""
    of_step: dict[int, dict] = defaultdict(dict)
    for _, record in read_lines(file, notes):
        of_step[record.pop("step")] |= record
    validated = [step for step, values in of_step.items() if any(key.startswith("validation/") for key in values)]
    steps = sorted({*evenly(sorted(of_step), MAX_STEPS), *validated})
    if len(steps) < len(of_step):
        notes.append(f"curves: {len(steps):,} of {len(of_step):,} steps, evenly, and all validations")
    keys = sorted({key for step in steps for key in of_step[step]})
    series = {key: [of_step[step].get(key) for step in steps] for key in keys}
    if odd := [key for key in keys if any(type(values.get(key)) is str for values in of_step.values())]:
        notes.append(f"not finite at some steps (crosses in the curves): {', '.join(odd[:8])} ({len(odd)} metrics)")
    held = {key: [step for step in sorted(of_step) if of_step[step].get(key) == 1] for key in keys if "/health/" in key}
    return steps, series, {key: at for key, at in held.items() if at}


def read_samples(file: Path, notes: list[str], limit: int, step: int | None = None, gaps: dict | None = None) -> tuple:
    """(samples to show, how many of all they are). Reads the file twice: numbers of all, then texts of those. The rule
    is stated in the page: lower ranks are kept first, and within a rank chance decides, of a fixed seed. gaps: line,
    from 0 -> mean |logp gap| of its sample, where a dump has it."""
    offsets = array("q")
    kept: dict[tuple, tuple[float, int]] = {}  # (rank, what of) -> the largest value there, its line
    for line, (offset, record) in enumerate(read_lines(file, notes, step)):
        offsets.append(offset)
        at, kind, env, outcome = (str(record.get(name)) for name in ("step", "kind", "env_name", "outcome"))
        values = [record.get(name) for name in ("reward", "num_tokens", "advantage")] + [(gaps or {}).get(line)]
        signed = [(i, sign * value) for i, value in enumerate(values) if is_number(value) for sign in (1, -1)]
        ranked = [((0, kind, env, outcome), 0), ((2, at, kind), 0), ((3, at, kind, outcome), 0)]
        ranked += [
            ((rank, *key, i, value > 0), value) for rank, key in ((1, (kind,)), (4, (at,))) for i, value in signed
        ]
        for key, value in [*ranked, ((5, at, kind, env, outcome), 0)]:
            if key not in kept or value > kept[key][0]:
                kept[key] = (value, line)
    candidates = [(key[0], line) for key, (_, line) in kept.items()] + [(6, line) for line in range(len(offsets))]
    random.Random(0).shuffle(candidates)
    lines = [line for _, line in sorted(candidates, key=lambda candidate: candidate[0])]
    samples = []
    for line in sorted([*dict.fromkeys(lines)][:limit]):
        with open_file(file) as stream:
            stream.seek(offsets[line])
            if record := as_record(stream.readline(), step):  # none: a resumed run has written it anew meanwhile
                samples.append(record | {"line": line})
    return samples, f"{len(samples):,} of {len(offsets):,} samples"


def read_dump(folder: Path, notes: list[str], limit: int) -> list[dict]:
    """Samples of a dumped step with `tokens`: of each its text, trainer's logp - sampler's, entropy."""
    numbers_of = {}
    try:
        step = int(folder.name.removeprefix("step_"))
        for file in sorted(folder.glob("rank_*.safetensors")):
            arrays = load_file(file)
            numbers_T2 = np.stack([arrays["logp_T"] - arrays["sampler_logp_T"], arrays["entropy_T"]], axis=1)
            parts = np.split(numbers_T2.astype(float), np.cumsum(arrays["num_tokens_S"]))[:-1]
            numbers_of |= dict(zip(arrays["sample_S"].tolist(), parts, strict=True))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        notes.append(f"{folder}: cannot be read ({error!r:.200})")
        return []
    gaps = {line: float(np.nansum(np.abs(part[:, 0]))) / max(len(part), 1) for line, part in numbers_of.items()}
    samples, _ = read_samples(folder / "samples.jsonl", notes, limit, step, gaps)
    for sample in samples:
        texts = [str(text) for text in sample.pop("tokens", None) or ()]
        sample |= {"kind": "train, dumped", "prompt": sample.get("prompt_text"), "reply": "".join(texts)}
        sample["num_tokens"] = len(sample.get("prompt_ids", ())) + len(texts)
        if len(texts) == len(numbers_of.get(sample["line"], ())):
            rows = numbers_of[sample["line"]][:MAX_TOKENS].tolist()
            numbers = [[float(f"{x:.3g}") if math.isfinite(x) else None for x in row] for row in rows]
            sample["tokens"] = [[text, *row] for text, row in zip(texts, numbers, strict=False)]
    return samples


def as_page(runs: list[dict], live_seconds: float, differs: str = "") -> str:
    """The file. The longest texts are cut in their middle until all have room."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    lengths = [len(str(sample.get(name))) for run in runs for sample in run["samples"] for name in ("prompt", "reply")]
    page = ""
    for limit in (100_000, 30_000, 10_000, 3_000, 1_000, 300):
        if sum(min(length, limit) for length in lengths) <= MAX_TEXT and not 0 < len(page) <= MAX_PAGE:
            shown = [run | {"samples": [for_page(sample, limit) for sample in run["samples"]]} for run in runs]
            data = {"runs": shown, "differs": differs, "charts": CHARTS, "phase": PHASE, "live": live_seconds}
            data["time"] = time.ctime()
            packed = base64.b64encode(gzip.compress(json.dumps(data, allow_nan=False).encode(), 6)).decode()
            page = template.replace("SCRIPT_HASH", digest).replace("DATA", packed)
    return page


def for_page(sample: dict, limit: int) -> dict:
    record = {name: value if is_number(value) else str(value or "") for name in FIELDS for value in [sample.get(name)]}
    for name in ("prompt", "reply"):
        record[name] = text = str(record[name])
        if len(text) > limit:
            cut = f"\n[... {len(text) - limit:,} characters left out ...]\n"
            record[name] = text[: limit // 2] + cut + text[-limit // 2 :]
    return record | {"tokens": sample.get("tokens", [])[:limit]}


def as_text(runs: list[dict], width: int, differs: str = "") -> str:
    lines = textwrap.wrap(differs, width)
    bar = max(width - 64, 8)
    for run in runs:
        series = {key: x for key, values in run["series"].items() if (x := [*filter(is_number, values)])}
        lines += [f"{run['name']}: {run['ending']}", *run["notes"]]
        lines += [f"{key} held at {len(steps)} steps" for key, steps in run["held"].items()]
        validated = [key for key in series if key.startswith("validation/") and key.endswith("/accuracy")]
        for key in [key for chart in CHARTS for key in chart.split("+") if key in series] + validated:
            first, last = series[key][0], series[key][-1]
            lines.append(f"{key:<36} {first:>10.4g} -> {last:<10.4g} {sparkline(evenly(series[key], bar))}")
        phases = {key: statistics.median(series[key]) for key in series if re.fullmatch(PHASE, key)}
        for key, seconds in phases.items():
            share = seconds / (sum(phases.values()) or 1)
            lines.append(f"{key:<36} {seconds:>9.3f}s    {share:<10.1%} {'█' * round(bar * share)}")
        lines.append(run["kept"])
        for sample in evenly(run["samples"], 8):
            facts = "step {step} {kind}, {outcome}, reward {reward}".format_map(for_page(sample, 1))
            lines.append(f"{facts}: {sample.get('prompt')!s:.99} -> {sample.get('reply')!s:.99}")
    return "\n".join("".join(c if c.isprintable() else "?" for c in line)[:width] for line in lines)


def sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (value - low) / (high - low or 1))] for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.report", description="The report of runs: docs/report.md")
    parser.add_argument("folders", nargs="+", type=Path, metavar="logs/exp_001")
    parser.add_argument("--text", action="store_true", help="print it instead of writing report.html")
    parser.add_argument("--live", action="store_true", help="anew every few seconds until each run has ended")
    args = parser.parse_args()
    if absent := [str(folder) for folder in args.folders if not folder.is_dir()]:
        parser.error(f"no such run folder: {', '.join(absent)}")
    names = [folder.name for folder in args.folders]
    if len({*names, ""}) <= len(names):
        names = [str(folder) for folder in args.folders]
    live = True
    while live:
        start = time.monotonic()
        live = args.live and not all((folder / "exit.json").exists() for folder in args.folders)
        differs = differences(args.folders)
        runs = [read_run(*each, MAX_SAMPLES // len(names)) for each in zip(args.folders, names, strict=True)]
        pause = max(LIVE_SECONDS, 4 * (time.monotonic() - start)) if live else 0
        if args.text:
            sys.stdout.reconfigure(errors="replace")  # of a terminal that has no blocks
            print(as_text(runs, shutil.get_terminal_size().columns, differs), flush=True)
        else:
            file = args.folders[0] / "report.html"
            new = file.with_suffix(".tmp")
            new.write_text(as_page(runs, pause, differs), encoding="utf-8")
            new.replace(file)  # a browser never reads half of it
            print(f"{file}: {file.stat().st_size / 1e6:.1f} MB", flush=True)
        try:
            time.sleep(pause)
        except KeyboardInterrupt:
            args.live = False  # once more: a last page that does not reload itself
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        sys.exit(f"error: {describe_os_error(error)}; where nothing can be written, --text prints the report")
