"""The two panels of a run: what is about to happen, and how it went."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autolaunch.config.arithmetic import arithmetic_words
from autolaunch.directories import shown
from autolaunch.models.facts import ModelFacts, model_facts
from autolaunch.report.page import LEVELS, Page
from autolaunch.report.pipeline import remarks, stage_table
from autolaunch.report.readable import counted, joined, readable_bytes, readable_count, readable_seconds
from autolaunch.report.schedule_screen import schedule_text
from autolaunch.report.settings_words import SHARDED, mesh_words
from autolaunch_strategies.config import AXES, CP_BACKEND_SPECS, SHARDING_AXES
from autolaunch_strategies.config.values import written
from autolaunch_strategies.schedules.schedule import Timeline

WIDEST_PICTURE = 160
"""Columns of a schedule's picture, which has more to show the wider it is."""

OUTCOMES = {"finished": "green", "failed": "red", "interrupted": "yellow"}


def show_start(
    describe: Mapping[str, Any],
    job: Mapping[str, Any],
    console: Console,
    parameters: int = 0,
    trained: int | None = None,
) -> None:
    """Show what is about to run, on rank 0.

    Args:
        describe: what the strategy has applied (`MeshStrategy.describe()`), empty for another strategy.
        job: the resolved job as plain dicts.
        parameters: of the whole model; 0 if not known.
        trained: how many of them are; None for all.
    """
    rows = [
        ("model", _model(job, parameters, trained)),
        ("trained", _trained_part(job)),
        ("mesh", _mesh(job)),
        ("chosen", _choice(describe)),
        ("mp", _plan(job, describe)),
        ("pipeline", _pipeline(describe)),
        ("cp", _sequences(job, describe)),
        ("experts", _experts(describe)),
        ("data", _data(job)),
        ("packing", _packing(job, describe)),
        ("training", _training(job) if job["task"] == "fit" else ""),
        ("precision", _precision(job, describe)),
        ("sharded", _sharded(job, describe)),
        ("output", _shown(job.get("output_dir"))),
    ]
    name = f" · {job['name']}" if job.get("name") not in (None, "run") else ""
    Page(console).panel(f"autolaunch {job['task']}{name}", "cyan", rows)


def show_plan(
    account: Mapping[str, Any],
    job: Mapping[str, Any],
    console: Console,
    parameters: int,
    path: Path,
    schedule: Timeline | None = None,
    picture: Path | None = None,
    trained: int | None = None,
) -> None:
    """Show what a run would do: its panel, what is applied in which order and why, and how its pipeline works.

    Args:
        account: what would be applied (`autolaunch_strategies.apply.order.foresee`).
        job: the resolved job as plain dicts.
        parameters: of the whole model.
        path: where the plan was written.
        schedule: of a pipeline, over time.
        picture: where it was drawn.
        trained: how many of the parameters are; None for all.
    """
    show_start(account, job, console, parameters, trained)
    page = Page(console)
    page.rows(_steps(account))
    if schedule is not None:
        console.print()
        page.print(stage_table(account["pp"]))
        console.print()
        console.print(schedule_text(schedule, min(console.width, WIDEST_PICTURE)))
        for line in remarks(account, job):
            page.text(line)
        console.print()
    page.rows([("written", ", ".join(_shown(item) for item in (path, picture) if item))])


def _steps(account: Mapping[str, Any]) -> Iterator[tuple[str, str | Text]]:
    """(step, what it would do, and why)."""
    yield "order", " → ".join(account["order"])
    for name, reason in account["blocks"].get("reasons", {}).items():
        yield "blocks", f"{name}: {reason}"
    mp, cp = account.get("mp", {}), account.get("cp", {})
    for pattern, styles in mp.get("plan", {}).items():
        matches = counted(mp["modules"][pattern], "module")
        yield "mp", f"{pattern}: {_styles(styles)} ({matches}; {mp['reasons'][pattern]})"
    if share := mp.get("share"):
        yield "mp", share
    for warning in mp.get("warnings", ()):
        yield "mp", Text(warning, style="yellow")
    for kind, names in _sharded_sequences(cp):
        yield "cp", f"{names}: {kind}"
    for warning in cp.get("warnings", ()):
        yield "cp", Text(warning, style="yellow")
    for names, reason in _alike(account.get("ep", {}).get("reasons", {})):
        yield "ep", f"{names}: ExpertParallel ({reason})"
    if float8 := account.get("float8"):
        yield "float8", f"{counted(float8['layers'], 'linear layer')}: {float8['recipe']}"
        for names, reason in _alike(float8.get("kept", {})):
            yield "float8", f"{names}: stays as it is ({reason})"
        for warning in float8.get("warnings", ()):
            yield "float8", Text(warning, style="yellow")
    for step in ("recompute", "compile"):
        if blocks := account[step].get("blocks"):
            yield step, f"{len(blocks)} of {len(account['blocks']['found'])} blocks: {account[step]['mode']}"
    for names, reason in _alike(account["compile"].get("reasons", {})):
        yield "compile", f"{names}: {reason}"
    for warning in account["compile"].get("warnings", ()):
        yield "compile", Text(warning, style="yellow")
    for names, reason in _alike(account["dp"]["groups"]):
        yield "dp", f"{names}: {reason}"


def _alike(groups: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """(first ... last name, reason) of each run of names with one reason."""
    for reason, run in itertools.groupby(groups.items(), key=lambda item: item[1]):
        names = [name for name, _ in run]
        yield (names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"), reason


def show_end(summary: Mapping[str, Any], console: Console, losses: Sequence[float] = ()) -> None:
    """Show how a run ended, on rank 0.

    Args:
        summary: what `collect_summary` returned; `output_dir` is shown if it is in it.
        losses: the loss of every logged step, for its curve.
    """
    steps, seconds = summary.get("steps") or 0, readable_seconds(summary["seconds"])
    fit = summary["task"] == "fit"
    rows = [
        ("loss", _loss(summary, losses) if fit else ""),
        ("steps", f"{steps:,} in {seconds}") if fit else ("time", seconds),
        ("speed", _speed(summary)),
        ("pipeline", _idle(summary.get("pipeline") or {})),
        ("experts", _load(summary.get("experts") or {})),
        ("memory", _peak(summary)),
        *((name, f"{value:.6g}") for name, value in (summary.get("metrics") or {}).items()),
        ("restarts", str(summary.get("restarts") or "")),
        ("checkpoint", _shown(summary.get("checkpoint"))),
        ("output", _shown(summary.get("output_dir"))),
        ("error", str(summary.get("error") or "")),
    ]
    title = summary["status"] if fit else f"{summary['task']} {summary['status']}"
    Page(console).panel(title, OUTCOMES.get(summary["status"], "cyan"), rows)


def loss_sparkline(values: Iterable[float], width: int = 32) -> str:
    """The curve of `values` in at most `width` characters: low to high is ▁ to █, and × where it was not finite.

    More values than characters are averaged. Empty if there are less than two values.
    """
    values = list(values)
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [
        math.fsum(part) / len(part) if all(map(math.isfinite, part := values[a:b])) else math.nan
        for a, b in itertools.pairwise(edges)
    ]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return "×" * width
    low, high = min(finite), max(finite)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((mean - low) * scale)] if math.isfinite(mean) else "×" for mean in means)


# --- lines of the first panel ----------------------------------------------------------------------------------------


def _model(job: Mapping[str, Any], parameters: int, trained: int | None) -> str:
    if job.get("module"):
        name = str(job["module"].get("_target_", "module"))
    else:
        model = job["model"]
        name = f"{model['name']} {model['size']}" if "size" in model else str(model.get("path") or model["name"])
    count = f"{readable_count(parameters)} parameters" if parameters else ""
    if trained is not None and trained != parameters:
        count = f"{readable_count(trained)} of {count} trained"
    adapter = job.get("adapter") or {}
    bits = f"{adapter['quant_type']} where frozen and linear" if adapter.get("name") == "qlora" else ""
    return joined(name, count, bits)


def _trained_part(job: Mapping[str, Any]) -> str:
    """What of the model is trained; empty if all of it is."""
    if not (adapter := job.get("adapter")):
        return ", ".join((job.get("model") or {}).get("trainable") or [])
    whole = ", ".join(adapter["modules_to_save"] or [])
    return joined(
        str(adapter["name"]),
        f"rank {adapter['r']}" if adapter["r"] else "",
        f"from {_shown(adapter['path'])}" if adapter["path"] else "",
        f"{whole} whole" if whole else "",
    )


def _mesh(job: Mapping[str, Any]) -> str:
    ranks = math.prod(job["mesh"].get(axis, 1) for axis in AXES)
    return "1 rank" if ranks == 1 else joined(mesh_words(job["mesh"]), f"{ranks} ranks")


def _choice(describe: Mapping[str, Any]) -> str:
    """That the planner chose the mesh, and what it expects."""
    if (choice := describe.get("choice")) is None:
        return ""
    return joined("by the planner", f"{readable_seconds(choice['chosen']['seconds'])} per step expected")


def _plan(job: Mapping[str, Any], describe: Mapping[str, Any]) -> str:
    ranks, mp = job["mesh"].get("mp", 1), describe.get("mp", {})
    if ranks == 1 or not mp:
        return ""
    facts = ModelFacts("") if job.get("module") else model_facts(job["model"])
    kv_heads = facts.num_kv_heads or ranks
    return joined(
        job["mp"]["name"],
        counted(len(mp.get("plan", {})), "rule"),
        counted(len(mp["warnings"]), "rule") + " without effect" if mp.get("plan") and mp.get("warnings") else "",
        mp.get("share", ""),
        f"keys and values gathered ({kv_heads} heads for {ranks} ranks)" if kv_heads % ranks else "",
    )


def _pipeline(describe: Mapping[str, Any]) -> str:
    pp = describe.get("pp", {})
    if not pp:
        return ""
    schedule = "exact" if pp["loss"] == "exact" else Path(pp["schedule"]).name
    return joined(
        counted(len(pp["stages"]), "stage"),
        f"{schedule}, {counted(pp['microbatches'], 'microbatch', 'es')}" if "microbatches" in pp else "",
        f"idle {pp['expected_idle_share']:.1%} expected" if "expected_idle_share" in pp else "",
    )


def _sequences(job: Mapping[str, Any], describe: Mapping[str, Any]) -> str:
    cp = describe.get("cp", {})
    if not cp:
        return ""
    ranks, ulysses = cp["ranks"], cp["ulysses"] or 1
    mixed = CP_BACKEND_SPECS[cp["backend"]].is_mixed
    places = f" (ring of {ranks // ulysses} × ulysses of {ulysses})" if mixed else ""
    tokens = ""
    if (length := job["data"].get("seq_len")) and "_target_" not in job["data"]:
        padded = -(-length // (2 * ranks)) * 2 * ranks
        tokens = f"{length:,} → {padded // ranks:,} tokens per rank" + (", padded" if padded > length else "")
    return joined(cp["backend"], f"{ranks} ranks{places}", tokens)


def _experts(describe: Mapping[str, Any]) -> str:
    ep = describe.get("ep", {})
    if not ep:
        return ""
    counts = sorted(set(ep["experts_per_rank"].values()))
    return joined(
        f"ep {ep['degree']} × efsdp {ep['efsdp']}",
        f"{' or '.join(map(str, counts))} experts of a layer per rank",
        counted(len(ep["plan"]), "mixture"),
    )


def _sharded_sequences(cp: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """(what happens there, names of modules) of each kind of layer that sharded sequences go through."""
    if names := [*cp.get("regions", ()), *cp.get("layers", ())]:
        yield f"each rank has 1/{cp['ranks']} of the positions", _names(names)
    for reason, gathered in itertools.groupby((cp.get("gathered") or {}).items(), key=lambda item: item[1]):
        yield f"gathered where positions meet: {reason}", _names(name for name, _ in gathered)
    for backend, run in itertools.groupby((cp.get("attention") or {}).items(), key=lambda item: item[1]):
        yield f"attention over all positions by {backend}", _names(name for name, _ in run)


def _names(names: Iterable[str]) -> str:
    """Names in their order, those that differ in numbers alone as the first and the last of them."""
    runs = [list(run) for _, run in itertools.groupby(names, key=lambda name: re.sub(r"\d+", "*", name))]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} ... {run[-1]}" for run in runs)


def _styles(styles: Any) -> str:
    """The right-hand side of a rule as one would type it."""
    if isinstance(styles, Mapping):
        (name, arguments), *_ = styles.items()
        if name == "_target_":
            return str(arguments)
        return f"{name}({', '.join(f'{key}={written(value)}' for key, value in arguments.items())})"
    return ", ".join(map(_styles, styles)) if isinstance(styles, list | tuple) else str(styles)


def _data(job: Mapping[str, Any]) -> str:
    data = job["data"]
    name = str(data.get("name", "custom"))
    if "seq_len" not in data or "batch_size" not in data:
        return name
    sequences, length, microbatches = data["batch_size"], data["seq_len"], data.get("microbatches", 1)
    return joined(
        name,
        f"{sequences:,} × {length:,} = {sequences * length:,} tokens per step",
        f"{microbatches} microbatches" if microbatches > 1 else "",
        _tokenizer(data),
    )


def _packing(job: Mapping[str, Any], describe: Mapping[str, Any]) -> str:
    """What keeps documents apart that share a sequence; data of one's own may have none."""
    packed = describe.get("packed_attention")
    if packed is None or job["data"].get("packing") != "documents":
        return ""
    return joined("documents", f"{packed['kernel']} ({packed['reason']})")


def _tokenizer(data: Mapping[str, Any]) -> str:
    """Where tokens come from: nobody who brings a pretrained model means bytes."""
    tokenizer = data.get("tokenizer")
    return "" if tokenizer is None else "bytes as tokens" if tokenizer == "bytes" else f"tokenizer {_shown(tokenizer)}"


def _training(job: Mapping[str, Any]) -> str:
    trainer, optimizer = job["trainer"], job["optimizer"]
    limits = []
    if trainer["max_steps"] >= 0:
        limits.append(f"{trainer['max_steps']:,} steps")
    if trainer["max_epochs"] is not None and trainer["max_epochs"] >= 0:
        limits.append(f"{trainer['max_epochs']:,} epoch{'' if trainer['max_epochs'] == 1 else 's'}")
    if trainer["max_time"] is not None:
        limits.append(str(trainer["max_time"]))
    if job.get("module"):
        return " or ".join(limits)
    return joined(" or ".join(limits), f"{optimizer['name']}, lr {optimizer['lr']:g} {job['scheduler']['name']}")


def _precision(job: Mapping[str, Any], describe: Mapping[str, Any]) -> str:
    recompute, compiled = job["recompute"], job["compile"]
    if isinstance(recompute, bool):
        recompute = "full" if recompute else "none"
    if isinstance(recompute, int):
        recompute = f"every {recompute} blocks" if recompute > 1 else "full"
    mode = "on" if compiled is True else compiled or "off"
    return joined(*arithmetic_words(job, describe.get("by_device", {})), f"recompute {recompute}", f"compile {mode}")


def _sharded(job: Mapping[str, Any], describe: Mapping[str, Any]) -> str:
    axes = [axis for axis in SHARDING_AXES if job["mesh"].get(axis, 1) > 1]
    if not axes:
        return ""
    dp = {**job["dp"], **describe.get("dp", {})}  # the strategy has worked out what the job leaves open
    if dp["sharding_level"] == 0:
        return f"nothing: every rank of {' and '.join(axes)} holds all of it"
    replicas = dp.get("replicate") or 1
    blocks = len(describe.get("blocks", {}).get("found", ()))
    return joined(
        f"{SHARDED[dp['sharding_level']]} over {' × '.join(axes) if replicas == 1 else 'each replica'}",
        f"{replicas} replicas" if replicas > 1 else "",
        f"{blocks} blocks" if blocks else "",
        "in host memory" if dp.get("cpu_offload") else "",
    )


# --- lines of the last panel -----------------------------------------------------------------------------------------


def _loss(summary: Mapping[str, Any], losses: Sequence[float]) -> str:
    last = summary.get("loss")
    if last is None:
        return ""
    if len(losses) < 2:
        return f"{last:.4f}"
    return f"{losses[0]:.4f} → {last:.4f}   {loss_sparkline(losses)}"


def _speed(summary: Mapping[str, Any]) -> str:
    rate, step_time = summary.get("tokens_per_second"), summary.get("step_time_s")
    return joined(
        f"{readable_count(rate)} {summary.get('counted', 'tokens')}/s" if rate else "",
        f"{readable_seconds(step_time)} per step (median)" if step_time else "",
    )


def _idle(pipeline: Mapping[str, Any]) -> str:
    measured, expected = (pipeline.get(f"{kind}_idle_share") for kind in ("measured", "expected"))
    if measured is None:
        return ""
    return f"idle {measured:.1%} of the time" + (f" ({expected:.1%} expected)" if expected is not None else "")


def _load(experts: Mapping[str, Any]) -> str:
    if not experts:
        return ""
    return f"busiest {experts['imbalance']:.2f} × the mean, in {experts['worst_layer']}"


def _peak(summary: Mapping[str, Any]) -> str:
    rank = f" (largest of {summary['world_size']} ranks)" if summary["world_size"] > 1 else ""
    return f"{readable_bytes(summary['peak_memory_bytes'])} at its peak{rank}"


def _shown(path: Any) -> str:
    return shown(Path(path)) if path else ""
