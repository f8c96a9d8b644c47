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
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from config import ConfigError
from support.inputs.files import open_file, parse_json, read_bytes, read_records
from support.inputs.yaml_text import plain_yaml
from support.system.disk import describe_os_error, write_whole

T = TypeVar("T")
MAX_SAMPLES = 8000  # of all runs together
MAX_STEPS = 2000  # in the curves of each run
MAX_DUMPS = 60  # dumped steps of a run
MAX_DUMPED = 240  # their samples
MAX_TOKENS = 2000  # in colour, of such a sample
MAX_PARTS = 24  # of rewards, with a chart each
MAX_TEXT = 8_000_000  # characters of prompts and replies
MAX_PAGE = 9_500_000  # bytes of the file
LIVE_SECONDS = 5.0
METRICS_PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
PHASE = r"timing/train/(?!.*(total_step_time|_per_gpu)$).*"
FIELDS = """step kind env_name outcome finish_reason row_id index prompt reply expected reward rewards unshaped_reward
advantage num_gen_tokens weight_version line calls""".split()
CHARTS = """train/reward train/accuracy train/loss train/grad_norm train/entropy train/logp_gap_mean
train/mean_gen_tokens_per_sample train/truncation_rate train/ratio_clip_low_fraction+train/ratio_clip_high_fraction
train/outcome/wrong+train/outcome/parse_fail+train/outcome/timeout+train/outcome/error train/zero_variance_fraction
performance/tokens_per_sec""".split()  # what is looked at first; + joins curves in one chart


def read_run(folder: Path, name: str, max_samples: int) -> dict:
    """What the report shows of a run, as `read_metrics` and `read_samples` say."""
    notes: list[str] = []
    ending = "no exit.json: still running, or killed"
    if (folder / "exit.json").exists():
        for end in read_lines(folder / "exit.json", notes, step=0):
            ending = f"exit code {end.get('code')}: {end.get('reason')}"
    steps, series, held = read_metrics(folder / "metrics.jsonl", notes)
    if (folder / "eval.json").exists() and not steps:
        notes = ["made by eval.py: its numbers are in eval.json"]  # and not that there are no metrics
    samples, kept = read_samples(folder / "samples.jsonl", notes, max_samples)
    for sample in samples:
        sample.pop("tokens", None)  # those of a dump alone have numbers
    all_dumps = sorted((folder / "rollouts").glob("step_*[0-9]"))
    dumps = evenly(all_dumps, MAX_DUMPS)
    for dump in dumps:
        samples += read_dump(dump, notes, MAX_DUMPED // len(dumps))
    if dumps:
        kept += f", and of {len(dumps)} of {len(all_dumps)} dumped steps"
    return {
        "name": name,
        "ending": ending,
        "notes": notes,
        "steps": steps,
        "series": series,
        "held": held,
        "samples": samples,
        "kept": kept,
        "about": read_about(folder, notes),
    }


def read_about(folder: Path, notes: list[str]) -> dict[str, str]:
    """The model of a run, and the command and commit of its newest part."""
    about: dict[str, str] = {}
    try:
        if (folder / "config.yaml").exists():
            config = plain_yaml(folder / "config.yaml")
            about["model"] = str(config["policy"]["model_name"])
        provenance = folder / "provenance.json"
        if provenance.exists():
            newest = parse_json(read_bytes(provenance), provenance)[-1]
            about["command"] = f"{newest['command']}, {newest['world_size']} ranks"
            about["commit"] = str(newest["commit"])[:10]
            if newest["changes"]:
                about["commit"] += f", with {newest['changes']}"
    except (ConfigError, LookupError, TypeError) as error:
        notes.append(f"model, command, commit: cannot be read ({error!r:.200})")
    return about


def read_meanings() -> list[list[str]]:
    """[pattern of names, what docs/metrics.md says] of each metric, in the order of that page."""
    meanings = []
    for line in METRICS_PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        names = re.findall(r"`((?:train|validation|timing|performance)/[^`]+)`", cells[0])
        if not names or len(cells) != 4:
            continue
        _, formula, healthy, _ = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", cell) for cell in cells]
        text = formula
        if healthy:
            sentences = re.sub(r"\*([^*]+)\*", r"SmolLM2 \1", healthy.replace("**", ""))  # the page's italic ranges
            text = f"{formula}. {sentences[0].upper()}{sentences[1:]}"
        for name in names:
            pattern = re.sub(r"<\w+>", ".+", name.replace(".", r"\."))
            meanings.append([pattern, text])
    return meanings


def read_lines(file: Path, notes: list[str], step: int | None = None) -> Iterator[dict]:
    """The records that a run wrote, with finite numbers. `step` is the step of records that have none. What cannot be
    read is noted."""
    bad_lines: list[int] = []
    try:
        for _, record in read_records(file, bad_lines):
            conversation = conversation_of(record.pop("rows", None))
            parts = parts_text(record.pop("rewards", None))
            record = {name: for_json(value) for name, value in record.items()}
            if conversation:
                record["calls"] = conversation
            if parts:
                record["rewards"] = parts
            if step is not None:
                record.setdefault("step", step)
            if "step" in record:
                yield record
    except ConfigError as error:
        notes.append(str(error))
    if bad_lines:
        places = ", ".join(map(str, evenly(bad_lines, 5)))
        notes.append(f"{file.name}: {len(bad_lines)} lines are not records, and left out: {places}")


def parts_text(rewards: Any) -> str:
    """The parts of a sample's reward by name: "answer 0.5, format 0.1"."""
    if not isinstance(rewards, dict):
        return ""
    return ", ".join(f"{name} {for_json(value)}" for name, value in rewards.items())


def for_json(value: Any) -> Any:
    """Floats with five digits. NaN and infinities, which the JSON of the page must not have, become words."""
    if isinstance(value, list):
        return [for_json(entry) for entry in value]
    if isinstance(value, dict):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    if isinstance(value, float):
        return json.dumps(value)
    return value


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**53


def evenly(items: Sequence[T], limit: int) -> Sequence[T]:
    if len(items) <= limit:
        return items
    places = np.linspace(0, len(items) - 1, limit).astype(int)
    return [items[place] for place in places]


def read_metrics(file: Path, notes: list[str]) -> tuple[list[int], dict[str, list], dict[str, list[int]]]:
    """(steps to draw; metric -> its value at each of them, None where it has none; health rule -> where it held, of all
    steps)."""
    of_step: dict[int, dict] = defaultdict(dict)
    for record in read_lines(file, notes):
        of_step[record.pop("step")] |= record
    all_steps = sorted(of_step)
    validated = []
    for step in all_steps:
        if any(key.startswith("validation/") for key in of_step[step]):
            validated.append(step)
    steps = sorted({*evenly(all_steps, MAX_STEPS), *validated})
    if len(steps) < len(all_steps):
        notes.append(f"curves: {len(steps):,} of {len(all_steps):,} steps, evenly spaced, and all validations")
    keys = sorted({key for step in steps for key in of_step[step]})
    series = {}
    odd = []
    held = {}
    for key in keys:
        series[key] = [of_step[step].get(key) for step in steps]
        if any(isinstance(values.get(key), str) for values in of_step.values()):
            odd.append(key)
        if "/health/" in key:
            held[key] = [step for step in all_steps if of_step[step].get(key) == 1]
    if odd:
        notes.append(f"not finite at some steps (crosses in the curves): {', '.join(odd[:8])} ({len(odd)} metrics)")
    return steps, series, {key: steps_held for key, steps_held in held.items() if steps_held}


def read_samples(file: Path, notes: list[str], limit: int, step: int | None = None) -> tuple[list[dict], str]:
    """(samples to show, how many of all they are). Where not all have room: of each step and kind the first and the
    last sample and those of the lowest and the highest reward, of steps evenly spaced. Reads the file twice, to keep
    few texts in memory."""
    total = 0
    groups: dict[tuple[int, str], None] = {}  # (step, kind), in the file's order
    for record in read_lines(file, notes, step):
        total += 1
        groups[record["step"], str(record.get("kind"))] = None
    have_room = total <= limit
    chosen = list(groups)
    if not have_room:
        chosen = evenly(chosen, max(1, limit // 4))
    kept: dict[tuple[int, str], list[dict]] = {group: [] for group in chosen}
    for line, record in enumerate(read_lines(file, [], step)):
        group = record["step"], str(record.get("kind"))
        if group not in kept:
            continue
        record["line"] = line
        kept[group].append(record)
        if not have_room:
            kept[group] = extremes(kept[group])
    samples = list(chain.from_iterable(kept.values()))[:limit]
    return samples, f"{len(samples):,} of {total:,} samples"


def conversation_of(rows: Any) -> str:
    """What an agent asked in a rollout and what it got, call by call, as a text. Whatever is not as log.py writes it is
    left out."""
    lines = []
    for number, row in enumerate(entries_of(rows, list), 1):
        lines.append(f"--- sequence {number} of {len(rows)}")
        for call in entries_of(row, dict):
            lines += [message_text(message) for message in entries_of(call.get("messages"), dict)]
            ids = call.get("ids")
            num_ids = len(ids) if isinstance(ids, list) else 0
            trained = "trained" if call.get("is_trained") else "not trained"
            numbers = f"reward {call.get('reward')}, advantage {call.get('advantage')}"
            lines.append(f"--- call {call.get('number')}: {num_ids} ids, {trained}, {numbers}")
            lines.append(message_text(call.get("reply")))
    return "\n".join(lines)


def entries_of(value: Any, kind: type) -> list:
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, kind)]


def message_text(message: Any) -> str:
    if not isinstance(message, dict):
        return ""
    text = f"{message.get('role')}: {message.get('content') or ''}"
    if message.get("reasoning_content"):
        text += f"\n(thought: {message['reasoning_content']})"
    for call in entries_of(message.get("tool_calls"), dict):
        text += f"\n-> {json.dumps(call.get('function'), ensure_ascii=False)}"
    return text


def extremes(group: list[dict]) -> list[dict]:
    """The first and the last, and the first of those with the lowest and the highest reward; each once, in order."""
    rewards = [number_or_0(sample.get("reward")) for sample in group]
    places = {0, len(group) - 1, rewards.index(min(rewards)), rewards.index(max(rewards))}
    return [group[place] for place in sorted(places)]


def number_or_0(value: Any) -> float:
    if is_number(value):
        return value
    return 0


def read_dump(folder: Path, notes: list[str], limit: int) -> list[dict]:
    """Samples of a dumped step with `tokens`: of each its text, trainer's logp - sampler's, entropy."""
    numbers_of_line: dict[int, np.ndarray] = {}
    try:
        step = int(folder.name.removeprefix("step_"))
        for file in sorted(folder.glob("rank_*.safetensors")):
            with open_file(file):  # no pipe, which would never end
                arrays = load_file(file)
            numbers_T2 = np.stack([arrays["logp_T"] - arrays["sampler_logp_T"], arrays["entropy_T"]], axis=1)
            parts = np.split(numbers_T2.astype(float), np.cumsum(arrays["num_tokens_S"]))[:-1]
            numbers_of_line |= zip(arrays["sample_S"].tolist(), parts, strict=True)
    except (ConfigError, SafetensorError, OSError, KeyError, ValueError) as error:
        notes.append(f"{folder}: cannot be read ({error!r:.200})")
        return []
    samples, _ = read_samples(folder / "samples.jsonl", notes, limit, step)
    for sample in samples:
        tokens = sample.pop("tokens", None)
        texts = [str(token) for token in tokens] if isinstance(tokens, list) else []
        sample["kind"] = "train, dumped"
        sample["prompt"] = sample.get("prompt_text")
        sample["reply"] = "".join(texts)
        sample["num_gen_tokens"] = len(texts) - number_or_0(sample.get("num_env_tokens"))
        numbers = numbers_of_line.get(sample["line"])
        if numbers is not None and len(numbers) == len(texts):
            sample["tokens"] = coloured(texts[:MAX_TOKENS], numbers[:MAX_TOKENS])
    return samples


def coloured(texts: list[str], numbers_T2: np.ndarray) -> list[list]:
    """[text, gap, entropy] of each token, with three digits; None for a number that is not finite."""
    rows = []
    for text, numbers in zip(texts, numbers_T2.tolist(), strict=True):
        rows.append([text, *(float(f"{x:.3g}") if math.isfinite(x) else None for x in numbers)])
    return rows


def as_page(runs: list[dict], live_seconds: float) -> str:
    """The file. The longest texts are cut in their middle until all have room."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    lengths = []
    for run in runs:
        for sample in run["samples"]:
            lengths += [len(str(sample.get(name))) for name in ("prompt", "reply", "calls")]
    page = ""
    for limit in (100_000, 30_000, 10_000, 3_000, 1_000, 300):
        if sum(min(length, limit) for length in lengths) > MAX_TEXT:
            continue
        data = page_data(runs, limit, live_seconds)
        text = json.dumps(data, allow_nan=False).encode()
        packed = base64.b64encode(gzip.compress(text, 6)).decode()
        page = template.replace("SCRIPT_HASH", digest).replace("DATA", packed)
        if len(page) <= MAX_PAGE:
            break
    return page


def page_data(runs: list[dict], limit: int, live_seconds: float) -> dict:
    """What the script of the page draws."""
    shown = []
    for run in runs:
        samples = [for_page(sample, limit) for sample in run["samples"]]
        shown.append(run | {"samples": samples})
    return {
        "runs": shown,
        "charts": CHARTS + part_charts(runs),
        "phase": PHASE,
        "live": live_seconds,
        "time": time.ctime(),
        "meanings": read_meanings(),
    }


def part_charts(runs: list[dict]) -> list[str]:
    """The means of the parts of rewards, which only some runs have: the first MAX_PARTS by name."""
    means = {key for run in runs for key in run["series"] if re.fullmatch(r"train/reward_part_by_env/[^+]*/mean", key)}
    return sorted(means)[:MAX_PARTS]


def for_page(sample: dict, limit: int) -> dict:
    record = {}
    for name in FIELDS:
        value = sample.get(name)
        record[name] = value if is_number(value) else str(value or "")
    for name in ("prompt", "reply", "calls"):
        record[name] = cut_in_the_middle(str(record[name]), limit)
    record["tokens"] = sample.get("tokens", [])[:limit]
    return record


def cut_in_the_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    cut = f"\n[... {len(text) - limit:,} characters left out ...]\n"
    return text[: limit // 2] + cut + text[-limit // 2 :]


def main() -> int:
    parser = argparse.ArgumentParser(prog=".venv/bin/python -m tools.report", description="An HTML report of runs")
    parser.add_argument("folders", nargs="+", type=Path, metavar="logs/exp_001")
    parser.add_argument("--live", action="store_true", help="redraw every few seconds until all runs have ended")
    args = parser.parse_args()
    absent = [str(folder) for folder in args.folders if not folder.is_dir()]
    if absent:
        parser.error(f"no such run folder: {', '.join(absent)}")
    names = [folder.name for folder in args.folders]
    are_names_clear = "" not in names and len(set(names)) == len(names)
    if not are_names_clear:
        names = [str(folder) for folder in args.folders]
    live = True
    while live:
        have_all_ended = all((folder / "exit.json").exists() for folder in args.folders)
        live = args.live and not have_all_ended
        start = time.monotonic()
        runs = []
        for folder, name in zip(args.folders, names, strict=True):
            runs.append(read_run(folder, name, MAX_SAMPLES // len(names)))
        pause = 0
        if live:
            pause = max(LIVE_SECONDS, 4 * (time.monotonic() - start))
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
