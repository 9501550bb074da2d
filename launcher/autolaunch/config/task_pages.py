"""What is said of each task beside its line in `TASKS`: the keys that matter to it, lines to type, where it writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskPage:
    """One task; what its keys mean stands in the schema."""

    keys: tuple[str, ...]
    """Groups, keys, and nodes of the schema, which stand for all keys below."""
    examples: tuple[tuple[str, str], ...]
    """(line, what it does)"""
    writes: str
    """In the directory of the run, unless another place is named."""


TASK_PAGES = {
    "fit": TaskPage(
        ("model", "data", "mesh", "data.batch_size", "trainer.max_steps", "optimizer.lr", "precision", "ckpt_path"),
        (
            ("autolaunch model=llama mesh=2 trainer.max_steps=200", "train on two ranks"),
            ("autolaunch mesh=auto model.size=1b", "on the mesh that the planner chooses for this machine"),
            ("autolaunch name=mine ckpt_path=last", "go on from the newest checkpoint of that name"),
        ),
        "checkpoints/, metrics.csv, summary.json, plan.yaml, logs/",
    ),
    "validate": TaskPage(
        ("ckpt_path", "data", "data.path", "mesh", "trainer.limit_val_batches"),
        (
            ("autolaunch validate ckpt_path=last", "the newest checkpoint of the runs of this name"),
            ("autolaunch validate ckpt_path=outputs/mine mesh=2", "that of a run's directory, on two ranks"),
            ("autolaunch validate name=mine ckpt_path=last data.path=other.txt", "on other data"),
        ),
        "summary.json, plan.yaml, logs/",
    ),
    "test": TaskPage(
        ("ckpt_path", "data", "data.test_path", "mesh", "trainer.limit_test_batches"),
        (
            (
                "autolaunch test ckpt_path=last data.test_path=test.txt",
                "the newest checkpoint of the runs of this name",
            ),
            ("autolaunch test ckpt_path=outputs/mine data.test_path=test.txt mesh=2", "that of a run's directory"),
            ("autolaunch -m test ckpt_path=outputs/a,outputs/b data.test_path=test.txt", "two runs, and a table"),
        ),
        "summary.json, plan.yaml, logs/",
    ),
    "predict": TaskPage(
        ("ckpt_path", "data", "data.path", "mesh", "trainer.limit_predict_batches"),
        (
            ("autolaunch predict ckpt_path=last", "the newest checkpoint of the runs of this name"),
            ("autolaunch predict ckpt_path=outputs/mine mesh=2", "that of a run's directory, on two ranks"),
            ("autolaunch predict ckpt_path=last output_dir=predicted", "in a directory of its own"),
        ),
        "predictions/, summary.json, plan.yaml, logs/",
    ),
    "lr_find": TaskPage(
        ("lr_find", "optimizer", "mesh"),
        (
            ("autolaunch lr_find mesh=2", "on two ranks; every mesh finds the same rate"),
            ("autolaunch lr_find lr_find.min=1e-5 lr_find.max=1e-2", "between two rates"),
            ("autolaunch lr_find lr_find.steps=200 data.batch_size=64", "in more steps, of the batch of the training"),
        ),
        "lr_find.csv, metrics.csv, summary.json, plan.yaml, logs/",
    ),
    "compare": TaskPage(
        ("compare", "mesh"),
        (
            ("autolaunch compare mesh=1,2x2x2", "one process and eight: where losses and gradient norms part"),
            ("autolaunch compare mesh=2 dp=ddp,fsdp compare.steps=20", "any key may have several values"),
            ("autolaunch compare outputs/one outputs/other", "two finished runs, by what they have logged"),
        ),
        "a directory for each job, with the files of fit; of finished runs, nothing",
    ),
    "generate": TaskPage(
        ("ckpt_path", "model.path", "generate", "mesh"),
        (
            ("autolaunch generate ckpt_path=last 'generate.prompts=[Hello]'", "with the newest checkpoint"),
            ("autolaunch generate model=hf model.path=DIRECTORY 'generate.prompts=[Hello]'", "with an exported model"),
            ("autolaunch generate ckpt_path=last 'generate.prompts=[Hello]' generate.temperature=0.8", "drawn"),
        ),
        "generated.jsonl, summary.json, logs/",
    ),
    "plan": TaskPage(
        ("mesh", "cluster", "dp", "mp", "pp", "cp", "recompute", "compile", "data.microbatches", "why", "full"),
        (
            ("autolaunch plan model.size=8b mesh=8 precision=bf16-mixed", "what a run with this line would do"),
            ("autolaunch plan model.size=8b cluster=h100x64", "the mesh, and all else that is not typed, chosen"),
            ("autolaunch plan model.size=8b cluster=h100x64 pp=1f1b mesh.pp=2 --why mp=4", "chosen beside these"),
        ),
        "plan.yaml (autolaunch +plan=PATH runs it), schedule.svg of a pipeline; with --full, pictures",
    ),
    "dryrun": TaskPage(
        ("mesh", "rank", "model", "data", "cluster"),
        (
            ("autolaunch dryrun mesh=dp2xmp2xpp2 data=synthetic", "the ranks that are unlike"),
            ("autolaunch dryrun mesh=dp64xmp8xpp2 model.size=70b data=synthetic data.batch_size=128 'rank=[0]'", "one"),
            ("autolaunch dryrun mesh=auto cluster=h100x64 model.size=8b data.batch_size=64", "the planner's mesh"),
        ),
        "dryrun.json, summary.json, logs/",
    ),
    "calibrate": TaskPage(
        ("cluster",),
        (
            ("autolaunch calibrate", "all devices of this machine"),
            ("autolaunch calibrate cluster=localx2", "two of them"),
            ("autolaunch plan cluster=local", "what is then planned with it"),
        ),
        "a cluster file in ~/.cache/autolaunch, which cluster=local reads",
    ),
    "export": TaskPage(
        ("ckpt_path", "export_path", "export_merged"),
        (
            ("autolaunch export ckpt_path=last", "the newest checkpoint of the runs of this name"),
            ("autolaunch export name=mine ckpt_path=last export_path=exported", "to a directory of its own"),
            ("autolaunch export ckpt_path=last export_merged=true", "with the adapter merged into the model"),
        ),
        "export/, or export_path; summary.json, logs/",
    ),
    "eval": TaskPage(
        ("eval", "ckpt_path"),
        (
            ("autolaunch eval ckpt_path=last 'eval.tasks=[hellaswag]'", "a checkpoint, which is exported first"),
            ("autolaunch eval eval.path=exported 'eval.tasks=[hellaswag,arc_easy]' eval.limit=100", "some questions"),
            ("autolaunch eval eval.path=exported 'eval.tasks=[mine]' eval.include_path=my_tasks", "tasks of your own"),
        ),
        "eval.json, summary.json, logs/",
    ),
}
"""In the order of `TASKS`."""
