"""Ends a run that hangs, and says where: a thread in each rank watches its phases and the other ranks.

Owns the limit of each phase, the stacks of all ranks, and what is told when a rank dies. Ranks that wait for one that
is stuck or gone would wait for the collective's timeout, on CUDA in a kernel that no signal interrupts. Nothing here is
a collective: it has to work when those do not. `Waiting` is for waits that may be long and all right.
"""

import faulthandler
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from config import WatchdogConfig
from system import exits
from system.exits import EXIT_CRASH, EXIT_HUNG, GRACE_SECONDS, LIBRARIES, describe_os_error, find_lost_rank, report_exit
from system.ranks import Ranks

POLL_SECONDS = 1.0
WAITING = "waiting for the trainers"  # a generator's phase; what they do has limits at the trainers' watchdogs
AHEAD = "generation ahead"  # a generator's, too: each decode step for which no trainer waits
WAIT_SECONDS = 10.0


class Waiting:
    """Says what is waited for, after WAIT_SECONDS without progress and again after as long again, and so on."""

    def __init__(self) -> None:
        self.start = self.newest = time.monotonic()
        self.limit, self.num_missing = WAIT_SECONDS, 0

    def look(self, names: Collection[str]) -> None:
        """`names`: of what is missing."""
        now = time.monotonic()
        if len(names) != self.num_missing:
            self.newest = now
            self.limit, self.num_missing = WAIT_SECONDS, len(names)
        if now - self.newest > self.limit:
            self.limit *= 2
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self.start)))
            more = f" and {len(names) - 3} more" * (len(names) > 3)
            first = "; ".join(list(names)[:3])
            who = exits.rank_name(exits.job_rank)
            print(f"{who} waits since {since}, {now - self.start:.0f} s, for {first}{more}", flush=True)


class Watchdog:
    """Watches this rank from when it is made to `stop`; `enter` says what it does."""

    def __init__(self, ranks: Ranks, run_folder: Path, cfg: WatchdogConfig):
        self.ranks = ranks
        self.run_folder = run_folder
        self.folder = run_folder / "stacks"
        self.cfg = cfg
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.main = threading.get_ident()
        self.step = 0
        self.phase = "start"
        self.since = time.monotonic()
        self.stopped = threading.Event()
        faulthandler.register(signal.SIGUSR2, all_threads=True)  # by hand: kill -USR2 <pid of a rank>
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, phase: str) -> None:
        """This rank now begins `phase`; the one before has ended well."""
        now = time.monotonic()
        # A new list, and the time before the phase: the thread below may read at any point.
        self.seconds[self.phase] = [*self.seconds[self.phase], now - self.since][-50:]
        self.since = now
        self.phase = phase
        # Where the thread below cannot run, because C code keeps the interpreter's lock: a thread without Python.
        faulthandler.dump_traceback_later(self.limit() + 6 * GRACE_SECONDS, exit=True)

    def limit(self) -> float:
        """Seconds that this phase may take. The first of its name gets more: it may compile, or capture graphs."""
        if self.phase == WAITING:
            return 1e8
        past = self.seconds.get(self.phase)
        return max(self.cfg.min_seconds, self.cfg.factor * statistics.median(past)) if past else self.cfg.first_seconds

    def stop(self) -> None:
        """Before this rank leaves: its end is no death."""
        self.stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self.stopped.wait(POLL_SECONDS):
            if time.monotonic() - self.since > self.limit() or self.folder.exists():
                self._end_hung()
            lost = find_lost_rank(self.run_folder)
            if lost and not self.stopped.wait(GRACE_SECONDS):
                self._leave(EXIT_CRASH, lost)

    def _end_hung(self) -> None:
        frames = sys._current_frames()
        main_frame = frames.pop(self.main)
        texts = [self._where(main_frame), "".join(traceback.format_stack(main_frame))]
        texts += ["another thread:\n" + "".join(traceback.format_stack(frame)) for frame in frames.values()]
        file = self.folder / f"rank_{self.ranks.job_rank:05d}.tmp"
        try:
            self.folder.mkdir(exist_ok=True)  # which makes the other ranks dump theirs too
            file.write_text("\n".join(texts))
            file.rename(file.with_suffix(".txt"))
        except OSError as error:
            self._leave(EXIT_HUNG, f"hung: {texts[0]}; its stack cannot be written ({describe_os_error(error)})")
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end and len(list(self.folder.glob("*.txt"))) < self.ranks.job_size:
            time.sleep(0.1)
        lines = {int(f.stem[5:]): f.read_text().splitlines()[0] for f in sorted(self.folder.glob("*.txt"))}
        missing = [rank for rank in range(self.ranks.job_size) if rank not in lines]
        lines |= {rank: f"{exits.rank_name(rank)}: does not answer" for rank in missing}
        stuck = [rank for rank in sorted(lines) if "waits for other ranks" not in lines[rank]]
        who = f"{', '.join(map(exits.rank_name, stuck))} did not come" if stuck else "all ranks wait for each other"
        places = "; ".join(lines[rank] for rank in stuck or sorted(lines))
        self._leave(EXIT_HUNG, f"hung: {who}; {places}; stacks of all ranks: {self.folder}")

    def _where(self, frame) -> str:
        """One line: what this rank does, since when, and at which line of which file."""
        stack = traceback.extract_stack(frame)
        waits = any("torch/distributed" in entry.filename for entry in stack)
        waits |= self.phase == WAITING or (self.phase == AHEAD and time.monotonic() - self.since < self.limit())
        ours = [entry for entry in stack if not entry.filename.startswith(LIBRARIES)]
        last = ours[-1] if ours else stack[-1]
        doing = "waits for other ranks in" if waits else "is at"
        return (
            f"{exits.rank_name(self.ranks.job_rank)}: step {self.step}, {self.phase}, "
            f"{time.monotonic() - self.since:.0f} s (limit {self.limit():.0f} s), "
            f"{doing} {Path(last.filename).name}:{last.lineno} {last.name}: {last.line}"
        )

    def _leave(self, code: int, reason: str) -> None:
        report_exit(code, reason, self.run_folder)
        os._exit(code)
