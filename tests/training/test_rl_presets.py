"""Every RL preset end to end on a tiny model: it trains, its rollouts explain its update, degenerate batches are
survived.
"""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from stages.algorithms import RL_PRESETS
from stages.harness import execute
from stages.policy.settings import Preset
from stages.rl import Config, resolve_preset
from storage.datasets import open_dataset
from tests.common import written

SMALL = {
    "max_steps": 3,
    "prompts_per_step": 3,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "critic_learning_rate": 1e-2,
    "reward_override": "random",
    "rewards": [{"name": "length", "kind": "length", "max_length": 8, "cache_length": 6}],
}
EXTRA = {
    "dapo": {"filter_groups_metric": "reward_std", "soft_punish_cache": 4, "truncation_policy": "score"},
    "vapo": {"critic_warmup_steps": 2},
    "grpo_process": {"reward_override": "none"},
    "grpo_passk": {"prompts_per_step": 8},
    "grpo_plus": {"truncation_policy": "score", "context_schedule": [(0, 6), (2, 8)]},
    "astar_po": {"num_generations": 1, "baseline_samples": 3, "options": {"beta": 0.1}},
    "sppo": {"options": {"eta": 1.0}},
    "sdpo": {"ref_mode": "frozen"},
    "ppo_ptx": {"ptx_coef": 1.0},
    "online_ipo": {"options": {"tau": 1.0}},
    "vineppo": {"vine_samples": 3, "step_separator": "e"},
    "agent": {
        "environment": "tests.training.environments:Countdown",
        "environment_options": {"turns": 3},
        "rewards": [{"kind": "environment"}],
        "reward_override": "none",
        "max_turn_length": 6,
        "max_completion_length": 100,
    },
}


def fitting(config):
    """The config without what its preset does not read of the settings that the tests share."""
    return {k: v for k, v in config.items() if k != "critic_learning_rate" or RL_PRESETS[config["preset"]].needs_critic}


def inputs_of(name, tiny, data):
    row = resolve_preset(Config(preset=name, environment=EXTRA.get(name, {}).get("environment", "")))[0]
    given = {"model": tiny["policy"], "data": data["prompts"]}
    # a critic that starts at 0 says of completions that are all cut, as these are, that they are worth 0
    if row.advantage == "process" or row.needs_critic:
        given["reward_model"] = tiny["reward"]
    return given


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("text") / "text")
    written(path, "text", "text/1", [{"text": f"two plus {i} is a sum. " * 3} for i in range(6)], dataset="t")
    return path


def run(spec, name, given, config, text=None, label=None):
    made = spec("rl", config, given, label or name)
    if text is not None:
        made["inputs"]["ptx"] = {"kind": "dataset", "path": text, "ref": "ptx", "digest": "ptx"}
    result = execute(made, lambda event: None)
    return made, result, [json.loads(line) for line in Path(made["workdir"], "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", get_args(Preset))
def test_every_preset_trains(tiny, data, spec, text, name):
    config = fitting({**SMALL, "preset": name, **EXTRA.get(name, {})})
    made, result, metrics = run(spec, name, inputs_of(name, tiny, data), config, text if name == "ppo_ptx" else None)
    row = resolve_preset(Config(**config))[0]
    assert len(metrics) == 3 and all(np.isfinite(v) for m in metrics for v in m["metrics"].values() if v is not None)
    from stages.models.modeling import load_policy

    before, after = (
        torch.cat([p.flatten() for p in load_policy(p).parameters()])
        for p in (tiny["policy"], result["outputs"]["model"]["path"])
    )
    assert before.shape == after.shape and not torch.equal(before, after)
    rows = list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())
    assert all(
        (r["logp_ref"] is not None) == row.needs_reference and (r["values"] is not None) == row.needs_critic
        for r in rows
    )
    assert ("critic" in result["outputs"]) == row.needs_critic
    assert len(rows) == result["summary"]["iterations"] * config["prompts_per_step"] * config["num_generations"]


# --- the update, computed again in float64 from the rollout dataset, as each paper prints it --------------------------


def logps_of(model, row):
    """Log-probs of the completion's tokens, through the model's own forward."""
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    picked = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)
    n = len(row["prompt_ids"])
    return picked[n - 1 : -1].gather(1, ids[0, n:, None])[:, 0], picked[n - 1 : -1]


def clip(ratio, A, low, high):
    return torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


def z_score(r):
    return [(x - np.mean(r)) / (np.std(r, ddof=1) + 1e-4) if len(set(r)) > 1 else 0.0 for x in r]


def centred(r):
    return [x - np.mean(r) for x in r]


def one_out(r):
    return [x - (sum(r) - x) / (len(r) - 1) for x in r]


def kl_sum(row):
    return float(np.sum(np.array(row["logp_old"]) - np.array(row["logp_ref"])))


def token_rewards(row, coef):
    out = -coef * (np.array(row["logp_old"]) - np.array(row["logp_ref"])) if coef else np.zeros(row["length"])
    out[-1] += row["reward"] if row["terminated"] else 0.0
    return out


def advantage_gae(row, coef, lam):
    r = token_rewards(row, coef)
    v = row["values"]
    out = np.zeros(row["length"])
    running = 0.0
    after = row["bootstrap_value"]
    for t in reversed(range(row["length"])):
        running = r[t] + after - v[t] + lam * running
        out[t], after = running, v[t]
    return out


def whitened(parts):
    flat = np.concatenate(parts)
    return [(p - flat.mean()) / (flat.std() + 1e-8) for p in parts]


def per_group(fn, rewards, size=4):
    return [a for i in range(0, len(rewards), size) for a in fn(rewards[i : i + size])]


def stored(rows):
    return [np.array(r["advantages"]) for r in rows]


def baseline_by_token(rows, full):
    """G - B_t: B_t the mean of the group's rewards at token t, weighted by the squared norms of d log pi / d logits up
    to t; 0 where one completion goes on alone.
    """
    out = []
    for k in range(0, len(rows), 4):
        group = rows[k : k + 4]
        norms = []
        for row, logps in zip(group, full[k : k + 4]):
            chosen = torch.nn.functional.one_hot(torch.tensor(row["completion_ids"]), logps.shape[-1]).double()
            norms.append((chosen - logps.exp()).square().sum(-1).cumsum(0).tolist())
        for row in group:
            A = []
            for t in range(row["length"]):
                alive = [i for i in range(4) if group[i]["length"] > t]
                W = [norms[i][t] for i in alive]
                A.append(
                    row["reward"]
                    - (sum(w * group[i]["reward"] for w, i in zip(W, alive)) / sum(W) if len(alive) > 1 else 0.0)
                )
            out.append(np.array(A))
    return out


def papers_advantages(name, rows, full_old=None):
    """Advantage of every completion (a number, or one per token) from the rewards, values and log-probs of the rollout
    rows.
    """
    R = [r["reward"] for r in rows]
    if name in ("grpo", "dapo", "grpo_plus", "gspo", "cispo", "sapo", "vespo", "gmpo"):
        return per_group(z_score, R)
    if name in ("dr_grpo", "grape", "grape_alt", "mdpo"):
        return per_group(centred, R)
    if name == "opo":
        return [
            x - sum(a["reward"] * a["length"] for a in group) / sum(a["length"] for a in group)
            for k in range(0, len(rows), 4)
            for group in [rows[k : k + 4]]
            for x in R[k : k + 4]
        ]
    if name == "otb":
        return baseline_by_token(rows, full_old)
    if name == "grpo_passk":
        return per_group(lambda r: [max(r) - max(r[:i] + r[i + 1 :]) for i in range(len(r))], R)
    if name == "rloo":
        return per_group(one_out, [x - 0.02 * kl_sum(r) for x, r in zip(R, rows)])
    if name == "reinforce":
        return centred([x - 0.02 * kl_sum(r) for x, r in zip(R, rows)])
    if name == "remax":
        offsets = [x - 0.02 * kl_sum(r) - r["advantages"][0] for x, r in zip(R, rows)]  # the greedy completion's reward
        assert all(np.ptp(offsets[i : i + 4]) < 1e-5 for i in range(0, len(rows), 4))
        return stored(rows)
    if name == "reinforce_pp":
        return whitened([token_rewards({**r, "terminated": True}, 0.02)[::-1].cumsum()[::-1] for r in rows])
    if name in ("ppo", "ppo_ptx", "a2c"):
        return whitened([advantage_gae(r, 0.02, 0.95) for r in rows])
    if name in ("trpo_penalty", "ppo_penalty_adaptive", "ppo_clip_kl"):
        return whitened([advantage_gae(r, 0.0, 0.95) for r in rows])
    if name == "vapo":
        return whitened([advantage_gae(r, 0.0, max(0.0, 1 - 1 / (0.05 * r["length"]))) for r in rows])
    if name == "ppo_outcome":
        return whitened([r["reward"] - 0.02 * kl_sum(r) / r["length"] - np.array(r["values"]) for r in rows])
    if name == "a_lol":
        values = [x - r["advantages"][0] for x, r in zip(R, rows)]  # V of the starting policy, per prompt
        assert all(np.ptp(values[i : i + 4]) < 1e-5 for i in range(0, len(rows), 4))
        return stored(rows)
    if name in ("topr", "offline_is"):
        return R
    if name == "agent":
        from tests.training.test_agents import advantage_by_hand

        return advantage_by_hand(rows, 1.0)
    if name == "vineppo":
        out = []
        for r in rows:
            A, after = np.zeros(r["length"]), [*r["step_values"][1:], r["reward"]]
            for start, end, v, w in zip([0, *[e + 1 for e in r["step_ends"]]], r["step_ends"], r["step_values"], after):
                A[start : end + 1] = w - v
            out.append(A)
        return out
    if name == "sppo":
        return per_group(lambda r: [np.mean([1 / (1 + np.exp(y - x)) for y in r]) - 0.5 for x in r], R)
    if name == "nash_md":
        return [
            a - 0.1 * kl_sum(r)
            for a, r in zip(
                per_group(lambda r: [np.mean([1 / (1 + np.exp(y - x)) for y in r]) - 0.5 for x in r], R), rows
            )
        ]
    return stored(rows)


EPSILON = {"dapo": (0.2, 0.28), "grpo_plus": (0.2, 0.4), "vapo": (0.2, 0.28)}


def papers_loss(name, rows, A, new, old, ref, full_new, full_old):
    """The loss of one optimizer step over all rows: lists of token log-probs, whole distributions for exact KLs."""
    S, N = len(rows), sum(len(x) for x in new)
    ratio = [torch.exp(n - o) for n, o in zip(new, old)]
    A = [torch.as_tensor(a, dtype=torch.float64) for a in A]
    low, high = EPSILON.get(name, (0.2, 0.2))
    k3 = [torch.exp(r - n) - (r - n) - 1 for n, r in zip(new, ref)] if ref else None
    exact = [(fo.exp() * (fo - fn)).sum(-1) for fn, fo in zip(full_new, full_old)]
    seq = [n.sum() for n in new]
    pairs = [(i, i + 1) for i in range(0, S, 2)]
    R = [r["reward"] for r in rows]
    if name in ("reinforce", "remax", "rloo", "nash_md"):
        return -sum((a * n).sum() for a, n in zip(A, new)) / S
    if name in ("a2c", "opo"):
        return -sum((a * n).sum() for a, n in zip(A, new)) / N
    if name in ("grpo", "grpo_process"):
        return -sum((clip(r, a, 0.2, 0.2) - 0.04 * k).mean() for r, a, k in zip(ratio, A, k3)) / S
    if name in ("grpo_plus", "ppo_outcome"):
        return -sum(clip(r, a, low, high).mean() for r, a in zip(ratio, A)) / S
    if name == "dr_grpo":
        return -sum(clip(r, a, 0.2, 0.2).sum() for r, a in zip(ratio, A)) / S / 8
    if name == "grape":
        return -sum(clip(r, a, 0.2, 0.2).sum() for r, a in zip(ratio, A)) / S
    if name == "grape_alt":
        return -sum(clip(torch.exp((n - o).sum()), a, 0.2, 0.2) for n, o, a in zip(new, old, A)) / S
    if name == "gspo":
        return -sum(clip(torch.exp((n - o).mean()), a, 3e-4, 4e-4) for n, o, a in zip(new, old, A)) / S
    if name == "gmpo":
        return (
            -sum(
                a * torch.exp((n - o).clamp(max=0.4) if a > 0 else (n - o).clamp(min=-0.4)).prod() ** (1 / len(n))
                for n, o, a in zip(new, old, A)
            )
            / S
        )
    if name in ("dapo", "grpo_passk", "otb", "ppo", "vapo", "reinforce_pp", "ppo_ptx", "agent", "vineppo"):
        return -sum(clip(r, a, low, high).sum() for r, a in zip(ratio, A)) / N
    if name == "cispo":
        return -sum((r.detach().clamp(max=1.28) * a * n).sum() for r, a, n in zip(ratio, A, new)) / N
    if name == "sapo":
        return (
            -sum(
                (4 / (tau := 1.0 if a > 0 else 1.05) / (1 + torch.exp(-tau * (r - 1))) * a).mean()
                for r, a in zip(ratio, A)
            )
            / S
        )
    if name == "vespo":
        phi = [
            float(torch.exp(k * (s - o.sum()) + rate * (1 - torch.exp(s - o.sum()))))
            for s, o, a in zip(seq, old, A)
            for k, rate in [(2.0, 3.0) if a >= 0 else (3.0, 2.0)]
        ]
        return -sum((w * a * n).sum() for w, a, n in zip(phi, A, new)) / N
    if name == "ppo_penalty_adaptive":
        return -sum((r * a - k).sum() for r, a, k in zip(ratio, A, exact)) / N
    if name == "ppo_clip_kl":
        return -sum((clip(r, a, 0.2, 0.2) - k).sum() for r, a, k in zip(ratio, A, exact)) / N
    if name == "trpo_penalty":
        return -sum((r * a - k).sum() for r, a, k in zip(ratio, A, exact)) / S
    if name == "topr":
        return (
            -sum(
                (1.0 if r > 0 else float(torch.exp(s - o.sum()).detach().clamp(0, 1))) * r * s
                for r, s, o in zip(R, seq, old)
            )
            / S
        )
    if name == "a_lol":
        return (
            -sum(
                float(torch.exp(s - o.sum()).detach().clamp(0, 2)) * a[0] * s
                for a, s, o in zip(A, seq, old)
                if a[0] > 0
            )
            / S
        )
    if name == "offline_is":
        return -sum(float(torch.exp(s - o.sum()).detach().clamp(0, 2)) * r * s for r, s, o in zip(R, seq, old)) / S
    if name == "mdpo":
        return -sum(a * s - 0.05 * (s - o.sum()) ** 2 for a, s, o in zip(A, seq, old)) / S
    if name == "astar_po":
        return sum((0.1 * (s - r.sum()) - a[0]) ** 2 for a, s, r in zip(A, seq, ref)) / S
    if name == "sppo":
        return sum((s - o.sum() - a) ** 2 for a, s, o in zip(A, seq, old)) / S
    if name == "p3o":
        total, r = 0.0, [x - 0.02 * kl_sum(row) for x, row in zip(R, rows)]
        for i, j in pairs:
            D, ri, rj = r[i] - r[j], torch.exp(seq[i] - old[i].sum()), torch.exp(seq[j] - old[j].sum())
            total -= (clip(ri, rj.detach() * D, 0.2, 0.2) + clip(rj, -ri.detach() * D, 0.2, 0.2)) / 2
        return total / len(pairs)
    if name == "sdpo":
        return (
            sum(
                (r.detach().clamp(max=2.0) * (n.detach() - row["teacher"]) * n).mean()
                for row, r, n in zip(rows, ratio, new)
                if row["teacher"] is not None
            )
            / S
        )
    h = [s - r.sum() for s, r in zip(seq, ref)]
    if name == "copg":
        return sum((R[i] - R[j] - 0.1 * (h[i] - h[j])) ** 2 / 0.2 for i, j in pairs) / len(pairs)
    if name == "online_ipo":
        return sum((h[i] - h[j] - (1 / (1 + np.exp(R[j] - R[i])) - 0.5)) ** 2 for i, j in pairs) / len(pairs)
    if name == "oreo":
        total = 0.0
        for row, n, r in zip(rows, new, ref):
            l = n - r
            for t in range(len(n)):
                total += (row["values"][t] - row["reward"] + 0.1 * l[t] + 0.1 * l[t + 1 :].sum().detach()) ** 2
        return total / N
    raise AssertionError(f"write the loss of {name} as its paper prints it")


SECOND_STEP = [
    n for n in get_args(Preset) if n not in ("reinforce", "remax", "rloo", "a2c", "trpo", "nash_md", "vapo", "opo")
]


@pytest.mark.parametrize("name", [n for n in get_args(Preset) if n != "trpo"])
def test_the_update_follows_from_the_rollouts(tiny, data, spec, text, name):
    """Loss and gradient norm that the stage logged = an independent float64 computation from its rollout dataset.
    Presets that take several steps per rollout are compared at the second one, away from ratio 1."""
    steps = 2 if name in SECOND_STEP else 1
    config = fitting(
        {
            **SMALL,
            "preset": name,
            **EXTRA.get(name, {}),
            "max_steps": steps,
            "num_iterations": steps,
            "learning_rate": {"gspo": 1e-6, "grape_alt": 1e-4, "grpo_passk": 1e-5}.get(name, 3e-3),
            "ptx_coef": 0.0 if name == "ppo_ptx" else None,
            "opponent": "self" if name == "nash_md" else None,
        }
    )
    config.pop("context_schedule", None)
    given = inputs_of(name, tiny, data)
    given["reference"] = tiny["other"]
    made, result, metrics = run(spec, name, given, config)
    start = tiny["policy"]
    if steps == 2:
        start = run(spec, name, given, {**config, "max_steps": 1}, label=f"{name}-one")[1]["outputs"]["model"]["path"]
    from stages.models.modeling import load_policy

    rows = list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())
    model, sampler, other = (load_policy(p).double() for p in (start, tiny["policy"], tiny["other"]))
    # a sampled pad token is a token: torch would drop its embedding's gradient
    model.get_input_embeddings().padding_idx = None
    new, full_new = zip(*(logps_of(model, r) for r in rows))
    with torch.no_grad():
        sampled, full_old = zip(*(logps_of(sampler, r) for r in rows))
        reference = [logps_of(other, r)[0] for r in rows]
        for r in rows if name == "sdpo" else ():
            read = json.loads(r["extra_json"])["teacher"]["prompt_ids"]
            r["teacher"] = None if read is None else logps_of(other, {**r, "prompt_ids": read})[0]
    own = [np.array(r["tool_mask"] or [0] * r["length"]) == 0 for r in rows]  # tokens that the policy chose
    new, sampled, reference, full_new, full_old = (
        [x[k] for x, k in zip(xs, own)] for xs in (new, sampled, reference, full_new, full_old)
    )
    for r, s, o, k in zip(rows, sampled, reference, own):
        assert not np.array(r["logp_old"])[~k].any()
        r["logp_old"] = np.array(r["logp_old"])[k]
        assert np.allclose(r["logp_old"], s, atol=1e-5) and (
            r["logp_ref"] is None or np.allclose(r["logp_ref"], o, atol=1e-5)
        )
    A = papers_advantages(name, rows, full_old)
    for a, r in zip(A, rows):
        assert np.allclose(r["advantages"], a, atol=2e-5)
    A = [a[k] if np.ndim(a) else a for a, k in zip(A, own)]
    loss = papers_loss(
        name, rows, A, new, sampled, reference if rows[0]["logp_ref"] is not None else None, full_new, full_old
    )
    loss.backward()
    norm = float(torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None)))
    logged = metrics[steps - 1]["metrics"]
    assert logged["loss"] == pytest.approx(float(loss), rel=2e-4, abs=2e-5)
    assert logged["grad_norm"] == pytest.approx(norm, rel=1e-3) and norm > 1e-4
