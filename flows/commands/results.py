"""The commands on what runs have made: ls, show, rm, cost, lineage, compare, promote, alias, select, export, chat."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from flows.commands.app import Json, Seed, Sets, emit


def ls(
    what: Annotated[
        str, typer.Argument(help="runs, results (of every stage, newest first), datasets, models, stages or recipes")
    ] = "runs",
    json_: Json = False,
) -> None:
    """List runs, results of stages, datasets, models, stages or recipes."""
    from flows import display, env, report

    env.prepare(quiet=True)
    rows = report.listing(what)
    if json_:
        return emit({what: rows})
    if what == "runs" and not rows and report.listing("results"):
        return print("no recipe was run yet; what single stages gave: posttrain ls results")
    display.table(rows)


def show(
    ref: Annotated[str, typer.Argument(help="A ref, a path, a stage key, a run id or `latest`.")],
    rows: Annotated[
        Optional[int], typer.Option(metavar="N", min=1, help="Of a dataset: its first rows; of rollouts every token.")
    ] = None,
    where: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="COLUMN=VALUE", help="Of a dataset: the first rows (3, or --rows) with this value. Repeatable."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Show a dataset, a model, a run or a stage: where it is, what made it, its numbers.

    Of a run or stage that is underway or stopped: what is done, how far it is, what comes next.

    Example: posttrain show latest
    Example: posttrain show dataset:policy-rollouts@latest --where iteration=7 --rows 1
    """
    from flows import env, report

    env.prepare(quiet=True)
    if rows is not None or where:
        from flows.rows import find, print_rows

        value = find(ref, where or [], rows or 3)
        return emit(value) if json_ else print_rows(value)
    value = report.describe(ref)
    if json_:
        return emit(value)
    report.print_description(value)


def rm(
    what: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="REF|RUN|KEY", help="Models and datasets, or runs and stages: what those gave."),
    ] = None,
    before: Annotated[
        Optional[str],
        typer.Option(
            metavar="AGE",
            help="Everything that was made, and last used, before this: 30d, 2w, 12h or a date. What has an alias stays.",
        ),
    ] = None,
    unalias: Annotated[
        bool,
        typer.Option(
            "--unalias",
            help="Also a model that has aliases (candidate, champion), which it loses; not one that another person gave.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would go, and how much room that makes.")
    ] = False,
    json_: Json = False,
) -> None:
    """Remove the files of models and datasets; the records of what made them stay, and a rerun makes them again.

    Refused is what an alias points at, what a running or waiting run or stage reads, and what a schedule names. Of a
    run, and by age, such results stay and the others go, as do results that another run has, too.

    Example: posttrain rm 20261001-1203 --dry-run
    Example: posttrain rm model:policy/3 dataset:rollouts@latest
    """
    from flows import env

    env.prepare(quiet=True)
    from flows.remove import print_removed, remove

    value = remove(what or [], before=before, unalias=unalias, dry_run=dry_run)
    return emit(value) if json_ else print_removed(value)


def cost(
    what: Annotated[
        Optional[str],
        typer.Argument(
            metavar="RUN|REF",
            help=(
                "A run id, or a model or dataset: then everything that it was made by counts. Without it, everything in"
                " the state directory."
            ),
        ),
    ] = None,
    prices: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE",
            help=(
                "YAML file of prices in USD, e.g. {gpu_hours: 2.5, judge_mtokens_in: 3, human_labels: 1}; default:"
                " prices.yaml in the state directory."
            ),
        ),
    ] = None,
    against: Annotated[
        Optional[str],
        typer.Option(metavar="MODEL", help="Also what the gain over this model cost, by their evaluations."),
    ] = None,
    metric: Annotated[str, typer.Option(help="With --against: the metric that gained.")] = "accuracy",
    by: Annotated[
        Optional[Literal["user", "recipe", "stage", "month"]],
        typer.Option(help="Without RUN or REF: what the rows are of.", show_default="user"),
    ] = None,
    since: Annotated[
        Optional[datetime],
        typer.Option(metavar="DATE", formats=["%Y-%m-%d"], help="Without RUN or REF: what finished from this day on."),
    ] = None,
    until: Annotated[
        Optional[datetime],
        typer.Option(metavar="DATE", formats=["%Y-%m-%d"], help="Without RUN or REF: what finished before this day."),
    ] = None,
    json_: Json = False,
) -> None:
    """The cost ledger of a run, model or dataset: hours, generated tokens, judge calls and labels by people, with their
    prices; or of everybody: posttrain cost --by user --since 2026-11-01

    Example: posttrain cost model:policy@champion --against model:sft/1 --prices prices.yaml
    """
    from flows import env, ledger
    from stages.spec import ConfigError

    env.prepare(quiet=True)
    if what is None:
        if against is not None:
            raise ConfigError(
                "--against compares a model with another; write both: posttrain cost MODEL --against MODEL"
            )
        value = ledger.cost_of_all(prices, since, until, by or "user")
    elif by or since or until:
        raise ConfigError(f"--by, --since and --until are of everything that was run; leave {what} or them out")
    else:
        value = ledger.cost(what, prices, against, metric)
    if json_:
        return emit(value)
    ledger.print_cost(value)


def lineage(ref: Annotated[str, typer.Argument(help="A dataset or model ref.")], json_: Json = False) -> None:
    """Show everything a dataset or model was made from: stages, configs, data files."""
    from flows import env, report

    env.prepare(quiet=True)
    tree = report.lineage(ref)
    if json_:
        return emit(tree)
    report.print_lineage(tree)


def compare(
    a: Annotated[
        str,
        typer.Argument(
            help=(
                "A run id, a model (the training that made it; beside one of another stage its newest evaluation), or an"
                " evaluation (the ref of its samples or a stage key)."
            )
        ),
    ],
    b: Annotated[str, typer.Argument(help="The one to compare with.")],
    out: Annotated[
        Optional[Path],
        typer.Option(metavar="DIR", help="Where the figure of the curves goes; default: below the state directory."),
    ] = None,
    json_: Json = False,
) -> None:
    """Put two runs or two evaluations side by side: numbers, settings, curves, held-out scores, answers; different
    protocols are refused.
    """
    from flows import display, env
    from flows.compare import compare as side_by_side

    env.prepare(quiet=True)
    value = side_by_side(a, b, out)
    if json_:
        return emit(value)
    known = {(row["step"], row["metric"]) for row in value["metrics"]}
    display.table(
        [
            row
            for row in value["metrics"]
            if not display.is_beside(row["metric"], {metric for step, metric in known if step == row["step"]})
        ]
    )
    for name, title in (
        ("held_out", "held-out prompts, difference b - a with its 95% interval"),
        ("answers", "the same prompts, largest changes first"),
    ):
        if value[name]:
            print()
            display.table(value[name], title)
    print()
    for line in (*value["config"], *value["notes"], *(f"curves: {path}" for path in value["figures"])):
        print(line)


def promote(
    model: Annotated[str, typer.Argument(help="The candidate: a model ref or directory.")],
    input_: Annotated[
        Optional[list[str]],
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=REF",
            help=(
                "Evidence for the gate in the place of the model's newest evaluation, e.g."
                " candidate_samples=dataset:NAME@latest; the inputs: posttrain stage promote --keys. Repeatable."
            ),
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Registered name.")] = "policy",
    alias: Annotated[str, typer.Option(help="Alias the winner gets.")] = "champion",
    set_: Sets = None,
    json_: Json = False,
) -> None:
    """Put a model through the promotion gate; the decision and its evidence are recorded whatever it is.

    Its newest evaluation is held against the champion's under the same protocol, which is made now where there is none.

    Exit code 1 when the gate refuses.
    """
    from flows import env, promotion

    env.prepare(quiet=True)
    decision = promotion.promote(model, name=name, alias=alias, inputs=input_ or [], sets=set_ or [])
    if json_:
        emit(decision)
    else:
        promotion.print_decision(decision)
    if not decision["promoted"]:
        raise typer.Exit(1)


def alias(
    which: Annotated[str, typer.Argument(metavar="model:NAME@ALIAS", help="The alias, e.g. model:policy@champion.")],
    version: Annotated[
        Optional[str],
        typer.Argument(
            metavar="VERSION",
            help="The version that gets it: a number, or a ref. Without it, who has the alias and how it moved.",
        ),
    ] = None,
    previous: Annotated[
        bool, typer.Option("--previous", help="Back to the version before; given again, to the one before that.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take the alias away.")] = False,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, kept with who and when.")] = "",
    json_: Json = False,
) -> None:
    """Give an alias to another version by hand, without the gate: back at once after a bad promotion.

    Whatever reads model:NAME@ALIAS, deployments and triggers too, reads that version from then on. No gate gives the
    alias again to what it was taken from by hand; this command does.

    Example: posttrain alias model:policy@champion --previous --reason "answers in French"
    Example: posttrain alias model:policy@champion
    """
    from flows import env, promotion

    env.prepare(quiet=True)
    if version is None and not previous and not remove:
        if reason:
            from flows.config import ConfigError

            raise ConfigError("--reason is of a move; write VERSION, --previous or --remove too")
        value = promotion.moves(which)
        return emit(value) if json_ else promotion.print_moves(value)
    value = promotion.point(which, version, previous=previous, remove=remove, reason=reason)
    return emit(value) if json_ else promotion.print_point(value)


def select(
    candidates: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY|RUN|MODEL…",
            help=(
                "A stage that was run with publish_epochs=true: its key, a run with one such stage, or a model that it"
                " made. Or models, in the order in which ties go."
            ),
        ),
    ],
    input_: Annotated[
        Optional[list[str]],
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=REF",
            help=(
                "prompts, reward_model, judge; data is that of the stage; the inputs: posttrain stage select_checkpoint"
                " --keys. Repeatable."
            ),
        ),
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="Registered name; default: that of the stage's model.")] = None,
    alias: Annotated[str, typer.Option(help="Alias that the chosen model gets.")] = "selected",
    set_: Sets = None,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Choose among the checkpoints of a finished training by reward, win rate, a metric or validation loss, and give the
    chosen one an alias.

    Example: posttrain select 4be1f0a2c3d4 --input reward_model=model:reward@candidate --alias selected
    """
    from flows import display, env, promotion

    env.prepare(quiet=True)
    value = promotion.select(
        candidates, name=name, alias=alias, inputs=input_ or [], sets=set_ or [], seed=seed if seed is not None else 0
    )
    if json_:
        return emit(value)
    promotion.print_decision(value)
    display.table(display.metric_rows({key: number for key, number in value["scores"].items() if number is not None}))


def export(
    what: Annotated[str, typer.Argument(metavar="REF", help="A model or dataset ref.")],
    directory: Annotated[
        Optional[Path],
        typer.Argument(
            help=(
                "New directory; a model loads with from_pretrained anywhere, a dataset with datasets.load_dataset. May"
                " be left out with --push."
            )
        ),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter",
            help=(
                "Only the LoRA adapter, as peft loads one (adapter_model.safetensors, adapter_config.json), with the"
                " tokenizer."
            ),
        ),
    ] = False,
    base: Annotated[
        Optional[str],
        typer.Option(
            help="With --adapter: path or hub id of the model it belongs on, written into adapter_config.json."
        ),
    ] = None,
    push: Annotated[
        Optional[str],
        typer.Option(
            metavar="OWNER/NAME",
            help=(
                "Commit it to this repository of the Hugging Face Hub (or of HF_ENDPOINT), which is made where there is"
                " none; the token is HF_TOKEN's or that of `hf auth login`."
            ),
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: a repository that only its owner sees.")
    ] = False,
    json_: Json = False,
) -> None:
    """Copy a model out of the store as a plain Hugging Face directory, or a dataset as Parquet files by split; with
    --push to the Hub.

    Example: posttrain export model:policy@champion --push me/policy --private
    """
    from flows import env
    from flows.export import export as copy_out

    env.prepare(quiet=True)
    value = copy_out(what, directory, adapter, base, push, private)
    if json_:
        return emit(value)
    if value["directory"]:
        print(f"{value['ref']} -> {value['directory']} ({value['files']} files)")
    if push:
        print(f"{value['ref']} -> {value['url']}")


def chat(
    model: Annotated[str, typer.Argument(help="A model ref, directory or hub id.")],
    prompt: Annotated[Optional[str], typer.Option(help="Answer this one and stop.")] = None,
    system: Annotated[Optional[str], typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus mass.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer at most.")] = 512,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Talk to a model with the platform's own sampler; answers are printed as they are drawn. Empty line or Ctrl-D ends;
    /reset forgets the conversation.
    """
    from flows import env
    from flows.chat import converse

    env.prepare(quiet=True)
    converse(
        model,
        prompt=prompt,
        system=system,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed or 0,
        as_json=json_,
    )
