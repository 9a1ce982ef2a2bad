"""Whether a text satisfies a constraint, of whichever published kind (reward.if_constraints)."""

from __future__ import annotations

from stages.verification import more_constraints
from stages.verification.golds import BadGold
from stages.verification.ifeval import CHECKERS


def check_constraint(constraint_id: str, kwargs: dict, text: str) -> bool:
    """Whether `text` satisfies one constraint of IFEval, IFBench or IFTrain (reward.if_constraints); an empty text
    satisfies none. Raises BadGold for an id or arguments it does not know.
    """
    checker = CHECKERS.get(constraint_id) or more_constraints.CHECKERS.get(constraint_id)
    if checker is None:
        if constraint_id in more_constraints.UNDECIDED:
            raise BadGold(
                f"constraint {constraint_id!r} needs {more_constraints.UNDECIDED[constraint_id]}, which is not here;"
                " leave out the rows that have it"
            )
        raise BadGold(
            f"unknown constraint {constraint_id!r}; write one of {', '.join((*CHECKERS, *more_constraints.CHECKERS))}"
        )
    # Parquet keeps a count with nulls as a float
    given = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in kwargs.items() if v is not None}
    try:
        return bool(checker(text if text.strip() else "?", **given)) and bool(text.strip())
    except (TypeError, AttributeError, IndexError) as error:
        raise BadGold(f"constraint {constraint_id}: wrong arguments {sorted(kwargs)} ({error})") from None
