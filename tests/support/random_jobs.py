"""Random training jobs: their state, saved in any format, and a live state of another job that differs a little.

A job is drawn as plain data, and built from that: so the live one can have the same structure, or one change in it.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from job_models import Holding, Job, Pair, Spec, make_model, parameters_of
from stateful import Holder
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import statexchange as sx
from statexchange.testing import run_ranks

MODELS = ["mlp", "net", "tied", "square", "plist", "stages", "parts", "sub", "tensors", "nested"]
OPTIMIZERS = ["Adam", "AdamW", "SGD", "LBFGS", "Adafactor"]
SCHEDULERS = ["StepLR", "MultiStepLR", "LambdaLR", "SequentialLR", "CosineAnnealingLR", "ReduceLROnPlateau"]
CHANGES = ["permuted groups", "permuted parameters", "one group", "more groups", "fewer parameters", "other head"]
CHANGES += ["key more", "key less", "other optimizer", "other scheduler", "no model", "wrapped", "other extra", "names"]
SOURCES = ["own", "own 2", "torch", "dcp", "dcp flat", "dcp names", "export"]
PLAIN_KEYS: list[Any] = ["a", "b", "a.b", "0", "1", "x y", "state", "None", "step", 0, 1, 2, 10, -1, True, None, 2.5]


class Case(NamedTuple):
    """A case: what is saved, how, what it is loaded into, and with which options."""

    seed: int
    saved: Spec
    live: Spec
    change: str
    source: str
    options: dict[str, Any]
    root: str
    prefix: str
    ranks_differ: bool
    live_is_fresh: bool


def draw(seed: int) -> Case:
    """Draw a case."""
    rng = random.Random(seed)
    saved = _draw_spec(rng)
    change = rng.choice(CHANGES) if rng.random() < 0.5 else ""
    source = rng.choice(SOURCES)
    if not source.startswith("own"):  # torch's loader refuses namedtuples, and a DCP has a tuple as one value
        saved.nesting = {"tuple": "list", "pair": "holding"}.get(saved.nesting, saved.nesting)
    live = copy.deepcopy(saved)
    if change:
        _apply(live, change, rng)
    live.steps = rng.choice([0, 0, 1, 2])
    if source in ("dcp flat", "dcp names"):
        saved.steps = max(saved.steps, 1)  # else torch makes a state of zeros
    options = _draw_options(rng, saved) if rng.random() < 0.4 else {}
    roots = ["", "", "", "", "list", "object"] if not options and live.nesting == "" else [""]
    if source == "export":
        roots = ["model", "model", "model", "model in state"]
    prefix = rng.choice(["", "", "", "module.", "_orig_mod."]) if source in ("torch", "dcp") else ""
    return Case(seed, saved, live, change, source, options, rng.choice(roots), prefix, rng.random() < 0.3, True)


def _draw_spec(rng: random.Random) -> Spec:
    spec = Spec(rng.choice(MODELS), wrapper=rng.choice(["", "", "", "", "compile", "averaged"]))
    if spec.model in ("stages", "parts", "sub", "tensors"):
        spec.wrapper = ""
    if rng.random() < 0.85:
        spec.optimizer = rng.choice(OPTIMIZERS)
        count = len(parameters_of(spec.model, make_model(spec.model, 2)))
        numbers = [*range(count)]
        if rng.random() < 0.3:
            rng.shuffle(numbers)
        if rng.random() < 0.15:
            numbers = numbers[:-1] or numbers
        cuts = sorted(rng.sample(range(1, len(numbers)), min(rng.choice([0, 0, 1, 1, 2]), len(numbers) - 1)))
        if spec.optimizer == "LBFGS":
            cuts = []
        spec.groups = [numbers[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(numbers)], strict=True)]
        spec.has_names = rng.random() < 0.2
        spec.lr_is_tensor = rng.random() < 0.15 and spec.optimizer in ("Adam", "AdamW")
        spec.is_stray = rng.random() < 0.07
        spec.steps = rng.choice([0, 1, 1, 2])
        if rng.random() < 0.45:
            spec.scheduler = rng.choice(SCHEDULERS)
    spec.has_ema = rng.random() < 0.12 and spec.model in ("mlp", "net", "tied", "square")
    odd = rng.random() < 0.15
    for role in ("model", "optimizer", "scheduler", "ema", "extra"):
        spec.keys[role] = rng.choice([role, f"train.{role}", f"{role}.0"]) if odd else role
    spec.nesting = rng.choice(["", "", "", "dict", "list", "tuple", "pair", "holding", "deep"])
    if rng.random() < 0.75:
        spec.extra = {"rng": rng.randrange(1 << 30), "depth": rng.choice([1, 2, 3])}
    return spec


def _apply(spec: Spec, change: str, rng: random.Random) -> None:
    """Change a spec a little."""
    if change == "permuted groups":
        rng.shuffle(spec.groups)
    elif change == "permuted parameters":
        for group in spec.groups:
            rng.shuffle(group)
    elif change == "one group":
        spec.groups = [[number for group in spec.groups for number in group]] if spec.groups else []
    elif change == "more groups" and spec.optimizer != "LBFGS":
        spec.groups = [[number] for group in spec.groups for number in group]
    elif change == "fewer parameters":
        spec.groups = [group[1:] for group in spec.groups if group[1:]] or spec.groups
    elif change == "other head":
        spec.out = 3
    elif change in ("key more", "key less"):
        spec.extra["change"] = change
    elif change == "other optimizer" and spec.optimizer:
        spec.optimizer = rng.choice(OPTIMIZERS if len(spec.groups) == 1 else ["Adam", "AdamW", "SGD"])
        spec.lr_is_tensor &= spec.optimizer in ("Adam", "AdamW")
    elif change == "other scheduler" and spec.optimizer:
        spec.scheduler = rng.choice(["", *SCHEDULERS])
    elif change == "no model":
        spec.has_model = False
    elif change == "wrapped" and spec.model not in ("stages", "parts", "sub", "tensors"):
        spec.wrapper = rng.choice(["", "compile", "averaged"])
    elif change == "other extra":
        spec.extra["rng"] = rng.randrange(1 << 30)
    elif change == "names":
        spec.has_names = not spec.has_names


def _draw_options(rng: random.Random, spec: Spec) -> dict[str, Any]:
    begin = {"dict": "job.", "deep": "a.b."}.get(spec.nesting, "")
    keys = [begin + key for key in spec.keys.values()]
    patterns = [*keys, *(f"{key}.*" for key in keys), "*head*", "*weight*", "*exp_avg*", "*lr*", "*.0*", "*body*"]
    patterns += ["*bias", f"{keys[1]}.param_groups*", f"{keys[1]}.state*", "*step*", f"{keys[1]}.state.*.weight.*"]
    patterns += ["items[[]0]*", "items[0].*", "job*", "*.a*", "*extra*.b", "*_last_lr*", "*milestones*"]
    options: dict[str, Any] = {}
    kind = rng.randrange(7)
    if kind in (0, 2):
        options["include"] = rng.sample(patterns, rng.randint(1, 3))
    if kind in (1, 2):
        options["exclude"] = rng.sample(patterns, rng.randint(1, 2))
    if kind == 3:
        options["strict"] = False
    if kind == 4:
        options["replicas"] = "root"
    if kind == 5:
        model = spec.keys["model"]
        options["rename"] = rng.choice(
            [
                [(r"\bbody\b", "head")],
                [(rf"^{model}\.", "model.")],
                [("head", "tail")],
                [(r"\b0\b", "1")],
                [(r"^optimizer", "opt")],
                [(r"extra", "other")],
                [("weight", "bias"), ("bias$", "weight")],
            ]
        )
    if kind == 6:
        options |= {"strict": False, "exclude": rng.sample(patterns, 1)}
    return options


def build(spec: Spec, seed: int) -> Job:
    """Build a job with random values."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    plain = make_model(spec.model, spec.out)
    parameters = parameters_of(spec.model, plain)
    model: Any = plain
    if spec.wrapper == "averaged":
        model = AveragedModel(plain)
        model.n_averaged += seed % 3
        parameters = parameters_of(spec.model, model.module)
    elif spec.wrapper == "compile":
        model = torch.compile(plain, backend="eager")
    sections: dict[str, Any] = {}
    if spec.has_model:
        sections["model"] = model
    optimizer: Any = None
    if spec.optimizer:
        trained = parameters
        if spec.is_stray:
            trained = {name: nn.Parameter(torch.randn_like(one)) for name, one in parameters.items()}
            parameters = trained
        optimizer = _optimizer(spec, trained, rng)
        sections["optimizer"] = optimizer
    if spec.has_ema:
        sections["ema"] = AveragedModel(plain)
        for one in sections["ema"].parameters():
            one.data.normal_()
    if optimizer is not None and spec.scheduler:
        sections["scheduler"] = _scheduler(spec, optimizer)
        for _ in range(spec.steps):
            if spec.scheduler == "ReduceLROnPlateau":
                sections["scheduler"].step(rng.random())
            else:
                sections["scheduler"].step()
    if spec.extra:
        sections["extra"] = Extra(spec.extra, rng).state()
    state = {spec.keys[role]: value for role, value in sections.items()}
    return Job(_nested(state, spec.nesting), parameters, model, optimizer, spec)


def step_randomly(optimizer: Any) -> None:
    """Let an optimizer take one step by random gradients."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        loss = torch.stack([(one * torch.randn_like(one)).sum() for one in parameters]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def _optimizer(spec: Spec, parameters: dict[str, Any], rng: random.Random) -> Any:
    names = [*parameters]
    groups = []
    for numbers in spec.groups:
        of_group = [(names[number], parameters[names[number]]) for number in numbers if number < len(names)]
        lr: Any = rng.choice([0.1, 0.2, 0.3, 0.4])
        if spec.lr_is_tensor:
            lr = torch.tensor(lr)
        groups.append({"params": of_group if spec.has_names else [one for _, one in of_group], "lr": lr})
    if spec.optimizer == "LBFGS":
        params = groups[0]["params"]
        optimizer: Any = torch.optim.LBFGS(params, lr=rng.choice([0.1, 0.2]), max_iter=2)
    else:
        more = {"SGD": {"momentum": 0.9}, "Adam": {"betas": (rng.choice([0.8, 0.9]), 0.99)}}.get(spec.optimizer, {})
        optimizer = getattr(torch.optim, spec.optimizer)(groups, **more)

    for _ in range(spec.steps):
        step_randomly(optimizer)
    optimizer.zero_grad()
    return optimizer


def _scheduler(spec: Spec, optimizer: Any) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "StepLR": lambda: lr_scheduler.StepLR(optimizer, 2),
        "MultiStepLR": lambda: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
        "LambdaLR": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        "SequentialLR": lambda: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [1, 3])], [2]
        ),
        "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer),
    }
    return makers[spec.scheduler]()


def _nested(state: dict[str, Any], nesting: str) -> Any:
    if nesting == "dict":
        return {"job": state, "run": 3}
    if nesting == "deep":
        return {"a": {"b": state}, "c": {}}
    values = [*state.values()]
    if nesting == "list":
        return {"items": values}
    if nesting == "tuple":
        return {"items": tuple(values)}
    if nesting in ("pair", "holding"):
        kind = Pair if nesting == "pair" else Holding
        return {"both": kind(state, len(values))}
    return state


class Extra:
    """Draws nested values and objects; the structure from one seed, the values from another."""

    def __init__(self, extra: dict[str, Any], values: random.Random) -> None:
        self.rng = random.Random(extra.get("rng", 0))
        self.depth = extra.get("depth", 1)
        self.change = extra.get("change", "")
        self.values = values

    def state(self) -> Any:
        value = {f"k{number}": self.value(self.depth) for number in range(self.rng.randint(1, 3))}
        if self.change == "key more":
            value["more"] = self.values.randrange(9)
        if self.change == "key less":
            value.popitem()
        return value

    def value(self, depth: int, *, objects: bool = True) -> Any:
        rng, kind = self.rng, self.rng.random()
        if depth == 0 or kind < 0.35:
            return self.leaf()
        if kind < 0.5:
            return [self.value(depth - 1, objects=objects) for _ in range(rng.randrange(4))]
        if kind < 0.57:
            return tuple(self.value(depth - 1, objects=objects) for _ in range(rng.randrange(3)))
        if kind < 0.61:
            return Pair(self.value(depth - 1, objects=objects), self.leaf())
        if kind < 0.64 and objects:
            return Holding(self.value(depth - 1, objects=objects), self.leaf())
        if kind < 0.74 and objects:
            return Holder(self.mapping(depth - 1, objects=False))
        if kind < 0.77 and objects:
            return nn.Linear(2, 1)
        if kind < 0.775 and objects:
            return sx.integrations.RandomState()
        return self.mapping(depth - 1, objects=objects)

    def mapping(self, depth: int, *, objects: bool) -> Any:
        rng = self.rng
        kind = rng.random()
        if kind < 0.1:
            return Counter({rng.randrange(9): self.values.randint(1, 5) for _ in range(3)})
        numbers = kind < 0.25
        keys = [rng.randrange(12) if numbers else rng.choice(PLAIN_KEYS) for _ in range(rng.randrange(4))]
        items = {key: self.value(depth, objects=objects) for key in keys}
        if kind > 0.95:
            return OrderedDict(items)
        return defaultdict(list, items) if kind > 0.9 else items

    def leaf(self) -> Any:
        rng, values = self.rng, self.values
        makers: list[Callable[[], Any]] = [
            lambda: values.randrange(100),
            values.random,
            lambda: f"text {values.randrange(9)}",
            lambda: values.choice([None, True, False]),
            lambda: torch.randint(0, 100, (rng.randrange(3),)),
            lambda: torch.randn(rng.choice([(), (2, 2)])),
            lambda: [values.randrange(9) for _ in range(rng.randrange(3))],
            dict,
            list,
        ]
        return rng.choice(makers)()


def without_objects(value: Any) -> Any:
    """Return what a user of torch saves of a state: the state dict of each object."""
    if isinstance(value, list | tuple):
        items = [without_objects(item) for item in value]
        return items if isinstance(value, list) else tuple(items)  # torch's loader refuses namedtuples
    if dataclasses.is_dataclass(value):
        return {field.name: without_objects(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, nn.Module) or hasattr(value, "load_state_dict"):
        return without_objects(value.state_dict())
    if isinstance(value, Counter):
        return Counter(value)
    if isinstance(value, defaultdict):
        return defaultdict(list, {key: without_objects(item) for key, item in value.items()})
    if isinstance(value, dict):
        return {key: without_objects(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def save(case: Case, path: Path) -> Path | None:
    """Save the case's job; None if its format cannot hold it."""
    job = build(case.saved, case.seed)
    state = job.state
    if case.source == "own":
        sx.save_checkpoint(state, path)
        return path
    if case.source == "own 2":
        return _saved_by_two(case, path)
    if case.source == "export":
        if case.saved.model in ("parts", "sub"):
            return None
        sx.export_checkpoint(job.model, path)
        return path
    tree = without_objects(state)
    is_module = isinstance(job.model, nn.Module)
    if case.source in ("dcp flat", "dcp names") and is_module and job.optimizer and not case.saved.is_stray:
        options = StateDictOptions(flatten_optimizer_state_dict=case.source == "dcp flat")
        try:
            of_optimizer = get_optimizer_state_dict(job.model, job.optimizer, options=options)
            of_model = get_model_state_dict(job.model)
        except Exception:  # noqa: BLE001 (whatever torch cannot do)
            return None
        tree = replaced(state, {id(job.model): of_model, id(job.optimizer): of_optimizer})
    if case.prefix and is_module:
        of_model = {case.prefix + name: value for name, value in without_objects(job.model).items()}
        tree = replaced(state, {id(job.model): of_model})
    if case.source == "torch":
        torch.save(tree, path.with_suffix(".pt"))  # the format under test
        return path.with_suffix(".pt")
    try:
        dcp.save(tree, checkpoint_id=path, no_dist=True)
    except CheckpointException:  # which is no Exception
        return None
    return path


def replaced(state: Any, new: dict[int, Any]) -> Any:
    """Return a state's tree with other values for some objects."""
    if id(state) in new:
        return new[id(state)]
    if isinstance(state, dict) and type(state) is dict:
        return {key: replaced(item, new) for key, item in state.items()}
    if type(state) in (list, tuple):
        return type(state)([replaced(item, new) for item in state])
    if isinstance(state, Pair):
        return tuple(replaced(item, new) for item in state)
    if isinstance(state, Holding):
        return {"first": replaced(state.first, new), "second": state.second}
    return without_objects(state)


def _saved_by_two(case: Case, path: Path) -> Path:
    jobs = [build(case.saved, case.seed), build(case.saved, case.seed)]
    if case.ranks_differ:
        numbers = random.Random(case.seed)
        for place in _plain_places(jobs[1].state):
            if numbers.random() < 0.3:
                place()

    def of_rank() -> None:
        sx.save_checkpoint(jobs[sx.get_rank()].state, path)

    run_ranks(of_rank, 2)
    return path


def _plain_places(value: Any) -> list[Callable[[], None]]:
    """Return functions each of which changes one plain value of a mapping."""
    found: list[Callable[[], None]] = []
    items = [*value.items()] if type(value) is dict else [*enumerate(value)] if type(value) is list else []
    for key, item in items:
        if type(item) in (int, float):
            found.append(lambda key=key, item=item: value.__setitem__(key, item + 1))
        found += _plain_places(item)
    if isinstance(value, Holding):
        found += _plain_places(value.first)
    if isinstance(value, Pair):
        found += _plain_places(value.first)
    if isinstance(value, torch.optim.Optimizer):
        found += [change for group in value.param_groups for change in _plain_places(group)]
    return found


def live_job(case: Case) -> tuple[Job, Any]:
    """Build the live job, and return it with the state to load into."""
    job = build(case.live, case.seed + 1_000_003)
    return job, root_of(case, job)


def root_of(case: Case, job: Job) -> Any:
    """Return the part of a job's state that the case is about."""
    if case.root == "object":
        values = [value for value in job.state.values() if isinstance(value, nn.Module | torch.optim.Optimizer)]
        if values:
            return values[case.seed % len(values)]
    if case.root == "model":
        return job.model
    if case.root == "model in state":
        return {"model": job.model, "step": 3} if case.seed % 2 else {"model": job.model}
    return [*job.state.values()] if case.root == "list" else job.state
