"""What bench/head.py has measured, as a table, and the project's own demands on it."""

from bench.head_cases import LIGER_GRPO, LOGP, OURS, OURS_SMALL, VERL

# N rows, D, V, and of those V the tokenizer's, as Qwen2.5 has them; then as if the tokenizer had all.
MAIN_SHAPES = ((32768, 2048, 151936, 151665), (32768, 2048, 151936, 151936))


def name_of(shape: tuple) -> str:
    """As --shapes takes it, with x for the comma."""
    *sizes, vocab = shape
    return "x".join(map(str, sizes)) + (f":{vocab}" if vocab != sizes[-1] else "")


def bars(lines: list[dict], shape: tuple) -> list[str]:
    """The demands at a shape. `own` is the head that training takes."""
    at = {(line["name"], line["backward"]): line for line in lines if tuple(line["shape"]) == shape}
    ms = {key: line["ms"] for key, line in at.items() if "ms" in line}
    own, score, small = (at.get(key, {}) for key in ((OURS, True), (LOGP, False), (OURS_SMALL, True)))
    rivals = [ms[n, b] for n, b in ms if b and at[n, b]["computes"] == "GRPO" and not n.startswith((OURS, LOGP))]
    best = min(rivals) / own["ms"] if rivals and "ms" in own else None
    times = {name: ms[name, True] / own["ms"] for name in (LIGER_GRPO, VERL) if (name, True) in ms and "ms" in own}
    rows = [
        ("one pass: share of the bare matmuls' speed", own.get("of_bare"), ">=", 0.85),
        ("one pass: speed over the best other GRPO's", best, ">=", 1.25),
        ("one pass: speed over Liger GRPO's", times.get(LIGER_GRPO), ">=", 2),
        ("one pass: speed over verl's", times.get(VERL), ">=", 2),
        ("linear_logp forward: share of the bare matmul's speed", score.get("of_bare"), ">=", 0.75),
        ("one pass: extra MiB", own.get("extra_MiB"), "<=", 4096),
        # Backward has dW in float32, 1,187 MiB, and dX while it writes what it returns, however few the rows are.
        ("one pass, 512 rows: extra MiB", small.get("extra_MiB"), "<=", 1400),
        ("one pass: mean logp error", own.get("logp_error"), "<=", 1e-4),
    ]
    return [f"{name_of(shape)} {bar(*row)}" for row in rows]


def bar(what: str, value: float | None, sign: str, limit: float) -> str:
    if value is None:
        return f"not measured  {what} (bar {sign} {limit:g})"
    holds = value >= limit if sign == ">=" else value <= limit
    return f"{'holds' if holds else 'FALLS SHORT':13s} {what}: {value:.4g} (bar {sign} {limit:g})"


def table(lines: list[dict]) -> str:
    """A row per shape, mode and head; the last line of each counts. Of other shapes than MAIN_SHAPES: the fastest 6."""
    last = {(tuple(line["shape"]), not line["backward"], line["name"]): line for line in lines if "name" in line}
    columns = ("ms", "tflops", "of_bare", "extra_MiB", "logp_error", "dX_error", "dW_error", "loss_error")
    out = [f"{'shape':>25s} {'head':28s} {'':8s}" + "".join(f"{column:>11s}" for column in columns)]
    rows = sorted(last.items(), key=lambda item: (item[0][:2], item[1].get("ms", 1e9)))
    for number, ((shape, forward, name), line) in enumerate(rows):
        if shape not in MAIN_SHAPES and number >= 6 and rows[number - 6][0][:2] == (shape, forward):
            continue
        cells = "".join(f"{line[column]:11.4g}" if column in line else f"{'-':>11s}" for column in columns)
        reason = f" {line['status']}: {line['reason'].splitlines()[0][:100]}" if "reason" in line else ""
        mode = "forward" if forward else line["computes"]
        out.append(f"{name_of(shape):>25s} {name:28s} {mode:8s}{cells}{reason}")
    return "\n".join([*out, ""] + [row for shape in MAIN_SHAPES for row in bars(list(last.values()), shape)])
