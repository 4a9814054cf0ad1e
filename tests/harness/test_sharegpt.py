"""ShareGPT files: the sixteen malformed rows, files that are no such file, and the stated synthetic lengths."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixbench.errors import UsageError
from prefixbench.workloads import Workload, build
from prefixbench.workloads.sharegpt_file import read_sharegpt

HELLO = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}


def turns(*said: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in said]}


ROWS: list[Any] = [
    HELLO,
    {"conversations": []},
    {"id": "no key"},
    turns(("human", "only me")),
    turns(("gpt", "x"), ("human", "y"), ("gpt", "z")),
    {"conversations": [{"from": "human"}, {"from": "gpt", "value": "a"}]},
    {"conversations": None},
    turns(("system", "s"), ("human", "q"), ("gpt", "a")),
    turns(("human", "\ud83d"), ("gpt", "a")),
    turns(("human", "😀👩‍👩‍👧"), ("gpt", "a")),
    turns(("human", "   "), ("gpt", "a")),
    turns(("human", "word " * 200_000), ("gpt", "a")),
    turns(("human", 123), ("gpt", "a")),
    HELLO,
    {"conversation": HELLO["conversations"]},
    {"conversations": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "share.json"
    path.write_text(json.dumps(ROWS), encoding="utf-8")
    return path


def make(settings: dict[str, Any], **sizes: Any) -> Workload:
    defaults = {"prefix_tokens": 20, "suffix_tokens": 512, "output_tokens": 64, "concurrency": 6, "vocab_size": 5000}
    return build("sharegpt", settings, **{**defaults, "seed": 0, **sizes})


def test_every_row_is_accepted_or_rejected_with_a_reason(file: Path) -> None:
    read = read_sharegpt(file)
    assert [(turn.row, turn.prompt) for turn in read.accepted if turn.row != 12] == [
        (1, "hi"),
        (5, "y"),
        (8, "q"),
        (10, "😀👩‍👩‍👧"),
        (14, "hi"),
        (16, "u"),
    ]
    assert [turn.row for turn in read.accepted if turn.is_duplicate] == [14]
    reasons = {rejection.row: rejection.reason for rejection in read.rejected}
    assert set(reasons) == {2, 3, 4, 6, 7, 9, 11, 13, 15}
    assert "surrogate" in reasons[9]
    assert "blank" in reasons[11]
    assert "a number" in reasons[13]


def test_the_overlong_row_is_rejected_by_its_tokens_and_the_counts_add_up(file: Path) -> None:
    workload = make({"file": str(file)})
    note = workload.note
    assert (note["rows"], note["rows_accepted"], note["rows_rejected"], note["rows_duplicate"]) == (16, 6, 10, 1)
    assert "prompt is longer than suffix_tokens: 1" in str(note["rejected"])
    assert note["prompts"] == "6 of 6"
    assert len(workload.requests) == 6
    json.dumps(asdict(workload), ensure_ascii=False).encode("utf-8")  # what a record does; row 9 must not break it


def test_fewer_rows_than_asked_for_is_an_error_or_said(file: Path) -> None:
    with pytest.raises(UsageError, match=r"8 prompts were asked for, 6 of its 16 rows are usable .*surrogate"):
        make({"file": str(file)}, concurrency=8)
    fewer = make({"file": str(file), "allow_fewer": True}, concurrency=8)
    assert fewer.note["prompts"] == "6 of 8"
    assert len(fewer.requests) == 6


def test_equal_texts_get_equal_ids_and_seeds_choose_other_rows(file: Path) -> None:
    prompts = [make({"file": str(file)}, concurrency=3, seed=seed, prefix_tokens=0).requests for seed in range(8)]
    assert len({tuple(request.input_ids for request in chosen) for chosen in prompts}) > 1
    everything = make({"file": str(file)}).requests
    assert len({request.input_ids for request in everything}) == 5  # rows 1 and 14 are the same text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[{}] é".encode("latin-1"), "not UTF-8"),
        (b"\xef\xbb\xbf[]", "byte order mark"),
        (b"{}", "holds an object"),
        (b"", "is empty"),
        (b"[1,", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "0 of its 0 rows"),
    ],
    ids=["latin-1", "bom", "object", "empty", "cut off", "deep", "no rows"],
)
def test_a_file_that_is_no_sharegpt_is_one_line_that_names_it(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refusal:
        make({"file": str(path)})
    assert words in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json: No such file"):
        make({"file": str(tmp_path / "nowhere.json")})


def test_without_a_file_lengths_follow_the_stated_distribution() -> None:
    workload = make({"outputs": "reply"}, concurrency=4000, suffix_tokens=100_000, output_tokens=100_000)
    lengths = [len(request.input_ids) - 20 for request in workload.requests]
    assert np.mean(lengths) == pytest.approx(161, rel=0.1)
    assert np.std(np.log(lengths)) == pytest.approx(1.0, rel=0.1)
    assert np.mean([request.max_new_tokens for request in workload.requests]) == pytest.approx(338, rel=0.1)
    assert workload.note["label"] == "synthetic-lengths"
    assert workload.note["prompt_sigma"] == 1.0


def test_outputs_are_fixed_unless_replies_are_asked_for_and_caps_hold() -> None:
    assert {request.max_new_tokens for request in make({}).requests} == {64}
    capped = make({"outputs": "reply"}, concurrency=200, suffix_tokens=50)
    assert max(request.max_new_tokens for request in capped.requests) == 64
    assert max(len(request.input_ids) for request in capped.requests) == 70
