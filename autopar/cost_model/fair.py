"""When is each of several activities done, if they share what they use fairly?

Activity i has a size, runs at a rate x_i ≤ limit_i, and takes a_ir · x_i of each resource r, which gives c_r:

    Σ_i a_ir · x_i ≤ c_r      for every r

The rates are max-min fair: all rise together from zero; an activity stops rising at its limit, or when a resource of it is
full (progressive filling; Bertsekas and Gallager, Data Networks, section 6.5).  Whenever an activity begins or ends, the
rates change of those that are joined to it by shared resources, and of no others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.errors import InternalError

Usage = tuple[tuple[int, float], ...]  # (resource, what it takes of it per unit of rate)


@dataclass(slots=True)
class _Activity:
    left: float
    limit: float
    usage: Usage
    rate: float = 0.0
    since_seconds: float = 0.0
    version: int = -2  # as no entry of the heap


class FairClock:
    """Simulated time: activities and timers go in under a key of the caller's, and come out when they are done.

    Those that are done at the same time come out in the order in which their ends were found; nothing else decides it.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self.now_seconds = 0.0
        self._capacities = capacities
        self._running: dict[int, _Activity] = {}
        self._users: list[dict[int, None]] = [{} for _ in capacities]
        self._changed: dict[int, None] = {}
        self._heap: list[
            tuple[float, int, int, int]
        ] = []  # seconds, number, key, version of the activity (-1: a timer)
        self._pushed = 0

    def wait(self, key: int, seconds: float) -> None:
        """A timer."""
        self._push(self.now_seconds + seconds, key, -1)

    def start(self, key: int, size: float, limit: float, usage: Usage) -> None:
        """An activity of ``size`` units of its rate × second; without usage or size it is a timer."""
        if not usage or not size:
            self.wait(key, size / limit)
            return
        self._running[key] = _Activity(size, limit, usage, 0.0, self.now_seconds)
        for resource, _ in usage:
            self._users[resource][key] = None
            self._changed[resource] = None

    def next_done(self) -> int | None:
        """The key of what is done next, ``now_seconds`` being the time of it; None if nothing runs."""
        heap = self._heap
        while True:
            if self._changed and (not heap or heap[0][0] > self.now_seconds):
                self._settle()
            if not heap:
                return None
            seconds, _, key, version = heapq.heappop(heap)
            if version >= 0:
                activity = self._running.get(key)
                if activity is None or activity.version != version:
                    continue
                del self._running[key]
                for resource, _ in activity.usage:
                    del self._users[resource][key]
                    self._changed[resource] = None
            self.now_seconds = seconds
            return key

    def _push(self, seconds: float, key: int, version: int) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (seconds, self._pushed, key, version))

    def _settle(self) -> None:
        """New rates for all that share, directly or not, a resource whose users changed."""
        running, now = self._running, self.now_seconds
        while self._changed:
            keys = self._joined(self._changed.popitem()[0])
            if not keys:
                continue
            activities = [running[key] for key in keys]
            rates = fair_rates([(activity.limit, activity.usage) for activity in activities], self._capacities)
            for key, activity, rate in zip(keys, activities, rates, strict=True):
                if rate != activity.rate:
                    activity.left = max(0.0, activity.left - activity.rate * (now - activity.since_seconds))
                    activity.rate, activity.since_seconds = rate, now
                    activity.version = self._pushed  # unique, so that what was pushed for it before is void
                    self._push(now + activity.left / rate, key, activity.version)

    def _joined(self, resource: int) -> list[int]:
        """The activities joined to a resource; what they use is settled with it."""
        found: dict[int, None] = dict(self._users[resource])
        queue = list(found)
        seen = {resource}
        while queue:
            for other, _ in self._running[queue.pop()].usage:
                if other not in seen:
                    seen.add(other)
                    self._changed.pop(other, None)
                    new = [key for key in self._users[other] if key not in found]
                    found.update(dict.fromkeys(new))
                    queue.extend(new)
        return list(found)


def fair_rates(activities: Sequence[tuple[float, Usage]], capacities: Sequence[float]) -> list[float]:
    """The max-min fair rates of activities, given as (limit, usage).

    Raises ``InternalError`` if a rate has no bound, or a resource that is used gives nothing.
    """
    if all(len(usage) == 1 for _, usage in activities) and len({usage[0][0] for _, usage in activities}) == 1:
        return _rates_on_one([(limit, usage[0][1]) for limit, usage in activities], capacities[activities[0][1][0][0]])
    rates = [0.0] * len(activities)
    rising = dict.fromkeys(range(len(activities)))
    spare: dict[int, float] = {}
    users: dict[int, dict[int, float]] = {}
    for number, (_, usage) in enumerate(activities):
        for resource, share in usage:
            spare[resource] = capacities[resource]
            users.setdefault(resource, {})[number] = share
    while rising:
        levels = {resource: spare[resource] / sum(sharing.values()) for resource, sharing in users.items() if sharing}
        level = _checked(min(*levels.values(), *(activities[number][0] for number in rising)))
        done = dict.fromkeys(number for number in rising if activities[number][0] <= level)
        for resource, reached in levels.items():
            if reached <= level:
                done.update(dict.fromkeys(users[resource]))
        _stop(done, level, activities, spare, users)
        for number in done:
            rates[number] = level
            del rising[number]
    return rates


def _rates_on_one(activities: Sequence[tuple[float, float]], capacity: float) -> list[float]:
    """The rates of activities, given as (limit, share), that use the same resource and no other: most often so."""
    rates = [0.0] * len(activities)
    spare, shares = capacity, sum(share for _, share in activities)
    by_limit = sorted(range(len(activities)), key=lambda number: activities[number][0])
    for place, number in enumerate(by_limit):
        limit, share = activities[number]
        if limit * shares > spare:
            level = _checked(spare / shares)
            for other in by_limit[place:]:
                rates[other] = level
            break
        rates[number] = _checked(limit)
        spare -= limit * share
        shares -= share
    return rates


def _stop(
    done: Iterable[int],
    level: float,
    activities: Sequence[tuple[float, Usage]],
    spare: dict[int, float],
    users: dict[int, dict[int, float]],
) -> None:
    """Take what stopped rising out of what the others may have."""
    for number in done:
        for resource, share in activities[number][1]:
            del users[resource][number]
            spare[resource] = max(0.0, spare[resource] - share * level)


def _checked(rate: float) -> float:
    if not 0 < rate < float("inf"):
        raise InternalError(f"a rate of {rate}; give every resource more than nothing, every activity a bound")
    return rate
