"""Who owes whom, and the circle of debts that is worth settling (DGFM: Infinite-LLM, section 4.5). No I/O.

The paper's Algorithm 1 is not followed as printed. It keeps one `visited` mark a node and reports a circle
where a neighbour is visited and is not the node it came from. That is the test for undirected graphs. On the
directed graph of debts it fails both ways: two instances that owe each other are never found, for the edge
back is excused, and any two ways from one node to another are reported though they close no circle (in the
paper's own figure 4, where 1 borrows from 0 and 3, and 3 from 0). Here a circle is what the theory says:
a walk inside one strongly connected component.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Debts = Mapping[str, Mapping[str, int]]  # debtor to creditor to blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """Each instance owes at least `blocks` to the next one, the last one to the first."""

    instances: tuple[str, ...]
    blocks: int


def find_circle(debts: Debts, threshold: int) -> Circle | None:
    """The circle whose smallest debt is the greatest, and of those a shortest one; None where no circle has
    `threshold` blocks on each of its edges. The order of the debts does not matter.

    A settled circle loses its smallest debt, so this one brings most blocks home; a short one has the fewest
    instances that must agree. About E log E steps for E debts.
    """
    edges = {
        debtor: {
            creditor: blocks
            for creditor, blocks in owed.items()
            if blocks >= max(threshold, 1) and creditor != debtor
        }
        for debtor, owed in debts.items()
    }
    weights = sorted({blocks for owed in edges.values() for blocks in owed.values()})
    best: dict[str, list[str]] | None = None
    low, high = 0, len(weights)
    while low < high:  # the greatest weight at which a circle is left
        middle = (low + high) // 2
        inside = _circular(edges, weights[middle])
        if inside:
            best, low = inside, middle + 1
        else:
            high = middle
    if best is None:
        return None
    circle = _shortest(best)
    # It starts at its least name: the same circle always has the same form.
    first = circle.index(min(circle))
    circle = circle[first:] + circle[:first]
    return Circle(
        instances=tuple(circle),
        blocks=min(edges[one][circle[(at + 1) % len(circle)]] for at, one in enumerate(circle)),
    )


def components(successors: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The strongly connected components (Tarjan 1972), without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for root in successors:
        if root in index:
            continue
        work = [(root, iter(successors[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for successor in rest:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    stack.append(successor)
                    on_stack.add(successor)
                    work.append((successor, iter(successors.get(successor, ()))))
                    break
                if successor in on_stack:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    found.append(stack[cut:])
                    on_stack.difference_update(stack[cut:])
                    del stack[cut:]
    return found


def _circular(edges: Debts, weight: int) -> dict[str, list[str]]:
    """Edges of at least `weight` that lie on a circle of such edges."""
    heavy = {
        debtor: sorted(creditor for creditor, blocks in owed.items() if blocks >= weight)
        for debtor, owed in sorted(edges.items())
    }
    component = {
        name: number for number, names in enumerate(components(heavy)) if len(names) > 1 for name in names
    }
    return {
        debtor: inside
        for debtor, owed in heavy.items()
        if debtor in component
        and (inside := [one for one in owed if component.get(one) == component[debtor]])
    }


def _shortest(successors: Mapping[str, Sequence[str]]) -> list[str]:
    """A shortest circle; every node lies on one."""
    best: list[str] = []
    for start in successors:
        before: dict[str, str] = {}
        waiting = deque([start])
        while waiting and start not in before:
            node = waiting.popleft()
            for successor in successors[node]:
                if successor not in before:
                    before[successor] = node
                    waiting.append(successor)
        walk = [start]
        while (node := before[walk[-1]]) != start:
            walk.append(node)
        if not best or len(walk) < len(best):
            best = walk[::-1]
        if len(best) == 2:
            break
    return best
