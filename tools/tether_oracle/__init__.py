"""The judge outside the product: what the scripted agent really printed against what a reader got.

Nothing here imports the product. `load_truth` reads the agent's ground truth, `judge` compares.
"""

from tether_oracle.truth import LedgerLine, OracleError, Printed, ProcessTruth, StdinLine, Truth, load_truth
from tether_oracle.verdict import (
    COMPLETED_KINDS,
    KINDS,
    Fact,
    Verdict,
    expected_facts,
    fact_of_event,
    judge,
    ledger_duplicates,
)

__all__ = [
    "COMPLETED_KINDS",
    "KINDS",
    "Fact",
    "LedgerLine",
    "OracleError",
    "Printed",
    "ProcessTruth",
    "StdinLine",
    "Truth",
    "Verdict",
    "expected_facts",
    "fact_of_event",
    "judge",
    "ledger_duplicates",
    "load_truth",
]
