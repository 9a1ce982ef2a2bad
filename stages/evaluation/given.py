"""Answers that somebody else made (input ``answers``), graded as a policy's are: those of an API, of another model, of an
older run.

    posttrain stage evaluate --input answers=humaneval_samples.jsonl --input prompts=HumanEval.jsonl.gz --set split=train --set rewards='[{kind: code}]'

Files are read as they are, one answer per row or a list of them, in the forms that ``stages/ingestion/answers.py`` lists. A
row belongs to the prompt that it names by an id (the prompt's row_id or prompt_id, or what its file called it), else to
the one whose text it holds (white space aside), and never to one by its place in the file. A row that names one prompt and
holds the text of another belongs to none. Several rows of a prompt are its samples, in their order, and all count alike,
however many another prompt has. Prompts without an answer are refused, or with ``unanswered=empty`` count as empty
answers, which verifiers call wrong.

Nothing is known of how the answers were sampled, so the protocol says of it only that they were given and how many there
are per prompt; ``compare`` sets them beside a model's answers to the same prompts under the same graders, and tells so.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from stages.settings import AgentConfig, BenchmarkConfig, ChatConfig, SamplingConfig, refuse_unread
from stages.spec import ConfigError, StageConfig


class GivenConfig(StageConfig):
    """How the input ``answers`` is read."""

    answers_from: str = Field(
        "",
        description=(
            "Input answers: who made them and how, as far as you know (gpt-4o, temperature 0.7), for the record and the"
            " report; nothing is computed from it."
        ),
    )
    answer_column: str = Field(
        "", description="Input answers: the column with the answer; empty: completion, output, response ..."
    )
    id_column: str = Field(
        "",
        description=(
            "Input answers: the column that names the prompt by an id of its own or of its file; empty: task_id,"
            " question_id, key, id ..., else its text."
        ),
    )
    unanswered: Literal["refuse", "empty"] = Field(
        "refuse",
        description=(
            "Input answers: what is done where prompts have none. Their number cannot be left out of a mean that is to"
            " compare: refuse, or count them as empty answers, which verifiers call wrong."
        ),
    )


#: Columns that name a prompt, in answers and in the files of prompts.
IDS = (
    "row_id",
    "item_id",
    "task_id",
    "question_id",
    "custom_id",
    "prompt_id",
    "key",
    "id",
    "uid",
    "uuid",
    "problem_id",
)
#: Columns with the text of the prompt.
ASKED = ("prompt", "instruction", "question", "query", "problem", "input", "turns", "text")
#: Which sample of its prompt a row is: the same one twice is no sample more.
INDICES = ("sample_idx", "completion_idx", "sample_index", "completion_index")

#: Rewards that read the tokens or the turns that a model sampled.
OF_TOKENS = ("length", "length_group", "length_target", "length_penalty", "truncation", "icdpo")
OF_TURNS = ("environment", "milestones", "step_weighted", "debate")

#: Settings of how a model is asked, which nothing reads where answers are given.
OF_A_MODEL = (
    *(
        name
        for of in (SamplingConfig, AgentConfig, ChatConfig, BenchmarkConfig)
        for name in of.model_fields
        if name != "multiple_choice"
    ),
    *("num_samples", "greedy", "prompt_template", "max_prompt_length", "max_length", "beta", "think_max", "think_min"),
    *("think_waits", "token_shift", "perturb_options", "probe_pairs"),
)

UNREAD = "no answer in it"
UNNAMED = "nothing in it says which prompt it answers"
UNKNOWN = "to no prompt of the data"
ELSEWHERE = "to prompts that are not evaluated (split, limit)"
SEVERAL = "to several prompts alike"
APART = "its id is that of one prompt, its text that of another"
AGAIN = "the same sample of its prompt again"
NEVER_GIVEN = "whoever was asked gave none"


@dataclass(frozen=True)
class Answer:
    """One answer. ``finish``: how it ended, ``tokens``: how long it is, as far as is known. ``mode``: sample or greedy;
    ``opened``: its prompt had begun its thought. ``turns``: of a conversation, what was answered to each."""

    text: str
    finish: str | None = None
    mode: str = "sample"
    tokens: int | None = None
    opened: bool = False
    turns: tuple[str, ...] = ()

    @property
    def said(self) -> tuple[str, ...]:
        """What was answered to each turn."""
        return self.turns or (self.text,)


def check(config, names: Sequence[str]) -> None:
    """Refuse what asks something of a model where answers are given, and settings of given answers where none are.

    Raises ConfigError, which says what to write.
    """
    if "answers" not in names:
        if "model" not in names:
            raise ConfigError(
                "stage evaluate needs input 'model' (a model; The model that is judged.), or answers that somebody else"
                " made; give it as --input model=REF_OR_PATH, or --input answers=FILE"
            )
        refuse_unread(
            config,
            [
                (
                    tuple(GivenConfig.model_fields),
                    lambda c: False,
                    "the model answers by itself; give --input answers=FILE in the place of the model",
                )
            ],
        )
        return
    for name, why in (
        ("model", "answers are given, or a model makes them; leave answers out"),
        ("pairs", "a policy orders pairs by its own likelihood; give --input model=MODEL in the place of the answers"),
        ("texts", "loss and perplexity of texts are a model's; give --input model=MODEL in the place of the answers"),
        ("reference", "a KL is between two models; give --input model=MODEL in the place of the answers"),
        ("examples", "nothing is asked anew, so no examples are shown"),
    ):
        if name in names:
            raise ConfigError(f"evaluate: the inputs answers and {name} do not go together: {why}, or leave {name} out")
    if "prompts" not in names:
        raise ConfigError(
            "evaluate: answers are graded beside what they answer; give --input prompts=REF_OR_PATH (prompts/1), the"
            " prompts with their answers, tests or constraints"
        )
    refuse_unread(
        config,
        [
            (("target",), lambda c: False, "given answers are those of a policy; write target=policy"),
            (
                OF_A_MODEL,
                lambda c: False,
                "answers are given and nothing is sampled; write what is known of how they were made into answers_from",
            ),
        ],
    )
    if config.mt_bench and config.mt_bench.temperatures != "category":
        raise ConfigError(
            f"evaluate: mt_bench.temperatures={config.mt_bench.temperatures} would change nothing: answers are given and"
            " nothing is sampled; leave it out, and write what is known into answers_from"
        )
    for component in config.rewards:
        if component.kind in (*OF_TOKENS, *OF_TURNS) or component.step_credit != "none":
            raise ConfigError(
                f"evaluate: reward {component.name!r} ({component.kind}) reads the"
                f" {'turns' if component.kind in OF_TURNS else 'tokens'} that a model sampled, and given answers are"
                " texts; leave it out, or give --input model=MODEL in the place of the answers"
            )
        if component.kind == "remote" and component.request_form == "openrlhf":
            raise ConfigError(
                f"evaluate: reward {component.name!r}: request_form=openrlhf shows texts under the policy's template,"
                " and given answers have none; write request_form=messages"
            )


def unread(config, names: Sequence[str]) -> tuple[str, ...]:
    """Settings that nothing reads: of how a model is asked where answers are given."""
    return OF_A_MODEL if "answers" in names else ()


class Given:
    """The answers of the input ``answers`` to the evaluated prompts.

    Args:
        rows: the ``prompts/1`` rows that are evaluated.
        read: the rows of answers (``stages.ingestion.answers.read``).

    Raises:
        ConfigError: no answer belongs to any prompt, or prompts have none and ``unanswered=refuse``.
    """

    def __init__(self, stage, rows: Sequence[dict], read: Iterable):
        self.stage, self.config = stage, stage.config
        self.counts: Counter = Counter()  # rows of the file that are not graded, by reason
        self.examples: dict[str, str] = {}  # where the first of each reason is
        self.columns: dict[str, None] = {}
        self.by_row: dict[str, list[Answer]] = {row["row_id"]: [] for row in rows}
        self.read = 0
        self._match(read)
        every = [one.mode for found in self.by_row.values() for one in found]
        modes = [mode for mode in ("sample", "greedy") if mode in every]  # of an evaluation, both
        self.lacking = [row for row in rows if self._lacks(row, modes)]
        self._refuse_missing()
        self.graded = len(every)
        for mode in modes:
            counts = [sum(one.mode == mode for one in found) for found in self.by_row.values()]
            fewest = min(n for n in counts if n)  # so that pass@k is that of all prompts
            for found, n in zip(self.by_row.values(), counts):
                found += [] if n else [Answer("", mode=mode)] * fewest
        mode = modes[0]
        #: How many prompts have how many sampled (without any: greedy) answers.
        self.per_prompt = Counter(sum(one.mode == mode for one in found) for found in self.by_row.values())
        self._tell()

    # -- which answer is to which prompt -------------------------------------------------------------------------------

    def _match(self, read: Iterable) -> None:
        index = Index(self.stage.dataset("prompts").iter_rows(), self.by_row)
        seen, whole = set(), Counter()
        for where, row, answers, code in read:
            self.read += 1
            self.columns |= dict.fromkeys(row)
            if not answers:
                why = f"cannot be read ({code})" if code else NEVER_GIVEN if answers is None else UNREAD
                self._left(why, where)
                continue
            found, why = index.find(_ids(row, self.config.id_column), *_texts(row))
            if found is None:
                self._left(why, where)
                continue
            again = next(((found, name, str(row[name])) for name in INDICES if row.get(name) is not None), None)
            if again is not None and (again := (*again, answers[0].mode)) in seen:
                self._left(AGAIN, where)
                continue
            seen.add(again)
            whole[json.dumps([found, row], sort_keys=True, default=str)] += 1
            self.by_row[found] += answers
        self.repeated = sum(n - 1 for n in whole.values())

    def _left(self, why: str, where: str) -> None:
        self.counts[why] += 1
        self.examples.setdefault(why, where)

    def _lacks(self, row: dict, modes: Sequence[str]) -> bool:
        """Whether a prompt has no answer, sampled and greedy where others have both, or of several turns (mt_bench) not
        one to each.
        """
        from stages.evaluation.mt_bench import questions_of

        found = self.by_row[row["row_id"]]
        if len(found) > 1 and self.config.mt_bench:
            raise ConfigError(
                f"evaluate: mt_bench rates one answer to every question, and {_name_of(row)!r} has {len(found)}; give a"
                " file with one answer per question"
            )
        return (
            not found
            or any(all(one.mode != mode for one in found) for mode in modes)
            or bool(self.config.mt_bench)
            and len(found[0].said) < len(questions_of(row)[0])
        )

    # -- what is told --------------------------------------------------------------------------------------------------

    def _why(self) -> str:
        """Rows that are not graded, by reason."""
        return "; ".join(f"{n} {why} (the first: {self.examples[why]})" for why, n in self.counts.most_common())

    def _refuse_missing(self) -> None:
        count = len(self.by_row)
        if len(self.lacking) < count and (self.config.unanswered == "empty" or not self.lacking):
            return
        data = self.stage.dataset("prompts")
        shown = ", ".join(repr(_name_of(row)) for row in self.lacking[:3])
        left = f" Of {self.read} rows of answers are left out: {self._why()}." if self.counts else ""
        columns = f" Columns found: {', '.join([*self.columns][:30])}." if self.columns and self.counts else ""
        if len(self.lacking) == count:
            if not self.read:
                raise ConfigError("evaluate: the input answers is empty; give a file with an answer per row")
            raise ConfigError(
                f"evaluate: no row of answers belongs to any of the {count} prompts of {data.name}, split"
                f" {self.config.split!r}, such as {shown}.{left}{columns} Write answer_column= and id_column= where the"
                " columns are called otherwise, split=NAME where the answers are to another split, or give the prompts"
                " that were asked"
            )
        raise ConfigError(
            f"evaluate: {len(self.lacking)} of {count} prompts have no answer ({shown} ...), and a mean that leaves them"
            f" out would compare with no other.{left}{columns} Give the missing answers, write unanswered=empty, which"
            " counts them as empty answers (wrong), or evaluate fewer prompts (limit, split, another file)"
        )

    def _tell(self) -> None:
        graded = f"{sum(self.counts.values())} of {self.read} rows of answers are not graded: {self._why()}"
        if set(self.counts) == {ELSEWHERE}:
            self.stage.log(f"{graded}.")
        elif self.counts:
            self.stage.warn("answers_left_out", f"{graded}. Mend these rows, or leave them out of the file.")
        if self.lacking:
            self.stage.warn(
                "prompts_unanswered",
                f"{len(self.lacking)} of {len(self.by_row)} prompts have no answer and count as empty ones, which are"
                f" wrong, such as {_name_of(self.lacking[0])!r}. Give their answers, or evaluate fewer prompts.",
            )
        if len(self.per_prompt) > 1:
            told = ", ".join(f"{n} prompts have {k}" for k, n in sorted(self.per_prompt.items()))
            self.stage.warn(
                "answers_uneven",
                f"Prompts have different numbers of answers ({told}). A prompt counts once, by the mean of its answers;"
                f" pass@k and votes are of k up to {min(self.per_prompt)}. Give as many answers to every prompt for more.",
            )
        if self.repeated and 2 * self.repeated >= self.read:
            self.stage.warn(
                "answers_repeated",
                f"{self.repeated} of {self.read} rows of answers are the same as an earlier row to their prompt, and count"
                " as samples of their own. Take them out where the file holds everything twice by mistake.",
            )

    def summary(self) -> dict[str, Any]:
        """Numbers of the stage's summary."""
        return {
            "answers": self.graded,
            "answers_from": self.config.answers_from or "unknown",
            "answers_left_out": sum(self.counts.values()),
            "prompts_unanswered": len(self.lacking),
        }

    def told(self) -> str:
        """What the report says of them."""
        maker = self.config.answers_from or "who made them is not said"
        return f" {self.graded} answers were given ({maker}), and nothing else is known of how they were sampled."

    def facts(self) -> dict[str, Any]:
        """What the protocol says of them."""
        few, most = min(self.per_prompt), max(self.per_prompt)
        return (
            {"answers": "given", "num_samples": few if few == most else f"{few} to {most}"}
            | ({"greedy": True} if any(one.mode == "greedy" for found in self.by_row.values() for one in found) else {})
            | ({"unanswered": len(self.lacking)} if self.lacking else {})
        )

    @property
    def fewest(self) -> int:
        """Answers of the prompt that has the fewest."""
        return min(map(len, self.by_row.values()))

    # -- as samples ----------------------------------------------------------------------------------------------------

    def drawn(self, rows: Sequence[tuple[dict, list[int]]]) -> list[tuple[str, Any, dict]]:
        """(mode, sample, what is known of it beside) of every answer to these prompts, in their order: the answers as
        stages read those that they sample. One of which it is not known how it ended counts as whole; one whose tokens
        nobody counted has its characters.
        """
        from stages.generation import Sample

        found = []
        for row, ids in rows:
            index = Counter()
            for answer in self.by_row[row["row_id"]]:
                sample = Sample(row, ids, index[answer.mode], [], None, answer.finish or "stop", answer.text)
                sample.opened = answer.opened
                index[answer.mode] += 1
                length = {"characters": len(answer.text)} if answer.tokens is None else {"tokens": answer.tokens}
                found.append((answer.mode, sample, {"finish": answer.finish, **length}))
        return found

    def turns(self, row: dict, count: int) -> list[str]:
        """What was answered to each of so many turns (mt_bench), empty where nothing was."""
        said = self.by_row[row["row_id"]][0].said[:count]
        return [*said, *[""] * (count - len(said))]


class Index:
    """Which prompt an answer is to.

    Args:
        rows: all prompts of the data.
        evaluated: row ids of those that are evaluated.
    """

    def __init__(self, rows, evaluated):
        self.evaluated = evaluated
        self.ids: dict[tuple[str, str], set[str]] = defaultdict(set)  # by (name, id)
        self.named: dict[str, set[str]] = defaultdict(set)  # by id, whatever its name
        self.texts: dict[str, set[str]] = defaultdict(set)
        self.whole: dict[str, set[str]] = defaultdict(set)  # by prompt_id
        for row in rows:
            extra = json.loads(row["extra_json"]) if row.get("extra_json") else {}
            own = {**(extra if isinstance(extra, dict) else {}), "item_id": row["row_id"]}
            for name in IDS:
                value = row.get(name, own.get(name))
                if _is_id(value):
                    self.ids[name, str(value)].add(row["row_id"])
                    self.named[str(value)].add(row["row_id"])
            self.whole[row["prompt_id"]].add(row["row_id"])
            for text in _texts_of_prompt(row):
                self.texts[_plain(text)].add(row["row_id"])

    def find(self, ids: Mapping[str, str], texts: Sequence[str], prompt_id: str | None) -> tuple[str | None, str]:
        """(row id of the prompt, why there is none) of an answer with these ``ids`` by their names, texts that it says it
        answers, and prompt_id of such messages."""
        by_text = self.whole.get(prompt_id, set()) or next(
            (found for text in texts if (found := self.texts.get(_plain(text)))), set()
        )
        same_name = [found for one in ids.items() if (found := self.ids.get(one))]
        any_name = [found for value in ids.values() if len(found := self.named.get(value, set())) == 1]
        by_id = min(same_name or any_name, key=len, default=set())
        if by_id and by_text and not by_id & by_text:
            return None, APART
        found = by_id & by_text or by_id or by_text
        here = [one for one in found if one in self.evaluated]
        if len(here) == 1:
            return here[0], ""
        return None, SEVERAL if here else ELSEWHERE if found else UNKNOWN if ids or texts else UNNAMED


def _plain(text: str) -> str:
    return " ".join(text.split())


def _is_id(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""


def _name_of(row: dict) -> str:
    """How an error names a prompt: as its file does, else by its text."""
    extra = json.loads(row["extra_json"]) if row.get("extra_json") else {}
    named = next((str(extra[name]) for name in IDS if isinstance(extra, dict) and _is_id(extra.get(name))), None)
    return named or _plain(row["prompt"][-1].get("content") or "")[:60]


def _texts_of_prompt(row: dict) -> Iterator[str]:
    from stages.verification.choices import is_choice, question_of

    yield row["prompt"][-1].get("content") or "" if row["prompt"] else ""
    if is_choice(row):
        yield question_of(row)


def _ids(row: dict, column: str) -> dict[str, str]:
    """{column: id} of a row of answers; of the column that the settings name alone, where they name one."""
    return {name: str(row[name]) for name in ((column,) if column else IDS) if _is_id(row.get(name))}


def _texts(row: dict) -> tuple[list[str], str | None]:
    """(what a row says was asked, prompt_id of its messages)."""
    from storage.schema import prompt_id

    texts, asked = [], None
    for name in ASKED:
        value = row.get(name)
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            value = value[0]  # of several turns
        if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
            asked = asked or prompt_id([{"role": one["role"], "content": one.get("content")} for one in value])
            value = value[-1].get("content")
        if isinstance(value, str) and value.strip():
            texts.append(value)
    if isinstance(row.get("instruction"), str) and isinstance(row.get("input"), str) and row["input"].strip():
        texts.insert(0, f"{row['instruction']} {row['input']}")
    return texts, asked
