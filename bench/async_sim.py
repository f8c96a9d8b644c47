"""Seconds of a step at 8 to 64 GPUs, colocated, with carry-over and as an asynchronous split, from published phases.

    python -m bench.async_sim

Engines decode with continuous batching: a decode step takes `floor + cost * running` seconds. verl's floors are fitted
to its generation on 16 and on 4 GPUs, 2.3 and 1.6 times the time to read the weights; the others' are twice that time.
The cost makes the colocated generation as long as published. Lengths are log-normal, cut at the longest. On a share x
of the GPUs training takes x^-0.6 as long: so do verl's 374 s on 16 GPUs and 445 s on 12 (FSDP2). The pacing is the
project's: a batch belongs to a step from its birth, and may begin when the weights are at most `age` steps older than
those it trains. Measured are the published seconds only; what else the table says is computed.
"""

import heapq
from collections import Counter, deque
from dataclasses import dataclass, replace

import numpy as np

NUM_STEPS, WARM = 16, 4
SCALING = 0.6
SIGMA = 0.8  # of the lengths' logarithm: the longest of 1,000 is twelve times the median


@dataclass(frozen=True)
class Job:
    """Published seconds of the phases of a colocated step on `gpus`; `samples` of a step; lengths in tokens."""

    name: str
    gpus: int
    gpus_of_engine: int
    samples: int
    mean: float
    longest: int
    floor: float  # seconds of a decode step
    generation: float
    training: float  # with log-probabilities
    rest: float  # refit and all else, as long on any number of GPUs
    split: int  # GPUs that generate
    published: float | None = None  # seconds of an asynchronous step


def share(step: float, job: Job) -> Job:
    """The same proportions of a step of other length: a system that published only the whole."""
    factor = step / (job.generation + job.training + job.rest)
    return replace(job, **{phase: factor * getattr(job, phase) for phase in ("generation", "training", "rest")})


H100 = 3.35e12  # bytes/s
LLAMA = Job("NeMo RL 0.3, Llama-3.1-8B", 8, 1, 2048, 795, 4096, 2 * 16e9 / H100, 58, 28 + 18, 5 + 3, 4)
LARGE = Job("NeMo RL 0.3, Llama-3.1-70B", 64, 4, 2048, 398, 4096, 2 * 35e9 / H100, 84, 28 + 18, 14 + 3, 32)
NEMO = replace(LLAMA, name="NeMo RL 0.5, Llama-3.1-8B, shares of 0.3", gpus=16, mean=1019, split=8, published=64.8)
FSDP2 = Job("verl, Qwen2.5-Math-7B, FSDP2", 16, 1, 8192, 2500, 20480, 8.6e-3, 247, 88 + 286, 74 + 54, 4, 520)
MEGATRON = Job("verl, Qwen2.5-Math-7B, Megatron", 16, 1, 8192, 1500, 8192, 6e-3, 162, 119 + 344, 45 + 29, 4, 566)
NEMO_4 = replace(NEMO, name=NEMO.name.replace("0.5", "0.4"), mean=1060, published=74.6)
JOBS = [LLAMA, LARGE, share(92.8, NEMO), share(97.7, NEMO_4), FSDP2, MEGATRON]


class Engine:
    """Decodes `slots` requests at once, a token of each per decode step, those of the oldest training step first."""

    def __init__(self, slots: int, floor: float, cost: float):
        self.slots, self.floor, self.cost = slots, floor, cost
        self.clock, self.token, self.idle = 0.0, 0.0, 0.0  # seconds, decode steps, seconds
        self.queue: deque[tuple[int, int]] = deque()  # training step, length
        self.running: list[tuple[float, int]] = []  # heap of (decode step at which it ends, training step)
        self.left: Counter[int] = Counter()  # training step -> unfinished requests

    def begin(self, step: int, lengths: np.ndarray) -> None:
        self.queue.extend((step, int(length)) for length in lengths)
        self.left[step] = len(lengths)

    def run(self, step: int | None = None, until: float = np.inf) -> float:
        """Until all of `step` is finished, or the clock stands at `until`. Returns the clock."""
        while step is None or self.left[step]:
            while self.queue and len(self.running) < self.slots:
                born, length = self.queue.popleft()
                heapq.heappush(self.running, (self.token + length, born))
            seconds = self.floor + self.cost * len(self.running)
            tokens = self.running[0][0] - self.token if self.running else np.inf
            if self.clock + tokens * seconds > until:
                self.token += (until - self.clock) / seconds if self.running else 0
                self.idle += 0 if self.running else until - self.clock
                self.clock = until
                break
            self.clock += tokens * seconds
            self.token += tokens
            _, born = heapq.heappop(self.running)
            self.left[born] -= 1
        return self.clock


def lengths_of(job: Job) -> np.ndarray:
    """[steps, samples]: the same for every mode. The median is found by bisection."""
    normal = np.random.default_rng(0).normal(size=(NUM_STEPS + 9, job.samples))
    low, high = 1.0, float(job.longest)
    while high - low > 0.1:
        median = (low + high) / 2
        lengths = np.minimum(median * np.exp(SIGMA * normal), job.longest)
        low, high = (median, high) if lengths.mean() < job.mean else (low, median)
    return np.maximum(lengths.round(), 1).astype(int)


def simulate(job: Job, cost: float, age: int, generators: int = 0) -> dict[str, float]:
    """Seconds of a step, and the shares of it in which generators and trainers wait; generators=0: colocated."""
    num_engines = (generators or job.gpus) // job.gpus_of_engine
    batches = np.array_split(lengths_of(job), num_engines, axis=1)
    engines = [Engine(len(batch[0]), job.floor, cost) for batch in batches]
    training = job.training * (job.gpus / ((job.gpus - generators) or job.gpus)) ** SCALING
    trained, generation, marks = 0.0, 0.0, {}
    for step in range(1, NUM_STEPS + 1):
        for due in range(1 if step == 1 else step + age, step + age + 1):
            for engine, batch in zip(engines, batches, strict=True):
                engine.begin(due, batch[due - 1])
        whole = max(max(engine.run(step) for engine in engines), trained)
        generation += whole - trained
        for engine in engines:
            engine.run(until=whole)
            if generators and age:
                engine.run(until=whole + training)
            engine.clock = whole + training + job.rest  # colocated, it is frozen meanwhile
        trained = whole + training + job.rest
        marks[step] = trained, generation, sum(engine.idle for engine in engines) / num_engines
    seconds, waits, idle = np.subtract(marks[NUM_STEPS], marks[WARM]) / (NUM_STEPS - WARM)
    return {"step": seconds, "generation": waits, "generators idle": idle / seconds, "trainers idle": waits / seconds}


def cost_of(job: Job) -> float:
    """The cost of a request in a decode step with which the colocated generation takes as long as published."""
    low, high = 0.0, 0.01
    while high - low > 1e-7:
        middle = (low + high) / 2
        faster = simulate(job, middle, 0)["generation"] < job.generation
        low, high = (middle, high) if faster else (low, middle)
    return high


def table() -> str:
    """Markdown: seconds of a step in each mode, share of waiting GPUs, and what was published."""
    head = "job | GPUs | colocated | carry-over, age 1 | split, age 2 | split, age 1 | idle in it: generators, trainers"
    lines = [f"| {head} | published for age 1 | error |", "|---|---|---|---|---|---|---|---|---|"]
    for job in JOBS:
        cost = cost_of(job)
        modes = [simulate(job, cost, *mode) for mode in ((0, 0), (1, 0), (2, job.split), (1, job.split))]
        seconds = [f"{mode['step']:.1f} s" for mode in modes]
        idle = f"{modes[3]['generators idle']:.0%} of {job.split}, {modes[3]['trainers idle']:.0%} of the others"
        known = [f"{job.published:g} s", f"{modes[3]['step'] / job.published - 1:+.0%}"] if job.published else ["", ""]
        lines.append(f"| {' | '.join([job.name, str(job.gpus), *seconds, idle, *known])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
