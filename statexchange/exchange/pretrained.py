"""Files that transformers and PEFT write beside a model's tensors: its configs, and those of a tokenizer or processor.

Neither library is imported here: a model can only be theirs if they have been imported already.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from statexchange.errors import InvalidArgumentError, UnsupportedError, type_text
from statexchange.sharding.paths import without_wrappers
from statexchange.state.types import Leaf, Module
from statexchange.state.units import is_module, layers


def model_files(state: Leaf) -> dict[str, bytes]:
    """Return the config files of a model of transformers or PEFT; {} for any other state.

    Not collective. The model may be wrapped (DistributedDataParallel, torch.compile), and sharded by FSDP2.
    """
    model = _unwrapped(state)
    if is_adapter_model(model):
        return _adapter_files(model)
    if not _is_pretrained(model):
        return {}
    config = {**_config(model), "architectures": [_own_class(model).__name__]}
    files = {"config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        files["generation_config.json"] = model.generation_config.to_json_string().encode()
    return files


def model_config(state: Leaf) -> dict[str, Leaf] | None:
    """Return the config of a model of transformers; None for any other state. Not collective."""
    model = pretrained_model(state)
    if model is None:
        return None
    return _config(model)


def pretrained_model(state: Leaf) -> Leaf:
    """Return the model of transformers that a state is, without its wrappers; None for any other state."""
    model = _unwrapped(state)
    if _is_pretrained(model):
        return model
    return None


def with_own_classes(model: Leaf) -> Leaf:
    """Return a model of transformers without the classes of torch's by which fully_shard replaces those of models.

    transformers takes such a class for custom code. The result is a copy with the same tensors, unless no class was
    replaced; the model itself stays as it is.
    """
    copies: dict[Leaf, Leaf] = {}
    is_replaced = False
    for module in model.modules():
        own_class = _own_class(module) if _is_pretrained(module) else type(module)
        is_replaced = is_replaced or own_class is not type(module)
        copies[module] = object.__new__(own_class)
        copies[module].__dict__.update(module.__dict__)
    if not is_replaced:
        return model
    # Only now, as a module may be inside one that comes before it.
    for module, copied in copies.items():
        inside = module._modules  # noqa: SLF001 (named_children leaves out a module's second name)
        copied.__dict__["_modules"] = {name: copies.get(child) for name, child in inside.items()}
    return copies[model]


def _config(model: Leaf) -> dict[str, Leaf]:
    config: dict[str, Leaf] = json.loads(model.config.to_json_string())
    return config


def is_adapter_model(state: Leaf) -> bool:
    """Whether a state is a model of PEFT, of which only the adapter is written."""
    return _is_instance(_unwrapped(state), "peft.peft_model", "PeftModel")


def adapter_names(state: Leaf) -> dict[str, str]:
    """Return the names in a PEFT model, without wrappers, of the active adapter's parameters by those that PEFT loads.

    Not collective. PEFT gives the very parameters that it is given, which shows what it calls each.
    """
    parameters = dict(_unwrapped(state).named_parameters(remove_duplicate=False))
    in_model: dict[int, str] = {}
    for name, parameter in parameters.items():
        in_model[id(parameter)] = without_wrappers(name)
    names: dict[str, str] = {}
    for name, tensor in adapter_state(state, parameters).items():
        # PEFT may add what is no parameter, as the embeddings that it saves.
        if id(tensor) in in_model:
            names[name] = in_model[id(tensor)]
    return names


def adapter_state(state: Leaf, tensors: Mapping[str, Leaf] | None = None) -> dict[str, Leaf]:
    """Return the tensors of the active adapter of a PEFT model, by the names that PEFT loads.

    Not collective. Sharded parameters stay sharded. They are those of `tensors`, by their names in the model, if these
    are given.

    Raises:
        UnsupportedError: several adapters are active.
    """
    import peft

    model = _unwrapped(state)
    adapter = _active_adapter(model)
    embeddings = set(peft.utils.other.EMBEDDING_LAYER_NAMES)
    targets = getattr(model.peft_config[adapter], "target_modules", None)  # prompts have none
    # "auto", PEFT's default, may look for the base model's config on the network.
    saves_embeddings = not isinstance(targets, str) and bool(embeddings.intersection(targets or ()))
    named: dict[str, Leaf] = peft.get_peft_model_state_dict(
        model, tensors, adapter_name=adapter, save_embedding_layers=saves_embeddings
    )
    return named


def _active_adapter(model: Leaf) -> str:
    active: list[str] = model.active_adapters
    # A directory of PEFT has one adapter: of several it would be one by chance.
    if len(active) == 1:
        return active[0]
    raise UnsupportedError(f"the adapters {', '.join(map(repr, active))} are active: activate one with set_adapter")


def _adapter_files(model: Leaf) -> dict[str, bytes]:
    config = copy.copy(model.peft_config[_active_adapter(model)])
    # As PEFT saves it: a loaded adapter is trained further only if the loader asks for that.
    config.inference_mode = True
    base = model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
    mapping = None
    if config.task_type is None:  # then PEFT needs the class to load the adapter
        own_class = _own_class(base)
        mapping = {"base_model_class": own_class.__name__, "parent_library": own_class.__module__}
    return _saved_files(config, auto_mapping_dict=mapping)


def tokenizer_files(tokenizer: Leaf) -> dict[str, bytes]:
    """Return the files that a tokenizer or processor of transformers writes, by name. Not collective.

    Raises:
        InvalidArgumentError: the object has no `save_pretrained`.
    """
    if not hasattr(tokenizer, "save_pretrained") or is_module(tokenizer):
        text = f"tokenizer must be a tokenizer or processor of transformers, not {type_text(tokenizer)}"
        raise InvalidArgumentError(text)
    return _saved_files(tokenizer)


def _saved_files(value: Leaf, **options: Leaf) -> dict[str, bytes]:
    """Return the files that `value.save_pretrained` writes, by their paths below its directory."""
    # It writes nothing but files, and the names of some are known to the class alone.
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as directory:
        value.save_pretrained(directory, **options)
        for path in sorted(Path(directory).rglob("*")):
            if path.is_file():
                files[path.relative_to(directory).as_posix()] = path.read_bytes()
    return files


def _unwrapped(state: Leaf) -> Leaf:
    if is_module(state):
        return layers(state)[-1]
    return state


def _is_pretrained(value: Leaf) -> bool:
    return _is_instance(value, "transformers.modeling_utils", "PreTrainedModel")


def _is_instance(value: Leaf, module: str, name: str) -> bool:
    """Whether a value is an instance of a module's class; False if the module has not been imported."""
    # Importing them takes seconds, and a value can only be theirs if somebody has imported them.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _own_class(module: Module) -> type:
    """Return a module's class, or the one that fully_shard has replaced by a class of torch's."""
    return next(base for base in type(module).__mro__ if not base.__module__.startswith("torch.distributed."))
