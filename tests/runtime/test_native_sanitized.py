"""The engine under the thread sanitizer and under the address and undefined-behaviour sanitizers, without torch or Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = [CSRC / f"{name}.cpp" for name in ("aio_engine", "barrier", "store", "transfer", "trimmer")]
FLAGS = ("-g", "-O1", "-std=c++20", "-pthread", "-fno-omit-frame-pointer", f"-I{CSRC}")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_engine_is_clean_under(sanitizer, tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = [*FLAGS, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    for command in ([compiler, *flags, str(probe), "-o", str(tmp_path / "probe")], [str(tmp_path / "probe")]):
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip(f"the {sanitizer} sanitizer does not work here")
    main = tmp_path / "main"
    built = subprocess.run(
        [compiler, *flags, str(Path(__file__).with_name("native_main.cpp")), *map(str, SOURCES), "-o", str(main)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(main), str(tmp_path), "60"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stdout + done.stderr[-20_000:]
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
