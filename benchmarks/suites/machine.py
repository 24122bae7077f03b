"""The V100s of the paper, their speed set by one measured step.

The preset says what a V100 does by its data sheet, times shares that are commonly reached.  One factor on that is found from
one measured step and from nothing else (:data:`~benchmarks.suites.published.CALIBRATION`): how many times as fast as the preset
says a device does its work, products and memory traffic alike, such that the simulated seconds of that step are those that were
measured.  Links stay as the preset has them; the measured step is one of a single host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.inter_op.terms import AccumulatorDtype
from autopar.methods import TensorParallel
from autopar.planning import make_plan
from autopar.subjects import Demands, Subjected
from benchmarks.suites import half_precision
from benchmarks.suites.published import CALIBRATION, MeasuredStep
from benchmarks.suites.steps import gpt_config, subject_of_model

HOST = "p3.16xlarge"
DEVICES_PER_HOST = 8

TOLERANCE = 1e-3
"""Share by which the simulated seconds of the measured step may be off."""

MOST_GUESSES = 6


@dataclass(frozen=True)
class Calibration:
    """The speed of a device as a share of the preset's, and simulated seconds of the measured step before and after."""

    speed: float
    preset_seconds: float
    seconds: float
    measured: MeasuredStep


def cluster_of(num_devices: int, speed: float = 1.0) -> Cluster:
    """So many V100s, eight to a host, each ``speed`` times as fast as the preset says."""
    hosts = max(1, num_devices // DEVICES_PER_HOST)
    cluster = Cluster.preset(HOST, hosts=hosts).replace(devices_per_host=min(num_devices, DEVICES_PER_HOST))
    device = cluster.device
    rates = {dtype: rate * speed for dtype, rate in device.flops_per_second.items()}
    bandwidth = device.memory_bytes_per_second * speed
    return cluster.replace(device=replace(device, flops_per_second=rates, memory_bytes_per_second=bandwidth))


def calibrated(measured: MeasuredStep = CALIBRATION) -> Calibration:
    """The speed at which the measured step takes as long as it took.

    Seconds are a + b/speed, a for links; from the second guess on two points say what a is.
    """
    subject = subject_of_model(half_precision.gpt(gpt_config(measured.size), measured.batch_size))
    tried = [(1.0, _simulated(subject, measured, 1.0))]
    speed = tried[0][1] / measured.seconds
    while len(tried) < MOST_GUESSES:
        tried.append((speed, _simulated(subject, measured, speed)))
        if math.isclose(tried[-1][1], measured.seconds, rel_tol=TOLERANCE):
            return Calibration(speed, tried[0][1], tried[-1][1], measured)
        (before, slow), (after, fast) = tried[-2:]
        work = (slow - fast) / (1 / before - 1 / after)
        speed = work / (measured.seconds - fast + work / after)
    raise RuntimeError(f"no speed was found in {MOST_GUESSES} guesses: {tried}")


def _simulated(subject: Subjected, measured: MeasuredStep, speed: float) -> float:
    """Seconds of the measured step, planned as Megatron-LM lays it out; memory is not in question."""
    demands = Demands(
        method=TensorParallel(measured.tensor),
        mesh_shape=(measured.data, measured.tensor),
        stages=measured.pipeline,
        num_microbatches=measured.num_microbatches,
        memory_per_device=math.inf,
        accumulator_dtype=AccumulatorDtype.SAME,
    )
    _, plan, _ = make_plan(subject, cluster_of(measured.num_devices, speed), demands)
    return plan.step_seconds
