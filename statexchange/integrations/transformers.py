"""Hugging Face's Trainer: a callback that exports, and a Trainer that saves to `Checkpoints` and resumes from them.

A callback cannot resume a run: Trainer decides before the first event with which epoch and batch it begins. So a
subclass overrides the methods by which Trainer saves and resumes, and Trainer's own code skips the data that was seen:

1. `train(resume_from_checkpoint=True)` loads the entry "trainer" of the newest save and gives it to Trainer as a
   temporary directory with ``trainer_state.json``. From that Trainer finds the epoch and the batches to skip.
2. Where Trainer would load weights, before it wraps the model, nothing is loaded.
3. Once model, optimizer and scheduler are made and wrapped, the rest of the save is loaded into them, in place.
4. The random states are set where Trainer sets them: after the batches are skipped.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from statexchange.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from statexchange.exchange.checkpoints import Checkpoints
from statexchange.exchange.export import export_checkpoint
from statexchange.integrations.random import RandomState

if TYPE_CHECKING:
    import torch
    from transformers import TrainerControl, TrainingArguments
    from transformers.trainer_utils import TrainOutput

_log = logging.getLogger(__name__)
_STATE_FILE = "trainer_state.json"
_RANK_FIELDS = ("is_local_process_zero", "is_world_process_zero")  # fields of TrainerState that Trainer sets anew


class ExportCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Exports the model as one merged checkpoint at each of Trainer's saves.

    Trainer calls it on all ranks, whether the model is replicated or sharded by FSDP2. Each export is a directory that
    `from_pretrained` loads: it has the model's config and the files of Trainer's ``processing_class``, if there is one.

    Args:
        path: the directory of the exports, ``path/checkpoint-500`` and so on; by default each lies in Trainer's own
            checkpoint directory as ``merged``.
        options: options of `export_checkpoint`, such as ``dtype="bfloat16"``.

    Raises:
        InvalidArgumentError: `export_checkpoint` has no such option.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        >>> import statexchange as sx
        >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> rows = [{"input_ids": row, "labels": row} for row in torch.randint(50, (16, 4))]
        >>> args = TrainingArguments("run", max_steps=2, save_steps=2, use_cpu=True, report_to="none")
        >>> export = sx.integrations.ExportCallback("exports", dtype="bfloat16")
        >>> trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows, callbacks=[export])
        >>> trainer.train().global_step
        {'train_runtime': ...}
        2
        >>> LlamaForCausalLM.from_pretrained("exports/checkpoint-2", dtype="auto").dtype
        torch.bfloat16
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, **options: Any) -> None:
        # Now: the first export, after hours of training, would be too late.
        unknown = options.keys() - (inspect.signature(export_checkpoint).parameters.keys() - {"state", "path"})
        if unknown:
            raise InvalidArgumentError(f"export_checkpoint has no option {sorted(unknown)[0]!r}")
        self._path = path
        # A run that resumes comes to steps that it has exported before.
        self._options: dict[str, Any] = {"overwrite": True, **options}

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 (the signature of an event)
        *,
        model: torch.nn.Module,
        processing_class: object = None,
        **kwargs: object,  # noqa: ARG002
    ) -> None:
        """Export. Collective; Trainer calls it."""
        name = f"checkpoint-{state.global_step}"
        path = os.path.join(args.output_dir, name, "merged")
        if self._path is not None:
            path = os.path.join(self._path, name)
        # A user's own processing class may have no files.
        tokenizer = processing_class if hasattr(processing_class, "save_pretrained") else None
        export_checkpoint(model, path, **{"tokenizer": tokenizer, **self._options})


class CheckpointsTrainer(Trainer):  # type: ignore[misc]  # transformers is not followed by mypy
    """A Trainer that saves to `Checkpoints` and resumes from them, on any number of ranks.

    Each save has the model, the optimizer, the scheduler, the gradient scaler, the random states of each rank and
    Trainer's own state; each rank writes its own part. A save is due by the schedule of Trainer (``save_strategy``,
    ``save_steps``) or by ``saves.should_save``. After a signal of ``on_signal`` it saves and ends the training. Numbers
    that Trainer logged at the step are the metrics of the save, for ``best``.

    ``train(resume_from_checkpoint=True)`` goes on from the newest save, or starts if there is none yet, and skips the
    data that was seen; ``train()`` starts anew, and a path is a checkpoint of Trainer's own.
    On the same number of ranks the run goes on as if it had not ended. On another number the batches differ, random
    states are not restored, and where ranks saved different values rank 0's are used, as Trainer does.

    For other trainers, such as TRL's: ``class SavingTrainer(CheckpointsTrainer, SFTTrainer): pass``.

    Args:
        args: positional arguments of Trainer.
        saves: the saves, or the path for a `Checkpoints` of default options; the same on all ranks.
        background: save in the background.
        kwargs: keyword arguments of Trainer.

    Raises:
        InvalidArgumentError: `saves` is neither.
        UnsupportedError: an argument asks for what these saves do not have: DeepSpeed, ``load_best_model_at_end``,
            ``save_total_limit``, ``push_to_hub`` at each save.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> import statexchange as sx
        >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> rows = [{"input_ids": row, "labels": row} for row in torch.randint(50, (16, 4))]
        >>> args = TrainingArguments("run", max_steps=4, save_steps=2, use_cpu=True, report_to="none")
        >>> saves = sx.Checkpoints("saves")
        >>> model = LlamaForCausalLM(config)
        >>> trainer = sx.integrations.CheckpointsTrainer(model, args, train_dataset=rows, saves=saves)
        >>> trainer.train(resume_from_checkpoint=True).global_step
        {'train_runtime': ...}
        4
        >>> saves.steps()
        [2, 4]
    """

    def __init__(
        self, *args: object, saves: Checkpoints | str | os.PathLike[str], background: bool = False, **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        self._check_supported()
        self.saves = saves if isinstance(saves, Checkpoints) else Checkpoints(saves)
        self._background = background
        self._resumed_ranks: int | None = None  # while resuming from a save: the ranks that saved it
        self._resumed_random: Mapping[str, Any] | None = None
        self._saved_step: int | None = None
        self.add_callback(_SaveWhenDue(self.saves))

    def _check_supported(self) -> None:
        """Raise UnsupportedError for arguments that only Trainer's own saves support."""
        args = self.args
        # hub_strategy is an enum, or the text that a user has set it to.
        pushes = args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end"
        refused = {
            "DeepSpeed keeps its state in an engine of its own": self.is_deepspeed_enabled,
            "load_best_model_at_end: keep the best save by Checkpoints(best=...), and load it afterwards": (
                args.load_best_model_at_end
            ),
            "save_total_limit: Checkpoints(keep=...) decides which saves stay": args.save_total_limit is not None,
            "push_to_hub at each save: pass hub_strategy='end'": pushes,
        }
        for text, is_asked in refused.items():
            if is_asked:
                raise UnsupportedError(f"CheckpointsTrainer cannot do this: {text}")

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, from the newest save or from the start. Collective.

        Args:
            resume_from_checkpoint: True: go on from the newest save, or start if there is none. None or False: start
                anew. A path: a checkpoint directory of Trainer's own.
            trial: not supported.
            ignore_keys_for_eval: as for Trainer.

        Returns:
            As Trainer.

        Raises:
            UnsupportedError: there is a `trial`.
            NotFoundError: the newest save was not made by a CheckpointsTrainer.
            StateExchangeError: as `Checkpoints.load` and `Checkpoints.save`.
        """
        if trial is not None:
            raise UnsupportedError("trials of a hyperparameter search would share the steps of their saves")
        # A second training counts its steps from 0 again, and may come to the step of the last save.
        self._saved_step = None
        if resume_from_checkpoint is not True:
            return super().train(resume_from_checkpoint, None, ignore_keys_for_eval)
        stored: dict[str, Any] = {}  # an empty state takes what the save has
        report = self.saves.load(stored, include="trainer.*", replicas="root")  # each rank measured its own times
        if report is None:
            return super().train(None, None, ignore_keys_for_eval)
        fields = dict(stored.get("trainer", {}))
        if "ranks" not in fields:
            text = "CheckpointsTrainer did not make this save: load it into the model by Checkpoints.load, then train()"
            raise NotFoundError(text, path=report.path)
        self._resumed_ranks = fields.pop("ranks")
        self._saved_step = report.step
        # Trainer reads its state from a file alone, on each rank.
        with tempfile.TemporaryDirectory() as folder:
            TrainerState(**fields).save_to_json(os.path.join(folder, _STATE_FILE))
            try:
                return super().train(folder, None, ignore_keys_for_eval)
            finally:
                # A later train(path) loads that checkpoint by Trainer's own code again.
                self._resumed_ranks = self._resumed_random = None

    # Methods that Trainer calls

    def _save_checkpoint(self, model: object, trial: object) -> None:  # noqa: ARG002 (self.model is the one without wrappers)
        step = self.state.global_step
        if step == self._saved_step:  # a step that ends an epoch may be saved for both
            return
        # As Trainer does before its own save: the counts and the callbacks' states that are written are those of now.
        self.store_flos()
        callbacks = [*self.callback_handler.callbacks, self.control]
        exportable = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks
        fields = dataclasses.asdict(self.state)
        for key in _RANK_FIELDS:
            del fields[key]
        state = {**self._live_state(RandomState()), "trainer": {**fields, "ranks": self.args.world_size}}
        metrics = _logged_at(step, self.state.log_history)
        if self._background:
            self.saves.save(state, step, metrics=metrics, background=True)
        else:
            self.saves.save(state, step, metrics=metrics)
        self._saved_step = step

    def _live_state(self, random: RandomState) -> dict[str, object]:
        state = {
            "model": self.model,
            "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),  # accelerate wraps it
            "scheduler": self.lr_scheduler,
            "random": random,
        }
        scaler = getattr(self.accelerator, "scaler", None)
        return state if scaler is None else {**state, "scaler": scaler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        # The model is loaded together with the optimizer, which does not exist yet at Trainer's first call of this.
        if self._resumed_ranks is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed_ranks is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # Trainer calls this also if no optimizer was saved, so it is the one place where all is wrapped and in place.
        random = _LaterRandomState()
        state = self._live_state(random)
        if self._resumed_ranks == self.args.world_size:
            self.saves.load(state, self._saved_step, exclude="trainer.*")
        else:
            _log.warning(
                "the save was made on %d ranks and this job has %d: random states are not restored",
                self._resumed_ranks,
                self.args.world_size,
            )
            self.saves.load(state, self._saved_step, exclude=["trainer.*", "random.*"], replicas="root")
        self._resumed_random = random.loaded

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed_ranks is None:
            super()._load_rng_state(checkpoint)
        elif self._resumed_random is not None:
            RandomState().load_state_dict(self._resumed_random)


class _LaterRandomState(RandomState):
    """Random states that are loaded now and set later."""

    loaded: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state


class _SaveWhenDue(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Asks for a save when `should_save` does, and ends the training after a signal."""

    def __init__(self, saves: Checkpoints) -> None:
        self._saves = saves

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 (the signature of an event)
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,  # noqa: ARG002
    ) -> TrainerControl:
        # Added to what Trainer's schedule has decided: its own callback has run before.
        control.should_save |= self._saves.should_save(state.global_step)
        control.should_training_stop |= self._saves.is_stopping
        return control


def _logged_at(step: int, history: list[dict[str, object]]) -> dict[str, float]:
    """Return the numbers that were logged at a step, by name."""
    numbers: dict[str, float] = {}
    for entry in history:
        # Training and evaluation log separately at one step: the losses of both are metrics of the save.
        if entry.get("step") == step:
            numbers |= {name: float(value) for name, value in entry.items() if isinstance(value, int | float)}
    return {name: number for name, number in numbers.items() if name not in ("step", "epoch")}
