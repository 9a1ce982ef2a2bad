"""Losses given as text: equal to the built-in ones, refused when they are no losses, proposed, unit-tested and trained
with.
"""

import json
from pathlib import Path

import pytest
import torch

from stages.algorithms import DIRECT_METHODS, resolve
from stages.direct.objective_code import ObjectiveError, Program, failures
from stages.harness import execute
from storage.datasets import open_dataset
from tests.chat_server import chat_server
from tests.common import silent, written

H = "((pc - pr) - (rc - rr))"
GATED = """
import torch.nn.functional as F
def discovered(self, policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, tau=0.05):
    '''DiscoPOP.'''
    pi_logratios = policy_chosen_logps - policy_rejected_logps
    ref_logratios = reference_chosen_logps - reference_rejected_logps
    u = self.beta * (pi_logratios - ref_logratios)
    gate = torch.sigmoid(u / tau)
    loss = (1 - gate) * F.softplus(-u)
    loss += gate * torch.exp((-u).clamp(max=80))
    return loss
"""
SAME = [
    ("dpo", f"-logsigmoid(beta * {H})", {}),
    ("discovered", f"relu(1 - beta * {H})", {"member": "hinge"}),
    ("discopop", GATED, {}),
    ("discovered", f"0.9 * torch.where({H} < 0, 0.5, 1.0) * F.softplus(-beta * {H})", {"member": "padll"}),
    ("ipo", f"({H} - 1 / (2 * beta)) ** 2", {}),
    ("apo_zero", "1 - sigmoid(beta * (pc - rc)) + sigmoid(beta * (pr - rr))", {}),
]


@pytest.mark.parametrize("method,code,options", SAME, ids=[f"{m}-{i}" for i, (m, _, _) in enumerate(SAME)])
def test_a_written_loss_is_the_built_in_one(method, code, options):
    """Values and gradients in float64, against the function of the method's row."""
    torch.manual_seed(0)
    given = [(-torch.rand(64, dtype=torch.float64) * 40).requires_grad_(True) for _ in range(4)]
    grads = []
    for loss in (Program(code)(*given, beta=0.05), resolve(DIRECT_METHODS[method].loss)(*given, beta=0.05, **options)):
        grads.append([loss.detach(), *torch.autograd.grad(loss.sum(), given)])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert failures(Program(code), 0.05) == []


@pytest.mark.parametrize(
    "code,reason",
    [
        ("__import__('os').system('true')", "function"),
        ("().__class__.__bases__", "not available"),
        ("open('x')", "not available"),
        ("[x for x in (1,)]", "not read"),
        ("(lambda: 1)()", "not the name"),
        ("pc.data", "not available"),
        ("torch.load('x')", "not available"),
        ("pc.__class__", "not available"),
        ("def loss(pc):\n    while True:\n        pass\n    return pc", "While"),
        ("def loss(pc):\n    import os\n    return pc", "Import"),
        ("def loss(pc):\n    pc.data = 3\n    return pc", "Assign"),
        ("def f(pc):\n    return pc\ndef g(pc):\n    return pc", "one function"),
        ("@staticmethod\ndef f(pc):\n    return pc", "decorator"),
        ("softplus(-beta * (pc - pr)).mean()", "leave mean out"),
        ("'a' * 1000000", "no number"),
        ("10 ** 10 ** 10 ** 10 * pc", "cannot be computed|no number|not finite"),
        ("def f(pc, alpha):\n    return alpha * pc", "alpha"),
        ("pc[0]", "not read"),
        ("unknown + pc", "not known"),
        ("", "empty"),
        ("pc if pc else pr", "not read"),
        ("exp(", "not readable"),
        ("pc +" * 2000 + " pc", "characters"),
        ("-" * 3000 + "pc", "not readable|operations"),
        ("clamp(pc, *rc)", "one by one"),
        ("pc + clamp(min=0)", "cannot be computed"),
        ("pc + exp()", "cannot be computed"),
        ("def loss(pc):\n    x = 1", "return"),
        ("True * pc", "no number"),
        ("1e400 * pc", "no number"),
        ("exec('1')", "not available"),
        ("f'{pc}'", "not read"),
    ],
)
def test_what_is_no_loss_is_refused_before_anything_is_computed(code, reason):
    with pytest.raises(ObjectiveError, match=reason):
        program = Program(code)
        wrong = failures(program, 0.05)
        raise ObjectiveError(" ".join(wrong))


@pytest.mark.parametrize(
    "code,reason",
    [
        (f"exp(-beta * 100 * {H})", "not finite"),
        (f"sqrt({H} * beta + 50)", "not finite"),
        ("0.0 * pc", "falls"),
        (f"softplus(beta * {H})", "falls"),
        ("rc - rr", "does not depend"),
        ("1.0", "one per pair"),
        (f"{H} < 0", "one per pair"),
        (f"relu(1e-6 - abs({H} - 1e6))", "falls"),
        ("log(pc)", "not finite"),
        ("pc + where(1, 2)", "cannot be computed"),
    ],
)
def test_unit_tests_find_what_cannot_be_trained_with(code, reason):
    wrong = failures(Program(code), 0.05)
    assert wrong and reason in " ".join(wrong)


def run_objective(spec, config, name, seed=5, **inputs):
    made = {**spec("objective", config, {}, name), "seed": seed}
    made["inputs"] = {key: {"kind": "dataset", "path": path, "ref": key, "digest": key} for key, path in inputs.items()}
    result = execute(made, silent)
    return result, next(iter(open_dataset(result["outputs"]["objective"]["path"]).iter_rows()))


def tried(tmp_path, label, code, score):
    objective, scores = str(tmp_path / f"o-{label}"), str(tmp_path / f"s-{label}")
    written(
        objective,
        label,
        "objectives/1",
        [{"name": label, "code": code, "valid": True, "proposer": "given", "attempts": 1}],
        dataset="o",
        origin="ai",
    )
    written(
        scores,
        label,
        "eval_scores/1",
        [{"run_id": "r", "benchmark": "b", "metric": "accuracy", "value": score, "n": 10, "config_json": "{}"}],
        dataset="s",
        origin="ai",
    )
    return {f"objectives.{label}": objective, f"scores.{label}": scores}


def test_a_server_is_told_why_its_loss_failed_and_what_was_tried(spec, tmp_path):
    """First an answer that is no JSON, then an unbounded loss, then one that was tried, then a good one; each refusal
    reaches the next request.
    """
    good = (
        "def loss(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps,"
        f" beta):\n    return relu(2 - beta * {H})"
    )
    answers = [
        "I would rather not.",
        json.dumps({"name": "wild", "code": f"exp(-100 * beta * {H})"}),
        json.dumps({"name": "again", "code": f"softplus( -beta*{H} )"}),
        "Sure:\n" + json.dumps({"thought": "wider hinge", "name": "wide_hinge", "code": good}),
    ]
    archive = tried(tmp_path, "dpo", f"softplus(-beta * {H})", 0.25) | tried(
        tmp_path, "hinge", f"relu(1 - beta * {H})", 0.75
    )
    with chat_server(lambda body: {"message": {"content": answers[len(server.seen) - 1]}}) as server:
        config = {"proposer": "server", "endpoint": server.url, "endpoint_model": "m", "attempts": 5}
        result, row = run_objective(spec, config, "server", **archive)
    requests = [body["messages"][0]["content"] for body in server.seen]
    assert (row["name"], row["valid"], row["attempts"], row["thought"]) == (
        "wide_hinge",
        True,
        4,
        "wider hinge",
    ) and result["summary"]["valid"] == 1.0
    assert requests[0].index("accuracy 0.2500") < requests[0].index("accuracy 0.7500") and "refused" not in requests[0]
    assert "holds no JSON" in requests[1] and "not finite" in requests[2] and "tried already" in requests[3]
    with chat_server(lambda body: {"message": {"content": "no"}}) as server:
        result, row = run_objective(spec, {**config, "endpoint": server.url, "attempts": 2}, "refused", **archive)
    assert (
        not row["valid"]
        and "JSON" in row["failure"]
        and result["summary"] == {"valid": 0.0, "attempts": 2.0, "tried": 2.0}
    )


def test_another_constant_is_another_loss_and_another_comment_is_not(spec, tmp_path):
    """DiscoPOP under tau=0.5 was refused as tried already once it had been tried under 0.05."""
    archive = tried(tmp_path, "discopop", GATED, 0.5)
    _, row = run_objective(spec, {"code": GATED.replace("tau=0.05", "tau=0.5")}, "other", **archive)
    assert row["valid"]
    with pytest.raises(ObjectiveError, match="tried already"):
        run_objective(spec, {"code": GATED.replace("DiscoPOP.", "The same.")}, "same", **archive)


def test_mutations_are_valid_new_and_learn_from_scores(spec, tmp_path):
    """Without a language model: every proposal passes, none repeats, the better half of the archive is built upon."""
    archive, seen, names = tried(tmp_path, "dpo", f"softplus(-beta * {H})", 0.5), set(), []
    for number in range(12):
        made = spec("objective", {"attempts": 8}, {}, f"m{number}")
        made["seed"] = number
        made["inputs"] = {
            key: {"kind": "dataset", "path": path, "ref": key, "digest": key} for key, path in archive.items()
        }
        row = next(iter(open_dataset(execute(made, silent)["outputs"]["objective"]["path"]).iter_rows()))
        assert row["valid"] and Program(row["code"]).normal_form not in seen
        seen.add(Program(row["code"]).normal_form)
        names.append(row["name"])
        archive |= tried(tmp_path, f"made{number}", row["code"], number / 12)
    assert any("made" in name for name in names)


def test_what_is_not_written_as_mutations_are_is_not_built_upon_and_told(spec, tmp_path):
    """Arguments of its own, or other meanings of the same names: the proposal had a name that nobody knows, or was
    another loss than the one tried.
    """
    from stages.direct.objective_code import START
    from stages.objective import BEGIN

    ours = f"{START}{BEGIN}    return softplus(0.25 - u)\n"
    other = {
        "argument": ours.replace("beta):", "beta, gamma=0.3):").replace("0.25", "gamma"),
        "meaning": ours.replace("u = beta *", "u = 2 * beta *"),
        "expression": f"softplus(0.3 - beta * {H})",
    }
    for name, code in {"ours": ours, **other}.items():
        archive = tried(tmp_path, name, code, 1.0)
        made = [run_objective(spec, {"attempts": 1}, f"{name}-{number}", seed=number, **archive) for number in range(6)]
        assert all(row["valid"] for _, row in made)
        assert any(name in row["name"] for _, row in made) == (name == "ours")
        told = [w["text"] for w in made[0][0]["warnings"] if w["code"] == "not_recombined"]
        assert len(told) == (name != "ours") and all(name in text and "u = beta * (h_w - h_l)" in text for text in told)


def test_training_with_a_written_loss_is_training_with_the_method(tiny, data, spec, tmp_path):
    """`align` with DPO's loss as text and through the `objective` input: the very weights of method=dpo."""
    config = {"max_steps": 2, "batch_size": 4, "max_length": 96, "learning_rate": 1e-3, "beta": 0.1}
    _, row = run_objective(spec, {"code": f"softplus(-beta * {H})"}, "mine")
    made = {
        "dpo": spec("align", {**config, "method": "dpo"}, {"model": tiny["policy"], "data": data["pairs"]}, "dpo"),
        "text": spec(
            "align",
            {**config, "method": "written", "options": {"code": f"softplus(-beta * {H})"}},
            {"model": tiny["policy"], "data": data["pairs"]},
            "text",
        ),
        "input": spec(
            "align", {**config, "method": "written"}, {"model": tiny["policy"], "data": data["pairs"]}, "input"
        ),
    }
    made["input"]["inputs"]["objective"] = {
        "kind": "dataset",
        "path": str(tmp_path / "mine" / "out" / "objective"),
        "ref": "o",
        "digest": "o",
    }
    weights = {
        name: Path(execute(one, silent)["outputs"]["model"]["path"], "model.safetensors").read_bytes()
        for name, one in made.items()
    }
    assert weights["dpo"] == weights["text"] == weights["input"]
    for options, inputs, reason in (
        ({}, {}, "needs a loss"),
        ({"code": "pc + pr + rc + rr"}, {}, "falls"),
        ({"code": f"exp(-99 * {H})"}, {}, "not finite"),
    ):
        with pytest.raises(Exception, match=reason):
            execute(
                spec(
                    "align",
                    {**config, "method": "written", "options": options},
                    {"model": tiny["policy"], "data": data["pairs"], **inputs},
                    f"bad-{reason[:3]}",
                ),
                silent,
            )
