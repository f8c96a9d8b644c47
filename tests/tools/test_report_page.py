"""The report in a browser: colours, groups, trees, filters, keys, hostile text, three forms, and how fast it opens."""

import json
import math
import shutil
from pathlib import Path

import browser as browsers
import pytest
from report_runs import ATTACKS, branching_rows, make_hostile, make_run

from tools import report

pytestmark = [pytest.mark.long, pytest.mark.skipif(not browsers.IS_THERE, reason=browsers.WHY_NOT)]
FORMS = {"light": (1280, 900, "light"), "dark": (1280, 900, "dark"), "phone": (390, 844, "light", True)}
DOWN, UP, RIGHT, ESCAPE, ENTER = "\ue015", "\ue013", "\ue014", "\ue00c", "\ue007"
# What is wider than the page, beyond boxes that scroll; and text whose contrast with what is behind it is below 4.5.
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = """
const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const rgba = colour => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = node => {
  if (!node) return [255, 255, 255];
  const [r, g, b, a] = rgba(getComputedStyle(node).backgroundColor), below = a < 255 ? behind(node.parentElement) : [];
  return a === 255 ? [r, g, b] : [r, g, b].map((v, i) => v * a / 255 + below[i] * (1 - a / 255));
};
const low = [];
const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || node.closest('svg, option') || !node.checkVisibility()) continue;
  const [ink, paper] = [rgba(getComputedStyle(node).color), behind(node)].map(luminance).sort((a, b) => b - a);
  const ratio = (ink + 0.05) / (paper + 0.05);
  if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${node.className} ${walker.currentNode.data.slice(0, 30)}`);
}
return low.slice(0, 5);
"""


@pytest.fixture(scope="module")
def page():
    with browsers.browser() as session:
        yield session


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Twenty steps, of which two are dumped, and an agent's rollout."""
    folder = tmp_path_factory.mktemp("run") / "exp_001"
    make_run(folder, num_steps=20, num_envs=3, num_samples=24, num_dumps=2)
    agent = {
        "step": 20,
        "kind": "train",
        "prompt": "sheep",
        "reply": "85",
        "row_id": 99,
        "index": 0,
        "env_name": "agent",
    }
    agent |= {"reward": 0.5, "outcome": "ok", "advantage": 0.1, "rows": branching_rows()}
    with (folder / "samples.jsonl").open("a") as stream:
        stream.write(json.dumps(agent) + "\n")
    write_page(folder)
    return folder / "report.html"


def write_page(folder: Path) -> None:
    run = report.read_run(folder, folder.name, report.MAX_SAMPLES)
    (folder / "report.html").write_text(report.as_page([run], 0))


def key_of(page, condition: str) -> str:
    return page.run(f"return samples.find(s => {condition}).key")


@pytest.mark.parametrize("form", FORMS)
def test_nothing_overflows_and_all_text_can_be_read(page, file, form):
    page.show_as(*FORMS[form])
    page.open(file)
    dumped, agent = key_of(page, "s.kind === 'train, dumped'"), key_of(page, "s.tree.length")
    views = ["", f"open={agent}&colour=advantage", f"open={agent}&view=reply"]
    for colour in ("none", "advantage", "surprise", "entropy", "gap", "ratio"):
        views += [f"open={dumped}&view=group&colour={colour}", f"open={dumped}&colour={colour}&words=sum"]
    for view in views:
        page.open(file, view)
        assert page.run(OVERFLOW) <= 0, view
        assert page.run(CONTRAST) == [], view
    assert page.messages == []


def test_a_token_has_the_colour_of_its_number(page, file):
    """From the data to the pixel's style: the share of the full colour, and the numbers that are read out."""
    page.show_as(*FORMS["light"])
    page.open(file)
    key = key_of(page, "s.kind === 'train, dumped'")
    sample = page.run(f"return samples.find(s => s.key === '{key}')")
    tokens = sample["tokens"]
    for name, values in (("entropy", tokens["entropy"]), ("gap", tokens["gap"]), ("ratio", tokens["gap"])):
        page.open(file, f"open={key}&colour={name}")
        styles = page.run("return [...document.querySelectorAll('.tokens span')].map(s => s.getAttribute('style'))")
        scale = page.run(f"return scaleOf('{name}')")
        assert len(styles) == len(tokens["lengths"]) == len(values)
        for style, value in zip(styles, values, strict=True):
            if value is None:
                assert style == ""
                continue
            full = "--one" if name == "entropy" else "--below" if value < 0 else "--above"
            percent = math.floor(min(1, abs(value) / scale) * 100 + 0.5)
            assert style == f"background: color-mix(in oklab, var({full}) {percent}%, transparent)"
    spoken = page.run("document.querySelector('.tokens').focus(); return document.activeElement.className")
    assert spoken == "tokens"
    page.press(RIGHT, RIGHT)
    text = page.run("return $('numbers').textContent")
    assert text.startswith(f"token 2 of {len(values)} ") and "entropy" in text
    assert f"ratio {math.exp(tokens['gap'][1]):.6g}" in text
    whole = page.run("return document.querySelector('.tokens').textContent")
    assert whole == sample["reply"]


def test_a_group_stands_side_by_side(page, file):
    page.show_as(*FORMS["light"])
    page.open(file)
    key = key_of(page, "s.row_id === 1 && s.step === 10")
    page.open(file, f"open={key}&view=group")
    group = page.run("return samples.filter(s => s.row_id === 1 && s.step === 10)")
    shown = page.run("return [...document.querySelectorAll('.column pre')].map(pre => pre.textContent)")
    assert (
        shown == [sample["reply"] for sample in sorted(group, key=lambda sample: sample["index"])] and len(shown) == 8
    )
    tops = page.run("return [...document.querySelectorAll('.column')].map(c => c.getBoundingClientRect().top)")
    assert tops.count(tops[0]) >= 3
    page.run("document.querySelectorAll('.column-head')[3].click()")
    assert page.run("return samples.find(s => s.key === get('open')).index") == 3
    assert page.run("return document.querySelector('[name=view][aria-pressed=true]').value") == "reply"


def test_the_tree_of_an_agent(page, file):
    page.show_as(*FORMS["light"])
    page.open(file)
    page.open(file, f"open={key_of(page, 's.tree.length')}")
    assert page.run("return [...document.querySelectorAll('.map text')].map(t => t.textContent)") == [*"013245"]
    branches = page.run("return [...document.querySelectorAll('.branch > summary')].map(s => s.textContent)")
    assert branches == ["conversation 1 of 2", "branch 1 of 2", "branch 2 of 2", "conversation 2 of 2"]
    inside = page.run("return [...document.querySelectorAll('.branch .branch')].map(b => b.innerText)")
    assert "85 sheep" in inside[0] and "carry the one" in inside[1] and "carry" not in inside[0]
    page.run("document.querySelectorAll('.branch').forEach(b => b.open = false)")
    page.run("document.querySelectorAll('.map g')[8].focus()")
    page.press(ENTER)
    assert page.run("return document.activeElement.innerText").startswith("user\nDid you carry the one?")
    assert page.run("return document.activeElement.checkVisibility()")


def test_a_group_of_agents_has_their_trees(page, tmp_path):
    """Under what was asked first; a press on a tree opens its sample."""
    agent = {"step": 1, "kind": "train", "prompt": "judge", "reply": "85", "row_id": 9, "rows": branching_rows()}
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(agent | {"index": i}) + "\n" for i in range(3)))
    write_page(tmp_path)
    page.show_as(*FORMS["light"])
    page.open(tmp_path / "report.html")
    page.open(tmp_path / "report.html", f"open={key_of(page, 's.index === 0')}&view=group")
    assert page.run("return document.querySelector('.prompt').textContent").startswith("system: You add numbers.")
    assert page.run("return document.querySelectorAll('.column .map').length") == 3
    page.run("document.querySelectorAll('.column .map')[2].querySelector('g').onclick()")
    assert page.run("return samples.find(s => s.key === get('open')).index") == 2
    assert page.run("return !!document.getElementById('message-0')")


def test_filters_search_and_keys(page, file):
    page.show_as(*FORMS["light"])
    page.open(file)
    shown = "return shown.map(s => [s.outcome, s.step, s.reward, s.searched])"
    page.run("[...document.querySelectorAll('#outcomes button')].find(b => b.value === 'wrong').click()")
    wrong = page.run(shown)
    assert {row[0] for row in wrong} == {"wrong"} and 100 < len(wrong) < 480
    page.run("const i = document.getElementsByName('words')[0]; i.value = 'CARRY the'; i.oninput()")
    assert page.run(shown) == []
    assert "ok 1" in page.run("return document.querySelector('#outcomes').innerText")
    page.run("[...document.querySelectorAll('#outcomes button')].find(b => b.value === 'wrong').click()")
    assert len(page.run(shown)) == 1
    page.open(file, "step_min=4&step_max=5&reward_min=1&sort=oldest")
    assert {(row[1], row[2]) for row in page.run(shown)} == {(4, 1), (5, 1)}
    page.run("document.querySelector('.item').focus()")
    page.press(DOWN, DOWN, UP)
    assert (
        page.run("return get('open') === shown[0].key")
        and page.run("return document.activeElement.className") == "item"
    )
    page.press(DOWN, ENTER)
    assert page.run("return document.activeElement.id") == "reader"
    page.press("j", "j", "k")
    assert page.run("return get('open') === shown[2].key")
    page.press(ESCAPE)
    assert page.run("return document.getElementById('reader').hidden")


def test_it_opens_on_a_group_whose_rewards_differ_and_on_the_median_speed(page, tmp_path):
    """Not on the newest step, where all is solved; and not on the speeds of the first and the last step."""
    folder = tmp_path / "exp_001"
    folder.mkdir()
    speeds = [1574, 2900, 2922, 2950, 1711]
    metrics = [{"step": i, "performance/tokens_per_sec": speed} for i, speed in enumerate(speeds, 1)]
    samples = [
        {"step": step, "kind": "train", "row_id": row, "index": i, "reward": float(step > 2 or i > 2), "reply": "85"}
        for step in range(1, 6)
        for row in range(10)
        for i in range(8)
    ]
    for name, records in (("metrics", metrics), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_page(folder)
    page.show_as(*FORMS["light"])
    page.open(folder / "report.html")
    first = page.run("return [...document.querySelectorAll('.item')].slice(0, 8).map(item => item.innerText)")
    assert all("step 2 " in text for text in first)
    assert ["reward 0" in text for text in first] == [True] * 3 + [False] * 5
    assert "2900 median step" in page.run("return document.querySelector('.facts').innerText")
    page.run("const s = document.getElementsByName('sort')[0]; s.value = 'step'; s.oninput()")
    assert "step 5 " in page.run("return document.querySelector('.item').innerText")


def test_hostile_text_stays_text(page, tmp_path):
    """No element, no script, no request, no message; what a text hides is shown as its code points."""
    folder = tmp_path / "a"
    make_hostile(folder)
    calls = [
        {"number": attack, "messages": [{"role": attack, "content": attack}], "ids": [], "tokens": [attack]}
        for attack in ATTACKS
    ]
    for call, attack in zip(calls, ATTACKS, strict=True):
        call |= {"reply": {"role": attack, "content": attack}, "sampler_logps": [-1.0], "advantage": attack[:50]}
    hostile = {"step": 50, "kind": "train", "rows": [[call] for call in calls], "reply": "".join(ATTACKS[:6])}
    hostile |= {"tokens": list(ATTACKS[:6]), "sampler_logps": [-1.0] * 6, "row_id": ATTACKS[0], "message": ATTACKS[1]}
    lines = (folder / "samples.jsonl").read_text()
    (folder / "samples.jsonl").write_text(json.dumps(hostile) + "\n" + lines)
    write_page(folder)
    page.show_as(*FORMS["light"])
    page.open(folder / "report.html")
    for number in range(page.run("return samples.length")):
        for view in ("reply", "messages", "group"):
            page.run("set('view', arguments[1]); open(samples[arguments[0]])", number, view)
            text = page.run("return document.body.innerText + document.body.textContent")
            assert len(text) > 50 and not any(bad in text for bad in "\u202e\u2066\u2028\0\x1b"), (number, view)
            assert page.run("return document.querySelectorAll('img, iframe, a, script:not(#data)').length") == 1
    assert page.run("return document.title") == "GRPO report"
    page.run("set('view', 'reply'); open(samples.find(s => s.step === 50))")
    text = page.run("return document.querySelector('.tokens').innerText")
    for said in ("</script><img src=x", "⟨U+202E⟩gnp.exe⟨U+202C⟩", "⟨U+0000⟩", "⟨U+2028⟩", "⟨U+D800⟩"):
        assert said in text
    assert page.messages == []


def test_two_hundred_thousand_samples_open_at_once(page, tmp_path):
    folder = tmp_path / "exp_001"
    make_run(folder, num_steps=1000, num_envs=8, num_samples=200, num_dumps=5)
    write_page(folder)
    file = folder / "report.html"
    assert file.stat().st_size < report.MAX_PAGE
    page.show_as(*FORMS["light"])
    page.open(file)
    drawn_ms = page.run("return +document.documentElement.dataset.drawn")
    search_ms = page.run(
        "const start = performance.now(); set('words', 'sum1'); drawSamples(); return performance.now() - start"
    )
    print(f"{file.stat().st_size / 1e6:.2f} MB, drawn after {drawn_ms} ms, searched in {search_ms:.0f} ms")
    assert drawn_ms < 5000 and search_ms < 1000
    shutil.rmtree(folder)
