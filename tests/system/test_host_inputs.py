"""Inputs of blocks in host memory: what the streams of a GPU wait for, on stand-ins that note the order.

The bits of the gradients are in tests/core (test_model, test_blocks, test_lora), the bytes in tests/plan.
"""

import weakref

import pytest
import torch

from base.system import host_inputs
from base.system.host_inputs import HostInputs, ParkedInput

NUM_BLOCKS = 4


class Stream:
    """Notes what it is told. An event is the number of copies that it comes after."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def record_event(self):
        return sum(entry[1] == "copies" for entry in self.log)

    def wait_event(self, event):
        self.log.append((self.name, "waits for copy", event))


@pytest.fixture
def log(monkeypatch):
    """As on a GPU: a stream computes, another one copies."""
    entries = []
    main, side = Stream(entries, "main"), Stream(entries, "side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    copy = ParkedInput._copy

    def noted(self, rows, on_host, *, to_host):
        self.stream = side
        self.log = entries
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "stream", lambda stream: Copies(entries, to_host))
            copy(self, rows, on_host, to_host=to_host)

    monkeypatch.setattr(ParkedInput, "_copy", noted)
    return entries


class Copies:
    def __init__(self, log, to_host):
        self.log, self.to_host = log, to_host

    def __enter__(self):
        self.log.append(("side", "copies", "out" if self.to_host else "in"))

    def __exit__(self, *_):
        pass


def run(host, inputs, log):
    """Forward and backward of blocks; each notes when it computes. Returns the gradient of the first input."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    hidden = x * 2

    def block(number, hidden):
        log.append(("main", "computes", number))
        return torch.tanh(hidden).square() + hidden

    for number in range(NUM_BLOCKS):
        inputs.append(weakref.ref(hidden))
        hidden = host.recomputed(lambda hidden, number=number: block(number, hidden), hidden)
    held = [ref() is not None for ref in inputs]
    hidden.sum().backward()
    return x.grad, held


def test_each_copy_begins_after_its_source_is_there_and_is_waited_for(log):
    inputs = []
    _, held = run(HostInputs(), inputs, log)
    assert held == [False] * (NUM_BLOCKS - 1) + [True], "of the forward only the newest input is on the device"
    copies = [entry for entry in log if entry[1] == "copies"]
    assert [kind for *_, kind in copies] == ["out"] * NUM_BLOCKS + ["in"] * (NUM_BLOCKS - 1)
    for place, entry in enumerate(log):
        if entry[1] == "copies":
            assert log[place - 1] == ("side", "waits for", "main"), "what it copies, or copies to, is main's"
    # The device's copy of an input is free, or is read, only after main has waited for the copy.
    computed = [place for place, entry in enumerate(log) if entry[1] == "computes"]
    assert [log[place][2] for place in computed] == [*range(NUM_BLOCKS), *reversed(range(NUM_BLOCKS))]
    waits = [(place, event) for place, (_, what, event) in enumerate(log) if what == "waits for copy"]
    for number in range(NUM_BLOCKS - 1):
        copied_in = 2 * NUM_BLOCKS - 1 - number  # the copies in come last block first, but for the newest
        again = computed[2 * NUM_BLOCKS - 1 - number]
        assert any(event == copied_in and place < again for place, event in waits), number
        began = next(place for place, entry in enumerate(log) if entry == copies[copied_in - 1])
        before_it = computed[2 * NUM_BLOCKS - 2 - number]
        assert began < before_it, "the copy runs beside the block that the backward pass computes before"


def test_gradients_do_not_change_and_inputs_are_in_parts(log, monkeypatch):
    monkeypatch.setattr(host_inputs, "host_rows", lambda row_bytes: 2)
    parked = []
    park = ParkedInput.__init__
    monkeypatch.setattr(ParkedInput, "__init__", lambda self, *given: park(self, *given) or parked.append(self))
    gradient, _ = run(HostInputs(), [], log)
    plain, _ = run(HostInputsThatKeep(), [], log)
    assert torch.equal(gradient, plain)
    assert [[len(part) for part in each.on_host] for each in parked] == [[2, 1]] * NUM_BLOCKS
    assert all(each.on_device is None for each in parked), "nothing stays on the device"


class HostInputsThatKeep:
    def recomputed(self, function, hidden):
        return function(hidden)
