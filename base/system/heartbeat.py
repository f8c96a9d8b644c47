"""Whether the other machines of a run answer: each writes a number into torchrun's store every few seconds. The store
is on the machine of rank 0.

A machine that loses power or network closes no connection. Without this, the ranks that wait for it would end only by
the watchdog's limit of their phase.
"""

import os
import threading

import torch.distributed as dist

from base.system.exits import host_name

BEAT_SECONDS = 5.0
SILENT_POLLS = 45  # of the watchdog, one a second: a process that was itself stopped has not counted meanwhile
LEFT = b"left"  # the value of a machine whose first rank has ended its work


class Heartbeat:
    """This machine's beat, and how long the others have been silent. A thread talks to the store, which hangs with its
    machine. hosts: of the ranks, rank 0's first. A run on one machine has no heartbeat (`watchdog`)."""

    def __init__(self, hosts: list[str]):
        self.store_host = hosts[0]
        self.others = [host for host in hosts if host != host_name()]
        self.problem = ""  # of the store
        self.polls_without_store = 0
        self.polls_without_news = dict.fromkeys(self.others, 0)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def find_silent(self) -> str | None:
        """The machines that do not answer; None while all do. To be called once a second."""
        self.polls_without_store += 1
        for host in self.others:
            self.polls_without_news[host] += 1
        if self.polls_without_store > SILENT_POLLS:
            return f"{self.store_host} does not answer{self.problem}"
        silent = [host for host, polls in self.polls_without_news.items() if polls > SILENT_POLLS]
        if not silent:
            return None
        return f"{', '.join(silent)} does not answer"

    def stop(self) -> None:
        """Before this rank leaves: its silence is no failure."""
        self.stopped.set()
        self.thread.join(BEAT_SECONDS)  # not for ever: the store may hang

    def _beat(self) -> None:
        try:
            self._beat_until_stopped()
        except RuntimeError as error:  # of the store: `find_silent` tells it, unless the run ends before
            self.problem = f" ({type(error).__name__}: {error})"

    def _beat_until_stopped(self) -> None:
        client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore("heartbeat", client)
        newest: dict[str, bytes] = {}
        number = 0
        while not self.stopped.wait(BEAT_SECONDS):
            number += 1
            store.set(host_name(), str(number))
            for host in self.others:
                if not store.check([host]):  # not yet there
                    continue
                value = store.get(host)
                if value == LEFT or value != newest.get(host):
                    self.polls_without_news[host] = 0
                newest[host] = value
            self.polls_without_store = 0
        store.set(host_name(), LEFT)
