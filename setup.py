"""Builds the native module moonep._C: C++17, no torch headers, one binary for any CPU of the architecture.

Everything is compiled for the architecture's baseline, except the row kernels, which are compiled once per
instruction set and chosen when the module is loaded.
"""

import platform
import sys
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

BASE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a weighted row is rounded before it is added: results must not depend on the CPU
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-pthread",
]
WARNING_FLAGS = ["-Wall", "-Wextra", "-Wshadow", "-Wno-unknown-pragmas", "-Wno-psabi"]
# Flags for the files that hold one instruction set each; on other machines these files compile to nothing.
SIMD_FLAGS = {
    "rows_avx2.cpp": ["-mavx2", "-mf16c"],
    "rows_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-Wno-maybe-uninitialized"],
}


class BuildExt(build_ext):
    """Compiles each source with its own flags; setuptools has one set of flags for all."""

    def build_extension(self, ext: Extension) -> None:
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        objects = []
        for source in ext.sources:
            name = Path(source).name
            own = "csrc" in Path(source).parts
            flags = BASE_FLAGS + (WARNING_FLAGS if own else ["-w"])
            flags += [flag for path in ext.include_dirs[1:] for flag in ("-isystem", path)]
            flags += SIMD_FLAGS.get(name, []) if is_x86 else []
            objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=ext.include_dirs[:1],
                macros=ext.define_macros,
                extra_postargs=flags,
                depends=ext.depends,
            )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-pthread"] + (["-s"] if sys.platform == "linux" else []),
            target_lang="c++",
        )


nanobind_dir = Path(nanobind.include_dir()).parent
sources = sorted(str(path) for path in Path("csrc").glob("*/*.cpp"))
setup(
    ext_modules=[
        Extension(
            "moonep._C",
            sources=[*sources, str(nanobind_dir / "src" / "nb_combined.cpp")],
            depends=sorted(str(path) for path in Path("csrc").glob("*/*.h")),
            include_dirs=["csrc", str(nanobind_dir / "include"), str(nanobind_dir / "ext" / "robin_map" / "include")],
            define_macros=[("NDEBUG", "1"), ("NB_COMPACT_ASSERTIONS", "1")],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
