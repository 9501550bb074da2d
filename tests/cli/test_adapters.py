"""Runs that train an adapter, or part of a model: on every mesh as on one process, resumed, exported, gone on with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from autolaunch.cli import run
from autolaunch_strategies.checkpoint.files import write_manifest
from autolaunch_strategies.checkpoint.storage import Reader
from tests.support.commands import Commands, Run, assert_same_curve
from tests.support.messages import Told, assert_only_told

pytestmark = pytest.mark.timeout(900)

ADAPTER = ("adapter=dora", "adapter.r=4", "adapter.modules_to_save=[lm_head]")
STEPS = 4


# --- refused before anything starts ------------------------------------------------------------------------------


def _checkpoint(directory: Path, **record: object) -> Path:
    path = directory / "step_0000005.ckpt"
    path.mkdir(parents=True)
    (path / "meta.pt").write_bytes(b"x")
    write_manifest(path, 5, "2", run=record)
    return path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["adapter=lora", "adapter.r=0"], Told("adapter.r=0", allowed="1 or more")),
        (
            ["adapter=lora", "adapter.target_modules=[q_prj]"],
            Told("adapter.target_modules=q_prj", "q_proj", write="adapter.target_modules=[q_proj]"),
        ),
        (
            ["adapter=lora", "adapter.modules_to_save=[lm_haed]"],
            Told("adapter.modules_to_save=lm_haed", write="adapter.modules_to_save=[lm_head]"),
        ),
        (
            ["adapter=lora", "adapter.target_modules=[]"],
            Told("adapter.target_modules=[]", write="adapter.target_modules=all-linear"),
        ),
        (["adapter=lora", "adapter.path=nowhere"], Told("adapter.path=nowhere", "directory")),
        (
            ["adapter=lora", "model.trainable=[lm_head]"],
            Told("model.trainable=[lm_head] with adapter=lora", write="model.trainable=null"),
        ),
        (["model.trainable=[]"], Told("model.trainable=[]", write="model.trainable=null")),
        (["export_merged=true"], Told("export_merged=true", "fit", write="export_merged=false")),
        (
            ["adapter=lora", "module={_target_: json.JSONDecoder}"],
            Told("adapter=lora", "LightningModule", write="adapter=none"),
        ),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "adapter=lora" in arguments:
        pytest.importorskip("peft")
    assert run([f"output_dir={tmp_path / 'run'}", "mesh=2", "trainer.accelerator=cpu", *arguments]) == 2
    assert_only_told(capsys.readouterr().err, told)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("library", "adapter", "extra"), [("peft", "lora", "peft"), ("bitsandbytes", "qlora", "qlora")]
)
def test_without_a_library_the_line_that_installs_it_is_told(
    library: str, adapter: str, extra: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    pytest.importorskip("peft")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == library else find(name, *rest))
    assert run([f"output_dir={tmp_path / 'run'}", f"adapter={adapter}"]) == 2
    write = f"pip install 'autolaunch[{extra}]'"
    assert_only_told(capsys.readouterr().err, Told(f"adapter={adapter}", library, write=write))


def test_where_weights_of_four_bits_would_be_destroyed_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    peft = pytest.importorskip("peft").__spec__
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: peft if name == "bitsandbytes" else find(name))
    common = [f"output_dir={tmp_path / 'run'}", "trainer.accelerator=cpu", "adapter=qlora"]
    assert run([*common, "mesh=1x2"]) == 2
    assert_only_told(capsys.readouterr().err, Told("adapter=qlora with mesh=1x2", "cut along mp", write="mesh=2"))
    assert run([*common, "mesh=2", "dp.param_dtype=bf16"]) == 2
    told = Told("adapter=qlora with dp.param_dtype=bf16", write="dp.param_dtype=null precision=bf16-true")
    assert_only_told(capsys.readouterr().err, told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["adapter=lora", "adapter.target_modules=[c_atn]"],
            Told("adapter.target_modules=c_atn", "GPT2LMHeadModel", write="adapter.target_modules=[c_attn]"),
        ),
        (
            ["adapter=lora", "adapter.modules_to_save=[wtee]"],
            Told("adapter.modules_to_save=wtee", "GPT2LMHeadModel", write="adapter.modules_to_save=[wte]"),
        ),
        (["model.trainable=[lm_haed]"], Told("model.trainable: lm_haed", "lm_head", write="model.trainable=[lm_head]")),
    ],
)
def test_names_that_only_the_model_knows_are_refused_before_processes_start(
    arguments: list[str], told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr("autolaunch.jobs.restarts.run", lambda *_, **__: pytest.fail("processes would start"))
    sizes = "n_embd:8,n_layer:1,n_head:2,vocab_size:64,n_positions:16,bos_token_id:1,eos_token_id:2"
    model = f"model.config={{model_type:gpt2,{sizes}}}"
    data = ["data=synthetic", "data.vocab_size=64", "data.seq_len=16"]
    common = [f"output_dir={tmp_path / 'run'}", "mesh=2", "trainer.accelerator=cpu", "model=hf", model, *data]
    assert run([*common, *arguments]) == 2
    assert_only_told(capsys.readouterr().err, told)


LORA = {"kind": "lora", "r": 8, "alpha": 16.0, "target_modules": "all-linear"}
LORA |= {"target_parameters": [], "modules_to_save": [], "exclude": []}


@pytest.mark.parametrize("task", ["fit", "validate"])
def test_checkpoints_of_adapters_and_of_whole_models_are_not_mixed_up(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = _checkpoint(tmp_path / "adapter", adapter=LORA, base={"seed": 0}, base_path="/models/base")
    whole = _checkpoint(tmp_path / "whole", seed=0)
    common = [task, f"output_dir={tmp_path / 'run'}", "mesh=2", "trainer.accelerator=cpu"]
    assert run([*common, f"ckpt_path={adapter}"]) == 2
    line = "adapter=lora adapter.r=8 adapter.alpha=16.0 adapter.target_modules=all-linear model=hf"
    told = Told(f"ckpt_path={adapter}", "adapter alone", write=f"{line} model.path=/models/base")
    assert_only_told(capsys.readouterr().err, told)
    pytest.importorskip("peft")
    assert run([*common, "adapter=lora", f"ckpt_path={whole}"]) == 2
    assert_only_told(capsys.readouterr().err, Told(f"ckpt_path={whole}", "a whole model", write=None))
    assert run([*common, "adapter=lora", "adapter.alpha=3", "seed=2", f"ckpt_path={adapter}"]) == 2
    said = capsys.readouterr().err
    assert "alpha 16.0 there, 3.0 here" in said and "seed 0 there, 2 here" in said
    assert run(["export", "export_merged=true", f"ckpt_path={whole}", f"output_dir={tmp_path / 'run'}"]) == 2
    assert_only_told(capsys.readouterr().err, Told("export_merged=true", "whole model", write="export_merged=false"))


# --- runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Runs commands on a small pretrained model, `base`."""
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory / "base")
    return Commands(
        directory, "model=hf", "model.path=base", "data=synthetic", "data.vocab_size=64", "data.seq_len=32",
        "data.batch_size=8", "trainer.accelerator=cpu", "scheduler=constant", "optimizer.lr=0.01",
        f"trainer.max_steps={STEPS}", timeout=400,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(command: Commands) -> Run:
    return command("mesh=1", *ADAPTER)


MESHES = [
    ("mesh=2", "recompute=full"),
    ("mesh=1x1x2", "pp=1f1b"),
    # Of test_adapter_meshes.py each has a smaller one.
    *(
        pytest.param(mesh, marks=pytest.mark.every)
        for mesh in (
            ("mesh=2", "dp=ddp"),
            ("mesh=1x2",),
            ("mesh=1x2", "mp=seq_parallel", "recompute=selective"),
            ("mesh=1x1x1x2",),
        )
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=" ".join)
def test_a_pretrained_model_is_adapted_alike_on_every_mesh(
    mesh: tuple[str, ...], command: Commands, alone: Run, tmp_path: Path
) -> None:
    other = command(*mesh, *ADAPTER)
    assert_same_curve(other, alone)
    expected, found = (_adapter(command, item, tmp_path / str(place)) for place, item in enumerate((alone, other)))
    assert found.keys() == expected.keys() and len(found) == 2 * 7 * 3 + 1
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


def _adapter(command: Commands, of: Run, directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    from autolaunch.config.trained import trained_config
    from autolaunch.tasks.export import export_checkpoint

    config = trained_config(of.checkpoint)
    assert config is not None
    config["model"]["path"] = str(command.directory / config["model"]["path"])
    export_checkpoint(of.checkpoint, directory, config)
    return load_file(directory / "adapter_model.safetensors")


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            ("model=llama", "model.num_layers=2", "model.vocab_size=64", "adapter=lora"), id="llama",
            marks=pytest.mark.every,
        ),
        pytest.param(
            (
                "model=hf", "model.path=null", "adapter=lora",
                "adapter.target_parameters=[experts.gate_up_proj,experts.down_proj]",
                "model.config={model_type:mixtral,vocab_size:64,hidden_size:32,intermediate_size:32,"
                "num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2,num_local_experts:4}",
            ),
            id="experts",
            marks=pytest.mark.every,
        ),
        pytest.param(("model=hf", "model.trainable=[lm_head,.*norm]"), id="trainable", marks=pytest.mark.every),
    ],
)  # fmt: skip
def test_other_models_are_trained_in_part_alike(model: tuple[str, ...], command: Commands, tmp_path: Path) -> None:
    small = ("model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4", "model.num_kv_heads=2")
    keys = (*model, *(small if model[0] == "model=llama" else ()))
    plain = Commands(tmp_path, *command.always[2:], timeout=400)
    if model[1].startswith("model.trainable"):
        plain = command
    expected = plain("mesh=1", *keys, "trainer.max_steps=3")
    for mesh in ("mesh=2", "mesh=1x2", "mesh=1x1x2"):
        assert_same_curve(plain(mesh, *keys, "trainer.max_steps=3"), expected)


@pytest.mark.full
def test_resumed_on_another_mesh_exported_and_gone_on_with(command: Commands, alone: Run, tmp_path: Path) -> None:
    import peft
    import transformers

    half = command("mesh=1x2", *ADAPTER, f"trainer.max_steps={STEPS // 2}")
    stored = Reader(half.checkpoint, False).read_metadata().state_dict_metadata
    assert len([name for name in stored if name.startswith("model.")]) == 2 * 7 * 3 + 1  # what is trained, and no more
    assert not any(".base_layer." in name or ".original_module." in name for name in stored)
    assert_same_curve(command("mesh=2", *ADAPTER, f"ckpt_path={half.checkpoint}"), alone, after=STEPS // 2)
    command("validate", "mesh=2", f"ckpt_path={half.directory}")  # its adapter is that of its job

    published, merged = tmp_path / "adapter", tmp_path / "merged"
    command("export", f"ckpt_path={alone.checkpoint}", f"export_path={published}")
    command("export", f"ckpt_path={alone.checkpoint}", f"export_path={merged}", "export_merged=true")
    ids = torch.arange(40).view(2, 20) * 3 % 64
    base = transformers.AutoModelForCausalLM.from_pretrained(command.directory / "base")
    before = base(ids).logits.detach()
    adapted = peft.PeftModel.from_pretrained(base, published).eval()(ids).logits
    assert (adapted - before).abs().max() > 0.1
    whole, info = transformers.AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(whole.eval()(ids).logits, adapted)

    again = ("adapter=dora", f"adapter.path={published}", "trainer.max_steps=2")
    from_published = command("mesh=1", *again)
    assert from_published.rows[0]["loss"] < alone.rows[-1]["loss"] + 0.1 < alone.rows[0]["loss"]
    assert_same_curve(command("mesh=1x2", *again), from_published)


@pytest.mark.full
def test_weights_of_four_bits_are_trained_beside_resumed_on_another_mesh_and_exported(
    command: Commands, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="weights of four bits are bitsandbytes'")
    import transformers

    qlora = ("adapter=qlora", "adapter.r=4")
    alone = command("mesh=1", *qlora)
    assert alone.rows[-1]["loss"] < alone.rows[0]["loss"] and alone.rows[0]["grad_norm"] > 0
    half = command("mesh=2", *qlora, f"trainer.max_steps={STEPS // 2}")
    assert_same_curve(command("mesh=1x1x2", *qlora, f"ckpt_path={half.checkpoint}"), alone, after=STEPS // 2)
    merged = tmp_path / "merged"
    command("export", f"ckpt_path={alone.checkpoint}", f"export_path={merged}", "export_merged=true")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(info.values())
