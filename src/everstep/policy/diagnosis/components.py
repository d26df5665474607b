"""Strongly connected components of a graph of whole numbers, without recursion; knows nothing of ranks."""

from collections.abc import Sequence


def components(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Tarjan's algorithm (SIAM J. Comput. 1, 1972), linear; each component comes after those it leads to.

    Args:
        edges: for each node the nodes that it leads to.
    """
    count = len(edges)
    order = [0] * count
    low = [0] * count
    on_stack = bytearray(count)
    stack: list[int] = []
    found: list[list[int]] = []
    time = 0
    for start in range(count):
        if order[start]:
            continue
        time += 1
        order[start] = low[start] = time
        stack.append(start)
        on_stack[start] = 1
        work = [(start, iter(edges[start]))]
        while work:
            node, heads = work[-1]
            for head in heads:
                if not order[head]:
                    time += 1
                    order[head] = low[head] = time
                    stack.append(head)
                    on_stack[head] = 1
                    work.append((head, iter(edges[head])))
                    break
                if on_stack[head] and order[head] < low[node]:
                    low[node] = order[head]
            else:
                work.pop()
                if work and low[node] < low[work[-1][0]]:
                    low[work[-1][0]] = low[node]
                if low[node] == order[node]:
                    place = len(stack) - 1
                    while stack[place] != node:
                        place -= 1
                    found.append(stack[place:])
                    for one in stack[place:]:
                        on_stack[one] = 0
                    del stack[place:]
    return found
