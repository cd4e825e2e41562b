"""`transformers:DIR`: a folder with config.json, and weights or none. transformers is an extra."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nimble_jobs.errors import ModelError
from nimble_jobs.models.identity import FOLDER_WEIGHTS, existing, missing_package, opened
from nimble_jobs.models.source import similar
from nimble_jobs.models.unfilled import Unfilled
from nimble_jobs.sentence import transformer_folder

NEW_HEAD = "head_is_new"  # attribute of a model that was built with `new_head`: some of its head's weights are random
_log = logging.getLogger(__name__)
_LAYERS = "hidden_states"  # ends the names of outputs with a tensor for each layer


def build(
    folder: Path,
    args: dict[str, Any],
    dtype: torch.dtype,
    *,
    own_weights: bool,
    headless: bool = False,
    new_head: bool = False,
) -> nn.Module:
    """The architecture that config.json names, else AutoModel, in `dtype`; `args` replace entries of config.json.

    With `own_weights` the folder's weights are loaded if it has any; with `headless` the head that config.json names is
    left out, and so is the decoder of T5 and its kin. With `new_head` a head that the weights lack, or have in another
    size, stays random. Nothing is downloaded and no code of the folder runs. The folder
    may be one of sentence-transformers, which keeps these files in a folder of its own.

    The module takes the model's arguments by name, or ONE tensor, its main input (`input_ids` of text, `pixel_values`
    of images), and then attends to every position. It returns a dict of the tensors in the model's output, with one
    row for each record: `logits_per_image` of CLIP is [n], each image with its own text. Raises ModelError.
    """
    folder = transformer_folder(folder)
    config, transformers = _configured(folder, args)
    config.use_cache = False
    cls = _encoder_of(config, transformers) if headless else _class_of(config, transformers)
    if own_weights and any((folder / name).is_file() for name in FOLDER_WEIGHTS):
        return _with_one_input(_with_weights(cls, folder, config, dtype, new_head=new_head, headless=headless))
    try:
        return _with_one_input(cls._from_config(config, dtype=dtype))
    except Exception as e:  # whatever the library raises for sizes it does not like
        raise ModelError(f"{folder}: cannot be built from its configuration: {type(e).__name__}: {e}") from e


def arguments_of(folder: Path, args: dict[str, Any], *, headless: bool = False) -> tuple[str, ...]:
    """Names of the arguments that the model of a folder takes, such as `input_ids`. The model is not built.

    Raises ModelError as `build` does.
    """
    config, transformers = _configured(transformer_folder(folder), args)
    cls = _encoder_of(config, transformers) if headless else _class_of(config, transformers)
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def _configured(folder: Path, args: dict[str, Any]) -> tuple[Any, Any]:
    """The configuration with `args`, and the library. Raises ModelError."""
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(missing_package("transformers"))
    _refuse_remote_code(folder)
    for member in folder.iterdir():  # the library opens them by name, and would wait forever on a named pipe
        if member.exists() and not member.is_dir():
            existing(member)
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config, unknown = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, return_unused_kwargs=True, **args
        )
    except Exception as e:  # whatever the library raises for a configuration it does not like
        raise ModelError(f"{folder}: transformers cannot read the configuration: {type(e).__name__}: {e}") from e
    if unknown:
        key = min(unknown)
        raise ModelError(f"model.args.{key}: no such entry in the configuration{similar(key, list(config.to_dict()))}")
    return _part(config, transformers, args), transformers


def _part(config: Any, transformers: Any, args: dict[str, Any]) -> Any:
    """The part of the configuration that the class in `architectures` takes: CLIPTextModel takes `text_config`.

    Settings of the whole that `args` names, and its labels, hold for the part, too. Raises ModelError for others.
    """
    names = config.architectures or []
    cls = _named(names[0], config, transformers) if names else None
    wanted = getattr(cls, "config_class", None)
    if not isinstance(wanted, type) or isinstance(config, wanted):
        return config
    for name in config.sub_configs:
        part: Any = getattr(config, name, None)
        if issubclass(type(part), wanted):
            part.architectures = names
            for key in args.keys() - {"architectures", name}:
                if not hasattr(part, key):
                    raise ModelError(f"model.args.{key}: {names[0]} has no such entry; set it in {name}")
                setattr(part, key, getattr(config, key))
            if config.id2label != transformers.PretrainedConfig().id2label and "num_labels" not in args:
                part.id2label, part.label2id = config.id2label, config.label2id
            if hasattr(part, "projection_dim") and hasattr(config, "projection_dim"):
                part.projection_dim = config.projection_dim  # the one that the whole model was built with
            return part
    return config


def _refuse_remote_code(folder: Path) -> None:
    """Refuse configurations that name kernels on a hub, which are code. Such names have a slash."""
    path = folder / "config.json"
    try:
        pairs: list[tuple[str, Any]] = []
        with opened(path) as file:
            json.load(file, object_pairs_hook=pairs.extend)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: not a model configuration: {e}") from e
    for key, value in pairs:
        if "implementation" in key and "/" in str(value):
            raise ModelError(f"{path}: {key}: {value!r} is code from a hub, which nimble-jobs never runs")


def _class_of(config: Any, transformers: Any) -> Any:
    """The class that `architectures` names, else the bare model of the configuration's type."""
    names = config.architectures or []
    cls = _named(names[0], config, transformers) if names else None
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
        return cls
    return _bare(config, transformers)


def _encoder_of(config: Any, transformers: Any) -> Any:
    """The bare model, or of a model with a decoder the encoder alone."""
    bare = _bare(config, transformers)
    alone = bare.__name__.removesuffix("Model") + "EncoderModel"
    if not config.is_encoder_decoder and alone not in (config.architectures or []):  # T5's saved encoder has no decoder
        return bare
    encoder = _named(alone, config, transformers)
    if encoder is None:
        raise ModelError(
            f"output.pooling: {config.model_type!r} has an encoder and a decoder, and transformers cannot load its "
            "encoder alone; expected a model that is an encoder only"
        )
    return encoder


def _bare(config: Any, transformers: Any) -> Any:
    own = f"{type(config).__name__.removesuffix('Config')}Model"
    if own in (config.architectures or []) and (cls := _named(own, config, transformers)) is not None:
        return cls  # to import AutoModel, and scikit-learn with it, takes most of a second
    try:
        found = transformers.AutoModel._model_mapping[type(config)]
    except KeyError:
        raise ModelError(f"config.json: transformers has no model for {config.model_type!r}") from None
    return found[0] if isinstance(found, tuple) else found


def _named(name: str, config: Any, transformers: Any) -> Any:
    """What transformers has by this name, or None. Most models lie beside their configuration.

    Asked for a model by the name alone, transformers first reads the files of all models.
    """
    beside = sys.modules.get(type(config).__module__.rpartition(".")[0])
    if getattr(beside, "__name__", "").startswith(f"{transformers.__name__}.models."):
        found = getattr(beside, name, None)
        if found is not None:
            return found
    return getattr(transformers, name, None)


@contextmanager
def _without_report() -> Iterator[None]:
    """While inside, the library does not print a table of weights that are missing, as those of a new head are."""
    logger = logging.getLogger("transformers.modeling_utils")

    def grave(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    # Not by its level: at a level of ERROR the library checks how layers are sharded, and another logger complains.
    logger.addFilter(grave)
    try:
        yield
    finally:
        logger.removeFilter(grave)


def _with_weights(
    cls: Any, folder: Path, config: Any, dtype: torch.dtype, *, new_head: bool, headless: bool, **more: bool
) -> Any:
    """The model with the folder's weights. `more`: arguments of its class. Raises ModelError."""
    try:
        quiet = new_head or headless or config.base_config_key  # of a part: the rest of the weights is not used
        with _without_report() if quiet else nullcontext(), Unfilled():
            model, info = cls.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=any((folder / name).is_file() for name in FOLDER_WEIGHTS[:2]),
                weights_only=True,
                ignore_mismatched_sizes=True,  # they are reported below, by name
                output_loading_info=True,
                **more,
            )
    except Exception as e:  # the same
        raise ModelError(f"{folder}: its weights cannot be loaded: {type(e).__name__}: {e}") from e
    if new_head:
        inner, unlike = f"{cls.base_model_prefix}.", [*info["missing_keys"], *info["mismatched_keys"]]
        for kind in ("missing_keys", "mismatched_keys"):
            info[kind] = [n for n in info[kind] if _key(n).startswith(inner) and ".pooler." not in _key(n)]
        setattr(model, NEW_HEAD, len(unlike) > len(info["missing_keys"]) + len(info["mismatched_keys"]))
    if headless and not more and _lacks_pooler_only(cls, info):
        # Many checkpoints with a head for tokens have none. Random weights would give a random `pooler_output`.
        return _with_weights(cls, folder, config, dtype, new_head=new_head, headless=True, add_pooling_layer=False)
    bad = [
        f"{len(names)} {kind} ({', '.join(sorted(str(n) for n in names)[:10])})"
        for kind in ("missing_keys", "mismatched_keys")
        if (names := info[kind])
    ]
    if bad:
        raise ModelError(f"{folder}: its weights do not fit {cls.__name__}: {'; '.join(bad)}")
    if info["unexpected_keys"]:  # usual: a checkpoint holds the heads of its pre-training too
        _log.warning("%s: %d weights are not used by %s", folder, len(info["unexpected_keys"]), cls.__name__)
    return model


def _lacks_pooler_only(cls: Any, info: Mapping[str, Any]) -> bool:
    """Whether the pooler is all that the weights lack, and the class can do without it."""
    missing = [_key(name) for name in info["missing_keys"]]
    optional = "add_pooling_layer" in inspect.signature(cls.__init__).parameters
    return bool(missing) and optional and all(name.startswith("pooler.") for name in missing)


def _key(found: Any) -> str:
    """The weight's name; a mismatched one comes with its shapes."""
    return str(found if isinstance(found, str) else found[0])


def _with_one_input(model: Any) -> nn.Module:
    """Let the module be called with one tensor, its main input, or with arguments by name. It returns the tensors of
    the model's output, and the hidden states of its layers if its configuration asks for them.

    A subclass, not a wrapper: the names of its weights stay as they are.
    """
    cls = type(model)
    name = cls.main_input_name

    def forward(self: nn.Module, x: Tensor | None = None, **named: Any) -> dict[str, Any]:
        output = cls.forward(self, **(named if x is None else {name: x}), return_dict=True)
        return {
            key: _of_records(key, value) if isinstance(value, Tensor) else value
            for key, value in output.items()
            if isinstance(value, Tensor) or (key.endswith(_LAYERS) and isinstance(value, tuple | list))
        }

    # Without its open keywords, into which a misspelt mask would vanish.
    takes = inspect.signature(cls.forward)
    known = [p for p in takes.parameters.values() if p.kind is not p.VAR_KEYWORD]
    forward.__signature__ = takes.replace(parameters=known)  # type: ignore[attr-defined]
    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    assert isinstance(model, nn.Module)
    return model


def _of_records(name: str, output: Tensor) -> Tensor:
    """An output with one row for each record.

    CLIP and its kin compare every image of a batch with every text. What a record gives must not depend on the other
    records of its batch, so only each image with its own text is kept: [n] of [n, n].
    """
    if name.startswith("logits_per_") and output.dim() == 2 and output.shape[0] == output.shape[1]:
        return output.diagonal().clone()
    return output
