"""Draws the run: reward of each step, its mean over five steps, held-out accuracy; light and dark. Only the stdlib.

.venv/bin/python examples/smollm2/plot.py                                # the two pictures beside this file, anew
.venv/bin/python examples/smollm2/plot.py logs/exp_001/metrics.jsonl .   # of your run of configs/smollm2.yaml
.venv/bin/python examples/smollm2/plot.py logs/exp_001/metrics.jsonl . "A title" "A line below it"   # of another run
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
TITLE = "SmolLM2-135M-Instruct learns to convert units on two CPU cores"
SUBTITLE = "GRPO, 8 prompts x 8 samples a step; held out: 300 problems that training never sees"
WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 200, 64, 50  # margins; the right one holds the labels of the lines
MEAN_OF, LABEL_HEIGHT = 5, 20

Points = list[tuple[float, float]]


class Theme(NamedTuple):
    background: str
    text: str
    faint: str
    grid: str
    step: str
    mean: str
    greedy: str
    sampled: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#59636e", "#e4e8ec", "#a9c1e6", "#1f5fbf", "#c2410c", "#7a3fb5"),
    "dark": Theme("#0d1117", "#e6edf3", "#9da7b3", "#262d36", "#44699f", "#6ea8fe", "#ff9e57", "#c79bff"),
}


def read(file: Path, key: str) -> Points:
    """(step, value) of each record that has the metric."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [(record["step"], record[key]) for record in records if key in record]


def smoothed(points: Points) -> Points:
    """Each value's mean with the four before it."""
    values = [value for _, value in points]
    means = [fmean(values[max(0, i + 1 - MEAN_OF) : i + 1]) for i in range(len(values))]
    return [(step, mean) for (step, _), mean in zip(points, means, strict=True)]


def text(x: float, y: float, words: str, colour: str, size: int = 13, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}"{more}>{words}</text>'


def place(step: float, value: float, last: float) -> tuple[float, float]:
    """Pixels of a step and of a share between 0 and 1."""
    x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
    return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value, 1)


def line(points: Points, last: float, colour: str, width: float) -> str:
    corners = " ".join(f"{x},{y}" for x, y in (place(*point, last) for point in points))
    return (
        f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'
    )


def axes(last: int, theme: Theme, title: str, subtitle: str) -> list[str]:
    """Title, grid, numbers, and what the axes are."""
    parts = [text(LEFT - 46, 24, title, theme.text, 17, ' font-weight="600"')]
    parts.append(text(LEFT - 46, 43, subtitle, theme.faint))
    for fifth in range(6):
        parts.append(line([(0, fifth / 5), (last, fifth / 5)], last, theme.grid, 1))
        y = place(0, fifth / 5, last)[1] + 4
        parts.append(text(LEFT - 10, y, f"{fifth / 5:.1f}", theme.faint, more=' text-anchor="end"'))
    for tick in range(0, last + 1, max(1, last // 6)):
        x, y = place(tick, 0, last)
        parts.append(text(x, y + 18, str(tick), theme.faint, more=' text-anchor="middle"'))
    middle_x = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(
        text(middle_x, HEIGHT - 10, "step (one rollout, one update)", theme.text, more=' text-anchor="middle"')
    )
    x, y = 20, TOP + (HEIGHT - TOP - BOTTOM) / 2
    turned = f' text-anchor="middle" transform="rotate(-90 {x} {y})"'
    return [*parts, text(x, y, "share of right answers", theme.text, more=turned)]


def dots(points: Points, last: float, shape: str) -> list[str]:
    places = [place(*point, last) for point in points]
    return [f'<circle cx="{x}" cy="{y}" {shape}/>' for x, y in places]


def labels(entries: list[tuple[float, str, str]], last: float) -> list[str]:
    """(value, words, colour) of each line, beside its end: highest on top, none over another."""
    parts, y = [], 0.0
    for value, words, colour in sorted(entries, reverse=True):
        end = place(last, value, last)
        y = max(y + LABEL_HEIGHT, end[1] + 4)
        parts.append(text(end[0] + 14, y, words, colour, more=' font-weight="600"'))
    return parts


def draw(file: Path, theme: Theme, title: str = TITLE, subtitle: str = SUBTITLE) -> str:
    """The picture, as SVG."""
    rewards = read(file, "train/accuracy")
    means = smoothed(rewards)
    greedy = read(file, "validation/greedy/accuracy")
    sampled = read(file, "validation/sampled/accuracy")
    last = rewards[-1][0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{theme.background}"/>',
        *axes(last, theme, title, subtitle),
        line(rewards, last, theme.step, 1.5),
        line(means, last, theme.mean, 3),
        *dots(sampled, last, f'r="8" fill="none" stroke="{theme.sampled}" stroke-width="2.5"'),
        *dots(greedy, last, f'r="4.5" fill="{theme.greedy}"'),
    ]
    ends = [
        (means[-1][1], f"{means[-1][1]:.2f} reward, mean of {MEAN_OF}", theme.mean),
        (greedy[-1][1], f"{greedy[-1][1]:.2f} held out, greedy", theme.greedy),
        (sampled[-1][1], f"{sampled[-1][1]:.2f} held out, sampled", theme.sampled),
    ]
    parts += labels(ends, last)
    x, y = place(0, 0, last)
    before = [f'<tspan fill="{theme.greedy}">{greedy[0][1]:.2f} greedy</tspan>, ']
    before.append(f'<tspan fill="{theme.sampled}">{sampled[0][1]:.2f} sampled</tspan> before')
    parts.append(text(x + 12, y - 14, "".join(before), theme.faint, more=' font-weight="600"'))
    x, y = place(last, means[-1][1], last)
    parts.append(text(x + 14, y + 4 + 3 * LABEL_HEIGHT, "thin line: reward", theme.faint))
    parts.append(text(x + 14, y + 22 + 3 * LABEL_HEIGHT, "of each step", theme.faint))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, nargs="?", default=HERE / "metrics.jsonl", metavar="METRICS_JSONL")
    parser.add_argument("folder", type=Path, nargs="?", default=HERE, metavar="FOLDER")
    parser.add_argument("title", nargs="?", default=TITLE, metavar="TITLE")
    parser.add_argument("subtitle", nargs="?", default=SUBTITLE, metavar="SUBTITLE")
    args = parser.parse_args()
    for name, theme in THEMES.items():
        picture = draw(args.metrics, theme, args.title, args.subtitle)
        (args.folder / f"curve_{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
