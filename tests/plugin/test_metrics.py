"""Prometheus' view of the counters: grows with them, survives a reset, and has few label values."""

import pytest
from prometheus_client import CollectorRegistry, Counter

from prefixonce.dispatch import Limits, choose
from prefixonce.plugin.metrics import Metrics
from prefixonce.plugin.placement import Placement
from prefixonce.plugin.runtime import Runtime
from prefixonce.plugin.settings import PluginSettings
from prefixonce.step import DecodeStep, Mode, PrefixGroup, Segment, Sharing

NO_LIMITS = Limits()
LABELS = {"model_name": "m", "tp_rank": 3}
STEP = DecodeStep((40, 40, 9), 8, 2, 32, (PrefixGroup((0, 1), 32, (Segment(64, 32),)),))


class Scrape:
    def __init__(self):
        self.registry = CollectorRegistry()
        self.runtime = Runtime(PluginSettings())
        self.placement = Placement(pool=None, min_run_tokens=64)
        self.metrics = Metrics(self.runtime, self.placement)

    def step(self, mode, limits=NO_LIMITS):
        choice = choose(STEP, mode, limits)
        self.runtime.counters.count_step(STEP, choice, Sharing.of(STEP.groups, choice), kv_token_bytes=100)

    def publish(self):
        self.metrics.publish(LABELS, lambda *args, **options: Counter(*args, **options, registry=self.registry))

    def value(self, name, **labels):
        return self.registry.get_sample_value(name, {"model_name": "m", "tp_rank": "3"} | labels)


@pytest.fixture
def scrape():
    return Scrape()


def test_what_was_counted_is_shown_once_with_sglangs_labels(scrape):
    scrape.step(Mode.CASCADE)
    scrape.step(Mode.STOCK)
    scrape.publish()
    scrape.publish()
    assert scrape.value("prefixonce_decode_steps_total", path="cascade") == 1
    assert scrape.value("prefixonce_decode_steps_total", path="dense") == 0
    assert scrape.value("prefixonce_stock_decode_steps_total", reason="stock was asked for") == 1
    assert scrape.value("prefixonce_decode_tokens_total") == 6
    assert scrape.value("prefixonce_prefix_groups_total") == 1
    assert scrape.value("prefixonce_prefix_tokens_read_total") == 32
    assert scrape.value("prefixonce_kv_bytes_saved_total") == 32 * 100


def test_a_reset_of_our_counters_takes_nothing_back(scrape):
    scrape.step(Mode.CASCADE)
    scrape.publish()
    scrape.step(Mode.CASCADE)
    scrape.metrics.settle()
    scrape.runtime.reset_counters()
    scrape.publish()
    assert scrape.value("prefixonce_decode_steps_total", path="cascade") == 2
    scrape.step(Mode.CASCADE)
    scrape.publish()
    assert scrape.value("prefixonce_decode_steps_total", path="cascade") == 3


def test_figures_in_reasons_do_not_become_labels(scrape):
    for least in (100, 200):
        scrape.step(Mode.CASCADE, Limits(min_prefix_tokens=least))
    for node in range(3):
        scrape.placement.leave(node, 10 + node)
    scrape.publish()
    assert scrape.value("prefixonce_stock_decode_steps_total", reason="prefix of N tokens is under N") == 2
    labels = {"layout": "paged", "reason": "output of a finished request"}
    assert scrape.value("prefixonce_nodes_placed_total", **labels) == 3
    assert scrape.value("prefixonce_tokens_placed_total", layout="paged") == 33
