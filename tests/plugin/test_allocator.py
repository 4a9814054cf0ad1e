"""SGLang's real allocators with our index before them: which slots prefills and decode steps get, and how many."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.engine

PAGES = 96
MIN_RUN_PAGES = 4


class Pool:
    """Requests are lists of slots; a prefill gives each of some requests more of them, in one call as SGLang does."""

    def __init__(self, page_size):
        from prefixonce.plugin.sglang_0516.allocator import RunKeeper
        from prefixonce_cpu.allocator import build_allocator

        self.page_size = page_size
        self.allocator = build_allocator(
            PAGES * page_size, page_size=page_size, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
        )
        self.keeper = RunKeeper(self.allocator, MIN_RUN_PAGES * page_size)

    def prefill(self, requests, lens):
        before = torch.tensor([len(request) for request in requests])
        after = before + torch.tensor(lens)
        with self.keeper.prefill(lens):
            if self.page_size == 1:
                slots = self.allocator.alloc(sum(lens))
            else:
                last = torch.tensor([request[-1] if request else -1 for request in requests])
                slots = self.allocator.alloc_extend(before, before, after, after, last, sum(lens))
        if slots is None:
            return False
        for request, part in zip(requests, torch.split(slots, lens), strict=True):
            request += part.tolist()
        return True

    def pages_of(self, request):
        """In order; every page that a request has holds its tokens from the page's first slot on."""
        pages = [slot // self.page_size for slot in request[:: self.page_size]]
        in_order = [page * self.page_size + at for page in pages for at in range(self.page_size)]
        assert request == in_order[: len(request)]
        return pages

    def new_pages(self, requests, lens):
        size = self.page_size
        return sum(-(-(len(r) + new) // size) - -(-len(r) // size) for r, new in zip(requests, lens, strict=True))


def is_run(pages):
    return pages == list(range(pages[0], pages[0] + len(pages)))


batches = st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), min_size=1, max_size=4), max_size=8)


@pytest.mark.parametrize("page_size", [1, 16])
@settings(max_examples=150, deadline=None)
@given(batches=batches, freed=st.lists(st.integers(0, 5), max_size=4))
def test_every_page_has_one_owner_and_what_is_handed_out_is_missing(page_size, batches, freed):
    pool = Pool(page_size)
    requests = [[] for _ in range(6)]
    for number, batch in enumerate(batches):
        unique = dict(batch)
        chosen, lens = [requests[at] for at in unique], list(unique.values())
        need, available = pool.new_pages(chosen, lens), pool.allocator.available_size()
        assert pool.prefill(chosen, lens) == (need * page_size <= available), "SGLang counts on all that is available"
        used = [page for request in requests for page in pool.pages_of(request)]
        assert len(set(used)) == len(used)
        assert 0 not in used, "page 0 is for padding"
        assert pool.allocator.available_size() == (PAGES - len(used)) * page_size
        free = {slot for run in pool.keeper.free_slots() for slot in range(run.start, run.end)}
        assert len(free) == (PAGES - len(used)) * page_size
        if number < len(freed):
            gone = requests[freed[number]]
            if gone:
                pool.allocator.free(torch.tensor(gone))
                gone.clear()


@pytest.mark.parametrize("page_size", [1, 16])
@settings(deadline=None)
@given(
    stretches=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), max_size=12),
    lens=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    ragged=st.integers(0, 15),
)
def test_each_prompt_of_a_batch_lies_in_the_lowest_run_that_holds_it(page_size, stretches, lens, ragged):
    from prefixonce.layout import FreeRuns

    free, at = set(), 0
    for taken, length in stretches:
        free |= set(range(at + taken, at + taken + length)) & set(range(PAGES // 2 + 1))
        at += taken + length
    pool = Pool(page_size)
    loose = list(range(PAGES, PAGES // 2, -1))
    pool.allocator.free_pages = torch.tensor(loose)
    pool.keeper._index = FreeRuns(np.isin(np.arange(PAGES // 2 + 1), list(free)))
    requests = [[] for _ in lens]
    assert pool.prefill(requests, [pages * page_size + ragged % page_size for pages in lens])
    for request, pages in zip(requests, lens, strict=True):
        runs = (range(at, at + pages) for at in sorted(free) if free.issuperset(range(at, at + pages)))
        run = next(runs, None) if pages >= MIN_RUN_PAGES else None
        whole, rest = pool.pages_of(request)[:pages], pool.pages_of(request)[pages:]
        if run is None:
            assert whole == loose[:pages], "a short prompt breaks up no run"
            del loose[:pages]
        else:
            assert whole == list(run)
            free -= set(run)
        assert rest == loose[: len(rest)]
        del loose[: len(rest)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_chunk_goes_on_in_the_page_that_the_last_one_ended_in(page_size):
    pool = Pool(page_size)
    request, other = [], []
    assert pool.prefill([request], [6 * page_size + page_size // 2])
    assert pool.prefill([other, request], [8 * page_size, 8 * page_size])
    pages = pool.pages_of(request)
    assert is_run(pages[:6])
    assert is_run(pages[-8:] if page_size == 1 else pages[7:14])


def test_a_decode_step_as_large_as_a_prefill_takes_loose_slots():
    pool = Pool(1)
    pool.allocator.free_pages = torch.from_numpy(pool.keeper._index.drain(PAGES // 2)[::-1].copy())
    assert pool.allocator.alloc(8).tolist() == list(range(PAGES, PAGES - 8, -1))
    with pool.keeper.prefill([8]):
        assert pool.allocator.alloc(8).tolist() == list(range(1, 9))
        assert pool.allocator.alloc(3).tolist() == [PAGES - 8, PAGES - 9, PAGES - 10], "not what the prefill announced"
    assert pool.allocator.alloc(8).tolist() == list(range(PAGES - 11, PAGES - 19, -1))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prefill_that_finds_too_little_leaves_everything_available(page_size):
    pool = Pool(page_size)
    assert not pool.prefill([[], []], [60 * page_size, 60 * page_size])
    assert pool.allocator.available_size() == PAGES * page_size
    assert len(pool.keeper.free_slots()) == 1
    assert pool.prefill([[]], [PAGES * page_size])
