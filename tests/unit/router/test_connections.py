"""Who keeps a connection, and who loses it where there are too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.http.connections import ConnectionTable, client_address


def table(connections_max: int = 4, per_address_max: int = 3) -> ConnectionTable[int]:
    return ConnectionTable(connections_max=connections_max, per_address_max=per_address_max)


def test_the_longest_idle_connection_of_a_full_address_goes() -> None:
    connections = table()
    for number in range(3):
        assert connections.open(number, "a") == (True, None)
    connections.idle(0)  # it has been used since: 1 is the oldest now
    assert connections.open(3, "a") == (True, 1)
    assert connections.open(4, "b") == (True, None)
    assert connections.open(5, "b") == (True, 2)  # full in all: the oldest of any address
    assert len(connections) == 4


def test_a_connection_that_serves_is_never_closed_for_another() -> None:
    connections = table()
    for number in range(3):
        connections.open(number, "a")
        connections.serving(number)
    assert connections.open(3, "a") == (False, None)
    assert connections.open(4, "b") == (True, None)
    connections.serving(4)
    assert connections.open(5, "c") == (False, None)
    connections.idle(1)
    assert connections.open(5, "c") == (True, 1)
    connections.idle(1)  # the answer of a closed one ends later
    connections.closed(1)
    assert len(connections) == 4


def test_who_opens_connections_to_keep_them_keeps_nobody_out() -> None:
    connections = table(connections_max=64, per_address_max=16)
    for number in range(2000):
        connections.open(number, f"flood{number % 8}")
        if number % 100 == 0:
            key = 10_000 + number
            assert connections.open(key, "client")[0]
            connections.serving(key)
            connections.closed(key)


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "serving", "idle", "closed"]), st.integers(0, 12)), max_size=200
    )
)
def test_limits_hold_and_nothing_is_forgotten(events: list[tuple[str, int]]) -> None:
    connections = table(connections_max=6, per_address_max=3)
    there: dict[int, bool] = {}  # connection: whether it serves
    for event, number in events:
        if event == "open" and number not in there:
            taken, victim = connections.open(number, str(number % 3))
            if victim is not None:
                assert not there.pop(victim)
            if taken:
                there[number] = False
            else:
                of_address = [serves for one, serves in there.items() if one % 3 == number % 3]
                assert all(of_address if len(of_address) == 3 else there.values())
        elif event == "closed":
            connections.closed(number)
            there.pop(number, None)
        elif event in ("serving", "idle") and number in there:
            getattr(connections, event)(number)
            there[number] = event == "serving"
        assert len(connections) == len(there) <= 6
        assert all(sum(one % 3 == at for one in there) <= 3 for at in range(3))


def test_addresses_of_one_client_count_together() -> None:
    assert client_address("192.0.2.7") == client_address("::ffff:192.0.2.7") == "192.0.2.7"
    assert client_address("2001:db8:1:2::1") == client_address("2001:db8:1:2:ffff::9")
    assert client_address("2001:db8:1:2::1") != client_address("2001:db8:1:3::1")
    assert client_address("fe80::1%eth0") == client_address("fe80::2")
    assert client_address("") == ""
