"""Plans cover every key of every query exactly once, whatever the shape, and are balanced."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixonce.dispatch import Limits, choose
from prefixonce.errors import LayoutError
from prefixonce.step import DecodeStep, Mode, PrefixGroup, Segment, SlotPiece
from prefixonce.workplan import Geometry, plan_prefix, plan_suffix

MODES = (Mode.CASCADE, Mode.DENSE)


def group(rows, tokens, start=10_000):
    pieces, position = [], start
    for length, is_run in tokens:
        pieces.append(Segment(position, length) if is_run else SlotPiece(None, length))
        position += length + 5
    return PrefixGroup(tuple(rows), sum(length for length, _ in tokens), tuple(pieces))


def step_of(groups, batch, suffix=7, heads=2, gqa=4):
    prefix = {row: g.prefix_tokens for g in groups for row in g.rows}
    lengths = tuple(prefix.get(row, 0) + suffix for row in range(batch))
    return DecodeStep(lengths, heads * gqa, heads, 64, tuple(groups))


def plan(step, mode, geometry, num_ctas=None):
    choice = choose(step, mode, Limits(dense_m_eff=0, min_rows=1))
    return plan_prefix(step, choice, geometry, num_ctas or geometry.num_ctas)


def geometry_of(step, num_ctas=16, tile_rows=32, **options):
    return Geometry(step.num_kv_heads, step.gqa_group, num_ctas, tile_rows, **options)


def assert_complete(step, prefix, geometry):
    """Every (row, head) sees each prefix token once, through items whose partial rows do not overlap."""
    read = {}
    written = np.zeros(prefix.partial_rows, int)
    for work in (prefix.dense, prefix.gather):
        assert work.cta_indptr[-1] == len(work.items)
        assert_same_items(work)
        for member, rows, head, key, keys, first_row, *_ in work.items:
            assert rows % geometry.gqa_group == 0
            assert keys > 0
            written[first_row : first_row + rows] += 1
            for position in range(rows // geometry.gqa_group):
                row = prefix.group_rows[member + position]
                sources = np.arange(prefix.row_sources[row, head])
                queries = prefix.row_first[row, head] + sources * prefix.row_stride[row]
                assert first_row + position * geometry.gqa_group in queries
                assert len(sources) == np.diff(prefix.source_indptr)[prefix.row_tile[row] * step.num_kv_heads + head]
                kind = work is prefix.dense
                read.setdefault((row, head), []).append((kind, key, keys))
    assert (written == 1).all()
    for g in step.groups:
        for row, head in itertools.product(g.rows, range(step.num_kv_heads)):
            runs = sorted((key, keys) for kind, key, keys in read[row, head] if kind)
            loose = sum(keys for kind, _, keys in read[row, head] if not kind)
            for (first, keys), (second, _) in itertools.pairwise(runs):
                assert first + keys <= second, "no key twice"
            assert sum(keys for _, keys in runs) + loose == g.prefix_tokens
            inside = [
                any(p.start_slot <= key and key + keys <= p.start_slot + p.length_tokens for p in _segments(g))
                for key, keys in runs
            ]
            assert all(inside), "a run is never left"


def assert_same_items(work):
    """What a thread block finds through `words` are its items, in their order."""
    words = work.words()
    for cta, (begin, end) in enumerate(itertools.pairwise(work.cta_indptr)):
        found, index = [], words[cta, 7]
        assert index == (cta if begin < end else -1)
        while index >= 0:
            found.append(words[index, :6])
            index = words[index, 6]
        assert np.array_equal(np.reshape(found, (-1, 6)), work.items[begin:end, :6])


def _segments(g):
    return [piece for piece in g.pieces if isinstance(piece, Segment)]


pieces = st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=7)


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), pieces), min_size=1, max_size=4),
    num_ctas=st.integers(1, 40),
    gqa=st.sampled_from([1, 4, 5, 7, 16]),
    split=st.sampled_from([0, 0, 128, 512]),
    mode=st.sampled_from(MODES),
)
def test_every_key_once(sizes, num_ctas, gqa, split, mode):
    batch = sum(count for count, _ in sizes) + 2
    order = iter(np.random.default_rng(0).permutation(batch).tolist())
    groups = [
        group(sorted(itertools.islice(order, count)), tokens, 10_000 * (index + 1))
        for index, (count, tokens) in enumerate(sizes)
    ]
    step = step_of(groups, batch, gqa=gqa)
    geometry = geometry_of(step, num_ctas, split_tokens=split)
    assert_complete(step, plan(step, mode, geometry), geometry)


@pytest.mark.parametrize(
    ("batch", "prefix", "num_ctas"), [(256, 8192, 132), (256, 16384, 132), (64, 8192, 132), (256, 2048, 16)]
)
def test_blocks_are_dealt_evenly(batch, prefix, num_ctas):
    step = step_of([group(range(batch), [(prefix, True)])], batch, heads=8)
    geometry = geometry_of(step, 132, 128)
    work = plan(step, Mode.DENSE, geometry, num_ctas).dense
    blocks = [
        sum(-(-keys // 128) for keys in work.items[begin:end, 4]) for begin, end in itertools.pairwise(work.cta_indptr)
    ]
    busy = [count for count in blocks if count]
    assert len(busy) <= num_ctas
    assert max(busy) <= 1.1 * sum(blocks) / num_ctas + 1


def test_one_item_per_block_when_heads_divide():
    """8 tiles and 8 heads: 128 of 132 thread blocks with one item each, rather than 132 that cut heads in two."""
    step = step_of([group(range(256), [(8192, True)])], 256, heads=8)
    work = plan(step, Mode.DENSE, geometry_of(step, 132, 128)).dense
    assert len(work.items) == 128
    assert set(work.items[:, 4]) == {4096}


def test_more_tiles_than_thread_blocks():
    groups = [group(range(8 * i, 8 * i + 8), [(300, True)], 1000 * i) for i in range(30)]
    step = step_of(groups, 240)
    geometry = geometry_of(step, 7)
    prefix = plan(step, Mode.DENSE, geometry)
    assert_complete(step, prefix, geometry)
    keys = [prefix.dense.items[a:b, 4].sum() for a, b in itertools.pairwise(prefix.dense.cta_indptr)]
    assert max(keys) <= 1.2 * min(keys)


def test_fixed_splits_ignore_the_batch():
    def cuts(batch):
        step = step_of([group(range(batch), [(1000, True), (300, False)])], batch)
        prefix = plan(step, Mode.DENSE, geometry_of(step, 16, split_tokens=256))
        return {tuple(item[3:5]) for item in prefix.dense.items}, {tuple(item[4:5]) for item in prefix.gather.items}

    assert cuts(2) == cuts(40)


def test_long_chains_keep_their_longest_runs():
    chain = [(130 + i, True) for i in range(9)]
    step = step_of([group(range(4), chain)], 4)
    prefix = plan(step, Mode.DENSE, geometry_of(step))
    assert len({(key, keys) for _, _, _, key, keys, *_ in prefix.dense.items if keys}) >= 4
    assert prefix.packed_tokens == sum(130 + i for i in range(5))
    assert prefix.copies[:, 2].sum() == prefix.packed_tokens
    assert_complete(step, prefix, geometry_of(step))


def test_contradictions_are_refused():
    short = DecodeStep((10, 400), 8, 2, 64, (group((0, 1), [(300, True)]),))
    with pytest.raises(LayoutError, match="does not fit every row"):
        plan(short, Mode.DENSE, geometry_of(short))
    twice = step_of([group((0, 1), [(300, True)]), group((1, 2), [(300, True)])], 3)
    with pytest.raises(LayoutError, match="two groups"):
        plan(twice, Mode.DENSE, geometry_of(twice))


@settings(max_examples=100, deadline=None)
@given(
    suffixes=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    room=st.integers(0, 60),
    split=st.sampled_from([0, 256]),
    grown=st.lists(st.integers(0, 300), min_size=40, max_size=40),
)
def test_suffix_chunks_cover_each_row(suffixes, room, split, grown):
    step = DecodeStep(tuple(suffixes), 8, 2, 64)
    empty = plan(step, Mode.CASCADE, geometry_of(step))
    capacity = len(suffixes) + room + (sum(suffixes) // split if split else 0)
    suffix = plan_suffix(step.seq_lens, empty, capacity, split_tokens=split)
    assert len(suffix.items) <= capacity
    shorter = [length - min(length, less) for length, less in zip(suffixes, grown, strict=False)]
    before = plan_suffix(shorter, empty, capacity, split_tokens=split)
    after = plan_suffix(step.seq_lens, empty, capacity, split_tokens=split, before=before)
    assert suffix_words(after) == suffix_words(suffix), "the step before saves work and changes nothing"
    expected = 0
    for row, length in enumerate(suffixes):
        chunks = suffix.items[suffix.row_indptr[row] : suffix.row_indptr[row + 1]]
        assert (chunks[:, 0] == row).all()
        assert chunks[:, 2].sum() == length
        assert (chunks[:, 2] > 0).all()
        assert (chunks[:, 3] == (len(chunks) == 1)).all(), "a row with one chunk is written directly"
        for chunk in chunks:
            assert chunk[1] == expected
            expected += chunk[2]
    assert suffix.packed_tokens == expected


def suffix_words(plan):
    arrays = (plan.items, plan.row_indptr, plan.copies)
    return [array.tolist() for array in arrays], plan.chunk_tokens, plan.packed_tokens, plan.whole_rows


def test_rows_with_a_prefix_are_never_written_directly():
    step = step_of([group((0, 2), [(300, True)])], 3)
    suffix = plan_suffix(step.seq_lens, plan(step, Mode.DENSE, geometry_of(step)), 100)
    assert suffix.items[:, 3].tolist() == [0, 1, 0]
