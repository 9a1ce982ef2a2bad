"""Splits, near duplicates, decontamination, bias audit and statistics of agreement.

Catalogue: data.split, data.dedup, data.decontam, data.bias_audit, data.agreement, data.ifd.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import Counter
from fractions import Fraction
from typing import Callable, Hashable, Iterable, Sequence

from storage.schema import normalise_text

# -- splits -----------------------------------------------------------------------------------------
HALVES_SALT, GENERATED_SALT = "rm-halves", "generated-validation"


def split_position(group_id: str, salt: str) -> float:
    """u in [0, 1): first 16 hex of sha256(salt + ":" + group_id) over 2^64 (`data.split`)."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{group_id}".encode()).digest()[:8], "big") / 2**64


def split_of(group_id: str, salt: str, fractions: dict[str, float]) -> str:
    """Split of a group: cumulative thresholds in the order of `fractions`. New rows never move old ones."""
    u, edge, name = split_position(group_id, salt), 0.0, "train"
    for name, fraction in fractions.items():
        edge += fraction
        if u < edge:
            return name
    return name


def half_of(group_id: str, salt: str = HALVES_SALT) -> str:
    """`rm_a` or `rm_b`: halves for train-RM / test-RM studies."""
    return "rm_a" if split_position(group_id, salt) < 0.5 else "rm_b"


def generated_splits(rows: Iterable[dict], validation_fraction: float) -> dict[str, str]:
    """Split of each prompt that rows were generated for: that of its rows, the held-out one where they disagree.

    A share of the training groups becomes the validation split where nothing is in it, by a salt of its own: under that
    of the ingest stage all training groups have low positions, which leaves none for it.
    """
    splits, groups = {}, {}
    for row in rows:
        groups[row["prompt_id"]] = row["group_id"]
        if splits.get(row["prompt_id"], "train") == "train":
            splits[row["prompt_id"]] = row["split"]
    if "validation" in splits.values():
        return splits
    fractions = {"train": 1.0 - validation_fraction, "validation": validation_fraction}
    return {
        name: split_of(groups[name], GENERATED_SALT, fractions) if split == "train" else split
        for name, split in splits.items()
    }


# -- near duplicates --------------------------------------------------------------------------------
_WORD = re.compile(r"[^\W_]+")


def word_tokens(text: str) -> list[str]:
    """Runs of letters and digits after NFKC and casefold (`data.decontam`)."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def shingles(text: str, k: int = 5, unit: str = "word") -> set:
    """k-shingles of the normalised text: of whitespace words, or of characters."""
    items = normalise_text(text).split() if unit == "word" else normalise_text(text)
    return {tuple(items[i : i + k]) if unit == "word" else items[i : i + k] for i in range(len(items) - k + 1)}


def jaccard(left: set, right: set) -> float:
    """|intersection| / |union|; two empty sets give 0."""
    union = len(left | right)
    return len(left & right) / union if union else 0.0


_PRIME = 4_294_967_311  # the first one above 2^32


class MinHash:
    """MinHash signatures in bands for a Jaccard threshold (128 permutations by default): the smallest (a h + b) mod p
    over the items' hashes h, for random a and b.
    """

    def __init__(self, threshold: float = 0.8, permutations: int = 128, seed: int = 0x5EED):
        import numpy as np

        self._np = np
        rng = np.random.Generator(np.random.Philox(seed))
        self._a = rng.integers(1, 1 << 32, permutations, dtype=np.uint64)
        self._b = rng.integers(0, 1 << 32, permutations, dtype=np.uint64)
        # Rows per band r so that (1/bands)^(1/r) lies just under the threshold: few misses, and the
        # exact Jaccard that follows removes the false candidates.
        self.rows = max(
            (
                r
                for r in range(1, permutations + 1)
                if permutations % r == 0 and (r / permutations) ** (1 / r) <= threshold
            ),
            default=1,
        )
        self.bands = permutations // self.rows

    def keys(self, items: set) -> list[bytes]:
        """One 16-byte key per band; two texts that share a key are candidates."""
        np = self._np
        hashes = np.array(
            [int.from_bytes(hashlib.blake2b(repr(item).encode(), digest_size=4).digest(), "big") for item in items],
            dtype=np.uint64,
        )
        # below 2^64 before the modulus
        mixed = (self._a[:, None] * hashes[None, :] + self._b[:, None]) % np.uint64(_PRIME)
        signature = mixed.min(axis=1)
        return [
            hashlib.blake2b(
                band.to_bytes(4, "big") + signature[band * self.rows : (band + 1) * self.rows].tobytes(), digest_size=16
            ).digest()
            for band in range(self.bands)
        ]


# -- decontamination --------------------------------------------------------------------------------
def ngrams(tokens: Sequence[str] | str, n: int) -> list:
    """All n-grams in order; none where there are fewer than n tokens."""
    return [
        tuple(tokens[i : i + n]) if not isinstance(tokens, str) else tokens[i : i + n]
        for i in range(len(tokens) - n + 1)
    ]


class DecontaminationIndex:
    """n-grams of evaluation texts; asks for each training text whether it overlaps (`data.decontam`).

    mode coverage (Tulu 3): contaminated iff more than `threshold` of an evaluation item's tokens lie
    in shared n-grams; any: iff one n-gram is shared. Texts shorter than n tokens match only as a
    whole. Memory grows with the evaluation texts, not with the training rows.
    """

    def __init__(self, n: int = 8, mode: str = "coverage", threshold: float = 0.5, unit: str = "word"):
        self.n, self.mode, self.threshold, self.unit = n, mode, threshold, unit
        self._lengths: list[int] = []
        self._where: dict[Hashable, list[tuple[int, int]]] = {}
        self._short: dict[Hashable, list[int]] = {}
        self._short_later: dict[Hashable, list[int]] = {}
        self.any_hit: set[int] = set()
        self.best: dict[int, Fraction] = {}

    def tokens(self, text: str) -> list[str]:
        """Tokens of a text in the index's unit."""
        return word_tokens(text) if self.unit == "word" else list(normalise_text(text))

    def add(self, text: str, later: bool = False) -> None:
        """Index one evaluation text. A short `later` turn of a conversation ("Why?") only meets training prompts that
        are nothing else.
        """
        tokens, item = self.tokens(text), len(self._lengths)
        self._lengths.append(len(tokens))
        if len(tokens) < self.n:
            (self._short_later if later else self._short).setdefault(tuple(tokens), []).append(item)
        for start, gram in enumerate(ngrams(tokens, self.n)):
            self._where.setdefault(gram, []).append((item, start))

    def __len__(self) -> int:
        return len(self._lengths)

    def check(self, *turns: str) -> bool:
        """True if the training text, or the user turns of one conversation together, are contaminated; remembers each
        evaluation item's best coverage.
        """
        spots: dict[int, set[int]] = {}
        hit = False
        for tokens in map(self.tokens, turns):
            for gram in set(ngrams(tokens, self.n)):
                for item, start in self._where.get(gram, ()):
                    spots.setdefault(item, set()).update(range(start, start + self.n))
            if len(tokens) < self.n:
                found = (
                    (
                        *self._short.get(tuple(tokens), ()),
                        *(self._short_later.get(tuple(tokens), ()) if len(turns) == 1 else ()),
                    )
                    if tokens
                    else ()
                )
                for item in found:
                    self.any_hit.add(item)
                    self.best[item] = Fraction(1)
                    hit = True
        for item, covered in spots.items():
            self.any_hit.add(item)
            score = Fraction(len(covered), self._lengths[item])
            self.best[item] = max(self.best.get(item, Fraction(0)), score)
            hit = hit or self.mode == "any" or score > self.threshold
        return hit

    def report(self) -> dict:
        """Evaluation items in total, with any shared n-gram, over the threshold, mean coverage."""
        total = len(self._lengths)
        over = sum(score > self.threshold for score in self.best.values())
        return {
            "eval_rows": total,
            "eval_rows_with_any_ngram": len(self.any_hit),
            "eval_rows_over_threshold": over,
            "contamination_rate": (over if self.mode == "coverage" else len(self.any_hit)) / total if total else 0.0,
            "mean_coverage": math.fsum(map(float, self.best.values())) / total if total else 0.0,
        }


# -- bias audit -------------------------------------------------------------------------------------
_INLINE_MARKDOWN = re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__|```")
_LINE_MARKDOWN = re.compile(r"\n(?:\s{0,3}#{1,6}\s|\s*[-*+]\s+\S|\s*\d+[.)]\s+\S)")


def has_markdown(text: str) -> bool:
    """Bold, heading, bullet, numbered item or code fence."""
    if ("**" in text or "__" in text or "```" in text) and _INLINE_MARKDOWN.search(text):
        return True
    return bool(_LINE_MARKDOWN.search("\n" + text))


_LISTS = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+\S", re.M)
_HEADING = re.compile(r"^#{1,6} ", re.M)
_EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf]")
_REFUSES = re.compile(
    r"\b(?:i (?:can't|cannot|can not|won't|will not)|i'm (?:sorry, but|not able to|unable to)|i am (?:sorry, but|not"
    r" able to|unable to)|as an ai\b)"
)
_STOCK = (
    "as an ai language model",
    "certainly!",
    "great question",
    "it's important to note",
    "i hope this helps",
    "delve into",
)
_OPINION = re.compile(r"\b(?:i (?:think|believe|feel)|in my (?:opinion|view)|i'm (?:sure|convinced))\b")
_AGREES = re.compile(
    r"\b(?:i (?:completely |totally |fully )?agree|you(?:'re| are) (?:absolutely |completely |quite"
    r" )?right|absolutely[!,.]|great point|good point)"
)
_MARKS: dict[str, Callable[[str, str], bool]] = {  # name -> (text, the same in lower case) has it
    "markdown": lambda text, low: has_markdown(text),
    "list": lambda text, low: bool(_LISTS.search(text)),
    "heading": lambda text, low: bool(_HEADING.search(text)),
    "code": lambda text, low: "```" in text,
    "emoji": lambda text, low: not text.isascii() and bool(_EMOJI.search(text)),
    "refusal": lambda text, low: bool(_REFUSES.search(low[:300])),
    "stock_phrase": lambda text, low: any(phrase in low for phrase in _STOCK),
}
KEPT_PREFIXES, SHOWN_PREFIXES, LONGEST_PREFIX = 20_000, 10, 3


def script_name(text: str) -> str:
    """Most frequent script among the first hundred letters (latin, cyrillic, cjk ...); none where there is no
    letter.
    """
    if text[:400].isascii():
        return "latin" if any(map(str.isalpha, text[:400])) else "none"
    found = Counter(unicodedata.name(letter, "?").split()[0] for letter in [c for c in text[:400] if c.isalpha()][:100])
    return found.most_common(1)[0][0].lower() if found else "none"


class BiasAudit:
    """Running sums over chosen/rejected texts: bounded memory, JSON-able state (`data.bias_audit`).

    Prefixes are the first one to three words in lower case; the first ``KEPT_PREFIXES`` different ones are counted.
    Quantiles of the length difference are of counts per character up to 100 and per ten beyond.
    """

    FIELDS = (
        "pairs",
        "chars",
        "words",
        "longer_chars",
        "longer_words",
        "equal_chars",
        "cross_model",
        "with_models",
        "first_won",
        "labelled_in_order",
        "gap",
        "gap_gap",
        "gap_won",
        "opinions",
        "agrees_chosen",
        "agrees_rejected",
        *(f"{mark}_{side}" for mark in _MARKS for side in ("chosen", "rejected")),
    )

    def __init__(self, state: dict | None = None):
        state = state or {}
        self.sums = {name: state.get("sums", {}).get(name, 0) for name in self.FIELDS}
        self.models = {side: Counter(state.get("models", {}).get(side, {})) for side in ("chosen", "rejected")}
        self.gaps = Counter({int(gap): n for gap, n in state.get("gaps", {}).items()})
        self.strengths = Counter({int(one): n for one, n in state.get("strengths", {}).items()})
        self.scripts = Counter(state.get("scripts", {}))
        self.prefixes = {prefix: list(counts) for prefix, counts in state.get("prefixes", {}).items()}

    def state(self) -> dict:
        """What a checkpoint keeps."""
        return {
            "sums": dict(self.sums),
            "models": {side: dict(count) for side, count in self.models.items()},
            "gaps": {str(gap): n for gap, n in self.gaps.items()},
            "strengths": {str(one): n for one, n in self.strengths.items()},
            "prefixes": self.prefixes,
            "scripts": dict(self.scripts),
        }

    def add(
        self,
        chosen: str,
        rejected: str,
        models: tuple[str | None, str | None] = (None, None),
        *,
        prompt: str = "",
        first_won: bool | None = None,
        strength: int | None = None,
    ) -> None:
        """Count one pair of texts; lengths are of the stripped texts, in code points and in words. first_won: whether
        the label preferred the answer that was shown first, where the source says which one was."""
        sums, a, b = self.sums, chosen.strip(), rejected.strip()
        split = a.split(), b.split()
        chars, words = len(a) - len(b), len(split[0]) - len(split[1])
        sums["pairs"] += 1
        sums["chars"] += chars
        sums["words"] += words
        sums["longer_chars"] += chars > 0
        sums["equal_chars"] += chars == 0
        sums["longer_words"] += words > 0
        self.scripts[script_name(a)] += 1
        self.gaps[chars if abs(chars) <= 100 else round(chars, -1)] += 1
        low = a.lower().replace("\u2019", "'"), b.lower().replace("\u2019", "'")
        for side, text, lowered in (("chosen", a, low[0]), ("rejected", b, low[1])):
            for mark, found in _MARKS.items():
                sums[f"{mark}_{side}"] += found(text, lowered)
        for index, own in enumerate(split):
            for k in range(1, min(LONGEST_PREFIX, len(own)) + 1):
                prefix = " ".join(own[:k]).lower()
                if prefix in self.prefixes or (len(self.prefixes) < KEPT_PREFIXES and len(prefix) <= 60):
                    self.prefixes.setdefault(prefix, [0, 0])[index] += 1
        if _OPINION.search(prompt.lower().replace("\u2019", "'")):
            sums["opinions"] += 1
            sums["agrees_chosen"] += bool(_AGREES.search(low[0][:300]))
            sums["agrees_rejected"] += bool(_AGREES.search(low[1][:300]))
        if first_won is not None:
            gap = chars if first_won else -chars  # of the answer shown first
            for name, value in (
                ("labelled_in_order", 1),
                ("first_won", first_won),
                ("gap", gap),
                ("gap_gap", gap * gap),
                ("gap_won", gap * first_won),
            ):
                sums[name] += value
        if strength is not None:
            self.strengths[strength] += 1
        if models[0] and models[1]:
            sums["with_models"] += 1
            sums["cross_model"] += models[0] != models[1]
            for side, name in zip(("chosen", "rejected"), models):
                if name in self.models[side] or len(self.models[side]) < 1_000:
                    self.models[side][name] += 1

    def report(self) -> dict:
        """Rates and means; empty where no pair was counted."""
        n = self.sums["pairs"]
        if not n:
            return {}
        out = {
            "pairs": n,
            "char_diff_mean": self.sums["chars"] / n,
            "word_diff_mean": self.sums["words"] / n,
            **{f"char_diff_p{int(100 * q)}": self._quantile(q) for q in (0.1, 0.5, 0.9)},
            "share_chosen_longer_chars": self.sums["longer_chars"] / n,
            "share_equal_chars": self.sums["equal_chars"] / n,
            "share_chosen_longer_words": self.sums["longer_words"] / n,
            **{
                f"{mark}_rate_{side}": self.sums[f"{mark}_{side}"] / n
                for mark in _MARKS
                for side in ("chosen", "rejected")
            },
        }
        found = self.prefix_bias()
        if found:
            out["max_prefix_z"] = max((row["z"] for row in found), key=abs)
        if ordered := self.sums["labelled_in_order"]:
            out |= {"first_position_rate": self.sums["first_won"] / ordered}
            spread = (
                (self.sums["gap_gap"] - self.sums["gap"] ** 2 / ordered)
                * self.sums["first_won"]
                * (1 - self.sums["first_won"] / ordered)
            )
            if spread > 0:
                out["length_label_correlation"] = (
                    self.sums["gap_won"] - self.sums["gap"] * self.sums["first_won"] / ordered
                ) / math.sqrt(spread)
        if opinions := self.sums["opinions"]:
            out |= {
                "prompts_with_opinion": opinions,
                "agreement_rate_chosen": self.sums["agrees_chosen"] / opinions,
                "agreement_rate_rejected": self.sums["agrees_rejected"] / opinions,
            }
        out |= {f"script_{name}": self.scripts[name] / n for name in sorted(self.scripts)}
        out |= {f"strength_{one}": self.strengths[one] for one in sorted(self.strengths)}
        if self.sums["with_models"]:
            out |= {
                "max_model_imbalance": source_share(self.models["chosen"], self.models["rejected"])["max_imbalance"],
                "pairs_cross_model": self.sums["cross_model"],
            }
        return out

    def _quantile(self, q: float) -> int:
        """The least length difference that at least a share ``q`` of the pairs does not exceed."""
        seen, need = 0, q * self.sums["pairs"]
        for gap in sorted(self.gaps):
            seen += self.gaps[gap]
            if seen >= need - 1e-9:
                return gap
        return 0

    def prefix_bias(self) -> list[dict]:
        """The prefixes that tell chosen from rejected answers best, by |z| of their log-odds: {"prefix", "chosen",
        "rejected", "log_odds_ratio", "se", "z"}. Where longer prefixes have the same counts, the longest stands for
        them."""
        n = self.sums["pairs"]
        covered = {
            prefix.rpartition(" ")[0]
            for prefix, counts in self.prefixes.items()
            if counts == self.prefixes.get(prefix.rpartition(" ")[0])
        }
        rows = [
            {"prefix": prefix, "chosen": won, "rejected": lost, **prefix_log_odds(won, n, lost, n)}
            for prefix, (won, lost) in self.prefixes.items()
            if won + lost >= 5 and prefix not in covered
        ]
        return sorted(rows, key=lambda row: (-abs(row["z"]), row["prefix"]))[:SHOWN_PREFIXES]

    def warnings(self) -> list[str]:
        """What a reward model would learn instead of quality; thresholds are the catalogue's choices."""
        report, out = self.report(), []
        if report.get("share_chosen_longer_chars", 0) > 0.6:
            out.append(
                f"the chosen answer is longer in {report['share_chosen_longer_chars']:.1%} of the pairs (more than"
                " 60%): a reward model will learn length; balance the pairs or use a length-debiased reward"
            )
        if report.get("max_model_imbalance", 0) > 0.3 + 1e-9:  # a difference of two shares
            out.append(
                f"one model's share differs by {report['max_model_imbalance']:.2f} between chosen and rejected (more"
                " than 0.3): a reward model will learn that model's style; take chosen and rejected answers of the"
                " same models, or balance them"
            )
        telling = [row for row in self.prefix_bias() if abs(row["z"]) > 3]
        if telling:
            out.append(
                "beginnings of answers tell chosen from rejected ones (|z| above 3): "
                + ", ".join(
                    f"{row['prefix']!r} {row['chosen']} times chosen, {row['rejected']} times rejected"
                    for row in telling[:3]
                )
                + "; a reward model will learn them; balance these pairs"
            )
        return out


def source_share(chosen: Counter | Iterable[str], rejected: Counter | Iterable[str]) -> dict:
    """win_share per model and the largest |chosen share - rejected share|."""
    won, lost = Counter(chosen), Counter(rejected)
    n_won, n_lost = sum(won.values()), sum(lost.values())
    models = sorted(set(won) | set(lost))
    return {
        "win_share": {m: won[m] / (won[m] + lost[m]) for m in models},
        "max_imbalance": (
            max((abs(won[m] / n_won - lost[m] / n_lost) for m in models), default=0.0) if n_won and n_lost else 0.0
        ),
    }


def prefix_log_odds(
    chosen_with: int, n_chosen: int, rejected_with: int, n_rejected: int, smoothing: float = 0.5
) -> dict:
    """Haldane-Anscombe log-odds ratio of a prefix in chosen against rejected, its error and z."""
    a, b = chosen_with + smoothing, n_chosen - chosen_with + smoothing
    c, d = rejected_with + smoothing, n_rejected - rejected_with + smoothing
    ratio, error = math.log(a * d / (b * c)), math.sqrt(1 / a + 1 / b + 1 / c + 1 / d)
    return {"log_odds_ratio": ratio, "se": error, "z": ratio / error}


# -- agreement --------------------------------------------------------------------------------------
def cohen_kappa(confusion: Sequence[Sequence[float]]) -> dict:
    """p_observed, p_expected, kappa (None where p_expected = 1) of a confusion matrix."""
    n = math.fsum(map(math.fsum, confusion))
    if not n:
        return {"p_observed": None, "p_expected": None, "kappa": None}
    observed = math.fsum(confusion[i][i] for i in range(len(confusion))) / n
    rows = [math.fsum(row) / n for row in confusion]
    columns = [math.fsum(column) / n for column in zip(*confusion)]
    expected = math.fsum(a * b for a, b in zip(rows, columns))
    return {
        "p_observed": observed,
        "p_expected": expected,
        "kappa": (observed - expected) / (1 - expected) if expected != 1 else None,
    }


def fleiss_kappa(counts: Sequence[Sequence[int]], times: Sequence[int] | None = None) -> dict:
    """P_bar, P_e, kappa of an items x categories table with the same number of raters per item, rows counted ``times``
    (default once); None without items or with one rater, and kappa where P_e = 1. Raises ValueError where the raters
    differ in number."""
    times = [1] * len(counts) if times is None else times
    n, items = sum(counts[0]) if counts else 0, sum(times)
    if any(sum(row) != n for row in counts):
        raise ValueError(
            "Fleiss's kappa takes items with the same number of labels; leave the others out, or take"
            " krippendorff_alpha"
        )
    if n < 2 or not items:
        return {"P_bar": None, "P_e": None, "kappa": None}
    p_bar = math.fsum(t * (sum(v * v for v in row) - n) / (n * (n - 1)) for row, t in zip(counts, times)) / items
    p_e = math.fsum((sum(v * t for v, t in zip(column, times)) / (items * n)) ** 2 for column in zip(*counts))
    return {"P_bar": p_bar, "P_e": p_e, "kappa": (p_bar - p_e) / (1 - p_e) if p_e != 1 else None}


def krippendorff_alpha(
    units: Sequence[Sequence], metric: str = "nominal", times: Sequence[int] | None = None
) -> float | None:
    """alpha = 1 - D_o/D_e over units of labels, counted ``times`` (default once); units with fewer than two labels are
    dropped. None where D_e = 0 or no unit is left.
    """
    pairs: Counter = Counter()
    for unit, t in zip(units, [1] * len(units) if times is None else times):
        if len(unit) >= 2:
            for i, a in enumerate(unit):
                for j, b in enumerate(unit):
                    if i != j:
                        pairs[a, b] += Fraction(t, len(unit) - 1)
    totals: Counter = Counter()
    for (a, _), value in pairs.items():
        totals[a] += value
    n = sum(totals.values())
    if n <= 1:
        return None

    def distance(a, b) -> float:
        return float(a != b) if metric == "nominal" else float(a - b) ** 2

    observed = math.fsum(float(value) * distance(a, b) for (a, b), value in pairs.items()) / float(n)
    expected = math.fsum(float(totals[a] * totals[b]) * distance(a, b) for a in totals for b in totals) / float(
        n * (n - 1)
    )
    return 1 - observed / expected if expected else None


def bradley_terry(n: int, wins: Sequence[tuple[int, int]], l2: float = 0.1, steps: int = 100) -> list[float]:
    """Scores of n items from (winner, loser) pairs: Newton steps on the l2-penalised log-likelihood."""
    import numpy as np

    theta = np.zeros(n)
    winners, losers = np.array([w for w, _ in wins]), np.array([loser for _, loser in wins])
    for _ in range(steps):
        p = 1 / (1 + np.exp(theta[winners] - theta[losers]))  # P(the loser wins)
        gradient, hessian = -l2 * theta, -l2 * np.eye(n)
        np.add.at(gradient, winners, p)
        np.add.at(gradient, losers, -p)
        curvature = p * (1 - p)
        for (i, j), c in zip(wins, curvature):
            hessian[i, i] -= c
            hessian[j, j] -= c
            hessian[i, j] += c
            hessian[j, i] += c
        step = np.linalg.solve(hessian, gradient)
        theta = theta - step
        if np.abs(step).max() < 1e-12:
            break
    return theta.tolist()


# -- difficulty, filters --------------------------------------------------------------------------------
def self_paced(losses: Sequence[float], k: float) -> list[int]:
    """v_i = 1 iff loss < 1/K (Kumar et al. 2010); K is annealed down so that more samples enter."""
    return [int(loss < 1 / k) for loss in losses]


def superfilter(with_instruction: Sequence[float], without: Sequence[float], keep_fraction: float) -> dict:
    """IFD = loss given the instruction / loss alone; >= 1 is dropped, then the highest floor(f * n) stay.

    kept: indices in input order; n counts all rows.
    """
    ifd = [a / b if b else math.inf for a, b in zip(with_instruction, without)]
    excluded = [i for i, value in enumerate(ifd) if not value < 1]
    valid = [i for i, value in enumerate(ifd) if value < 1]
    count = math.floor(keep_fraction * len(ifd) + 1e-9)
    kept = sorted(sorted(valid, key=lambda i: (-ifd[i], i))[:count])
    return {"ifd": ifd, "excluded": excluded, "kept": kept}
