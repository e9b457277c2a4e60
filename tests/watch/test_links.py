"""What the kernel says of a process' connections: who does not answer, and whether bytes move."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from fastddp import _C
from repository import ROOT
from waiting import until

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import netns

sys.path.pop()

pytestmark = pytest.mark.tier("nightly")


@pytest.fixture
def ends() -> Iterator[netns.Pair]:
    if why := netns.unavailable():
        pytest.skip(why)
    with netns.pair("100mbit") as pair:
        yield pair


Connection = tuple[socket.socket, socket.socket]


@pytest.fixture
def connection(ends: netns.Pair) -> Iterator[Connection]:
    """From the left end to the right one; both of this process."""
    with ExitStack() as sockets:
        listening = sockets.enter_context(ends[1].socket())
        listening.bind((ends[1].address, 0))
        listening.listen()
        left = sockets.enter_context(ends[0].socket())
        left.connect(listening.getsockname())
        yield left, sockets.enter_context(listening.accept()[0])


def after(seconds: float, links: _C.Links) -> _C.Links:
    time.sleep(seconds)
    links.look()
    return links


def test_who_does_not_acknowledge_is_named_until_it_does(ends: netns.Pair, connection: Connection) -> None:
    links = _C.Links()
    netns.cut(ends[1])  # what is sent arrives, and nothing comes back
    connection[0].send(b"x")
    assert until(lambda: after(0.1, links).unanswered == {ends[1].address})
    netns.limit(ends[1], 1e8)
    assert until(lambda: after(0.1, links).unanswered == set())


def test_a_connection_on_which_nothing_is_sent_is_asked_about_and_left_as_it_was(
    ends: netns.Pair, connection: Connection
) -> None:
    links = _C.Links()
    netns.cut(ends[0])
    assert after(3.0, links).unanswered == set()  # nobody has sent anything
    links.ask()
    # Both are of this process.
    assert until(lambda: after(0.1, links).unanswered == {end.address for end in ends})
    links.leave()
    assert [of.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for of in connection] == [0, 0]


def test_a_process_that_does_not_read_is_no_broken_network(connection: Connection) -> None:
    left, _ = connection
    left.setblocking(False)
    with suppress(BlockingIOError):
        while left.send(bytes(1 << 16)):
            pass
    assert after(3.0, _C.Links()).unanswered == set()


def test_bytes_that_move_are_counted_but_for_those_of_this_machine(connection: Connection) -> None:
    links = after(0, _C.Links())
    near = socket.create_server(("127.0.0.1", 0))
    with near, socket.create_connection(near.getsockname()) as sending, near.accept()[0] as receiving:
        links = after(1.1, links)  # knows them all
        sending.sendall(bytes(100_000))
        assert receiving.recv(1)
        assert after(1.1, links).moved == 0
    left, right = connection
    left.sendall(bytes(100_000))
    missing = 100_000
    while missing:
        missing -= len(right.recv(missing))
    # Acknowledged at one end, received at the other: both are here.
    assert 20_000 < after(1.1, links).moved <= 200_000
    assert after(1.1, links).moved == 0
