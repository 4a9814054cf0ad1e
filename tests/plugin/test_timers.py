"""Timers of decode steps: host spans, and events that are read only after the device has passed them."""

import pytest

from prefixonce.plugin.counters import Counters
from prefixonce.plugin.timers import EventTimers, HostTimers, NoTimers, timers_for


class Device:
    """Events take the time at which the device reaches them; `runs(ms)` is work in the stream."""

    def __init__(self):
        self.queued_ms = 0.0
        self.reached_ms = 0.0
        self.waits = 0
        self.events = []
        self.capturing = False

    def runs(self, ms):
        self.queued_ms += ms

    def catches_up(self, ms=float("inf")):
        self.reached_ms = min(self.queued_ms, self.reached_ms + ms)

    def event(self):
        self.events.append(Event(self))
        return self.events[-1]


class Event:
    def __init__(self, device):
        self.device = device
        self.at_ms = None

    def record(self):
        assert not self.device.capturing, "an event of a graph is recorded by every replay"
        self.at_ms = self.device.queued_ms

    def query(self):
        return self.device.reached_ms >= self.at_ms

    def synchronize(self):
        self.device.waits += 1
        self.device.catches_up()

    def elapsed_time(self, end):
        assert end.query(), "CUDA refuses an event that has not happened"
        return end.at_ms - self.at_ms


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def counters():
    return [Counters()]


@pytest.fixture
def timers(device, counters):
    return EventTimers(lambda: counters[0], device.event, lambda: device.capturing)


def step(timers, device, ms, attention_ms=()):
    with timers.span("decode_s"):
        device.runs(ms - sum(attention_ms))
        for layer_ms in attention_ms:
            with timers.span("attention_s"):
                device.runs(layer_ms)


def test_steps_are_read_once_the_device_has_passed_them(timers, device, counters):
    step(timers, device, 10.0)
    assert counters[0].decode_s is None
    device.catches_up(10.0)
    step(timers, device, 30.0)
    assert counters[0].decode_s == pytest.approx(0.010)
    assert device.waits == 0, "no step waits for the device"
    timers.settle()
    assert device.waits == 1
    assert counters[0].decode_s == pytest.approx(0.040)


def test_idle_time_between_steps_is_in_no_step(timers, device, counters):
    for _ in range(3):
        step(timers, device, 10.0)
        device.runs(500.0)
    timers.settle()
    assert counters[0].decode_s == pytest.approx(0.030)


def test_events_are_used_again(timers, device):
    for _ in range(50):
        step(timers, device, 10.0)
        device.catches_up(10.0)
    assert len(device.events) <= 4


def test_attention_is_timed_layer_by_layer_outside_graphs(timers, device, counters):
    step(timers, device, 10.0, attention_ms=(2.0, 3.0))
    timers.settle()
    assert counters[0].to_json()["attention_s"] == pytest.approx(0.005)
    assert counters[0].to_json()["decode_s"] == pytest.approx(0.010)


def test_a_step_in_a_graph_makes_the_time_of_attention_unknown(timers, device, counters):
    step(timers, device, 10.0, attention_ms=(2.0, 3.0))
    step(timers, device, 10.0)  # a replay: no layer is launched from here
    timers.settle()
    assert counters[0].to_json()["attention_s"] is None
    assert counters[0].to_json()["decode_s"] == pytest.approx(0.020)


def test_nothing_is_recorded_into_a_graph(timers, device, counters):
    device.capturing = True
    step(timers, device, 10.0, attention_ms=(2.0,))
    timers.settle()
    assert counters[0].decode_s is None
    assert not device.events


def test_a_reset_keeps_what_is_in_flight_out_of_the_new_counters(timers, device, counters):
    step(timers, device, 10.0)
    old, counters[0] = counters[0], Counters()
    step(timers, device, 30.0)
    timers.settle()
    assert counters[0].decode_s == pytest.approx(0.030)
    assert old.decode_s == pytest.approx(0.010)


def test_a_cpu_times_decode_always_and_attention_when_asked():
    counters = Counters()
    for details in (False, True):
        timers = timers_for("cpu", lambda: counters, details=details)
        assert isinstance(timers, HostTimers)
        with timers.span("decode_s"), timers.span("attention_s"):
            pass
        assert counters.decode_s > 0
        assert (counters.attention_s is not None) == details


def test_a_gpu_server_is_not_timed_unless_asked():
    timers = timers_for("cuda", Counters, details=False)
    assert isinstance(timers, NoTimers)
    with timers.span("decode_s"), timers.span("attention_s"):
        pass
