"""The fixed prompts that every measurement asks, so that two measurements can be compared prompt by prompt.

Mixed on purpose: a drafter agrees with its target far more on code and lists than on open prose.
"""

from __future__ import annotations

import hashlib
import json

_TASKS = (
    "Write a Python function that returns the n-th Fibonacci number, iteratively, with a docstring.",
    "Explain to a ten-year-old why the sky is blue.",
    "List the planets of the solar system from the sun outwards, with one fact each.",
    "Solve step by step: a train leaves at 9:40 and arrives at 13:05. How long does it travel?",
    "Write an SQL query that returns the ten customers with the highest total order value in 2024.",
    "Summarise the causes of the First World War in five sentences.",
    "Translate into French: The meeting was moved to Thursday because the director is travelling.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Give the JSON of a user record with name, e-mail, three roles and a postal address.",
    "What are the trade-offs between optimistic and pessimistic locking in databases?",
    "Write a C function that reverses a singly linked list in place.",
    "Compose a polite e-mail that declines a meeting and offers two other dates.",
    "Prove that the square root of two is irrational.",
    "Describe how to make a pot of green tea, in numbered steps.",
    "Write a shell script that deletes log files older than thirty days, with a dry-run option.",
    "Compare three ways to cool a data centre and say when each is the best.",
)
_ANGLES = ("", " Answer briefly.", " Give an example.", " Then name one common mistake.")


def prompts(count: int) -> list[str]:
    """The first ``count`` prompts."""
    every = [task + angle for angle in _ANGLES for task in _TASKS]
    return every[:count]


def prompt_set(count: int, tokens: int) -> str:
    """What names this set: measurements with different sets are never compared."""
    named = json.dumps([prompts(count), tokens]).encode()
    return hashlib.sha256(named).hexdigest()[:16]
