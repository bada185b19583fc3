"""Tests for benchmarks/gpu.py: what it refuses before it measures, and how it counts the kernels of a profile."""

import sys
from collections import Counter

import pytest

from benchmarks import gpu
from benchmarks.gpu_shares import kernel_seconds, kind_of, summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target=nonsense"], "unknown target 'nonsense'; known: "),
        (["--target="], "unknown target ''; known: "),
        (["--out="], "--out= names no place"),
        (["--missing"], "--missing adds to measurements: give their file with --out"),
        (["--missing", "--out=none.json"], "--missing adds to measurements: give their file with --out"),
        (["--out=."], "--out=. is a folder"),
        (["--out=none/gpu.json"], "there is no folder none"),
        (["--out=/proc/gpu.json"], "--out=/proc/gpu.json: /proc keeps no files"),
    ],
)
def test_what_is_refused_before_it_measures(arguments, message, tmp_path, monkeypatch, capsys):
    def part(*_):
        raise AssertionError("it measures")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "_part", part)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--small", *arguments])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    said = capsys.readouterr().err
    assert said.startswith("gpu.py: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1", "attention"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNN", "products"),
        ("gemm_fusion_dot_112", "products"),
        ("wrapped_concatenate_1", "other"),
        ("input_reduce_select_fusion", "other"),
        ("loop_transpose_fusion_6", "copies"),
        ("MemcpyD2H", "copies"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", "attention"),
    ],
)
def test_kernels_have_kinds(kernel, kind):
    assert kind_of(kernel) == kind


def test_a_summary_has_all_seconds_by_kind():
    seconds = Counter({"nvjet_a": 2.0, "gemm_fusion_b": 1.0, "loop_add_fusion": 0.5})
    found = summary(seconds, most=1)
    assert found == {"seconds_by_kind": {"products": 3.0, "other": 0.5}, "seconds_by_kernel": {"nvjet_a": 2.0}}


def test_a_folder_without_a_profile_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no profile"):
        kernel_seconds(tmp_path)
