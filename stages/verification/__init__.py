"""Whether an answer is right, by rule: extraction, mathematical equality, constraints."""
