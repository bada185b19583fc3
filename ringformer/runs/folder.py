"""Folder of a run while this process trains in it: the run is compared with the folder's record, resumed, and recorded
again."""

import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

from ringformer.checkpoints.copies import Copies, not_apart, settled_steps
from ringformer.checkpoints.manager import Checkpoints, State
from ringformer.checkpoints.retention import Keep
from ringformer.checkpoints.saved_model import latest_step, other_tokenizer
from ringformer.checkpoints.verify import checkpoint_faults
from ringformer.data import Tokenizer, save_tokenizer
from ringformer.data.tokenizers.special_tokens import MODEL_IDS
from ringformer.files.atomic import write_object, write_whole
from ringformer.files.bucket import ObjectStore
from ringformer.files.run_layout import BEGINS, CARRIED, CONFIG, HF_CONFIG, LICENCES, METRICS
from ringformer.files.untrusted import contained_files, read_object
from ringformer.models.registry import registered_by
from ringformer.processes.agreement import from_process_0
from ringformer.processes.run_lock import RunLock
from ringformer.runs.config import Config
from ringformer.runs.identity import Identity, identity_hash, origin
from ringformer.runs.metrics import evaluation_losses, read_metrics
from ringformer.runs.record import Changes, Checked, check_run, keep_record, note_saved


class RunFolder:
    """Folder of a run that is being trained; resumes the run from its latest checkpoint, and records it."""

    def __init__(
        self,
        lock: RunLock,
        path: Path,
        config: Config,
        tokenizer: Tokenizer,
        identity: Identity,
        checked: Checked,
        allow: Collection[str],
        begins: bool | None,
    ):
        """
        Args:
          lock: the folder's lock, which this process holds until the run ends.
          checked: result of the comparison during the run's preparation; the comparison is repeated if there is a later
            checkpoint.
          allow: keys that may have changed.
          begins: result of `texts_begin` for the run's training stores, which its prompts follow.

        Raises ValueError as `check_run` does.
        """
        # The previous stage may have been trained since this one was prepared.
        identity = {**identity, "init_from": origin(config.init_from)}
        if latest_step(path) != checked.step:
            checked = check_run(path, identity, config.steps, allow)
        self.path = path
        self.changes: Changes = checked.changes
        self._config = config
        self._tokenizer = tokenizer
        self._identity = identity
        self._about_texts = {BEGINS: begins}
        self.check: Callable[[], None] = lock.check
        """Function that raises OSError if this process has lost the lock."""
        self._recorded = False
        self.keep: Keep = Keep(config.keep_checkpoints, config.keep_every, config.keep_best)
        self._copies: Copies | None = None
        self.start: int | None = None
        """Step that the run continues from; None if the run begins."""
        self.damage: list[str] = []
        """Messages about damaged checkpoints, which were set aside."""
        self.about_start: dict[str, Any] = {}
        """Notes that were saved with the step that the run continues from."""

    def close(self) -> None:
        """Record that the run has checkpoints; call this after the last save."""
        if jax.process_index() == 0:
            note_saved(self.path)

    def resume(self, target: State, shardings: State) -> tuple[Checkpoints, State | None]:
        """Open the checkpoints, restore the newest whole one, and record the run. The state is None if there is no
        checkpoint.

        A changed run is recorded only with its first save: until then, the run can still continue with its old config.

        Args:
          target, shardings: as for `Checkpoints`.

        Raises:
          ValueError: the destination of the copies holds checkpoints of another run.
          DamagedFiles: there are checkpoints, but none of them is whole.
        """
        if self._config.copy_to:
            self._copies = self._open_copies()
        checkpoints = Checkpoints(self.path, target, shardings, self.keep, self._copies)
        self.start, state, self.damage = checkpoints.restore_newest()
        if self.start is not None:
            for step, loss in evaluation_losses(self.path).items():
                if step <= self.start:  # later steps are repeated
                    self.keep.losses[step] = loss
            self.about_start = checkpoints.about(self.start)
            self.keep.resume(self.about_start, self.changes)
        if not self.changes:
            self._record()
        return checkpoints, state

    def begin_copies(self) -> None:
        """Copy the checkpoint that the run continues from, if the copy is missing."""
        if self._copies is not None and self.start:
            self._copies.begin(self.start, self.keep)

    def save(self, checkpoints: Checkpoints, state: State, notes: dict[str, Any]) -> None:
        """Save a state with its notes and the run's identity; a changed run is recorded before its first save."""
        self.check()
        if not self._recorded:
            self._record()
        about = {"run": identity_hash(self._identity), "data.store": self._identity["data.store"]}
        checkpoints.save(state, about | {"run_dir": str(self.path)} | notes)
        if jax.process_index() == 0:
            note_saved(self.path)  # notes the previous save, which is finished by now

    def _open_copies(self) -> Copies | None:
        """Return the copier of checkpoints, on process 0 only.

        Raises ValueError on all processes if the checkpoints cannot be copied to their destination.
        """
        copies = None
        refusal = ""
        if jax.process_index() == 0:
            try:
                copies = Copies(self.path, self._config.copy_to)
                refusal = copies.refusal()
            except OSError as error:
                refusal = str(error)
        if refusal := from_process_0(refusal):
            raise ValueError(refusal)
        return copies

    def _record(self) -> None:
        """Write the resolved config and how texts begin, the tokenizer, the files that a converted model brought along,
        and the identity."""
        self._recorded = True
        self.path.mkdir(parents=True, exist_ok=True)
        if jax.process_index() != 0:
            return
        config = self._config
        resolved = dataclasses.asdict(config) | registered_by(config.model) | self._about_texts
        write_object(self.path / CONFIG, resolved)
        (self.path / METRICS).touch()  # marks a run, as opposed to a converted model
        if config.init_from:
            self._carry(config.init_from)
        save_tokenizer(self._tokenizer, self.path)
        keep_record(self.path, self._identity, self.start, self.changes)

    def _carry(self, model: str) -> None:
        """Copy the files that the initial model brought along from Hugging Face: without its tokenizer and its special
        ids, if the run has another tokenizer."""
        replaced = other_tokenizer(model, self._tokenizer) is not None
        names = LICENCES if replaced else (*CARRIED, HF_CONFIG)
        for file in contained_files(model, names):
            write_whole(self.path / file.name, file.read_bytes())
        if replaced and contained_files(model, [HF_CONFIG]):
            ids = dict(zip(MODEL_IDS, (self._tokenizer.bos_id, self._tokenizer.eos_id, None), strict=True))
            hf = read_object(model, HF_CONFIG) | ids
            write_whole(self.path / HF_CONFIG, f"{json.dumps(hf, indent=1)}\n")


def nothing_left(config: Config) -> bool:
    """Return True if a run is finished, and its last checkpoint is whole and, if the config requests copies, copied.
    All processes call this function."""
    if not finished(config) or checkpoint_faults(config.run_dir, config.steps):
        return False
    if not config.copy_to:
        return True
    store = ObjectStore(config.copy_to)
    return config.steps in settled_steps(store) and not not_apart(Path(config.run_dir), store)


def finished(config: Config) -> bool:
    """Return True if the checkpoint of the run's last step exists, and its evaluation if there are held-out data."""
    if not config.run_dir:
        return False
    rows = read_metrics(Path(config.run_dir, METRICS))
    evaluated = any(row["step"] == config.steps and "eval_tokens" in row for row in rows)
    return (latest_step(config.run_dir) or 0) >= config.steps and (evaluated or not config.data.held_out)
