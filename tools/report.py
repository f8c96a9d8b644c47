"""The report of runs: `report.html`, one file that needs no network and no library. No torch.

    .venv/bin/python -m tools.report logs/exp_001 [logs/exp_002 ...] [--live]

docs/report.md: what it shows, which samples it keeps. What cannot be read is left out, and said. Text of samples may be
hostile: it is compressed data for the script of the page (report.html), which makes text nodes of it, never HTML.
"""

import argparse
import base64
import gzip
import hashlib
import json
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file

from config import ConfigError
from support.inputs.files import open_file, parse_json, read_bytes, read_records, read_text
from support.system.disk import describe_os_error, write_whole

MAX_SAMPLES, MAX_STEPS = 8000, 2000  # samples of all runs together; steps in the curves of each
MAX_DUMPS, MAX_DUMPED = 60, 240  # dumped steps of a run, and their samples
MAX_TOKENS = 2000  # in colour, of such a sample
MAX_PARTS = 24  # of rewards, with a chart each
MAX_TEXT, MAX_PAGE = 8_000_000, 9_500_000  # characters of prompts and replies; bytes of the file
LIVE_SECONDS = 5.0
METRICS_PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
PHASE = r"timing/train/(?!.*(total_step_time|_per_gpu)$).*"
FIELDS = """step kind env_name outcome finish_reason row_id index prompt reply expected reward unshaped_reward advantage
num_gen_tokens weight_version line""".split()
CHARTS = """train/reward train/accuracy train/loss train/grad_norm train/entropy train/logp_gap_mean
train/mean_gen_tokens_per_sample train/truncation_rate train/ratio_clip_low_fraction+train/ratio_clip_high_fraction
train/outcome/wrong+train/outcome/parse_fail+train/outcome/timeout+train/outcome/error train/zero_variance_fraction
performance/tokens_per_sec""".split()  # what is looked at first; + joins curves in one chart


def read_run(folder: Path, name: str, max_samples: int) -> dict:
    """What the report shows of a run, as `read_metrics` and `read_samples` say."""
    notes: list[str] = []
    ending = "no exit.json: still running, or killed"
    for end in read_lines(folder / "exit.json", notes, step=0) if (folder / "exit.json").exists() else ():
        ending = f"exit code {end.get('code')}: {end.get('reason')}"
    steps, series, held = read_metrics(folder / "metrics.jsonl", notes)
    if (folder / "eval.json").exists() and not steps:
        notes = ["made by eval.py: its numbers are in eval.json"]  # and not that there are no metrics
    samples, kept = read_samples(folder / "samples.jsonl", notes, max_samples)
    dumps = sorted((folder / "rollouts").glob("step_*[0-9]"))
    for dump in evenly(dumps, MAX_DUMPS):
        samples += read_dump(dump, notes, MAX_DUMPED // min(len(dumps), MAX_DUMPS))
    kept += f", and of {min(len(dumps), MAX_DUMPS)} of {len(dumps)} dumped steps" if dumps else ""
    run = {"name": name, "ending": ending, "notes": notes, "steps": steps, "series": series, "held": held}
    return run | {"samples": samples, "kept": kept, "about": read_about(folder, notes)}


def read_about(folder: Path, notes: list[str]) -> dict[str, str]:
    """The model of a run, and the command and commit of its newest part."""
    about: dict[str, str] = {}
    try:
        if (folder / "config.yaml").exists():
            about["model"] = str(yaml.safe_load(read_text(folder / "config.yaml"))["policy"]["model_name"])
        if (folder / "provenance.json").exists():
            part = parse_json(read_bytes(folder / "provenance.json"), folder / "provenance.json")[-1]
            about["command"] = f"{part['command']}, {part['world_size']} ranks"
            about["commit"] = str(part["commit"])[:10] + (f", with {part['changes']}" if part["changes"] else "")
    except (ConfigError, yaml.YAMLError, LookupError, TypeError) as error:
        notes.append(f"model, command, commit: cannot be read ({error!r:.200})")
    return about


def read_meanings() -> list[list[str]]:
    """[pattern of names, what docs/metrics.md says] of each metric, in the order of that page."""
    meanings = []
    for line in METRICS_PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        names = re.findall(r"`((?:train|validation|timing|performance)/[^`]+)`", cells[0])
        if names and len(cells) == 5:
            cells = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", cell) for cell in cells]
            words = [cells[1], cells[2] != "-" and f"Healthy: {cells[2]}", cells[3] != "-" and f"Else: {cells[3]}"]
            sentence = ". ".join(word for word in words if word)
            meanings += [[re.sub(r"<\w+>", ".+", re.sub(r"[.]", r"\.", name)), sentence] for name in names]
    return meanings


def read_lines(file: Path, notes: list[str], step: int | None = None) -> Iterator[dict]:
    """The records that a run wrote, with finite numbers. `step` is the step of records that have none. What cannot be
    read is noted."""
    bad_lines: list[int] = []
    try:
        for _, record in read_records(file, bad_lines):
            if "step" in record or step is not None:
                yield {"step": step} | {name: for_json(value) for name, value in record.items()}
    except ConfigError as error:
        notes.append(str(error))
    if bad_lines:
        places = ", ".join(map(str, evenly(bad_lines, 5)))
        notes.append(f"{file.name}: {len(bad_lines)} lines are not records, and left out: {places}")


def for_json(value: object) -> object:
    """Floats with five digits. NaN and infinities, which the JSON of the page must not have, become words."""
    if isinstance(value, list):
        return [for_json(each) for each in value]
    if isinstance(value, dict):
        return str(value)
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else json.dumps(value)
    return value


def is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 2**53


def evenly(items: Sequence, limit: int) -> Sequence:
    return items if len(items) <= limit else [items[i] for i in np.linspace(0, len(items) - 1, limit).astype(int)]


def read_metrics(file: Path, notes: list[str]) -> tuple[list[int], dict[str, list], dict[str, list[int]]]:
    """(steps to draw; metric -> its value at each of them, None where it has none; health rule -> where it held, of all
    steps)."""
    of_step: dict[int, dict] = defaultdict(dict)
    for record in read_lines(file, notes):
        of_step[record.pop("step")] |= record
    validated = [step for step, values in of_step.items() if any(key.startswith("validation/") for key in values)]
    steps = sorted({*evenly(sorted(of_step), MAX_STEPS), *validated})
    if len(steps) < len(of_step):
        notes.append(f"curves: {len(steps):,} of {len(of_step):,} steps, evenly spaced, and all validations")
    keys = sorted({key for step in steps for key in of_step[step]})
    series = {key: [of_step[step].get(key) for step in steps] for key in keys}
    if odd := [key for key in keys if any(type(values.get(key)) is str for values in of_step.values())]:
        notes.append(f"not finite at some steps (crosses in the curves): {', '.join(odd[:8])} ({len(odd)} metrics)")
    held = {key: [step for step in sorted(of_step) if of_step[step].get(key) == 1] for key in keys if "/health/" in key}
    return steps, series, {key: at for key, at in held.items() if at}


def read_samples(file: Path, notes: list[str], limit: int, step: int | None = None) -> tuple[list[dict], str]:
    """(samples to show, how many of all they are). Where not all have room: of each step and kind the first and the
    last sample and those of the lowest and the highest reward, of steps evenly spaced. Reads the file twice, to keep
    few texts in memory."""
    total, keys = 0, {}
    for record in read_lines(file, notes, step):
        total += 1
        keys[record["step"], str(record.get("kind"))] = None
    chosen = set(keys if total <= limit else evenly([*keys], max(1, limit // 4)))
    kept: dict[tuple, list[dict]] = defaultdict(list)
    for line, record in enumerate(read_lines(file, [], step)):
        key = record["step"], str(record.get("kind"))
        if key in chosen:
            group = kept[key]
            group.append(record | {"line": line})
            if total > limit:
                kept[key] = extremes(group)
    samples = [sample for group in kept.values() for sample in group][:limit]
    return samples, f"{len(samples):,} of {total:,} samples"


def extremes(group: list[dict]) -> list[dict]:
    """The first and the last, and the first of those with the lowest and the highest reward; each once, in order."""
    reward = [sample["reward"] if is_number(sample.get("reward")) else 0.0 for sample in group]
    places = {0, len(group) - 1, reward.index(min(reward)), reward.index(max(reward))}
    return [group[place] for place in sorted(places)]


def read_dump(folder: Path, notes: list[str], limit: int) -> list[dict]:
    """Samples of a dumped step with `tokens`: of each its text, trainer's logp - sampler's, entropy."""
    numbers_of = {}
    try:
        step = int(folder.name.removeprefix("step_"))
        for file in sorted(folder.glob("rank_*.safetensors")):
            with open_file(file):  # no pipe, which would never end
                arrays = load_file(file)
            numbers_T2 = np.stack([arrays["logp_T"] - arrays["sampler_logp_T"], arrays["entropy_T"]], axis=1)
            parts = np.split(numbers_T2.astype(float), np.cumsum(arrays["num_tokens_S"]))[:-1]
            numbers_of |= dict(zip(arrays["sample_S"].tolist(), parts, strict=True))
    except (ConfigError, SafetensorError, OSError, KeyError, ValueError) as error:
        notes.append(f"{folder}: cannot be read ({error!r:.200})")
        return []
    samples, _ = read_samples(folder / "samples.jsonl", notes, limit, step)
    for sample in samples:
        texts = [str(text) for text in sample.pop("tokens", None) or ()]
        sample |= {"kind": "train, dumped", "prompt": sample.get("prompt_text"), "reply": "".join(texts)}
        sample["num_gen_tokens"] = len(texts) - sample.get("num_env_tokens", 0)
        if len(texts) == len(numbers_of.get(sample["line"], ())):
            rows = numbers_of[sample["line"]][:MAX_TOKENS].tolist()
            numbers = [[float(f"{x:.3g}") if math.isfinite(x) else None for x in row] for row in rows]
            sample["tokens"] = [[text, *row] for text, row in zip(texts, numbers, strict=False)]
    return samples


def as_page(runs: list[dict], live_seconds: float) -> str:
    """The file. The longest texts are cut in their middle until all have room."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    lengths = [len(str(sample.get(name))) for run in runs for sample in run["samples"] for name in ("prompt", "reply")]
    page = ""
    for limit in (100_000, 30_000, 10_000, 3_000, 1_000, 300):
        if sum(min(length, limit) for length in lengths) <= MAX_TEXT and not 0 < len(page) <= MAX_PAGE:
            shown = [run | {"samples": [for_page(sample, limit) for sample in run["samples"]]} for run in runs]
            data = {"runs": shown, "charts": CHARTS + part_charts(runs), "phase": PHASE, "live": live_seconds}
            data |= {"time": time.ctime(), "meanings": read_meanings()}
            packed = base64.b64encode(gzip.compress(json.dumps(data, allow_nan=False).encode(), 6)).decode()
            page = template.replace("SCRIPT_HASH", digest).replace("DATA", packed)
    return page


def part_charts(runs: list[dict]) -> list[str]:
    """The means of the parts of rewards, which only some runs have: the first MAX_PARTS by name."""
    means = {key for run in runs for key in run["series"] if re.fullmatch(r"train/reward_part_by_env/[^+]*/mean", key)}
    return sorted(means)[:MAX_PARTS]


def for_page(sample: dict, limit: int) -> dict:
    record = {name: value if is_number(value) else str(value or "") for name in FIELDS for value in [sample.get(name)]}
    for name in ("prompt", "reply"):
        record[name] = text = str(record[name])
        if len(text) > limit:
            cut = f"\n[... {len(text) - limit:,} characters left out ...]\n"
            record[name] = text[: limit // 2] + cut + text[-limit // 2 :]
    return record | {"tokens": sample.get("tokens", [])[:limit]}


def main() -> int:
    parser = argparse.ArgumentParser(prog=".venv/bin/python -m tools.report", description="An HTML report of runs")
    parser.add_argument("folders", nargs="+", type=Path, metavar="logs/exp_001")
    parser.add_argument("--live", action="store_true", help="redraw every few seconds until all runs have ended")
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
        runs = [read_run(*each, MAX_SAMPLES // len(names)) for each in zip(args.folders, names, strict=True)]
        pause = max(LIVE_SECONDS, 4 * (time.monotonic() - start)) if live else 0
        file = args.folders[0] / "report.html"
        write_whole(file, as_page(runs, pause))  # a browser never reads half of it
        print(f"{file}: {file.stat().st_size / 1e3:,.0f} kB", flush=True)
        try:
            time.sleep(pause)
        except KeyboardInterrupt:
            args.live = False  # once more: a last page that does not reload itself
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        sys.exit(f"error: {describe_os_error(error)}")
