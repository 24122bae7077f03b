"""Does elimination find the optimum that enumeration finds, and does it say when it cannot?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given

from autopar.intra_op import eliminate
from autopar.intra_op.eliminate import optimum_by_elimination
from autopar.intra_op.model import Model
from tests.test_bound import models, optimum


@given(models())
def test_the_optimum_is_found(model: Model) -> None:
    best, found = optimum(model), optimum_by_elimination(model)
    assert (found is None) == np.isinf(best)
    if found is not None:
        np.testing.assert_allclose([found.cost, found.bound, model.cost(found.options)], best, atol=1e-9)


def test_large_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = itertools.combinations(range(5), 2)
    clique = Model([np.zeros(3)] * 5, {pair: np.eye(3) for pair in pairs})
    assert optimum_by_elimination(clique) is not None
    monkeypatch.setattr(eliminate, "MOST_ENTRIES", 3**5 - 1)
    assert optimum_by_elimination(clique) is None
