"""Read the directory in which a training framework keeps the parts of one checkpoint, such as model and optimizer.

Each framework is a row of the table `FRAMEWORKS`: how its directory is recognised, and for each section of the job's
state (formats/sections.py) the files or directories that have it. A part is read by its own format. Where one section
is wanted, only its parts are opened, so a broken or refused file of another section does not matter. Where all are
wanted, the names of a part begin with its section, as ``optimizer.state.0.exp_avg``.

A directory that only contains checkpoints is no checkpoint; `check_none_below` lists them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain, count
from typing import NamedTuple

from statexchange.errors import CorruptError, IncompleteError, InvalidArgumentError, StateExchangeError
from statexchange.formats.frameworks import FRAMEWORKS, TRAINER_STATE, VERL_FILES, Framework, Row
from statexchange.formats.model_files import (
    ADAPTER_CONFIG,
    TORCH,
    is_weights,
    unread_weights,
)
from statexchange.formats.sections import ALL, MODEL_OF_PARTS, SECTIONS, section_note, section_of, sections_of
from statexchange.formats.source import (
    Part,
    Section,
    SectionName,
    Source,
    abbreviated_names,
    joined,
)
from statexchange.storage.location import OpenedPath
from statexchange.storage.publish.claim import CLAIM_NAME
from statexchange.storage.steps import list_steps, step_name
from statexchange.storage.store import Store
from statexchange.storage.workspace import is_rank_file

# Files that only checkpoints of other formats have.
_OF_OTHERS = ("statexchange.json", "save.json", "latest", CLAIM_NAME)  # "latest" is DeepSpeed's
_KEYS = ("state_dict", "model", "optimizer")  # which frameworks add above all names of a DCP


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a directory of one of the frameworks."""
    return _directory(opened) is not None


def read(opened: OpenedPath, *, section: str | None = ALL) -> Source:
    """Return the source at a path: all parts, or those of one section alone.

    Args:
        opened: the opened path.
        section: the section, as in `registry.open_source`.

    Raises:
        InvalidArgumentError: the directory does not have the section, or has several models.
    """
    directory = _directory(opened)
    assert directory is not None  # matches
    if section == ALL:
        return directory.read_all()
    return directory.read_section("model" if section in (None, MODEL_OF_PARTS) else section)


def _directory(opened: OpenedPath) -> _Directory | None:
    """Return the directory with its parts if it is that of a framework; None for any other path."""
    store = opened.store
    names = store.listing
    if opened.file is not None or not names.keys().isdisjoint(_OF_OTHERS) or any(map(is_rank_file, names)):
        return None
    directory = store.path.rstrip("/").rpartition("/")[2]
    marks = [*names, *map(f"{directory}/".__add__, names)]
    for framework in FRAMEWORKS:
        if any(map(re.compile(framework.mark).fullmatch, marks)):
            parts = _parts_of(framework, store)
            # A mark alone, as a lone random_states_0.pkl, is not yet a job's state.
            if not {part.row.section for part in parts}.isdisjoint(("model", "optimizer", None)):
                return _Directory(opened, framework, parts)
    return None


class _StoredPart(NamedTuple):
    """A part of a directory: how it is stored, and its names."""

    row: Row
    names: tuple[str, ...]

    @property
    def stem(self) -> str:
        """The first name up to its first dot."""
        return self.names[0].partition(".")[0]


def _parts_of(framework: Framework, store: Store) -> list[_StoredPart]:
    """Return the parts that a directory has."""
    parts: dict[SectionName | None, list[_StoredPart]] = {}
    for row in framework.rows:
        if row.section in parts:  # stored in a way that comes first
            continue
        names: dict[str, list[str]] = {}
        entries = store.directories if row.is_directory else store.non_directories
        for name in entries:
            match = row.match(name)
            if match is not None:
                names.setdefault(match.groupdict().get("of", name), []).append(name)
        if names:
            parts[row.section] = [_StoredPart(row, tuple(of_part)) for of_part in names.values()]
    return list(chain.from_iterable(parts.values()))


@dataclass(frozen=True, slots=True)
class _Directory:
    """The directory of a framework in an opened path, and its parts."""

    opened: OpenedPath
    framework: Framework
    parts: list[_StoredPart]

    @property
    def store(self) -> Store:
        """The directory."""
        return self.opened.store

    def read_all(self) -> Source:
        """Return all parts as one source; the names of each part begin with its section."""
        problems = [*self._missing_parts(), *self._missing_ranks(*SECTIONS)]
        parts = []
        read: list[tuple[_StoredPart, Source, tuple[Section, ...]]] = []
        counts: Counter[str] = Counter()
        for part in self.parts:
            refusal = ""
            try:
                source = self._read(part)
            except StateExchangeError as error:
                source = Source(self.framework.kind, self.opened, (), problems=(error,))
            if source.problems and not source.files:
                refusal = source.problems[0].message
            parts.append(Part(part.row.section, part.names, refusal))
            problems += source.problems
            sections = _sections_of(part, source)
            counts.update(section.name for section in sections)
            read.append((part, source, sections))
        # Only now is it known which sections have several parts, whose names need the file's.
        sources = []
        names: dict[SectionName, set[str]] = {section: set() for section in SECTIONS if section in counts}
        for part, source, sections in read:
            new_names = {}
            for section in sections:
                prefix = f"{section.name}."
                if counts[section.name] > 1:
                    prefix += f"{part.stem}."
                for name in section.names:
                    new_names[name] = prefix + name.removeprefix(section.prefix)
                    names[section.name].add(new_names[name])
            sources.append(source.renamed(new_names.get))
        return replace(
            joined(self.framework.kind, self.opened, sources),
            sections=tuple(Section(section, f"{section}.", frozenset(names[section])) for section in names),
            problems=problems,
            notes=self._notes(),
            parts=tuple(parts),
        )

    def read_section(self, section: str) -> Source:
        """Return one section, without opening parts of others."""
        read: list[tuple[_StoredPart, Source]] = []
        unread: set[SectionName] = set()
        for part in self.parts:
            if part.row.section not in (section, None):
                unread.add(part.row.section)
                continue
            source = self._read(part)
            sections = _sections_of(part, source)
            for of_part in sections:
                if of_part.name != section:
                    unread.add(of_part.name)
                elif part.row.section is None:
                    read.append((part, replace(section_of(source, of_part, sections), selected=of_part.name)))
                else:
                    read.append((part, source))
        rest = [repr(name) for name in SECTIONS if name in unread]
        if not read:
            text = f"there is no section {section!r}, only {', '.join(rest)}: choose with section (--section)"
            if section == "model":
                text = f"{_no_model(rest)}: copy it, too, or choose with section (--section)"
            # A note names the adapters that lie one level down.
            raise InvalidArgumentError("; ".join((text, *self._notes())), path=self.store.path)
        if section == "model" and len(read) > 1:
            paths = [self.store.path_of(part.names[0]) for part, _ in read]
            text = f"this directory has {len(paths)} models, name one of them: {', '.join(paths)}"
            raise InvalidArgumentError(text, path=self.store.path)
        source = read[0][1]
        if len(read) > 1:
            # The parts of one section may have equal names.
            named = [of_part.renamed(f"{part.stem}.".__add__) for part, of_part in read]
            source = joined(self.framework.kind, self.opened, named)
        note = section_note(section, rest, f" of this {self.framework.kind} directory")
        return replace(
            source,
            opened=self.opened,
            problems=(*self._missing_ranks(section), *source.problems),
            notes=(*source.notes, note, *self._notes()),
            sections=(),
            small_files=self._small_files(),
        )

    def _read(self, part: _StoredPart) -> Source:
        """Open a part by its own format, and remove the key that its framework adds."""
        row, name = part.row, part.names[0]
        store, reader, file = self.store, row.reader, None
        if row.is_directory:
            store = store.below(name)
            # In place of a DCP, accelerate can write one file of torch.save for each rank into this directory.
            if ".metadata" not in store.listing and any(name.endswith(TORCH) for name in store.files):
                reader = "torch_file"
        elif row.has("of"):
            store = store.only(frozenset(part.names).__contains__)
        elif reader != "dcp":
            file = name
        read_part: Callable[..., Source] = import_module(f"statexchange.formats.{reader}").read
        path = store.path
        if file is not None:
            path = store.path_of(file)
        source = read_part(OpenedPath(path, store, file))
        names = source.names
        if row.reader == "dcp" and names:
            # The first key of all names, if they have one in common.
            key = min(names).partition(".")[0]
            if key in _KEYS and all(name.startswith(f"{key}.") for name in names):
                return source.renamed(lambda name: name.removeprefix(f"{key}."))
        return source

    def _missing_parts(self) -> Iterator[StateExchangeError]:
        """Yield an error if the save was not finished, and if there is no model."""
        if self.framework.kind == "trainer" and TRAINER_STATE not in self.store.listing:
            text = "Trainer writes this file last, and it is missing: the save did not finish, or was not copied whole"
            yield IncompleteError(text, path=self.store.path_of(TRAINER_STATE))
        sections = {part.row.section for part in self.parts}
        if sections.isdisjoint(("model", None)) and not self._adapters():
            text = _no_model([repr(name) for name in SECTIONS if name in sections])
            yield IncompleteError(f"{text}: it was not written, or not copied", path=self.store.path)

    def _missing_ranks(self, *sections: str) -> Iterator[StateExchangeError]:
        """Yield an error for each row of these sections that lacks the file of a rank."""
        names: dict[Row, list[str]] = {}
        for part in self.parts:
            if part.row.section in sections and part.row.has("rank"):
                names.setdefault(part.row, []).extend(part.names)
        for row, of_row in names.items():
            matches = {}
            sizes = set()  # the numbers of ranks in the names, 0 without one
            for match in filter(None, map(row.match, of_row)):
                if match["rank"] is not None:  # else one file for all ranks
                    matches[int(match["rank"])] = match
                    sizes.add(match.groupdict().get("ranks", "0"))
            if len(sizes) > 1:
                text = f"{of_row[0].partition('_')[0]} files of {' and '.join(sorted(sizes, key=int))} ranks are here"
                yield CorruptError(f"{text}, of two saves: remove those of one", path=self.store.path)
                continue
            missing = next(rank for rank in count() if rank not in matches)
            # Without the number of ranks, a file that is missing after the last one goes unnoticed.
            if missing < max((0, *map(int, sizes), *matches)):
                match = next(iter(matches.values()))
                name = f"{match.string[: match.start('rank')]}{missing}{match.string[match.end('rank') :]}"
                path = self.store.path_of(name)
                yield IncompleteError("the file of this rank is missing", rank=missing, path=path)

    def _small_files(self) -> Store | None:
        """Return the directory in which the framework keeps config and tokenizer; None without one."""
        if self.framework.kind in ("trainer", "accelerate"):
            return self.store
        if self.framework.kind == "verl" and VERL_FILES in self.store.directories:
            return self.store.below(VERL_FILES)
        return None

    def _adapters(self) -> list[str]:
        """Return the subdirectories in which PEFT keeps adapters that have names."""
        return [name for name in self.store.directories if ADAPTER_CONFIG in self.store.below(name).listing]

    def _notes(self) -> tuple[str, ...]:
        """Return notes about the files and adapters of the directory that are not read."""
        notes = unread_weights(self.store, chain.from_iterable(part.names for part in self.parts))
        adapters = self._adapters()
        if adapters:
            notes += (f"not read: the adapters in {abbreviated_names(adapters)}; to read one, give its path",)
        return notes


def _no_model(sections: Sequence[str]) -> str:
    return f"no file of a model is here, only of {', '.join(sections)}"


def _sections_of(part: _StoredPart, source: Source) -> tuple[Section, ...]:
    """Return a part's sections: the one that it is, or those that its names show."""
    if part.row.section is None and source.files:
        sections = sections_of(source)
        if sections:
            return sections
    return (Section(part.row.section or "model", "", frozenset(source.names)),)


_CKPT = ".ckpt"  # of Lightning's files and directories
_CHECKPOINT = re.compile(
    rf"(checkpoint|global_step|step|epoch|iter)[-_=]?[0-9]{{1,18}}|actor|critic|.*{re.escape(_CKPT)}",
    re.IGNORECASE,
)


def check_none_below(opened: OpenedPath) -> None:
    """Raise InvalidArgumentError for a directory without weights that has checkpoints, of which one must be named."""
    store = opened.store
    if opened.file is not None or any(is_weights(name) and not name.endswith(_CKPT) for name in store.files):
        return
    names = list(map(step_name, list_steps(store)))
    if not names:
        candidates = [*store.directories, *(name for name in store.files if name.endswith(_CKPT))]
        # The newest last.
        names = sorted(filter(_CHECKPOINT.fullmatch, candidates), key=lambda name: (len(name), name))
    if names:
        text = f"this directory contains checkpoints ({abbreviated_names(names)}): name one of them"
        raise InvalidArgumentError(f"{text}, such as {store.path_of(names[-1])}", path=opened.path)
