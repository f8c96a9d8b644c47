"""The report of runs: `report.html`, one file that needs no network and no library. No torch.

    .venv/bin/python -m tools.report logs/exp_001 [logs/exp_002 ...] [--live]

docs/report.md: what it shows, which samples it keeps. What cannot be read is left out, and said. Text of samples may be
hostile: it is compressed data for the scripts of the page (report.html, .css, .js), which make text nodes of it, never
HTML. report_samples.py reads the samples.
"""

import argparse
import base64
import gzip
import hashlib
import json
import re
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np

from base.inputs.yaml_text import Document, read_yaml
from base.system.disk import describe_os_error, write_whole
from base.system.files import parse_json, read_bytes
from config import ConfigError
from tools.report_samples import (
    COLUMNS,
    DUMPED,
    FIELDS,
    FORK,
    Tokens,
    evenly,
    for_json,
    is_number,
    read_dump,
    read_lines,
    read_samples,
)

MAX_SAMPLES = 8000  # of all runs together
MAX_STEPS = 2000  # in the curves of each run
MAX_DUMPS = 30  # dumped steps of a run
MAX_DUMPED = 480  # their samples
MAX_TOKENS = 2000  # with numbers, of a reply
MAX_ALL_TOKENS = 500_000  # with numbers, of all runs together
MAX_PARTS = 24  # of rewards, with a chart each
MAX_TEXT = 8_000_000  # characters of prompts and replies
MAX_PAGE = 9_500_000  # bytes of the file
LIVE_SECONDS = 5.0
PAGE = Path(__file__).with_suffix(".html")
SCRIPTS = ("report_common", "report_charts", "report_tokens", "report_samples", "report")  # in this order
TEXTS = ("kind", "env_name", "outcome", "finish_reason", "prompt", "reply", "message")  # whatever a file has there
METRICS_PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
PHASE = r"timing/train/(?!.*(total_step_time|_per_gpu)$).*"
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
    samples, kept = read_samples(partial(read_lines, folder / "samples.jsonl"), notes, max_samples)
    all_dumps = sorted((folder / "rollouts").glob("step_*[0-9]"))
    dumps = evenly(all_dumps, MAX_DUMPS)
    for dump in dumps:
        samples += read_dump(dump, samples, notes, MAX_DUMPED // len(dumps))
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
            file = folder / "config.yaml"
            config = Document(read_yaml(file), str(file), lambda name: True).value
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


def read_metrics(file: Path, notes: list[str]) -> tuple[list[int], dict[str, list], dict[str, list[int]]]:
    """(steps to draw; metric -> its value at each of them, None where it has none; health rule -> where it held, of all
    steps)."""
    of_step: dict[int, dict] = defaultdict(dict)
    for record in read_lines(file, notes):
        of_step[record.pop("step")] |= {name: for_json(value) for name, value in record.items()}
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
            steps_held = [step for step in all_steps if of_step[step].get(key) == 1]
            if steps_held:
                held[key] = steps_held
    if odd:
        notes.append(f"not finite at some steps (crosses in the curves): {', '.join(odd[:8])} ({len(odd)} metrics)")
    return steps, series, held


def as_page(runs: list[dict], live_seconds: float) -> str:
    """The file. The longest texts are cut in their middle until all have room."""
    template = page_template()
    dumped = []  # with the number of their run, as others
    others = []
    for number, run in enumerate(runs):
        for sample in run["samples"]:
            if sample["kind"] in (DUMPED, FORK):
                dumped.append((number, sample))
            else:
                others.append((number, sample))
    num_kept = keep_tokens(dumped, MAX_ALL_TOKENS)
    keep_tokens(others, MAX_ALL_TOKENS - num_kept)
    lengths = [len(text) for _, sample in dumped + others for text in texts_of(sample)]
    page = ""
    for limit in (100_000, 30_000, 10_000, 3_000, 1_000, 300):
        num_characters = sum(min(length, limit) for length in lengths)
        if num_characters > MAX_TEXT:
            continue
        data = page_data(runs, limit, live_seconds)
        text = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
        packed = base64.b64encode(gzip.compress(text, 6)).decode()
        page = template.replace("DATA", packed)
        if len(page) <= MAX_PAGE:
            break
    return page


def page_template() -> str:
    """The page with everything but its data: report.html with the styles and scripts that it names, and the digest of
    the script, which alone may run."""
    html = PAGE.read_text(encoding="utf-8")
    styles = PAGE.with_suffix(".css").read_text(encoding="utf-8")
    script = "\n".join(PAGE.with_name(f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    html = html.replace("STYLES", f"\n{styles}").replace("SCRIPT_HERE", f"\n{script}")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    return html.replace("SCRIPT_HASH", digest)


def keep_tokens(samples: list[tuple[int, dict]], limit: int) -> int:
    """Takes the tokens from samples of some steps, evenly spaced, until about `limit` are left. samples: each with the
    number of its run. Returns how many are left."""
    sizes: dict[tuple, int] = defaultdict(int)  # (number of the run, step) -> tokens
    for number, sample in samples:
        for tokens in tokens_in(sample):
            sizes[number, sample["step"]] += min(len(tokens["lengths"]), MAX_TOKENS)
    total = sum(sizes.values())
    steps = list(sizes)
    if total > limit:
        steps = evenly(steps, int(len(steps) * max(limit, 0) / total))
    chosen = set(steps)
    for number, sample in samples:
        if (number, sample["step"]) not in chosen:
            for tokens in tokens_in(sample):
                tokens.clear()
    return sum(sizes[step] for step in steps)


def tokens_in(sample: dict) -> list[Tokens]:
    """Of the reply, or of an agent's replies; only where there are any."""
    found = [sample["tokens"], *(node["tokens"] for node in sample["tree"])]
    return [tokens for tokens in found if tokens]


def texts_of(sample: dict) -> list[str]:
    return [str(sample["prompt"]), str(sample["reply"]), *(node["text"] for node in sample["tree"])]


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
    """A sample with texts of at most `limit` characters, as JSON."""
    record = {}
    for name in (*FIELDS, "rewards", "line"):
        record[name] = sample[name]
        if name in TEXTS or not is_number(sample[name]):
            record[name] = str(sample[name] or "")
    for name in ("prompt", "reply"):
        record[name] = cut_in_the_middle(record[name], limit)
    record["tokens"] = numbers_for_page(sample["tokens"], str(sample["reply"]), limit)
    record["tree"] = []
    for node in sample["tree"]:
        text = cut_in_the_middle(node["text"], limit)
        tokens = numbers_for_page(node["tokens"], node["text"], limit)
        record["tree"].append(node | {"text": text, "tokens": tokens})
    return record


def numbers_for_page(tokens: Tokens, text: str, limit: int) -> dict[str, list]:
    """Lengths and numbers, with three digits, of the first tokens; of a text that is cut, those before the cut. None:
    not a number."""
    if "sampler" not in tokens:
        return {}
    num_tokens = min(len(tokens["lengths"]), MAX_TOKENS)
    if len(text) > limit:
        ends = np.cumsum(tokens["lengths"])
        num_tokens = min(num_tokens, int(np.searchsorted(ends, limit // 2, side="right")))
    found = {"lengths": tokens["lengths"][:num_tokens].tolist()}
    for name in COLUMNS:
        if name in tokens:
            found[name] = three_digits(tokens[name][:num_tokens].astype(float))
    return found


def three_digits(numbers_T: np.ndarray) -> list[float | None]:
    is_finite_T = np.isfinite(numbers_T)
    sizes_T = np.abs(np.where(is_finite_T, numbers_T, 0.0))
    digits_T = 2 - np.floor(np.log10(np.maximum(sizes_T, 1e-12)))
    scales_T = 10.0 ** np.maximum(digits_T, 0)
    rounded_T = np.round(np.where(is_finite_T, numbers_T, 0.0) * scales_T) / scales_T
    return [x if finite else None for x, finite in zip(rounded_T.tolist(), is_finite_T.tolist(), strict=True)]


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
    while True:
        have_all_ended = all((folder / "exit.json").exists() for folder in args.folders)
        is_live = args.live and not have_all_ended
        start = time.monotonic()
        runs = []
        for folder, name in zip(args.folders, names, strict=True):
            runs.append(read_run(folder, name, MAX_SAMPLES // len(names)))
        pause = 0
        if is_live:
            pause = max(LIVE_SECONDS, 4 * (time.monotonic() - start))
        file = args.folders[0] / "report.html"
        write_whole(file, as_page(runs, pause))  # a browser never reads half of it
        print(f"{file}: {file.stat().st_size / 1e3:,.0f} kB", flush=True)
        if not is_live:
            return 0
        try:
            time.sleep(pause)
        except KeyboardInterrupt:
            args.live = False  # once more: a last page that does not reload itself


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        sys.exit(f"error: {describe_os_error(error)}")
