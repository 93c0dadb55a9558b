"""Read the directory in which a training framework keeps the parts of one checkpoint, such as model and optimizer.

Each framework is a row of the table `_FRAMEWORKS`: how its directory is recognised, and for each section of the job's
state (formats/sections.py) the files or directories that have it. A part is read by its own format. Where one section
is wanted, only its parts are opened, so a broken or refused file of another section does not matter. Where all are
wanted, the names of a part begin with its section, as ``optimizer.state.0.exp_avg``.

A directory that only contains checkpoints is no checkpoint; `check_none_below` lists them. verl's directories are the
exception: they say which step is the newest, and which of its directories has the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    ReplacedError,
    StateExchangeError,
    excerpt,
)
from statexchange.formats.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    INDEX,
    SAFETENSORS,
    TORCH,
    is_weights,
    unread_weights,
)
from statexchange.formats.sections import ALL, MODEL_OF_PARTS, SECTIONS, sections_of, select_section
from statexchange.formats.source import (
    Part,
    Section,
    SectionName,
    ShardFile,
    Source,
    SourceKind,
    UnreadableTensor,
    abbreviated_names,
    merged_metadata,
)
from statexchange.sharding.paths import Path
from statexchange.storage.location import FilteredStore, OpenedPath
from statexchange.storage.publish.claim import CLAIM_NAME
from statexchange.storage.steps import list_steps, step_name
from statexchange.storage.store import Store
from statexchange.storage.workspace import is_rank_file

__all__ = ["check_none_below", "matches", "read"]

_Reader = Literal["dcp", "huggingface", "torch_file"]
_MAX_SHOWN = 8
_MAX_TEXT = 64  # bytes of a file with one number
# Files that only checkpoints of other formats have.
_OF_OTHERS = ("statexchange.json", "save.json", "latest", CLAIM_NAME)  # "latest" is DeepSpeed's


@dataclass(frozen=True, slots=True)
class _Stored:
    """One way in which a part may be stored: files or directories whose whole name matches `pattern`.

    The names with an equal group ``of`` are one part; without such a group each name is one. If the pattern has the
    group ``rank``, there is a file for each rank: as many as ``ranks`` says, or else for each up to the last.

    Attributes:
        pattern: the names.
        reader: the format of the files, or of each directory.
        keys: first keys that all names of the part may have; the first that they do have is removed.
        is_directory: whether the names are directories. DCP's ``.metadata`` is a file, of the directory that has it.
    """

    pattern: re.Pattern[str]
    reader: _Reader
    keys: tuple[str, ...] = ()
    is_directory: bool = False


@dataclass(frozen=True, slots=True)
class _Framework:
    """A framework's directory.

    Attributes:
        kind: the format that `info` shows.
        marks: patterns of names; the directory is recognised if it has one of these, and one of its parts.
        parts: the sections, in the order of the table, each with the ways in which it may be stored; the first way that
            is found counts. None stands for a part with several sections, which its names show.
        small_files: the subdirectory with config and tokenizer; "" for the directory itself, None if it has none.
    """

    kind: SourceKind
    marks: tuple[re.Pattern[str], ...]
    parts: tuple[tuple[SectionName | None, tuple[_Stored, ...]], ...]
    small_files: str | None = ""


def _stored(pattern: str, reader: _Reader, *keys: str, is_directory: bool = False) -> _Stored:
    return _Stored(re.compile(pattern), reader, keys, is_directory)


_TRAINER_STATE, _MAX_STATE_BYTES = "trainer_state.json", 64 << 10
# Trainer writes its state last. A directory of this name that has one of these files and no state is unfinished.
_TRAINER_DIRECTORY, _OF_TRAINER = re.compile(r"checkpoint-[0-9]{1,18}"), ("training_args.bin", "optimizer.pt")
_GLOBAL_STEP = re.compile(rb'"global_step"\s*:\s*([0-9]{1,18})(?![0-9.eE])')
_INDEX = r"(-[0-9]{5}-of-[0-9]{5})?"
_SAFETENSORS = _stored(rf"(?P<of>(adapter_)?model(_[0-9]+)?){_INDEX}\.safetensors(\.index\.json)?", "huggingface")
# accelerate writes FSDP's states: sharded as DCP, full as one file, local as one file a rank.
_ACCELERATE_MODEL = (
    _SAFETENSORS,
    _stored(r"pytorch_model_fsdp_[0-9]+", "dcp", "model", is_directory=True),
    _stored(r"pytorch_model_fsdp(_[0-9]+)?\.bin", "torch_file"),
    _stored(r"pytorch_model_fsdp(?P<of>(_[0-9]+)?)_rank[0-9]+\.bin", "torch_file"),
    _stored(rf"(?P<of>adapter_model|pytorch_model(_[0-9]+)?){_INDEX}\.bin(\.index\.json)?", "torch_file"),
)
_ACCELERATE_OPTIMIZER = (
    _stored(r"optimizer_[0-9]+", "dcp", "optimizer", is_directory=True),
    _stored(r"optimizer(_[0-9]+)?\.(pt|bin)", "torch_file"),
    _stored(r"optimizer(?P<of>(_[0-9]+)?)_rank[0-9]+\.bin", "torch_file"),
)
_WORLD = r"_world_size_(?P<ranks>[0-9]{1,9})_rank_(?P<rank>[0-9]{1,9})\.pt"
_VERL_FILES = "huggingface"
_FRAMEWORKS = (
    _Framework(
        "trainer",
        (re.compile(re.escape(_TRAINER_STATE)),),
        (
            ("model", _ACCELERATE_MODEL),
            ("optimizer", _ACCELERATE_OPTIMIZER),
            ("scheduler", (_stored(r"scheduler\.pt", "torch_file"),)),
            ("rng", (_stored(r"rng_state(_(?P<rank>[0-9]{1,9}))?\.pth", "torch_file"),)),
            ("other", (_stored(r"training_args\.bin", "torch_file"),)),
            ("other", (_stored(r"scaler\.pt", "torch_file"),)),
        ),
    ),
    _Framework(
        "accelerate",
        (re.compile(r"random_states_[0-9]+\.pkl"), re.compile(r"pytorch_model_fsdp.*"), re.compile(r"optimizer_0")),
        (
            ("model", _ACCELERATE_MODEL),
            ("optimizer", _ACCELERATE_OPTIMIZER),
            ("scheduler", (_stored(r"scheduler(_[0-9]+)?\.bin", "torch_file"),)),
            ("rng", (_stored(r"random_states_(?P<rank>[0-9]{1,9})\.pkl", "torch_file"),)),
            ("other", (_stored(r"(scaler\.pt|(dl_state_dict|sampler)(_[0-9]+)?\.bin)", "torch_file"),)),
            ("other", (_stored(r"custom_checkpoint_[0-9]+\.pkl", "torch_file"),)),
        ),
    ),
    _Framework(
        "verl",
        (re.compile(r"(model|optim)_world_size_.*"),),
        (
            (
                "model",
                (
                    _stored(rf"(?P<of>model){_WORLD}", "torch_file"),
                    _stored(_VERL_FILES, "huggingface", is_directory=True),
                ),
            ),
            ("optimizer", (_stored(rf"(?P<of>optim){_WORLD}", "torch_file"),)),
            ("other", (_stored(rf"extra_state{_WORLD}", "torch_file"),)),
        ),
        _VERL_FILES,
    ),
    _Framework(
        "lightning",
        (re.compile(r"meta\.pt"),),
        (
            (None, (_stored(r"\.metadata", "dcp", "state_dict", "model"),)),
            ("other", (_stored(r"meta\.pt", "torch_file"),)),
        ),
        None,
    ),
    _Framework(
        "torch_checkpointing",
        (re.compile(r"metadata\.pkl"),),
        (
            ("model", (_stored(r"(?P<of>model)_(?P<rank>[0-9]{1,9})\.pt", "torch_file"),)),
            ("optimizer", (_stored(r"(?P<of>optim|optimizer)_(?P<rank>[0-9]{1,9})\.pt", "torch_file"),)),
            ("other", (_stored(r"(?!(model|optim|optimizer)_[0-9]).+_[0-9]+\.pt", "torch_file"),)),
        ),
        None,
    ),
)
# verl's directories: a file names the newest step, whose directory has one of each model.
_VERL_LATEST, _VERL_STEP, _VERL_ROLES = "latest_checkpointed_iteration.txt", "global_step_", ("actor", "critic")


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a directory of one of the frameworks."""
    return _found(opened) is not None


def read(opened: OpenedPath, *, section: str | None = ALL) -> Source:
    """Return the source at a path: all parts, or those of one section alone.

    Args:
        opened: the opened path.
        section: the section, as in `registry.open_source`.

    Raises:
        InvalidArgumentError: the directory does not have the section, or has several models.
    """
    found = _found(opened)
    assert found is not None  # matches
    directory = _Directory(opened, *found)
    if section == ALL:
        return directory.read_all()
    return directory.read_section(section if section not in (None, MODEL_OF_PARTS) else "model")


def _found(opened: OpenedPath) -> tuple[_Framework, Store] | None:
    """Return the framework whose directory this is, with its store, which may be below for verl."""
    store: Store | None = opened.store if opened.file is None else None
    while store is not None:
        framework = _framework_of(store)
        if framework is not None:
            return framework, store
        store = _verl_below(store)
    return None


def _verl_below(store: Store) -> Store | None:
    """Return the directory of the newest step, or of the one model of a step, if this is one of verl's directories.

    Raises:
        IncompleteError: the newest step is missing, and others are there.
    """
    if _VERL_LATEST in store.listing:
        step = store.read_small(_VERL_LATEST, _MAX_TEXT).strip()
        name = f"{_VERL_STEP}{step.decode(errors='replace')}"
        if name in store.directories:
            return store.below(name)
        others = [other for other in store.directories if re.fullmatch(rf"{_VERL_STEP}[0-9]+", other)]
        if not others or not step.isdigit():  # Megatron's reader names a file that is cut or empty
            return None
        text = (
            f"{_VERL_LATEST} names {excerpt(name)[1:-1]}, which is missing; there are: {abbreviated_names(others)}. "
            "To read one of these, give its directory"
        )
        raise IncompleteError(text, path=store.path_of(name))
    if re.fullmatch(rf"{_VERL_STEP}[0-9]+", store.path.rstrip("/").rpartition("/")[2]):
        roles = [role for role in _VERL_ROLES if store.listing.get(role) == "directory"]
        return store.below(roles[0]) if len(roles) == 1 else None
    return None


def _framework_of(store: Store) -> _Framework | None:
    names = store.listing
    if any(name in names for name in _OF_OTHERS) or any(map(is_rank_file, names)):
        return None
    for framework in _FRAMEWORKS:
        has_mark = any(mark.fullmatch(name) for mark in framework.marks for name in names)
        if framework.kind == "trainer":
            has_mark = has_mark or _is_cut_short(store)
        if has_mark and any(section in ("model", "optimizer", None) for section, _ in _chosen(framework, store)):
            return framework
    return None


def _is_cut_short(store: Store) -> bool:
    """Whether this is a directory of Trainer without the state, which is written last."""
    name = store.path.rstrip("/").rpartition("/")[2]
    if _TRAINER_STATE in store.listing or not _TRAINER_DIRECTORY.fullmatch(name):
        return False
    return any(file in store.listing for file in _OF_TRAINER)


def _adapters_below(store: Store) -> list[str]:
    """Return the subdirectories in which PEFT keeps adapters that have names."""
    return [name for name in store.directories if ADAPTER_CONFIG in store.below(name).listing]


def _chosen(framework: _Framework, store: Store) -> list[tuple[SectionName | None, list[_FoundPart]]]:
    """Return the parts that a directory has, by section."""
    chosen = []
    for section, ways in framework.parts:
        for stored in ways:
            found = _found_parts(stored, store)
            if section == "model" and len(found) > 1:  # a model comes before an adapter, as in model_files.py
                found = [part for part in found if not part.stem.startswith("adapter_model")] or found
            if found:
                chosen.append((section, found))
                break
    return chosen


@dataclass(frozen=True, slots=True)
class _FoundPart:
    """A part of a directory: how it is stored, and its names."""

    stored: _Stored
    names: tuple[str, ...]

    @property
    def stem(self) -> str:
        """The first name up to its first dot."""
        return self.names[0].partition(".")[0]


def _found_parts(stored: _Stored, store: Store) -> list[_FoundPart]:
    names: dict[str, list[str]] = {}
    for name in store.directories if stored.is_directory else store.non_directories:
        match = stored.pattern.fullmatch(name)
        if match is not None and not _has_only_small_files(stored, store, name):
            of = (match["of"] or "") if "of" in stored.pattern.groupindex else name
            names.setdefault(of, []).append(name)
    return [_FoundPart(stored, tuple(of_part)) for of_part in names.values()]


def _has_only_small_files(stored: _Stored, store: Store, name: str) -> bool:
    """Whether a directory for weights of transformers has config and tokenizer alone, as verl always writes them."""
    if not stored.is_directory or stored.reader != "huggingface":
        return False
    return not any(file.removesuffix(INDEX).endswith(SAFETENSORS) for file in store.below(name).files)


class _Directory:
    """The opened directory of a framework."""

    def __init__(self, opened: OpenedPath, framework: _Framework, store: Store) -> None:
        self._opened = opened
        self._framework = framework
        self._store = store
        self._chosen = _chosen(framework, store)

    def read_all(self) -> Source:
        """Return all parts as one source; the names of each part begin with its section."""
        found: list[tuple[SectionName, str, Source | None]] = []
        parts: list[Part] = []
        problems = self._missing(("model", *dict(self._chosen)))
        for section, of_section in self._chosen:
            for part in of_section:
                try:
                    source = self._read(part)
                except StateExchangeError as error:
                    problems.append(error)
                    parts.append(Part(section, part.names, error.message))
                    found.append((section or "other", part.stem, None))
                    continue
                refusal = source.problems[0].message if source.problems and not source.files else ""
                parts.append(Part(section, part.names, refusal))
                problems += source.problems
                found += [(name, part.stem, one) for name, one in _by_section(section, source)]
        counts = Counter(section for section, _, _ in found)
        sources: dict[SectionName, list[Source]] = {section: [] for section in SECTIONS if section in counts}
        for name, stem, one in found:
            if one is not None:
                prefix = f"{name}." if counts[name] == 1 else f"{name}.{stem}."
                sources[name].append(one.renamed(prefix.__add__))
        sections = []
        for name, of_name in sources.items():
            sections.append(Section(name, f"{name}.", frozenset().union(*(source.names for source in of_name))))
        joined = _one_source(
            self._framework.kind, self._opened, [one for of_name in sources.values() for one in of_name]
        )
        return replace(
            joined,
            sections=tuple(sections),
            problems=tuple(problems),
            notes=self._notes(),
            parts=tuple(parts),
            step=self._step(),
        )

    def read_section(self, section: str) -> Source:
        """Return one section, without opening parts of others."""
        found: list[_FoundPart] = []
        mixed: list[_FoundPart] = []
        for name, parts in self._chosen:
            if name == section:
                found += parts
            elif name is None:
                mixed += parts
        if not found and not mixed:
            there = ", ".join(repr(name) for name in SECTIONS if name in dict(self._chosen))
            text = f"there is no section {section!r}, only {there}: choose with section (--section)"
            if section == "model":
                text = f"no file of a model is here, only of {there}: copy it, too, or choose with section (--section)"
            # A note names the adapters that lie one level down.
            raise InvalidArgumentError("; ".join((text, *self._notes())), path=self._store.path)
        if section == "model" and len(found) > 1:
            paths = ", ".join(self._store.path_of(part.names[0]) for part in found[:_MAX_SHOWN])
            text = f"this directory has {len(found)} models, name one of them: {paths}"
            raise InvalidArgumentError(text, path=self._store.path)
        problems = self._missing((section,)) if found else []
        sources = [self._read(part) for part in found]
        others = {name for name, _ in self._chosen if name not in (section, None)}
        for part in mixed:
            selected, left_out = self._selected(part, section, is_only=not found)
            others |= left_out
            if selected is not None:
                found.append(part)
                sources.append(selected)
        source = sources[0]
        if len(sources) > 1:
            # The parts of one section may have equal names.
            named = [source.renamed(f"{part.stem}.".__add__) for part, source in zip(found, sources, strict=True)]
            source = _one_source(self._framework.kind, self._opened, named)
        note = f"only the section {section!r} of this {self._framework.kind} directory is read"
        if others:
            note += f", not {', '.join(repr(name) for name in SECTIONS if name in others)}"
        # The note of a lone file advises to give this directory, which was given.
        own_notes = () if source.parts else source.notes
        notes = (*own_notes, f'{note} (all: section="all", --section all)', *self._notes(), *_notes_on_lora(source))
        return replace(
            source,
            opened=self._opened,
            problems=(*problems, *source.problems),
            notes=notes,
            sections=(),
            small_files=self._small_files(),
            step=self._step(),
        )

    def _selected(self, part: _FoundPart, section: str, *, is_only: bool) -> tuple[Source | None, set[SectionName]]:
        """Return one section of a part that has several, and the others.

        None if it does not have the section; with `is_only`, raise InvalidArgumentError then.
        """
        whole = self._read(part)
        known: set[SectionName] = {one.name for one in sections_of(whole)} or {"model"}
        if section not in known and not is_only:
            return None, known
        selected = whole
        if section not in known or len(known) > 1:
            selected = replace(select_section(whole, section), notes=whole.notes)
        return selected, {name for name in known if name != section}

    def _read(self, part: _FoundPart) -> Source:
        """Open a part by its own format, and remove the key that its framework adds."""
        stored, (first, *others) = part.stored, part.names
        reader = stored.reader
        if stored.is_directory:
            below = self._store.below(first)
            # In place of a DCP, accelerate can write one file of torch.save for each rank into this directory.
            if ".metadata" not in below.listing and any(name.endswith(TORCH) for name in below.files):
                reader = "torch_file"
            opened = OpenedPath(below.path, below, None)
        elif stored.reader == "dcp":
            opened = OpenedPath(self._store.path, self._store, None)
        elif others or "of" in stored.pattern.groupindex:
            opened = OpenedPath(self._store.path, FilteredStore(self._store, frozenset(part.names).__contains__), None)
        else:
            opened = OpenedPath(self._store.path_of(first), self._store, first)
        read_part: Callable[..., Source] = import_module(f"statexchange.formats.{reader}").read
        source = read_part(opened)
        for key in stored.keys:
            if _all_have(source, f"{key}."):
                return source.renamed(lambda name: name.partition(".")[2])
        return source

    def _missing(self, sections: Collection[str | None]) -> list[StateExchangeError]:
        """Return an error for each set of files of these sections that lacks a rank's, and one for a missing model."""
        problems: list[StateExchangeError] = []
        for section, parts in self._chosen:
            if section in sections:
                problems += self._missing_ranks(parts)
        found = {section for section, _ in self._chosen}
        if len(sections) > 1 and _is_cut_short(self._store):  # the files of the model alone may be whole
            text = "Trainer writes this file last, and it is missing: the save did not finish, or was not copied whole"
            problems.append(IncompleteError(text, path=self._store.path_of(_TRAINER_STATE)))
        if "model" in sections and not found & {"model", None} and not _adapters_below(self._store):
            there = ", ".join(repr(name) for name in SECTIONS if name in found)
            text = f"no file of a model is here, only of {there}: it was not written, or not copied"
            problems.append(IncompleteError(text, path=self._store.path))
        return problems

    def _missing_ranks(self, parts: Sequence[_FoundPart]) -> list[StateExchangeError]:
        """Return an error if the file of a rank is missing, where the names have ranks."""
        pattern = parts[0].stored.pattern  # all are stored in one way
        if "rank" not in pattern.groupindex:
            return []
        by_rank: dict[int, re.Match[str]] = {}
        world_sizes = set()
        for name in (name for part in parts for name in part.names):
            match = pattern.fullmatch(name)
            assert match is not None
            if match["rank"] is None:  # one file for all ranks
                continue
            by_rank[int(match["rank"])] = match
            if "ranks" in pattern.groupindex:
                world_sizes.add(int(match["ranks"]))
        if len(world_sizes) > 1:
            sizes = " and ".join(map(str, sorted(world_sizes)))
            text = (
                f"{parts[0].stem.partition('_')[0]} files of {sizes} ranks are here, of two saves: remove those of one"
            )
            return [CorruptError(text, path=self._store.path)]
        world_size = max(world_sizes, default=max(by_rank, default=-1) + 1)
        missing = next((rank for rank in range(world_size) if rank not in by_rank), None)
        if missing is None:
            return []
        match = next(iter(by_rank.values()))
        begin, end = match.span("rank")
        path = self._store.path_of(f"{match.string[:begin]}{missing}{match.string[end:]}")
        return [IncompleteError("the file of this rank is missing", rank=missing, path=path)]

    def _step(self) -> int | None:
        """Return the training step that Trainer's state has; None without one, or if it cannot be read.

        The keys are sorted, so it comes before the history, which may be long.
        """
        if self._framework.kind != "trainer":
            return None
        try:
            start = self._store.open(_TRAINER_STATE).first_bytes(_MAX_STATE_BYTES)
        except ReplacedError:
            raise
        except StateExchangeError:
            return None
        match = _GLOBAL_STEP.search(start)
        return None if match is None else int(match[1])

    def _small_files(self) -> Store | None:
        name = self._framework.small_files
        if name is None or (name and self._store.listing.get(name) != "directory"):
            return None
        return self._store.below(name) if name else self._store

    def _notes(self) -> tuple[str, ...]:
        """Return notes about the files and adapters of the directory that are not read."""
        notes: tuple[str, ...] = () if self._store is self._opened.store else (f"read from {self._store.path}",)
        names = {name for _, parts in self._chosen for part in parts for name in part.names}
        notes += unread_weights(self._store, names)
        adapters = _adapters_below(self._store)
        if adapters:
            notes += (f"not read: the adapters in {abbreviated_names(adapters)}; to read one, give its path",)
        return notes


def _notes_on_lora(source: Source) -> tuple[str, ...]:
    """Return a note on the names of a PEFT model, which transformers does not know."""
    names = source.names
    if not any(".lora_" in name for name in names) or not all(name.startswith(ADAPTER_PREFIX) for name in names):
        return ()
    advice = '--exclude "*.lora_*" --rename "^base_model[.]model[.]=" --rename "[.]base_layer[.]=."'
    return (f"the names are those of a PEFT model with LoRA; its base model alone: {advice}",)


def _by_section(section: SectionName | None, source: Source) -> list[tuple[SectionName, Source]]:
    """Return a part's sections: the one that it is, or those that its names show."""
    if section is not None:
        return [(section, source)]
    known = sections_of(source)
    return [(one.name, select_section(source, one.name)) for one in known] if known else [("model", source)]


def _all_have(source: Source, key: str) -> bool:
    """Whether all names of a source begin with a first key."""
    return all(name.startswith(key) and name != key for name in source.names)


def _one_source(kind: SourceKind, opened: OpenedPath, sources: Sequence[Source]) -> Source:
    """Return sources of different names as one; they may share files."""
    files: dict[tuple[int, str], ShardFile] = {}
    others: dict[str, str] = {}
    texts: dict[str, str] = {}
    paths: dict[str, Path] = {}
    unreadable: list[UnreadableTensor] = []
    problems: list[StateExchangeError] = []
    for source in sources:
        for shard_file in source.files:
            known = files.setdefault((shard_file.rank, shard_file.path), shard_file)
            tensors, aliases = {**known.tensors, **shard_file.tensors}, {**known.aliases, **shard_file.aliases}
            files[shard_file.rank, shard_file.path] = replace(known, tensors=tensors, aliases=aliases)
        others |= source.others
        texts |= source.texts
        paths |= source.paths
        unreadable += source.unreadable
        problems += source.problems
    metadata, differing = merged_metadata([source.metadata for source in sources if source.metadata])
    return Source(
        kind,
        opened,
        tuple(files.values()),
        others=others,
        texts=texts,
        problems=tuple(problems),
        unreadable=tuple(unreadable),
        metadata=metadata,
        differing=differing,
        paths=paths,
    )


_CHECKPOINT = re.compile(r"(?:checkpoint|global_step|step|epoch|iter)[-_=]?([0-9]{1,18})", re.IGNORECASE)
_CKPT = ".ckpt"  # of Lightning's files and directories


def check_none_below(opened: OpenedPath) -> None:
    """Raise InvalidArgumentError for a directory that contains checkpoints, of which one must be named."""
    if opened.file is not None:
        return
    store = opened.store
    names = _checkpoints_below(store) or [name for name in store.directories if _is_dcp(store, name)]
    if names:
        shown = f"{len(names):,} checkpoint{'' if len(names) == 1 else 's'} ({abbreviated_names(names)})"
        text = f"this directory contains {shown}: name one of them, such as {store.path_of(names[-1])}"
        raise InvalidArgumentError(text, path=opened.path)


def _checkpoints_below(store: Store) -> list[str]:
    """Return the names of checkpoints in a directory without weights, the newest last."""
    if any(is_weights(name) and not name.endswith(_CKPT) for name in store.files):
        return []
    saves = [step_name(step) for step in list_steps(store)]
    numbers = {name: int(match[1]) for name in store.directories if (match := _CHECKPOINT.fullmatch(name)) is not None}
    if saves or numbers:
        return saves or sorted(numbers, key=numbers.__getitem__)
    roles = [name for name in store.directories if name in _VERL_ROLES]
    if len(roles) > 1:
        return roles
    return [name for name, kind in store.listing.items() if name.endswith(_CKPT) and kind != "other"]


def _is_dcp(store: Store, name: str) -> bool:
    try:
        return ".metadata" in store.below(name).listing
    except StateExchangeError:  # removed meanwhile, or unreadable
        return False
