"""Adapters in a model: names, initial values, what is trained and saved; and freezing by patterns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from autolaunch.config.schema import Adapter, Job
from autolaunch.models import build_module
from autolaunch.models.adapters import add_adapter, save_only
from autolaunch.models.hf_export import write_transformers_files
from autolaunch.tasks.export_adapter import MergedWeights, changed_ties, write_adapter
from autolaunch.tasks.run_parts import construct_module
from autolaunch.tasks.weight_files import weight_files
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.construction import Construction
from tests.support.messages import assert_told

LLAMA = {
    **{"name": "llama", "num_layers": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 32},
    **{"num_heads": 2, "num_kv_heads": 1},
}


def job(model: dict[str, Any] | None = None, **adapter: Any) -> dict[str, Any]:
    base = dataclasses.asdict(Job())
    keys = {**dataclasses.asdict(Adapter()), **adapter} if adapter else None
    return {**base, "model": LLAMA if model is None else model, "adapter": keys}


def built(config: dict[str, Any]) -> tuple[Any, Construction]:
    construction = Construction(config["seed"])
    with construction.recording():
        module = build_module(config)
    return module, construction


def test_every_linear_layer_but_the_head_gets_an_adapter_of_peft() -> None:
    peft = pytest.importorskip("peft")
    module, _ = built(job(name="lora", r=2, modules_to_save=["model.norm"]))
    model = module.model
    adapted = {name for name, part in model.named_modules() if isinstance(part, peft.tuners.lora.LoraLayer)}
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    assert adapted == {
        *(f"model.layers.{block}.self_attn.{name}" for block in range(2) for name in attention),
        *(f"model.layers.{block}.mlp.{name}" for block in range(2) for name in mlp),
    }
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == module.adapted.trained
    assert {name.split(".")[-4] for name in trained if "lora" in name} == {*attention, *mlp}
    assert {name for name in trained if "lora" not in name} == {"model.norm.modules_to_save.default.weight"}
    # A checkpoint holds what is trained, and nothing else.
    assert set(module.state_dict()) == {f"model.{name}" for name in trained}
    # The file of an adapter has the names that PEFT gives it around the same model.
    with torch.device("meta"):
        plain = build_module(job()).model
        config = peft.LoraConfig(r=2, target_modules=[*attention, *mlp], modules_to_save=["model.norm"])
        wrapped = peft.get_peft_model(plain, config)
        names = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    assert set(module.adapted.published) == set(names)
    assert set(module.adapted.published.values()) == trained
    assert set(module.adapted.base_names.values()) == set(build_module(job()).model.state_dict())


@pytest.mark.parametrize(
    ("keys", "where", "write"),
    [
        ({"target_modules": ["q_prj", "v_proj"]}, "adapter.target_modules=q_prj", "adapter.target_modules=[q_proj]"),
        ({"target_modules": "layers.0.q"}, "adapter.target_modules=layers.0.q", None),
        ({"modules_to_save": ["lm_haed"]}, "adapter.modules_to_save=lm_haed", "adapter.modules_to_save=[lm_head]"),
        ({"exclude": ["q_proj", "p_proj"]}, "adapter.exclude=p_proj", None),
        ({"target_parameters": ["experts.up"]}, "adapter.target_parameters=experts.up", None),
    ],
)
def test_a_name_that_is_nothing_is_refused(keys: dict[str, Any], where: str, write: str | None) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ConfigError) as error:
        built(job(name="lora", **keys))
    assert_told(error.value, where, "Llama", write=write)


def test_what_embedding_and_head_train_together_is_saved() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    module = lightning.LightningModule()
    module.model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("one", "last", "frozen")})
    module.model["last"].weight = module.model["one"].weight
    module.model["frozen"].requires_grad_(False)
    save_only(module, ["one.weight"])
    assert set(module.state_dict()) == {"model.one.weight", "model.last.weight"}


def test_a_layer_that_peft_cannot_adapt_is_refused() -> None:
    pytest.importorskip("peft")
    with pytest.raises(ConfigError) as error:
        built(job(name="lora", target_modules=["norm"]))
    assert_told(error.value, "adapter=lora", "RMSNorm")


def test_what_an_adapter_begins_from_is_computed_from_the_files(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    fields = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape = {**fields, "num_attention_heads": 2, "num_key_value_heads": 1}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    base.save_pretrained(tmp_path)
    model = {"name": "hf", "path": str(tmp_path), "pretrained": True, "mp_plans": {}}
    config = job(model, name="dora", r=2, modules_to_save=["lm_head"])

    class Strategy:
        construction: Any = None
        files: Any = None

    from lightning.pytorch.plugins.precision import Precision

    from autolaunch_strategies.model.materialise import materialise

    strategy: Any = Strategy()
    module: Any = construct_module(config, strategy, Precision(), torch.device("cpu"))
    strategy.construction.remember(module)
    materialise(module, torch.device("cpu"), strategy.construction, strategy.files)
    layer = module.model.model.layers[0].self_attn.q_proj
    weight = base.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(layer.base_layer.weight, weight)
    torch.testing.assert_close(layer.lora_magnitude_vector.default.weight, weight.norm(dim=1))
    torch.testing.assert_close(module.model.lm_head.modules_to_save.default.weight, base.lm_head.weight)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(module(ids), base(ids).logits)


# --- published adapters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "keys", "where", "write"),
    [
        ({"use_dora": True}, {}, "adapter.path={}", "adapter=dora"),
        ({"peft_type": "IA3"}, {}, "adapter.path={}", ""),
        ({"r": "x"}, {}, "adapter.path={}", ""),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "adapter.path={}", ""),
        ({"init_lora_weights": "olora"}, {}, "adapter.path={}", ""),
        ({"kasa_config": {"beta": 0.1}}, {}, "adapter.path={}", ""),
        ({"alora_invocation_tokens": [5, 9]}, {}, "adapter.path={}", ""),
        ({}, {"r": 4}, "adapter.r=4 with adapter.path={}", "adapter.r=null"),
        ({}, {"target_modules": ["v_proj"]}, "adapter.target_modules=[v_proj] with adapter.path={}", None),
    ],
)
def test_another_adapter_than_the_keys_say(
    fields: dict[str, Any], keys: dict[str, Any], where: str, write: str | None, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    from autolaunch.models.adapter_config import adapter_settings

    published = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], **fields}
    (tmp_path / "adapter_config.json").write_text(json.dumps(published))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError) as error:
        adapter_settings({**dataclasses.asdict(Adapter()), "path": str(tmp_path), **keys})
    assert_told(error.value, where.format(tmp_path), write=write)


def test_an_adapter_with_the_embedding_of_its_model_is_not_called_that_of_another(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=2))
    base.save_pretrained(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["embed_tokens"])).save_pretrained(tmp_path / "published")
    model = {"name": "hf", "path": str(tmp_path / "base"), "pretrained": True, "mp_plans": {}}
    config = job(model, name="lora", path=str(tmp_path / "published"))
    with pytest.raises(ConfigError) as error:
        weight_files(config, *built(config))
    assert_told(error.value, f"adapter.path={tmp_path / 'published'}", "embed_tokens.base_layer.weight", write="")


# --- freezing by patterns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "apart"),
    [
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, True),
        ({"modules_to_save": ["lm_head"]}, True),
        ({"target_modules": ["q_proj", "lm_head"]}, True),
        ({"target_modules": ["q_proj", "embed_tokens"]}, True),
        ({"target_modules": ["q_proj"]}, False),
    ],
)
def test_a_merged_model_has_what_an_adapter_made_of_a_shared_weight(
    keys: dict[str, Any], apart: bool, tmp_path: Path
) -> None:
    """Its embedding and its head are two matrices then, and its config says so."""
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    fields = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    shape = {**fields, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    torch.manual_seed(0)
    adapted = add_adapter(model, {**dataclasses.asdict(Adapter()), "name": "lora", "r": 2, **keys}, {"name": "hf"})
    with torch.no_grad():
        trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
        for item in trained.values():
            item.add_(torch.randn_like(item))
    in_memory: Any = SimpleNamespace(tensor=torch.detach)  # not a copy, as what is read from a mapped file
    run: Any = SimpleNamespace(model=model, adapted=adapted)
    weights = MergedWeights({"module": None, "model": {"name": "hf"}, "adapter": None}, run, in_memory, trained)
    assert weights.unties == apart and ("lm_head.weight" in weights.metas()) == apart
    save_file({name: weights.read(name).contiguous() for name in weights.metas()}, tmp_path / "model.safetensors")
    write_transformers_files(tmp_path, {"name": "hf"}, model, "float32", weights.unties)
    merged, model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval(), model.eval()
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) != apart
    ids = torch.arange(8)[None]
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)  # a sum of two products


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, "lm_head"),
        ({"trainable_token_indices": [1, 5]}, None),
        ({"lora_bias": True}, "q_proj has a bias"),
    ],
)
def test_what_other_adapters_of_peft_have_is_exported(
    fields: dict[str, Any], refused: str | None, tmp_path: Path
) -> None:
    """A weight that embedding and head both train, single rows of an embedding, biases that can't be merged."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    tied = "ensure_weight_tying" in fields
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=tied)
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    published = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], **fields))
    published.save_pretrained(tmp_path / "published")
    keys = {**dataclasses.asdict(Adapter()), "name": "lora", "path": str(tmp_path / "published")}
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted = add_adapter(model, keys, {"name": "hf"})
    with torch.no_grad():
        trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
        for item in trained.values():
            item.add_(torch.randn_like(item))
    write_adapter(tmp_path, adapted, {name: item.detach() for name, item in trained.items()})
    ids = torch.arange(8)[None]
    expected = model.eval()(ids).logits
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, expected)
    in_memory: Any = SimpleNamespace(tensor=torch.detach)
    run: Any = SimpleNamespace(model=model, adapted=adapted)
    plain = {"module": None, "model": {"name": "hf"}, "adapter": None}
    if refused is not None:
        with pytest.raises(ConfigError) as caught:
            MergedWeights(plain, run, in_memory, trained)
        assert_told(caught.value, "export_merged=true", refused, write="export_merged=false")
        return
    weights = MergedWeights(plain, run, in_memory, trained)
    merged = transformers.LlamaForCausalLM(config)
    merged.load_state_dict({name: weights.read(name) for name in weights.metas()})
    torch.testing.assert_close(merged.eval()(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_merged_model_has_the_types_of_its_files(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=2))
    base.bfloat16().save_pretrained(tmp_path)
    model = {"name": "hf", "path": str(tmp_path), "pretrained": True, "mp_plans": {}}
    config = job(model, name="lora", modules_to_save=["lm_head"])
    module, construction = built(config)
    trained = {name: torch.ones(item.shape) for name, item in module.model.named_parameters() if item.requires_grad}
    weights = MergedWeights(config, module, construction, trained)
    assert {weights.read(name).dtype for name in weights.metas()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "keys", [{"target_modules": ["one"]}, {"target_modules": ["last"], "modules_to_save": ["around"]}]
)
def test_an_adapter_of_what_others_share_is_not_merged(keys: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("one", "last")})
    model["around"] = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    model["around"][0].weight = model["one"].weight
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, **keys), model)
    with pytest.raises(ConfigError) as caught:
        changed_ties(model)
    assert_told(caught.value, "export_merged=true", "around.0, one share", write="export_merged=false")


def test_an_adapter_names_the_model_of_the_hub_and_not_this_machines_cache() -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    fields = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    snapshot = f"/home/me/.cache/huggingface/hub/models--own--tiny/snapshots/{'a1' * 20}"
    for path, expected in ((snapshot, ("own/tiny", "a1" * 20)), ("/models/tiny", ("/models/tiny", None))):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, num_attention_heads=2))
        config = add_adapter(model, dataclasses.asdict(Adapter()), {"name": "hf", "path": path}).config
        assert (config.base_model_name_or_path, config.revision) == expected


def test_only_what_is_named_is_trained() -> None:
    module, _ = built(job({**LLAMA, "trainable": ["lm_head", "model.layers.1", ".*layernorm"]}))
    trained = {name for name, parameter in module.model.named_parameters() if parameter.requires_grad}
    assert trained == {
        name
        for name, _ in module.model.named_parameters()
        if name.startswith(("lm_head.", "model.layers.1.")) or "layernorm" in name
    }
    assert len(module.state_dict()) == len(list(module.model.parameters()))  # all of it is in checkpoints


def test_tied_weights_are_trained_under_each_of_their_names() -> None:
    module, _ = built(job({**LLAMA, "tie_embeddings": True, "trainable": ["lm_head"]}))
    assert [name for name, part in module.model.named_parameters() if part.requires_grad] == [
        "model.embed_tokens.weight"
    ]


@pytest.mark.parametrize(("pattern", "write"), [("lm_haed", "model.trainable=[lm_head]"), ("layers.(1", None)])
def test_patterns_of_nothing_are_refused(pattern: str, write: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        built(job({**LLAMA, "trainable": [pattern]}))
    assert_told(error.value, f"model.trainable: {pattern}", write=write)
