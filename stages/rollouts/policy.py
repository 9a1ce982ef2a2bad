"""The policy as what is sampled from: a sampling engine that holds its current weights, and the environment it acts in,
if any.
"""

from __future__ import annotations

import shutil

from stages.acting.agent_rewards import STEP_WEIGHTS, check_step_weights
from stages.acting.agents import Agent, prefix_of
from stages.algorithms import RLPreset
from stages.decoding.sampling import SamplingParams
from stages.generation import Sample, continuations, sample_groups, sampling_params
from stages.models.memory import sampling_stays
from stages.models.modeling import weights_digest
from stages.models.sharding import Acting
from stages.policy.schedules import ADMITTING
from stages.reward.debate import Debaters
from stages.reward.components import ON_TURNS
from stages.running import cuda, ranks
from stages.training import TrainingError
from storage.files import sha256_text


class PolicySampler:
    """Draws completions, or trajectories in an environment, from the policy.

    Args:
        acting: the policy, and what is sampled from in this process (``sharding.Acting``).
        agent: what plays the environment (:func:`agent_for`), or None.

    Raises:
        ValueError: the engine returns text only, and ``allow_reencoded_ids`` is not set.
    """

    def __init__(self, stage, renderer, acting: Acting, agent: Agent | Debaters | None = None):
        from stages.decoding.engines import make_engine

        config = stage.config
        # model: what is trained, in shards if it is
        self.renderer, self.model, self.acting, self.agent = renderer, acting.source, acting, agent
        self.home, self.device = stage.workdir / "engine", stage.device
        self.engine = make_engine(stage, renderer, acting.model, sleeps=config.engine_sleep)
        if self.engine.reencodes and not config.allow_reencoded_ids:
            raise ValueError(
                f"{self.engine.name} returns text, so the ids trained on would be an encoding of it and not what was"
                " sampled. Use an engine that returns ids (engine=builtin, engine=vllm, a vLLM server), or accept it"
                " with allow_reencoded_ids=true."
            )
        #: Whether the engine gives its memory back before is trained.
        self.rests = config.engine_sleep or self.engine.shares_weights and not sampling_stays(stage)
        self.params = sampling_params(config, renderer)
        self.seats = getattr(agent, "seats", 1)  # groups that one task gives
        self.drawn = 0  # completions so far
        #: Whether the engine's log-probs are the trainer's, so that they need not be computed again.
        rounds = config.compute_dtype != "float32"
        compares = next((n for n in ("importance_correction", "rejection") if getattr(config, n) != "none"), None)
        self.exact_logps = self.engine.exact_logps and self.params.plain and not compares and not rounds
        if not self.exact_logps:
            why = (
                f"those of {self.engine.name} are not the trainer's"
                if not self.engine.exact_logps
                else (
                    "filters, penalties or bans change the sampled distribution"
                    if not self.params.plain
                    else (
                        f"the trainer's products are in {config.compute_dtype}"
                        if rounds
                        else f"{compares} compares both"
                    )
                )
            )
            stage.log(f"old log-probs: computed by the trainer, because {why}; the engine's are kept as logp_rollout")

    def update(self) -> None:
        """Give the engine the policy's current weights (every push is named by the digest of what it must hold); every
        rank must call.
        """
        self.acting.refresh()
        if self.engine.shares_weights:
            return
        # of sharded weights each rank has its own
        wanted = sha256_text("".join(ranks.gather(weights_digest(self.model))))[:16]
        if self.engine.weights != wanted:
            from stages.decoding.engines import memory_disk, write_weights

            held, copied = getattr(self.engine, "holds", None), getattr(self.engine, "copies", False)
            size = sum(p.numel() * (held or p.dtype).itemsize for p in self.model.parameters())
            home = (memory_disk(str(self.home), size) if copied else None) or self.home
            try:
                write_weights(self.model, self.renderer.tokenizer, home / wanted, held)
                self.engine.update(str(home / wanted), wanted)
            finally:
                if ranks.rank() == 0:
                    for directory in (d for d in home.glob("*") if d.name != wanted or copied):
                        shutil.rmtree(directory, ignore_errors=True)
                    if home != self.home:
                        shutil.rmtree(home, ignore_errors=True)
        if self.engine.weights != wanted:
            raise TrainingError(
                f"{self.engine.name} holds the weights {self.engine.weights} instead of the policy's {wanted}; report"
                " this with the config."
            )

    def draw(self, prompts, seeds, params: SamplingParams | None = None, engine=None) -> list[list[Sample]]:
        """Completions or trajectories of each ``(row, prompt ids)`` from the engine as it is (:meth:`update` first), or
        from another one; ``seeds[i]``: the seeds of prompt i.
        """
        sample = self.agent.sample if self.agent else sample_groups
        with cuda.freely(self.device):
            found = sample(engine or self.engine, prompts, params or self.params, seeds)
        self.drawn += sum(map(len, found))
        if engine is not None and self.rests and hasattr(engine, "release"):
            engine.release()
        return found

    def go_on(self, starts, seeds, params: SamplingParams) -> list[list[Sample]]:
        """What follows the first ``count`` tokens (of a trajectory: turns) of each ``(sample, count)``, as whole
        completions.
        """
        with cuda.freely(self.device):
            if self.agent:
                found = self.agent.sample(
                    self.engine,
                    [(s.prompt, s.prompt_ids) for s, _ in starts],
                    params,
                    seeds,
                    [prefix_of(s, count) for s, count in starts],
                )
            else:
                found = continuations(self.engine, starts, params, seeds)
        self.drawn += sum(map(len, found))
        return found

    def rest(self) -> None:
        """Nothing is sampled until the next :meth:`update`."""
        if self.rests:
            self.engine.sleep(keep_weights=False)

    def close(self) -> None:
        if self.agent:
            self.agent.close()
        self.engine.close()
        if ranks.rank() == 0:
            shutil.rmtree(self.home, ignore_errors=True)


def agent_for(config, row: RLPreset, renderer, rewards, stage) -> Agent | Debaters | None:
    """What samples trajectories, where an environment is set; refuses settings that have no meaning there."""
    judged = [c.name for c in rewards.components if c.kind == "debate"]
    if judged and config.environment != "debate":
        raise ValueError(f"reward {judged[0]!r} judges debates; write environment=debate, or take it out of rewards")
    if not config.environment:
        on_turns = [c.name for c in rewards.components if c.kind in ON_TURNS]
        if on_turns:
            raise ValueError(
                f"reward {on_turns[0]!r} scores trajectories in an environment; write environment=tools (or"
                " module:Class of your own), or take it out of rewards"
            )
        return None
    if config.environment == "debate":
        if not judged:
            raise ValueError(
                "environment=debate is decided by a judge; add a reward of kind debate and the input judge (or an"
                " endpoint)"
            )
        for name, on in (
            (f"baseline={row.baseline}", row.baseline in ("greedy", "table", "v_star")),
            ("advantage=vine", row.advantage == "vine"),
            (f"curriculum={config.curriculum}", config.curriculum in ADMITTING),
        ):
            if on:
                raise ValueError(
                    f"{name} needs completions of one prompt, and a debate has two sides; write preset=dr_grpo or agent"
                )
    refused = {
        f"opponent={row.opponent} (write opponent=self)": row.opponent != "self",
        "prompt_template": config.prompt_template != "chat",
        "mode_mix": config.mode_mix != "fresh",
        "sft_member": config.sft_member != "none",
        "stored": stage.has("stored"),
    }
    for name in (name for name, on in refused.items() if on):
        raise ValueError(
            f"{name} is not supported in an environment: it answers a prompt in one turn; leave it out, or write"
            " environment=''"
        )
    for text in {
        w
        for c in rewards.components
        if c.kind == "step_weighted"
        for w in check_step_weights(c.step_weights or STEP_WEIGHTS)
    }:
        stage.warn("step_weights", text)
    return Debaters(config, renderer) if config.environment == "debate" else Agent(config, renderer)


def opponent_for(stage, row: RLPreset, policy: PolicySampler, reference):
    """What win rates compare the policy with besides itself: its moving average, or the mixture of policy and
    reference; None where that is the group.
    """
    config = stage.config
    if row.advantage != "win_rate" or row.opponent == "self":
        return None
    import torch

    from stages.decoding.sampler import Sampler
    from stages.models.modeling import follower

    if row.opponent == "mixture":
        from stages.generation import MixtureSampler

        return MixtureSampler(policy.acting.model, reference, policy.renderer.tokenizer, config.mixture_coef)
    return Sampler(
        follower(stage.path("model"), stage.device, policy.model, config, starts_there=True),
        policy.renderer.tokenizer,
        max_batch=config.generation_batch,
        dtype=getattr(torch, config.sampling_dtype),
    )
