"""A reward model behind a URL: batches of answers out, one number each in (OpenRLHF's ``--remote_rm_url``).

    server = RewardServer(url, "my-rm")
    for found in server.scores(answers): a number, or the text that says why there is none

``openrlhf``  ``{"query": [prompt and response as the policy's tokens spell them], "prompts": [...], "labels": [gold
answers]}``, what OpenRLHF posts ``messages``  ``{"model": name, "messages": [conversations that end in the answer],
"answers": [gold answers], "rows": [columns of the prompts], "finish_reasons": [...]}``

The answer is ``{"rewards": [...]}`` (another name: ``score_key``) or the list alone, one number per answer in their
order. A server that is away, overloaded or answers otherwise is asked again after growing waits; if it stays away, the
stage ends (RewardServerError) instead of learning from what is left (stages/running/servers.py). A batch that it
refuses is halved, so that one answer that is too long costs its own score only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.running import journal
from stages.running.http_json import ServerError, request_json, shown
from stages.running.servers import FAILING, Served, Settings, each, patiently, refuse_error, rule_of


class RewardServerError(RuntimeError):
    """The server cannot be asked; the text says what to see to."""


@dataclass(frozen=True)
class Answer:
    """What is scored. query, prompt: text as the policy's tokens spell it, with its template; messages: the
    conversation, the answer last; row: the prompt's columns in plain JSON.
    """

    messages: list[dict]
    row: dict
    finish_reason: str | None
    query: str = ""
    prompt: str = ""

    @property
    def label(self) -> str | None:
        return self.row.get("answer")


FORMS = {
    "openrlhf": lambda model, answers: {
        "query": [a.query for a in answers],
        "prompts": [a.prompt for a in answers],
        "labels": [a.label for a in answers],
    },
    "messages": lambda model, answers: {
        "model": model,
        "messages": [a.messages for a in answers],
        "answers": [a.label for a in answers],
        "rows": [a.row for a in answers],
        "finish_reasons": [a.finish_reason for a in answers],
    },
}


class RewardServer:
    """A server that scores answers.

    Args:
        url: where batches are posted. model: the name of what scores there. form: one of ``FORMS``. score_key: where
            the numbers are in the answer. batch_size: answers in a request. concurrency: requests under way at once.
            timeout_s: seconds of one request. key_variable: environment variable that holds the key, if one is needed.
    """

    def __init__(
        self,
        url: str,
        model: str,
        form: str = "openrlhf",
        score_key: str = "rewards",
        batch_size: int = 32,
        concurrency: int = 8,
        timeout_s: float = 60.0,
        key_variable: str = "",
    ):
        self.url, self.model, self.form, self.score_key, self.batch_size = url, model, form, score_key, batch_size
        self.concurrency, self.timeout_s, self.key_variable = concurrency, timeout_s, key_variable
        self.served = Served(
            f"the reward server at {url}",
            "scores",
            RewardServerError,
            timeout_s,
            Settings(address="url", fewer="batch_size=N or concurrency"),
        )

    def scores(self, answers: Sequence[Answer]) -> list[float | str]:
        """A finite number for each answer, in order, or the reason why there is none."""
        batches = [answers[i : i + self.batch_size] for i in range(0, len(answers), self.batch_size)]
        found = each(self._batch, batches, self.concurrency, finish=journal.keeps())
        if len(answers) >= FAILING:  # fewer may each be an answer that it has no number for
            self.served.not_silent(len(batches))
        return [one for of_batch in found for one in of_batch]

    def _batch(self, answers: Sequence[Answer]) -> list[float | str]:
        body = FORMS[self.form](self.model, answers)
        try:
            values = journal.once(
                self.url,
                ["scores", self.model, self.form, self.score_key, body],
                lambda: patiently(lambda: self._ask(body, len(answers)), body),
                self.served,
                object(),
                lambda values: values if any(isinstance(_number(value, ""), float) for value in values) else None,
            )
            return [_number(value, self.key_variable) for value in values]
        except ServerError as error:
            if rule_of(error).then == "row" and len(answers) > 1:  # it may be about one of them
                half = len(answers) // 2
                return self._batch(answers[:half]) + self._batch(answers[half:])
            return [f"the reward server did not score it: {error}"] * len(answers)

    def _ask(self, body: dict, count: int) -> list:
        said = request_json(self.url, body, key_variable=self.key_variable, timeout_s=self.timeout_s)
        refuse_error(said, self.key_variable)
        values = said.get(self.score_key) if isinstance(said, dict) else said
        if not isinstance(values, list):
            held = (
                f"only {', '.join(map(str, said))[:100]}"
                if isinstance(said, dict)
                else shown(said, self.key_variable, 100)
            )
            raise ServerError(
                f"the answer holds no list {self.score_key!r} but {held}; score_key=NAME says what it is called"
            )
        if len(values) != count:
            raise ServerError(f"{len(values)} numbers for {count} answers")
        return values


def _number(value, key_variable: str) -> float | str:
    """A finite number, or one alone in a list as models with one output give it; else what is wrong."""
    from stages.reward.verdicts import finite

    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if finite(value):
        return float(value)
    return (
        "the reward server gave no number for it"
        if value is None
        else f"the reward server gave {shown(value, key_variable, 60)}, which is no finite number"
    )
