"""A resolved job composes again: from the job of its run, below a checkpoint, and from its plan.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose
from autolaunch.config.schema import DATA
from autolaunch.config.sources import TAKEN
from autolaunch.job import ResolvedJob
from autolaunch.jobs.run import resolve_job
from autolaunch.models.hf_tasks import MODEL_TASKS
from autolaunch.report.plan_file import write_plan
from tests.support.chats import save_tokenizer
from tests.support.tiers import one_in

pytest.importorskip("transformers")

LLAMA = "model.config={model_type: llama, vocab_size: 300, hidden_size: 32, num_hidden_layers: 2}"
PADDED = LLAMA.replace("}", ", pad_token_id: 0}")
CLASSES = ["model=hf", "model.task=sequence_classification", LLAMA]
TYPED = {
    "text": ["data.path=rows.jsonl"],
    "tokens": ["data.path=tokens.npy"],
    "synthetic": [],
    "documents": ["data.path=rows.jsonl"],
    "chat": ["data.path=rows.jsonl", "data.tokenizer=tokenizer"],
    "classification": ["data.path=rows.jsonl", "model.num_labels=3", *CLASSES],
    "custom": ["data._target_=collections.OrderedDict"],
}
"""Data -> what they cannot do without."""

JOBS = {
    **{f"data={name}": [f"data={name}", *words] for name, words in TYPED.items()},
    "names-of-classes": ["data=classification", "data.path=rows.jsonl", "data.classes=[no,yes,maybe]", *CLASSES],
}
TASKS = {task: ["model=hf", f"model.task={task}", PADDED, "data=custom", *TYPED["custom"]] for task in MODEL_TASKS}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("workplace")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "what"}]
    rows = [{"text": "hello what", "label": number % 3, "messages": messages} for number in range(40)]
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    np.save(directory / "tokens.npy", np.arange(9000, dtype=np.uint16) % 250)
    save_tokenizer(directory / "tokenizer")
    return directory


def resolved_job(directory: Path, *argv: str) -> ResolvedJob:
    composed = compose(parse(argv))
    assert composed.errors == []
    return resolve_job(composed.config, composed.config.hydra, directory, origin=composed.origin)


def plain(job: ResolvedJob) -> dict[str, Any]:
    """What every rank reads of it, without what belongs to one run."""
    config = json.loads(job.to_json())["config"]
    return {key: value for key, value in config.items() if key not in ("task", "output_dir")}


def test_all_data_are_looked_at() -> None:
    assert TYPED.keys() == DATA.keys()


@pytest.mark.parametrize(
    "typed",
    [
        *(pytest.param(words, id=name) for name, words in JOBS.items()),
        *one_in(4, [pytest.param(words, id=f"model.task={name}") for name, words in TASKS.items()]),
    ],
)
def test_a_resolved_job_composes_again(
    typed: list[str], workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    job = resolved_job(tmp_path, "mesh=1", *typed)
    plan = write_plan(tmp_path, job.config, {"order": []}, job.choices)
    assert plain(resolved_job(tmp_path, f"experiment={plan}")) == plain(job)
    again = plain(resolved_job(tmp_path, "validate", f"experiment={job.write()}"))
    assert {key: again[key] for key in TAKEN} == {key: plain(job)[key] for key in TAKEN}


def test_a_plan_that_was_written_with_what_is_made_of_other_keys(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As runs of earlier versions left it."""
    monkeypatch.chdir(workplace)
    job = resolved_job(tmp_path, "mesh=1", *JOBS["data=classification"])
    plan = write_plan(tmp_path, job.config, {"order": []}, job.choices)
    assert "of_model" not in plan.read_text()
    plan.write_text(plan.read_text().replace("\ndata:\n", "\ndata:\n  of_model: [3, single_label_classification, 0]\n"))
    assert plain(resolved_job(tmp_path, f"experiment={plan}")) == plain(job)
