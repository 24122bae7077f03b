"""Does the command line find a user's model, answer with the right exit code, and say what is wrong with its input?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import efforts, measure
from autopar.cli import BAD_INPUT, DIFFERENT, OK, PROFILED_DTYPES, main
from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.explain import verification
from autopar.products import ProductOrder
from autopar.profile_file import default_path, load_profile
from tests import verify_cases

ROOT = Path(__file__).parent.parent


def test_a_case_of_a_module_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-plan", "tests.verify_cases:decorated", "--method", "zero3", "--mesh", "8"]) == OK
    shown = capsys.readouterr().out
    assert "step · zero3 · mesh data=8" in shown
    assert "is what the plan predicted" in shown


def test_a_step_s_own_options_hold_unless_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-plan", "tests.verify_cases:decorated"]) == OK
    assert "step · data_parallel" in capsys.readouterr().out


def test_a_difference_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    exact = verification.Tolerances(wire_bytes=-1.0, small_bytes=-1)
    monkeypatch.setattr(
        "autopar.verify.held_against",
        lambda plan, read, name, tolerances, notes: verification.held_against(plan, read, name, exact, notes),
    )
    assert main(["verify-plan", "tests.verify_cases:decorated"]) == DIFFERENT
    assert "is not what the plan predicted" in capsys.readouterr().out


def test_a_file_outside_any_package_on_virtual_devices(tmp_path: Path) -> None:
    """In a process of its own: the console's own way to devices, a plain file beside its helper, a cluster file."""
    (tmp_path / "sizes.py").write_text("WIDTH = 64\n")
    (tmp_path / "mine.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "from sizes import WIDTH\n"
        "WARM = jnp.ones(2)  # starts the backend, as many modules do\n"
        "def step(w, x):\n"
        "    g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)\n"
        "    return w - g, {}\n"
        "def case():\n"
        "    f32 = jnp.float32\n"
        "    return step, (jax.ShapeDtypeStruct((WIDTH, WIDTH), f32), jax.ShapeDtypeStruct((128, WIDTH), f32))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-m", "autopar", "verify-plan", str(tmp_path / "mine.py") + ":case", "--mesh", "2x2"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (OK, "")
    assert "mesh data=2 × model=2" in ran.stdout


BAD = {
    "tests.verify_cases": "is not MODULE:FUNCTION",
    "tests.no_such_module:case": "No module named 'tests.no_such_module'",
    "tests/no_such_file.py:case": "there is no file tests/no_such_file.py",
    "tests.verify_cases:gtp": "has no 'gtp'; it has",
    "tests.verify_cases:number": "is a int",
    "tests.verify_cases:wrong": "returned int; give a function of no arguments that returns (train_step, args)",
    "tests.verify_cases:not_a_tuple": "args is a tuple",
    "tests.verify_cases:failing": "raised ValueError: no such data set",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_cases_are_exit_code_2_with_a_sentence(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-plan", case]) == BAD_INPUT
    assert BAD[case] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster", "p4d.24xlager"], "did you mean 'p4d.24xlarge'"),
        (["--cluster", "none.json"], "cannot read cluster file none.json"),
        (["--hosts", "2"], "--hosts goes with --cluster"),
        (["--mesh", "3x3"], "mesh"),
        (["--method", "zero4"], "zero4"),
        (["--plan", "none.json"], "cannot read plan file none.json"),
        (["--cluster", "p4d.24xlarge", "--hosts", "2"], "16 devices"),
        (["--compiler", "h100"], "plan for GPUs"),
        (["--compiler", "h10", "--cluster", "p5.48xlarge"], "compiler='h10' is unknown; say \"v100\""),
        (["--compiler", "h100", "--cluster", "p5.48xlarge", "--devices", "8"], "give one"),
    ],
)
def test_bad_options_are_exit_code_2_with_a_sentence(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-plan", "tests.verify_cases:decorated", *options]) == BAD_INPUT
    assert said in capsys.readouterr().err


def test_without_the_compiler_of_gpus_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autopar._compat.has_gpu_compiler", lambda: False)
    options = ["--compiler", "h100", "--cluster", "p5.48xlarge"]
    assert main(["verify-plan", "tests.verify_cases:decorated", *options]) == BAD_INPUT
    assert 'pip install "autopar[gpu-compiler]"' in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["verify"], ["verify-plan"], ["verify-plan", "a:b", "--mesh", "2x0"]])
def test_usage_errors_are_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == BAD_INPUT


def test_a_cluster_file_and_a_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.toy_runs import eight_slow_devices

    cluster, plan = tmp_path / "cluster.json", tmp_path / "plan.json"
    eight_slow_devices().to_file(cluster)
    step, args, kwargs = verify_cases.decorated()
    step.plan(*args, cluster=eight_slow_devices(), method="zero2", **kwargs).save(plan)
    options = ["--cluster", str(cluster), "--plan", str(plan)]
    assert main(["verify-plan", "tests.verify_cases:decorated", *options]) == OK
    assert "step · zero2" in capsys.readouterr().out
    stored = json.loads(cluster.read_text())
    stored["cluster"]["hosts"] = 0
    cluster.write_text(json.dumps(stored))
    assert main(["verify-plan", "tests.verify_cases:decorated", *options]) == BAD_INPUT
    assert "hosts" in capsys.readouterr().err


@pytest.mark.verify
def test_profile_measures_and_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    least = efforts.Effort(
        (1 << 12,),
        (16,),
        ("float32",),
        (1 << 12,),
        (1 << 12,),
        seconds=0.0,
        least_runs=1,
        streamed_bytes=1 << 13,
        operations=(),
        convolutions=(),
        orders=(ProductOrder.PLAIN,),
        use_orders=(ProductOrder.PLAIN,),
        large_side=16,
        uses=(4,),
        work_sides=(8,),
        copied_shape=(8, 16),
        message_bytes=(1 << 10,),
        world_bytes=(1 << 12,),
        looped_features=(4,),
    )
    monkeypatch.setattr(efforts, "QUICK", least)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["profile", "--quick", "--out", str(tmp_path / "mine.json")]) == OK
    assert "all-reduce among 8" in capsys.readouterr().out
    assert Cluster.local(profile=tmp_path / "mine.json").profile == load_profile(tmp_path / "mine.json")
    monkeypatch.setattr(measure, "measure", lambda *_: load_profile(tmp_path / "mine.json"))  # once is enough
    assert main(["profile", "--quick"]) == OK
    stored = default_path("cpu", "cpu", 8)
    assert f"written to {stored}" in capsys.readouterr().out.replace("\n", "")
    assert load_profile(stored).num_devices == 8


def test_a_profile_is_of_the_dtypes_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[efforts.Effort] = []

    def stop(effort: efforts.Effort, say: object) -> None:
        asked.append(effort)
        raise ClusterError("enough")

    monkeypatch.setattr(measure, "measure", stop)
    where = ["--out", str(tmp_path / "mine.json")]
    assert main(["profile", *where]) == BAD_INPUT
    assert main(["profile", *where, "--dtypes", "bfloat16", "float32", "bfloat16"]) == BAD_INPUT
    assert main(["profile", *where, "--quick", "--dtypes", "float64"]) == BAD_INPUT
    assert asked[0] == efforts.FULL and efforts.FULL.dtypes == PROFILED_DTYPES
    assert [one.dtypes for one in asked[1:]] == [("bfloat16", "float32"), ("float64",)]
    there = asked[1].on_accelerators
    assert there is not None and there.dtypes == ("bfloat16", "float32")
    assert there.sides == efforts.FULL.on_accelerators.sides  # type: ignore[union-attr]
    with pytest.raises(SystemExit, match="2"):
        main(["profile", "--dtypes", "int7"])
    assert "float32" in capsys.readouterr().err


def test_a_profile_that_cannot_be_stored_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured"))
    assert main(["profile", "--out", str(tmp_path)]) == BAD_INPUT
    assert "is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["profile", "network"])
def test_where_nothing_can_be_written_nothing_is_measured(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([command, "--out", str(tmp_path / "file" / "measured.json")]) == BAD_INPUT
    assert f"{tmp_path / 'file'} is no directory" in capsys.readouterr().err
