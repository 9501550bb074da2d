"""What people type who come from elsewhere: every slip is answered with the line to write, or by what was meant."""

from __future__ import annotations

import shlex

import pytest
from omegaconf import OmegaConf

from autolaunch import cli
from autolaunch.config.against_schema import field_types
from autolaunch.config.command_line import parse, typed_keys
from autolaunch.config.compose import compose
from autolaunch.config.help import known_keys
from autolaunch.config.schema import TASKS, Job
from autolaunch.config.slips import _LINES, shape_meant, slip
from autolaunch.config.task_pages import TASK_PAGES
from autolaunch_strategies.config import ConfigError


@pytest.mark.parametrize(
    ("typed", "write"),
    [
        ("tp=2", "mesh=tp2"),
        ("dp=8", "mesh=dp8"),
        ("pp=-1", "mesh=pp-1"),
        ("tp=two", None),
        ("trainer.strategy=ddp", "dp=ddp"),
        ("strategy=fsdp", "dp=fsdp"),
        ("trainer.strategy=ddp_find_unused_parameters_true", "dp=ddp"),
        ("trainer.strategy=deepspeed_stage_2_offload", "dp=zero2"),
        ("trainer.strategy=deepspeed_stage_3", "dp=fsdp"),
        ("trainer.strategy=horovod", ""),
        ("model.size=8b", None),
        ("mesh.tp=2", "mesh.mp=2"),
        ("parallelism.tensor_parallel_degree=2", "mesh=mp2"),
        ("tensor_parallel=2", "mesh=mp2"),
        ("tensor_parallel=true", None),
        ("pipeline_parallel=2", "mesh=pp2"),
        ("context_parallel=2", "mesh=cp2"),
        ("data_parallel=2", "mesh=dp2"),
        ("expert_parallel=2", "ep=2"),
        ("nodes=2", "launch=slurm launch.nodes=2"),
        ("num_processes=8", "mesh=8"),
        ("data_parallel_replicate_degree=2", "dp=hsdp dp.replicate=2"),
        ("zero_stage=2", "dp=zero2"),
        ("zero_optimization.stage=3", "dp=fsdp"),
        ("fsdp=shard_grad_op", "dp=zero2"),
        ("bf16=true", "precision=bf16-mixed"),
        ("mixed_precision=fp8", "precision=float8"),
        ("activation_checkpoint.mode=selective", "recompute=selective"),
        ("gradient_checkpointing=true", "recompute=full"),
        ("training.steps=100", "trainer.max_steps=100"),
        ("gradient_accumulation_steps=4", "data.microbatches=4"),
        ("per_device_train_batch_size=4", "data.batch_size=..."),
        ("lr_scheduler_type=constant_with_warmup", "scheduler=constant"),
        ("report_to=wandb", "logger=wandb"),
        ("report_to=none", None),
        ("gpus=[0,1]", "mesh=2"),
        ("resume_from_checkpoint=true", "ckpt_path=last"),
        ("resume=runs/a/last.ckpt", "ckpt_path=runs/a/last.ckpt"),
        ("model=meta-llama/Llama-3-8B", "model=hf model.path=meta-llama/Llama-3-8B"),
        ("job.config_file=llama3_8b.toml", None),
        ("fsdp=false", "dp=ddp"),
        ("cpu_offload=false", None),
        ("use_lora=False", None),
        ("lora=true", "adapter=lora"),
        ("sequence_parallel=false", None),
        ("lora.r=4", "adapter=lora adapter.r=4"),
        ("lora.rank=4", "adapter=lora adapter.r=4"),
        ("adapter.rank=4", "adapter=lora adapter.r=4"),
        ("data=txt", None),
        ("data=all.txt", "data=text data.path=all.txt"),
        ("mesh=2xdp2", ""),
        ("mesh=2xmp2xtp2", ""),
        ("mesh=mp2xtp2", None),
    ],
)
def test_keys_of_other_tools(typed: str, write: str | None) -> None:
    error = slip(typed, *typed.split("="))
    assert (error.write if error else None) == write


def test_a_plan_is_asked_for_nodes_by_its_cluster() -> None:
    error = slip("nodes=2", "nodes", "2", {"task": "plan"})
    assert error is not None and error.write == "cluster=h100x16" and "cluster.nodes=2" in error.allowed
    error = slip("nodes=2", "nodes", "2", {"task": "plan", "cluster": {"name": "a100"}})
    assert error is not None and error.write == "cluster.nodes=2"


def test_an_adapter_that_is_chosen_stays() -> None:
    error = slip("adapter.rank=4", "adapter.rank", "4", {"adapter": {"name": "dora"}})
    assert error is not None and error.write == "adapter.r=4"
    with pytest.raises(ConfigError) as raised:
        parse(["plan", "--nodes", "2"])
    assert raised.value.write == "cluster=h100x16"


def test_a_size_without_a_name_beside_one_of_dp() -> None:
    error = slip("mesh=2xdp2", "mesh", "2xdp2")
    assert error is not None and "dp is given twice" in error.problem and "dp2xmp2" in error.allowed


def test_who_asks_for_fp16_is_told_that_it_is_bf16() -> None:
    error = slip("fp16=true", "fp16", "true")
    assert error is not None and (error.write, error.allowed[:16]) == ("precision=bf16-mixed", "there is no fp16")


def test_a_command_line_full_of_slips(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tp=2", "pp=4", "trainer.strategy=ddp"]) == 2
    said = capsys.readouterr().err
    assert all(f"write:   {line}\n" in f"{said}\n" for line in ("mesh=tp2", "mesh=pp4", "dp=ddp"))


@pytest.mark.parametrize(
    ("words", "page", "absent"),
    [
        (["help"], "autolaunch [task] [group=option] [key=value]", "Traceback"),
        (["help", "fit"], "autolaunch fit: train the model", "[key=value]"),
        (["plan", "--help"], "--why mp=4", "[key=value]"),
        (["plan", "mesh=2", "--help"], "autolaunch plan: show", "[key=value]"),
        (["lr_find", "cluster=h100x8", "--help"], "lr_find.steps", "[key=value]"),
        (["help", "trainer"], "trainer.max_steps", "model.size"),
        (["fit", "help", "trainer"], "trainer.max_steps", "model.size"),
        (["--help", "trainer"], "trainer.max_steps", "model.size"),
        (["--help", "model=llama", "mesh=2"], "autolaunch [task] [group=option] [key=value]", "Traceback"),
        (["--info", "model=hf"], "model.path", "model.hidden_size"),
        (["--info", "model"], "model.hidden_size", "Traceback"),
        (["--info", "cluster=h100x16"], "cluster.nodes", "Traceback"),
        (["--info", "mesh=2x4"], "mesh.order", "Traceback"),
    ],
)
def test_pages(words: list[str], page: str, absent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 0
    said = capsys.readouterr().out
    assert page in said and absent not in said


def test_every_task_has_a_page_and_what_it_names_is_there() -> None:
    assert list(TASK_PAGES) == list(TASKS)
    known = {*known_keys()}
    for task, page in TASK_PAGES.items():
        assert known.issuperset(page.keys) and len(page.examples) == 3
        for example, _ in page.examples:
            words = shlex.split(example)[1:]
            if words == ["compare", "outputs/one", "outputs/other"]:
                continue  # directories of runs, and no keys
            typed = typed_keys(parse(words).overrides)
            assert known.issuperset(typed), example
            assert typed.get("task", "fit") == task or example == "autolaunch plan cluster=local"


@pytest.mark.parametrize(
    ("words", "write"),
    [
        (["fit", "plan"], "autolaunch plan"),
        (["fit", "mesh=2", "plan"], "autolaunch plan mesh=2"),
        (["mesh=2", "plan"], "autolaunch plan mesh=2"),
        (["train"], "autolaunch fit"),
        (["2x2"], "mesh=2x2"),
        (["2xmp2"], "mesh=dp2xmp2"),
        (["bf16"], "precision=bf16-mixed"),
        (["trainer.max_steps", "3"], "trainer.max_steps=3"),
        (["mesh", "=", "2"], "mesh=2"),
        (["fit", "train.yaml"], "experiment=train.yaml"),
        (["--tp", "2"], "mesh=tp2"),
        (["--tensor-model-parallel-size", "2", "mesh=4"], "mesh=mp2"),
        (["--nproc-per-node=2"], "mesh=2"),
        (["--bf16", "mesh=2"], "precision=bf16-mixed"),
        (["--trainer.max_steps", "3"], "autolaunch trainer.max_steps=3"),
        (["-mesh=2"], "autolaunch mesh=2"),
        (["-multirun", "mesh=1,2"], "autolaunch --multirun mesh=1,2"),
        (["--m", "mesh=1,2"], "autolaunch -m mesh=1,2"),
        (["--cofig-dir", "conf", "mesh=2"], "autolaunch --config-dir conf mesh=2"),
        (["\u2014help"], "autolaunch --help"),
        (["\u2013m", "mesh=1,2"], "autolaunch -m mesh=1,2"),
        (["\u2014mesh=2"], "autolaunch mesh=2"),
        (["info", "model=hf"], "autolaunch --info model=hf"),
        (["version"], "autolaunch --version"),
        (["--help=trainer"], "autolaunch --help trainer"),
        (["-m=mesh=1,2"], "autolaunch -m mesh=1,2"),
        (["plan", "cluster=local", "--full=true"], "autolaunch plan cluster=local --full"),
        (["mesh:2"], "mesh=2"),
        (["mesh:", "2"], "mesh=2"),
        (["data.seq_len: 8"], "data.seq_len=8"),
    ],
)
def test_words_in_the_wrong_place(words: list[str], write: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(words)
    assert write in raised.value.write


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("tp2,pp2", "tp2xpp2"),
        ("dp=2", "dp2"),
        ("{dp:2,tp:2}", "dp2xtp2"),
        ("(2, 2)", "2x2"),
        ("8*2", "8x2"),
        ("dp2,dp4", ""),
        ("2,4", ""),
        ("3xmp2", "dp3xmp2"),
        ("2xpp-1", "dp2xpp-1"),
        ("2xdp2", ""),
    ],
)
def test_shapes_with_other_signs(value: str, meant: str) -> None:
    assert shape_meant(value) == meant


def test_axes_in_a_list_are_one_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["mesh=tp2,pp2"]) == 2
    assert "write:   mesh=tp2xpp2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "write"),
    [
        ("mesh=fsdp2", "dp=fsdp"),
        ("mp=fsdp", "dp=fsdp"),
        ("model=lora", "adapter=lora"),
        ("cluster.nodes=2", "cluster=h100x8 cluster.nodes=2"),
        ("launch=torchrun", "torchrun --nproc-per-node 2 -m autolaunch mesh=2"),
        ("optimizer=adamw8bit", "optimizer=custom optimizer._target_=torchao.optim.AdamW8bit"),
        ("optimizer=torch.optim.RMSprop", "optimizer=custom optimizer._target_=torch.optim.RMSprop"),
        ("model=gpt2", "model=hf model.path=OWNER/gpt2"),
        ("data=wikitext", "data=documents data.path=OWNER/wikitext"),
        ("data=txt", "data=text"),
        ("data=chats.jsonl", "data=documents data.path=chats.jsonl"),
        ("data=texts/all.txt", "data=text data.path=texts/all.txt"),
        ("data=train.bin", "data=tokens data.path=train.bin"),
        ("mesh=2x", "mesh=2"),
        ("mesh=2x0", "mesh=2x1"),
        ("mesh=8*2", "mesh=8x2"),
        ("\u201cmesh=2\u201d", "mesh=2"),
        ("name=\u201cmine\u201d", "name=mine"),
        ("name=\u201cmy run, the first\u201d", "'name=\"my run, the first\"'"),
        ("name=it\u2019s", "'name=\"it\u2019s\"'"),
    ],
)
def test_what_no_option_is_called(typed: str, write: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([typed]) == 2
    assert f"write:   {write}\n" in capsys.readouterr().err


def test_groups_of_hydra_have_no_classes_of_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["hydra/launcher=mine.Launcher"]) == 2
    assert "allowed: basic" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "page"), [("tp", "mp"), ("sp", "mp"), ("ddp", "dp"), ("num_nodes", "launch.nodes")])
def test_pages_of_what_other_tools_call_otherwise(typed: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--info", typed]) == 2
    assert f"write:   autolaunch --info {page}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "allowed", "write"),
    [
        ("model=gpt", "custom, hf, llama", "model=hf model.path=OWNER/gpt"),
        ("dp=zero9", "ddp, fsdp, hsdp, zero1, zero2", "autolaunch --info dp=zero2"),
        ("mesh=2x", "", "autolaunch --info mesh=2"),
        ("cluster=h101", "h100xN", "autolaunch --info cluster=h100"),
        ("callbacks=ema2", "ema, ", "autolaunch --info callbacks=ema"),
    ],
)
def test_pages_of_options_that_are_none(
    typed: str, allowed: str, write: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["--info", typed]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"--info {typed}: ") and allowed in said and f"write:   {write}\n" in said


@pytest.mark.parametrize(
    ("package", "write"),
    [
        ("zzzz", "autolaunch --cfg job"),
        ("optimiser", "autolaunch --cfg job --package optimizer"),
        ("model.sise", "autolaunch --cfg job --package model.size"),
        ("hydra.job", "autolaunch --cfg job"),
    ],
)
def test_a_package_that_is_none(package: str, write: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--cfg", "job", "--package", package]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"--package {package}: ")
    assert f"write:   {write}\n" in said.err and "not found in config" not in said.err


@pytest.mark.parametrize(("package", "printed"), [("adapter", "null\n"), ("data.microbatches", "1\n")])
def test_a_package_without_keys(package: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--cfg", "job", "-p", package]) == 0
    assert capsys.readouterr().out == printed


def test_a_name_in_other_letters(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimizer=AdamW"]) == 2
    assert "write:   optimizer=adamw" in capsys.readouterr().err


def test_every_line_for_another_tool_has_keys_that_there_are() -> None:
    typed = ["adapter=lora", "dp=hsdp", "mesh=pp2", "launch=slurm", "scheduler=cosine", "optimizer=adamw"]
    config = compose(parse(typed)).config
    assert config is not None
    known = {*field_types(Job), "model.path", "experiment"}
    for line in _LINES.values():
        for key in (word.partition("=")[0] for word in line.split()):
            assert key in known or OmegaConf.select(config, key, default="absent") != "absent", line


def test_full_needs_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "mesh=2", "--full"]) == 2
    assert "write:   cluster=local --full" in capsys.readouterr().err
