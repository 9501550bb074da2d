"""What the group `adapter` means: its keys, or the config of a published adapter. Torch-free."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autolaunch_strategies.config import ConfigError, nearest
from autolaunch_strategies.config.values import written

ALL_LINEAR = "all-linear"

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""What the directory of an adapter holds, by PEFT's names."""

_RANK, _QUANT_TYPE = 8, "nf4"

# Key of the group -> field of PEFT's config, of those that say which parameters there are and what they mean.
_FIELDS = {
    "r": "r",
    "alpha": "lora_alpha",
    "rslora": "use_rslora",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
    "modules_to_save": "modules_to_save",
    "exclude": "exclude_modules",
}
_OF_NAMES = ("target_modules", "target_parameters", "modules_to_save", "exclude")

# How `init_lora_weights` of PEFT's config begins where loading the adapter changes the frozen weights, too.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Fields of kinds that are more than parameters: positions, losses, buffers, other adapters.
_VARIANTS = ("alora_invocation_tokens", "arrow_config", "monteclora_config", "velora_config")


@dataclass(frozen=True)
class AdapterSettings:
    """An adapter, with nothing left open."""

    kind: str
    r: int
    alpha: float
    rslora: bool
    dropout: float
    target_modules: str | tuple[str, ...]
    """`all-linear`, another text that is a regular expression, or names."""
    target_parameters: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    exclude: str | tuple[str, ...]
    path: Path | None
    """Where its weights begin from; None for new ones."""
    quant_type: str | None
    """The four-bit type of the frozen linear layers; None where they stay as they are."""

    def record(self) -> dict[str, Any]:
        """What has to be the same in a run that goes on from a checkpoint."""
        fields = asdict(self)
        del fields["path"], fields["dropout"]
        for key in ("rslora", "quant_type"):  # of checkpoints from before there were these
            if not fields[key]:
                del fields[key]
        return {key: sorted(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def adapter_settings(adapter_cfg: Mapping[str, Any]) -> AdapterSettings:
    """The adapter that the fields of `autolaunch.config.schema.Adapter` describe.

    Raises:
        ConfigError: PEFT is not installed, `target_modules` names nothing, or `adapter.path` holds no adapter of this
            kind, or another one than the other keys say.
    """
    adapter_cfg = {"rslora": None, "quant_type": _QUANT_TYPE, **adapter_cfg}  # a job from before there were these
    kind, quant_type = adapter_cfg["name"], adapter_cfg["quant_type"]
    libraries = {"peft": "peft", "bitsandbytes": "qlora"} if kind == "qlora" else {"peft": "peft"}
    for library, extra in libraries.items():
        if importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"adapter={kind}", f"{library} is not installed", write=f"pip install 'autolaunch[{extra}]'"
            )
    if quant_type != _QUANT_TYPE and kind != "qlora":
        raise ConfigError(
            f"adapter.quant_type={quant_type} with adapter={kind}",
            "has no effect: nothing is quantised",
            "adapter=qlora",
            "adapter=qlora",
        )
    targets = adapter_cfg["target_modules"]
    _check_targets(targets, bool(adapter_cfg["target_parameters"]))
    if adapter_cfg["path"] is not None:
        return _published(adapter_cfg)
    if targets is None:
        targets = () if adapter_cfg["target_parameters"] else ALL_LINEAR
    rank = adapter_cfg["r"] or _RANK
    return AdapterSettings(
        kind,
        rank,
        float(adapter_cfg["alpha"] or 2 * rank),
        bool(adapter_cfg["rslora"]),
        float(adapter_cfg["dropout"] or 0.0),
        targets if isinstance(targets, str) else tuple(targets),
        tuple(adapter_cfg["target_parameters"]),
        tuple(adapter_cfg["modules_to_save"]),
        tuple(adapter_cfg["exclude"]),
        None,
        _quant_type(adapter_cfg),
    )


def _quant_type(adapter_cfg: Mapping[str, Any]) -> str | None:
    return adapter_cfg["quant_type"] if adapter_cfg["name"] == "qlora" else None


def unquantised(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A job with the same adapter beside the weights as they were before they had four bits."""
    adapter = config.get("adapter")
    if adapter is None or adapter["name"] != "qlora":
        return config
    return {**config, "adapter": {**adapter, "name": "lora", "quant_type": _QUANT_TYPE}}


def _check_targets(targets: Any, has_parameters: bool) -> None:
    if targets is None or (isinstance(targets, str) and targets):
        return
    names = isinstance(targets, Sequence) and all(isinstance(name, str) and name for name in targets)
    if not names or not (targets or has_parameters):
        raise ConfigError(
            f"adapter.target_modules={written(targets)}",
            "names no layers",
            "all-linear, a list of names or ends of names, or a regular expression over whole names",
            "adapter.target_modules=all-linear",
        )


def _published(adapter_cfg: Mapping[str, Any]) -> AdapterSettings:
    where = f"adapter.path={adapter_cfg['path']}"
    directory = Path(adapter_cfg["path"]).expanduser()
    allowed = f"a directory on this machine with {CONFIG_FILE} and {WEIGHTS_FILE} (nothing is downloaded)"
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ConfigError(
                where, f"there is no {name} in it" if directory.is_dir() else "no such directory", allowed
            )
    try:
        fields = json.loads((directory / CONFIG_FILE).read_text("utf-8"))
        kind = "dora" if fields.get("use_dora") else str(fields["peft_type"]).lower()
        rank, alpha, rslora = int(fields["r"]), float(fields["lora_alpha"]), bool(fields.get("use_rslora"))
        names = {key: _names(fields.get(field)) for key, field in _FIELDS.items() if key in _OF_NAMES}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            where, f"its {CONFIG_FILE} can't be read: {type(error).__name__}: {error}", allowed
        ) from error
    _check_kind(where, fields)
    if kind != ("lora" if adapter_cfg["name"] == "qlora" else adapter_cfg["name"]):
        known = kind in ("lora", "dora")
        raise ConfigError(where, f"it is of the kind {kind}", "lora, dora", f"adapter={kind}" if known else "")
    said = {"r": rank, "alpha": alpha, "rslora": rslora, **names}
    for key, value in said.items():
        typed = adapter_cfg[key]
        if typed not in (None, [], ()) and _comparable(typed) != _comparable(value):
            raise ConfigError(
                f"adapter.{key}={written(typed)} with {where}",
                f"the adapter there has {written(list(value) if isinstance(value, tuple) else value)}",
                "the adapter's own, which need not be written",
                f"adapter.{key}={'null' if adapter_cfg[key] is not None and not isinstance(typed, list) else '[]'}",
            )
    dropout = adapter_cfg["dropout"] if adapter_cfg["dropout"] is not None else fields.get("lora_dropout") or 0.0
    return AdapterSettings(
        adapter_cfg["name"],
        rank,
        alpha,
        rslora,
        float(dropout),
        path=directory,
        quant_type=_quant_type(adapter_cfg),
        **_settings(names),
    )


def _check_kind(where: str, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError if PEFT makes more of a published adapter than parameters beside the weights of model.path."""
    initial = str(fields.get("init_lora_weights")).lower()
    changes = f"init_lora_weights={initial}" if initial.startswith(_CHANGES_THE_BASE) else ""
    if changes or fields.get("kasa_config"):
        raise ConfigError(
            where,
            f"its {CONFIG_FILE} says {changes or 'kasa_config'}: PEFT changes the frozen weights when it loads that, "
            "and here they stay those of model.path",
            "adapters beside weights as they are; or PEFT's merged model as model.path",
        )
    variant = next((key for key in _VARIANTS if fields.get(key)), None)
    if variant is not None:
        raise ConfigError(
            where,
            f"its {CONFIG_FILE} says {variant}: that is more than the parameters of its layers, and only these "
            "are taken",
            "LoRA and DoRA; others are part of a LightningModule of your own",
        )


def _names(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(sorted(value or ()))


def _comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, list | tuple) else value


def _settings(names: Mapping[str, Any]) -> dict[str, Any]:
    alone = {key: (value,) if isinstance(value, str) else value for key, value in names.items()}
    return {**alone, "target_modules": names["target_modules"], "exclude": names["exclude"]}


def ending_with(ends: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that PEFT takes for targets: equal to one of `ends`, or with it as their last parts."""
    ends = tuple(ends)
    return [name for name in names if any(name == end or name.endswith(f".{end}") for end in ends)]


def unmatched(key: str, name: str, of: str, names: Sequence[str]) -> ConfigError:
    """The error that a name in `adapter.<key>` is that of nothing in the model, with the one that was meant.

    Args:
        of: the model, in a word.
        names: all that could be named.
    """
    ends = list(dict.fromkeys(known.rpartition(".")[2] for known in names))
    close = nearest(name, names if "." in name else [end for end in ends if not end.isdigit()])
    shown = [end for end in ends if not end.isdigit()][:12]
    return ConfigError(
        f"adapter.{key}={name}",
        f"there is nothing of that name in {of}" + (f"; did you mean {close}?" if close else ""),
        f"names, or ends of names: {', '.join(shown)}" + (", ..." if len(ends) > 12 else ""),
        f"adapter.{key}=[{close}]" if close else "",
    )


LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")


def check_llama(settings: AdapterSettings) -> None:
    """Check the names of an adapter of `model=llama`, whose layers are known without building it.

    Raises:
        ConfigError: a name without dots that none of its layers has.
    """
    targets = () if isinstance(settings.target_modules, str) else settings.target_modules
    for key, names in (("target_modules", targets), ("modules_to_save", settings.modules_to_save)):
        known = LLAMA_LAYERS if key == "target_modules" else (*LLAMA_LAYERS, "norm", "input_layernorm")
        for name in names:
            if "." not in name and not name.isdigit() and name not in (*known, "post_attention_layernorm", "norm"):
                raise unmatched(key, name, "model=llama", known)
