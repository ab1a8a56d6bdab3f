"""Which view of the kvstores follows which."""

from __future__ import annotations

from kvcommons.pb import ledger_pb2, shards_pb2
from kvcommons.shards import ShardView
from services.ledger.shard_views import Report, ShardViews, reports

GRACE_S = 1.0


def present(
    *names: str, synced: int = 0, sessions: bool = False, view: ShardView | None = None
) -> dict[str, Report]:
    return {
        name: Report(
            folder=name.partition(".")[0], name=name, view=view, synced_epoch=synced, has_sessions=sessions
        )
        for name in names
    }


def views(**settings: object) -> ShardViews:
    return ShardViews(grace_s=GRACE_S, draw=lambda: "", **settings)  # type: ignore[arg-type]


def after_grace(stored: ShardView, there: dict[str, Report], **settings: object) -> ShardView | None:
    deciding = views(**settings)
    deciding.next(stored, there, 0.0)
    return deciding.next(stored, there, GRACE_S)


def test_the_first_view_has_one_shard_the_one_with_sessions() -> None:
    there = present("a.1") | present("b.1", sessions=True)
    assert views().next(None, there, 0.0) == ShardView(epoch=1, serving=("b.1",))
    assert views().next(None, {}, 0.0) is None


def test_one_alone_stays_as_it_is() -> None:
    alone = ShardView(epoch=1, serving=("a.1",))
    assert views().next(alone, present("a.1"), 0.0) is None
    assert after_grace(alone, {}) is None  # nobody else has what it has


def test_one_that_comes_joins_and_is_let_in_once_all_have_said_so_of_this_epoch() -> None:
    one = ShardView(epoch=1, serving=("a.1",))
    joining = views().next(one, present("a.1", "b.1"), 0.0)
    assert joining == ShardView(epoch=2, serving=("a.1",), joining=("b.1",))
    assert views().next(joining, present("a.1", "b.1", synced=1), 0.0) is None
    both = views().next(joining, present("a.1", synced=2) | present("b.1"), 0.0)
    assert both == ShardView(epoch=3, serving=("a.1", "b.1"))


def test_sessions_of_another_stack_do_not_join() -> None:
    one = ShardView(epoch=1, serving=("a.1",))
    assert views().next(one, present("a.1") | present("b.1", sessions=True), 0.0) is None


def test_one_that_is_gone_is_dropped_after_a_while() -> None:
    both = ShardView(epoch=3, serving=("a.1", "b.1"))
    deciding = views()
    assert deciding.next(both, present("a.1"), 0.0) is None
    assert deciding.next(both, present("a.1", "b.1"), 0.9) is None
    assert deciding.next(both, present("a.1"), 1.0) is None
    assert deciding.next(both, present("a.1"), 2.0) == ShardView(epoch=4, serving=("a.1",))


def test_of_a_folder_s_processes_the_last_one_has_it() -> None:
    def instance(name: str, folder: str, started_ms: int) -> ledger_pb2.Instance:
        shard = shards_pb2.Shard(folder=folder, name=name)
        return ledger_pb2.Instance(
            id=f"{name}-{started_ms}", service="kvstore", started_ms=started_ms, shard=shard
        )

    there = [instance("a.2", "a", 20), instance("a.1", "a", 10), instance("b.1", "b", 5)]
    assert set(reports(there)) == {"a.2", "b.1"}


def test_nobody_is_dropped_while_who_is_there_is_not_known() -> None:
    both = ShardView(epoch=3, serving=("a.1", "b.1"))
    deciding = views()
    deciding.next(both, present("a.1"), 0.0)
    deciding.pause()
    assert deciding.next(both, present("a.1"), 5.0) is None


def test_of_three_the_two_that_are_left_settle_first() -> None:
    three = ShardView(epoch=5, serving=("a.1", "b.1", "c.1"))
    two = after_grace(three, present("a.1", "c.1"))
    assert two == ShardView(epoch=6, serving=("a.1", "c.1"), settled=False)
    assert after_grace(two, present("a.1")) is None  # it may be the only one with what the first one had
    settled = views().next(two, present("a.1", "c.1", synced=6), 0.0)
    assert settled == ShardView(epoch=7, serving=("a.1", "c.1"))


def test_two_that_are_gone_at_once_stay_in_the_view() -> None:
    three = ShardView(epoch=5, serving=("a.1", "b.1", "c.1"))
    assert after_grace(three, present("a.1")) is None


def test_a_joiner_that_is_gone_holds_up_nobody() -> None:
    joining = ShardView(epoch=2, serving=("a.1",), joining=("b.1",))
    assert after_grace(joining, present("a.1")) == ShardView(epoch=3, serving=("a.1",))


def test_a_folder_that_was_begun_anew_has_lost_its_sessions() -> None:
    """Also where it was the only one: whoever began it anew knows."""
    both = ShardView(epoch=3, serving=("a.1", "b.1"))
    assert views().next(both, present("a.1", "b.2"), 0.0) == ShardView(epoch=4, serving=("a.1",))
    assert views().next(ShardView(epoch=9, serving=("a.1",)), present("a.2"), 0.0) == ShardView(
        epoch=10, serving=("a.2",)
    )


def test_the_operator_says_which_disk_is_lost() -> None:
    alone = ShardView(epoch=4, serving=("a.1",))
    assert views(lost=["a.1"]).next(alone, present("b.1"), 0.0) == ShardView(epoch=5, serving=("b.1",))


def test_etcd_that_forgot_goes_on_where_the_shards_are_once_all_of_them_are_there() -> None:
    both = ShardView(epoch=8, serving=("a.1", "b.1"))
    assert views().next(None, present("a.1", view=both), 0.0) is None
    again = views().next(None, present("a.1", view=both) | present("b.1"), 0.0)
    assert again == ShardView(epoch=9, serving=("a.1", "b.1"))


def test_a_folder_of_another_stack_takes_nothing_over() -> None:
    """Neither by its higher epoch, nor by joining, which would drop what is in it."""
    both = ShardView(epoch=3, serving=("a.1", "b.1"), stack="here")
    foreign = present("c.1", sessions=True, view=ShardView(epoch=50, serving=("c.1",), stack="there"))
    assert after_grace(both, present("a.1", "b.1", view=both) | foreign) is None


def test_a_folder_that_was_put_in_the_only_one_s_place_serves() -> None:
    alone = ShardView(epoch=3, serving=("a.1",), stack="here")
    restored = present("a.2", sessions=True, view=ShardView(epoch=50, serving=("a.2",), stack="there"))
    assert views().next(alone, restored, 0.0) == ShardView(epoch=51, serving=("a.2",), stack="here")
