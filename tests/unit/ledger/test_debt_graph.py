from __future__ import annotations

from collections.abc import Iterator, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from services.ledger.debt_graph import Circle, Debts, components, find_circle

NAMES = "abcde"


def circles(debts: Debts) -> Iterator[tuple[str, ...]]:
    """Every simple directed circle, once, by trying all walks."""

    def walk(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for following in debts.get(path[-1], {}):
            if following == path[0] and len(path) > 1:
                yield path
            elif following > path[0] and following not in path:
                yield from walk((*path, following))

    for start in debts:
        yield from walk((start,))


def smallest(debts: Debts, circle: tuple[str, ...]) -> int:
    return min(debts[one][circle[(at + 1) % len(circle)]] for at, one in enumerate(circle))


debts_of_a_few = st.dictionaries(
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 6), max_size=5),
    max_size=5,
)


@settings(max_examples=500, deadline=None)
@given(debts_of_a_few, st.integers(1, 6))
def test_the_widest_and_of_those_a_shortest_circle_is_found(
    debts: Mapping[str, Mapping[str, int]], threshold: int
) -> None:
    there = [circle for circle in circles(debts) if smallest(debts, circle) >= threshold]
    found = find_circle(debts, threshold)
    if not there:
        assert found is None
        return
    widest = max(smallest(debts, circle) for circle in there)
    assert found is not None
    assert found.blocks == widest
    assert len(found.instances) == min(len(circle) for circle in there if smallest(debts, circle) == widest)
    assert found.instances in there


@settings(max_examples=200, deadline=None)
@given(debts_of_a_few)
def test_components_are_those_who_reach_each_other(debts: Mapping[str, Mapping[str, int]]) -> None:
    successors = {name: list(debts.get(name, {})) for name in NAMES}

    def reached(start: str) -> set[str]:
        seen, waiting = {start}, [start]
        while waiting:
            for one in successors[waiting.pop()]:
                if one not in seen:
                    seen.add(one)
                    waiting.append(one)
        return seen

    reach = {name: reached(name) for name in NAMES}
    found = components(successors)
    assert sorted(name for names in found for name in names) == list(NAMES)
    for names in found:
        for name in NAMES:
            together = name in reach[names[0]] and names[0] in reach[name]
            assert (name in names) == together


def test_two_that_owe_each_other_are_a_circle() -> None:
    """The paper's Algorithm 1 excuses the edge back."""
    assert find_circle({"a": {"b": 5}, "b": {"a": 7}}, 4) == Circle(instances=("a", "b"), blocks=5)
    assert find_circle({"a": {"b": 5}, "b": {"a": 7}}, 6) is None


def test_the_papers_figure_4_has_no_circle() -> None:
    """Two ways from 1 to 0: Algorithm 1 reports one."""
    assert find_circle({"1": {"0": 9, "3": 9}, "3": {"0": 9}}, 1) is None


def test_a_thousand_instances_take_no_recursion() -> None:
    ring = {f"{number:04}": {f"{(number + 1) % 1000:04}": 3} for number in range(1000)}
    found = find_circle(ring, 3)
    assert found is not None
    assert len(found.instances) == 1000
