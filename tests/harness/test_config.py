"""Configuration: composes, refuses with one line that says what is allowed, and never rewrites."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from prefixbench.config import checks as config_checks
from prefixbench.config import config_dir
from prefixbench.config.cases import sweep_cases
from prefixbench.config.overrides import one_line_errors, prepare, quoted
from prefixbench.config.run import RunConfig, register_schema
from prefixbench.errors import UsageError
from prefixbench.jobs.launch import build_workload
from prefixbench.jobs.sweep import by_size
from prefixbench.workloads import NAMES
from prefixbench.workloads.churn import ChurnOptions
from prefixbench.workloads.sharegpt import ShareGptOptions
from prefixbench.workloads.synthetic import RolloutsOptions, SharedPrefixOptions, TenantsOptions


def load(*typed: str, multirun: bool = False) -> RunConfig:
    register_schema()
    with one_line_errors(), initialize_config_dir(str(config_dir()), version_base="1.3"):
        return config_checks.load(compose("config", overrides=prepare(typed, multirun)))


@pytest.mark.parametrize("preset", sorted(path.stem for path in (config_dir() / "sweep").glob("*.yaml")))
def test_every_preset_composes(preset: str) -> None:
    assert sweep_cases(load(f"sweep={preset}"))


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("shared-prefix", SharedPrefixOptions),
        ("distinct", SharedPrefixOptions),
        ("rollouts", RolloutsOptions),
        ("tenants", TenantsOptions),
        ("churn", ChurnOptions),
        ("sharegpt", ShareGptOptions),
    ],
)
def test_workload_files_show_the_real_defaults(workload: str, options: type) -> None:
    shown = load(f"workload={workload}").workload.settings
    assert shown == {field.name: field.default for field in fields(options)}


def test_there_is_a_file_for_every_workload() -> None:
    assert {path.stem for path in (config_dir() / "workload").glob("*.yaml")} == set(NAMES)


def test_command_line_beats_preset_beats_defaults() -> None:
    assert load().prefix_len == 512
    assert load("sweep=cpu-smoke").prefix_len == [512, 2048]
    assert load("sweep=cpu-smoke", "prefix_len=64").prefix_len == 64


PARTS = ("+workload@also.apart.workload=distinct", "also.apart.concurrency=3", "also.apart.path=[stock]")


def test_parts_add_cells_for_the_same_servers() -> None:
    whole, both = load("path=[stock,full]"), load("path=[stock,full]", *PARTS)
    added = [case for case in sweep_cases(both) if case not in sweep_cases(whole)]
    assert [case for case in sweep_cases(both) if case not in added] == list(sweep_cases(whole))
    assert {(case.workload, case.concurrency, case.path, case.plugin) for case in added} == {
        ("distinct", 3, "stock", True),
        ("distinct", 3, "stock", False),
    }
    assert all(case.prefix_tokens == 512 for case in added)
    alone = sweep_cases(load("workload=distinct", "concurrency=3", "path=stock"))
    assert added == list(alone), "the same case, whichever way it was asked for, so that a later run resumes it"


def test_a_case_that_two_parts_ask_for_is_one_case() -> None:
    again = load("path=[stock,full]", "+workload@also.again.workload=shared-prefix")
    assert sweep_cases(again) == sweep_cases(load("path=[stock,full]"))


def test_cells_of_other_workloads_are_other_cells() -> None:
    cells = by_size(sweep_cases(load(*PARTS, "also.apart.concurrency=8")))
    assert [{case.workload for case in cell} for cell in cells] == [{"shared-prefix"}, {"distinct"}]
    assert [build_workload(load(), cell[0]).name for cell in cells] == ["shared-prefix", "distinct"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("also.apart.path=[auto]", "also.apart: path 'auto' is unknown; allowed: cascade, full, stock"),
        ("also.apart.prefix_len=-1", "also.apart: prefix_len=-1: allowed are whole numbers from 0"),
        ("also.apart.concurrency=4096", "also.apart: concurrency=4096 is above engine.max_running_requests=512"),
        ("also.apart.prefix_lenn=1", "key 'also.apart.prefix_lenn' is unknown; did you mean 'prefix_len'?"),
    ],
)
def test_mistakes_in_a_part_name_the_part(override: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(*PARTS, override)
    assert message in str(refused.value)


def test_stock_is_measured_with_and_without_the_plugin() -> None:
    cases = sweep_cases(load("path=[stock,full]"))
    assert [(case.path, case.plugin) for case in cases] == [("stock", True), ("full", True), ("stock", False)]
    assert "dense_m_eff" not in cases[-1].engine_settings, "a setting of the plugin must not split the baseline"
    assert [case.plugin for case in sweep_cases(load("path=stock", "path.stock.plugin=without"))] == [False]


def test_sweeps_that_one_server_can_serve_become_lists() -> None:
    typed = ["model=tiny,llama-3.1-8b", "prefix_len=512,2048", "concurrency=range(1,4)", "path=stock,full", "gpus=1,2"]
    assert prepare(typed, multirun=True) == [
        "model=tiny,llama-3.1-8b",
        "prefix_len=[512,2048]",
        "concurrency=[1,2,3]",
        "path=[stock,full]",
        "gpus='1','2'",
    ]
    assert load("gpus=2", "model=llama-3.1-8b").gpus.count == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle=tiny", "key 'modle' is unknown; did you mean 'model'?"),
        ("model=tinny", "model 'tinny' is unknown; did you mean 'tiny'? allowed: llama-3.1-8b"),
        ("path=[stock,casade]", "path 'casade' is unknown; did you mean 'cascade'?"),
        ("engine.page_sze=1", "did you mean 'page_size'?"),
        ("measure.warmup_scope=cel", "did you mean 'cell'? allowed: cell, launch"),
        ("+nothing=1", "key 'nothing' is unknown; allowed: also, concurrency"),
        ("+model.nothing=1", "key 'model.nothing' is unknown"),
        ("workload.settings.rate=1", "allowed below workload.settings: requests"),
        ("prefix_len=1,2", "add -m, or write 'prefix_len=[1,2]'"),
        ("prefix_len=long", "allowed are whole numbers from 0"),
        ("prefix_len=[1,1]", "each only once"),
        ("concurrency=0", "whole numbers from 1"),
        ("concurrency=4096", "engine.max_running_requests=512"),
        ("launches=0", "must be at least 1"),
        ("launches=few", "'few' of type 'str' could not be converted to Integer"),
        ("gpus.count=2", "tensor parallelism needs GPUs"),
        ("gpus=4", "2 K/V heads, which 4 GPUs cannot share evenly"),
        ("engine.stock_backend=fa3", "needs a GPU; gpus=cpu allows auto, torch_native"),
        ("path.full.plugin=without", "allowed: with"),
        ("prefix_len=40000", "tiny takes 32768"),
    ],
)
def test_mistakes_are_one_line_that_says_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(override)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["it's", "a,b=[1]", "back\\slash", "end\\", "\\'", "${oc.env:HOME}", "x y", ""])
def test_any_text_survives_as_one_value(text: str) -> None:
    assert load(f"tag={quoted(text)}").tag == text


def test_checks_never_rewrite() -> None:
    register_schema()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = compose("config", overrides=["prefix_len=[1,2]"])
    before = OmegaConf.to_container(composed)
    config_checks.load(composed)
    assert OmegaConf.to_container(composed) == before
