"""Plans as files: what is written is read back to the bit, anything else is refused by a sentence that helps."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster, Mesh
from autopar.errors import PlanError
from autopar.plan import CollectiveUse, Layout, Memory, Pass, Plan, Prediction, Schedule, SolverReport, Stage, Strategy
from autopar.plan_file import load_plan, save_plan
from autopar.schedule.orders import as_entries, from_entries, make_order
from tests.pipelines import folded

MESH = Mesh(("data", "model"), (2, 4))
ROWS = Layout((("data",), ()))
BOTH = Layout((("data", "model"), ()))
SUMS = Layout(((), ("model",)), ("data",))


def make_plan(stage: Stage, **changes: Any) -> Plan:
    """A plan that a planner might make of a small step; ``changes`` are fields of it."""
    use = CollectiveUse("all-reduce", ("data",), 4096.0, 2, 8192.0, 1.25e-5, "backward", 9, "dot_general at model.py:3")
    memory = Memory(1 << 20, 1 << 19, 1 << 18, 12345, {"parameters": 1 << 20, "activations": 7}, (("state.w", 512),))
    plan = Plan(
        fingerprint="5a" * 32,
        jax_version="0.10.2",
        method="intra_op",
        cluster="toy",
        num_devices=8,
        stages=(stage,),
        in_paths=("state['w']", "batch"),
        out_paths=("[0]['w']",),
        in_layouts=(BOTH, ROWS),
        out_layouts=(BOTH,),
        prediction=Prediction(0.1, 0.2, 0.05, 1e12, 3e9, (use,), memory),
        solver=SolverReport(168797, 12000, 6.5, 0.0, ("data=2 × model=4", "data=8")),
    )
    return dataclasses.replace(plan, **changes)


TOY = make_plan(
    Stage(
        MESH, {0: BOTH, 3: ROWS, 9: SUMS}, {9: ROWS}, {4: Strategy((("data",), (), ("model",)), ()), 7: Strategy(((),))}
    )
)


def stored(plan: Plan, path: Path) -> dict[str, Any]:
    plan.save(path)
    return json.loads(path.read_text())


def refusal(path: Path, content: object) -> str:
    """What is said of a file with this content; it always names the file."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- round trip


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    TOY.save(path)
    back = Plan.load(str(path))
    assert back == TOY
    assert repr(back) == repr(TOY)
    assert dict(back.stages[0].homes) == dict(TOY.stages[0].homes)
    assert back.stages[0].copies == {9: ROWS}
    hiding = dataclasses.replace(TOY, prediction=dataclasses.replace(TOY.prediction, hidden_seconds=0.125))
    hiding.save(path)
    assert Plan.load(path) == hiding != TOY
    assert back.stages[0].strategies == TOY.stages[0].strategies
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_entries_stand_in_the_tables_once(tmp_path: Path) -> None:
    content = stored(TOY, tmp_path / "plan.json")
    assert (content["format"], content["version"]) == ("autopar.plan", 10)
    plan = content["plan"]
    assert plan["layouts"] == [
        {"dims": [["data", "model"], []], "partial": []},
        {"dims": [["data"], []], "partial": []},
        {"dims": [[], ["model"]], "partial": ["data"]},
    ]
    assert plan["stages"][0]["homes"] == [[0, 0], [3, 1], [9, 2]]
    assert plan["stages"][0]["copies"] == [[9, 1]]
    assert (plan["in_layouts"], plan["out_layouts"]) == ([0, 1], [0])
    assert len(plan["strategies"]) == 2


def disjoint_groups(mesh: Mesh, count: int) -> st.SearchStrategy[list[tuple[str, ...]]]:
    """``count`` groups of axes in mesh order, every axis in one of them or in none."""

    def groups(places: list[int]) -> list[tuple[str, ...]]:
        return [tuple(n for n, p in zip(mesh.axis_names, places, strict=True) if p == g) for g in range(count)]

    axes = len(mesh.axis_names)
    return st.lists(st.integers(-1, count - 1), min_size=axes, max_size=axes).map(groups)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    names = draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3, unique=True))
    mesh = Mesh(tuple(names), tuple(draw(st.lists(st.integers(1, 9), min_size=len(names), max_size=len(names)))))
    number = st.floats(0, allow_nan=False, allow_infinity=False)
    whole = st.integers(0, 1 << 62)

    def split(rank: int) -> st.SearchStrategy[tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]]:
        return disjoint_groups(mesh, rank + 1).map(lambda groups: (tuple(groups[:-1]), groups[-1]))

    layouts = st.integers(0, 4).flatmap(split).map(lambda both: Layout(*both))
    strategies = st.integers(0, 4).flatmap(split).map(lambda both: Strategy(*both))
    ids = st.integers(0, 1 << 40)
    stage = Stage(
        mesh,
        draw(st.dictionaries(ids, layouts, max_size=6)),
        draw(st.dictionaries(ids, layouts, max_size=3)),
        draw(st.dictionaries(ids, strategies, max_size=6)),
    )
    axes = disjoint_groups(mesh, 1).map(lambda groups: groups[0])
    use = st.builds(CollectiveUse, st.text(), axes, number, whole, number, number, st.text(), whole, st.text())
    named = st.lists(st.tuples(st.text(), whole), max_size=3).map(tuple)
    memory = st.builds(Memory, whole, whole, whole, whole, st.dictionaries(st.text(), whole), named)
    uses = st.lists(use, max_size=3).map(tuple)
    inputs = draw(st.lists(st.tuples(st.text(), layouts), max_size=4))
    outputs = draw(st.lists(st.tuples(st.text(), layouts), max_size=4))
    gap = st.floats(0, allow_nan=False)
    return Plan(
        *(draw(st.text()) for _ in range(4)),
        num_devices=mesh.size,
        stages=(stage,),
        in_paths=tuple(path for path, _ in inputs),
        out_paths=tuple(path for path, _ in outputs),
        in_layouts=tuple(layout for _, layout in inputs),
        out_layouts=tuple(layout for _, layout in outputs),
        prediction=draw(
            st.builds(Prediction, number, number, number, number, number, uses, memory, st.none() | number)
        ),
        solver=draw(st.builds(SolverReport, whole, whole, number, gap, st.lists(st.text(), max_size=2).map(tuple))),
        num_microbatches=draw(st.integers(1, 1 << 40)),
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(plans())
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    save_plan(plan, path)
    back = load_plan(path)
    assert back == plan
    # repr tells 0.0 from -0.0 and an int from a float; the mappings, which it leaves out, keep their order.
    assert repr(back) == repr(plan)
    for ours, theirs in zip(back.stages, plan.stages, strict=True):
        for field in ("homes", "copies", "strategies"):
            assert list(getattr(ours, field).items()) == list(getattr(theirs, field).items())


def test_numbers_of_planners(tmp_path: Path) -> None:
    """NumPy's scalars become plain numbers; a gap without a bound is infinite and stays so."""
    solver = dataclasses.replace(TOY.solver, gap=np.float64(0.1), variables=np.int64(5))
    prediction = dataclasses.replace(TOY.prediction, flops=np.float64(1 / 3), compute_seconds=0)
    stage = dataclasses.replace(TOY.stages[0], homes={np.int64(3): ROWS})
    plan = dataclasses.replace(TOY, solver=solver, prediction=prediction, stages=(stage,))
    plan.save(tmp_path / "plan.json")
    back = Plan.load(tmp_path / "plan.json")
    assert back == plan
    assert type(back.solver.gap) is float
    assert type(next(iter(back.stages[0].homes))) is int
    unbounded = dataclasses.replace(TOY, solver=dataclasses.replace(TOY.solver, gap=math.inf))
    unbounded.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").solver.gap == math.inf


def test_several_stages(tmp_path: Path) -> None:
    """Each stage's layouts are held against its own mesh, the ends against any."""
    other = Mesh(("extra",), (4,))
    lone = Layout((("extra",),))
    first = Stage(Mesh(("data",), (4,)), {0: ROWS}, {}, {}, (0, 1, 2, 3))
    use = dataclasses.replace(TOY.prediction.collectives[0], axes=("extra",))
    prediction = dataclasses.replace(TOY.prediction, collectives=(use,))
    ends = {"in_layouts": (ROWS, lone), "out_layouts": (lone,), "prediction": prediction}
    second = Stage(other, {5: lone}, {}, {}, (4, 5, 6, 7))
    pipeline = {"stages": (first, second), "cuts": (3,), "schedule": Schedule.GPIPE, "num_microbatches": 2}
    plan = dataclasses.replace(make_plan(first, **ends), **pipeline)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    crossed = dataclasses.replace(plan, stages=(first, dataclasses.replace(second, homes={5: ROWS})))
    with pytest.raises(
        PlanError, match=r"no axis 'data' in mesh extra=4, used at \$\.plan\.stages\[1\]\.homes\[0\]\[1\]"
    ):
        crossed.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"extra=4 has 4 devices, and \$\.plan\.num_devices is 3"):
        dataclasses.replace(plan, stages=plan.stages[::-1], num_devices=3).save(tmp_path / "plan.json")
    for change, message in (
        ({"cuts": ()}, r"\$\.plan\.cuts: 0 cuts for 2 stages"),
        ({"stages": (first, second, first), "cuts": (3, 3)}, r"\$\.plan\.cuts: \[3, 3\] do not ascend"),
        ({"schedule": Schedule.SINGLE}, r"\$\.plan\.schedule: 'single' is no schedule of 2 stages"),
        (
            {"stages": (first, dataclasses.replace(second, devices=(3, 4, 5, 6)))},
            r"stages\[1\]\.devices: the device 3 stands in \$\.plan\.stages\[0\] already",
        ),
        ({"stages": (first, first)}, r"stages: 2 stages on 1 meshes are not spread as the schedule 'gpipe' has it"),
        ({"schedule": Schedule.OWN}, r"\$\.plan\.order: no order stands there for the schedule 'own'"),
        ({"num_devices": 7}, r"stages\[1\]\.devices: there is no device 7, \$\.plan\.num_devices is 7"),
        (
            {"stages": (first, dataclasses.replace(second, devices=()))},
            r"stages\[1\]\.devices: 0 devices for mesh extra=4 of one of 2 stages",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            dataclasses.replace(plan, **change).save(tmp_path / "plan.json")


def test_stages_that_share_meshes(tmp_path: Path) -> None:
    """They lie as the schedule has it; an order of the user's own is data like all else."""
    low, high = (Stage(Mesh(("data",), (4,)), {0: ROWS}, {}, {}, devices) for devices in ((0, 1, 2, 3), (4, 5, 6, 7)))
    first = {"stages": (low, high, low, high), "cuts": (1, 2, 3), "num_microbatches": 1}
    use = dataclasses.replace(TOY.prediction.collectives[0], axes=("data",))
    prediction = dataclasses.replace(TOY.prediction, collectives=(use,))
    ends = {"in_layouts": (ROWS, ROWS), "out_layouts": (ROWS,), "prediction": prediction}
    dealt = dataclasses.replace(make_plan(low, **ends), **first, schedule=Schedule.INTERLEAVED_ONE_F_ONE_B)
    dealt.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == dealt
    assert (
        dealt.meshes_of_stages == (0, 1, 0, 1) and "in 4 stages on 2 meshes, interleaved_1f1b over" in dealt.summary()
    )
    order = make_order(folded, 4, 1)
    own = dataclasses.replace(dealt, schedule=Schedule.OWN, order=as_entries(order), stages=(low, high, high, low))
    own.save(tmp_path / "plan.json")
    back = Plan.load(tmp_path / "plan.json")
    assert back == own and from_entries(back.order, 4, 1) == order
    other = dataclasses.replace(low, mesh=Mesh(("data", "model"), (2, 2)))
    spread = r"\$\.plan\.stages: 4 stages on 2 meshes are not spread as the schedule 'interleaved_1f1b' has it"
    for plan, change, message in (
        (dealt, {"stages": (low, high, high, low)}, spread),
        (
            dealt,
            {"stages": (low, high, other, high)},
            r"stages\[2\]\.mesh: data=2 × model=2 on the devices that are data=4",
        ),
        (dealt, {"order": own.order}, r"\$\.plan\.order: an order stands there for the schedule 'interleaved_1f1b'"),
        (own, {"stages": (low, high, low, high)}, r"are not spread as the schedule 'own' has it"),
        (own, {"order": own.order[:1]}, r"\$\.plan\.order: the stage 1 stands nowhere"),
        (
            own,
            {"order": (*own.order, own.order[0])},
            r"\$\.plan\.order\[2\]\[0\]: the stage 0 stands in .*\[0\] already",
        ),
        (
            own,
            {"order": ((*own.order[0], (Pass.FORWARD, 0, 1)), own.order[1])},
            r"order\[0\]\[4\]: there is no microbatch 1",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            dataclasses.replace(plan, **change).save(tmp_path / "plan.json")


def test_plan_of_a_real_program(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    import autopar

    def step(weights: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            return jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2)

        value, slopes = jax.value_and_grad(loss)(weights)
        return [weight - 0.1 * slope for weight, slope in zip(weights, slopes, strict=True)], value

    shape = jax.ShapeDtypeStruct
    arguments = ([shape((64, 256), "float32"), shape((256, 64), "float32")], shape((32, 64), "float32"))
    train_step = autopar.parallelize(step)
    plan = train_step.plan(*arguments, cluster=Cluster.preset("h200"))
    path = tmp_path / "plan.json"
    plan.save(path)
    back = Plan.load(path)
    assert back == plan
    assert back.stages[0].homes, "the plan says something"
    assert back.summary() == plan.summary()
    assert path.stat().st_size < 50_000


def test_plan_of_a_rematerialised_program(tmp_path: Path) -> None:
    """A barrier lets each of its operands through for itself, so an axis cuts several of its factors."""
    import autopar
    from benchmarks.models import build
    from tests.toy_runs import eight_slow_devices

    model = build("gpt_remat", "toy")
    arguments = model.abstract_state(), model.abstract_batch()
    plan = autopar.parallelize(model.train_step).plan(*arguments, cluster=eight_slow_devices(), method="data_parallel")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_fifty_thousand_values(tmp_path: Path) -> None:
    """The plan of a deep program: saved and loaded within a second, a dozen bytes for each value."""
    layouts = [ROWS, BOTH, SUMS, Layout(((), ("data",)))]
    strategies = [Strategy((("data",), axes)) for axes in ((), ("model",))]
    stage = Stage(
        MESH,
        {value: layouts[value % 4] for value in range(50_000)},
        dict.fromkeys(range(0, 50_000, 7), ROWS),
        {operator: strategies[operator % 2] for operator in range(40_000)},
    )
    plan = make_plan(stage)
    path = tmp_path / "plan.json"
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        plan.save(path)
        back = Plan.load(path)
        seconds.append(time.perf_counter() - started)
    assert back == plan
    assert path.stat().st_size < 97_000 * 12
    assert min(seconds) < 1.0


# ------------------------------------------------------------------------------------------------------------- writing


def test_summary() -> None:
    assert TOY.summary() == "intra_op on data=2 × model=4: 300.000 ms per step, 1.3 MiB per device, gap 0.00%"
    twice = tuple(dataclasses.replace(TOY.stages[0], devices=devices) for devices in ((0, 1), (2, 3)))
    halves = dataclasses.replace(TOY, stages=twice, solver=dataclasses.replace(TOY.solver, gap=0.0123))
    assert halves.summary().startswith(
        "intra_op in 2 stages, single over 1 microbatch, on data=2 × model=4 | data=2 × model=4: "
    )
    assert halves.summary().endswith(", gap 1.23%")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            make_plan(Stage(MESH, dict.fromkeys(range(3), Layout((("modle",),))), {}, {})),
            r"no axis 'modle' in mesh data=2 × model=4, used at \$\.plan\.stages\[0\]\.homes\[0\]\[1\];",
        ),
        (make_plan(TOY.stages[0], in_paths=("batch",)), r"2 layouts for 1 paths"),
        (make_plan(TOY.stages[0], stages=()), r"\$\.plan\.stages"),
        (make_plan(TOY.stages[0], num_microbatches=0), r"\$\.plan\.num_microbatches"),
        (
            make_plan(TOY.stages[0], prediction=dataclasses.replace(TOY.prediction, flops=math.nan)),
            r"Expected `float`, got `null` - at `\$\.plan\.prediction\.flops`",
        ),
        (make_plan(TOY.stages[0], solver=dataclasses.replace(TOY.solver, gap=math.nan)), "does not survive"),
        (make_plan(TOY.stages[0], cluster="\ud800"), "cannot be written as JSON"),
        (make_plan(TOY.stages[0], num_devices=8.0), "cannot be written as JSON"),
        (make_plan(TOY.stages[0], cluster=None), r"Expected `str`, got `null` - at `\$\.plan\.cluster`"),
    ],
)
def test_an_unsound_plan_is_not_written(plan: Plan, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("as before")
    with pytest.raises(PlanError, match=message) as caught:
        plan.save(path)
    assert str(path) in str(caught.value)
    assert path.read_text() == "as before"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    TOY.save(path)
    before = path.read_bytes()
    with path.open("rb") as reader:
        dataclasses.replace(TOY, method="zero3").save(path)
        assert reader.read() == before, "who has the old file open reads on in the old file"
    before = path.read_bytes()
    assert b"zero3" in before

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match=r"cannot write plan file .*plan\.json: No space left on device"):
        dataclasses.replace(TOY, method="other").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_where_the_file_goes(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot write plan file .*: No such file or directory; check the path"):
        TOY.save(tmp_path / "missing" / "plan.json")
    with pytest.raises(PlanError, match="cannot write plan file"):
        TOY.save(tmp_path)
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    TOY.save(link)
    assert link.is_symlink()
    assert Plan.load(target) == TOY
    umask = os.umask(0o027)
    try:
        TOY.save(tmp_path / "shared.json")
    finally:
        os.umask(umask)
    assert (tmp_path / "shared.json").stat().st_mode & 0o777 == 0o640, "not for its owner alone"


# ------------------------------------------------------------------------------------------------------- broken files


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match=r"cannot read plan file .*missing\.json: No such file or directory; check"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(PlanError, match="cannot read plan file"):
        Plan.load(tmp_path)
    Cluster.preset("h200").to_file(path)
    assert "describes a cluster, not a plan; read it with Cluster.from_file" in refusal(path, path.read_text())
    for content in ("", "not JSON", b"\x80\x04\x95\x00", "\ufeff{}", json.dumps(stored(TOY, path)) + "}"):
        assert "is not complete JSON" in refusal(path, content)
    assert "give a file that Plan.save wrote" in refusal(path, b"\xff\xfe")
    assert "Expected `object`, got `array`" in refusal(path, [TOY.fingerprint])
    assert "missing required field `format`" in refusal(path, {"plan": 1})
    assert "is not complete JSON" in refusal(path, '{"format": "autopar.plan", "version": 1, "x": ' + "[" * 100_000)
    assert "$.format is 'alpa', not 'autopar.plan'; this is not a plan file" in refusal(
        path, {"format": "alpa", "version": 1}
    )


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    assert "is not complete JSON" in refusal(tmp_path / "plan.json", pickle.dumps(Trap()))
    assert not (tmp_path / "sprung").exists()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    TOY.save(path)
    text = path.read_text().rstrip()
    for length in range(0, len(text), 11):
        assert "is not complete JSON" in refusal(path, text[:length])


@pytest.mark.parametrize(
    ("version", "unknown"),
    [
        (3, ("opening", "remat", "hosted")),
        (4, ("remat", "hosted")),
        (5, ("hosted",)),
        (6, ()),
        (7, ()),
        (8, ()),
        (9, ()),
    ],
)
def test_files_of_the_versions_before_are_read(version: int, unknown: tuple[str, ...], tmp_path: Path) -> None:
    """They know nothing of loops over layers that are cut, of layers that compute again, of state in host memory, of sums
    that are scattered by hand, of what is hidden, of residuals in host memory, or of shares.
    """
    content = stored(TOY, tmp_path / "plan.json")
    content["version"] = version
    for name in unknown:
        del content["plan"][name]
    if version < 6:
        del content["plan"]["prediction"]["host_seconds"], content["plan"]["prediction"]["memory"]["host_bytes"]
    if version < 8:
        del content["plan"]["prediction"]["hidden_seconds"]
    for stage in content["plan"]["stages"] if version < 7 else ():
        del stage["sum_scatter"]
    for stage in content["plan"]["stages"] if version < 9 else ():
        del stage["hosted"]
    del content["plan"]["shares"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert Plan.load(tmp_path / "plan.json") == TOY


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (11, "$.version is 11, written by a newer release, and this one reads 10; upgrade autopar"),
        (2, "$.version is 2, written by an older release, and this one reads 10; plan again with this release"),
        (0, "$.version is 0, and there is no such version (this release reads 10)"),
        ("1", "Expected `int`, got `str` - at `$.version`"),
    ],
)
def test_other_versions(version: object, message: str, tmp_path: Path) -> None:
    content = stored(TOY, tmp_path / "plan.json")
    content["version"] = version
    assert message in refusal(tmp_path / "plan.json", content)
    content["plan"] = {"what": "a later release keeps here"}
    assert message in refusal(tmp_path / "plan.json", content)


STAGE = ("plan", "stages", 0)
USE = ("plan", "prediction", "collectives", 0)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("comment",), "hi", "unknown field `comment`"),
        (("plan", "methods"), "zero3", "unknown field `methods` - at `$.plan`"),
        ((*STAGE, "remat"), [], "unknown field `remat` - at `$.plan.stages[0]`"),
        (("plan", "layouts", 1, "dim"), [], "unknown field `dim` - at `$.plan.layouts[1]`"),
        ((*USE, "bytes"), 1, "unknown field `bytes` - at `$.plan.prediction.collectives[0]`"),
        (("plan", "num_devices"), "8", "Expected `int`, got `str` - at `$.plan.num_devices`"),
        (("plan", "num_devices"), True, "Expected `int`, got `bool` - at `$.plan.num_devices`"),
        (("plan", "num_devices"), 0, "Expected `int` >= 1 - at `$.plan.num_devices`"),
        (("plan", "num_microbatches"), 0, "Expected `int` >= 1 - at `$.plan.num_microbatches`"),
        (("plan", "schedule"), "2f2b", "Invalid enum value '2f2b' - at `$.plan.schedule`"),
        (("plan", "stages"), [], "Expected `array` of length >= 1 - at `$.plan.stages`"),
        ((*STAGE, "mesh", "axis_sizes", 0), 0, "Expected `int` >= 1 - at `$.plan.stages[0].mesh.axis_sizes[0]`"),
        ((*STAGE, "mesh", "axis_sizes"), [8], "$.plan.stages[0].mesh: mesh axes ('data', 'model') of sizes (8,)"),
        ((*STAGE, "mesh", "axis_names"), ["data", "data"], "give one size for each name, no name twice"),
        ((*STAGE, "mesh", "axis_sizes", 0), 4, "data=4 × model=4 has 16 devices, and $.plan.num_devices is 8"),
        ((*STAGE, "mesh", "axis_sizes", 0), 1, "data=1 × model=4 has 4 devices, and $.plan.num_devices is 8"),
        (
            ("plan", "layouts", 1, "dims", 0),
            ["modle"],
            "$.plan.layouts[1].dims[0]: there is no axis 'modle' in mesh data=2 × model=4, used at $.plan.stages[0]",
        ),
        (
            ("plan", "layouts", 0, "dims", 0),
            ["model", "data"],
            "$.plan.layouts[0].dims[0]: the axes ['model', 'data'] are not in the order of mesh data=2 × model=4",
        ),
        (("plan", "layouts", 0, "dims", 1), ["data"], "$.plan.layouts[0].dims[1]: the axis 'data' is used twice"),
        (("plan", "layouts", 2, "partial"), ["model"], "$.plan.layouts[2].partial: the axis 'model' is used twice"),
        (
            ("plan", "layouts", 0, "dims", 0),
            ["data", "data"],
            "$.plan.layouts[0].dims[0]: the axis 'data' is used twice",
        ),
        (
            ("plan", "strategies", 0, "factors", 2),
            ["m"],
            ", used at $.plan.stages[0].strategies[0][1]; correct it",
        ),
        (("plan", "strategies", 0, "passing"), ["data"], "$.plan.strategies[0].passing: the axis 'data' is used twice"),
        (
            (*STAGE, "homes", 1, 1),
            7,
            "$.plan.stages[0].homes[1][1]: 7 is no place in $.plan.layouts, which has 3 entries",
        ),
        ((*STAGE, "strategies", 0, 1), 2, "2 is no place in $.plan.strategies, which has 2 entries"),
        ((*STAGE, "homes", 1, 1), -1, "Expected `int` >= 0 - at `$.plan.stages[0].homes[1][1]`"),
        ((*STAGE, "homes", 2, 0), 3, "$.plan.stages[0].homes[2][0]: the id 3 stands there twice"),
        ((*STAGE, "copies", 0), [9], "Expected `array` of length 2 - at `$.plan.stages[0].copies[0]`"),
        (("plan", "in_layouts"), [0], "$.plan.in_layouts: 1 layouts for 2 paths in $.plan.in_paths"),
        (("plan", "out_paths"), ["a", "b"], "$.plan.out_layouts: 1 layouts for 2 paths in $.plan.out_paths"),
        (("plan", "in_layouts", 1), 3, "$.plan.in_layouts[1]: 3 is no place in $.plan.layouts"),
        (("plan", "prediction", "flops"), -1.0, "Expected `float` >= 0.0 - at `$.plan.prediction.flops`"),
        (("plan", "prediction", "flops"), None, "Expected `float`, got `null` - at `$.plan.prediction.flops`"),
        (("plan", "prediction", "memory", "temp_bytes"), 0.5, "at `$.plan.prediction.memory.temp_bytes`"),
        (("plan", "prediction", "memory", "by_kind", "x"), -1, "at `$.plan.prediction.memory.by_kind[...]`"),
        (("plan", "solver", "gap"), -0.1, "at `$.plan.solver.gap`"),
        ((*USE, "seconds"), "1", "at `$.plan.prediction.collectives[0].seconds`"),
        ((*USE, "axes"), ["extra"], "$.plan.prediction.collectives[0].axes: there is no axis 'extra'"),
    ],
)
def test_fields_are_checked(place: tuple[Any, ...], value: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    content = stored(TOY, path)
    inner: Any = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    said = refusal(path, content)
    assert message in said
    assert said.endswith("; correct it, or plan again and save anew")


@pytest.mark.parametrize(
    "place", [("version",), ("plan",), ("plan", "fingerprint"), ("plan", "layouts"), (*STAGE, "mesh"), (*USE, "value")]
)
def test_required_fields(place: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    content = stored(TOY, path)
    inner: Any = content
    for key in place[:-1]:
        inner = inner[key]
    del inner[place[-1]]
    assert f"missing required field `{place[-1]}`" in refusal(path, content)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(literal: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    TOY.save(path)
    text = path.read_text()
    assert text.count("1000000000000.0") == 1
    said = refusal(path, text.replace("1000000000000.0", literal))
    assert "is not complete JSON" in said or "Number out of range - at `$.plan.prediction.flops`" in said
