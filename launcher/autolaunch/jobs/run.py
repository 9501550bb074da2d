"""From a command line to jobs that run: one, or those of a sweep, each checked, resolved and launched."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import math
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from autolaunch import __version__
from autolaunch.config.across_keys import check, launcher_beside_cluster
from autolaunch.config.against_schema import validate
from autolaunch.config.arithmetic import with_arithmetic
from autolaunch.config.classification import with_labels_of_model
from autolaunch.config.command_line import CommandLine, quoted_mesh, typed_keys, unquoted
from autolaunch.config.compose import (
    Composed,
    compose,
    from_environment,
    jobs_of_sweep,
    resolved,
    run_once,
    run_sweep,
    unresolvable,
)
from autolaunch.config.hub import fetch_weights, with_hub_directory
from autolaunch.config.microbatches import with_batch_parts
from autolaunch.config.origin import Origin
from autolaunch.config.own_module import keys_without_effect
from autolaunch.config.recorded import recorded, recorded_adapter
from autolaunch.config.resume import (
    COMPARING_TASKS,
    check_adapter,
    check_that_it_goes_on,
    resolve_ckpt_path,
    what_last_is,
)
from autolaunch.config.saving import saving_without_effect
from autolaunch.config.schema import IN_ONE_PROCESS
from autolaunch.config.search import is_trial
from autolaunch.config.sequence_parts import with_sequence_parts
from autolaunch.config.tokenizer import with_tokenizer
from autolaunch.config.trained import TAKING_TASKS, check_model, takes_from_job, with_trained_job
from autolaunch.directories import shown
from autolaunch.garbage import no_garbage_collection
from autolaunch.instantiate import let_imports_see_the_working_directory
from autolaunch.job import ResolvedJob, write_beside
from autolaunch.jobs import restarts
from autolaunch.jobs.compare import compare_jobs, refuse_single_job
from autolaunch.jobs.directory import check_that_nothing_is_lost, check_what_is_there
from autolaunch.jobs.ends import (
    SUMMARY,
    JobEnd,
    forget_end,
    forget_ends,
    last_row,
    metrics_state,
    print_table,
    read_ends,
)
from autolaunch.jobs.named_parts import check_named_parts
from autolaunch.jobs.objective import objective_of, value_for_sweeper
from autolaunch.launch.containment import contained
from autolaunch.launch.end import RunEnd, correct_summary
from autolaunch.launch.lock import LOCK_FILE, locked
from autolaunch.launch.output_lost import output_lost
from autolaunch.launch.place import Place, place
from autolaunch.launch.requeue import newest_checkpoint
from autolaunch.models.facts import begins_random
from autolaunch.report.terminal import Terminal
from autolaunch_strategies.config import ConfigError, ConfigErrors, as_typed, raise_all

AUTO = "mesh=auto"
"""Typed, it lets the planner choose the mesh, and of everything else that it sets what is not typed."""

FAILED, MISCONFIGURED, INTERRUPTED = 1, 2, 130

START_TIMEOUT = 600.0
"""Seconds to wait for the other ranks before there is a job, unless `launch.start_timeout` was typed."""


def run_jobs(line: CommandLine) -> int:
    """Run what a command line asks for and return the exit code.

    Raises:
        ConfigError, ConfigErrors: nothing was started and nothing was written.
    """
    let_imports_see_the_working_directory()
    here = place()
    if here.kind != "alone":
        return _run_as_rank(line, here)
    going_on = _going_on(line)
    line, chooses = _for_a_cluster(line, here)
    line, composed = composed_with_trained_job(line)
    if composed.multirun:
        raise_all(composed.errors)
        raise_all(unresolvable(composed.config, composed.origin))
        _refuse_cluster_of_sweep(composed.config)
        return _run_jobs_of_sweep(line, composed.config)
    line, composed, choice = _with_choice(line, composed, chooses)
    directory = _prepare(line, composed)
    with _locked(directory, composed.config):
        check_that_nothing_is_lost(directory, composed.config, going_on)
        forget_end(directory)
        ends: list[JobEnd] = []
        code = run_once(line, composed.config, directory, lambda config: run_job(config, choice, ends))
    return ends[0].exit_code if ends else code


@no_garbage_collection()
def composed_with_trained_job(line: CommandLine) -> tuple[CommandLine, Composed]:
    """What a line composes to, and the line with what it takes from the job of its checkpoint.

    Raises:
        ConfigError, ConfigErrors: as `compose` and `with_trained_job`.
    """
    composed = compose(line)
    try:
        directory = _output_dir(composed.config, composed.config.hydra.run)
    except (ConfigError, OmegaConfBaseException):
        return line, composed  # which is told with everything else that is wrong
    return with_trained_job(line, composed, directory)


def _refuse_cluster_of_sweep(config: DictConfig) -> None:
    """A choice is made before Hydra runs a job, and the jobs of a sweep would go without."""
    if config.get("cluster") is not None and config.get("search") is None:
        raise ConfigError(
            f"-m with cluster={config.cluster.get('name')}",
            "a sweep chooses no mesh: it runs what is typed",
            "one plan after the other, without -m; -m search=auto, which measures",
            "autolaunch plan cluster=...",
        )


def _for_a_cluster(line: CommandLine, here: Place) -> tuple[CommandLine, bool]:
    """(the line as the planner reads it, whether `mesh=auto` was typed): no mesh, and a cluster.

    If none is named, it is this machine, or as many like it as torchrun or srun has started ranks on.
    """
    if AUTO not in line.overrides:
        return line, False
    overrides = [item for item in line.overrides if item != AUTO]
    if line.multirun:
        raise ConfigError(
            AUTO,
            "every job of a sweep would choose for itself",
            "-m search=auto, which measures what the planner proposes",
            _as_sweep(["search=auto", *overrides]),
        )
    typed = typed_keys(overrides)
    if "cluster" not in typed:
        devices = typed.get("launch.devices") if here.kind == "alone" else str(here.local_world_size)
        overrides.append(f"cluster=local{f'x{devices}' if devices else ''}")
        if here.world_size > here.local_world_size:
            overrides.append(f"cluster.nodes={here.world_size // here.local_world_size}")
    return replace(line, overrides=overrides), True


def _as_sweep(overrides: Sequence[str]) -> str:
    """The command line of a sweep with these overrides."""
    return shlex.join(["autolaunch", "-m", *map(unquoted, overrides)])


def _going_on(line: CommandLine) -> str:
    """The same line with `ckpt_path=last`."""
    name = None if line.config_name == CommandLine.config_name else line.config_name
    flags = {"--config-dir": line.config_dir, "--config-path": line.config_path, "--config-name": name}
    words = [word for flag, value in flags.items() if value for word in (flag, str(value))]
    typed = [unquoted(item).removeprefix("task=") for item in line.overrides if "ckpt_path" not in typed_keys([item])]
    return shlex.join(["autolaunch", *(["-m"] if line.multirun else []), *typed, "ckpt_path=last", *words])


@no_garbage_collection()
def _with_choice(
    line: CommandLine, composed: Composed, chooses: bool
) -> tuple[CommandLine, Composed, dict[str, Any] | None]:
    """With what the planner chose at the line's end, and its account of it; None if there was nothing to choose.

    Args:
        chooses: whether `mesh=auto` was typed; `plan` chooses for every cluster.
    """
    if not chooses and (composed.config.get("cluster") is None or composed.config.task != "plan"):
        return line, composed, None
    from autolaunch.planning import ahead

    raise_all(composed.errors)
    if chooses and composed.config.launch.get("name") == "slurm" and composed.config.cluster.get("name") == "local":
        raise ConfigError(
            AUTO,
            "with launch=slurm it is for other machines than this one, and which is not said",
            "a cluster to plan for (autolaunch --info cluster)",
            "mesh=auto cluster=h100x16 launch=slurm launch.nodes=2",
        )
    hydra = composed.config.hydra
    job = resolve_job(composed.config, hydra, _output_dir(composed.config, hydra.run), None, composed.origin)
    answer = ahead.ask(job.config, line.overrides, job.by_device)
    for comes_next in ("report.choice_screen", "worker"):  # imported meanwhile
        importlib.import_module(f"autolaunch.{comes_next}")
    chosen, choice = answer()
    if job.config["task"] == "plan":
        _show_choice(choice, job.config["full"])
    settled = typed_keys(chosen)  # said twice, Hydra would refuse a group
    kept = [item for item in line.overrides if not typed_keys([item]).keys() & settled.keys()]
    if job.config["task"] != "plan":
        # A run has the devices that there are.
        kept = [item for item in kept if not any(key.split(".")[0] == "cluster" for key in typed_keys([item]))]
    line = replace(line, overrides=[*kept, *map(quoted_mesh, chosen)])
    return line, compose(line), choice


def _show_choice(choice: dict[str, Any], full: bool) -> None:
    """Show it at once: to write it down, the config is composed and checked again with it."""
    from autolaunch.report.choice_screen import show_choice, show_why

    show_choice(choice, Terminal(), full=full)
    if choice.get("why") is not None:
        show_why(choice["why"], Terminal())
    sys.stdout.flush()


def _prepare(line: CommandLine, composed: Composed, started_ranks: int | None = None) -> Path:
    """Check a single run and create its directory; who runs in it has to lock it."""
    hydra = composed.config.hydra
    if (launcher := hydra.runtime.choices["hydra/launcher"]) != "basic":
        raise ConfigError(
            f"hydra/launcher={launcher}",
            "starts the jobs of a sweep, and this is a single run",
            write=_as_sweep(line.overrides),
        )
    if composed.config.get("search") is not None:
        raise ConfigError(
            f"search={composed.config.search.get('name')}",
            "a search runs several jobs, and this is a single run",
            write=_as_sweep(line.overrides),
        )
    if composed.config.get("cluster") is not None and composed.config.task not in ("plan", "calibrate"):
        raise _cluster_without_choice(line, composed.config)
    # The name of the directory may hold one of them.
    unresolved = unresolvable(composed.config, composed.origin)
    raise_all([*composed.errors, *unresolved] if unresolved else [])
    directory = _output_dir(composed.config, hydra.run)
    resolve_job(composed.config, hydra, directory, started_ranks, composed.origin, composed.errors)
    return _claim(directory, composed.config, hydra.run)


def _cluster_without_choice(line: CommandLine, config: DictConfig) -> ConfigError:
    """A cluster beside a task that chooses nothing for it, named as it was typed: the profile has no number."""
    option = str(config.hydra.runtime.choices.get("cluster"))
    name = config.cluster.get("name") if option in ("None", "null", "none") else option
    typed = [unquoted(item) for item in line.overrides if not item.startswith("task=")]
    if config.task != "dryrun":
        return ConfigError(
            f"cluster={name}",
            f"{config.task} runs on the devices that there are",
            "`plan`, which chooses for any cluster; mesh=auto; -m search=auto, which also measures",
            shlex.join(["autolaunch", "plan", *typed]),
        )
    has_mesh = any(key.partition(".")[0] == "mesh" for key in typed_keys(typed))
    unneeded = [item for item in typed if any(key.partition(".")[0] == "cluster" for key in typed_keys([item]))]
    return ConfigError(
        f"cluster={name}",
        "a dry run uses no devices: with a mesh that is typed it needs no cluster",
        "mesh=auto, which is planned for a cluster; or any mesh without one",
        shlex.join(["autolaunch", "dryrun", *(item for item in typed if item not in unneeded)])
        if has_mesh
        else shlex.join(["autolaunch", "dryrun", AUTO, *typed]),
    )


@contextlib.contextmanager
def _locked(directory: Path, config: DictConfig) -> Iterator[None]:
    """Have the directory of a run or a sweep to oneself, with nothing in it that is in the way."""
    waits = bool((config.get("launch") or {}).get("wait"))
    with locked(directory, f"output_dir={shown(directory)}", wait=math.inf if waits else 0.0):
        check_what_is_there(directory)
        yield


def _run_as_rank(line: CommandLine, here: Place) -> int:
    """Be one of the ranks that torchrun or srun has started: rank 0 composes the job, the others are given it."""
    from autolaunch.launch.rendezvous import RankMissing, connect, share_job
    from autolaunch.launch.resources import raise_file_limit
    from autolaunch.worker import leave, run_rank

    held = contextlib.ExitStack()
    atexit.register(held.close)  # what `leave` calls, too

    def make_job() -> ResolvedJob:
        chosen_for, chooses = _for_a_cluster(line, here)
        chosen_for, composed = composed_with_trained_job(chosen_for)
        if composed.multirun:
            raise ConfigError(
                "-m",
                f"a sweep starts its own processes, and these {here.world_size} were started by {here.kind}",
                "a single run here, or the sweep without it",
                _as_sweep(line.overrides),
            )
        settled, composed, choice = _with_choice(chosen_for, composed, chooses)
        directory = _prepare(settled, composed, here.world_size)
        held.enter_context(_locked(directory, composed.config))
        check_that_nothing_is_lost(directory, composed.config, "ckpt_path=last")
        forget_end(directory)
        jobs: list[ResolvedJob] = []

        def make(config: DictConfig) -> None:
            hydra = hydra_node()
            resolved_job = resolve_job(config, hydra, Path(hydra.runtime.output_dir), here.world_size)
            jobs.append(replace(resolved_job, choice=choice))
            jobs[0].write()
            (jobs[0].output_dir / SUMMARY).unlink(missing_ok=True)  # of an earlier run here
            _say_what_last_is(jobs[0])
            _say_random_weights(jobs[0])

        code = run_once(settled, composed.config, directory, make)
        if not jobs:
            sys.exit(code)  # Hydra has said why
        return jobs[0]

    raise_file_limit(here.world_size)
    # Only rank 0 composes; the others have nothing but what was typed.
    timeout = _seconds(typed_keys(line.overrides).get("launch.start_timeout"), START_TIMEOUT)
    try:
        store = connect(here, timeout)
        job = share_job(store, here, make_job, timeout)
    except RankMissing as error:
        print(error, file=sys.stderr)
        return FAILED
    leave(run_rank(job, here, store))


def _seconds(typed: str | None, otherwise: float) -> float:
    """A number of seconds that was typed; `otherwise` if there is none, or one that will be refused."""
    try:
        seconds = float(typed or "")
    except ValueError:
        return otherwise
    return seconds if 0 < seconds < math.inf else otherwise


def _run_jobs_of_sweep(line: CommandLine, config: DictConfig) -> int:
    swept = [
        item.key_or_group
        for item in OverridesParser.create().parse_overrides(line.overrides)
        if item.is_sweep_override()
    ]
    if "output_dir" in swept:
        raise ConfigError(
            next(item for item in line.overrides if item.startswith("output_dir=")),
            "a sweep has one directory, and in it one for each job",
            "one directory",
            "output_dir=outputs/sweep",
        )
    _refuse_intervals(line, config)
    compares = config.task == "compare"
    directory = _output_dir(config, config.hydra.sweep)
    if compares:
        refuse_single_job(line.overrides, swept)
        if _runs_every_combination(config):
            _check_each_job(line, directory)
    directory = _claim(directory, config, config.hydra.sweep)
    with _locked(directory, config):
        if _runs_every_combination(config) and "ckpt_path" not in swept:
            for number in range(len(jobs_of_sweep(line))):
                check_that_nothing_is_lost(directory / str(number), config, _going_on(line))
        forget_ends(directory)
        if not _runs_every_combination(config) and not is_trial(config):
            keys = [*swept, *(config.hydra.sweeper.get("params") or {})]
            objective = objective_of(config.get("search"), dict.fromkeys(keys))
            objective.write(directory)
            print(f"search: {objective}", file=sys.stderr)
        try:
            code = run_sweep(line, directory, run_job)
        finally:
            ends = [] if is_trial(config) else read_ends(directory)  # a search tells of its trials itself
            if ends:
                print_table(ends, directory, Terminal())
            elif [item.name for item in directory.iterdir()] == [LOCK_FILE]:
                shutil.rmtree(directory)
    code = code or _code_of(ends)
    return code or (compare_jobs(ends, config.compare.tolerance) if compares else 0)


def _check_each_job(line: CommandLine, directory: Path) -> None:
    """Check every job of a comparison before the first one runs: without all of them it says little.

    Raises:
        ConfigError, ConfigErrors: what is wrong with any of them.
    """
    errors: dict[str, ConfigError] = {}
    for number, overrides in enumerate(jobs_of_sweep(line)):
        try:
            composed = compose(replace(line, overrides=overrides, multirun=False))
            resolve_job(
                composed.config,
                composed.config.hydra,
                directory / str(number),
                origin=composed.origin,
                errors=composed.errors,
            )
        except ConfigErrors as several:
            errors |= {str(error): error for error in several.errors}
        except ConfigError as error:
            errors[str(error)] = error
    raise_all(list(errors.values()))


def _code_of(ends: Sequence[JobEnd]) -> int:
    """The exit code of a sweep: that of a mistake if nothing but mistakes came of it, as for one job."""
    codes = {end.exit_code for end in ends}
    return MISCONFIGURED if codes == {MISCONFIGURED} else FAILED if codes - {0} else 0


def _runs_every_combination(config: DictConfig) -> bool:
    """Whether the sweeper is Hydra's own, which runs every combination and compares nothing."""
    return str(config.hydra.sweeper.get("_target_")).endswith("BasicSweeper")


def _refuse_intervals(line: CommandLine, config: DictConfig) -> None:
    """Hydra's own sweeper runs every combination, of which an interval has no end."""
    if not _runs_every_combination(config):
        return
    for item in OverridesParser.create().parse_overrides(line.overrides):
        if item.is_sweep_override() and not item.is_discrete_sweep():
            key = item.key_or_group
            raise ConfigError(
                unquoted(str(item.input_line)),
                "this sweep runs every combination, and between two numbers are too many",
                f"values: {key}=0.1,0.2, {key}=range(1,10,3); or a sweeper that draws from intervals",
                _as_sweep(["search=optuna", *line.overrides]),
            )


def run_job(config: DictConfig, choice: dict[str, Any] | None = None, ended: list[JobEnd] | None = None) -> float:
    """Run one job: what Hydra calls, in this process or in one that its launcher started.

    Args:
        choice: the planner's account of what it chose, if it did.
        ended: is given how it ended, also where nothing can be written any more.

    Returns:
        Of a job in a sweep what its sweeper compares, see `autolaunch.jobs.objective`.
    """
    let_imports_see_the_working_directory()
    hydra = hydra_node()
    sweep = hydra.mode == RunMode.MULTIRUN
    directory, overrides = Path(hydra.runtime.output_dir), typed_overrides(hydra)
    status, code, message = "interrupted", INTERRUPTED, ""
    held = contextlib.ExitStack()
    is_ours = not sweep
    try:
        if sweep:  # a single run has locked its directory before Hydra wrote there
            held.enter_context(_locked(directory, config))
            forget_end(directory)
            is_ours = True
        job = replace(resolve_job(config, hydra, directory), choice=choice)
        job.write()
        _say_what_last_is(job)
        _say_random_weights(job)
        started, before = time.time(), metrics_state(directory)
        (directory / SUMMARY).unlink(missing_ok=True)  # of an earlier run here
        with contained() if is_trial(config) else contextlib.nullcontext():
            job, end = restarts.run(job, isolated=sweep)
        status, code, message = end.status, end.exit_code, "\n".join(filter(None, [end.message, _to_go_on(job, end)]))
        if code and status != "submitted":
            if not (directory / SUMMARY).exists():
                _write_summary(job, status, message, time.time() - started, before)
            correct_summary(directory, status, message.partition("\n")[0], of_the_run=True)
    except (ConfigError, ConfigErrors) as error:
        status, code, message = "misconfigured", MISCONFIGURED, str(error)
    except Exception as error:
        # Not through Hydra: of a sweep it would show the first one only, and that at the very end.
        message = message or output_lost(directory, error) or traceback.format_exc().rstrip()
        status, code = "failed", FAILED
    finally:
        end_of_job = JobEnd(hydra.job.num if sweep else 0, overrides, status, code, str(directory), message)
        if ended is not None:
            ended.append(end_of_job)
        with contextlib.suppress(OSError):  # the directory may be gone, or its disk full
            if is_ours:  # not while another run is in it
                end_of_job.write()
        with contextlib.suppress(OSError):
            if sweep and not is_trial(config):
                end_of_job.tell(Path(hydra.sweep.dir))
        held.close()
        if message and not is_trial(config):
            if sweep:
                print(f"job {hydra.job.num} ({' '.join(overrides)}) {status}:", file=sys.stderr)
            print(message, file=sys.stderr, flush=True)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if status == "interrupted":
        sys.exit(code)
    if not sweep:
        return math.inf if code else 0.0
    try:
        return value_for_sweeper(Path(hydra.sweep.dir), directory, code)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(MISCONFIGURED)


def _to_go_on(job: ResolvedJob, end: RunEnd) -> str:
    """What a run that failed, or was ended at once, has saved before, and how to go on from it.

    Empty if its message says so, or if it has saved nothing.
    """
    newest = None
    has_ended_early = end.status == "interrupted" or (end.status == "failed" and end.exit_code == FAILED)
    with contextlib.suppress(OSError):  # someone has deleted what is there: not what has to be told
        newest = newest_checkpoint(job) if has_ended_early else None
    if newest is None or str(newest) in end.message:
        return ""
    there = as_typed("output_dir", job.output_dir)
    return f"saved before: {newest}\nto go on: the same command with {there} ckpt_path=last"


def _write_summary(
    job: ResolvedJob, status: str, message: str, seconds: float, before: tuple[int, int, int] | None
) -> None:
    """Say how a run ended whose first rank could not say it itself, in the keys that it would have used.

    Args:
        before: the state of metrics.csv when the run started.
    """
    row = last_row(job.output_dir, before)
    loss = float(row["loss"]) if row.get("loss") else math.nan
    summary = {
        "task": job.config["task"],
        "status": "interrupted" if status == "interrupted" else "failed",
        "world_size": job.world_size,
        "mesh": job.choices["mesh"],
        "steps": int(row["step"]) if row else None,
        "loss": loss if math.isfinite(loss) else None,
        "tokens_per_second": None,
        "step_time_s": None,
        "peak_memory_bytes": None,
        "parameters": None,
        "checkpoint": None,
        "seconds": seconds,
        "error": message.splitlines()[0] if message else status,
        "restarts": job.restarts,
    }
    write_beside(job.output_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")


@no_garbage_collection()
def resolve_job(
    config: DictConfig,
    hydra: DictConfig,
    output_dir: Path,
    started_ranks: int | None = None,
    origin: Origin | None = None,
    errors: Sequence[ConfigError] = (),
) -> ResolvedJob:
    """Check a composed config and make the job of it that workers read.

    Args:
        hydra: the `hydra` node that it was composed with.
        output_dir: absolute.
        started_ranks: how many ranks torchrun or srun has started; None if we start them.
        origin: says where its values came from.
        errors: what is known to be wrong already, to be told together with what is found here.

    Raises:
        ConfigError, ConfigErrors: all that is wrong with it.
    """
    origin = origin or Origin(hydra)
    config = config.copy()
    with open_dict(config):
        config.output_dir = str(output_dir)
    raise_all(unresolvable(config, origin))
    values = resolved(config)
    values, wrong = validate(values, origin)
    raise_all([*errors, *wrong])
    values = with_tokenizer(with_hub_directory(values))
    values, by_device = with_arithmetic(values)
    mesh, wrong = check(values, output_dir, origin, started_ranks)
    typed = typed_overrides(hydra)
    wrong += launcher_beside_cluster(values, typed, origin)
    raise_all([*keys_without_effect(config, typed), *saving_without_effect(values, typed, origin), *wrong])
    values = with_labels_of_model(values)
    ranks = 1 if values["task"] in IN_ONE_PROCESS else mesh.size
    if ranks > 1 and started_ranks is None:
        check_named_parts(values)
    fetch_weights(values)  # may be much: once nothing else is wrong
    values["mesh"] = {**mesh.sizes, "order": list(mesh.order)}
    resumes_last = values["ckpt_path"] == "last"
    record = recorded(values) if values["task"] in COMPARING_TASKS else {}
    checkpoint = resolve_ckpt_path(values, output_dir)
    if checkpoint is not None:
        adapter = recorded_adapter(values) if values["task"] != "export" else {}
        check_adapter(values, Path(checkpoint), adapter)
        if values["task"] in TAKING_TASKS:
            check_model(values, Path(checkpoint), typed)
    if checkpoint is not None and record:
        check_that_it_goes_on(values, Path(checkpoint), output_dir, record)
    values["ckpt_path"] = checkpoint
    values = with_sequence_parts(with_batch_parts(values, mesh.pp), mesh)
    if values["pp"] is not None and values["pp"]["schedule"].endswith(".csv"):
        values["pp"] = {**values["pp"], "schedule": str(Path(values["pp"]["schedule"]).absolute())}
    choices = {**chosen_options(hydra), "mesh": mesh.name}
    if values["task"] == "calibrate":
        from autolaunch.tasks.calibrate.job import calibration

        values, ranks = calibration(values, started_ranks)
    return ResolvedJob(
        values,
        output_dir,
        ranks,
        typed,
        __version__,
        choices,
        resumes_last=resumes_last,
        recorded=record,
        by_device=by_device,
        taken_from=checkpoint if takes_from_job(typed) else None,
        from_environment=from_environment(config),
    )


def _say_what_last_is(job: ResolvedJob) -> None:
    path = job.config["ckpt_path"]
    if job.resumes_last and path is not None and (line := what_last_is(Path(path), job.output_dir)) is not None:
        print(line, file=sys.stderr)


def _say_random_weights(job: ResolvedJob) -> None:
    """Where a model is asked about data that nobody has trained: its figures look like any others."""
    task = job.config["task"]
    if task in ("validate", "test", "predict") and begins_random(job.config):
        said = "neither ckpt_path nor model.path with model.pretrained names trained weights"
        print(f"warning: {task} runs on random weights: {said} (write: ckpt_path=last)", file=sys.stderr)


def hydra_node() -> DictConfig:
    """The `hydra` node of the job that Hydra is running."""
    node: Any = HydraConfig.get()  # declared as the dataclass of its schema
    return node


def chosen_options(hydra: DictConfig) -> dict[str, str]:
    """Config group -> the option that a job was composed with."""
    return {group: option for group, option in hydra.runtime.choices.items() if option is not None}


def typed_overrides(hydra: DictConfig) -> list[str]:
    """The overrides of a job as a person would type them."""
    overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return [unquoted(str(override)) for override in overrides]


def _output_dir(config: DictConfig, node: DictConfig) -> Path:
    """Where a run or a sweep writes: `output_dir`, or what its node of Hydra (`hydra.run`, `hydra.sweep`) says.

    Raises:
        ConfigError: it is no text, or `~` stands for nothing.
    """
    typed = config.get("output_dir")
    if typed is not None and (not isinstance(typed, str) or not typed.strip() or "\0" in typed):
        where = Origin(config.hydra)("output_dir", typed)
        path = "" if isinstance(typed, str) or OmegaConf.is_config(typed) else where.partition("=")[2]
        raise ConfigError(
            where,
            "names nothing" if isinstance(typed, str) else "is not read as a text",
            "the path of a directory",
            f"output_dir=./{path}" if path else "",
        )
    try:
        return Path(typed or node.dir).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"output_dir={typed or node.dir}", "there is no home directory of that name", "a path without ~"
        ) from None


def _claim(directory: Path, config: DictConfig, node: DictConfig) -> Path:
    """Create the directory of a run or a sweep; where its name is a time, one that nobody else has."""
    unresolved: Any = OmegaConf.to_container(node, resolve=False)
    named_by_time = config.get("output_dir") is None and "${now" in unresolved["dir"]
    candidate, number = directory, 1
    while True:
        try:
            candidate.mkdir(parents=True, exist_ok=not named_by_time)
            return candidate
        except OSError as error:
            if not isinstance(error, FileExistsError) or not named_by_time:
                reason = "is a file" if isinstance(error, FileExistsError) else f"cannot be created: {error.strerror}"
                raise ConfigError(f"output_dir={shown(directory)}", reason, "a directory that can be written") from None
            number += 1
            candidate = directory.with_name(f"{directory.name}_{number}")
