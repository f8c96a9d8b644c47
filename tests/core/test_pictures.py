"""docs/images: the committed pictures are what bench/pictures.py draws now; whole SVG files that fetch nothing."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from small_run import ROOT

from bench import pictures
from check.memory_plan import GIB

DRAWN = pictures.files()
FOLDER = ROOT / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DRAWN)
def test_file_of(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text == DRAWN[name], "the numbers have changed: run `python bench/pictures.py`, and look at the pictures"
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.get("width") == str(pictures.WIDTH)
    references = re.findall(
        r'href|url\((?!#(?:line|accent)\))|@import|<script|<image|<style|https?://(?!www\.w3\.org/2000/svg")', text
    )
    assert references == []
    height = float(root.get("height"))
    for word in root.iter(f"{SVG}text"):
        assert (
            float(word.get("font-size")) >= 12 and 0 < float(word.get("x")) < 700 and 0 < float(word.get("y")) < height
        )
        assert word.get("fill") in {pair["dark" in name] for pair in pictures.COLORS.values()}


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_legible_on_every_fill(dark):
    """WCAG 2.2, 1.4.3: a contrast of 4.5 to 1."""

    def contrast(one, other):
        low, high = sorted(luminance(pictures.COLORS[name][dark]) for name in (one, other))
        return (high + 0.05) / (low + 0.05)

    fills = ("page", "empty", "blue", "teal", "green", "yellow", "orange", "red", "purple", "gray")
    on_page = {name: contrast(name, "page") for name in ("dim", "accent", "alarm")}
    on_fills = {name: min(contrast("text", name), contrast("dim", name)) for name in fills}
    assert {name: ratio for name, ratio in (on_page | on_fills).items() if ratio < 4.5} == {}


def test_the_memory_picture_leaves_nothing_out():
    """Its parts add up to the plan's phases, and each of them has a name."""
    plan = pictures.plan_1b()
    for phase, _ in pictures.PHASES:
        items = plan.phases[phase][1]
        assert items.keys() <= pictures.ITEMS.keys()
        assert f"{sum(items.values()) / GIB:.1f} of 80 GiB" in DRAWN["memory_light.svg"]
    assert {phase for phase, _ in pictures.PHASES} == plan.phases.keys()


def test_the_pack_is_that_of_the_walkthrough():
    pack, samples = pictures.recorded_pack()
    page = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    assert str(pack.cu_seqlens.tolist()) in page and str(pack.pos_R.tolist()[:23]) in page
    assert len(samples) == 4 and f"({len(pack.token_T)}, {len(pack.target_R)}, {len(pack.token_T)})" in page
