"""Does the simulated V100 convolve as fast as real ones did?  ``python -m benchmarks.suites.check``

The factor of :mod:`benchmarks.suites.machine` is found from a transformer in float16.  Here the same device trains ResNet-50 in
float32, alone, in batches of 112 images, of which NVIDIA published 367 images per second (DeepLearningExamples, PyTorch, ResNet50
v1.5, Training performance: NVIDIA DGX-1 16GB, 1 GPU, FP32; container 21.03; batch of configs.yml).  Nothing is fitted to it.
"""

from __future__ import annotations

import argparse
import math

from autopar.planning import make_plan
from autopar.subjects import Demands
from benchmarks.models import wide_resnet
from benchmarks.suites.machine import calibrated, cluster_of
from benchmarks.suites.steps import subject_of_model

BATCH = 112
PUBLISHED_IMAGES_PER_SECOND = 367.0
RESNET50 = wide_resnet.ResNetConfig(
    wide_resnet.RESNET50, channels=64, width=1, image=224, classes=1000, batch_size=BATCH
)


def simulated_images_per_second(speed: float) -> float:
    """On one device of that speed."""
    subject = subject_of_model(wide_resnet.model_of("resnet50", RESNET50))
    demands = Demands(memory_per_device=math.inf, num_microbatches=1)
    return BATCH / make_plan(subject, cluster_of(1, speed), demands)[1].step_seconds


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--speed", type=float, help="of V100s as a share of the preset's; else found from the measured step"
    )
    speed = parser.parse_args().speed or calibrated().speed
    rate = simulated_images_per_second(speed)
    print(
        f"ResNet-50, float32, batch {BATCH}, one V100 at {speed:.3f} of the preset: {rate:.0f} images per second simulated,"
    )
    print(f"{PUBLISHED_IMAGES_PER_SECOND:.0f} published by NVIDIA ({rate / PUBLISHED_IMAGES_PER_SECOND:.2f} of it)")


if __name__ == "__main__":
    main()
