"""The models of the Alpa paper on its clusters, planned from descriptions alone and priced in one simulator.

    python -m benchmarks.suites [--suites gpt moe] [--gpus 4 8] [--plans auto published intra_op inter_op megatron]
    python -m benchmarks.suites.check, python -m benchmarks.suites.ranking

* `published`: models, batches, the plans that Alpa found and the throughput that was measured, as data.
* `steps`: the train step of a cell, and the FLOPs that its throughput is counted in.
* `machine`: the V100s, their speed set by one measured step.
* `pricing`: a plan of each kind and what the simulator says of it.
* `rows`: what is kept of it, in a file if there are several runs.
* `report` and `picture`: the table and the picture.
* `check`: the simulated V100 against a ResNet-50 that somebody else measured.
* `ranking`: the order of the systems in the simulator, against the measured order.
"""
