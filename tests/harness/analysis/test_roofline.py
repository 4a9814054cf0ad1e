"""The model from first principles, its fit, its residuals, and what it predicts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.builders import kernel_record, serving_record
from prefixbench.analysis.roofline.checks import Hardware, KernelCheck, load_hardware
from prefixbench.analysis.roofline.fit import fit, on_paper, transfer
from prefixbench.analysis.roofline.model import (
    PAPER,
    PATHS,
    Attention,
    Load,
    Term,
    memory_bytes,
    rest_ideal_s,
    step_time,
)
from prefixbench.analysis.roofline.predict import model_of, predict
from prefixbench.analysis.roofline.records import gpu_key, kernel_checks, step_checks
from prefixbench.errors import UsageError


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware()


def test_shapes_from_first_principles(hardware: Hardware) -> None:
    llama = hardware.model("llama-3.1-8b")
    assert llama.weight_bytes == pytest.approx(16.06e9, rel=1e-3), "8.03 billion parameters of 2 bytes"
    assert llama.kv_bytes_per_token == 131072
    assert Attention(32, 8, 128).kv_bytes(8192) == 33_554_432


def test_the_claimed_launch_on_paper(hardware: Hardware) -> None:
    rows = {row.what: row for row in on_paper(hardware)}
    assert rows["K2 paged launch (bytes)"].predicted == pytest.approx(8.59e9, rel=1e-3)
    assert rows["K2 shared launch (bytes)"].predicted == pytest.approx(37.7e6, rel=2e-3)
    unique = rows["K3 dense kernel on unique data (us)"]
    assert unique.predicted / unique.measured == pytest.approx(0.79, abs=0.005), "the 79% of its memory limit"
    assert rows["R1 full (tok/s)"].log_error < 0, "a bound: the real system is slower"


def test_a_step_adds_up(hardware: Hardware) -> None:
    gpu, llama, load = hardware.gpu("a100-40gb"), hardware.model("llama-3.1-8b"), Load(16384, 128, 256)
    step = step_time(gpu, llama, load, "full")
    assert step.rest_s == pytest.approx(rest_ideal_s(gpu, llama, load))
    assert step.prefix_s == pytest.approx(4 * 256 * 16384 * 32 * 128 * 32 / 3.12e14)
    assert step.suffix_s == pytest.approx(256 * 128 * 131072 / 1.555e12)
    assert step.tok_s == pytest.approx(256 / step.total_s)


def test_auto_is_never_slower_and_full_follows_the_threshold(hardware: Hardware) -> None:
    gpu, llama = hardware.gpu("h200"), hardware.model("llama-3.1-8b")
    fitted = model_of(gpu, hardware).steps
    for prefix in (0, 64, 512, 16384):
        for concurrency in (1, 8, 255, 256):
            load = Load(prefix, 64, concurrency)
            times = {path: step_time(gpu, llama, load, path, fitted).total_s for path in (*PATHS, "dense")}  # type: ignore[arg-type]
            assert times["auto"] <= min(times.values()) + 1e-12
            assert times["full"] == times["dense" if concurrency >= 256 else "cascade"]


def test_tensor_parallel_halves_what_each_gpu_does(hardware: Hardware) -> None:
    gpu, qwen = hardware.gpu("h200"), hardware.model("qwen2.5-32b")
    one, two = (step_time(gpu, qwen, Load(8192, 64, 256, n), "full") for n in (1, 2))
    assert two.total_s == pytest.approx(one.total_s / 2)
    assert memory_bytes(qwen, Load(8192, 64, 256, 2), 128) == pytest.approx(
        memory_bytes(qwen, Load(8192, 64, 256), 128) / 2
    )


def test_the_fit_recovers_known_numbers(hardware: Hardware) -> None:
    gpu = hardware.gpu("h200")
    truth = replace(PAPER, dense=Term(5e-6, 0.8), suffix=Term(9e-6, 0.9))
    checks = []
    for op, sizes in (("dense", ((512, 0), (2048, 0), (8192, 0))), ("suffix", ((0, 64), (0, 256), (0, 512)))):
        for prefix, suffix in sizes:
            blank = KernelCheck("h200", op, prefix, suffix, 256, 32, 8, 0.0)
            checks.append(replace(blank, us=1e6 * blank.predicted_s(gpu, truth)))
    found = fit(gpu, hardware, checks, ()).kernels
    assert (found.dense.fixed_s, found.dense.efficiency) == pytest.approx((5e-6, 0.8))
    assert (found.suffix.fixed_s, found.suffix.efficiency) == pytest.approx((9e-6, 0.9))


def test_h200_is_predicted_within_its_bound(hardware: Hardware) -> None:
    """Kernels within 15%, each by a fit that has not seen it; stock steps within 5%."""
    fitted = model_of(hardware.gpu("h200"), hardware)
    assert len(fitted.residuals) == len(hardware.kernels) + len(hardware.steps)
    assert max(abs(r.log_error) for r in fitted.residuals) < 0.15
    assert 0 < fitted.bounds["stock"] < 0.05
    assert fitted.bounds["full"] >= max(abs(r.log_error) for r in fitted.residuals if r.what.startswith("dense"))
    (headline,) = [
        p for p in predict(hardware.model("llama-3.1-8b"), fitted, Load(16384, 128, 256), 192) if p.path == "stock"
    ]
    assert headline.step_ms.low < 72.6 < headline.step_ms.high


def test_an_unknown_gpu_gets_the_wide_bound(hardware: Hardware) -> None:
    known = model_of(hardware.gpu("h200"), hardware)
    carried = model_of(hardware.gpu("a100-40gb"), hardware)
    assert carried.bounds["stock"] > 1 > known.bounds["stock"]
    assert carried.steps == known.steps
    assert transfer(hardware.gpu("a100-40gb"), hardware, known).bounds == carried.bounds
    full = next(
        p for p in predict(hardware.model("llama-3.1-8b"), carried, Load(16384, 128, 256), 192) if p.path == "full"
    )
    assert full.speedup.low == pytest.approx(2943 / 1360), "the reported ratio is what the bound comes from"


def test_pays_only_where_the_whole_range_says_so(hardware: Hardware) -> None:
    fitted = model_of(hardware.gpu("h200"), hardware)
    llama = hardware.model("llama-3.1-8b")

    def pays(prefix: int, concurrency: int) -> dict[str, str]:
        return {p.path: p.pays for p in predict(llama, fitted, Load(prefix, 128, concurrency), 192)}

    assert pays(16384, 256)["full"] == "yes"
    assert pays(512, 64)["cascade"] == "unclear"
    crowded = predict(llama, fitted, Load(16384, 4096, 512), 8192)
    assert not crowded[0].fits


def test_records_replace_and_extend_the_checks(hardware: Hardware) -> None:
    records = [
        kernel_record("dense", samples_us=[us], prefix_tokens=p)
        for p, us in ((2048, 15.0), (8192, 50.0), (16384, 97.0))
    ]
    kernels = kernel_checks(records, hardware)
    assert [(c.op, c.prefix, c.us) for c in kernels] == [
        ("dense", 2048, 15.0),
        ("dense", 8192, 50.0),
        ("dense", 16384, 97.0),
    ]
    faster = model_of(hardware.gpu("h200"), hardware, kernels)
    assert faster.kernels.dense.efficiency > model_of(hardware.gpu("h200"), hardware).kernels.dense.efficiency
    steps = step_checks([serving_record("full", step_s=0.0135, concurrency=256, output_tokens=9)], hardware)
    assert [(c.path, c.batch, c.suffix) for c in steps] == [("full", 256, 68)]
    assert steps[0].ms == pytest.approx(13.5)
    checked = model_of(hardware.gpu("h200"), hardware, kernels, steps)
    measured = next(r for r in checked.residuals if " full " in r.what)
    assert checked.bounds["full"] == pytest.approx(abs(measured.log_error))


def test_gpu_names(hardware: Hardware) -> None:
    assert gpu_key("NVIDIA H200", hardware) == "h200"
    assert gpu_key("NVIDIA A100-SXM4-40GB", hardware) == "a100-40gb"
    assert gpu_key("CPU: x", hardware) is None


def test_unknown_names_are_one_line(hardware: Hardware) -> None:
    with pytest.raises(UsageError, match="did you mean 'h200'"):
        hardware.gpu("h20")
    with pytest.raises(UsageError, match="model 'llama' is unknown"):
        hardware.model("llama")
    assert math.isfinite(hardware.gpu("h200").l2_bytes_per_s)
