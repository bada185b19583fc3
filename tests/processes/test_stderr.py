"""What C++ writes goes to the file, what Python writes stays; an abort ends in one line."""

import subprocess
import sys

PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from ringformer.processes.stderr import divert_native_stderr, divert_native_stdout, on_abort

divert_native_stderr(Path(sys.argv[1]), "[3] ")
print("before", end=" ", flush=True)
os.write(1, b"Gloo is heard, ")  # the control
divert_native_stdout(sys.argv[1])
print("Python says")
os.write(1, b"[Gloo] Rank 0 is connected\\n")
sys.stdout.flush()
print("one\\ntwo", end="", file=sys.stderr)
print(" and more", file=sys.stderr)
os.write(2, b"C++ says\\n")

def ended():
    print("gone", file=sys.stderr, flush=True)
    return 76

on_abort(ended)
import threading
threading.Thread(target=ctypes.CDLL(None).abort).start()
while True:
    pass
"""


def test_native_output_goes_to_a_file_and_an_abort_says_one_line(tmp_path):
    log = tmp_path / "logs" / "process-3.txt"
    done = subprocess.run([sys.executable, "-c", PROGRAM, log], capture_output=True, text=True, timeout=60)
    assert done.returncode == 76
    assert done.stderr == "[3] one\n[3] two and more\n[3] gone\n"
    assert done.stdout == "before Gloo is heard, Python says\n"
    assert log.read_text() == "[Gloo] Rank 0 is connected\nC++ says\n"
