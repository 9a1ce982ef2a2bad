"""write_prompts: new user prompts, written by a model (``synth.character`` step 2, ``synth.self_instruct``,
``synth.rewrite``).

``method=traits``         messages to which somebody of a certain character would answer in a way of their own, for each trait in ``principles``
``method=self_instruct``  tasks like those of the ``pool``: eight examples in each request, six of the pool and two that
were written before
``method=rewrite``        the prompts of the ``pool``, deepened, constrained or made concrete; dropped where nothing changed or they cannot be answered as they stand

A new prompt must differ from all before it (ROUGE-L below ``max_similarity``), have a sensible length, begin with a
word, and ask for nothing that text cannot hold; what is dropped is counted by reason. The rows say who wrote them and
from what; ``category`` is the trait's id. Work is done in rounds of requests; a killed run continues at the last
complete round and ends with the same bytes.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.decoding.writers import STOP, WriterConfig
from stages.settings import ReadWhen, refuse_unread
from stages.spec import InputSpec, OutputSpec, StageSpec

TRAIT = (
    "This is a trait of an assistant's character:\n\n[Trait]\n{trait}\n[End of trait]\n\nWrite {n} messages that"
    " different people might send to the assistant, and to which an assistant of this character would answer otherwise"
    " than one without it. Vary subject, length and tone, and do not name the trait.{examples} Number them, one to a"
    " line, and write nothing else."
)
TASK = (
    "These are tasks that people gave to an assistant:\n\n{examples}\n\nWrite {n} more tasks that are unlike these and"
    " unlike each other in what they ask for and how. Each must say all that is needed to do it, with text alone."
    " Number them from {first}, one to a line, and write nothing else."
)
REWRITE = (
    "Rewrite the message below. {operation} Keep its language and what it is about, and write only the new"
    " message.\n\n{before}[Message]\n{message}\n[End of message]\n\nNew message:"
)
ANSWERABLE = (
    "Can this message be answered with text as it stands, without a file, an image or anything else that it speaks of"
    " and does not contain?\n\n{before}[Message]\n{message}\n[End of message]\n\nReply with yes or no. Answer:"
)
#: What was said before a message that is rewritten, so that the writer knows what it refers to.
BEFORE = "[Conversation so far]\n{said}\n[End of conversation so far]\n\n"
OPERATIONS = {
    "deepen": "Make it ask more deeply about the same thing: for reasons, for consequences, or for a comparison.",
    "constrain": "Add one requirement that the answer has to meet, on its content, its form or its length.",
    "concretise": "Put a concrete case with names, numbers or circumstances in the place of what is general.",
}
#: Worked example of a list of messages in plain text, for models that continue (request_format=text).
EXAMPLE_TRAIT = (
    "Patient with people who are new to something.",
    [
        "I tried to repot my basil and now it looks dead. What did I do?",
        "whats a browser tab",
        "Explain fractions to me again please, I still do not get it.",
    ],
)
UNSUITED = (
    "image",
    "images",
    "picture",
    "pictures",
    "photo",
    "photos",
    "graph",
    "graphs",
    "chart",
    "diagram",
    "flowchart",
    "draw",
    "plot",
    "file",
    "files",
    "map",
    "video",
    "videos",
    "audio",
    "music",
    "website",
    "link",
)
_ITEM = re.compile(r"(?m)^[ \t]*\d+[ \t]*[.)][ \t]+")
# scripts without spaces between words: a character is a word
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_TOKEN = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])[^\W_])+")
SALT = "written-prompts"


class Config(WriterConfig):
    READ_WHEN: ClassVar[ReadWhen] = (
        (
            ("per_request", "max_rounds", "num_examples"),
            lambda c: c.method != "rewrite",
            "method=rewrite makes num_prompts requests about each prompt of the pool; write num_prompts",
        ),
        (
            ("written_examples",),
            lambda c: c.method == "self_instruct",
            "only method=self_instruct shows written prompts among those of the pool; write method=self_instruct",
        ),
        (
            ("operations", "check_answerable"),
            lambda c: c.method == "rewrite",
            "only method=rewrite changes prompts; write method=rewrite",
        ),
        (
            ("validation_fraction", "test_fraction"),
            lambda c: c.method != "rewrite",
            "rewritten prompts stay in the split of the prompt that they are made of; write method=traits",
        ),
    )

    method: Literal["traits", "self_instruct", "rewrite"] = Field(
        "traits",
        description=(
            "What is written: messages that bring out a trait, tasks like those of the pool, or the pool's prompts"
            " rewritten."
        ),
    )
    num_prompts: int = Field(
        20,
        ge=1,
        description="New prompts wanted: of each trait; in all (self_instruct); of each prompt of the pool (rewrite).",
    )
    per_request: int = Field(8, ge=1, description="Prompts that one request asks for (traits, self_instruct).")
    max_rounds: int = Field(
        20,
        ge=1,
        description=(
            "Rounds of requests at most (traits, self_instruct): one request for each trait that lacks prompts, or"
            " `block` requests."
        ),
    )
    num_examples: int = Field(
        8, ge=0, description="Examples in a request (Self-Instruct 8): of the pool, and of what was written before."
    )
    written_examples: int = Field(
        2,
        ge=0,
        description="self_instruct: how many of the examples are written ones, once there are any (Self-Instruct 2).",
    )
    operations: list[Literal["deepen", "constrain", "concretise"]] = Field(
        list(OPERATIONS),
        min_length=1,
        description="rewrite: what may be done to a prompt; one is drawn for each rewriting.",
    )
    check_answerable: bool = Field(
        True,
        description=(
            "rewrite: ask the writer whether the new prompt can be answered as it stands; without a yes it is dropped."
        ),
    )
    max_similarity: float = Field(
        0.7,
        gt=0,
        le=1,
        description="A new prompt's ROUGE-L F1 with every other must be below this (Self-Instruct 0.7).",
    )
    min_words: int = Field(3, ge=1, description="Words of a prompt at least.")
    max_words: int = Field(150, ge=1, description="Words of a prompt at most (Self-Instruct 150).")
    unsuited: list[str] = Field(
        list(UNSUITED), description="Words of prompts that text cannot answer; whole words, whatever their case."
    )
    max_completion_length: int = Field(
        512,
        ge=1,
        description=(
            "New tokens of whatever the writer says at most, its thought with it; the last prompt of a cut list is left"
            " out."
        ),
    )
    block: int = Field(
        16, ge=1, description="Requests of a round (self_instruct), and prompts rewritten as one resumable unit."
    )
    split: str = Field("train", description="Split of the pool that is read.")
    validation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the new prompts in the validation split (rewritten ones stay in that of their prompt).",
    )
    test_fraction: float = Field(0.0, ge=0, lt=1, description="Share of the new prompts in the test split.")

    @model_validator(mode="after")
    def _read(self):
        refuse_unread(self, self.READ_WHEN)
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"validation_fraction={self.validation_fraction:g} and test_fraction={self.test_fraction:g} leave no"
                " prompt to train on; write smaller ones"
            )
        return self


SPEC = StageSpec(
    name="write_prompts",
    config=Config,
    gpu="models",
    inputs={
        "model": InputSpec("model", required=False, doc="Who writes (or endpoint=URL)."),
        "principles": InputSpec(
            "dataset",
            kinds=("principles/1",),
            required=False,
            doc="method=traits: those of kind trait, or all where none is; a text file with one per line will do.",
        ),
        "pool": InputSpec(
            "dataset",
            kinds=("prompts/1",),
            required=False,
            doc="Prompts to write others like, or to rewrite; with traits, examples of how people write.",
        ),
    },
    outputs={"prompts": OutputSpec("dataset", doc="prompts/1 without answers; category is the trait.")},
)


def traits_of(principles: list[dict]) -> list[dict]:
    """The principles of kind trait, or all of them where none is one."""
    return [p for p in principles if p["kind"] == "trait"] or principles


def words_of(text: str) -> list[str]:
    """Words for comparing and counting: runs of letters and digits after NFKC and casefold, single characters in
    scripts without spaces.
    """
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


class Pool:
    """Prompts that a new one must differ from."""

    def __init__(self, threshold: float):
        self.threshold, self.texts = threshold, []
        self._known: list[tuple[list[str], Counter]] = []

    def add(self, text: str) -> None:
        words = words_of(text)
        self.texts.append(text)
        self._known.append((words, Counter(words)))

    def nearest(self, text: str) -> str | None:
        """A prompt whose ROUGE-L F1 with ``text`` is the threshold or more, None if there is none."""
        from stages.measures.text import rouge_l

        words = words_of(text)
        counts = Counter(words)
        for known, (other, theirs) in zip(self.texts, self._known):
            # of the common subsequence, which has no more words than both have in common
            enough = self.threshold * (len(words) + len(other)) / 2
            if (
                min(len(words), len(other)) >= enough
                and (counts & theirs).total() >= enough
                and rouge_l(words, other)["f1"] >= self.threshold
            ):
                return known
        return None


def items_in(text: str, cut: bool = False) -> list[str]:
    """The numbered items of a list, without what stands before the first and behind an empty line; ``cut``: the last
    one is not whole.
    """
    found = [re.split(r"\n\s*\n", part.strip())[0].strip() for part in _ITEM.split(text)[1:]]
    found = [
        one[1:-1].strip() if len(one) > 1 and one[0] + one[-1] in ('""', "''", "“”", "«»") else one for one in found
    ]
    return found[:-1] if cut else found


def unfit(text: str, config: Config) -> str | None:
    """Why a prompt is not taken: too_short, too_long, punctuation or unsuited; None if nothing speaks against it."""
    words = words_of(text)
    if len(words) < config.min_words:
        return "too_short"
    if len(words) > config.max_words:
        return "too_long"
    if unicodedata.category(text[0])[0] in "PS" and text[0] not in "¿¡":
        return "punctuation"
    return "unsuited" if set(words) & {word.casefold() for word in config.unsuited} else None


@dataclass
class State:
    """What a checkpoint holds: prompts so far by slot (a trait; "" otherwise), counts of what was dropped, and prompts
    by split.
    """

    taken: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    splits: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.counts, self.splits = Counter(self.counts), Counter(self.splits)


def run(stage):
    from stages.decoding.writers import make_writer
    from stages.reward.principles import load
    from stages.spec import ConfigError

    config = stage.config
    if (config.method == "traits") != stage.has("principles"):
        raise ConfigError(
            "write_prompts: method=traits and the input principles go together; write --input principles=FILE with one"
            " trait per line, or another method"
        )
    if config.method != "traits" and not stage.has("pool"):
        raise ConfigError(f"write_prompts: method={config.method} starts from prompts; give --input pool=FILE")
    if config.max_words < config.min_words:
        raise ConfigError(
            f"write_prompts: no prompt has at least {config.min_words} and at most {config.max_words} words; write a"
            " smaller min_words"
        )
    pool = list(stage.dataset("pool").iter_rows(split=config.split)) if stage.has("pool") else []
    if stage.has("pool") and not pool:
        raise ConfigError(
            f"write_prompts: the pool has no prompts in split {config.split!r}; it has"
            f" {', '.join(stage.dataset('pool').manifest['splits'])}"
        )
    writer = stage.writer("prompts", "prompts/1")
    found = stage.checkpoints.latest()
    state, done = (State(**found.state), found.step) if found else (State(), 0)
    asker = make_writer(stage, "model")
    seen = Pool(config.max_similarity)
    for text in [row["prompt"][-1]["content"] or "" for row in pool] + [
        text for texts in state.taken.values() for text in texts
    ]:
        seen.add(text)
    task = (
        Rewriting(stage, asker, pool)
        if config.method == "rewrite"
        else Listing(stage, asker, pool, traits_of(load(stage)) if stage.has("principles") else [])
    )
    while (made := task.round(done, state)) is not None:
        rows = []
        for text, slot, row in made:
            reason = unfit(text, config) if text else "empty"
            if reason is None and seen.nearest(text) is not None:
                reason = "similar"
            if reason is None and len(state.taken.get(slot, ())) >= task.wanted:
                reason = "not_needed"
            if reason is not None:
                state.counts[reason] += 1
                continue
            seen.add(text)
            state.taken.setdefault(slot, []).append(text)
            rows.append(row(text))
            state.splits[rows[-1]["split"]] += 1
        writer.write(rows)
        writer.flush()
        done += 1
        stage.save_checkpoint(
            done, {"taken": state.taken, "counts": dict(state.counts), "splits": dict(state.splits)}, {}
        )
        stage.progress(*task.progress(done, state), "prompts")
    writer.close({"prompts": sum(map(len, state.taken.values()))})
    report(stage, task, state, done)


class Listing:
    """Lists of new prompts: a request for each trait that lacks some, or ``block`` requests for tasks."""

    def __init__(self, stage, writer, pool: list[dict], traits: list[dict]):
        self.stage, self.writer, self.config = stage, writer, stage.config
        self.pool = [row["prompt"][-1]["content"] or "" for row in pool]
        self.traits = {trait["principle_id"]: trait for trait in traits}
        self.slots, self.wanted = list(self.traits) or [""], stage.config.num_prompts

    def progress(self, done: int, state: State) -> tuple[int, int]:
        return sum(len(state.taken.get(slot, ())) for slot in self.slots), self.wanted * len(self.slots)

    def round(self, number: int, state: State):
        """(text, slot, row) of the prompts of a round, None where there are enough or the last round is over."""
        from stages.reward.judge import spoken

        open_slots = [slot for slot in self.slots if len(state.taken.get(slot, ())) < self.wanted]
        if not open_slots or number >= self.config.max_rounds:
            return None
        asked = [(slot, k) for slot in open_slots for k in range(1 if self.traits else self.config.block)]
        requests = [self.request(slot, state, number, k) for slot, k in asked]
        seeds = [self.stage.seed_for("write", slot, number, k) for slot, k in asked]
        out = []
        for (slot, k), (_, first), written in zip(asked, requests, ask(self, [text for text, _ in requests], seeds)):
            state.counts["requests"] += 1
            text = spoken(written.text)  # a list in a thought is a draft
            text = f"{first}. {text}" if self.config.request_format == "text" else text
            found = items_in(text, cut=written.problem == "cut") if written.problem in (None, "cut") else []
            if not found:
                state.counts[
                    "requests_unreadable" if written.problem in (None, "cut") else f"requests_{written.problem}"
                ] += 1
            out += [
                (
                    one,
                    slot,
                    lambda text, slot=slot, gen=written.gen, number=number, k=k: self.row(text, slot, gen, number, k),
                )
                for one in found
            ]
        return out

    def request(self, slot: str, state: State, number: int, k: int) -> tuple[str, int]:
        """(text of a request, number of the first prompt it asks for)."""
        config, rng = self.config, self.stage.rng("examples", slot, number, k)
        written = state.taken.get(slot, [])
        if not self.traits:
            of_written = draw(rng, written, min(config.written_examples, config.num_examples))
            shown = draw(rng, self.pool, config.num_examples - len(of_written)) + of_written
            shown = [shown[i] for i in rng.permutation(len(shown))]
            if config.request_format == "text":
                return (
                    "Tasks that people gave to an assistant:\n\n" + numbered(shown) + f"\n{len(shown) + 1}.",
                    len(shown) + 1,
                )
            return TASK.format(examples=numbered(shown), n=config.per_request, first=len(shown) + 1), len(shown) + 1
        like, before = draw(rng, self.pool, config.num_examples), draw(rng, written, config.num_examples)
        examples = "\n\nThis is how people write:\n" + "\n".join(f"- {one}" for one in like) + "\n\n" if like else ""
        examples += (
            "\n\nThere are these already, so write others:\n" + "\n".join(f"- {one}" for one in before) + "\n\n"
            if before
            else ""
        )
        text = TRAIT.format(trait=self.traits[slot]["text"], n=config.per_request, examples=examples)
        if config.request_format == "text":
            trait, messages = EXAMPLE_TRAIT
            text = (
                TRAIT.format(trait=trait, n=len(messages), examples="")
                + f"\n\n{numbered(messages)}{STOP}\n\n{text}\n\n1."
            )
        return text, 1

    def row(self, text: str, slot: str, gen: dict, number: int, k: int) -> dict:
        from stages.ingestion.curation import split_of
        from storage.schema import complete_row, prompt_id

        config, messages = self.config, [{"role": "user", "content": text}]
        fractions = {
            "train": 1.0 - config.validation_fraction - config.test_fraction,
            "validation": config.validation_fraction,
            "test": config.test_fraction,
        }
        trait = {"trait": slot, "trait_version": self.traits[slot]["version"]} if slot else {}
        return complete_row(
            "prompts/1",
            {
                "prompt": messages,
                "category": slot or None,
                "extra_json": json.dumps(
                    {"method": config.method, **trait, "round": number, "request": k, "gen": gen}, sort_keys=True
                ),
            },
            dataset="written",
            source=gen["model_id"] or "model",
            origin="ai",
            split=split_of(prompt_id(messages), SALT, fractions),
        )


class Rewriting:
    """Each prompt of the pool, ``num_prompts`` times rewritten, ``block`` prompts a round."""

    def __init__(self, stage, writer, pool: list[dict]):
        self.stage, self.writer, self.config, self.pool = stage, writer, stage.config, pool
        self.slots, self.wanted = [row["row_id"] for row in pool], stage.config.num_prompts

    def progress(self, done: int, state: State) -> tuple[int, int]:
        return min(done * self.config.block, len(self.pool)), len(self.pool)

    def round(self, number: int, state: State):
        """(text, row id, row) of the rewritten prompts of a block, None behind the last."""
        from stages.reward.judge import spoken
        from storage.schema import normalise_text

        block = self.pool[number * self.config.block : (number + 1) * self.config.block]
        if not block:
            return None
        asked = [
            (
                row,
                k,
                self.config.operations[
                    int(self.stage.rng("operation", row["row_id"], k).integers(len(self.config.operations)))
                ],
            )
            for row in block
            for k in range(self.wanted)
        ]
        texts = [
            REWRITE.format(
                operation=OPERATIONS[name],
                message=row["prompt"][-1]["content"] or "",
                before=before_last(row["prompt"]),
            )
            for row, _, name in asked
        ]
        written = ask(self, texts, [self.stage.seed_for("rewrite", row["row_id"], k) for row, k, _ in asked])
        state.counts["requests"] += len(asked)
        made = []
        for (row, k, name), one in zip(asked, written):
            text = spoken(one.text).strip()
            if one.problem is not None or not text:
                state.counts[one.problem or "empty"] += 1
            elif normalise_text(text) == normalise_text(row["prompt"][-1]["content"] or ""):
                state.counts["unchanged"] += 1
            else:
                made.append((text, row, k, name, one.gen))
        if self.config.check_answerable and made:
            verdicts = self.answerable(made)
            state.counts.update(unanswerable=verdicts.count(False), unreadable_verdicts=verdicts.count(None))
            made = [one for one, verdict in zip(made, verdicts) if verdict]
        return [
            (text, row["row_id"], lambda text, row=row, k=k, name=name, gen=gen: self.row(text, row, k, name, gen))
            for text, row, k, name, gen in made
        ]

    def answerable(self, made) -> list[bool | None]:
        """What the writer says of each new prompt, behind its thought; None where it says neither yes nor no."""
        from stages.reward.judge import spoken

        found = self.writer.write(
            [ANSWERABLE.format(message=text, before=before_last(row["prompt"])) for text, row, *_ in made],
            [self.stage.seed_for("answerable", row["row_id"], k) for _, row, k, *_ in made],
            self.config.max_completion_length,
            0.0,
        )
        return [{"yes": True, "no": False}.get((words_of(spoken(one.text)) or [""])[0]) for one in found]

    def row(self, text: str, row: dict, k: int, name: str, gen: dict) -> dict:
        from storage.schema import complete_row, provenance

        messages = [*row["prompt"][:-1], {**row["prompt"][-1], "content": text}]
        note = {"method": "rewrite", "operation": name, "of": row["row_id"], "gen": gen}
        return complete_row(
            "prompts/1",
            {
                "prompt": messages,
                "category": row["category"],
                "domain": row["domain"],
                "language": row["language"],
                **provenance(row),
                "prompt_id": None,
                "extra_json": json.dumps(note, sort_keys=True),
            },
            dataset="written",
            source=row["source"],
            origin="ai",
            split=row["split"],
        )


def ask(task, requests: list[str], seeds: list[int]):
    """The writer's answers, and a warning of those it has not."""
    from stages.decoding.writers import warn_of_failed

    found = (
        task.writer.write(requests, seeds, task.config.max_completion_length, task.config.temperature)
        if requests
        else []
    )
    warn_of_failed(task.stage, found)
    return found


def before_last(prompt: list[dict]) -> str:
    """What a request shows of a prompt in front of its last message; empty where nothing is."""
    from stages.reward_models.reward_heads import transcript

    # with the last message, so that a lone one before it has its role too
    said = transcript([*prompt[:-1], {"role": "user", "content": ""}]).removesuffix("\n\nHuman: ")
    return BEFORE.format(said=said) if prompt[:-1] else ""


def draw(rng, texts: list[str], n: int) -> list[str]:
    """Up to n different ones, in the order they were drawn."""
    return [texts[i] for i in rng.choice(len(texts), size=min(n, len(texts)), replace=False)] if texts and n else []


def numbered(texts: list[str]) -> str:
    return "\n".join(f"{i}. {' '.join(text.split())}" for i, text in enumerate(texts, 1))


def report(stage, task, state: State, rounds: int) -> None:
    """Counts by reason, prompts per trait, samples; ValueError where nothing was written."""
    from stages.reporting.reports import document, facts, markdown_table, sample_table

    kept = sum(map(len, state.taken.values()))
    dropped = {name: n for name, n in sorted(state.counts.items()) if n and not name.startswith("requests")}
    summary = {
        "prompts": kept,
        "rounds": rounds,
        **{name: n for name, n in sorted(state.counts.items()) if name.startswith("requests")},
        **{f"dropped/{name}": n for name, n in dropped.items()},
        **{f"split.{name}": n for name, n in sorted(state.splits.items())},
    }
    stage.summary(summary)
    if not kept:
        why = (
            ", ".join(
                f"{n} {name}"
                for name, n in (
                    dropped | {name: n for name, n in state.counts.items() if name.startswith("requests_")}
                ).items()
            )
            or "it wrote nothing"
        )
        raise ValueError(
            f"No prompt was written: {why}. Give a model that follows instructions (or endpoint=URL), for a base model"
            " write request_format=text, and look at min_words and max_similarity."
        )
    few = [slot for slot in task.slots if len(state.taken.get(slot, ())) < task.wanted]
    if few and stage.config.method != "rewrite":
        what = ", ".join(f"{slot or 'the pool'}: {len(state.taken.get(slot, ()))}" for slot in few[:10])
        stage.warn(
            "prompts_lacking",
            f"{len(few)} of {len(task.slots)} have fewer than {task.wanted} prompts after {rounds} rounds ({what});"
            " raise max_rounds or max_similarity, or the temperature.",
        )
    table = (
        [{"trait": slot, "prompts": len(state.taken.get(slot, ()))} for slot in task.slots]
        if stage.config.method == "traits"
        else []
    )
    shown = [{"of": slot, "prompt": text} for slot, texts in sorted(state.taken.items()) for text in texts[:3]][:30]
    stage.report(
        "summary",
        markdown=document(
            "Written prompts",
            facts(summary),
            ("Traits", markdown_table(table)) if table else None,
            ("Samples", sample_table(shown, ("of", "prompt"))),
        ),
    )
