"""Interfaces of stages for the tests of lists and of the simulator."""

from __future__ import annotations

from random import Random

from autopar.plan import Schedule
from autopar.schedule.instructions import Part, Task
from autopar.schedule.lists import Executable, Kind, Passage, StageInterface
from autopar.schedule.orders import Order

STATE, INPUT, ACTIVATION, RESIDUAL, GRADIENT_IN, GRADIENT_OUT, SUM = range(7)


def folded(stages: int, microbatches: int) -> Order:
    """Stages 0 and S−1 on the first mesh, 1 and S−2 on the second, …, microbatch by microbatch."""
    rows = []
    for low in range(stages // 2):
        high = stages - 1 - low
        one = (Task.forward(low, 0), Task.forward(high, 0), Task.backward(high, 0), Task.backward(low, 0))
        rows.append(tuple(task._replace(microbatch=number) for number in range(microbatches) for task in one))
    return Order(stages, microbatches, tuple(rows))


def promised_in_flight(schedule: Schedule, num_stages: int, num_microbatches: int, stage: int) -> int:
    """How many microbatches a schedule of one stage on each mesh keeps in flight, by its formula."""
    formulas = {
        Schedule.SINGLE: 1,
        Schedule.GPIPE: num_microbatches,
        Schedule.ONE_F_ONE_B: num_stages - stage,
        Schedule.EAGER_ONE_F_ONE_B: 2 * (num_stages - stage) - 1,
    }
    return min(num_microbatches, formulas[schedule])


def chain(num_stages: int) -> tuple[list[StageInterface], list[Passage]]:
    """A plain pipeline: activations forward, gradients back, sums that update the state."""
    stages, passages = [], []
    each = (INPUT, ACTIVATION, RESIDUAL, GRADIENT_IN, GRADIENT_OUT)
    kinds = {STATE: Kind.ONCE, SUM: Kind.CARRIED, **dict.fromkeys(each, Kind.EACH)}
    for stage in range(num_stages):
        first, last = stage == 0, stage == num_stages - 1
        results = (RESIDUAL,) if last else (RESIDUAL, ACTIVATION)
        operands = (STATE, RESIDUAL, SUM) if last else (STATE, RESIDUAL, SUM, GRADIENT_IN)
        executables = (
            Executable(Part.BEFORE, (), (SUM,)),
            Executable(Part.FORWARD, (STATE, INPUT), results),
            Executable(Part.BACKWARD, operands, (SUM,) if first else (SUM, GRADIENT_OUT)),
            Executable(Part.AFTER, (STATE, SUM), (7,), (STATE, SUM)),
        )
        given = (STATE, INPUT) if first else (STATE,)
        stages.append(StageInterface(executables, {**kinds, 7: Kind.ONCE}, given, (7,)))
        if not last:
            passages.append(Passage(2 * stage, stage, ACTIVATION, stage + 1, INPUT))
            passages.append(Passage(2 * stage + 1, stage + 1, GRADIENT_OUT, stage, GRADIENT_IN))
    return stages, passages


def split_chain(num_stages: int) -> tuple[list[StageInterface], list[Passage]]:
    """The same with the gradients of weights apart: they read the residuals, and what the backward pass left for them."""
    stages, passages = chain(num_stages)
    left = 8
    for number, one in enumerate(stages):
        before, forward, _, after = one.executables
        first, last = number == 0, number == num_stages - 1
        operands = (STATE, RESIDUAL) if last else (STATE, RESIDUAL, GRADIENT_IN)
        backward = Executable(Part.BACKWARD, operands, (left,) if first else (left, GRADIENT_OUT))
        weight = Executable(Part.WEIGHT, (RESIDUAL, left, SUM), (SUM,))
        kinds = {**one.kinds, left: Kind.EACH}
        stages[number] = StageInterface((before, forward, backward, weight, after), kinds, one.given, one.kept)
    return stages, passages


class _Drawn:
    """A random pipeline while it grows; every name is fresh."""

    def __init__(self, random: Random, num_stages: int) -> None:
        self.random = random
        self.kinds: list[dict[int, Kind]] = [{} for _ in range(num_stages)]
        self.parts: list[dict[tuple[Part, int], tuple[list[int], list[int]]]] = [{} for _ in range(num_stages)]
        self.given: list[list[int]] = [[] for _ in range(num_stages)]
        self.passages: list[Passage] = []

    def name(self, stage: int, kind: Kind) -> int:
        name = len(self.kinds[stage])
        self.kinds[stage][name] = kind
        return name

    def part(self, stage: int, part: Part, segment: int = 0) -> tuple[list[int], list[int]]:
        """What it reads, what it writes."""
        return self.parts[stage].setdefault((part, segment), ([], []))

    def write(self, stage: int, part: Part, segment: int = 0) -> int:
        name = self.name(stage, Kind.EACH if part.per_microbatch else Kind.ONCE)
        self.part(stage, part, segment)[1].append(name)
        return name

    def read(self, stage: int, name: int, *parts: tuple[Part, int]) -> None:
        for part in parts:
            reads = self.part(stage, *part)[0]
            if name not in reads:
                reads.insert(self.random.randint(0, len(reads)), name)

    def send(self, source_stage: int, source_name: int, target_stage: int) -> int:
        each = self.kinds[source_stage][source_name] is Kind.EACH
        target = self.name(target_stage, Kind.EACH if each else Kind.ONCE)
        self.passages.append(Passage(len(self.passages), source_stage, source_name, target_stage, target))
        return target

    def some(self, options: list[tuple[Part, int]]) -> list[tuple[Part, int]]:
        return self.random.sample(options, self.random.randint(1, len(options)))


_F, _B, _A0, _A1, _A2 = (Part.FORWARD, 0), (Part.BACKWARD, 0), (Part.AFTER, 0), (Part.AFTER, 1), (Part.AFTER, 2)


def random_pipeline(random: Random, num_stages: int) -> tuple[list[StageInterface], list[Passage]]:
    """Stages that exchange values in all ways that a chain of stages allows.

    Forward values that skip stages or are handed on, values that only a backward reads, gradients that skip stages, values
    made before and given ones, sums and per-microbatch results read at the end on other stages, an exchange between the
    segments at the end; some are donated, kept, or read by nobody.
    """
    drawn = _Drawn(random, num_stages)
    stages = range(num_stages)
    for stage in stages:
        before = drawn.write(stage, *(_B if random.random() < 0.2 else (Part.BEFORE, 0)))
        residual = drawn.write(stage, *_F)
        drawn.read(stage, residual, _B)
        if drawn.kinds[stage][before] is Kind.ONCE:
            drawn.read(stage, before, *drawn.some([_F, _B, _A0]))
        for adds in drawn.some([_F, _B]):
            total = drawn.name(stage, Kind.CARRIED)
            drawn.part(stage, Part.BEFORE)[1].append(total)
            drawn.read(stage, total, adds, _A0)
            drawn.part(stage, *adds)[1].append(total)
        state = drawn.name(stage, Kind.ONCE)
        drawn.given[stage].append(state)
        drawn.read(stage, state, *drawn.some([_F, _B, _A1]))
        rows = drawn.name(stage, Kind.EACH)
        drawn.given[stage].append(rows)
        drawn.read(stage, rows, *drawn.some([_F, _B]))
        for segment in range(3):
            drawn.write(stage, Part.AFTER, segment)
    for _ in range(random.randint(num_stages, 4 * num_stages) if num_stages > 1 else 0):
        _exchange(drawn, *random.sample(stages, 2))
    random.shuffle(drawn.passages)
    return [_interface(drawn, stage) for stage in stages], drawn.passages


def _exchange(drawn: _Drawn, low: int, high: int) -> None:
    """One value from a stage to another, read where a chain of stages lets it be there in time."""
    low, high = sorted((low, high))
    ways = ("forward", "late", "backward", "before", "given", "sum", "each", "after", "relay")
    match drawn.random.choice(ways):
        case "forward":
            there = drawn.send(low, drawn.write(low, *_F), high)
            drawn.read(high, there, *drawn.some([_F, _B]))
        case "late":
            there = drawn.send(high, drawn.write(high, *_F), low)
            drawn.read(low, there, _B)
        case "backward":
            there = drawn.send(high, drawn.write(high, *_B), low)
            drawn.read(low, there, *drawn.some([_B, _A0]))
        case "before":
            there = drawn.send(high, drawn.write(high, Part.BEFORE), low)
            drawn.read(low, there, *drawn.some([_F, _B, _A0]))
        case "given":
            there = drawn.send(low, drawn.given[low][0], high)
            drawn.read(high, there, *drawn.some([_F, _B, _A0]))
        case "sum":
            sums = [name for name, kind in drawn.kinds[high].items() if kind is Kind.CARRIED]
            there = drawn.send(high, drawn.random.choice(sums), low)
            drawn.read(low, there, *drawn.some([_A0, _A1]))
        case "each":
            there = drawn.send(low, drawn.write(low, *drawn.random.choice([_F, _B])), high)
            drawn.read(high, there, _A0)
        case "after":
            for ends in ((low, high), (high, low)):
                segment = drawn.random.choice([0, 1])
                there = drawn.send(ends[0], drawn.write(ends[0], Part.AFTER, segment), ends[1])
                drawn.read(ends[1], there, *([_A1, _A2] if segment == 0 else [_A2]))
        case "relay":
            there = drawn.write(low, *_F)
            for stage in range(low, high):
                there = drawn.send(stage, there, stage + 1)
                drawn.read(stage + 1, there, *drawn.random.choice([[], [_F], [_B]]))
            drawn.read(high, there, *drawn.some([_F, _B]))


def _interface(drawn: _Drawn, stage: int) -> StageInterface:
    sent = {passage.source_name for passage in drawn.passages if passage.source_stage == stage}
    last = {name: part for part in (_F, _B, _A0, _A1, _A2) for name in drawn.parts[stage].get(part, ([], []))[0]}
    kept = {name for name in drawn.kinds[stage] if drawn.random.random() < 0.2}
    executables = []
    for (part, segment), (reads, writes) in drawn.parts[stage].items():
        donates = tuple(
            name
            for name in reads
            if last[name] == (part, segment)
            and name not in sent | kept
            and (drawn.kinds[stage][name] is Kind.EACH or not part.per_microbatch)
            and drawn.random.random() < 0.5
        )
        executables.append(Executable(part, tuple(reads), tuple(writes), donates, segment))
    return StageInterface(tuple(executables), drawn.kinds[stage], tuple(drawn.given[stage]), tuple(sorted(kept)))
