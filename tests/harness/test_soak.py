"""What a soak must find: wrong answers, lost slots, errors, what never happened."""

import types

import pytest

from prefixbench.jobs import soak
from prefixbench.jobs.soak import Reference, agreement, attack
from prefixbench.measures.soak import Answer, Observed, prompts

ASKED = prompts(1, prefix_tokens=30, output_tokens=3, vocabulary=4096, seed=1)


class Scripted:
    """Stands in for a server: its answers are those of `drive`, its pool is what the test says."""

    url = "nowhere"

    def __init__(self, steps, free):
        self.steps, self.free = steps, free

    def set_path(self, path):
        pass

    def counters(self):
        return types.SimpleNamespace(steps=self.steps)

    def placement(self):
        run = types.SimpleNamespace(kind="free", length=self.free)
        return types.SimpleNamespace(pool_slots=100, pool_after=(run,))


def scripted(monkeypatch, tmp_path, *, answers, free=100, log="all is well", errors=(), retractions=1):
    def drive(*_args, between_waves, **_options):
        between_waves()
        found = [Answer(0, tokens, logprobs, retractions) for tokens, logprobs in answers]
        return Observed(answers=found, aborted=1, flushes=1, errors=list(errors))

    monkeypatch.setattr(soak, "drive", drive)
    (tmp_path / "log").write_text(log)
    known = Answer(0, (1, 2, 3), (-1.0, -2.0, -3.0), 0)
    expected = Reference((known,), agreement([known], [known]))
    server = Scripted({"cascade": 5}, free)
    options = {"seconds": 1, "gap_s": 1, "in_flight": 1, "seed": 1}
    return attack(server, ASKED, expected, tmp_path / "log", **options).faults


RIGHT = ((1, 2, 3), (-1.0, -2.0, -3.0))


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        ({"answers": [RIGHT]}, None),
        ({"answers": [((1, 2, 3), (-1.0, -2.1, -3.0))]}, "is 0.1 from stock's"),
        ({"answers": [((9, 2, 3), (-1.0, -2.0, -3.0))]}, "context of only 33%"),
        ({"answers": [((1, 2), (-1.0, -2.0))]}, "have no log-probability"),
        ({"answers": [RIGHT], "free": 97}, "3 slots are not free"),
        ({"answers": [RIGHT], "log": "fine\nTraceback (most recent call last)\n"}, "server log: Traceback"),
        ({"answers": [RIGHT], "errors": ["whole: HTTP 500"]}, "HTTP 500"),
        ({"answers": [RIGHT], "retractions": 0}, "no retraction in the whole soak"),
    ],
)
def test_every_kind_of_fault_is_named(monkeypatch, tmp_path, seen, fault):
    faults = scripted(monkeypatch, tmp_path, **seen)
    assert (faults == ()) is (fault is None), faults
    assert fault is None or any(fault in found for found in faults), faults
