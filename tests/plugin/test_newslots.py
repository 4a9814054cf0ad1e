"""What the host knows of the slots that prefills write: from which batch, for how long, and what it does not know."""

import pytest
import torch

pytestmark = pytest.mark.engine


class Request:
    pass


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def slots(request):
    return lambda *numbers: torch.tensor(numbers, dtype=torch.int64, device=request.param)


@pytest.fixture
def known():
    from prefixonce.plugin.sglang_0516.newslots import NewSlots

    return NewSlots()


def test_requests_of_a_batch_follow_each_other(known, slots):
    first, second = Request(), Request()
    known.launched([first, second], [10, 0], [2, 3], slots(70, 71, 5, 9, 6))
    assert known.of(first, 10, 12).tolist() == [70, 71]
    assert known.of(second, 1, 3).tolist() == [9, 6]
    assert known.of(first, 9, 12) is None, "token 9 was written by an earlier batch"
    assert known.of(first, 10, 13) is None
    assert known.of(Request(), 0, 1) is None


def test_the_last_batch_of_a_request_counts_and_two_are_kept(known, slots):
    first, second = Request(), Request()
    known.launched([first, second], [0, 0], [2, 1], slots(1, 2, 3))
    known.launched([first], [2], [2], slots(4, 5))
    assert known.of(second, 0, 1).tolist() == [3]
    assert known.of(first, 2, 4).tolist() == [4, 5]
    assert known.of(first, 0, 2) is None
    known.launched([Request()], [0], [1], slots(8))
    assert known.of(second, 0, 1) is None


def test_what_is_cached_is_forgotten(known, slots):
    request = Request()
    known.launched([request], [0], [2], slots(1, 2))
    known.launched([request], [2], [1], slots(3))
    known.forget(request)
    assert known.of(request, 0, 2) is None
    assert known.of(request, 2, 3) is None
