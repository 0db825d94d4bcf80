"""The nearest valid name, for error lines."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`: did you mean X?` for the choice most like `word`, else nothing."""
    near = get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f": did you mean {near[0]}?" if near else ""
