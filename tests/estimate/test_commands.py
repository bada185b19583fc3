"""`ringformer estimate` and `ringformer plan`: what they print, and what they refuse."""

import json
import re
from dataclasses import replace

import pytest

from ringformer.cli import main
from ringformer.estimate.choices import memory_settings
from ringformer.estimate.commands import add_estimate
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler import process as compiler_process
from ringformer.estimate.reports import run_estimate
from ringformer.estimate.search.commands import add_plan
from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.programs import EVALUATION, PROGRAMS
from ringformer.estimate.workloads.targets import find_target
from tests.estimate.search.test_longest_context import estimate_of
from tests.hlo import on_tpu
from tests.verbs import run_verb

ESTIMATE = ["--model=llama_7b", "--target=8xH100", "--seq_len=524288"]
LLAMA3 = "configs/llama3_8b_1m_8xh200.py"


def estimate(*change: str) -> int:
    return run_verb(add_estimate, *ESTIMATE, *change)


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)


@pytest.fixture
def compiled(monkeypatch):
    """The workloads that were compiled, by a compiler that accepts all."""
    workloads = []

    def compile_apart(workload, generate_code):
        workloads.append(workload)
        return estimate_of(workload, fits=True)

    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    monkeypatch.setattr(targets, "version", lambda wheel: "1.2.3")
    monkeypatch.setattr(memory_settings, "compile_apart", compile_apart)
    monkeypatch.setattr(run_estimate, "compile_apart", other_program)
    return workloads


def other_program(workload, program, generate_code=False, peak_bytes=2**30):
    e = estimate_of(workload, fits=peak_bytes <= workload.target.budget, peak_bytes=peak_bytes)
    return replace(e, program=program, generated_code=generate_code, code_bytes=2**20 if generate_code else None)


def test_without_its_compiler_it_is_a_closed_form_and_says_so(no_compiler, capsys):
    assert estimate() == 0
    out, err = capsys.readouterr()
    assert "pip install 'jax[cuda13]'" in err and "compiling" not in err
    assert "closed form, not compiled: should fit" in out and "kept layer inputs" in out
    assert estimate("--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["closed_form"] and answer["fits"] and answer["peak_bytes"] < answer["hbm_bytes"]
    assert answer["exposed_permute_bytes"] is None and answer["seconds_source"].startswith("closed form: FLOPs at 5")
    assert estimate("--json", "--tokens=1e9") == 0
    counted = json.loads(capsys.readouterr().out)
    assert counted["hours_model"] == pytest.approx(1e9 / answer["tokens_per_second_model"] / 3600)
    assert estimate("--tokens=1e9") == 0 and "device-hours, modelled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq_len=1001"], "multiple|divisible"),
        (["--batch_size=3", "--mesh_dim=2,1,1,4"], "batch_size=3 is not a multiple of 2"),
        (["--model=llama3_8b", "--mesh_dim=1,1,8,1", "--head_groups=8"], "head_groups=8"),
    ],
)
def test_what_no_run_can_have_is_refused_without_a_compiler_too(no_compiler, flags, message):
    with pytest.raises(ValueError, match=message):
        estimate("--require_fit", *flags)


def test_a_kernel_that_the_target_cannot_have_is_refused(no_compiler):
    with pytest.raises(ValueError, match="kernel='pallas' runs on TPU; kernel='xla' runs on gpu too"):
        estimate("--kernel=pallas")


def test_counted_on_request_though_the_compiler_is_there(monkeypatch, capsys):
    monkeypatch.setattr(compiler_process, "compile_apart", lambda *call, **kw: pytest.fail("nobody is asked"))
    assert estimate("--closed_form") == 0 and "closed form, not compiled: should fit" in capsys.readouterr().out
    with pytest.raises(ValueError, match="give one of them"):
        estimate("--closed_form", "--generate_code")


def test_gpus_are_told_the_environment_that_a_run_needs(no_compiler, capsys):
    """13B's inputs of 40 layers, 262,144 tokens of 5,120 in bf16, are 100 GiB of each GPU: more than XLA's own pool."""
    needed = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "102"}
    long = ["--model=llama_13b", "--seq_len=2097152", "--offload"]
    assert estimate(*long) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "environment: " + " ".join(f"{name}={value}" for name, value in needed.items())
    assert estimate(*long, "--json") == 0
    assert json.loads(capsys.readouterr().out)["environment"] == needed
    assert estimate(*long, "--target=v5e-256") == 0
    assert "environment" not in capsys.readouterr().out


def test_json_says_what_it_is_of_and_what_made_it(compiled, capsys):
    assert estimate("--json", "--tokens=1e9") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["model"], answer["target"]) == ("llama_7b", "8xH100")
    assert set(answer["versions"]) == {"ringformer", "jax", "jaxlib", "jax-cuda12-plugin"}
    assert answer["fits"] and answer["days_model"] > 0


def test_every_flag_reaches_the_workload(compiled, capsys):
    flags = [
        "--batch_size=4",
        "--accumulate=2",
        "--mesh_dim=1,2,1,4",
        "--attention=ring",
        "--layout=striped",
        "--remat=attention",
        "--compute_dtype=float32",
        "--remat_group=2",
        "--q_chunk=512",
        "--k_chunk=256",
        "--offload",
    ]
    assert estimate(*flags) == 0
    assert estimate("--head_groups=4", "--kernel=auto") == 0
    workload, other = compiled
    assert (other.model.head_groups, other.model.kernel) == (4, "cudnn")
    assert "kernel cudnn: the fastest on H100\n" in capsys.readouterr().err
    model = workload.model
    assert (workload.batch_size, workload.accumulate, workload.mesh_shape) == (4, 2, (1, 2, 1, 4))
    assert (model.layout, model.remat, model.compute_dtype, model.offload) == ("striped", "attention", "float32", True)
    assert str(workload.settings) == "head_groups 1, remat_group 2, q_chunk 512, k_chunk 256"


def test_a_config_is_a_file_with_overrides(compiled, capsys):
    """Its model is compiled as it is written, stage by stage; flags come last."""
    assert (
        run_verb(
            add_estimate,
            "--config",
            LLAMA3,
            "--target=8xH200",
            "--json",
            "--stage=2",
            "--batch_size=8",
            "--config.model.ffn_chunk=512",
            "--config.seed=1",
        )
        == 0
    )
    (workload,) = compiled
    assert (workload.name, workload.seq_len, workload.batch_size) == ("stage 2", 2**19, 8)
    assert workload.model.ffn_chunk == 512
    answer = json.loads(capsys.readouterr().out)
    assert (answer["stage"], answer["model"], answer["target"]) == ("stage 2", LLAMA3, "8xH200")


@pytest.mark.parametrize(("stages", "code"), [(1, 0), (2, 2)])
def test_tokens_are_those_of_a_single_stage(stages, code, no_compiler, tmp_path, capsys):
    (tmp_path / "config.py").write_text(
        "from ringformer.runs.config import base_config\n\n\ndef get_config():\n    config = base_config('tiny')\n"
        "    config.data.store = 'store'\n"
        f"    config.stages = ({{'seq_len': 64}},) * {stages}\n    return config\n"
    )
    assert main(["estimate", f"--config={tmp_path}/config.py", "--target=8xH100", "--tokens=1e6"]) == code
    assert ("is ambiguous: each of the 2 stages" in capsys.readouterr().err) == bool(code)


def test_what_must_fit_and_does_not_is_an_exit_code(no_compiler, capsys):
    assert estimate("--require_fit") == 0
    assert estimate("--require_fit", "--seq_len=33554432") == 3
    assert "closed form, not compiled: should not fit" in capsys.readouterr().out


def test_without_a_compiler_all_that_is_known_must_fit(no_compiler, capsys):
    """The host too: 7B at 8M tokens offloads 32 x 8 GiB a device. And what is not judged is said."""
    assert estimate("--require_fit", "--seq_len=8388608", "--offload", "--remat_group=1") == 3
    out = capsys.readouterr().out
    assert "a save beside what is offloaded: should not fit, " in out
    assert "not checked without the compiler: evaluation, init, machine code" in out
    choking = ["--model=llama3_8b", "--target=v5p-128", "--seq_len=33554432", "--mesh_dim=1,1,1,-1", "--offload"]
    assert run_verb(add_estimate, *choking) == 1
    assert "bf16[524288,4096] on each device, has 4.00 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model=llama_9b", "unknown model 'llama_9b'; known models: tiny"),
        ("--target=v5e-3", "unknown slice 'v5e-3'; known: v5e-1, v5e-4"),
        ("--mesh_dim=1,1,1,5", "needs 5 devices, there are 8"),
        ("--head_groups=5", "head_groups=5 does not divide num_kv_heads=32"),
        ("--head_groups=0", "--head_groups=0 must be at least 1"),
        ("--q_chunk=-1", "--q_chunk=-1 must be at least 1"),
        ("--seq_len=0", "--seq_len=0 must be at least 1"),
        ("--batch_size=0", "--batch_size=0 must be at least 1"),
        ("--accumulate=0", "--accumulate=0 must be at least 1"),
        ("--tokens=-5", "--tokens=-5 must be positive"),
        ("--tokens=nan", "--tokens=nan must be positive"),
        ("--tokens=inf", "--tokens=inf must be positive"),
        ("--stage=1", "--stage=1 does not exist: the config has 0 stages"),
        ("--generate_cod", "unrecognized arguments: --generate_cod"),
        ("--attention=rings", "unknown attention 'rings'"),
        ("--config.steps=3", "overrides need --config=FILE"),
    ],
)
def test_estimates_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        estimate(change)


def test_a_context_is_asked_for():
    with pytest.raises(ValueError, match="a preset needs a context: give --seq_len"):
        run_verb(add_estimate, "--target=8xH100")


def test_a_broken_compiler_is_not_called_too_large(compiled, monkeypatch, capsys):
    def breaks(*args, **kwargs):
        raise CompilerFailure("INTERNAL: something else")

    monkeypatch.setattr(memory_settings, "compile_apart", breaks)
    monkeypatch.setattr(run_estimate, "compile_apart", breaks)
    assert estimate() == 1
    out, err = capsys.readouterr()
    assert not out and "the compiler broke down, so it is unknown whether it fits: INTERNAL" in err
    assert run_verb(add_plan, "--model=llama_7b", "--target=8xH100", "--seq_len=131072") == 1
    assert "the compiler broke down, so it is unknown whether it fits: INTERNAL" in capsys.readouterr().err


def test_a_kernel_takes_the_masks_that_the_run_has(compiled, capsys):
    """cuDNN takes packed documents in layouts whose shards are intervals: a config is estimated as it would be trained,
    or refused."""
    options = [f"--config={LLAMA3}", "--target=8xH100", "--closed_form", "--stage=2"]
    for layout, packed, kernel in (
        ("zigzag", "document", "cudnn"),
        ("striped", "document", "xla"),
        ("striped", "sequence", "cudnn"),
    ):
        settings = f"--config.model.layout={layout}", f"--config.data.packed_attention={packed}"
        assert run_verb(add_estimate, *options, *settings) == 0
        assert f"kernel {kernel}: " in capsys.readouterr().err
    with pytest.raises(ValueError, match="not in striped"):
        run_verb(add_estimate, *options, "--config.model.kernel=cudnn", "--config.model.layout=striped")


ONE_LAYER = """
from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.model.hidden_size, config.model.num_heads, config.model.num_kv_heads, config.model.head_dim = 256, 2, 2, 128
    config.model.num_layers, config.model.kernel, config.model.compute_dtype = 1, "pallas", "bfloat16"
    config.mesh_dim, config.seq_len, config.data.store, config.run_dir = "1,1,1,4", 65536, "store", "run"
    return config
"""


@pytest.mark.slow
@on_tpu
def test_chunks_that_no_kernel_can_have_do_not_fit(tmp_path, capsys):
    """The schedule accepts them, the machine code does not: 2048 x 2048 need more VMEM than v4 has."""
    (tmp_path / "config.py").write_text(ONE_LAYER)
    chunks = [f"--config.model.{name}=2048" for name in ("q_chunk", "k_chunk")]
    assert run_verb(add_estimate, f"--config={tmp_path}/config.py", "--target=v4-8", *chunks) == 1
    out, err = capsys.readouterr()
    assert "FITS" not in out and "cannot become machine code: RESOURCE_EXHAUSTED" in err and "smaller q_chunk" in err


def test_no_headline_says_that_what_was_not_compiled_fits(compiled, monkeypatch, capsys):
    """Kernels that were scheduled only, of the train step or of another program."""

    def untried(workload, program="", generate_code=False):
        step = replace(estimate_of(workload, fits=True), untried_kernels=True)
        return replace(step, program=program) if program else step

    monkeypatch.setattr(memory_settings, "compile_apart", untried)
    assert estimate("--quick") == 0
    out = capsys.readouterr().out
    assert "FITS" not in out and "the train step SHOULD FIT, if its kernels compile, which was not tried: " in out
    monkeypatch.setattr(memory_settings, "compile_apart", lambda w, generate_code: estimate_of(w, fits=True))
    monkeypatch.setattr(run_estimate, "compile_apart", untried)
    monkeypatch.setattr(run_estimate, "with_tried_kernels", lambda workload, e: e)
    assert estimate() == 0
    *_, verdict, _ = capsys.readouterr().out.splitlines()
    assert verdict.strip().startswith("SHOULD FIT, if its kernels compile, which was not tried: every program")


def test_a_generation_without_the_kernel_is_refused_by_name():
    with pytest.raises(ValueError, match="kernel='pallas' needs Mosaic, which cannot compile it for TPU v3 core"):
        run_verb(add_estimate, "--model=llama_7b", "--target=v3-8", "--seq_len=8192", "--kernel=pallas", "--quick")


def test_every_program_of_a_run_is_judged(compiled, monkeypatch, capsys):
    """The evaluation needs more than the train step here: the run does not fit, and it is said which, and by how
    much."""
    assert estimate("--require_fit") == 0
    out = capsys.readouterr().out
    assert all(f"\n    {program:17}fits, " in out for program in PROGRAMS)
    *_, verdict, environment = out.splitlines()
    assert verdict.strip() == "FITS: every program of the run and its saves, scheduled; machine code not tried"
    assert environment == "environment: XLA_PYTHON_CLIENT_MEM_FRACTION=0.92"
    budget = find_target("8xH100").budget

    def too_large(workload, program, generate_code):
        need = round(budget) + 2**30 if program == EVALUATION else 2**30
        return other_program(workload, program, generate_code, need)

    monkeypatch.setattr(run_estimate, "compile_apart", too_large)
    assert estimate() == 0 and estimate("--require_fit") == 3
    out = capsys.readouterr().out
    assert "DOES NOT FIT: evaluation needs 73.85 of 72.85 GiB on each device, 1.00 too much" in out
    assert estimate("--require_fit", "--json") == 3
    answer = json.loads(capsys.readouterr().out)
    assert not answer["fits"] and [p["program"] for p in answer["programs"]] == list(PROGRAMS)
    assert [p["program"] for p in answer["programs"] if not p["fits"]] == ["evaluation"]
    assert answer["reasons_against"][0].startswith("evaluation needs")


def test_a_save_that_the_host_cannot_hold(compiled, monkeypatch, capsys):
    """It copies the state of all of a host's devices to the host, beside what is offloaded."""

    def compile_apart(workload, generate_code):
        e = estimate_of(workload, fits=True, host_bytes=200 * 2**30)
        return replace(e, state_bytes=100 * 2**30)

    monkeypatch.setattr(memory_settings, "compile_apart", compile_apart)
    assert estimate("--require_fit") == 3
    out = capsys.readouterr().out
    assert "the host needs 300.0 GiB per device for what is offloaded and a save, and has 250.0" in out


def test_a_compiler_that_dies_on_another_program_is_a_failure(compiled, monkeypatch, capsys):
    def dies(workload, program, generate_code):
        raise CompilerFailure(f"{program}: the compiler died (SIGABRT)")

    monkeypatch.setattr(run_estimate, "compile_apart", dies)
    assert estimate("--generate_code") == 1
    err = capsys.readouterr().err
    assert "evaluation: the compiler died (SIGABRT)" in err and "Traceback" not in err


def test_a_plan_is_a_config_to_use(no_compiler, capsys):
    assert run_verb(add_plan, "--model=llama_7b", "--target=8xH100", "--seq_len=131072") == 0
    out = capsys.readouterr().out
    assert out.startswith("llama_7b on 8xH100, 131,072 tokens: mesh ") and "--config.seq_len=131072" in out
    with pytest.raises(ValueError, match="unknown target '8xH900'"):
        run_verb(add_plan, "--model=llama_7b", "--target=8xH900")


@pytest.mark.slow
def test_the_longest_context_has_two_ends(no_compiler, capsys):
    assert run_verb(add_plan, "--model=llama_7b", "--target=8xH100") == 0
    fits, within = re.findall(r"^the longest .*?llama_7b on 8xH100, ([\d,]+) tokens", capsys.readouterr().out, re.M)
    assert int(within.replace(",", "")) < int(fits.replace(",", ""))
    assert run_verb(add_plan, "--model=llama_7b", "--target=8xH100", "--max_step_seconds=1e9") == 0
    assert "the longest with a step of at most 1e+09 s: the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--max_step_seconds=0"], "--max_step_seconds=0 must be positive"),
        (["--max_step_seconds=nan"], "--max_step_seconds=nan must be positive"),
        (["--max_step_seconds=60", "--seq_len=4096"], "--max_step_seconds=60 searches for a context"),
    ],
)
def test_plans_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        run_verb(add_plan, "--model=llama_7b", "--target=8xH100", *change)


CONFIG_OF_A_TOY = """
import tests.models.toy
from ringformer.runs.config import base_config


def get_config():
    config = base_config("toy")
    config.update({"mesh_dim": "1,2,1,4", "seq_len": 1024, "batch_size": 2, "steps": 10})
    config.data.store = "store"
    return config
"""


@pytest.mark.slow
@on_tpu
def test_a_model_that_is_no_llama_is_compiled_all_the_same(tmp_path, capsys):
    """Through the protocol alone, in the compiler's process: what closed forms would say is left out."""
    (tmp_path / "config.py").write_text(CONFIG_OF_A_TOY)
    assert run_verb(add_estimate, f"--config={tmp_path}/config.py", "--target=v5e-8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and 0 < found["argument_bytes"] < found["peak_bytes"] and found["flops"] > 0
    assert not found["hops_model"] and "head_groups" not in found and found["days_model"] > 0
    # 3 hops of keys and values forward, 3 and 2 x 3 of gradients backward
    permutes = [c for c in found["collectives"] if c["kind"] == "collective-permute"]
    assert sum(c["executed"] for c in permutes) >= 9
