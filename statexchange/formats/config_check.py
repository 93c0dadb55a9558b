"""Compare config.json and adapter_config.json with the tensors beside them: a difference is a warning.

The tensors decide what is written. Where it is unclear which part of a model a config describes, there is no warning:
if several configs have a vocabulary, several tensors are embeddings, or the model has an encoder, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from statexchange.errors import CorruptError, ReplacedError, StateExchangeError, excerpt
from statexchange.formats.model_files import ADAPTER_CONFIG, CONFIG
from statexchange.formats.sections import sections_of
from statexchange.formats.source import Section
from statexchange.sharding.options import FLOATS
from statexchange.sharding.paths import ADAPTER_PREFIX, is_adapter, note_on_adapters
from statexchange.sharding.shards import TensorInfo
from statexchange.storage.location import parse_json
from statexchange.storage.store import Budget
from statexchange.units import format_number

if TYPE_CHECKING:
    from statexchange.formats.source import Source

_LORA_A = re.compile(r".*\.lora_A\.(.+\.)?weight")
_SCALE = re.compile(r"(scale|scales|scale_inv|absmax|qzeros|SCB)$")

_LAYER = re.compile(r"(?P<list>(.*?\.)?(layers?|h|blocks?))\.(?P<number>[0-9]{1,9})\.")  # of a list of layers
_EMBEDDING = re.compile(
    r"(?P<model>(.*?\.)??)(embeddings\.)?(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight"
)
_HEAD = re.compile(
    r"(?P<model>(.*?\.)??)(lm_head|embed_out|output|output_projection|(cls\.)?predictions\.decoder)\.[^.]+"
)
_LANGUAGE_MODEL = re.compile(r".*(ForCausalLM|ForConditionalGeneration|LMHeadModel|ForMaskedLM)")
# Keys of configs of parts that do not read text, and of quantization_config.
_OTHER_PART = re.compile(r"quantization|compression|vision|visual|audio|speech")
_TIED = "tie_word_embeddings"
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")  # keys of one number, of several families
_FURTHER = "num_nextn_predict_layers"  # layers for multi-token prediction, which num_hidden_layers does not count

_Config = Mapping[str, object]


class _Info(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


_Tensors = Mapping[str, _Info]


def config_warnings(
    tensors: _Tensors, files: Mapping[str, bytes], digests: Mapping[str, Sequence[str] | bytes]
) -> tuple[str, ...]:
    """Return a warning for each config in a directory that differs from its tensors.

    Not collective. transformers would give missing layers and heads random values, leave out layers that it does not
    expect, and refuse tensors of other shapes. A config that cannot be parsed is left out.

    Args:
        tensors: all tensors of the model, by name.
        files: the files of the directory, by name.
        digests: the digests of each tensor's boxes, in order, where they are known.
    """
    if not tensors:
        return ()
    warnings = []
    adapter, config = _parsed(files.get(ADAPTER_CONFIG)), _parsed(files.get(CONFIG))
    if adapter is not None:
        warnings += [f"{ADAPTER_CONFIG} and the tensors differ: {text}" for text in _against_adapter(adapter, tensors)]
    if config is not None:
        texts = list(_against_dtypes(config, tensors))
        file = config.get("transformers_weights")
        if isinstance(file, str) and file != "model.safetensors":
            texts.append(f"transformers_weights is {excerpt(file, 100)}, the only file that transformers reads")
        model = _text_model(config, tensors)
        if model is not None:
            texts += [*_against_layers(model, tensors), *_against_vocabulary(model, tensors)]
            if _ties_heads(config):
                texts += _against_ties(model, tensors, digests)
            texts += _against_head(model, config, tensors)
        if texts:
            warnings.append(f"{CONFIG} and the tensors differ: {'; '.join(texts)}")
    return tuple(warnings)


def source_warnings(source: Source, digests: Mapping[str, Sequence[str]] = MappingProxyType({})) -> tuple[str, ...]:
    """Return the warnings about the configs in a source's directory. Not collective; reads the configs.

    () for a source of which something is missing or broken, as its tensors are not all there to compare.

    Args:
        source: the source.
        digests: the digests of each tensor's boxes, in order, where they are known.

    Raises:
        ReplacedError: a config was replaced while it was read.
    """
    store = source.config_store
    if store is None or source.problems or source.unreadable:
        return ()
    files: dict[str, bytes] = {}
    for name in (CONFIG, ADAPTER_CONFIG):
        if store.listing.get(name) == "file":
            try:
                files[name] = store.read_small(name)
            except ReplacedError:
                raise
            except StateExchangeError:
                continue
    if not files:
        return ()
    model = Section("model", "", frozenset(source.tensor_names))
    for section in sections_of(source):
        if section.name == "model":
            model = section
    tensors, digests_of_model = {}, {}
    for shard in source.described():
        if shard.name in model.names:
            name = shard.name.removeprefix(model.prefix)
            tensors[name] = TensorInfo(shard.dtype, shard.global_shape)
            digests_of_model[name] = digests.get(shard.name, ())
    return note_on_adapters(tensors) + config_warnings(tensors, files, digests_of_model)


def unties_heads(config: bytes | None) -> bool:
    """Whether a config.json says that the head of a language model is not tied to its embedding."""
    return _ties_heads(_parsed(config) or {}) is False


def without_heads(aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the aliases of tied tensors without those between a head and an embedding.

    For a config that does not tie them: transformers would give a head that is not written random values. Aliases
    between embeddings, as in T5, do not depend on the config and stay.
    """
    kept = {}
    for alias, name in aliases.items():
        if bool(_EMBEDDING.fullmatch(alias)) == bool(_EMBEDDING.fullmatch(name)):
            kept[alias] = name
    return kept


def _parsed(content: bytes | None) -> _Config | None:
    """Return the JSON object in a config; None if there is none that can be read."""
    try:
        parsed = parse_json(content or b"", CONFIG, Budget(CONFIG))
    except CorruptError:
        return None
    return parsed if isinstance(parsed, dict) else None


class _TextModel(NamedTuple):
    """The part of a model that reads text.

    Attributes:
        prefix: the beginning of all its names.
        embedding: the name of its embedding.
        where: the beginning of the full keys of its config.
        config: its config.
    """

    prefix: str
    embedding: str
    where: str
    config: _Config


def _text_model(config: _Config, tensors: _Tensors) -> _TextModel | None:
    """Return the part that reads text; None if it is unclear which part that is, or which config describes it."""
    configs = [(where, inner) for where, inner in _configs(config, "") if "vocab_size" in inner]
    embeddings: dict[str, str] = {}  # by the beginning of the part's names
    for name in tensors:
        match = _EMBEDDING.fullmatch(name)
        if match is not None and _LAYER.match(name) is None:
            embeddings[match["model"]] = name
    if len(configs) != 1 or len(embeddings) != 1:
        return None
    ((where, of_text),) = configs
    # Some values are those of the encoder, some those of the decoder, and some models tie their embeddings alone.
    if "encoder_layers" in of_text or of_text.get("is_encoder_decoder") is True:
        return None
    ((prefix, embedding),) = embeddings.items()
    return _TextModel(prefix, embedding, where, of_text)


def _configs(config: _Config, where: str) -> Iterator[tuple[str, _Config]]:
    """Yield a config and the configs in it of parts that may read text, by the beginning of their keys."""
    yield where, config
    for key, inner in config.items():
        if key.endswith("_config") and isinstance(inner, dict) and not _OTHER_PART.search(key):
            yield from _configs(inner, f"{where}{key}.")


def _ties_heads(config: _Config) -> bool | None:
    """Return the `tie_word_embeddings` of the outermost config that has it, as transformers does; None without one."""
    for _, inner in _configs(config, ""):
        is_tied = inner.get(_TIED)
        if isinstance(is_tied, bool):
            return is_tied
    return None


def _number(config: _Config, key: str) -> int | None:
    """Return a whole number in a config; None if the key has none."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value


def _against_layers(model: _TextModel, tensors: _Tensors) -> Iterator[str]:
    """Yield a text if the number of layers in the config is not that of the one list of layers."""
    numbers: dict[str, set[str]] = {}
    for match in map(_LAYER.match, tensors):
        if match is not None and match["list"].startswith(model.prefix):
            numbers.setdefault(match["list"], set()).add(match["number"])
    key = next(filter(model.config.__contains__, _NUM_LAYERS), "")
    expected = _number(model.config, key)
    if expected is None or len(numbers) != 1:
        return
    ((layers, of_layers),) = numbers.items()
    count = len(of_layers)
    if not expected <= count <= expected + (_number(model.config, _FURTHER) or 0):
        verb = "is" if count == 1 else "are"
        yield f"{model.where}{key} is {expected}, and there {verb} {format_number(count, 'layer')} of {layers}"


def _against_vocabulary(model: _TextModel, tensors: _Tensors) -> Iterator[str]:
    """Yield a text if neither the embedding nor a head has as many rows as the vocabulary has tokens."""
    vocab_size, shape = _number(model.config, "vocab_size"), tensors[model.embedding].shape
    # Packed weights have other shapes than their values.
    if vocab_size is None or len(shape) != 2 or tensors[model.embedding].dtype not in FLOATS:
        return
    # Some embeddings have more rows than there are tokens to predict; then the head has the vocabulary's size.
    rows = {shape[:1], *(tensors[name].shape[:1] for name in filter(_HEAD.fullmatch, tensors))}
    if (vocab_size,) not in rows:
        have = format_number(shape[0], "row")
        yield f"{model.where}vocab_size is {vocab_size}, and {model.embedding} has {have}"


def _against_ties(model: _TextModel, tensors: _Tensors, digests: Mapping[str, Sequence[str] | bytes]) -> Iterator[str]:
    """Yield a text if a head, which the config ties to the embedding, has other values; for the first such head."""
    embedding, of_embedding = tensors[model.embedding], digests.get(model.embedding, ())
    for name in tensors:
        head = _HEAD.fullmatch(name)
        if head is None or not model.embedding.startswith(head["model"]):  # that of another part
            continue
        is_alike = (tensors[name].dtype, tensors[name].shape) == (embedding.dtype, embedding.shape)
        of_head = digests.get(name, ())
        if is_alike and len(of_head) == len(of_embedding) and list(of_head) != list(of_embedding):
            yield f"{_TIED} is true, and {name} and {model.embedding} have different values"
            return


def _against_head(model: _TextModel, config: _Config, tensors: _Tensors) -> Iterator[str]:
    """Yield a text if a language model has no head, and the config does not tie it to the embedding."""
    classes = config.get("architectures")
    is_language_model = isinstance(classes, list) and any(_LANGUAGE_MODEL.fullmatch(str(name)) for name in classes)
    if not is_language_model or _ties_heads(config) is not False:
        return
    rows = tensors[model.embedding].shape[:1]
    for name, info in tensors.items():
        # A head of another name has a row for each token, too.
        if _HEAD.fullmatch(name) or (name != model.embedding and len(info.shape) == 2 and info.shape[:1] == rows):
            return
    yield f"{_TIED} is false, and beside {model.embedding} there is no head, such as lm_head.weight"


def _against_dtypes(config: _Config, tensors: _Tensors) -> Iterator[str]:
    """Yield a text if the config calls the weights quantised, and no tensor is."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    plain = {*FLOATS, "I64", "BOOL"}  # positions and masks are in models of any kind
    is_quantised = any(info.dtype not in plain or _SCALE.search(name) for name, info in tensors.items())
    if isinstance(method, str) and not is_quantised:
        name, info = next(iter(tensors.items()))
        text = f"quantization_config says {excerpt(method)}, and no tensor is packed, in float8 or a scale"
        yield f"{text}: {excerpt(name)[1:-1]} has dtype {info.dtype}"


def _against_adapter(adapter: _Config, tensors: _Tensors) -> Iterator[str]:
    """Yield a text if the tensors are no adapter, or their names or LoRA's rank are not those of the config."""
    if not is_adapter(tensors, has_config=True):
        name = next((name for name in tensors if not name.startswith(ADAPTER_PREFIX)), next(iter(tensors)))
        yield f"it describes an adapter, and the tensors are a whole model's, such as {excerpt(name)[1:-1]}"
    elif not any(name.startswith(ADAPTER_PREFIX) for name in tensors) and "prompt_embeddings" not in tensors:
        yield f"names lack {ADAPTER_PREFIX!r}: PeftModel reads none of them, and load_adapter of transformers all"
    elif adapter.get("peft_type") == "LORA" and type(adapter.get("r")) is int and not adapter.get("rank_pattern"):
        rows = {}
        for name in filter(_LORA_A.fullmatch, tensors):
            for size in tensors[name].shape[:1]:
                rows[size] = name
        if rows and adapter["r"] not in rows:
            size, name = next(iter(rows.items()))
            yield f"r is {adapter['r']}, and {name} has {format_number(size, 'row')}"
