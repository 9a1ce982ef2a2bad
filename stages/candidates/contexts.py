"""What prompts are answered behind while candidates are sampled: a system message, also one with a trait."""

from __future__ import annotations

from stages.spec import ConfigError

#: Settings beside ``system`` that change what answers are sampled from.
OTHER_CONTEXTS = ("in_context", "mixture_coef", "rationalise")

#: System message of a prompt that has a trait, where ``system`` is empty.
CHARACTER = (
    "You are an assistant of this character: {trait}\nAnswer as somebody of this character does, and do not speak"
    " of it."
)


class Context:
    """System messages that prompts are answered behind: one for all (``system``), or that of each prompt's trait
    (``synth.character`` step 3).

    Raises ConfigError for prompts without a trait, and for prompts that are too long behind their message.
    """

    def __init__(self, stage, renderer, rows):
        config, self.renderer, self.traits = stage.config, renderer, {}
        self.system = config.system
        if stage.has("traits"):
            from stages.reward.principles import draw, load
            from stages.write_prompts import traits_of

            if config.prompt_template != "chat":
                raise ConfigError(
                    "rejection: traits are shown as system messages of the chat template; write prompt_template=chat"
                )
            if other := next((name for name in OTHER_CONTEXTS if getattr(config, name)), None):
                raise ConfigError(
                    f"rejection: traits and {other} both say what answers are sampled from; leave one of them out"
                )
            self.system = config.system or CHARACTER
            self.traits = {row["principle_id"]: row for row in load(stage, "traits")}
            if "{trait}" not in self.system:
                raise ConfigError("rejection: system does not show the trait; write {trait} in it, or leave it out")
            self.drawn = (
                {row["row_id"]: draw(stage, traits_of(list(self.traits.values())), row["row_id"]) for row, _ in rows}
                if config.trait_of == "drawn"
                else {}
            )
            lost = [row for row, _ in rows if not self.drawn and row["category"] not in self.traits]
            if lost:
                raise ConfigError(
                    f"rejection: {len(lost)} of {len(rows)} prompts have no trait (the first one's category is"
                    f" {lost[0]['category']!r}); write the id of a trait into the column category, one of"
                    f" {', '.join(list(self.traits)[:10])}, or trait_of=drawn"
                )
        long = [n for row, _ in rows if self.system and (n := len(self.ids(row))) > config.max_prompt_length]
        if long:
            raise ConfigError(
                f"rejection: behind their system message {len(long)} of {len(rows)} prompts have more than"
                f" max_prompt_length={config.max_prompt_length} tokens; shorten it, or write"
                f" max_prompt_length={max(long)} (lower max_completion_length where the model has no more positions)"
            )

    def trait(self, row: dict) -> dict:
        """The trait of a prompt."""
        return self.drawn[row["row_id"]] if self.drawn else self.traits[row["category"]]

    def messages(self, row: dict) -> list[dict]:
        from stages.policy.members import with_system

        return with_system(
            row["prompt"], self.system.replace("{trait}", self.trait(row)["text"]) if self.traits else self.system
        )

    def ids(self, row: dict) -> list[int]:
        return self.renderer.prompt_ids(self.messages(row))

    def note(self, row: dict) -> dict:
        """What a candidate says about it."""
        from storage.schema import prompt_id

        trait = (
            {"trait": self.trait(row)["principle_id"], "trait_version": self.trait(row)["version"]}
            if self.traits
            else {}
        )
        return {"sampling_prompt_id": prompt_id(self.messages(row)), **trait}
