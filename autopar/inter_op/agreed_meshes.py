"""On which meshes may stages that share their devices lie together, and with which answers?

Stages of an interleaved schedule take turns on one mesh, so what is best for each of them alone need not be there for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.intra_op.priced import PricedStage, Prices


def agreeing(owners: Mapping[int, Prices], prices: Sequence[float]) -> list[dict[int, PricedStage]]:
    """Answers of stages that are to agree on a mesh, for every mesh that may be the best for all of them.

    Where meshes take long to solve, these are the meshes that are best for one of the stages, if there is one for all.
    """
    if all(one.is_quick for one in owners.values()):
        return on_common_meshes({stage: one.by_mesh(prices[stage]) for stage, one in owners.items()})
    best = {stage: one.cheapest(prices[stage]) for stage, one in owners.items()}
    found = []
    for mesh in dict.fromkeys(one.stage.mesh for one in best.values()):
        answers = {
            stage: best[stage] if best[stage].stage.mesh == mesh else one.on(mesh, prices[stage])
            for stage, one in owners.items()
        }
        known = {stage: one for stage, one in answers.items() if one is not None}
        if len(known) == len(answers):
            found.append(known)
    return found or on_common_meshes({stage: one.by_mesh(prices[stage]) for stage, one in owners.items()})


def on_common_meshes(answers: Mapping[int, Sequence[PricedStage]]) -> list[dict[int, PricedStage]]:
    """The answers of all stages on each mesh for which every stage has one."""
    by_mesh = [{one.stage.mesh: one for one in own} for own in answers.values()]
    common = [mesh for mesh in by_mesh[0] if all(mesh in own for own in by_mesh)]
    return [{stage: own[mesh] for stage, own in zip(answers, by_mesh, strict=True)} for mesh in common]


def priced_seconds(together: Mapping[int, PricedStage]) -> float:
    """Of all stages of one answer."""
    return sum(stage.priced_seconds for stage in together.values())
