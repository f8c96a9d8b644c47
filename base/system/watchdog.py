"""Ends a run that hangs, and says where: a thread in each rank watches the rank's phases and the other ranks.

Without it, ranks that wait for a stuck or dead rank would wait for the collective's timeout, on CUDA in a kernel that
no signal interrupts. Nothing here is a collective: the watchdog has to work when collectives do not.
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
from pathlib import Path
from types import FrameType

from base.system.disk import describe_os_error, write_whole
from base.system.exits import EXIT_CRASH, EXIT_HUNG, LIBRARIES, host_name, how_to_go_on, report_exit
from base.system.ranks import Ranks
from config import WatchdogConfig

POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0  # for another rank to say why it ended, or to write its stacks
WAITS = "waits for other ranks"  # what the line of a rank in a collective says


class Watchdog:
    """Watches this rank from construction to `stop`; `enter` says what the rank does."""

    def __init__(self, ranks: Ranks, run_folder: Path, cfg: WatchdogConfig):
        self.ranks = ranks
        self.run_folder = run_folder
        self.folder = run_folder / "stacks"
        self.cfg = cfg
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.main = threading.get_ident()
        self.step = 0
        self.phase = "start"
        self.waits = False
        self.since = time.monotonic()
        self.stopped = threading.Event()
        self.heartbeat = None
        first_rank_of = ranks.peers.first_ranks()
        if len(first_rank_of) > 1 and first_rank_of[host_name()] == ranks.job_rank:
            from base.system.heartbeat import Heartbeat  # a run on one machine has none

            self.heartbeat = Heartbeat(list(first_rank_of))
        faulthandler.register(signal.SIGUSR2, all_threads=True)  # by hand: kill -USR2 <pid of a rank>
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, phase: str, *, waits: bool = False) -> None:
        """This rank now begins `phase`. waits: for other ranks, without limit: their watchdogs limit what they do."""
        now = time.monotonic()
        past = [*self.seconds[self.phase], now - self.since]
        # A new list, and the time before the phase: the thread below may read at any point.
        self.seconds[self.phase] = past[-50:]
        self.since = now
        self.phase = phase
        self.waits = waits
        # For when the thread below cannot run because C code keeps the interpreter's lock: a thread without Python.
        faulthandler.dump_traceback_later(self.limit() + 3 * GRACE_SECONDS, exit=True)

    def limit(self) -> float:
        """Seconds that this phase may take. The first phase of a name gets more: it may compile, or capture graphs."""
        if self.waits:
            return 1e8
        past = self.seconds.get(self.phase)
        if not past:
            return self.cfg.first_seconds
        return max(self.cfg.min_seconds, self.cfg.factor * statistics.median(past))

    def stop(self) -> None:
        """Before this rank leaves: its end is no death."""
        self.stopped.set()
        if self.heartbeat:
            self.heartbeat.stop()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self.stopped.wait(POLL_SECONDS):
            seconds_in_phase = time.monotonic() - self.since
            another_is_hung = self.folder.exists()
            if seconds_in_phase > self.limit() or another_is_hung:
                self._end_hung()
            lost = self.ranks.peers.find_lost(self.run_folder)
            if lost and not self.stopped.wait(GRACE_SECONDS):
                self._leave(EXIT_CRASH, lost)
            silent = self.heartbeat.find_silent() if self.heartbeat else None
            if silent:
                self._leave(EXIT_HUNG, f"hung: {silent}{how_to_go_on(self.run_folder)}")

    def _end_hung(self) -> None:
        """Writes the stacks of this rank, waits for those of the others, and says who hangs."""
        self._write_stacks()
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end and len(self._stack_files()) < self.ranks.job_size:
            time.sleep(0.1)
        name = self.ranks.peers.name
        line_of_rank = {}
        for rank in range(self.ranks.job_size):
            line_of_rank[rank] = f"{name(rank)}: does not answer"
        for file in self._stack_files():
            rank = int(file.stem.removeprefix("rank_"))
            line_of_rank[rank] = file.read_text().splitlines()[0]
        stuck = [rank for rank, line in line_of_rank.items() if WAITS not in line]
        if stuck:
            who = f"{', '.join(map(name, stuck))} reached no collective"
            places = "; ".join(line_of_rank[rank] for rank in stuck)
        else:
            who = "all ranks wait for each other"
            places = "; ".join(line_of_rank.values())
        self._leave(EXIT_HUNG, f"hung: {who}; {places}; stacks of all ranks: {self.folder}")

    def _write_stacks(self) -> None:
        frames = sys._current_frames()
        main_frame = frames.pop(self.main)
        where = self._where(main_frame)
        texts = [where, "".join(traceback.format_stack(main_frame))]
        for frame in frames.values():
            texts.append("another thread:\n" + "".join(traceback.format_stack(frame)))
        try:
            self.folder.mkdir(exist_ok=True)  # the other ranks see it and dump their stacks too
            write_whole(self.folder / f"rank_{self.ranks.job_rank:05d}.txt", "\n".join(texts))
        except OSError as error:
            self._leave(EXIT_HUNG, f"hung: {where}; its stack cannot be written ({describe_os_error(error)})")

    def _stack_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.txt"))

    def _where(self, frame: FrameType) -> str:
        """One line: what this rank does, for how long, and at which line of which file."""
        stack = traceback.extract_stack(frame)
        ours = [entry for entry in stack if not entry.filename.startswith(LIBRARIES)]
        last = ours[-1] if ours else stack[-1]
        # A generator that decodes ahead while it waits for a request may hang in its engine.
        waits_for_request = self.waits and last.name == "_next_request"
        is_in_collective = any("torch/distributed" in entry.filename for entry in stack)
        doing = "is at"
        if waits_for_request or is_in_collective:
            doing = f"{WAITS} in"
        return (
            f"{self.ranks.peers.name(self.ranks.job_rank)}: step {self.step}, {self.phase}, "
            f"{time.monotonic() - self.since:.0f} s (limit {self.limit():.0f} s), "
            f"{doing} {Path(last.filename).name}:{last.lineno} {last.name}: {last.line}"
        )

    def _leave(self, code: int, reason: str) -> None:
        report_exit(code, reason, self.run_folder, self.ranks.peers)
        os._exit(code)
