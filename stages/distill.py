"""distill: a student learns a teacher's next-token distributions, not only its words.

Three ways, all on the trained tokens of demonstrations (the same masks and row weights as ``sft``), over the whole
vocabulary:

``logit``      T^2 KL(teacher || student) on the given answers (``kd.logit``); with ``soft_weight`` below 1 the rest is the
               usual negative log-likelihood (``kd.codistill``).
``context``    the teacher reads ``context`` before each conversation and the student does not; by default the teacher is
               the starting model itself (``kd.context``, Askell et al. 2021).
``on_policy``  a share ``lmbda`` of the answers is sampled from the student as it is at that step (``kd.onpolicy``, GKD,
               Agarwal et al. 2024); sampling is not differentiated. With ``context`` the teacher reads it here too, and
               by default is the starting model.

In ``context``, ``{prompt}`` stands for the last question, whose place the text then takes, and ``{answer}`` for the row's
own answer. So the student learns on answers of its own from itself having read the demonstration: self-distillation
fine-tuning (Shenfeld et al. 2026, arXiv:2601.19897), meant to teach what ``sft`` would and forget less.
``teacher_update=ema`` has such a teacher follow the student.

What is compared is the ``objective``:

``divergence``  the two distributions at every token, over one vocabulary; the teacher has the student's tokenizer.
``uld``         a teacher with any tokenizer and chat template: both tokenise the answer's text, tokens are merged where
                their borders differ (:mod:`stages.token_spans`), and of every such span the sorted probabilities are
                compared (Universal Logit Distillation, Boizard et al. 2024, arXiv:2402.12030).
``gold``        the same, but entries that both vocabularies have are compared by name, by the divergence that
                ``direction`` names, and only the others sorted (General Online Logit Distillation, Patino et al. 2025).
``iw_opd``      policy gradient of the reverse KL on the student's answers, which weighs a token less the more of the
                row's distance from the teacher lies before it (``method=on_policy lmbda=1``; Xie et al. 2026,
                arXiv:2606.22600). Validation, on given answers, is the reverse KL over the whole vocabulary.

From the dataset of a ``capture`` stage it trains without the teacher, on the K most likely tokens of every position and
what is left as one class (``tail``); what the teacher saw was decided there, so ``method`` is logit.

Sequence-level distillation (``kd.sequence``) needs no stage of its own: sample with ``rejection``, then run ``sft``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from stages.models.memory import Role, sampling_stays
from stages.samples import answered_turn
from stages.settings import EPOCHS, ReadWhen, note_template, refuse_unread, refuse_unread_in
from stages.sft import RowsConfig
from stages.spec import InputSpec, OutputSpec, StageSpec, left_out, refuse_no_rows, warn_of_cut_rows


if TYPE_CHECKING:
    import numpy as np

    from stages.chat import Renderer
    from stages.token_spans import Pieces

#: Objectives that align what the teacher's tokenizer makes of an answer's text.
ACROSS = ("uld", "gold")
#: Stand in ``context`` for the row's own answer, and for its last question, whose place the context then takes.
ANSWER, PROMPT = "{answer}", "{prompt}"


class Config(RowsConfig):
    #: Beside RowsConfig.READ_WHEN, and read once the method has decided the direction.
    READ_BY_METHOD: ClassVar[ReadWhen] = (
        (
            ("jsd_beta",),
            lambda c: c.direction == "jsd",
            "only the Jensen-Shannon divergence has a mixture; write direction=jsd",
        ),
        (("lmbda",), lambda c: c.method == "on_policy", "the student writes no answers; write method=on_policy"),
        (
            ("sampling_temperature", "max_completion_length"),
            lambda c: c.method == "on_policy" and c.lmbda > 0,
            "the student writes no answers; write method=on_policy and lmbda=0.5",
        ),
        (
            ("soft_weight_schedule",),
            lambda c: c.soft_weight_end is not None,
            "soft_weight stays as it is; write soft_weight_end=0",
        ),
        (
            ("teacher_update",),
            lambda c: c.context is not None,
            "only a teacher that is the starting model behind a context follows the student; write context=TEXT",
        ),
        (("teacher_decay",), lambda c: c.teacher_update == "ema", "the teacher stays; write teacher_update=ema"),
        (
            ("direction",),
            lambda c: c.objective in ("divergence", "gold"),
            "sorted probabilities have no direction, and iw_opd is of the reverse KL; write objective=divergence or gold",
        ),
        (
            ("teacher_chat_template",),
            lambda c: c.objective in ACROSS,
            "the teacher reads the student's ids; write objective=gold",
        ),
        (
            ("span_merge",),
            lambda c: c.objective in ACROSS,
            "with one tokenizer there are no spans; write objective=gold",
        ),
        (
            ("matched_weight", "unmatched_weight"),
            lambda c: c.objective == "gold",
            "entries of the vocabularies are matched by objective=gold alone; write objective=gold",
        ),
        (("iw_opd_gamma",), lambda c: c.objective == "iw_opd", "tokens weigh the same; write objective=iw_opd"),
    )

    method: Literal["logit", "context", "on_policy"] = Field(
        "logit", description="What the teacher sees and who writes the answers; see the stage's description."
    )
    objective: Literal["divergence", "uld", "gold", "iw_opd"] = Field(
        "divergence",
        description=(
            "What is compared: divergence = distributions over one vocabulary; uld, gold = also a teacher with another"
            " tokenizer, by sorted probabilities, or by shared entries and the others sorted; iw_opd = sampled tokens,"
            " early ones more (method=on_policy, lmbda 1 unless given)."
        ),
    )
    direction: Literal["forward", "reverse", "jsd"] = Field(
        "forward",
        description=(
            "KL(teacher||student), KL(student||teacher), or their generalised Jensen-Shannon divergence (of gold: over"
            " the shared entries); with method=on_policy the last unless given (GKD)."
        ),
    )
    jsd_beta: float = Field(
        0.5, gt=0, lt=1, description="Weight of the teacher in the mixture (direction=jsd; GKD 0.5)."
    )
    distillation_temperature: float = Field(
        1.0, gt=0, description="Temperature of both distributions; the loss is multiplied by its square."
    )
    span_merge: Literal["last", "first"] = Field(
        "last",
        description=(
            "uld, gold: which token of a span of several has its distribution compared, times the probabilities of the"
            " span's other tokens (last: by the chain rule, the text's own probability is that of the last token)."
        ),
    )
    matched_weight: float | None = Field(
        None,
        ge=0,
        title="Weight of matched entries",
        description="gold: of entries that both vocabularies have; empty, as the other: their share of the teacher's.",
    )
    unmatched_weight: float | None = Field(
        None,
        ge=0,
        title="Weight of unmatched entries",
        description="gold: of the sorted others; empty, as the other: the rest of that share.",
    )
    iw_opd_gamma: float = Field(
        0.5,
        ge=0,
        description="iw_opd: a row's first token weighs 1 + gamma, one behind all of its distance 1; 0: all the same.",
    )
    soft_weight: float = Field(
        1.0,
        ge=0,
        le=1,
        description=(
            "Share of the divergence; the rest is the negative log-likelihood of the tokens (codistillation: 0.5),"
            " none where the student itself wrote them (method=on_policy)."
        ),
    )
    soft_weight_end: float | None = Field(
        None,
        ge=0,
        le=1,
        title="Soft weight at the end",
        description="Reached at the last step, and the weight of every validation loss; empty: constant.",
    )
    soft_weight_schedule: Literal["linear", "cosine"] = Field(
        "linear", description="How soft_weight goes to soft_weight_end (kd.codistill)."
    )
    tail: Literal["bucket", "renormalise", "drop"] = Field(
        "bucket",
        description=(
            "Captured teacher: tokens outside of its top K are one class of both, the "
            "teacher is spread over its K, or they are left out."
        ),
    )
    context: str | None = Field(
        None,
        title="Context",
        description=(
            "System message that only the teacher reads (method=context or on_policy). With {prompt} in it, it takes the"
            " place of the last question instead, which {prompt} stands for; {answer} is the row's own answer"
            " (method=on_policy lmbda=1)."
        ),
    )
    teacher_chat_template: str | None = Field(
        None,
        title="Teacher's chat template",
        description=(
            "uld, gold: Jinja file, or model directory, whose chat template the teacher reads in the place of its own,"
            " for example a base model's."
        ),
        json_schema_extra={"identity": False},
    )
    teacher_chat_template_digest: str = Field(
        "", description="Digest of that template; filled in by itself, so that a change of the file is another run."
    )
    teacher_update: Literal["frozen", "ema"] = Field(
        "frozen",
        description=(
            "Of a teacher that is the starting model behind a context: it stays, or every step mixes the student into"
            " it (SDFT), and validation/kl is from the teacher of that moment."
        ),
    )
    teacher_decay: float = Field(
        0.95,
        ge=0,
        lt=1,
        description="ema: share of the old teacher, teacher <- d*teacher + (1-d)*student; 0: the student.",
    )
    lmbda: float = Field(
        0.5, ge=0, le=1, description="Share of rows answered by the student itself (method=on_policy; GKD 0.5)."
    )
    sampling_temperature: float = Field(
        0.9, gt=0, description="Temperature of the student's answers (method=on_policy; GKD 0.9)."
    )
    max_completion_length: int = Field(
        128, ge=1, description="New tokens of the student's answers at most (method=on_policy)."
    )

    @model_validator(mode="after")
    def _gkd(self):
        compared = self.objective in ("divergence", "gold")
        if self.method == "on_policy" and compared and "direction" not in self.model_fields_set:
            self.__dict__["direction"] = "jsd"
        if self.objective == "iw_opd" and self.method == "on_policy":
            if "lmbda" not in self.model_fields_set:
                self.__dict__["lmbda"] = 1.0
            if "sampling_temperature" not in self.model_fields_set:
                self.__dict__["sampling_temperature"] = self.distillation_temperature
        refuse_unread(self, self.READ_BY_METHOD)
        if self.method == "on_policy" and self.lmbda and not (self.soft_weight or self.soft_weight_end):
            raise ValueError(
                "soft_weight=0 leaves the likelihood of given answers alone, and answers of the student have none, so"
                f" that lmbda={self.lmbda:g} of the rows would train nothing; write soft_weight=0.5, or lmbda=0"
            )
        return self

    @model_validator(mode="after")
    def _teachers_template(self):
        note_template(self, "teacher_chat_template")
        return self

    @model_validator(mode="after")
    def _compared(self):
        if self.objective == "iw_opd" and (self.method != "on_policy" or self.lmbda < 1):
            raise ValueError(
                "objective=iw_opd weighs tokens that the student itself drew; write method=on_policy lmbda=1, or"
                " objective=divergence"
            )
        if (self.matched_weight is None) != (self.unmatched_weight is None):
            raise ValueError(
                "matched_weight and unmatched_weight go together; write both, or leave both out, where each is the share"
                " of the teacher's vocabulary that it is about"
            )
        if self.matched_weight == 0 and self.unmatched_weight == 0:
            raise ValueError("matched_weight=0 unmatched_weight=0 compares nothing; write matched_weight=1")
        if self.objective in ACROSS and self.train_on == "full":
            raise ValueError(
                f"objective={self.objective} compares what is said in two chat templates, which train_on=full would"
                " train, too; write train_on=all_assistant"
            )
        return self

    @model_validator(mode="after")
    def _context_given(self):
        if self.method == "context" and self.context is None:
            raise ValueError("method=context needs what the teacher reads; write context=TEXT, or method=logit")
        if self.method == "logit" and self.context is not None:
            raise ValueError(
                "with method=logit the teacher reads no context; write method=context, or method=on_policy for answers"
                " of the student's own, or leave context out"
            )
        if self.shows_answer and (self.method != "on_policy" or self.lmbda < 1):
            raise ValueError(
                "a teacher that has read {answer} in its context would only repeat it where the answer is the row's own;"
                " write method=on_policy lmbda=1, or a context without {answer}"
            )
        if self.select_by in ("loss", "kl", "divergence", "distance") and (
            self.teacher_update == "ema" or self.shows_answer
        ):
            what = "moves between them" if self.teacher_update == "ema" else "has read the answers of their rows"
            raise ValueError(
                f"select_by={self.select_by} compares validation passes whose teacher {what}; leave select_by out, or"
                " write teacher_update=frozen and a context without {answer}"
            )
        return self

    @property
    def shows_answer(self) -> bool:
        """Whether the teacher reads the row's own answer in its context."""
        return ANSWER in (self.context or "")


def roles(config, given) -> list[Role]:
    """Student and teacher; captured distributions need none, and the model under an adapter is its own."""
    student, moves = Role("student", "model", trained=True, sharded=True), config.teacher_update != "frozen"
    if "teacher" in given:
        return [student, Role("teacher", "teacher")]
    own = config.context is not None and (moves or not config.lora_rank)
    return [student] + [Role("teacher", "model", moves=moves)] * own


SPEC = StageSpec(
    name="distill",
    config=Config,
    gpu=True,
    parallel=True,
    roles=roles,
    inputs={
        "model": InputSpec("model", doc="The student."),
        "teacher": InputSpec(
            "model",
            required=False,
            doc="The teacher, with the student's tokenizer (objective=uld, gold: any); with a context: default the"
            " student as it starts.",
        ),
        "data": InputSpec(
            "dataset",
            kinds=("demonstrations/1", "teacher_logps/1"),
            doc="Conversations (on_policy uses them up to the last user turn), or a teacher's captured distributions.",
        ),
    },
    outputs={"model": OutputSpec("model", role="policy"), "epoch": EPOCHS},
)


#: Settings that are read of some rows only, as ``READ_WHEN``: of the stage.
READ_OF_INPUTS: ReadWhen = (
    (
        ("train_on",),
        lambda s: s.dataset("data").kind != "teacher_logps/1",
        "which tokens are trained was decided when the teacher was captured; write train_on for the capture stage",
    ),
    (
        ("teacher_chat_template",),
        lambda s: s.has("teacher"),
        "the teacher is the student as it starts, which reads its own; give the input teacher",
    ),
    (
        ("teacher_update", "teacher_decay"),
        lambda s: not s.has("teacher"),
        "the teacher is another model, which does not follow the student; leave the input teacher out",
    ),
)


class Distillation:
    """Objective: soft_weight * divergence + (1 - soft_weight) * negative log-likelihood, per trained token over the
    whole step, rows weighted by their weight. A row that the student answered (``extra["own"]``) has no label to be
    likely: its likelihood would only make the student surer of itself. With ``uld`` and ``gold`` the first term is per
    span (``extra["spans"]``).

    Args:
        teacher: a frozen causal LM, or None where every item brings its teacher's distributions
            (``extra["captured"]``).
        shared: entries that the vocabularies share (:func:`stages.token_spans.shared_vocabulary`), for ``gold``.
    """

    def __init__(self, config: Config, teacher, shared=None):
        self.config, self.teacher, self.soft_weight, self.shared = config, teacher, config.soft_weight, shared

    def counts(self, items):
        found = {
            "tokens": float(sum(i.n_targets * i.extra["weight"] for i in items)),
            "targets": float(sum(i.n_targets for i in items)),
            "step": 1.0,
        }
        if self.config.objective in ACROSS:
            spans = [len(i.extra["spans"]) for i in items]
            found |= {
                "spans": float(sum(spans)),
                "weighted_spans": float(sum(n * i.extra["weight"] for n, i in zip(spans, items))),
            }
        return found

    def __call__(self, model, batch):
        import torch

        from stages.models.modeling import head_of, hidden_states, token_logps
        from stages.training import Sums

        states, head = hidden_states(model, batch, batch.src_N), head_of(model)
        weight_S = torch.tensor([i.extra["weight"] for i in batch.items], device=states.device)
        squared = self.config.distillation_temperature**2
        if self.config.objective in ACROSS:
            values, of, merged = self.across(head, states, batch)
            by, seen = "weighted_spans", "spans"
            metrics = {
                "distance": (values.detach().sum() / squared, seen),
                "merged_spans": (merged.to(values.dtype).sum(), seen),
            }
        else:
            if self.config.objective == "iw_opd":
                values, apart = self.sampled(head, states, batch)
            else:
                values = (self.divergence if self.teacher is not None else self.captured)(head, states, batch)
                apart = values.detach()
            of, by = batch.seq_N, "tokens"
            metrics = {"kl": (apart.sum() / squared, "targets")}
        terms = {"divergence": (self.soft_weight * (values * weight_S[of]).sum(), by)}
        if self.soft_weight < 1:
            labelled = torch.tensor([not i.extra.get("own") for i in batch.items], device=states.device)
            weights = (weight_S * labelled)[batch.seq_N]
            terms["nll"] = (
                -(1 - self.soft_weight) * (token_logps(head, states, batch.target_N)[0] * weights).sum(),
                "tokens",
            )
        return Sums(terms, {**metrics, "trained_tokens": (torch.tensor(float(len(batch.target_N))), "step")})

    def read(self, batch):
        """(the batch that the teacher reads, its hidden states at the targets ``[N, K]``)."""
        import torch

        from stages.batching import collate
        from stages.models.modeling import hidden_states

        theirs = collate([i.extra.get("teacher_item") or i for i in batch.items], batch.ids_U.device)
        with torch.no_grad():
            return theirs, hidden_states(self.teacher, theirs, theirs.src_N)

    def sampled(self, head, states, batch):
        """(loss, log q - log p) ``[N]`` of the student's own tokens, whose gradient in expectation is that of the
        reverse KL, weighted; of given answers, which are validated, the reverse KL itself, twice. Times T^2.
        """
        import torch

        from stages.models.divergence import iw_opd_advantages
        from stages.models.modeling import token_logps

        temperature = self.config.distillation_temperature
        own = torch.tensor([bool(i.extra.get("own")) for i in batch.items], device=states.device)[batch.seq_N]
        if not own.any():
            exact = self.divergence(head, states, batch, "reverse")
            return exact, exact.detach()
        _, teacher_states = self.read(batch)
        logq = token_logps(head, states, batch.target_N, temperature)[0]
        with torch.no_grad():
            teacher = self.teachers_head(head.weight.shape[0])
            logp = token_logps(teacher, teacher_states, batch.target_N, temperature)[0].to(logq.dtype)
            gained = iw_opd_advantages(batch.padded(logp), batch.padded(logq), self.config.iw_opd_gamma)
        values = -gained[batch.seq_N, batch.col_N] * logq
        apart = (logq - logp).detach()
        if not own.all():
            exact = self.divergence(head, states, batch, "reverse") / temperature**2
            values, apart = torch.where(own, values, exact), torch.where(own, apart, exact.detach())
        return values * temperature**2, apart * temperature**2

    def across(self, head, states, batch):
        """(distance, row, whether tokens were merged) of every span of texts ``[G]``."""
        import numpy as np
        import torch

        from stages.models.modeling import head_of, precise, token_logps
        from stages.models.span_losses import Gold, span_distances, uld

        config, temperature, device = self.config, self.config.distillation_temperature, states.device
        theirs, teacher_states = self.read(batch)
        teacher, spans, rows, at = head_of(self.teacher), [], [], np.zeros(4, np.int64)
        for n, (mine, read) in enumerate(zip(batch.items, theirs.items)):
            spans.append(mine.extra["spans"] + at)
            rows += [n] * len(spans[-1])
            at = at + np.array([mine.n_targets] * 2 + [read.n_targets] * 2)
        spans = np.concatenate(spans)
        tensor = lambda found: torch.as_tensor(np.asarray(found, np.int64)).to(device)  # noqa: E731

        def side(first, end, owner, hidden, targets):
            """(hidden states at the tokens that are compared, log-prob of the others together)."""
            last = config.span_merge == "last"
            others = [np.arange(a, b - 1) if last else np.arange(a + 1, b) for a, b in zip(first, end)]
            span_of = tensor(np.repeat(np.arange(len(first)), [len(part) for part in others]))
            together = precise(hidden).new_zeros(len(first))
            if len(span_of):
                others = tensor(np.concatenate(others))
                logps = token_logps(owner, hidden[others], targets[others], temperature)[0]
                together = together.index_add(0, span_of, logps)
            return hidden[tensor(end - 1 if last else first)], together

        mine = side(spans[:, 0], spans[:, 1], head, states, batch.target_N)
        with torch.no_grad():
            read = side(spans[:, 2], spans[:, 3], teacher, teacher_states, theirs.target_N)
        distance = uld
        if config.objective == "gold":
            distance = Gold(
                tensor(self.shared),
                config.direction,
                config.jsd_beta,
                config.matched_weight,
                config.unmatched_weight,
            ).of(len(head.weight), len(teacher.weight), device)
        merged = tensor((spans[:, 1] - spans[:, 0] > 1) | (spans[:, 3] - spans[:, 2] > 1))
        return span_distances(head, *mine, teacher, *read, distance, temperature), tensor(rows), merged

    def divergence(self, head, states, batch, direction: str | None = None):
        """From the teacher in memory, over the student's whole vocabulary ``[N]``."""
        from stages.models.divergence import divergence

        _, teacher_states = self.read(batch)
        config = self.config
        return divergence(
            head,
            states,
            self.teachers_head(head.weight.shape[0]),
            teacher_states,
            direction or config.direction,
            config.distillation_temperature,
            config.jsd_beta,
        )

    def teachers_head(self, rows: int):
        """The head of the teacher in memory, over the student's ``rows``: one tokenizer, and a head that may be padded
        further.
        """
        from dataclasses import replace

        from stages.models.modeling import head_of

        teacher = head_of(self.teacher)
        if teacher.weight.shape[0] <= rows:
            return teacher
        bias = None if teacher.bias is None else teacher.bias[:rows]
        return replace(teacher, weight=teacher.weight[:rows], bias=bias)

    def captured(self, head, states, batch):
        """From its captured top K ``[N]``."""
        import numpy as np
        import torch

        from stages.models.divergence import topk_divergence
        from stages.models.modeling import column_logps

        ids, logps, rest = (
            torch.as_tensor(np.concatenate([i.extra["captured"][k] for i in batch.items])).to(states.device)
            for k in range(3)
        )
        config = self.config
        logq, rest_q = column_logps(head, states, ids.long(), config.distillation_temperature, rest=True)
        if (gone := logps.isneginf()).any():  # ids that stand for none of the teacher's
            rest_q = torch.logaddexp(rest_q, logq.masked_fill(~gone, -torch.inf).logsumexp(-1))
            logq, logps = logq.masked_fill(gone, -1e4), logps.masked_fill(gone, -1e4)
        return topk_divergence(
            logq,
            rest_q,
            logps.to(logq.dtype),
            rest.to(logq.dtype),
            config.direction,
            config.distillation_temperature,
            config.jsd_beta,
            config.tail,
        )


def run(stage):
    from stages.chat import renderer_for, stage_renderer
    from stages.decoding.engines import vocabulary_of
    from stages.models.adapters import AdapterOff
    from stages.models.epochs import epochs_of
    from stages.models.modeling import follower, load_frozen, policy_to_train
    from stages.preflight import preflight
    from stages.reporting.curves import training_report
    from stages.samples import Samples
    from stages.spec import ConfigError
    from stages.training import Trainer, fit
    from stages.validation_alarms import telling

    config, dataset = stage.config, stage.dataset("data")
    captured = dataset.kind == "teacher_logps/1"
    refuse_unread_in(stage, READ_OF_INPUTS)
    if captured and (stage.has("teacher") or config.method != "logit"):
        raise ConfigError(
            f"distill: the teacher of {dataset.name} was asked when it was captured, and what it saw was decided there;"
            " leave teacher out and write method=logit, or give demonstrations"
        )
    if captured and config.objective != "divergence":
        raise ConfigError(
            f"distill: objective={config.objective} asks the teacher of every token, and of {dataset.name} only the most"
            " likely ones are known; write objective=divergence, or give demonstrations and teacher=REF"
        )
    if config.tail != "bucket" and (not captured or config.direction != "forward"):
        raise ConfigError(
            f"distill: tail={config.tail} is for direction=forward with captured data, a teacher in memory has no tail;"
            " write tail=bucket"
        )
    if not captured and not stage.has("teacher") and config.context is None:
        way = "context=TEXT" if config.method == "on_policy" else "method=context context=TEXT"
        raise ConfigError(f"distill: method={config.method} needs a teacher; give teacher=REF, or write {way}")
    renderer = stage_renderer(stage)
    teacher_path = stage.path("teacher" if stage.has("teacher") else "model")
    one_vocabulary = not captured and config.objective not in ACROSS
    if one_vocabulary and renderer_for(teacher_path).tokenizer.get_vocab() != renderer.tokenizer.get_vocab():
        raise ConfigError(
            "distill: teacher and student have different tokenizers, so their distributions cannot be compared token by"
            " token; write objective=gold, which compares them where they say the same text, or sample the teacher's"
            " answers with the rejection stage and fine-tune on them with sft"
        )
    if one_vocabulary and (few := vocabulary_of(teacher_path)[0]) < (rows := vocabulary_of(stage.path("model"))[0]):
        raise ConfigError(
            f"distill: the teacher's head has {few} rows and the student's {rows} (one tokenizer, but the student's head"
            f" is padded further), so the student's last ids have no probability in the teacher; they belong to no"
            f" token, so give the student {few} rows with model.resize_token_embeddings({few}) and save_pretrained"
        )
    encoded = encode_captured if captured else encode
    train, dropped = encoded(stage, renderer, "train")
    validation, _ = encoded(stage, renderer, "validation", config.eval_rows)
    stage.log(f"{len(train)} training rows, {len(validation)} validation rows{left_out(dropped)}")
    warn_of_cut_rows(stage, dropped, len(train))
    refuse_no_rows(dropped, len(train))
    model = policy_to_train(stage)
    moves = config.teacher_update != "frozen"
    if captured:
        teacher = None
    elif moves:
        teacher = follower(teacher_path, stage.device, model, config, True)
    elif config.lora_rank and not stage.has("teacher"):  # the starting model is the one under the adapter
        teacher = AdapterOff(model)
    else:
        teacher = load_frozen(teacher_path, stage.device, config.frozen_dtype)
    reader = across_of(stage, renderer)
    objective = Distillation(config, teacher, None if reader is None else reader.shared)
    source = answers(stage, train, objective, renderer, model)
    trainer = Trainer(model, objective, config, source.total_steps, stage.device)
    preflight(stage, trainer, train, config.batch_size, renderer)

    # all passes under the last soft weight, so that they can be compared; the source sets each step's own
    def evaluate():
        objective.soft_weight = config.soft_weight if config.soft_weight_end is None else config.soft_weight_end
        return trainer.evaluate(validation)

    samples = Samples(stage, model, renderer, dataset)
    epochs = epochs_of(stage, model, renderer.tokenizer, source)
    before, final = fit(
        stage,
        trainer,
        source,
        epochs=epochs,
        evaluate=telling(stage, evaluate) if validation else None,
        eval_every=config.steps_between_validations(len(train)),
    )
    samples.publish(model, renderer.tokenizer, epochs)
    summary = {
        "steps": trainer.step_index,
        "rows": len(train),
        "skipped_steps": trainer.skipped,
        **{f"dropped/{k}": v for k, v in dropped.items()},
    }
    if final:
        name = "distance" if config.objective in ACROSS else "kl"
        summary |= {f"validation/{name}": final[name], f"validation/{name}_before": before[name]}
    stage.summary(summary)
    training_report(stage, f"Distillation ({config.method})", summary, samples.block())


def encode(stage, renderer, split: str, limit: int | None = None):
    """Items of a split, each with the teacher's item where that differs, and counts of dropped rows by reason."""
    from stages.sft import encode_demonstrations

    config = stage.config
    positions, reader = teacher_positions(stage), across_of(stage, renderer)
    # with lmbda=1 no training row keeps its answer
    given = config.method != "on_policy" or split != "train" or config.lmbda < 1
    theirs = None if config.context is None else behind_context(renderer, config)
    if reader is not None:
        theirs = read_across(renderer, reader, config)
    more = (
        asked_of(renderer if reader is None else reader.theirs, config, positions, theirs)
        if config.method == "on_policy"
        else theirs
    )
    more = within_positions(more, positions) if given else more
    items, dropped = encode_demonstrations(stage.dataset("data"), split, renderer, config, limit, more)
    dropped = {"context_does_not_fit": 0, **dropped}
    return items, dropped if reader is None else {"turns_differ": 0, "no_span": 0, **dropped}


def within_positions(more, positions: int | None):
    """``more`` of :func:`stages.sft.encode_demonstrations`, without rows whose answers the teacher has no ``positions``
    for, where it reads them.
    """

    def checked(row, mine, turns):
        found = {} if more is None else more(row, mine, turns)
        if isinstance(found, str) or positions is None:
            return found
        behind = found.get("teacher_item")
        if (len(mine.ids) if behind is None else behind.n_tokens) <= positions:
            return found
        return "teacher_has_no_positions" if behind is None or "spans" in found else "context_does_not_fit"

    return checked


def teacher_positions(stage) -> int | None:
    """Longest sequence that the teacher has positions for, None where its config states none."""
    from stages.decoding.engines import vocabulary_of

    return vocabulary_of(stage.path("teacher" if stage.has("teacher") else "model"))[1]


def asked_of(reader, config, positions: int | None, theirs):
    """``more`` of :func:`stages.sft.encode_demonstrations`: the messages that the student answers, those before the
    last trained turn, and what ``theirs`` (:func:`behind_context`, :func:`read_across`, None) adds where the teacher
    reads something else, which has to leave one of its ``positions`` for an answer. ``reader``: the teacher's renderer.
    """

    def more(row, mine, turns):
        last = answered_turn(row["messages"], turns)
        found = {"asked": row["messages"][:last]}
        if theirs is None:
            return found
        if isinstance(added := theirs(row, mine, turns), str):
            return added
        read = with_context(row["messages"], last, config.context)
        read = read[: len(read) - len(row["messages"]) + last]
        if positions is not None and len(reader.prompt_ids(read)) >= positions:
            return "context_does_not_fit" if config.context is not None else "teacher_has_no_positions"
        return found | added | {"teacher_asked": read}

    return more


def with_context(messages: list[dict], last: int, context: str | None) -> list[dict]:
    """What the teacher reads of a conversation whose last answer is at ``last``: ``context`` as its system message, or
    in the place of the question before that answer; without one the conversation.
    """
    from stages.policy.members import with_system

    if context is None:
        return messages
    asked = max((i for i in range(last) if messages[i]["role"] == "user"), default=None)
    said = lambda i: messages[i].get("content") or ""
    parts = {ANSWER: lambda: said(last), PROMPT: lambda: "" if asked is None else said(asked)}
    text = "".join(parts[part]() if part in parts else part for part in re.split(f"({ANSWER}|{PROMPT})", context))
    if PROMPT not in context:
        return with_system(messages, text)
    if asked is None:
        return messages
    return [*messages[:asked], {**messages[asked], "content": text}, *messages[asked + 1 :]]


def behind_context(renderer, config):
    """``more`` of :func:`stages.sft.encode_demonstrations`: the teacher's item, in which ``config.context`` stands
    before the same targets.
    """

    def more(row, mine, turns):
        messages, shifted = read_by_teacher(row["messages"], turns, config.context)
        item = aligned(row["row_id"], renderer.conversation(messages, train=config.train_on, train_turns=shifted), mine)
        return "context_does_not_fit" if item is None else {"teacher_item": item}

    return more


def read_by_teacher(messages: list[dict], turns, context: str | None):
    """(messages, trained turns or None) as the teacher reads them: :func:`with_context`."""
    read = with_context(messages, answered_turn(messages, turns), context)
    return read, None if turns is None else [t + len(read) - len(messages) for t in turns]


@dataclass(frozen=True)
class Across:
    """How a teacher with a tokenizer of its own reads what the student says: its renderer, what the tokens of both say,
    and the entries ``[M, 2]`` that both vocabularies have.
    """

    theirs: Renderer
    mine_said: Pieces
    theirs_said: Pieces
    shared: np.ndarray | None


def across_of(stage, renderer) -> Across | None:
    """None where teacher and student read the same ids (``objective`` is neither uld nor gold)."""
    from stages.chat import renderer_for
    from stages.settings import template_text

    if stage.config.objective not in ACROSS:
        return None
    shown = stage.config.teacher_chat_template
    theirs = renderer
    if stage.has("teacher"):
        theirs = renderer_for(stage.path("teacher"), None if shown is None else template_text(shown))
    return _across(renderer, theirs, stage.config.objective == "gold")


@lru_cache(2)
def _across(renderer, theirs, matched: bool) -> Across:
    from stages.token_spans import Pieces, shared_vocabulary

    said = Pieces(renderer, "student"), Pieces(theirs, "teacher")
    return Across(theirs, *said, shared_vocabulary(*said) if matched else None)


def read_across(renderer, reader: Across, config):
    """``more`` of :func:`stages.sft.encode_demonstrations`: the teacher's item under its own chat template, its BOS and
    stop token, and the spans between its targets and the student's; a row that was cut keeps those before the cut.
    """
    from stages.batching import make_item
    from stages.chat import RenderError
    from stages.token_spans import spans_of_turns

    def more(row, mine, turns):
        messages, shifted = read_by_teacher(row["messages"], turns, config.context)
        try:
            theirs = reader.theirs.conversation(messages, train=config.train_on, train_turns=shifted)
        except RenderError as error:
            raise RenderError(f"as the teacher reads it: {error}") from error
        whole = mine
        if mine.truncated:
            whole = renderer.conversation(row["messages"], train=config.train_on, train_turns=turns)
        # the first token of a row has nothing before it that predicts it
        sides = [(found.ids, [0, *found.mask[1:]]) for found in (whole, theirs)]
        spans = spans_of_turns(*sides, reader.mine_said, reader.theirs_said)
        if spans is None:
            return "turns_differ"
        spans = spans[spans[:, 1] <= mine.n_targets]
        if not len(spans):
            return "no_span"
        ids, mask = sides[1]
        end = [n for n, m in enumerate(mask) if m][spans[-1, 3] - 1] + 1
        return {"teacher_item": make_item(row["row_id"], [], [ids[:end]], [mask[:end]]), "spans": spans}

    return more


def encode_captured(stage, renderer, split: str, limit: int | None = None):
    """Items of a split of ``teacher_logps/1``, cut to ``max_length`` like any row, with the teacher's distributions at
    their targets.

    Raises:
        ConfigError: captured with another tokenizer, template or temperature.
    """
    import numpy as np
    from transformers import AutoConfig

    from stages.batching import make_item
    from stages.spec import ConfigError

    config, items, dropped = stage.config, [], {"truncated": 0, "no_target": 0}
    vocabulary = AutoConfig.from_pretrained(stage.path("model")).get_text_config().vocab_size
    for row in stage.dataset("data").iter_rows(split=split):
        if limit is not None and len(items) >= limit:
            break
        if (row["tokenizer_hash"], row["template_id"]) != (renderer.vocabulary_hash, renderer.template_hash):
            raise ConfigError(
                "distill: the rows were captured with another tokenizer or chat template than the student's; capture a"
                " teacher that shares them, or sample its answers with the rejection stage and fine-tune on them"
                " with sft"
            )
        if row["temperature"] != config.distillation_temperature:
            raise ConfigError(
                f"distill: the rows were captured at temperature {row['temperature']:g}; write"
                f" distillation_temperature={row['temperature']:g}, or capture them again"
            )
        item = make_item(
            row["row_id"],
            [],
            [row["ids"][: config.max_length]],
            [row["mask"][: config.max_length]],
            weight=row["weight"],
        )
        dropped["truncated"] += len(row["ids"]) > config.max_length
        if not item.n_targets:
            dropped["no_target"] += 1
            continue
        shape = len(row["rest_logps"]), row["top_k"]
        ids, logps = (
            np.array(row["teacher_ids"], np.int32).reshape(shape),
            np.array(row["teacher_logps"], np.float32).reshape(shape),
        )
        top = within(vocabulary, ids, logps, np.array(row["rest_logps"], np.float32))
        item.extra["captured"] = tuple(part[: item.n_targets] for part in top)
        items.append(item)
    return items, dropped


def within(vocabulary: int, ids_NK, logps_NK, rest_N):
    """(ids, log-probs, log of the rest's mass) of a teacher's most likely tokens given that the token is one of the
    first ``vocabulary`` ids, as the head of a teacher in memory is cut: a head that is padded further than the
    student's has ids there that belong to no token (those that are not among the most likely stay in the rest). In
    their place are ids of the student's that the position has not, with log-prob -inf, which
    :meth:`Distillation.captured` counts among the rest.
    """
    import numpy as np

    width = min(ids_NK.shape[1], vocabulary)
    beyond = ids_NK >= vocabulary
    if not beyond.any():
        return ids_NK, logps_NK, rest_N
    lost = np.where(beyond, np.exp(logps_NK.astype(np.float64)), 0.0).sum(1)
    kept = np.log1p(-np.minimum(lost, 1 - 1e-9))
    order = np.argsort(beyond, axis=1, kind="stable")[:, :width]
    ids, logps, gone = (np.take_along_axis(part, order, 1) for part in (ids_NK, logps_NK - kept[:, None], beyond))
    logps[gone] = -np.inf
    for n in np.flatnonzero(gone.any(1)):
        free = np.setdiff1d(np.arange(min(vocabulary, 2 * width)), ids[n, ~gone[n]])
        ids[n, gone[n]] = free[: gone[n].sum()]
    return ids, logps.astype(np.float32), (rest_N - kept).astype(np.float32)


def aligned(row_id: str, theirs, mine):
    """The teacher's item with as many targets as the student's (which may be cut), or None where the tokens differ."""
    from stages.batching import make_item

    wanted = [t for t, m in zip(mine.ids, mine.mask) if m]
    mask, found = [], []
    for token, m in zip(theirs.ids, theirs.mask):
        on = bool(m) and len(found) < len(wanted)
        mask.append(int(on))
        if on:
            found.append(token)
    return make_item(row_id, [], [theirs.ids], [mask]) if found == wanted else None


def answers(stage, items, objective, renderer, model):
    """Source: shuffled rows, some answered anew by the student (``on_policy``); sets the objective's weight of each
    step, and moves the teacher behind it (``teacher_update``), whose weights are in its checkpoints.
    """
    import math

    from stages.batching import make_item
    from stages.models.modeling import load_weights, move_towards, weights_file
    from stages.models.sharding import Acting, asked
    from stages.token_spans import spans, text_of
    from stages.training import ShuffledRows, was_skipped

    config = stage.config
    acting = Acting(model, asked(config)) if config.method == "on_policy" else None
    moving = objective.teacher if config.teacher_update == "ema" else None
    positions, reader = teacher_positions(stage), across_of(stage, renderer)

    class Source(ShuffledRows):
        sampler = None

        def items(self, step: int):
            if config.soft_weight_end is not None:
                done = step / max(1, self.total_steps - 1)
                done = done if config.soft_weight_schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * done))
                objective.soft_weight = config.soft_weight + (config.soft_weight_end - config.soft_weight) * done
            rows = super().items(step)
            if config.method != "on_policy":
                return rows
            own = [i for i, draw in enumerate(stage.rng("own answers", step).random(len(rows))) if draw < config.lmbda]
            for i, answer in zip(own, self.sample([rows[i] for i in own], step)):
                rows[i] = answer
            return rows

        def sample(self, rows, step):
            """The rows answered by the student, in as many tokens as it has positions for; one whose prompt takes them
            all keeps its answer.
            """
            from stages.decoding.sampler import Sampler
            from stages.decoding.sampling import SamplingParams
            from stages.generation import room_after, sample_with_room

            if self.sampler is None:
                self.sampler = Sampler(acting.model, renderer.tokenizer, max_batch=64)
                self.stays = sampling_stays(stage)
            acting.refresh()
            prompts = [renderer.prompt_ids(row.extra["asked"]) for row in rows]
            asks = renderer if reader is None else reader.theirs
            theirs = [
                asks.prompt_ids(row.extra["teacher_asked"]) if "teacher_asked" in row.extra else prompt
                for row, prompt in zip(rows, prompts)
            ]
            rooms = [
                min(
                    room_after(self.sampler, prompt, config.max_completion_length),
                    config.max_completion_length if positions is None else positions - len(read),
                )
                for prompt, read in zip(prompts, theirs)
            ]
            fit = [i for i, room in enumerate(rooms) if room > 0]
            params = SamplingParams(
                temperature=config.sampling_temperature,
                max_new_tokens=config.max_completion_length,
                stop_ids=renderer.stop_ids,
            )
            groups = sample_with_room(
                self.sampler,
                [prompts[i] for i in fit],
                params,
                [[stage.seed_for("answer", step, rows[i].row_id)] for i in fit],
                [rooms[i] for i in fit],
            )
            if not self.stays:
                self.sampler.release()
            answered = {}
            for i, group in zip(fit, groups):
                ids, extra = group[0].ids, {**rows[i].extra, "own": True}
                said = [ids], [[1] * len(ids)]
                if reader is not None:
                    extra |= self.said_across(rows[i], ids)
                elif "teacher_asked" in extra:
                    extra["teacher_item"] = make_item(rows[i].row_id, theirs[i], *said)
                answered[i] = make_item(rows[i].row_id, prompts[i], *said, **extra)
            return [answered.get(i, row) for i, row in enumerate(rows)]

        def said_across(self, row, ids) -> dict:
            """The teacher's item of the text of an answer, as far as it has positions, and the spans of both."""
            said = text_of(renderer, reader.mine_said, row.extra["asked"], ids)
            prompt, answer = reader.theirs.answered_ids(row.extra["teacher_asked"], *said)
            found = spans(reader.mine_said.of(ids), reader.theirs_said.of(answer))
            if positions is not None:
                answer = answer[: max(0, positions - len(prompt))]
            return {
                "teacher_item": make_item(row.row_id, prompt, [answer], [[1] * len(answer)]),
                "spans": found[found[:, 3] <= len(answer)],
            }

        def after_step(self, step: int, metrics):
            if moving is not None and not was_skipped(metrics):
                move_towards(moving, model, config.teacher_decay)
            return super().after_step(step, metrics)

        def state(self):
            value, files = super().state()
            return value, files if moving is None else {**files, "teacher.safetensors": weights_file(moving)}

        def restore(self, state, read) -> None:
            super().restore(state, read)
            if moving is not None:
                load_weights(moving, read.path("teacher.safetensors"))

    return Source(stage, items, config.batch_size, config.num_train_epochs, config.max_steps)
