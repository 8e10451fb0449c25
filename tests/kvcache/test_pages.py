"""The allocator by itself: owners, copies, all or nothing, handles that outlive their requests."""

from __future__ import annotations

import dataclasses

import pytest

from polyflash import SpecError
from polyflash.kvcache.pages import OutOfPages, Pages, Request


def grown(pages: Pages, *lengths: int) -> tuple[Request, ...]:
    made = pages.add(len(lengths))
    pages.commit(pages.reserve(made, lengths))
    pages.check()
    return made


def state(pages: Pages) -> object:
    """All that a failed call must leave alone; the free list as a set."""
    with pages.lock:
        return (
            {r: (list(pages.pages(r)), pages.length(r)) for r in pages.requests()},
            sorted(pages._free),
            list(pages._owners),
        )


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_follow_lengths(page_size: int):
    pages = Pages(40, page_size)
    (a, b) = grown(pages, 0, 7)
    for total in (0, 1, page_size, page_size + 1, 20):
        pages.commit(pages.reserve([a], [total - pages.length(a)]))
        assert len(pages.pages(a)) == -(-total // page_size) and pages.length(a) == total
        pages.check()
    assert not set(pages.pages(a)) & set(pages.pages(b))
    assert pages.num_free == 40 - len(pages.pages(a)) - len(pages.pages(b))


def test_a_reservation_changes_nothing_until_it_is_committed():
    pages = Pages(8, 4)
    (a,) = grown(pages, 3)
    before = state(pages)
    reservation = pages.reserve([a], [9])
    pages.check()
    assert pages.length(a) == 3 and len(pages.pages(a)) == 1 and pages.num_free == 5
    assert reservation.starts == (3,) and len(reservation.taken) == 2 and not reservation.copies
    with pytest.raises(SpecError, match="step open"):
        pages.reserve([a], [1])
    pages.rollback(reservation)
    assert state(pages) == before
    for again in (pages.commit, pages.rollback):
        with pytest.raises(SpecError, match="closed"):
            again(reservation)
    assert state(pages) == before


def test_PF11_all_or_nothing_when_pages_run_out_in_the_middle_of_a_batch():
    pages = Pages(6, 4)
    (a, b, c) = grown(pages, 4, 3, 5)
    before = state(pages)
    with pytest.raises(OutOfPages) as caught:
        pages.reserve([a, b, c], [4, 4, 8])
    assert (caught.value.needed, caught.value.free) == (4, 2) and state(pages) == before
    pages.check()
    pages.commit(pages.reserve([a, b], [4, 5]))  # exactly the two that are left
    assert pages.num_free == 0
    pages.commit(pages.reserve([a, b, c], [0, 0, 3]))  # room in the last page needs no page
    with pytest.raises(OutOfPages):
        pages.reserve([b], [1])


def test_forks_share_pages_and_copy_the_last_before_they_write():
    pages = Pages(16, 4)
    (parent,) = grown(pages, 10)
    first, second = pages.fork(parent, 2)
    shared = list(pages.pages(parent))
    assert [pages.owners(p) for p in shared] == [3, 3, 3] and pages.num_free == 13
    reservation = pages.reserve([first], [1])
    ((source, target, slots),) = reservation.copies
    assert (source, slots) == (shared[2], 2) and pages.owners(shared[2]) == 3
    pages.commit(reservation)
    assert list(pages.pages(first)) == [*shared[:2], target] and pages.owners(shared[2]) == 2
    pages.check()
    pages.commit(pages.reserve([second], [1]))
    assert not pages.reserve([parent], [1]).copies  # nobody else reads its last page any more
    pages.check()


def test_PF11_copies_of_shared_pages_count_too():
    pages = Pages(3, 4)
    (parent,) = grown(pages, 6)
    first, second = pages.fork(parent, 2)
    pages.commit(pages.reserve([first], [1]))
    before = state(pages)
    with pytest.raises(OutOfPages) as caught:
        pages.reserve([second], [1])
    assert (caught.value.needed, caught.value.free) == (1, 0) and state(pages) == before
    pages.free([first])
    with pytest.raises(OutOfPages):
        pages.reserve([second, parent], [1, 3])  # one copy, and one page behind the parent's last
    pages.commit(pages.reserve([second, parent], [1, 1]))
    pages.check()


def test_a_fork_at_a_page_border_copies_nothing():
    pages = Pages(8, 4)
    (parent,) = grown(pages, 8)
    (child,) = pages.fork(parent)
    reservation = pages.reserve([parent, child], [1, 1])
    assert not reservation.copies and [len(entry.pages) for entry in reservation.entries] == [3, 3]
    pages.commit(reservation)
    pages.check()


def test_when_all_owners_write_at_once_the_longest_stays_in_place():
    """Its first new slot lies behind what the others read, so that their copies are right in any order."""
    pages = Pages(4, 8)
    (parent,) = grown(pages, 6)
    short, long = pages.fork(parent, 2)
    pages.truncate([short], [2])
    reservation = pages.reserve([short, parent, long], [1, 1, 1])  # 2, 6 and 6 tokens
    assert sorted(copy.slots for copy in reservation.copies) == [2, 6]
    assert reservation.entries[0].pages[-1] == reservation.copies[0].target
    pages.commit(reservation)
    pages.check()
    assert pages.num_free == 1
    snapshot = pages.snapshot()  # an owner that never writes
    reservation = pages.reserve([short, parent, long][:1], [1])
    assert len(reservation.copies) == 1
    pages.rollback(reservation)
    pages.release(snapshot)


def test_an_open_step_still_reads_the_page_it_will_leave():
    """Two threads: a's step copies a page that b owns too; b may not take it for its own before a is done."""
    pages = Pages(8, 4)
    (a,) = grown(pages, 2)
    (b,) = pages.fork(a)
    first = pages.reserve([a], [1])
    second = pages.reserve([b], [1])
    assert first.copies and second.copies
    pages.commit(first)
    pages.commit(second)
    pages.check()
    assert pages.num_free == 6


def test_PF16_truncation_gives_pages_back_and_only_those():
    pages = Pages(16, 4)
    (a,) = grown(pages, 11)
    (b,) = pages.fork(a)
    assert pages.truncate([a], [4]) == []  # the others are b's
    assert len(pages.pages(a)) == 1 and pages.num_free == 13
    pages.commit(pages.reserve([a], [3]))
    assert set(pages.pages(a)[1:]).isdisjoint(pages.pages(b))
    freed = pages.truncate([b], [0])
    assert len(freed) == 2 and pages.pages(b).tolist() == []
    pages.check()
    with pytest.raises(SpecError, match="at most the 7"):
        pages.truncate([b, a], [0, 8])
    assert pages.length(b) == 0 and pages.length(a) == 7


def test_PF14_B_pag_14_a_page_is_freed_once():
    pages = Pages(8, 4)
    (a, b) = grown(pages, 6, 6)
    with pytest.raises(SpecError, match="twice"):
        pages.free([a, b, a])
    assert pages.num_free == 4
    (fork,) = pages.fork(a)
    assert pages.free([a]) == []  # the fork lives on them
    pages.check()
    for call in (pages.free, lambda r: pages.truncate(r, [0]), lambda r: pages.reserve(r, [1])):
        with pytest.raises(SpecError, match="freed"):
            call([a])
    for call in (pages.pages, pages.length, pages.fork):
        with pytest.raises(SpecError, match="freed"):
            call(a)
    assert len(pages.free([fork])) == 2 and len(pages.free([b])) == 2
    pages.check()
    (other,) = pages.add()
    assert other != a and other.generation > fork.generation
    assert pages.num_free == 8


def test_handles_belong_to_their_allocator():
    one, two = Pages(4, 4), Pages(4, 4)
    (a,) = one.add()
    two.add()
    with pytest.raises(SpecError, match="another cache"):
        two.free([a])
    with pytest.raises(SpecError, match="living request"):
        one.free([3])  # type: ignore[list-item]


def test_a_failing_call_names_the_first_reason_and_changes_nothing():
    pages = Pages(8, 4)
    (a, b) = grown(pages, 6, 6)
    before = state(pages)
    for calls in (
        lambda: pages.reserve([a, b], [1]), lambda: pages.reserve([a], [-1]),
        lambda: pages.reserve([a], [2**40]), lambda: pages.reserve([a], [1.0]),  # type: ignore[list-item]
        lambda: pages.reserve([a], [True]), lambda: pages.reserve([a], [2**31 - 2**20 - 5]),
        lambda: pages.truncate([a, b], [1]), lambda: pages.truncate([a], [-1]),
        lambda: pages.add(-1), lambda: pages.fork(a, -1), lambda: pages.reserve([a, a], [1, 1]),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            calls()
        assert state(pages) == before
    with pytest.raises(SpecError):
        Pages(-1, 4)
    with pytest.raises(SpecError):
        Pages(4, 0)
    assert not Pages(0, 4).reserve([], []).taken


def test_a_snapshot_holds_its_pages():
    pages = Pages(8, 4)
    (a, b) = grown(pages, 6, 3)
    before = state(pages)[0]  # type: ignore[index]
    snapshot = pages.snapshot()
    pages.check()
    pages.free([b])
    assert pages.num_free == 5  # b's page is the snapshot's
    reservation = pages.reserve([a], [1])
    assert len(reservation.copies) == 1  # what the snapshot reads is not written
    with pytest.raises(SpecError, match="open reservations"):
        pages.restore(snapshot)
    pages.commit(reservation)
    (c,) = grown(pages, 9)
    for _ in range(2):
        pages.restore(snapshot)
        pages.check()
        assert state(pages)[0] == before  # type: ignore[index]
        assert pages.num_free == 5
    with pytest.raises(SpecError, match="freed"):
        pages.length(c)
    pages.release(snapshot)
    pages.check()
    for late in (pages.restore, pages.release):
        with pytest.raises(SpecError, match="snapshot"):
            late(snapshot)
    with pytest.raises(SpecError, match="snapshot"):
        Pages(4, 4).restore(snapshot)
    with pytest.raises(SpecError, match="snapshot"):
        pages.restore(None)  # type: ignore[arg-type]
    assert not pages.reserve([a], [1]).copies


def test_PF3_PF4_check_counts_owners_anew():
    """Corrupted on purpose: what no call brings about is found."""

    def broken(damage) -> str:
        pages = Pages(8, 4)
        (a, b) = grown(pages, 6, 6)
        damage(pages, a, b)
        with pytest.raises(RuntimeError) as caught:
            pages.check()
        return str(caught.value)

    def same_page_in_two(pages: Pages, a: Request, b: Request) -> None:
        pages._entries[b].pages[0] = pages._entries[a].pages[0]

    def same_page_twice(pages: Pages, a: Request, b: Request) -> None:
        pages._owners[pages._entries[a].pages[1]] = 0
        pages._free.append(pages._entries[a].pages[1])
        pages._entries[a].pages[1] = pages._entries[a].pages[0]
        pages._owners[pages._entries[a].pages[0]] = 2

    assert "1 owners, of which 2 exist" in broken(same_page_in_two)
    assert "has a page twice" in broken(same_page_twice)
    assert "free with 1 owners" in broken(lambda p, a, b: p._free.append(p._entries[a].pages[0]))
    assert "free twice" in broken(lambda p, a, b: p._free.append(p._free[0]))
    assert "for 99 tokens" in broken(lambda p, a, b: setattr(p._entries[a], "length", 99))
    assert "taken with 0 owners" in broken(lambda p, a, b: p._free.pop())


def test_handles_are_values():
    (a,) = Pages(1, 1).add()
    assert a == dataclasses.replace(a) and hash(a) == hash(dataclasses.replace(a))
    assert repr(a) == "Request(generation=1)"
