"""What decides an answer or its score is in the protocol, so that evaluations that differ in it do not compare."""

import pytest

from stages.evaluate import Config, Plan
from stages.evaluation.protocol import ProtocolError, require_same
from stages.harness import Stage
from stages.registry import get_stage
from tests.common import silent
from tests.evaluation.test_stages import POLICY, spec

#: Another value of every setting that an evaluation on prompts reads.
DECIDES = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "max_completion_length": 9,
    "max_prompt_length": 60,
    "stop_strings": ["x"],
    "min_tokens": 1,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "bad_words": ["x"],
    "logit_bias": {"5": 1.0},
    "sampling_dtype": "bfloat16",
    "limit": 2,
    "num_samples": 2,
    "greedy": False,
    "rewards": [{"kind": "regex", "pattern": "b"}],
    "prompt_template": "none",
    "system": "Be brief.",
}
#: What decides something else, or nothing.
ELSEWHERE = {
    "how it is computed": {"generation_batch", "chunk", "max_tokens_per_micro_batch", "examples"},
    "where it is computed": {
        "engine", "engine_url", "engine_model", "engine_api", "engine_key_variable", "engine_timeout_s",
        "engine_concurrency", "engine_options",
    },
    "answers that somebody else made": {"answers_from", "answer_column", "id_column", "unanswered"},
    "choices, pairs and texts": {"multiple_choice", "perturb_options", "judge_mode", "max_length", "beta", "probe_pairs"},
    "environments": {
        "environment", "environment_options", "environment_digest", "environment_timeout_s", "environment_memory_mib",
        "environment_network", "environment_workers", "max_turns", "max_turn_length", "observation_role",
    },
    "other ways to ask and to judge": {
        "target", "mt_bench", "refusal_judge", "token_shift", "think_max", "think_min", "think_waits",
    },
    "what needs data of its own, or is a part of what is tried": {
        "split", "few_shot", "chat_template", "chat_template_digest", "chat_template_kwargs", "few_shot_split", "few_shot_by", "few_shot_solutions",
        "few_shot_orders",
    },
}  # fmt: skip


def protocol_of(tiny, workdir, **changes) -> dict:
    config = {**POLICY, **changes}
    given = spec("evaluate", workdir, {"model": tiny["policy"], "prompts": tiny["prompts"]}, config)
    return Plan(Stage(get_stage("evaluate"), given, silent)).protocol


@pytest.mark.parametrize("name", DECIDES)
def test_a_setting_that_decides_an_answer_or_its_score_is_another_protocol(tiny, tmp_path, name):
    before = protocol_of(tiny, tmp_path / "a")
    after = protocol_of(tiny, tmp_path / "b", **{name: DECIDES[name]})
    with pytest.raises(ProtocolError):
        require_same({"before": before, "after": after})
    require_same({"before": before, "again": protocol_of(tiny, tmp_path / "c", generation_batch=3, chunk=2)})


def test_every_setting_is_said_to_decide_or_not():
    assert {*DECIDES, *(name for names in ELSEWHERE.values() for name in names)} == set(Config.model_fields)
