"""Discrete-event simulation of drafting beside verification; ``docs/scaling.md`` explains model and limits."""

from vllm_jetspecpp.evaluation.pipeline_simulator.acceptance import Acceptance, CommittedTokens, inline_acceptance
from vllm_jetspecpp.evaluation.pipeline_simulator.costs import CostCurve, PipelineCosts
from vllm_jetspecpp.evaluation.pipeline_simulator.figures import Figures
from vllm_jetspecpp.evaluation.pipeline_simulator.profile import Profile
from vllm_jetspecpp.evaluation.pipeline_simulator.setup import Method, Setup
from vllm_jetspecpp.evaluation.pipeline_simulator.simulator import Simulation, simulate

__all__ = [
    "Acceptance",
    "CommittedTokens",
    "CostCurve",
    "Figures",
    "Method",
    "PipelineCosts",
    "Profile",
    "Setup",
    "Simulation",
    "inline_acceptance",
    "simulate",
]
