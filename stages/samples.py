"""What a trained policy answers, beside what the model it started from answers: the samples on the report of a stage
that trains on rows (``report_samples``).

A few prompts of the validation split, else of the training rows, are answered greedily by the starting model before the
first step and by the published one at the end. Nothing that is trained, measured or stored reads the answers, and those
of the start are kept in the work directory, so that a resumed stage has them from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from stages.models.memory import lacks_room_to_sample

#: New tokens of an answer at most; below that twice the longest answer given, and ``LEAST`` at least.
MOST, LEAST = 128, 16
#: Tokens of a plain text (or half of them) that its continuation starts from.
TEXT_START = 32
#: Prompts from which on their answers say something of lengths, and how much longer is said to be longer (section H).
ENOUGH, LONGER = 16, 1.3
#: Rows of the split among which prompts are looked for.
LOOKED_AT = 64


@dataclass(frozen=True)
class Asked:
    """One prompt: its last message or the start of a text, its ids, and the answer that the row gives."""

    prompt: str
    ids: tuple[int, ...]
    given: str


def answered_turn(messages: list[dict], turns) -> int:
    """The index of the last trained answer of a conversation; ``turns``: those that are, None: all."""
    return max(
        (i for i, m in enumerate(messages) if m["role"] == "assistant" and (turns is None or i in turns)),
        default=len(messages) - 1,
    )


def asked_of(kind: str, row: dict, renderer) -> Asked | None:
    """The prompt of a row of training data and the answer that it holds up as good; None where it has none."""
    decode = lambda ids: renderer.tokenizer.decode(list(ids), skip_special_tokens=True)
    if kind == "text/1":
        ids = renderer.text_ids(row["text"], end=False)
        start = min(TEXT_START, len(ids) // 2)
        return Asked(decode(ids[:start]), tuple(ids[:start]), decode(ids[start : start + MOST])) if start else None
    if kind == "teacher_logps/1":
        end = max((i for i, on in enumerate(row["mask"]) if on), default=-1)
        start = next((i for i in range(end, -1, -1) if not row["mask"][i]), -1) + 1
        prompt, given = row["ids"][:start], row["ids"][start : end + 1]
        return Asked(decode(prompt), tuple(prompt), decode(given)) if prompt else None
    if kind == "demonstrations/1":
        last = answered_turn(row["messages"], row.get("train_turns") or None)
        prompt, given = row["messages"][:last], row["messages"][last : last + 1]
        if row.get("kept") is False:
            return None
    elif kind == "rankings/1":
        prompt, given = row["prompt"], row["completions"][row["ranks"].index(min(row["ranks"]))]
    elif kind == "unpaired/1":
        prompt, given = row["prompt"], row["completion"] if row["label"] else []
    else:
        prompt, given = row["prompt"], row["chosen"]
    said = lambda messages: (messages[-1].get("content") or "") if messages else ""
    return Asked(said(prompt), tuple(renderer.prompt_ids(prompt)), said(given)) if prompt else None


class Samples:
    """The answers of a stage: of the starting model (in memory, untrained) as this is made, of the published one by
    :meth:`publish`. Of several ranks the first one samples.

    Args:
        model: what is trained, before its first step.
        dataset: the training data.
    """

    def __init__(self, stage, model, renderer, dataset):
        from stages.models.sharding import asked

        self.stage, self.renderer = stage, renderer
        self.split, self.asked, self.reason = "", [], None
        self.before: list = []
        self.after: list = []
        if not stage.config.report_samples or stage.rank != 0:
            return
        if asked(stage.config):
            self.reason = "the weights are split over the devices (sharding=full)"
        else:
            self._find(dataset, model)
        if self.asked:
            self._start(model)
        if self.reason:
            stage.log(f"the report will have no answers of the model: {self.reason}")

    def _find(self, dataset, model) -> None:
        """Choose the prompts: the first ones of the split that differ and leave room for an answer in ``max_length``
        and the model's positions.
        """
        from stages.chat import RenderError
        from stages.decoding.decoders import max_positions

        stage, config = self.stage, self.stage.config
        self.split = "validation" if dataset.rows_of("validation") else "train"
        most = min(config.max_length, max_positions(model) or config.max_length)
        for row in islice(dataset.iter_rows(split=self.split), LOOKED_AT):
            if len(self.asked) == config.report_samples:
                break
            try:
                one = asked_of(dataset.kind, row, self.renderer)
            except RenderError:  # training says so of the rows that it reads
                continue
            if one and len(one.ids) < most and one.ids not in [other.ids for other in self.asked]:
                self.asked.append(one)
        if not self.asked:
            self.reason = (
                f"none of the first {LOOKED_AT} rows of split {self.split} has a prompt that leaves room in max_length"
            )
            return
        given = max(len(self.renderer.tokenizer.encode(one.given, add_special_tokens=False)) for one in self.asked)
        self.tokens = min(MOST, max(LEAST, 2 * given))
        longest = max(len(one.ids) for one in self.asked) + self.tokens
        self.reason = lacks_room_to_sample(stage, len(self.asked), longest)
        if self.reason:
            self.asked = []
            return
        stage.log(
            f"the report shows answers to {len(self.asked)} prompts of split {self.split}, at most {self.tokens} tokens"
            " each, before and after training (report_samples=0 leaves them out)"
        )

    def _start(self, model) -> None:
        """What the starting model answers, read back where an earlier start of this stage has asked it."""
        from stages.decoding.decoders import DecoderError
        from stages.decoding.sampler import SamplerError
        from stages.running.blocks import in_blocks

        answer = lambda asked: self._answers(model, asked)
        try:
            self.before = in_blocks(
                self.stage, "answers-before", self.asked, answer, len(self.asked), "answers for the report"
            )
        except (SamplerError, DecoderError) as error:
            self.asked, self.reason = [], f"the sampler does not take this model ({error})"

    def _answers(self, model, asked) -> list[dict]:
        """{"text", "finish", "tokens"} of every prompt."""
        from stages.decoding.sampler import Sampler
        from stages.decoding.sampling import SamplingParams
        from stages.generation import room_after, sample_with_room
        from stages.models.modeling import uncompiled

        sampler = Sampler(model, self.renderer.tokenizer, max_batch=len(asked))
        params = SamplingParams(temperature=0.0, max_new_tokens=self.tokens, stop_ids=self.renderer.stop_ids)
        prompts = [list(one.ids) for one in asked]
        rooms = [room_after(sampler, ids, self.tokens) for ids in prompts]
        with uncompiled():  # graphs of single tokens would be made, and those of training again
            groups = sample_with_room(sampler, prompts, params, [[0]] * len(prompts), rooms)
        sampler.release()
        return [{"text": c.text, "finish": c.finish_reason, "tokens": len(c.ids)} for group in groups for c in group]

    def publish(self, model, tokenizer, epochs=None) -> None:
        """Publish the trained model (:func:`stages.models.modeling.publish`), and have it answer: as it is in memory,
        or read back where ``save_dtype`` rounds it.
        """
        from stages.models.modeling import load_frozen, publish

        rounds = self.stage.config.save_dtype != "float32"
        if not rounds:
            self._end(lambda: model)
        publish(self.stage, model, tokenizer, epochs)
        if rounds:
            self._end(lambda: load_frozen(str(self.stage.workdir / "out" / "model"), self.stage.device))

    def _end(self, published) -> None:
        """What the model that ``published()`` gives answers. Training is done, so that one which cannot be sampled is
        published without.
        """
        from stages.decoding.decoders import DecoderError
        from stages.decoding.sampler import SamplerError
        from stages.running import cuda

        if not self.asked:
            return
        try:
            self.after = self._answers(published(), self.asked)
            return
        except (SamplerError, DecoderError, MemoryError, RuntimeError) as error:
            if not isinstance(error, (SamplerError, DecoderError)) and not cuda.out_of_memory(error):
                raise
            self.asked, self.reason = [], f"the trained model could not be sampled ({error})"
        cuda.release(self.stage.device)

    def warn_of_length(self) -> None:
        """Warn where the answers have grown by 30% (section H, alarms; of ``ENOUGH`` prompts at least), for stages whose
        rows should not change lengths.
        """
        before, after = (sum(one["tokens"] for one in answers) for answers in (self.before, self.after))
        if len(self.asked) >= ENOUGH and after > LONGER * before:
            self.stage.warn(
                "answers_longer",
                f"To {len(self.asked)} prompts the trained policy answers in {after / len(self.asked):.0f} tokens and the"
                f" starting one in {before / len(self.asked):.0f} ({self.tokens} at most): preferences for longer answers"
                " may be all that it learned. Raise beta, train fewer steps, take method=simpo, length_norm or r_dpo, or"
                " balance lengths in the data.",
            )

    def block(self) -> tuple[str, str] | str | None:
        """The part of the report, after :meth:`publish`; its table is a report of its own. None where
        ``report_samples=0``.
        """
        from stages.reporting.reports import sample_table

        if self.reason:
            return f"No answers of the model are shown: {self.reason}."
        if not self.asked:
            return None
        rows = [
            {
                "split": self.split,
                "prompt": one.prompt,
                "answer before": before["text"],
                "answer after": after["text"],
                "given answer": one.given,
                "finish before": before["finish"],
                "finish after": after["finish"],
                "tokens before": before["tokens"],
                "tokens after": after["tokens"],
            }
            for one, before, after in zip(self.asked, self.before, self.after)
        ]
        self.stage.report("samples", table=rows)
        which = "held-out" if self.split == "validation" else "training"
        ended = lambda when: sum(row[f"finish {when}"] != "length" for row in rows)
        return (
            f"Answers to {len(rows)} {which} prompts, before and after training",
            f"Greedy, at most {self.tokens} tokens; {ended('before')} of {len(rows)} ended by themselves before and"
            f" {ended('after')} after."
            + (
                ""
                if self.split == "validation"
                else " The data has no validation split, so these rows were trained on."
            )
            + "\n\n"
            + sample_table(rows, [name for name in rows[0] if name not in ("split", "tokens before")], limit=160),
        )
