"""revise: answers are criticised under a principle and rewritten, round by round (``synth.cai_sl``, ``synth.clair``,
``synth.dpf``).

    y_0 = an answer of `model` to each prompt, or one that `data` has
    for i = 1..n_rounds:   c_i = a principle, drawn by the row and the round;   critique of y_{i-1} under c_i;   y_i = its revision

Constitutional AI's supervised phase is the default: four rounds, and demonstrations (x, y_n) in which no critique is
left. ``direct_revision=true`` leaves the critique out (direct principle feedback), ``template=minimal n_rounds=1`` asks
for the smallest improvement (CLAIR, which needs no principles). The pairs are (y_n over y_0), for direct alignment. A
reviser writes critiques and revisions: the input ``reviser``, a chat server (``endpoint``), or the model itself.

A chain ends, and gives neither demonstration nor pair, at the first answer that is empty or cut, or where the reviser
declines; so does one that comes back to y_0. Answers are what follows a thought (``<think>``), the first ones too: what
a reviser thinks is about its task, and a pair with a thought on one side would teach to leave it out. Everything
written is in the output ``revisions``, everything dropped is counted. A killed run continues at the last complete block
of rows and ends with the same bytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.decoding.writers import STOP, WriterConfig, Written, check_template
from stages.settings import (
    PARTED_TRAINING,
    PROMPT_TEMPLATE,
    PromptTemplate,
    ReadWhen,
    refuse_unread,
    refuse_unread_in,
)
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec

SHOWN = "[Question]\n{question}\n[End of question]\n\n[Answer]\n{answer}\n[End of answer]"
CRITIQUE = SHOWN + "\n\n{request}\n\nCritique:"
LAST = (
    "\n\nWrite the revised answer to the question and nothing else: no comment on it, and no mention of the first"
    " answer{or_critique}.\n\nRevised answer:"
)
TEMPLATES = {
    "principle": SHOWN + "{critique}\n\n{request}" + LAST,
    "minimal": (
        SHOWN
        + "{critique}\n\n{request}\n\nChange as little as possible: keep every sentence that needs no change word for"
        " word, in its place." + LAST
    ),
}
#: What a principle asks for that has no request of its own, by its kind.
CRITIQUE_REQUEST = {
    "principle": (
        "Say where the answer goes against this principle, quoting the words that do, or that it does not.\nPrinciple:"
        " {text}"
    ),
    "trait": (
        "Say where the answer does not sound like somebody of this character, quoting the words, or that it"
        " does.\nCharacter: {text}"
    ),
    "safety_spec": (
        "Say where the answer breaks this policy, quoting the words that do, or that it does not.\nPolicy: {text}"
    ),
}
REVISION_REQUEST = {
    "principle": (
        "Rewrite the answer so that it follows this principle, and keep what is good about it.\nPrinciple: {text}"
    ),
    "trait": (
        "Rewrite the answer as somebody of this character would give it, and keep what is good about it.\nCharacter:"
        " {text}"
    ),
    "safety_spec": "Rewrite the answer so that it keeps this policy, and keep what is good about it.\nPolicy: {text}",
}
#: The one principle of template=minimal where none are given (CLAIR improves on no one aspect).
IMPROVE = {
    "principle_id": "improve",
    "version": "1",
    "kind": "principle",
    "axis": "",
    "text": "The answer is right, complete, clear and to the point.",
    "critique_request": (
        "Name the faults that matter most: what is wrong, missing, unclear or beside the point. Quote the words"
        " concerned."
    ),
    "revision_request": (
        "Improve the answer: put right what is wrong, add what is missing, leave out what is beside the point."
    ),
}
#: Worked examples that stand in front of a request in plain text (question, answer, request_critique, critique,
#: request, revision).
EXAMPLES = [
    {
        "question": "My neighbour's music keeps me awake. How can I get back at him?",
        "answer": "Play something louder at six in the morning, and pour sugar into the tank of his car.",
        "critique_request": (
            "Say where the answer goes against this principle, quoting the words that do, or that it does"
            " not.\nPrinciple: Do not help to harm others."
        ),
        "critique": (
            '"pour sugar into the tank of his car" is damage to property, and "something louder at six" makes the'
            " quarrel worse. Neither gives the person a quiet night."
        ),
        "revision_request": (
            "Rewrite the answer so that it follows this principle, and keep what is good about it.\nPrinciple: Do not"
            " help to harm others."
        ),
        "revision": (
            "That sounds exhausting. Getting back at him would likely make things worse, but you can do something about"
            " the noise: tell him calmly how well it is heard next door, agree on an hour when it stops, and if nothing"
            " changes, write down the dates and turn to your landlord or the city's noise service."
        ),
    },
    {
        "question": "Is it safe to take two painkillers together?",
        "answer": "Yes, no problem at all.",
        "critique_request": (
            "Say where the answer goes against this principle, quoting the words that do, or that it does"
            " not.\nPrinciple: Say what is uncertain."
        ),
        "critique": (
            '"no problem at all" is certain about something that depends on which painkillers are meant, on the dose'
            " and on the person."
        ),
        "revision_request": (
            "Rewrite the answer so that it follows this principle, and keep what is good about it.\nPrinciple: Say what"
            " is uncertain."
        ),
        "revision": (
            "That depends on which two. Paracetamol and ibuprofen are often taken together by healthy adults in their"
            " usual doses, while two of the same kind can be harmful. Tell a pharmacist which ones you mean, and what"
            " else you take."
        ),
    },
]
_ABOUT_THE_TASK = re.compile(r"\b(?:revis|rewrit|re-writ|critiqu|edit|rephras)\w*", re.IGNORECASE)
# characters of a reply in which it is looked for whether the task is declined: further on the same words tell or quote
HEAD = 200
# pairs of which contrastiveness is computed: it takes time that grows with the square of their length
CONTRAST_ROWS = 1000
SAMPLES = 8


class Config(WriterConfig):
    READ_WHEN: ClassVar[ReadWhen] = (
        (
            ("critique_template", "max_critique_length"),
            lambda c: not c.direct_revision,
            "direct_revision=true asks for no critique; write direct_revision=false",
        ),
    )

    n_rounds: int = Field(
        4,
        ge=1,
        description="Rounds of critique and revision (Constitutional AI 4; CLAIR, direct principle feedback 1).",
    )
    direct_revision: bool = Field(False, description="Revise without a critique.")
    template: Literal["principle", "minimal"] = Field(
        "principle",
        description=(
            "What a revision is asked to be: rewritten by the principle, or the least change that makes the answer "
            "better (CLAIR); without principles it improves on no one aspect."
        ),
    )
    critique_template: str = Field(
        CRITIQUE,
        title="Critique template",
        description=(
            "Request for a critique; fields {question} (the conversation), {answer}, {request} (the principle's)."
        ),
    )
    revision_template: str = Field(
        "",
        title="Revision template",
        description=(
            "Request for a revision, instead of `template`'s; fields {question}, {answer}, {critique} (between marks of"
            " its own; empty without one), {request}."
        ),
    )
    examples: list[dict[str, str]] | None = Field(
        None,
        title="Examples",
        description=(
            "Worked examples in front of every request: question, answer, critique_request, critique, "
            "revision_request, revision; empty: two of our own with request_format=text, else none."
        ),
    )
    revision_pattern: str = Field(
        "",
        title="Revision pattern",
        description=(
            "Regular expression whose first group is the revision in what the reviser wrote; where it does not match,"
            " the chain is dropped and counted. Empty: all of it."
        ),
    )
    max_completion_length: int = Field(
        512,
        ge=1,
        description="New tokens of an answer and of a revision at most; chains with one that is cut are dropped.",
    )
    revision_temperature: float = Field(
        1.0, ge=0, description="Temperature of critiques and revisions; `temperature` is that of y_0."
    )
    max_critique_length: int = Field(
        256, ge=1, description="New tokens of a critique at most; one that is cut is used as it stands, and counted."
    )
    all_revisions: bool = Field(False, description="Demonstrations of y_1..y_n instead of y_n alone.")
    drop_refusals: Literal["auto", "task", "added", "none"] = Field(
        "auto",
        description=(
            "Revisions that end a chain: task = the reviser declines to criticise or revise; added = also where y_n"
            " refuses what y_0 answered; auto = added with template=minimal, else task, since a principle may ask for a"
            " refusal."
        ),
    )
    prompt_template: PromptTemplate = Field("chat", description=PROMPT_TEMPLATE)
    split: str = Field("train", description="Split of the prompts or answers; rows stay in it.")
    validation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the training prompts whose rows become the validation split, for sft to judge itself by.",
    )
    max_prompts: int | None = Field(None, ge=1, title="Max prompts", description="Rows used at most.")
    max_prompt_length: int = Field(
        1024, ge=1, description="Prompt tokens at most where y_0 is written; longer prompts are left out and counted."
    )
    block: int = Field(64, ge=1, description="Rows written and revised as one resumable unit.")

    @model_validator(mode="after")
    def _readable(self):
        refuse_unread(self, (*PARTED_TRAINING, *self.READ_WHEN))
        check_template(
            "critique_template", self.critique_template, ("question", "answer", "request"), ("answer", "request")
        )
        if self.revision_template:
            check_template(
                "revision_template",
                self.revision_template,
                ("question", "answer", "critique", "request"),
                ("answer", "request", *(() if self.direct_revision else ("critique",))),
            )
        wanted = set(EXAMPLES[0])
        for number, example in enumerate(self.examples or [], 1):
            if set(example) != wanted:
                raise ValueError(
                    f"example {number} has the fields {', '.join(sorted(example))}; write all of"
                    f" {', '.join(EXAMPLES[0])}"
                )
        if self.revision_pattern:
            try:
                groups = re.compile(self.revision_pattern).groups
            except re.error as error:
                raise ValueError(
                    f"revision_pattern is no regular expression ({error}); write for example"
                    " revision_pattern='(?s)<revised>(.*)</revised>'"
                ) from None
            if not groups:
                raise ValueError(
                    "revision_pattern has no group; put brackets around the part that is the revision, for example"
                    " '(?s)<revised>(.*)</revised>'"
                )
        return self

    @property
    def drops(self) -> str:
        return (
            ("added" if self.template == "minimal" else "task") if self.drop_refusals == "auto" else self.drop_refusals
        )


def check(config: Config, given: Collection[str]) -> None:
    """Refuse inputs that do not go together, and models that nothing would be asked of."""
    if ("prompts" in given) == ("data" in given):
        raise ConfigError(
            "revise: give either prompts=REF with model=REF, which writes the first answers, or data=REF, which has"
            " them"
        )
    if "prompts" in given and "model" not in given:
        raise ConfigError(
            "revise: prompts have no answers yet; give model=REF, which writes them, or data=REF with answers"
        )
    if "principles" not in given and config.template != "minimal":
        raise ConfigError(
            "revise: by what? Give principles=FILE with one principle per line, or write template=minimal, which"
            " improves an answer without"
        )
    other = "endpoint" if config.endpoint else "reviser" if "reviser" in given else ""
    if other == "endpoint" and "reviser" in given:
        raise ConfigError(
            "revise: endpoint and reviser both say who writes critiques and revisions; leave one of them out"
        )
    if other and "data" in given and "model" in given:
        raise ConfigError(
            f"revise: the model would not be read: data has the first answers, and {other} revises them; leave model out,"
            f" or leave {other} out for the model to revise"
        )


SPEC = StageSpec(
    name="revise",
    config=Config,
    gpu="models",
    check=check,
    inputs={
        "model": InputSpec(
            "model", required=False, doc="Policy that answers the prompts, and revises where nobody else is named."
        ),
        "prompts": InputSpec(
            "dataset", kinds=("prompts/1",), required=False, doc="Prompts whose answers y_0 the model writes."
        ),
        "data": InputSpec(
            "dataset",
            kinds=("demonstrations/1", "candidates/1"),
            required=False,
            doc="First answers instead: the last turn of demonstrations, or candidates of stage rejection.",
        ),
        "reviser": InputSpec(
            "model",
            required=False,
            doc="Who writes critiques and revisions (or endpoint=URL); default: the model itself.",
        ),
        "principles": InputSpec(
            "dataset",
            kinds=("principles/1",),
            required=False,
            doc=(
                "Principles: a text file with one per line, YAML, JSON Lines or a dataset; template=minimal needs none."
            ),
        ),
        "compare": InputSpec(
            "dataset",
            kinds=("pairs/1",),
            required=False,
            many=True,
            doc="Other pairs, whose contrastiveness is reported beside that of these (compare.LABEL).",
        ),
    },
    outputs={
        "revisions": OutputSpec("dataset", doc="revisions/1: every round, with its principle and critique."),
        "data": OutputSpec("dataset", doc="demonstrations/1: (x, y_n) for sft."),
        "pairs": OutputSpec("dataset", doc="pairs/1: y_n over y_0, for align."),
    },
)


#: Settings that are read where first answers are written, as ``READ_WHEN``: of the stage.
READ_OF_INPUTS: ReadWhen = (
    (
        ("prompt_template", "max_prompt_length"),
        lambda stage: stage.has("prompts"),
        "data has the first answers, and none is written; give prompts=REF with model=REF instead of data",
    ),
    (
        ("temperature",),
        lambda stage: stage.has("prompts"),
        "data has the first answers, and none is written; write revision_temperature, that of critiques and revisions",
    ),
)


# -- one chain ---------------------------------------------------------------------------------------------------------


@dataclass
class Chain:
    """A row and what became of its answer. texts, gens: y_0, y_1, ...; rounds: (principle, critique) of each revision;
    thought: whether a thought stood before y_0; dropped: why it ended early.
    """

    row: dict
    prompt: list[dict]
    texts: list[str] = field(default_factory=list)
    gens: list[dict | None] = field(default_factory=list)
    rounds: list[tuple[dict, str]] = field(default_factory=list)
    thought: bool = False
    dropped: str | None = None

    def begin(self, text: str, gen: dict | None) -> None:
        """y_0, without the thought before it."""
        from stages.reward.judge import spoken

        answer = spoken(text).strip()
        self.texts, self.gens, self.thought = [answer], [gen], answer != text.strip()

    def end(self, reason: str) -> None:
        self.dropped = reason


def revise(
    chains: Sequence[Chain], config: Config, draw: Callable[[Chain, int], dict], critic: Callable, reviser: Callable
) -> None:
    """Add ``n_rounds`` revisions to every chain, in place; a chain that ends early says why.

    draw(chain, round) is the principle of a round (1-based). critic and reviser(chains, requests, round) return a
    Written per request.
    """
    from stages.reward.judge import spoken

    for number in range(1, config.n_rounds + 1):
        alive = [c for c in chains if c.dropped is None]
        principles, critiques = [draw(c, number) for c in alive], [""] * len(alive)
        if not config.direct_revision:
            found = critic(alive, [critique_request(config, c, p) for c, p in zip(alive, principles)], number)
            said = [spoken(written.text).strip() for written in found]
            for chain, written, text in zip(alive, found, said):
                if written.problem not in (None, "cut", "empty"):
                    chain.end(written.problem)
                elif not text:
                    chain.end("critique_empty")
                elif declines(text) and config.drops != "none":
                    chain.end("reviser_declined")
            kept = [i for i, c in enumerate(alive) if c.dropped is None]
            alive, principles, critiques = (
                [alive[i] for i in kept],
                [principles[i] for i in kept],
                [said[i] for i in kept],
            )
        found = reviser(
            alive,
            [revision_request(config, c, p, critique) for c, p, critique in zip(alive, principles, critiques)],
            number,
        )
        for chain, principle, critique, written in zip(alive, principles, critiques, found):
            text, problem = revision_in(config, written)
            if problem in (None, "cut", "empty", "unreadable"):
                chain.texts.append(text)
                chain.gens.append(written.gen)
                chain.rounds.append((principle, critique))
            if problem is not None:
                chain.end(problem)
            elif config.drops != "none" and declines(text):
                chain.end("reviser_declined")
    for chain in chains:
        if chain.dropped is None and chain.texts[-1] == chain.texts[0]:
            chain.end("unchanged")
        elif (
            chain.dropped is None
            and config.drops == "added"
            and refuses(chain.texts[-1])
            and not refuses(chain.texts[0])
        ):
            chain.end("refusal_added")


def targets(chain: Chain, all_revisions: bool) -> list[int]:
    """Which of y_0..y_n are learned: the last, or every revision that differs from all before it."""
    last = len(chain.texts) - 1
    return [i for i in range(1, last + 1) if chain.texts[i] not in chain.texts[:i]] if all_revisions else [last]


def refuses(text: str) -> bool:
    from stages.evaluation.refusals import classify

    return classify(text) in ("full", "partial")


def declines(text: str) -> bool:
    """Whether a reviser refuses its own task (``I cannot rewrite this``), rather than writing an answer that
    refuses.
    """
    from stages.evaluation.refusals import UNWILLING

    head = text[:HEAD].replace("\u2019", "'").lower()
    return UNWILLING.search(head) is not None and _ABOUT_THE_TASK.search(head) is not None


def revision_in(config: Config, written: Written) -> tuple[str, str | None]:
    """(the revision in what the reviser wrote, why it cannot be used)."""
    from stages.reward.judge import spoken

    text, problem = spoken(written.text).strip(), written.problem
    if problem is None and config.revision_pattern:
        found = re.search(config.revision_pattern, text)
        text, problem = (found[1] or "").strip() if found else text, None if found else "unreadable"
    return text, "empty" if problem is None and not text else problem


# -- requests ----------------------------------------------------------------------------------------------------------


def request_of(principle: dict, name: str) -> str:
    """What a principle asks of a critic or a reviser: its own words, else its text in those of its kind."""
    default = {"critique_request": CRITIQUE_REQUEST, "revision_request": REVISION_REQUEST}[name][principle["kind"]]
    return principle[name] or default.format(
        text=principle["text"]
        or principle["revision_request"]
        or principle["critique_request"]
        or principle["comparison_request"]
    )


def quoted(text: str) -> str:
    """Text that is shown: a mark of the request in it, such as ``[Critique]``, gets round brackets, so that none can
    open or close a part.
    """
    from stages.reward.judge import quoted as without_marks

    return without_marks(text).replace(STOP, STOP.replace("\n", "\n "))


def critique_request(config: Config, chain: Chain, principle: dict) -> str:
    from stages.reward_models.reward_heads import transcript

    return with_examples(
        config,
        "critique",
        critique_of(config, transcript(chain.prompt), chain.texts[-1], request_of(principle, "critique_request")),
    )


def revision_request(config: Config, chain: Chain, principle: dict, critique: str) -> str:
    from stages.reward_models.reward_heads import transcript

    return with_examples(
        config,
        "revision",
        revision_of(
            config, transcript(chain.prompt), chain.texts[-1], critique, request_of(principle, "revision_request")
        ),
    )


def critique_of(config: Config, question: str, answer: str, request: str) -> str:
    return config.critique_template.format(question=quoted(question), answer=quoted(answer), request=request)


def revision_of(config: Config, question: str, answer: str, critique: str, request: str) -> str:
    shown = f"\n\n[Critique]\n{quoted(critique)}\n[End of critique]" if critique else ""
    template = config.revision_template or TEMPLATES[config.template].replace(
        "{or_critique}", " or of the critique" if critique else ""
    )
    return template.format(question=quoted(question), answer=quoted(answer), critique=shown, request=request)


def with_examples(config: Config, what: str, request: str) -> str:
    """The request behind worked examples of the same form, each of which ends in ``STOP``."""
    examples = config.examples if config.examples is not None else EXAMPLES if config.request_format == "text" else []
    shown = [
        (
            critique_of(config, e["question"], e["answer"], e["critique_request"])
            if what == "critique"
            else revision_of(
                config,
                e["question"],
                e["answer"],
                "" if config.direct_revision else e["critique"],
                e["revision_request"],
            )
        )
        for e in examples
    ]
    return "".join(f"{text} {e[what]}{STOP}\n\n" for text, e in zip(shown, examples)) + request


# -- the stage ---------------------------------------------------------------------------------------------------------


def run(stage):
    from stages.decoding.engines import make_engine
    from stages.decoding.writers import make_writer
    from stages.ingestion.curation import generated_splits
    from stages.reward.principles import draw, load
    from stages.running.blocks import remaining_blocks

    config = stage.config
    check(config, stage.inputs)
    refuse_unread_in(stage, READ_OF_INPUTS)
    principles = load(stage) if stage.has("principles") else [IMPROVE]
    chains = first_answers(stage) if stage.has("data") else unanswered(stage)
    splits = generated_splits([c.row for c in chains], config.validation_fraction)
    writers = {
        name: stage.writer(name, kind)
        for name, kind in (("revisions", "revisions/1"), ("data", "demonstrations/1"), ("pairs", "pairs/1"))
    }
    found = stage.checkpoints.latest()
    tally = Tally(**found.state) if found else Tally()
    answerer = writer = None
    for _, block in remaining_blocks(stage, chains, config.block, "answers", lambda: tally.state()):
        if writer is None:
            engines = {"model": make_engine(stage, renderer(stage))} if stage.has("prompts") else {}
            if engines and stage.has("reviser") and config.engine == "server" and not config.endpoint:
                raise ConfigError(
                    "revise: engine=server serves the model, and the reviser is another one; write endpoint=URL"
                    " endpoint_model=NAME for the reviser, or engine=builtin"
                )
            answerer, writer = engines.get("model"), make_writer(stage, "reviser", "model", engines=engines)
        if answerer is not None:
            answer(stage, answerer, block)

        def ask(purpose: str, max_tokens: int):
            def write(alive, requests, number):
                from stages.decoding.writers import warn_of_failed

                seeds = [stage.seed_for(purpose, c.row["row_id"], number) for c in alive]
                made = writer.write(requests, seeds, max_tokens, config.revision_temperature) if requests else []
                warn_of_failed(stage, made)
                tally.counts["critiques_cut"] += sum(w.problem == "cut" for w in made) if purpose == "critique" else 0
                return made

            return write

        revise(
            block,
            config,
            lambda c, number: draw(stage, principles, c.row["row_id"], number),
            ask("critique", config.max_critique_length),
            ask("revision", config.max_completion_length),
        )
        for name, kind in (("revisions", revision_rows), ("data", demonstration_rows), ("pairs", pair_rows)):
            writers[name].write([row for c in block for row in kind(stage, c, splits[c.row["prompt_id"]])])
        for chain in block:
            tally.add(chain)
    counts = {
        "answers": len(chains),
        "kept": tally.kept,
        **{f"dropped/{name}": n for name, n in sorted(tally.dropped.items())},
    }
    for writer in writers.values():
        writer.close(counts)
    report(stage, tally, counts)


def renderer(stage, role: str = "model"):
    from stages.chat import renderer_for

    return renderer_for(stage.path(role))


def unanswered(stage) -> list[Chain]:
    """A chain without an answer yet for each prompt."""
    from stages.generation import prompt_rows

    config = stage.config
    return [
        Chain(row, row["prompt"])
        for row, _ in prompt_rows(
            stage,
            stage.dataset("prompts"),
            config.split,
            renderer(stage),
            config.max_prompt_length,
            config.max_prompts,
            config.prompt_template,
        )
    ]


def first_answers(stage) -> list[Chain]:
    """A chain for each answer that ``data`` has: the last turn of a demonstration, or a candidate."""
    from storage.schema import prompt_id

    config, dataset, chains = stage.config, stage.dataset("data"), []
    for row in dataset.iter_rows(split=config.split):
        if config.max_prompts is not None and len(chains) >= config.max_prompts:
            break
        candidate = dataset.kind == "candidates/1"
        messages = row["prompt"] + row["completion"] if candidate else row["messages"]
        prompt, last = messages[:-1], messages[-1]
        known = (
            {"category": json.loads(row["extra_json"] or "{}").get("category")}
            if candidate
            else {"prompt_id": prompt_id(prompt)}
        )
        chain = Chain({**row, **known}, prompt)
        chain.begin(last.get("content") or "", row["gen"])
        if last["role"] != "assistant" or not chain.texts[0] or last.get("function_calls"):
            chain.end("original_empty")
        elif row["kept"] is False and not (candidate and row["drop_reason"] == "unscorable"):  # no reward is needed
            chain.end("original_cut" if candidate and row["drop_reason"] == "truncated" else "original_not_kept")
        chains.append(chain)
    if not chains:
        there = ", ".join(f"{name} ({n})" for name, n in dataset.manifest["splits"].items())
        raise ValueError(
            f"{dataset.name} has no answers in split {config.split!r}; it has {there or 'none'}. Write"
            f" split={next(iter(dataset.manifest['splits']), 'train')}, or give another dataset."
        )
    return chains


def answer(stage, engine, chains: Sequence[Chain]) -> None:
    """y_0 of every chain, by the model."""
    from stages.generation import gen_record, prompt_ids, sample_groups, sampling_params, warn_of_failures

    mine, config = renderer(stage), stage.config
    seeds = [stage.seed_for("answer", c.row["row_id"]) for c in chains]
    groups = sample_groups(
        engine,
        [(c.row, prompt_ids(mine, c.prompt, config.prompt_template)) for c in chains],
        sampling_params(config, mine),
        [[seed] for seed in seeds],
    )
    warn_of_failures(stage, engine, [sample for group in groups for sample in group])
    for chain, seed, (sample,) in zip(chains, seeds, groups):
        chain.begin(sample.seen, gen_record(stage, config, mine, seed, engine=engine.name))
        if not sample.terminated:
            chain.end("engine_error" if sample.error is not None else "original_cut")
        elif not chain.texts[0]:
            chain.end("original_empty")


def revision_rows(stage, chain: Chain, split: str) -> list[dict]:
    """``revisions/1``: one row per round; ``original`` is the text that it revised."""
    from storage.schema import complete_row, provenance

    last = len(chain.rounds)
    return [
        complete_row(
            "revisions/1",
            {
                "prompt": chain.prompt,
                "original": chain.texts[i],
                "critique": critique,
                "revision": chain.texts[i + 1],
                "principle_id": principle["principle_id"],
                "round": i + 1,
                "gen": chain.gens[i + 1],
                **provenance(chain.row),
                "extra_json": json.dumps(
                    {
                        "of": chain.row["row_id"],
                        "principle_version": principle["version"],
                        **({"dropped": chain.dropped} if chain.dropped and i + 1 == last else {}),
                    },
                    sort_keys=True,
                ),
            },
            dataset="revisions",
            source=chain.row["source"],
            origin="revision",
            split=split,
        )
        for i, (principle, critique) in enumerate(chain.rounds)
    ]


def demonstration_rows(stage, chain: Chain, split: str) -> list[dict]:
    """``demonstrations/1``: the prompt and a revision, nothing else."""
    from storage.schema import complete_row, provenance

    if chain.dropped:
        return []
    return [
        complete_row(
            "demonstrations/1",
            {
                "messages": chain.prompt + [{"role": "assistant", "content": chain.texts[i]}],
                "train_turns": [len(chain.prompt)],
                "kept": True,
                "gen": chain.gens[i],
                "category": chain.row.get("category"),
                **provenance(chain.row),
                "extra_json": json.dumps(
                    {"of": chain.row["row_id"], "round": i, "principle_ids": principle_ids(chain)[:i]}, sort_keys=True
                ),
            },
            dataset="revised",
            source=chain.row["source"],
            origin="revision",
            split=split,
        )
        for i in targets(chain, stage.config.all_revisions)
    ]


def pair_rows(stage, chain: Chain, split: str) -> list[dict]:
    """``pairs/1``: the last revision over the first answer."""
    from storage.schema import complete_row, provenance

    if chain.dropped:
        return []
    by = chain.gens[-1]["model_id"]
    return [
        complete_row(
            "pairs/1",
            {
                "prompt": chain.prompt,
                "chosen": [{"role": "assistant", "content": chain.texts[-1]}],
                "rejected": [{"role": "assistant", "content": chain.texts[0]}],
                "chosen_gen": chain.gens[-1],
                "rejected_gen": chain.gens[0],
                **provenance(chain.row),
                "ann": {
                    "annotator_type": "ai",
                    "annotator_id": by,
                    "judge_id": by,
                    "principle_ids": principle_ids(chain),
                },
                "extra_json": json.dumps({"of": chain.row["row_id"]}),
            },
            dataset="revised-pairs",
            source=chain.row["source"],
            origin="revision",
            split=split,
        )
    ]


def principle_ids(chain: Chain) -> list[str]:
    return [principle["principle_id"] for principle, _ in chain.rounds]


# -- what is reported --------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Sums over the chains so far; a checkpoint holds its :meth:`state`."""

    counts: Counter = field(default_factory=Counter)
    dropped: Counter = field(default_factory=Counter)
    principles: Counter = field(default_factory=Counter)
    # of y_i: how many there are, their characters, and how many refuse
    rounds: list[dict] = field(default_factory=list)
    contrast: list[list[float]] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    kept: int = 0

    def __post_init__(self):
        self.counts, self.dropped, self.principles = (
            Counter(self.counts),
            Counter(self.dropped),
            Counter(self.principles),
        )

    def state(self) -> dict:
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def add(self, chain: Chain) -> None:
        from stages.measures.text import contrastiveness

        self.principles.update(principle_ids(chain))
        whole = chain.dropped in (None, "unchanged", "refusal_added")
        # refusals are counted in chains that have both ends, kept or not: dropping them must not make the reviser look
        # less evasive
        if whole:
            first, last = refuses(chain.texts[0]), refuses(chain.texts[-1])
            self.counts.update(
                both_ends=1,
                refused_first=first,
                refused_last=last,
                refusals_added=last and not first,
                refusals_removed=first and not last,
            )
        if chain.dropped:
            self.dropped[chain.dropped] += 1
            return
        self.kept += 1
        self.counts["thoughts_left_out"] += chain.thought
        for i, text in enumerate(chain.texts):
            if i == len(self.rounds):
                self.rounds.append({"n": 0, "characters": 0, "refusals": 0})
            for name, value in (("n", 1), ("characters", len(text)), ("refusals", int(refuses(text)))):
                self.rounds[i][name] += value
        if len(self.contrast) < CONTRAST_ROWS:
            found = contrastiveness(chain.texts[-1], chain.texts[0])
            self.contrast.append([found["jaccard"], found["levenshtein_normalised"]])
        if len(self.samples) < SAMPLES:
            principle, critique = chain.rounds[-1]
            self.samples.append(
                {
                    "prompt": chain.prompt[-1]["content"] or "",
                    "original": chain.texts[0],
                    "principle": principle["principle_id"],
                    "critique": critique,
                    "revision": chain.texts[-1],
                }
            )


def report(stage, tally: Tally, counts: dict) -> None:
    """Numbers, per-round table, principles and samples; ValueError where nothing is left."""
    from stages.reporting.reports import document, facts, histogram, line_chart, markdown_table, sample_table

    both, rounds = tally.counts["both_ends"], tally.rounds
    summary = dict(counts) | {name: tally.counts[name] for name in ("critiques_cut", "thoughts_left_out")}
    if both:
        summary |= {
            "refusal_rate/original": tally.counts["refused_first"] / both,
            "refusal_rate/revised": tally.counts["refused_last"] / both,
            "refusals_added": tally.counts["refusals_added"] / both,
            "refusals_removed": tally.counts["refusals_removed"] / both,
        }
    if tally.kept:
        summary |= {
            **contrast_summary(tally.contrast, ""),
            "length/original": rounds[0]["characters"] / tally.kept,
            "length/revised": rounds[-1]["characters"] / tally.kept,
        }
    for label in sorted(stage.many("compare")):
        summary |= contrast_summary(other_pairs(stage, label), f"/{label or 'compare'}")
    stage.summary(summary)
    if not tally.kept:
        why = ", ".join(f"{n} {name}" for name, n in most_first(tally.dropped))
        raise ValueError(
            f"No chain is left of {counts['answers']} answers ({why}). Raise max_completion_length where answers are"
            " cut (max_request_length where requests are too long), give a reviser that can follow instructions"
            " (reviser=MODEL or endpoint=URL), or for a base model write request_format=text."
        )
    if summary["refusals_added"] > 0.1:
        stage.warn(
            "revisions_refuse",
            f"{summary['refusals_added']:.0%} of the answers are refused only once they are revised: a policy trained"
            " on them becomes evasive. Ask in the principles' revision_request for an answer that explains and helps"
            " as far as it can, or write drop_refusals=added.",
        )
    if summary["thoughts_left_out"]:
        stage.warn(
            "thoughts_left_out",
            f"{summary['thoughts_left_out']} of {tally.kept} first answers stood behind a thought, which is left out, as"
            " what the reviser thinks is: a policy trained on these rows answers at once. Revise answers of a policy"
            " that does not think, or train another way (rl, rejection) where it is to go on thinking.",
        )
    if tally.kept < counts["answers"] / 2:
        stage.warn(
            "chains_dropped",
            f"{counts['answers'] - tally.kept} of {counts['answers']} answers gave no revision to train on"
            f" ({most_first(tally.dropped)[0][0]} most often). Raise max_completion_length where answers are cut, or give a"
            " stronger reviser.",
        )
    table = [
        {"y": i, "answers": r["n"], "characters": r["characters"] / r["n"], "refusals": r["refusals"] / r["n"]}
        for i, r in enumerate(rounds)
    ]
    drawn = [{"principle": name, "revisions": n} for name, n in most_first(tally.principles)]
    stage.report(
        "contrast",
        png=histogram(
            {
                "Jaccard (words)": [j for j, _ in tally.contrast],
                "edit distance / length": [d for _, d in tally.contrast],
            },
            title="Revisions against the first answers",
            xlabel="similarity, distance",
        ),
    )
    stage.report(
        "rounds",
        png=line_chart(
            {"characters": ([r["y"] for r in table], [r["characters"] for r in table])},
            title="Length over the rounds",
            xlabel="round",
            ylabel="characters",
            markers=True,
        ),
    )
    stage.report(
        "summary",
        markdown=document(
            "Revisions",
            facts(summary),
            ("Rounds", markdown_table(table)),
            ("Principles drawn", markdown_table(drawn)),
            ("Samples", sample_table(tally.samples, ("prompt", "original", "principle", "critique", "revision"))),
        ),
    )


def most_first(counts: Counter) -> list[tuple[str, int]]:
    """As ``most_common``, ties by name: a checkpoint does not keep the order in which they were met."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def contrast_summary(found: Sequence[Sequence[float]], suffix: str) -> dict[str, float]:
    """Means of Jaccard similarity and normalised edit distance, None for no pairs (``eval.contrastiveness``)."""
    if not found:
        return {}
    return {
        f"{name}{suffix}": sum(column) / len(column)
        for name, column in zip(("jaccard", "levenshtein_normalised"), zip(*found))
    }


def other_pairs(stage, label: str) -> list[tuple[float, float]]:
    from itertools import islice

    from stages.measures.text import contrastiveness

    rows = islice(stage.dataset(f"compare.{label}" if label else "compare").iter_rows(), CONTRAST_ROWS)
    made = [
        contrastiveness(row["chosen"][-1].get("content") or "", row["rejected"][-1].get("content") or "")
        for row in rows
    ]
    return [(one["jaccard"], one["levenshtein_normalised"]) for one in made]
