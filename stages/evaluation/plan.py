"""What an evaluation evaluates, under which protocol and in which units of work, and the models that it loads."""

from __future__ import annotations

from collections.abc import Iterable

from stages.evaluation import given, protocol
from stages.evaluation.sampled import Sampled, not_of_the_policy
from stages.evaluation.settings import check_inputs
from stages.reward.components import REWARD_INPUTS
from stages.spec import ConfigError


class Plan:
    """What will be evaluated, under which protocol, in which units; models are loaded when first needed.

    Args:
        read: rows of the input ``answers`` (``stages.ingestion.answers.read``), where answers are given.
    """

    violations: dict = {}  # metrics of the rubric's clauses, once all answers are scored

    def __init__(self, stage, read: Iterable = ()):
        from stages.chat import renderer_for, stage_renderer

        self.stage, self.config = stage, stage.config
        config = stage.config
        policy = config.target == "policy"
        check_inputs(stage)
        # a reward model reads text in its own way, and given answers are texts
        self.renderer = stage_renderer(stage) if policy and not stage.has("answers") else None
        self.given: given.Given | None = None
        self.prompts = []
        self.choices = []
        self.pairs = []
        self.texts = {}
        self.dropped = {}
        self.n_prompts = 0
        self.with_choices = False
        self.plain = self._read_texts() if policy and stage.has("texts") else []
        self.positions: int | None = None
        self.scorers = {
            name: stage.inputs[name].digest
            for name in ("reward_model", "reference", "rubric", "judge", *REWARD_INPUTS)
            if stage.has(name)
        }
        if policy and stage.has("prompts"):
            self._read_prompts(read)
        for name in ("mt_bench", "refusal_judge"):
            if settings := getattr(config, name):
                settings.check(name, stage.inputs)
        if config.mt_bench and (
            unread := [name for name in ("reward_model", "reference") if stage.has(name)]
            or ["prompts"] * (not self.prompts)
        ):
            raise ConfigError(
                "evaluate: mt_bench needs --input prompts=REF_OR_PATH, questions with a column turns"
                if unread == ["prompts"]
                else (
                    f"evaluate: mt_bench does not read the input {unread[0]}; leave it out, or evaluate with it in a"
                    " run without mt_bench"
                )
            )
        if stage.has("pairs"):
            self._read_pairs()
        self.verifier, self.constraints, self.code = (
            next((component for component in config.rewards if component.kind == kind), None)
            for kind in ("verifier", "constraints", "code")
        )
        if (
            not config.environment
            and not any(c.kind in ("code", "python", "remote") for c in config.rewards)
            and (tested := sum(bool(row.get("tests")) for row, _ in self.prompts))
        ):
            stage.warn(
                "tests_not_run",
                f"{tested} prompts bring tests of programs, and no reward runs them, so their answers have no accuracy."
                " Write rewards='[{kind: code}]'"
                + (" beside the others." if any(row.get("answer") is not None for row, _ in self.prompts) else "."),
            )
        if stage.has("reference") and self.prompts and not config.token_shift and (why := not_of_the_policy(config)):
            stage.warn(
                "kl_is_biased",
                "kl_reference is the mean log-ratio of the policy's answers, an estimate of its KL where these are"
                f" drawn from it as it is, and here {why}. Evaluate with temperature=1 and no filters or penalties for"
                " the KL itself.",
            )
        self.run_id = stage.key[:16]
        self.answerer = self.given or Sampled(self)
        self.protocol = protocol.of(self)
        self._loaded = {}
        self.debate = next((component.name for component in config.rewards if component.kind == "debate"), None)
        if (config.environment == "debate") != (self.debate is not None):
            raise ConfigError(
                "evaluate: environment=debate is decided by a judge; write rewards='[{kind: debate}]' with it and only"
                " with it, and give judge=MODEL or an endpoint"
            )
        if config.token_shift and not (stage.has("reference") and self.prompts):
            raise ConfigError(
                "evaluate: token_shift ranks answers to prompts under the base model; give --input prompts=REF_OR_PATH"
                " and --input reference=BASE_MODEL, or leave token_shift out"
            )
        if (
            config.token_shift
            and renderer_for(stage.path("reference")).vocabulary_hash != self.renderer.vocabulary_hash
        ):
            raise ConfigError(
                "evaluate: the input reference has another tokenizer, so its ranks would be those of other tokens;"
                " token_shift needs the base model with the policy's vocabulary"
            )
        if config.perturb_options and not self.with_choices:
            raise ConfigError(
                "evaluate: perturb_options reorders the options of prompts with choices, and there are none; leave"
                " it out"
            )
        if config.environment and config.target != "policy":
            raise ConfigError("evaluate: an environment takes the turns of a policy; write target=policy")

    def _read_prompts(self, answers: Iterable) -> None:
        from stages.evaluation import mt_bench, opinions, perturbed, refusals
        from stages.generation import prompt_rows
        from stages.verification.choices import is_choice

        config, data = self.config, self.stage.dataset("prompts")
        read = (
            prompt_rows(self.stage, data, config.split, None, 0, config.limit, ids_of=lambda row: [], first=True)
            if self.stage.has("answers")
            else self._shown(data)
        )
        if not config.perturb_options:
            perturbed.check([row for row, _ in read])
        self.n_prompts = sum(perturbed.asked_of(row).get("perturbation", "") == "" for row, _ in read)
        self.readings = [reading for reading in config.multiple_choice if reading != "generation"]
        if config.few_shot_orders > 1:
            read = [(again, self._ids_of(again)) for row, _ in read for again in self._orders(row)]
        self.with_choices = any(is_choice(row) for row, _ in read)
        if self.with_choices and self.readings and self.stage.has("answers"):
            raise ConfigError(
                f"evaluate: multiple_choice reads the {' and the '.join(self.readings)} of choices by a model's"
                " probabilities, and answers are given; write multiple_choice=[generation], which reads the choice that"
                " they name"
            )
        self.choices = [row for row, _ in read if is_choice(row)] if self.readings else []
        self.prompts = [
            (row, ids)
            for row, ids in read
            if not is_choice(row) or ("generation" in config.multiple_choice and not opinions.of(row))
        ]
        if self.prompts and config.few_shot and config.prompt_template == "none" and not config.stop_strings:
            self.stage.warn(
                "few_shot_runs_on",
                "Behind plain-text examples a model without an end of turn goes on with questions of its own, and the"
                " last answer in the text counts. Write stop_strings='[\"Question:\"]'.",
            )
        refusals.check([row for row, _ in self.prompts])
        if config.mt_bench:
            mt_bench.check([row for row, _ in self.prompts])
        if self.stage.has("answers"):
            self.given = given.Given(self.stage, [row for row, _ in self.prompts], answers)

    def _ids_of(self, row: dict) -> list[int]:
        """What a completion starts from, or a reading of choices."""
        from stages.verification.choices import is_choice

        readings = self.config.multiple_choice
        return self.shots.ids(
            self.renderer, row, "generation" if "generation" in readings or not is_choice(row) else readings[0]
        )

    def _orders(self, row: dict) -> list[dict]:
        """A row under each choice and order of the examples."""
        count = self.config.few_shot_orders
        return [{**row, "order": order} for order in range(count)] if count > 1 else [row]

    def _shown(self, data) -> list[tuple[dict, list[int]]]:
        """(row, ids) of the evaluated prompts as the model is shown them, those that it has room for."""
        from transformers import AutoConfig

        from stages.evaluation import perturbed
        from stages.evaluation.few_shot import Shots
        from stages.generation import prompt_rows
        from stages.verification.choices import is_choice

        config = self.config
        room = getattr(
            AutoConfig.from_pretrained(self.stage.path("model")).get_text_config(decoder=True),
            "max_position_embeddings",
            None,
        )
        generates = "generation" in config.multiple_choice or any(
            not is_choice(row) for row in data.iter_rows(split=config.split)
        )
        longest = (
            config.max_prompt_length
            if room is None
            else min(config.max_prompt_length, room - (config.max_completion_length if generates else 1))
        )
        self.positions = room
        self.shots = Shots(self.stage, data)
        read = prompt_rows(
            self.stage,
            data,
            config.split,
            self.renderer,
            longest,
            config.limit,
            config.prompt_template,
            ids_of=lambda row: max(map(self._ids_of, self._orders(row)), key=len),
            first=True,
        )
        if config.perturb_options:
            perturbed.check([row for row, _ in read])
            if any(perturbed.asked_of(row) for row, _ in read):
                raise ConfigError(
                    "evaluate: these prompts bring their perturbed forms (columns pair_id and perturbation); leave"
                    " perturb_options out"
                )
            forms = [
                perturbed.with_reordered(row, self.stage.rng("options", row["row_id"])) if is_choice(row) else (row,)
                for row, _ in read
            ]
            read = [(form, self._ids_of(form)) for each in forms for form in each]
        return read

    def _read_texts(self) -> list[dict]:
        data, config = self.stage.dataset("texts"), self.config
        rows = [row for _, row in zip(range(config.limit or data.num_rows), data.iter_rows(split=config.split))]
        if not rows:
            splits = ", ".join(f"{name} ({n})" for name, n in (data.manifest.get("splits") or {}).items()) or "none"
            raise ConfigError(
                f"evaluate: the texts have no row in split {config.split!r} (splits: {splits}); write split=NAME"
            )
        return rows

    def _read_pairs(self) -> None:
        from stages.pairs import encode_pairs, is_tie

        config, data = self.config, self.stage.dataset("pairs")
        if config.target != "policy":
            from stages.reward_models.reward_eval import rows_of

            read, dropped = rows_of(data, config.split, config.limit), {}
        else:
            read, dropped = encode_pairs(data, config.split, self.renderer, config.max_length, config.limit)
        # nobody can be right about a tie
        self.pairs = [pair for pair in read if not is_tie(pair if isinstance(pair, dict) else pair.extra)]
        self.dropped = {
            f"pairs_{name}": count for name, count in {**dropped, "ties": len(read) - len(self.pairs)}.items()
        }
        if not self.pairs:
            splits = ", ".join(data.manifest.get("splits") or {}) or "none"
            ties = f"all {len(read)} rows are ties, which prefer neither side; " if read else ""
            raise ConfigError(
                f"evaluate: the pairs have no usable row in split {config.split!r} ({ties}splits: {splits}); write"
                " split=NAME"
            )
        if config.target != "policy":
            return
        wanted = {item.row_id for item in self.pairs}
        self.texts = {row["row_id"]: row for row in data.iter_rows(split=config.split) if row["row_id"] in wanted}

    def units(self) -> list[tuple[str, list]]:
        """Chunks of work in order; each one's rows depend on nothing but itself."""
        size = dict.fromkeys(("prompts", "choices", "pairs", "texts"), self.config.chunk)
        if any(
            c.kind == "rubric" and (c.rubric_normalizer != "plain" or c.rm_squash == "minmax")
            for c in self.config.rewards
        ):
            # the confidence of a rubric's items is a mean over all answers, whatever the chunk (GRAPE-REWARD)
            size["prompts"] = max(len(self.prompts), 1)
        return [
            (kind, rows[i : i + size[kind]])
            for kind, rows in (
                ("prompts", self.prompts),
                ("choices", self.choices),
                ("pairs", self.pairs),
                ("texts", self.plain),
            )
            for i in range(0, len(rows), size[kind])
        ]

    def _once(self, name: str, load):
        if name not in self._loaded:
            self._loaded[name] = load()
        return self._loaded[name]

    def policy(self, role: str = "model"):
        from stages.models.modeling import load_frozen

        return self._once(role, lambda: load_frozen(self.stage.path(role), self.stage.device))

    def scorer(self, role: str):
        from stages.reward.judge import Judge, LocalJudge
        from stages.reward_models.reward_heads import RewardCard
        from stages.reward_models.reward_scorers import load_scorer

        if role == "model" and self.config.target == "judge":
            return self._once(
                "scorer:model",
                lambda: Judge(
                    LocalJudge(self.stage.path("model"), RewardCard(), self.stage.device), self.config.judge_mode
                ),
            )
        return self._once(
            f"scorer:{role}",
            lambda: load_scorer(self.stage.path(role), self.stage.device, self.config.max_tokens_per_micro_batch),
        )

    @property
    def sampler(self):
        """The engine that the policy answers with."""
        from stages.decoding.engines import make_engine

        return self._once("sampler", lambda: make_engine(self.stage, self.renderer, self.policy))

    def close(self) -> None:
        """End the environment's processes."""
        if isinstance(self.answerer, Sampled):
            self.answerer.close()

    # -- finished rows ----------------------------------------------------------------------------------------------------

    def _row(
        self,
        source: dict,
        mode: str,
        index: int,
        text: str,
        tokens: int,
        extra: dict,
        *,
        correct=None,
        extracted=None,
        format_error=False,
    ) -> dict:
        from storage.files import canonical_json
        from storage.schema import complete_row

        run_id = self.run_id if mode == "sample" else f"{self.run_id}:{mode}"
        return complete_row(
            "eval_samples/1",
            {
                "prompt_id": source["prompt_id"],
                "group_id": source["group_id"],
                "run_id": run_id,
                "item_id": source["row_id"],
                "sample_idx": index,
                "output": text,
                "extracted": extracted,
                "correct": correct,
                "format_error": format_error,
                "tokens": tokens,
                "extra_json": canonical_json({name: value for name, value in extra.items() if value is not None}),
            },
            dataset=source["dataset"],
            source=source["source"],
            origin="ai",
            split=source["split"],
        )

    def logps_of(self, items) -> list:
        from stages.decoding.likelihood import prompted_logps

        return prompted_logps(self.policy(), items, self.config.max_tokens_per_micro_batch, self.stage.device)
