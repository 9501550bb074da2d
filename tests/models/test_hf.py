"""model=hf: families of transformers from a config, and pretrained weights read piece by piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from autolaunch.models import build_model
from autolaunch.models.conversion import as_in_files
from autolaunch.models.documents import check_keeps_documents_apart
from autolaunch.models.facts import ModelFacts, model_facts
from autolaunch.models.hf_export import write_transformers_files
from autolaunch.models.language_model import LanguageModel
from autolaunch.models.llama import Llama
from autolaunch.models.llama_config import llama_config
from autolaunch.models.pretrained import SafetensorsWeights
from autolaunch.tasks.export import _write_shards
from autolaunch_strategies.config import ConfigError
from tests.experts.cases import made
from tests.support.messages import Told, assert_only_told

transformers = pytest.importorskip("transformers")

USUAL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": USUAL,
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3": {**USUAL, "head_dim": 8},
    "gemma3_text": {**USUAL, "head_dim": 8},
    "gpt_neox": {key: USUAL[key] for key in USUAL if key != "num_key_value_heads"},
    "mixtral": {**USUAL, "num_local_experts": 11},  # expert 10 sorts between 1 and 2
}


class Largest(TorchDispatchMode):
    """Notes how many bytes the largest new tensor has; views of others are none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and not func.is_view:
            self.bytes = max(self.bytes, output.nbytes)
        return output


def hf(model_type: str = "llama", **keys: Any) -> dict[str, Any]:
    return {"name": "hf", "path": None, "config": {"model_type": model_type, **FAMILIES[model_type]}, **keys}


def local(path: Path, **keys: Any) -> dict[str, Any]:
    return {"name": "hf", "path": str(path), "config": {}, "pretrained": True, **keys}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    """A directory with a tiny pretrained llama in several files, and the model that is in it."""
    torch.manual_seed(0)
    model = build_model(hf())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    return tmp_path, model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_from_a_config(model_type: str) -> None:
    torch.manual_seed(0)
    model = build_model(hf(model_type))
    assert type(model) is transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    output = model(torch.randint(0, 96, (2, 16)))
    assert output.logits.shape == (2, 16, 96) and getattr(output, "past_key_values", None) is None
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    assert all(0.005 < matrix.std().item() < 0.03 for matrix in matrices)  # the family's own 0.02, not torch's defaults
    facts = model_facts(hf(model_type))
    assert (facts.num_layers, facts.num_heads, facts.hidden_size, facts.vocab_size) == (2, 4, 32, 96)


@pytest.mark.parametrize(
    ("task", "fields", "told"),
    [
        ("masked_lm", {"model_type": "bart"}, r"(?s)bart has a decoder.*write: +model.task=seq2seq_lm"),
        (
            "causal_lm",
            {"model_type": "prophetnet"},
            r"(?s)several tokens.*write: +model.config.disable_ngram_loss=true$",
        ),
        ("seq2seq_lm", {"model_type": "prophetnet", "ngram": 1, "eps": 0.1}, r"ngram_loss=true model.config.eps=0.0"),
    ],
)
def test_losses_that_are_others_than_the_familys_own_are_refused(task: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_model({"name": "hf", "path": None, "task": task, "config": fields})


def test_prophetnet_of_the_next_token_alone_has_the_loss_of_the_family() -> None:
    small = {"vocab_size": 96, "hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1, "dropout": 0.0}
    heads = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 32}
    others = {"decoder_ffn_dim": 32, "attention_dropout": 0.0, "activation_dropout": 0.0, "disable_ngram_loss": True}
    fields = {"model_type": "prophetnet", "max_position_embeddings": 64, **small, **heads, **others}
    model = build_model({"name": "hf", "path": None, "attn_implementation": "eager", "config": fields})
    tokens = torch.randint(1, 96, (2, 16))
    own = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:]).loss
    torch.testing.assert_close(LanguageModel(model, {}, {}, -1)._loss({"input_ids": tokens, "labels": tokens}), own)


def test_whole_numbers_where_transformers_wants_others() -> None:
    changed = hf("llama")
    changed["config"] |= {"rms_norm_eps": 1, "attention_dropout": 0}
    assert build_model(changed).config.rms_norm_eps == 1.0


def test_a_recorded_constructor_draws_the_weights_of_the_family() -> None:
    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.drawn: dict[int, float] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.normal_.default:
                self.drawn[id(args[0])] = args[2] if len(args) > 2 else 1.0
            return func(*args, **(kwargs or {}))

    # On the meta device transformers itself skips them.
    with torch.device("meta"), Recorder() as recorder:
        model = build_model(hf(config={"model_type": "llama", **USUAL, "initializer_range": 0.125}))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    assert all(matrix.is_meta for matrix in matrices)
    assert [recorder.drawn.get(id(matrix)) for matrix in matrices] == [0.125] * len(matrices)


def test_weights_take_the_default_dtype_whatever_the_file_says(saved: tuple[Path, torch.nn.Module]) -> None:
    path, _ = saved
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "dtype": "bfloat16"}))
    assert {parameter.dtype for parameter in build_model(local(path)).parameters()} == {torch.float32}
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {parameter.dtype for parameter in build_model(local(path)).parameters()} == {torch.bfloat16}
    finally:
        torch.set_default_dtype(torch.float32)


def test_config_of_a_directory_and_overrides(saved: tuple[Path, torch.nn.Module]) -> None:
    path, _ = saved
    cfg = local(path, config={"num_hidden_layers": 1, "rope_parameters": {"rope_theta": 5.0}})
    model = build_model(cfg)
    assert model.config.rope_parameters == {"rope_theta": 5.0, "rope_type": "default"}
    assert len(model.model.layers) == 1 and model.config.hidden_size == 32
    assert model_facts(cfg) == ModelFacts("hf", 1, 4, 2, 32, 64, 96, 2048, num_experts=0)


def test_facts_of_a_model_of_text_and_images() -> None:
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 3, "hidden_size": 8}, "vision_config": {}}
    assert model_facts({"name": "hf", "config": config}) == ModelFacts("hf", num_layers=3, hidden_size=8, num_experts=0)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"model_type": "mixtral"}, 8),
        ({"model_type": "deepseek_v3"}, 256),
        ({"model_type": "olmoe", "num_experts": 4}, 4),
        ({"model_type": "llama"}, 0),
        ({"model_type": "gemma3_text"}, None),  # whose files are in the directory of another
        ({"model_type": "../llama"}, None),
    ],
)
def test_how_many_experts_a_model_has_is_known_without_building_it(config: dict[str, Any], experts: int) -> None:
    assert model_facts({"name": "hf", "config": config}).num_experts == experts


def test_a_field_that_a_model_reads_and_does_not_declare() -> None:
    config = {**USUAL, "model_type": "qwen3_moe", "num_experts": 2, "head_dim": 24}
    with torch.device("meta"):
        assert build_model({"name": "hf", "config": config}).model.layers[0].self_attn.head_dim == 24


# --- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_weights_come_back_one_by_one(tmp_path: Path, model_type: str, shard: str) -> None:
    torch.manual_seed(0)
    model = build_model(hf(model_type))
    with torch.no_grad():
        for parameter in model.parameters():  # the weight of every norm is 1 at first: make each tensor its own
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path, max_shard_size=shard)
    weights = SafetensorsWeights(tmp_path)
    with torch.device("meta"):
        empty = build_model(local(tmp_path))
    sources = weights.matching(empty)
    assert sources.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights.read(sources[name]), tensor), name
    assert weights.unread(empty, sources) == []


def test_what_a_smaller_model_leaves_over(saved: tuple[Path, torch.nn.Module]) -> None:
    path, model = saved
    weights = SafetensorsWeights(path)
    smaller = build_model({**local(path), "config": {"num_hidden_layers": 1}})
    left = [name for name in model.state_dict() if name.startswith("model.layers.1.")]
    assert weights.unread(smaller, weights.matching(smaller)) == sorted(left) and len(left) == 9


def test_slices(saved: tuple[Path, torch.nn.Module]) -> None:
    path, model = saved
    weights, name = SafetensorsWeights(path), "model.layers.1.mlp.up_proj.weight"
    expected = model.state_dict()[name]
    assert weights.names() == set(model.state_dict())
    assert weights.shape(name) == (64, 32)
    assert torch.equal(weights.read(name, (slice(5, 20),)), expected[5:20])
    assert torch.equal(weights.read(name, (slice(None), slice(8, 9))), expected[:, 8:9])
    assert torch.equal(weights.read(name, (slice(60, 64), slice(30, 32))), expected[60:, 30:])
    assert weights.read(name, (slice(64, 64),)).shape == (0, 32)
    assert torch.equal(weights.read("model.norm.weight", (slice(1, 3),)), model.state_dict()["model.norm.weight"][1:3])


def test_slices_of_a_merged_weight(tmp_path: Path) -> None:
    model = build_model(hf("mixtral"))
    model.save_pretrained(tmp_path)
    weights, name = SafetensorsWeights(tmp_path), "model.layers.0.mlp.experts.gate_up_proj"
    source = weights.matching(model)[name]
    assert weights.shape(source) == (11, 128, 32)
    part = weights.read(source, (slice(9, 11), slice(60, 70)))
    assert torch.equal(part, model.state_dict()[name][9:11, 60:70])


def test_no_more_of_a_merged_weight_is_in_memory_than_its_part_and_an_expert(tmp_path: Path) -> None:
    model = build_model(hf("mixtral"))
    model.save_pretrained(tmp_path)
    weights = SafetensorsWeights(tmp_path)
    for name in ("gate_up_proj", "down_proj"):
        source = weights.matching(model)[f"model.layers.0.mlp.experts.{name}"]
        expected = model.state_dict()[f"model.layers.0.mlp.experts.{name}"]
        with Largest() as largest:
            part = weights.read(source, (slice(3, 6),))
        assert torch.equal(part, expected[3:6]) and largest.bytes == part.nbytes
        with Largest() as largest:
            part = weights.read(source, (slice(None), slice(8, 24)))
        assert torch.equal(part, expected[:, 8:24]) and largest.bytes == part.nbytes
        assert weights.read(source, (slice(11, 11),)).shape == (0, *expected.shape[1:])


def test_a_base_models_files_serve_the_model_with_a_head_and_the_reverse(tmp_path: Path) -> None:
    gpt = build_model(hf("gpt2"))
    gpt.transformer.save_pretrained(tmp_path / "base")
    gpt.save_pretrained(tmp_path / "head")
    from_base = SafetensorsWeights(tmp_path / "base").matching(gpt)
    assert from_base["transformer.h.0.ln_1.weight"] == "h.0.ln_1.weight"
    assert from_base["lm_head.weight"] == "wte.weight"
    assert from_base.keys() == gpt.state_dict().keys()
    to_base = SafetensorsWeights(tmp_path / "head").matching(gpt.transformer)
    assert to_base["h.0.ln_1.weight"] == "transformer.h.0.ln_1.weight"
    assert to_base.keys() == gpt.transformer.state_dict().keys()


def test_our_llama_takes_the_files_of_transformers(saved: tuple[Path, torch.nn.Module]) -> None:
    path, model = saved
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "norm_eps": 1e-6}
    ours = Llama(llama_config(shape))
    weights = SafetensorsWeights(path)
    with torch.no_grad():
        for name, source in weights.matching(ours).items():
            ours.get_parameter(name).copy_(weights.read(source))
    ids = torch.randint(0, 96, (1, 12))
    torch.testing.assert_close(ours(ids), model(ids).logits, rtol=1e-4, atol=1e-6)


# --- what is refused ---------------------------------------------------------------------------------------------

DIRECTORY = ("config.json", "safetensors")
"""What must be in a directory of a model."""


@pytest.mark.parametrize(
    ("files", "told"),
    [
        pytest.param(None, Told("model.path={path}", "no such directory", allowed=DIRECTORY), id="no-directory"),
        pytest.param({}, Told("model.path={path}", "no config.json", allowed=DIRECTORY), id="no-config"),
        pytest.param(
            {"config.json": "{"},
            Told("model.path={path}", "config.json", "cannot be read", "line 1 column 2"),
            id="not-json",
        ),
        pytest.param(
            {"config.json": "{}"},
            Told("model.path={path}", "config.json", "no model_type", allowed=("config.json",)),
            id="no-model-type",
        ),
        pytest.param(
            {"config.json": '{"model_type": "llama"}', "pytorch_model.bin": ""},
            Told(
                "model.path={path}",
                "no weights",
                allowed=("model.safetensors", "model.safetensors.index.json"),
                write="model.pretrained=false for random weights",
            ),
            id="no-safetensors",
        ),
    ],
)
def test_directories_that_hold_no_model(tmp_path: Path, files: dict[str, str] | None, told: Told) -> None:
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        model_facts(local(path))
    assert_only_told(str(caught.value).replace(str(path), "{path}"), told)


@pytest.mark.parametrize(
    ("cfg", "told"),
    [
        pytest.param(
            {"name": "hf"},
            Told(
                "model=hf",
                "model.path",
                "model.config.model_type",
                allowed=("config.json", "model_type"),
                write="model.path=DIRECTORY, or model.config.model_type=llama model.config.hidden_size=256 ...",
            ),
            id="nothing",
        ),
        pytest.param(
            {"name": "hf", "config": {"model_type": "lama"}},
            Told("model.config.model_type=lama", "llama", allowed=("model_type",)),
            id="model-type",
        ),
        pytest.param(
            {"name": "hf", "config": {"model_type": "vit"}},
            Told(
                "model.config.model_type=vit",
                "vit",
                "causal language model",
                allowed=("model_type", "ForCausalLM"),
                write="model.task=image_classification",
            ),
            id="not-causal",
        ),
        pytest.param(
            {"name": "hf", "config": {"model_type": "llama", "num_hidden_layer": 2}},
            Told("model.config.num_hidden_layer", "num_hidden_layers", allowed=("transformers.LlamaConfig",)),
            id="unknown-field",
        ),
    ],
)
def test_configs_that_are_no_model(cfg: dict, told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(cfg)
    assert_only_told(caught.value, told)


def test_attention_that_the_class_lacks_is_refused_where_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_supports_sdpa", False)
    told = Told(
        "model.attn_implementation=sdpa",
        "LlamaForCausalLM",
        allowed="flash_attention_2, eager",
        write="model.attn_implementation=eager",
    )
    with pytest.raises(ConfigError) as caught:
        build_model(hf(attn_implementation="sdpa"))
    assert_only_told(caught.value, told)
    assert build_model(hf()).config._attn_implementation == "eager"


def test_values_that_transformers_refuses() -> None:
    cfg = {"name": "hf", "config": {"model_type": "llama", "hidden_size": "wide"}}
    with pytest.raises(ConfigError) as caught:
        build_model(cfg)
    assert_only_told(caught.value, Told("model.config.model_type=llama", "transformers"))


def test_an_absent_expert_is_noticed(tmp_path: Path) -> None:
    model = build_model(hf("mixtral"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    del fields["weight_map"]["model.layers.1.block_sparse_moe.experts.4.w2.weight"]
    index.write_text(json.dumps(fields))
    weights = SafetensorsWeights(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(ConfigError) as caught:
        weights.read(weights.matching(model)[name])
    told = Told(f"model.path={tmp_path}", name, "10 tensors", "is [10, 32, 64]", "instead of [11, 32, 64]")
    assert_only_told(caught.value, told)


def refused(path: Path, model: torch.nn.Module, *facts: str) -> None:
    """The weights in a directory are refused for a model, and these facts told."""
    with pytest.raises(ConfigError) as caught:
        SafetensorsWeights(path).matching(model)
    assert_only_told(caught.value, Told(f"model.path={path}", *facts))


def test_an_absent_shard_is_named(saved: tuple[Path, torch.nn.Module]) -> None:
    path, model = saved
    shard = sorted(path.glob("model-*.safetensors"))[2]
    shard.unlink()
    refused(path, model, "model.safetensors.index.json", "not there", shard.name)


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_corrupt_shard_is_named(saved: tuple[Path, torch.nn.Module], damage: str) -> None:
    path, model = saved
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100] if damage == "cut" else b"\xff" * 4096)
    refused(path, model, shard.name, "corrupt or cut short")


def test_an_index_that_is_none(saved: tuple[Path, torch.nn.Module]) -> None:
    path, model = saved
    (path / "model.safetensors.index.json").write_text("{}")
    refused(path, model, "model.safetensors.index.json", "KeyError: 'weight_map'")


def test_an_index_that_promises_too_much(saved: tuple[Path, torch.nn.Module]) -> None:
    path, model = saved
    index = path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    shard = fields["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps({"weight_map": {**fields["weight_map"], "model.norm.weight": shard}}))
    refused(path, model, shard, "model.norm.weight", "index")


def test_missing_weights_are_counted_and_named(saved: tuple[Path, torch.nn.Module]) -> None:
    path, _ = saved
    deeper = build_model(local(path, config={"num_hidden_layers": 3}))
    layer = "model.layers.2"
    attention = [f"{layer}.self_attn.{part}_proj.weight" for part in "qkvo"]
    refused(
        path, deeper, "9 of the 30 weights", "LlamaForCausalLM", *attention, f"{layer}.mlp.gate_proj.weight", "4 more"
    )


def test_another_shape_is_refused(saved: tuple[Path, torch.nn.Module]) -> None:
    path, _ = saved
    wider = build_model(local(path, config={"vocab_size": 100}))
    refused(
        path,
        wider,
        "2 of the weights",
        "LlamaForCausalLM",
        "shape",
        "lm_head.weight [96, 32] instead of [100, 32]",
        "model.embed_tokens.weight [96, 32] instead of [100, 32]",
    )


@pytest.mark.parametrize(
    ("model_type", "fields", "why"),
    [
        pytest.param("llama", USUAL, None, id="llama"),
        pytest.param(
            "opt",
            {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32, "num_attention_heads": 4},
            "mask",
            id="opt",
        ),
        pytest.param("lfm2", {**USUAL, "layer_types": ["conv", "full_attention"]}, "state", id="conv"),
        pytest.param(
            "qwen3_5_text", {**USUAL, "layer_types": ["linear_attention", "full_attention"]}, "state", id="linear"
        ),
        pytest.param(
            "phi3",
            {
                **USUAL,
                "pad_token_id": None,
                "original_max_position_embeddings": 4,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [4.0] * 4,
                },
            },
            "more than 4 tokens",
            id="longrope",
        ),
        pytest.param(
            "llama",
            {
                **USUAL,
                "max_position_embeddings": 4,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            },
            "more than 4 tokens",
            id="dynamic",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_packing_is_refused_where_documents_would_see_each_other(
    model_type: str, fields: dict[str, Any], why: str | None, device: str
) -> None:
    with torch.device(device):
        model = build_model({"name": "hf", "config": {"model_type": model_type, **fields, "num_hidden_layers": 2}})
    if why is None:
        check_keeps_documents_apart(model)
        return
    with pytest.raises(ConfigError) as caught:
        check_keeps_documents_apart(model)
    assert_only_told(caught.value, Told("data.packing=documents", why, write="data.packing=none"))
    if device == "cpu":  # and so it is
        ids, positions = torch.randint(0, 96, (1, 9)), torch.tensor([[*range(6), *range(3)]])
        with torch.no_grad():
            packed, alone = model.eval()(ids, position_ids=positions).logits[:, 6:], model(ids[:, 6:]).logits
        assert not torch.allclose(packed, alone, atol=1e-6)
    if why.endswith("tokens"):
        check_keeps_documents_apart(model, longest=4)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_an_exported_mixture_has_the_names_of_save_pretrained_and_loads_bitwise(name: str, tmp_path: Path) -> None:
    model: Any = made(name, {})
    weights = {key: value.detach() for key, value in model.state_dict().items()}
    metas = {key: value.to("meta") for key, value in weights.items()}

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        return as_in_files(model, {key: weights[key] for key in names})

    _, files, _ = _write_shards(tmp_path, metas, read, shard_bytes=30_000)
    model.save_pretrained(tmp_path / "theirs")
    found = {key for file in tmp_path.glob("*.safetensors") for key in load_file(file)}
    assert files > 1 and found == set(load_file(tmp_path / "theirs" / "model.safetensors"))
    model.config.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[key], weights[key]) for key in weights)


def test_the_config_of_an_export_says_the_type_of_its_weights(tmp_path: Path) -> None:
    model = build_model(hf())
    write_transformers_files(tmp_path, hf(), model, "bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.dtype == torch.float32


@pytest.mark.parametrize(
    ("model_type", "tokens"), [("llama", 32000), ("t5", 32128), ("gemma3_text", None), ("vit", None)]
)
def test_a_vocabulary_is_known_by_default(model_type: str, tokens: int | None) -> None:
    assert model_facts({"name": "hf", "path": None, "config": {"model_type": model_type}}).vocab_size == tokens


@pytest.mark.parametrize(("model_type", "longest"), [("opt", 2048), ("gpt2", 1024), ("llama", None), ("mistral", None)])
def test_a_table_of_positions_is_known_by_default(model_type: str, longest: int | None) -> None:
    """Rotary models have none."""
    assert model_facts({"name": "hf", "path": None, "config": {"model_type": model_type}}).max_seq_len == longest
