"""The forms of the study: what each trains and evaluates, and on which machine."""

from dataclasses import dataclass, field, replace

K = 1024
RELEASED, THETA = "released", "theta"
"""Models that nobody trains: as released, and with a larger rope theta."""
SHIFTED, UNSHIFTED, LORA, LONG = "shifted", "unshifted", "lora", "long"
"""Models that are trained: with shifted positions, the same without shifts, adapters with shifts, at whole lengths."""

RINGS = (1, 8)
"""Devices of the ring that take the same step."""
LINES = "lines"
"""Task of the number that one line among many has."""

Flags = dict[str, object]


@dataclass(frozen=True)
class Training:
    """A run: its config file in this folder, and the keys that differ from it."""

    config: str
    keys: Flags = field(default_factory=dict)


@dataclass(frozen=True)
class Losses:
    """Held-out documents whose loss is measured, and the tokens of each."""

    context: int
    documents: int


@dataclass(frozen=True)
class Task:
    """A task with answers: of RULER, or, named `LINES`, line retrieval."""

    name: str
    lengths: tuple[int, ...]
    cases: int

    @property
    def evaluation(self) -> str:
        """Verb of `ringformer eval` that measures it."""
        return LINES if self.name == LINES else "ruler"


@dataclass(frozen=True)
class Plan:
    """One form of the study."""

    rope_theta: float
    """Base of the rotary frequencies of all models but the released one."""
    trainings: dict[str, Training]
    """Runs by the name of their model, in the order of the tables."""
    losses: tuple[Losses, ...]
    """Losses by position; tables and the figure show the first, and list the others apart."""
    tasks: tuple[Task, ...]
    task_models: tuple[str, ...]
    """Models that are asked the tasks, which take most of the study's hours."""
    machine: Flags = field(default_factory=dict)
    """Flags of evaluations and chats for this machine."""
    runs_at_once: int = 1
    """Runs that train at the same time: a step of a short sequence keeps little more than one core busy."""
    at_once: int = 1
    """Evaluations that run at the same time, on a machine with as many cores and as much memory as that needs."""
    short_questions: int = 0
    """Questions of the short task (`continuations.py`)."""
    ring_step: int | None = None
    """Tokens of a train step that a ring of eight simulated devices and one device take from the same weights."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models, in the order of the tables."""
        return (RELEASED, THETA, *self.trainings)

    def on_an_accelerator(self) -> "Plan":
        """Return the same plan for one GPU, whose evaluations run three at a time."""
        return replace(self, machine={"prefill_chunk": 16 * K}, at_once=3, runs_at_once=1)


def loss_folder(plan: Plan, losses: Losses) -> str:
    """Return the name of the folder, and of the part, of some of a plan's losses."""
    return "loss" if losses == plan.losses[0] else f"loss-{losses.context}"


TWO_CORES: Flags = {"cpu_devices": 2, "mesh_dim": "1,1,1,2"}
"""A ring of two simulated devices, which keeps both cores busy."""
SHIFTS: Flags = {"data.position_range": 16 * K}
ADAPTERS: Flags = {"lora.rank": 16, "lora.base_dtype": "bfloat16", "optimizer.learning_rate": 5e-4}
CORE = Plan(
    rope_theta=4e5,
    trainings={SHIFTED: Training("short_config.py", SHIFTS)},
    losses=(Losses(16 * K, 8),),
    tasks=(Task("niah_multikey_2", (4 * K, 16 * K), 5),),
    task_models=(RELEASED, THETA, SHIFTED),
    machine=TWO_CORES,
)
WHOLE = Plan(
    rope_theta=4e5,
    trainings={
        SHIFTED: Training("short_config.py", SHIFTS),
        UNSHIFTED: Training("short_config.py"),
        LORA: Training("short_config.py", SHIFTS | ADAPTERS),
    },
    losses=(Losses(16 * K, 8), Losses(32 * K, 2)),
    tasks=(
        Task("niah_multikey_2", (4 * K, 16 * K), 20),
        Task("niah_single_1", (4 * K, 16 * K), 20),
        Task(LINES, (4 * K, 16 * K), 20),
        Task("vt", (4 * K, 16 * K), 20),
    ),
    task_models=(RELEASED, THETA, SHIFTED),
    machine=TWO_CORES,
    runs_at_once=2,
    short_questions=200,
    ring_step=16 * K,
)
GPU = Plan(
    rope_theta=3.2e6,
    trainings={LONG: Training("long_config.py")},
    losses=(Losses(128 * K, 8),),
    tasks=(Task("niah_multikey_2", (64 * K, 128 * K), 10),),
    task_models=(RELEASED, THETA, LONG),
    machine={"prefill_chunk": 16 * K},
    at_once=3,
)
TOY = Plan(
    rope_theta=3.2e6,
    trainings={LONG: Training("toy_config.py")},
    losses=(Losses(2 * K, 2), Losses(4 * K, 1)),
    tasks=(Task("niah_multikey_2", (1 * K,), 1), Task(LINES, (1 * K,), 1)),
    task_models=(RELEASED, THETA, LONG),
    machine={"compute_dtype": "float32", "prefill_chunk": 512},
    at_once=2,
    short_questions=8,
    ring_step=1 * K,
)
"""The parts of all forms at the size of a CPU: do they run?"""
PLANS = {"core": CORE, "whole": WHOLE, "gpu": GPU, "toy": TOY}
