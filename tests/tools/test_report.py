"""The report: the page against the files of the run, which samples are kept, hostile text, --live."""

import base64
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_runs import ATTACKS, branching_rows, call_of, make_hostile, make_run
from safetensors.numpy import load_file, save_file

from tools import report, report_samples

PURE = ("ticks", "isShare", "isMisleading", "median", "mixedGroups", "inOrder")  # of the page's script: draw nothing
ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """A report as a browser's parser sees it: tags, attributes, and the data that its script unpacks."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.inside = [], [], [], False
        self.feed(html)
        packed, self.script = self.scripts
        self.data = json.loads(gzip.decompress(base64.b64decode(packed, validate=True)), parse_constant=pytest.fail)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = tag == "script"

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts.append(data)


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(folder, metrics=(), samples=(), exit_code=0):
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("metrics", metrics), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if exit_code is not None:
        (folder / "exit.json").write_text(json.dumps({"code": exit_code, "reason": "trained", "rank": 0}))


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    return report.main()


def page_of(monkeypatch, *folders):
    assert call(monkeypatch, *folders) == 0
    return Page((folders[0] / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "exp_001"
    make_run(folder, num_steps=20, num_envs=3, num_samples=24, num_dumps=2)
    return folder


def test_each_part_of_a_reward_has_a_curve_and_stands_at_the_sample(tmp_path, monkeypatch):
    """TRL#5352: of the environments that name parts; the deviations and shares are found by the search."""
    prefix = "train/reward_part_by_env/my.module:Class"
    numbers = {f"{prefix}/{part}/{key}": 0.5 for part in ("form", "right") for key in ("mean", "std", "nonzero")}
    write(tmp_path, [{"step": 1, "train/reward": 1.0, **numbers}])
    rewards = [{"right": 1.0, "form": 0.12345678}, {"</script>": math.nan}, {"a": {"b": [1]}}, [1], "x", {}]
    lines = [json.dumps({"step": 1, "rewards": parts}) for parts in rewards]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    data = page_of(monkeypatch, tmp_path).data
    shown = [sample["rewards"] for sample in data["runs"][0]["samples"]]
    assert shown == ["right 1.0, form 0.12346", "</script> NaN", "a {'b': [1]}", "", "", ""]
    assert data["charts"][-2:] == [f"{prefix}/form/mean", f"{prefix}/right/mean"]
    assert data["charts"][:-2] == report.CHARTS and numbers.keys() <= data["runs"][0]["series"].keys()


def test_what_the_run_was_is_on_the_page(tmp_path, monkeypatch):
    """Model, command and commit; what docs/metrics.md says of each metric; what cannot be read is noted."""
    write(tmp_path, [{"step": 1, "train/reward": 1.0}])
    assert page_of(monkeypatch, tmp_path).data["runs"][0]["about"] == {}
    part = {"command": "grpo.py <b>", "world_size": 2, "commit": "a" * 40, "changes": "changes_1.patch"}
    (tmp_path / "provenance.json").write_text(json.dumps([part | {"command": "old"}, part]))
    (tmp_path / "config.yaml").write_text("policy: {model_name: Qwen/Qwen3-0.6B}")
    data = page_of(monkeypatch, tmp_path).data
    assert data["runs"][0]["about"] == {
        "model": "Qwen/Qwen3-0.6B",
        "command": "grpo.py <b>, 2 ranks",
        "commit": "a" * 10 + ", with changes_1.patch",
    }
    for name, said in (
        ("train/reward", "Rises; SmolLM2 0.19 to 0.98"),
        ("validation/greedy/accuracy", "mean_B(outcome"),
        ("train/reward_by_env/math", "of an environment"),
        ("timing/train/generation", "sampling and grading"),
    ):
        (sentence, *_) = [text for pattern, text in data["meanings"] if re.fullmatch(pattern, name)]
        assert said in sentence and not re.search(r"`|\]\(", sentence), sentence
    (tmp_path / "provenance.json").write_text("[]")
    bomb = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    merges = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40))]
    for text in ("policy: [", "[" * 100_000, "\n".join(bomb), "\n".join(merges), "policy: 3", "a: &a {b: *a}"):
        (tmp_path / "config.yaml").write_text(text)
        (shown,) = page_of(monkeypatch, tmp_path).data["runs"]
        assert shown["about"] == {} and "model, command, commit: cannot be read" in shown["notes"][0]


@pytest.fixture
def in_node(tmp_path):
    """Values of expressions that call the script's own functions."""
    if not shutil.which("node"):
        pytest.skip("needs node")
    script = report.page_template()
    pieces = [script[script.index(f"function {name}(") :].split("\n}\n")[0] + "\n}" for name in PURE]

    def values_of(expressions, setup=""):
        lines = ["const isNumber = Number.isFinite;", *pieces, setup, f"console.log(JSON.stringify({expressions}))"]
        (tmp_path / "a.js").write_text("\n".join(lines))
        return json.loads(subprocess.check_output(["node", tmp_path / "a.js"]))

    return values_of


def test_the_median_of_a_run_s_speed(in_node):
    lists = [[3], [9, 1574, 10], [4000, 1, 2, 3], [2922.5, 1574, 1711, 3000]]
    assert in_node(f"{lists}.map(median)") == [np.median(values) for values in lists]


def test_groups_whose_rewards_differ_are_first(in_node):
    """A solved run: its newest steps are all right. Other orders stay, in a step as in the file."""
    groups = {"old": (1, [1, 0]), "all_wrong": (2, [0, 0]), "mixed": (3, [0.5, 1, "NaN"]), "solved": (4, [1, 1])}
    groups |= {"alone": (5, [0]), "unscored": (6, [None, 1])}
    samples = [
        {"group": group, "step": step, "reward": reward, "name": f"{group} {i}"}
        for group, (step, rewards) in groups.items()
        for i, reward in enumerate(rewards)
    ]
    setup = f"const samples = {json.dumps(samples)}, mixed = mixedGroups(samples); let chosen = '';"
    setup += "for (const sample of samples) sample.mixed = mixed.has(sample.group); const get = () => chosen;"
    setup += "const order = name => { chosen = name; return inOrder([...samples]).map(sample => sample.name) };"
    mixed, newest, oldest, best = in_node("['', 'step', 'oldest', 'reward'].map(order)", setup)
    names = [sample["name"] for sample in samples]
    assert mixed[:5] == ["mixed 0", "mixed 1", "mixed 2", "old 0", "old 1"]
    newest_first = [name for step in (6, 5, 4, 3, 2, 1) for name in names if groups[name.split()[0]][0] == step]
    assert mixed[5:] == [name for name in newest_first if name not in mixed[:5]]
    assert (newest, oldest) == (newest_first, names)
    assert best[:5] == ["unscored 1", "solved 0", "solved 1", "mixed 1", "old 0"]


def test_round_ticks_and_what_accuracy_says(in_node):
    """Ticks are 1, 2 or 5 times a power of ten; of partial credit no accuracy."""
    runs = {"half": [0.43, 0.97], "whole": [0.25, 0.25]}
    runs = {name: {"series": {"v/reward": [r], "v/accuracy": [a], "v/pass_at_2": [1]}} for name, (r, a) in runs.items()}
    calls = "[ticks(0.002, 0.996, 3), ticks(3.38, 3.93, 3), ticks(0, 0.498, 3), ticks(1, 61, 4, 1), ticks(1, 2, 4, 1), "
    keys = "['v/accuracy', 'v/pass_at_2', 'v/reward']"
    calls += f"['half', 'whole'].map(name => {keys}.map(key => !!isMisleading(runs[name], key)))]"
    *marks, misleading = in_node(calls, f"const runs = {json.dumps(runs)};")
    assert marks[:3] == [[0, 0.5, 1], [3.2, 3.4, 3.6, 3.8, 4], [0, 0.2, 0.4, 0.6]]
    assert marks[3:] == [[0, 20, 40, 60, 80], [1, 2]]
    assert misleading == [[True, True, False], [False, False, False]]


def test_the_page_has_every_number_and_every_sample(run, monkeypatch):
    (shown,) = page_of(monkeypatch, run).data["runs"]
    assert (shown["name"], shown["ending"], shown["notes"]) == ("exp_001", "exit code 0: trained to step 20", [])
    numbers = 0
    for record in lines_of(run / "metrics.jsonl"):
        row = shown["steps"].index(record.pop("step"))
        for key, value in record.items():
            assert shown["series"][key][row] == pytest.approx(value, rel=1e-4), key
            numbers += 1
    assert numbers == sum(value is not None for values in shown["series"].values() for value in values) > 2000
    logged = lines_of(run / "samples.jsonl")
    assert shown["kept"] == "480 of 480 samples, and of 2 of 2 dumped steps"
    for sample, record in zip(shown["samples"], logged, strict=True):  # those of a dump are among them
        assert sample["kind"] == ("train, dumped" if record["step"] in (10, 20) else "train")
        for name in record.keys() - {"kind", "tokens", "sampler_logps"}:
            assert sample[name] == (pytest.approx(record[name], rel=1e-4) if name == "advantage" else record[name])


def test_what_is_kept_of_many(tmp_path, monkeypatch):
    """Of each step and kind the first ones, the last, the worst and the best; where that is too much, of some
    steps."""
    monkeypatch.setattr(report_samples, "MIN_FIRST", 2)
    rewards = [0.5, 0.5, 0.0, 0.25, None, 1.0, 1.0, 0.75]
    samples = [
        dict(step=step, kind=kind, outcome="ok", reward=reward, reply=f"{step} {kind} {i}", row_id=i // 2, index=i % 2)
        for step in range(1, 11)
        for kind in ("train", "validation/greedy")
        for i, reward in enumerate(rewards)
    ]
    write(tmp_path, samples=samples)
    lines = partial(report_samples.read_lines, tmp_path / "samples.jsonl")
    kept, words = report.read_samples(lines, [], 119)
    assert words == "100 of 160 samples"
    of_first = [f"1 {kind} {i}" for kind in ("train", "validation/greedy") for i in (0, 1, 2, 5, 7)]
    assert [s["reply"] for s in kept[:10]] == of_first
    assert all(samples[sample["line"]]["reply"] == sample["reply"] for sample in kept)
    few, words = report.read_samples(lines, [], 12)
    assert words == "10 of 160 samples" and {few[0]["step"], few[-1]["step"]} == {1, 10}
    more, words = report.read_samples(lines, [], 159)
    assert words == "120 of 160 samples" and [s["line"] % 8 for s in more[:6]] == [0, 1, 2, 3, 5, 7]
    assert report.read_samples(lines, [], 160)[1] == "160 of 160 samples"
    others, words = report.read_samples(lines, [], 160, leave_out={0, 159})
    assert words == "158 of 160 samples" and [s["line"] for s in others] == list(range(1, 159))


@pytest.mark.slow
@pytest.mark.parametrize("num_logged", [24, 4, 0])
def test_tokens_of_a_dump(run, tmp_path, monkeypatch, num_logged):
    """A logged sample gets the numbers of its dump; the others of the dumped step stand beside it. Each once."""
    folder = tmp_path / "exp_001"
    shutil.copytree(run, folder)
    logged = [
        record for record in lines_of(folder / "samples.jsonl") if record["row_id"] * 8 + record["index"] < num_logged
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in logged))
    (shown,) = page_of(monkeypatch, folder).data["runs"]
    dumped = [sample for sample in shown["samples"] if sample["kind"] == "train, dumped"]
    assert {sample["step"] for sample in dumped} == {10, 20} and len(dumped) == 48
    assert len(shown["samples"]) == 48 + 18 * num_logged
    masked = 0
    for sample in dumped:
        line = sample["row_id"] * 8 + sample["index"]
        step = folder / "rollouts" / f"step_{sample['step']:06d}"
        record = lines_of(step / "samples.jsonl")[line]
        arrays = load_file(step / f"rank_{line % 2:03d}.safetensors")
        place = arrays["sample_S"].tolist().index(line)
        start = int(arrays["num_tokens_S"][:place].sum())
        assert sample["prompt"] == record["prompt_text"] and sample["reply"] == "".join(record["tokens"])
        tokens = sample["tokens"]
        assert tokens["lengths"] == [len(text) for text in record["tokens"]]
        for i, gap in enumerate(tokens["gap"]):
            if not arrays["mask_T"][start + i]:
                masked += 1
                assert gap is tokens["entropy"][i] is tokens["sampler"][i] is None
                continue
            logp, sampler_logp = arrays["trainer_logp_T"][start + i], arrays["logp_T"][start + i]
            assert gap == pytest.approx(logp - sampler_logp, rel=6e-3)
            assert tokens["sampler"][i] == pytest.approx(sampler_logp, rel=6e-3)
            assert tokens["entropy"][i] == pytest.approx(arrays["entropy_T"][start + i], rel=6e-3)
    assert masked > 10


def test_tokens_that_a_run_logged(tmp_path, monkeypatch):
    """A worked example: lengths as JavaScript counts them, an observation, turns with advantages of their own; and what
    does not fit together, which is left out."""
    good = {"step": 1, "kind": "train", "reply": "a\U0001f9eeb c", "tokens": ["a\U0001f9ee", "b", " c"]}
    good |= {"sampler_logps": [-0.12345, None, -2.5], "advantage": [0.5, -1.0], "turn_tokens": [1, 1]}
    odd = [{"reply": "other"}, {"tokens": ["a", 3]}, {"sampler_logps": [-1.0]}, {"sampler_logps": ["x", 1, 2]}]
    odd += [{"tokens": None}, {"turn_tokens": [3, 1]}, {"turn_tokens": [-1, 3]}, {"advantage": 0.25}]
    write(tmp_path, samples=[good, *(good | other for other in odd)])
    (shown,) = page_of(monkeypatch, tmp_path).data["runs"]
    first, *others = [sample["tokens"] for sample in shown["samples"]]
    assert first == {"lengths": [3, 1, 2], "sampler": [-0.123, None, -2.5], "advantage": [0.5, None, -1.0]}
    without_turns = {name: first[name] for name in ("lengths", "sampler")}
    assert others == [{}] * 5 + [without_turns] * 3
    assert shown["samples"][0]["advantage"] == "[0.5, -1.0]"


def test_numbers_have_three_digits():
    numbers = [0.0, 0.12345, -0.0001236, 1234.5, -98.76, math.nan, math.inf, 9.996, 1e-15]
    shown = [0.0, 0.123, -0.000124, 1234.0, -98.8, None, None, 10.0, 0.0]
    assert report.three_digits(np.array(numbers)) == shown


def test_tokens_end_where_their_text_is_cut():
    tokens = {"lengths": np.array([3, 3, 3, 3]), "sampler": np.array([-1.0, -2.0, -3.0, -4.0])}
    assert report.numbers_for_page(tokens, "x" * 12, 12)["lengths"] == [3, 3, 3, 3]
    assert report.numbers_for_page(tokens, "x" * 12, 11) == {"lengths": [3], "sampler": [-1.0]}
    assert report.numbers_for_page(tokens, "x" * 12, 6)["lengths"] == [3]  # ends where the cut begins


def test_tokens_of_some_steps_are_kept_where_not_all_have_room(monkeypatch):
    """Those of a dump first; of the others, those of whole steps."""
    monkeypatch.setattr(report, "MAX_TOKENS", 10)
    samples = [(0, {"step": i // 2, "tree": [], "tokens": {"lengths": np.ones(20)}}) for i in range(20)]
    assert report.keep_tokens(samples, 200) == 200
    assert report.keep_tokens(samples, 100) == 100
    left = [sample["step"] for _, sample in samples if sample["tokens"]]
    assert len(left) == 10 and {left.count(step) for step in left} == {2} and {0, 9} <= set(left)
    assert report.keep_tokens(samples, 0) == 0 and not any(sample["tokens"] for _, sample in samples)


@pytest.mark.slow
def test_a_damaged_dump_is_said(tmp_path):
    make_run(tmp_path / "a", num_steps=2, num_envs=1, num_samples=4, num_dumps=1)
    folder = tmp_path / "a/rollouts/step_000002"
    (folder / "rank_001.safetensors").write_bytes(b"no tensors")
    notes = []
    assert report.read_dump(folder, [], notes, 9) == [] and "step_000002: cannot be read" in notes[0]
    (folder / "rank_001.safetensors").unlink()  # a rank that has not written yet: its samples have no colours
    samples = report.read_dump(folder, [], [], 9)
    assert ["gap" in sample["tokens"] for sample in samples] == [True, False, True, False]


ODD = (None, True, 7, -2.5, 1e400, "text", [], [1, None, "a"], {"a": 1})


def test_fields_of_any_type_are_shown(tmp_path):
    """Of samples and of a dump: each field with a value of each type. Dumped tokens that are no list are none."""
    make_run(tmp_path / "a", num_steps=2, num_envs=1, num_samples=4, num_dumps=1)
    for file in (tmp_path / "a/samples.jsonl", tmp_path / "a/rollouts/step_000002/samples.jsonl"):
        sample, *others = lines_of(file)
        rows = [
            sample | {name: value}
            for name in (
                *sample,
                "num_env_tokens",
                "tokens",
                "sampler_logps",
                "turn_tokens",
                "turns",
                "rows",
                "rewards",
            )
            for value in ODD
            if name != "step"
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *others]))
    shown = report.read_run(tmp_path / "a", "a", 8000)
    dumped = [sample for sample in shown["samples"] if sample["kind"] == "train, dumped"]
    assert len(dumped) > 9 and all(type(sample["num_gen_tokens"]) in (int, float) for sample in dumped)
    page = Page(report.as_page([shown], 0)).data["runs"][0]
    assert any(sample["tokens"] for sample in page["samples"])
    assert all(type(length) is int for sample in page["samples"] for length in sample["tokens"].get("lengths", []))


def test_the_messages_of_an_agent_are_a_tree(tmp_path, monkeypatch):
    """A worked example: a plan, two goes from there, a judge apart."""
    write(tmp_path, samples=[{"step": 1, "kind": "train", "row_id": 4, "rows": branching_rows()}])
    ((sample,),) = [run["samples"] for run in page_of(monkeypatch, tmp_path).data["runs"]]
    tree = sample["tree"]
    said = [(node["parent"], node["role"], node.get("call", {}).get("number")) for node in tree]
    assert said[:4] == [(-1, "system", None), (0, "user", None), (1, "assistant", 0), (2, "user", None)]
    assert said[4:7] == [(3, "assistant", 1), (4, "tool", None), (5, "assistant", 3)]
    assert said[7:10] == [(3, "assistant", 2), (7, "user", None), (8, "assistant", 4)]
    assert said[10:] == [(-1, "user", None), (10, "assistant", 5)]
    plan, with_tool, judge = tree[2], tree[4], tree[11]
    assert plan["text"] == "I add the two numbers: 37 and 48."
    assert plan["tokens"]["lengths"] == [2, 4, 4, 4, 9, 3, 4, 3] and plan["tokens"]["sampler"][:3] == [0, -0.1, -0.2]
    assert with_tool["text"] == "I ask the calculator. <tool_call>"  # what was sampled, not what was made of it
    assert plan["call"] == {"number": 0, "is_trained": True, "reward": 0.625, "advantage": 0.125, "num_tokens": 8}
    assert judge["call"]["is_trained"] is False and "call" not in tree[1]


def test_replies_that_say_the_same_are_two_and_the_first_is_continued():
    """n=2 with equal texts; a sequence that tells of them, with space around them, stands before theirs."""
    question = {"role": "user", "content": "1+1"}
    reply = {"role": "assistant", "content": "2"}
    calls = [{"number": n, "messages": [question], "reply": reply} for n in (0, 1)]
    told = [
        question,
        {"role": "assistant", "content": " 2\n"},
        {"role": "user", "content": [{"text": "a"}, {"text": "b"}]},
    ]
    third = {"number": 2, "messages": told, "reply": reply | {"reasoning_content": "hm"}}
    tree = report_samples.tree_of([[third], [calls[1]], [calls[0]]])
    found = [(node["parent"], node.get("call", {}).get("number")) for node in tree]
    assert found == [(-1, None), (0, 0), (0, 1), (1, None), (3, 2)]
    assert tree[3]["text"] == "a\nb" and tree[4]["text"] == "hm\n\n2"


def test_calls_of_any_type_are_passed_over():
    odd = [*ODD, *([{name: value}] for name in ("messages", "ids", "reply", "number", "tokens") for value in ODD)]
    odd += [[{"messages": [message]}] for value in ODD for message in ({"role": value}, {"content": value})]
    odd += [[{"messages": [], "reply": {"tool_calls": value}}] for value in (*ODD, [{}], [{"function": 3}])]
    tree = report_samples.tree_of([*odd, *branching_rows()])
    assert [node["text"] for node in tree if node["role"] == "system"] == [
        branching_rows()[0][0]["messages"][0]["content"]
    ]
    for value in ODD:
        assert report_samples.tree_of(value) == []


@pytest.mark.slow
def test_numbers_of_a_dump_reach_the_calls_of_an_agent(tmp_path):
    """Two sequences, of which the second is a fork; the ids between two replies are not trained."""
    rows = [[call_of(0, [], "a b", 0.5), call_of(2, [], "c", 0.5)], [call_of(1, [], "d e f", -0.5)]]
    logged = {"step": 2, "kind": "train", "row_id": 7, "index": 1, "reply": "?", "rows": rows}
    record = {"row_id": 7, "index": 1, "tokens": list("abxc"), "turns": [0, 2], "turn_tokens": [2, 1]}
    fork = record | {"tokens": list("def"), "turns": [1], "turn_tokens": [3], "is_fork": True}
    folder = tmp_path / "step_000002"
    folder.mkdir()
    (folder / "samples.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(fork) + "\n")
    mask_T = np.array([1, 1, 0, 1, 1, 1, 1], bool)
    logp_T = np.where(mask_T, -np.arange(7), np.nan).astype(np.float32)
    arrays = {"mask_T": mask_T, "trainer_logp_T": logp_T, "logp_T": logp_T - 0.5, "entropy_T": logp_T + 10}
    arrays |= {"sample_S": np.array([0, 1]), "num_tokens_S": np.array([4, 3])}
    save_file(arrays, folder / "rank_000.safetensors")
    sample = report_samples.as_sample(logged)
    assert report.read_dump(folder, [sample], [], 9) == []
    assert sample["kind"] == "train, dumped"
    found = {node["call"]["number"]: node["tokens"]["entropy"].tolist() for node in sample["tree"]}
    assert found == {0: [10, 9], 2: [7], 1: [6, 5, 4]}
    assert sample["tree"][0]["tokens"]["gap"].tolist() == [0.5, 0.5]
    alone = report.read_dump(folder, [], [], 9)
    assert [other["kind"] for other in alone] == ["train, dumped", "train, dumped, fork"]
    assert np.isnan(alone[0]["tokens"]["entropy"][2]) and alone[1]["tokens"]["entropy"].tolist() == [6, 5, 4]


def test_hostile_text_is_data(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    make_hostile(folder)
    page = page_of(monkeypatch, folder)
    template = Page(report.page_template().replace("DATA", page.scripts[0]))
    assert page.tags == template.tags and page.script == template.script
    policy = dict(page.attributes)["content"]
    policies = [value for name, value in page.attributes if name == "content" and "default-src" in value]
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert len(policies) == 1 and f"script-src 'sha256-{digest}'" in policies[0] and policy
    assert "default-src 'none'" in policies[0] and "connect" not in policies[0]
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert not any(
        word in page.script for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "document.write")
    )
    (shown,) = page.data["runs"]
    replies = [sample["reply"] for sample in shown["samples"]]
    for attack in ATTACKS:
        if len(attack) < 10_000:
            assert attack in replies
    (longest,) = [reply for reply in replies if reply.startswith("long ")]
    assert len(longest) < 100_100 and "characters left out" in longest
    assert "samples.jsonl: 12 lines are not records, and left out: 3, 9, 18, 27, 34" in shown["notes"]
    assert shown["ending"] == f"exit code 1: {ATTACKS[0]}"
    assert shown["series"]["train/loss"][:2] == ["NaN", "-Infinity"]
    assert any("not finite at some steps" in note and "train/loss" in note for note in shown["notes"])


def test_what_cannot_be_read_is_said(tmp_path, monkeypatch):
    """A run that goes on: half a line of metrics, no samples yet; and broken lines of any kind."""
    broken = [b"[]", b"\xff\xfe", b'{"train/loss": 1}', b'{"step": true}', b"[" * 99999, b'{"step": 2, "tr']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([b'{"step": 1, "train/loss": 2.5}', *broken]))
    (shown,) = page_of(monkeypatch, tmp_path).data["runs"]
    assert shown["ending"] == "no exit.json: still running, or killed"
    assert (shown["steps"], shown["series"]) == ([1], {"train/loss": [2.5]})
    lines, absent = shown["notes"]
    assert lines == "metrics.jsonl: 5 lines are not records, and left out: 2, 3, 5, 6, 7"
    assert absent.endswith("samples.jsonl: cannot be read (No such file or directory)")
    assert shown["kept"] == "0 of 0 samples"


def test_several_runs(tmp_path, run, monkeypatch):
    other = tmp_path / "exp_002"
    write(other, [{"step": 1, "train/reward": 0.5}], [dict(step=1, kind="train", prompt=7, reply="x")] * 9)
    monkeypatch.setattr(report, "MAX_SAMPLES", 100)
    data = page_of(monkeypatch, other, run).data
    assert [shown["name"] for shown in data["runs"]] == ["exp_002", "exp_001"]
    assert [shown["kept"].partition(",")[0] for shown in data["runs"]] == ["9 of 9 samples", "40 of 480 samples"]
    assert {sample["prompt"] for sample in data["runs"][0]["samples"]} == {"7"}
    same = tmp_path / "b" / "exp_002"
    write(same)
    assert [x["name"] for x in page_of(monkeypatch, other, same).data["runs"]] == [str(other), str(same)]


def test_pipes_in_place_of_files_are_said_and_passed_over(run, tmp_path, monkeypatch):
    """One that is opened to read never ends."""
    folder = tmp_path / "exp_001"
    shutil.copytree(run, folder)
    dump = next((folder / "rollouts").glob("step_*"))
    files = [folder / name for name in ("exit.json", "metrics.jsonl", "samples.jsonl", "config.yaml")]
    for file in [*files, dump / "rank_000.safetensors"]:
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    (shown,) = page_of(monkeypatch, folder).data["runs"]
    for file in [*files[:3], dump]:
        assert any(file.name in note and "a regular file" in note for note in shown["notes"]), (file, shown["notes"])


def test_a_folder_of_eval(tmp_path, monkeypatch):
    (tmp_path / "eval.json").write_text("{}")
    (shown,) = page_of(monkeypatch, tmp_path).data["runs"]
    assert shown["notes"][0] == "made by eval.py: its numbers are in eval.json"


def test_many_steps_and_long_texts_are_cut(tmp_path, monkeypatch):
    metrics = [{"step": i, "train/loss": 1.0} for i in range(1, 500)] + [{"step": 77, "validation/accuracy": 0.5}]
    sample = dict(step=1, kind="train", prompt="p" * 50)
    write(tmp_path, metrics, [sample | {"reply": f"{i}" + "r" * 20_000} for i in range(9)])
    monkeypatch.setattr(report, "MAX_STEPS", 10)
    monkeypatch.setattr(report, "MAX_TEXT", 40_000)
    (shown,) = page_of(monkeypatch, tmp_path).data["runs"]
    assert len(shown["steps"]) == 11 and {1, 77, 499} <= set(shown["steps"])
    assert shown["notes"] == ["curves: 11 of 499 steps, evenly spaced, and all validations"]
    for i, sample in enumerate(shown["samples"]):
        assert sample["prompt"] == "p" * 50
        assert sample["reply"] == f"{i}" + "r" * 1499 + "\n[... 17,001 characters left out ...]\n" + "r" * 1500


def test_what_held_or_was_not_finite_at_a_step_without_a_curve_is_shown(tmp_path, monkeypatch):
    """A rule that held at three of 500 steps, and a NaN: at steps which the curves of ten leave out."""
    metrics = [{"step": i, "train/loss": 1.0, "train/health/truncated": 0.0} for i in range(500)]
    for i in (201, 202, 333):
        metrics[i] |= {"train/loss": float("nan"), "train/health/truncated": 1.0}
    write(tmp_path, metrics)
    monkeypatch.setattr(report, "MAX_STEPS", 10)
    (shown,) = page_of(monkeypatch, tmp_path).data["runs"]
    assert not {201, 202, 333} & set(shown["steps"])
    assert shown["held"] == {"train/health/truncated": [201, 202, 333]}
    assert any(note.endswith("(crosses in the curves): train/loss (1 metrics)") for note in shown["notes"])


def test_the_page_stays_small_where_texts_do_not_compress(tmp_path, monkeypatch):
    def noise(i):
        return "".join(hashlib.sha512(b"%d %d" % (i, j)).hexdigest() for j in range(40))

    write(tmp_path, samples=[dict(step=1, kind="train", reply=noise(i)) for i in range(99)])
    for limit in (500_000, 100_000):
        monkeypatch.setattr(report, "MAX_PAGE", limit)
        page_of(monkeypatch, tmp_path)
        assert limit / 2 < (tmp_path / "report.html").stat().st_size <= limit


@pytest.mark.parametrize("stopped", [False, True])
def test_live(tmp_path, monkeypatch, stopped):
    """Written anew while the run goes on; the last page has the last step and does not reload itself."""
    write(tmp_path, [{"step": 1}], exit_code=None)
    pages = []

    def read_page():
        data = Page((tmp_path / "report.html").read_text(encoding="utf-8")).data
        pages.append((data["live"], data["runs"][0]["steps"]))

    def sleep(seconds):
        assert seconds == report.LIVE_SECONDS
        read_page()
        write(tmp_path, [{"step": i} for i in range(1, len(pages) + 2)], exit_code=0 if len(pages) == 3 else None)
        if stopped and len(pages) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert call(monkeypatch, tmp_path, "--live") == 0
    read_page()
    goes_on = [(report.LIVE_SECONDS, list(range(1, n + 1))) for n in (1, 2, 3)]
    last = [(0, [1, 2, 3])] if stopped else [(0, [1, 2, 3, 4])]
    assert pages == goes_on[: 2 if stopped else 3] + last
    assert [path.name for path in tmp_path.glob("report*")] == ["report.html"]
