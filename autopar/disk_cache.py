"""What need not be done twice: where executables and plans lie between two starts of the same job.

Both are named by their content: an executable by XLA's key of its program (JAX's own persistent cache), a plan by a hash of the
program, the cluster and what was demanded.  ``AUTOPAR_CACHE`` names another directory than the user's, or ``none``.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "AUTOPAR_CACHE"
OFF = "none"


def cache_directory(kind: str) -> Path | None:
    """The directory of one kind of things ("executables", "plans"); None if nothing is to be kept."""
    said = os.environ.get(VARIABLE, "")
    if said == OFF:
        return None
    if said:
        return Path(said) / kind
    import platformdirs

    return platformdirs.user_cache_path("autopar") / kind
