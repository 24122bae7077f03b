"""The plan in words and figures, for a terminal, a notebook, or a program."""

from autopar.explain.compare import Comparison
from autopar.explain.explanation import Explanation
from autopar.explain.gather import explain
from autopar.explain.pipeline import PipelineExplanation

__all__ = ["Comparison", "Explanation", "PipelineExplanation", "explain"]
