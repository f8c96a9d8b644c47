"""Draws a run: reward of each step, its mean over five, and the held-out accuracy. Standard library only.

.venv/bin/python examples/smollm2/plot.py RUN_FOLDER/metrics.jsonl curve.svg
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

WIDTH, HEIGHT, MARGIN = 720, 360, 48
STEP, MEAN, GREEDY, SAMPLED = "#b9c6d8", "#2b5797", "#c0392b", "#e08e0b"
Points = list[tuple[float, float]]


def read(file: Path, key: str) -> Points:
    """(step, value) of each record that has the metric."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [(record["step"], record[key]) for record in records if key in record]


def draw(file: Path) -> str:
    """The picture, as SVG."""
    rewards = read(file, "train/accuracy")
    smooth = [
        (step, fmean(value for _, value in rewards[max(0, i - 4) : i + 1])) for i, (step, _) in enumerate(rewards)
    ]
    last = rewards[-1][0]

    def place(step: float, value: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        return round(x, 1), round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value, 1)

    def line(points: Points, colour: str, width: float) -> str:
        corners = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        return f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def dots(points: Points, colour: str) -> list[str]:
        places = [place(*point) for point in points]
        return [f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>' for x, y in places]

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for tenth in range(0, 11, 2):
        parts.append(line([(0, tenth / 10), (last, tenth / 10)], "#eeeeee", 1))
        parts.append(f'<text x="14" y="{place(0, tenth / 10)[1] + 4}" font-size="12">{tenth / 10:.1f}</text>')
    for step in range(0, last + 1, 10):
        parts.append(f'<text x="{place(step, 0)[0] - 6}" y="{HEIGHT - MARGIN + 18}" font-size="12">{step}</text>')
    parts += [line(rewards, STEP, 1.5), line(smooth, MEAN, 2.5)]
    parts += dots(read(file, "validation/sampled/accuracy"), SAMPLED) + dots(
        read(file, "validation/greedy/accuracy"), GREEDY
    )
    legend = (
        (STEP, "reward of a step"),
        (MEAN, "mean of five"),
        (SAMPLED, "held out, sampled"),
        (GREEDY, "held out, greedy"),
    )
    for i, (colour, text) in enumerate(legend):
        parts.append(f'<rect x="{MARGIN + 160 * i}" y="16" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{MARGIN + 160 * i + 18}" y="27" font-size="13">{text}</text>')
    parts.append(f'<text x="{WIDTH / 2 - 20}" y="{HEIGHT - 8}" font-size="13">step</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, metavar="METRICS_JSONL")
    parser.add_argument("picture", type=Path, metavar="PICTURE_SVG")
    args = parser.parse_args()
    args.picture.write_text(draw(args.metrics), encoding="utf-8")
