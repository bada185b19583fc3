"""The forms of the study: what each trains and evaluates, and on which machine."""

from dataclasses import dataclass, field

K = 1024
RELEASED, THETA = "released", "theta"
"""Models that nobody trains: as released, and with a larger rope theta."""
SHIFTED, UNSHIFTED, LORA, LONG = "shifted", "unshifted", "lora", "long"
"""Models that are trained: with shifted positions, the same without shifts, adapters with shifts, at whole lengths."""

Flags = dict[str, object]


@dataclass(frozen=True)
class Training:
    """A run: its config file in this folder, and the keys that differ from it."""

    config: str
    keys: Flags = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A task of RULER."""

    name: str
    lengths: tuple[int, ...]
    cases: int


@dataclass(frozen=True)
class Plan:
    """One form of the study."""

    rope_theta: float
    """Base of the rotary frequencies of all models but the released one."""
    trainings: dict[str, Training]
    """Runs by the name of their model, in the order of the tables."""
    context: int
    """Tokens of the longest stretches whose loss is measured."""
    documents: int
    """Held-out documents whose loss is measured."""
    tasks: tuple[Task, ...]
    machine: Flags = field(default_factory=dict)
    """Flags of evaluations and chats for this machine."""
    at_once: int = 1
    """Evaluations that run at the same time, on a machine with as many cores and as much memory as that needs."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models, in the order of the tables."""
        return (RELEASED, THETA, *self.trainings)


TWO_CORES: Flags = {"cpu_devices": 2, "mesh_dim": "1,1,1,2"}
"""A ring of two simulated devices, which keeps both cores busy."""
SHIFTS: Flags = {"data.position_range": 16 * K}
ADAPTERS: Flags = {"lora.rank": 16, "lora.base_dtype": "bfloat16", "optimizer.learning_rate": 5e-4}
CORE = Plan(
    rope_theta=4e5,
    trainings={SHIFTED: Training("short_config.py", SHIFTS)},
    context=16 * K,
    documents=8,
    tasks=(Task("niah_multikey_2", (4 * K, 16 * K), 5),),
    machine=TWO_CORES,
)
WHOLE = Plan(
    rope_theta=4e5,
    trainings={
        SHIFTED: Training("short_config.py", SHIFTS),
        UNSHIFTED: Training("short_config.py"),
        LORA: Training("short_config.py", SHIFTS | ADAPTERS),
    },
    context=16 * K,
    documents=8,
    tasks=(
        Task("niah_multikey_2", (4 * K, 16 * K), 20),
        Task("niah_single_1", (4 * K, 16 * K), 20),
        Task("vt", (4 * K, 16 * K), 20),
    ),
    machine=TWO_CORES,
)
GPU = Plan(
    rope_theta=3.2e6,
    trainings={LONG: Training("long_config.py")},
    context=128 * K,
    documents=8,
    tasks=(Task("niah_multikey_2", (64 * K, 128 * K), 10),),
    machine={"prefill_chunk": 16 * K},
    at_once=3,
)
TOY = Plan(
    rope_theta=3.2e6,
    trainings={LONG: Training("toy_config.py")},
    context=2 * K,
    documents=2,
    tasks=(Task("niah_multikey_2", (1 * K,), 1),),
    machine={"compute_dtype": "float32", "prefill_chunk": 512},
    at_once=2,
)
"""The GPU's form at the size of a CPU: does it run?"""
PLANS = {"core": CORE, "whole": WHOLE, "gpu": GPU, "toy": TOY}
