"""Vectors of written AI feedback: chains of revisions, and the filter of new instructions."""

from stages.decoding.writers import Written
from stages.measures.text import rouge_l
from stages.revise import Chain, Config, revise, targets


def _chain(inputs, params):
    """A chain whose i-th revision is the text y_i, by principles drawn as given."""
    draws, asked = inputs["principle_draws"], []
    principles = [
        {
            "principle_id": str(k),
            "kind": "principle",
            "text": f"principle {k}",
            "critique_request": "",
            "revision_request": "",
        }
        for k in range(inputs["n_principles"])
    ]
    chain = Chain({}, [{"role": "user", "content": "x"}], ["y_0"], [None])

    def write(name):
        return lambda chains, requests, number: [
            Written(name.format(number), "eos", {}) for request in requests if asked.append(request) is None
        ]

    config = Config(n_rounds=inputs["n_rounds"])
    revise([chain], config, lambda c, number: principles[draws[number - 1]], write("critique {}"), write("y_{}"))
    for k, draw in enumerate(draws):
        if (
            f"principle {draw}" not in asked[2 * k]
            or f"principle {draw}" not in asked[2 * k + 1]
            or f"y_{k}" not in asked[2 * k]
        ):
            raise AssertionError(f"round {k + 1} did not criticise and revise y_{k} under principle {draw}")
    return {
        "stored_responses": len(chain.texts),
        "sft_target": chain.texts[targets(chain, False)[0]],
        "sft_targets_all_revisions": [chain.texts[i] for i in targets(chain, True)],
    }


def _rouge(inputs, params):
    from stages.write_prompts import Pool

    pool = Pool(params["threshold"])
    for text in inputs["pool"]:
        pool.add(text)
    found = [rouge_l(inputs["new"].split(), text.split()) for text in inputs["pool"]]
    best = max(found, key=lambda one: one["f1"])
    return {"lcs": best["lcs"], "rouge_l_f1": best["f1"], "accepted": pool.nearest(inputs["new"]) is None}


ADAPTERS = {"cai_revision_chain": _chain, "rouge_l_filter": _rouge}
METHOD_ADAPTERS = {
    "synth.cai_sl": [({"n_rounds", "principle_draws"}, _chain)],
    "synth.self_instruct": [({"new", "pool"}, _rouge)],
}
