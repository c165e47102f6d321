"""Only for ZINF_BUILD_NATIVE=1 (with --no-build-isolation): compiles csrc/ into the package instead of at first use."""

import os
import sys
from glob import glob
from pathlib import Path

from setuptools import setup

if os.environ.get("ZINF_BUILD_NATIVE") == "1":
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from zinf_compile.runtime import native

    os.environ["PATH"] = str(Path(native._ninja()).parent) + os.pathsep + os.environ.get("PATH", "")
    extension = CppExtension(
        "zinf_compile._C", sorted(glob("csrc/*.cpp")), extra_compile_args=native.compile_flags(), py_limited_api=True
    )
    setup(ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
else:
    setup()
