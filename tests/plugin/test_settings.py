"""The environment is read strictly: what is not understood stops the server."""

import pytest

from prefixonce.errors import PrefixOnceError
from prefixonce.plugin.faults import Fault, FaultKind
from prefixonce.plugin.register import adapter_for
from prefixonce.plugin.settings import PluginSettings
from prefixonce.step import Mode


def test_nothing_set_means_the_documented_defaults():
    assert PluginSettings.from_environment({"HOME": "/root"}) == PluginSettings(
        mode=Mode.AUTO, dense_m_eff=1024, min_run_tokens=64, min_prefix_tokens=1, timers=False, fault=Fault()
    )


def test_every_variable_is_read():
    settings = PluginSettings.from_environment(
        {
            "PREFIXONCE_PATH": "full",
            "PREFIXONCE_DENSE_M_EFF": "12",
            "PREFIXONCE_MIN_RUN_TOKENS": "7",
            "PREFIXONCE_MIN_PREFIX_TOKENS": "9",
            "PREFIXONCE_TIMERS": "1",
            "PREFIXONCE_TEST_FAULT": "sleep-us:250",
        }
    )
    assert settings == PluginSettings(
        mode=Mode.FULL,
        dense_m_eff=12,
        min_run_tokens=7,
        min_prefix_tokens=9,
        timers=True,
        fault=Fault(FaultKind.SLEEP, 250),
    )
    assert str(settings.fault) == "sleep-us:250"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("PREFIXONCE_PAHT", "full", "PREFIXONCE_PATH"),
        ("PREFIXONCE_PATH", "fast", "cascade"),
        ("PREFIXONCE_DENSE_M_EFF", "0", "at least 1"),
        ("PREFIXONCE_DENSE_M_EFF", "1e3", "whole number"),
        ("PREFIXONCE_MIN_RUN_TOKENS", "²", "whole number"),
        ("PREFIXONCE_TIMERS", "yes", "0 or 1"),
        ("PREFIXONCE_TEST_FAULT", "sleep-us", "sleep-us:N"),
        ("PREFIXONCE_TEST_FAULT", "none:3", "none"),
        ("PREFIXONCE_TEST_FAULT", "zero", "zero-prefix"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line_that_says_what_is_allowed(name, value, allowed):
    with pytest.raises(PrefixOnceError) as refusal:
        PluginSettings.from_environment({name: value})
    assert allowed in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_unknown_sglang_version_is_refused_by_name():
    with pytest.raises(PrefixOnceError, match=r"SGLang 0\.5\.99 is unknown; allowed: 0\.5\.16"):
        adapter_for("0.5.99")
